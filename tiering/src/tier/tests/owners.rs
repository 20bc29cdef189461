//! Several handles of one store: each owner fences earlier ones, and a reader disturbs no other
//! handle.

use super::*;
use crate::testing::Fault;

#[test]
fn an_earlier_owner_is_fenced_and_a_lower_epoch_cannot_open() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(1);
        let first = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(20);
        first.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        let second = Tier::open(options(store.clone(), 2)).await.unwrap();
        let late = world.window(20);
        let error = Error::from(first.destage(late.window.clone(), &Payloads).await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        let error = Error::from(first.destage(late.window.clone(), &Payloads).await.unwrap_err());
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        check_all(&second, &world.model).await;
        second.destage(late.window, &Payloads).await.unwrap();
        check_all(&second, &late.after).await;
        // Uploads of a fenced owner that arrive late are orphans of a lower epoch; no other objects
        // are.
        second.sweep_orphans().await.unwrap();
        let id = "00112233445566778899aabbccddeeff";
        let late_upload =
            |epoch: u64, number: u64| format!("segments/{epoch:016x}/{number:016x}-{id}");
        let orphan = late_upload(1, 1);
        for path in [&orphan, &late_upload(2, 1), "segments/0000000000000001/README"] {
            store.put(&Path::from(path), "late".into()).await.unwrap();
        }
        let swept = second.sweep_orphans().await.unwrap();
        assert_eq!((swept.deleted_count, swept.deleted_bytes, swept.foreign_count), (1, 4, 1));
        assert!(store.get(&Path::from(orphan)).await.is_err());
        check_all(&second, &late.after).await;
        check_fsck(&second).await;
        second.close().await.unwrap();
        let error = Tier::open(options(store.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        let third = Tier::open(options(store, 2)).await.unwrap();
        check_all(&third, &late.after).await;
        third.close().await.unwrap();
    });
}

#[test]
fn another_pool_key_opens_nothing() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        Tier::open(options(store.clone(), 1)).await.unwrap().close().await.unwrap();
        let mut other = options(store, 2);
        other.pool_key = PoolKey::new([0x43; 32]);
        let error = Tier::open(other).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("metadata root"), "{error}");
    });
}

#[test]
fn superseded_owner_opening_late_does_not_disturb_the_present() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(2);
        let present = Tier::open(options(store.clone(), 5)).await.unwrap();
        let late = Tier::open(options(store.clone(), 4)).await.err().unwrap();
        assert_eq!(late.kind(), ErrorKind::Fenced);
        let made = world.window(20);
        present.destage(made.window, &Payloads).await.unwrap();
        check_all(&present, &made.after).await;
        present.close().await.unwrap();
    });
}

#[test]
fn reader_writes_only_its_checkpoint_and_fences_no_owner() {
    runtime().block_on(async {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let error = Tier::open_read_only(options(shared.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let mut world = World::new(3);
        let owner = Tier::open(options(shared.clone(), 1)).await.unwrap();
        let first = world.window(50);
        owner.destage(first.window, &Payloads).await.unwrap();
        world.model = first.after.clone();
        let store = Arc::new(FaultStore::new(shared));
        let reader = Tier::open_read_only(options(store.clone(), 1)).await.unwrap();
        check_all(&reader, &first.after).await;
        check_fsck(&reader).await;
        let second = world.window(50);
        owner.destage(second.window, &Payloads).await.unwrap();
        check_all(&owner, &second.after).await;
        check_all(&reader, &first.after).await;
        let third = world.window(5);
        let denied = Error::from(reader.destage(third.window, &Payloads).await.unwrap_err());
        assert_eq!(denied.kind(), ErrorKind::Denied);
        assert_eq!(reader.step(1).await.unwrap_err().kind(), ErrorKind::Denied);
        assert_eq!(reader.sweep_orphans().await.unwrap_err().kind(), ErrorKind::Denied);
        reader.close().await.unwrap();
        // The checkpoint that preserves the state being checked, and its release.
        assert_eq!((store.call_count(Op::Put), store.call_count(Op::Delete)), (2, 0));
        owner.close().await.unwrap();
    });
}

#[test]
fn a_check_of_metadata_that_is_compacted_meanwhile_finds_no_damage() {
    runtime().block_on(async {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let owner = Tier::open(options(shared.clone(), 1)).await.unwrap();
        let mut world = World::new(6);
        for _ in 0..6 {
            let made = world.window(30);
            owner.destage(made.window, &Payloads).await.unwrap();
            world.model = made.after;
        }
        let store = Arc::new(FaultStore::new(shared.clone()));
        let mut small = options(store.clone(), 1);
        small.database.cache_bytes = 0;
        let mut refreshed_count = 0;
        // The database's own reads determine which lookups hit the fault, so repeat until one did.
        for (count, skipped) in [0, 1, 2, 4, 8, 16, 32].into_iter().cycle().take(70).enumerate() {
            if count >= 7 && refreshed_count > 0 {
                break;
            }
            let reader = Tier::open_read_only(small.clone()).await.unwrap();
            let opened_at = reader.destaged_lsn();
            let old = report_of_all(&shared).await;
            let made = world.window(30);
            owner.destage(made.window, &Payloads).await.unwrap();
            let new = report_of_all(&shared).await;
            // A table that is needed next was collected, at the first lookup or later.
            store.inject_after(Op::Get, "metadata/compacted", skipped, 1, Fault::NotFound);
            let report = check_fsck(&reader).await;
            store.clear_injected();
            refreshed_count += u32::from(reader.destaged_lsn() > opened_at);
            let pages = |report: &FsckReport| {
                (report.page_count, report.run_count, report.block_count, report.segment_count)
            };
            let found = pages(&report);
            assert!(found == pages(&old) || found == pages(&new), "one state, counted once");
            assert!((old.frame_count..=new.frame_count).contains(&report.frame_count));
        }
        assert!(refreshed_count >= 1, "no look met a table that was gone");
        owner.close().await.unwrap();

        // An owner that is always faster is not damage either.
        let reader = Tier::open_read_only(small).await.unwrap();
        store.inject(Op::Get, "metadata/compacted", u64::MAX, Fault::NotFound);
        let error = reader.fsck(FsckOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
        store.clear_injected();
        check_fsck(&reader).await;
        reader.close().await.unwrap();
    });
}

async fn report_of_all(store: &Arc<dyn ObjectStore>) -> FsckReport {
    let reader = Tier::open_read_only(options(store.clone(), 1)).await.unwrap();
    check_fsck(&reader).await
}
