//! The messages between an owner and the members of a log.
//!
//! Invariants:
//! - Bytes that decode are the bytes that the message encodes to.
//! - No message that decodes makes a state machine panic, whatever state it is in.

use crate::SMALL;
use block::{Epoch, Lsn, Position};
use bytes::Bytes;
use fuzz::{Outcome, Target, corpus};
use replication::{
    Answer, Candidate, Configuration, Document, Follower, Found, LogIndex, Owner, Proof, Request,
};
use uuid::Uuid;

/// Returns the golden messages, each of which follows a title in brackets.
fn golden() -> Vec<Vec<u8>> {
    let text = corpus::text("replication/quorum/testdata/messages-v1.hex");
    let parts = text.split('[').skip(1).filter_map(|part| part.split_once(']'));
    let messages: Vec<Vec<u8>> = parts.map(|(_, digits)| corpus::from_hex(digits)).collect();
    assert_eq!(messages.len(), 12, "each kind, and an append without batches");
    messages
}

/// Returns a log with two epochs whose first batches were released, around the golden positions.
fn log() -> LogIndex {
    let mut log = LogIndex::new(Position { epoch: Epoch(0x13), sequence: 0x1200 });
    let mut push = |epoch, sequences: std::ops::RangeInclusive<u64>| {
        sequences.for_each(|sequence| log.push(Position { epoch: Epoch(epoch), sequence }));
    };
    push(0x14, 0x1201..=0x1235);
    push(0x15, 0x1236..=0x1240);
    log
}

fn configuration() -> Configuration {
    let members = [1, 2, 3].map(Uuid::from_u128);
    Configuration { number: 9, members: members.into(), quorum: 2 }
}

fn take_request(request: Request) {
    let document = Document {
        page_cache: Uuid::from_u128(1),
        run: 6,
        promised: Epoch(1),
        proof: Proof::All,
        synced: 0x1210,
        lease: 0,
    };
    let found = Found {
        document,
        log: log(),
        damaged: None,
        noted: None,
        page_cache: Uuid::from_u128(1),
        has_failed: false,
    };
    let (mut follower, _) = Follower::start(found, 1000);
    for now in [1000, u64::MAX] {
        let epoch = request.epoch();
        let _ = follower.on_request(now, request.clone());
        let ask = Request::Append {
            epoch,
            previous: follower.log().tail(),
            batches: Vec::new(),
            proven_at: None,
            is_sync: true,
            lease: None,
            configuration: 9,
            trim_lsn: Lsn(0x1010),
        };
        let _ = follower.on_request(now, ask);
        assert!(follower.document().promised >= Epoch(1));
    }
}

fn take_answer(answer: &Answer) {
    let [me, member] = [1, 2].map(Uuid::from_u128);
    let log = log();
    let mut owner = Owner::new(me, answer.epoch(), configuration(), 0x1236);
    owner.on_own(0x1240, 0x1240);
    for _ in 0..2 {
        owner.on_answer(&member, answer, &log);
        assert!(owner.acknowledged() <= 0x1240 && owner.committed() <= 0x1240);
        for count_max in [0, 1, u64::MAX] {
            if let Some(sending) = owner.sending(&member, &log, count_max) {
                owner.on_sent(&member, &sending);
            }
        }
    }
    owner.on_disconnected(&member);
    let mut candidate = Candidate::new(me, answer.epoch(), configuration());
    candidate.on_answer(member, answer);
    let _ = (candidate.decide(), candidate.may_open(&log), candidate.read(log.tail(), &log));
    candidate.on_own_answer(answer, &log);
    if let Answer::Batches { start, previous, batches, .. } = answer {
        take_request(candidate.store(*start, *previous, batches.clone(), &log, Lsn(0x1010)));
    }
}

/// Puts the version and the high bits of the numbers right, which are most of what a decoder refuses.
fn repair(input: &mut [u8]) {
    if let Some(version) = input.first_mut() {
        *version = 1;
    }
    input.iter_mut().skip(3).take(1).for_each(|flags| *flags = 0);
    input.iter_mut().skip(15).step_by(8).take(8).for_each(|high| *high &= 0x3f);
}

fn decode(input: &[u8]) -> Outcome {
    let bytes = Bytes::copy_from_slice(input);
    let request = Request::decode(&bytes);
    let answer = Answer::decode(&bytes);
    match (request, answer) {
        (Ok(_), Ok(_)) => panic!("a request is no answer"),
        (Ok(request), Err(_)) => {
            assert_eq!(request.encode().concat(), input);
            take_request(request);
            Outcome::Accepted
        }
        (Err(_), Ok(answer)) => {
            assert_eq!(answer.encode().concat(), input);
            take_answer(&answer);
            Outcome::Accepted
        }
        (Err(request), Err(answer)) => Outcome::Refused(format!("{request}, {answer}")),
    }
}

#[test]
fn member_messages() {
    Target {
        name: "member_messages",
        inputs: golden(),
        repair: &|input| repair(input),
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 4096,
        allocation: SMALL,
    }
    .check();
}
