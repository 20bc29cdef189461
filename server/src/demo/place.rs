//! The directory of the demo.
//!
//! Invariant: a directory that the demo made is removed at the end; one that was named is kept.

use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// The directory of the demo's pool.
pub(super) struct Place {
    pub(super) path: PathBuf,
    is_ours: bool,
}

impl Place {
    pub(super) fn new(dir: Option<&Path>) -> Result<Place> {
        if let Some(dir) = dir {
            return Ok(Place { path: dir.to_owned(), is_ours: false });
        }
        let name = format!("spindle-demo-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("make {}", path.display()), error)
        })?;
        Ok(Place { path, is_ours: true })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_ours
            && let Err(error) = std::fs::remove_dir_all(&self.path)
        {
            eprintln!("spindle: could not remove {}: {error}", self.path.display());
        }
    }
}
