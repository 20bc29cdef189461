//! The member of this node, in whichever role it is: storing what an owner sends, or being the owner.
//!
//! Invariants:
//! - The log on disk has one user: the member's thread, or the write log of the owner. The document goes
//!   from one to the other.
//! - An owner that hears of a later epoch stores the promise of it and ends. It answers nothing, and the
//!   connection ends: the member, once it runs again, answers for the log as the owner left it.

mod role;

pub use role::OwnerRole;

use crate::document::{self, DocumentFile};
use crate::member::{ANSWERS_MAX, FoundLog, MemberLog};
use crate::owned::{OwnedLog, OwnedOptions};
use crate::peers::Peers;
use crate::tasks;
use block::env::Clock;
use block::{Epoch, Error, ErrorKind, Result};
use replication::{Answer, Configuration, Document, LogIndex, MemberId, Request};
use role::{Inner, Role};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use uuid::Uuid;

/// Opens the log in the member's directory, given a sequence that was on stable storage.
pub type OpenLog = dyn Fn(u64) -> Result<(Box<dyn MemberLog>, FoundLog)> + Send + Sync;

/// The surroundings of a member.
#[derive(Clone)]
pub struct LocalOptions {
    /// Directory of the log; it exists.
    pub dir: PathBuf,
    /// The pool.
    pub pool: Uuid,
    /// The clock of leases, which are measured in its uptime.
    pub clock: Arc<dyn Clock>,
    /// Opens the log in `dir`.
    pub open_log: Arc<OpenLog>,
}

/// The member of this node. Clones are handles to the same.
#[derive(Clone)]
pub struct LocalMember {
    inner: Arc<Inner>,
}

impl LocalMember {
    /// Makes a member with an empty log, and its identity.
    ///
    /// # Errors
    /// `Busy` if the directory has a member already; `Io`.
    pub fn create(options: &LocalOptions, id: MemberId) -> Result<()> {
        DocumentFile::create(&options.dir, options.pool, id).map(drop)
    }

    /// Returns the identity of the member in the directory; `None` if there is none.
    ///
    /// # Errors
    /// `Invalid` for a member of another pool; `Corrupt`, `Unsupported`, `Io`.
    pub fn find(options: &LocalOptions) -> Result<Option<MemberId>> {
        Ok(document::find(&options.dir, options.pool)?.map(|stored| stored.member))
    }

    /// Starts the member that the directory has. Blocks while the log is read. Needs a runtime, on which
    /// a member that fails later is started again.
    ///
    /// # Errors
    /// `NotFound` if the directory has no member; `Busy` if a member of it runs; those of
    /// [`LocalMember::find`] and of the log.
    pub fn start(options: LocalOptions) -> Result<LocalMember> {
        Ok(LocalMember { inner: Inner::start(options)? })
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> Uuid {
        self.inner.pool()
    }

    /// Identity of the member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.inner.id
    }

    /// Hands a request to the member. Its answer, if it has one, comes through `answers`, which has room
    /// for all requests that are under way.
    ///
    /// # Errors
    /// `Unavailable` if the member has failed, or the node just ceased to be the owner.
    pub async fn request(&self, request: Request, answers: &mpsc::Sender<Answer>) -> Result<()> {
        let role = Arc::clone(&self.inner.role).read_owned().await;
        match &*role {
            Role::Member(member) => {
                // A queue behind a slow disk may be full for long, and must not hold up a change of role.
                let jobs = member.jobs();
                drop(role);
                jobs.request(request, answers).await
            }
            Role::Closed(error) => Err(error.clone()),
            Role::Owner { owned, epoch, file } => {
                let asked = request.epoch();
                if asked <= *epoch {
                    let superseded = Answer::Superseded { epoch: asked, promised: *epoch };
                    let _ = answers.try_send(superseded); // a connection that has ended needs none
                    return Ok(());
                }
                let (owned, file) = (owned.clone(), Arc::clone(file));
                let promised = tasks::blocking(move || {
                    let _role = role; // the document stays here even if the caller is dropped
                    role::promise(&file, &owned, asked)
                });
                promised.await.map_err(|e| Error::with_source(ErrorKind::Io, "promise", e))??;
                Err(is_owner()) // ends the connection: the next one finds the member
            }
        }
    }

    /// Hands a request to the member, and waits for the answer. `None` if it gives none.
    ///
    /// # Errors
    /// Those of [`LocalMember::request`].
    pub async fn ask(&self, request: Request) -> Result<Option<Answer>> {
        let (sender, mut answers) = mpsc::channel(1);
        self.request(request, &sender).await?;
        drop(sender);
        // The thread drops the sender of a request that it does not answer.
        Ok(answers.recv().await)
    }

    /// Serves one connection until it ends. Run one task for each.
    pub async fn serve(
        &self,
        mut requests: mpsc::Receiver<Request>,
        answers: mpsc::Sender<Answer>,
    ) {
        while let Some(request) = requests.recv().await {
            if self.request(request, &answers).await.is_err() {
                return;
            }
        }
    }

    /// Makes the channels of a connection, and serves them on the present runtime.
    #[must_use]
    pub fn link(&self) -> crate::peers::Link {
        let (requests, to_serve) = mpsc::channel(ANSWERS_MAX);
        let (from_member, answers) = mpsc::channel(ANSWERS_MAX);
        let member = self.clone();
        drop(tasks::spawn(async move { member.serve(to_serve, from_member).await }));
        crate::peers::Link { requests, answers }
    }

