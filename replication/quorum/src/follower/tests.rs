//! The rules of a member, one at a time. The model explores their combinations.

use super::*;
use bytes::Bytes;

const CACHE: Uuid = Uuid::from_u128(1);
const FRESH: Document = Document {
    page_cache: CACHE,
    run: 0,
    promised: Epoch(0),
    proof: Proof::All,
    synced: 0,
    lease: 0,
};

fn found(document: Document, log: LogIndex) -> Found {
    Found { document, log, damaged: None, noted: None, page_cache: CACHE, has_failed: false }
}

fn position(epoch: u64, sequence: u64) -> Position {
    Position { epoch: Epoch(epoch), sequence }
}

fn append(epoch: u64, previous: Position, positions: &[Position]) -> Request {
    let batch = |position: &Position| Batch { position: *position, bytes: Bytes::new() };
    Request::Append {
        epoch: Epoch(epoch),
        previous,
        batches: positions.iter().map(batch).collect(),
        proven_at: None,
        is_sync: true,
        lease: None,
        configuration: 1,
        trim_lsn: Lsn::NONE,
    }
}

fn follower() -> Follower {
    let log = LogIndex::new(Position::START);
    let (mut follower, effects) = Follower::start(found(FRESH, log), 0);
    assert_eq!(effects, [Effect::Sync, Effect::Store(Document { run: 1, ..FRESH })]);
    let effects =
        follower.on_request(0, append(2, Position::START, &[position(2, 1), position(2, 2)]));
    assert_eq!(effects.len(), 4, "promise, write, sync, answer: {effects:?}");
    follower
}

#[test]
fn batches_that_do_not_follow_each_other_change_nothing() {
    let first = follower();
    let wrong = [
        append(3, position(2, 2), &[position(3, 4)]),
        append(3, position(2, 2), &[position(1, 3)]),
        append(3, position(2, 2), &[position(4, 3)]),
        append(3, position(2, 2), &[position(3, 3), position(2, 4)]),
        append(3, position(2, u64::MAX), &[position(3, 0)]),
    ];
    for request in wrong {
        let mut follower = first.clone();
        assert_eq!(follower.on_request(0, request), Vec::new());
        assert_eq!(follower, first);
    }
}

#[test]
fn replaced_suffix_lowers_the_synced_position_before_it_is_cut() {
    let mut follower = follower();
    let noted = follower.on_tick();
    assert!(matches!(noted, Some(Effect::Store(Document { synced: 2, .. }))), "{noted:?}");
    assert_eq!(follower.on_tick(), None);
    let effects = follower.on_request(0, append(3, position(2, 1), &[position(3, 2)]));
    let stored = |effect: &Effect| match effect {
        Effect::Store(document) => Some(document.synced),
        _ => None,
    };
    let cut = effects.iter().position(|effect| *effect == Effect::Cut(1)).unwrap();
    assert_eq!(effects[..cut].iter().filter_map(stored).next_back(), Some(1));
    assert_eq!(follower.log().tail(), position(3, 2));
}

#[test]
fn damaged_log_proves_nothing_and_another_page_cache_what_was_synced() {
    let mut follower = follower();
    let Some(Effect::Store(stored)) = follower.on_tick() else { panic!("it has synced") };
    let mut log = LogIndex::new(Position::START);
    log.push(position(2, 1));
    let proof = |log: &LogIndex, cache: u128, damaged: Option<u64>| {
        let page_cache = Uuid::from_u128(cache);
        let found = Found { damaged, page_cache, ..found(stored, log.clone()) };
        Follower::start(found, 0).0.document().proof
    };
    assert_eq!(proof(&log, 1, None), Proof::Nothing, "it ends below what was synced");
    assert_eq!(proof(&log, 2, None), Proof::Nothing);
    log.push(position(2, 2));
    assert_eq!(proof(&log, 1, None), Proof::All);
    assert_eq!(proof(&log, 1, Some(3)), Proof::Nothing, "a whole batch was there");
    assert_eq!(proof(&log, 2, Some(3)), Proof::Synced, "a torn write is no damage");
    assert_eq!(proof(&log, 2, Some(2)), Proof::Nothing, "it was on stable storage");
}

