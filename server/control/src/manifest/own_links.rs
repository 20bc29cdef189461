//! The links that an owner creates during its term: changes of the members, and the link that ends
//! the term.
//!
//! Invariants:
//! - All clones of an ownership share the newest own link, and continue from it.
//! - One link is under way at a time. If its creation has no certain outcome, the next call creates
//!   the same bytes again; no other link is created before the outcome is known.
//! - A link is remembered as under way before the store is asked for it, so a check never takes an
//!   own link for another owner's.
//! - A directory knows the links of its own term: by the epoch that it has recorded, or by the nonce
//!   of the link that took the pool, which the changes of that term keep.
//! - Old links are deleted only after the directory has recorded a newer one.

use super::{Configuration, KEEP_COUNT, Manifest, NodeDir, Ownership, PURPOSE, successor};
use crate::chain::{Created, seal_document};
use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use std::sync::Arc;

/// Looks of one check while own links are created beside it. Chosen by hand: each but the last
/// needs a link that was deleted between a listing and a read.
const LOOK_COUNT_MAX: usize = 4;

/// Outcome of a change of the configuration.
#[derive(Debug)]
pub enum Changed {
    /// The chain has the link with this number, which holds the configuration.
    Ours(u64),
    /// Another link was created: the pool has another owner.
    Fenced(Error),
    /// The store did not answer, and the link may exist or come to exist. The owner holds both
    /// configurations, and calls again with the same one.
    Unknown(Error),
}

/// The newest own link, and the one that is being created.
#[derive(Debug)]
pub(super) struct OwnLinks {
    known: parking_lot::Mutex<Known>,
    /// Held while a link is created.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Clone, Debug)]
struct Known {
    newest: Arc<Manifest>,
    under_way: Option<UnderWay>,
    /// The newest link ends the term.
    has_ended: bool,
}

/// A link whose creation was begun, and has no outcome yet.
#[derive(Clone, Debug)]
struct UnderWay {
    link: Arc<Manifest>,
    bytes: Bytes,
    ends: bool,
}

/// Purpose of an own link.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step<'a> {
    /// Closes the pool in order.
    Release,
    /// Removes the pool, at this time in seconds since 1970.
    Remove(u64),
    /// Returns the pool to the owner of this link.
    GiveBack(&'a Manifest),
    /// Replaces the configuration.
    Configure(Option<&'a Configuration>),
}

impl Step<'_> {
    fn ends(self) -> bool {
        !matches!(self, Step::Configure(_))
    }

    /// The link behind `newest`.
    fn link(self, newest: &Manifest) -> Manifest {
        let next = successor(newest);
        match self {
            Step::Release => Manifest { is_released: true, ..next },
            Step::Remove(now) => Manifest { is_released: true, removed_at: Some(now), ..next },
            // These keep the nonce, by which the owner's directory may know it. The seal makes the
            // bytes unique.
            Step::GiveBack(previous) => Manifest {
                number: next.number,
                previous_number: next.previous_number,
                epoch: next.epoch,
                held_epoch: Some(previous.held_epoch()),
                ..previous.clone()
            },
            Step::Configure(configuration) => {
                let (nonce, configuration) = (newest.nonce.clone(), configuration.cloned());
                Manifest { nonce, configuration, ..next }
            }
        }
    }

    /// Tells whether `link`, an own one behind that of the acquisition, has this purpose.
    fn is_done_by(self, link: &Manifest) -> bool {
        match self {
            Step::Release => link.is_released && link.removed_at.is_none(),
            Step::Remove(_) => link.removed_at.is_some(),
            Step::GiveBack(previous) => link.nonce == previous.nonce,
            Step::Configure(configuration) => link.configuration.as_ref() == configuration,
        }
    }
}

/// Outcome of creating a link. An error means that it is not known.
enum Advanced {
    Ours(Arc<Manifest>),
    Lost(Error),
}

impl OwnLinks {
    /// Links that begin with the one that took the pool.
    pub fn new(first: Manifest) -> Arc<OwnLinks> {
        let known = Known { newest: Arc::new(first), under_way: None, has_ended: false };
        Arc::new(OwnLinks { known: known.into(), turn: tokio::sync::Mutex::default() })
    }

    /// The newest link that is known to be in the chain.
    pub fn newest(&self) -> Arc<Manifest> {
        self.known.lock().newest.clone()
    }