    /// Returns the document and the positions in the log of a member that is not the owner.
    ///
    /// # Errors
    /// `Unavailable` if the node is the owner, or the member has failed.
    pub async fn state(&self) -> Result<(Document, LogIndex)> {
        let jobs = match &*self.inner.role.read().await {
            Role::Member(member) => member.jobs(),
            Role::Owner { .. } => return Err(is_owner()),
            Role::Closed(error) => return Err(error.clone()),
        };
        jobs.state().await
    }

    /// Time since an owner last sent a request of the newest epoch, since a candidate first asked for the promise of a
    /// later one, or since the start of the member.
    /// `None` if the node is the owner, or the member has failed and hears nothing.
    pub async fn silence(&self) -> Option<Duration> {
        match &*self.inner.role.read().await {
            Role::Member(member) if !member.has_ended() => Some(member.silence()),
            Role::Member(_) | Role::Owner { .. } | Role::Closed(_) => None,
        }
    }

    /// Waits until the log that this node owns is open, as [`OwnedLog::opened`] does, and notes in the
    /// document that this member's log lacks nothing. Called once by each owner.
    ///
    /// # Errors
    /// Those of [`OwnedLog::opened`]; `Unavailable` if the node is not the owner; `Io`.
    pub async fn opened(&self) -> Result<()> {
        let (owned, epoch) = match &*self.inner.role.read().await {
            Role::Owner { owned, epoch, .. } => (owned.clone(), *epoch),
            Role::Member(_) => return Err(not_owner()),
            Role::Closed(error) => return Err(error.clone()),
        };
        owned.opened().await?;
        let role = Arc::clone(&self.inner.role).read_owned().await;
        let file = match &*role {
            Role::Owner { epoch: now, file, .. } if *now == epoch => Arc::clone(file),
            Role::Owner { .. } | Role::Member(_) | Role::Closed(_) => return Err(not_owner()),
        };
        let stored = tasks::blocking(move || {
            let _role = role; // the document stays here even if the caller is dropped
            role::prove(&file, epoch)
        });
        let what = "note that the log of the owner lacks nothing";
        stored.await.map_err(|e| Error::with_source(ErrorKind::Io, what, e))?
    }

    /// Makes this node the owner of `epoch`, which the member has promised: closes the member's log, so
    /// that the owner's write log can be opened on it. A change that the caller no longer waits for is
    /// undone.
    ///
    /// # Errors
    /// `Fenced` if the member has promised a later epoch meanwhile; `Unavailable` if the member has failed.
    pub(crate) async fn become_owner(
        &self,
        epoch: Epoch,
        configuration: Configuration,
        peers: Arc<dyn Peers>,
        options: OwnedOptions,
    ) -> Result<OwnedLog> {
        Arc::clone(&self.inner).become_owner(epoch, configuration, peers, options).await
    }

    /// Returns the guard of the role of an owner. The node becomes a plain member when it is dropped.
    pub(crate) fn owner_role(&self, epoch: Epoch) -> OwnerRole {
        OwnerRole::new(&self.inner, epoch)
    }

    /// Makes this node a plain member again. The owner's write log is closed, and nothing of it runs.
    ///
    /// # Errors
    /// Those of opening the log; this is then repeated in the background, as long as it takes.
    pub async fn leave_ownership(&self) -> Result<()> {
        Arc::clone(&self.inner).leave(None).await
    }

    /// Ends the member, and returns when its log is closed. It starts again while another handle to it is left.
    ///
    /// # Errors
    /// `Busy` if this node owns the pool; the failure with which the member has ended.
    pub async fn close(self) -> Result<()> {
        let mut role = Arc::clone(&self.inner.role).write_owned().await;
        let ended = Role::Closed(crate::member::ended());
        match std::mem::replace(&mut *role, ended) {
            Role::Member(member) => member.close().await.map(drop),
            Role::Closed(_) => Ok(()),
            owner @ Role::Owner { .. } => {
                *role = owner;
                Err(Error::new(ErrorKind::Busy, "end the member: this node owns the pool"))
            }
        }
    }

    /// Returns the owner's side, if this node is the owner.
    pub async fn owned(&self) -> Option<OwnedLog> {
        match &*self.inner.role.read().await {
            Role::Owner { owned, .. } => Some(owned.clone()),
            Role::Member(_) | Role::Closed(_) => None,
        }
    }

    /// Returns the failure of the member, which is started again now and then until that succeeds.
    pub async fn failure(&self) -> Option<Error> {
        match &*self.inner.role.read().await {
            Role::Closed(error) => Some(error.clone()),
            Role::Member(member) if member.has_ended() => Some(crate::member::ended()),
            Role::Member(_) | Role::Owner { .. } => None,
        }
    }
}

fn is_owner() -> Error {
    let what = "ask the member of the write log on this node: the node owns the pool";
    Error::new(ErrorKind::Unavailable, what)
}

fn not_owner() -> Error {
    let what = "open the write log: its node has ceased to be the owner of the pool";
    Error::new(ErrorKind::Unavailable, what)
}
