//! The network between a node that is to become a member and the members that there are: measuring it,
//! and refusing an outlier.
//!
//! Invariants:
//! - The paths of the new node are measured at the same moment as those of the members, in the same way,
//!   so that a busy machine or network slows both.
//! - A path counts with its best measurement. A node is an outlier only if no measurement was good enough.

use super::Roles;
use super::messages::{self, Answer, Question};
use api::member::PathInfo;
use block::{Error, ErrorKind, Result};
use cluster::{Measurement, Node, NodeId};
use control::manifest::Member;
use std::time::Duration;

/// Measurements before a node counts as an outlier. Chosen by hand: one may meet a busy machine.
const MEASUREMENTS: u32 = 3;
/// Measurements before a node does not reach a member. Chosen by hand: one that has just joined is not known
/// to all others yet.
const MEASUREMENTS_TO_REACH: u32 = 10;
/// Pause before a measurement is repeated. Chosen by hand.
const REPEAT_PAUSE: Duration = Duration::from_secs(1);
/// Factor between an outlier and the slowest member. Chosen by hand.
const OUTLIER_FACTOR: u64 = 3;
/// A shorter round trip is none of an outlier, in microseconds. Chosen by hand: zones of one region are at
/// most 100 km apart (AWS, "Regions and Availability Zones"), 1 ms of light in fibre and back, and a busy
/// machine adds some.
const ROUND_TRIP_FLOOR_US: u64 = 5_000;
/// A larger bandwidth is none of an outlier, in bytes per second. Chosen by hand: a quarter of 1 Gbit/s.
const BANDWIDTH_FLOOR: u64 = 32 << 20;
/// Longest round trip with no member to compare with, in microseconds. Chosen by hand: an answer of a member
/// that takes longer counts as slow (`watching.rs`).
const ROUND_TRIP_ALONE_MAX_US: u64 = 20_000;
/// Smallest bandwidth with no member to compare with. Chosen by hand: two thirds of 100 Mbit/s.
const BANDWIDTH_ALONE_MIN: u64 = 8 << 20;

/// The paths that were measured.
#[derive(Clone, Debug, Default)]
pub(super) struct Paths {
    /// From the owner to each other member that it reached.
    present: Vec<PathInfo>,
    /// From the owner to the new node, and from there to the members that the owner reached.
    new: Vec<PathInfo>,
}

impl Paths {
    /// Returns all of them, those of the new node first.
    pub(super) fn into_all(self) -> Vec<PathInfo> {
        self.new.into_iter().chain(self.present).collect()
    }

    /// Says why the new node is an outlier; `None` if it is none.
    pub(super) fn verdict(&self) -> Option<String> {
        let known = || self.present.iter().filter(|path| path.error.is_none());
        let slowest = known().max_by_key(|path| path.round_trip_us);
        let narrowest = known().min_by_key(|path| path.bytes_per_second);
        self.new.iter().find_map(|path| {
            let PathInfo { from, to, error, .. } = path;
            if let Some(error) = error {
                return Some(format!("node {from} does not reach node {to}: {error}"));
            }
            check_round_trip(path, slowest).or_else(|| check_bandwidth(path, narrowest))
        })
    }

    /// Measurements before the verdict counts.
    fn measurements_max(&self) -> u32 {
        match self.new.iter().any(|path| path.error.is_some()) {
            true => MEASUREMENTS_TO_REACH,
            false => MEASUREMENTS,
        }
    }

    /// Keeps the better of two measurements of each path.
    fn improve(&mut self, again: Paths) {
        for (kept, again) in [(&mut self.present, again.present), (&mut self.new, again.new)] {
            for path in again {
                match kept.iter_mut().find(|one| (&one.from, &one.to) == (&path.from, &path.to)) {
                    None => kept.push(path),
                    Some(one) if one.error.is_some() => *one = path,
                    Some(_) if path.error.is_some() => {}
                    Some(one) => {
                        one.round_trip_us = one.round_trip_us.min(path.round_trip_us);
                        one.bytes_per_second = one.bytes_per_second.max(path.bytes_per_second);
                    }
                }
            }
        }
    }
}

