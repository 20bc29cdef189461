//! The state of the log in files: in its own directory, and at other paths, preferably on another
//! file system.
//!
//! Invariants:
//! - An open replaces each file whole and keeps it open; on a full disk it writes over the file in
//!   place. A failure is always written over it in place, which takes no space, no descriptor and
//!   no change of a directory.
//! - Each place is tried, whatever the outcome at the previous one.

use crate::format::state::{self, LogState, STATE_FILE_BYTES};
use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Name of the file in the log's own directory.
pub(crate) const STATE_NAME: &str = "ring.state";

/// A state that existed before an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FoundState {
    /// `None` if it is damaged, which a power failure may cause while it is written over.
    pub(crate) state: Option<LogState>,
    /// Whether it comes from this machine. A state from elsewhere may report a loss and never rules
    /// one out.
    pub(crate) is_own: bool,
}

/// Keeps the state of a log durably.
pub(crate) trait StateKeeper: Send + Sync {
    /// Returns the states that exist.
    ///
    /// # Errors
    /// `Io`; `Unsupported` if a later program wrote one.
    fn found(&self) -> Result<Vec<FoundState>>;

    /// Replaces the state everywhere.
    ///
    /// # Errors
    /// `Io`: the first place that could not be written. The others were tried.
    fn replace(&self, state: &LogState) -> Result<()>;

    /// Writes over the state from [`StateKeeper::replace`] in every place that allows it, without
    /// taking any space.
    ///
    /// # Errors
    /// `Io`: it failed in all places.
    fn write_over(&self, state: &LogState) -> Result<()>;
}

struct Place {
    path: PathBuf,
    /// Open for writing after the first replacement.
    file: Mutex<Option<File>>,
}

/// The places of the state; see the head of the file.
pub(crate) struct StateFiles {
    places: Vec<Place>,
    /// States that are kept elsewhere.
    heard: Vec<FoundState>,
}

impl StateFiles {
    /// Makes a keeper for the log's directory and the paths `beside`. `heard` are the encoded
    /// states that are kept elsewhere.
    pub(crate) fn new(dir: &Path, beside: &[PathBuf], heard: &[Vec<u8>]) -> StateFiles {
        let paths = [dir.join(STATE_NAME)].into_iter().chain(beside.iter().cloned());
        let places = paths.map(|path| Place { path, file: Mutex::new(None) }).collect();
        let heard = heard
            .iter()
            .map(|bytes| FoundState { state: state::decode(bytes).ok(), is_own: false })
            .collect();
        StateFiles { places, heard }
    }

    /// Tries each place; returns the outcome of each.
    fn each(&self, what: impl Fn(&Place) -> io::Result<()>) -> Vec<Result<()>> {
        let one = |place: &Place| {
            what(place).map_err(|error| {
                let what = format!("write {}", place.path.display());
                Error::with_source(ErrorKind::Io, what, error)
            })
        };
        self.places.iter().map(one).collect()
    }
}

impl StateKeeper for StateFiles {
    fn found(&self) -> Result<Vec<FoundState>> {
        let mut found = self.heard.clone();
        for Place { path, .. } in &self.places {
            let bytes = match std::fs::read(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if crate::disk::unreadable::is_eio(&error) => Vec::new(),
                Err(error) => {
                    let what = format!("read {}", path.display());
                    return Err(Error::with_source(ErrorKind::Io, what, error));
                }
                Ok(bytes) => bytes,
            };
            let state = match state::decode(&bytes) {
                Err(error) if error.is_unsupported() => {
                    let what = format!("open the write log: read {}", path.display());
                    return Err(Error::with_source(ErrorKind::Unsupported, what, error));
                }
                decoded => decoded.ok(),
            };
            found.push(FoundState { state, is_own: true });
        }
        Ok(found)
    }

    fn replace(&self, state: &LogState) -> Result<()> {
        let bytes = state::encode(state);
        let all = self.each(|place| {
            let replaced = match replace(&place.path, &bytes) {
                // A log must open on a full disk, so that it can drain.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                    ) =>
                {
                    write_in_place(&place.path, &bytes).map_err(|_| error)?
                }
                replaced => replaced?,
            };
            *place.file.lock() = Some(replaced);
            Ok(())
        });
        all.into_iter().collect()
    }

