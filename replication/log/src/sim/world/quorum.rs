//! Runs that end with an open of the log as its members have decided, while the kernel fails to write
//! back parts of it.
//!
//! Invariants:
//! - An open that succeeds has everything on stable storage. One that is refused leaves a record, with
//!   which the member on these files proves no more than what was synced, and can write all of it again.

use super::*;
use crate::TailLoss;
use crate::disk::state_files::{FoundState, StateKeeper};
use crate::ring::follower_log::{FollowerLog, FollowerOpening};
use block::Position;

impl World {
    /// Returns whether the open was refused.
    pub(crate) fn run_with_quorum(&mut self) -> Result<bool, String> {
        self.run()?;
        let mut process = self.open_after_crashes()?;
        self.live(&mut process)?;
        process.disk.kill();
        let position = self.member()?.tail();
        self.platter.lock().write_back(&mut self.rng, 70);
        let replicas = Arc::new(SimMember::new(position.sequence, Lsn::NONE));
        let loss = Some(TailLoss::Reboot);
        let disk = self.disk();
        let (opened, disk) = self
            .try_open_with(disk, Some(&QuorumTail { position, predecessor: None, loss, replicas }));
        let states = disk.keeper(self.is_beside).found().map_err(|e| e.chain())?;
        match opened {
            Ok(_) => {
                self.check_survives(position.sequence + 1)?;
                Ok(false)
            }
            Err(error) => {
                let text = error.chain();
                if error.kind() != ErrorKind::Io || !text.contains("open the pool again") {
                    return Err(format!("refused for another reason: {text}"));
                }
                self.check_member(position, &states)?;
                Ok(true)
            }
        }
    }

    fn member(&mut self) -> Result<FollowerLog, String> {
        let (made_count, random) = (self.platter.lock().made_count(), Arc::clone(&self.random));
        let (disk, pool, options) = (Box::new(self.disk()), self.identity.pool, self.options);
        let opening = FollowerOpening { disk, random, pool, options, made_count };
        let (log, _) = opening.open_with(self.plan.seeded_bugs).map_err(|e| e.chain())?;
        Ok(log)
    }

    /// Starts the member again, which counts nothing as synced here.
    fn check_member(&mut self, position: Position, states: &[FoundState]) -> Result<(), String> {
        let mut log = self.member()?;
        if log.tail() != position {
            return Err(format!("the refused log ends at {}, not at {position}", log.tail()));
        }
        if !log.has_failed(states) {
            return Err("the member does not learn of the failure".into());
        }
        log.rewrite(0).and_then(|()| log.sync()).map_err(|e| e.chain())?;
        drop(log);
        self.check_survives(position.sequence)
    }

    /// Cuts the power, and looks for the batches up to `sequence`.
    fn check_survives(&mut self, sequence: u64) -> Result<(), String> {
        self.platter.lock().cut_power(&mut self.rng);
        let found = self.member()?.tail().sequence;
        match found == sequence {
            true => Ok(()),
            false => Err(format!("{sequence} was said to be on stable storage, and {found} is")),
        }
    }
}
