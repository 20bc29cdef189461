//! Hints: the work that they start is bounded while the store hangs, and the fetched data is
//! available.

use super::keep::{end_database, patient_options, patient_runtime};
use super::*;
use crate::testing::Fault;
use crate::tier::hints::PREFETCH_COUNT_MAX;

const MIB: u64 = 1 << 20;

/// Makes blocks of noise, so that a frame is as large in the store as in memory.
fn noise(lsn: u64, start_sector: u64, byte_count: usize) -> Window<Bytes> {
    let content = ExtentContent::Data(Rng::new(lsn).bytes(byte_count, 100).into());
    let sector_count = byte_count as u64 / SECTOR_BYTES;
    let mut window = plain_window(lsn, Vec::new());
    window.volumes.push((VolumeId(1), vec![WindowExtent { start_sector, sector_count, content }]));
    window
}

async fn settled(what: &str, is_settled: impl Fn() -> bool) {
    let settling = async {
        while !is_settled() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(600), settling).await.expect(what);
}

/// Maximum number of tasks that hints add: their own, the fetches that they wait for, and tasks
/// that the database may have begun meanwhile.
const TASK_COUNT_MAX: usize = 3 * PREFETCH_COUNT_MAX;

fn is_idle(tier: &Tier) -> bool {
    tier.parts.jobs.prefetch.hint_places.available_permits() == PREFETCH_COUNT_MAX
}

/// Sends many hints. Returns the number of tasks that they added, and of hints that were dropped.
async fn flood(tier: &Tier) -> (usize, u64) {
    let metrics = Handle::current().metrics();
    let (tasks, dropped) = (metrics.num_alive_tasks(), tier.status().hint_dropped_count);
    for hint in 0..2048 {
        tier.prefetch(VolumeId(1), hint * BLOCK_BYTES, BLOCK_BYTES);
        if hint % 64 == 0 {
            // Let the earlier hints get as far as they can.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    let dropped = tier.status().hint_dropped_count - dropped;
    (metrics.num_alive_tasks().saturating_sub(tasks), dropped)
}

#[test]
fn hints_are_bounded_while_the_store_stands_still() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        tier.destage(noise(1, 0, 8 << 20), &Payloads).await.unwrap();
        store.hold_gets(true);
        let (tasks, dropped) = flood(&tier).await;
        assert!(tasks <= TASK_COUNT_MAX, "{tasks} tasks wait for segments");
        // A hint for a frame that is being fetched already ends at once, so more hints than the
        // bound were accepted: one for each block of the frames that are under way.
        assert!(dropped > 2048 - 16 * PREFETCH_COUNT_MAX as u64, "{dropped} hints were dropped");
        assert!(!is_idle(&tier));
        store.hold_gets(false);
        settled("the hints end when the store answers", || is_idle(&tier)).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn hints_are_bounded_while_the_metadata_stands_still() {
    patient_runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let mut world = World::new(5);
        let tier = Tier::open(patient_options(store.clone(), 1)).await.unwrap();
        tier.destage(world.window(40).window, &Payloads).await.unwrap();
        store.inject(Op::List, "metadata", u64::MAX, Fault::Denied);
        end_database(&store, &tier, &mut world).await;
        tier.parts.metadata.map.forget_pages();
        let (tasks, dropped) = flood(&tier).await;
        assert!(tasks <= TASK_COUNT_MAX, "{tasks} tasks wait for the metadata");
        assert_eq!(dropped, 2048 - PREFETCH_COUNT_MAX as u64);
        store.clear_injected();
        settled("the hints end when the metadata is back", || is_idle(&tier)).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn a_read_after_a_prefetch_asks_the_store_for_nothing() {
    runtime().block_on(async {
        let store = Arc::new(FaultStore::default());
        let tier = Tier::open(options(store.clone(), 1)).await.unwrap();
        let window = noise(1, 0, 4 << 20);
        let ExtentContent::Data(written) = window.volumes[0].1[0].content.clone() else {
            unreachable!("the window has data")
        };
        tier.destage(window, &Payloads).await.unwrap();
        tier.close().await.unwrap();

        let tier = Tier::open(options(store.clone(), 2)).await.unwrap();
        tier.prefetch(VolumeId(1), MIB, 2 * MIB);
        settled("the prefetch ends", || is_idle(&tier)).await;
        let before = tier.status().frames;
        assert!(before.ahead_frame_count > 0 && before.ahead_dropped_count == 0, "{before:?}");
        store.take_calls();

        // One read from the middle, so that no stream is detected that would read ahead.
        let mut buf = vec![0; MIB as usize];
        tier.read(VolumeId(1), MIB + MIB / 2, &mut buf).await.unwrap();
        let from = (MIB + MIB / 2) as usize;
        assert!(buf[..] == written[from..from + buf.len()]);
        let after = tier.status().frames;
        assert_eq!(after.store_request_count, before.store_request_count);
        assert_eq!(after.store_frame_count, before.store_frame_count);
        let of_segments = store.take_calls();
        let of_segments = of_segments.iter().filter(|call| call.path.as_ref().contains("segments"));
        assert_eq!(of_segments.count(), 0);
        tier.close().await.unwrap();
    });
}
