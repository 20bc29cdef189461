//! The composition of a round: the mix, sizes, alignment and concurrency of its requests, and its
//! end.
//!
//! Invariants:
//! - Rounds differ a lot: a mix that is the same in every round finds only one kind of bug.

use crate::seed::Random;
use std::ops::Range;
use std::time::Duration;

/// Largest request. The promises of spindle hold for any size that NBD allows; this limit keeps
/// rounds short.
pub const REQUEST_BYTES_MAX: u64 = 256 << 10;

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Write, perhaps FUA.
    Write,
    /// Flush.
    Flush,
    /// Trim, perhaps FUA.
    Trim,
    /// Write zeroes, perhaps FUA, perhaps NO_HOLE.
    Zero,
    /// Read and check.
    Read,
}

/// The mix of one round.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Its name, for reports.
    pub name: &'static str,
    /// Weights of write, flush, trim, zero, read.
    pub weights: [u64; 5],
    /// How many of a hundred writes, trims and zeroes are FUA.
    pub fua_percent: u64,
    /// Largest request in bytes.
    pub bytes_max: u64,
    /// Offsets and lengths are multiples of one of these.
    pub alignments: &'static [u64],
    /// Requests in flight on one connection.
    pub depth: usize,
    /// Part of the window that requests go to, in percent. A small part is overwritten often.
    pub spread_percent: u64,
}

const MIXED: Profile = Profile {
    name: "mixed",
    weights: [60, 5, 8, 8, 10],
    fua_percent: 10,
    bytes_max: REQUEST_BYTES_MAX,
    alignments: &[1, 512, 512, 4096, 4096],
    depth: 16,
    spread_percent: 100,
};

const PROFILES: &[Profile] = &[
    MIXED,
    Profile { name: "flush", weights: [40, 40, 2, 2, 2], bytes_max: 16 << 10, depth: 8, ..MIXED },
    Profile {
        name: "fua",
        weights: [80, 2, 5, 5, 2],
        fua_percent: 90,
        bytes_max: 32 << 10,
        ..MIXED
    },
    Profile { name: "trim", weights: [30, 5, 60, 2, 5], ..MIXED },
    Profile { name: "zero", weights: [30, 5, 2, 60, 5], ..MIXED },
    Profile {
        name: "blocks",
        weights: [90, 2, 2, 2, 4],
        bytes_max: 8 << 10,
        alignments: &[4096],
        depth: 64,
        ..MIXED
    },
    Profile {
        name: "bytes",
        weights: [80, 5, 5, 5, 5],
        bytes_max: 6000,
        alignments: &[1, 1, 1, 512],
        depth: 8,
        ..MIXED
    },
    Profile { name: "large", weights: [90, 5, 1, 1, 3], depth: 6, alignments: &[512], ..MIXED },
    Profile {
        name: "overwrite",
        weights: [70, 5, 10, 10, 5],
        bytes_max: 16 << 10,
        spread_percent: 2,
        depth: 32,
        ..MIXED
    },
    Profile { name: "one at a time", depth: 1, bytes_max: 8 << 10, fua_percent: 40, ..MIXED },
];

impl Profile {
    /// Returns one of the mixes.
    pub fn random(random: &mut Random) -> Profile {
        random.pick(PROFILES).clone()
    }

    /// Returns the next request: kind, range in bytes of the volume (empty for a flush), FUA.
    pub fn request(&self, random: &mut Random, window: &Range<u64>) -> (Kind, Range<u64>, bool) {
        let kind = self.kind(random);
        if kind == Kind::Flush {
            return (kind, 0..0, false);
        }
        let unit = *random.pick(self.alignments);
        let span = window.end - window.start;
        let spread = (span * self.spread_percent / 100).clamp(REQUEST_BYTES_MAX.min(span), span);
        // Small requests are as likely as big ones, whatever the limit.
        let unit = if unit > spread { 512 } else { unit };
        let limit = (self.bytes_max >> random.below(8)).max(unit);
        let units = random.between(1, (limit / unit).max(1));
        let length = (units * unit).min(spread / unit * unit);
        let places = (spread - length) / unit;
        let start = window.start + random.below(places + 1) * unit;
        (kind, start..start + length, random.chance(self.fua_percent))
    }

    fn kind(&self, random: &mut Random) -> Kind {
        let kinds = [Kind::Write, Kind::Flush, Kind::Trim, Kind::Zero, Kind::Read];
        let mut at = random.below(self.weights.iter().sum());
        for (kind, weight) in kinds.into_iter().zip(self.weights) {
            if at < weight {
                return kind;
            }
            at -= weight;
        }
        Kind::Write
    }
}

/// How a round ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Kill at the acknowledgement of the n-th flush or FUA request.
    AfterDurable(u64),
    /// Kill at the n-th acknowledgement.
    AfterAcknowledged(u64),
    /// Kill after a while.
    AfterTime(Duration),
    /// Ask it to stop under load, and kill it while it stops.
    DuringStop(Duration),
    /// Ask it to stop under load, and let it finish.
    Stop,
    /// Wait until it dies at an armed fail point; kill it if it does not.
    FailPoint(Duration),
}

impl Ending {
    /// Returns a random end for a round that lasts about `round`.
    pub fn random(random: &mut Random, round: Duration) -> Ending {
        let millis = u64::try_from(round.as_millis()).expect("short").max(2);
        match random.below(10) {
            0..3 => Ending::AfterDurable(random.between(1, 60)),
            3..5 => Ending::AfterAcknowledged(random.between(1, 3000)),
            5..8 => Ending::AfterTime(Duration::from_millis(random.between(1, millis))),
            8 => Ending::DuringStop(Duration::from_micros(random.below(100_000))),
            _ => Ending::Stop,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_stay_inside_the_window_and_are_never_empty() {
        let mut random = Random::new(1, 0);
        for window in [0..4096, 1 << 20..64 << 20, 512..1024] {
            for _ in 0..2000 {
                let profile = Profile::random(&mut random);
                let (kind, range, _) = profile.request(&mut random, &window);
                if kind != Kind::Flush {
                    assert!(range.start < range.end, "{profile:?} {window:?} {range:?}");
                    assert!(window.start <= range.start && range.end <= window.end);
                }
            }
        }
    }
}
