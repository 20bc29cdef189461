//! Features that depend on age, on a machine whose clock jumps.

use super::*;
use crate::clock::tests::{DAY, manual_clock, pass};
use crate::schedule::Keep;
use crate::snapshot::SnapshotName;
use block::env::ManualClock;

const HOUR: u64 = 3600;

async fn open_with(dir: &Path, store: &Arc<InMemory>) -> (Arc<Pool>, ManualClock) {
    let pool = open(dir, store, 1).await;
    let machine = manual_clock();
    pool.set_clock(ProvenClock::new(Arc::new(machine.clone()), uuid::Uuid::from_u128(1), 0, None));
    pool.create_volume("db", MIB, Durability::Flush).await.unwrap();
    (pool, machine)
}

fn scheduled(pool: &Pool) -> Vec<Lsn> {
    let all = pool.snapshots(Some("db")).unwrap();
    all.into_iter().filter(|one| one.record.is_scheduled).map(|one| one.lsn).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scheduled_snapshots_are_made_and_kept_wherever_the_clock_jumps() {
    for days in [-2, -400, 2, 400] {
        let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
        let (pool, machine) = open_with(dir.path(), &store).await;
        let keep = Keep { hourly: 4, daily: 2, weekly: 0, monthly: 0 };
        pool.set_schedule("db", Some(("@hourly", keep))).await.unwrap();
        for _ in 0..30 {
            pass(&machine, HOUR);
            assert_eq!(pool.run_schedules().await.0, 1);
        }
        let before = scheduled(&pool);
        machine.jump(days * DAY as i64);
        for hour in 0..6 {
            let (made, _) = pool.run_schedules().await;
            assert!(made == 1 || hour == 0, "{days} days, hour {hour}: none was made");
            let newest = scheduled(&pool).pop().unwrap();
            assert!(hour == 0 || newest > *before.last().unwrap());
            assert_eq!(pool.run_schedules().await, (0, 0), "{days} days, hour {hour}");
            pass(&machine, HOUR);
        }
        let after: Vec<Lsn> =
            scheduled(&pool).into_iter().filter(|lsn| lsn > before.last().unwrap()).collect();
        assert!(after.len() >= 4, "{days} days: {} of the last hours are kept", after.len());
        // The plan shows which snapshots are kept.
        let plan = pool.schedule_plan("db").unwrap();
        assert!(plan.snapshots.last().is_some_and(|(_, why)| why.is_some()));
        pool.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_jump_of_the_clock_purges_and_expires_nothing_early() {
    for days in [-400, 400] {
        let (dir, store) = (tempfile::tempdir().unwrap(), Arc::new(InMemory::new()));
        let (pool, machine) = open_with(dir.path(), &store).await;
        pool.create_volume("old", MIB, Durability::Flush).await.unwrap();
        let name: SnapshotName = "db@a".parse().unwrap();
        pool.create_snapshots(&name).await.unwrap();
        pool.clone_volume("db", "a", "test", Some(Duration::from_secs(HOUR))).await.unwrap();
        pool.remove_volume("old", false).await.unwrap();
        pass(&machine, HOUR / 2);
        machine.jump(days * DAY as i64);
        let later = ["late", "later"];
        for name in later {
            pool.create_volume(name, MIB, Durability::Flush).await.unwrap();
            pool.remove_volume(name, false).await.unwrap();
        }
        assert!(pool.expired().is_empty(), "{days} days");
        assert_eq!(pool.purge_expired().await.unwrap(), 0, "{days} days");
        // The clock is set right.
        machine.jump(-days * DAY as i64);
        assert!(pool.expired().is_empty() && pool.purge_expired().await.unwrap() == 0);
        assert!(pool.is_removed("late") && pool.is_removed("old"));
        pass(&machine, HOUR / 2);
        assert_eq!(pool.expired().len(), 1, "{days} days: its time has passed");
        assert_eq!(pool.purge_expired().await.unwrap(), 1, "{days} days");
        pool.close().await.unwrap();
    }
}
