//! Decides who owns a pool, by the manifest chain in the store and this directory's identity.
//!
//! Invariants:
//! - The owner is the node that created the highest `manifest/<number>`; each acquisition takes the next epoch. Of
//!   several simultaneous attempts exactly one wins.
//! - A pool that another directory has open is refused unless a take-over is asked for. The same directory takes its
//!   own pool back after a crash, under the next epoch.
//! - A pool whose log has members is opened only by a member of the newest link, or by force. A change of the members
//!   is a link of the owner, and every take-over carries them over.
//! - A manifest is authentic under the pool key, or it is refused as damaged.
//! - A removed pool can be opened only by a restore, and one whose purge has begun can no longer be opened at all. Both
//!   steps are links of the chain, so only one of a simultaneous restore and purge wins.
//! - No clock decides who owns a pool. Times in a manifest are for display, and for the time for which a removed pool
//!   is retained.

mod configuration;
mod found;
mod node_dir;
mod own_links;

use self::configuration::carried_over;
use self::own_links::{OwnLinks, Step};
use crate::chain::{Chain, Created, Document, Format, corrupt, seal_document};
use crate::store::Store;
use async_recursion::async_recursion;
use block::env::random_bytes;
use block::hex::to_hex;
use block::quantities;
use block::seal::PoolKey;
use block::{Epoch, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

pub use configuration::{Configuration, Degraded, MEMBER_COUNT_MAX, Member, NODE_NAME_BYTES_MAX};
pub use looking::{look, newer_than};
pub use node_dir::NodeDir;
pub use own_links::Changed;
pub use purging::{begin_purge, read_unverified};

/// Manifests kept for people to read; only the newest counts.
const KEEP_COUNT: usize = 4;
/// Keeps the seal of a manifest apart from every other use of the pool key.
const PURPOSE: &str = "manifest";

/// The process that opened a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Owner {
    /// Identity of the directory, from `DIR/node.json`.
    pub node_id: Uuid,
    /// Host name, for display.
    pub host: String,
    /// Process id on that host, for display.
    pub pid: u32,
    /// Seconds since 1970 by that host's clock, for display.
    pub opened_at: u64,
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (pid {}) since {}", self.host, self.pid, quantities::utc(self.opened_at))
    }
}

/// A pool's root object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: Format,
    /// The pool's identity.
    pub pool: Uuid,
    /// The pool's name, for display.
    pub name: String,
    /// Number of this object in the chain.
    pub number: u64,
    /// Number of the manifest that this one replaces; 0 for the first.
    pub previous_number: u64,
    /// The owner's term.
    pub epoch: u64,
    /// First epoch since which this owner's directory has held the pool without interruption: a write log of that
    /// directory with this epoch or a later one is not superseded.
    pub owner_since_epoch: u64,
    /// The owner.
    pub owner: Owner,
    /// The owner has closed the pool in order and no longer serves it.
    pub is_released: bool,
    /// Time of the pool's removal, in seconds since 1970; absent while it is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed_at: Option<u64>,
    /// Epoch under which `owner` held the pool, as its directory knows it. It is present only if another node has taken
    /// the pool since, could not open it, and gave it back; otherwise `epoch` counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_epoch: Option<u64>,
    /// Objects of the removed pool are being deleted, or are gone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_purging: bool,
    /// Newest epoch that was begun by force: without the writes that only the owner before had, or without the
    /// members of its log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forced_epoch: Option<u64>,
    /// The members of the pool's log; absent for a pool that has its log on one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configuration: Option<Configuration>,
    /// Random: tells our own create from another's after an ambiguous answer.
    nonce: String,
}

