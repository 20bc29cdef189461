//! The space that data stores have left, as far as their file systems tell.
//!
//! Invariants:
//! - A file system counts once, however many stores are on it.
//! - A directory that does not answer in time is one of unknown space: its drive may hang.

use config::DriveUrl;
use control::store::Store;
use engine::data_stores::Room;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for a file system. Chosen by hand: a person waits for the answer.
const TIME_MAX: Duration = Duration::from_secs(3);

/// Returns the space that the stores with these URLs have left.
pub(super) async fn of_stores(urls: Vec<String>) -> Room {
    let found = futures::future::join_all(urls.iter().map(|url| of_store(url))).await;
    let known: BTreeMap<u64, u64> = found.iter().flatten().copied().collect();
    Room {
        known_bytes: known.into_values().fold(0, u64::saturating_add),
        unknown_count: found.iter().filter(|found| found.is_none()).count(),
    }
}

/// The number of the file system of a store in a directory, and the bytes that it has left.
async fn of_store(url: &str) -> Option<(u64, u64)> {
    if DriveUrl::parse(url).ok()?.is_some() {
        return None;
    }
    let dir = Store::dir_of(url).ok()??;
    let asked = tokio::task::spawn_blocking(move || space_of(dir));
    tokio::time::timeout(TIME_MAX, asked).await.ok()?.ok()?
}

fn space_of(dir: PathBuf) -> Option<(u64, u64)> {
    let device = std::fs::metadata(&dir).ok()?.dev();
    let found = rustix::fs::statvfs(&dir).ok()?;
    // Some file systems report no size.
    (found.f_blocks > 0).then(|| (device, found.f_bavail.saturating_mul(found.f_frsize)))
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
        let one = of_stores(vec![a.clone()]).await;
        assert!(one.known_bytes > 0 && one.unknown_count == 0, "{one:?}");
        let missing = place.path().join("missing").display().to_string();
        let all = vec![a, b, missing, "spindle://d1/nvme0".to_owned(), "s3://b/p".to_owned()];
        let all = of_stores(all).await;
        assert_eq!(all.unknown_count, 3);
        // Other processes use the disk, too.
        assert!(all.known_bytes < one.known_bytes + one.known_bytes / 2, "{all:?} and {one:?}");
    }
}
