//! Decides whether one batch follows another. All code that walks the ring uses this rule, so that
//! no two readers of a log can disagree about its end.
//!
//! Invariants:
//! - A sequence number alone proves nothing: a run that was cut off may have left a batch with the
//!   next number behind the batch that a later run wrote. Only the whole rule counts.
//! - The rule reads headers and one checksum: it needs neither the key nor the place of a batch, so
//!   that every machine with the chain applies the same one.

use crate::format::batch::{BatchHeader, Predecessor};

/// Returns whether `next` directly follows `before`, whose checksum is `checksum`.
pub(crate) fn follows(before: &BatchHeader, checksum: u32, next: &BatchHeader) -> bool {
    let is_in_sequence = next.sequence == before.sequence.saturating_add(1)
        && next.previous == Predecessor::of(before, checksum)
        && (next.pool, next.chain) == (before.pool, before.chain);
    let is_in_chain = if next.is_opening {
        next.open != before.open && next.first_lsn >= before.next_lsn()
    } else {
        next.open == before.open && next.first_lsn == before.next_lsn()
    };
    is_in_sequence && is_in_chain && next.epoch >= before.epoch
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::seal::Algorithm;
    use block::{Epoch, Lsn};

    fn before() -> BatchHeader {
        BatchHeader {
            algorithm: Algorithm::Aes256Gcm,
            is_opening: false,
            is_clean: false,
            acks_before_sync: true,
            is_settled: true,
            has_snapshots: false,
            pool: [1; 16],
            chain: [2; 16],
            open: [3; 16],
            boot: [4; 16],
            epoch: Epoch(5),
            sequence: 6,
            configuration: 2,
            first_lsn: Lsn(10),
            durable_lsn: Lsn(9),
            commit_lsn: Lsn(8),
            trim_lsn: Lsn(0),
            entry_count: 3,
            batch_bytes: 4096,
            payload_bytes: 0,
            previous: Predecessor { epoch: Epoch(5), open: [3; 16], checksum: 7 },
            salt: [8; 16],
        }
    }

    #[test]
    fn a_batch_follows_only_where_all_of_the_rule_holds() {
        const CHECKSUM: u32 = 99;
        let follows = |next: &BatchHeader| follows(&before(), CHECKSUM, next);
        let plain = BatchHeader {
            sequence: 7,
            first_lsn: Lsn(13),
            previous: Predecessor::of(&before(), CHECKSUM),
            ..before()
        };
        let opening = BatchHeader { is_opening: true, open: [9; 16], epoch: Epoch(6), ..plain };
        for right in [plain, opening, BatchHeader { first_lsn: Lsn(20), ..opening }] {
            assert!(follows(&right), "{right:?}");
            for wrong in [
                BatchHeader { sequence: 8, ..right },
                BatchHeader { sequence: 6, ..right },
                BatchHeader { previous: Predecessor { checksum: 98, ..right.previous }, ..right },
                BatchHeader {
                    previous: Predecessor { epoch: Epoch(4), ..right.previous },
                    ..right
                },
                BatchHeader { previous: Predecessor { open: [4; 16], ..right.previous }, ..right },
                BatchHeader { first_lsn: Lsn(12), ..right },
                BatchHeader { epoch: Epoch(4), ..right },
                BatchHeader { pool: [0; 16], ..right },
                BatchHeader { chain: [0; 16], ..right },
            ] {
                assert!(!follows(&wrong), "{wrong:?}");
            }
        }
        assert!(!follows(&BatchHeader { first_lsn: Lsn(14), ..plain }), "a gap within one run");
        assert!(
            !follows(&BatchHeader { open: [9; 16], ..plain }),
            "another run without an opening"
        );
        assert!(!follows(&BatchHeader { open: [3; 16], ..opening }), "an opening of the same run");
    }
}
