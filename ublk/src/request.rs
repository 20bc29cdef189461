//! Checks a request of the kernel before any work starts. Pure.
//!
//! Invariants:
//! - A request reaches the device only if its payload is within the agreed limit and its end fits
//!   in 64 bits.

use crate::abi::{Descriptor, operation, request_flag};
use block::units::SECTOR_BYTES;
use rustix::io::Errno;

/// A valid request. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Read { offset: u64, length: u32 },
    Write { offset: u64, length: u32, fua: bool },
    Flush,
    Discard { offset: u64, length: u64, fua: bool },
    WriteZeroes { offset: u64, length: u64, no_hole: bool, fua: bool },
}

/// Returns the work of a request, or the negative error number that answers it.
pub(crate) fn judge(descriptor: &Descriptor, io_bytes_max: u32) -> Result<Work, i32> {
    let invalid = -Errno::INVAL.raw_os_error();
    let Descriptor { operation, flags, sector_count, start_sector } = *descriptor;
    if operation == operation::FLUSH {
        return Ok(Work::Flush);
    }
    let offset = start_sector.checked_mul(SECTOR_BYTES).ok_or(invalid)?;
    let length = u64::from(sector_count) * SECTOR_BYTES;
    offset.checked_add(length).ok_or(invalid)?;
    let fua = flags & request_flag::FUA != 0;
    let payload = || match u32::try_from(length) {
        Ok(length) if length > 0 && length <= io_bytes_max => Ok(length),
        _ => Err(invalid),
    };
    match operation {
        operation::READ => Ok(Work::Read { offset, length: payload()? }),
        operation::WRITE => Ok(Work::Write { offset, length: payload()?, fua }),
        operation::DISCARD => Ok(Work::Discard { offset, length, fua }),
        operation::WRITE_ZEROES => {
            let no_hole = flags & request_flag::NO_UNMAP != 0;
            Ok(Work::WriteZeroes { offset, length, no_hole, fua })
        }
        _ => Err(-Errno::OPNOTSUPP.raw_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(operation: u32, flags: u32, start_sector: u64, sector_count: u32) -> Descriptor {
        Descriptor { operation, flags, sector_count, start_sector }
    }

    #[test]
    fn requests_become_work() {
        let work = |operation, flags| judge(&descriptor(operation, flags, 8, 16), 8192);
        assert_eq!(work(operation::READ, 0), Ok(Work::Read { offset: 4096, length: 8192 }));
        let fua = request_flag::FUA;
        let write = Work::Write { offset: 4096, length: 8192, fua: true };
        assert_eq!(work(operation::WRITE, fua), Ok(write));
        assert_eq!(work(operation::FLUSH, 0), Ok(Work::Flush));
        let discard = Work::Discard { offset: 4096, length: 8192, fua: false };
        assert_eq!(work(operation::DISCARD, 0), Ok(discard));
        let zeroes = Work::WriteZeroes { offset: 4096, length: 8192, no_hole: true, fua: false };
        assert_eq!(work(operation::WRITE_ZEROES, request_flag::NO_UNMAP), Ok(zeroes));
        assert_eq!(work(13, 0), Err(-95));
    }

    #[test]
    fn malformed_requests_are_refused() {
        let invalid = Err(-22);
        assert_eq!(judge(&descriptor(operation::READ, 0, 0, 17), 8192), invalid);
        assert_eq!(judge(&descriptor(operation::WRITE, 0, 0, 0), 8192), invalid);
        assert_eq!(judge(&descriptor(operation::READ, 0, u64::MAX / 256, 1), 8192), invalid);
        assert_eq!(judge(&descriptor(operation::WRITE, 0, 0, u32::MAX), u32::MAX), invalid);
        assert_eq!(judge(&descriptor(operation::DISCARD, 0, u64::MAX / 512, 1), 8192), invalid);
    }
}
