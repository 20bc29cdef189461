//! Golden bytes, round trips and damaged messages.

use super::*;
use proptest::prelude::*;
use std::fmt::Write;

fn position(epoch: u64, sequence: u64) -> Position {
    Position { epoch: Epoch(epoch), sequence }
}

fn batch(epoch: u64, sequence: u64, bytes: &'static [u8]) -> Batch {
    Batch { position: position(epoch, sequence), bytes: Bytes::from_static(bytes) }
}

fn requests() -> Vec<(&'static str, Request)> {
    let epoch = Epoch(0x15);
    let full = Request::Append {
        epoch,
        previous: position(0x14, 0x1234),
        batches: vec![batch(0x14, 0x1235, b"batch 1 "), batch(0x15, 0x1236, b"batch 2 ")],
        proven_at: Some((7, position(0x15, 0x1236))),
        is_sync: true,
        lease: Some(Lease { sent: 0x0102_0304_0506_0708, length: 3_000_000_000 }),
        configuration: 9,
        trim_lsn: Lsn(0x1010),
    };
    let empty = Request::Append {
        epoch,
        previous: position(0x14, 0x1234),
        batches: Vec::new(),
        proven_at: None,
        is_sync: false,
        lease: None,
        configuration: 9,
        trim_lsn: Lsn(0x1010),
    };
    vec![
        ("append", full),
        ("append without batches", empty),
        ("reset", Request::Reset { epoch, before: position(0x14, 0x1234) }),
        ("promise", Request::Promise { epoch }),
        ("resign", Request::Resign { epoch }),
        ("read", Request::Read { epoch, after: position(0x14, 0x1234) }),
    ]
}

fn answers() -> Vec<(&'static str, Answer)> {
    let (epoch, run) = (Epoch(0x15), 7);
    let lease = Some(Lease { sent: 0x0102_0304_0506_0708, length: 3_000_000_000 });
    vec![
        ("appended", Answer::Appended { epoch, run, written: 0x1236, synced: 0x1235, lease }),
        ("full", Answer::Full { epoch, run, written: 0x1236, lease }),
        ("superseded", Answer::Superseded { epoch, promised: Epoch(0x16) }),
        (
            "lacking",
            Answer::Lacking {
                epoch,
                run,
                sequence: 0x1234,
                may_match: position(0x13, 0x1200),
                start: 0x1100,
            },
        ),
        (
            "promised",
            Answer::Promised { epoch, run, tail: position(0x14, 0x1235), proof: Proof::Synced },
        ),
        (
            "batches",
            Answer::Batches {
                epoch,
                run,
                start: 0x1100,
                previous: position(0x14, 0x1234),
                batches: vec![batch(0x14, 0x1235, b"batch 1 ")],
            },
        ),
    ]
}

fn joined(parts: Vec<Bytes>) -> Bytes {
    Bytes::from(parts.concat())
}

/// One line for each eight bytes.
fn hex(name: &str, bytes: &[u8]) -> String {
    let mut text = format!("[{name}]\n");
    for line in bytes.chunks(8) {
        line.iter().for_each(|byte| write!(text, "{byte:02x}").expect("a string grows"));
        text.push('\n');
    }
    text
}

#[test]
fn golden_bytes_of_messages_of_version_1() {
    let mut text = String::new();
    for (name, request) in requests() {
        let bytes = joined(request.encode());
        text += &hex(name, &bytes);
        assert_eq!(Request::decode(&bytes), Ok(request));
    }
    for (name, answer) in answers() {
        let bytes = joined(answer.encode());
        text += &hex(name, &bytes);
        assert_eq!(Answer::decode(&bytes), Ok(answer));
    }
    let golden = include_str!("../../testdata/messages-v1.hex");
    if std::env::var("GOLDEN").is_ok_and(|value| value == "print") {
        println!("{text}");
    } else {
        assert_eq!(text, golden, "the bytes have changed: a new version needs a new file");
    }
}