#[test]
fn failed_disk_leaves_the_proof_of_what_was_synced() {
    let mut follower = follower();
    let Some(Effect::Store(stored)) = follower.on_tick() else { panic!("it has synced") };
    let failed = follower.on_failure(stored);
    assert_eq!(failed, Document { proof: Proof::Synced, ..stored });
    let log = follower.log().clone();
    let proof = |document, has_failed| {
        let found = Found { noted: Some(2), has_failed, ..found(document, log.clone()) };
        Follower::start(found, 0).0.document().proof
    };
    assert_eq!(proof(stored, false), Proof::All);
    assert_eq!(proof(failed, false), Proof::Synced, "it failed as a member");
    assert_eq!(proof(stored, true), Proof::Synced, "it failed as the owner");
    follower.on_damage(1);
    assert_eq!(follower.on_failure(stored).proof, Proof::Nothing, "a failure proves no more");
}

#[test]
fn member_that_never_ran_lacks_nothing_in_any_page_cache() {
    let page_cache = Uuid::from_u128(2);
    let proof = |document| {
        let found = Found { page_cache, ..found(document, LogIndex::new(Position::START)) };
        Follower::start(found, 0).0.document().proof
    };
    assert_eq!(proof(FRESH), Proof::All);
    assert_eq!(proof(Document { run: 1, ..FRESH }), Proof::Synced);
}

#[test]
fn batches_are_released_as_far_as_they_are_the_owners() {
    let mut follower = follower(); // batches 1 and 2 of epoch 2
    let with_trim = |previous, positions: &[Position]| {
        let mut request = append(3, previous, positions);
        if let Request::Append { trim_lsn, .. } = &mut request {
            *trim_lsn = Lsn(70);
        }
        request
    };
    let released = |effects: &[Effect]| {
        effects.iter().find_map(|effect| match effect {
            Effect::Release { trim_lsn, last } => Some((*trim_lsn, *last)),
            _ => None,
        })
    };
    // Batch 2 is that of an owner whose entries may have been others.
    let effects = follower.on_request(0, with_trim(position(2, 1), &[]));
    assert_eq!(released(&effects), Some((Lsn(70), 1)));
    let effects = follower.on_request(0, with_trim(position(3, 2), &[]));
    assert_eq!(released(&effects), None, "the logs differ, or the member lacks it: {effects:?}");
    let effects = follower.on_request(0, with_trim(position(2, 1), &[position(3, 2)]));
    let at = |wanted: &dyn Fn(&Effect) -> bool| effects.iter().position(wanted).unwrap();
    let [cut, release, write] = [
        at(&|effect| *effect == Effect::Cut(1)),
        at(&|effect| *effect == Effect::Release { trim_lsn: Lsn(70), last: 1 }),
        at(&|effect| matches!(effect, Effect::Write(_))),
    ];
    assert!(cut < release && release < write, "{effects:?}");
    let effects = follower.on_request(0, append(3, position(3, 2), &[]));
    assert_eq!(released(&effects), None, "nothing is in the store");
}

#[test]
fn full_log_gives_no_proof_and_answers_for_what_it_has() {
    let mut follower = follower();
    follower.on_damage(2);
    let stored = *follower.document();
    let mut request = append(2, position(2, 1), &[position(2, 2), position(2, 3)]);
    if let Request::Append { proven_at, .. } = &mut request {
        *proven_at = Some((stored.run, position(2, 3)));
    }
    let effects = follower.on_request(0, request.clone());
    assert_eq!(follower.document().proof, Proof::All, "unless there is no room: {effects:?}");
    let (epoch, run) = (Epoch(2), stored.run);
    let full = Answer::Full { epoch, run, written: 2, lease: None };
    assert_eq!(follower.on_full(stored, 2, effects), [Effect::Sync, Effect::Answer(full)]);
    assert_eq!((follower.log().tail(), follower.document()), (position(2, 2), &stored));
    // The batch that had no room comes again.
    let effects = follower.on_request(0, request);
    let appended = Answer::Appended { epoch, run, written: 3, synced: 3, lease: None };
    assert_eq!(effects.last(), Some(&Effect::Answer(appended)));
    assert_eq!((follower.log().tail(), follower.document().proof), (position(2, 3), Proof::All));
}

