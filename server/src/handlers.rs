//! Handlers of the admin requests, one module a noun: they call the engine, and build the replies
//! from what it returns.
//!
//! Invariants:
//! - Every request uses the same pool operations, whether a daemon serves the pool or the command
//!   line has opened it.
//! - Secrets are returned only to the client that asked for them.
//! - A handler decides nothing about the data of a pool: it converts, calls and reports. It refuses
//!   requests about a volume that is attached, which the engine cannot know.

mod check;
mod closed;
mod convert;
mod copy;
mod data;
mod device;
mod dnode;
mod doctor;
mod key;
mod member;
pub(crate) mod node;
mod pool;
mod restore;
mod scrub;
mod snapshot;
mod status;
mod volume;

pub(crate) use check::check;
pub(crate) use closed::answers_closed;
pub(crate) use convert::{
    example, fsck_info, pool_from_copy, pool_purged, pool_removed, pool_restored, remote_device,
    remote_options, secret,
};
pub(crate) use dnode::{DnodeAdmin, drive_url};
pub(crate) use member::MemberAdmin;

use crate::adapters::exports::PoolExports;
use crate::adapters::pool_volumes::{self, Attachments};
use crate::admin::AdminHandler;
use crate::roles::{Desk, Roles};
use api::{Reply, Request};
use async_trait::async_trait;
use block::{Error, ErrorKind, Result, VolumeId};
use cluster::Cluster;
use engine::copies::Copies;
use engine::open_pool::OpenPool;
use engine::reservations::DetachGuard;
use engine::scrub::Scrub;
use nbd::Server;
use std::sync::Arc;
use tokio::sync::{Mutex, watch};

/// Answers requests about an open pool.
pub struct AdminPool {
    open: Mutex<Option<Arc<OpenPool>>>,
    endpoints: Vec<String>,
    nbd: Option<Server<PoolExports>>,
    attachments: Option<Arc<Attachments>>,
    copies: Arc<Copies>,
    scrub: Arc<Scrub>,
    is_offline: bool,
    roles: Option<Arc<Roles>>,
    stop: watch::Sender<bool>,
}

/// The parts of a daemon that its handlers ask.
pub(crate) struct DaemonParts {
    /// Addresses that clients connect to.
    pub endpoints: Vec<String>,
    /// The NBD server.
    pub nbd: Server<PoolExports>,
    /// Devices of this machine.
    pub attachments: Arc<Attachments>,
    /// Copies of the pool.
    pub copies: Arc<Copies>,
    /// The scrub.
    pub scrub: Arc<Scrub>,
    /// The node's roles, if it is a node of a cluster.
    pub roles: Option<Arc<Roles>>,
    /// Set by a request to stop.
    pub stop: watch::Sender<bool>,
}

impl AdminPool {
    /// Removes a volume whose time is over if it is not in use.
    pub(crate) async fn remove_expired(&self, id: VolumeId) -> Result<Option<String>> {
        let open = self.open().await?;
        let _kept = self.guard_id_detached(&open, "remove", "whose time is over", id).await?;
        open.pool.remove_expired(id).await
    }

    /// The node that the daemon serves, if its directory is one.
    fn cluster(&self) -> Option<&Cluster> {
        self.roles.as_ref().map(|roles| roles.cluster())
    }

    /// Makes the handler of a daemon.
    #[must_use]
    pub(crate) fn serving(open: Arc<OpenPool>, parts: DaemonParts) -> AdminPool {
        let DaemonParts { endpoints, nbd, attachments, copies, scrub, roles, stop } = parts;
        AdminPool {
            open: Mutex::new(Some(open)),
            endpoints,
            nbd: Some(nbd),
            attachments: Some(attachments),
            copies,
            scrub,
            is_offline: false,
            roles,
            stop,
        }
    }

    /// Makes the handler for a command that has opened the pool itself and closes it with
    /// [`AdminHandler::close`].
    pub async fn offline(open: OpenPool) -> AdminPool {
        let (copies, scrub) = (open.copies().await, open.scrub().await);
        AdminPool {
            open: Mutex::new(Some(Arc::new(open))),
            endpoints: Vec::new(),
            nbd: None,
            attachments: None,
            copies: Arc::new(copies),
            scrub: Arc::new(scrub),
            is_offline: true,
            roles: None,
            stop: watch::Sender::new(false),
        }
    }

