//! The role of this node in its pool: a member that stores the log, or the owner that serves it, and
//! the decision when a member takes the pool over.
//!
//! Invariants:
//! - Only the manifest chain decides who owns the pool. A member that takes it over by mistake costs a
//!   pause, and no data.
//! - A member takes over because of silence only if no other member that it reaches hears an owner, so
//!   that a node which has lost one connection does not take the pool from a healthy owner.
//! - The directory is locked in every role.

mod asking;
mod degraded;
mod forward;
mod measuring;
mod members;
mod messages;
mod moving;
mod watching;

pub(crate) use asking::Desk;
pub(crate) use degraded::{keep_going, set_degraded};
pub(crate) use forward::{Passages, forward};
pub(crate) use members::{add_member, members_of, remove_member, replace_member};
pub(crate) use moving::{Successor, begin_move};
pub(crate) use watching::watch_members;

use crate::adapters::log_members::EnsembleMembers;
use crate::data_stores::pool_config;
use api::pool::MoveInfo;
use asking::Desks;
use async_trait::async_trait;
use block::env::{Clock, SystemClock};
use block::{Epoch, Error, ErrorKind, Result};
use cluster::{Cluster, Connection, Handler, NodeId, Service};
use config::Config;
use control::keys::KeyRing;
use control::manifest::{self, Changed, Configuration, Degraded, Manifest, Member, NodeDir};
use control::store::{Store, StoreOptions};
use engine::config::PoolConfig;
use engine::open_pool::OpenPool;
use engine::opening::{self, Opening};
use engine::superseded::{has_ring, set_aside_if_superseded};
use ensemble::{ClusterPeers, LocalMember, MemberService, OwnedOptions};
use futures::FutureExt;
use messages::{Answer, Question, Role};
use parking_lot::Mutex;
use replication::Proof;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Pause between two looks at the silence, which grows by as much while this node may not take over: each
/// look reads the store. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
const LOOK_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Shortest time for an answer about a role: a connection with TLS to a busy node. Chosen by hand.
const ROLE_MIN: Duration = Duration::from_millis(300);
/// Attempts to lock the directory of this node. Chosen by hand: ten seconds.
const LOCK_ATTEMPTS: u32 = 200;
/// Silences of an owner after which a candidate that does not come to serve the pool holds up another one
/// no longer. Chosen by hand: ten seconds by default.
const CANDIDATE_SILENCES: u32 = 10;
/// Longest wait for the store before a member starts without it. Chosen by hand.
const STORE_MAX: Duration = Duration::from_secs(5);
/// Pause before the store is asked for the outcome of a change again. Chosen by hand.
const OUTCOME_PAUSE: Duration = Duration::from_secs(1);

/// The node and its part in the pool.
pub(crate) struct Roles {
    pool: PoolConfig,
    /// Silence of an owner after which the first stand-in takes over.
    detection: Duration,
    cluster: Cluster,
    service: Arc<MemberService>,
    member: Mutex<Option<Arc<EnsembleMembers>>>,
    /// The directory while this node does not own the pool.
    dir: Mutex<Option<NodeDir>>,
    /// Notified when the node is to take the pool over.
    asked: Notify,
    /// The ways into the NBD server while this node serves the pool.
    passages: Mutex<Option<Passages>>,
    /// The node that owned the pool at the last look, and the pool.
    owner: tokio::sync::Mutex<Option<(NodeId, Uuid)>>,
    /// Held while the members change.
    changes: tokio::sync::Mutex<()>,
    /// The node that is brought up before it becomes a member, while the members change.
    joining: Mutex<Option<Member>>,
    /// The node to which this one hands the pool over.
    successor: watch::Sender<Option<Successor>>,
    /// The last hand-over from this node.
    last_move: Mutex<Option<MoveInfo>>,
    /// The node that was asked to hand the pool over, by a request on this one.
    moved_from: Mutex<Option<NodeId>>,
    /// Answers the requests of the command line on other nodes.
    desks: Desks,
    /// The owner is silent, and too few members answer; it was logged.
    is_alone: AtomicBool,
}

