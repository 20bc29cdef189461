//! NBD without I/O: the decoders of the wire, the negotiation as a state machine, and the checks of
//! requests.
//!
//! Invariants:
//! - Option replies are whole: a client that reads them by their lengths stays in step.
//! - The work of an accepted request lies inside the export and within the limit of payloads.

use crate::{SMALL, no_repair};
use block::units::array_at;
use block::{ErrorKind, Limits};
use fuzz::{AllocationBound, Outcome, Target};
use nbd::TlsMode;
use nbd::handshake::{Action, Admission, Handshake, Terms};
use nbd::request::{Rules, Verdict, Work, judge_status_query};
use nbd::wire::{
    Dialect, InfoRequest, Intent, MetaRequest, OPTION_HEADER_BYTES, OPTION_REPLY_MAGIC,
    OptionHeader, RequestHeader, ReservationRequest, command, command_flag, option,
};

const LIMITS: Limits = Limits {
    size_bytes: 1 << 30,
    preferred_block_bytes: 4096,
    payload_bytes_max: 1 << 20,
    is_read_only: false,
    is_multi_conn: true,
    has_volatile_cache: true,
};
const DIALECTS: [Dialect; 3] = [Dialect::Simple, Dialect::Structured, Dialect::Extended];

/// Encodes an option with its data.
pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).expect("short");
    [&nbd::wire::IHAVEOPT.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data]
        .concat()
}

/// Encodes a text with its length, as options hold names.
pub fn text_bytes(text: &[u8]) -> Vec<u8> {
    let length = u32::try_from(text.len()).expect("short");
    [&length.to_be_bytes()[..], text].concat()
}

/// Encodes a request with its payload. The length is that of the payload for a write.
pub fn request_bytes(
    dialect: Dialect,
    (flags, command): (u16, u16),
    (offset, length): (u64, u64),
    payload: &[u8],
) -> Vec<u8> {
    let magic: u32 = match dialect {
        Dialect::Extended => nbd::wire::EXTENDED_REQUEST_MAGIC,
        _ => nbd::wire::REQUEST_MAGIC,
    };
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&command.to_be_bytes());
    bytes.extend_from_slice(&0x0102_0304_0506_0708_u64.to_be_bytes());
    bytes.extend_from_slice(&offset.to_be_bytes());
    match dialect {
        Dialect::Extended => bytes.extend_from_slice(&length.to_be_bytes()),
        _ => bytes.extend_from_slice(&u32::try_from(length).expect("short").to_be_bytes()),
    }
    bytes.extend_from_slice(payload);
    bytes
}

/// Returns a reservation.
pub fn reservation(intent: Intent) -> ReservationRequest {
    ReservationRequest {
        intent,
        is_shared: true,
        connection: 3,
        client: [1; 16],
        boot: [3; 16],
        attachment: [2; 16],
        label: "db1".to_owned(),
        export: "disk".to_owned(),
    }
}

/// Returns the options that lead to transmission in this dialect.
pub fn negotiation(dialect: Dialect) -> Vec<u8> {
    let name = text_bytes(b"disk");
    let query = [&1u32.to_be_bytes()[..], &text_bytes(nbd::wire::BASE_ALLOCATION)].concat();
    let meta = [&name[..], &query].concat();
    let info = [&name[..], &[0, 3, 0, 1, 0, 2, 0, 3]].concat();
    let mut bytes = vec![0, 0, 0, 3];
    match dialect {
        Dialect::Simple => bytes.extend(option_bytes(option::LIST, &[])),
        Dialect::Structured => bytes.extend(option_bytes(option::STRUCTURED_REPLY, &[])),
        Dialect::Extended => bytes.extend(option_bytes(option::EXTENDED_HEADERS, &[])),
    }
    if dialect != Dialect::Simple {
        bytes.extend(option_bytes(option::LIST_META_CONTEXT, &[&name[..], &[0; 4]].concat()));
        bytes.extend(option_bytes(option::SET_META_CONTEXT, &meta));
    }
    bytes.extend(option_bytes(option::RESERVATION, &reservation(Intent::Attach).encode()));
    bytes.extend(option_bytes(option::INFO, &info));
    bytes.extend(option_bytes(option::GO, &info));
    bytes
}

/// Returns one request of each kind.
pub fn requests(dialect: Dialect) -> Vec<u8> {
    let with_payload = if dialect == Dialect::Extended { command_flag::PAYLOAD_LEN } else { 0 };
    let write = (command_flag::FUA | with_payload, command::WRITE);
    let query = [&65536u64.to_be_bytes()[..], &1u32.to_be_bytes()].concat();
    let mut parts = vec![
        request_bytes(dialect, write, (4096, 512), &[0xab; 512]),
        request_bytes(dialect, (0, command::READ), (4096, 512), &[]),
        request_bytes(dialect, (command_flag::DF, command::READ), (0, 65536), &[]),
        request_bytes(dialect, (0, command::FLUSH), (0, 0), &[]),
        request_bytes(dialect, (0, command::TRIM), (8192, 4096), &[]),
        request_bytes(dialect, (0, command::CACHE), (0, 4096), &[]),
        request_bytes(dialect, (command_flag::NO_HOLE, command::WRITE_ZEROES), (0, 8192), &[]),
        request_bytes(dialect, (command_flag::REQ_ONE, command::BLOCK_STATUS), (0, 65536), &[]),
    ];
    if dialect == Dialect::Extended {
        let status = (command_flag::PAYLOAD_LEN, command::BLOCK_STATUS);
        parts.push(request_bytes(dialect, status, (0, query.len() as u64), &query));
    }
    parts.push(request_bytes(dialect, (0, command::DISC), (0, 0), &[]));
    parts.concat()
}

