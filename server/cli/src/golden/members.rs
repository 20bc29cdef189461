//! Fixed replies of the golden tests about the members of a pool's write log.

use super::{Case, done, reply};
use api::Reply;
use api::member::{Degraded, MemberInfo, MembersInfo};
use api::pool::MoveInfo;

pub(super) fn about_members() -> Vec<(&'static str, Vec<Case>)> {
    vec![
        (
            "pool-members-list",
            vec![
                reply("spindle pool members list", Reply::Members(members())),
                reply("spindle pool members list", Reply::Members(alone())),
                reply("spindle pool members list", Reply::Members(left_alone())),
            ],
        ),
        (
            "pool-members-add",
            vec![done(
                "spindle pool members add c",
                "node c is a member of the pool's log: a write is acknowledged by 2 of 3 members",
            )],
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
    MembersInfo { members, quorum: 2, degraded: Degraded::Block, away: Vec::new() }
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
