//! The doctor: whether the data of a pool is at risk, and what would be unavailable or lost without some data stores.
//!
//! Invariants:
//! - The segments were counted for this answer, by a walk of their records.
//! - Counts of segments include those of snapshots, and those that wait to be reclaimed.

use crate::status::{ConditionInfo, DataStoreInfo, TierSpaceInfo, survival_words};
use block::quantities::ByteSize;
use serde::{Deserialize, Serialize};
use std::fmt;

/// A request to the doctor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum DoctorRequest {
    /// Looks at the data stores, and counts all segments. Changes nothing.
    Examine {
        /// Data stores that are taken as gone, all of them together; none: as the pool is.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        without: Vec<StoresGone>,
    },
}

/// Data stores that are taken as gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoresGone {
    /// All drives of the data node of this name.
    Node(String),
    /// The store with this URL.
    Store(String),
    /// All stores of this failure domain.
    Domain(String),
}

impl fmt::Display for StoresGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoresGone::Node(name) => write!(f, "node {name}"),
            StoresGone::Store(url) => write!(f, "{url}"),
            StoresGone::Domain(name) => write!(f, "domain {name}"),
        }
    }
}

/// The findings of the doctor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DoctorInfo {
    /// The answer, in one sentence.
    pub summary: String,
    /// URL of the pool's object store.
    pub store: String,
    /// Current conditions of the pool, oldest first.
    pub conditions: Vec<ConditionInfo>,
    /// Number of conditions that were raised but not listed because there were too many.
    pub condition_excluded_count: u64,
    /// The data stores; absent if segments are objects of the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataRiskInfo>,
}

/// The risk of data on data stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRiskInfo {
    /// Every record could be read. Otherwise there are more segments than were counted.
    pub is_complete: bool,
    /// Scheme of new segments, such as `4+2`.
    pub scheme: String,
    /// Failure domains that a segment of the scheme needs.
    pub domain_needed: u64,
    /// The fewest failure domains with which segments are written while stores fail.
    pub domain_min: u64,
    /// Number of data stores.
    pub store_count: u64,
    /// Those of them that fail, are lost, or are no longer configured.
    pub troubled: Vec<DataStoreInfo>,
    /// Reason why the last segment could not be rebuilt, until one is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild_failure: Option<String>,
    /// Space by tier.
    pub space: TierSpaceInfo,
    /// Segments in fragments of a later version, which are counted nowhere below.
    pub unknown: AmountInfo,
    /// With the stores as they are.
    pub now: OutlookInfo,
    /// With stores taken as gone, if some were named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without: Option<WithoutInfo>,
}

/// A number of segments and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AmountInfo {
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of them, without parity.
    pub bytes: u64,
}

/// How the segments in fragments fare with a set of data stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutlookInfo {
    /// The segments by what they survive, those that cannot be read first, and then the fewest losses.
    pub survivals: Vec<SurvivalCount>,
    /// Segments of which a fragment has to be rebuilt.
    pub lacking: AmountInfo,
    /// Those of them for which too few failure domains take new fragments.
    pub short: AmountInfo,
    /// Bytes of fragments to be rebuilt, of segments that can be read.
    pub missing_bytes: u64,
    /// Bytes that stores which take new fragments have left, as far as that is known.
    pub room_bytes: u64,
    /// Number of such stores of which it is not known.
    pub room_unknown_count: u64,
    /// There is room for the fragments to be rebuilt; absent if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_room_enough: Option<bool>,
    /// Number of failure domains with a store that takes new fragments.
    pub taking_domain_count: u64,
    /// What becomes of new segments.
    pub writes: Writes,
    /// What could not be read if one failure domain more failed, the worst first.
    pub domains: Vec<DomainInfo>,
    /// Number of further failure domains, which are not listed because there are too many.
    pub domain_excluded_count: u64,
}

