//! The metadata database gives up, and is reopened automatically.

use super::*;
use crate::testing::{Fault, TimerClock};
use block::ConditionKind;
use block::env::{Clock, SystemClock};
use std::sync::atomic::AtomicUsize;

/// Makes a runtime with one thread and a clock that jumps to the next timer when nothing is left to
/// do: hours pass in a moment.
pub(super) fn patient_runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// Options for a tier on [`patient_runtime`], whose clock moves with the timers.
pub(super) fn patient_options(store: Arc<dyn ObjectStore>, epoch: u64) -> TierOptions {
    TierOptions { clock: Arc::new(TimerClock), ..options(store, epoch) }
}

const EVERYTHING: [Op; 4] = [Op::Get, Op::Put, Op::Delete, Op::List];

/// Faults that end a database for good: found in one of its background tasks, and not retried.
const FATAL: [(Op, &str, Fault); 5] = [
    (Op::Put, "metadata/manifest", Fault::NotFound),
    (Op::Put, "metadata/manifest", Fault::Unheard),
    (Op::Put, "metadata/compacted", Fault::NotFound),
    (Op::Put, "metadata/compactions", Fault::NotFound),
    (Op::List, "metadata/manifest", Fault::NotImplemented),
];

#[test]
fn database_survives_outages_of_any_length() {
    patient_runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(3);
        let tier = Tier::open(patient_options(store.clone(), 1)).await.unwrap();
        let made = world.window(20);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        let minute = Duration::from_secs(60);
        for (fault, delay, length) in [
            (Fault::Broken, Duration::ZERO, 30 * minute),
            (Fault::Denied, Duration::ZERO, 30 * minute),
            (Fault::Broken, minute, 600 * minute), // every request times out
        ] {
            let made = world.window(20);
            for op in EVERYTHING {
                store.inject(op, "", u64::MAX, fault);
            }
            store.set_delay(delay);
            let started = TimerClock.now();
            let destage = {
                let tier = tier.clone();
                tokio::spawn(async move { tier.destage(made.window, &Payloads).await })
            };
            tokio::time::sleep(length).await;
            assert!(!destage.is_finished(), "{fault:?}: it waits");
            store.clear_injected();
            store.set_delay(Duration::ZERO);
            destage.await.unwrap().unwrap();
            let late = TimerClock.since(started) - length;
            assert!(late < 3 * minute, "{fault:?}: it went on {late:?} after the outage");
            world.model = made.after;
            check_all(&tier, &world.model).await;
        }
        // The database's own background work has survived it too.
        for _ in 0..80 {
            let made = world.window(3);
            tier.destage(made.window, &Payloads).await.unwrap();
            world.model = made.after;
        }
        let status = tier.status();
        assert_eq!((status.reopen_count, status.metadata_failure), (0, None));
        check_all(&tier, &world.model).await;
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn failing_reopening_of_the_database_is_a_condition() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let mut world = World::new(1);
        let made = world.window(6);
        let (op, folder, fault) = FATAL[0];
        store.inject(op, folder, 1, fault);
        store.inject(Op::List, "metadata", u64::MAX, Fault::Denied);
        let destage = {
            let (tier, window) = (tier.clone(), made.window.clone());
            tokio::spawn(async move { destage_at_last(&tier, &window).await })
        };
        let until_raised = async |is_wanted| {
            let begun = SystemClock.now();
            while tier.conditions().is_raised(ConditionKind::MetadataReopening, "pool") != is_wanted
            {
                assert!(SystemClock.since(begun) < Duration::from_secs(60), "{:?}", tier.status());
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        until_raised(true).await;
        store.clear_injected();
        destage.await.unwrap();
        until_raised(false).await;
        assert!(tier.status().reopen_count > 0);
        tier.close().await.unwrap();
    });
}

