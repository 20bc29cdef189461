//! The member of this node, in whichever role it is: storing what an owner sends, or being the owner.
//!
//! Invariants:
//! - The log on disk has one user: the member's thread, or the write log of the owner. The document goes
//!   from one to the other.
//! - An owner that hears of a later epoch stores the promise of it and ends. It answers nothing, and the
//!   connection ends: the member, once it runs again, answers for the log as the owner left it.

use crate::document::DocumentFile;
use crate::member::{ANSWERS_MAX, FoundLog, Member, MemberLog};
use crate::note::Note;
use crate::owned::{OwnedLog, OwnedOptions};
use crate::peers::Peers;
use crate::seeded_bugs::seeded_bugs;
use block::env::Clock;
use block::{Epoch, Error, ErrorKind, Result};
use parking_lot::Mutex;
use replication::{Answer, Configuration, Document, LogIndex, MemberId, Proof, Request};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{RwLock, mpsc};
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
    /// Identifies the boot of the kernel.
    pub boot: Uuid,
    /// The clock of leases.
    pub clock: Arc<dyn Clock>,
    /// Opens the log in `dir`.
    pub open_log: Arc<OpenLog>,
}

enum Role {
    Member(Member),
    Owner {
        owned: OwnedLog,
        epoch: Epoch,
        file: Arc<Mutex<DocumentFile>>,
    },
    /// The role is being changed, or a change has failed.
    Closed(Option<Error>),
}

/// The member of this node. Clones are handles to the same.
#[derive(Clone)]
pub struct LocalMember {
    options: LocalOptions,
    id: MemberId,
    role: Arc<RwLock<Role>>,
}

impl LocalMember {
    /// Makes a member with an empty log, and its identity.
    ///
    /// # Errors
    /// `Busy` if the directory has a member already; `Io`.
    pub fn create(options: &LocalOptions, id: MemberId) -> Result<()> {
        DocumentFile::create(&options.dir, options.pool, id, options.boot).map(drop)
    }

    /// Returns the identity of the member in the directory; `None` if there is none.
    ///
    /// # Errors
    /// `Invalid` for a member of another pool; `Corrupt`, `Unsupported`, `Io`.
    pub fn find(options: &LocalOptions) -> Result<Option<MemberId>> {
        let found = DocumentFile::open(&options.dir, options.pool)?;
        Ok(found.map(|file| file.stored.member))
    }

    /// Starts the member that the directory has. Blocks while the log is read.
    ///
    /// # Errors
    /// `NotFound` if the directory has no member; those of [`LocalMember::find`] and of the log.
    pub fn start(options: LocalOptions) -> Result<LocalMember> {
        let Some(file) = DocumentFile::open(&options.dir, options.pool)? else {
            let dir = options.dir.display();
            let what = format!("start the member of {dir}: the directory has none");
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let id = file.stored.member;
        let member = start_member(&options, file)?;
        Ok(LocalMember { options, id, role: Arc::new(RwLock::new(Role::Member(member))) })
    }

    /// Identity of the member.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.id
    }

    /// Hands a request to the member. Its answer, if it has one, comes through `answers`, which has room
    /// for all requests that are under way.
    ///
    /// # Errors
    /// `Unavailable` if the member has failed, or the node just ceased to be the owner.
    pub async fn request(&self, request: Request, answers: &mpsc::Sender<Answer>) -> Result<()> {
        let role = Arc::clone(&self.role).read_owned().await;
        match &*role {
            Role::Member(member) => member.request(request, answers).await,
            Role::Closed(error) => Err(error.clone().unwrap_or_else(changing)),
            Role::Owner { owned, epoch, file } => {
                let asked = request.epoch();
                if asked <= *epoch {
                    let superseded = Answer::Superseded { epoch: asked, promised: *epoch };
                    let _ = answers.try_send(superseded); // a connection that has ended needs none
                    return Ok(());
                }
                let (owned, file) = (owned.clone(), Arc::clone(file));
                let promised = tokio::task::spawn_blocking(move || {
                    let _role = role; // the document stays here even if the caller is dropped
                    promise(&file, &owned, asked)
                });
                promised.await.map_err(|e| Error::with_source(ErrorKind::Io, "promise", e))??;
                Err(changing()) // ends the connection: the next one finds the member
            }
        }
    }

    /// Hands a request to the member, and waits for the answer. `None` if it gives none.
    ///
    /// # Errors
    /// Those of [`LocalMember::request`].
    pub async fn ask(&self, request: Request) -> Result<Option<Answer>> {
        let role = self.role.read().await;
        match &*role {
            Role::Member(member) => member.ask(request).await,
            Role::Owner { .. } | Role::Closed(_) => Err(changing()),
        }
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
        tokio::spawn(async move { member.serve(to_serve, from_member).await });
        crate::peers::Link { requests, answers }
    }

    /// Returns the document and the positions in the log of a member that is not the owner.
    ///
    /// # Errors
    /// `Unavailable` if the node is the owner, or the member has failed.
    pub async fn state(&self) -> Result<(Document, LogIndex)> {
        match &*self.role.read().await {
            Role::Member(member) => member.state().await,
            Role::Owner { .. } | Role::Closed(_) => Err(changing()),
        }
    }

