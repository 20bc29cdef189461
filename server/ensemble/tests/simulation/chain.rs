//! A model of the manifest chain: links that are created only if absent, by a store whose answers are late,
//! lost or ambiguous.
//!
//! It follows `server/control/src/manifest.rs` and `own_links.rs`: an owner continues from its newest link,
//! a creation without a known outcome is repeated with the same link, and an opening that fails gives the
//! pool back under the new epoch.
//!
//! Invariants:
//! - A number has one link, which never changes.
//! - An error of a creation leaves open whether the link exists, and it never comes to exist later.

use crate::executor::World;
use crate::report::Counts;
use block::simulated::simulated;
use block::{Epoch, Error, ErrorKind, Result};
use parking_lot::Mutex;
use replication::MemberId;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Attempts of a creation whose outcome stays unknown, and the first pause between them.
const ATTEMPTS: u32 = 6;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(100);

/// A member of the log, and its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) id: MemberId,
    pub(crate) node: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Configuration {
    pub(crate) members: Vec<Member>,
    pub(crate) quorum: usize,
}

impl Configuration {
    pub(crate) fn member(&self, id: MemberId) -> Option<&Member> {
        self.members.iter().find(|member| member.id == id)
    }
}

/// A link.
#[derive(Clone, Debug)]
pub(crate) struct Manifest {
    pub(crate) number: u64,
    pub(crate) epoch: Epoch,
    pub(crate) owner: MemberId,
    pub(crate) configuration: Configuration,
    /// Tells the own creation from another's.
    nonce: u64,
}

/// Outcome of a change of the configuration.
pub(crate) enum Changed {
    Ours(u64),
    Fenced(Error),
    Unknown,
}

/// The chain in its store; see the head of the file. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct Chain {
    world: World,
    counts: Counts,
    links: Arc<Mutex<Vec<Manifest>>>,
    failing_percent: Arc<AtomicU64>,
}

impl Chain {
    /// Makes the chain of a pool with these members.
    pub(crate) fn new(world: &World, counts: &Counts, configuration: Configuration) -> Chain {
        let owner = configuration.members[0].id;
        let first = Manifest { number: 1, epoch: Epoch(0), owner, configuration, nonce: 0 };
        Chain {
            world: world.clone(),
            counts: counts.clone(),
            links: Arc::new(Mutex::new(vec![first])),
            failing_percent: Arc::default(),
        }
    }

    /// Lets some percent of the requests fail.
    pub(crate) fn fail(&self, percent: u64) {
        self.failing_percent.store(percent, Ordering::Relaxed);
    }

    async fn sleep(&self, time: Duration) {
        simulated().expect("a process uses the store").sleep(time).await;
    }

    async fn wait(&self) {
        let time = match self.world.chance(5) {
            true => self.world.ms(20, 700),
            false => self.world.ms(1, 20),
        };
        self.sleep(time).await;
    }

    fn fails(&self, name: &'static str) -> Result<()> {
        match self.world.chance(self.failing_percent.load(Ordering::Relaxed)) {
            true => {
                self.counts.add(name);
                Err(Error::new(ErrorKind::Unavailable, "ask the store: the answer was lost"))
            }
            false => Ok(()),
        }
    }

    /// Returns the newest link, as nobody in the simulation sees it.
    pub(crate) fn last(&self) -> Manifest {
        self.links.lock().last().expect("the first link").clone()
    }

    /// Reads the newest link.
    pub(crate) async fn newest(&self) -> Result<Manifest> {
        self.wait().await;
        self.fails("store requests failed")?;
        let newest = self.last();
        self.wait().await;
        Ok(newest)
    }

    async fn put(&self, link: &Manifest) -> Result<bool> {
        self.wait().await;
        self.fails("store requests failed")?;
        {
            let mut links = self.links.lock();
            if links.len() as u64 + 1 == link.number {
                links.push(link.clone());
            }
        }
        self.wait().await;
        self.fails("ambiguous puts")?;
        Ok(self.is_ours(link))
    }

    /// Whether the link of this number is this one, and the newest.
    fn is_ours(&self, link: &Manifest) -> bool {
        let last = self.last();
        last.number == link.number && last.nonce == link.nonce
    }

    /// Creates a link. Returns whether it is the newest one afterwards.
    async fn create(&self, link: &Manifest) -> Result<bool> {
        let mut pause = ATTEMPT_PAUSE;
        for _ in 1..ATTEMPTS {
            if let Ok(outcome) = self.put(link).await {
                return Ok(outcome);
            }
            self.sleep(pause).await;
            pause *= 2;
        }
        self.put(link).await
    }

    /// Takes the pool under the next epoch, as a member of its log.
    pub(crate) async fn acquire(&self, me: MemberId) -> Result<Ownership> {
        let previous = self.newest().await?;
        if previous.configuration.member(me).is_none() {
            return Err(Error::new(ErrorKind::Denied, "open the pool: no member of its log"));
        }
        let epoch = Epoch(previous.epoch.0 + 1);
        let link = Manifest { owner: me, epoch, ..self.behind(&previous) };
        let outcome = self.create(&link).await;
        let (known, under_way) = (Mutex::new(link), Mutex::default());
        let ownership = Ownership { chain: self.clone(), previous, known, under_way };
        match outcome {
            Ok(true) => Ok(ownership),
            Ok(false) => Err(Error::new(ErrorKind::Busy, "open the pool: another node has it")),
            Err(error) => {
                let newest = self.newest().await;
                if newest.is_ok_and(|newest| newest.nonce == ownership.manifest().nonce) {
                    ownership.give_back().await;
                }
                Err(error)
            }
        }
    }

    fn behind(&self, link: &Manifest) -> Manifest {
        Manifest { number: link.number + 1, nonce: self.world.seed(), ..link.clone() }
    }
}

/// The right to serve the pool.
pub(crate) struct Ownership {
    chain: Chain,
    previous: Manifest,
    known: Mutex<Manifest>,
    /// The link whose creation has no known outcome.
    under_way: Mutex<Option<Manifest>>,
}

impl Ownership {
    pub(crate) fn manifest(&self) -> Manifest {
        self.known.lock().clone()
    }

    /// Changes the members. After an unknown outcome only the same change may be asked for.
    pub(crate) async fn change_configuration(&self, next: &Configuration) -> Changed {
        let fresh = Manifest { configuration: next.clone(), ..self.chain.behind(&self.manifest()) };
        let link = self.under_way.lock().get_or_insert(fresh).clone();
        assert_eq!(link.configuration, *next, "another change is under way");
        match self.chain.create(&link).await {
            Ok(true) => {
                *self.under_way.lock() = None;
                *self.known.lock() = link.clone();
                Changed::Ours(link.number)
            }
            Ok(false) => Changed::Fenced(Error::new(ErrorKind::Fenced, "another owner came")),
            Err(_) => Changed::Unknown,
        }
    }

    /// Gives the pool back to the owner of before, under the new epoch and with the members of before.
    pub(crate) async fn give_back(&self) {
        let Manifest { owner, configuration, .. } = self.previous.clone();
        let link = Manifest { owner, configuration, ..self.chain.behind(&self.manifest()) };
        let _ = self.chain.create(&link).await; // another owner may have come
    }
}
