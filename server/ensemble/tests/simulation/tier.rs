//! A model of the data tier.
//!
//! Invariants:
//! - It takes a generation whole, and only from the owner that opened it last. The product's tier is fenced
//!   by its metadata database in the same way.

use block::{Epoch, Error, ErrorKind, Lsn};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

#[derive(Default)]
struct TierState {
    opened: Epoch,
    destaged: Lsn,
    blocks: BTreeMap<u64, Bytes>,
}

/// The data tier. Clones are handles to the same.
#[derive(Clone, Default)]
pub(crate) struct Tier(Arc<Mutex<TierState>>);

impl Tier {
    /// Opens the metadata, which fences the owners of earlier epochs. Returns the destaged LSN.
    pub(crate) fn open(&self, epoch: Epoch) -> block::Result<Lsn> {
        let mut tier = self.0.lock();
        if epoch < tier.opened {
            return Err(Error::new(ErrorKind::Fenced, "open the metadata: a later owner has it"));
        }
        tier.opened = epoch;
        Ok(tier.destaged)
    }

    /// Takes the blocks of a generation up to an LSN.
    pub(crate) fn take(
        &self,
        epoch: Epoch,
        blocks: Vec<(u64, Bytes)>,
        up_to: Lsn,
    ) -> block::Result<()> {
        let mut tier = self.0.lock();
        if epoch != tier.opened {
            return Err(Error::new(ErrorKind::Fenced, "destage: a later owner has the metadata"));
        }
        tier.blocks.extend(blocks);
        tier.destaged = tier.destaged.max(up_to);
        Ok(())
    }

    pub(crate) fn read(&self, block: u64) -> Option<Bytes> {
        self.0.lock().blocks.get(&block).cloned()
    }
}

/// Time that destaging takes.
pub(crate) const DESTAGE_TIME: Duration = Duration::from_millis(30);
