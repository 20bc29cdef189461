//! The same three nodes with logs on disk: write logs of owners over the rings of members.

use super::{Net, POOL, Port, options, page_cache, until};
use crate::disk_log::open_ring;
use crate::local::{LocalMember, LocalOptions, OwnerRole};
use crate::owned::{OwnedLog, Standing};
use crate::peers::Peers;
use crate::take_over::TakeOver;
use block::env::SystemClock;
use block::seal::{KEY_BYTES, PoolKey};
use block::{Epoch, ErrorKind, Lsn, VolumeId};
use bytes::Bytes;
use replication::{Configuration, MemberId, Proof};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;
use wal::{EntryKind, Log, LogIdentity, LogOptions, LogSources, NewEntry, Recovery, Source, Wait};

pub(super) const VOLUME: VolumeId = VolumeId(1);

pub(super) fn log_options() -> LogOptions {
    LogOptions {
        ring_bytes: 16 << 20,
        file_bytes: 1 << 20,
        generation_bytes_max: 8 << 20,
        ..LogOptions::default()
    }
}

pub(super) struct Nodes {
    pub(super) net: Arc<Net>,
    pub(super) ids: Vec<MemberId>,
    /// The sizes of each node's ring.
    rings: Vec<LogOptions>,
    dir: tempfile::TempDir,
}

/// An owner with its open write log.
pub(super) struct Open {
    pub(super) log: Log,
    pub(super) owned: OwnedLog,
    pub(super) recovery: Recovery,
    pub(super) role: OwnerRole,
}

impl Nodes {
    pub(super) fn new() -> Nodes {
        Nodes::with_rings([log_options(); 3])
    }

    pub(super) fn with_rings(rings: [LogOptions; 3]) -> Nodes {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<MemberId> = (1..=3).map(Uuid::from_u128).collect();
        let nodes = Nodes { net: Arc::new(Net::default()), ids, rings: rings.to_vec(), dir };
        for node in 0..3 {
            std::fs::create_dir(nodes.log_dir(node)).unwrap();
            LocalMember::create(&nodes.local_options(node), nodes.ids[node]).unwrap();
            nodes.start(node);
        }
        nodes
    }

    pub(super) fn log_dir(&self, node: usize) -> PathBuf {
        self.dir.path().join(format!("log{node}"))
    }

    fn local_options(&self, node: usize) -> LocalOptions {
        LocalOptions {
            dir: self.log_dir(node),
            pool: POOL,
            clock: Arc::new(SystemClock),
            open_log: open_ring(self.log_dir(node), POOL, self.rings[node], page_cache),
        }
    }

    /// Starts the member of a node, and replaces the one that ran there.
    pub(super) fn start(&self, node: usize) {
        self.net.members.lock().remove(&self.ids[node]);
        let member = LocalMember::start(self.local_options(node)).unwrap();
        self.net.members.lock().insert(self.ids[node], member);
    }

    /// Gives a node an empty directory, and starts a member with the same identity in it.
    pub(super) fn wipe(&self, node: usize) {
        self.net.members.lock().remove(&self.ids[node]);
        std::fs::rename(self.log_dir(node), self.dir.path().join("wiped")).unwrap();
        std::fs::create_dir(self.log_dir(node)).unwrap();
        LocalMember::create(&self.local_options(node), self.ids[node]).unwrap();
        self.start(node);
    }

    pub(super) fn member(&self, node: usize) -> LocalMember {
        self.net.members.lock()[&self.ids[node]].clone()
    }

    pub(super) async fn take_over(&self, node: usize, epoch: u64) -> Open {
        self.take_over_at(node, epoch, Lsn::NONE).await
    }

    /// Like [`Nodes::take_over`], when everything up to `destaged` is in the store.
    pub(super) async fn take_over_at(&self, node: usize, epoch: u64, destaged: Lsn) -> Open {
        let port = Arc::new(Port { net: Arc::clone(&self.net), from: self.ids[node] });
        let taking = TakeOver { trim_lsn: destaged, ..taking(&self.ids, port, epoch) };
        Open::by(&self.member(node), taking, &self.log_dir(node)).await
    }

