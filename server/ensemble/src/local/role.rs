//! The roles of the member on this node, the changes between them, and the start of a member that has
//! failed.
//!
//! Invariants:
//! - A change of role has the role to itself and runs to its end, also when its caller is gone.
//! - A node whose change or member has failed tries to be a plain member again, with growing pauses, as
//!   long as anything holds the [`LocalMember`](super::LocalMember).
//! - A guard of the role of an owner ends the ownership of its own epoch only.

use super::{LocalOptions, is_owner};
use crate::document::DocumentFile;
use crate::member::{Closed, Member};
use crate::note::Note;
use crate::owned::{OwnedLog, OwnedOptions};
use crate::peers::Peers;
use crate::seeded_bugs::seeded_bugs;
use crate::tasks::{self, Spawner};
use block::{Epoch, Error, ErrorKind, Result};
use parking_lot::Mutex;
use replication::{Configuration, Document, MemberId, Proof};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, OwnedRwLockWriteGuard, RwLock, oneshot};
use uuid::Uuid;

/// First and longest pause before a member that failed is started again. Chosen by hand: the write log
/// of an owner that ends is closed within the first few.
const RESTART_PAUSE: Duration = Duration::from_millis(50);
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Ticks after which a member that was started again counts as sound. Chosen by hand.
const CALM_TICKS: u32 = 20;

pub(super) enum Role {
    Member(Member),
    Owner {
        owned: OwnedLog,
        epoch: Epoch,
        file: Arc<Mutex<DocumentFile>>,
    },
    /// No member runs, for this reason; one is started again.
    Closed(Error),
}

/// What the handles of a member share.
pub(super) struct Inner {
    options: LocalOptions,
    pub(super) id: MemberId,
    pub(super) role: Arc<RwLock<Role>>,
    /// Notified when a member has to be started again.
    wake: Arc<Notify>,
    tasks: Spawner,
}

/// The role of an owner. The node becomes a plain member once this is dropped and the write log is
/// closed, in either order.
#[derive(Debug)]
pub struct OwnerRole {
    inner: Weak<Inner>,
    epoch: Epoch,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalMember").field("id", &self.id).finish_non_exhaustive()
    }
}

impl OwnerRole {
    pub(super) fn new(inner: &Arc<Inner>, epoch: Epoch) -> OwnerRole {
        OwnerRole { inner: Arc::downgrade(inner), epoch }
    }
}

impl Drop for OwnerRole {
    fn drop(&mut self) {
        let Some(inner) = self.inner.upgrade().filter(|_| !seeded_bugs().owner_role_kept) else {
            return;
        };
        let (tasks, epoch) = (inner.tasks.clone(), self.epoch);
        // Reported where the member is started again.
        drop(tasks.spawn(async move { drop(inner.leave(Some(epoch)).await) }));
    }
}

impl Inner {
    /// See [`LocalMember::start`](super::LocalMember::start).
    pub(super) fn start(options: LocalOptions) -> Result<Arc<Inner>> {
        let member = start_member(&options)?;
        let id = member.id();
        let role = Arc::new(RwLock::new(Role::Member(member)));
        let tasks = Spawner::current();
        let wake = Arc::new(Notify::new());
        let inner = Arc::new(Inner { options, id, role, wake: Arc::clone(&wake), tasks });
        drop(inner.tasks.spawn(supervise(Arc::downgrade(&inner), wake)));
        Ok(inner)
    }

    /// See [`LocalMember::become_owner`](super::LocalMember::become_owner).
    pub(super) async fn become_owner(
        self: Arc<Self>,
        epoch: Epoch,
        configuration: Configuration,
        peers: Arc<dyn Peers>,
        options: OwnedOptions,
    ) -> Result<OwnedLog> {
        let (sender, became) = oneshot::channel();
        let tasks = self.tasks.clone();
        drop(tasks.spawn(async move {
            let mut role = Arc::clone(&self.role).write_owned().await;
            let owner = self.change_to_owner(&mut role, epoch, configuration, peers, options).await;
            drop(role);
            if sender.send(owner).is_err() {
                drop(self.leave(Some(epoch)).await);
            }
        }));
        became.await.unwrap_or_else(|_| Err(changing()))
    }

