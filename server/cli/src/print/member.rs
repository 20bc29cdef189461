//! Text output about the members of a pool's write log.

use super::table;
use api::member::{
    JoiningInfo, MemberAdded, MemberInfo, MembersInfo, PathInfo, TrafficInfo, milliseconds, rate,
    round_trip,
};
use block::quantities::ByteSize;
use std::fmt::Write;

/// Lists the members of a pool's write log. Zones are a column if any node has one.
#[must_use]
pub(super) fn members(info: &MembersInfo) -> String {
    let has_zones = info.members.iter().any(|member| member.zone.is_some());
    let with_zone = |mut row: Vec<String>, zone: &str| {
        if has_zones {
            row.insert(1, zone.to_owned());
        }
        row
    };
    let head = ["NODE", "ROLE", "BEHIND", "SENT", "ANSWERS", "STATE"].map(str::to_owned).to_vec();
    let mut rows = vec![with_zone(head, "ZONE")];
    rows.extend(
        info.members
            .iter()
            .map(|member| with_zone(row(member), member.zone.as_deref().unwrap_or("-"))),
    );
    rows.extend(info.away.iter().map(|node| with_zone(row_away(node), "-")));
    rows.extend(info.joining.iter().map(|joining| with_zone(row_joining(joining), "-")));
    let (count, quorum) = (info.members.len(), info.quorum);
    let safety = match info.losses() {
        0 if info.flushes_to_store() => {
            "a loss of this machine loses what was not flushed".to_owned()
        }
        0 => "a loss of this machine loses what the store lacks".to_owned(),
        losses => {
            format!("an acknowledged write survives the loss of any {losses} of {count} machines")
        }
    };
    let right: &[usize] = if has_zones { &[3, 4, 5] } else { &[2, 3, 4] };
    let mut text = format!(
        "{}{quorum} of {count} members acknowledge a write: {safety}\n",
        table(&rows, right)
    );
    if let Some(sent) = traffic(&info.traffic) {
        let _ = writeln!(text, "sent {sent}");
    }
    text
}

fn row(member: &MemberInfo) -> Vec<String> {
    let state = match (&member.error, member.is_connected) {
        (Some(error), _) => error.clone(),
        (None, true) => "connected".to_owned(),
        (None, false) => "not connected yet".to_owned(),
    };
    vec![
        member.node.clone(),
        if member.is_owner { "owner" } else { "member" }.to_owned(),
        member.behind.to_string(),
        ByteSize(member.sent_bytes).rounded(),
        member.answer_us.map_or_else(|| "-".to_owned(), milliseconds),
        state,
    ]
}

fn row_away(node: &str) -> Vec<String> {
    [node, "away", "-", "-", "-", "left out, because it did not answer"].map(str::to_owned).to_vec()
}

fn row_joining(JoiningInfo { node, behind, sent_bytes, error }: &JoiningInfo) -> Vec<String> {
    let state = error.as_deref().unwrap_or("gets the log, and does not count yet");
    let figures = [behind.to_string(), ByteSize(*sent_bytes).rounded(), "-".to_owned()];
    let row = [node.clone(), "joining".to_owned()].into_iter().chain(figures);
    row.chain(std::iter::once(state.to_owned())).collect()
}

/// Compares the bytes sent to other members with those written; `None` before the first.
pub(super) fn traffic(traffic: &TrafficInfo) -> Option<String> {
    let TrafficInfo { written_bytes, sent_within_bytes, sent_across_bytes } = *traffic;
    let sent_bytes = sent_within_bytes.saturating_add(sent_across_bytes);
    if written_bytes == 0 || sent_bytes == 0 {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
    let ratio = |bytes: u64| bytes as f64 / written_bytes as f64;
    Some(format!(
        "{:.2} bytes per byte written: {:.2} within the zone, {:.2} to other zones",
        ratio(sent_bytes),
        ratio(sent_within_bytes),
        ratio(sent_across_bytes)
    ))
}

/// Describes a new member, and the network that was measured.
#[must_use]
pub(super) fn added(added: &MemberAdded) -> String {
    let MemberAdded { node, replaced, member_count, quorum, forced, paths } = added;
    let place = replaced.as_ref().map(|old| format!(" in place of node {old}")).unwrap_or_default();
    let mut text = format!(
        "node {node} is a member of the pool's log{place}: a write is acknowledged by {quorum} of {member_count} members\n"
    );
    let row = |path: &PathInfo| {
        let figures = match &path.error {
            None => [round_trip(path.round_trip_us), rate(path.bytes_per_second)],
            Some(error) => ["-".to_owned(), error.clone()],
        };
        [path.from.clone(), path.to.clone()].into_iter().chain(figures).collect()
    };
    if !paths.is_empty() {
        let head = ["FROM", "TO", "ROUND TRIP", "BANDWIDTH"].map(str::to_owned).to_vec();
        let rows: Vec<Vec<String>> = std::iter::once(head).chain(paths.iter().map(row)).collect();
        text.push_str(&table(&rows, &[2, 3]));
    }
    if let Some(reason) = forced {
        let _ = writeln!(text, "warning: it was added by force: {reason}");
    }
    text
}
