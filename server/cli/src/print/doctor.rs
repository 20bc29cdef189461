//! Text output of the doctor.

use super::status::{conditions, tiers};
use super::{pairs, table};
use api::doctor::{DataRiskInfo, DoctorInfo, DomainInfo, OutlookInfo, SurvivalCount, WithoutInfo};
use api::status::ANY_LOSS;
use block::quantities::ByteSize;
use std::collections::BTreeSet;
use std::fmt::Write;

fn size(bytes: u64) -> String {
    ByteSize(bytes).rounded()
}

/// Shows the findings: the conditions, the sentence, and what it is made from.
pub(super) fn doctor(info: &DoctorInfo) -> String {
    let mut text = conditions(&info.conditions, info.condition_excluded_count);
    let mut rows = vec![("summary", info.summary.clone()), ("store", info.store.clone())];
    let Some(data) = &info.data else {
        text.push_str(&pairs(&rows));
        return text;
    };
    rows.push(("data", stores(data)));
    rows.push(("tiers", tiers(&data.space)));
    rows.push(("lacking", lacking(&data.now)));
    if let Some(failure) = &data.rebuild_failure {
        rows.push(("rebuild", format!("the last one failed: {failure}")));
    }
    if let Some(without) = &data.without {
        rows.extend(without_rows(without));
    }
    text.push_str(&pairs(&rows));
    for store in &data.troubled {
        let mut says: Vec<&str> = Vec::new();
        if store.is_leaving {
            says.push("no longer configured");
        }
        if store.is_lost {
            says.push("lost");
        }
        says.extend(store.failure.as_deref());
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{} (domain {}): {}", store.url, store.domain, says.join(", "));
    }
    text.push_str(&survivals(data));
    let outlook = data.without.as_ref().map_or(&data.now, |without| &without.outlook);
    text.push_str(&domains(outlook));
    text
}

fn stores(data: &DataRiskInfo) -> String {
    format!(
        "{} over {} data stores; {} failure domains take new fragments, {} are needed, {} at least",
        data.scheme,
        data.store_count,
        data.now.taking_domain_count,
        data.domain_needed,
        data.domain_min
    )
}

/// Describes what has to be made anew, and the room for it.
fn lacking(outlook: &OutlookInfo) -> String {
    let room = match outlook.room_unknown_count {
        0 => format!("{} are free", size(outlook.room_bytes)),
        count => format!(
            "{} are free where that is known, which it is not of {count} stores",
            size(outlook.room_bytes)
        ),
    };
    let short = match outlook.short.segment_count {
        0 => String::new(),
        count => format!("; {count} segments have no failure domain to go to"),
    };
    format!(
        "{} in {} segments; {} of fragments to be made anew, {room}{short}",
        size(outlook.lacking.bytes),
        outlook.lacking.segment_count,
        size(outlook.missing_bytes)
    )
}

fn without_rows(without: &WithoutInfo) -> Vec<(&'static str, String)> {
    let amount = |bytes: u64, count: u64| format!("{} in {count} segments", size(bytes));
    let (lost, thin) = (without.unavailable, without.thinner);
    vec![
        ("without", without.stores.join(", ")),
        ("unavailable", amount(lost.bytes, lost.segment_count)),
        ("less spare", amount(thin.bytes, thin.segment_count)),
        ("lacking then", lacking(&without.outlook)),
    ]
}

/// Lists the segments by what they survive.
fn survivals(data: &DataRiskInfo) -> String {
    let then = data.without.as_ref().map(|without| &without.outlook);
    let classes = data.now.survivals.iter().chain(then.iter().flat_map(|it| &it.survivals));
    let losses: BTreeSet<Option<u8>> = classes.map(|class| class.losses).collect();
    if losses.is_empty() {
        return String::new();
    }
    let cells = |outlook: &OutlookInfo, losses: Option<u8>| {
        let found = outlook.survivals.iter().find(|class| class.losses == losses).copied();
        let SurvivalCount { bytes, segment_count, .. } = found.unwrap_or_default();
        [size(bytes), segment_count.to_string()]
    };
    let mut head = vec!["SURVIVES".to_owned(), "BYTES".to_owned(), "SEGMENTS".to_owned()];
    if then.is_some() {
        head.extend(["BYTES THEN".to_owned(), "SEGMENTS THEN".to_owned()]);
    }
    let mut rows = vec![head];
    for losses in losses.into_iter().rev() {
        let name = match losses {
            None => "cannot be read".to_owned(),
            Some(0) => "no further loss".to_owned(),
            Some(1) => "1 further loss".to_owned(),
            Some(ANY_LOSS) => "all data stores lost".to_owned(),
            Some(losses) => format!("{losses} further losses"),
        };
        let mut row = vec![name];
        row.extend(cells(&data.now, losses));
        row.extend(then.iter().flat_map(|outlook| cells(outlook, losses)));
        rows.push(row);
    }
    table(&rows, &[1, 2, 3, 4])
}

/// Lists what would be unavailable without one failure domain more.
fn domains(outlook: &OutlookInfo) -> String {
    if outlook.domains.is_empty() {
        return String::new();
    }
    let head = ["IF IT FAILED", "STORES", "AWAY", "UNAVAILABLE", "SEGMENTS"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(outlook.domains.iter().map(|found| {
        let DomainInfo { domain, store_count, away_count, unavailable } = found;
        vec![
            domain.clone(),
            store_count.to_string(),
            away_count.to_string(),
            size(unavailable.bytes),
            unavailable.segment_count.to_string(),
        ]
    }));
    let mut text = table(&rows, &[1, 2, 3, 4]);
    if outlook.domain_excluded_count > 0 {
        let _ = writeln!(text, "and {} other domains", outlook.domain_excluded_count);
    }
    text
}
