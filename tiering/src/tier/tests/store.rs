//! A store that fails, sends bad bytes, or is away: transient failures are waited out, and
//! leftovers of uploads are deleted.

use super::*;
use crate::segment::SegmentName;
use crate::segment_store::Leftover;
use crate::testing::Fault;
use block::env::{Clock, ManualClock, SystemClock};

fn leftover(path: &Path) -> Leftover {
    let name = SegmentName::parse(path).expect("it is the path of a segment");
    Leftover { name, placement: None }
}

#[test]
fn transient_and_ambiguous_failures_are_waited_out() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store = Arc::new(FaultStore::default());
            let mut world = World::new(seed);
            let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            for _ in 0..3 {
                let made = world.window(40);
                store.make_ambiguous(Op::Put, 2);
                store.fail_next(Op::Get, 1);
                tier.destage(made.window, &Payloads).await.unwrap();
                assert_eq!(tier.status().upload_failure, None, "found to have arrived");
                world.model = made.after;
                store.fail_next(Op::Put, 2);
                let made = world.window(40);
                tier.destage(made.window, &Payloads).await.unwrap();
                world.model = made.after;
            }
            assert!(tier.status().upload_retry_count > 0);
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn an_upload_that_fails_shows_why_until_one_succeeds() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(7);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(40);
        store.set_away(true);
        let destage = {
            let tier = tier.clone();
            tokio::spawn(async move { tier.destage(made.window, &Payloads).await })
        };
        let failing = async {
            loop {
                match tier.status().upload_failure {
                    Some(failure) => return failure,
                    None => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            }
        };
        let failure = tokio::time::timeout(Duration::from_secs(30), failing).await.unwrap();
        assert!(!failure.error.is_empty() && failure.age <= failure.lasts, "{failure:?}");
        let is_raised =
            || tier.conditions().is_raised(block::ConditionKind::StoreUnavailable, "upload");
        assert!(is_raised());
        store.set_away(false);
        destage.await.unwrap().unwrap();
        assert_eq!(tier.status().upload_failure, None);
        assert!(!is_raised());
        tier.close().await.unwrap();
    });
}

fn window_of(lsn: u64, start: u64, bytes: Vec<u8>) -> Window<Bytes> {
    let extent = WindowExtent {
        start_sector: start,
        sector_count: bytes.len() as u64 / SECTOR_BYTES,
        content: ExtentContent::Data(bytes.into()),
    };
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes: vec![(VolumeId(1), vec![extent])],
        stalled_volumes: Vec::new(),
        late: None,
        snapshots: Vec::new(),
    }
}

#[test]
fn destage_survives_bad_transfers_of_its_reads() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut uncached = options(store.clone(), 1);
        uncached.frames.memory_bytes = 0;
        uncached.frames.stream_bytes = 0;
        let tier = Tier::open(uncached).await.unwrap();
        tier.destage(window_of(1, 0, vec![1; 8192]), &Payloads).await.unwrap();
        // One sector of an old block: the rest of it is read from the store.
        for (lsn, fault) in [(2, Fault::Flipped), (3, Fault::Short)] {
            store.inject(Op::Get, "segments", 1, fault);
            let window = window_of(lsn, lsn, vec![lsn as u8; SECTOR]);
            let report = tier.destage(window, &Payloads).await.unwrap();
            assert_eq!((report.merged_block_count, store.clear_injected()), (1, 0));
        }
        assert_eq!(tier.status().frames.store_refetch_count, 1);
        // An upload whose answer was lost is compared with the object in the store.
        for fault in [Fault::Flipped, Fault::Short] {
            store.inject(Op::Put, "segments", 1, Fault::Unheard);
            store.inject(Op::Get, "segments", 1, fault);
            let lsn = tier.destaged_lsn().0 + 1;
            tier.destage(window_of(lsn, 64, vec![9; 4096]), &Payloads).await.unwrap();
            assert_eq!(store.clear_injected(), 0);
        }
        let mut buf = vec![0; 5 * SECTOR];
        tier.read(VolumeId(1), 0, &mut buf).await.unwrap();
        let first: Vec<u8> = buf.iter().step_by(SECTOR).copied().collect();
        assert_eq!(first, [1, 1, 2, 3, 1]);
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn a_window_given_twice_or_cancelled_is_destaged_once() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let store = Arc::new(FaultStore::new(shared));
            let mut world = World::new(seed);
            let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            store.set_delay(Duration::from_millis(2));
            let mut cancelled_count = 0;
            for round in 0..10u64 {
                let made = world.window(30);
                let patience = Duration::from_millis(round * 3);
                let first =
                    tokio::time::timeout(patience, tier.destage(made.window.clone(), &Payloads));
                if first.await.is_err() {
                    cancelled_count += 1;
                    tier.destage(made.window.clone(), &Payloads).await.unwrap();
                }
                let again = tier.destage(made.window, &Payloads).await.unwrap();
                assert!(again.was_done);
                world.model = made.after;
            }
            assert!(cancelled_count > 2, "{cancelled_count} cancelled");
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            sweep_all_abandoned(&tier).await;
            let segments = check_fsck(&tier).await.segment_count;
            let found = tier.sweep_orphans().await.unwrap();
            assert_eq!(found.object_count, segments, "nothing but named segments is left");
            check_all(&tier, &world.model).await;
            tier.close().await.unwrap();
        });
    }
}

