//! Golden bytes of the metadata: every key, every record and the header, with their sealing,
//! annotated by field in `testdata/map-v1*.hex`. Each version adds files; existing ones are never
//! edited.
//!
//! To print the bytes that this build writes: `SPINDLE_PRINT_GOLDEN=1 cargo test golden_metadata --
//! --nocapture`.

use super::dedup::decode_fingerprints;
use super::keys::{self, Header, Opener};
use super::layers::{Base, LayerId, LayerRecord};
use super::pages::{self, Operand, OperandKind, Run};
use super::ranges::Range;
use super::read_times;
use super::records::{self, Root, SegmentRecord};
use super::snapshots::{self, Prune};
use crate::dedup::Found;
use crate::dedup::fingerprints::{self, FrameFingerprints};
use crate::keys::KeyId;
use crate::segment::{FragmentPlace, Fragments, FrameAt, Placement, SegmentInfo, SegmentNumber};
use block::seal::{Algorithm, PoolKey};
use block::{Epoch, Lsn, VolumeId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names and lengths of fields; bytes after the last field are an error.
pub(crate) type Fields = &'static [(&'static str, usize)];

/// The sections of one golden file.
pub(crate) struct Golden {
    file: &'static str,
    sections: BTreeMap<String, Vec<u8>>,
}

impl Golden {
    pub(crate) fn new(file: &'static str, text: &str) -> Golden {
        let mut sections: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut name = String::new();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if let Some(section) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
                section.clone_into(&mut name);
                assert!(
                    sections.insert(name.clone(), Vec::new()).is_none(),
                    "{file}: {name} twice"
                );
            } else if !line.is_empty() {
                let bytes = (0..line.len()).step_by(2);
                let bytes = bytes.map(|at| u8::from_str_radix(&line[at..at + 2], 16).unwrap());
                sections.get_mut(&name).expect("bytes belong to a section").extend(bytes);
            }
        }
        Golden { file, sections }
    }

    /// Compares `written`, this build's bytes of the section, with the golden bytes, and returns
    /// the latter for decoding.
    pub(crate) fn take(&mut self, name: &str, written: &[u8], fields: Fields) -> Vec<u8> {
        if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
            println!("[{name}]");
            let mut rest = written;
            for (field, length) in fields {
                let (bytes, after) = rest.split_at(*length);
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                println!("{hex} # {field}");
                rest = after;
            }
            assert!(rest.is_empty(), "{name}: fields are missing for {rest:02x?}");
            return written.to_vec();
        }
        let golden = self.sections.remove(name).expect("the section is in the file");
        assert_eq!(written, golden, "{}: {name}", self.file);
        golden
    }

    pub(crate) fn end(self) {
        let left: Vec<_> = self.sections.keys().collect();
        assert!(left.is_empty(), "{}: nothing reads {left:?}", self.file);
    }
}

const NUMBERED: Fields = &[("family", 1), ("number", 8)];

#[test]
fn golden_metadata_keys_of_version_1() {
    let mut golden = Golden::new("keys", include_str!("../../testdata/map-v1-keys.hex"));
    golden.take("header key", keys::HEADER_KEY, &[("family", 1)]);
    golden.take("root key", keys::ROOT_KEY, &[("family", 1)]);
    let number = 0x0102_0304_0506_0708;
    for (name, key) in [
        ("layer key", keys::layer_key(LayerId(number))),
        ("live key", keys::live_key(number)),
        ("segment key", keys::segment_key(number)),
    ] {
        assert_eq!(keys::number_of(&golden.take(name, &key, NUMBERED)), Some(number));
    }
    let key = keys::volume_key(VolumeId(0x0102_0304));
    let key = golden.take("volume key", &key, &[("family", 1), ("volume", 4)]);
    assert_eq!(keys::volume_of(&key), Some(VolumeId(0x0102_0304)));
    let fields: Fields = &[("family", 1), ("layer", 8), ("page", 4)];
    let key = keys::page_key(LayerId(number), 0x0a0b_0c0d);
    let key = golden.take("page key", &key, fields);
    assert_eq!(keys::page_of(&key), Some((LayerId(number), 0x0a0b_0c0d)));
    let fields: Fields = &[("family", 1), ("layer", 8), ("LSN", 8), ("ordinal", 4)];
    let key = keys::range_key(LayerId(number), Lsn(0x1112_1314), 0x0a0b_0c0d);
    let key = golden.take("range key", &key, fields);
    assert_eq!(keys::range_of(&key), Some((LayerId(number), Lsn(0x1112_1314), 0x0a0b_0c0d)));
    golden.end();
}

