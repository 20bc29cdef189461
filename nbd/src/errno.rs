//! [`ErrorKind`] -> NBD error value.
//!
//! Invariants:
//! - Exhaustive: a new kind does not compile until its answer is decided here.
//! - Only values that the specification defines leave the server (spec, "Error values").

use block::ErrorKind;

/// Operation not permitted: a write to a read-only export.
pub const EPERM: u32 = 1;
/// Input/output error.
pub const EIO: u32 = 5;
/// The request is wrong; a client should not send it again.
pub const EINVAL: u32 = 22;
/// No space left, or a write past the end.
pub const ENOSPC: u32 = 28;
/// Answers FAST_ZERO only (spec, "WRITE_ZEROES").
pub const ENOTSUP: u32 = 95;
/// The server is going away, or another server has taken over.
pub const ESHUTDOWN: u32 = 108;

/// Returns the error value for a failed request. `is_fast_zero` says that the request carried
/// FAST_ZERO; only such a request may be answered with ENOTSUP.
#[must_use]
pub const fn to_nbd_error(kind: ErrorKind, is_fast_zero: bool) -> u32 {
    match kind {
        ErrorKind::Invalid => EINVAL,
        ErrorKind::Unsupported if is_fast_zero => ENOTSUP,
        ErrorKind::Unsupported => EINVAL,
        ErrorKind::Denied => EPERM,
        ErrorKind::Full => ENOSPC,
        // The volume was removed or has another owner: this server will not serve it again. In the
        // second case only a kernel device is answered.
        ErrorKind::NotFound | ErrorKind::Fenced => ESHUTDOWN,
        ErrorKind::Busy
        | ErrorKind::Unavailable
        | ErrorKind::Unreadable
        | ErrorKind::Corrupt
        | ErrorKind::Io => EIO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enotsup_answers_fast_zero_only() {
        assert_eq!(to_nbd_error(ErrorKind::Unsupported, true), ENOTSUP);
        assert_eq!(to_nbd_error(ErrorKind::Unsupported, false), EINVAL);
        assert_eq!(to_nbd_error(ErrorKind::Full, true), ENOSPC);
        assert_eq!(to_nbd_error(ErrorKind::Fenced, false), ESHUTDOWN);
    }
}
