//! Who has to have a batch.
//!
//! Invariants:
//! - A quorum is more than half of the members, so two quorums of one configuration share a member.
//! - A recovery quorum shares a member with every quorum.
//! - While two configurations are held, a batch needs the quorum of each.

use std::collections::BTreeSet;
use uuid::Uuid;

/// Identity of a member's directory. A directory that was wiped gets another one.
pub type MemberId = Uuid;

/// The members of a pool's log, as one link of the manifest chain has them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Configuration {
    /// Number of the link.
    pub number: u64,
    /// The members; the owner is one of them.
    pub members: BTreeSet<MemberId>,
    /// Number of members that must have written a batch before it is acknowledged.
    pub quorum: usize,
}

impl Configuration {
    /// Whether the quorum is more than half of the members, and at most all of them.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.quorum <= self.members.len() && 2 * self.quorum > self.members.len()
    }

    /// Number of members that a take-over needs: at least one of them has any acknowledged batch.
    #[must_use]
    pub fn recovery_quorum(&self) -> usize {
        (self.members.len() + 1).saturating_sub(self.quorum)
    }

    /// The highest number that a quorum has reached, given that of each member.
    pub(crate) fn reached(&self, has: impl Fn(&MemberId) -> u64) -> u64 {
        let count = |least| self.members.iter().filter(|member| has(member) >= least).count();
        let quorum = self.quorum.max(1);
        self.members.iter().map(&has).filter(|least| count(*least) >= quorum).max().unwrap_or(0)
    }
}

/// The configuration that an owner holds, and the one that it is changing to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Quorums {
    /// The newest one that is known to be in the chain.
    pub current: Configuration,
    /// The one for which a link is being created.
    pub next: Option<Configuration>,
}

impl Quorums {
    /// The highest number that satisfies each configuration that is held.
    pub(crate) fn reached(&self, has: impl Fn(&MemberId) -> u64) -> u64 {
        let current = self.current.reached(&has);
        self.next.as_ref().map_or(current, |next| current.min(next.reached(&has)))
    }

    /// All members of the configurations that are held.
    pub(crate) fn members(&self) -> BTreeSet<MemberId> {
        let next = self.next.iter().flat_map(|next| &next.members);
        self.current.members.iter().chain(next).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(numbers: &[u128]) -> BTreeSet<MemberId> {
        numbers.iter().map(|number| Uuid::from_u128(*number)).collect()
    }

    #[test]
    fn a_quorum_is_counted_from_the_highest() {
        let three = Configuration { number: 1, members: members(&[1, 2, 3]), quorum: 2 };
        assert!(three.is_valid());
        assert_eq!(three.recovery_quorum(), 2);
        let has = |member: &MemberId| u64::try_from(member.as_u128()).expect("small") * 10;
        assert_eq!(three.reached(has), 20);
        let next = Configuration { number: 2, members: members(&[1, 4, 5]), quorum: 3 };
        let both = Quorums { current: three.clone(), next: Some(next) };
        assert_eq!(both.reached(has), 10, "the quorum of each is needed");
        assert_eq!(both.members(), members(&[1, 2, 3, 4, 5]));
        for quorum in [1, 4] {
            assert!(!Configuration { quorum, ..three.clone() }.is_valid());
        }
    }
}
