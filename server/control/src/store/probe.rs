//! Checks that a store keeps the promises that a pool depends on.
//!
//! Invariants:
//! - A store is refused only for its treatment of an object that was seen there. A request with a
//!   possibly temporary answer (a conflict while another request is under way, a missing object or
//!   listing entry) is repeated.

use super::Store;
use async_recursion::async_recursion;
use block::env::random_uuid;
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStoreExt, PutMode, PutOptions};
use std::time::Duration;
use tiering::listing::list_all;

/// Attempts of a step whose answer may be temporary. Chosen by hand: three seconds with the pauses.
const ATTEMPT_COUNT_MAX: u32 = 6;
/// Pause before the second attempt; it doubles each time.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });
/// Objects below `probe/`, left by interrupted probes. Chosen by hand.
const LISTED_COUNT_MAX: u64 = 100_000;
const FOLDER: &str = "probe";

impl Store {
    /// Checks that the store can carry a pool: an object is created once and not twice, written
    /// data is read back and listed at once, and objects can be deleted. Leaves nothing behind.
    ///
    /// # Errors
    /// `Unsupported` if the store lacks conditional creates, `Denied` for credentials, `NotFound`
    /// for a missing bucket, `Unavailable` if nothing answers, or the store says that an object
    /// exists and does not show it.
    #[async_recursion]
    pub async fn probe(&self) -> Result<()> {
        let path = ObjectPath::from(format!("{FOLDER}/{}", random_uuid().simple()));
        let outcome = self.probe_at(&path).await;
        match self.control.delete(&path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => outcome,
            Err(error) => outcome.and(Err(self.explain("delete the probe object", error))),
        }
    }

    async fn probe_at(&self, path: &ObjectPath) -> Result<()> {
        let first = Bytes::from(format!("spindle probe 1 {path}"));
        let second = Bytes::from(format!("spindle probe 2 {path}"));
        self.create_probe(path, &first).await?;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.control.put_opts(path, second.into(), options).await {
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => {}
            Ok(_) => return Err(self.refuse("it let an object be created twice")),
            Err(error) => return Err(self.explain("create the probe object again", error)),
        }
        match self.read_probe(path).await? {
            Some(read) if read == first => {}
            Some(_) => {
                return Err(self.refuse("a refused create changed the object all the same"));
            }
            None => return Err(self.refuse("an object just created cannot be read")),
        }
        for attempt in 0..ATTEMPT_COUNT_MAX {
            let folder = ObjectPath::from(FOLDER);
            let listed = list_all(&self.control, Some(&folder), LISTED_COUNT_MAX).await;
            let listed = listed.map_err(|error| self.explain("list objects", error))?;
            if listed.iter().any(|meta| meta.location == *path) {
                return Ok(());
            }
            pause(attempt).await;
        }
        Err(self.refuse("a listing does not show an object just created"))
    }

    /// Creates the object. If the store says that it exists already, checks that it does.
    async fn create_probe(&self, path: &ObjectPath, bytes: &Bytes) -> Result<()> {
        for attempt in 0..ATTEMPT_COUNT_MAX {
            let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
            match self.control.put_opts(path, bytes.clone().into(), options).await {
                Ok(_) => return Ok(()),
                // A retry inside the client found its own first try, or another request is under
                // way.
                Err(
                    object_store::Error::AlreadyExists { .. }
                    | object_store::Error::Precondition { .. },
                ) => {}
                Err(error) => return Err(self.explain("create the probe object", error)),
            }
            if self.look_for_probe(path).await?.is_some() {
                return Ok(());
            }
            pause(attempt).await;
        }
        let what = format!(
            "store {}: create the probe object: the store says that it exists, and shows no such object; try \
             again",
            self.url
        );
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    async fn look_for_probe(&self, path: &ObjectPath) -> Result<Option<Bytes>> {
        match async { self.control.get(path).await?.bytes().await }.await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.explain("read the probe object", error)),
        }
    }

    async fn read_probe(&self, path: &ObjectPath) -> Result<Option<Bytes>> {
        for attempt in 0..ATTEMPT_COUNT_MAX {
            let read = self.look_for_probe(path).await?;
            if read.is_some() {
                return Ok(read);
            }
            pause(attempt).await;
        }
        Ok(None)
    }
}

async fn pause(attempt: u32) {
    tokio::time::sleep(PAUSE * 2u32.saturating_pow(attempt)).await;
}
