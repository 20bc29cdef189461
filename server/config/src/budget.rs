//! Divides the single memory budget among everything that holds memory.
//!
//! Invariants:
//! - The parts never add up to more than the budget.
//! - Parts that the user set explicitly are granted exactly; the rest is shared in fixed
//!   proportions.
//! - A budget that is too small is an error that states the smallest one that works.

use super::Settings;
use block::quantities::ByteSize;
use block::{Error, ErrorKind, Result};
use engine::config::{MAP_BYTES_MIN, METADATA_BYTES_MIN};
use tiering::map::database::MEMTABLE_BYTES_MAX;
use tiering::reclaim::{READ_BYTES_MAX, SEGMENT_BYTES_MAX};

/// The process itself: code, stacks, the index of a read cache of ordinary size, compactions, buffers
/// of the store's client. Chosen by hand; the soak test watches the sum.
const PROCESS_BYTES: u64 = 96 << 20;
/// Part of [`PROCESS_BYTES`] for the index of the read cache.
const CACHE_INDEX_BYTES: u64 = 32 << 20;
/// Smallest index of the read cache.
const CACHE_INDEX_BYTES_MIN: u64 = 16 << 20;
/// Bytes of the read cache for each byte of its index: a frame takes 20 bytes in the index (source:
/// `tiering/src/cache/index.rs`), and 8 KiB in the cache are a database's blocks, or compressed
/// ones.
const CACHE_BYTES_PER_INDEX_BYTE: u64 = 8192 / 20;
/// Divisor of the budget that limits the index of the read cache; the limit is at least 64 MiB.
const CACHE_INDEX_PART: u64 = 8;
/// Segments in memory at a time: one being built, one being sealed, one being uploaded.
const SEGMENT_COUNT: u64 = 3;
/// Segments of reclaim, which are smaller: one being gathered, one being built or uploaded.
const RECLAIM_SEGMENT_COUNT: u64 = 2;
/// Objects on their way to copies in other stores, or from one: a segment each, at most.
const COPY_SEGMENT_COUNT: u64 = tiering::copier::OBJECTS_AT_ONCE as u64;
/// Data that each connection may have received but not read yet. Source: `nbd/src/session.rs`,
/// `INBOX_BYTES`.
const INBOX_BYTES: u64 = 128 << 10;
/// Divisor of the budget for data that waits for the read cache: at least one segment, at most the
/// maximum. Chosen by hand: the data that a disk writes in the time that destage takes for a
/// segment.
const CACHE_PENDING_PART: u64 = 16;
const CACHE_PENDING_BYTES_MAX: u64 = 96 << 20;
/// Divisor of the budget for frames of sequential streams, within bounds. Chosen by hand: four
/// streams with a window of 8 MiB at the default budget.
const STREAM_PART: u64 = 32;
const STREAM_BYTES_MIN: u64 = 8 << 20;
const STREAM_BYTES_MAX: u64 = 256 << 20;
/// Divisor of the budget for the overlay's index, within bounds. Chosen by hand: at the default
/// budget a log of the default size fits, full of 4 KiB writes.
const OVERLAY_PART: u64 = 8;
const OVERLAY_BYTES_MIN: u64 = 32 << 20;
const OVERLAY_BYTES_MAX: u64 = 4 << 30;
/// Bytes of the overlay's index per extent: 104 for key and extent, in nodes that are two thirds
/// full, and its share of a batch. Source: `replication/log/src/overlay/extents.rs`, where a test checks the
/// 104.
const EXTENT_BYTES: u64 = 192;
/// Smallest share for payloads of the log that are not destaged yet.
const LOG_BYTES_MIN: u64 = 32 << 20;
/// Smallest share for payloads of NBD requests: two of the largest requests.
const NBD_BYTES_MIN: u64 = 64 << 20;
/// Shares of the budget above the minima, in percent.
const LOG_PERCENT: u64 = 25;
const MEMORY_CACHE_PERCENT: u64 = 30;
const MAP_PERCENT: u64 = 20;
const NBD_PERCENT: u64 = 5;
/// Kernel devices get nothing of the smallest budget; attaching then fails with a message.
const DEVICE_PERCENT: u64 = 5;
const METADATA_PERCENT: u64 = 15;
const _: () = assert!(
    LOG_PERCENT
        + MEMORY_CACHE_PERCENT
        + MAP_PERCENT
        + NBD_PERCENT
        + DEVICE_PERCENT
        + METADATA_PERCENT
        == 100
);