    /// Time since an owner last sent a request; zero if this node is the owner.
    pub async fn silence(&self) -> Duration {
        match &*self.role.read().await {
            Role::Member(member) => member.silence(),
            Role::Owner { .. } | Role::Closed(_) => Duration::ZERO,
        }
    }

    /// Notes in the document how far the log is synced. Called every [`Member::TICK`].
    pub async fn tick(&self) {
        if let Role::Member(member) = &*self.role.read().await {
            member.tick();
        }
    }

    /// Makes this node the owner of `epoch`, which the member has promised: closes the member's log, so
    /// that the owner's write log can be opened on it.
    ///
    /// # Errors
    /// `Fenced` if the member has promised a later epoch meanwhile.
    pub(crate) async fn become_owner(
        &self,
        epoch: Epoch,
        configuration: Configuration,
        peers: Arc<dyn Peers>,
        options: OwnedOptions,
    ) -> Result<OwnedLog> {
        let mut role = self.role.write().await;
        let Role::Member(member) = &*role else { return Err(changing()) };
        let (document, index) = member.state().await?;
        if document.promised != epoch {
            let what = format!(
                "take the pool over with epoch {epoch}: the member on this node has promised epoch {}",
                document.promised
            );
            return Err(Error::new(ErrorKind::Fenced, what));
        }
        let Role::Member(member) = std::mem::replace(&mut *role, Role::Closed(None)) else {
            return Err(changing());
        };
        let closed = tokio::task::spawn_blocking(move || member.close()).await;
        let closed =
            closed.map_err(|e| Error::with_source(ErrorKind::Io, "close the member", e))?;
        let file = match closed {
            Ok(file) => Arc::new(Mutex::new(file)),
            Err(error) => {
                *role = Role::Closed(Some(error.clone()));
                return Err(error);
            }
        };
        let clock = Arc::clone(&self.options.clock);
        let owned = OwnedLog::new(self.id, epoch, configuration, index, peers, clock, options);
        match Note::open(&self.options.dir, self.options.boot) {
            Ok(note) => owned.keep(note),
            Err(error) => {
                *role = Role::Closed(Some(error.clone()));
                return Err(error);
            }
        }
        *role = Role::Owner { owned: owned.clone(), epoch, file };
        Ok(owned)
    }

    /// Waits until the log that this node owns is open, as [`OwnedLog::opened`] does, and notes in the
    /// document that this member's log lacks nothing. Called once by each owner.
    ///
    /// # Errors
    /// Those of [`OwnedLog::opened`]; `Unavailable` if the node is not the owner; `Io`.
    pub async fn opened(&self) -> Result<()> {
        let (owned, epoch) = match &*self.role.read().await {
            Role::Owner { owned, epoch, .. } => (owned.clone(), *epoch),
            Role::Member(_) | Role::Closed(_) => return Err(changing()),
        };
        owned.opened().await?;
        let role = Arc::clone(&self.role).read_owned().await;
        let file = match &*role {
            Role::Owner { epoch: now, file, .. } if *now == epoch => Arc::clone(file),
            Role::Owner { .. } | Role::Member(_) | Role::Closed(_) => return Err(changing()),
        };
        let stored = tokio::task::spawn_blocking(move || {
            let _role = role; // the document stays here even if the caller is dropped
            prove(&file, epoch)
        });
        let what = "note that the log of the owner lacks nothing";
        stored.await.map_err(|e| Error::with_source(ErrorKind::Io, what, e))?
    }

    /// Makes this node a plain member again. The owner's write log is closed, and nothing of it runs.
    ///
    /// # Errors
    /// Those of opening the log; the member then answers nothing until this is repeated.
    pub async fn leave_ownership(&self) -> Result<()> {
        let mut role = self.role.write().await;
        if let Role::Member(_) = &*role {
            return Ok(());
        }
        if let Role::Owner { owned, .. } = std::mem::replace(&mut *role, Role::Closed(None)) {
            owned.stop();
        }
        let options = self.options.clone();
        let started = tokio::task::spawn_blocking(move || {
            let file = DocumentFile::open(&options.dir, options.pool)?;
            let file = file.ok_or_else(|| {
                let what = format!("start the member of {}: it is gone", options.dir.display());
                Error::new(ErrorKind::NotFound, what)
            })?;
            start_member(&options, file)
        });
        let started = started.await;
        match started.map_err(|e| Error::with_source(ErrorKind::Io, "start the member", e))? {
            Ok(member) => {
                *role = Role::Member(member);
                Ok(())
            }
            Err(error) => {
                *role = Role::Closed(Some(error.clone()));
                Err(error)
            }
        }
    }
}

fn start_member(options: &LocalOptions, file: DocumentFile) -> Result<Member> {
    let (log, found) = (options.open_log)(file.stored.document.synced)?;
    let note = Note::open(&options.dir, options.boot)?;
    Member::start((file, note), log, found, options.boot, Arc::clone(&options.clock))
}

/// Stores the promise of `epoch`, and ends the owner. Blocks.
fn promise(file: &Mutex<DocumentFile>, owned: &OwnedLog, epoch: Epoch) -> Result<()> {
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
fn prove(file: &Mutex<DocumentFile>, epoch: Epoch) -> Result<()> {
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
