//! Listings of an object store that end, whatever the server answers.
//!
//! Invariants:
//! - A listing that shows an object twice fails: the server has answered a later page with an
//!   earlier one, and would do so for ever. The check does not depend on the order of keys, which
//!   directories and some buckets do not guarantee.
//! - A listing that shows nothing for [`SILENCE_MAX`], or more objects than a limit, fails.
//! - The memory needed is that of one name, not of all listed names.

use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, Result};
use std::time::Duration;

/// Maximum number of objects in one listing. Chosen by hand: 2 PiB in segments of the default size.
pub const OBJECT_COUNT_MAX: u64 = 1 << 26;
/// Maximum number of objects whose names are held in memory together: 512 TiB in segments of the
/// default size, in about 1 GiB.
pub const HELD_COUNT_MAX: u64 = 1 << 24;
/// Longest wait for the next object of a listing. Chosen by hand: longer than one request takes
/// with all its retries. A server may send empty pages for ever.
const SILENCE_MAX: Duration = Duration::from_secs(300);
/// Number of listings that must agree that a folder is empty.
pub const EMPTY_LOOK_COUNT: u32 = 3;
/// Pause before the second listing; it doubles each time.
const LOOK_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });

/// Evidence that the server does not end a listing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Endless {
    #[error(
        "the store's listing of {folder} does not end: it shows {object} again. The server answers a \
         request for the next page with an earlier page (it ignores the continuation token); update \
         or replace the server or the proxy in front of it"
    )]
    Repeats { folder: String, object: Path },
    #[error("the store's listing of {folder} has more than {count_max} objects")]
    TooLong { folder: String, count_max: u64 },
    #[error(
        "the store's listing of {folder} has shown no further object for {seconds} s and has not ended; \
         check the server or the proxy in front of it"
    )]
    Silent { folder: String, seconds: u64 },
}

impl From<Endless> for Error {
    fn from(endless: Endless) -> Error {
        Error::Generic { store: "listing", source: Box::new(endless) }
    }
}

/// Lists the objects below `prefix` like [`ObjectStore::list`]. The listing always ends; see the
/// module. Poll it on a tokio runtime.
pub fn list(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
) -> BoxStream<'static, Result<ObjectMeta>> {
    ending(store.list(prefix), prefix, OBJECT_COUNT_MAX)
}

/// Like [`list`], but fails beyond `count_max` objects; for names that are held in memory.
pub fn list_at_most(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
    count_max: u64,
) -> BoxStream<'static, Result<ObjectMeta>> {
    ending(store.list(prefix), prefix, count_max)
}

/// Returns all objects below `prefix`.
///
/// # Errors
/// Those of the store; `Generic` for more than `count_max` objects and for a listing that does not
/// end.
pub async fn list_all(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
    count_max: u64,
) -> Result<Vec<ObjectMeta>> {
    list_at_most(store, prefix, count_max).try_collect().await
}

