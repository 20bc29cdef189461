//! Tests that spill files read back the data that was spilled, or say that it is lost.

use super::*;
use crate::sim::SimSpill;
use block::Lsn;
use block::seal::KEY_BYTES;

const VOLUME: VolumeId = VolumeId(7);

fn key() -> PoolKey {
    PoolKey::new([3; KEY_BYTES])
}

fn id(first: u64, last: u64, salt: u8) -> SpillFileId {
    SpillFileId { first_lsn: Lsn(first), last_lsn: Lsn(last), id: [salt; 16] }
}

fn seed(id: SpillFileId) -> SpillSeed {
    let algorithm = Algorithm::ChaCha20Poly1305;
    SpillSeed { pool: [1; 16], epoch: Epoch(4), algorithm, volume: VOLUME, id }
}

fn piece(start_sector: u64, sector_count: u64, source: Source) -> Piece {
    Piece { start_sector, sector_count, source }
}

fn payload(tag: u8, sectors: usize) -> Source {
    Source::Payload(Bytes::from(vec![tag; sectors * 512]))
}

fn read(source: &Source) -> Result<Bytes> {
    match source {
        Source::SpillResident(resident) => resident.read(),
        other => panic!("{other:?} needs no reading"),
    }
}

fn made(id: SpillFileId, pieces: &[Piece]) -> SimSpill {
    let mut file = SimSpill::default();
    write(&mut file, &seed(id), pieces, &key(), &read).unwrap();
    file
}

fn opened(file: &SimSpill, id: SpillFileId) -> Result<SpillLayer> {
    let reader = SpillReader { pool: [1; 16], epoch: Epoch(4), key: &key() };
    open("side".into(), Box::new(file.clone()), VOLUME, id, &reader)
}

/// Returns start, length and contents as a byte: 0 zero, 1 trim, 2 lost, 3 damaged, otherwise the
/// payload.
fn shown(pieces: &[Piece]) -> Vec<(u64, u64, u8)> {
    let tag = |piece: &Piece| match &piece.source {
        Source::Zeroes { is_trim } => u8::from(*is_trim),
        Source::Lost { .. } => 2,
        source => match read(source) {
            Ok(bytes) => {
                assert_eq!(bytes.len() as u64, piece.sector_count * 512);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                bytes[0]
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                3
            }
        },
    };
    pieces.iter().map(|piece| (piece.start_sector, piece.sector_count, tag(piece))).collect()
}

fn pieces() -> Vec<Piece> {
    vec![
        piece(0, 2, payload(10, 2)),
        piece(8, 100, Source::Zeroes { is_trim: false }),
        piece(108, 1, payload(11, 1)),
        piece(200, 1 << 30, Source::Zeroes { is_trim: true }),
        piece(1 << 31, 4, Source::Lost { lsn: Lsn(12) }),
    ]
}

#[test]
fn spilled_data_reads_back() {
    let id = id(10, 20, 9);
    let layer = opened(&made(id, &pieces()), id).unwrap();
    let found: Vec<Piece> = layer.extents.iter().collect();
    let wanted = [(0, 2, 10), (8, 100, 0), (108, 1, 11), (200, 1 << 30, 1), (1 << 31, 4, 2)];
    assert_eq!(shown(&found), wanted);
    assert!(matches!(found[4].source, Source::Lost { lsn: Lsn(12) }));
    assert_eq!((layer.weight.payload_bytes, layer.weight.memory_bytes), (3 * 512, 0));
    assert_eq!(layer.lost_sector_count, 4);
}

