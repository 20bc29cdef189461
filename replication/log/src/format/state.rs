//! `ring.state`: the run that has the log open, its kernel and its mounted file system,
//! and whether a write or sync of its files failed.
//!
//! Invariants:
//! - Each open replaces the file whole. A failure is written over it in place: all meaningful bytes
//!   lie in one sector of 512 bytes, whose space was allocated at the open.

use super::{FormatError, put};
use block::Lsn;
use block::units::{crc32c, u16_at, u32_at, u64_at};

/// Length of the file in bytes: one block, so that writing over it takes no space.
pub(crate) const STATE_FILE_BYTES: usize = 4096;
/// Number of meaningful bytes in it.
pub(crate) const STATE_BYTES: usize = 80;
/// Format version that this program writes.
const VERSION: u16 = 1;

const MAGIC: &[u8; 8] = b"SPDLSTAT";
const AT_VERSION: usize = 8; //  u16
const AT_STANDING: usize = 10; // u8: 0 open, 1 failed
const AT_OWED: usize = 11; //    u8: 0 nothing, or a TailLoss that is not settled
const AT_MOUNT_KIND: usize = 12; // u32: 0 not known, 1 number of a node of sysfs
const AT_OPEN: usize = 16; //    [u8; 16] open id of the run
const AT_BOOT: usize = 32; //    [u8; 16] the kernel's boot id
const AT_MOUNT: usize = 48; //   u64, 0 if it is not known
const AT_ACKED: usize = 56; //   u64, newest entry answered before the failure; all ones: not known
const AT_ZERO: usize = 64; //    12 zero bytes
const AT_CRC: usize = 76; //     u32, CRC-32C of bytes 0..76
const _: () = assert!(AT_CRC + 4 == STATE_BYTES && STATE_BYTES <= 512);

const MOUNT_UNKNOWN: u32 = 0;
const MOUNT_SYSFS: u32 = 1;
const ACKED_UNKNOWN: u64 = u64::MAX;

/// The reason why acknowledged writes may be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailLoss {
    /// The machine stopped, and data that was only in its page cache is lost.
    Reboot,
    /// The file system of the log was unmounted meanwhile, and data that it could not write is
    /// lost.
    Remount,
    /// A write or sync of the log's files failed, and the kernel may have dropped data that it
    /// could not write.
    Failure,
}

/// The standing of the log of one run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// The log is open, or its process ended without a failure of the log.
    Open,
    /// A write or sync of its files failed.
    Failed {
        /// Newest entry that was answered before; `None` if it is not known.
        acked: Option<Lsn>,
    },
}

/// The state of the log; see the head of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogState {
    pub(crate) standing: Standing,
    /// A loss of an earlier run that the owner has not settled.
    pub(crate) owed: Option<TailLoss>,
    pub(crate) open: [u8; 16],
    pub(crate) boot: [u8; 16],
    /// The mounted file system; `None` if the kernel does not tell.
    pub(crate) mount: Option<u64>,
}

/// Returns the contents of the file.
pub(crate) fn encode(state: &LogState) -> [u8; STATE_FILE_BYTES] {
    let mut bytes = [0; STATE_FILE_BYTES];
    let (standing, acked) = match state.standing {
        Standing::Open => (0, 0),
        Standing::Failed { acked } => (1, acked.map_or(ACKED_UNKNOWN, |acked| acked.0)),
    };
    let owed = match state.owed {
        None => 0,
        Some(TailLoss::Reboot) => 1,
        Some(TailLoss::Remount) => 2,
        Some(TailLoss::Failure) => 3,
    };
    let kind = if state.mount.is_some() { MOUNT_SYSFS } else { MOUNT_UNKNOWN };
    put(&mut bytes, 0, MAGIC);
    put(&mut bytes, AT_VERSION, &VERSION.to_le_bytes());
    put(&mut bytes, AT_STANDING, &[standing]);
    put(&mut bytes, AT_OWED, &[owed]);
    put(&mut bytes, AT_MOUNT_KIND, &kind.to_le_bytes());
    put(&mut bytes, AT_OPEN, &state.open);
    put(&mut bytes, AT_BOOT, &state.boot);
    put(&mut bytes, AT_MOUNT, &state.mount.unwrap_or_default().to_le_bytes());
    put(&mut bytes, AT_ACKED, &acked.to_le_bytes());
    let crc = crc32c(bytes.get(..AT_CRC).unwrap_or_default());
    put(&mut bytes, AT_CRC, &crc.to_le_bytes());
    bytes
}

