//! Small files that are complete or absent after a crash, such as the documents in a pool's directory.
//!
//! Invariants:
//! - After a crash, a file has its old or its new contents. No later write makes a success false.

use crate::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces the file at `path` by `bytes`, with the permissions `mode`. A crash leaves the old or the
/// new contents, never a mixture.
///
/// # Errors
/// `Io`; the file then has its old or its new contents.
pub fn write_durably(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let temporary = path.with_extension("tmp");
        let _ = std::fs::remove_file(&temporary); // a leftover may have another mode
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        sync_parent(path)
    };
    write().map_err(|error| {
        Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error)
    })
}

/// Makes the directory entry of `path` durable.
///
/// # Errors
/// Those of the file system.
pub fn sync_parent(path: &Path) -> std::io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn small_files_are_replaced_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write_durably(&path, b"one", 0o600).unwrap();
        write_durably(&path, b"two", 0o600).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
