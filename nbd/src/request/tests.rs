//! Verdicts on headers, at the boundaries and at random.

use super::*;
use crate::wire::STATE_HOLE;
use proptest::prelude::*;

const SIZE: u64 = 64 << 20;
const LIMITS: Limits = Limits {
    size_bytes: SIZE,
    preferred_block_bytes: 4096,
    payload_bytes_max: 32 << 20,
    is_read_only: false,
    is_multi_conn: true,
    has_volatile_cache: true,
};

fn rules(dialect: Dialect) -> Rules {
    let terms = Terms { dialect, has_allocation: dialect != Dialect::Simple };
    Rules { terms, can_resize: true, payload_bytes_max: LIMITS.payload_bytes_max }
}

fn header(command: u16, flags: u16, offset: u64, length: u64) -> RequestHeader {
    RequestHeader { flags, command, cookie: 1, offset, length }
}

fn error_of(dialect: Dialect, request: RequestHeader, limits: &Limits) -> u32 {
    match rules(dialect).judge(&request, limits) {
        Verdict::Refuse { error, .. } => error,
        Verdict::Run(work) => panic!("{request:?} may run: {work:?}"),
    }
}

#[test]
fn past_the_end_writes_get_enospc_and_others_einval() {
    let d = Dialect::Structured;
    for (offset, length) in
        [(SIZE, 1), (SIZE - 1, 2), (SIZE + 1, 1), (u64::MAX, 1), (u64::MAX - 1, 4096), (1, SIZE)]
    {
        for (command, error) in [
            (command::READ, EINVAL),
            (command::WRITE, ENOSPC),
            (command::WRITE_ZEROES, ENOSPC),
            (command::TRIM, EINVAL),
            (command::CACHE, EINVAL),
            (command::BLOCK_STATUS, EINVAL),
        ] {
            assert_eq!(error_of(d, header(command, 0, offset, length), &LIMITS), error);
        }
    }
}

#[test]
fn a_read_only_export_refuses_every_change_with_eperm() {
    let limits = Limits { is_read_only: true, ..LIMITS };
    for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES, command::RESIZE] {
        assert_eq!(error_of(Dialect::Simple, header(command, 0, 0, 0), &limits), EPERM);
    }
    let read = rules(Dialect::Simple).judge(&header(command::READ, 0, 0, 4096), &limits);
    assert!(matches!(read, Verdict::Run(Work::Read { .. })));
}

#[test]
fn flags_belong_to_their_commands() {
    use command_flag::*;
    let refused = [
        (Dialect::Simple, command::READ, DF),
        (Dialect::Structured, command::WRITE, DF),
        (Dialect::Structured, command::WRITE, PAYLOAD_LEN),
        (Dialect::Extended, command::READ, PAYLOAD_LEN),
        (Dialect::Extended, command::WRITE, 0),
        (Dialect::Structured, command::TRIM, NO_HOLE),
        (Dialect::Structured, command::READ, 0x8000),
        (Dialect::Structured, command::FLUSH, REQ_ONE),
    ];
    for (dialect, command, flags) in refused {
        let request = header(command, flags, 0, if command == command::FLUSH { 0 } else { 512 });
        assert_eq!(error_of(dialect, request, &LIMITS), EINVAL, "{request:?}");
    }
    for command in 0..=7 {
        let length = if command == command::FLUSH { 0 } else { 512 };
        let verdict = rules(Dialect::Structured).judge(&header(command, FUA, 0, length), &LIMITS);
        assert!(matches!(verdict, Verdict::Run(_)), "FUA is taken on every command: {command}");
    }
}