#[test]
fn damaged_batch_ends_the_log_and_the_run() {
    let mut follower = follower();
    let effects = follower.on_damage(2);
    let stored = *follower.document();
    assert_eq!((stored.proof, stored.run, stored.synced), (Proof::Nothing, 2, 0));
    assert_eq!(effects, [Effect::Store(stored), Effect::Cut(1)]);
    assert_eq!(follower.log().tail(), position(2, 1));
    for beyond in [0, 2, u64::MAX] {
        assert_eq!(follower.on_damage(beyond), Vec::new());
    }
    // A proof that was under way for the run before does not count.
    let prove = |follower: &mut Follower, run| {
        let Request::Append {
            epoch,
            previous,
            batches,
            is_sync,
            lease,
            configuration,
            trim_lsn,
            ..
        } = append(2, position(2, 1), &[position(2, 2)])
        else {
            panic!("it is an append");
        };
        let proven_at = Some((run, position(2, 2)));
        let request = Request::Append {
            epoch,
            previous,
            batches,
            proven_at,
            is_sync,
            lease,
            configuration,
            trim_lsn,
        };
        follower.on_request(0, request);
        follower.document().proof
    };
    assert_eq!(prove(&mut follower, 1), Proof::Nothing);
    assert_eq!(prove(&mut follower, 2), Proof::All);
}

#[test]
fn reset_drops_a_log_that_lacks_its_position_and_no_other() {
    let first = follower();
    let reset = |before| Request::Reset { epoch: Epoch(4), before };
    for late in [Position::START, position(2, 1), position(2, 2)] {
        let mut follower = first.clone();
        let effects = follower.on_request(0, reset(late));
        assert_eq!(effects.len(), 2, "promise and answer: {effects:?}");
        assert_eq!((follower.log(), follower.document().run), (first.log(), 1));
    }
    for before in [position(3, 1), position(3, 2), position(2, 9)] {
        let mut follower = first.clone();
        let effects = follower.on_request(0, reset(before));
        assert_eq!(follower.log(), &LogIndex::new(before));
        let stored = *follower.document();
        assert_eq!((stored.proof, stored.synced), (Proof::All, before.sequence));
        assert_eq!(effects[1..3], [Effect::Store(stored), Effect::Reset(before)]);
        assert!(
            matches!(effects[3], Effect::Answer(Answer::Appended { run: 2, written, .. })
                if written == before.sequence),
            "{effects:?}"
        );
    }
    assert_eq!(first.clone().on_request(0, reset(position(5, 9))), Vec::new());
}

#[test]
fn member_goes_alone_only_with_proof_and_where_every_batch_is_on_all() {
    let [me, other, third] = [1, 2, 3].map(Uuid::from_u128);
    let two = Configuration { number: 1, members: [me, other].into(), quorum: 2 };
    let mut follower = follower();
    assert!(follower.may_go_alone(&me, &two));
    assert!(!follower.may_go_alone(&third, &two), "it is no member");
    let three = Configuration { members: [me, other, third].into(), ..two.clone() };
    assert!(!follower.may_go_alone(&me, &three), "the others may have acknowledged");
    assert!(follower.may_go_alone(&me, &Configuration { quorum: 3, ..three }));
    follower.on_damage(1);
    assert!(!follower.may_go_alone(&me, &two));
}

