//! `/dev/ublk-control`: commands that add, start, recover and delete devices.
//!
//! Invariants:
//! - Every command is awaited, for a bounded time. Memory that the driver may still use after that
//!   is never freed.
//! - A missing kernel feature is reported in one line, with its name and the remedy.

use crate::abi::{self, Info, Params, command, feature};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

const PATH: &str = "/dev/ublk-control";
/// Longest wait for a command. Chosen by hand: a start reads the partition table through the
/// device, a stop waits for requests in flight.
const COMMAND_WAIT: Duration = Duration::from_secs(60);
/// Features without which a device would break its promises. Source: all of them came with Linux
/// 6.5 at the latest.
const NEEDED: [(u64, &str); 4] = [
    (feature::USER_RECOVERY, "user recovery"),
    (feature::USER_RECOVERY_REISSUE, "user recovery with reissue"),
    (feature::CMD_IOCTL_ENCODE, "encoded commands"),
    (feature::USER_COPY, "user copy"),
];

/// The open control device of the driver. It runs one command at a time and is not shared.
pub(crate) struct Control {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: File,
    features: u64,
    /// Identifies the newest command, so that the late end of an abandoned one is not mistaken for
    /// it.
    command_count: u64,
}

impl Control {
    /// Opens the driver and checks its features.
    ///
    /// # Errors
    /// `Unsupported`: there is no driver, or it lacks a feature. `Denied`: missing privileges.
    pub(crate) fn open() -> Result<Control> {
        let file = OpenOptions::new().read(true).write(true).open(PATH).map_err(|error| {
            match error.kind() {
                std::io::ErrorKind::NotFound => Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "open {PATH}: this kernel has no ublk driver loaded; run `modprobe ublk_drv` \
                         (Linux 6.5 or newer, built with BLK_DEV_UBLK)"
                    ),
                ),
                std::io::ErrorKind::PermissionDenied => Error::new(
                    ErrorKind::Denied,
                    format!("open {PATH}: {RIGHTS}"),
                ),
                _ => Error::with_source(ErrorKind::Io, format!("open {PATH}"), error),
            }
        })?;
        let ring = IoUring::<squeue::Entry128, cqueue::Entry>::builder().build(4);
        let ring = ring.map_err(|error| {
            let what = "set up io_uring for ublk commands (is it forbidden by \
                        kernel.io_uring_disabled, or by a container's rules?)";
            Error::with_source(ErrorKind::Unsupported, what, error)
        })?;
        let mut control = Control { ring, file, features: 0, command_count: 0 };
        control.features = control.read_features()?;
        Ok(control)
    }

    fn read_features(&mut self) -> Result<u64> {
        let mut bytes = Box::new([0; 8]);
        match self.run_with(command::GET_FEATURES, u32::MAX, &mut bytes, 0) {
            Ok(()) => {}
            // Kernels before 6.5 do not know this command.
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NODEV) => {}
            Err(errno) => return Err(failed("ask the ublk driver for its features", errno)),
        }
        check_features(u64::from_ne_bytes(*bytes))
    }

    /// Returns the driver's features, as bits of [`feature`].
    pub(crate) fn features(&self) -> u64 {
        self.features
    }

    /// Adds a device. The driver chooses its number if `info` has none (`u32::MAX`).
    pub(crate) fn add(&mut self, info: &Info) -> Result<Info> {
        let mut bytes = Box::new(info.encode());
        self.run_with(command::ADD_DEV, info.device, &mut bytes, 0)
            .map_err(|errno| failed("add a ublk device", errno))?;
        Ok(Info::decode(&bytes))
    }

    pub(crate) fn set_params(&mut self, device: u32, params: &Params) -> Result<()> {
        let mut bytes = Box::new(params.encode());
        self.run_with(command::SET_PARAMS, device, &mut bytes, 0)
            .map_err(|errno| failed(&format!("set the parameters of ublk device {device}"), errno))
    }

    /// Returns the driver's record of a device, or `None` if there is no such device.
    pub(crate) fn info(&mut self, device: u32) -> Result<Option<Info>> {
        // This command identifies the device by its path, which precedes the buffer.
        let path = format!("/dev/ublkc{device}\0");
        let mut bytes = Box::new([0; INFO_WITH_PATH_BYTES]);
        bytes[..path.len()].copy_from_slice(path.as_bytes());
        let len = path.len() + abi::INFO_BYTES;
        match self.run_path(command::GET_DEV_INFO2, device, &mut bytes, len, path.len()) {
            Ok(()) => {
                let info = &bytes[path.len()..len];
                Ok(Some(Info::decode(info.try_into().expect("the slice has that length"))))
            }
            Err(Errno::NODEV | Errno::NOENT) => Ok(None),
            Err(errno) => Err(failed(&format!("query ublk device {device}"), errno)),
        }
    }

    /// Makes the block device appear. All queues must be fetching, or about to fetch.
    pub(crate) fn start(&mut self, device: u32) -> Result<()> {
        let pid = u64::from(std::process::id());
        self.run(command::START_DEV, device, pid)
            .map_err(|errno| failed(&format!("start ublk device {device}"), errno))
    }

    /// Makes the block device disappear, after the requests in flight have been answered. A device
    /// that is already stopped is no error.
    pub(crate) fn stop(&mut self, device: u32) -> Result<()> {
        match self.run(command::STOP_DEV, device, 0) {
            Ok(()) | Err(Errno::NODEV) => Ok(()),
            Err(errno) => Err(failed(&format!("stop ublk device {device}"), errno)),
        }
    }

    /// Deletes a device without a server, at the latest when its last user has closed it. A device
    /// that is already gone is no error.
    pub(crate) fn delete(&mut self, device: u32) -> Result<()> {
        match self.run(command::DEL_DEV_ASYNC, device, 0) {
            Ok(()) | Err(Errno::NODEV) => Ok(()),
            Err(errno) => Err(failed(&format!("delete ublk device {device}"), errno)),
        }
    }

    /// Begins to take over a quiesced device, once its server has ended completely. Until then the
    /// driver answers `EBUSY`.
    pub(crate) fn start_recovery(&mut self, device: u32, until: Instant) -> Result<()> {
        loop {
            match self.run(command::START_USER_RECOVERY, device, 0) {
                Ok(()) => return Ok(()),
                // Linux 6.12: an earlier process died between this command and the end of its recovery.
                Err(Errno::INVAL) => return Ok(()),
                Err(Errno::BUSY) if SystemClock.now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(errno) => {
                    return Err(failed(&format!("take over ublk device {device}"), errno));
                }
            }
        }
    }

    /// Ends the take-over: requests flow again. All queues must be fetching, or about to fetch.
    pub(crate) fn end_recovery(&mut self, device: u32) -> Result<()> {
        let pid = u64::from(std::process::id());
        self.run(command::END_USER_RECOVERY, device, pid)
            .map_err(|errno| failed(&format!("resume ublk device {device}"), errno))
    }

    /// Changes the size known to the kernel, in sectors, while the device is in use.
    pub(crate) fn update_size(&mut self, device: u32, sectors: u64) -> Result<()> {
        if self.features & feature::UPDATE_SIZE == 0 {
            let what = format!(
                "resize ublk device {device}: this kernel cannot change the size of a device in use \
                 (Linux 6.16 can); detach and attach it"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        self.run(command::UPDATE_SIZE, device, sectors)
            .map_err(|errno| failed(&format!("resize ublk device {device}"), errno))
    }

    fn run(&mut self, operation: u32, device: u32, data: u64) -> Result<(), Errno> {
        self.submit(operation, abi::control(device, None, data))
    }

    fn run_with<const N: usize>(
        &mut self,
        operation: u32,
        device: u32,
        buffer: &mut Box<[u8; N]>,
        data: u64,
    ) -> Result<(), Errno> {
        let len = u16::try_from(N).expect("buffers of commands are small");
        let command = abi::control(device, Some((buffer.as_mut_ptr() as u64, len)), data);
        self.lend(operation, command, buffer)
    }

    fn run_path<const N: usize>(
        &mut self,
        operation: u32,
        device: u32,
        buffer: &mut Box<[u8; N]>,
        len: usize,
        path_len: usize,
    ) -> Result<(), Errno> {
        let len = u16::try_from(len).expect("buffers of commands are small");
        let mut command = abi::control(device, Some((buffer.as_mut_ptr() as u64, len)), 0);
        let path_len = u16::try_from(path_len).expect("paths of devices are short");
        command[24..26].copy_from_slice(&path_len.to_ne_bytes());
        self.lend(operation, command, buffer)
    }

    /// Runs a command that carries the address of `buffer` and reads or writes it.
    fn lend<const N: usize>(
        &mut self,
        operation: u32,
        command: [u8; 80],
        buffer: &mut Box<[u8; N]>,
    ) -> Result<(), Errno> {
        let result = self.submit(operation, command);
        if result == Err(Errno::TIMEDOUT) {
            // The driver may still write there.
            std::mem::forget(std::mem::replace(buffer, Box::new([0; N])));
        }
        result
    }

    #[expect(unsafe_code, reason = "a ring's entries are unsafe to submit")]
    fn submit(&mut self, operation: u32, command: [u8; 80]) -> Result<(), Errno> {
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation)
            .cmd(command)
            .build()
            .user_data(self.command_count + 1);
        self.command_count += 1;
        // SAFETY: the command holds no pointer except that of a boxed buffer. Its owner keeps the
        // buffer until the completion, or forever if that does not arrive in time (`lend`).
        unsafe { self.ring.submission().push(&entry).map_err(|_| Errno::BUSY)? };
        let limit = types::Timespec::from(COMMAND_WAIT);
        let args = types::SubmitArgs::new().timespec(&limit);
        let until = SystemClock.now() + COMMAND_WAIT;
        loop {
            let waited = self.ring.submitter().submit_with_args(1, &args);
            let ended =
                self.ring.completion().find(|ended| ended.user_data() == self.command_count);
            if let Some(entry) = ended {
                return match entry.result() {
                    result if result >= 0 => Ok(()),
                    error => Err(Errno::from_raw_os_error(-error)),
                };
            }
            match waited.map_err(|error| Errno::from_io_error(&error)) {
                Err(Some(Errno::INTR)) | Ok(_) if SystemClock.now() < until => {}
                Err(Some(Errno::TIME)) | Ok(_) => return Err(Errno::TIMEDOUT),
                Err(errno) => return Err(errno.unwrap_or(Errno::IO)),
            }
        }
    }
}

