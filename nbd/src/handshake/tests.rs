//! Negotiations without a socket.

use super::*;
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    size_bytes: 1 << 20,
    preferred_block_bytes: 4096,
    payload_bytes_max: 32 << 20,
    is_read_only: false,
    is_multi_conn: true,
    has_volatile_cache: true,
};

/// Splits a stream of option replies into (option, type, data).
fn replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let mut fields = wire::Fields::new(bytes);
        assert_eq!(fields.u64(), Ok(wire::OPTION_REPLY_MAGIC));
        let (option, reply) = (fields.u32().unwrap(), fields.u32().unwrap());
        let data = fields.string().unwrap().to_vec();
        bytes = &bytes[20 + data.len()..];
        replies.push((option, reply, data));
    }
    replies
}

fn reply_of(action: Action) -> u32 {
    let Action::Reply(bytes) = action else { panic!("expected a reply, got {action:?}") };
    replies(&bytes).last().unwrap().1
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
    data.extend_from_slice(name.as_bytes());
    data.extend_from_slice(rest);
    data
}

fn meta_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut rest = u32::try_from(queries.len()).unwrap().to_be_bytes().to_vec();
    for query in queries {
        rest.extend_from_slice(&named(query, &[]));
    }
    named(name, &rest)
}

fn set_meta(handshake: &mut Handshake, name: &str, queries: &[&str]) -> Vec<(u32, u32, Vec<u8>)> {
    match handshake.on_option(option::SET_META_CONTEXT, &meta_data(name, queries)) {
        Action::Meta(lookup) => replies(&handshake.meta(&lookup, Ok(()))),
        Action::Reply(bytes) => replies(&bytes),
        other => panic!("{other:?}"),
    }
}

fn go(handshake: &mut Handshake, name: &str) -> (Vec<(u32, u32, Vec<u8>)>, Terms) {
    let Action::Open(lookup) = handshake.on_option(option::GO, &named(name, &[0, 1, 0, 3])) else {
        panic!("GO must look the export up")
    };
    let (bytes, terms) = handshake.opened(&lookup, "", &LIMITS);
    (replies(&bytes), terms)
}

#[test]
fn required_tls_answers_nothing_before_it() {
    let mut handshake = Handshake::new(TlsMode::Required, false);
    for option in [option::LIST, option::GO, option::INFO, option::STRUCTURED_REPLY, 0x7777] {
        assert_eq!(reply_of(handshake.on_option(option, &[])), option_reply::ERR_TLS_REQD);
    }
    let action = handshake.on_option(option::EXPORT_NAME, b"a");
    assert_eq!(action, Action::Close(Vec::new()));
    assert!(matches!(handshake.on_option(option::STARTTLS, &[]), Action::StartTls(_)));
    handshake.on_tls();
    assert_eq!(handshake.on_option(option::LIST, &[]), Action::List);
    assert_eq!(reply_of(handshake.on_option(option::STARTTLS, &[])), option_reply::ERR_INVALID);
}

#[test]
fn starttls_discards_earlier_negotiation() {
    let mut handshake = Handshake::new(TlsMode::On, false);
    assert_eq!(reply_of(handshake.on_option(option::STRUCTURED_REPLY, &[])), option_reply::ACK);
    assert_eq!(set_meta(&mut handshake, "a", &["base:allocation"]).len(), 2);
    assert!(matches!(handshake.on_option(option::STARTTLS, &[]), Action::StartTls(_)));
    handshake.on_tls();
    let (_, terms) = go(&mut handshake, "a");
    assert_eq!(terms, Terms { dialect: Dialect::Simple, has_allocation: false });
    let off = Handshake::new(TlsMode::Off, false).on_option(option::STARTTLS, &[]);
    assert_eq!(reply_of(off), option_reply::ERR_UNSUP);
}

#[test]
fn a_context_is_selected_for_one_export_by_the_last_success() {
    let mut handshake = Handshake::new(TlsMode::Off, false);
    let early = set_meta(&mut handshake, "a", &["base:allocation"]);
    assert_eq!(early[0].1, option_reply::ERR_INVALID, "before structured replies");
    handshake.on_option(option::STRUCTURED_REPLY, &[]);
    let twice = set_meta(&mut handshake, "a", &["base:allocation", "x:y", "base:allocation"]);
    assert_eq!(twice.len(), 2, "one context and the end");
    assert!(go(&mut handshake, "a").1.has_allocation);
    assert!(!go(&mut handshake, "b").1.has_allocation, "another export");
    for nothing in [&[][..], &["base:"], &["base:other"], &["x:y"], &["colonless"]] {
        set_meta(&mut handshake, "a", &["base:allocation"]);
        let replies = set_meta(&mut handshake, "a", nothing);
        assert_eq!(replies.len(), 1, "{nothing:?}");
        assert!(!go(&mut handshake, "a").1.has_allocation, "{nothing:?}");
    }
    set_meta(&mut handshake, "a", &["base:allocation"]);
    let data = meta_data("a", &["base:allocation"]);
    let Action::Meta(lookup) = handshake.on_option(option::SET_META_CONTEXT, &data) else {
        panic!()
    };
    let refused = handshake.meta(&lookup, Err((ErrorKind::NotFound, "no such export".into())));
    assert_eq!(replies(&refused)[0].1, option_reply::ERR_UNKNOWN);
    assert!(!go(&mut handshake, "a").1.has_allocation, "the failure cleared the selection");
}

