//! Golden bytes, and decoders under random and flipped bytes.
#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::unwrap_used
)]

use super::FormatError;
use super::batch::{self, BatchHeader, Predecessor};
use super::entry::{EntryKind, EntryRow};
use super::file::FileHeader;
use super::made;
use super::spill::{self, SpillContent, SpillHeader, SpillRow};
use block::env::IoBuffer;
use block::seal::{Algorithm, KEY_BYTES, PoolKey};
use block::{Epoch, Lsn, VolumeId};
use proptest::prelude::*;
use std::fmt::Write;

fn file_header() -> FileHeader {
    FileHeader {
        pool: *b"pool-pool-pool-p",
        ring: *b"ring-ring-ring-r",
        chain: *b"chainchainchainc",
        slot: 2,
        file_count: 16,
        file_bytes: 64 << 20,
    }
}

fn header() -> BatchHeader {
    BatchHeader {
        algorithm: Algorithm::ChaCha20Poly1305,
        is_opening: false,
        is_clean: false,
        acks_before_sync: true,
        is_settled: true,
        has_snapshots: false,
        pool: *b"pool-pool-pool-p",
        chain: *b"chainchainchainc",
        open: *b"open-open-open-o",
        boot: *b"boot-boot-boot-b",
        epoch: Epoch(3),
        sequence: 0x0102_0304,
        configuration: 5,
        first_lsn: Lsn(1000),
        durable_lsn: Lsn(990),
        commit_lsn: Lsn(980),
        trim_lsn: Lsn(900),
        entry_count: 0,
        batch_bytes: 0,
        payload_bytes: 0,
        previous: Predecessor {
            epoch: Epoch(2),
            open: *b"past-past-past-p",
            checksum: 0xaabb_ccdd,
        },
        salt: *b"salt-salt-salt-s",
    }
}

fn rows() -> Vec<EntryRow> {
    let row = |volume, kind, start_sector, sector_count, payload_bytes| EntryRow {
        volume: VolumeId(volume),
        kind,
        start_sector,
        sector_count,
        payload_offset: 0,
        payload_bytes,
    };
    vec![
        row(7, EntryKind::Write, 0x1000, 1, 512),
        row(8, EntryKind::Trim, 0, 1 << 30, 0),
        row(7, EntryKind::VolumeRecord, 0, 0, 6),
    ]
}

fn payloads() -> Vec<Vec<u8>> {
    vec![(0..=255).chain(0..=255).collect(), Vec::new(), b"record".to_vec()]
}

fn key(header: &BatchHeader) -> block::seal::SealKey {
    PoolKey::new([0x11; KEY_BYTES]).derive(header.algorithm, &header.salt, batch::KEY_PURPOSE)
}

/// Encodes an opening batch, which has no entries.
fn encoded_empty() -> (BatchHeader, Vec<u8>) {
    let (algorithm, mut buffer) = (Algorithm::Aes256Gcm, IoBuffer::default());
    let mut header = BatchHeader { algorithm, is_opening: true, durable_lsn: Lsn(999), ..header() };
    let key = key(&header);
    batch::encode(&mut header, &mut [], std::iter::empty(), &key, &mut buffer).unwrap();
    (header, buffer.as_slice().to_vec())
}

fn encoded(algorithm: Algorithm) -> (BatchHeader, Vec<u8>, u32) {
    let mut header = BatchHeader { algorithm, ..header() };
    let (mut rows, payloads, mut buffer) = (rows(), payloads(), IoBuffer::default());
    let key = key(&header);
    let payloads = payloads.iter().map(Vec::as_slice);
    let checksum = batch::encode(&mut header, &mut rows, payloads, &key, &mut buffer).unwrap();
    (header, buffer.as_slice().to_vec(), checksum)
}