    fn write_over(&self, state: &LogState) -> Result<()> {
        let bytes = state::encode(state);
        let mut all = self.each(|place| match &*place.file.lock() {
            Some(file) => file.write_all_at(&bytes, 0).and_then(|()| file.sync_data()),
            None => Err(io::Error::from(io::ErrorKind::NotFound)),
        });
        match all.iter().position(Result::is_ok) {
            Some(_) => Ok(()),
            None => all.swap_remove(0),
        }
    }
}

/// Writes over an existing file of full size. A power failure may leave a damaged state, which
/// proves nothing about the log.
fn write_in_place(path: &Path, bytes: &[u8; STATE_FILE_BYTES]) -> io::Result<File> {
    let file = OpenOptions::new().write(true).open(path)?;
    if file.metadata()?.len() < STATE_FILE_BYTES as u64 {
        return Err(io::ErrorKind::StorageFull.into());
    }
    file.write_all_at(bytes, 0)?;
    file.sync_all()?;
    Ok(file)
}

/// Replaces the file. The new file is on stable storage, its name included.
fn replace(path: &Path, bytes: &[u8; STATE_FILE_BYTES]) -> io::Result<File> {
    let making = path.with_extension("state.tmp");
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let written = options.open(&making).and_then(|file| {
        file.write_all_at(bytes, 0)?;
        file.sync_all()?;
        std::fs::rename(&making, path)?;
        Ok(file)
    });
    let file = written.inspect_err(|_| drop(std::fs::remove_file(&making)))?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all()?,
        _ => File::open(".")?.sync_all()?,
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::state::Standing;
    use block::Lsn;

    fn state(standing: Standing) -> LogState {
        LogState { standing, owed: None, open: [1; 16], boot: [2; 16], mount: Some(3) }
    }

    #[test]
    fn failure_replaces_the_state_of_the_open_in_each_place() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let beside = [other.path().join("log.state")];
        let files = StateFiles::new(dir.path(), &beside, &[]);
        assert_eq!(files.found().unwrap(), []);
        let failed = state(Standing::Failed { acked: Some(Lsn(9)) });
        assert!(files.write_over(&failed).is_err(), "nothing was made ahead");
        files.replace(&state(Standing::Open)).unwrap();
        // This also works on a file system that is full or has become read-only for directories.
        files.write_over(&failed).unwrap();
        let again = StateFiles::new(dir.path(), &beside, &[]);
        let own = |state| FoundState { state: Some(state), is_own: true };
        assert_eq!(again.found().unwrap(), [own(failed); 2]);
        std::fs::write(dir.path().join(STATE_NAME), b"no state").unwrap();
        std::fs::remove_file(&beside[0]).unwrap();
        assert_eq!(again.found().unwrap(), [FoundState { state: None, is_own: true }]);
    }

    #[test]
    fn one_place_that_fails_keeps_no_other_from_being_written() {
        let dir = tempfile::tempdir().unwrap();
        let beside = [dir.path().join("missing/log.state"), dir.path().join("log.state")];
        let files = StateFiles::new(dir.path(), &beside, &[]);
        let error = files.replace(&state(Standing::Open)).unwrap_err();
        assert!(error.chain().contains("missing/log.state"), "{}", error.chain());
        assert_eq!(files.found().unwrap().len(), 2);
    }

    #[test]
    fn notes_from_elsewhere_are_distinguished_from_local_ones() {
        let dir = tempfile::tempdir().unwrap();
        let failed = state(Standing::Failed { acked: None });
        let heard = [state::encode(&failed).to_vec(), b"no state".to_vec()];
        let files = StateFiles::new(dir.path(), &[], &heard);
        let expected = [Some(failed), None].map(|state| FoundState { state, is_own: false });
        assert_eq!(files.found().unwrap(), expected);
    }
}