fn check_round_trip(path: &PathInfo, slowest: Option<&PathInfo>) -> Option<String> {
    let took = path.round_trip_us;
    let (max, than) = match slowest {
        Some(slowest) => {
            let max =
                (slowest.round_trip_us.saturating_mul(OUTLIER_FACTOR)).max(ROUND_TRIP_FLOOR_US);
            let of = format!(
                "the slowest one to a member, {}, takes {}",
                slowest.to,
                api::member::round_trip(slowest.round_trip_us)
            );
            (max, of)
        }
        None => (ROUND_TRIP_ALONE_MAX_US, "no other member can be compared with".to_owned()),
    };
    (took > max).then(|| {
        format!(
            "a round trip from node {} to node {} takes {}, and {than}; at most {} is accepted",
            path.from,
            path.to,
            api::member::round_trip(took),
            api::member::round_trip(max)
        )
    })
}

fn check_bandwidth(path: &PathInfo, narrowest: Option<&PathInfo>) -> Option<String> {
    let (min, than) = match narrowest {
        Some(narrowest) => {
            let min = (narrowest.bytes_per_second / OUTLIER_FACTOR).min(BANDWIDTH_FLOOR);
            let of = format!(
                "the least to a member, {}, is {}",
                narrowest.to,
                api::member::rate(narrowest.bytes_per_second)
            );
            (min, of)
        }
        None => (BANDWIDTH_ALONE_MIN, "no other member can be compared with".to_owned()),
    };
    (path.bytes_per_second < min).then(|| {
        format!(
            "the bandwidth from node {} to node {} is {}, and {than}; at least {} is accepted",
            path.from,
            path.to,
            api::member::rate(path.bytes_per_second),
            api::member::rate(min)
        )
    })
}

/// Measures the network between a new node, the owner and the other members, again if it is an outlier.
///
/// # Errors
/// Those of reaching the new node.
pub(super) async fn measure(roles: &Roles, others: &[&Member], new: &Node) -> Result<Paths> {
    let mut paths = measure_once(roles, others, new).await?;
    let mut count = 1;
    while paths.verdict().is_some() && count < paths.measurements_max() {
        tokio::time::sleep(REPEAT_PAUSE).await;
        paths.improve(measure_once(roles, others, new).await?);
        count += 1;
    }
    Ok(paths)
}

async fn measure_once(roles: &Roles, others: &[&Member], new: &Node) -> Result<Paths> {
    let cluster = roles.cluster();
    let me = cluster.node_name();
    let mut paths = Paths::default();
    for other in others {
        // A member that is away is compared with nothing.
        if let Ok(measured) = cluster.measure(NodeId(other.node)).await {
            paths.present.push(path(me, &other.node_name, Ok(measured)));
        }
    }
    let measured = cluster.measure(new.id).await?;
    paths.new.push(path(me, &new.name, Ok(measured)));
    for other in others {
        if paths.present.iter().any(|path| path.to == other.node_name) {
            let measured = measured_by(roles, new, NodeId(other.node)).await;
            paths.new.push(path(&new.name, &other.node_name, measured));
        }
    }
    Ok(paths)
}

/// Lets the new node measure its path to a member, which it has to reach once it owns the pool.
async fn measured_by(roles: &Roles, new: &Node, to: NodeId) -> Result<Measurement> {
    let question = Question::Measure { node: to.0 };
    match messages::ask(roles.cluster(), new.id, &question).await? {
        Answer::Measured { round_trip_us, bytes_per_second } => {
            let round_trip = Duration::from_micros(round_trip_us);
            Ok(Measurement { round_trip, bytes_per_second })
        }
        _ => Err(Error::new(ErrorKind::Corrupt, "ask a node to measure: it gave another answer")),
    }
}