fn root() -> Root {
    Root { epoch: Epoch(3), destaged: Lsn(70_000), commit_number: 12, next_segment: 0x0506 }
}

const ROOT: Fields = &[
    ("version", 1),
    ("epoch", 8),
    ("destaged LSN", 8),
    ("commit number", 8),
    ("number of the next segment", 8),
];

#[test]
fn golden_metadata_records_of_version_1() {
    let mut golden = Golden::new("records", include_str!("../../testdata/map-v1-records.hex"));
    let bytes = golden.take("root", &root().encode(), ROOT);
    assert_eq!(Root::decode(&bytes).unwrap(), root());

    let layer = LayerRecord::plain(VolumeId(0x0102_0304));
    let fields: Fields = &[("version", 1), ("volume", 4), ("parent layer: none", 8)];
    let bytes = golden.take("layer", &layer.encode(), fields);
    assert_eq!(LayerRecord::decode(LayerId(9), &bytes).unwrap(), layer);

    let range = Range { lsn: Lsn(8), ordinal: 2, first_page: 0x0102, last_page: 0x0a0b_0c0d };
    let fields: Fields = &[("version", 1), ("first page", 4), ("last page", 4)];
    let bytes = golden.take("range", &range.encode(), fields);
    assert_eq!(Range::decode(LayerId(9), Lsn(8), 2, &bytes).unwrap(), range);

    let fields: Fields = &[
        ("version", 1),
        ("epoch", 8),
        ("id", 16),
        ("cipher", 1),
        ("object bytes", 4),
        ("frame count", 4),
        ("block count", 4),
    ];
    for (name, algorithm) in [
        ("segment, ChaCha20-Poly1305", Algorithm::ChaCha20Poly1305),
        ("segment, AES-256-GCM", Algorithm::Aes256Gcm),
    ] {
        let info = SegmentInfo {
            number: SegmentNumber(8),
            epoch: Epoch(2),
            id: *b"0123456789abcdef",
            algorithm,
            key: KeyId::POOL,
            object_bytes: 1_000_000,
            frame_count: 99,
        };
        let record = SegmentRecord { info, placement: Placement::Object, block_count: 800 };
        let bytes = golden.take(name, &record.encode(), fields);
        let read = SegmentRecord::decode(8, &bytes).unwrap();
        assert_eq!((read.info, read.block_count), (record.info, record.block_count));
    }

    let fields: Fields = &[("version", 1), ("blocks", 4)];
    let bytes = golden.take("live blocks", &records::encode_live(77_000), fields);
    assert_eq!(records::decode_live(8, &bytes).unwrap(), 77_000);

    let (delta, fields) = delta();
    check_operand(&mut golden, "operand", &delta, fields);
    let (image, fields) = image();
    check_operand(&mut golden, "image", &image, fields);
    golden.end();
}

fn check_operand(golden: &mut Golden, name: &str, operand: &Operand, fields: Fields) {
    let mut bytes = Vec::new();
    pages::encode(operand.lsn, operand.kind, &operand.runs, &mut bytes);
    let bytes = golden.take(name, &bytes, fields);
    assert_eq!(pages::decode(&bytes).unwrap(), *operand, "{name}");
}

fn run(segment: u64, frame_index: u32, offset: u32, first: u8, last: u8, within: u8) -> Run {
    Run { segment, frame_index, offset, sealed_bytes: 5000, first, last, within }
}

/// A frame in a segment, the one that follows it, a hole, and a frame of a lower segment.
fn delta() -> (Operand, Fields) {
    let runs = vec![
        run(300, 17, 70_000, 4, 7, 2),
        run(300, 18, 75_000, 8, 15, 0),
        Run::hole(16, 31),
        run(40, 2, 96, 255, 255, 0),
    ];
    let fields: Fields = &[
        ("version", 1),
        ("kind: delta", 1),
        ("LSN", 3),
        ("number of runs", 1),
        ("blocks before the first run", 1),
        ("4 blocks, mapped", 1),
        ("segment", 2),
        ("frame index", 1),
        ("offset", 3),
        ("block within the frame", 1),
        ("bytes of the frame", 2),
        ("blocks before the second run", 1),
        ("8 blocks, mapped, the next frame", 1),
        ("bytes of the frame", 2),
        ("blocks before the hole", 1),
        ("16 blocks, not mapped", 1),
        ("blocks before the last run", 2),
        ("1 block, mapped", 1),
        ("segment, from the second run's", 2),
        ("frame index, likewise", 1),
        ("offset, likewise", 3),
        ("block within the frame", 1),
        ("bytes of the frame", 2),
    ];
    (Operand { lsn: Lsn(70_000), kind: OperandKind::Delta { keeps: false }, runs }, fields)
}