/// The right by which a pool is taken that is not closed in order, or whose log has members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TakeOver {
    /// Only from this directory itself. A pool whose log has members is refused.
    #[default]
    No,
    /// From any node that has it open. Writes that it had not yet copied to the store are given up,
    /// and the log has no members from then on.
    Forced,
    /// As a member of the pool's log: the members have every acknowledged write, so none is given
    /// up. The caller must find it there before it serves. The configuration stays as it is. For a
    /// pool without a configuration this is `No`.
    ByQuorum,
    /// Like `ByQuorum`, for a member that is a recovery quorum by itself: it is the only member from
    /// then on. The caller must have proof that the member's log lacks nothing, and that the pool
    /// may continue without the others.
    Alone,
}

/// Terms on which a pool is taken.
#[derive(Clone, Copy, Debug, Default)]
pub struct Terms {
    /// The right by which it is taken.
    pub take_over: TakeOver,
    /// Restore a removed pool to use.
    pub restores: bool,
    /// Time for which a removed pool is retained, for the message of a refusal.
    pub retention: Duration,
}

/// The right to serve a pool, held for as long as the pool is open. Clones share the newest link.
#[derive(Clone, Debug)]
pub struct Ownership {
    chain: Chain,
    key: PoolKey,
    own: Arc<OwnLinks>,
    previous: Option<Manifest>,
    /// The pool was taken from a directory that was copied.
    is_from_copy: bool,
    /// The pool was taken by a member of its log.
    is_by_quorum: bool,
}

impl Ownership {
    /// Takes the pool under the next epoch. The directory records the attempt, and the epoch once [`Ownership::settle`]
    /// is called.
    ///
    /// # Errors
    /// `Busy` if another directory has the pool open and a take-over is not asked for, or if another node won at the
    /// same moment; `Denied` if the pool's log has members and this directory is not one of them, is a copy of one, or
    /// takes the pool alone or without a quorum where it may not; `NotFound` for a removed pool, unless it is restored;
    /// `Invalid` for a restore of one that is not removed; `Corrupt` for a damaged newest manifest or a store older than this directory.
    #[async_recursion]
    pub async fn acquire(
        store: &Store,
        node: &NodeDir,
        key: &PoolKey,
        pool: Uuid,
        name: &str,
        terms: Terms,
    ) -> Result<Ownership> {
        let chain = Chain::new(store, "manifest");
        let previous = read_known(&chain, key, node).await?;
        node.check_not_rolled_back(pool, previous.as_ref())?;
        if let Some(previous) = &previous {
            check_available(node, pool, previous, terms.take_over)?;
        }
        check_not_removed(name, previous.as_ref(), terms)?;
        let configuration = match &previous {
            Some(previous) => carried_over(node, previous, terms.take_over)?,
            None => None,
        };
        let next = next_manifest(node, pool, name, previous.as_ref());
        let was_open = previous.as_ref().is_some_and(|previous| !previous.is_released);
        let is_another = next.owner_since_epoch == next.epoch || node.is_copy();
        // The log of a member that is left behind has no successor either, even if the store has all of it.
        let had_members = previous.as_ref().is_some_and(|one| one.configuration.is_some());
        let is_forced =
            terms.take_over == TakeOver::Forced && (was_open && is_another || had_members);
        let forced_epoch = if is_forced { Some(next.epoch) } else { next.forced_epoch };
        let manifest = Manifest { configuration, forced_epoch, ..next };
        let bytes = seal_document(key, PURPOSE, &manifest)?;
        node.record_attempt(&manifest.nonce)?;
        let created = match chain.create(manifest.number, &bytes).await {
            Ok(created) => created,
            Err(error) => {
                let taken = Ownership::perhaps(chain, key, manifest, previous, node);
                taken.give_back_if_taken(&bytes, node).await;
                return Err(error);
            }
        };
        if created == Created::Lost {
            let who = match read_newest(&chain, key).await {
                Ok(Some(winner)) => winner.owner.to_string(),
                _ => "another node".to_owned(),
            };
            return Err(Error::new(
                ErrorKind::Busy,
                format!("open pool {name}: it was opened at the same moment by {who}"),
            ));
        }
        let ownership = Ownership::perhaps(chain, key, manifest, previous, node);
        if let Err(error) = ownership.chain.prune(KEEP_COUNT).await {
            tracing::warn!(error = %error.chain(), "could not delete old manifests");
        }
        Ok(ownership)
    }

