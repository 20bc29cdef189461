//! A node: its machine, its process, and the daemon's decisions.
//!
//! The member, the owner, the take-over and the log are the product's. The decisions of the daemon are a model of `server/src/roles.rs` and `server/engine/src/opening.rs`: when a member
//! takes the pool over, and in which order an owner opens it.

use crate::chain::{Chain, Changed, Configuration, Member, Ownership};
use crate::data::Data;
use crate::executor::{MachineClock, World};
use crate::network::{Network, Parts, Port, Running};
use crate::oracle::Oracle;
use crate::printing::print;
use crate::report::Counts;
use crate::server::{DETECTION, Server};
use crate::stores::Stores;
use crate::tier::Tier;
use block::env::Clock;
use block::seal::{KEY_BYTES, PoolKey};
use block::simulated::{enter, simulated};
use block::{Epoch, Error, ErrorKind, Result};
use ensemble::{LocalMember, LocalOptions, OwnedLog, OwnedOptions, TakeOver, member_log};
use parking_lot::Mutex;
use replication::MemberId;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use uuid::Uuid;
use wal::{LogIdentity, LogOptions, LogSources, MachineDisk, ProcessDisk};

const POOL: Uuid = Uuid::from_u128(99);
/// Pause between two looks at the silence, which grows while the node may not take over.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
const LOOK_PAUSE_MAX: Duration = Duration::from_secs(2);
/// Number of batches that a new member may lack when clients begin to wait for it. Chosen by hand.
const NEAR: u64 = 8;
/// Longest time of a change of the members. Chosen by hand.
const CHANGE_MAX: Duration = Duration::from_secs(20);

/// The surroundings of all nodes. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) world: World,
    pub(crate) network: Network,
    pub(crate) chain: Chain,
    pub(crate) tier: Tier,
    pub(crate) stores: Stores,
    pub(crate) oracle: Oracle,
    pub(crate) counts: Counts,
    /// The nodes that should keep the log.
    pub(crate) wanted: Arc<Mutex<BTreeSet<usize>>>,
    /// Told when an owner is about to record a change of the members.
    pub(crate) changing: Arc<Notify>,
    /// The member of each machine.
    pub(crate) members: Arc<Mutex<Vec<MemberId>>>,
}

/// A machine with its disk. It outlives the processes of its node.
pub(crate) struct Machine {
    pub(crate) node: usize,
    site: Site,
    dir: PathBuf,
    disk: MachineDisk,
    process: Option<(Running, ProcessDisk)>,
    clock: MachineClock,
    pub(crate) asked: Arc<Notify>,
    /// Directories made here.
    wipe_count: u128,
    /// A bit of its log was flipped.
    is_flipped: bool,
}

/// The daemon of a node.
struct Daemon {
    node: usize,
    site: Site,
    disk: ProcessDisk,
    clock: MachineClock,
    local: LocalMember,
    running: Running,
    asked: Arc<Notify>,
}

pub(crate) fn key() -> PoolKey {
    PoolKey::new([3; KEY_BYTES])
}

fn log_options() -> LogOptions {
    LogOptions {
        ring_bytes: 4 << 20,
        file_bytes: 256 << 10,
        generation_bytes_max: 1 << 20,
        ..LogOptions::default()
    }
}

fn owned_options() -> OwnedOptions {
    OwnedOptions {
        window_bytes: 64 << 10,
        request_bytes: 32 << 10,
        under_way_count: 16,
        silence: Duration::from_secs(2),
        ..OwnedOptions::for_detection(DETECTION)
    }
}

/// Returns the identity of a node's directory: it has had so many.
pub(crate) fn node_id(node: usize, wipe_count: u128) -> MemberId {
    Uuid::from_u128(((node as u128 + 1) << 64) + wipe_count)
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts = self.process.as_ref().and_then(|(running, _)| running.parts());
        let server = parts.as_ref().and_then(|parts| parts.server.as_ref());
        f.debug_struct("Machine")
            .field("node", &self.node)
            .field("is_candidate", &parts.as_ref().map(|parts| parts.is_candidate))
            .field("epoch", &server.map(|server| server.epoch))
            .field("log", &server.map(|server| server.log.status()))
            .finish_non_exhaustive()
    }
}

impl Machine {
    pub(crate) fn new(site: &Site, node: usize, under: &Path) -> Machine {
        let world = &site.world;
        let ahead_ppm = i64::try_from(world.below(8000)).expect("small") - 4000;
        let clock = MachineClock::new(world, ahead_ppm, Duration::ZERO);
        let disk = MachineDisk::new(world.seed());
        let (site, asked) = (site.clone(), Arc::default());
        let dir = under.join(node.to_string());
        let mut machine = Machine {
            node,
            site,
            dir,
            disk,
            process: None,
            clock,
            asked,
            wipe_count: 0,
            is_flipped: false,
        };
        machine.make_dir();
        machine
    }