/// Segments that survive the same number of further losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SurvivalCount {
    /// Number of further failure domains that may be lost, whichever they are; 255: all of them, because the object store
    /// has the segments, too; absent: the segments cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub losses: Option<u8>,
    /// Number of segments.
    pub segment_count: u64,
    /// Bytes of them.
    pub bytes: u64,
}

/// What becomes of new segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Writes {
    /// They get all of their fragments.
    #[default]
    Whole,
    /// They lack fragments.
    Lacking,
    /// They cannot be written: destage waits, and writers once the log is full.
    Waiting,
}

/// A failure domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DomainInfo {
    /// Its name.
    pub domain: String,
    /// Number of its data stores.
    pub store_count: u64,
    /// Number of those that fail, or are taken as gone.
    pub away_count: u64,
    /// What could be read before, and could not if it failed.
    pub unavailable: AmountInfo,
}

/// What would be without some data stores, and without those that fail now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WithoutInfo {
    /// What was asked for.
    pub asked: Vec<StoresGone>,
    /// URLs of the stores that were taken as gone.
    pub stores: Vec<String>,
    /// What can be read now, and could not be read while they are away.
    pub unavailable: AmountInfo,
    /// What could be read, and would have fewer fragments to spare than now.
    pub thinner: AmountInfo,
    /// The rest.
    pub outlook: OutlookInfo,
}

fn size(bytes: u64) -> String {
    ByteSize(bytes).rounded()
}

impl OutlookInfo {
    /// All segments.
    fn total(&self) -> AmountInfo {
        let mut total = AmountInfo::default();
        for class in &self.survivals {
            total.segment_count += class.segment_count;
            total.bytes += class.bytes;
        }
        total
    }

    /// What survives, in words; `None` without segments.
    fn words(&self) -> Option<String> {
        survival_words(self.survivals.iter().map(|class| (class.losses, class.bytes)))
    }

    /// Whether a further loss costs data, or one has.
    fn is_at_risk(&self) -> bool {
        self.survivals.iter().any(|class| class.losses.unwrap_or(0) == 0)
    }

    /// Bytes that a further loss of a failure domain could cost.
    fn without_spare(&self) -> u64 {
        let bare = self.survivals.iter().filter(|class| class.losses == Some(0));
        bare.map(|class| class.bytes).sum()
    }
}

impl DoctorInfo {
    /// Makes the sentence of [`DoctorInfo::summary`] from the rest.
    #[must_use]
    pub fn summarize(&self) -> String {
        let Some(data) = &self.data else {
            return format!(
                "segments are objects of the store {}, whose own redundancy keeps them: no data store can be lost",
                self.store
            );
        };
        let mut text = match &data.without {
            None => data.now_in_words(),
            Some(without) => data.without_in_words(without),
        };
        if !data.is_complete {
            text += "; records of segments could not be read, so the answer is INCOMPLETE";
        }
        if data.unknown.segment_count > 0 {
            text += &format!(
                "; {} are in a way that this version does not know, and are not counted",
                size(data.unknown.bytes)
            );
        }
        text
    }
}

impl DataRiskInfo {
    fn now_in_words(&self) -> String {
        let now = &self.now;
        let mut text = match now.words() {
            None => "no segment is in fragments yet".to_owned(),
            Some(words) if now.is_at_risk() => format!("DATA IS AT RISK: {words}"),
            Some(words) => format!("no data is at risk: {words}"),
        };
        if now.lacking.segment_count > 0 {
            let cause = match now.short.segment_count {
                0 => "which are made anew",
                _ => "and failure domains are too few to make all of them anew",
            };
            text += &format!("; {} lack fragments, {cause}", size(now.lacking.bytes));
        }
        let (count, needed) = (now.taking_domain_count, self.domain_needed);
        let scheme = &self.scheme;
        match now.writes {
            Writes::Whole => {}
            Writes::Lacking => {
                text += &format!(
                    "; new segments LACK FRAGMENTS: {scheme} needs {needed} failure domains, and {count} take fragments"
                );
            }
            Writes::Waiting => {
                text += &format!(
                    "; new segments CANNOT BE WRITTEN: {scheme} needs {} failure domains at least, and {count} take \
                     fragments",
                    self.domain_min
                );
            }
        }
        text
    }

