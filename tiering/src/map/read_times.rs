//! The records of when segments were last read, in groups of neighbours.
//!
//! Invariants:
//! - Times are seconds for which the pool was open, never those of a wall clock. The map keeps the highest one.
//! - The records are hints. One that is missing or does not open says nothing of its segments, and is no error.
//!
//! Byte tables: docs/format-map.md.

use super::commit::Fresh;
use super::commit::draft::Draft;
use super::records::Root;
use super::{Forget, Map, Writer, after, entries, get, keys};
use block::Result;
use block::units::u64_at;
use std::ops::Bound;
use std::sync::atomic::Ordering;

/// Segments in a group: those whose numbers are equal but for the lowest byte.
pub const GROUP_SEGMENTS: usize = 256;

const VERSION: u8 = 1;
/// Bytes of a row: place in the group, and time.
const ROW_BYTES: usize = 1 + 4;
const OPEN_TIME_BYTES: usize = 1 + 8;

/// The times of a group by the place in it; 0: unknown.
pub type Times = [u32; GROUP_SEGMENTS];

/// The group of a segment, and its place there.
#[must_use]
pub fn place_of(segment: u64) -> (u64, usize) {
    let count = GROUP_SEGMENTS as u64;
    (segment / count, usize::try_from(segment % count).expect("it is small"))
}

/// The stored form of the times of a group.
#[must_use]
pub fn encode_times(times: &Times) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    for (place, time) in (0..=u8::MAX).zip(times) {
        if *time != 0 {
            bytes.push(place);
            bytes.extend_from_slice(&time.to_le_bytes());
        }
    }
    bytes
}

/// Reads the stored form of the times of a group. `None` for anything that this version does not write.
#[must_use]
pub fn decode_times(bytes: &[u8]) -> Option<Times> {
    let (&VERSION, rows) = bytes.split_first()? else { return None };
    let (rows, cut) = rows.as_chunks::<ROW_BYTES>();
    let (mut times, mut next) = ([0; GROUP_SEGMENTS], 0);
    for [place, time @ ..] in rows {
        let (place, time) = (usize::from(*place), u32::from_le_bytes(*time));
        if place < next || time == 0 {
            return None;
        }
        (times[place], next) = (time, place + 1);
    }
    cut.is_empty().then_some(times)
}

/// The stored form of the time for which the pool was open.
#[must_use]
pub fn encode_open_time(seconds: u64) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    bytes.extend_from_slice(&seconds.to_le_bytes());
    bytes
}

/// Reads the stored form of the time for which the pool was open.
#[must_use]
pub fn decode_open_time(bytes: &[u8]) -> Option<u64> {
    let is_known = bytes.first() == Some(&VERSION) && bytes.len() == OPEN_TIME_BYTES;
    u64_at(bytes, 1).filter(|_| is_known)
}

/// Changes to the records.
#[derive(Clone, Debug, Default)]
pub(crate) struct TimesChange {
    /// The time for which the pool was open.
    pub open_seconds: u64,
    /// Groups and their times.
    pub put: Vec<(u64, Times)>,
    /// Groups of which no segment exists any more.
    pub deleted: Vec<u64>,
}

impl Map {
    /// The seconds for which the pool was open, as last recorded.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn open_time(&self) -> Result<u64> {
        let found = get(&self.db(), keys::OPEN_TIME_KEY).await?;
        let plain = found.and_then(|value| self.opener.open_one(keys::OPEN_TIME_KEY, &value).ok());
        Ok(plain.and_then(|plain| decode_open_time(&plain)).unwrap_or(0))
    }

    /// The recorded times of a group.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn read_times(&self, group: u64) -> Result<Times> {
        let key = keys::read_times_key(group);
        let found = get(&self.db(), &key).await?;
        let plain = found.and_then(|value| self.opener.open_one(&key, &value).ok());
        Ok(plain.and_then(|plain| decode_times(&plain)).unwrap_or([0; GROUP_SEGMENTS]))
    }

    /// Up to `count_max` groups after `last`, or from the first on, that have a record.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn read_time_groups(
        &self,
        last: Option<u64>,
        count_max: usize,
    ) -> Result<Vec<u64>> {
        let from = match last {
            Some(last) => Bound::Excluded(keys::read_times_key(last).to_vec()),
            None => Bound::Included(vec![keys::family::READ_TIMES]),
        };
        let until = after(keys::family::READ_TIMES);
        let found = entries(&self.db(), from, until, count_max).await?;
        Ok(found.iter().filter_map(|(key, _)| keys::number_of(key)).collect())
    }

    /// Changes the records durably, in one batch.
    ///
    /// # Errors
    /// Like [`Map::commit`].
    pub(crate) async fn set_read_times(
        &self,
        writer: &mut Writer,
        change: &TimesChange,
    ) -> Result<()> {
        self.check(writer)?;
        let mut draft = Draft::new(self);
        draft.put(keys::OPEN_TIME_KEY, &encode_open_time(change.open_seconds));
        for (group, times) in &change.put {
            draft.put(&keys::read_times_key(*group), &encode_times(times));
        }
        for group in &change.deleted {
            draft.delete(&keys::read_times_key(*group));
        }
        let root = Root { commit_number: writer.root.commit_number + 1, ..writer.root };
        draft.put(keys::ROOT_KEY, &root.encode());
        self.write(writer, draft.batch).await?;
        self.flush(writer).await?;
        writer.root = root;
        self.apply(Fresh { bytes_left: 0, pages: Vec::new() }, &[], Vec::new(), Forget::Nothing);
        self.commit_number.store(root.commit_number, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_back_and_nothing_else_does() {
        let mut times = [0; GROUP_SEGMENTS];
        (times[0], times[7], times[255]) = (1, 0x0102_0304, u32::MAX);
        let bytes = encode_times(&times);
        assert_eq!(bytes.len(), 1 + 3 * ROW_BYTES);
        assert_eq!(decode_times(&bytes), Some(times));
        assert_eq!(decode_times(&[VERSION]), Some([0; GROUP_SEGMENTS]));
        for end in [0, 2, bytes.len() - 1] {
            assert_eq!(decode_times(&bytes[..end]), None, "cut at {end}");
        }
        // Another version, places out of order, and a time that would say nothing.
        let row = |place: u8, time: u8| [place, time, 0, 0, 0];
        for wrong in [
            [&[2][..], &row(3, 1)].concat(),
            [&[1][..], &row(3, 1), &row(3, 2)].concat(),
            [&[1][..], &row(3, 1), &row(2, 2)].concat(),
            [&[1][..], &row(3, 0)].concat(),
        ] {
            assert_eq!(decode_times(&wrong), None, "{wrong:?}");
        }
        let bytes = encode_open_time(0x0102_0304_0506);
        assert_eq!(decode_open_time(&bytes), Some(0x0102_0304_0506));
        assert_eq!(decode_open_time(&bytes[..8]), None);
        assert_eq!(decode_open_time(&[&[2], &bytes[1..]].concat()), None);
        assert_eq!((place_of(255), place_of(0x0203)), ((0, 255), (2, 3)));
    }
}