/// Fields of a batch's header.
const HEADER_FIELDS: &[(&str, usize)] = &[
    ("magic", 8),
    ("version", 2),
    ("algorithm", 1),
    ("flags", 1),
    ("compatible features", 4),
    ("read-only-compatible features", 4),
    ("incompatible features", 4),
    ("pool", 16),
    ("chain", 16),
    ("open", 16),
    ("boot", 16),
    ("epoch", 8),
    ("sequence", 8),
    ("configuration", 8),
    ("first LSN", 8),
    ("durable LSN", 8),
    ("commit LSN", 8),
    ("trim LSN", 8),
    ("entry count", 4),
    ("batch bytes", 4),
    ("payload bytes", 4),
    ("previous checksum", 4),
    ("previous epoch", 8),
    ("previous open", 16),
    ("salt", 16),
    ("zero", 32),
    ("header checksum", 4),
    ("checksum", 4),
    ("tag of the header", 16),
];
/// Fields after the header of the golden batch; the rest is zero.
const ENTRY_FIELDS: &[(&str, usize)] = &[
    ("row 0, sealed", 32),
    ("row 1, sealed", 32),
    ("row 2, sealed", 32),
    ("tag of the table", 16),
    ("payload 0, sealed", 512),
    ("tag of payload 0", 16),
    ("payload 2, sealed", 6),
    ("tag of payload 2", 16),
];

const FILE_FIELDS: &[(&str, usize)] = &[
    ("magic", 8),
    ("version", 2),
    ("zero", 2),
    ("compatible features", 4),
    ("read-only-compatible features", 4),
    ("incompatible features", 4),
    ("pool", 16),
    ("ring", 16),
    ("chain", 16),
    ("slot", 4),
    ("file count", 4),
    ("file bytes", 8),
    ("checksum", 4),
];

fn annotate(bytes: &[u8], fields: &[(&str, usize)]) -> String {
    let mut text = String::new();
    let mut at = 0;
    for (name, length) in fields {
        let hex: String = bytes[at..at + length].iter().map(|b| format!("{b:02x}")).collect();
        writeln!(text, "{hex} # {at}: {name}").unwrap();
        at += length;
    }
    assert!(bytes[at..].iter().all(|byte| *byte == 0), "a field is not in the table");
    writeln!(text, "# zeroes up to {}", bytes.len()).unwrap();
    text
}

/// Compares with a golden file. `GOLDEN=print cargo test … golden -- --nocapture` prints the
/// contents for a new file.
fn check_golden(name: &str, golden: &str, bytes: &[u8], fields: &[(&str, usize)]) {
    let text = annotate(bytes, fields);
    if std::env::var("GOLDEN").is_ok_and(|value| value == "print") {
        println!("--- {name}\n{text}---");
    } else {
        assert_eq!(
            text, golden,
            "the bytes of {name} have changed: a new version needs a new file"
        );
    }
}

const MADE_FIELDS: &[(&str, usize)] =
    &[("magic", 8), ("version", 2), ("zero", 2), ("count", 4), ("checksum", 4)];

#[test]
fn golden_bytes_of_the_count_of_files_of_version_1() {
    let bytes = made::encode(8);
    check_golden("made-v1.hex", include_str!("../../testdata/made-v1.hex"), &bytes, MADE_FIELDS);
    assert_eq!(made::decode(&bytes), Ok(8));
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes;
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(made::decode(&flipped).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(made::decode(&bytes[..len]).is_err(), "{len} bytes");
    }
    assert_eq!(made::decode(&[&bytes[..], &[0]].concat()), Err(FormatError::Range));
    assert_eq!(made::decode(&made::encode(0)), Ok(0));
    assert_eq!(made::decode(&made::encode(u32::MAX)), Err(FormatError::Range));
}

#[test]
fn golden_bytes_of_a_file_of_version_2() {
    let bytes = file_header().encode();
    check_golden("file-v2.hex", include_str!("../../testdata/file-v2.hex"), &bytes, FILE_FIELDS);
    assert_eq!(FileHeader::decode(&bytes), Ok(file_header()));
}

