//! [`ErrorKind`] -> result of a request.
//!
//! Invariants:
//! - Exhaustive: a new kind does not compile until its answer is decided here.
//! - Every result becomes a status of the kernel's block layer, which tells file systems what to
//!   do. An unknown number becomes EIO there (source: `errno_to_blk_status`, block/blk-core.c).

use block::ErrorKind;
use rustix::io::Errno;

/// Returns the negative error number that answers a failed request.
pub(crate) const fn to_result(kind: ErrorKind) -> i32 {
    let errno = match kind {
        ErrorKind::Invalid => Errno::INVAL,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        ErrorKind::Denied => Errno::PERM,
        ErrorKind::Full => Errno::NOSPC,
        // The bytes exist but are wrong: file systems with several copies read another one.
        ErrorKind::Corrupt => Errno::ILSEQ,
        // Not EAGAIN and not ETIMEDOUT: the block layer would repeat the request forever.
        ErrorKind::NotFound
        | ErrorKind::Fenced
        | ErrorKind::Busy
        | ErrorKind::Unavailable
        | ErrorKind::Unreadable
        | ErrorKind::Io => Errno::IO,
    };
    -errno.raw_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_negative_error_numbers() {
        assert_eq!(to_result(ErrorKind::Full), -28);
        assert_eq!(to_result(ErrorKind::Io), -5);
        assert_eq!(to_result(ErrorKind::Corrupt), -84);
    }
}