#[test]
fn promise_waits_for_the_longest_lease_also_after_a_start() {
    let mut follower = follower();
    let lease = |length| {
        let request = append(2, position(2, 2), &[]);
        let Request::Append { epoch, previous, batches, proven_at, is_sync, trim_lsn, .. } =
            request
        else {
            panic!("it is an append");
        };
        let lease = Some(Lease { sent: 7, length });
        Request::Append {
            epoch,
            previous,
            batches,
            proven_at,
            is_sync,
            lease,
            configuration: 1,
            trim_lsn,
        }
    };
    let effects = follower.on_request(1000, lease(300));
    assert!(matches!(effects[0], Effect::Store(Document { lease: 300, .. })), "{effects:?}");
    assert_eq!(follower.on_request(1000, lease(200)).len(), 2, "a shorter one is not stored");
    assert_eq!(follower.on_request(1000, lease(LEASE_NS_MAX + 1)), Vec::new());
    let promise = Request::Promise { epoch: Epoch(3) };
    let is_answered = |effects: Vec<Effect>| {
        effects.iter().any(|effect| matches!(effect, Effect::Answer(Answer::Promised { .. })))
    };
    assert!(!is_answered(follower.on_request(1302, promise.clone())), "the margin of clocks");
    assert!(is_answered(follower.on_request(1303, promise.clone())));
    let stored = *follower.document();
    let (mut follower, _) = Follower::start(found(stored, follower.log().clone()), 5);
    assert!(!is_answered(follower.on_request(307, promise.clone())));
    assert!(is_answered(follower.on_request(308, promise)));
}

#[test]
fn owner_that_resigns_need_not_be_waited_for() {
    let mut follower = follower();
    let lease = Some(Lease { sent: 1, length: 300 });
    let append = |epoch| Request::Append {
        epoch: Epoch(epoch),
        previous: position(1, 1),
        batches: Vec::new(),
        proven_at: None,
        is_sync: false,
        lease,
        configuration: 0,
        trim_lsn: Lsn::NONE,
    };
    let is_promised = |effects: Vec<Effect>| {
        effects.iter().any(|effect| matches!(effect, Effect::Answer(Answer::Promised { .. })))
    };
    follower.on_request(1000, append(3));
    assert_eq!(follower.on_request(1001, Request::Resign { epoch: Epoch(4) }), Vec::new());
    let promise = |epoch| Request::Promise { epoch: Epoch(epoch) };
    assert!(!is_promised(follower.clone().on_request(1002, promise(4))), "another owner's lease");
    assert_eq!(follower.on_request(1001, Request::Resign { epoch: Epoch(3) }), Vec::new());
    assert!(is_promised(follower.clone().on_request(1002, promise(4))));
    follower.on_request(1003, append(3));
    assert!(!is_promised(follower.on_request(1004, promise(4))), "a request that is late");
    follower.on_request(1004, Request::Resign { epoch: Epoch(2) });
    assert!(!is_promised(follower.on_request(1004, promise(4))), "of an earlier owner");
    // The successor was faster than the message.
    follower.on_request(1005, Request::Resign { epoch: Epoch(3) });
    assert!(is_promised(follower.on_request(1005, promise(4))));
}

#[test]
fn owner_on_the_same_node_writes_until_a_later_promise() {
    let mut follower = follower();
    follower.on_damage(2);
    assert!(follower.on_own_written(position(2, 2)) && follower.on_own_written(position(2, 3)));
    follower.on_own_synced(99);
    assert!(matches!(follower.on_tick(), Some(Effect::Store(Document { synced: 3, .. }))));
    assert_eq!(follower.on_own_open(Epoch(1)), None);
    let opened = follower.on_own_open(Epoch(2));
    assert!(matches!(opened, Some(Effect::Store(Document { proof: Proof::All, .. }))));
    assert_eq!(follower.on_own_open(Epoch(2)), None, "it is stored already");
    follower.on_request(0, Request::Promise { epoch: Epoch(3) });
    assert!(!follower.on_own_written(position(2, 4)), "the promised tail does not grow");
    assert_eq!(follower.log().tail(), position(2, 3));
}