impl Roles {
    /// Registers the node's services, and starts the member that the directory has.
    pub(crate) async fn start(config: &Config, cluster: Cluster) -> Result<Arc<Roles>> {
        let dir = NodeDir::open(config.dir())?;
        let pool = dir.pool();
        let roles = Arc::new(Roles {
            pool: pool_config(config),
            detection: config.settings().log.detection.duration(),
            service: MemberService::register(&cluster),
            cluster,
            member: Mutex::new(None),
            dir: Mutex::new(Some(dir)),
            asked: Notify::new(),
            passages: Mutex::new(None),
            owner: tokio::sync::Mutex::default(),
            changes: tokio::sync::Mutex::default(),
            joining: Mutex::default(),
            successor: watch::Sender::new(None),
            last_move: Mutex::new(None),
            moved_from: Mutex::new(None),
            desks: Desks::default(),
            is_alone: AtomicBool::new(false),
        });
        if let Some(pool) = pool {
            roles.set_log_aside(pool).await?;
            roles.start_member(pool).await?;
        }
        let answers = Answers(Arc::downgrade(&roles));
        roles.cluster.register(Service::Pool, Arc::new(answers));
        let passed = forward::Passed(Arc::downgrade(&roles));
        roles.cluster.register(Service::Forward, Arc::new(passed));
        Ok(roles)
    }

    /// The node in its cluster.
    pub(crate) fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The member of the log on this node.
    pub(crate) fn member(&self) -> Option<Arc<EnsembleMembers>> {
        self.member.lock().clone()
    }

    /// Returns the settings for opening the pool.
    pub(crate) fn pool_config(&self) -> PoolConfig {
        let members = self.member().map(|members| members as _);
        PoolConfig { log_members: members, ..self.pool.clone() }
    }

    /// Sets the ways for clients of other nodes; `None` while this node does not serve the pool.
    pub(crate) fn set_passages(&self, passages: Option<Passages>) {
        *self.passages.lock() = passages;
    }

    /// Releases the directory for an owner.
    pub(crate) fn leave_dir(&self) {
        *self.dir.lock() = None;
    }

    /// Locks the directory again. A command that found no daemon may have it for a moment.
    pub(crate) async fn lock_dir(&self) -> Result<()> {
        let mut attempts_left = LOCK_ATTEMPTS;
        loop {
            match self.try_lock_dir() {
                Err(error) if error.kind() == ErrorKind::Busy && attempts_left > 0 => {
                    attempts_left -= 1;
                    tokio::time::sleep(LOOK_PAUSE).await;
                }
                locked => return locked,
            }
        }
    }

    fn try_lock_dir(&self) -> Result<()> {
        let mut dir = self.dir.lock();
        if dir.is_none() {
            *dir = Some(NodeDir::open(&self.pool.dir)?);
            // Orders and moves of the time as the owner are void.
            let _ = self.asked.notified().now_or_never();
            if self.successor.send_replace(None).is_some() {
                self.moved_not("this node ceased to serve the pool before");
            }
        }
        Ok(())
    }

    /// Lets this node take the pool over by the order of an operator.
    ///
    /// # Errors
    /// `Invalid` if it is no member of the pool's log; those of reading the store.
    pub(crate) async fn take_over_by_order(&self) -> Result<()> {
        let Some(member) = self.member() else { return Err(no_member()) };
        let manifest = self.manifest().await?;
        let configuration = manifest.and_then(|manifest| manifest.configuration);
        if configuration.is_none_or(|configuration| configuration.member(member.id()).is_none()) {
            return Err(no_member());
        }
        self.take_over()
    }

    /// Lets this node take the pool over.
    fn take_over(&self) -> Result<()> {
        if self.member().is_none() {
            return Err(no_member());
        }
        // An order that comes twice would take the pool back later.
        if self.dir.lock().is_some() {
            self.asked.notify_one();
        }
        Ok(())
    }

    /// Lets this node take the pool over from the owner of `epoch`, and no later one: an order may be late.
    async fn take_over_from(&self, pool: Uuid, epoch: Epoch) -> Result<()> {
        if let Some(member) = self.member() {
            let is_known = match member.local().state().await {
                Ok((document, _)) => document.promised > epoch,
                Err(_) => false,
            };
            if is_known || member.local().pool() != pool {
                let what =
                    format!("take the pool over from epoch {epoch}: it has another owner by now");
                return Err(Error::new(ErrorKind::Fenced, what));
            }
        }
        self.take_over()
    }

    /// The settings of the pool.
    pub(crate) fn config(&self) -> &PoolConfig {
        &self.pool
    }