    /// Records in the directory that it has held this epoch: from now on an older state of the store is refused. Call
    /// this once everything of the pool is open and before anything is served. An opening that was refused, because the
    /// store is an old one, must not rule out the newer one.
    ///
    /// # Errors
    /// `Io` if node.json cannot be written.
    pub fn settle(&self, node: &NodeDir) -> Result<()> {
        let newest = self.own.newest();
        node.record(newest.pool, newest.epoch, newest.number)
    }

    /// This owner's term.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        Epoch(self.own.newest().epoch)
    }

    /// The newest link of this owner that is known to be in the chain.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        self.own.newest()
    }

    /// Tells whether a member of the pool's log has taken the pool. The members then decide how much of the log is
    /// valid, and not the directory; no acknowledged write is given up.
    #[must_use]
    pub fn is_by_quorum(&self) -> bool {
        self.is_by_quorum
    }

    /// The manifest before ours, if the pool is not new.
    #[must_use]
    pub fn previous(&self) -> Option<&Manifest> {
        self.previous.as_ref()
    }

    /// Tells whether the pool was taken without a release by its last owner: another directory, or the original of this
    /// one. Writes that the last owner had answered and not yet copied to the store are not here. Never true for a
    /// member of the pool's log, unless it was told to use force.
    #[must_use]
    pub fn is_forced(&self) -> bool {
        if self.is_by_quorum {
            return false;
        }
        let newest = self.own.newest();
        let is_first_term = newest.owner_since_epoch == newest.epoch;
        let is_released = self.previous.as_ref().is_none_or(|previous| previous.is_released);
        (is_first_term || self.is_from_copy) && !is_released
    }

    /// Tells whether a write log of this directory, last written under `log_epoch`, may be replayed: no other directory
    /// has owned the pool since. Otherwise its tail must be kept and not replayed.
    #[must_use]
    pub fn may_replay(&self, log_epoch: Epoch) -> bool {
        let newest = self.own.newest();
        log_epoch.0 >= newest.owner_since_epoch && log_epoch.0 <= newest.epoch
    }

    async fn fenced(&self) -> Error {
        let who = match read_newest(&self.chain, &self.key).await {
            Ok(Some(winner)) => winner.owner.to_string(),
            _ => "another node".to_owned(),
        };
        let newest = self.own.newest();
        let (name, epoch) = (&newest.name, newest.epoch);
        let what = format!("pool {name} was taken over by {who}; epoch {epoch} has ended here");
        Error::new(ErrorKind::Fenced, what)
    }

    /// Records that the pool is closed in order, so that any node may open it next, or any member if its log has
    /// members. Call this last. It may be repeated after an error.
    ///
    /// # Errors
    /// `Fenced` if another owner took over meanwhile.
    #[async_recursion]
    pub async fn release(&self) -> Result<()> {
        self.advance(Step::Release).await.map(drop)
    }

    /// Records, in place of a release, that the pool is removed at `now`, in seconds since 1970. Returns the time of
    /// the removal, which is that of the first call if this is repeated after an error.
    ///
    /// # Errors
    /// `Fenced` if another owner took over meanwhile.
    #[async_recursion]
    pub async fn remove(&self, now: u64) -> Result<u64> {
        let link = self.advance(Step::Remove(now)).await?;
        Ok(link.removed_at.unwrap_or(now))
    }
}

