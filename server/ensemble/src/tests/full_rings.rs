//! Members whose rings are full or empty, while the store takes nothing and when it does again.

use super::logs::{Nodes, Open, VOLUME, log_options};
use super::until;
use block::{Epoch, Lsn, Position};
use bytes::Bytes;
use replication::{Answer, Request};
use std::time::Duration;
use wal::{EntryKind, LogOptions, NewEntry, Wait};

fn small_ring() -> LogOptions {
    LogOptions { ring_bytes: 4 << 20, generation_bytes_max: 2 << 20, ..log_options() }
}

const ENTRY_BYTES: usize = 256 << 10;

fn large_entry(content: u8) -> NewEntry {
    NewEntry {
        volume: VOLUME,
        kind: EntryKind::Write,
        start_sector: 0,
        sector_count: (ENTRY_BYTES / 512) as u64,
        payload: Bytes::from(vec![content; ENTRY_BYTES]),
    }
}

/// Writes large entries, more than a small ring has room for, in the background.
fn write_many(owner: &Open, count: u8) -> tokio::task::JoinHandle<block::Result<()>> {
    let log = owner.log.clone();
    tokio::spawn(async move {
        for content in 0..count {
            log.append(large_entry(content), Wait::Written).await?;
        }
        Ok(())
    })
}

/// Lets the store take everything that is acknowledged. Returns the LSN up to which it has everything.
async fn destage(owner: &Open) -> Lsn {
    while let Some(generation) = owner.log.freeze() {
        owner.log.make_durable(generation.last_lsn()).await.unwrap();
        owner.log.release(&generation);
    }
    owner.log.destaged_lsn()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_member_gets_room_from_what_the_store_has_since() {
    let nodes = Nodes::with_rings([log_options(), small_ring(), log_options()]);
    nodes.cut(2, true);
    let owner = nodes.take_over(0, 1).await;
    let writing = write_many(&owner, 40);
    let status = || owner.owned.statuses()[&nodes.ids[1]].clone();
    until(|| status().is_full).await;
    let (written, is_stuck) = (status().written, !writing.is_finished());
    assert!(is_stuck && status().is_connected, "{:?}", status());
    assert_eq!(owner.owned.replicas().acknowledged(), written, "a refused batch counts");
    // It still answers: the owner's lease goes on, and it is found as it is.
    assert_eq!(nodes.member(1).state().await.unwrap().1.tail().sequence, written);
    tokio::time::sleep(Duration::from_millis(300)).await;
    owner.log.await_lease().await.unwrap();
    assert_eq!((status().written, status().is_full), (written, true));
    // The batch that waits says that nothing is in the store.
    let done = async {
        while !writing.is_finished() {
            destage(&owner).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), done).await.expect("it never has room again");
    writing.await.unwrap().unwrap();
    until(|| status().written == owner.owned.replicas().acknowledged()).await;
    assert!(!status().is_full);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn take_over_by_a_full_member_uses_the_room_that_the_store_gives() {
    let nodes = Nodes::with_rings([log_options(), small_ring(), log_options()]);
    nodes.net.members.lock().remove(&nodes.ids[2]);
    let first = nodes.take_over(0, 1).await;
    let writing = write_many(&first, 40);
    until(|| first.owned.statuses()[&nodes.ids[1]].is_full).await;
    nodes.cut(1, true);
    let destaged = destage(&first).await;
    first.kill();
    assert!(writing.await.unwrap().is_err());
    nodes.start(0);
    nodes.cut(1, false);
    // The first node has a batch for which the second one had no room.
    let longest = nodes.member(0).state().await.unwrap().1.tail();
    assert!(longest > nodes.member(1).state().await.unwrap().1.tail());
    let second = nodes.take_over_at(1, 2, destaged).await;
    assert!(second.recovery.last_lsn > destaged);
    second.log.append(large_entry(7), Wait::Written).await.unwrap();
    second.kill();
}

/// Resets the member of a node, as an owner does whose log has released everything up to `before`.
async fn reset(nodes: &Nodes, node: usize, before: Position) {
    let request = Request::Reset { epoch: Epoch(1), before };
    let answer = nodes.member(node).ask(request).await.unwrap();
    assert!(matches!(answer, Some(Answer::Appended { .. })), "{answer:?}");
    let (_, index) = nodes.member(node).state().await.unwrap();
    assert_eq!((index.before(), index.tail()), (before, before));
}

/// Writes with the owner on `owner` while the node `absent` is cut off, and ends. Returns the tail.
async fn write_without(nodes: &Nodes, owner: usize, absent: usize) -> Position {
    nodes.cut(absent, true);
    let first = nodes.take_over(owner, 1).await;
    for sector in 0..5 {
        first.write(sector).await.unwrap();
    }
    let all = first.owned.replicas().acknowledged();
    until(|| first.owned.statuses().values().any(|status| status.written >= all)).await;
    first.kill();
    nodes.start(owner);
    nodes.member(owner).state().await.unwrap().1.tail()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn candidate_whose_log_is_empty_behind_a_reset_opens() {
    let nodes = Nodes::new();
    let tail = write_without(&nodes, 0, 2).await;
    reset(&nodes, 2, tail).await;
    nodes.cut(2, false);
    let second = nodes.take_over_at(2, 2, Lsn(5)).await;
    assert_eq!(second.recovery.last_lsn, Lsn(5));
    let lsn = second.write(5).await.unwrap();
    // The others have the batch that the opening one follows.
    until(|| second.owned.statuses().values().all(|status| status.written > tail.sequence + 1))
        .await;
    second.kill();
    nodes.start(2);
    let third = nodes.take_over_at(2, 3, Lsn(5)).await;
    assert_eq!(third.recovery.last_lsn, lsn);
    third.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn candidate_begins_where_an_empty_member_was_reset_to() {
    let nodes = Nodes::new();
    let tail = write_without(&nodes, 1, 0).await;
    nodes.wipe(2);
    reset(&nodes, 2, tail).await;
    nodes.cut(0, false);
    // The candidate hears only the empty one until it has begun where that begins. Otherwise it may read
    // from the node that has the batches.
    nodes.cut(1, true);
    let begun = async {
        while nodes.member(0).state().await.unwrap().1.tail() != tail {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        nodes.cut(1, false);
    };
    let (second, ()) = tokio::join!(nodes.take_over_at(0, 2, Lsn(5)), begun);
    second.write(5).await.unwrap();
    until(|| second.owned.statuses().values().all(|status| status.written > tail.sequence + 1))
        .await;
    second.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_with_a_damaged_batch_ends() {
    let nodes = Nodes::new();
    let owner = nodes.take_over(0, 1).await;
    nodes.cut(2, true);
    for sector in 0..10 {
        owner.write(sector).await.unwrap();
    }
    // In the fifth batch of the file, behind its header.
    let path = nodes.log_dir(0).join("ring-00000.log");
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[99; 64], 5 * 4096 + 300).unwrap();
    nodes.cut(2, false);
    let mut changes = owner.log.changes();
    let ended = async {
        while owner.write(11).await.is_ok() {
            let _ = tokio::time::timeout(Duration::from_millis(20), changes.changed()).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), ended).await.expect("the owner goes on");
    let error = owner.write(12).await.unwrap_err();
    assert_eq!(error.kind(), block::ErrorKind::Corrupt, "{}", error.chain());
}