    fn known(&self) -> Known {
        self.known.lock().clone()
    }
}

impl Ownership {
    /// Replaces the members, the quorum or the conduct without a quorum, by a link of the same epoch
    /// and owner. Its number is that of [`Ownership::manifest`] plus one. A configuration that the
    /// newest link holds already needs no other link.
    ///
    /// After [`Changed::Unknown`] only the same configuration can be asked for, until the outcome is
    /// known. `node` is the directory that the pool was opened from.
    ///
    /// # Errors
    /// `Invalid` for a configuration that breaks a rule; `Busy` while the outcome of another change
    /// is unknown; `Fenced` if the pool is closed here. The store is not asked in these cases.
    #[async_recursion]
    pub async fn change_configuration(
        &self,
        node: &NodeDir,
        next: &Configuration,
    ) -> Result<Changed> {
        let step = Step::Configure(Some(next));
        let turn = self.own.turn.lock().await;
        let known = self.own.known();
        next.check(known.newest.owner.node_id)?;
        let ends = known.has_ended || known.under_way.as_ref().is_some_and(|link| link.ends);
        if ends {
            return Err(self.closed());
        }
        if known.under_way.is_some_and(|under_way| !step.is_done_by(&under_way.link)) {
            let what = format!(
                "change the members of the log of pool {}: it is not known yet whether the change \
                 before was made; repeat that one first",
                known.newest.name
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let link = match self.advance_in_turn(step).await {
            Ok(Advanced::Ours(link)) => link,
            Ok(Advanced::Lost(error)) => return Ok(Changed::Fenced(error)),
            Err(error) => return Ok(Changed::Unknown(error)),
        };
        drop(turn);
        self.forget_old_links(node, &link).await;
        Ok(Changed::Ours(link.number))
    }

    /// Deletes links that only people read, once the directory knows the newest one.
    async fn forget_old_links(&self, node: &NodeDir, newest: &Manifest) {
        match node.note_manifest(newest.epoch, newest.number) {
            Ok(true) => {}
            Ok(false) => return, // it knows no link of this term yet
            Err(error) => {
                tracing::warn!(
                    error = %error.chain(),
                    "could not record the pool's newest manifest in its directory; spindle keeps the \
                     older ones"
                );
                return;
            }
        }
        if let Err(error) = self.chain.prune(KEEP_COUNT).await {
            tracing::warn!(error = %error.chain(), "could not delete old manifests");
        }
    }

    /// Creates the link that `step` asks for, unless the newest one does it already.
    pub(super) async fn advance(&self, step: Step<'_>) -> Result<Arc<Manifest>> {
        let _turn = self.own.turn.lock().await;
        match self.advance_in_turn(step).await? {
            Advanced::Ours(link) => Ok(link),
            Advanced::Lost(error) => Err(error),
        }
    }

    /// Like [`Ownership::advance`], for a caller that has the turn. First settles the link that is
    /// under way.
    async fn advance_in_turn(&self, step: Step<'_>) -> Result<Advanced> {
        if let Some(under_way) = self.own.known().under_way {
            match self.create(under_way).await? {
                Advanced::Ours(link) if step.is_done_by(&link) => return Ok(Advanced::Ours(link)),
                Advanced::Ours(_) => {}
                lost @ Advanced::Lost(_) => return Ok(lost),
            }
        }
        let known = self.own.known();
        let is_done = if step.ends() { known.has_ended } else { true };
        if is_done && step.is_done_by(&known.newest) {
            return Ok(Advanced::Ours(known.newest));
        }
        let link = step.link(&known.newest);
        let bytes = seal_document(&self.key, PURPOSE, &link)?;
        let under_way = UnderWay { link: Arc::new(link), bytes, ends: step.ends() };
        self.own.known.lock().under_way = Some(under_way.clone());
        self.create(under_way).await
    }

    async fn create(&self, under_way: UnderWay) -> Result<Advanced> {
        let UnderWay { link, bytes, ends } = under_way;
        match self.chain.create(link.number, &bytes).await? {
            Created::Ours => {
                let known = Known { newest: link.clone(), under_way: None, has_ended: ends };
                *self.own.known.lock() = known;
                Ok(Advanced::Ours(link))
            }
            Created::Lost => {
                self.own.known.lock().under_way = None;
                Ok(Advanced::Lost(self.fenced().await))
            }
        }
    }

    /// Checks whether this process still owns the pool. One listing suffices if it shows our newest
    /// link. Links that this process creates meanwhile are its own.
    ///
    /// # Errors
    /// `Fenced` if another owner took over, or the pool is closed here: stop at once. `Corrupt` if
    /// our manifest is gone according to both the object itself and several listings. `Unavailable`
    /// if the store does not answer, or its listing does not show an object that exists: nothing is
    /// known.
    #[async_recursion]
    pub async fn check(&self) -> Result<()> {
        let mut number = 0;
        for _ in 0..LOOK_COUNT_MAX {
            number = self.own.newest().number;
            let listed = self.chain.newest_from(number).await?;
            // After the listing, so that this has every own link that the listing may show.
            let known = self.own.known();
            if known.has_ended {
                return Err(self.closed());
            }
            let Some(highest) = listed else { return Err(self.chain.gone(number)) };
            if highest <= known.newest.number {
                return Ok(());
            }
            let Some(under_way) = known.under_way.filter(|own| own.link.number == highest) else {
                return Err(self.fenced().await);
            };
            match self.chain.read(highest).await? {
                Some(found) if found == under_way.bytes && under_way.ends => {
                    return Err(self.closed());
                }
                Some(found) if found == under_way.bytes => return Ok(()),
                Some(_) => return Err(self.fenced().await),
                None => {} // it was replaced since the listing
            }
        }
        Err(self.chain.unlisted(number))
    }

    fn closed(&self) -> Error {
        let newest = self.own.newest();
        let what = format!("pool {} is closed here; epoch {} has ended", newest.name, newest.epoch);
        Error::new(ErrorKind::Fenced, what)
    }
}