/// Returns an object below `prefix` that is not empty; an empty one is the marker by which a
/// console shows a folder. Returns `None` once `look_count` listings, with pauses between them,
/// have shown nothing. A faulty server or proxy may answer one listing with an empty list, and this
/// must not have the consequences of an empty folder (a new pool, a new database).
///
/// # Errors
/// Those of the store.
pub async fn first(
    store: &dyn ObjectStore,
    prefix: Option<&Path>,
    look_count: u32,
) -> Result<Option<ObjectMeta>> {
    for look in 0..look_count {
        pause_before(look).await;
        let mut listed = list(store, prefix).try_filter(|found| std::future::ready(found.size > 0));
        if let Some(found) = listed.try_next().await? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Waits before the listing number `look`, counted from 0, if an earlier one showed nothing.
pub async fn pause_before(look: u32) {
    if look > 0 {
        tokio::time::sleep(LOOK_PAUSE * 2u32.saturating_pow(look - 1)).await;
    }
}

/// Ends a listing of `prefix` if the server does not.
pub(crate) fn ending(
    listing: BoxStream<'static, Result<ObjectMeta>>,
    prefix: Option<&Path>,
    count_max: u64,
) -> BoxStream<'static, Result<ObjectMeta>> {
    let folder = prefix.map_or_else(|| "its prefix".to_owned(), |prefix| format!("{prefix}/"));
    let silence_max = SILENCE_MAX;
    let ending =
        Ending { listing, folder, count: 0, count_max, silence_max, mark: None, is_over: false };
    ending.into_stream()
}

struct Ending {
    listing: BoxStream<'static, Result<ObjectMeta>>,
    folder: String,
    count: u64,
    count_max: u64,
    silence_max: Duration,
    /// The object whose position is the last power of two. A circular listing reaches it again
    /// within twice the length of the circle, once the circle is shorter than its position (R. P.
    /// Brent, An improved Monte Carlo factorization algorithm, 1980, section 2).
    mark: Option<ObjectMeta>,
    is_over: bool,
}

impl Ending {
    fn into_stream(self) -> BoxStream<'static, Result<ObjectMeta>> {
        futures::stream::unfold(self, |mut ending| async move {
            let found = ending.next().await?;
            Some((found, ending))
        })
        .boxed()
    }

    async fn next(&mut self) -> Option<Result<ObjectMeta>> {
        if self.is_over {
            return None;
        }
        let folder = || self.folder.clone();
        let found = match tokio::time::timeout(self.silence_max, self.listing.next()).await {
            Ok(found) => found?,
            Err(_) => {
                let seconds = self.silence_max.as_secs();
                Err(Endless::Silent { folder: folder(), seconds }.into())
            }
        };
        let checked = found.and_then(|object| self.check(&object).map(|()| object));
        self.is_over = checked.is_err();
        Some(checked)
    }

    fn check(&mut self, object: &ObjectMeta) -> Result<()> {
        let folder = || self.folder.clone();
        if self.mark.as_ref() == Some(object) {
            let object = object.location.clone();
            return Err(Endless::Repeats { folder: folder(), object }.into());
        }
        self.count += 1;
        if self.count > self.count_max {
            return Err(Endless::TooLong { folder: folder(), count_max: self.count_max }.into());
        }
        if self.count.is_power_of_two() {
            self.mark = Some(object.clone());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(number: u64) -> ObjectMeta {
        ObjectMeta {
            location: Path::from(format!("folder/{number:020}")),
            last_modified: chrono::DateTime::UNIX_EPOCH,
            size: number,
            e_tag: None,
            version: None,
        }
    }

    async fn listed(
        objects: BoxStream<'static, Result<ObjectMeta>>,
        count_max: u64,
    ) -> (u64, String) {
        let mut listing = ending(objects, Some(&Path::from("folder")), count_max);
        let mut count = 0;
        loop {
            match listing.next().await {
                Some(Ok(_)) => count += 1,
                Some(Err(error)) => {
                    assert!(listing.next().await.is_none(), "nothing comes after an error");
                    return (count, error.to_string());
                }
                None => return (count, String::new()),
            }
        }
    }

    #[tokio::test]
    async fn circular_listing_ends_with_an_error_naming_the_server() {
        // Some pages are right, and then one of them is repeated for ever.
        for (before, circle) in
            [(0, 1), (0, 1000), (1000, 1000), (5000, 1000), (1000, 5000), (3, 7)]
        {
            let numbers = (0..before).chain((before..before + circle).cycle());
            let endless = futures::stream::iter(numbers.map(|number| Ok(object(number)))).boxed();
            let (count, error) = listed(endless, OBJECT_COUNT_MAX).await;
            assert!(error.contains("folder/") && error.contains("server"), "{error}");
            let bound = 4 * (before + circle);
            assert!(
                count <= bound,
                "{count} objects until it was noticed, of {before} and {circle}"
            );
        }
    }

    #[tokio::test]
    async fn listing_in_any_order_is_passed_on_unchanged() {
        let numbers = (0..10_000).rev().map(|number| Ok(object(number)));
        let backwards = futures::stream::iter(numbers).boxed();
        assert_eq!(listed(backwards, 10_000).await, (10_000, String::new()));
    }

    #[tokio::test]
    async fn listing_past_its_limit_fails() {
        let endless = futures::stream::iter((0..).map(|number| Ok(object(number)))).boxed();
        let (count, error) = listed(endless, 100).await;
        assert_eq!(count, 100);
        assert!(error.contains("more than 100 objects"), "{error}");
    }

    #[tokio::test]
    async fn listing_of_empty_pages_only_ends() {
        let first = futures::stream::iter([Ok(object(1))]);
        let ending = Ending {
            listing: first.chain(futures::stream::pending()).boxed(),
            folder: "folder/".to_owned(),
            count: 0,
            count_max: 100,
            silence_max: Duration::from_millis(1),
            mark: None,
            is_over: false,
        };
        let found: Vec<_> = ending.into_stream().collect().await;
        assert_eq!(found.len(), 2);
        let error = found[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("has not ended"), "{error}");
    }
}
