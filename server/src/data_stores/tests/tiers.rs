//! Pools whose segments are in data stores and in the object store.

use super::*;
use engine::pool_jobs::run_tiers;
use engine::tiers::TiersStatus;
use std::time::Duration;
use tiering::tiers::{TierOutcome, TierRoom, TierStep};
use tokio::sync::watch;

impl Place {
    fn with_tiers(self, tiers: &'static str) -> Place {
        Place { tiers, ..self }
    }

    /// The objects of segments.
    fn segments(&self) -> PathBuf {
        self.dir.path().join("one").join("store").join("segments")
    }

    fn fragment_count(&self) -> usize {
        let folders = self.stores.iter().map(|store| store.join("fragments"));
        folders.filter(|folder| folder.exists()).map(|folder| file_count(&folder)).sum()
    }
}

/// Data stores of 100 GiB, each of which tells that this many GiB are free.
#[derive(Debug)]
struct Telling {
    inner: Arc<dyn OpenDataStores>,
    free: Mutex<u64>,
}

#[async_trait]
impl OpenDataStores for Telling {
    fn status(&self) -> DataStoresStatus {
        let mut status = self.inner.status();
        for store in &mut status.stores {
            store.total_bytes = Some(100 << 30);
            store.free_bytes = Some(*self.free.lock() << 30);
        }
        status
    }

    fn segments(&self) -> Arc<dyn SegmentStore> {
        self.inner.segments()
    }

    async fn look(&self) {
        self.inner.look().await;
    }

    fn clean_unfinished(&self) {
        self.inner.clean_unfinished();
    }

    fn places(&self) -> Vec<(Store, object_store::path::Path)> {
        self.inner.places()
    }

    async fn forget_unnamed(&self, named: &BTreeSet<u32>) -> Result<()> {
        self.inner.forget_unnamed(named).await
    }

    async fn drain(&self, stores: &[String]) -> Result<()> {
        self.inner.drain(stores).await
    }

    async fn undrain(&self, stores: &[String]) -> Result<()> {
        self.inner.undrain(stores).await
    }

    async fn replace(&self, old: &str, new: &NewDataStore) -> Result<()> {
        self.inner.replace(old, new).await
    }

    async fn watch_media_group(&self) {
        self.inner.watch_media_group().await;
    }

    async fn set_rebalancing(&self, is_rebalancing: bool) -> Result<()> {
        self.inner.set_rebalancing(is_rebalancing).await
    }

    async fn room(&self, numbers: &BTreeSet<u32>) -> Room {
        self.inner.room(numbers).await
    }
}