#[test]
fn nbd_reservation() {
    let inputs =
        [Intent::Attach, Intent::Go, Intent::Release].map(|intent| reservation(intent).encode());
    Target {
        name: "nbd_claim",
        inputs: inputs.to_vec(),
        repair: &no_repair,
        decode: &|input| match ReservationRequest::decode(input) {
            Ok(reservation) => {
                let encoded = reservation.encode();
                assert_eq!(ReservationRequest::decode(&encoded).as_ref(), Ok(&reservation));
                // Flags that are not known are ignored.
                if input[4..6] == encoded[4..6] {
                    assert_eq!(encoded, input);
                }
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(format!("{error:?}")),
        },
        execution_count: 100_000,
        input_bytes_max: 8192,
        allocation: SMALL,
    }
    .check();
}

/// The decoders of headers and of the data of options, each under the same bytes.
#[test]
fn nbd_wire() {
    let name = text_bytes(b"disk");
    let query = [&1u32.to_be_bytes()[..], &text_bytes(nbd::wire::BASE_ALLOCATION)].concat();
    let mut inputs = vec![
        option_bytes(option::GO, &[]),
        [&name[..], &[0, 3, 0, 1, 0, 2, 0, 3]].concat(),
        [&name[..], &query].concat(),
    ];
    for dialect in DIALECTS {
        inputs.push(request_bytes(dialect, (1, command::READ), (4096, 512), &[]));
    }
    let decode = |input: &[u8]| {
        let mut accepted = 0;
        if let Some(header) = array_at::<OPTION_HEADER_BYTES>(input, 0)
            && let Ok(header) = OptionHeader::decode(&header)
        {
            let rest = &input[OPTION_HEADER_BYTES..];
            let data = &rest[..rest.len().min(header.data_bytes as usize)];
            let again = option_bytes(header.option, data);
            assert_eq!(again[..12], input[..12]);
            accepted += 1;
        }
        for dialect in DIALECTS {
            if let Ok(header) = RequestHeader::decode(dialect, input) {
                let (kind, place) =
                    ((header.flags, header.command), (header.offset, header.length));
                let mut again = request_bytes(dialect, kind, place, &[]);
                again[8..16].copy_from_slice(&header.cookie.to_be_bytes());
                assert_eq!(again[..], input[..dialect.request_header_bytes()]);
                accepted += 2;
            }
        }
        if let Ok(info) = InfoRequest::decode(input) {
            assert!(info.name.len() < input.len());
            accepted += 8;
        }
        if let Ok(meta) = MetaRequest::decode(input) {
            assert!(meta.name.len() < input.len());
            accepted += 16;
        }
        match accepted {
            0 => Outcome::Refused(String::new()),
            _ => Outcome::Accepted,
        }
    };
    Target {
        name: "nbd_wire",
        inputs,
        repair: &no_repair,
        decode: &decode,
        execution_count: 200_000,
        input_bytes_max: 8192,
        // Nothing is kept: only what is encoded here is allocated.
        allocation: SMALL,
    }
    .check();
}

/// Checks that `bytes` are whole option replies.
fn check_replies(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        assert_eq!(array_at(bytes, 0), Some(OPTION_REPLY_MAGIC.to_be_bytes()));
        let length = array_at(bytes, 16).map(u32::from_be_bytes).expect("a whole header");
        bytes = bytes.get(20 + length as usize..).expect("a whole reply");
    }
}

/// Takes `count` bytes off the front; `None` if there are fewer.
fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (head, tail) = bytes.split_at_checked(count)?;
    *bytes = tail;
    Some(head)
}

