//! Records of the engine and of the map of the data tier.
//!
//! Invariant: a record that decodes is encoded to a record that decodes to the same value; the
//! binary ones to the same bytes.

use crate::{SMALL, no_repair};
use block::seal::Algorithm;
use block::{Epoch, Error, ErrorKind, Lsn, VolumeId};
use engine::client_record::ClientRecord;
use engine::record::{Durability, VolumeRecord, VolumeState};
use engine::schedule::{Keep, Schedule};
use engine::snapshot::SnapshotRecord;
use fuzz::{Outcome, Target};
use tiering::KeyId;
use tiering::map::read_times::{
    GROUP_SEGMENTS, decode_open_time, decode_times, encode_open_time, encode_times,
};
use tiering::map::records::{
    NamedSpillFile, Root, SegmentRecord, decode_live, decode_stalled, encode_live, encode_stalled,
};
use tiering::segment::{FragmentPlace, Fragments, Placement, SegmentInfo, SegmentNumber};
use uuid::Uuid;

fn client(number: u128) -> ClientRecord {
    let id = Uuid::from_u128(number);
    ClientRecord {
        pool: id,
        client: id,
        boot: id,
        attachment: id,
        label: "db1".to_owned(),
        is_shared: true,
        attached_at: 1_700_000_000,
        epoch: 3,
        has_lost_writes: true,
    }
}

#[test]
fn volume_record() {
    let plain = VolumeRecord::new(7, "db", 1 << 30, Durability::Flush, 1_700_000_000);
    let schedule = Schedule::new("*/15 * * * *", Keep::default(), 1_700_000_000);
    let full = {
        let mut record = plain.clone();
        (record.is_read_only, record.has_lost_writes, record.is_dedup) = (true, true, true);
        (record.lost_writes_in, record.expires_at) = (4, 1_800_000_000);
        record.schedule = Some(schedule.expect("a valid expression"));
        record.state = VolumeState::Removed { removed_at: 1_700_000_001 };
        record
    };
    let mut purged = plain.clone();
    purged.state = VolumeState::Purged;
    let mut attached = plain.clone();
    attached.clients = [1, 2].map(client).to_vec();
    let records = [plain.clone().with_dedicated_key(7), plain, full, purged, attached];
    Target {
        name: "volume_record",
        inputs: records.iter().map(|record| record.encode().to_vec()).collect(),
        repair: &no_repair,
        decode: &|input| match VolumeRecord::decode(input) {
            Ok(record) => {
                let again = VolumeRecord::decode(&record.encode()).map_err(|error| error.chain());
                assert_eq!(again.as_ref(), Ok(&record));
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.chain()),
        },
        execution_count: 60_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}

#[test]
fn snapshot_record() {
    let plain = SnapshotRecord::new(7, "before-upgrade", 1 << 30, 1_700_000_000);
    let mut scheduled = plain.clone();
    scheduled.is_scheduled = true;
    Target {
        name: "snapshot_record",
        inputs: [plain, scheduled].iter().map(|record| record.encode().to_vec()).collect(),
        repair: &no_repair,
        decode: &|input| match SnapshotRecord::decode(input) {
            Ok(record) => {
                let again = SnapshotRecord::decode(&record.encode()).map_err(|error| error.chain());
                assert_eq!(again.as_ref(), Ok(&record));
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.chain()),
        },
        execution_count: 60_000,
        input_bytes_max: 4096,
        allocation: SMALL,
    }
    .check();
}

/// The records of the map in clear. The first byte of an input says which.
#[test]
fn map_record() {
    let file =
        |first, last| NamedSpillFile { first_lsn: Lsn(first), last_lsn: Lsn(last), id: [5; 16] };
    let root = Root { epoch: Epoch(3), destaged: Lsn(900), commit_number: 40, next_segment: 18 };
    let segment = |key| SegmentRecord {
        info: SegmentInfo {
            number: SegmentNumber(17),
            epoch: Epoch(3),
            id: [8; 16],
            algorithm: Algorithm::Aes256Gcm,
            key,
            object_bytes: 10_000,
            frame_count: 12,
        },
        placement: Placement::Object,
        block_count: 90,
    };
    let fragments = Fragments {
        data: 4,
        parity: 2,
        codec: 2,
        ends: vec![2500, 2500, 7000, 10_000],
        places: [3, 1, 2, 9, Fragments::NOWHERE, 7]
            .map(|store| FragmentPlace { store, generation: 9 })
            .to_vec(),
        is_copied: false,
    };
    let coded = |is_copied| {
        let fragments = Fragments { is_copied, ..fragments.clone() };
        let placement = Placement::Fragments(std::sync::Arc::new(fragments));
        SegmentRecord { placement, ..segment(KeyId(9)) }
    };
    let mut times = [0; GROUP_SEGMENTS];
    (times[3], times[200]) = (70, 900);
    let records = [
        (2, coded(false).encode()),
        (2, coded(true).encode()),
        (4, encode_times(&times)),
        (5, encode_open_time(800)),
        (0, encode_stalled(&[file(1, 7), file(8, 8)])),
        (1, root.encode()),
        (2, segment(KeyId::POOL).encode()),
        (2, segment(KeyId(9)).encode()),
        (3, encode_live(77)),
    ];
    let decode = |input: &[u8]| {
        let Some((kind, record)) = input.split_first() else {
            return Outcome::Refused("empty".to_owned());
        };
        let unread = || Error::new(ErrorKind::Corrupt, "the times of reads");
        let encoded = match kind % 6 {
            0 => decode_stalled(VolumeId(7), record).map(|files| encode_stalled(&files)),
            1 => Root::decode(record).map(|root| root.encode()),
            2 => SegmentRecord::decode(17, record).map(|segment| segment.encode()),
            3 => decode_live(17, record).map(encode_live),
            4 => decode_times(record).map(|times| encode_times(&times)).ok_or_else(unread),
            _ => decode_open_time(record).map(encode_open_time).ok_or_else(unread),
        };
        match encoded {
            Ok(encoded) => {
                assert_eq!(encoded, record);
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.chain()),
        }
    };
    Target {
        name: "map_record",
        inputs: records.into_iter().map(|(kind, record)| [&[kind], &record[..]].concat()).collect(),
        repair: &no_repair,
        decode: &decode,
        execution_count: 100_000,
        input_bytes_max: 4096,
        allocation: SMALL,
    }
    .check();
}
