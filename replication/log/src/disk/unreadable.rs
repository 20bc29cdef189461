//! Payloads that the log's disk does not read (EIO). It may read them later, or never.
//!
//! Invariants:
//! - Only an error of reading a payload of the log or of a spill file counts. Errors of writing and
//!   of other disks do not.
//! - A payload is read several times before it is given up.

use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use std::fmt;
use std::io;
use std::time::Duration;

/// Number of reads of a payload before it is given up, and the pause between two. Chosen by hand:
/// callers that give up have already retried for long.
const READS: u32 = 3;
const PAUSE: Duration = Duration::from_millis(100);

/// EIO of a payload.
#[derive(Debug)]
struct Unreadable(io::Error);

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the disk does not read it: {}", self.0)
    }
}

impl std::error::Error for Unreadable {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Returns whether the system says that the disk could not read.
pub(crate) fn is_eio(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Builds the error of reading a payload.
pub(crate) fn error_of(what: String, error: io::Error) -> Error {
    if is_eio(&error) {
        return Error::with_source(ErrorKind::Io, what, Unreadable(error));
    }
    let kind = match error.kind() {
        // The file was cut short after it was opened, which is as bad as overwritten data.
        io::ErrorKind::UnexpectedEof => ErrorKind::Corrupt,
        _ => ErrorKind::Io,
    };
    Error::with_source(kind, what, error)
}

/// Returns whether `error` comes from a payload of the log or of a spill file that the disk does not
/// read.
#[must_use]
pub fn is_unreadable(error: &Error) -> bool {
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        if source.is::<Unreadable>() {
            return true;
        }
        cause = source.source();
    }
    false
}

/// Reads, with retries; a payload that the disk still does not read becomes `Corrupt`. Blocks.
pub(crate) fn read_or_lose(read: impl Fn() -> Result<Bytes>) -> Result<Bytes> {
    let mut left = READS;
    loop {
        left -= 1;
        match read() {
            Err(error) if is_unreadable(&error) => {
                if left == 0 {
                    let what = "give up what the disk does not read";
                    return Err(Error::with_source(ErrorKind::Corrupt, what, error));
                }
                std::thread::sleep(PAUSE);
            }
            read => return read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn failing(errno: rustix::io::Errno) -> Error {
        error_of("read log 7".into(), io::Error::from_raw_os_error(errno.raw_os_error()))
    }

    #[test]
    fn only_payloads_that_the_disk_does_not_read_are_given_up() {
        let unreadable = failing(rustix::io::Errno::IO);
        assert!(
            is_unreadable(&unreadable) && is_unreadable(&unreadable.clone().context("destage"))
        );
        let nested = Error::with_source(ErrorKind::Unavailable, "read a block", unreadable);
        assert!(is_unreadable(&nested));
        let written = io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error());
        let written = Error::with_source(ErrorKind::Io, "write a spill file", written);
        for other in [written, failing(rustix::io::Errno::NOSPC), failing(rustix::io::Errno::MFILE)]
        {
            assert!(!is_unreadable(&other), "{other:?}");
            let kept = read_or_lose(|| Err(other.clone())).unwrap_err();
            assert_eq!(kept.kind(), ErrorKind::Io);
        }
        let short = error_of("read log 7".into(), io::ErrorKind::UnexpectedEof.into());
        assert_eq!(short.kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn payload_that_a_later_try_reads_is_not_lost() {
        let tries = Cell::new(0);
        let read = |good_from: u32| {
            tries.set(0);
            read_or_lose(|| {
                tries.set(tries.get() + 1);
                match tries.get() >= good_from {
                    true => Ok(Bytes::from_static(b"there")),
                    false => Err(failing(rustix::io::Errno::IO)),
                }
            })
        };
        assert_eq!(read(READS).unwrap(), "there");
        assert_eq!(read(READS + 1).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(tries.get(), READS);
    }
}