#[test]
fn golden_bytes_of_batches_of_version_3() {
    let fields = [HEADER_FIELDS, ENTRY_FIELDS].concat();
    let (_, bytes, _) = encoded(Algorithm::ChaCha20Poly1305);
    let golden = include_str!("../../testdata/batch-v3-chacha20poly1305.hex");
    check_golden("batch-v3-chacha20poly1305.hex", golden, &bytes, &fields);
    let (_, bytes, _) = encoded(Algorithm::Aes256Gcm);
    let golden = include_str!("../../testdata/batch-v3-aes256gcm.hex");
    check_golden("batch-v3-aes256gcm.hex", golden, &bytes, &fields);
    let (_, bytes) = encoded_empty();
    let golden = include_str!("../../testdata/batch-v3-no-entries.hex");
    check_golden("batch-v3-no-entries.hex", golden, &bytes, HEADER_FIELDS);
}

const SPILL_FIELDS: &[(&str, usize)] = &[
    ("magic", 8),
    ("version", 2),
    ("algorithm", 1),
    ("zero", 1),
    ("compatible features", 4),
    ("read-only-compatible features", 4),
    ("incompatible features", 4),
    ("pool", 16),
    ("id", 16),
    ("epoch", 8),
    ("first LSN", 8),
    ("last LSN", 8),
    ("volume", 4),
    ("row count", 4),
    ("payload bytes", 8),
    ("checksum of the table", 4),
    ("checksum", 4),
    ("zero", 24),
    ("payload 0, sealed", 512),
    ("tag of payload 0", 16),
    ("row 0, sealed", 32),
    ("row 1, sealed", 32),
    ("row 2, sealed", 32),
    ("row 3, sealed", 32),
    ("tag of the table", 16),
];

#[test]
fn a_batch_without_entries_has_no_payload_bytes() {
    let (_, mut bytes) = encoded_empty();
    bytes[152] = 2;
    let checksum = block::units::crc32c(&bytes[..232]);
    bytes[232..236].copy_from_slice(&checksum.to_le_bytes());
    assert_eq!(BatchHeader::decode(&bytes), Err(FormatError::Range));
}

fn spill_header(algorithm: Algorithm) -> SpillHeader {
    SpillHeader {
        algorithm,
        pool: *b"pool-pool-pool-p",
        id: *b"side-side-side-s",
        epoch: Epoch(3),
        first_lsn: Lsn(900),
        last_lsn: Lsn(1000),
        volume: VolumeId(7),
        row_count: 0,
        payload_bytes: 0,
        table_checksum: 0,
    }
}

fn spill_key(header: &SpillHeader) -> block::seal::SealKey {
    PoolKey::new([0x11; KEY_BYTES]).derive(header.algorithm, &header.id, spill::SPILL_KEY_PURPOSE)
}

fn spill_rows() -> Vec<SpillRow> {
    let row =
        |start_sector, sector_count, content| SpillRow { start_sector, sector_count, content };
    vec![
        row(0x1000, 1, SpillContent::Write { offset: 0 }),
        row(0x1001, 7, SpillContent::Zero),
        row(0x2000, 1 << 30, SpillContent::Trim),
        row(1 << 40, 8, SpillContent::Lost { lsn: Lsn(950) }),
    ]
}

/// Returns header, payloads and table.
fn spill_encoded(algorithm: Algorithm) -> (SpillHeader, Vec<u8>, Vec<u8>) {
    let mut header = spill_header(algorithm);
    let (rows, key) = (spill_rows(), spill_key(&header));
    let mut payload = payloads().swap_remove(0);
    let tag = key.seal(0, &rows[0].encode(), &mut payload);
    payload.extend_from_slice(&tag);
    let table = spill::seal_table(&mut header, &rows, &key).unwrap();
    (header, payload, table)
}