    fn without_in_words(&self, without: &WithoutInfo) -> String {
        let asked: Vec<String> = without.asked.iter().map(ToString::to_string).collect();
        let (outlook, total) = (&without.outlook, without.outlook.total());
        let reads = match without.unavailable.bytes {
            _ if total.segment_count == 0 => "nothing would be missed".to_owned(),
            0 => "everything that can be read now could still be read".to_owned(),
            bytes => {
                let until = "COULD NOT BE READ until they are back";
                format!("{} of {} {until}", size(bytes), size(total.bytes))
            }
        };
        let bare = match outlook.without_spare() {
            0 => String::new(),
            bytes => {
                format!(", {} would not survive the loss of one more failure domain", size(bytes))
            }
        };
        let writes = match outlook.writes {
            Writes::Whole => "writes would go on",
            Writes::Lacking => "writes would go on with segments that lack fragments",
            Writes::Waiting => "destage would WAIT, and writers once the log is full",
        };
        format!(
            "without {}: {reads}{bare}; {writes}; {}",
            asked.join(" and "),
            self.rebuild_in_words(outlook)
        )
    }

    /// Whether a rebuild onto the stores that are left could restore full redundancy.
    fn rebuild_in_words(&self, outlook: &OutlookInfo) -> String {
        let is_lost = outlook.survivals.iter().any(|class| class.losses.is_none());
        let rest = if is_lost { " of the rest" } else { "" };
        let missing = size(outlook.missing_bytes);
        if outlook.lacking.segment_count == 0 {
            return "no fragment would have to be made anew".to_owned();
        }
        if outlook.short.segment_count > 0 {
            return format!(
                "a rebuild could NOT restore full redundancy{rest}: {} failure domains would take fragments, and {} \
                 would be without a free one",
                outlook.taking_domain_count,
                size(outlook.short.bytes)
            );
        }
        match (outlook.missing_bytes, outlook.is_room_enough) {
            (0, _) => "nothing could be made anew".to_owned(),
            (_, Some(true)) => {
                format!("a rebuild of {missing} could restore full redundancy{rest}")
            }
            (_, Some(false)) => {
                let room = size(outlook.room_bytes);
                format!("a rebuild would need {missing}, and only {room} are free")
            }
            (_, None) => {
                format!(
                    "a rebuild of {missing} could restore full redundancy{rest} if the stores have room"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(losses: Option<u8>, bytes: u64) -> SurvivalCount {
        SurvivalCount { losses, segment_count: 1, bytes }
    }

    fn amount(bytes: u64) -> AmountInfo {
        AmountInfo { segment_count: 1, bytes }
    }

    fn data(now: OutlookInfo) -> DataRiskInfo {
        let scheme = "4+2".to_owned();
        let (domain_needed, domain_min) = (6, 5);
        DataRiskInfo {
            is_complete: true,
            scheme,
            domain_needed,
            domain_min,
            now,
            ..Default::default()
        }
    }

    fn said(data: DataRiskInfo) -> String {
        DoctorInfo { data: Some(data), ..DoctorInfo::default() }.summarize()
    }

    #[test]
    fn summary_says_whether_data_is_at_risk() {
        let none = DoctorInfo { store: "s3://b/p".to_owned(), ..DoctorInfo::default() };
        assert!(none.summarize().starts_with("segments are objects of the store s3://b/p"));
        assert_eq!(said(data(OutlookInfo::default())), "no segment is in fragments yet");
        let whole = OutlookInfo { survivals: vec![class(Some(2), 1 << 30)], ..Default::default() };
        let fine = "no data is at risk: everything survives the loss of any 2 stores";
        assert_eq!(said(data(whole.clone())), fine);
        let worse = OutlookInfo {
            survivals: vec![
                class(None, 1 << 20),
                class(Some(0), 30 << 20),
                class(Some(1), 1 << 30),
            ],
            lacking: amount(31 << 20),
            writes: Writes::Lacking,
            taking_domain_count: 5,
            ..OutlookInfo::default()
        };
        assert_eq!(
            said(data(worse.clone())),
            "DATA IS AT RISK: 1.00 GiB survives the loss of any store, 30.0 MiB would be LOST with one more store, 1.00 MiB \
             CANNOT BE READ until stores are back; 31.0 MiB lack fragments, which are made anew; new segments LACK \
             FRAGMENTS: 4+2 needs 6 failure domains, and 5 take fragments"
        );
        let stuck = OutlookInfo { short: amount(1), writes: Writes::Waiting, ..worse };
        let stuck = said(data(stuck));
        assert!(stuck.contains("too few to make all of them anew"), "{stuck}");
        assert!(stuck.contains("CANNOT BE WRITTEN: 4+2 needs 5 failure domains"), "{stuck}");
        let unread = DataRiskInfo { is_complete: false, unknown: amount(1 << 20), ..data(whole) };
        let unread = said(unread);
        assert!(unread.starts_with(fine) && unread.contains("INCOMPLETE"), "{unread}");
        assert!(unread.ends_with(
            "1.00 MiB are in a way that this version does not know, and are not counted"
        ));
    }

    #[test]
    fn summary_says_what_would_be_without_stores() {
        let of = |outlook: OutlookInfo, unavailable: u64| {
            let asked = vec![
                StoresGone::Node("b".to_owned()),
                StoresGone::Store("/mnt/x".to_owned()),
                StoresGone::Domain("rack 1".to_owned()),
            ];
            let unavailable = AmountInfo { bytes: unavailable, ..AmountInfo::default() };
            let without = WithoutInfo { asked, unavailable, outlook, ..WithoutInfo::default() };
            said(DataRiskInfo { without: Some(without), ..data(OutlookInfo::default()) })
        };
        let begin = "without node b and /mnt/x and domain rack 1: ";
        assert_eq!(
            of(OutlookInfo::default(), 0),
            format!(
                "{begin}nothing would be missed; writes would go on; no fragment would have to be made anew"
            )
        );
        let less = OutlookInfo {
            survivals: vec![class(Some(0), 2 << 20), class(Some(1), 1 << 30)],
            lacking: amount(1 << 30),
            missing_bytes: 5 << 20,
            is_room_enough: Some(true),
            writes: Writes::Lacking,
            ..OutlookInfo::default()
        };
        assert_eq!(
            of(less.clone(), 0),
            format!(
                "{begin}everything that can be read now could still be read, 2.00 MiB would not survive the loss of one more \
                 failure domain; writes would go on with segments that lack fragments; a rebuild of 5.00 MiB could restore \
                 full redundancy"
            )
        );
        let unknown = of(OutlookInfo { is_room_enough: None, ..less.clone() }, 0);
        assert!(unknown.ends_with("full redundancy if the stores have room"), "{unknown}");
        let full = OutlookInfo { is_room_enough: Some(false), room_bytes: 1 << 20, ..less.clone() };
        let full = of(full, 0);
        assert!(full.ends_with("would need 5.00 MiB, and only 1.00 MiB are free"), "{full}");
        let gone = OutlookInfo {
            survivals: vec![class(None, 1 << 30)],
            missing_bytes: 0,
            writes: Writes::Waiting,
            ..less.clone()
        };
        assert_eq!(
            of(gone, 1 << 29),
            format!(
                "{begin}512 MiB of 1.00 GiB COULD NOT BE READ until they are back; destage would WAIT, and writers once the \
                 log is full; nothing could be made anew"
            )
        );
        let short = OutlookInfo { short: amount(1 << 30), taking_domain_count: 5, ..less };
        let short = of(short, 0);
        let end =
            "5 failure domains would take fragments, and 1.00 GiB would be without a free one";
        assert!(short.ends_with(end), "{short}");
    }
}
