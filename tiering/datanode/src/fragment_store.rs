//! Stores of fragments: directories and buckets. They do nothing clever.
//!
//! Invariants:
//! - A fragment is written once, under a name that says of which segment, placement and place it is, and
//!   never changes.
//! - Errors are those of the object store: `NotFound` means that the fragment is not stored, and any other
//!   error may concern the store as a whole.
//! - A directory in which no disk is mounted, or an emptied bucket, is a store that is away: nothing is
//!   written to it, and that it has no fragments says nothing. Its [`Witness`] tells.

use crate::seeded_bugs::seeded_bugs;
use block::env::Clock;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, Result};
use parking_lot::Mutex;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tiering::listing::list_at_most;
use tiering::segment::SegmentName;

/// Folder of all fragments within a store.
const FOLDER: &str = "fragments";

/// Name of a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FragmentName {
    /// The segment.
    pub segment: SegmentName,
    /// The placement of the segment, from 1.
    pub generation: u64,
    /// Its place in the scheme.
    pub index: u8,
}

impl FragmentName {
    /// Returns the path of the fragment in its store: that of the segment in another folder, and
    /// `.<generation as 16 hexadecimal digits>.<index as 2>`.
    #[must_use]
    pub fn path(&self) -> Path {
        let segment = self.segment.object_path();
        let segment = segment.as_ref().split_once('/').map_or("", |(_, name)| name);
        Path::from(format!("{FOLDER}/{segment}.{:016x}.{:02x}", self.generation, self.index))
    }

    /// Parses a path made by [`FragmentName::path`]; `None` for any other one.
    #[must_use]
    pub fn parse(path: &Path) -> Option<FragmentName> {
        let (folder, name) = path.as_ref().split_once('/')?;
        let mut parts = name.split('.');
        let segment = Path::from(format!("{}/{}", tiering::segment::FOLDER, parts.next()?));
        let (generation, index) = (parts.next()?, parts.next()?);
        let parsed = FragmentName {
            segment: SegmentName::parse(&segment)?,
            generation: u64::from_str_radix(generation, 16).ok()?,
            index: u8::from_str_radix(index, 16).ok()?,
        };
        // The digits have one form.
        (folder == FOLDER && parts.next().is_none() && parsed.path() == *path).then_some(parsed)
    }
}

impl fmt::Display for FragmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.path().fmt(f)
    }
}

/// A stored object among the fragments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListedFragment {
    /// A fragment, and the bytes stored.
    Fragment(FragmentName, u64),
    /// An object whose name is not that of a fragment.
    Foreign,
}

/// What a store says of a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Check {
    /// All of it verifies; its header.
    Whole(Bytes),
    /// It is damaged.
    Damaged,
    /// The store verifies nothing: whoever asks has to read the fragment.
    Unknown,
}

/// The part of a store that verifies fragments where they are.
#[async_trait::async_trait]
pub trait Verifier: fmt::Debug + Send + Sync {
    /// Verifies all of the fragment at `path`, which has about this many bytes. Returns its header; `None` if it is
    /// damaged.
    ///
    /// # Errors
    /// `NotFound` if it is not stored; any other error means that the store did not say.
    async fn verify(&self, path: &Path, bytes: u64) -> Result<Option<Bytes>>;
}

/// The room of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Bytes that the store can hold.
    pub total_bytes: u64,
    /// Bytes that it still takes.
    pub free_bytes: u64,
    /// Why its drive is expected to fail, if it is.
    pub wear: Option<String>,
}

/// The part of a store that knows its room.
#[async_trait::async_trait]
pub trait RoomTeller: fmt::Debug + Send + Sync {
    /// Returns the room; `None` if it is not known.
    ///
    /// # Errors
    /// Any error means that the store did not say.
    async fn room(&self) -> Result<Option<Room>>;
}

/// A store of fragments; see the module. Any method may be called from any task at any time.
#[async_trait::async_trait]
pub trait FragmentStore: fmt::Debug + Send + Sync {
    /// Writes a fragment, which consists of these parts, and puts it on stable storage, in one attempt. It
    /// succeeds if the same bytes are stored already: the answer to an earlier attempt may have been lost.
    ///
    /// # Errors
    /// `AlreadyExists` if other bytes were read back under its name.
    async fn put(&self, name: &FragmentName, parts: Vec<Bytes>) -> Result<()>;

    /// Reads a range. The result may be shorter if a transfer ends early.
    async fn read(&self, name: &FragmentName, range: Range<u64>) -> Result<Bytes>;

    /// Reads everything that is stored.
    async fn read_whole(&self, name: &FragmentName) -> Result<Bytes>;

    /// Returns the bytes stored.
    async fn size(&self, name: &FragmentName) -> Result<u64>;