    /// Reads the newest link of the manifest chain; `None` if the store has no pool.
    ///
    /// # Errors
    /// Those of reading the store; `Denied` with another key.
    pub(crate) async fn manifest(&self) -> Result<Option<Manifest>> {
        let store = Store::open(&self.pool.store_url, &StoreOptions::default())?;
        let keys = match KeyRing::open(&store, &self.pool.keys).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            keys => keys?,
        };
        manifest::read(&store, &keys.newest().key).await
    }

    /// Sets the log of the member in the directory aside if the pool went on without it by force: as a member again,
    /// it would drop what only it has.
    async fn set_log_aside(&self, pool: Uuid) -> Result<()> {
        let log_dir = self.pool.dir.join("log");
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let options = EnsembleMembers::local_options(&log_dir, pool, self.pool.log, clock);
        let Some(id) = LocalMember::find(&options)? else { return Ok(()) };
        // The member is needed, too, while the store does not answer.
        let manifest = match tokio::time::timeout(STORE_MAX, self.manifest()).await {
            Ok(Ok(Some(manifest))) => manifest,
            _ => return Ok(()),
        };
        let Some(since) = manifest.left_behind_since(id) else { return Ok(()) };
        let aside = move || set_aside_if_superseded(&log_dir, pool, since);
        let done = tokio::task::spawn_blocking(aside).await;
        done.map_err(|e| Error::with_source(ErrorKind::Io, "set a log aside", e))?.map(drop)
    }

    /// Sets the log of a directory that has no member aside: it is of another owner's time, and a member would drop
    /// what only it has.
    async fn set_old_log_aside(&self, id: Uuid) -> Result<()> {
        let log_dir = self.pool.dir.join("log");
        if !has_ring(&log_dir)? {
            return Ok(());
        }
        let Some(manifest) = self.manifest().await? else { return Ok(()) };
        let (since, dir) = (Epoch(manifest.owner_since_epoch), log_dir.clone());
        let aside = move || set_aside_if_superseded(&dir, manifest.pool, since);
        if manifest.owner.node_id != id {
            let done = tokio::task::spawn_blocking(aside).await;
            done.map_err(|e| Error::with_source(ErrorKind::Io, "set a log aside", e))??;
        }
        if !has_ring(&log_dir)? {
            return Ok(());
        }
        let what = format!(
            "become a member: {} holds a log that is not known to be an earlier owner's. Keep it, and use another \
             directory for this node",
            log_dir.display()
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Refuses to become a member again with a log that the pool went on without.
    async fn check_not_left_behind(&self, member: &EnsembleMembers) -> Result<()> {
        let Some(manifest) = self.manifest().await? else { return Ok(()) };
        let Some(since) = manifest.left_behind_since(member.id()) else { return Ok(()) };
        let (log_dir, pool) = (self.pool.dir.join("log"), manifest.pool.into_bytes());
        let found =
            tokio::task::spawn_blocking(move || wal::find_superseded(&log_dir, pool, since));
        let found =
            found.await.map_err(|e| Error::with_source(ErrorKind::Io, "read a log", e))??;
        if found.is_none() {
            return Ok(());
        }
        let what = "become a member: the pool went on without the log of this node. Restart spindle on this node, which \
                    sets that log aside, and add the node again";
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Starts the member in the directory, if it has one.
    async fn start_member(&self, pool: Uuid) -> Result<()> {
        let log_dir = self.pool.dir.join("log");
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let options = EnsembleMembers::local_options(&log_dir, pool, self.pool.log, clock.clone());
        if LocalMember::find(&options)?.is_none() {
            return Ok(());
        }
        let started = tokio::task::spawn_blocking(move || LocalMember::start(options)).await;
        let local =
            started.map_err(|e| Error::with_source(ErrorKind::Io, "start a member", e))??;
        self.service.insert(pool, local.clone());
        let peers = Arc::new(ClusterPeers::new(self.cluster.clone(), pool, Default::default()));
        let members =
            EnsembleMembers::new(local, peers, OwnedOptions::for_detection(self.detection), clock);
        *self.member.lock() = Some(Arc::new(members));
        Ok(())
    }

    /// Ends the member on this node, if there is one.
    async fn stop_member(&self) -> Result<()> {
        let Some(member) = self.member.lock().take() else { return Ok(()) };
        let local = member.local().clone();
        self.service.remove(local.pool());
        drop(member);
        local.close().await
    }

    /// Makes this node a member of the log of a pool, unless it is one.
    async fn join(&self, pool: Uuid, name: &str) -> Result<Uuid> {
        if name != self.pool.name {
            let what =
                format!("join pool {name}: this node is configured for pool {}", self.pool.name);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let id = {
            let dir = self.dir.lock();
            let Some(dir) = &*dir else {
                let what = format!("join pool {name}: this node owns it");
                return Err(Error::new(ErrorKind::Busy, what));
            };
            dir.join(pool)?;
            dir.node_id()
        };
        match self.member() {
            Some(member) => self.check_not_left_behind(&member).await?,
            None => {
                self.check_log_not_lost(id).await?;
                self.set_old_log_aside(id).await?;
                self.make_member(pool, id)?;
                self.start_member(pool).await?;
            }
        }
        Ok(id)
    }

    /// Refuses to make an empty log for a member: it may have acknowledged writes, and would say that there are none.
    async fn check_log_not_lost(&self, id: Uuid) -> Result<()> {
        let manifest = self.manifest().await?;
        let configuration = manifest.as_ref().and_then(|manifest| manifest.configuration.as_ref());
        let Some(configuration) = configuration.filter(|now| now.member(id).is_some()) else {
            return Ok(());
        };
        let what = format!(
            "make a log on this node: it is a member of the pool's log, and its directory has none; {}",
            missing_log_advice(configuration)
        );
        Err(Error::new(ErrorKind::Denied, what))
    }

    fn make_member(&self, pool: Uuid, id: Uuid) -> Result<()> {
        let log_dir = self.pool.dir.join("log");
        std::fs::create_dir_all(&log_dir).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("make {}", log_dir.display()), error)
        })?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let options = EnsembleMembers::local_options(&log_dir, pool, self.pool.log, clock);
        match LocalMember::find(&options)? {
            Some(_) => Ok(()),
            None => LocalMember::create(&options, id),
        }
    }

    /// Prepares the start of the node. Returns whether it opens the pool at once: it is new, or this
    /// node was its last owner or is its only member.
    pub(crate) async fn prepare(&self) -> Result<bool> {
        let me = self.dir.lock().as_ref().map(NodeDir::node_id);
        let manifest = match self.manifest().await {
            Ok(manifest) => manifest,
            // The member is needed all the same.
            Err(error) if self.member().is_some() => {
                tracing::warn!(error = %error.chain(), "could not read who owns the pool");
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        let Some(manifest) = manifest else { return self.found_log().await.map(|()| true) };
        let was_ours = me == Some(manifest.owner.node_id);
        let Some(configuration) = &manifest.configuration else {
            return match was_ours || manifest.is_released {
                true => self.found_log().await.map(|()| true),
                false => {
                    tracing::warn!(
                        owner = %manifest.owner.host,
                        "another directory owns the pool, and its log is there alone; this node waits until `spindle \
                         pool members add` on the owner makes it a member"
                    );
                    Ok(false)
                }
            };
        };
        let Some(member) = self.member() else {
            if me.is_some_and(|me| configuration.member(me).is_some()) {
                tracing::error!(
                    advice = missing_log_advice(configuration),
                    "this node is a member of the pool's log, and its directory has no log: it does not take part"
                );
            }
            return Ok(false);
        };
        let is_only =
            configuration.members.len() == 1 && configuration.member(member.id()).is_some();
        if is_only || !was_ours {
            return Ok(is_only);
        }
        // With too few it would wait for them, and answer neither clients nor commands.
        let roles = self.ask_roles(&manifest, configuration, member.id()).await;
        Ok(1 + roles.len() >= configuration.quorum)
    }

    /// Whether too few members of the pool's log answer. False if that is not known.
    pub(crate) async fn lacks_quorum(&self) -> bool {
        let (Some(member), Ok(Some(manifest))) = (self.member(), self.manifest().await) else {
            return false;
        };
        let Some(configuration) = &manifest.configuration else { return false };
        let roles = self.ask_roles(&manifest, configuration, member.id()).await;
        1 + roles.len() < configuration.quorum
    }

    /// Asks the other members for their roles. Returns those of the members that answer soon.
    async fn ask_roles(
        &self,
        manifest: &Manifest,
        configuration: &Configuration,
        me: Uuid,
    ) -> Vec<Role> {
        let role_max = self.role_max();
        let mut asking = JoinSet::new();
        for other in configuration.members.iter().filter(|other| other.id != me) {
            let (cluster, node) = (self.cluster.clone(), NodeId(other.node));
            let question = Question::Role { pool: manifest.pool };
            asking.spawn(async move {
                // An owner that hangs is no owner.
                tokio::time::timeout(role_max, messages::ask(&cluster, node, &question)).await
            });
        }
        let mut roles = Vec::new();
        while let Some(asked) = asking.join_next().await {
            match asked {
                Ok(Ok(Ok(Answer::Role(Role::None {})))) => {}
                Ok(Ok(Ok(Answer::Role(role)))) => roles.push(role),
                _ => {}
            }
        }
        roles
    }

    /// Longest wait for an answer about a role.
    fn role_max(&self) -> Duration {
        (self.detection / 4).max(ROLE_MIN)
    }

    /// Whether another node owns the pool, and this one is a member of its log. False if that is not known.
    pub(crate) async fn is_owned_elsewhere(&self) -> bool {
        let (Some(member), Ok(Some(manifest))) = (self.member(), self.manifest().await) else {
            return false;
        };
        let configuration = manifest.configuration.as_ref();
        let is_member = configuration.is_some_and(|one| one.member(member.id()).is_some());
        is_member && manifest.owner.node_id != member.id()
    }

    /// Makes the log of a pool without members one with this node as its only member.
    async fn found_log(&self) -> Result<()> {
        // A start that ended before the link left one, and so did a time as a member of others.
        self.stop_member().await?;
        self.leave_dir();
        let open = opening::open(&self.pool, Opening::OrNew).await?;
        let founded = self.found_log_of(&open).await;
        let pool = open.ownership.manifest().pool;
        let closed = open.close().await;
        self.lock_dir().await?;
        founded.and(closed)?;
        self.start_member(pool).await
    }

    async fn found_log_of(&self, open: &OpenPool) -> Result<()> {
        let (pool, id) = (open.ownership.manifest().pool, open.node.node_id());
        // Before the link: a node that is named as a member has one.
        self.make_member(pool, id)?;
        let members = vec![self.member_of(self.cluster.node_id(), id)?];
        let next =
            Configuration { members, quorum: 1, degraded: Degraded::default(), away: Vec::new() };
        record(open, &next).await.map(drop)
    }

    /// Returns the entry of a configuration for the member `id` on a node.
    fn member_of(&self, node: NodeId, id: Uuid) -> Result<Member> {
        let nodes = self.cluster.nodes();
        let found = nodes.into_iter().find(|known| known.id == node).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("node {node} is not in the cluster"))
        })?;
        Ok(Member { id, node: node.0, node_name: found.name })
    }

    /// Resolves when this node is to take the pool over: it was asked to, or the owner is silent and it
    /// is this node's turn. Returns the way.
    pub(crate) async fn turn(&self) -> Opening {
        let mut pause = LOOK_PAUSE;
        loop {
            tokio::select! {
                () = self.asked.notified() => return Opening::OrNew,
                () = tokio::time::sleep(pause) => {}
            }
            let Some(member) = self.member() else { continue };
            let Some(silence) = member.local().silence().await else { continue };
            if silence < self.detection {
                self.is_alone.store(false, Ordering::Relaxed);
                pause = LOOK_PAUSE;
                continue;
            }
            match self.may_take_over(&member, silence).await {
                Ok(Some(opening)) => return opening,
                Ok(None) => pause = (pause + LOOK_PAUSE).min(LOOK_PAUSE_MAX),
                Err(error) => {
                    tracing::warn!(
                        error = %error.chain(),
                        "the owner of the pool is silent, and this node could not read who owns it"
                    );
                    tokio::time::sleep(self.detection).await;
                }
            }
        }
    }

    /// Returns how this node may take the pool from an owner that is silent; `None` if it may not.
    async fn may_take_over(
        &self,
        member: &EnsembleMembers,
        silence: Duration,
    ) -> Result<Option<Opening>> {
        let Some(manifest) = self.manifest().await? else { return Ok(None) };
        let Some(configuration) = &manifest.configuration else { return Ok(None) };
        let Some(rank) = rank(configuration, manifest.owner.node_id, member.id()) else {
            return Ok(None);
        };
        // The stand-in before this one has asked the others by then, and says that it takes the pool over.
        let role_max = self.role_max();
        let step = (self.detection / 2).max(2 * role_max);
        if silence < self.detection + step * rank {
            return Ok(None);
        }
        let roles = self.ask_roles(&manifest, configuration, member.id()).await;
        let hears_owner = roles.iter().any(|role| match role {
            Role::Owner { is_serving } => {
                *is_serving || silence < self.detection * CANDIDATE_SILENCES
            }
            Role::Member { silence_ms } => Duration::from_millis(*silence_ms) < self.detection,
            Role::None {} => false,
        });
        if hears_owner {
            return Ok(None);
        }
        // With this one.
        let answering = 1 + roles.len();
        if answering < configuration.quorum && self.may_go_alone(member, configuration).await {
            tracing::warn!(
                owner = %manifest.owner.host,
                "the owner of the pool is silent, and no other member of its log answers; this node takes the pool \
                 over, and goes on alone"
            );
            return Ok(Some(Opening::Alone));
        }
        if answering < configuration.quorum {
            // It would take the pool from an owner that others still reach, and could not serve it.
            if !self.is_alone.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    answering,
                    needed = configuration.quorum,
                    "the owner of the pool is silent, and too few members of its log answer; this node waits for them"
                );
            }
            return Ok(None);
        }
        tracing::warn!(
            owner = %manifest.owner.host,
            silence_ms = u64::try_from(silence.as_millis()).unwrap_or(u64::MAX),
            "the owner of the pool is silent; this node takes the pool over"
        );
        Ok(Some(Opening::OrNew))
    }

    /// Whether this node may take the pool over as its only member: by the pool's setting, and because its log
    /// has every write that was acknowledged (docs/protocol.md, "A quorum of all members").
    async fn may_go_alone(&self, member: &EnsembleMembers, configuration: &Configuration) -> bool {
        if configuration.degraded == Degraded::Block || configuration.recovery_quorum() != 1 {
            return false;
        }
        let state = member.local().state().await;
        state.is_ok_and(|(document, _)| document.proof == Proof::All)
    }

    async fn role(&self, pool: Uuid) -> Role {
        if self.dir.lock().is_none() {
            return Role::Owner { is_serving: self.passages.lock().is_some() };
        }
        let member = self.member().filter(|member| member.local().pool() == pool);
        match member {
            Some(member) => match member.local().silence().await {
                Some(silence) => Role::Member {
                    silence_ms: u64::try_from(silence.as_millis()).unwrap_or(u64::MAX),
                },
                None => Role::None {},
            },
            None => Role::None {},
        }
    }
}

