//! Pools whose segments are in data stores and in the object store.

use super::*;
use engine::pool_jobs::run_tiers;
use engine::tiers::TiersStatus;
use std::time::Duration;
use tiering::tiers::{TierOutcome, TierStep};
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
    let policy = TierPolicy { tiers: Tiers::Both, cold_after: Duration::ZERO };
    let plan = open.pool.tier().tier_plan(policy).await.unwrap();
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
    let numbers = open.pool.tier().tier_plan(policy).await.unwrap().copy;
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
