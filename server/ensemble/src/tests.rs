//! Three nodes in one process, with a network that a test cuts. The logs of the members are in memory,
//! and survive the end of a member as a disk does.

mod failures;
mod full_rings;
mod logs;
mod measured;
mod over_tls;
mod seeded;

use crate::local::{LocalMember, LocalOptions, OwnerRole};
use crate::member::{FoundLog, MemberLog};
use crate::note::Note;
use crate::owned::{OwnedLog, OwnedOptions, OwnersLog, Standing};
use crate::peers::{Link, Peers};
use crate::take_over::TakeOver;
use async_trait::async_trait;
use block::env::{Clock, ManualClock, SystemClock};
use block::{Epoch, Error, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use replication::{Answer, Batch, Configuration, LogIndex, MemberId, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;
use wal::Replicas;

/// A log in memory, and whether its disk refuses writes. A batch without bytes is a damaged one.
#[derive(Clone, Default)]
struct MemoryLog(Arc<Mutex<Vec<Batch>>>, Arc<AtomicBool>);

impl MemoryLog {
    fn index(&self) -> LogIndex {
        let mut index = LogIndex::new(Position::START);
        self.0.lock().iter().for_each(|batch| index.push(batch.position));
        index
    }
}

impl MemberLog for MemoryLog {
    fn write(&mut self, batches: &[Batch]) -> Result<()> {
        if self.1.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Io, "write: no space is left on the device"));
        }
        self.0.lock().extend_from_slice(batches);
        Ok(())
    }

    fn cut(&mut self, sequence: u64) -> Result<()> {
        self.0.lock().retain(|batch| batch.position.sequence <= sequence);
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset(&mut self, before: Position) -> Result<()> {
        panic!("nothing was released, and the log is to begin behind {before}");
    }

    fn release(&mut self, _trim_lsn: Lsn, _last: u64) {}

    fn start(&self) -> u64 {
        1
    }

    fn last(&self) -> u64 {
        self.index().tail().sequence
    }

    fn read(&self, sequence: u64, _bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        let log = self.0.lock();
        let later = log.iter().filter(|batch| batch.position.sequence > sequence);
        // Few at a time, so that a reader has to go on.
        let read: Vec<_> =
            later.take(2).map(|batch| (batch.position, batch.bytes.clone())).collect();
        match read.iter().position(|(_, bytes)| bytes.is_empty()) {
            Some(0) => Err(Error::new(ErrorKind::Corrupt, "read a damaged batch")),
            damaged => Ok(read.into_iter().take(damaged.unwrap_or(2)).collect()),
        }
    }
}

impl OwnersLog for MemoryLog {
    fn on_replicas(&self) {}

    fn fail(&self, _error: Error) {}

    fn start(&self) -> u64 {
        1
    }

    fn trim_lsn(&self) -> Lsn {
        Lsn::NONE
    }

    fn read_batches(&self, sequence: u64, bytes_max: usize) -> Result<Vec<(Position, Bytes)>> {
        self.read(sequence, bytes_max)
    }
}

/// The network between the nodes.
#[derive(Default)]
struct Net {
    members: Mutex<BTreeMap<MemberId, LocalMember>>,
    /// Pairs of nodes that do not reach each other.
    cut: watch::Sender<BTreeSet<(MemberId, MemberId)>>,
}

impl Net {
    /// Cuts a node off from all others, in both directions, or connects it again.
    fn cut_off(&self, ids: &[MemberId], node: usize, is_cut: bool) {
        let id = ids[node];
        self.cut.send_modify(|cut| {
            for other in ids.iter().filter(|other| **other != id) {
                for pair in [(id, *other), (*other, id)] {
                    match is_cut {
                        true => cut.insert(pair),
                        false => cut.remove(&pair),
                    };
                }
            }
        });
    }
}

/// The network, as one node sees it.
struct Port {
    net: Arc<Net>,
    from: MemberId,
}

#[async_trait]
impl Peers for Port {
    async fn connect(&self, member: MemberId) -> Result<Link> {
        let unavailable = || Error::new(ErrorKind::Unavailable, "the link is cut");
        let mut cut = self.net.cut.subscribe();
        let pair = (self.from, member);
        if cut.borrow().contains(&pair) {
            return Err(unavailable());
        }
        let there = self.net.members.lock().get(&member).cloned().ok_or_else(unavailable)?;
        let mut inner = there.link();
        let (requests, mut to_send) = mpsc::channel(64);
        let (to_receive, answers) = mpsc::channel(64);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = async { cut.wait_for(|cut| cut.contains(&pair)).await.is_ok() } => return,
                    request = to_send.recv() => match request {
                        Some(request) => {
                            if inner.requests.send(request).await.is_err() {
                                return;
                            }
                        }
                        None => return,
                    },
                    answer = inner.answers.recv() => match answer {
                        Some(answer) => {
                            if to_receive.send(answer).await.is_err() {
                                return;
                            }
                        }
                        None => return,
                    },
                }
            }
        });
        Ok(Link { requests, answers })
    }
}