#[test]
fn refused_payloads_are_announced_for_dropping() {
    let dropped = |dialect, request: RequestHeader| match rules(dialect).judge(&request, &LIMITS) {
        Verdict::Refuse { payload_bytes, .. } => payload_bytes,
        Verdict::Run(work) => panic!("{work:?}"),
    };
    let past = header(command::WRITE, 0, SIZE, 4096);
    assert_eq!(dropped(Dialect::Simple, past), 4096);
    let huge = header(command::WRITE, 0, 0, (32 << 20) + 1);
    assert_eq!(dropped(Dialect::Simple, huge), (32 << 20) + 1);
    assert_eq!(dropped(Dialect::Simple, header(command::READ, 0, SIZE, 4096)), 0);
    let flag = command_flag::PAYLOAD_LEN;
    assert_eq!(dropped(Dialect::Extended, header(command::READ, flag, 0, 4096)), 4096);
    assert_eq!(dropped(Dialect::Extended, header(command::WRITE, 0, 0, 4096)), 0);
}

#[test]
fn a_status_query_names_one_known_context() {
    let query = |length: u64, ids: &[u32]| {
        let mut payload = length.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
        judge_status_query(&payload, 0, false, &LIMITS)
    };
    let expected = Work::BlockStatus { offset: 0, length: SIZE, is_one: false };
    assert_eq!(query(SIZE, &[crate::wire::BASE_ALLOCATION_ID]), Ok(expected));
    assert_eq!(query(SIZE + 1, &[1]), Err(EINVAL));
    assert_eq!(query(0, &[1]), Err(EINVAL));
    assert_eq!(query(4096, &[7]), Err(EINVAL));
    assert_eq!(query(4096, &[]), Err(EINVAL));
    assert_eq!(query(4096, &[1, 1]), Err(EINVAL));
    assert_eq!(judge_status_query(&[0; 11], 0, false, &LIMITS), Err(EINVAL));
    assert_ne!(STATE_HOLE, 0);
}

#[test]
fn resize_only_where_it_was_offered() {
    let request = header(command::RESIZE, 0, 1 << 30, 0);
    let verdict = rules(Dialect::Simple).judge(&request, &LIMITS);
    assert_eq!(verdict, Verdict::Run(Work::Resize { size_bytes: 1 << 30 }));
    let refusing = Rules { can_resize: false, ..rules(Dialect::Simple) };
    assert!(matches!(refusing.judge(&request, &LIMITS), Verdict::Refuse { error: EINVAL, .. }));
}

proptest! {
    #[test]
    fn work_lies_inside_the_export_and_the_limits(
        command in 0u16..12,
        flags in any::<u16>(),
        offset in prop_oneof![0..SIZE * 2, any::<u64>()],
        length in prop_oneof![0..SIZE * 2, any::<u64>()],
        dialect in 0usize..3,
    ) {
        let dialect = [Dialect::Simple, Dialect::Structured, Dialect::Extended][dialect];
        let request = header(command, flags & 0x3f, offset, length);
        if let Verdict::Run(work) = rules(dialect).judge(&request, &LIMITS) {
            let (offset, length, payload) = match work {
                Work::Read { offset, length, .. } | Work::Write { offset, length, .. } => {
                    (offset, u64::from(length), length)
                }
                Work::Discard { offset, length, .. }
                | Work::WriteZeroes { offset, length, .. }
                | Work::Prefetch { offset, length }
                | Work::BlockStatus { offset, length, .. } => (offset, length, 0),
                Work::BlockStatusQuery { payload_bytes, .. } => (0, 1, payload_bytes),
                Work::Nothing | Work::Flush | Work::Disconnect | Work::Resize { .. } => (0, 1, 0),
            };
            prop_assert!(offset.checked_add(length).unwrap() <= SIZE);
            prop_assert!(length > 0 && payload <= LIMITS.payload_bytes_max);
        }
        let _ = rules(dialect).judge(&header(command, flags, offset, length), &LIMITS);
    }

    #[test]
    fn no_query_panics(payload in proptest::collection::vec(any::<u8>(), 0..40), at in any::<u64>()) {
        let _ = judge_status_query(&payload, at, true, &LIMITS);
    }
}
