//! Snapshots by schedule, and volumes made from them, on an open pool.

use super::*;
use crate::schedule::{Keep, Schedule};
use crate::snapshot::SnapshotName;

fn names(pool: &Pool) -> Vec<String> {
    let all = pool.snapshots(None).unwrap();
    all.into_iter().map(|one| format!("{}@{}", one.volume, one.record.name)).collect()
}

/// Sets a schedule as if it had been set long ago, with a snapshot made at each of these times.
async fn make_earlier(pool: &Pool, name: &str, keep: Keep, times: &[u64]) {
    pool.set_schedule(name, Some(("@hourly", keep))).await.unwrap();
    let volume = pool.find(name).unwrap();
    let change = |record: &mut VolumeRecord| {
        let schedule = record.schedule.as_ref().unwrap();
        record.schedule = Some(Schedule { since: 1, ..schedule.clone() });
    };
    let record = volume.update_record_of_any(change).await.unwrap();
    pool.volumes.lock().records.insert(record.id, record);
    for (index, at) in times.iter().enumerate() {
        let asked: SnapshotName = format!("{name}@auto-{index}").parse().unwrap();
        let made = pool.create_snapshots_as(&asked, true).await.unwrap();
        let mut volumes = pool.volumes.lock();
        let key = (made[0].record.volume, made[0].lsn);
        volumes.snapshots.records.get_mut(&key).unwrap().created_at = *at;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schedule_removes_only_its_own_expired_snapshots() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    for name in ["db", "wal"] {
        pool.create_volume(name, MIB, Durability::Flush).await.unwrap();
    }
    let mine: SnapshotName = "db@mine".parse().unwrap();
    pool.create_snapshots(&mine).await.unwrap();
    let now = pool.clock().wall();
    let keep = Keep { hourly: 2, daily: 0, weekly: 0, monthly: 0 };
    let times: Vec<u64> = (1..=5).rev().map(|hours| now - hours * 3600).collect();
    make_earlier(&pool, "db", keep, &times).await;
    make_earlier(&pool, "wal", keep, &[]).await;
    // The plan shows what is removed: the next snapshot and the newest of these are kept.
    let plan = pool.schedule_plan("db").unwrap();
    let goes: Vec<&str> = plan
        .snapshots
        .iter()
        .filter(|(_, why)| why.is_none())
        .map(|(one, _)| &one.record.name[..])
        .collect();
    assert_eq!(goes, ["auto-0", "auto-1", "auto-2", "auto-3"]);
    // One is open meanwhile.
    let view = pool.snapshot_view("db", "auto-1").unwrap();
    assert_eq!(pool.run_schedules().await, (2, 3));
    let left = names(&pool);
    assert_eq!(left.len(), 5, "{left:?}");
    for name in ["db@mine", "db@auto-1", "db@auto-4"] {
        assert!(left.contains(&name.to_owned()), "{left:?}");
    }
    let made: Vec<NamedSnapshot> = pool.snapshots(None).unwrap();
    let newest: Vec<&NamedSnapshot> =
        made.iter().filter(|one| one.record.name.starts_with("auto-2")).collect();
    assert_eq!((newest.len(), newest[0].lsn), (2, newest[1].lsn), "of one instant");
    // The time has passed, even if the snapshot is gone.
    assert_eq!(pool.run_schedules().await, (0, 0));
    pool.remove_snapshot("wal", &newest[1].record.name).await.unwrap();
    assert_eq!(pool.run_schedules().await, (0, 0));
    drop(view);
    assert_eq!(pool.prune_scheduled("db").await, 1);
    pool.set_schedule("db", None).await.unwrap();
    assert_eq!(pool.run_schedules().await, (0, 0));
    assert_eq!(pool.schedule_plan("db").unwrap().snapshots.len(), 2);
    kill(pool).await;
    // The schedule is part of the volume.
    let pool = open(dir.path(), &store, 2).await;
    assert_eq!(pool.find("db").unwrap().record().schedule, None);
    assert_eq!(pool.find("wal").unwrap().record().schedule.unwrap().keep, keep);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_clone_is_removed_and_can_be_restored() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    let db = pool.create_volume("db", MIB, Durability::Flush).await.unwrap();
    db.write(0, pattern(1, 8192), WriteFlags::default()).await.unwrap();
    let name: SnapshotName = "db@a".parse().unwrap();
    pool.create_snapshots(&name).await.unwrap();
    let ttl = Some(Duration::from_secs(3600));
    pool.clone_volume("db", "a", "test", ttl).await.unwrap();
    assert!(pool.expired().is_empty());
    let test = pool.find("test").unwrap();
    let record = test.update_record_of_any(|record| record.expires_at = 1).await.unwrap();
    pool.volumes.lock().records.insert(record.id, record);
    assert!(pool.expired().is_empty(), "somebody has it");
    drop(test);
    let id = pool.expired()[0];
    assert_eq!(pool.remove_expired(id).await.unwrap().as_deref(), Some("test"));
    assert_eq!(pool.remove_expired(id).await.unwrap(), None);
    let restored = pool.restore_volume("test").await.unwrap();
    assert_eq!(restored.expires_at, 0);
    let test = pool.find("test").unwrap();
    assert_eq!(read(&test, 0, 8192).await.unwrap(), pattern(1, 8192));
    drop(test);
    // A volume that is being changed cannot be opened, and its ids are never reused.
    let free = || std::future::ready(Ok(()));
    pool.roll_back("db", "a", free()).await.unwrap_err(); // `db` is held here
    drop(db);
    let taken = std::future::ready(Err(Error::new(ErrorKind::Busy, "attached meanwhile")));
    pool.roll_back("db", "a", taken).await.unwrap_err();
    assert!(pool.volume("db").is_some(), "it is served again");
    pool.roll_back("db", "a", free()).await.unwrap();
    pool.remove_volume("test", true).await.unwrap();
    let next = pool.create_volume("test", MIB, Durability::Flush).await.unwrap();
    assert_eq!(next.id().0, 3);
    assert_eq!(read(&next, 0, 8192).await.unwrap(), vec![0; 8192]);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_held_by_snapshots_is_known_for_new_volumes() {
    let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
    let pool = open(dir.path(), &store, 1).await;
    let db = pool.create_volume("db", MIB, Durability::Flush).await.unwrap();
    db.write(0, pattern(1, 64 << 10), WriteFlags::default()).await.unwrap();
    pool.create_snapshots(&"db@a".parse::<SnapshotName>().unwrap()).await.unwrap();
    db.write(0, pattern(2, 64 << 10), WriteFlags::default()).await.unwrap();
    pool.destage_all().await.unwrap();
    let found = pool.snapshots(None).unwrap();
    let held = pool.held_by(&found).await.unwrap();
    let bytes = held[&(db.id().0, found[0].lsn.0)];
    assert!((32 << 10..128 << 10).contains(&bytes), "{bytes} bytes");
    drop(db);
    // The name is a word of the command line.
    let refused = pool.create_volume("list", MIB, Durability::Flush).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    pool.close().await.unwrap();
}