fn image() -> (Operand, Fields) {
    let runs = vec![run(7, 0, 96, 0, 15, 0)];
    let fields: Fields = &[
        ("version", 1),
        ("kind: image", 1),
        ("LSN", 3),
        ("number of runs", 1),
        ("blocks before the run", 1),
        ("16 blocks, mapped", 1),
        ("segment", 1),
        ("frame index", 1),
        ("offset", 2),
        ("block within the frame", 1),
        ("bytes of the frame", 2),
    ];
    (Operand { lsn: Lsn(69_000), kind: OperandKind::Image { copy: Lsn::NONE }, runs }, fields)
}

#[test]
fn golden_metadata_of_snapshots() {
    let text = include_str!("../../testdata/map-v1-snapshots.hex");
    let mut golden = Golden::new("snapshots", text);
    let number = 0x0102_0304_0506_0708;
    let fields: Fields = &[("family", 1), ("layer", 8), ("page", 4), ("LSN", 8)];
    let key = keys::copy_key(LayerId(number), 0x0a0b_0c0d, Lsn(0x1112_1314));
    let key = golden.take("copy key", &key, fields);
    assert_eq!(keys::copy_of(&key), Some((LayerId(number), 0x0a0b_0c0d, Lsn(0x1112_1314))));
    let fields: Fields = &[("family", 1), ("layer", 8), ("LSN", 8)];
    let key = keys::snapshot_key(LayerId(number), Lsn(0x1112_1314));
    let key = golden.take("snapshot key", &key, fields);
    assert_eq!(keys::snapshot_of(&key), Some((LayerId(number), Lsn(0x1112_1314))));
    let key = golden.take("prune key", &keys::prune_key(LayerId(number)), NUMBERED);
    assert_eq!(keys::number_of(&key), Some(number));

    let fields: Fields = &[("family", 1), ("layer", 8), ("page", 4)];
    let key = keys::kept_key(LayerId(number), 0x0a0b_0c0d);
    let key = golden.take("kept key", &key, fields);
    assert_eq!(keys::page_of(&key), Some((LayerId(number), 0x0a0b_0c0d)));

    let fields: Fields = &[("version", 1), ("the daemon's record", 7)];
    let bytes = golden.take("snapshot", &snapshots::encode_snapshot(b"nightly"), fields);
    let record = snapshots::decode_snapshot(LayerId(1), Lsn(2), &bytes).unwrap();
    assert_eq!(record, b"nightly".as_slice());
    let prune = Prune { next_page: 0x0102_0304, is_again: true, is_kept: true };
    let fields: Fields = &[("version", 1), ("next page", 4), ("once more; copies are done", 1)];
    let bytes = golden.take("prune", &prune.encode(), fields);
    assert_eq!(Prune::decode(LayerId(1), &bytes).unwrap(), prune);

    let runs = vec![run(7, 0, 96, 0, 15, 0)];
    let keeping =
        Operand { lsn: Lsn(70_000), kind: OperandKind::Delta { keeps: true }, runs: runs.clone() };
    let fields: Fields = &[
        ("version", 1),
        ("kind: delta that keeps", 1),
        ("LSN", 3),
        ("number of runs", 1),
        ("the run, as in an image", 9),
    ];
    check_operand(&mut golden, "keeping operand", &keeping, fields);
    let after = Operand { lsn: Lsn(70_000), kind: OperandKind::Image { copy: Lsn(300) }, runs };
    let fields: Fields = &[
        ("version", 1),
        ("kind: image after a copy", 1),
        ("LSN", 3),
        ("LSN of the copy", 2),
        ("number of runs", 1),
        ("the run, as in an image", 9),
    ];
    check_operand(&mut golden, "image after a copy", &after, fields);
    let header = Header::with_salt(Algorithm::ChaCha20Poly1305, *b"salt of metadata");
    let written = header.with_snapshots();
    let header = Header::decode(&golden.take("header", written.bytes(), HEADER)).unwrap();
    assert!(header.has_snapshots() && !Header::new(Algorithm::Aes256Gcm).has_snapshots());
    golden.end();
}

