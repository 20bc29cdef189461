//! Damaged objects and records: they cause an error that names the damaged item, never wrong data,
//! and do not affect other volumes.

use super::*;

async fn paths(store: &dyn ObjectStore, folder: &str) -> Vec<Path> {
    use futures::TryStreamExt;
    let listing = store.list(Some(&Path::from(folder)));
    let mut paths: Vec<Path> = listing.map_ok(|meta| meta.location).try_collect().await.unwrap();
    paths.sort();
    paths
}

#[test]
fn damage_is_a_named_error_and_never_wrong_data() {
    for seed in seeds(1) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let mut world = World::new(seed);
            let tier = Tier::open(options(shared.clone(), 1)).await.unwrap();
            for _ in 0..3 {
                let made = world.window(40);
                tier.destage(made.window, &Payloads).await.unwrap();
                world.model = made.after;
            }
            tier.close().await.unwrap();
            let mut epoch = 2;
            let mut noticed_count = 0;
            for folder in ["segments", "metadata/compacted"] {
                let found = paths(&*shared, folder).await;
                for _ in 0..6 {
                    let path = &found[world.rng.below(found.len() as u64) as usize];
                    let whole = shared.get(path).await.unwrap().bytes().await.unwrap();
                    let store = FaultStore::new(shared.clone());
                    let (at, bit) =
                        (world.rng.next_u64() as usize % whole.len(), world.rng.below(8));
                    store.damage(path, |bytes| bytes[at] ^= 1 << bit).await;
                    noticed_count += u32::from(is_noticed(&shared, epoch, &world.model).await);
                    epoch += 1;
                    shared.put(path, whole.into()).await.unwrap();
                }
            }
            // Metadata that compaction has replaced is no longer read; all other damage is noticed.
            assert!(noticed_count >= 6, "{noticed_count} noticed");
            let tier = Tier::open(options(shared, epoch)).await.unwrap();
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

/// Reads everything, and checks that each read returns the right data or an error of kind
/// `Corrupt`.
async fn is_noticed(store: &Arc<dyn ObjectStore>, epoch: u64, model: &Model) -> bool {
    let is_corrupt = |error: &Error| {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        true
    };
    let tier = match Tier::open(options(store.clone(), epoch)).await {
        Ok(tier) => tier,
        Err(error) => return is_corrupt(&error),
    };
    let mut noticed = false;
    for volume in [1, 2] {
        for zone in ZONES {
            for page in 0..ZONE_BYTES / PAGE_BYTES {
                let mut buf = vec![0; PAGE_BYTES as usize];
                let offset = zone + page * PAGE_BYTES;
                match tier.read(VolumeId(volume), offset, &mut buf).await {
                    Ok(()) => assert!(buf == expected(model, volume, offset, buf.len())),
                    Err(error) => noticed |= is_corrupt(&error),
                }
            }
        }
    }
    match tier.fsck(FsckOptions::default()).await {
        Ok(report) => noticed |= !report.is_clean(),
        Err(error) => noticed |= is_corrupt(&error),
    }
    let _ = tier.close().await;
    noticed
}

#[test]
fn damaged_map_page_affects_only_its_volume() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let both = |lsn, byte| {
            plain_window(lsn, vec![(1, block_extent(0, byte)), (2, block_extent(0, byte))])
        };
        tier.destage(both(10, 1), &Payloads).await.unwrap();
        let page = crate::map::keys::page_key(crate::map::LayerId(1), 0);
        tier.parts.metadata.map.damage(&page).await;
        let failed = tier.destage(both(20, 2), &Payloads).await.unwrap_err();
        assert_eq!((failed.volume, failed.error.kind()), (Some(VolumeId(1)), ErrorKind::Corrupt));
        let check = |start, count, has_payload| {
            let tier = tier.clone();
            async move { tier.check_extents(VolumeId(1), &[(start, count, has_payload)]).await }
        };
        assert_eq!(check(0, 8, true).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(check(0, 8, false).await.unwrap_err().kind(), ErrorKind::Corrupt);
        check(PAGE_SECTORS, 8, true).await.unwrap();
        check(0, 100 * PAGE_SECTORS, false).await.unwrap();

        // Without the volume the window is accepted, and records where the rest is.
        let files = vec![NamedSpillFile { first_lsn: Lsn(11), last_lsn: Lsn(20), id: [7; 16] }];
        let mut without = plain_window(20, vec![(2, block_extent(0, 2))]);
        without.stalled_volumes = vec![(VolumeId(1), files.clone())];
        tier.destage(without, &Payloads).await.unwrap();
        let mut found = vec![0; 512];
        tier.read(VolumeId(2), 0, &mut found).await.unwrap();
        assert_eq!(found, [2; 512]);
        let report = tier.fsck(FsckOptions::default()).await.unwrap();
        let behind = "volume 1 is behind the others: its writes from LSN 11 to 20 are only in 1";
        assert!(report.differences.iter().any(|line| line.starts_with(behind)), "{report:?}");
        tier.close().await.unwrap();
        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        assert_eq!(tier.stalled_volumes(), BTreeMap::from([(VolumeId(1), files)]));

        // A trim of many pages hides the damage. It cannot be folded, but other volumes' trims can.
        let mut late = trim_window(20, 1, 0..100);
        late.stalled_volumes = vec![(VolumeId(1), Vec::new())];
        late.late = Some(Lsn(20));
        let early = Window { last_lsn: Lsn(19), ..late.clone() };
        let refused = tier.destage(early, &Payloads).await.unwrap_err();
        assert_eq!(refused.error.kind(), ErrorKind::Invalid);
        assert!(!tier.destage(late, &Payloads).await.unwrap().was_done);
        assert!(tier.stalled_volumes().is_empty());
        assert_eq!(tier.destaged_lsn(), Lsn(20));
        tier.destage(trim_window(21, 2, 0..100), &Payloads).await.unwrap();
        assert_eq!(tier.step(1000).await.unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(tier.step(1000).await.unwrap().ranges_left, 1);
        assert_eq!(tier.step(1000).await.unwrap_err().kind(), ErrorKind::Corrupt);
        tier.close().await.unwrap();
    });
}