    /// Lets the store verify all of a fragment of about this many bytes itself.
    ///
    /// # Errors
    /// Any but `NotFound` means that the store did not say.
    async fn check(&self, name: &FragmentName, bytes: u64) -> Result<Check>;

    /// Deletes a fragment. It succeeds if there is none.
    async fn delete(&self, name: &FragmentName) -> Result<()>;

    /// Lists the fragments of a segment, or all. The listing ends with an error beyond `count_max` objects.
    fn list(
        &self,
        segment: Option<&SegmentName>,
        count_max: u64,
    ) -> BoxStream<'static, Result<ListedFragment>>;

    /// Checks that the store is there, and is the one that it was.
    ///
    /// # Errors
    /// Any error means that the store is away for now; it is never `NotFound`.
    async fn look(&self) -> Result<()>;

    /// Returns the room; `None` if the store does not know it, as a bucket.
    ///
    /// # Errors
    /// Any error means that the store did not say.
    async fn room(&self) -> Result<Option<Room>>;
}

/// The object that shows that a place is the store that it was: written once, when the place becomes one.
#[derive(Clone, Debug)]
pub struct Witness {
    /// Its name.
    pub path: Path,
    /// Its bytes.
    pub bytes: Bytes,
    /// How long a look at it counts for later writes. Zero for a directory, whose disk may be unmounted
    /// at any time, and where a look costs little.
    pub lasts: Duration,
}

/// Fragments as objects of an object store, or files of a directory.
#[derive(Clone, Debug)]
pub struct ObjectFragments {
    store: Arc<dyn ObjectStore>,
    witness: Arc<Witness>,
    clock: Arc<dyn Clock>,
    /// When the witness was last seen.
    seen: Arc<Mutex<Option<Instant>>>,
    verifier: Option<Arc<dyn Verifier>>,
    teller: Option<Arc<dyn RoomTeller>>,
}

impl ObjectFragments {
    /// Makes the store of the fragments in `store`, which has the prefix of the pool and holds the witness.
    #[must_use]
    pub fn new(
        store: Arc<dyn ObjectStore>,
        witness: Witness,
        clock: Arc<dyn Clock>,
    ) -> ObjectFragments {
        let (witness, seen) = (Arc::new(witness), Arc::default());
        ObjectFragments { store, witness, clock, seen, verifier: None, teller: None }
    }

    /// Lets the store verify fragments itself.
    #[must_use]
    pub fn with_verifier(self, verifier: Arc<dyn Verifier>) -> ObjectFragments {
        ObjectFragments { verifier: Some(verifier), ..self }
    }

    /// Lets the store tell its room.
    #[must_use]
    pub fn with_room(self, teller: Arc<dyn RoomTeller>) -> ObjectFragments {
        ObjectFragments { teller: Some(teller), ..self }
    }

    /// Looks at the witness, unless that was done a short while ago.
    async fn look_sometimes(&self) -> Result<()> {
        let seen = *self.seen.lock();
        match seen {
            Some(seen) if self.clock.since(seen) < self.witness.lasts => Ok(()),
            _ => self.look().await,
        }
    }

    /// Whether the place has no witness at all, as a directory where a disk would be mounted.
    async fn is_unmounted(&self) -> bool {
        matches!(self.store.head(&self.witness.path).await, Err(Error::NotFound { .. }))
    }

    /// What the absence of a fragment means: nothing if the store is away.
    async fn absent(&self, error: Error) -> Error {
        match self.look().await {
            Ok(()) => error,
            Err(away) => away,
        }
    }

    async fn judge<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(error @ Error::NotFound { .. }) => Err(self.absent(error).await),
            other => other,
        }
    }
}

/// The error of a store that is away.
fn away(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "fragments", source: source.into() }
}