/// Passes a window until it is in the tier. Returns the number of failures.
async fn destage_at_last(tier: &Tier, window: &Window<Bytes>) -> u64 {
    let mut failed_count = 0;
    while let Err(error) = tier.destage(window.clone(), &Payloads).await {
        let error = Error::from(error);
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
        failed_count += 1;
        assert!(failed_count < 10_000, "{}", error.chain());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    failed_count
}

/// Reads at random until told to stop. Reads may fail, but only with `Unavailable`, and are never
/// wrong. Returns the number of correct reads.
async fn read_along(
    tier: Tier,
    between: Arc<parking_lot::Mutex<Between>>,
    stop: Arc<AtomicBool>,
    mut rng: Rng,
) -> u64 {
    let mut count = 0;
    while !stop.load(Ordering::Relaxed) {
        let volume = 1 + rng.below(2) as u32;
        let offset = ZONES[rng.below(2) as usize] + rng.below(ZONE_BYTES);
        let mut buf = vec![0xaa; 1 + rng.below(40_000) as usize];
        let before = between.lock().settled.clone();
        let read = tier.read(VolumeId(volume), offset, &mut buf).await;
        let after = between.lock().begun.clone();
        if let Err(error) = read {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
            continue;
        }
        if after.0 > before.0 + 1 {
            continue; // it lasted longer than a window
        }
        let before = expected(&before.1, volume, offset, buf.len());
        let after = expected(&after.1, volume, offset, buf.len());
        let is_right = |at: usize| buf[at] == before[at] || buf[at] == after[at];
        assert!((0..buf.len()).all(is_right), "volume {volume}, offset {offset}");
        count += 1;
        tokio::time::sleep(Duration::from_micros(300)).await; // a hit in memory never waits
    }
    count
}

#[test]
fn failed_database_is_reopened_without_losing_a_window() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store = Arc::new(FaultStore::default());
            let mut small = options(store.clone(), 1);
            small.map.page_cache_bytes = 48 << 10; // pages come and go
            let tier = Tier::open(small).await.unwrap();
            let mut world = World::new(seed);
            let empty = (0, Arc::new(Model::new()));
            let between = Between { settled: empty.clone(), begun: empty };
            let between = Arc::new(parking_lot::Mutex::new(between));
            let stop = Arc::new(AtomicBool::new(false));
            let reader = |number: u64| {
                let rng = Rng::new(seed * 100 + number);
                tokio::spawn(read_along(tier.clone(), between.clone(), stop.clone(), rng))
            };
            let readers = [reader(0), reader(1)];
            let mut failed_count = 0;
            for number in 1..=25u64 {
                let made = world.window(6);
                let after = (number, Arc::new(made.after.clone()));
                between.lock().begun = after.clone();
                let (op, folder, fault) = FATAL[world.rng.below(FATAL.len() as u64) as usize];
                store.clear_injected();
                store.inject(op, folder, 1 + world.rng.below(3), fault);
                failed_count += destage_at_last(&tier, &made.window).await;
                assert_eq!(tier.destaged_lsn(), Lsn(world.lsn), "SEED={seed}, {fault:?}");
                if world.rng.below(3) == 0 {
                    // Folds that are not durable are repeated.
                    match tier.step(1).await {
                        Ok(_) => {}
                        Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable),
                    }
                }
                between.lock().settled = after;
                world.model = made.after;
                for record in made.window.volume_records {
                    assert!(tier.volume_records().contains(&record), "SEED={seed}");
                }
            }
            store.clear_injected();
            stop.store(true, Ordering::Relaxed);
            let mut read_count = 0;
            for reader in readers {
                read_count += reader.await.unwrap();
            }
            let last = world.window(6);
            destage_at_last(&tier, &last.window).await;
            let status = tier.status();
            println!("SEED={seed}: {} times, {failed_count} failed", status.reopen_count);
            assert!(status.reopen_count > 5 && read_count > 50, "{status:?}, {read_count}");
            assert_eq!(status.metadata_failure, None);
            fold_all(&tier).await;
            check_all(&tier, &last.after).await;
            sweep_all_abandoned(&tier).await;
            let segments = check_fsck(&tier).await.segment_count;
            let swept = tier.sweep_orphans().await.unwrap();
            assert_eq!(swept.object_count, segments, "SEED={seed}: nothing uploaded is left over");
            tier.close().await.unwrap();
            // Check again from the store alone.
            let tier = Tier::open(options(store, 2)).await.unwrap();
            check_all(&tier, &last.after).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

/// Ends the database of `tier` for good and waits until the tier has noticed.
pub(super) async fn end_database(store: &FaultStore, tier: &Tier, world: &mut World) -> Made {
    store.inject(Op::Put, "metadata/manifest", 1, Fault::NotFound);
    let made = world.window(10);
    let error = Error::from(tier.destage(made.window.clone(), &Payloads).await.unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    made
}

#[test]
fn reads_wait_for_the_database_or_fail_cleanly() {
    patient_runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(5);
        let tier = Tier::open(patient_options(store.clone(), 1)).await.unwrap();
        let made = world.window(40);
        tier.destage(made.window, &Payloads).await.unwrap();
        world.model = made.after;
        store.inject(Op::List, "metadata", u64::MAX, Fault::Denied);
        end_database(&store, &tier, &mut world).await;
        tier.parts.metadata.map.forget_pages();
        let read = |offset: u64| {
            let tier = tier.clone();
            tokio::spawn(async move {
                let mut buf = vec![0xaa; 9000];
                tier.read(VolumeId(1), offset, &mut buf).await.map(|()| buf)
            })
        };
        let waiting = read(100);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert!(!waiting.is_finished(), "it waits");
        let failure = tier.status().metadata_failure.unwrap();
        assert!(failure.contains("injected fault"), "{failure}");
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
        let waiting = read(200);
        tokio::time::sleep(Duration::from_secs(60)).await;
        store.clear_injected();
        assert!(waiting.await.unwrap().unwrap() == expected(&world.model, 1, 200, 9000));
        assert_eq!((tier.status().reopen_count, tier.status().metadata_failure), (1, None));
        // Closing does not wait for a database that cannot be reopened.
        store.inject(Op::List, "metadata", u64::MAX, Fault::Denied);
        end_database(&store, &tier, &mut world).await;
        tier.parts.metadata.map.forget_pages();
        let waiting = read(300);
        tokio::task::yield_now().await;
        let _ = tier.close().await;
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    });
}