/// Bytes that each part may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The whole.
    pub total_bytes: u64,
    /// Payloads of log entries that are not destaged.
    pub log_payload_bytes: u64,
    /// Decrypted frames of the data tier; may be 0.
    pub memory_cache_bytes: u64,
    /// Pages of the volume map.
    pub map_cache_bytes: u64,
    /// Payloads of NBD requests in flight, over all connections.
    pub nbd_payload_bytes: u64,
    /// Payloads of requests in flight of devices of the kernel, over all devices.
    pub device_payload_bytes: u64,
    /// Blocks of the metadata database; its write buffers come on top.
    pub metadata_cache_bytes: u64,
    /// Segments and frames that wait for the read cache.
    pub cache_pending_bytes: u64,
    /// Frames of sequential streams and their read-ahead.
    pub stream_bytes: u64,
    /// Maximum number of extents in the overlay.
    pub extent_count_max: u64,
    /// Index of the read cache.
    pub cache_index_bytes: u64,
    /// Size of an index for the whole read cache.
    pub cache_index_wanted_bytes: u64,
}

impl Budget {
    /// Divides `settings.memory`.
    ///
    /// # Errors
    /// `Invalid`, with the minimum, when it is too small.
    pub fn divide(settings: &Settings) -> Result<Budget> {
        let total = settings.memory.0;
        let memory_cache = settings.memory_cache.size.map(|size| size.0);
        let nbd = settings.nbd.payload_memory.map(|size| size.0);
        if let Some(nbd) = nbd
            && nbd < NBD_BYTES_MIN
        {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "nbd.payload_memory {} is too small: at least {}, two of the largest requests",
                    ByteSize(nbd),
                    ByteSize(NBD_BYTES_MIN)
                ),
            ));
        }
        let parts = Scaled::of(total, settings);
        let Some(rest) = total.checked_sub(minimum(total, settings)) else {
            let mut smallest = total;
            // This ends, because the minimum grows slower than the budget.
            while minimum(smallest, settings) > smallest {
                let needed = minimum(smallest, settings);
                smallest = needed.checked_next_multiple_of(1 << 20).unwrap_or(u64::MAX);
            }
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "memory {} is too small: at least {} with these settings (destage.segment_size \
                     {}, memory_cache.size {}, nbd.payload_memory {}, nbd.connection_count_max {})",
                    settings.memory,
                    ByteSize(smallest),
                    settings.destage.segment_size,
                    ByteSize(memory_cache.unwrap_or(0)),
                    ByteSize(nbd.unwrap_or(NBD_BYTES_MIN)),
                    settings.nbd.connection_count_max,
                ),
            ));
        };
        // Explicitly set parts take no share; the others keep their proportions.
        let cache_percent = if memory_cache.is_some() { 0 } else { MEMORY_CACHE_PERCENT };
        let nbd_percent = if nbd.is_some() { 0 } else { NBD_PERCENT };
        let all = LOG_PERCENT
            + MAP_PERCENT
            + METADATA_PERCENT
            + DEVICE_PERCENT
            + cache_percent
            + nbd_percent;
        let share = |percent: u64| rest / all * percent;
        Ok(Budget {
            total_bytes: total,
            log_payload_bytes: LOG_BYTES_MIN + share(LOG_PERCENT),
            memory_cache_bytes: memory_cache.unwrap_or_else(|| share(cache_percent)),
            map_cache_bytes: MAP_BYTES_MIN + share(MAP_PERCENT),
            nbd_payload_bytes: nbd.unwrap_or_else(|| NBD_BYTES_MIN + share(nbd_percent)),
            device_payload_bytes: share(DEVICE_PERCENT),
            metadata_cache_bytes: METADATA_BYTES_MIN + share(METADATA_PERCENT),
            cache_pending_bytes: parts.cache_pending_bytes,
            stream_bytes: parts.stream_bytes,
            extent_count_max: parts.overlay_bytes / EXTENT_BYTES,
            cache_index_bytes: parts.cache_index_bytes,
            cache_index_wanted_bytes: cache_index_wanted_bytes(settings),
        })
    }
}

/// Parts that depend only on the whole.
struct Scaled {
    cache_pending_bytes: u64,
    cache_index_bytes: u64,
    stream_bytes: u64,
    overlay_bytes: u64,
}

impl Scaled {
    fn of(total: u64, settings: &Settings) -> Scaled {
        let has_cache = settings.cache.size.0 > 0;
        let pending = (total / CACHE_PENDING_PART).min(CACHE_PENDING_BYTES_MAX);
        let pending = pending.max(settings.destage.segment_size.0);
        let cache_index_bytes_max = (total / CACHE_INDEX_PART).max(64 << 20);
        Scaled {
            cache_pending_bytes: if has_cache { pending } else { 0 },
            cache_index_bytes: cache_index_wanted_bytes(settings)
                .clamp(CACHE_INDEX_BYTES_MIN, cache_index_bytes_max),
            stream_bytes: (total / STREAM_PART).clamp(STREAM_BYTES_MIN, STREAM_BYTES_MAX),
            overlay_bytes: (total / OVERLAY_PART).clamp(OVERLAY_BYTES_MIN, OVERLAY_BYTES_MAX),
        }
    }
}

