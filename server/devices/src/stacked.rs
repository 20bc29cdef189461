//! Detects paths on a device without a serving daemon. A daemon that needs such a path would wait
//! for it, and for ever if it is the one that should serve the device.
//!
//! Invariant: nothing here waits for such a device. A part of a path is read only once the
//! disks of its file system are known to be served.
//!
//! Disks are found through partitions, device mapper (LVM, crypt), RAID and loop devices. Disks
//! that a file system does not report to the kernel are not found: those of ZFS, and the lower file
//! systems of FUSE and overlay.

use crate::unserved;
use block::{Error, ErrorKind, Result};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

const MOUNTS: &str = "/proc/self/mountinfo";
/// Maximum number of symbolic links in one path. Source: the kernel's own bound,
/// path_resolution(7).
const LINKS_MAX: usize = 40;
/// Maximum depth of disks below disks. Chosen by hand: deeper than any real stack, and it ends a
/// loop.
const LEVELS_MAX: usize = 16;

/// A mounted file system.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    /// Major and minor number, as in `/sys/dev/block`. Not the number of a disk if the file system
    /// has several.
    device: String,
    source: PathBuf,
}

/// Refuses paths whose disks wait for a daemon. Blocks, but not on those disks.
///
/// # Errors
/// `Unavailable`, naming the path and the device.
pub fn check(places: &[PathBuf]) -> Result<()> {
    // If the list of mounts cannot be read, nothing is known, and nothing is refused.
    let search = Search {
        mounts: mounts_of(&std::fs::read(MOUNTS).unwrap_or_default()),
        known: RefCell::default(),
    };
    for place in places {
        let Ok(place) = std::path::absolute(place) else { continue };
        if let Some(device) = search.below(&place, 0) {
            let what = format!(
                "open {}: it lies on {1}, which no daemon serves now, so that the open would wait. \
                 Start the daemon of that device first; if that is this daemon, it can never \
                 start: keep its directory, cache, store and keys off its own devices (`spindle \
                 attach --cleanup {1}` removes the device, and its users get errors)",
                place.display(),
                device.display()
            );
            return Err(Error::new(ErrorKind::Unavailable, what));
        }
    }
    Ok(())
}

/// The list of mounts, and the results so far.
struct Search {
    mounts: Vec<Mount>,
    /// Devices, and whether they wait for a daemon. Checking a device can take long.
    known: RefCell<BTreeMap<PathBuf, bool>>,
}

impl Search {
    /// Finds the device that a path waits for.
    fn below(&self, place: &Path, level: usize) -> Option<PathBuf> {
        on_the_way(place, &self.mounts, &|mount| {
            let numbered = Path::new("/sys/dev/block").join(&mount.device);
            match numbered.exists() {
                true => self.disk(&numbered, level),
                // One of the disks of the file system. /dev is on no disk.
                false if mount.source.starts_with("/dev") => {
                    let numbers = std::fs::metadata(&mount.source).ok()?.rdev();
                    let (major, minor) = (rustix::fs::major(numbers), rustix::fs::minor(numbers));
                    let numbered = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
                    self.disk(&numbered, level)
                }
                false => None,
            }
        })
    }

    /// Finds a device without a daemon among the disks of a block device, given by its path in
    /// `/sys`.
    fn disk(&self, system: &Path, level: usize) -> Option<PathBuf> {
        if level > LEVELS_MAX {
            return None;
        }
        let mut system = system.canonicalize().ok()?; // in /sys, which is on no device
        if system.join("partition").exists() {
            system.pop();
        }
        let slaves = std::fs::read_dir(system.join("slaves")).into_iter().flatten().flatten();
        if let Some(found) =
            slaves.map(|entry| entry.path()).find_map(|disk| self.disk(&disk, level + 1))
        {
            return Some(found);
        }
        if let Ok(file) = std::fs::read_to_string(system.join("loop/backing_file")) {
            return self.below(Path::new(file.trim_end()), level + 1);
        }
        let device = Path::new("/dev").join(system.file_name()?);
        let mut known = self.known.borrow_mut();
        let is_waiting =
            *known.entry(device.clone()).or_insert_with(|| unserved::is_waiting(&device));
        is_waiting.then_some(device)
    }
}