/// Says what to do about a member whose log is gone. A copy from earlier would have forgotten what it acknowledged.
fn missing_log_advice(configuration: &Configuration) -> &'static str {
    match configuration.members.len() {
        1 => {
            "if the disk of the log is not mounted, mount it and start spindle again. No other node has the newest writes: if \
             the log is gone, `spindle serve --take-over` says how to go on with what the store has"
        }
        _ => {
            "if the disk of the log is not mounted, mount it and start spindle again. If the log is gone, remove the node \
             from the pool and add it again (`spindle pool members`); put no copy from earlier in its place"
        }
    }
}

fn no_member() -> Error {
    let what = "take the pool over: this node is no member of its log; `spindle pool members add` on the owner makes it \
                one";
    Error::new(ErrorKind::Invalid, what)
}

/// Returns the place of a member among the stand-ins of the owner; `None` if it is no member.
fn rank(configuration: &Configuration, owner: Uuid, me: Uuid) -> Option<u32> {
    let mut ids: Vec<Uuid> = configuration.members.iter().map(|member| member.id).collect();
    ids.sort_unstable();
    let first = ids.iter().position(|id| *id > owner).unwrap_or(0);
    ids.rotate_left(first);
    ids.retain(|id| *id != owner || owner == me);
    ids.iter().position(|id| *id == me).and_then(|rank| u32::try_from(rank).ok())
}