const HEADER: Fields = &[
    ("magic", 4),
    ("version", 2),
    ("cipher", 1),
    ("zero", 1),
    ("compatible features", 4),
    ("read-only compatible features", 4),
    ("incompatible features", 4),
    ("salt", 16),
];

#[test]
fn golden_metadata_of_layers() {
    let mut golden = Golden::new("layers", include_str!("../../testdata/map-v1-layers.hex"));
    let layer = LayerId(0x0102_0304).next().unwrap();
    let base = Base { lsn: Lsn(0x1112_1314), next_page: 0x0a0b_0c0d, is_promoted: true };
    let record = LayerRecord {
        volume: VolumeId(0x0102_0304),
        parent: Some(LayerId(0x2122_2324_2526_2728)),
        base: Some(base),
        since: Lsn(0x3132_3334),
        is_former: false,
    };
    let fields: Fields = &[
        ("version", 1),
        ("volume", 4),
        ("parent", 8),
        ("LSN of the base", 8),
        ("since", 8),
        ("promoted up to this page", 4),
        ("being promoted", 1),
    ];
    let bytes = golden.take("layer", &record.encode(), fields);
    assert_eq!(LayerRecord::decode(layer, &bytes).unwrap(), record);
    let former = LayerRecord { is_former: true, ..LayerRecord::plain(VolumeId(0x0102_0304)) };
    let fields: Fields = &[("version", 1), ("volume", 4), ("none", 28), ("former", 1)];
    let bytes = golden.take("former layer", &former.encode(), fields);
    assert_eq!(LayerRecord::decode(LayerId(0x0102_0304), &bytes).unwrap(), former);
    let header = Header::with_salt(Algorithm::Aes256Gcm, *b"salt of metadata");
    let header = header.with_snapshots().with_bases();
    let bytes = golden.take("header", header.bytes(), HEADER);
    let found = Header::decode(&bytes).unwrap();
    assert!(found.has_snapshots() && found.has_bases());
    golden.end();
}

#[test]
fn golden_metadata_of_volume_keys() {
    let text = include_str!("../../testdata/map-v1-volume-keys.hex");
    let mut golden = Golden::new("volume keys", text);
    let info = SegmentInfo {
        number: SegmentNumber(8),
        epoch: Epoch(2),
        id: *b"0123456789abcdef",
        algorithm: Algorithm::Aes256Gcm,
        key: KeyId(0x0102_0304),
        object_bytes: 1_000_000,
        frame_count: 99,
    };
    let fields: Fields = &[
        ("version", 1),
        ("epoch", 8),
        ("id", 16),
        ("cipher", 1),
        ("object bytes", 4),
        ("frame count", 4),
        ("block count", 4),
        ("volume of the key", 4),
    ];
    let record = SegmentRecord { info, placement: Placement::Object, block_count: 800 };
    let bytes = golden.take("segment", &record.encode(), fields);
    let read = SegmentRecord::decode(8, &bytes).unwrap();
    assert_eq!((read.info, read.block_count), (record.info, record.block_count));
    for end in 0..bytes.len() {
        assert!(SegmentRecord::decode(8, &bytes[..end]).is_err(), "cut at {end}");
    }
    let mut of_pool = bytes.clone();
    of_pool[38..].fill(0);
    assert!(SegmentRecord::decode(8, &of_pool).is_err(), "the pool's key has a version of its own");
    let header = Header::with_salt(Algorithm::Aes256Gcm, *b"salt of metadata").with_volume_keys();
    let found = Header::decode(&golden.take("header", header.bytes(), HEADER)).unwrap();
    assert!(found.has_volume_keys() && !found.has_bases() && !found.has_snapshots());
    golden.end();
}

#[test]
fn golden_metadata_of_fragments() {
    let text = include_str!("../../testdata/map-v1-fragments.hex");
    let mut golden = Golden::new("fragments", text);
    let info = SegmentInfo {
        number: SegmentNumber(8),
        epoch: Epoch(2),
        id: *b"0123456789abcdef",
        algorithm: Algorithm::Aes256Gcm,
        key: KeyId::POOL,
        object_bytes: 1_000_000,
        frame_count: 99,
    };
    check_coded(&mut golden, info, false);
    let header = Header::with_salt(Algorithm::Aes256Gcm, *b"salt of metadata").with_fragments();
    let found = Header::decode(&golden.take("header", header.bytes(), HEADER)).unwrap();
    assert!(found.has_fragments() && !found.has_dedup());
    golden.end();
}

