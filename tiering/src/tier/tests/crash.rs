//! Runs that end regularly or in a crash: the next run finds exactly the destaged state.

use super::*;
use object_store::local::LocalFileSystem;

#[test]
fn destaged_data_reads_back_after_every_reopen() {
    for seed in seeds(4) {
        println!("SEED={seed}");
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(seed);
        for epoch in 1..=8 {
            // No local state: each run has a runtime and a tier of its own.
            runtime().block_on(async {
                let tier = Tier::open(options(store.clone(), epoch)).await.unwrap();
                assert_eq!(tier.destaged_lsn(), Lsn(world.lsn));
                check_all(&tier, &world.model).await;
                for _ in 0..1 + world.rng.below(4) {
                    let op_count = 1 + world.rng.below(60);
                    let made = world.window(op_count);
                    let records = made.window.volume_records.clone();
                    tier.destage(made.window, &Payloads).await.unwrap();
                    world.model = made.after;
                    assert_eq!(tier.destaged_lsn(), Lsn(world.lsn));
                    for record in records {
                        assert!(tier.volume_records().contains(&record));
                    }
                    check_random_reads(&tier, &world.model, &mut world.rng, 20).await;
                    if world.rng.below(3) == 0 {
                        tier.step(2).await.unwrap();
                    }
                }
                check_all(&tier, &world.model).await;
                check_fsck(&tier).await;
                if epoch % 2 == 0 {
                    fold_all(&tier).await;
                    check_all(&tier, &world.model).await;
                    check_fsck(&tier).await;
                }
                let swept = tier.sweep_orphans().await.unwrap();
                assert_eq!(swept.deleted_count, 0);
                tier.close().await.unwrap();
            });
        }
    }
}

/// Performs one run that ends after a number of calls to the store, counted from the start or after
/// opening. Returns the number of windows that succeeded.
pub(super) fn life_until_crash(
    store: Arc<FaultStore>,
    epoch: u64,
    made: &[Made],
    calls_after_open: Option<u64>,
) -> usize {
    let runtime = runtime();
    let done = Arc::new(AtomicU64::new(0));
    runtime.block_on(async {
        let work = async {
            let tier = Tier::open(options(store.clone(), epoch)).await?;
            if let Some(count) = calls_after_open {
                store.go_away_after(count);
            }
            for made in made {
                tier.destage(made.window.clone(), &Payloads).await?;
                done.fetch_add(1, Ordering::SeqCst);
                tier.step(2).await?;
                while !tier.reclaim_step(EAGER).await?.is_idle {}
                tier.sweep_abandoned().await?;
            }
            tier.close().await
        };
        let death = async {
            while !store.is_away() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            result = work => {
                assert!(result.is_ok() || store.is_away(), "{result:?}");
            }
            () = death => {}
        }
    });
    drop(runtime);
    done.load(Ordering::SeqCst) as usize
}

#[test]
pub(super) fn a_crash_at_any_request_leaves_a_prefix_and_no_dangling_frame() {
    for seed in seeds(3) {
        println!("SEED={seed}");
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut world = World::new(seed);
        let mut done = 0;
        let mut made: Vec<Made> = Vec::new();
        let mut swept_count = 0;
        for epoch in 1..=12 {
            while made.len() < done + 4 {
                let op_count = 5 + world.rng.below(40);
                let next = world.window(op_count);
                world.model = next.after.clone();
                made.push(next);
            }
            let store = Arc::new(FaultStore::new(shared.clone()));
            let calls_after_open = (epoch % 4 != 0).then(|| world.rng.below(120));
            if calls_after_open.is_none() {
                store.go_away_after(world.rng.below(60));
            }
            let came_through = life_until_crash(store, 2 * epoch, &made[done..], calls_after_open);
            // The store holds the state after some window that is not older than the last
            // acknowledged one.
            let runtime = runtime();
            runtime.block_on(async {
                let tier = Tier::open(options(shared.clone(), 2 * epoch + 1)).await.unwrap();
                let lsn = tier.destaged_lsn();
                let found = made.iter().take_while(|made| made.window.last_lsn <= lsn).count();
                assert!(
                    found >= done + came_through,
                    "SEED={seed}: {found}, {done}+{came_through}"
                );
                assert!(found <= done + came_through + 1);
                assert!(lsn == Lsn::NONE || made[found - 1].window.last_lsn == lsn);
                let empty = Model::new();
                let model = found.checked_sub(1).map_or(&empty, |last| &made[last].after);
                check_all(&tier, model).await;
                check_fsck(&tier).await;
                swept_count += tier.sweep_orphans().await.unwrap().deleted_count;
                check_all(&tier, model).await;
                check_fsck(&tier).await;
                tier.close().await.unwrap();
                done = found;
            });
        }
        assert!(done > 3, "SEED={seed}: hardly anything came through");
        println!("SEED={seed}: {done} windows, {swept_count} orphans");
    }
}

#[test]
fn a_crash_while_the_pool_is_made_leaves_a_store_that_opens() {
    for calls in 0..40 {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let store = Arc::new(FaultStore::new(shared.clone()));
        store.go_away_after(calls);
        life_until_crash(store, 1, &[], None);
        runtime().block_on(async {
            let tier = Tier::open(options(shared, 1)).await.unwrap();
            assert_eq!(tier.destaged_lsn(), Lsn::NONE, "{calls} calls");
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn interrupted_first_start_is_repeated() {
    runtime().block_on(async {
        let dir = tempfile::tempdir().unwrap();
        // Left by a start that was interrupted before the database's first object had its name.
        let folder = dir.path().join(database::FOLDER).join("manifest");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("00000000000000000001.manifest#1"), b"half of it").unwrap();
        let local = LocalFileSystem::new_with_prefix(dir.path()).unwrap();
        let mut options = options(Arc::new(local), 1);
        options.database.has_conditional_update = false;
        let tier = Tier::open(options.clone()).await.unwrap();
        tier.close().await.unwrap();
        options.epoch = Epoch(2);
        Tier::open(options).await.unwrap().close().await.unwrap();
    });
}