    async fn change_to_owner(
        &self,
        role: &mut OwnedRwLockWriteGuard<Role>,
        epoch: Epoch,
        configuration: Configuration,
        peers: Arc<dyn Peers>,
        options: OwnedOptions,
    ) -> Result<OwnedLog> {
        let member = match std::mem::replace(&mut **role, Role::Closed(changing())) {
            Role::Member(member) => member,
            Role::Closed(error) => {
                **role = Role::Closed(error.clone());
                return Err(error);
            }
            owner @ Role::Owner { .. } => {
                **role = owner;
                return Err(is_owner());
            }
        };
        let opened = member.close().await.and_then(|closed| {
            let promised = closed.file.stored.document.promised;
            if promised != epoch {
                let what = format!(
                    "take the pool over with epoch {epoch}: the member on this node has promised epoch {promised}"
                );
                return Err(Error::new(ErrorKind::Fenced, what));
            }
            let page_cache = closed.file.stored.document.page_cache;
            Ok((closed, Note::open(&self.options.dir, page_cache)?))
        });
        let (Closed { file, index }, note) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                **role = Role::Closed(error.clone());
                self.wake.notify_one();
                return Err(error);
            }
        };
        let clock = Arc::clone(&self.options.clock);
        let owned = OwnedLog::new(self.id, epoch, configuration, index, peers, clock, options);
        owned.keep(note);
        let file = Arc::new(Mutex::new(file));
        **role = Role::Owner { owned: owned.clone(), epoch, file };
        Ok(owned)
    }

    /// Ends the ownership of `epoch`, or any, and starts a plain member.
    pub(super) async fn leave(self: Arc<Self>, epoch: Option<Epoch>) -> Result<()> {
        let tasks = self.tasks.clone();
        let left = tasks.spawn(async move {
            let mut role = Arc::clone(&self.role).write_owned().await;
            if let Role::Owner { owned, epoch: of, .. } = &*role
                && epoch.is_none_or(|epoch| epoch == *of)
            {
                owned.stop();
                *role = Role::Closed(changing());
            }
            self.start_again(&mut role).await
        });
        left.await.unwrap_or_else(|e| Err(Error::with_source(ErrorKind::Io, "leave ownership", e)))
    }

    pub(super) fn pool(&self) -> Uuid {
        self.options.pool
    }

    /// Ticks the member. Returns false if it has to be started again.
    async fn tick(&self) -> bool {
        match &*self.role.read().await {
            Role::Member(member) if !member.has_ended() => {
                member.tick();
                true
            }
            Role::Member(_) => seeded_bugs().ended_member_left,
            Role::Owner { .. } => true,
            Role::Closed(_) => false,
        }
    }

    /// Starts the member if it has failed or was closed.
    async fn start_again(&self, role: &mut OwnedRwLockWriteGuard<Role>) -> Result<()> {
        if let Role::Member(member) = &**role
            && member.has_ended()
            && let Role::Member(member) = std::mem::replace(&mut **role, Role::Closed(changing()))
        {
            // The thread has reported its failure.
            drop(member.close().await);
        }
        if !matches!(**role, Role::Closed(_)) {
            return Ok(());
        }
        let options = self.options.clone();
        let started = blocking("start the member", move || start_member(&options)).await;
        let (next, result) = match started {
            Ok(member) => (Role::Member(member), Ok(())),
            Err(error) => (Role::Closed(error.clone()), Err(error)),
        };
        **role = next;
        if result.is_err() {
            self.wake.notify_one();
        }
        result
    }
}

/// Ticks the member, and starts it again after a failure, until its handles are gone.
async fn supervise(inner: Weak<Inner>, wake: Arc<Notify>) {
    let (mut pause, mut calm_ticks) = (RESTART_PAUSE, 0);
    loop {
        // It may not keep the member alive meanwhile. Woken or not, it looks.
        let _ = tasks::timeout(Member::TICK, wake.notified()).await;
        let Some(member) = inner.upgrade() else { return };
        if member.tick().await {
            calm_ticks += 1;
            if calm_ticks >= CALM_TICKS {
                pause = RESTART_PAUSE;
            }
            continue;
        }
        drop(member);
        tasks::sleep(pause).await;
        calm_ticks = 0;
        pause = (2 * pause).min(RESTART_PAUSE_MAX);
        let Some(member) = inner.upgrade() else { return };
        let mut role = Arc::clone(&member.role).write_owned().await;
        let started = member.start_again(&mut role).await;
        drop(role);
        match started {
            Ok(()) => tracing::info!("the member of the write log on this node runs again"),
            // An owner that ends may still have its log open.
            Err(error) if error.kind() == ErrorKind::Busy && pause < RESTART_PAUSE_MAX => {}
            Err(error) => tracing::warn!(
                error = %error.chain(),
                "could not start the member of the write log on this node; the node tries again"
            ),
        }
    }
}

async fn blocking<T: Send + 'static>(
    what: &'static str,
    run: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let ran = tasks::blocking(run).await;
    ran.unwrap_or_else(|e| Err(Error::with_source(ErrorKind::Io, what, e)))
}

/// Starts the member in the directory. The document is locked before it is read, so that no earlier
/// member stores a promise afterwards. Blocks.
fn start_member(options: &LocalOptions) -> Result<Member> {
    let Some(file) = DocumentFile::open(&options.dir, options.pool)? else {
        let dir = options.dir.display();
        let what = format!("start the member of {dir}: the directory has none");
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    let (log, found) = (options.open_log)(file.stored.document.synced)?;
    let note = Note::open(&options.dir, found.page_cache)?;
    Member::start((file, note), log, found, Arc::clone(&options.clock))
}

/// Stores the promise of `epoch`, and ends the owner. Blocks.
pub(super) fn promise(file: &Mutex<DocumentFile>, owned: &OwnedLog, epoch: Epoch) -> Result<()> {
    let mut file = file.lock();
    let document = file.stored.document;
    if epoch > document.promised {
        file.store(Document { promised: epoch, ..document })?;
    }
    drop(file);
    owned.on_own_promise(epoch);
    Ok(())
}

/// Stores that the log of the owner of `epoch`, which has opened, lacks nothing: the rule of
/// [`Follower::on_own_open`](replication::Follower::on_own_open). Blocks.
pub(super) fn prove(file: &Mutex<DocumentFile>, epoch: Epoch) -> Result<()> {
    let mut file = file.lock();
    let document = file.stored.document;
    let is_proven = document.proof == Proof::All || seeded_bugs().open_not_proven;
    if document.promised != epoch || is_proven {
        return Ok(());
    }
    file.store(Document { proof: Proof::All, ..document })
}

fn changing() -> Error {
    let what = "ask the member of the write log on this node: its role is being changed";
    Error::new(ErrorKind::Unavailable, what)
}
