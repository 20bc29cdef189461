//! Effect of windows on a volume: with concurrent reads, of any size, and with catch-up windows in any
//! order.

use super::*;
use block::env::{Clock, SystemClock};

/// Reads at random until told to stop. As with the overlay in front, a read may see the state
/// before or after the window in flight. Returns the number of reads that could be checked.
async fn read_beside(
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
        tier.read(VolumeId(volume), offset, &mut buf).await.unwrap();
        let after = between.lock().begun.clone();
        if after.0 > before.0 + 1 {
            tokio::task::yield_now().await;
            continue; // it lasted longer than a window
        }
        let before = expected(&before.1, volume, offset, buf.len());
        let after = expected(&after.1, volume, offset, buf.len());
        for at in 0..buf.len() {
            let is_right = buf[at] == before[at] || buf[at] == after[at];
            assert!(is_right, "volume {volume}, byte {}", offset + at as u64);
        }
        count += 1;
        tokio::time::sleep(Duration::from_micros(300)).await; // a hit in memory never waits
    }
    count
}

#[test]
fn reads_beside_a_destage_see_each_block_before_or_after_it() {
    for seed in seeds(2) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store = Arc::new(FaultStore::default());
            let mut small = options(store.clone(), 1);
            small.map.page_cache_bytes = 48 << 10; // pages come and go
            let tier = Tier::open(small).await.unwrap();
            store.set_delay(Duration::from_micros(200));
            let mut world = World::new(seed);
            let empty = (0, Arc::new(Model::new()));
            let between = Between { settled: empty.clone(), begun: empty };
            let between = Arc::new(parking_lot::Mutex::new(between));
            let stop = Arc::new(AtomicBool::new(false));
            let reader = |number: u64| {
                let rng = Rng::new(seed * 100 + number);
                tokio::spawn(read_beside(tier.clone(), between.clone(), stop.clone(), rng))
            };
            let readers = [reader(0), reader(1), reader(2)];
            for number in 1..=25 {
                let made = world.window(6);
                let after = (number, Arc::new(made.after.clone()));
                between.lock().begun = after.clone();
                tier.destage(made.window, &Payloads).await.unwrap();
                tier.step(1).await.unwrap();
                between.lock().settled = after;
                world.model = made.after;
            }
            stop.store(true, Ordering::Relaxed);
            let mut read_count = 0;
            for reader in readers {
                read_count += reader.await.unwrap();
            }
            assert!(read_count > 50, "{read_count} reads");
            check_all(&tier, &world.model).await;
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}

fn scattered_window(rng: &mut Rng, lsn: u64, block_count: u64, volume_bytes: u64) -> Window<Bytes> {
    let mut extents = Extents::default();
    let payload = Bytes::from(rng.bytes(BLOCK_BYTES as usize, 50));
    for _ in 0..block_count {
        let start = rng.below(volume_bytes / BLOCK_BYTES) * 8;
        extents.insert(start, start + 8, Some(payload.clone()));
    }
    let volumes = vec![(VolumeId(1), extents.into_extents())];
    Window {
        last_lsn: Lsn(lsn),
        volume_records: Vec::new(),
        volumes,
        stalled_volumes: Vec::new(),
        late: None,
        snapshots: Vec::new(),
    }
}

