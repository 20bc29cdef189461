//! Locks that show which process serves a device of the nbd driver: the driver itself does not
//! tell.
//!
//! Invariants:
//! - A process holds the lock of a device from before it serves the device until it ends. The
//!   kernel releases the lock then, however the process ends.
//! - The lock of a device for a volume of another machine is named by its URIs, before there is a
//!   device; that of another device by its identifier.

use crate::identifiers;
use block::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Folder of the locks of devices that are served.
const LOCKS: &str = "/run/spindle";

/// Takes the lock that a process holds while it serves a device or is about to. The file names the
/// process.
///
/// # Errors
/// `Busy`: another process holds it. Errors of the file.
pub(crate) fn lock(name: &str) -> Result<File> {
    let path = lock_path(name);
    let failed =
        |error| Error::with_source(ErrorKind::Io, format!("lock {}", path.display()), error);
    std::fs::create_dir_all(LOCKS).map_err(failed)?;
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let mut file = file.map_err(failed)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = format!("attach {name}: another process serves its device");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Err(errno) => return Err(failed(errno.into())),
    }
    file.set_len(0).and_then(|()| write!(file, "{}", std::process::id())).map_err(failed)?;
    Ok(file)
}

/// Locks of one process, each held once.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    held: BTreeMap<String, File>,
}

impl Locks {
    /// Takes the locks with these names that are not held here yet.
    ///
    /// # Errors
    /// Those of [`lock`]; the locks taken before stay held.
    pub(crate) fn take(&mut self, names: impl IntoIterator<Item = String>) -> Result<()> {
        for name in names {
            if let Entry::Vacant(vacant) = self.held.entry(name) {
                let file = lock(vacant.key())?;
                vacant.insert(file);
            }
        }
        Ok(())
    }
}

/// Takes the lock of a device of the nbd driver, which its serving process would hold.
pub(crate) fn lock_unserved(path: &Path, identifier: &str) -> Result<File> {
    lock(&lock_name(identifier)).map_err(|error| match error.kind() {
        ErrorKind::Busy => {
            let what = format!("clean up {}: a process serves it; detach it there", path.display());
            Error::new(ErrorKind::Busy, what)
        }
        _ => error,
    })
}

/// Reports whether a process holds the lock of a device, without taking it; `None` if that cannot
/// be determined.
pub(crate) fn is_served(identifier: &str) -> Option<bool> {
    use std::os::unix::fs::MetadataExt;
    let name = lock_name(identifier);
    let file = std::fs::metadata(lock_path(&name)).ok()?;
    let process = holder_of(&name)?.as_raw_nonzero().get();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    Some(has_lock(&locks, process, LockedFile::new(file.dev(), file.ino())))
}

/// A file as the kernel's list of locks names it.
#[derive(Clone, Copy)]
struct LockedFile {
    /// Numbers of the device of its file system.
    major: u32,
    minor: u32,
    inode: u64,
}

impl LockedFile {
    fn new(device: u64, inode: u64) -> LockedFile {
        LockedFile { major: rustix::fs::major(device), minor: rustix::fs::minor(device), inode }
    }
}

/// Parses lines with number, kind, mode, access, process, and device and inode with colons. Source:
/// proc_locks(5).
fn has_lock(locks: &str, process: i32, file: LockedFile) -> bool {
    let (process, inode) = (process.to_string(), file.inode.to_string());
    let device = format!("{:02x}:{:02x}", file.major, file.minor);
    let holds = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let kind = fields.next()?;
        let holder = fields.nth(2)?;
        let (its_device, its_inode) = fields.next()?.rsplit_once(':')?;
        // A process in a container has another number there; some file systems have another device
        // there.
        let is_it = its_inode == inode && (holder == process || its_device == device);
        Some(kind == "FLOCK" && is_it)
    };
    locks.lines().any(|line| holds(line).unwrap_or(false))
}

/// Process that holds a lock.
pub(crate) fn holder_of(name: &str) -> Option<rustix::process::Pid> {
    let text = std::fs::read_to_string(lock_path(name)).ok()?;
    rustix::process::Pid::from_raw(text.parse().ok()?)
}

/// Path of the lock of a device.
pub(crate) fn lock_path(name: &str) -> PathBuf {
    let name = Uuid::new_v5(&Uuid::NAMESPACE_URL, name.as_bytes());
    Path::new(LOCKS).join(format!("device-{}.lock", name.simple()))
}

pub(crate) fn lock_served(identifier: &str) -> Result<Option<File>> {
    match lock(&lock_name(identifier)) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.kind() == ErrorKind::Busy => Err(error),
        Err(error) => {
            tracing::warn!(error = %error.chain(), "could not lock a device against `attach --cleanup`");
            Ok(None)
        }
    }
}

/// Name of the lock of a device, by its identifier.
fn lock_name(identifier: &str) -> String {
    identifiers::remote_of(identifier).map_or(identifier, |(uris, _)| uris).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::env::random_bytes;

    #[test]
    fn whether_a_lock_is_held_is_seen_without_taking_it() {
        let locks = "1: POSIX  ADVISORY  WRITE 12 00:2d:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 3491 00:1a:4711 0 EOF\n\
            2: -> FLOCK  ADVISORY  WRITE 9 00:1a:99 0 EOF\n";
        let run = |inode| LockedFile { major: 0, minor: 0x1a, inode };
        let other = |inode| LockedFile { minor: 0x2d, ..run(inode) };
        assert!(has_lock(locks, 3491, run(4711)));
        assert!(
            has_lock(locks, 1, run(4711)),
            "of a process that has another number in its container"
        );
        assert!(has_lock(locks, 3491, other(4711)), "on a file system of several devices");
        assert!(!has_lock(locks, 1, other(4711)), "of another file");
        assert!(!has_lock(locks, 12, other(77)), "of another kind");
        assert!(!has_lock(locks, 3491, run(711)) && !has_lock(locks, 9, run(99)));
        assert!(!has_lock("", 1, run(1)));
        // Check the format that this kernel writes.
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().unwrap();
        let metadata = file.metadata().unwrap();
        let locked = LockedFile::new(metadata.dev(), metadata.ino());
        let read = || std::fs::read_to_string("/proc/locks").unwrap();
        rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(has_lock(&read(), own, locked), "{}", read());
        rustix::fs::flock(&file, rustix::fs::FlockOperation::Unlock).unwrap();
        assert!(!has_lock(&read(), own, locked));
    }

    #[test]
    fn a_served_device_of_nbd_is_not_deleted_by_its_record() {
        if !rustix::process::geteuid().is_root() {
            return; // the locks are in /run
        }
        let name = identifiers::of_volume(u64::from_le_bytes(random_bytes()));
        let held = lock(&name).unwrap();
        let error = lock_unserved(Path::new("/dev/nbd3"), &name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("clean up /dev/nbd3: a process serves it"), "{error}");
        drop(held);
        lock_unserved(Path::new("/dev/nbd3"), &name).unwrap();
    }
}