#[async_trait::async_trait]
impl FragmentStore for ObjectFragments {
    async fn put(&self, name: &FragmentName, parts: Vec<Bytes>) -> Result<()> {
        self.look_sometimes().await?;
        let (path, payload) = (name.path(), PutPayload::from_iter(parts));
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = self.store.put_opts(&path, payload.clone(), options).await;
        let is_made = put.is_ok();
        match put {
            Ok(_) => {}
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                let found = self.store.get(&path).await?.bytes().await?;
                if found != Bytes::from(payload) {
                    let source = "other bytes were read back".into();
                    return Err(Error::AlreadyExists { path: path.to_string(), source });
                }
            }
            Err(failed) => return Err(failed),
        }
        // The disk may have been unmounted since the first look.
        match self.look_sometimes().await {
            Err(error) if is_made && self.witness.lasts.is_zero() && self.is_unmounted().await => {
                // It is in the directory that the disk hides, where it would be in the way. From the place itself it
                // would be deleted too early: another attempt may have found it there, and a placement may name it.
                let _ = self.store.delete(&path).await;
                Err(error)
            }
            looked => looked,
        }
    }

    async fn read(&self, name: &FragmentName, range: Range<u64>) -> Result<Bytes> {
        let path = name.path();
        let read = self.store.get_range(&path, range.clone()).await;
        // A fragment that was cut short is a damaged one, and its store works.
        if let Err(Error::Generic { .. }) = &read
            && let Ok(found) = self.store.head(&path).await
            && found.size <= range.start
        {
            let source = format!("it has {} bytes", found.size).into();
            return Err(self.absent(Error::NotFound { path: path.to_string(), source }).await);
        }
        self.judge(read).await
    }

    async fn read_whole(&self, name: &FragmentName) -> Result<Bytes> {
        let read = async { self.store.get(&name.path()).await?.bytes().await };
        self.judge(read.await).await
    }

    async fn size(&self, name: &FragmentName) -> Result<u64> {
        let size = self.store.head(&name.path()).await.map(|found| found.size);
        self.judge(size).await
    }

    async fn check(&self, name: &FragmentName, bytes: u64) -> Result<Check> {
        let Some(verifier) = &self.verifier else { return Ok(Check::Unknown) };
        let checked = self.judge(verifier.verify(&name.path(), bytes).await).await?;
        Ok(checked.map_or(Check::Damaged, Check::Whole))
    }

    async fn delete(&self, name: &FragmentName) -> Result<()> {
        match self.store.delete(&name.path()).await {
            // A fragment on a disk that is not mounted is still there.
            Ok(()) | Err(Error::NotFound { .. }) => self.look_sometimes().await,
            other => other,
        }
    }

    fn list(
        &self,
        segment: Option<&SegmentName>,
        count_max: u64,
    ) -> BoxStream<'static, Result<ListedFragment>> {
        let of_epoch = |segment: &SegmentName| format!("{FOLDER}/{:016x}", segment.epoch.0);
        let folder = segment.map_or_else(|| FOLDER.to_owned(), of_epoch);
        let wanted = segment.copied();
        let listing = list_at_most(&*self.store, Some(&Path::from(folder)), count_max);
        let listed = listing.filter_map(move |found| {
            let listed = found.map(|found| match FragmentName::parse(&found.location) {
                Some(name) => ListedFragment::Fragment(name, found.size),
                None => ListedFragment::Foreign,
            });
            let is_wanted = match (&listed, wanted) {
                (Ok(ListedFragment::Fragment(name, _)), Some(wanted)) => name.segment == wanted,
                (Ok(ListedFragment::Foreign), Some(_)) => false,
                _ => true,
            };
            std::future::ready(is_wanted.then_some(listed))
        });
        // After the listing: an empty one of a disk that is not mounted must not be believed.
        let store = self.clone();
        let end = futures::stream::once(async move { store.look().await })
            .filter_map(|looked| std::future::ready(looked.err().map(Err)));
        listed.chain(end).boxed()
    }

    async fn look(&self) -> Result<()> {
        let Witness { path, bytes, .. } = &*self.witness;
        if seeded_bugs().witness_unchecked {
            return Ok(());
        }
        let looked = self.clock.now();
        let found = async { self.store.get(path).await?.bytes().await };
        match found.await {
            Ok(found) if found == *bytes => {
                *self.seen.lock() = Some(looked);
                Ok(())
            }
            Ok(_) => Err(away(format!("{path} is that of another store"))),
            Err(Error::NotFound { .. }) => {
                Err(away(format!("{path} is not there: a disk may not be mounted")))
            }
            Err(error) => Err(error),
        }
    }

    async fn room(&self) -> Result<Option<Room>> {
        match &self.teller {
            Some(teller) => teller.room().await,
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Epoch;
    use tiering::segment::SegmentNumber;

    #[test]
    fn names_are_read_as_they_are_written() {
        let segment = SegmentName { epoch: Epoch(3), number: SegmentNumber(0x1f), id: [0xab; 16] };
        let name = FragmentName { segment, generation: 2, index: 17 };
        let text = "fragments/0000000000000003/000000000000001f-abababababababababababababababab\
                    .0000000000000002.11";
        assert_eq!(name.path().as_ref(), text);
        assert_eq!(FragmentName::parse(&name.path()), Some(name));
        for wrong in [
            text.replace("fragments", "segments"),
            text.replace(".11", ".1"),
            text.replace(".11", ".+1"),
            text.replace(".11", ".AA"),
            text.replace(".11", ".11.11"),
            text.replace(".0000000000000002", ".2"),
            text.replace("-ab", "ab"),
        ] {
            assert_eq!(FragmentName::parse(&Path::from(wrong.clone())), None, "{wrong}");
        }
    }
}
