//! The space that data stores have left, as far as they tell.
//!
//! Invariants:
//! - A file system counts once, however many stores are on it.
//! - A directory that does not answer in time is one of unknown space: its drive may hang.

use async_trait::async_trait;
use block::env::Clock;
use config::DriveUrl;
use control::store::Store;
use datanode::RoomTeller;
use dnode::WearWatch;
use engine::data_stores::Room;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a file system. Chosen by hand: a person waits for the answer.
const TIME_MAX: Duration = Duration::from_secs(3);

/// A place whose room is counted once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Counted {
    /// The number of a file system.
    FileSystem(u64),
    /// The URL of a drive of a data node.
    Drive(String),
}

/// The room of a file system.
#[derive(Clone, Copy, Debug)]
struct Space {
    /// Its number.
    device: u64,
    total_bytes: u64,
    free_bytes: u64,
}

/// A data store in a directory, which knows its room and the wear of its disks.
#[derive(Debug)]
pub(super) struct Directory {
    dir: PathBuf,
    wear: WearWatch,
}

impl Directory {
    pub(super) fn new(dir: PathBuf, clock: Arc<dyn Clock>) -> Directory {
        Directory { dir, wear: WearWatch::new(clock) }
    }
}

#[async_trait]
impl RoomTeller for Directory {
    async fn room(&self) -> object_store::Result<Option<datanode::Room>> {
        self.wear.look(&self.dir);
        let dir = self.dir.clone();
        let asked = tokio::task::spawn_blocking(move || space_of(&dir)).await;
        let found = asked.map_err(|cause| object_store::Error::JoinError { source: cause })?;
        Ok(found.map(|Space { total_bytes, free_bytes, .. }| datanode::Room {
            total_bytes,
            free_bytes,
            wear: self.wear.why(),
        }))
    }
}

/// Returns the space that the stores with these URLs have left. Data nodes have told theirs.
pub(super) async fn of_stores(stores: Vec<(String, Option<u64>)>) -> Room {
    let found = stores.iter().map(|(url, told)| of_store(url, *told));
    let found = futures::future::join_all(found).await;
    let known: BTreeMap<Counted, u64> = found.iter().flatten().cloned().collect();
    Room {
        known_bytes: known.into_values().fold(0, u64::saturating_add),
        unknown_count: found.iter().filter(|found| found.is_none()).count(),
    }
}

/// The place of a store whose room is known, and the bytes that it has left.
async fn of_store(url: &str, told: Option<u64>) -> Option<(Counted, u64)> {
    if DriveUrl::parse(url).ok()?.is_some() {
        return Some((Counted::Drive(url.to_owned()), told?));
    }
    let dir = Store::dir_of(url).ok()??;
    let asked = tokio::task::spawn_blocking(move || space_of(&dir));
    let found = tokio::time::timeout(TIME_MAX, asked).await.ok()?.ok()??;
    Some((Counted::FileSystem(found.device), found.free_bytes))
}

fn space_of(dir: &Path) -> Option<Space> {
    let device = std::fs::metadata(dir).ok()?.dev();
    let found = rustix::fs::statvfs(dir).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
    let (total_bytes, free_bytes) = (bytes(found.f_blocks), bytes(found.f_bavail));
    // Some file systems report no size.
    (total_bytes > 0).then_some(Space { device, total_bytes, free_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn file_system_counts_once_and_what_is_elsewhere_is_unknown() {
        let place = tempfile::tempdir().unwrap();
        let dirs = ["a", "b"].map(|name| place.path().join(name));
        dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let [a, b] = dirs.map(|dir| dir.display().to_string());
        let one = of_stores(vec![(a.clone(), None)]).await;
        assert!(one.known_bytes > 0 && one.unknown_count == 0, "{one:?}");
        let missing = place.path().join("missing").display().to_string();
        let all = [a, b, missing, "spindle://d1/nvme0".to_owned(), "s3://b/p".to_owned()];
        let all = of_stores(all.map(|url| (url, None)).to_vec()).await;
        assert_eq!(all.unknown_count, 3);
        // Other processes use the disk, too.
        assert!(all.known_bytes < one.known_bytes + one.known_bytes / 2, "{all:?} and {one:?}");
    }
    #[tokio::test]
    async fn drives_of_data_nodes_count_with_what_they_have_told() {
        let drive = |name: &str, told| (format!("spindle://{name}/nvme0"), told);
        let stores = vec![drive("d1", Some(7)), drive("d2", Some(30)), drive("d3", None)];
        let found = of_stores(stores).await;
        assert_eq!(found, Room { known_bytes: 37, unknown_count: 1 });
    }

    #[tokio::test]
    async fn directory_tells_the_room_of_its_file_system() {
        let place = tempfile::tempdir().unwrap();
        let directory = |dir: PathBuf| Directory::new(dir, Arc::new(block::env::SystemClock));
        let told = directory(place.path().to_owned()).room().await.unwrap().unwrap();
        assert!(told.free_bytes > 0 && told.free_bytes <= told.total_bytes, "{told:?}");
        assert_eq!(directory(place.path().join("missing")).room().await.unwrap(), None);
    }
}
