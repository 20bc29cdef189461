//! Identifies the mounted file system of a directory, meaning the superblock in the kernel's
//! memory, which has the same lifetime as its page cache.
//!
//! Invariants:
//! - The same number within one boot of the kernel means that the file system stayed mounted. Bind
//!   mounts, other mount namespaces and remounting with other options keep the superblock and so
//!   the number.
//! - Unmounting and mounting again gives another number.
//! - A file system that gives no number is `None`, which proves nothing.
//!
//! The number is the inode of the file system's directory below `/sys/fs`, which the kernel makes
//! with the superblock and removes with it. ext4, xfs, btrfs, f2fs and some others have one. Since
//! Linux 4.14, sysfs hands out inode numbers in order and does not reuse them. Network file systems
//! and FUSE have a node of their own below `/sys/class/bdi`. The others (overlay, tmpfs, ZFS) give
//! no number, and neither does a container without `/sys`. The id of a mount
//! (`STATX_MNT_ID_UNIQUE`) would not do: each mount namespace has ids of its own, so a service with
//! a private one, or a container, would find another file system at each restart.

use rustix::fs::{major, minor};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The first kernel that never reuses a sysfs inode number. Source: Linux 4.14, `kernfs: use idr
/// instead of ida to manage inode number`.
const KERNEL_MIN: (u32, u32) = (4, 14);
/// Source: Linux, include/uapi/linux/magic.h, `BTRFS_SUPER_MAGIC`.
const BTRFS_MAGIC: u64 = 0x9123_683e;
/// Source: Linux, include/uapi/linux/btrfs.h, `BTRFS_IOC_FS_INFO`.
const BTRFS_FS_INFO: u64 = 0x8400_941f;
/// Length of its answer in bytes, and the offset of the file system's id in it. Source: `struct
/// btrfs_ioctl_fs_info_args`.
const BTRFS_INFO_BYTES: usize = 1024;
const BTRFS_AT_FSID: usize = 16;

/// Returns the number of the mounted file system that holds `dir`; `None` if the kernel gives none.
#[must_use]
pub fn mounted(dir: &Path) -> Option<u64> {
    let release = rustix::system::uname();
    if !is_new_enough(release.release().to_str().ok()?) {
        return None;
    }
    let dir = File::open(dir).ok()?;
    let nodes = nodes_of(&dir)?;
    // With two candidates the choice would be a guess.
    let mut found = nodes.iter().filter_map(|path| std::fs::metadata(path).ok()).map(|it| it.ino());
    let number = found.next()?;
    found.next().is_none().then_some(number)
}

fn is_new_enough(release: &str) -> bool {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    match (parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= KERNEL_MIN,
        _ => false,
    }
}

/// Lists the places where the kernel may have a node of the file system.
fn nodes_of(dir: &File) -> Option<Vec<PathBuf>> {
    let device = dir.metadata().ok()?.dev();
    let magic = u64::try_from(rustix::fs::fstatfs(dir).ok()?.f_type).ok()?;
    if magic & 0xffff_ffff == BTRFS_MAGIC {
        return Some(vec![PathBuf::from("/sys/fs/btrfs").join(btrfs_id(dir)?)]);
    }
    let numbers = format!("{}:{}", major(device), minor(device));
    if major(device) == 0 {
        return Some(vec![PathBuf::from("/sys/class/bdi").join(numbers)]);
    }
    // The kernel's own name for the device: `sda1`, `dm-0`, `loop3`.
    let link = std::fs::read_link(PathBuf::from("/sys/dev/block").join(numbers)).ok()?;
    let name = link.file_name()?;
    let kinds = std::fs::read_dir("/sys/fs").ok()?;
    Some(kinds.flatten().map(|kind| kind.path().join(name)).collect())
}

/// Returns the id of a btrfs in the form that sysfs uses.
#[expect(unsafe_code, reason = "an ioctl that no safe library offers")]
fn btrfs_id(dir: &File) -> Option<String> {
    let mut info = [0u8; BTRFS_INFO_BYTES];
    // SAFETY: the descriptor is open for as long as `dir` is borrowed; the kernel writes as many
    // bytes as the size in the request number, which is the length of `info`.
    let answer = unsafe { libc::ioctl(dir.as_raw_fd(), BTRFS_FS_INFO as _, info.as_mut_ptr()) };
    let id = info.get(BTRFS_AT_FSID..BTRFS_AT_FSID + 16)?;
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    (answer == 0).then(|| parts.join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_keeps_its_number_and_shares_it_with_its_file_system() {
        let dir = tempfile::tempdir_in(".").unwrap();
        let inner = dir.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        assert_eq!(mounted(dir.path()), mounted(&inner));
        assert_eq!(mounted(Path::new("/proc")), None, "it is no file system of a device");
        assert_eq!(mounted(&dir.path().join("missing")), None);
    }

    #[test]
    fn kernels_that_give_inodes_twice_are_not_asked() {
        assert!(["4.14.0", "4.19-rc1", "5.0", "6.18.44-fc"].into_iter().all(is_new_enough));
        assert!(!["4.13.16", "3.10.0-1160.el7", "", "x"].into_iter().any(is_new_enough));
    }
}