/// Creates the first manifest of a pool that is being restored from a copy: released, under the epoch of the copy's
/// state, so that its next owner takes a later one. Repeating it changes nothing.
///
/// # Errors
/// `Busy` if another pool was created there at the same moment.
#[async_recursion]
pub async fn begin_restored(
    store: &Store,
    key: &PoolKey,
    pool: Uuid,
    name: &str,
    node: &NodeDir,
    epoch: u64,
) -> Result<()> {
    let chain = Chain::new(store, "manifest");
    if let Some(found) = read_newest(&chain, key).await?
        && (found.pool, found.epoch, found.is_released) == (pool, epoch, true)
    {
        return Ok(());
    }
    let first = Manifest {
        epoch,
        owner_since_epoch: epoch,
        is_released: true,
        ..next_manifest(node, pool, name, None)
    };
    match chain.create(first.number, &seal_document(key, PURPOSE, &first)?).await? {
        Created::Ours => Ok(()),
        Created::Lost => {
            let what = format!("restore to {}: another pool was made there", store.url());
            Err(Error::new(ErrorKind::Busy, what))
        }
    }
}

/// Name of the manifest with this number.
pub fn object_name(number: u64) -> String {
    Chain::name_in("manifest", number)
}

impl Manifest {
    /// The epoch since which the pool goes on without the log of a member, by force; `None` if it does not.
    #[must_use]
    pub fn left_behind_since(&self, member: Uuid) -> Option<Epoch> {
        let known = |configuration: &Configuration| {
            configuration.members.iter().chain(&configuration.away).any(|one| one.id == member)
        };
        // The owner's own log has no batch of this epoch before it is open.
        let is_known =
            self.owner.node_id == member || self.configuration.as_ref().is_some_and(known);
        self.forced_epoch.filter(|_| !is_known).map(Epoch)
    }

    /// Epoch under which the owner's directory has held the pool.
    fn held_epoch(&self) -> u64 {
        self.held_epoch.unwrap_or(self.epoch)
    }
}

fn successor(manifest: &Manifest) -> Manifest {
    Manifest {
        number: manifest.number + 1,
        previous_number: manifest.number,
        nonce: fresh_nonce(),
        ..manifest.clone()
    }
}

/// Reads the newest manifest of a pool without taking the pool: for fsck, and for the status of a pool that is open
/// elsewhere. `None` for a pool that was never opened.
///
/// # Errors
/// Those of reading the store; `Corrupt` for a damaged manifest.
#[async_recursion]
pub async fn read(store: &Store, key: &PoolKey) -> Result<Option<Manifest>> {
    read_newest(&Chain::new(store, "manifest"), key).await
}

/// Reads the newest manifest of a pool that the directory may have held: its epoch must be that of the directory or a
/// later one. A store that shows less is read again before it counts as rolled back.
async fn read_known(chain: &Chain, key: &PoolKey, node: &NodeDir) -> Result<Option<Manifest>> {
    let mut attempt = 0;
    loop {
        let newest = read_newest(chain, key).await?;
        let is_behind = newest.as_ref().map_or(0, |newest| newest.epoch) < node.epoch().0;
        if !is_behind {
            return Ok(newest);
        }
        if !chain.pause_before_retry(attempt).await {
            // A number that is listed says nothing: it may be another pool's.
            let number = node.file.lock().manifest;
            let is_listed = newest.as_ref().map_or(0, |newest| newest.number) >= number;
            return match !is_listed && chain.read(number).await?.is_some() {
                true => Err(chain.unlisted(number)),
                false => Ok(newest),
            };
        }
        attempt += 1;
    }
}

async fn read_newest(chain: &Chain, key: &PoolKey) -> Result<Option<Manifest>> {
    let Some((number, bytes)) = chain.newest().await? else { return Ok(None) };
    let name = chain.name(number);
    let document = Document::parse(&name, &bytes)?;
    document.verify(key, PURPOSE)?;
    let manifest: Manifest = document.body()?;
    if manifest.number != number {
        return Err(corrupt(&name, "it was written under another number"));
    }
    if manifest.epoch == 0
        || manifest.owner_since_epoch > manifest.epoch
        || manifest.held_epoch.is_some_and(|held| held > manifest.epoch)
    {
        return Err(corrupt(&name, "its epoch is impossible"));
    }
    let owner = manifest.owner.node_id;
    if let Some(fault) = manifest.configuration.as_ref().and_then(|one| one.fault(owner)) {
        return Err(corrupt(&name, &format!("its configuration is impossible: {fault}")));
    }
    Ok(Some(manifest))
}