#[test]
fn every_cut_and_every_added_byte_is_refused() {
    let all = requests().into_iter().map(|(name, one)| (name, joined(one.encode())));
    for (name, bytes) in all.chain(answers().into_iter().map(|(n, one)| (n, joined(one.encode()))))
    {
        for end in 0..bytes.len() {
            let cut = bytes.slice(..end);
            let both = (Request::decode(&cut).err(), Answer::decode(&cut).err());
            assert!(matches!(both, (Some(_), Some(_))), "{name} of {end} bytes");
        }
        let more = Bytes::from([&bytes[..], &[0]].concat());
        let refusals = [Request::decode(&more).err(), Answer::decode(&more).err()];
        assert!(refusals.contains(&Some(MessageError::Long)), "{name}: {refusals:?}");
    }
}

#[test]
fn values_out_of_range_are_refused() {
    let of = |name: &str| {
        let found = requests().into_iter().find(|(of, _)| *of == name).expect("a request");
        joined(found.1.encode()).to_vec()
    };
    let refusal = |name, at: usize, put: &[u8]| {
        let mut bytes = of(name);
        bytes[at..at + put.len()].copy_from_slice(put);
        Request::decode(&Bytes::from(bytes)).expect_err("it is refused")
    };
    let huge = (NUMBER_MAX + 1).to_le_bytes();
    assert_eq!(refusal("promise", 0, &[2]), MessageError::Version(2));
    assert_eq!(refusal("promise", 1, &[APPENDED]), MessageError::Kind(APPENDED));
    assert_eq!(refusal("promise", 2, &[HAS_LEASE as u8]), MessageError::Flags(HAS_LEASE));
    assert_eq!(refusal("promise", 4, &[1]), MessageError::Range, "batches in a promise");
    assert_eq!(refusal("promise", 8, &huge), MessageError::Range);
    assert_eq!(refusal("reset", 24, &huge), MessageError::Range);
    let longer = (LEASE_NS_MAX + 1).to_le_bytes();
    assert_eq!(refusal("append", 64, &longer), MessageError::Range, "a lease of a member's life");
    assert_eq!(refusal("append without batches", 56, &[1]), MessageError::Range, "no lease");
    assert_eq!(refusal("append", 4, &u32::MAX.to_le_bytes()), MessageError::Range);
    assert_eq!(refusal("append", 4, &[200]), MessageError::Short, "more batches than bytes");
    assert_eq!(refusal("append", 104, &u32::MAX.to_le_bytes()), MessageError::Short);
    assert_eq!(refusal("append", 104, &[0]), MessageError::Range, "a batch without bytes");
    assert_eq!(refusal("append", 108, &[1]), MessageError::Range);
}

#[test]
fn batches_share_the_memory_of_the_message() {
    let bytes = joined(requests().remove(0).1.encode());
    let Ok(Request::Append { batches, .. }) = Request::decode(&bytes) else {
        panic!("it is an append")
    };
    let memory = bytes.as_ptr_range();
    assert!(batches.iter().all(|batch| memory.contains(&batch.bytes.as_ptr())));
    let parts = Request::Append {
        epoch: Epoch(1),
        previous: Position::START,
        batches: batches.clone(),
        proven_at: None,
        is_sync: false,
        lease: None,
        configuration: 0,
        trim_lsn: Lsn::NONE,
    }
    .encode();
    assert_eq!(parts[1].as_ptr(), batches[0].bytes.as_ptr());
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, 0..=NUMBER_MAX]
}

fn any_position() -> impl Strategy<Value = Position> {
    (number(), number()).prop_map(|(epoch, sequence)| position(epoch, sequence))
}

fn any_batches() -> impl Strategy<Value = Vec<Batch>> {
    let bytes = prop::collection::vec(any::<u8>(), 1..40);
    let one = (any_position(), bytes)
        .prop_map(|(position, bytes)| Batch { position, bytes: Bytes::from(bytes) });
    prop::collection::vec(one, 0..5)
}