#[test]
fn every_flipped_bit_is_seen_and_costs_no_other_extent() {
    let id = id(10, 20, 9);
    let file = made(id, &pieces());
    let whole = opened(&file, id).unwrap();
    let wanted = shown(&whole.extents.iter().collect::<Vec<_>>());
    let len = file.0.lock().len();
    let payloads = 128..128 + 3 * 512 + 2 * 16;
    for bit in 0..len * 8 {
        file.0.lock()[bit / 8] ^= 1 << (bit % 8);
        match opened(&file, id) {
            Err(error) => {
                let is_known = matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported);
                assert!(is_known && !payloads.contains(&(bit / 8)), "bit {bit}: {error:?}");
            }
            Ok(layer) => {
                let found = shown(&layer.extents.iter().collect::<Vec<_>>());
                let differing = found.iter().zip(&wanted).filter(|(found, wanted)| found != wanted);
                let differing: Vec<_> = differing.map(|(found, _)| found.2).collect();
                assert_eq!(differing, [3], "bit {bit}: exactly one payload does not verify");
            }
        }
        file.0.lock()[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_file_that_was_cut_or_that_is_another_one_is_refused() {
    let named = id(10, 20, 9);
    let file = made(named, &pieces());
    let whole = file.0.lock().clone();
    for len in 0..whole.len() {
        file.0.lock().truncate(len);
        assert_eq!(opened(&file, named).unwrap_err().kind(), ErrorKind::Corrupt, "{len} bytes");
        file.0.lock().clone_from(&whole);
    }
    file.0.lock().push(0);
    assert_eq!(opened(&file, named).unwrap_err().kind(), ErrorKind::Corrupt);
    file.0.lock().pop();
    for other in [id(10, 21, 9), id(9, 20, 9), id(10, 20, 8)] {
        assert_eq!(opened(&file, other).unwrap_err().kind(), ErrorKind::Corrupt, "{other:?}");
    }
    let key = key();
    let kind_for = |pool, epoch, volume, key: &PoolKey| {
        let reader = SpillReader { pool, epoch, key };
        let opened = open("side".into(), Box::new(file.clone()), volume, named, &reader);
        opened.unwrap_err().kind()
    };
    assert_eq!(kind_for([2; 16], Epoch(4), VOLUME, &key), ErrorKind::Invalid);
    assert_eq!(kind_for([1; 16], Epoch(3), VOLUME, &key), ErrorKind::Fenced);
    assert_eq!(kind_for([1; 16], Epoch(4), VolumeId(8), &key), ErrorKind::Corrupt);
    let other_key = PoolKey::new([4; KEY_BYTES]);
    assert_eq!(kind_for([1; 16], Epoch(4), VOLUME, &other_key), ErrorKind::Corrupt);
}

#[test]
fn a_newer_layer_hides_an_older_one_and_merging_changes_nothing() {
    let (old, new) = (id(1, 9, 1), id(10, 20, 2));
    let bottom = made(old, &[piece(0, 16, payload(20, 16)), piece(40, 8, payload(21, 8))]);
    let top = made(
        new,
        &[
            piece(4, 4, payload(30, 4)),
            piece(12, 30, Source::Zeroes { is_trim: true }),
            piece(44, 1, Source::Lost { lsn: Lsn(15) }),
        ],
    );
    let layers = [Arc::new(opened(&bottom, old).unwrap()), Arc::new(opened(&top, new).unwrap())];
    let wanted =
        [(0, 4, 20), (4, 4, 30), (8, 4, 20), (12, 30, 1), (42, 2, 21), (44, 1, 2), (45, 3, 21)];
    assert_eq!(shown(&merge(&layers)), wanted);
    let both = id(1, 20, 3);
    let merged = opened(&made(both, &merge(&layers)), both).unwrap();
    assert_eq!(shown(&merged.extents.iter().collect::<Vec<_>>()), wanted);
    // The payload of the bottom layer that is still visible in two parts rots.
    bottom.0.lock()[128 + 5] ^= 1;
    let merged = opened(&made(both, &merge(&layers)), both).unwrap();
    let found = shown(&merged.extents.iter().collect::<Vec<_>>());
    assert_eq!((found[0], found[1], found[2]), ((0, 4, 2), (4, 4, 30), (8, 4, 2)));
    assert_eq!(found[3..], wanted[3..]);
}

#[test]
fn temporarily_unreadable_payload_is_not_lost() {
    let resident = {
        let id = id(1, 9, 1);
        let layer = opened(&made(id, &[piece(0, 1, payload(5, 1))]), id).unwrap();
        layer.extents.iter().next().unwrap()
    };
    let away = |_: &Source| Err(Error::new(ErrorKind::Io, "the disk does not answer"));
    let mut file = SimSpill::default();
    let failed = write(&mut file, &seed(id(1, 9, 2)), &[resident], &key(), &away).unwrap_err();
    assert_eq!(failed.kind(), ErrorKind::Io);
}

#[test]
fn a_missing_file_hides_everything_and_is_never_merged() {
    let [a, b, c] = [id(1, 2, 1), id(3, 4, 2), id(5, 6, 3)];
    let whole = |id| Arc::new(opened(&made(id, &[piece(0, 1, payload(9, 1))]), id).unwrap());
    let layers = [Arc::new(SpillLayer::missing(a)), whole(b), whole(c)];
    assert_eq!(cheapest_pair(&layers, |_, _| true), Some(1));
    assert_eq!(cheapest_pair(&layers[..2], |_, _| true), None);
    assert_eq!(cheapest_pair(&layers, |_, _| false), None);
    let sectors = crate::format::entry::SECTORS_MAX;
    assert_eq!(shown(&merge(&layers)), [(0, 1, 9), (1, sectors - 1, 2)]);
}
