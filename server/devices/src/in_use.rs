//! Detects the users of a block device, so that a device in use is not removed.
//!
//! Invariant: nothing here opens the device in this process, which may be the one that serves it.
//! Everything here blocks.

use crate::probe_process;
use crate::seeded_bugs::seeded_bugs;
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for programs that have a device open just for a moment. Chosen by hand: udev looks
/// at a device whenever a writer has closed it.
const CLOSE_WAIT: Duration = Duration::from_secs(1);
/// Longest wait for requests in flight when no program has the device open any more: a program may
/// have closed it while its writes are on their way. Chosen by hand: as long as a person would
/// wait.
const IDLE_WAIT: Duration = Duration::from_secs(15);
/// Time without requests in flight after which a device counts as idle. Chosen by hand: writeback
/// by the kernel makes no such pause.
const IDLE: Duration = Duration::from_millis(100);

/// Refuses to remove a block device that is in use: it is held exclusively, a program has it open,
/// or writes of a program that closed it are on their way; the last case is waited for. `what`
/// begins the message.
///
/// # Errors
/// `Busy`; errors opening it.
pub(crate) fn check_unused(what: &str, path: &Path) -> Result<()> {
    check_users(what, path)?;
    if seeded_bugs().detached_at_once {
        return Ok(());
    }
    if !becomes_idle(path) {
        let what = format!(
            "{what}: {} is in use: data written before it was closed is still on its way (`spindle \
             status` shows whether the log has room); try again, or use --force, which loses it",
            path.display()
        );
        return Err(Error::new(ErrorKind::Busy, what));
    }
    // A new user may have come meanwhile.
    check_users(what, path)
}

fn check_users(what: &str, path: &Path) -> Result<()> {
    let what = if is_in_use(path)? {
        format!(
            "{what}: {} is in use; unmount it first (`findmnt {0}`, `lsblk {0}` show by what), or use \
             --force, and its users get errors",
            path.display()
        )
    } else if let Some(user) = opened_by(path) {
        format!(
            "{what}: {} is in use: {user} has it open; end that first, or use --force, and its users get \
             errors",
            path.display()
        )
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Busy, what))
}

/// Reports whether a block device is held exclusively: by a mounted file system, swap, a device
/// mapper target or a RAID.
///
/// # Errors
/// Errors opening it.
pub(crate) fn is_in_use(path: &Path) -> Result<bool> {
    let is_free = probe_process::is_free(path).map_err(|error| {
        let what = format!("look whether {} is in use", path.display());
        let kind = match error.kind() {
            std::io::ErrorKind::TimedOut => ErrorKind::Unavailable,
            _ => ErrorKind::Io,
        };
        Error::with_source(kind, what, error)
    })?;
    Ok(!is_free)
}

/// Finds a program that has a block device or a partition of it open, for messages. Waits for
/// programs that close it soon, such as udev. Best effort: processes that this one may not inspect
/// are missed.
fn opened_by(path: &Path) -> Option<String> {
    let numbers = numbers_of(path);
    let until = SystemClock.now() + CLOSE_WAIT;
    loop {
        if let Some(device) = loop_on(&numbers) {
            return Some(format!("{device} (losetup)"));
        }
        let user =
            processes().find(|pid| has_open(*pid, &numbers) || has_mapped(*pid, &numbers))?;
        if SystemClock.now() >= until {
            let name = std::fs::read_to_string(format!("/proc/{user}/comm")).unwrap_or_default();
            return Some(format!("process {user} ({})", name.trim_end()));
        }
        std::thread::sleep(CLOSE_WAIT / 20);
    }
}