#[test]
fn a_volume_of_100_tib_stays_within_the_budget_and_is_trimmed_at_once() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut small = options(store.clone(), 1);
        small.segment_bytes = 16 << 20;
        small.map.page_cache_bytes = 1 << 20;
        let tier = Tier::open(small.clone()).await.unwrap();
        let mut rng = Rng::new(5);
        let volume_bytes = 100 << 40;
        for lsn in 1..=4 {
            let window = scattered_window(&mut rng, lsn, 10_000, volume_bytes);
            tier.destage(window, &Payloads).await.unwrap();
            assert!(tier.status().map.page_cache_bytes <= 1 << 20);
        }
        tier.close().await.unwrap();
        let started = SystemClock.now();
        small.epoch = Epoch(2);
        let tier = Tier::open(small).await.unwrap();
        assert!(
            SystemClock.since(started) < Duration::from_secs(2),
            "open took {:?}",
            SystemClock.since(started)
        );
        assert_eq!(tier.status().map.page_count, 0);

        let extents = vec![WindowExtent {
            start_sector: 3,
            sector_count: volume_bytes / SECTOR_BYTES - 7,
            content: ExtentContent::Zero,
        }];
        let trim = Window {
            last_lsn: Lsn(9),
            volume_records: Vec::new(),
            volumes: vec![(VolumeId(1), extents)],
            stalled_volumes: Vec::new(),
            late: None,
            snapshots: Vec::new(),
        };
        let started = SystemClock.now();
        let report = tier.destage(trim, &Payloads).await.unwrap();
        assert!(
            SystemClock.since(started) < Duration::from_secs(1),
            "trim took {:?}",
            SystemClock.since(started)
        );
        assert_eq!(report.commit.range_count, 1);
        let found = tier.allocation(VolumeId(1), 0, volume_bytes, 10).await.unwrap();
        assert!(found.iter().all(|extent| extent.is_hole), "{found:?}");
        check_fsck(&tier).await;
        let mut looked_at = 0;
        loop {
            let report = tier.step(1000).await.unwrap();
            assert!(report.page_count <= 1000);
            looked_at += report.page_count;
            if report.ranges_left == 0 {
                break;
            }
        }
        assert!((39_000..=40_000).contains(&looked_at), "{looked_at} pages");
        let report = check_fsck(&tier).await;
        assert_eq!((report.page_count, report.block_count), (0, 0));
        tier.close().await.unwrap();
    });
}

#[test]
fn late_windows_at_one_lsn_count_in_their_order() {
    runtime().block_on(async {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let mut tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let late = |mut window: Window<Bytes>, is_last: bool| {
            window.late = Some(window.last_lsn);
            let file = NamedSpillFile { first_lsn: Lsn(1), last_lsn: Lsn(9), id: [7; 16] };
            let left = if is_last { Vec::new() } else { vec![file] };
            window.stalled_volumes = vec![(VolumeId(1), left)];
            window
        };
        let at = |page: u64| page * PAGE_SECTORS;
        tier.destage(plain_window(10, vec![(1, block_extent(at(5) / 8, 1))]), &Payloads)
            .await
            .unwrap();
        // A trim of many pages, then data in the middle of it, then another trim, and data again;
        // nothing is folded in between, and the owner crashes once.
        tier.destage(late(trim_window(10, 1, 0..100), false), &Payloads).await.unwrap();
        tier.destage(
            late(plain_window(10, vec![(1, block_extent(at(50) / 8, 2))]), false),
            &Payloads,
        )
        .await
        .unwrap();
        tier.close().await.unwrap();
        tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.destage(late(trim_window(10, 1, 60..160), false), &Payloads).await.unwrap();
        tier.destage(
            late(plain_window(10, vec![(1, block_extent(at(70) / 8, 3))]), true),
            &Payloads,
        )
        .await
        .unwrap();
        let expected = [(5, 0), (50, 2), (70, 3), (71, 0)];
        for round in 0..3 {
            tier.parts.metadata.map.forget_pages();
            for (page, byte) in expected {
                let mut found = vec![0xee; 512];
                tier.read(VolumeId(1), at(page) * SECTOR_BYTES, &mut found).await.unwrap();
                assert_eq!(found, [byte; 512], "page {page}, round {round}");
            }
            while tier.step(1000).await.unwrap().ranges_left > 0 {}
        }
        check_fsck(&tier).await;
        tier.close().await.unwrap();
    });
}

/// Compared with a model of one bit per sector.
#[test]
fn partial_blocks_are_those_that_a_window_has_to_complete() {
    let mut rng = Rng::new(3);
    for _ in 0..2000 {
        let (mut extents, mut at) = (Vec::new(), 0);
        let mut have = vec![false; 400];
        while at < 300 {
            at += rng.below(20);
            let count = 1 + rng.below(40);
            extents.push((at, count, true));
            have[at as usize..(at + count) as usize].fill(true);
            at += count;
        }
        let is_partial = |block: &[bool]| block.contains(&true) && block.contains(&false);
        let blocks = have.chunks(8).enumerate();
        let wanted: Vec<u64> =
            blocks.filter(|(_, block)| is_partial(block)).map(|(index, _)| index as u64).collect();
        assert_eq!(crate::destage::partial_blocks(&extents), wanted, "{extents:?}");
    }
}