#[test]
fn list_meta_takes_the_namespace_and_the_empty_query() {
    let mut handshake = Handshake::new(TlsMode::Off, false);
    handshake.on_option(option::EXTENDED_HEADERS, &[]);
    for (queries, count) in
        [(&[][..], 2), (&["base:"], 2), (&["base:allocation"], 2), (&["base:x"], 1), (&["x:"], 1)]
    {
        let data = meta_data("a", queries);
        let Action::Meta(lookup) = handshake.on_option(option::LIST_META_CONTEXT, &data) else {
            panic!()
        };
        assert_eq!(replies(&handshake.meta(&lookup, Ok(()))).len(), count, "{queries:?}");
    }
}

#[test]
fn go_reports_size_flags_and_block_sizes() {
    use transmission_flag::*;
    let mut handshake = Handshake::new(TlsMode::Off, true);
    let (replies, _) = go(&mut handshake, "a");
    assert_eq!(replies.len(), 3);
    let export = &replies[0].2;
    assert_eq!(export.len(), 12);
    assert_eq!(export[2..10], (1u64 << 20).to_be_bytes());
    let flags = u16::from_be_bytes([export[10], export[11]]);
    assert_eq!(flags & SEND_DF, 0, "without structured replies");
    assert_eq!(flags & (SEND_RESIZE | CAN_MULTI_CONN), SEND_RESIZE | CAN_MULTI_CONN);
    assert_eq!(replies[1].2[..6], [0, 3, 0, 0, 0, 1], "the minimum block is one byte");
    let read_only = Limits { is_read_only: true, ..LIMITS };
    let flags = handshake.transmission_flags(&read_only);
    assert_eq!(flags & (READ_ONLY | SEND_TRIM | SEND_RESIZE), READ_ONLY);
    handshake.on_option(option::EXTENDED_HEADERS, &[]);
    let flags = handshake.transmission_flags(&LIMITS);
    assert_eq!(flags & (SEND_DF | BLOCK_STATUS_PAYLOAD), SEND_DF | BLOCK_STATUS_PAYLOAD);
    let refused = reply_of(handshake.on_option(option::STRUCTURED_REPLY, &[]));
    assert_eq!(refused, option_reply::ERR_EXT_HEADER_REQD);
}

#[test]
fn export_name_is_padded_unless_agreed_otherwise() {
    for (flags, length) in [(3u32, 10), (1, 134)] {
        let mut handshake = Handshake::new(TlsMode::Off, false);
        handshake.on_client_flags(flags.to_be_bytes()).unwrap();
        let Action::Open(lookup) = handshake.on_option(option::EXPORT_NAME, b"a") else { panic!() };
        assert_eq!(handshake.opened(&lookup, "", &LIMITS).0.len(), length);
        let refused = handshake.refused(&lookup, ErrorKind::NotFound, "no");
        assert_eq!(refused, Action::Close(Vec::new()));
    }
    assert!(Handshake::new(TlsMode::Off, false).on_client_flags([0x40, 0, 0, 3]).is_err());
}

#[test]
fn long_options_are_skipped_and_endless_ones_close() {
    let handshake = Handshake::new(TlsMode::Off, false);
    let admit = |option, data_bytes| handshake.admit(OptionHeader { option, data_bytes });
    assert_eq!(admit(option::GO, OPTION_BYTES_MAX), Admission::Read);
    assert!(matches!(admit(option::GO, OPTION_BYTES_MAX + 1), Admission::Skip(_)));
    assert_eq!(admit(option::EXPORT_NAME, OPTION_BYTES_MAX + 1), Admission::Close);
    assert_eq!(admit(option::GO, OPTION_SKIP_BYTES_MAX + 1), Admission::Close);
    assert_eq!(admit(0x1234, u32::MAX), Admission::Close);
}

#[test]
fn names_are_utf8_of_limited_length() {
    let mut handshake = Handshake::new(TlsMode::Off, false);
    let long = "x".repeat(4097);
    let reply = reply_of(handshake.on_option(option::GO, &named(&long, &[0, 0])));
    assert_eq!(reply, option_reply::ERR_TOO_BIG);
    let reply = reply_of(handshake.on_option(option::GO, &[0, 0, 0, 1, 0xff, 0, 0]));
    assert_eq!(reply, option_reply::ERR_INVALID);
    assert!(matches!(
        handshake.on_option(option::GO, &named(&"x".repeat(4096), &[0, 0])),
        Action::Open(_)
    ));
}

proptest! {
    #[test]
    fn no_sequence_of_options_panics(
        options in proptest::collection::vec(
            (0u32..13, proptest::collection::vec(any::<u8>(), 0..60), any::<bool>()),
            0..12,
        ),
        tls in 0usize..3,
    ) {
        let tls = [TlsMode::Off, TlsMode::On, TlsMode::Required][tls];
        let mut handshake = Handshake::new(tls, true);
        for (option, data, is_named) in options {
            let data = if is_named { named("a", &data) } else { data };
            match handshake.on_option(option, &data) {
                Action::StartTls(_) => handshake.on_tls(),
                Action::Describe(lookup) => drop(handshake.described(&lookup, "d", &LIMITS)),
                Action::Open(lookup) => drop(handshake.opened(&lookup, "d", &LIMITS)),
                Action::Meta(lookup) => drop(handshake.meta(&lookup, Ok(()))),
                Action::Reservation(_) => drop(handshake.claimed(Ok(()))),
                Action::Reply(_) | Action::Close(_) | Action::List => {}
            }
        }
    }
}