/// Reads the contents of the file.
pub(crate) fn decode(bytes: &[u8]) -> Result<LogState, FormatError> {
    if !bytes.starts_with(MAGIC) {
        return Err(FormatError::NoMagic);
    }
    let found = bytes.get(..AT_CRC).ok_or(FormatError::Short)?;
    if u32_at(bytes, AT_CRC).ok_or(FormatError::Short)? != crc32c(found) {
        return Err(FormatError::Checksum);
    }
    let version = u16_at(found, AT_VERSION).ok_or(FormatError::Short)?;
    if version != VERSION {
        return Err(FormatError::Version(version));
    }
    let id = |at| super::part(found, at, 16)?.try_into().map_err(|_| FormatError::Short);
    let number = |at| u64_at(found, at).ok_or(FormatError::Short);
    let acked = number(AT_ACKED)?;
    let standing = match (byte(found, AT_STANDING)?, acked) {
        (0, 0) => Standing::Open,
        (1, ACKED_UNKNOWN) => Standing::Failed { acked: None },
        (1, acked) => Standing::Failed { acked: Some(Lsn(acked)) },
        _ => return Err(FormatError::Range),
    };
    let owed = match byte(found, AT_OWED)? {
        0 => None,
        1 => Some(TailLoss::Reboot),
        2 => Some(TailLoss::Remount),
        3 => Some(TailLoss::Failure),
        _ => return Err(FormatError::Range),
    };
    let mount = match (u32_at(found, AT_MOUNT_KIND).ok_or(FormatError::Short)?, number(AT_MOUNT)?) {
        (MOUNT_UNKNOWN, 0) => None,
        (MOUNT_SYSFS, mount) => Some(mount),
        _ => return Err(FormatError::Range),
    };
    let is_zero = super::part(found, AT_ZERO, 12)?.iter().all(|byte| *byte == 0);
    let state = LogState { standing, owed, open: id(AT_OPEN)?, boot: id(AT_BOOT)?, mount };
    if is_zero { Ok(state) } else { Err(FormatError::Range) }
}

fn byte(bytes: &[u8], at: usize) -> Result<u8, FormatError> {
    bytes.get(at).copied().ok_or(FormatError::Short)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

    use super::*;

    /// Returns the bytes of an annotated golden file, which has one field a line.
    fn golden(text: &str) -> Vec<u8> {
        let hex: String = text.lines().filter_map(|line| line.split('#').next()).collect();
        let digits: Vec<u8> = hex
            .chars()
            .filter_map(|c| c.to_digit(16))
            .map(|d| u8::try_from(d).expect("16"))
            .collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    #[test]
    fn golden_bytes_of_the_state_of_version_1() {
        let failed = LogState {
            standing: Standing::Failed { acked: Some(Lsn(1234)) },
            owed: Some(TailLoss::Remount),
            open: *b"open-open-open-o",
            boot: *b"boot-boot-boot-b",
            mount: Some(18_617),
        };
        let bytes = encode(&failed);
        assert_eq!(bytes[..STATE_BYTES], golden(include_str!("../../testdata/state-v1.hex")));
        assert!(bytes[STATE_BYTES..].iter().all(|byte| *byte == 0));
        assert_eq!(decode(&bytes), Ok(failed));
        for bit in 0..STATE_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped).is_err(), "bit {bit}");
        }
        for len in 0..STATE_BYTES {
            assert!(decode(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn every_state_is_read_as_it_was_written() {
        let standings = [None, Some(Lsn(0)), Some(Lsn(7))].map(|acked| Standing::Failed { acked });
        for standing in standings.into_iter().chain([Standing::Open]) {
            for owed in [None, Some(TailLoss::Reboot), Some(TailLoss::Failure)] {
                for mount in [None, Some(1), Some(u64::MAX)] {
                    let state = LogState { standing, owed, open: [1; 16], boot: [2; 16], mount };
                    assert_eq!(decode(&encode(&state)), Ok(state));
                }
            }
        }
    }
}