/// Trims with writes between them, in one window, over existing data: every step of folding shows
/// the same contents.
#[test]
fn trims_and_writes_of_one_window_fold_step_by_step() {
    const PAGES: u64 = 700;
    const BLOCKS: u64 = PAGE_BYTES / BLOCK_BYTES;
    let blocks_of = |first: u64, count: u64, byte: Option<u8>| WindowExtent {
        start_sector: first * 8,
        sector_count: count * 8,
        content: match byte {
            Some(byte) => {
                ExtentContent::Data(Bytes::from(vec![byte; (count * BLOCK_BYTES) as usize]))
            }
            None => ExtentContent::Zero,
        },
    };
    for seed in seeds(6) {
        println!("SEED={seed}");
        runtime().block_on(async {
            let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let mut tier = Tier::open(options(store.clone(), 1)).await.unwrap();
            let mut rng = Rng::new(seed);
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            for lsn in 1..=4 {
                let mut extents = Vec::new();
                let mut block = 0;
                while block < PAGES * BLOCKS {
                    match rng.below(4) {
                        0 => {
                            let byte = 1 + rng.below(250) as u8;
                            extents.push(blocks_of(block, 1, Some(byte)));
                            model.insert(block, byte);
                            block += 1;
                        }
                        1 if lsn > 1 => {
                            let most = if rng.below(2) == 0 { 30 } else { 120 };
                            let count = 1 + rng.below(most * BLOCKS);
                            let count = count.min(PAGES * BLOCKS - block);
                            extents.push(blocks_of(block, count, None));
                            model.retain(|at, _| !(block..block + count).contains(at));
                            block += count;
                        }
                        // A page boundary, or a random block.
                        2 => block = (block / BLOCKS + 1) * BLOCKS,
                        _ => block += 1 + rng.below(20 * BLOCKS),
                    }
                }
                let mut window = plain_window(lsn, Vec::new());
                window.volumes = vec![(VolumeId(1), extents)];
                tier.destage(window, &Payloads).await.unwrap();
                let check = async |tier: &Tier, rng: &mut Rng| {
                    let known: Vec<u64> = model.keys().copied().collect();
                    for turn in 0..60 {
                        let block = match turn % 2 {
                            0 if !known.is_empty() => known[rng.below(known.len() as u64) as usize],
                            _ => rng.below(PAGES * BLOCKS),
                        };
                        let mut buf = vec![0xee; BLOCK_BYTES as usize];
                        tier.read(VolumeId(1), block * BLOCK_BYTES, &mut buf).await.unwrap();
                        let want = model.get(&block).copied().unwrap_or(0);
                        assert!(buf.iter().all(|byte| *byte == want), "LSN {lsn}, block {block}");
                    }
                };
                check(&tier, &mut rng).await;
                // Some windows come before everything is folded.
                let mut steps_left = 1 + rng.below(if lsn == 4 { 10_000 } else { 12 });
                while steps_left > 0 {
                    let budget = 1 + rng.below(40) as usize;
                    let done = tier.step(budget).await.unwrap();
                    if rng.below(3) == 0 {
                        check(&tier, &mut rng).await;
                    }
                    steps_left = if done.ranges_left == 0 { 0 } else { steps_left - 1 };
                }
                check_fsck(&tier).await;
                if rng.below(2) == 0 {
                    tier.close().await.unwrap();
                    tier = Tier::open(options(store.clone(), 1 + lsn)).await.unwrap();
                    check(&tier, &mut rng).await;
                }
            }
            fold_all(&tier).await;
            let mut buf = vec![0; PAGE_BYTES as usize];
            for page in 0..PAGES {
                tier.read(VolumeId(1), page * PAGE_BYTES, &mut buf).await.unwrap();
                for (at, bytes) in buf.chunks(BLOCK_BYTES as usize).enumerate() {
                    let want = model.get(&(page * BLOCKS + at as u64)).copied().unwrap_or(0);
                    assert!(bytes.iter().all(|byte| *byte == want), "page {page}, block {at}");
                }
            }
            check_fsck(&tier).await;
            tier.close().await.unwrap();
        });
    }
}