/// Leads a negotiation with the options in `bytes`. Returns the terms if transmission begins.
fn negotiate(bytes: &mut &[u8], handshake: &mut Handshake) -> Option<Terms> {
    let flags = take(bytes, 4)?.try_into().expect("four bytes");
    handshake.on_client_flags(flags).ok()?;
    loop {
        let header = take(bytes, OPTION_HEADER_BYTES)?.try_into().expect("of this length");
        let header = OptionHeader::decode(&header).ok()?;
        let data = match handshake.admit(header) {
            Admission::Close => return None,
            Admission::Skip(reply) => {
                check_replies(&reply);
                take(bytes, header.data_bytes as usize)?;
                continue;
            }
            Admission::Read => take(bytes, header.data_bytes as usize)?,
        };
        match handshake.on_option(header.option, data) {
            Action::Reply(reply) => check_replies(&reply),
            Action::Close(reply) => {
                check_replies(&reply);
                return None;
            }
            Action::StartTls(reply) => {
                check_replies(&reply);
                handshake.on_tls();
            }
            Action::List => check_replies(&handshake.list([("disk", "a disk")].into_iter())),
            Action::Describe(lookup) => {
                check_replies(&handshake.described(&lookup, "a disk", &LIMITS));
            }
            Action::Meta(lookup) => {
                let found = match lookup.name.as_str() {
                    "disk" => Ok(()),
                    _ => Err((ErrorKind::NotFound, "no such export".to_owned())),
                };
                check_replies(&handshake.meta(&lookup, found));
            }
            Action::Reservation(reservation) => {
                let outcome = match reservation.intent {
                    Intent::Release => Err((ErrorKind::Fenced, reservation.label)),
                    _ => Ok(()),
                };
                check_replies(&handshake.claimed(outcome));
            }
            Action::Open(lookup) if lookup.name != "disk" => {
                match handshake.refused(&lookup, ErrorKind::NotFound, "no such export") {
                    Action::Reply(reply) => check_replies(&reply),
                    _ => return None,
                }
            }
            Action::Open(lookup) => return Some(handshake.opened(&lookup, "a disk", &LIMITS).1),
        }
    }
}

/// Checks that `work` may run on an export with [`LIMITS`].
fn check_work(work: Work) {
    let is_inside = |offset: u64, length: u64| {
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= LIMITS.size_bytes), "{work:?}");
    };
    match work {
        Work::Read { offset, length, .. } | Work::Write { offset, length, .. } => {
            is_inside(offset, u64::from(length));
            assert!(length <= LIMITS.payload_bytes_max, "{work:?}");
        }
        Work::Discard { offset, length, .. }
        | Work::WriteZeroes { offset, length, .. }
        | Work::Prefetch { offset, length }
        | Work::BlockStatus { offset, length, .. } => is_inside(offset, length),
        Work::BlockStatusQuery { payload_bytes, .. } => {
            assert!(payload_bytes <= nbd::request::QUERY_BYTES_MAX, "{work:?}");
        }
        Work::Nothing | Work::Flush | Work::Resize { .. } | Work::Disconnect => {}
    }
}

/// Judges the requests in `bytes`. Returns the reason for the end.
fn judge(bytes: &mut &[u8], rules: &Rules) -> Option<&'static str> {
    loop {
        let header = take(bytes, rules.terms.dialect.request_header_bytes())?;
        let Ok(header) = RequestHeader::decode(rules.terms.dialect, header) else {
            return Some("no request");
        };
        match rules.judge(&header, &LIMITS) {
            Verdict::Refuse { payload_bytes, .. } => {
                take(bytes, usize::try_from(payload_bytes).ok()?)?;
            }
            Verdict::Run(Work::Disconnect) => return Some("disconnected"),
            Verdict::Run(work) => {
                check_work(work);
                match work {
                    Work::Write { length, .. } => drop(take(bytes, length as usize)?),
                    Work::BlockStatusQuery { offset, payload_bytes, is_one } => {
                        let query = take(bytes, payload_bytes as usize)?;
                        if let Ok(work) = judge_status_query(query, offset, is_one, &LIMITS) {
                            check_work(work);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Negotiation and requests of one connection. The first byte of an input chooses the listener.
#[test]
fn nbd_handshake() {
    let mut inputs = Vec::new();
    for dialect in DIALECTS {
        for listener in [0, 4] {
            inputs.push([&[listener], &negotiation(dialect)[..], &requests(dialect)].concat());
        }
    }
    let tls = [
        &[2, 0, 0, 0, 3][..],
        &option_bytes(option::STARTTLS, &[]),
        &negotiation(Dialect::Extended)[4..],
        &requests(Dialect::Extended),
    ];
    inputs.push(tls.concat());
    let old = [&[0, 0, 0, 0, 1][..], &option_bytes(option::EXPORT_NAME, b"disk")];
    inputs.push([&old.concat()[..], &requests(Dialect::Simple)].concat());
    let decode = |input: &[u8]| {
        let Some((listener, mut bytes)) = input.split_first() else {
            return Outcome::Refused("empty".to_owned());
        };
        let mode = [TlsMode::Off, TlsMode::On, TlsMode::Required][usize::from(listener % 4).min(2)];
        let can_resize = listener & 4 != 0;
        let mut handshake = Handshake::new(mode, can_resize);
        let Some(terms) = negotiate(&mut bytes, &mut handshake) else {
            return Outcome::Refused("negotiation".to_owned());
        };
        let payload_bytes_max = LIMITS.payload_bytes_max;
        match judge(&mut bytes, &Rules { terms, can_resize, payload_bytes_max }) {
            Some("disconnected") => Outcome::Accepted,
            why => Outcome::Refused(format!("{terms:?} {why:?}")),
        }
    };
    Target {
        name: "nbd_handshake",
        inputs,
        repair: &no_repair,
        decode: &decode,
        execution_count: 100_000,
        input_bytes_max: 8192,
        // Replies may be longer than the option that they answer.
        allocation: AllocationBound { bytes_per_input_byte: 64, ..SMALL },
    }
    .check();
}