#[test]
fn owner_with_ended_database_does_not_displace_a_successor() {
    runtime().block_on(async {
        let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let store = Arc::new(FaultStore::new(shared.clone()));
        let mut world = World::new(7);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        store.inject(Op::List, "metadata", u64::MAX, Fault::Denied);
        let made = end_database(&store, &tier, &mut world).await;
        let later = Tier::open(options(shared, 2)).await.unwrap();
        store.clear_injected();
        let error = loop {
            let error = tier.destage(made.window.clone(), &Payloads).await.unwrap_err().error;
            if error.kind() != ErrorKind::Unavailable {
                break error;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        assert_eq!(tier.step(1).await.unwrap_err().kind(), ErrorKind::Fenced, "for good");
        later.destage(made.window, &Payloads).await.unwrap();
        check_all(&later, &made.after).await;
        later.close().await.unwrap();
    });
}

/// Makes an owner check that calls `at` with the number of the call.
fn owner_check(
    at: impl Fn(usize) -> BoxFuture<'static, Result<()>> + Send + Sync + 'static,
) -> OwnerCheck {
    let count = AtomicUsize::new(0);
    OwnerCheck::new(move || at(count.fetch_add(1, Ordering::SeqCst)))
}

async fn claim(store: Arc<dyn ObjectStore>) -> Result<()> {
    let options = DatabaseOptions::default();
    Database::open(store, &options, None).await.map(drop)
}

#[test]
fn foreign_claim_during_reopening_is_distinguished_from_our_own() {
    let fenced = || Error::new(ErrorKind::Fenced, "taken over");
    for is_still_ours in [true, false] {
        runtime().block_on(async {
            let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let store = Arc::new(FaultStore::new(shared.clone()));
            let mut world = World::new(8);
            let mut checked = options(store.clone(), 1);
            // The pool is new at the first opening, so the first call belongs to the reopening. At
            // that moment the metadata is claimed, either by an abandoned attempt of our own or by
            // another owner.
            let claimed = shared.clone();
            checked.owner_check = Some(owner_check(move |call| {
                let store = claimed.clone();
                Box::pin(async move {
                    match call {
                        0 => claim(store).await,
                        _ if is_still_ours => Ok(()),
                        _ => Err(fenced()),
                    }
                })
            }));
            let tier = Tier::open(checked).await.unwrap();
            let made = end_database(&store, &tier, &mut world).await;
            if is_still_ours {
                destage_at_last(&tier, &made.window).await;
                check_all(&tier, &made.after).await;
                check_fsck(&tier).await;
                tier.close().await.unwrap();
                return;
            }
            let error = loop {
                let error = tier.destage(made.window.clone(), &Payloads).await.unwrap_err().error;
                if error.kind() != ErrorKind::Unavailable {
                    break error;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        });
    }
}

#[test]
fn an_owner_that_lost_the_pool_claims_nothing() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(9);
        let mut checked = options(store.clone(), 1);
        checked.owner_check = Some(owner_check(|_| {
            Box::pin(async { Err(Error::new(ErrorKind::Fenced, "taken over")) })
        }));
        let tier = Tier::open(checked.clone()).await.unwrap();
        let count = tier.parts.metadata.map.db().seen().writer_count;
        let made = end_database(&store, &tier, &mut world).await;
        let error = loop {
            let error = tier.destage(made.window.clone(), &Payloads).await.unwrap_err().error;
            if error.kind() != ErrorKind::Unavailable {
                break error;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
        assert_eq!(Tier::open(checked).await.err().unwrap().kind(), ErrorKind::Fenced);
        let reader = Tier::open_read_only(options(store, 1)).await.unwrap();
        assert_eq!(reader.parts.metadata.map.db().seen().writer_count, count, "no claim was made");
        reader.close().await.unwrap();
    });
}

#[test]
fn clock_that_was_ahead_does_not_block_writes() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        for (epoch, hours) in [(1, 48), (2, 0), (3, 1), (4, 0)] {
            let options = options(store.clone(), epoch);
            options.database.clock.advance(Duration::from_secs(hours * 3600));
            let started = SystemClock.now();
            let tier = Tier::open(options).await.unwrap();
            let window = plain_window(epoch, vec![(1, block_extent(epoch, epoch as u8))]);
            tier.destage(window, &Payloads).await.unwrap();
            // The database waits in vain for a clock that is behind.
            assert!(SystemClock.since(started) < Duration::from_secs(5), "epoch {epoch}");
            for block in 1..=epoch {
                let mut buf = vec![0; BLOCK_BYTES as usize];
                tier.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.unwrap();
                assert!(buf.iter().all(|byte| u64::from(*byte) == block));
            }
            tier.close().await.unwrap();
        }
    });
}