    pub(super) fn cut(&self, node: usize, is_cut: bool) {
        self.net.cut_off(&self.ids, node, is_cut);
    }
}

/// Returns the take-over with `epoch` by one of three nodes.
pub(super) fn taking(ids: &[MemberId], peers: Arc<dyn Peers>, epoch: u64) -> TakeOver {
    let members = ids.iter().copied().collect();
    let configuration = Configuration { number: epoch, members, quorum: 2 };
    TakeOver { epoch: Epoch(epoch), configuration, trim_lsn: Lsn::NONE, peers, options: options() }
}

impl Open {
    /// Takes the pool over with `epoch`, and opens the write log in `dir`.
    pub(super) async fn new(
        member: &LocalMember,
        ids: &[MemberId],
        peers: Arc<dyn Peers>,
        epoch: u64,
        dir: &Path,
    ) -> Open {
        Open::by(member, taking(ids, peers, epoch), dir).await
    }

    pub(super) async fn by(member: &LocalMember, taking: TakeOver, dir: &Path) -> Open {
        let epoch = taking.epoch;
        let open = Open::unsent(member, taking, dir).await;
        open.owned.attach(Box::new(open.log.downgrade()));
        open.owned.start();
        let opened = tokio::time::timeout(Duration::from_secs(10), member.opened());
        match opened.await {
            Ok(opened) => opened.unwrap(),
            Err(_) => {
                panic!("no quorum opens the log of epoch {epoch}: {:?}", open.owned.statuses())
            }
        }
        open
    }