/// Runs the job until its state is as wanted.
async fn run_until(open: OpenPool, is_so: impl Fn(&TiersStatus) -> bool) -> OpenPool {
    let (open, stop) = (Arc::new(open), watch::Sender::new(false));
    let job = tokio::spawn(run_tiers(open.clone(), stop.subscribe()));
    let waiting = async {
        while !is_so(&open.tiers.status()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(60), waiting).await;
    assert!(in_time.is_ok(), "{:?}", open.tiers.status());
    stop.send_replace(true);
    job.await.unwrap();
    Arc::into_inner(open).expect("the job has ended")
}

/// Drops everything, as if it were cold.
async fn drop_all(open: &OpenPool) -> usize {
    let policy = TierPolicy { tiers: Tiers::Both, cold_after: Duration::ZERO, free_min: 0 };
    let plan = open.pool.tier().tier_plan(policy, TierRoom::default()).await.unwrap();
    assert!(plan.copy.is_empty(), "{plan:?}");
    for number in &plan.drop {
        let dropped = open.pool.tier().change_tiers(*number, TierStep::Drop).await.unwrap();
        assert!(matches!(dropped, TierOutcome::Done(_)), "{dropped:?}");
    }
    plan.drop.len()
}

fn is_copied(status: &TiersStatus) -> bool {
    status.copied.segment_count > 0 && status.to_copy.segment_count == 0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_are_copied_and_survive_the_loss_of_all_data_stores() {
    let place = Place::new("2+1", 3).with_tiers("both");
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let fragment_count = place.fragment_count();
    assert!(fragment_count > 0 && !place.segments().exists(), "they are written to data stores");
    let open = run_until(open, is_copied).await;
    let copied = open.tiers.status().copied;
    assert_eq!(file_count(&place.segments()) as u64, copied.segment_count);
    assert_eq!(place.fragment_count(), fragment_count);
    (0..3).for_each(|index| place.unmount(index));
    read(&open, 100).await.unwrap();
    assert!(stores_of(&open).status().object_read_count > 0);
    (0..3).for_each(|index| place.mount(index));
    open.close().await.unwrap();
    // What was dropped and not yet deleted is deleted by the next owner.
    let open = place.open().await.unwrap();
    assert_eq!(drop_all(&open).await as u64, copied.segment_count);
    assert_eq!(place.fragment_count(), fragment_count);
    open.close().await.unwrap();
    let open = place.open().await.unwrap();
    assert_eq!(open.pool.tier().sweep_unnamed().await.unwrap(), fragment_count as u64);
    assert_eq!(place.fragment_count(), 0);
    read(&open, 100).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn little_room_shows_in_the_status_and_segments_written_lately_stay() {
    let place = Place::new("2+1", 3).with_tiers("both");
    let mut open = place.open().await.unwrap();
    write(&open, 100).await;
    let stores = Arc::new(Telling { inner: stores_of(&open), free: Mutex::new(60) });
    open.data_stores = Some(stores.clone() as Arc<dyn OpenDataStores>);
    let open = run_until(open, is_copied).await;
    assert!(!open.tiers.status().is_short);
    *stores.free.lock() = 10;
    write(&open, 200).await;
    let copied = open.tiers.status().copied.segment_count;
    let is_copied = |status: &TiersStatus| {
        status.is_short && status.copied.segment_count > copied && status.to_copy.segment_count == 0
    };
    let open = run_until(open, is_copied).await;
    let status = open.tiers.status();
    assert_eq!((status.to_drop.segment_count, status.dropped.segment_count), (0, 0), "{status:?}");
    // Between the marks it lasts.
    *stores.free.lock() = 24;
    write(&open, 300).await;
    let copied = status.copied.segment_count;
    let open = run_until(open, |status| status.copied.segment_count > copied).await;
    assert!(open.tiers.status().is_short);
    *stores.free.lock() = 26;
    let open = run_until(open, |status| !status.is_short).await;
    read(&open, 300).await.unwrap();
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_store_that_takes_nothing_shows_in_the_status_and_is_tried_again() {
    let place = Place::new("2+1", 3).with_tiers("both");
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    // A file is where the folder of the segments would be made.
    std::fs::write(place.segments(), "full").unwrap();
    let open = run_until(open, |status| status.failure.is_some()).await;
    let status = open.tiers.status();
    assert!(status.to_copy.segment_count > 0 && status.copied.segment_count == 0, "{status:?}");
    assert!(status.failure.unwrap().contains("write the object of segment"));
    read(&open, 100).await.unwrap();
    std::fs::remove_file(place.segments()).unwrap();
    let open = run_until(open, is_copied).await;
    assert_eq!(open.tiers.status().failure, None);
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_that_cannot_be_moved_do_not_keep_others_from_it() {
    let place = Place::new("1+1", 2).with_tiers("both");
    let open = place.open().await.unwrap();
    for from in [100, 200, 300, 400] {
        write(&open, from).await;
    }
    let policy = stores_of(&open).status().policy;
    let plan = open.pool.tier().tier_plan(policy, TierRoom::default()).await.unwrap();
    let numbers = plan.copy;
    assert!(numbers.len() > 6, "{numbers:?}");
    // The first four have lost all fragments.
    let lost = &numbers[..4];
    for store in &place.stores {
        for (name, path) in super::rebuild::fragments(store) {
            if lost.contains(&name.segment.number.0) {
                std::fs::remove_file(path).unwrap();
            }
        }
    }
    let rest = (numbers.len() - lost.len()) as u64;
    let open = run_until(open, |status| status.copied.segment_count == rest).await;
    let status = open.tiers.status();
    assert_eq!(status.to_copy.segment_count, 4, "{status:?}");
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_stores_may_leave_once_all_segments_are_objects() {
    let place = Place::new("2+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    open.close().await.unwrap();
    let mut place = place.with_tiers("object-store");
    let stores = std::mem::take(&mut place.stores);
    let open = place.open().await.unwrap();
    assert!(stores_of(&open).status().stores.iter().all(|store| store.is_leaving));
    write(&open, 200).await;
    read(&open, 200).await.unwrap();
    let is_done = |status: &TiersStatus| {
        status.dropped.segment_count > 0
            && status.to_copy.segment_count + status.to_drop.segment_count == 0
    };
    let open = run_until(open, is_done).await;
    let (found, _) = open.pool.tier().redundancy().await.unwrap();
    assert!(found.stores.is_empty() && found.is_complete, "{found:?}");
    stores_of(&open).forget_unnamed(&BTreeSet::new()).await.unwrap();
    assert!(stores_of(&open).status().stores.is_empty());
    open.close().await.unwrap();
    stores.iter().for_each(|store| std::fs::remove_dir_all(store).unwrap());
    let open = place.open().await.unwrap();
    read(&open, 200).await.unwrap();
    open.close().await.unwrap();
}
