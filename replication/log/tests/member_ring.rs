//! A member's ring over real files: what an owner wrote can be stored by a member, and what a member
//! stored can be opened by an owner.

use block::seal::{KEY_BYTES, PoolKey};
use block::{Epoch, ErrorKind, Lsn, Position, VolumeId};
use bytes::Bytes;
use std::os::unix::fs::FileExt;
use std::path::Path;
use wal::{
    EntryKind, FollowerFound, FollowerLog, IoMode, Log, LogIdentity, LogOptions, NewEntry,
    Recovery, Source, Wait,
};

const VOLUME: VolumeId = VolumeId(7);
const POOL: [u8; 16] = [1; 16];

fn options(file_bytes: u64, io_mode: IoMode) -> LogOptions {
    LogOptions {
        ring_bytes: 4 * file_bytes,
        file_bytes,
        generation_bytes_max: file_bytes,
        io_mode,
        ..LogOptions::default()
    }
}

fn open_log(dir: &Path, epoch: u64, boot: u8) -> (Log, Recovery) {
    let identity = LogIdentity {
        pool: POOL,
        epoch: Epoch(epoch),
        boot_id: [boot; 16],
        served_epoch: Epoch(0),
        configuration: 0,
    };
    let key = PoolKey::new([3; KEY_BYTES]);
    let options = options(1 << 20, IoMode::Buffered);
    Log::open(dir, identity, key, options, Lsn::NONE).expect("the log opens")
}

fn open_member(dir: &Path, file_bytes: u64) -> (FollowerLog, FollowerFound) {
    FollowerLog::open(dir, POOL, options(file_bytes, IoMode::Buffered)).expect("the ring opens")
}

async fn append(log: &Log, sectors: std::ops::Range<u64>) {
    for sector in sectors {
        let payload = Bytes::from(vec![sector as u8; 4096]);
        let (start_sector, kind) = (sector * 8, EntryKind::Write);
        let entry = NewEntry { volume: VOLUME, kind, start_sector, sector_count: 8, payload };
        log.append(entry, Wait::Written).await.unwrap();
    }
    log.flush().await.unwrap();
}

async fn has(log: &Log, sector: u64) -> bool {
    let pieces = log.overlay().lookup(VOLUME, sector * 8, 8);
    let byte = match &pieces[0].source {
        Source::Payload(bytes) => bytes[0],
        Source::LogResident(resident) => {
            log.read(resident).await.expect("reads").expect("is not released")[0]
        }
        _ => return false,
    };
    byte == sector as u8
}

fn read_all(log: &FollowerLog) -> Vec<(Position, Bytes)> {
    let mut all: Vec<(Position, Bytes)> = Vec::new();
    loop {
        let after = all.last().map_or(log.start().sequence, |(position, _)| position.sequence);
        let more = log.read(after, 64 << 10).unwrap();
        if more.is_empty() {
            return all;
        }
        all.extend(more);
    }
}

#[tokio::test]
async fn owner_replays_the_batches_that_a_member_stored() {
    let [own, other] = [(); 2].map(|()| tempfile::tempdir_in(".").unwrap());
    let (log, _) = open_log(own.path(), 1, 1);
    append(&log, 0..100).await;
    log.close().unwrap();
    let (owners, found) = open_member(own.path(), 1 << 20);
    assert_eq!((found.before, &found.epochs[..]), (Position::START, &[(Epoch(1), 1)][..]));
    assert!(!found.is_end_damaged && found.last == owners.tail().sequence);
    let batches = read_all(&owners);
    let bytes: Vec<Bytes> = batches.iter().map(|(_, bytes)| bytes.clone()).collect();

    // The member's files are shorter than the owner's.
    let (mut members, found) = open_member(other.path(), 512 << 10);
    assert_eq!(found, FollowerFound::default());
    members.write(&bytes).unwrap();
    members.sync().unwrap();
    drop(members);
    let (members, found) = open_member(other.path(), 512 << 10);
    assert_eq!(found.last, owners.tail().sequence);
    assert_eq!((members.chain(), members.tail()), (owners.chain(), owners.tail()));
    assert_eq!(read_all(&members), batches);
    drop(members);

    let (log, recovery) = open_log(other.path(), 2, 2);
    assert_eq!((recovery.entry_count, recovery.is_tail_proven), (100, true));
    for sector in 0..100 {
        assert!(has(&log, sector).await, "sector {sector}");
    }
    append(&log, 100..120).await;
    log.close().unwrap();
    let (members, continued) = open_member(other.path(), 512 << 10);
    assert_eq!(continued.epochs, [(Epoch(1), 1), (Epoch(2), found.last + 1)]);
    assert_eq!(read_all(&members)[..batches.len()], batches);
}