#[test]
fn a_damaged_count_of_live_blocks_stops_no_window() {
    runtime().block_on(async {
        let tier = Tier::open(options(Arc::new(InMemory::new()), 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(0, 1))]), &Payloads).await.unwrap();
        tier.parts.metadata.map.damage(&crate::map::keys::live_key(1)).await;
        tier.parts.metadata.map.forget_live();
        tier.destage(plain_window(2, vec![(1, block_extent(0, 2))]), &Payloads).await.unwrap();
        let mut found = vec![0; 512];
        tier.read(VolumeId(1), 0, &mut found).await.unwrap();
        assert_eq!(found, [2; 512]);
        // A check still finds it.
        let failed = tier.fsck(FsckOptions::default()).await.unwrap_err();
        assert!(failed.to_string().contains("live blocks of segment 1"), "{failed}");
        tier.close().await.unwrap();
    });
}

#[test]
fn ranges_over_a_damaged_page_do_not_fill_the_list_for_others() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let tier = Tier::open(options(store, 1)).await.unwrap();
        tier.destage(plain_window(1, vec![(1, block_extent(0, 1))]), &Payloads).await.unwrap();
        let page = crate::map::keys::page_key(crate::map::LayerId(1), 0);
        tier.parts.metadata.map.damage(&page).await;
        let range_max = crate::map::ranges::WINDOW_COUNT_MAX as u64;
        let mut lsn = 1;
        let failed = loop {
            lsn += 1;
            match tier.destage(trim_window(lsn, 1, 0..100), &Payloads).await {
                Ok(_) => assert!(lsn < 2 * range_max, "the list has no bound"),
                Err(failed) => break failed,
            }
        };
        assert_eq!((failed.volume, failed.error.kind()), (Some(VolumeId(1)), ErrorKind::Corrupt));
        for _ in 0..20 {
            lsn += 1;
            tier.destage(trim_window(lsn, 2, 0..100), &Payloads).await.unwrap();
            assert!(tier.status().map.range_count as u64 <= range_max + 1);
        }
        tier.close().await.unwrap();
    });
}