    fn log_dir(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Makes a directory with a new identity and an empty log.
    fn make_dir(&mut self) {
        self.wipe_count += 1;
        let id = node_id(self.node, self.wipe_count);
        std::fs::create_dir_all(self.log_dir()).expect("make a directory");
        LocalMember::create(&self.options(&self.disk.process()), id).expect("make a member");
        self.site.members.lock()[self.node] = id;
    }

    fn options(&self, disk: &ProcessDisk) -> LocalOptions {
        let (machine, disk, node) = (self.disk.clone(), disk.clone(), self.node);
        LocalOptions {
            dir: self.log_dir(),
            pool: POOL,
            clock: Arc::new(self.clock.clone()),
            open_log: Arc::new(move |synced| {
                let (log, found) = disk.open_follower(POOL.into_bytes(), log_options())?;
                let page_cache = ((node as u128) << 64) + u128::from(machine.mount()) + 1;
                member_log(log, &found, Uuid::from_u128(page_cache), synced)
            }),
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.process.is_some()
    }

    /// Starts the node's process.
    pub(crate) fn start(&mut self) {
        let world = &self.site.world;
        let process = world.new_process();
        let (executor, disk) = (world.executor(process), self.disk.process());
        let local = match enter(&executor, || LocalMember::start(self.options(&disk))) {
            Ok(local) => local,
            // The flipped bit was in the header of a file: an operator replaces the directory.
            Err(error) if error.kind() == ErrorKind::Corrupt && self.is_flipped => {
                self.site.counts.add("directories replaced");
                self.wipe();
                return self.start();
            }
            Err(error) => {
                let failure = format!("node {} does not start: {}", self.node, error.chain());
                return self.site.oracle.fail(failure);
            }
        };
        let parts = Parts { local: local.clone(), server: None, is_candidate: false };
        let running = Running {
            process,
            executor: Arc::clone(&executor),
            member: local.id(),
            parts: Arc::new(Mutex::new(Some(parts))),
        };
        print(world, format_args!("node {}: process {process} of {}", self.node, local.id()));
        self.site.network.set_running(self.node, Some(running.clone()));
        self.process = Some((running.clone(), disk.clone()));
        let daemon = Daemon {
            node: self.node,
            site: self.site.clone(),
            disk,
            clock: self.clock.clone(),
            local,
            running,
            asked: Arc::clone(&self.asked),
        };
        executor.spawn(Box::pin(daemon.run()));
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        let Some((running, disk)) = self.process.take() else { return };
        disk.kill();
        self.site.network.set_running(self.node, None);
        self.site.world.kill(running.process);
        let parts = running.parts.lock().take();
        enter(&running.executor, || drop(parts));
    }

    /// Kills the process and cuts the power.
    pub(crate) fn cut_power(&mut self) {
        self.kill();
        self.disk.cut_power();
        self.clock = MachineClock::new(&self.site.world, 0, self.site.world.now());
    }

    /// Kills the process, and mounts the file system anew.
    pub(crate) fn remount(&mut self) {
        self.kill();
        self.disk.remount();
    }

    /// Kills the process, and replaces the directory by an empty one.
    pub(crate) fn wipe(&mut self) {
        self.kill();
        std::fs::remove_dir_all(&self.dir).expect("remove a directory");
        self.disk.wipe();
        self.is_flipped = false;
        self.make_dir();
    }

    /// Flips a bit of its log, if there is one.
    pub(crate) fn flip(&mut self) -> bool {
        self.is_flipped |= self.disk.flip();
        self.is_flipped
    }

    /// Flips a bit of its newest batch, if there is one.
    pub(crate) fn flip_newest(&mut self) -> bool {
        self.is_flipped |= self.disk.flip_newest();
        self.is_flipped
    }

    /// A bit of its log was flipped, and nothing may have noticed yet.
    pub(crate) fn is_flipped(&self) -> bool {
        self.is_flipped
    }

    pub(crate) fn write_back(&self) {
        self.disk.write_back();
    }

    pub(crate) fn stop(&self, is_stopped: bool) {
        if let Some((running, _)) = &self.process {
            self.site.world.stop(running.process, is_stopped);
        }
    }
}

/// Returns the configuration of these nodes, whose members have these identities.
pub(crate) fn configuration(ids: &[MemberId], nodes: impl Iterator<Item = usize>) -> Configuration {
    let members: Vec<Member> = nodes.map(|node| Member { id: ids[node], node }).collect();
    let quorum = members.len() / 2 + 1;
    Configuration { members, quorum }
}

fn held(number: u64, configuration: &Configuration) -> replication::Configuration {
    let members = configuration.members.iter().map(|member| member.id).collect();
    replication::Configuration { number, members, quorum: configuration.quorum }
}

/// Returns the place of a member among the stand-ins of the owner.
fn rank(configuration: &Configuration, owner: MemberId, me: MemberId) -> Option<u32> {
    let mut ids: Vec<MemberId> = configuration.members.iter().map(|member| member.id).collect();
    ids.sort_unstable();
    let first = ids.iter().position(|id| *id > owner).unwrap_or(0);
    ids.rotate_left(first);
    ids.retain(|id| *id != owner || owner == me);
    ids.iter().position(|id| *id == me).and_then(|rank| u32::try_from(rank).ok())
}

impl Daemon {
    async fn sleep(&self, time: Duration) {
        simulated().expect("a daemon sleeps").sleep(time).await;
    }

    fn print(&self, line: std::fmt::Arguments<'_>) {
        print(&self.site.world, format_args!("node {}: {line}", self.node));
    }

    async fn run(self) {
        let mut was_ours = self.was_ours().await;
        loop {
            if !was_ours {
                self.turn().await;
            }
            was_ours = false;
            self.running.change(|parts| parts.is_candidate = true);
            let served = self.serve().await;
            self.running.change(|parts| (parts.server, parts.is_candidate) = (None, false));
            match served {
                Err(error) if error.kind() == ErrorKind::Fenced => {
                    self.site.counts.add("owners superseded");
                }
                Err(error) => {
                    self.print(format_args!("does not serve: {}", error.chain()));
                    self.site.counts.add("openings that failed");
                    self.sleep(Duration::from_millis(500)).await;
                }
                Ok(()) => {}
            }
        }
    }

    async fn was_ours(&self) -> bool {
        self.site.chain.newest().await.is_ok_and(|newest| newest.owner == self.local.id())
    }

    /// Resolves when this node is to take the pool over.
    async fn turn(&self) {
        let mut pause = LOOK_PAUSE;
        loop {
            tokio::select! {
                biased;
                () = self.asked.notified() => return,
                () = self.sleep(pause) => {}
            }
            let Some(silence) = self.local.silence().await else { continue };
            if silence < DETECTION {
                pause = LOOK_PAUSE;
                continue;
            }
            match self.may_take_over(silence).await {
                Ok(true) => return,
                Ok(false) => pause = (pause + LOOK_PAUSE).min(LOOK_PAUSE_MAX),
                Err(_) => self.sleep(DETECTION).await,
            }
        }
    }

    async fn may_take_over(&self, silence: Duration) -> Result<bool> {
        let manifest = self.site.chain.newest().await?;
        let configuration = &manifest.configuration;
        let me = self.local.id();
        let Some(rank) = rank(configuration, manifest.owner, me) else { return Ok(false) };
        if silence < DETECTION + DETECTION * rank {
            return Ok(false);
        }
        let mut answering = 1;
        for member in configuration.members.iter().filter(|member| member.id != me) {
            let answered = self.site.network.ask((self.node, member.node), |running| async move {
                let Parts { local, server, is_candidate } = running.parts()?;
                Some((server.is_some(), is_candidate, local.silence().await))
            });
            let hears_owner = match answered.await.flatten() {
                None | Some((false, false, None)) => continue,
                Some((is_serving, true, _)) => is_serving || silence < DETECTION * 10,
                Some((is_serving, false, there)) => {
                    is_serving || there.is_some_and(|there| there < DETECTION)
                }
            };
            if hears_owner {
                return Ok(false);
            }
            answering += 1;
        }
        Ok(answering >= configuration.quorum)
    }

    /// Takes the pool over and serves it until another owner has it.
    async fn serve(&self) -> Result<()> {
        let ownership = self.site.chain.acquire(self.local.id()).await?;
        self.site.counts.add("epochs");
        self.print(format_args!("takes the pool over with {:?}", ownership.manifest()));
        let opened = self.open(&ownership).await;
        let (server, owned, _role) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                ownership.give_back().await;
                return Err(error);
            }
        };
        self.site.counts.add("owners opened");
        self.print(format_args!("serves the pool in epoch {}", server.epoch));
        self.running.change(|parts| parts.server = Some(Arc::clone(&server)));
        let destaging = Arc::clone(&server).destage(self.site.world.clone());
        let keeping = Arc::clone(&server).keep_segments(self.site.world.clone());
        let executor = simulated().expect("a daemon serves");
        executor.spawn(Box::pin(destaging));
        executor.spawn(Box::pin(keeping));
        drop(executor);
        let error = tokio::select! {
            biased;
            error = server.ended() => error,
            error = self.keep_members(&ownership, &owned) => error,
        };
        self.running.change(|parts| parts.server = None);
        self.print(format_args!("ends: {}", error.chain()));
        server.log.fail(error.clone());
        owned.stop();
        Err(error)
    }

