//! The service of this node to owners and candidates on other nodes: hands their requests to the
//! members of this node.
//!
//! Invariants:
//! - Any admitted node may send; the cluster has verified it. A pool without a member here is refused
//!   before the first message.
//! - No answer is lost: a request is taken only while there is room for the answers of all requests
//!   that the member may have. A peer that does not read its answers holds up itself.
//! - A connection ends when its member leaves the service, and when either side fails. It ends behind
//!   the answers to the requests that were taken.

use crate::frames;
use crate::local::LocalMember;
use crate::member::{ANSWERS_MAX, QUEUE_MAX};
use crate::seeded_bugs::seeded_bugs;
use crate::tasks;
use async_trait::async_trait;
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, Connection, FrameWriter, Handler, NodeId, Service};
use parking_lot::Mutex;
use replication::{Answer, Request};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::timeout;
use uuid::Uuid;

/// Longest time for one answer to leave. Chosen by hand: an owner gives up sooner.
const WRITE_MAX: Duration = Duration::from_secs(10);
/// Room for answers with which another request is taken: the member's queue, the requests whose answers
/// wait for a sync, the one that its thread has, and this one.
const ROOM_MIN: usize = 2 * QUEUE_MAX + 2;
const _: () = assert!(ROOM_MIN < ANSWERS_MAX);

/// The members of this node, by pool.
#[derive(Default)]
pub struct MemberService {
    members: Mutex<HashMap<Uuid, Served>>,
}

struct Served {
    member: LocalMember,
    /// Dropped when the member leaves the service.
    in_service: watch::Sender<()>,
}

impl MemberService {
    /// Makes the service, without members, and registers it with the cluster.
    #[must_use]
    pub fn register(cluster: &Cluster) -> Arc<MemberService> {
        let service = Arc::new(MemberService::default());
        cluster.register(Service::Member, Arc::clone(&service) as _);
        service
    }

    /// Serves the member of `pool`, in place of an earlier one.
    pub fn insert(&self, pool: Uuid, member: LocalMember) {
        let in_service = watch::Sender::new(());
        self.members.lock().insert(pool, Served { member, in_service });
    }

    /// Serves the pool no longer. Its connections end.
    pub fn remove(&self, pool: Uuid) {
        self.members.lock().remove(&pool);
    }

    fn find(&self, pool: Option<Uuid>) -> Result<(LocalMember, watch::Receiver<()>)> {
        let not_found = |what| Err(Error::new(ErrorKind::NotFound, what));
        let Some(pool) = pool else {
            return not_found("the connection names no pool".to_owned());
        };
        let members = self.members.lock();
        let found = match seeded_bugs().pool_unchecked {
            true => members.values().next(),
            false => members.get(&pool),
        };
        match found {
            Some(served) => Ok((served.member.clone(), served.in_service.subscribe())),
            None => not_found(format!("this node has no member of pool {pool}")),
        }
    }
}

#[async_trait]
impl Handler for MemberService {
    fn check(&self, _peer: NodeId, pool: Option<Uuid>) -> Result<()> {
        self.find(pool).map(drop)
    }

    async fn serve(&self, connection: Connection) {
        let (node, pool) = (connection.peer(), connection.pool().unwrap_or_default());
        let name = connection.peer_name().to_owned();
        // The member may have left since the check: the peer sees the end of the connection.
        let Ok((member, mut in_service)) = self.find(connection.pool()) else { return };
        tracing::info!(%pool, %node, name, "a node connected to the member of a pool");
        let ended = tokio::select! {
            ended = converse(&member, connection) => ended,
            _ = in_service.changed(), if !seeded_bugs().left_member_served => {
                Err(Error::new(ErrorKind::Unavailable, "the member has left the service"))
            }
        };
        match ended {
            Ok(()) => {
                tracing::info!(%pool, %node, name, "a node closed its connection to a member")
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let error = error.chain();
                tracing::warn!(%pool, %node, name, error, "could not read the messages of a node");
            }
            Err(error) => {
                let error = error.chain();
                tracing::info!(%pool, %node, name, error, "the connection of a node to a member ended");
            }
        }
    }
}

/// Serves a connection until it ends.
async fn converse(member: &LocalMember, connection: Connection) -> Result<()> {
    let (mut reader, mut writer) = connection.into_frames();
    in_time(frames::write_identity(&mut writer, member.id())).await?;
    let (answers, to_write) = mpsc::channel(ANSWERS_MAX);
    let mut to_write = match seeded_bugs().member_answers_late {
        None => to_write,
        Some(ms) => {
            let late_ms = ms.parse().expect("a number of milliseconds");
            hold_back(to_write, Duration::from_millis(late_ms))
        }
    };
    let written = Notify::new();
    let reading = async {
        let answers = answers; // dropped at the end, so that the writer ends behind the last answer
        while let Some(request) = frames::read::<Request>(&mut reader).await? {
            while answers.capacity() < ROOM_MIN && !seeded_bugs().room_for_answers_unchecked {
                written.notified().await;
            }
            member.request(request, &answers).await?;
        }
        Ok(())
    };
    let writing = write_answers(&mut writer, &mut to_write, &written);
    tokio::pin!(reading, writing);
    let read = tokio::select! {
        read = &mut reading => read,
        written = &mut writing => return written,
    };
    let written = in_time(writing).await;
    read.and(written)
}

/// Writes answers until all of their senders are gone, and closes this direction.
async fn write_answers(
    writer: &mut FrameWriter,
    answers: &mut mpsc::Receiver<Answer>,
    written: &Notify,
) -> Result<()> {
    while let Some(answer) = answers.recv().await {
        written.notify_one();
        in_time(frames::write(writer, &answer)).await?;
    }
    in_time(writer.close()).await
}

/// Passes answers on in their order, each of them `late` after it came. As in a slow network, one does
/// not delay the next.
fn hold_back(mut answers: mpsc::Receiver<Answer>, late: Duration) -> mpsc::Receiver<Answer> {
    let (to_wait, mut waiting) = mpsc::channel(ANSWERS_MAX);
    let (passed, to_write) = mpsc::channel(ANSWERS_MAX);
    drop(tasks::spawn(async move {
        while let Some(answer) = answers.recv().await {
            let held = tasks::spawn(async move {
                tasks::sleep(late).await;
                answer
            });
            if to_wait.send(held).await.is_err() {
                return;
            }
        }
    }));
    drop(tasks::spawn(async move {
        while let Some(held) = waiting.recv().await {
            let Ok(answer) = held.await else { return };
            if passed.send(answer).await.is_err() {
                return;
            }
        }
    }));
    to_write
}

async fn in_time(writing: impl Future<Output = Result<()>>) -> Result<()> {
    timeout(WRITE_MAX, writing).await.unwrap_or_else(|_| {
        let what = "write to a node: it does not read";
        Err(Error::new(ErrorKind::Unavailable, what))
    })
}