/// Compares the record of a segment in fragments.
fn check_coded(golden: &mut Golden, info: SegmentInfo, is_copied: bool) {
    let fragments = Fragments {
        data: 2,
        parity: 1,
        codec: 2,
        ends: vec![500_000, 1_000_000],
        places: vec![
            FragmentPlace { store: 0x0102_0304, generation: 5 },
            FragmentPlace { store: Fragments::NOWHERE, generation: 1 },
            FragmentPlace { store: 7, generation: 6 },
        ],
        is_copied,
    };
    let fields: Fields = &[
        ("version", 1),
        ("epoch", 8),
        ("id", 16),
        ("cipher", 1),
        ("object bytes", 4),
        ("frame count", 4),
        ("block count", 4),
        ("volume of the key", 4),
        ("data fragments", 1),
        ("parity fragments", 1),
        ("codec", 1),
        ("end of piece 0", 4),
        ("end of piece 1", 4),
        ("store of fragment 0", 4),
        ("generation of fragment 0", 8),
        ("store of fragment 1", 4),
        ("generation of fragment 1", 8),
        ("store of fragment 2", 4),
        ("generation of fragment 2", 8),
    ];
    let placement = Placement::Fragments(Arc::new(fragments.clone()));
    let record = SegmentRecord { info, placement, block_count: 800 };
    let bytes = golden.take("segment", &record.encode(), fields);
    let read = SegmentRecord::decode(8, &bytes).unwrap();
    let Placement::Fragments(found) = &read.placement else { panic!("{read:?}") };
    assert_eq!((read.info, &**found), (info, &fragments));
}

#[test]
fn golden_metadata_of_tiers() {
    let text = include_str!("../../testdata/map-v1-tiers.hex");
    let mut golden = Golden::new("tiers", text);
    let info = SegmentInfo {
        number: SegmentNumber(8),
        epoch: Epoch(2),
        id: *b"0123456789abcdef",
        algorithm: Algorithm::Aes256Gcm,
        key: KeyId::POOL,
        object_bytes: 1_000_000,
        frame_count: 99,
    };
    check_coded(&mut golden, info, true);
    let fields: Fields = &[("family", 1), ("group", 8)];
    let key = keys::read_times_key(0x0102_0304_0506_0708);
    let key = golden.take("read times key", &key, fields);
    assert_eq!(keys::number_of(&key), Some(0x0102_0304_0506_0708));
    let mut times = [0; read_times::GROUP_SEGMENTS];
    (times[0], times[255]) = (0x0102_0304, 5);
    let fields: Fields =
        &[("version", 1), ("place", 1), ("seconds", 4), ("place", 1), ("seconds", 4)];
    let bytes = golden.take("read times", &read_times::encode_times(&times), fields);
    assert_eq!(read_times::decode_times(&bytes), Some(times));
    golden.take("open time key", keys::OPEN_TIME_KEY, &[("family", 1)]);
    let seconds = 0x0102_0304_0506_0708;
    let fields: Fields = &[("version", 1), ("seconds", 8)];
    let bytes = golden.take("open time", &read_times::encode_open_time(seconds), fields);
    assert_eq!(read_times::decode_open_time(&bytes), Some(seconds));
    let header = Header::with_salt(Algorithm::Aes256Gcm, *b"salt of metadata");
    let header = header.with_fragments().with_tiers();
    let found = Header::decode(&golden.take("header", header.bytes(), HEADER)).unwrap();
    assert!(found.has_tiers() && found.has_fragments() && !found.has_dedup());
    golden.end();
}