/// Waits until the kernel has no request in flight to a block device. A program that closes a
/// device waits for its writes, but no longer shows up as having it open. Returns false if the
/// device does not become idle soon.
///
/// Writing back here would be simpler, but would keep this process, which serves the device, from
/// ever ending while the device takes nothing.
fn becomes_idle(path: &Path) -> bool {
    let Some(name) = path.file_name() else { return true };
    let inflight = Path::new("/sys/block").join(name).join("inflight");
    let until = SystemClock.now() + IDLE_WAIT;
    let mut idle_since = None;
    loop {
        // Reads and writes, including flushes. Source: Documentation/ABI/stable/sysfs-block.
        let counts = std::fs::read_to_string(&inflight).unwrap_or_default();
        let now = SystemClock.now();
        if counts.split_ascii_whitespace().any(|count| count != "0") {
            idle_since = None;
        } else if now.duration_since(*idle_since.get_or_insert(now)) >= IDLE {
            return true;
        }
        if now >= until {
            return false;
        }
        std::thread::sleep(IDLE / 20);
    }
}

/// Number of a block device.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DeviceNumber {
    major: u32,
    minor: u32,
}

/// Numbers of a block device and of its partitions.
fn numbers_of(path: &Path) -> Vec<DeviceNumber> {
    let Some(name) = path.file_name() else { return Vec::new() };
    let system = Path::new("/sys/block").join(name);
    let entries = std::fs::read_dir(&system).into_iter().flatten().flatten();
    let partitions = entries.map(|entry| entry.path()).filter(|at| at.join("partition").exists());
    let number = |at: PathBuf| {
        let text = std::fs::read_to_string(at.join("dev")).ok()?;
        let (major, minor) = text.trim_end().split_once(':')?;
        Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
    };
    [system.clone()].into_iter().chain(partitions).filter_map(number).collect()
}

/// Finds a loop device over a block device or a partition of it. The kernel does not report that as
/// exclusive use.
fn loop_on(numbers: &[DeviceNumber]) -> Option<String> {
    let names = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    names.map(|entry| entry.path()).find_map(|system| {
        let backing = std::fs::read_to_string(system.join("loop/backing_file")).ok()?;
        let is_it = is_block_of(Path::new(backing.trim_end()), numbers);
        is_it.then(|| system.file_name().map(|name| format!("/dev/{}", name.to_string_lossy())))?
    })
}

/// Reports whether a process has a block device mapped. It may have closed the file itself.
fn has_mapped(pid: u32, numbers: &[DeviceNumber]) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    // Address, rights, offset, device, inode, path. Source: man 5 proc_pid_maps.
    let mut paths = maps.lines().filter_map(|line| line.split_once(" /dev/"));
    paths.any(|(_, name)| is_block_of(&Path::new("/dev").join(name.trim()), numbers))
}

fn is_block_of(path: &Path, numbers: &[DeviceNumber]) -> bool {
    // Do not ask a file server, which may not answer.
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let mask = rustix::fs::StatxFlags::TYPE;
    rustix::fs::statx(rustix::fs::CWD, path, flags, mask).is_ok_and(|found| {
        let kind = rustix::fs::FileType::from_raw_mode(found.stx_mode.into());
        kind == rustix::fs::FileType::BlockDevice
            && numbers.contains(&DeviceNumber {
                major: found.stx_rdev_major,
                minor: found.stx_rdev_minor,
            })
    })
}

/// Numbers of the other processes.
fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id())
}

fn has_open(pid: u32, numbers: &[DeviceNumber]) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.map(|file| file.path()).any(|file| is_block_of(&file, numbers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_program_that_has_a_device_open_is_found() {
        let names = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
        let mut devices = names.map(|entry| Path::new("/dev").join(entry.file_name()));
        let is_free = |path: &PathBuf| File::open(path).is_ok() && opened_by(path).is_none();
        let Some(device) = devices.find(is_free) else {
            return; // no disk here that we may read
        };
        let mut program = std::process::Command::new("sleep");
        program.arg("60").stdin(File::open(&device).unwrap());
        let mut program = program.spawn().unwrap();
        let said = opened_by(&device).unwrap();
        assert!(said.contains(&format!("process {} (sleep)", program.id())), "{said}");
        program.kill().unwrap();
        program.wait().unwrap();
        assert_eq!(opened_by(&device), None);
        // A program that ends soon is waited for.
        let mut program = std::process::Command::new("sleep");
        program.arg("0.2").stdin(File::open(&device).unwrap());
        let mut program = program.spawn().unwrap();
        assert_eq!(opened_by(&device), None);
        program.wait().unwrap();
    }
}