/// Creates the link with a configuration, and waits as long as its outcome is unknown.
async fn record(open: &OpenPool, next: &Configuration) -> Result<u64> {
    loop {
        match open.ownership.change_configuration(&open.node, next).await? {
            Changed::Ours(number) => return Ok(number),
            Changed::Fenced(error) => return Err(error),
            Changed::Unknown(error) => {
                tracing::warn!(
                    error = %error.chain(),
                    "could not learn whether the change of the log's members was recorded; asking again"
                );
                tokio::time::sleep(OUTCOME_PAUSE).await;
            }
        }
    }
}

/// Answers other nodes.
struct Answers(Weak<Roles>);

#[async_trait]
impl Handler for Answers {
    fn check(&self, _peer: NodeId, _pool: Option<Uuid>) -> Result<()> {
        Ok(())
    }

    async fn serve(&self, connection: Connection) {
        let Some(roles) = self.0.upgrade() else { return };
        let node = connection.peer();
        let answered = messages::answer(connection, |question| async move {
            match question {
                Question::Join { pool, name } => {
                    roles.join(pool, &name).await.map(|id| Answer::Member { id })
                }
                Question::Role { pool } => Ok(Answer::Role(roles.role(pool).await)),
                Question::TakeOver { pool, epoch } => {
                    roles.take_over_from(pool, Epoch(epoch)).await.map(|()| Answer::Begun {})
                }
                Question::Ask { pool, request } => roles.answer_passed_on(pool, *request).await,
                Question::LastMove {} => roles.own_last_move().map(|info| Answer::Moved { info }),
                Question::Measure { node } => measuring::answer(&roles, NodeId(node)).await,
            }
        });
        if let Err(error) = answered.await {
            tracing::debug!(%node, error = %error.chain(), "could not answer a node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::bare_environment;
    use crate::serve::tests::config;
    use cluster::NewNode;

    async fn prepared_in(place: &std::path::Path) -> (Arc<Roles>, Result<bool>) {
        let config = config(place, "a");
        let cluster = crate::node::open_in(config.dir()).unwrap().unwrap();
        let roles = Roles::start(&config, cluster).await.unwrap();
        let prepared = roles.prepare().await;
        (roles, prepared)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn start_that_ended_before_its_link_is_continued() {
        let place = tempfile::tempdir().unwrap();
        let plain = config(place.path(), "a");
        let open = opening::open(&pool_config(&plain), Opening::OrNew).await.unwrap();
        let (pool, id) = (open.ownership.manifest().pool, open.node.node_id());
        open.close().await.unwrap();
        let addresses = ["127.0.0.1:7400".to_owned()];
        let new = NewNode::new("a", &addresses);
        let cluster = Cluster::init(plain.dir(), new, bare_environment()).unwrap();
        let roles = Roles::start(&plain, cluster).await.unwrap();
        roles.make_member(pool, id).unwrap();
        drop(roles);
        // The first one finds a member that no configuration names, and the second one its own.
        for _ in 0..2 {
            let (roles, prepared) = prepared_in(place.path()).await;
            assert!(prepared.map_err(|error| error.chain()).unwrap());
            let manifest = roles.manifest().await.unwrap().unwrap();
            assert_eq!(manifest.configuration.unwrap().members.len(), 1);
            assert_eq!(roles.member().unwrap().id(), id);
            roles.stop_member().await.unwrap();
        }
        // Its log is lost. An owner of earlier, which knows no such member, asks for a new one.
        std::fs::remove_dir_all(place.path().join("a/log")).unwrap();
        let (roles, _) = prepared_in(place.path()).await;
        let error = roles.join(pool, &roles.pool.name).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{}", error.chain());
        assert!(roles.member().is_none());
    }

    #[test]
    fn stand_ins_follow_the_owner_in_turn() {
        let ids = [3, 1, 2].map(Uuid::from_u128);
        let member = |id| Member { id, node: id, node_name: "n".to_owned() };
        let members = ids.map(member).into();
        let configuration =
            Configuration { members, quorum: 2, degraded: Degraded::default(), away: Vec::new() };
        let ranks = |owner| {
            [1, 2, 3].map(|id| rank(&configuration, Uuid::from_u128(owner), Uuid::from_u128(id)))
        };
        assert_eq!(ranks(1), [Some(2), Some(0), Some(1)]);
        assert_eq!(ranks(2), [Some(1), Some(2), Some(0)]);
        assert_eq!(ranks(3), [Some(0), Some(1), Some(2)]);
        assert_eq!(ranks(9), [Some(0), Some(1), Some(2)]);
        assert_eq!(rank(&configuration, Uuid::from_u128(1), Uuid::from_u128(9)), None);
    }
}