#[test]
fn golden_bytes_of_spill_files_of_version_1() {
    for (algorithm, name, golden) in [
        (
            Algorithm::ChaCha20Poly1305,
            "spill-v1-chacha20poly1305.hex",
            include_str!("../../testdata/spill-v1-chacha20poly1305.hex"),
        ),
        (
            Algorithm::Aes256Gcm,
            "spill-v1-aes256gcm.hex",
            include_str!("../../testdata/spill-v1-aes256gcm.hex"),
        ),
    ] {
        let (header, payload, table) = spill_encoded(algorithm);
        let bytes = [&header.encode()[..], &payload, &table].concat();
        check_golden(name, golden, &bytes, SPILL_FIELDS);
        assert_eq!(header.file_bytes(), Some(bytes.len() as u64));
        assert_eq!(SpillHeader::decode(&bytes), Ok(header));
        let key = spill_key(&header);
        assert_eq!(spill::open_table(&header, &mut table.clone(), &key), Ok(spill_rows()));
        let mut sealed = payload.clone();
        let opened = spill::open_spill_payload(&spill_rows()[0], 0, &key, &mut sealed).unwrap();
        assert_eq!(opened, payloads()[0]);
        assert!(
            spill::open_spill_payload(&spill_rows()[0], 1, &key, &mut payload.clone()).is_err()
        );
    }
}

#[test]
fn a_side_table_that_makes_no_sense_is_refused() {
    let refused = |change: &dyn Fn(&mut Vec<SpillRow>)| {
        let mut header = spill_header(Algorithm::Aes256Gcm);
        let mut rows = spill_rows();
        change(&mut rows);
        let key = spill_key(&header);
        let mut table = spill::seal_table(&mut header, &rows, &key).unwrap();
        spill::open_table(&header, &mut table, &key) == Err(FormatError::Range)
    };
    assert!(!refused(&|_| ()));
    assert!(refused(&|rows| rows.swap(0, 1)), "order");
    assert!(refused(&|rows| rows[1].start_sector = 0x1000), "overlap");
    assert!(refused(&|rows| rows[1].sector_count = 0), "empty");
    assert!(refused(&|rows| rows[3].start_sector = u64::MAX - 2), "too far");
    assert!(refused(&|rows| rows[0].content = SpillContent::Write { offset: 1 }), "a gap");
    assert!(refused(&|rows| rows[1].content = SpillContent::Write { offset: 0 }), "shared payload");
    assert!(
        refused(&|rows| {
            rows[0].sector_count = 1 + (64 << 10);
            rows[1].start_sector = 0x1000 + (64 << 11);
            rows.truncate(2);
        }),
        "a payload beyond the bound"
    );
}

/// Everything that a reader learns from the bytes of a batch.
type Batch = (BatchHeader, Vec<EntryRow>, Vec<Vec<u8>>);

fn read_all(bytes: &[u8]) -> Result<Batch, FormatError> {
    let header = BatchHeader::decode(bytes)?;
    batch::verify(&header, bytes)?;
    open_all(&header, bytes)
}

fn open_all(header: &BatchHeader, bytes: &[u8]) -> Result<Batch, FormatError> {
    let key = key(header);
    batch::authenticate(bytes, &key)?;
    let rows = batch::open_table(header, bytes, &key)?;
    let mut payloads = Vec::new();
    for (index, row) in (0u32..).zip(&rows) {
        let at = header.payload_at().unwrap() + row.payload_offset as usize;
        let mut sealed = bytes[at..at + row.sealed_bytes()].to_vec();
        let lsn = Lsn(header.first_lsn.0 + u64::from(index));
        payloads.push(batch::open_payload(row, lsn, index, &key, &mut sealed)?.to_vec());
    }
    Ok((*header, rows, payloads))
}

#[test]
fn encoded_batches_decode_to_the_same() {
    for algorithm in [Algorithm::ChaCha20Poly1305, Algorithm::Aes256Gcm] {
        let (header, bytes, checksum) = encoded(algorithm);
        assert_eq!(batch::verify(&header, &bytes), Ok(checksum));
        let (found, rows, found_payloads) = read_all(&bytes).unwrap();
        assert_eq!(found, header);
        assert_eq!(rows.len(), 3);
        assert_eq!(found_payloads, payloads());
        assert_eq!(header.last_lsn(), Lsn(1002));
    }
}