#[test]
fn golden_metadata_of_dedup() {
    let text = include_str!("../../testdata/map-v1-dedup.hex");
    let mut golden = Golden::new("dedup", text);
    let key = keys::back_reference_key(8, LayerId(9), 42);
    let fields: Fields = &[("family", 1), ("segment", 8), ("layer", 8), ("page", 4)];
    let bytes = golden.take("back-reference key", &key, fields);
    assert_eq!(keys::back_reference_of(&bytes), Some((8, LayerId(9), 42)));
    golden.take("back-reference", &[super::dedup::BACK_REFERENCE_VERSION], &[("version", 1)]);
    let fields: Fields = &[("family", 1), ("segment", 8)];
    golden.take("fingerprints key", &keys::fingerprints_key(8), fields);
    let frame = |frame_index, offset, fingerprints: &[u64]| FrameFingerprints {
        at: FrameAt { frame_index, offset, sealed_bytes: 0x1234 },
        fingerprints: fingerprints.to_vec(),
    };
    let frames = [frame(0, 96, &[1, 0x0102_0304_0506_0708]), frame(2, 0x9000, &[u64::MAX])];
    let fields: Fields = &[
        ("version", 1),
        ("frame", 1),
        ("offset", 1),
        ("sealed bytes", 2),
        ("blocks", 1),
        ("fingerprint", 8),
        ("fingerprint", 8),
        ("frame, from the next", 1),
        ("offset, from the end", 3),
        ("sealed bytes", 2),
        ("blocks", 1),
        ("fingerprint", 8),
    ];
    let bytes = golden.take("fingerprints", &fingerprints::encode(&frames), fields);
    assert_eq!(decode_fingerprints(8, &bytes).unwrap(), frames);
    let cut = decode_fingerprints(7, &bytes[..bytes.len() - 1]).unwrap_err();
    assert!(cut.to_string().contains("fingerprints of segment 7"), "{cut}");
    let volume = VolumeId(7);
    golden.take("found key", &keys::found_key(volume), &[("family", 1), ("volume", 4)]);
    let found = Found { block_count: 1000, duplicate_count: 700 };
    let fields: Fields = &[("version", 1), ("blocks", 8), ("duplicates", 8)];
    let bytes = golden.take("found", &super::dedup::encode_found(&found), fields);
    assert_eq!(super::dedup::decode_found(volume, &bytes).unwrap(), found);
    for end in 0..bytes.len() {
        assert!(super::dedup::decode_found(volume, &bytes[..end]).is_err(), "cut at {end}");
    }
    let header = Header::with_salt(Algorithm::Aes256Gcm, *b"salt of metadata").with_dedup();
    let read = Header::decode(&golden.take("header", header.bytes(), HEADER)).unwrap();
    assert!(read.has_dedup() && !read.has_volume_keys() && !read.has_snapshots());
    golden.end();
}

#[test]
fn golden_metadata_sealed_of_version_1() {
    for (name, text, algorithm) in [
        ("chacha", include_str!("../../testdata/map-v1-chacha.hex"), Algorithm::ChaCha20Poly1305),
        ("aes", include_str!("../../testdata/map-v1-aes.hex"), Algorithm::Aes256Gcm),
    ] {
        println!("GOLDEN {name}");
        let mut golden = Golden::new(name, text);
        let written = Header::with_salt(algorithm, *b"salt of metadata");
        let header = Header::decode(&golden.take("header", written.bytes(), HEADER)).unwrap();
        let opener = Opener::new(header, &PoolKey::new([7; 32]));
        let mut sealer = opener.sealer_with(*b"8 random");

        let key = keys::ROOT_KEY;
        let fields: Fields =
            &[("version", 1), ("length", 1), ("nonce", 12), ("root", 33), ("tag", 16)];
        let value = golden.take("root value", &sealer.seal(key, &root().encode()), fields);
        assert_eq!(Root::decode(&opener.open_one(key, &value).unwrap()).unwrap(), root());

        // A page: an image and the changes of a later window, one sealed record each.
        let key = keys::page_key(LayerId(9), 42);
        let operands = [image().0, delta().0];
        let mut value = Vec::new();
        for operand in &operands {
            let mut plain = Vec::new();
            pages::encode(operand.lsn, operand.kind, &operand.runs, &mut plain);
            value.extend(sealer.seal(&key, &plain));
        }
        let fields: Fields = &[
            ("version", 1),
            ("length", 1),
            ("nonce", 12),
            ("image", 15),
            ("tag", 16),
            ("version", 1),
            ("length", 1),
            ("nonce", 12),
            ("operand", 35),
            ("tag", 16),
        ];
        let value = golden.take("page value", &value, fields);
        let mut found = Vec::new();
        let opened = opener.open_all(&key, &value, |plain| {
            found.push(pages::decode(plain).unwrap());
            Ok(())
        });
        opened.unwrap();
        assert_eq!(found, operands);

        let key = keys::volume_key(VolumeId(9));
        let fields: Fields =
            &[("version", 1), ("length", 1), ("nonce", 12), ("volume record", 13), ("tag", 16)];
        let value = golden.take("volume value", &sealer.seal(&key, b"volume record"), fields);
        assert_eq!(opener.open_one(&key, &value).unwrap(), b"volume record");
        golden.end();
    }
}