struct Cluster {
    net: Arc<Net>,
    ids: Vec<MemberId>,
    logs: Vec<MemoryLog>,
    clock: Arc<dyn Clock>,
    dir: tempfile::TempDir,
}

const POOL: Uuid = Uuid::from_u128(99);

/// The identity of the page cache in all tests but those that replace it.
fn page_cache(_dir: &Path) -> Uuid {
    Uuid::from_u128(7)
}

fn options() -> OwnedOptions {
    OwnedOptions {
        lease: Duration::from_millis(150),
        heartbeat: Duration::from_millis(30),
        window_bytes: 64,
        reconnect: Duration::from_millis(5),
        ..OwnedOptions::default()
    }
}

impl Cluster {
    fn new() -> Cluster {
        Cluster::with_clock(Arc::new(SystemClock))
    }

    fn with_clock(clock: Arc<dyn Clock>) -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<MemberId> = (1..=3).map(Uuid::from_u128).collect();
        let logs: Vec<MemoryLog> = ids.iter().map(|_| MemoryLog::default()).collect();
        let net = Arc::new(Net::default());
        let cluster = Cluster { net, ids, logs, clock, dir };
        for (node, id) in cluster.ids.iter().enumerate() {
            let options = cluster.options(node);
            std::fs::create_dir(&options.dir).unwrap();
            LocalMember::create(&options, *id).unwrap();
            let member = LocalMember::start(options).unwrap();
            cluster.net.members.lock().insert(*id, member);
        }
        cluster
    }

    fn options(&self, node: usize) -> LocalOptions {
        let log = self.logs[node].clone();
        LocalOptions {
            dir: self.dir.path().join(node.to_string()),
            pool: POOL,
            clock: Arc::clone(&self.clock),
            open_log: Arc::new(move |_synced| {
                let found = FoundLog {
                    index: log.index(),
                    damaged: None,
                    page_cache: Uuid::from_u128(7),
                    has_failed: false,
                };
                Ok((Box::new(log.clone()), found))
            }),
        }
    }

    fn member(&self, node: usize) -> LocalMember {
        self.net.members.lock()[&self.ids[node]].clone()
    }

    /// Lets a node win `epoch` and take the pool over.
    async fn take_over(&self, node: usize, epoch: u64) -> Result<Owned> {
        self.take_over_with(node, epoch, self.configuration(epoch, 0..3)).await
    }

    /// Returns a configuration of some of the nodes, with a majority as its quorum.
    fn configuration(&self, number: u64, nodes: std::ops::Range<usize>) -> Configuration {
        let quorum = nodes.len() / 2 + 1;
        Configuration { number, members: self.ids[nodes].iter().copied().collect(), quorum }
    }

    async fn take_over_with(
        &self,
        node: usize,
        epoch: u64,
        configuration: Configuration,
    ) -> Result<Owned> {
        let port = Port { net: Arc::clone(&self.net), from: self.ids[node] };
        let taking = TakeOver {
            epoch: Epoch(epoch),
            configuration,
            trim_lsn: Lsn::NONE,
            peers: Arc::new(port),
            options: options(),
        };
        let local = self.member(node);
        let taken = tokio::time::timeout(Duration::from_secs(10), taking.run(&local));
        let taken = taken.await.expect("the take-over does not end")?;
        let owned = Owned {
            log: self.logs[node].clone(),
            replicas: taken.owned.replicas(),
            owned: taken.owned,
            epoch: Epoch(epoch),
            _role: taken.role,
        };
        assert_eq!(taken.quorum.position, owned.log.index().tail());
        owned.owned.attach(Box::new(owned.log.clone()));
        owned.owned.start();
        Ok(owned)
    }

    fn cut(&self, node: usize, is_cut: bool) {
        self.net.cut_off(&self.ids, node, is_cut);
    }
}

/// An owner, with the part of its write log that matters here.
struct Owned {
    log: MemoryLog,
    replicas: Arc<dyn Replicas>,
    owned: OwnedLog,
    epoch: Epoch,
    _role: OwnerRole,
}