#[test]
fn every_flipped_bit_of_a_batch_is_seen() {
    let (header, bytes, _) = encoded(Algorithm::ChaCha20Poly1305);
    for bit in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(read_all(&flipped).is_err(), "bit {bit}");
        // Even if the checksums passed, the seals notice every change of the bytes that they cover.
        let (at, used) = (bit / 8, header.payload_at().unwrap() + header.payload_bytes as usize);
        let is_sealed = at < 232 || (240..used).contains(&at);
        assert!(!is_sealed || open_all(&header, &flipped).is_err(), "bit {bit} and the seal");
    }
}

/// Corrects the checksums, which need no key.
fn fix_checksums(bytes: &mut [u8]) {
    let crc = block::units::crc32c(&bytes[..232]);
    bytes[232..236].copy_from_slice(&crc.to_le_bytes());
    let crc = block::units::crc32c_parts(&[&bytes[..236], &bytes[240..]]);
    bytes[236..240].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_forged_header_is_seen_with_and_without_entries() {
    for bytes in [encoded_empty().1, encoded(Algorithm::ChaCha20Poly1305).1] {
        assert!(read_all(&bytes).is_ok());
        let mut decoded = 0;
        for bit in (0..232 * 8).chain(240 * 8..256 * 8) {
            let mut forged = bytes.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            fix_checksums(&mut forged);
            if let Ok(header) = BatchHeader::decode(&forged) {
                decoded += 1;
                let seal = batch::authenticate(&forged, &key(&header));
                assert_eq!(seal, Err(FormatError::Seal), "bit {bit}");
            }
        }
        assert!(decoded > 500, "{decoded} of them passed for headers");
    }
}

#[test]
fn later_formats_are_distinguished_from_damage() {
    let reseal = |at: usize, value: u8| {
        let (_, mut bytes, _) = encoded(Algorithm::ChaCha20Poly1305);
        bytes[at] = value;
        let crc = block::units::crc32c(&bytes[..232]);
        bytes[232..236].copy_from_slice(&crc.to_le_bytes());
        BatchHeader::decode(&bytes)
    };
    assert_eq!(reseal(8, 2), Err(FormatError::Version(2)));
    assert_eq!(reseal(8, 4), Err(FormatError::Version(4)));
    assert_eq!(reseal(8, 0), Err(FormatError::Version(0)));
    assert_eq!(reseal(10, 9), Err(FormatError::Algorithm(9)));
    assert_eq!(reseal(16, 1), Err(FormatError::Features(1)));
    assert_eq!(reseal(20, 4), Err(FormatError::Features(4)));
    assert!(reseal(12, 0xff).is_ok(), "compatible features are ignored");
    assert_eq!(reseal(11, 0x80), Err(FormatError::Range));
    assert_eq!(reseal(128, 0xff), Err(FormatError::Range), "committed beyond its first entry");
    assert_eq!(reseal(160, 0), Err(FormatError::Range), "a predecessor without an epoch");
    assert_eq!(reseal(160, 4), Err(FormatError::Range), "a predecessor of a later epoch");
    assert_eq!(reseal(200, 1), Err(FormatError::Range));
    assert_eq!(reseal(231, 1), Err(FormatError::Range));
    assert_eq!(reseal(148, 1), Err(FormatError::Range));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn decoders_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..8200), kind in 0..4) {
        let magic: &[u8] = if kind == 0 { b"SPDLRING" } else { b"SPDLBTCH" };
        if kind < 3 && bytes.len() >= 256 {
            bytes[..8].copy_from_slice(magic);
            let crc_at = if kind == 0 { 88 } else { 232 };
            let crc = block::units::crc32c(&bytes[..crc_at]);
            bytes[crc_at..crc_at + 4].copy_from_slice(&crc.to_le_bytes());
        }
        let _ = FileHeader::decode(&bytes);
        let _ = EntryRow::decode(&bytes, kind as usize * 32);
        if let Ok(header) = BatchHeader::decode(&bytes) {
            let _ = batch::verify(&header, &bytes);
            let _ = batch::authenticate(&bytes, &key(&header));
            let _ = batch::open_table(&header, &bytes, &key(&header));
        }
    }

    #[test]
    fn decoders_of_spill_files_never_panic(
        mut bytes in prop::collection::vec(any::<u8>(), 0..1000),
        row_count in 0u32..=u32::MAX, payload_bytes in 0u64..=u64::MAX, is_ours in any::<bool>(),
    ) {
        let (ours, _, table) = spill_encoded(Algorithm::ChaCha20Poly1305);
        if is_ours && bytes.len() >= 128 {
            bytes[..128].copy_from_slice(&ours.encode());
            bytes[84..88].copy_from_slice(&row_count.to_le_bytes());
            bytes[88..96].copy_from_slice(&payload_bytes.to_le_bytes());
            let crc = block::units::crc32c(&bytes[..100]);
            bytes[100..104].copy_from_slice(&crc.to_le_bytes());
        }
        if let Ok(header) = SpillHeader::decode(&bytes) {
            let _ = spill::open_table(&header, &mut bytes, &spill_key(&header));
            let _ = spill::open_table(&header, &mut table.clone(), &spill_key(&header));
        }
        let header = SpillHeader { table_checksum: block::units::crc32c(&bytes), ..ours };
        let _ = spill::open_table(&header, &mut bytes, &spill_key(&header));
        let _ = spill::open_spill_payload(&spill_rows()[0], 0, &spill_key(&header), &mut bytes);
    }

    /// Uses fields that pass every check of a header, over bytes that do not match them.
    #[test]
    fn sane_headers_over_other_bytes_never_panic(
        entry_count in 0u32..=u32::MAX, payload_bytes in 0u32..=u32::MAX, cut in 0usize..5000,
    ) {
        let (_, mut bytes, _) = encoded(Algorithm::ChaCha20Poly1305);
        bytes[144..148].copy_from_slice(&entry_count.to_le_bytes());
        bytes[152..156].copy_from_slice(&payload_bytes.to_le_bytes());
        if let Some(total) = batch::batch_bytes(entry_count as usize, payload_bytes as usize) {
            bytes[148..152].copy_from_slice(&(total as u32).to_le_bytes());
        }
        let crc = block::units::crc32c(&bytes[..232]);
        bytes[232..236].copy_from_slice(&crc.to_le_bytes());
        bytes.truncate(cut.max(256));
        if let Ok(header) = BatchHeader::decode(&bytes) {
            prop_assert!(batch::verify(&header, &bytes).is_err() || cut >= bytes.len());
            let _ = batch::open_table(&header, &bytes, &key(&header));
        }
    }
}

