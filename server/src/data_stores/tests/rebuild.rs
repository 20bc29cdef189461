//! The check after a rebuild: a pool counts as rebuilt once its stores were asked for every fragment.

use super::*;
use datanode::FragmentName;
use engine::pool_jobs::run_rebuild;
use engine::rebuild::{CheckStatus, RebuildStatus};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;

/// Of so many segments, the check verifies one by checksum; see the engine.
const SAMPLE: u64 = 16;

/// The fragments in a store, with their files.
pub(super) fn fragments(store: &Path) -> Vec<(FragmentName, PathBuf)> {
    let mut found = Vec::new();
    let mut folders = vec![store.join("fragments")];
    while let Some(folder) = folders.pop() {
        // A store that has got nothing yet has no folder.
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(store).unwrap().to_str().unwrap();
            found.extend(FragmentName::parse(&name.into()).map(|name| (name, path)));
        }
    }
    found
}

/// Writes until the stores have fragments of two segments of which the first one has none: the second of these is in
/// the sample. Returns one fragment of each.
async fn two_fragments(place: &Place, open: &OpenPool) -> (PathBuf, (u64, PathBuf)) {
    // Half of the segments have nothing on the first store, and one of 16 is in the sample: that none of 1,600 is
    // both has a probability of 2^-100.
    for round in 1..=1600 {
        write(open, round * 100).await;
        let stores: Vec<_> = place.stores.iter().map(|store| fragments(store)).collect();
        let first: BTreeSet<u64> =
            stores[0].iter().map(|(name, _)| name.segment.number.0).collect();
        let mut others: BTreeMap<u64, Vec<PathBuf>> = BTreeMap::new();
        for (name, path) in stores.into_iter().skip(1).flatten() {
            others.entry(name.segment.number.0).or_default().push(path);
        }
        // One that a late store has, too, may not be named.
        others.retain(|number, paths| paths.len() == 2 && !first.contains(number));
        let (samples, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(number, _)| number.is_multiple_of(SAMPLE));
        if let (Some((_, one)), Some((number, other))) = (others.first(), samples.first()) {
            return (one[0].clone(), (*number, other[0].clone()));
        }
    }
    panic!("half of the segments have nothing on the first store");
}

/// Runs the rebuild until the check after it has ended.
async fn rebuilt(open: &Arc<OpenPool>) -> CheckStatus {
    let (stop, stopped) = watch::channel(false);
    let job = tokio::spawn(run_rebuild(Arc::clone(open), stopped));
    let ended = async {
        loop {
            match open.rebuild.status().check {
                Some(check) if check.is_whole => return check,
                _ => tokio::task::yield_now().await,
            }
        }
    };
    let check = tokio::time::timeout(Duration::from_secs(60), ended).await.expect("it ends");
    stop.send_replace(true);
    job.await.unwrap();
    check
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rebuild_is_done_once_the_stores_were_asked_for_all_fragments() {
    let place = Place::new("1+1", 4);
    let open = Arc::new(place.open().await.unwrap());
    let (missing, (number, damaged)) = two_fragments(&place, &open).await;
    assert_eq!(open.rebuild.status().check, None);
    // A fragment disappears, and another one is damaged, while their records stay as they are.
    std::fs::remove_file(&missing).unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    stores_of(&open).drain(&[url(&place.stores[0])]).await.unwrap();
    let check = rebuilt(&open).await;
    let status = open.rebuild.status();
    assert_eq!((check.listed_count, check.left_seconds), (check.store_count, None), "{check:?}");
    assert!(check.segment_count > check.verified_count && check.verified_count > 0, "{check:?}");
    let deep = open.pool.tier().rebuild(number, tiering::segment_store::Depth::Checksums).await;
    assert!(deep.unwrap().is_some_and(|deep| deep.fragment_count == 0), "it was damaged");
    for store in stores_of(&open).status().stores {
        assert_eq!(open.pool.tier().unlisted(store.number).await.unwrap(), [0; 0], "{}", store.url);
    }
    assert!(status.fragment_count > 0 && status.left_seconds.is_none(), "{status:?}");
    Arc::into_inner(open).expect("the job has ended").close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_comes_back_with_less_than_it_had_gets_it_again() {
    let place = Place::new("1+1", 2);
    let open = Arc::new(place.open().await.unwrap());
    write(&open, 100).await;
    let (stop, stopped) = watch::channel(false);
    let job = tokio::spawn(run_rebuild(Arc::clone(&open), stopped));
    let until = async |is_so: &dyn Fn(&RebuildStatus) -> bool| {
        let waiting = async {
            while !is_so(&open.rebuild.status()) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it comes to be so");
    };
    let survives = |status: &RebuildStatus, losses| {
        status.redundancy.as_ref().is_some_and(|found| found.bytes.keys().eq([&Some(losses)]))
    };
    until(&|status| survives(status, 1)).await;
    place.unmount(0);
    stores_of(&open).look().await;
    until(&|status| survives(status, 0)).await;
    // The disk is that of an earlier backup.
    let (name, _) = fragments(&place.aside(0)).pop().expect("it has one");
    std::fs::remove_file(place.aside(0).join(name.path().as_ref())).unwrap();
    place.mount(0);
    stores_of(&open).look().await;
    until(&|status| status.fragment_count == 1 && survives(status, 1)).await;
    assert!(!place.stores[0].join(name.path().as_ref()).exists(), "its name is another one");
    until(&|status| status.check.as_ref().is_some_and(|check| check.is_whole)).await;
    stop.send_replace(true);
    job.await.unwrap();
    Arc::into_inner(open).expect("the job has ended").close().await.unwrap();
}

#[cfg(feature = "failpoints")]
#[test]
fn rebuild_that_calls_itself_done_early_is_found() {
    let test =
        "data_stores::tests::rebuild::rebuild_is_done_once_the_stores_were_asked_for_all_fragments";
    for (bug, is_passed) in [("", true), ("rebuild-unchecked", false)] {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).env("SPINDLE_SEEDED_BUGS", bug);
        let output = command.stderr(std::process::Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("running 1 test"), "there is no test {test}: {text}");
        assert_eq!(output.status.success(), is_passed, "{bug:?}: {text}");
    }
}