impl Owned {
    /// Writes a batch on the own disk and hands it to the members. Returns its sequence.
    fn write(&self, content: u8, is_sync: bool) -> u64 {
        let sequence = self.log.index().tail().sequence + 1;
        let position = Position { epoch: self.epoch, sequence };
        let bytes = Bytes::from(vec![content; 16]);
        self.replicas.append(position, bytes.clone(), is_sync);
        self.log.clone().write(&[Batch { position, bytes }]).unwrap();
        self.replicas.on_own(sequence, sequence);
        sequence
    }

    async fn acknowledged(&self, sequence: u64) {
        until(|| self.replicas.acknowledged() >= sequence).await;
    }

    async fn open(&self) {
        self.write(0, true);
        self.owned.opened().await.unwrap();
    }
}

/// Waits until something holds, at most ten seconds.
async fn until(holds: impl Fn() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("it never held");
}

fn contents(log: &MemoryLog) -> Vec<u8> {
    log.0.lock().iter().map(|batch| batch.bytes[0]).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_member_does_not_hold_up_the_quorum_and_catches_up_later() {
    let cluster = Cluster::new();
    let owner = cluster.take_over(0, 1).await.unwrap();
    owner.open().await;
    cluster.cut(2, true);
    // More than the window has.
    for content in 1..=20 {
        let sequence = owner.write(content, content % 4 == 0);
        owner.acknowledged(sequence).await;
    }
    until(|| owner.replicas.committed() >= 21).await;
    assert!(contents(&cluster.logs[2]).len() < 21);
    cluster.cut(2, false);
    until(|| contents(&cluster.logs[2]) == contents(&owner.log)).await;
    let statuses = owner.owned.statuses();
    assert!(statuses[&cluster.ids[2]].is_connected && statuses.len() == 2, "{statuses:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successor_has_every_acknowledged_batch_and_the_deposed_owner_ends() {
    let cluster = Cluster::new();
    let first = cluster.take_over(0, 1).await.unwrap();
    first.open().await;
    for content in 1..=5 {
        let sequence = first.write(content, false);
        first.acknowledged(sequence).await;
    }
    cluster.cut(0, true);
    // The deposed owner's own disk takes it, and no quorum does.
    let unanswered = first.write(66, true);
    let second = cluster.take_over(1, 2).await.unwrap();
    assert!(!first.replicas.has_lease(), "a stale read is possible");
    second.open().await;
    let sequence = second.write(7, true);
    second.acknowledged(sequence).await;
    assert!(first.replicas.acknowledged() < unanswered);
    assert_eq!(contents(&second.log), [0, 1, 2, 3, 4, 5, 0, 7]);
    cluster.cut(0, false);
    let mut standing = first.owned.standing();
    let ended = standing.wait_for(|standing| matches!(standing, Standing::Superseded(_))).await;
    assert_eq!(*ended.unwrap(), Standing::Superseded(Epoch(2)));
    assert_eq!(first.owned.opened().await.unwrap_err().kind(), ErrorKind::Fenced);
    // As a member again, it gives up what was never acknowledged.
    cluster.member(0).leave_ownership().await.unwrap();
    until(|| contents(&cluster.logs[0]) == contents(&second.log)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn candidate_fetches_the_tail_that_it_lacks() {
    let cluster = Cluster::new();
    let first = cluster.take_over(0, 1).await.unwrap();
    first.open().await;
    cluster.cut(2, true);
    for content in 1..=9 {
        let sequence = first.write(content, false);
        first.acknowledged(sequence).await;
    }
    cluster.cut(2, false);
    cluster.cut(0, true);
    let second = cluster.take_over(2, 2).await.unwrap();
    second.open().await;
    assert_eq!(contents(&second.log), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]);
    // The third node wins the next epoch while the second one still runs, which then becomes a member.
    let (mut standing, deposed) = (second.owned.standing(), cluster.member(2));
    let leaving = tokio::spawn(async move {
        standing.wait_for(|standing| matches!(standing, Standing::Superseded(_))).await.unwrap();
        deposed.leave_ownership().await
    });
    let third = cluster.take_over(1, 3).await.unwrap();
    third.open().await;
    leaving.await.unwrap().unwrap();
    assert_eq!(*second.owned.standing().borrow(), Standing::Superseded(Epoch(3)));
    until(|| contents(&cluster.logs[2]) == contents(&third.log)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn candidate_takes_the_whole_log_after_a_damaged_one() {
    let cluster = Cluster::new();
    cluster.cut(0, true);
    let first = cluster.take_over(2, 1).await.unwrap();
    first.open().await;
    for content in 1..=9 {
        let sequence = first.write(content, false);
        first.acknowledged(sequence).await;
    }
    cluster.member(2).leave_ownership().await.unwrap();
    cluster.cut(0, false);
    cluster.cut(2, true);
    // The candidate hears of this one first, and reads a part of its log.
    cluster.logs[1].0.lock()[5].bytes = Bytes::new();
    let returning = async {
        until(|| cluster.logs[1].0.lock().len() == 5).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
        cluster.cut(2, false);
    };
    let (second, ()) = tokio::join!(cluster.take_over(0, 2), returning);
    let second = second.unwrap();
    second.open().await;
    assert_eq!(contents(&second.log), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_runs_out_while_a_machine_is_suspended() {
    let clock = ManualClock::new();
    let cluster = Cluster::with_clock(Arc::new(clock.clone()));
    let owner = cluster.take_over(0, 1).await.unwrap();
    owner.open().await;
    until(|| owner.replicas.has_lease()).await;
    cluster.cut(0, true);
    until(|| owner.owned.statuses().values().all(|one| !one.is_connected)).await;
    assert!(owner.replicas.has_lease(), "no time has passed");
    let promise = Request::Promise { epoch: Epoch(2) };
    let member = cluster.member(1);
    assert_eq!(member.ask(promise.clone()).await.unwrap(), None, "the owner has a lease");
    let begun = clock.now();
    clock.suspend(Duration::from_secs(1));
    assert!(!owner.replicas.has_lease(), "a stale read is possible");
    assert_eq!(member.silence().await, Some(Duration::from_secs(1)));
    let answer = member.ask(promise.clone()).await.unwrap();
    assert!(matches!(answer, Some(Answer::Promised { .. })), "{answer:?}");
    // The first request gave the candidate time to open the pool, and further ones give no more.
    assert_eq!((clock.now(), member.silence().await), (begun, Some(Duration::from_secs(1))));
    clock.suspend(Duration::from_secs(1));
    member.ask(promise).await.unwrap();
    assert_eq!(member.silence().await, Some(Duration::from_secs(2)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn successor_need_not_wait_for_an_owner_that_resigns() {
    // No lease runs out, as no time passes.
    let cluster = Cluster::with_clock(Arc::new(ManualClock::new()));
    let first = cluster.take_over(0, 1).await.unwrap();
    assert!(!first.owned.resign(), "it has not opened");
    first.open().await;
    let sequence = first.write(1, false);
    first.acknowledged(sequence).await;
    until(|| first.replicas.has_lease()).await;
    assert!(first.owned.resign());
    assert!(!first.replicas.has_lease() && !first.owned.resign());
    let second = cluster.take_over(1, 2).await.unwrap();
    second.open().await;
    assert_eq!(contents(&second.log), [0, 1, 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_without_a_quorum_acknowledges_nothing_and_loses_its_lease() {
    let cluster = Cluster::new();
    let owner = cluster.take_over(0, 1).await.unwrap();
    owner.open().await;
    until(|| owner.replicas.has_lease()).await;
    cluster.cut(0, true);
    let sequence = owner.write(1, true);
    until(|| !owner.replicas.has_lease()).await;
    assert!(owner.replicas.acknowledged() < sequence && owner.replicas.committed() < sequence);
    cluster.cut(0, false);
    owner.acknowledged(sequence).await;
    until(|| owner.replicas.has_lease()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_whose_disk_failed_for_a_while_counts_again() {
    let cluster = Cluster::new();
    let owner = cluster.take_over(0, 1).await.unwrap();
    owner.open().await;
    let failed = cluster.member(2);
    cluster.logs[2].1.store(true, Ordering::Relaxed);
    let sequence = owner.write(1, true);
    owner.acknowledged(sequence).await;
    let waiting = async {
        while failed.failure().await.is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("nothing tells");
    cluster.logs[2].1.store(false, Ordering::Relaxed);
    until(|| contents(&cluster.logs[2]) == contents(&owner.log)).await;
    assert!(failed.failure().await.is_none() && failed.silence().await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_gives_up_promises_to_the_next_one() {
    let cluster = Cluster::new();
    // Once before the log was opened, once afterwards.
    drop(cluster.take_over(0, 1).await.unwrap());
    let second = cluster.take_over(1, 2).await.unwrap();
    second.open().await;
    second.owned.stop();
    drop(second);
    // All three have to answer.
    cluster.cut(2, true);
    let third = cluster.take_over(1, 3).await.unwrap();
    third.open().await;
    let sequence = third.write(1, true);
    third.acknowledged(sequence).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn change_of_role_outlives_its_caller() {
    let cluster = Cluster::new();
    for epoch in 1..40 {
        let member = cluster.member(0);
        let port = Port { net: Arc::clone(&cluster.net), from: cluster.ids[0] };
        let members = cluster.ids.iter().copied().collect();
        let configuration = Configuration { number: epoch, members, quorum: 2 };
        let (epoch, peers) = (Epoch(epoch), Arc::new(port));
        let trim_lsn = Lsn::NONE;
        let taking = TakeOver { epoch, configuration, trim_lsn, peers, options: options() };
        // It is dropped at another moment each time.
        let time = Duration::from_micros(300 * epoch.0);
        drop(tokio::time::timeout(time, taking.run(&member)).await);
    }
    let owner = cluster.take_over(0, 40).await.unwrap();
    owner.open().await;
}

#[test]
fn one_member_of_a_directory_runs_at_a_time() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let cluster = Cluster::new();
    let member = cluster.member(0);
    let options = cluster.options(0);
    assert_eq!(LocalMember::find(&options).unwrap(), Some(member.id()));
    let second = LocalMember::start(options.clone()).map(drop);
    assert_eq!(second.unwrap_err().kind(), ErrorKind::Busy);
    drop(member);
    cluster.net.members.lock().clear();
    LocalMember::start(options).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_cannot_note_its_opening_batch_does_not_open() {
    let cluster = Cluster::new();
    let owner = cluster.take_over(0, 1).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join("member.note")).unwrap();
    owner.owned.keep(Note::open(dir.path(), Uuid::from_u128(7)).unwrap());
    owner.write(0, true);
    let opened = tokio::time::timeout(Duration::from_secs(10), owner.owned.opened()).await;
    assert_eq!(opened.expect("it waits for ever").unwrap_err().kind(), ErrorKind::Io);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go_while_the_owner_writes() {
    let cluster = Cluster::new();
    let owner = cluster.take_over_with(0, 1, cluster.configuration(1, 0..1)).await.unwrap();
    owner.open().await;
    let write = |content| {
        let sequence = owner.write(content, true);
        let owner = &owner;
        async move { owner.acknowledged(sequence).await }
    };
    for content in 1..=20 {
        write(content).await;
    }
    assert!(owner.owned.statuses().is_empty());
    for count in 2..=3 {
        let (number, member) = (count as u64, cluster.ids[count - 1]);
        let next = cluster.configuration(number, 0..count);
        if number == 2 {
            let change = owner.owned.begin_change(next.clone()).unwrap().unwrap();
            assert!(!change.may_record().unwrap(), "it has nothing yet");
            let sequence = owner.write(29, true);
            tokio::task::yield_now().await;
            assert!(owner.owned.acknowledged() < sequence, "the new member is needed");
            drop(change);
            owner.acknowledged(sequence).await;
        }
        owner.owned.bring_up(member).unwrap();
        assert!(owner.owned.bring_up(member).is_err());
        write(30).await;
        let change = owner.owned.begin_change(next.clone()).unwrap().unwrap();
        assert!(owner.owned.begin_change(next.clone()).unwrap().is_none(), "one at a time");
        until(|| change.may_record().unwrap()).await;
        write(31).await;
        match number {
            2 => change.end(number).unwrap(),
            // Its link is in the chain with another number.
            _ => {
                assert_eq!(change.end(9).unwrap_err().kind(), ErrorKind::Invalid);
                assert!(owner.owned.begin_change(next).unwrap().is_none());
                write(32).await;
            }
        }
    }
    // The second and third node do without the first.
    for content in 41..=45 {
        write(content).await;
    }
    cluster.cut(0, true);
    owner.owned.stop();
    drop(owner);
    let successor = cluster.take_over_with(1, 4, cluster.configuration(3, 0..3)).await.unwrap();
    successor.open().await;
    assert_eq!(contents(&successor.log)[27..], [41, 42, 43, 44, 45, 0]);
    // One that is no member any more is sent nothing.
    cluster.cut(0, false);
    until(|| contents(&cluster.logs[0]).len() == 33).await;
    let change = successor.owned.begin_change(cluster.configuration(5, 1..3)).unwrap().unwrap();
    until(|| change.may_record().unwrap()).await;
    change.end(5).unwrap();
    let sequence = successor.write(50, true);
    successor.acknowledged(sequence).await;
    until(|| contents(&cluster.logs[2]).len() == 34).await;
    assert_eq!(contents(&cluster.logs[0]).len(), 33);
    assert!(!successor.owned.statuses().contains_key(&cluster.ids[0]));
}