fn reclaim_bytes(settings: &Settings) -> u64 {
    let segment_bytes = settings.destage.segment_size.0.min(SEGMENT_BYTES_MAX as u64);
    RECLAIM_SEGMENT_COUNT * segment_bytes + READ_BYTES_MAX
}

fn cache_index_wanted_bytes(settings: &Settings) -> u64 {
    settings.cache.size.0 / CACHE_BYTES_PER_INDEX_BYTE
}

/// Input buffers of all connections, including the reserved places.
fn inbox_bytes(settings: &Settings) -> u64 {
    (u64::from(settings.nbd.connection_count_max) + nbd::RESERVED_COUNT as u64) * INBOX_BYTES
}

/// Minimum for a budget of `total` bytes. It grows slower than `total`.
fn minimum(total: u64, settings: &Settings) -> u64 {
    let parts = Scaled::of(total, settings);
    [
        PROCESS_BYTES,
        parts.cache_pending_bytes,
        parts.cache_index_bytes.saturating_sub(CACHE_INDEX_BYTES),
        parts.stream_bytes,
        parts.overlay_bytes,
        inbox_bytes(settings),
        settings.destage.segment_size.0.saturating_mul(SEGMENT_COUNT + COPY_SEGMENT_COUNT),
        reclaim_bytes(settings),
        LOG_BYTES_MIN,
        MAP_BYTES_MIN,
        METADATA_BYTES_MIN,
        MEMTABLE_BYTES_MAX,
        settings.nbd.payload_memory.map_or(NBD_BYTES_MIN, |size| size.0),
        settings.memory_cache.size.map_or(0, |size| size.0),
    ]
    .into_iter()
    .fold(0u64, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(memory: u64) -> Settings {
        Settings { memory: ByteSize(memory), ..Settings::default() }
    }

    fn sum(budget: &Budget, settings: &Settings) -> u64 {
        PROCESS_BYTES
            + budget.cache_index_bytes.saturating_sub(CACHE_INDEX_BYTES)
            + inbox_bytes(settings)
            + settings.destage.segment_size.0 * (SEGMENT_COUNT + COPY_SEGMENT_COUNT)
            + reclaim_bytes(settings)
            + budget.log_payload_bytes
            + budget.memory_cache_bytes
            + budget.map_cache_bytes
            + budget.nbd_payload_bytes
            + budget.device_payload_bytes
            + budget.metadata_cache_bytes
            + MEMTABLE_BYTES_MAX
            + budget.cache_pending_bytes
            + budget.stream_bytes
            + budget.extent_count_max * EXTENT_BYTES
    }

    #[test]
    fn a_large_read_cache_has_an_index_for_it_within_its_part() {
        let index_of = |memory: u64, cache: u64| {
            let mut settings = settings(memory);
            settings.cache.size = ByteSize(cache);
            let budget = Budget::divide(&settings).unwrap();
            assert!(sum(&budget, &settings) <= memory);
            (budget.cache_index_bytes >> 20, budget.cache_index_wanted_bytes >> 20)
        };
        assert_eq!(index_of(1 << 30, 10 << 30), (25, 25));
        assert_eq!(index_of(1 << 30, 0), (16, 0));
        assert_eq!(index_of(1 << 30, 1 << 40), (128, 2563));
        assert_eq!(index_of(32 << 30, 1 << 40), (2563, 2563));
    }

    #[test]
    fn the_parts_never_exceed_the_whole() {
        for memory in [760 << 20, 1 << 30, (1 << 30) + 12_345, 64 << 30] {
            for cache in [None, Some(0), Some(100 << 20)] {
                for nbd in [None, Some(64 << 20)] {
                    let mut settings = settings(memory);
                    settings.memory_cache.size = cache.map(ByteSize);
                    settings.nbd.payload_memory = nbd.map(ByteSize);
                    let budget = Budget::divide(&settings).unwrap();
                    let used = sum(&budget, &settings);
                    assert!(used <= memory && memory - used < 400, "{memory} {used}");
                    if let Some(cache) = cache {
                        assert_eq!(budget.memory_cache_bytes, cache);
                    }
                }
            }
        }
    }

    #[test]
    fn a_budget_too_small_names_the_smallest_that_works() {
        let error = Budget::divide(&settings(100 << 20)).unwrap_err().to_string();
        let minimum = error.split("at least ").nth(1).unwrap().split(' ').next().unwrap();
        let minimum: ByteSize = minimum.parse().unwrap();
        assert!(Budget::divide(&settings(minimum.0)).is_ok());
        assert!(Budget::divide(&settings(minimum.0 - (1 << 20))).is_err());
        let mut settings = settings(1 << 30);
        settings.nbd.payload_memory = Some(ByteSize(1 << 20));
        assert!(Budget::divide(&settings).unwrap_err().to_string().contains("payload_memory"));
    }
}