    /// Like [`AdminPool::guard_id_detached`], if the volume exists.
    async fn guard_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
    ) -> Result<Option<DetachGuard>> {
        let Some(volume) = open.pool.volume(name) else { return Ok(None) };
        let id = volume.id();
        drop(volume);
        self.guard_id_detached(open, what, name, id).await
    }

    /// Checks that a volume is not attached, and keeps it so as long as the returned guard lives.
    /// `None` if no daemon runs, so that nothing can be attached.
    async fn guard_id_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
        id: VolumeId,
    ) -> Result<Option<DetachGuard>> {
        self.check_id_detached(open, what, name, id).await?;
        let Some(attachments) = &self.attachments else { return Ok(None) };
        let reservations = attachments.volumes().reservations();
        reservations.end_leftovers(id.0).await?;
        reservations.guard_detached(id.0, name).map(Some)
    }

    /// Adds the names of the clients that have a volume open to a refusal caused by them.
    fn name_users(&self, id: VolumeId, error: Error) -> Error {
        let attachments = self.attachments.as_ref().filter(|_| error.kind() == ErrorKind::Busy);
        match attachments
            .and_then(|attachments| attachments.volumes().reservations().connections_of(id.0))
        {
            Some(users) => {
                error.context(format!("NBD connections of {users} have the volume open"))
            }
            None => error,
        }
    }

    async fn check_id_detached(
        &self,
        open: &OpenPool,
        what: &str,
        name: &str,
        id: VolumeId,
    ) -> Result<()> {
        let (user, first) = match &self.attachments {
            Some(attachments) => (attachments.user_of(id).await?, "detach it first"),
            None => (pool_volumes::user_in(open, Some(id))?, pool_volumes::FREE_OFFLINE),
        };
        let Some(user) = user else { return Ok(()) };
        let what = format!(
            "{what} volume {name}: it is attached as {user}; {first}: spindle detach {name}"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    async fn open(&self) -> Result<Arc<OpenPool>> {
        self.open.lock().await.clone().ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "answer an admin request: the pool is closing")
        })
    }
}

#[async_trait]
impl Desk for AdminPool {
    async fn answer(&self, request: Request) -> Result<Reply> {
        check(&request)?;
        self.handle(request).await
    }
}

impl AdminHandler for AdminPool {
    async fn handle(&self, request: Request) -> Result<Reply> {
        let open = self.open().await?;
        match request {
            Request::Pool(request) => self.pool(&open, request).await,
            Request::Volume(request) => self.volume(&open, request).await,
            Request::Snapshot(request) => self.snapshot(&open, request).await,
            Request::Copy(request) => self.copy(&open, request).await,
            Request::Data(request) => data::handle(&open, request).await,
            Request::Restore(request) => self.restore(&open, request),
            Request::Scrub(request) => self.scrub(request).await,
            Request::Key(request) => key::handle(&open, request).await,
            Request::Device(request) => self.device(request).await,
            Request::Node(request) => node::answer(self.cluster(), &open.config.dir, request).await,
            Request::Doctor(request) => doctor::of_open(&open, request).await,
        }
    }

    async fn close(&self) -> Result<()> {
        let Some(open) = self.open.lock().await.take() else { return Ok(()) };
        match (self.is_offline, Arc::into_inner(open)) {
            (true, Some(open)) => open.close().await,
            // The daemon closes its pool itself.
            (false, _) => Ok(()),
            (true, None) => {
                Err(Error::new(ErrorKind::Busy, "close the pool: a request is still running"))
            }
        }
    }
}

/// Name of the volume as operators know it, or its number if it has none.
fn name_of(open: &OpenPool, volume: u32) -> String {
    let records = open.pool.records();
    let record = records.into_iter().find(|record| record.id == volume);
    record.map_or_else(|| format!("number {volume}"), |record| record.name)
}
