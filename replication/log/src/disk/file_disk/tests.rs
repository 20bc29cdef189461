//! Tests of the log's directory and the order of requests to its device.

use super::*;
use block::env::{IO_ALIGN_BYTES, SystemClock};

const FILE_BYTES: u64 = 1 << 20;

fn reaped(disk: &mut FileDisk) -> Vec<u64> {
    let mut completions = Vec::new();
    disk.reap(&mut completions);
    completions.iter().for_each(|done| assert!(done.result.is_ok(), "{:?}", done.result));
    completions.into_iter().map(|done| done.token).collect()
}

fn wait_for_one(disk: &mut FileDisk) -> u64 {
    loop {
        if let [token] = reaped(disk)[..] {
            return token;
        }
        disk.wait();
    }
}

fn write(disk: &mut FileDisk, token: u64, len: usize) {
    let mut buffer = IoBuffer::default();
    buffer.reset(len);
    buffer.pad_to(len);
    let offset = IO_ALIGN_BYTES as u64;
    disk.submit(DiskRequest::Write { token, file: 0, offset, buffer, is_sync_next: false });
}

#[test]
fn cleared_ring_does_not_come_back_after_a_crash() {
    let dir = tempfile::tempdir_in(".").expect("a directory");
    let open =
        || FileDisk::open(dir.path(), IoMode::Buffered, Arc::new(SystemClock)).expect("it opens");
    let run = |disk: &mut FileDisk, request: DiskRequest| {
        disk.submit(request);
        wait_for_one(disk)
    };
    let create = |file| DiskRequest::Create { token: 1, file, len: 8192, header: vec![7; 9] };
    let files = |disk: &FileDisk| disk.reader().files().expect("it lists them").len();
    let mut disk = open();
    (0..3).for_each(|file| assert_eq!(run(&mut disk, create(file)), 1));
    let left: Vec<(PathBuf, Vec<u8>)> = (1..3)
        .map(|file| dir.path().join(name_of(file)))
        .map(|path| (path.clone(), std::fs::read(path).expect("it is there")))
        .collect();
    assert_eq!(run(&mut disk, DiskRequest::Clear { token: 2 }), 2);
    assert_eq!((files(&disk), disk.made_count()), (0, Some(0)));
    drop(disk);
    // The machine stopped before the removal of two files was durable.
    left.iter().for_each(|(path, bytes)| std::fs::write(path, bytes).expect("a file"));
    assert!(is_cleared(dir.path()));
    let mut disk = open();
    assert_eq!((files(&disk), disk.made_count()), (0, Some(0)));
    assert!(left.iter().all(|(path, _)| !path.exists()));
    assert_eq!(run(&mut disk, create(0)), 1);
    drop(disk);
    let disk = open();
    assert_eq!((files(&disk), disk.made_count()), (1, Some(1)));
}

#[test]
fn submit_executes_the_allowed_number_of_direct_writes_while_the_device_is_fast() {
    let dir = tempfile::tempdir_in(".").expect("a directory");
    let mut disk =
        FileDisk::open(dir.path(), IoMode::Direct, Arc::new(SystemClock)).expect("it opens");
    disk.submit(DiskRequest::Create { token: 1, file: 0, len: FILE_BYTES, header: Vec::new() });
    assert_eq!(wait_for_one(&mut disk), 1);
    let is_waited_for = |disk: &mut FileDisk, token, len| {
        let files = Arc::clone(&disk.files);
        // Holds the writer's thread up, so that a request handed to it is not completed at
        // once.
        let held = files.completions.lock();
        write(disk, token, len);
        let is_done = disk.done.iter().any(|done| done.token == token);
        drop(held);
        assert_eq!(wait_for_one(disk), token);
        is_done
    };
    let known = |disk: &FileDisk, us| {
        (0..100).for_each(|_| disk.files.write_latency.note(Duration::from_micros(us)));
    };
    assert!(!is_waited_for(&mut disk, 2, IO_ALIGN_BYTES), "none is allowed");
    assert_eq!(disk.wait_for(2), 0);
    known(&disk, 60);
    assert!(is_waited_for(&mut disk, 3, IO_ALIGN_BYTES));
    assert!(!is_waited_for(&mut disk, 4, 2 * write_latency::BYTES_MAX), "it is long");
    known(&disk, 900);
    assert!(!is_waited_for(&mut disk, 5, IO_ALIGN_BYTES), "the device is slow");
    known(&disk, 60);
    assert!(is_waited_for(&mut disk, 6, IO_ALIGN_BYTES));
    assert!(!is_waited_for(&mut disk, 7, IO_ALIGN_BYTES), "two were said");
    assert_eq!(disk.wait_for(3), 0);
    assert_eq!(disk.wait_for(0), 3);
}

#[test]
fn syncs_pause_only_by_the_seeded_bug() {
    assert_eq!(sync_pause(SeededBugs::default()), None);
    let seeded_bugs = SeededBugs { log_sync_late: Some("100"), ..SeededBugs::default() };
    assert_eq!(sync_pause(seeded_bugs), Some(Duration::from_millis(100)));
}