/// Returns the first result of `stuck` for the file systems that a path leads through.
fn on_the_way(
    place: &Path,
    mounts: &[Mount],
    stuck: &dyn Fn(&Mount) -> Option<PathBuf>,
) -> Option<PathBuf> {
    let mut at = PathBuf::from("/");
    let mut rest: VecDeque<OsString> = parts_of(place).collect();
    let mut link_count = 0;
    loop {
        // Of several mounts at one point, the last is visible.
        let mount = mounts.iter().rev().find(|mount| mount.point == at);
        if let Some(device) = mount.and_then(stuck) {
            return Some(device);
        }
        if mount.is_none()
            && link_count < LINKS_MAX
            && let Ok(target) = std::fs::read_link(&at)
        {
            link_count += 1;
            at.pop();
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            let target: Vec<OsString> = parts_of(&target).collect();
            target.into_iter().rev().for_each(|part| rest.push_front(part));
        }
        match rest.pop_front()? {
            part if part == ".." => drop(at.pop()),
            part => at.push(part),
        }
    }
}

/// Components of a path below its root.
fn parts_of(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

/// Parses the mounts. Source: proc_pid_mountinfo(5).
fn mounts_of(text: &[u8]) -> Vec<Mount> {
    let of_line = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
        let point = unescaped(fields.nth(1)?);
        // Optional fields end with a dash, followed by the type of the file system and its source.
        let source = unescaped(fields.skip_while(|field| *field != b"-").nth(2)?);
        Some(Mount { point, device, source })
    };
    text.split(|byte| *byte == b'\n').filter_map(of_line).collect()
}

/// Decodes spaces and the like, which are written as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(escaped) if byte == b'\\' => {
                bytes.push(escaped);
                rest = &after[3..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_as_the_kernel_writes_them() {
        let text = b"22 1 8:1 / / rw,noatime shared:1 - ext4 /dev/sda1 rw\n\
            36 22 0:45 /sub /mnt/my\\040disk rw - btrfs /dev/ublkb0p1 rw,space_cache\n\
            nonsense\n37 22 259:3 / /x rw master:2 shared:3 - xfs /dev/ublkb1 rw\n";
        let mount = |point: &str, device: &str, source: &str| Mount {
            point: point.into(),
            device: device.to_owned(),
            source: source.into(),
        };
        assert_eq!(
            mounts_of(text),
            [
                mount("/", "8:1", "/dev/sda1"),
                mount("/mnt/my disk", "0:45", "/dev/ublkb0p1"),
                mount("/x", "259:3", "/dev/ublkb1")
            ]
        );
        assert_eq!(unescaped(b"a\\134b\\04\\999"), Path::new("a\\b\\04\\999"));
    }

    #[test]
    fn mounts_along_a_path_are_found_without_opening_it() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        std::fs::create_dir_all(place.join("a/stuck")).unwrap();
        std::os::unix::fs::symlink("a/stuck/inside", place.join("link")).unwrap();
        std::os::unix::fs::symlink(place.join("link/more"), place.join("far")).unwrap();
        std::os::unix::fs::symlink("round", place.join("round")).unwrap();
        let mount =
            |point: PathBuf| Mount { point, device: "1:1".to_owned(), source: "/dev/stuck".into() };
        let mounts = [mount("/".into()), mount(place.join("a/stuck"))];
        let stuck = |mount: &Mount| (mount.point != Path::new("/")).then(|| mount.source.clone());
        let found = |name: &str| on_the_way(&place.join(name), &mounts, &stuck).is_some();
        for inside in ["a/stuck", "a/stuck/db", "a/./x/../stuck/db", "link", "far", "far/db"] {
            assert!(found(inside), "{inside}");
        }
        for outside in ["a", "a/stuck2", "b/stuck", "a/stuck/../x", "round", "round/x"] {
            let is_through = outside.contains("stuck/..");
            assert_eq!(found(outside), is_through, "{outside}");
        }
        assert!(on_the_way(Path::new("/"), &mounts, &|mount| Some(mount.source.clone())).is_some());
    }

    #[test]
    fn paths_on_ordinary_disks_are_accepted() {
        check(&["/".into(), "/nowhere/at/all".into(), "/proc/self".into()]).unwrap();
    }
}
