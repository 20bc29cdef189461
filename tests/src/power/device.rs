//! A disk with a log of its writes, and file systems on it; for use in a guest kernel only.
//!
//! Invariants:
//! - All its data are files of one directory. Dropping a mount unmounts it.

use crate::place::{output, run};
use rustix::ioctl::{Updater, ioctl, opcode};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file as a block device.
pub struct Loop(String);

impl Loop {
    /// Attaches a file.
    ///
    /// # Panics
    /// When that fails.
    #[must_use]
    pub fn attach(file: &Path) -> Loop {
        Loop(run("losetup", &["-f", "--show", &file.display().to_string()]).trim().to_owned())
    }

    /// Returns its name under `/dev`.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        output("losetup", &["-d", &self.0]);
    }
}

/// A mounted ext4.
pub struct Mount(PathBuf);

impl Mount {
    /// Mounts the device, which replays the file system's journal.
    ///
    /// # Errors
    /// The output of mount.
    pub fn new(device: &str, at: &Path) -> Result<Mount, String> {
        std::fs::create_dir_all(at).expect("make a directory");
        let mounted = output("mount", &["-t", "ext4", device, &at.display().to_string()]);
        if !mounted.status.success() {
            return Err(String::from_utf8_lossy(&mounted.stderr).into_owned());
        }
        Ok(Mount(at.to_owned()))
    }

    /// Returns the mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        output("umount", &[&self.0.display().to_string()]);
    }
}

/// A device that logs its writes: device mapper's target `log-writes` over two files.
pub struct LoggedDisk {
    name: String,
    log_path: PathBuf,
    control: File,
    _disk: Loop,
    _log: Loop,
}

impl LoggedDisk {
    /// Makes a disk of this size in files of `dir`, with room for a log of its writes.
    ///
    /// # Panics
    /// When the kernel refuses.
    #[must_use]
    pub fn new(dir: &Path, name: &str, device_bytes: u64, log_bytes: u64) -> LoggedDisk {
        let file = |suffix: &str, bytes: u64| {
            let path = dir.join(format!("{name}.{suffix}"));
            let file = File::create(&path).expect("make a file");
            file.set_len(bytes).expect("a sparse file");
            (Loop::attach(&path), path)
        };
        let ((disk, _), (log, log_path)) = (file("disk", device_bytes), file("log", log_bytes));
        let sectors = device_bytes / 512;
        let table = format!("0 {sectors} log-writes {} {}", disk.device(), log.device());
        run("dmsetup", &["--noudevsync", "--noudevrules", "create", name, "--table", &table]);
        // A guest has no udev to make the name.
        run("dmsetup", &["mknodes", name]);
        let control = File::options().read(true).write(true).open("/dev/mapper/control");
        let control = control.expect("device mapper is in this kernel");
        LoggedDisk { name: name.to_owned(), log_path, control, _disk: disk, _log: log }
    }

    /// Returns its name under `/dev`.
    #[must_use]
    pub fn device(&self) -> String {
        format!("/dev/mapper/{}", self.name)
    }

    /// Puts a mark into the log, after everything that is on stable storage at this moment.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn mark(&self, text: &str) -> io::Result<()> {
        message(&self.control, &self.name, &format!("mark {text}"))
    }

    /// Ends logging and returns the log. Writes that were never flushed are at its end.
    #[must_use]
    pub fn finish(self) -> File {
        run("dmsetup", &["--noudevsync", "--noudevrules", "remove", "--retry", &self.name]);
        // The loop device must not cache anything that the file lacks.
        drop(self._log);
        File::open(&self.log_path).expect("the log of writes")
    }
}

/// Largest message. Chosen by hand: the marks are about ten bytes long.
const MESSAGE_BYTES_MAX: usize = 64;
/// `_IOWR(DM_IOCTL, DM_TARGET_MSG_CMD, struct dm_ioctl)`. Source: `linux/dm-ioctl.h`.
const TARGET_MESSAGE: rustix::ioctl::Opcode = opcode::read_write::<Header>(0xfd, 14);

/// Source: `linux/dm-ioctl.h`, `struct dm_ioctl`.
#[repr(C)]
struct Header {
    version: [u32; 3],
    data_bytes: u32,
    data_start: u32,
    target_count: u32,
    open_count: i32,
    flags: u32,
    event_number: u32,
    padding: u32,
    device: u64,
    name: [u8; 128],
    uuid: [u8; 129],
    rest: [u8; 7],
}

/// The header, followed by `struct dm_target_msg`: a sector and text that ends with a zero byte.
#[repr(C)]
struct Message {
    header: Header,
    sector: u64,
    text: [u8; MESSAGE_BYTES_MAX],
}

const _: () =
    assert!(size_of::<Header>() == 312 && size_of::<Message>() == 320 + MESSAGE_BYTES_MAX);

fn message(control: &File, device: &str, text: &str) -> io::Result<()> {
    assert!(device.len() < 128 && text.len() < MESSAGE_BYTES_MAX, "names are short");
    let mut message = Message {
        header: Header {
            version: [4, 0, 0],
            data_bytes: u32::try_from(size_of::<Message>()).expect("small"),
            data_start: u32::try_from(size_of::<Header>()).expect("small"),
            target_count: 0,
            open_count: 0,
            flags: 0,
            event_number: 0,
            padding: 0,
            device: 0,
            name: [0; 128],
            uuid: [0; 129],
            rest: [0; 7],
        },
        sector: 0,
        text: [0; MESSAGE_BYTES_MAX],
    };
    message.header.name[..device.len()].copy_from_slice(device.as_bytes());
    message.text[..text.len()].copy_from_slice(text.as_bytes());
    // SAFETY: the kernel reads and writes at most `data_bytes` from the start of `message`, which
    // is its size and which outlives the call.
    unsafe { ioctl(control, Updater::<TARGET_MESSAGE, Message>::new(&mut message)) }?;
    Ok(())
}