#[test]
fn abandoned_upload_is_remembered_until_its_deletion() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(1);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let made = world.window(30);
        // Uploaded, and never committed: the source fails at the last volume.
        let mut broken = made.window.clone();
        let (volume, extents) = broken.volumes.last().unwrap().clone();
        // Volumes under one key are processed in the given order.
        tier.volume_keys().assign(VolumeId(99), tier.volume_keys().of(volume));
        let short = WindowExtent {
            start_sector: 4096,
            sector_count: 8,
            content: ExtentContent::Data(Bytes::from_static(b"short")),
        };
        broken.volumes = vec![(volume, extents), (VolumeId(99), vec![short])];
        tier.destage(broken, &Payloads).await.unwrap_err();
        tier.destage(made.window, &Payloads).await.unwrap();
        // An upload of a failed commit may turn out to be committed.
        let named =
            tier.parts.metadata.map.segments_after(0, 1).await.unwrap()[0].0.info.object_path();
        tier.parts.segments.leftovers.abandon([leftover(&named)]);
        let id = "00112233445566778899aabbccddeeff";
        let extra = Path::from(format!("segments/{:016x}/{:016x}-{id}", 1, 77_000));
        store.put(&extra, "abandoned".into()).await.unwrap();
        tier.parts.segments.leftovers.abandon([leftover(&extra)]);
        let waiting = tier.status().abandoned_count;
        assert!(waiting >= 3, "{waiting}");

        store.fail_next(Op::Delete, 1);
        store.inject(Op::Get, "segments", 1, Fault::Broken); // other requests fail too
        let error = tier.sweep_abandoned().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert_eq!(tier.status().abandoned_count, waiting, "what was not deleted stays listed");
        assert_eq!(sweep_all_abandoned(&tier).await, waiting - 1);
        assert!(store.get(&extra).await.is_err());
        store.get(&named).await.unwrap();
        check_all(&tier, &made.after).await;
        let segments = check_fsck(&tier).await.segment_count;
        assert_eq!(tier.sweep_orphans().await.unwrap().object_count, segments);

        // Beyond its bound the list forgets the oldest, and a sweep makes a bounded number of
        // requests.
        let path =
            |number: u64| Path::from(format!("segments/{:016x}/{:016x}-{id}", 1, 1000 + number));
        tier.parts.segments.leftovers.abandon((0..5000).map(|number| leftover(&path(number))));
        assert_eq!(tier.status().abandoned_count, 4096);
        store.put(&path(4999), "newest".into()).await.unwrap();
        let swept = tier.sweep_abandoned().await.unwrap();
        assert_eq!((swept.object_count, tier.status().abandoned_count), (32, 4064));
        sweep_all_abandoned(&tier).await;
        assert!(store.get(&path(4999)).await.is_err());
        tier.close().await.unwrap();
    });
}

#[test]
fn unreachable_store_at_start_is_a_prompt_error() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        store.set_away(true);
        let error = Tier::open(options(store.clone(), 1)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        store.set_away(false);
        store.go_away_after(3);
        let mut impatient = options(store, 1);
        impatient.open_timeout = Duration::from_millis(300);
        let error = Tier::open(impatient).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let said = error.chain();
        assert!(said.contains("injected fault") && said.contains("metadata/"), "{said}");
    });
}