#[test]
fn batch_with_snapshots_sets_an_incompatible_feature() {
    let mut header = header();
    let key =
        PoolKey::new([5; KEY_BYTES]).derive(header.algorithm, &header.salt, batch::KEY_PURPOSE);
    for (kind, volume, features) in [(EntryKind::Snapshot, 0, 1), (EntryKind::VolumeRecord, 7, 0)] {
        let row = EntryRow {
            volume: VolumeId(volume),
            kind,
            start_sector: 0,
            sector_count: 0,
            payload_offset: 0,
            payload_bytes: 6,
        };
        let mut rows = [row];
        let mut buffer = IoBuffer::default();
        let payloads = [&b"nights"[..]].into_iter();
        batch::encode(&mut header, &mut rows, payloads, &key, &mut buffer).unwrap();
        // Offset 20: incompatible features, see docs/format-log.md.
        assert_eq!(buffer.as_slice()[20..24], [features, 0, 0, 0]);
        let found = BatchHeader::decode(buffer.as_slice()).unwrap();
        assert_eq!(found.has_snapshots, features == 1);
        assert_eq!(batch::open_table(&found, buffer.as_slice(), &key).unwrap(), rows);
        for wrong in [
            EntryRow { volume: VolumeId(7 - volume), ..row },
            EntryRow { sector_count: 1, ..row },
            EntryRow { start_sector: 1, ..row },
        ] {
            assert!(!wrong.is_sane(), "{wrong:?}");
        }
    }
}