    async fn open(
        &self,
        ownership: &Ownership,
    ) -> Result<(Arc<Server>, OwnedLog, ensemble::OwnerRole)> {
        let manifest = ownership.manifest();
        let epoch = manifest.epoch;
        // As long as the product's metadata database takes.
        self.sleep(self.site.world.ms(20, 400)).await;
        let destaged = self.site.tier.open(epoch)?;
        let taking = TakeOver {
            epoch,
            configuration: held(manifest.number, &manifest.configuration),
            trim_lsn: destaged,
            peers: Arc::new(Port { network: self.site.network.clone(), node: self.node }),
            options: owned_options(),
        };
        let taken = taking.run(&self.local).await?;
        let identity = LogIdentity {
            pool: POOL.into_bytes(),
            epoch,
            boot_id: [7; 16],
            served_epoch: Epoch(0),
            configuration: manifest.number,
        };
        let sources = LogSources { quorum: Some(taken.quorum), ..LogSources::default() };
        let clock: Arc<dyn Clock> = Arc::new(self.clock.clone());
        let opened = self.disk.open_log(identity, key(), log_options(), destaged, &sources, clock);
        let (log, recovery) = opened?;
        taken.owned.attach(Box::new(log.downgrade()));
        taken.owned.start();
        self.local.opened().await?;
        let is_loss = recovery.tail_loss.is_some();
        self.site.oracle.on_opened(epoch.0, format!("node {}", self.node), is_loss);
        if is_loss {
            self.site.counts.add("openings with lost writes");
            log.settle_tail();
        }
        let data = Data::new(&self.site.tier, &self.site.stores, self.node, epoch);
        let server = Arc::new(Server::new(log, data, epoch));
        Ok((server, taken.owned, taken.role))
    }