/// Answers such a question of another node.
pub(super) async fn answer(roles: &Roles, node: NodeId) -> Result<Answer> {
    let Measurement { round_trip, bytes_per_second } = roles.cluster().measure(node).await?;
    Ok(Answer::Measured { round_trip_us: micros(round_trip), bytes_per_second })
}

fn path(from: &str, to: &str, measured: Result<Measurement>) -> PathInfo {
    let (from, to) = (from.to_owned(), to.to_owned());
    match measured {
        Ok(Measurement { round_trip, bytes_per_second }) => {
            PathInfo { from, to, round_trip_us: micros(round_trip), bytes_per_second, error: None }
        }
        Err(error) => {
            let error = Some(error.chain());
            PathInfo { from, to, round_trip_us: 0, bytes_per_second: 0, error }
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn one(from: &str, to: &str, round_trip_us: u64, bytes_per_second: u64) -> PathInfo {
        let (from, to) = (from.to_owned(), to.to_owned());
        PathInfo { from, to, round_trip_us, bytes_per_second, error: None }
    }

    fn verdict(present: &[(u64, u64)], new: (u64, u64)) -> Option<String> {
        let present = present.iter().map(|(time, bytes)| one("a", "b", *time, *bytes)).collect();
        Paths { present, new: vec![one("a", "c", new.0, new.1)] }.verdict()
    }

    #[test]
    fn outlier_is_slower_than_the_factor_and_the_floor() {
        let fast = (200, 1000 * MIB);
        assert_eq!(verdict(&[fast], (5_000, 32 * MIB)), None, "no outlier within the floors");
        let said = verdict(&[fast], (60_100, 1000 * MIB)).unwrap();
        assert_eq!(
            said,
            "a round trip from node a to node c takes 60.1 ms, and the slowest one to a member, b, takes 200 µs; at most \
             5.0 ms is accepted"
        );
        let said = verdict(&[fast], (200, 31 * MIB)).unwrap();
        assert_eq!(
            said,
            "the bandwidth from node a to node c is 31.0 MiB/s, and the least to a member, b, is 1000 MiB/s; at least \
             32.0 MiB/s is accepted"
        );
        let slow = (10_000, 12 * MIB);
        assert_eq!(verdict(&[fast, slow], (30_000, 4 * MIB)), None, "the slowest member counts");
        assert!(verdict(&[fast, slow], (30_001, 4 * MIB)).is_some());
        assert!(verdict(&[fast, slow], (30_000, 4 * MIB - 1)).is_some());
    }

    #[test]
    fn floors_alone_hold_without_another_member() {
        assert_eq!(verdict(&[], (20_000, 8 * MIB)), None);
        let said = verdict(&[], (20_001, 8 * MIB)).unwrap();
        assert!(said.contains("no other member can be compared with"), "{said}");
        assert!(verdict(&[], (20_000, 8 * MIB - 1)).is_some());
    }

    #[test]
    fn best_measurement_counts_and_an_unreachable_member_does_not() {
        let mut paths = Paths {
            present: vec![one("a", "b", 200, 100 * MIB)],
            new: vec![
                one("a", "c", 90_000, MIB),
                PathInfo { error: Some("connection refused".to_owned()), ..one("c", "b", 0, 0) },
            ],
        };
        assert!(paths.verdict().unwrap().contains("a round trip from node a"));
        let again = Paths { new: vec![one("a", "c", 300, 50 * MIB)], ..Paths::default() };
        paths.improve(again);
        let said = paths.verdict().unwrap();
        assert_eq!(said, "node c does not reach node b: connection refused");
        paths.improve(Paths { new: vec![one("c", "b", 300, 50 * MIB)], ..Paths::default() });
        assert_eq!(paths.verdict(), None);
        assert_eq!(paths.into_all().len(), 3);
    }
}
