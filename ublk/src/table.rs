//! The partition table, which some kernels read within the command that makes a block device
//! appear.
//!
//! Invariants:
//! - Linux before 6.19 holds the device's lock during that read. If this process died meanwhile,
//!   the device could not be taken over or removed until the machine is rebooted. The daemon
//!   therefore reads both ends of the device, where tables usually lie, before the command. If the
//!   store does not answer, the attach then fails and can be interrupted.
//! - The caches of the device should then hold both ends, but this is not guaranteed. Other places
//!   are not read: logical partitions, labels within partitions, and the second copy of a GPT that
//!   is no longer at the end because the device has grown.
//! - The contents are left to the kernel, which decides whether there is a table.

use block::{BlockDevice, Error, ErrorKind, Result};
use std::time::Duration;

/// First kernel that reads tables after the command. Source: Linux 6.19,
/// `drivers/block/ublk_drv.c`, `ublk_partition_scan_work`.
const READ_LATER: (u32, u32) = (6, 19);
/// Bytes to read at each end of a device, where tables and their copies lie. Source:
/// `block/partitions/` of the kernel; the farthest is ldm's, 1 MiB before the end (`ldm.h`,
/// `LDM_DB_SIZE`).
const TABLE_BYTES: u64 = 1 << 20;
/// Bytes of one read.
const PART_BYTES: u64 = 128 << 10;
/// Time limit for the reads. Chosen by hand: the same as for a command of the driver.
pub(crate) const WAIT: Duration = Duration::from_secs(60);

/// Whether this kernel reads partition tables within the command.
pub(crate) fn is_read_at_start() -> bool {
    is_before(&rustix::system::uname().release().to_string_lossy())
}

/// Whether a release such as `6.12.57+deb13-cloud-amd64` is older than [`READ_LATER`]. An
/// unreadable one counts as older, because an unnecessary read does no harm.
fn is_before(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return true };
    (major, minor) < READ_LATER
}

/// Reads both ends of a device, so that it has them in memory. Read errors are ignored here,
/// because the kernel will meet them itself.
///
/// # Errors
/// `Unavailable` if it takes longer than `wait`.
pub(crate) async fn read_ends(device: &impl BlockDevice, wait: Duration) -> Result<()> {
    let size = device.limits().size_bytes;
    let tail = size.saturating_sub(TABLE_BYTES);
    let reads = async {
        let mut buf = vec![0; usize::try_from(PART_BYTES).unwrap_or_default()];
        for (from, to) in [(0, size.min(TABLE_BYTES)), (tail.max(TABLE_BYTES).min(size), size)] {
            let mut at = from;
            while at < to {
                let part = usize::try_from((to - at).min(PART_BYTES)).unwrap_or_default();
                let read = device.read(at, &mut buf[..part]).await;
                if let Err(error) = read {
                    tracing::debug!(
                        at, error = %error.chain(),
                        "could not read where a table of partitions may be"
                    );
                }
                at += PART_BYTES;
            }
        }
    };
    tokio::time::timeout(wait, reads).await.map_err(|_| {
        let what = format!(
            "make a ublk device: could not read where its table of partitions may be within {} s, \
             and this kernel (before Linux 6.19) must not wait for it; try again when the store \
             answers",
            wait.as_secs()
        );
        Error::new(ErrorKind::Unavailable, what)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::device::{AllocationExtent, Limits};
    use block::{WriteFlags, ZeroFlags};
    use bytes::Bytes;
    use std::sync::Mutex;

    /// Records the ranges that are read, and answers or stays silent.
    struct Noting {
        size_bytes: u64,
        is_silent: bool,
        ranges: Mutex<Vec<(u64, u64)>>,
    }

    impl BlockDevice for Noting {
        fn limits(&self) -> Limits {
            Limits {
                size_bytes: self.size_bytes,
                preferred_block_bytes: 4096,
                payload_bytes_max: 1 << 20,
                is_read_only: false,
                is_multi_conn: true,
                has_volatile_cache: true,
            }
        }

        async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            self.ranges.lock().unwrap().push((offset, buf.len() as u64));
            if self.is_silent {
                std::future::pending::<()>().await;
            }
            Err(Error::new(ErrorKind::Corrupt, "read: damaged"))
        }

        async fn write(&self, _: u64, _: Bytes, _: WriteFlags) -> Result<()> {
            unreachable!("only read")
        }

        async fn flush(&self) -> Result<()> {
            unreachable!("only read")
        }

        async fn discard(&self, _: u64, _: u64, _: bool) -> Result<()> {
            unreachable!("only read")
        }

        async fn write_zeroes(&self, _: u64, _: u64, _: ZeroFlags) -> Result<()> {
            unreachable!("only read")
        }

        async fn allocation(&self, _: u64, _: u64, _: usize) -> Result<Vec<AllocationExtent>> {
            unreachable!("only read")
        }

        async fn prefetch(&self, _: u64, _: u64) -> Result<()> {
            unreachable!("only read")
        }

        async fn resize(&self, _: u64) -> Result<()> {
            unreachable!("only read")
        }
    }

    fn noting(size_bytes: u64, is_silent: bool) -> Noting {
        Noting { size_bytes, is_silent, ranges: Mutex::default() }
    }

    #[test]
    fn kernels_are_distinguished() {
        for old in ["6.5.0", "6.12.57+deb13-cloud-amd64", "6.18", "5.14.0-570.el9", "", "next"] {
            assert!(is_before(old), "{old}");
        }
        for new in ["6.19.0-rc1", "6.19", "7.3.4", "10.0.1"] {
            assert!(!is_before(new), "{new}");
        }
    }

    #[tokio::test]
    async fn both_ends_are_read_once_and_nothing_else() {
        for size in [512, 4096, PART_BYTES + 512, TABLE_BYTES, 3 << 19, 2 << 20, 1 << 30] {
            let device = noting(size, false);
            read_ends(&device, WAIT).await.unwrap();
            let ranges = device.ranges.into_inner().unwrap();
            let mut wanted = Vec::new();
            let end = size.saturating_sub(TABLE_BYTES).max(TABLE_BYTES.min(size));
            let places = (0..size.min(TABLE_BYTES)).step_by(128 << 10);
            wanted.extend(places.map(|at| (at, PART_BYTES.min(size.min(TABLE_BYTES) - at))));
            wanted.extend((end..size).step_by(128 << 10).map(|at| (at, PART_BYTES.min(size - at))));
            assert_eq!(ranges, wanted, "{size}");
        }
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_is_an_error() {
        let error = read_ends(&noting(1 << 30, true), Duration::from_millis(5)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
}
