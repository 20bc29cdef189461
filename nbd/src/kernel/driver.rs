//! The kernel's nbd driver: commands over generic netlink, and its state in /sys.
//!
//! Invariants:
//! - Every command is awaited, for a bounded time.
//! - A device is recognized by the identifier that it was made with, which the kernel keeps. Its
//!   number may meanwhile belong to another device.

use super::netlink::{self, Answer, Request, attribute, command, control};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use rustix::io::Errno;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
    sockopt,
};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SYS_BLOCK: &str = "/sys/block";
/// Longest wait for an answer. Chosen by hand: a disconnect waits for replies in flight.
const ANSWER_WAIT: Duration = Duration::from_secs(60);
/// Buffer for one answer. Answers of this family have a few hundred bytes.
const ANSWER_BYTES_MAX: usize = 8 << 10;

/// The parameters of a new device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Made<'a> {
    pub(super) identifier: &'a str,
    pub(super) size_bytes: u64,
    pub(super) logical_block_bytes: u32,
    pub(super) transmission_flags: u16,
    pub(super) dead_timeout: Duration,
}

/// The driver, ready for commands. It runs one command at a time and is not shared.
pub(super) struct Driver {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Driver {
    /// Finds the driver. Like every method here, it blocks.
    ///
    /// # Errors
    /// `Unsupported` if the driver is missing.
    pub(super) fn open() -> Result<Driver> {
        let failed = |error: Errno| {
            let what = "open a socket to the kernel's nbd driver (generic netlink)";
            Error::with_source(ErrorKind::Io, what, std::io::Error::from(error))
        };
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        let socket =
            socket_with(family, kind, SocketFlags::CLOEXEC, Some(GENERIC)).map_err(failed)?;
        bind(&socket, &SocketAddrNetlink::new(0, 0)).map_err(failed)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(ANSWER_WAIT))
            .map_err(failed)?;
        let mut driver = Driver { socket, family: 0, sequence: 0 };
        driver.family = driver.find_family()?;
        Ok(driver)
    }