fn check_available(
    node: &NodeDir,
    pool: Uuid,
    previous: &Manifest,
    take_over: TakeOver,
) -> Result<()> {
    if previous.pool != pool {
        return Err(Error::new(
            ErrorKind::Corrupt,
            format!("manifest is of pool {}, the key ring of pool {pool}", previous.pool),
        ));
    }
    if take_over == TakeOver::Forced {
        return Ok(());
    }
    if previous.configuration.is_some() {
        return carried_over(node, previous, take_over).map(drop);
    }
    if previous.is_released || (node.has_witnessed(previous) && !node.is_copy()) {
        return Ok(());
    }
    let name = &previous.name;
    if previous.owner.node_id == node.node_id() {
        let what = format!(
            "pool {name} was opened from a copy of the directory {}, by {}, or this directory is \
             the copy (moved, or restored from a backup). Stop that process if it still runs, and \
             use the directory that it served, if there is one. --take-over continues from this \
             one: it fences the other, whose clients are disconnected, and gives up the writes since the \
             copy was made that are not in the store",
            node.path().display(),
            previous.owner
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let why = format!("pool {name} is open on {}", previous.owner);
    Err(Error::new(
        ErrorKind::Busy,
        format!(
            "{why}; stop it there, or use --take-over, which fences it: its clients are disconnected, \
             and writes it had not yet copied to the store stay behind in its write log"
        ),
    ))
}

fn check_not_removed(name: &str, previous: Option<&Manifest>, terms: Terms) -> Result<()> {
    let removed = previous.and_then(|previous| Some((previous, previous.removed_at?)));
    let (kind, why) = match removed {
        None if terms.restores => {
            (ErrorKind::Invalid, "it is not removed, so there is nothing to restore".to_owned())
        }
        None => return Ok(()),
        Some((previous, at)) if previous.is_purging => (
            ErrorKind::NotFound,
            format!(
                "it was removed at {}, and its purge has begun, so it cannot be restored; `spindle \
                 pool purge` deletes the rest",
                quantities::utc(at)
            ),
        ),
        Some(_) if terms.restores => return Ok(()),
        Some((_, at)) => (
            ErrorKind::NotFound,
            format!(
                "it was removed at {} and is kept until {} at least; `spindle pool restore` \
                 brings it back, `spindle pool purge` deletes it for good",
                quantities::utc(at),
                quantities::utc(at.saturating_add(terms.retention.as_secs()))
            ),
        ),
    };
    let name = previous.map_or(name, |previous| &previous.name);
    Err(Error::new(kind, format!("open pool {name}: {why}")))
}

fn next_manifest(node: &NodeDir, pool: Uuid, name: &str, previous: Option<&Manifest>) -> Manifest {
    let epoch = previous.map_or(1, |previous| previous.epoch + 1);
    let is_unbroken = previous.is_some_and(|previous| node.has_witnessed(previous));
    Manifest {
        format: Format::CURRENT,
        pool,
        name: name.to_owned(),
        number: previous.map_or(1, |previous| previous.number + 1),
        previous_number: previous.map_or(0, |previous| previous.number),
        epoch,
        owner_since_epoch: match previous {
            Some(previous) if is_unbroken => previous.owner_since_epoch,
            _ => epoch,
        },
        owner: Owner {
            node_id: node.node_id(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid: std::process::id(),
            opened_at: quantities::unix_seconds_now(),
        },
        is_released: false,
        removed_at: None,
        held_epoch: None,
        is_purging: false,
        forced_epoch: previous.and_then(|previous| previous.forced_epoch),
        configuration: None,
        nonce: fresh_nonce(),
    }
}

fn fresh_nonce() -> String {
    to_hex(&random_bytes::<16>())
}

mod give_back;
#[cfg(test)]
mod ill_tests;
mod looking;
#[cfg(test)]
mod members_tests;
mod purging;
#[cfg(test)]
mod tests;