#[tokio::test]
async fn owner_replays_a_members_ring_that_was_cut() {
    let [own, other] = [(); 2].map(|()| tempfile::tempdir_in(".").unwrap());
    let (log, _) = open_log(own.path(), 1, 1);
    append(&log, 0..60).await;
    log.close().unwrap();
    let (owners, _) = open_member(own.path(), 1 << 20);
    let bytes: Vec<Bytes> = read_all(&owners).into_iter().map(|(_, bytes)| bytes).collect();
    let (mut members, _) = open_member(other.path(), 256 << 10);
    members.write(&bytes).unwrap();
    // The batches behind it were on the disk of the owner, and name entries that are not here.
    members.cut(31).unwrap();
    drop(members);
    let (_, found) = open_member(other.path(), 256 << 10);
    assert_eq!((found.last, found.is_end_damaged), (31, false));
    let (log, recovery) = open_log(other.path(), 2, 2);
    // One entry in each batch behind the opening one.
    assert_eq!(recovery.entry_count, 30);
    assert!(has(&log, 29).await && !has(&log, 30).await);
    log.close().unwrap();
}

#[test]
fn members_ring_is_locked_and_belongs_to_one_pool() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (log, _) = open_log(dir.path(), 1, 1);
    let open = |pool| {
        let opened = FollowerLog::open(dir.path(), pool, options(1 << 20, IoMode::Direct));
        opened.err().map(|error| error.kind())
    };
    assert_eq!(open(POOL), Some(ErrorKind::Busy));
    log.close().unwrap();
    assert_eq!(open([9; 16]), Some(ErrorKind::Invalid));
    assert_eq!(open(POOL), None);
    std::fs::remove_file(dir.path().join("ring-00000.log")).unwrap();
    assert_eq!(open(POOL), Some(ErrorKind::Corrupt));
}

#[tokio::test]
async fn batch_that_is_too_long_for_a_members_files_is_refused() {
    let [own, other] = [(); 2].map(|()| tempfile::tempdir_in(".").unwrap());
    let (log, _) = open_log(own.path(), 1, 1);
    let payload = Bytes::from(vec![1; 256 << 10]);
    let (kind, sector_count) = (EntryKind::Write, 512);
    let entry = NewEntry { volume: VOLUME, kind, start_sector: 0, sector_count, payload };
    log.append(entry, Wait::Durable).await.unwrap();
    log.close().unwrap();
    let (owners, _) = open_member(own.path(), 1 << 20);
    let bytes: Vec<Bytes> = read_all(&owners).into_iter().map(|(_, bytes)| bytes).collect();
    let (mut members, _) = open_member(other.path(), 256 << 10);
    let error = members.write(&bytes).unwrap_err();
    assert!(error.kind() == ErrorKind::Full && error.chain().contains("files as long"));
    // The batches before it are stored.
    assert_eq!(members.tail(), Position { epoch: Epoch(1), sequence: 1 });
}

/// Flips a byte of the file that has these bytes, behind their header.
fn damage(dir: &Path, batch: &[u8]) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let mut file = std::fs::read(&path).unwrap();
        if let Some(at) = file.windows(batch.len()).position(|bytes| bytes == batch) {
            file[at + batch.len() - 1] ^= 1;
            let whole = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            return whole.write_all_at(&file, 0).unwrap();
        }
    }
    panic!("no file has the batch");
}

#[tokio::test]
async fn damaged_batch_leaves_the_whole_ones_before_it_readable() {
    let [own, other] = [(); 2].map(|()| tempfile::tempdir_in(".").unwrap());
    let (log, _) = open_log(own.path(), 1, 1);
    append(&log, 0..60).await;
    log.close().unwrap();
    let batches = read_all(&open_member(own.path(), 1 << 20).0);
    let bytes: Vec<Bytes> = batches.iter().map(|(_, bytes)| bytes.clone()).collect();
    let (mut members, _) = open_member(other.path(), 256 << 10);
    members.write(&bytes).unwrap();
    members.sync().unwrap();
    // Within a file of the ring, and the first one of a file: both are read along with earlier ones.
    for damaged in [40, 11] {
        damage(other.path(), &bytes[damaged]);
        let whole = members.read(0, 1 << 20).unwrap();
        assert_eq!(whole, batches[..damaged]);
        let error = members.read(damaged as u64, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
    }
}