    fn find_family(&mut self) -> Result<u16> {
        let request = self.request(control::FAMILY, control::GET_FAMILY);
        let asked = self.run(request.text(control::FAMILY_NAME, "nbd"), |attributes| {
            attributes.u16(control::FAMILY_ID)
        });
        match asked {
            Ok(Some(family)) => Ok(family),
            Ok(None) | Err(Failure::Errno(Errno::NOENT)) => {
                let what = "look for the kernel's nbd driver: it is not loaded; run `modprobe nbd` \
                            (Linux 5.14 or newer, built with BLK_DEV_NBD)";
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            Err(failure) => Err(failure.of("look for the kernel's nbd driver")),
        }
    }

    /// Makes a device of these sockets, and returns its number.
    ///
    /// # Errors
    /// `Denied`: missing privileges. `Unsupported`: the kernel keeps no identifiers (before 5.14);
    /// the device has then been removed again.
    pub(super) fn connect(&mut self, made: &Made<'_>, sockets: &[OwnedFd]) -> Result<u32> {
        let request = self
            .request(self.family, command::CONNECT)
            .u64(attribute::SIZE_BYTES, made.size_bytes)
            .u64(attribute::BLOCK_SIZE_BYTES, u64::from(made.logical_block_bytes))
            // No timeout: the kernel repeats a request only if its connection has been replaced.
            .u64(attribute::TIMEOUT, 0)
            .u64(attribute::SERVER_FLAGS, u64::from(made.transmission_flags))
            .u64(attribute::DEAD_CONN_TIMEOUT, made.dead_timeout.as_secs())
            .text(attribute::BACKEND_IDENTIFIER, made.identifier)
            .sockets(&numbers(sockets));
        let what = "make an nbd device";
        let made_it = self.run(request, |attributes| attributes.u32(attribute::INDEX));
        let index = made_it.map_err(|failure| failure.of(what))?.ok_or_else(|| {
            Error::new(ErrorKind::Io, format!("{what}: the kernel did not name it"))
        })?;
        if identifier_of(index).as_deref() != Some(made.identifier) {
            let removed = self.disconnect(index);
            tracing::debug!(
                ?removed,
                "the kernel keeps no identifier of a device; it was disconnected"
            );
            let what = format!(
                "{what}: this kernel keeps no identifiers of devices, so that none could be found again \
                 after a restart; it needs Linux 5.14 or newer, and /sys"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        Ok(index)
    }

    /// Gives a device new connections for its dead ones, another size, or both. The kernel closes a
    /// socket that it has no use for.
    ///
    /// # Errors
    /// `NotFound`: the device is not connected, or its number belongs to another device.
    pub(super) fn reconfigure(
        &mut self,
        index: u32,
        identifier: &str,
        size_bytes: Option<u64>,
        sockets: &[OwnedFd],
    ) -> Result<()> {
        let mut request = self
            .request(self.family, command::RECONFIGURE)
            .u32(attribute::INDEX, index)
            .text(attribute::BACKEND_IDENTIFIER, identifier);
        if let Some(size_bytes) = size_bytes {
            request = request.u64(attribute::SIZE_BYTES, size_bytes);
        }
        if !sockets.is_empty() {
            request = request.sockets(&numbers(sockets));
        }
        match self.run(request, |_| None::<()>) {
            Ok(_) => Ok(()),
            Err(Failure::Errno(Errno::INVAL)) => {
                let what = format!(
                    "reconfigure {}: it is no longer connected, or belongs to another process",
                    block_path(index).display()
                );
                Err(Error::new(ErrorKind::NotFound, what))
            }
            Err(failure) => {
                Err(failure.of(&format!("reconfigure {}", block_path(index).display())))
            }
        }
    }

    /// Ends a device; its open users get errors. The caller must make sure that the number is still
    /// that of its own device: see [`find`].
    pub(super) fn disconnect(&mut self, index: u32) -> Result<()> {
        let request = self.request(self.family, command::DISCONNECT).u32(attribute::INDEX, index);
        let ended = self.run(request, |_| None::<()>);
        ended.map_err(|failure| {
            failure.of(&format!("disconnect {}", block_path(index).display()))
        })?;
        Ok(())
    }

    fn request(&mut self, family: u16, command: u8) -> Request {
        self.sequence += 1;
        Request::new(family, command, self.sequence)
    }

    /// Sends a request and waits for its end. Returns the value that `take` finds in an answer.
    fn run<T>(
        &mut self,
        request: Request,
        take: impl Fn(netlink::Attributes<'_>) -> Option<T>,
    ) -> std::result::Result<Option<T>, Failure> {
        let message = request.finish();
        send(&self.socket, &message, SendFlags::empty()).map_err(Failure::Errno)?;
        let until = SystemClock.now() + ANSWER_WAIT;
        let mut buffer = vec![0; ANSWER_BYTES_MAX];
        let mut taken = None;
        while SystemClock.now() < until {
            let length = match recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) => length,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(Failure::Errno(errno)),
            };
            for answer in netlink::answers(&buffer[..length], self.sequence) {
                match answer {
                    Answer::Data(attributes) => taken = taken.or_else(|| take(attributes)),
                    Answer::End(0) => return Ok(taken),
                    Answer::End(code) => {
                        return Err(Failure::Errno(Errno::from_raw_os_error(code)));
                    }
                }
            }
        }
        Err(Failure::Late)
    }
}

enum Failure {
    Errno(Errno),
    Late,
}

impl Failure {
    fn of(self, what: &str) -> Error {
        match self {
            Failure::Late => {
                let what =
                    format!("{what}: no answer of the kernel in {} s", ANSWER_WAIT.as_secs());
                Error::new(ErrorKind::Unavailable, what)
            }
            Failure::Errno(Errno::PERM | Errno::ACCESS) => {
                let what = format!("{what}: devices of the kernel need root (CAP_SYS_ADMIN)");
                Error::new(ErrorKind::Denied, what)
            }
            Failure::Errno(errno) => {
                Error::with_source(ErrorKind::Io, what.to_owned(), std::io::Error::from(errno))
            }
        }
    }
}

fn numbers(sockets: &[OwnedFd]) -> Vec<u32> {
    let number = |socket: &OwnedFd| u32::try_from(socket.as_raw_fd()).expect("it is open");
    sockets.iter().map(number).collect()
}

/// Returns the path of the block device with this number.
pub(super) fn block_path(index: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// Returns the directory of a device in /sys.
pub(super) fn sys_path(index: u32) -> PathBuf {
    Path::new(SYS_BLOCK).join(format!("nbd{index}"))
}

/// Returns the identifier that a connected device was made with, or `None` for other devices.
pub(super) fn identifier_of(index: u32) -> Option<String> {
    let text = std::fs::read_to_string(sys_path(index).join("backend")).ok()?;
    Some(text.trim_end().to_owned())
}

/// Whether a process is connected to the device.
pub(super) fn is_connected(index: u32) -> bool {
    sys_path(index).join("pid").exists()
}

/// Lists the numbers and identifiers of the devices that have an identifier.
///
/// # Errors
/// `Unsupported` if /sys cannot be read.
pub(super) fn identified() -> Result<Vec<(u32, String)>> {
    let entries = std::fs::read_dir(SYS_BLOCK).map_err(|error| {
        Error::with_source(
            ErrorKind::Unsupported,
            format!("look for nbd devices in {SYS_BLOCK}"),
            error,
        )
    })?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.strip_prefix("nbd")?.parse().ok());
    Ok(numbers.filter_map(|number| Some((number, identifier_of(number)?))).collect())
}

/// Finds the device that was made with an identifier.
///
/// # Errors
/// Those of [`identified`].
pub(super) fn find(identifier: &str) -> Result<Option<u32>> {
    let mut all = identified()?.into_iter();
    Ok(all.find(|(_, other)| other == identifier).map(|(number, _)| number))
}
