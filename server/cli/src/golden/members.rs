//! Fixed replies of the golden tests about the members of a pool's write log.

use super::{Case, done, reply};
use api::Reply;
use api::member::{
    Degraded, JoiningInfo, MemberAdded, MemberInfo, MembersInfo, PathInfo, TrafficInfo,
};
use api::pool::MoveInfo;

pub(super) fn about_members() -> Vec<(&'static str, Vec<Case>)> {
    vec![
        (
            "pool-members-list",
            vec![
                reply("spindle pool members list", Reply::Members(members())),
                reply("spindle pool members list", Reply::Members(alone())),
                reply("spindle pool members list", Reply::Members(left_alone())),
                reply("spindle pool members list", Reply::Members(in_zones())),
                reply("spindle pool members list", Reply::Members(joining())),
            ],
        ),
        (
            "pool-members-add",
            vec![
                reply("spindle pool members add c", Reply::MemberAdded(added(None))),
                reply("spindle pool members add c --force", Reply::MemberAdded(added(Some(SLOW)))),
            ],
        ),
        (
            "pool-members-replace",
            vec![
                reply("spindle pool members replace b d", Reply::MemberAdded(replaced("b", "d"))),
                reply("spindle pool members replace c", Reply::MemberAdded(replaced("c", "c"))),
            ],
        ),
        (
            "pool-members-remove",
            vec![done(
                "spindle pool members remove c",
                "node c is no member of the pool's log any more: a write is acknowledged by 2 of 2 members",
            )],
        ),
        (
            "pool-members-degraded",
            vec![done(
                "spindle pool members degraded block",
                "without a quorum of its write log, the pool waits: nothing is lost, and clients wait until enough \
                 members are back",
            )],
        ),
        ("pool-take-over", vec![done("spindle pool take-over", "this node takes the pool over")]),
        ("pool-move", vec![reply("spindle pool move b", Reply::Moved(moved()))]),
    ]
}

fn moved() -> MoveInfo {
    MoveInfo { node: "b".to_owned(), pause_ms: Some(240), error: None }
}

fn members() -> MembersInfo {
    let member = |node: &str, number: u32| MemberInfo {
        node: node.to_owned(),
        id: format!("{number:08}-3333-4444-5555-666677778888"),
        zone: None,
        is_owner: false,
        is_connected: true,
        error: None,
        behind: 0,
        sent_bytes: 3 << 30,
        answer_us: Some(1234),
    };
    let owner = MemberInfo { is_owner: true, sent_bytes: 0, answer_us: None, ..member("a", 1) };
    let lost = MemberInfo {
        is_connected: false,
        error: Some("connect to node c: connection refused".to_owned()),
        behind: 120,
        ..member("c", 3)
    };
    let members = vec![owner, member("b", 2), lost];
    let (away, traffic) = (Vec::new(), TrafficInfo::default());
    MembersInfo { members, quorum: 2, degraded: Degraded::Block, away, joining: None, traffic }
}

fn in_zones() -> MembersInfo {
    let mut info = members();
    for (member, zone) in info.members.iter_mut().zip(["west", "west", "east"]) {
        member.zone = Some(zone.to_owned());
    }
    info.traffic = TrafficInfo {
        written_bytes: 1000 << 20,
        sent_within_bytes: 1010 << 20,
        sent_across_bytes: 1020 << 20,
    };
    info
}

const SLOW: &str = "a round trip from node a to node c takes 60.1 ms, and the slowest one to a member, b, takes 210 µs; \
                    at most 5.0 ms is accepted";

fn added(forced: Option<&str>) -> MemberAdded {
    let path = |from: &str, to: &str, round_trip_us| PathInfo {
        from: from.to_owned(),
        to: to.to_owned(),
        round_trip_us,
        bytes_per_second: 900 << 20,
        error: None,
    };
    let of_new = if forced.is_some() { 60_100 } else { 240 };
    MemberAdded {
        node: "c".to_owned(),
        replaced: None,
        member_count: 3,
        quorum: 2,
        forced: forced.map(str::to_owned),
        paths: vec![path("a", "c", of_new), path("c", "b", of_new + 100), path("a", "b", 210)],
    }
}

fn replaced(old: &str, new: &str) -> MemberAdded {
    let (node, replaced) = (new.to_owned(), Some(old.to_owned()));
    MemberAdded { node, replaced, paths: Vec::new(), ..added(None) }
}

fn joining() -> MembersInfo {
    let joining =
        JoiningInfo { node: "d".to_owned(), behind: 40_000, sent_bytes: 1 << 30, error: None };
    MembersInfo { joining: Some(joining), ..members() }
}

fn alone() -> MembersInfo {
    let mut alone = members();
    alone.members.truncate(1);
    MembersInfo { quorum: 1, ..alone }
}

fn left_alone() -> MembersInfo {
    let away = ["b", "c"].map(str::to_owned).to_vec();
    MembersInfo { degraded: Degraded::Store, away, ..alone() }
}