    /// Brings the members to the nodes that should keep the log, one change at a time. Returns the error
    /// that ends the owner.
    async fn keep_members(&self, ownership: &Ownership, owned: &OwnedLog) -> Error {
        loop {
            self.sleep(Duration::from_millis(500)).await;
            let Some(next) = self.next_members(ownership) else { continue };
            match self.change_members(ownership, owned, &next).await {
                Ok(true) => self.site.counts.add("changes of the members"),
                Ok(false) => self.site.counts.add("changes of the members given up"),
                Err(error) => return error,
            }
        }
    }

    /// Returns the next configuration: one member more or less.
    fn next_members(&self, ownership: &Ownership) -> Option<Configuration> {
        let now = ownership.manifest().configuration;
        let (wanted, ids) = (self.site.wanted.lock().clone(), self.site.members.lock().clone());
        let mut next = now.clone();
        let missing = wanted.iter().find(|node| now.member(ids[**node]).is_none());
        let is_stale = |member: &&Member| {
            let is_wanted = wanted.iter().any(|node| ids[*node] == member.id);
            !is_wanted && member.id != self.local.id()
        };
        // A node has one member, so that of a wiped directory leaves first.
        let stale = now.members.iter().find(is_stale).map(|member| member.id);
        if let Some(stale) = stale {
            next.members.retain(|member| member.id != stale);
        } else {
            let added = configuration(&ids, missing.copied().into_iter());
            next.members.push(added.members.into_iter().next()?);
        }
        next.quorum = next.members.len() / 2 + 1;
        Some(next)
    }

    /// Returns false if the change was given up.
    async fn change_members(
        &self,
        ownership: &Ownership,
        owned: &OwnedLog,
        next: &Configuration,
    ) -> Result<bool> {
        let now = ownership.manifest();
        let number = now.number + 1;
        let is_new = |member: &&Member| now.configuration.member(member.id).is_none();
        let added = next.members.iter().find(is_new).map(|member| member.id);
        let until = self.clock.now() + CHANGE_MAX;
        if let Some(added) = added {
            owned.bring_up(added)?;
            while !owned
                .catch_up(added)
                .is_some_and(|up| up.written > 0 && up.written + NEAR >= up.acknowledged)
            {
                self.sleep(Duration::from_millis(20)).await;
                if self.clock.now() > until {
                    owned.give_up(added);
                    return Ok(false);
                }
            }
        }
        let Some(change) = owned.begin_change(held(number, next))? else { return Ok(false) };
        while !change.may_record()? {
            self.sleep(Duration::from_millis(20)).await;
            if self.clock.now() > until {
                drop(change);
                added.into_iter().for_each(|added| owned.give_up(added));
                return Ok(false);
            }
        }
        self.site.changing.notify_one();
        loop {
            match ownership.change_configuration(next).await {
                Changed::Ours(number) => return change.end(number).map(|()| true),
                Changed::Fenced(error) => return Err(error),
                Changed::Unknown => self.sleep(Duration::from_secs(1)).await,
            }
        }
    }
}
