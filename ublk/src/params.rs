//! The parameters that the kernel gets for a device. Pure.
//!
//! Invariants:
//! - The attributes are true: a device has a volatile cache and FUA exactly if answered writes may
//!   be lost in a power failure until they are flushed.

use crate::abi::{Params, attribute};
use block::units::{BLOCK_BYTES, SECTOR_BYTES};
use block::{Error, ErrorKind, Limits, Result};

/// Longest range of one discard, in sectors. Source: the kernel's requests count bytes in 32 bits;
/// rounded down to whole blocks.
const RANGE_SECTORS_MAX: u32 = (u32::MAX - 4095) >> 9;

/// Returns the parameters for a device with these limits.
///
/// # Errors
/// `Invalid` if the logical block is neither 512 nor 4096 bytes, or the size is not a multiple of
/// it.
pub(crate) fn params(
    limits: &Limits,
    logical_block_bytes: u32,
    io_bytes_max: u32,
) -> Result<Params> {
    if logical_block_bytes != 512 && logical_block_bytes != 4096 {
        let what =
            format!("attach with logical blocks of {logical_block_bytes} bytes: 512 or 4096");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    if !limits.size_bytes.is_multiple_of(u64::from(logical_block_bytes)) {
        let what = format!(
            "attach with logical blocks of {logical_block_bytes} bytes: the volume's {} bytes are no \
             multiple; take 512, or resize it",
            limits.size_bytes
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let read_only = if limits.is_read_only { attribute::READ_ONLY } else { 0 };
    let cache = match limits.has_volatile_cache {
        true => attribute::VOLATILE_CACHE | attribute::FUA,
        false => 0,
    };
    let block_bytes = u32::try_from(BLOCK_BYTES).expect("a block is small");
    Ok(Params {
        attributes: cache | read_only,
        logical_shift: shift(logical_block_bytes),
        physical_shift: shift(limits.preferred_block_bytes.max(logical_block_bytes)),
        io_sectors_max: io_bytes_max / 512,
        device_sectors: limits.size_bytes / SECTOR_BYTES,
        discard_granularity_bytes: block_bytes,
        discard_sectors_max: RANGE_SECTORS_MAX,
        zeroes_sectors_max: RANGE_SECTORS_MAX,
    })
}

fn shift(bytes: u32) -> u8 {
    u8::try_from(bytes.trailing_zeros()).expect("at most 32")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(size_bytes: u64, is_read_only: bool) -> Limits {
        Limits {
            size_bytes,
            preferred_block_bytes: 4096,
            payload_bytes_max: 32 << 20,
            is_read_only,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    #[test]
    fn device_describes_itself() {
        let params = params(&limits(1 << 30, false), 512, 1 << 20).unwrap();
        assert_eq!(params.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
        assert_eq!((params.logical_shift, params.physical_shift), (9, 12));
        assert_eq!((params.io_sectors_max, params.device_sectors), (2048, 1 << 21));
        assert!(u64::from(params.discard_sectors_max) * 512 <= u64::from(u32::MAX));
        assert!((u64::from(params.discard_sectors_max) * 512).is_multiple_of(4096));
    }

    #[test]
    fn a_device_whose_writes_are_stable_has_no_volatile_cache() {
        let stable = Limits { has_volatile_cache: false, ..limits(1 << 30, false) };
        assert_eq!(params(&stable, 512, 1 << 20).unwrap().attributes, 0);
    }

    #[test]
    fn read_only_volumes_are_read_only_devices() {
        let params = params(&limits(1 << 30, true), 4096, 1 << 20).unwrap();
        assert_ne!(params.attributes & attribute::READ_ONLY, 0);
        assert_eq!((params.logical_shift, params.physical_shift), (12, 12));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        assert!(params(&limits((1 << 30) + 512, false), 512, 1 << 20).is_ok());
        let error = params(&limits((1 << 30) + 512, false), 4096, 1 << 20).unwrap_err();
        assert!(error.to_string().contains("no multiple"), "{error}");
        assert!(params(&limits(1 << 30, false), 1024, 1 << 20).is_err());
    }
}