#[test]
fn metadata_that_is_cut_short_is_damage_and_says_which_object() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(9);
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        for _ in 0..3 {
            let made = world.window(40);
            tier.destage(made.window, &Payloads).await.unwrap();
        }
        tier.close().await.unwrap();
        let tables: Vec<_> = store
            .list(Some(&Path::from("metadata/compacted")))
            .map_ok(|meta| (meta.location, meta.size))
            .try_collect()
            .await
            .unwrap();
        assert!(!tables.is_empty());
        let mut shorter_count = 0;
        for (table, size) in &tables {
            let whole = store.get(table).await.unwrap().bytes().await.unwrap();
            for cut in (0..8).map(|part| size * part / 8).chain([size - 1]) {
                let cut = usize::try_from(cut).unwrap();
                store.damage(table, |bytes| bytes.truncate(cut)).await;
                for is_read_only in [false, true] {
                    let began = SystemClock.now();
                    let opened = match is_read_only {
                        false => Tier::open(options(store.clone(), 2)).await,
                        true => Tier::open_read_only(options(store.clone(), 2)).await,
                    };
                    assert!(
                        SystemClock.since(began) < Duration::from_secs(15),
                        "{table} cut at {cut}"
                    );
                    let error = match opened {
                        // Objects that are not needed for opening, or no longer, are not examined.
                        Ok(tier) => {
                            let _ = tier.close().await;
                            continue;
                        }
                        Err(error) => error,
                    };
                    let said = error.chain();
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{table} cut at {cut}: {said}");
                    if said.contains("shorter than the metadata says") {
                        assert!(said.contains(table.as_ref()), "{said}");
                        shorter_count += 1;
                    }
                }
            }
            store.damage(table, |bytes| *bytes = whole.to_vec()).await;
        }
        assert!(shorter_count > 0, "no cut was one past which something was asked for");
    });
}

/// An object that the store does not delete, from a crash or of this epoch, is skipped; retrying it
/// needs no listing.
#[test]
fn undeletable_object_delays_nothing_and_is_retried() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(3);
        let first = Tier::open(options(store.clone(), 1)).await.unwrap();
        first.destage(world.window(30).window, &Payloads).await.unwrap();
        first.close().await.unwrap();
        let clock = ManualClock::new();
        let options = TierOptions { clock: Arc::new(clock.clone()), ..options(store.clone(), 2) };
        let tier = Tier::open(options).await.unwrap();
        let id = "00112233445566778899aabbccddeeff";
        let orphan = |epoch: u64, number: u64| {
            Path::from(format!("segments/{epoch:016x}/{number:016x}-{id}"))
        };
        for number in 100..140 {
            store.put(&orphan(1, number), "orphan".into()).await.unwrap();
        }
        let is_raised = |path: &Path| {
            let kind = block::ConditionKind::ObjectUndeletable;
            tier.conditions().is_raised(kind, path.as_ref())
        };
        // The first of them stays; the others are deleted in the same sweep.
        store.fail_next(Op::Delete, 1);
        let swept = tier.sweep_orphans().await.unwrap();
        assert_eq!((swept.deleted_count, swept.refused_count, swept.is_cut), (39, 1, false));
        let stuck = orphan(1, 100);
        store.get(&stuck).await.unwrap();
        assert!(!is_raised(&stuck), "a store may be busy once");
        // It is not retried before its time, and is not listed again.
        store.take_calls();
        tier.sweep_abandoned().await.unwrap();
        let of_segments = |call: &crate::testing::Call| call.path.as_ref().starts_with("segments");
        assert!(!store.take_calls().iter().any(of_segments));
        // Uploads of this epoch are deleted meanwhile, while it fails repeatedly.
        for round in 0..3 {
            clock.advance(Duration::from_secs(3600));
            store.put(&orphan(2, 500 + round), "abandoned".into()).await.unwrap();
            tier.parts.segments.leftovers.abandon([leftover(&orphan(2, 500 + round))]);
            store.inject_refusal(&stuck);
            let swept = tier.sweep_abandoned().await.unwrap();
            assert_eq!((swept.deleted_count, swept.refused_count), (1, 1), "round {round}");
            assert!(is_raised(&stuck));
        }
        assert_eq!(tier.status().abandoned_count, 1);
        store.clear_refusals();
        clock.advance(Duration::from_secs(3600));
        assert_eq!(tier.sweep_abandoned().await.unwrap().deleted_count, 1);
        assert!(store.get(&stuck).await.is_err() && !is_raised(&stuck));
        assert_eq!(tier.status().abandoned_count, 0);
        // If many objects stay, a sweep tries some of them, and the following sweeps skip these.
        for number in 200..240 {
            store.put(&orphan(1, number), "orphan".into()).await.unwrap();
            store.inject_refusal(&orphan(1, number));
        }
        let mut refused_count = 0;
        for is_cut in [true, true, false] {
            let swept = tier.sweep_orphans().await.unwrap();
            assert_eq!((swept.deleted_count, swept.is_cut), (0, is_cut));
            refused_count += swept.refused_count;
        }
        assert_eq!(refused_count, 40);
        tier.close().await.unwrap();
    });
}