/// Length of a path such as `/dev/ublkc4294967295` with its terminating zero, and the answer after
/// it.
const INFO_WITH_PATH_BYTES: usize = 24 + abi::INFO_BYTES;

/// Text for a refusal by the driver; root within a container often lacks this privilege as well.
const RIGHTS: &str = "devices of the kernel need root (CAP_SYS_ADMIN)";

fn failed(what: &str, errno: Errno) -> Error {
    let kind = match errno {
        Errno::PERM | Errno::ACCESS => {
            return Error::new(ErrorKind::Denied, format!("{what}: {RIGHTS}"));
        }
        Errno::BUSY | Errno::EXIST => ErrorKind::Busy,
        Errno::TIMEDOUT => ErrorKind::Unavailable,
        _ => ErrorKind::Io,
    };
    Error::with_source(kind, what, std::io::Error::from(errno))
}

/// Returns the features of the driver, if they suffice.
///
/// # Errors
/// `Unsupported`, naming the missing features.
fn check_features(features: u64) -> Result<u64> {
    let missing: Vec<&str> =
        NEEDED.iter().filter(|(bit, _)| features & bit == 0).map(|(_, name)| *name).collect();
    if missing.is_empty() {
        return Ok(features);
    }
    let what = format!(
        "use the ublk driver: it lacks {}; it needs Linux 6.5 or newer",
        missing.join(", ")
    );
    Err(Error::new(ErrorKind::Unsupported, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_lacks_something_is_refused_with_its_name() {
        let all = NEEDED.iter().fold(feature::UPDATE_SIZE, |all, (bit, _)| all | bit);
        assert_eq!(check_features(all).unwrap(), all);
        assert!(check_features(all & !feature::UPDATE_SIZE).is_ok(), "Linux before 6.16 has none");
        for (bit, name) in NEEDED {
            let error = check_features(all & !bit).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let wanted = format!("it lacks {name}; it needs Linux 6.5 or newer");
            assert!(error.to_string().contains(&wanted), "{error}");
        }
        // This is the result of a driver without the command.
        assert!(check_features(0).unwrap_err().to_string().contains("user copy"));
    }
}