    /// Opens the write log, and sends nothing of it.
    async fn unsent(member: &LocalMember, taking: TakeOver, dir: &Path) -> Open {
        let (epoch, destaged) = (taking.epoch, taking.trim_lsn);
        let taken = tokio::time::timeout(Duration::from_secs(10), taking.run(member));
        let taken = taken.await.expect("the take-over does not end").unwrap();
        let identity = LogIdentity {
            pool: POOL.into_bytes(),
            epoch,
            boot_id: [7; 16],
            served_epoch: Epoch(0),
            configuration: epoch.0,
        };
        let sources = LogSources { quorum: Some(taken.quorum), ..LogSources::default() };
        let dir = dir.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let key = PoolKey::new([3; KEY_BYTES]);
            Log::open_from(&dir, identity, key, log_options(), destaged, &sources)
        });
        let (log, recovery) = opened.await.unwrap().unwrap();
        Open { log, owned: taken.owned, recovery, role: taken.role }
    }

    /// Writes a sector that says its number.
    pub(super) async fn write(&self, sector: u64) -> block::Result<Lsn> {
        let payload = Bytes::from(vec![sector as u8; 512]);
        let (volume, kind) = (VOLUME, EntryKind::Write);
        let entry = NewEntry { volume, kind, start_sector: sector, sector_count: 1, payload };
        self.log.append(entry, Wait::Written).await
    }

    /// Checks that the sectors read as they were written.
    pub(super) async fn check(&self, sectors: u64) {
        let pieces = self.log.overlay().lookup(VOLUME, 0, sectors);
        let mut next = 0;
        for piece in pieces {
            assert_eq!(piece.start_sector, next);
            next += piece.sector_count;
            let bytes = match piece.source {
                Source::Payload(bytes) => bytes,
                Source::LogResident(place) => self.log.read(&place).await.unwrap().unwrap(),
                other => panic!("sector {} is {other:?}", piece.start_sector),
            };
            for (sector, bytes) in (piece.start_sector..).zip(bytes.chunks(512)) {
                assert!(bytes.iter().all(|byte| *byte == sector as u8), "sector {sector}");
            }
        }
        assert_eq!(next, sectors);
    }

    /// Ends as a process that is killed: nothing more is written or sent.
    pub(super) fn kill(self) {
        self.owned.stop();
        self.log.fail(block::Error::new(ErrorKind::Io, "the process was killed"));
        std::mem::forget(self.role); // nobody is left to end it
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_the_owner() {
    let nodes = Nodes::new();
    let first = nodes.take_over(0, 1).await;
    for sector in 0..100 {
        first.write(sector).await.unwrap();
    }
    first.check(100).await;
    nodes.cut(0, true);
    first.kill();
    let second = nodes.take_over(1, 2).await;
    assert_eq!((second.recovery.tail_loss, second.recovery.last_lsn), (None, Lsn(100)));
    second.check(100).await;
    for sector in 100..200 {
        second.write(sector).await.unwrap();
    }
    assert!(second.log.flush().await.unwrap() >= Lsn(200));
    // The first owner's node comes back, gives up what only it has, and takes the pool again.
    nodes.cut(0, false);
    nodes.start(0);
    let tail = nodes.member(0);
    let all = second.owned.replicas().acknowledged();
    let caught_up = async {
        while tail.state().await.unwrap().1.tail().sequence < all {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), caught_up).await.expect("it does not catch up");
    nodes.cut(1, true);
    second.kill();
    let third = nodes.take_over(0, 3).await;
    third.check(200).await;
    third.write(200).await.unwrap();
    third.check(201).await;
    third.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_ended_before_its_first_message_takes_the_log_of_the_next() {
    let nodes = Nodes::new();
    let port = Arc::new(Port { net: Arc::clone(&nodes.net), from: nodes.ids[0] });
    let first = taking(&nodes.ids, port, 1);
    let first = Open::unsent(&nodes.member(0), first, &nodes.log_dir(0)).await;
    first.kill();
    nodes.cut(0, true);
    // Both have begun the log of the pool.
    let second = nodes.take_over(1, 2).await;
    for sector in 0..10 {
        second.write(sector).await.unwrap();
    }
    nodes.cut(0, false);
    nodes.start(0);
    let all = second.owned.replicas().acknowledged();
    until(|| second.owned.statuses()[&nodes.ids[0]].written >= all).await;
    nodes.cut(2, true);
    second.write(10).await.unwrap();
    nodes.cut(2, false);
    nodes.cut(1, true);
    second.kill();
    let third = nodes.take_over(0, 3).await;
    third.check(11).await;
    third.write(11).await.unwrap();
    third.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deposed_owner_fails_its_writes_and_serves_no_read() {
    let nodes = Nodes::new();
    let first = nodes.take_over(0, 1).await;
    first.write(0).await.unwrap();
    first.log.await_lease().await.unwrap();
    nodes.cut(0, true);
    let second = nodes.take_over(2, 2).await;
    second.check(1).await;
    let unanswered = tokio::spawn({
        let log = first.log.clone();
        let payload = Bytes::from(vec![9; 512]);
        let (volume, kind) = (VOLUME, EntryKind::Write);
        let entry = NewEntry { volume, kind, start_sector: 0, sector_count: 1, payload };
        async move { log.append(entry, Wait::Written).await }
    });
    let reading = tokio::spawn({
        let log = first.log.clone();
        async move { log.await_lease().await }
    });
    until(|| !first.owned.replicas().has_lease()).await;
    second.write(0).await.unwrap();
    nodes.cut(0, false);
    let kind = |result: block::Result<()>| result.unwrap_err().kind();
    assert_eq!(kind(unanswered.await.unwrap().map(drop)), ErrorKind::Fenced);
    assert_eq!(kind(reading.await.unwrap()), ErrorKind::Fenced);
    assert_eq!(*first.owned.standing().borrow(), Standing::Superseded(Epoch(2)));
    second.check(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_lacks_released_batches_is_reset_and_catches_up() {
    let nodes = Nodes::new();
    let owner = nodes.take_over(0, 1).await;
    owner.write(0).await.unwrap();
    nodes.cut(2, true);
    // Several times the ring, released as the data tier would.
    for round in 0..40 {
        let payload = Bytes::from(vec![round; 1 << 20]);
        let (volume, kind) = (VOLUME, EntryKind::Write);
        let sector_count = (1 << 20) / 512;
        let entry = NewEntry {
            volume,
            kind,
            start_sector: 0,
            sector_count,
            payload: payload.slice(..256 << 10),
        };
        let entry = NewEntry { sector_count: (256 << 10) / 512, ..entry };
        for _ in 0..4 {
            owner.log.append(entry.clone(), Wait::Written).await.unwrap();
        }
        owner.log.flush().await.unwrap();
        if let Some(generation) = owner.log.freeze() {
            owner.log.make_durable(generation.last_lsn()).await.unwrap();
            owner.log.release(&generation);
        }
    }
    assert!(owner.log.first_batch() > 10, "nothing was released");
    nodes.cut(2, false);
    let (tail, all) = (nodes.member(2), owner.owned.replicas().acknowledged());
    let caught_up = async {
        while tail.state().await.unwrap().1.tail().sequence < all {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), caught_up).await.expect("it does not catch up");
    assert!(owner.owned.statuses()[&nodes.ids[2]].resets >= 1);
    owner.write(1).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_opens_proves_its_own_log() {
    let nodes = Nodes::new();
    let first = nodes.take_over(0, 1).await;
    first.write(0).await.unwrap();
    assert!(first.log.flush().await.unwrap() >= Lsn(1));
    first.kill();
    // Another kernel or mount: the log proves what was synced only.
    nodes.net.members.lock().remove(&nodes.ids[0]);
    let open_log = open_ring(nodes.log_dir(0), POOL, log_options(), |_dir| Uuid::from_u128(8));
    let rebooted = LocalOptions { open_log, ..nodes.local_options(0) };
    let member = LocalMember::start(rebooted).unwrap();
    assert_eq!(member.state().await.unwrap().0.proof, Proof::Synced);
    assert_eq!(member.opened().await.unwrap_err().kind(), ErrorKind::Unavailable, "no owner");
    nodes.net.members.lock().insert(nodes.ids[0], member.clone());
    let second = nodes.take_over(0, 2).await;
    second.check(1).await;
    second.kill();
    member.leave_ownership().await.unwrap();
    let (document, _) = member.state().await.unwrap();
    assert_eq!((document.proof, document.promised), (Proof::All, Epoch(2)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batch_torn_by_a_kill_takes_no_proof_from_the_member() {
    let nodes = Nodes::new();
    let owner = nodes.take_over(0, 1).await;
    owner.write(0).await.unwrap();
    let caught_up = owner.owned.replicas().acknowledged();
    until(|| owner.owned.statuses()[&nodes.ids[2]].written >= caught_up).await;
    // The next batch reaches the other two. Its beginning is put behind the log of the third, as a process
    // leaves it that is killed while it writes.
    nodes.cut(2, true);
    nodes.net.members.lock().remove(&nodes.ids[2]);
    let path = |node: usize| nodes.log_dir(node).join("ring-00000.log");
    let note = nodes.log_dir(2).join("member.note");
    // Before the batch: on a busy machine, it may still reach the third.
    let (mut torn, noted) = (std::fs::read(path(2)).unwrap(), std::fs::read(&note).unwrap());
    // Longer than a page.
    let (volume, kind, payload) = (VOLUME, EntryKind::Write, Bytes::from(vec![7; 8192]));
    let entry = NewEntry { volume, kind, start_sector: 16, sector_count: 16, payload };
    owner.log.append(entry, Wait::Written).await.unwrap();
    let whole = std::fs::read(path(0)).unwrap();
    // The headers of the two files differ.
    let pages = whole.chunks(4096).zip(torn.chunks(4096)).skip(1);
    let page = 1 + pages.take_while(|(whole, torn)| whole == torn).count();
    torn[page * 4096..][..4096].copy_from_slice(&whole[page * 4096..][..4096]);
    for (has_note, proof) in [(true, Proof::All), (false, Proof::Nothing)] {
        std::fs::write(path(2), &torn).unwrap();
        match has_note {
            true => std::fs::write(&note, &noted).unwrap(),
            false => std::fs::remove_file(&note).unwrap(),
        }
        nodes.start(2);
        let (document, index) = nodes.member(2).state().await.unwrap();
        assert_eq!((document.proof, index.tail().sequence), (proof, caught_up), "{has_note}");
        nodes.net.members.lock().remove(&nodes.ids[2]);
    }
}