fn any_lease() -> impl Strategy<Value = Option<Lease>> {
    prop::option::of((any::<u64>(), 0..=LEASE_NS_MAX))
        .prop_map(|lease| lease.map(|(sent, length)| Lease { sent, length }))
}

fn any_request() -> impl Strategy<Value = Request> {
    let append = (number(), any_position(), any_batches(), any::<bool>(), (number(), number()));
    let proven_at = prop::option::of((number(), any_position()));
    prop_oneof![
        (append, proven_at, any_lease()).prop_map(
            |((epoch, previous, batches, is_sync, numbers), proven_at, lease)| {
                let (epoch, (configuration, trim_lsn)) = (Epoch(epoch), numbers);
                Request::Append {
                    epoch,
                    previous,
                    batches,
                    proven_at,
                    is_sync,
                    lease,
                    configuration,
                    trim_lsn: Lsn(trim_lsn),
                }
            }
        ),
        (number(), any_position())
            .prop_map(|(epoch, before)| Request::Reset { epoch: Epoch(epoch), before }),
        number().prop_map(|epoch| Request::Promise { epoch: Epoch(epoch) }),
        number().prop_map(|epoch| Request::Resign { epoch: Epoch(epoch) }),
        (number(), any_position())
            .prop_map(|(epoch, after)| Request::Read { epoch: Epoch(epoch), after }),
    ]
}

fn any_answer() -> impl Strategy<Value = Answer> {
    let proof = prop_oneof![Just(Proof::Nothing), Just(Proof::Synced), Just(Proof::All)];
    prop_oneof![
        (number(), number(), number(), number(), any_lease()).prop_map(
            |(epoch, run, written, synced, lease)| {
                Answer::Appended { epoch: Epoch(epoch), run, written, synced, lease }
            }
        ),
        (number(), number(), number(), any_lease()).prop_map(|(epoch, run, written, lease)| {
            Answer::Full { epoch: Epoch(epoch), run, written, lease }
        }),
        (number(), number()).prop_map(|(epoch, promised)| {
            Answer::Superseded { epoch: Epoch(epoch), promised: Epoch(promised) }
        }),
        (number(), number(), number(), any_position(), number()).prop_map(
            |(epoch, run, sequence, may_match, start)| {
                Answer::Lacking { epoch: Epoch(epoch), run, sequence, may_match, start }
            }
        ),
        (number(), number(), any_position(), proof).prop_map(|(epoch, run, tail, proof)| {
            Answer::Promised { epoch: Epoch(epoch), run, tail, proof }
        }),
        (number(), number(), number(), any_position(), any_batches()).prop_map(
            |(epoch, run, start, previous, batches)| {
                Answer::Batches { epoch: Epoch(epoch), run, start, previous, batches }
            }
        ),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn messages_decode_to_what_was_encoded(request in any_request(), answer in any_answer()) {
        let (sent, answered) = (joined(request.encode()), joined(answer.encode()));
        prop_assert_eq!(Request::decode(&sent), Ok(request));
        prop_assert_eq!(Answer::decode(&answered), Ok(answer));
        let kinds = (Answer::decode(&sent), Request::decode(&answered));
        prop_assert!(matches!(kinds, (Err(MessageError::Kind(_)), Err(MessageError::Kind(_)))));
    }

    #[test]
    fn bytes_that_decode_encode_to_the_same_bytes(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0u8..24,
        is_plain in any::<bool>(),
    ) {
        if bytes.len() >= 16 {
            bytes[..2].copy_from_slice(&[MESSAGE_VERSION, kind]);
            if is_plain {
                bytes[3..].iter_mut().step_by(2).for_each(|byte| *byte = 0);
            }
        }
        let bytes = Bytes::from(bytes);
        if let Ok(request) = Request::decode(&bytes) {
            prop_assert_eq!(joined(request.encode()), bytes.clone());
        }
        if let Ok(answer) = Answer::decode(&bytes) {
            prop_assert_eq!(joined(answer.encode()), bytes);
        }
    }
}
