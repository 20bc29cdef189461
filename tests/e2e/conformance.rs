//! The protocol as other implementations may use it, over TCP and a unix socket: requests that must
//! work, requests that must be refused and how, and bad clients that must not harm good ones.
//!
//! Invariants:
//! - One list of checks serves every transport; TLS runs it too (see the module `tls`). Each check
//!   runs twice: with compact headers and with extended ones.
//! - Numbers cite doc/proto.md of NetworkBlockDevice/nbd by section name.

use std::io::Write;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::negotiate::{Haggle, open_payload};
use tests::nbd::wire::*;
use tests::nbd::{Connection, Endpoint, TlsClient, Wanted};
use tests::seed::Random;

/// The way to reach the server.
#[derive(Clone)]
pub struct Way {
    /// The export to use; its contents are destroyed.
    pub endpoint: Endpoint,
    /// TLS, if the server wants it.
    pub tls: Option<TlsClient>,
    /// Size of the export in bytes.
    pub size_bytes: u64,
    is_extended: bool,
}

impl Way {
    pub fn new(endpoint: Endpoint, tls: Option<TlsClient>, size_bytes: u64) -> Way {
        Way { endpoint, tls, size_bytes, is_extended: false }
    }

    fn haggle(&self) -> Haggle {
        let haggle = Haggle::greet(self.endpoint.connect().expect("it listens"));
        let haggle = haggle.expect("a greeting");
        match &self.tls {
            None => haggle,
            Some(tls) => haggle.start_tls(tls).expect("TLS starts"),
        }
    }

    fn connect(&self) -> Connection {
        let tls = self.tls.clone();
        let wanted = Wanted { tls, is_extended: self.is_extended, ..Wanted::everything() };
        Connection::open(&self.endpoint, &wanted).expect("the export opens")
    }

    /// Runs every check, with both kinds of headers.
    pub fn check(&self) {
        for is_extended in [false, true] {
            let way = Way { is_extended, ..self.clone() };
            for (name, check) in CHECKS {
                println!("{name}, extended headers: {is_extended}");
                check(&way);
                // Other connections are served, whatever happened to that one.
                way.connect().disconnect().unwrap_or_else(|error| panic!("after {name}: {error}"));
            }
        }
    }
}

type Check = (&'static str, fn(&Way));

const CHECKS: &[Check] = &[
    ("list", list),
    ("refusals keep the negotiation going", refusals),
    ("abort", abort),
    ("info and go say the same", info),
    ("flags", flags),
    ("bytes at any alignment", unaligned),
    ("beyond the end", beyond),
    ("unknown commands and flags", unknown),
    ("do not fragment", one_chunk),
    ("holes, zeroes and data", allocation),
    ("many in flight", pipeline),
    ("a flush covers other connections", flush_elsewhere),
    ("the largest payload", large),
    ("fua and cache", fua_and_cache),
    ("simple replies", simple),
    ("export name", export_name),
    ("rubbish", rubbish),
    ("a payload that never comes", half_a_write),
    ("a length nobody can mean", absurd),
    ("a client that reads nothing", never_reads),
];

fn list(way: &Way) {
    let names = way.haggle().list().expect("LIST works");
    assert!(names.contains(&way.endpoint.export), "{names:?}");
}

fn refusals(way: &Way) {
    let mut haggle = way.haggle();
    let last = |replies: Vec<tests::nbd::negotiate::OptionReply>| replies.last().expect("one").kind;
    // "Option types": unknown ones are refused, and the negotiation continues.
    assert_eq!(last(haggle.ask(0x7777, b"what").expect("an answer")), REP_ERR_UNSUP);
    let refused = haggle.open(OPT_GO, "no such export").expect("an answer");
    assert_eq!(refused, Err(REP_ERR_UNKNOWN));
    let mut short = open_payload("disk", &[]);
    short[3] = 200;
    assert_eq!(last(haggle.ask(OPT_GO, &short).expect("an answer")), REP_ERR_INVALID);
    assert_eq!(last(haggle.ask(OPT_LIST, b"x").expect("an answer")), REP_ERR_INVALID);
    let info = haggle.open(OPT_GO, &way.endpoint.export).expect("an answer");
    assert_eq!(info.expect("the export opens").size_bytes, way.size_bytes);
}

fn abort(way: &Way) {
    let replies = way.haggle().ask(OPT_ABORT, &[]).expect("ABORT is acknowledged");
    assert_eq!(replies.last().expect("one").kind, REP_ACK);
}

fn info(way: &Way) {
    let mut haggle = way.haggle();
    let info = haggle.open(OPT_INFO, &way.endpoint.export).expect("an answer").expect("known");
    let go = haggle.open(OPT_GO, &way.endpoint.export).expect("an answer").expect("known");
    assert_eq!(info, go);
    let (min, preferred, max) = go.block_sizes.expect("block sizes were asked for");
    assert_eq!(min, 1);
    assert!(preferred.is_power_of_two() && preferred >= 512, "{preferred}");
    assert!(max >= 32 << 20, "{max}");
}

fn flags(way: &Way) {
    let connection = way.connect();
    let (flags, is_structured) = (connection.info().flags, connection.is_structured());
    let expected = CAN_FLUSH
        | CAN_FUA
        | CAN_TRIM
        | CAN_WRITE_ZEROES
        | CAN_DF
        | CAN_MULTI_CONN
        | CAN_CACHE
        | CAN_FAST_ZERO;
    assert_eq!(flags & expected, expected, "{flags:#x}");
    assert_eq!(flags & IS_READ_ONLY, 0);
    assert!(is_structured && connection.has_allocation());
    assert_eq!(connection.is_extended(), way.is_extended);
}

fn unaligned(way: &Way) {
    let mut connection = way.connect();
    let mut random = Random::new(1, 1);
    let mut model = vec![0xee; 64 << 10];
    connection.write(0, &model, 0);
    for _ in 0..200 {
        let start = random.below(60_000);
        let length = random.between(1, 4000).min(65536 - start);
        let range = usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap();
        let length = u32::try_from(length).unwrap();
        match random.below(3) {
            0 => {
                connection.trim(start, length);
                model[range].fill(0);
            }
            1 => {
                connection.write_zeroes(start, length, 0);
                model[range].fill(0);
            }
            _ => {
                random.fill(&mut model[range.clone()]);
                connection.write(start, &model[range], 0);
            }
        }
    }
    assert!(connection.read(0, 64 << 10) == model, "neighbours of unaligned requests changed");
    assert!(connection.read(333, 7777) == model[333..333 + 7777]);
}

fn beyond(way: &Way) {
    let mut connection = way.connect();
    let end = way.size_bytes;
    let mut error = |command, offset, length, payload: &[u8]| {
        connection.call(command, 0, offset, length, payload).expect("a reply").error
    };
    // "Error values": ENOSPC for writes past the end, EINVAL for reads.
    assert_eq!(error(CMD_READ, end - 512, 1024, &[]), EINVAL);
    assert_eq!(error(CMD_READ, u64::MAX - 511, 1024, &[]), EINVAL);
    assert_eq!(error(CMD_WRITE, end - 512, 1024, &[1; 1024]), ENOSPC);
    assert_eq!(error(CMD_WRITE, u64::MAX - 511, 512, &[1; 512]), ENOSPC);
    assert_eq!(error(CMD_WRITE_ZEROES, end, 512, &[]), ENOSPC);
    assert!([EINVAL, ENOSPC].contains(&error(CMD_TRIM, end - 512, 1024, &[])));
    assert_eq!(error(CMD_BLOCK_STATUS, end, 512, &[]), EINVAL);
    assert_eq!(error(CMD_WRITE, end - 512, 512, &[7; 512]), 0);
    assert_eq!(connection.read(end - 512, 512), [7; 512], "the refused write had no effect");
}

fn unknown(way: &Way) {
    let mut connection = way.connect();
    let mut error =
        |command, flags| connection.call(command, flags, 0, 512, &[]).expect("a reply").error;
    assert_eq!(error(0x1234, 0), EINVAL);
    assert_eq!(error(CMD_READ, 1 << 14), EINVAL);
    assert_eq!(error(CMD_READ, 0), 0);
}

fn one_chunk(way: &Way) {
    let mut connection = way.connect();
    connection.write(0, &[1; 4096], 0);
    connection.trim(4096, 1 << 20);
    connection.write(1 << 20, &[2; 4096], 0);
    let reply = connection.call(CMD_READ, CMD_FLAG_DF, 0, 2 << 20, &[]).expect("a reply");
    assert!(reply.error == 0 && reply.chunk_count == 1, "{} chunks", reply.chunk_count);
    assert!(reply.payload[..4096] == [1; 4096] && reply.payload[4096..8192] == [0; 4096]);
}

fn allocation(way: &Way) {
    let mut connection = way.connect();
    connection.trim(0, 8 << 20);
    connection.write(1 << 20, &vec![9; 64 << 10], 0);
    connection.write_zeroes(2 << 20, 64 << 10, CMD_FLAG_NO_HOLE);
    let mut at = 0;
    let mut states = Vec::new();
    while at < 4 << 20 {
        let length = (4 << 20) - at;
        let reply = connection.call_long(CMD_BLOCK_STATUS, 0, at, length, &[]);
        let extents = reply.expect("a reply").extents;
        assert!(!extents.is_empty());
        for (bytes, state) in extents {
            assert!(bytes > 0);
            states.push((at, state));
            at += bytes;
        }
    }
    let state_at = |offset: u64| states.iter().rev().find(|(at, _)| *at <= offset).expect("one").1;
    assert_eq!(state_at(0), STATE_HOLE | STATE_ZERO);
    assert_eq!(state_at(1 << 20), 0, "{states:?}");
    assert_eq!(state_at((1 << 20) + (64 << 10)), STATE_HOLE | STATE_ZERO, "{states:?}");
    assert_eq!(state_at(2 << 20) & STATE_HOLE, 0, "NO_HOLE asks for space: {states:?}");
    let one = connection.call(CMD_BLOCK_STATUS, CMD_FLAG_REQ_ONE, 0, 4 << 20, &[]).unwrap();
    assert_eq!(one.extents.len(), 1);
    assert!(one.extents[0].0 <= 4 << 20);
}

fn pipeline(way: &Way) {
    let mut connection = way.connect();
    let mut cookies = std::collections::HashSet::new();
    for index in 0..256u64 {
        let payload = [u8::try_from(index).unwrap(); 512];
        let cookie = connection.submit(CMD_WRITE, 0, index * 512, 512, &payload);
        cookies.insert(cookie.expect("sent"));
    }
    while !cookies.is_empty() {
        let reply = connection.receive().expect("a reply");
        assert!(reply.error == 0 && cookies.remove(&reply.cookie));
    }
    let mut sent = std::collections::HashMap::new();
    for index in (0..256u64).rev() {
        let cookie = connection.submit(CMD_READ, 0, index * 512, 512, &[]).expect("sent");
        sent.insert(cookie, u8::try_from(index).unwrap());
    }
    while !sent.is_empty() {
        let reply = connection.receive().expect("a reply");
        let expected = sent.remove(&reply.cookie).expect("it was sent");
        assert!(reply.payload == [expected; 512], "the reply of another request");
    }
}

fn flush_elsewhere(way: &Way) {
    let (mut one, mut two) = (way.connect(), way.connect());
    one.write(0, &[0x11; 4096], 0);
    assert_eq!(two.read(0, 4096), [0x11; 4096], "an answered write is seen everywhere");
    two.flush();
    one.write_zeroes(0, 4096, CMD_FLAG_FUA);
    assert_eq!(two.read(0, 4096), [0; 4096]);
}

fn large(way: &Way) {
    let mut connection = way.connect();
    let mut bytes = vec![0; 32 << 20];
    Random::new(4, 4).fill(&mut bytes);
    connection.write(4096, &bytes, 0);
    assert!(connection.read(4096, 32 << 20) == bytes);
}

fn fua_and_cache(way: &Way) {
    let mut connection = way.connect();
    connection.write(512, &[3; 512], CMD_FLAG_FUA);
    for (command, flags) in
        [(CMD_TRIM, CMD_FLAG_FUA), (CMD_CACHE, 0), (CMD_WRITE_ZEROES, CMD_FLAG_FUA)]
    {
        let reply = connection.call(command, flags, 512, 512, &[]).expect("a reply");
        assert_eq!(reply.error, 0, "command {command}");
    }
    // Fast if the range consists of whole sectors; otherwise an error without effect.
    for flags in [CMD_FLAG_FAST_ZERO, CMD_FLAG_FAST_ZERO | CMD_FLAG_NO_HOLE] {
        connection.write(0, &[7; 4096], 0);
        for (offset, length) in [(1, 512), (0, 511), (512, 513), (100, 200)] {
            let slow = connection.call(CMD_WRITE_ZEROES, flags, offset, length, &[]).unwrap();
            assert_eq!(slow.error, ENOTSUP, "{length} bytes at {offset}");
        }
        assert_eq!(connection.read(0, 4096), [7; 4096]);
        for (offset, length) in [(512, 512), (0, 1 << 20)] {
            let fast = connection.call(CMD_WRITE_ZEROES, flags, offset, length, &[]).unwrap();
            assert_eq!(fast.error, 0, "{length} bytes at {offset}");
        }
        assert_eq!(connection.read(0, 4096), [0; 4096]);
    }
}

fn simple(way: &Way) {
    let wanted = Wanted { tls: way.tls.clone(), ..Wanted::default() };
    let mut connection = Connection::open(&way.endpoint, &wanted).expect("the export opens");
    assert!(!connection.is_structured());
    assert_eq!(connection.info().flags & CAN_DF, 0, "DF needs structured replies");
    connection.write(1000, &[4; 5000], 0);
    assert_eq!(connection.read(1000, 5000), [4; 5000]);
    let reply = connection.call(CMD_READ, 0, way.size_bytes, 512, &[]).expect("a reply");
    assert_eq!(reply.error, EINVAL);
    assert_eq!(connection.read(1000, 1), [4]);
}

fn export_name(way: &Way) {
    use tests::nbd::transport::take_array;
    let mut haggle = way.haggle();
    haggle.send(OPT_EXPORT_NAME, way.endpoint.export.as_bytes()).expect("sent");
    let size_bytes = u64::from_be_bytes(take_array(&mut haggle.stream).expect("the size"));
    let flags = u16::from_be_bytes(take_array(&mut haggle.stream).expect("the flags"));
    assert_eq!(size_bytes, way.size_bytes);
    assert_eq!(flags & CAN_FLUSH, CAN_FLUSH);
    haggle.stream.write_all(&request(CMD_FLUSH, 0, 5, 0, 0)).expect("sent");
    let reply: [u8; 16] = take_array(&mut haggle.stream).expect("a simple reply");
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    assert_eq!(reply[15], 5);
}

fn is_closed(connection: &mut Connection) -> bool {
    connection.receive().is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
}

fn rubbish(way: &Way) {
    let mut connection = way.connect();
    // As long as the longer kind of header, so that the server does not wait for more.
    connection.stream().write_all(&[0x42; 32]).expect("sent");
    assert!(is_closed(&mut connection), "a request without magic ends the connection");
    let mut haggle = way.haggle();
    haggle.stream.write_all(&[0x42; 64]).expect("sent");
    assert!(haggle.reply(OPT_GO).is_err());
}

fn half_a_write(way: &Way) {
    let mut connection = way.connect();
    connection.write(0, &[5; 4096], 0);
    let header = connection.header(CMD_WRITE, 0, 77, 0, 4096);
    connection.stream().write_all(&header).expect("sent");
    connection.stream().write_all(&[6; 1000]).expect("sent");
    drop(connection);
    assert_eq!(way.connect().read(0, 4096), [5; 4096], "half a write was carried out");
}

fn absurd(way: &Way) {
    let mut connection = way.connect();
    let header = connection.header(CMD_WRITE, 0, 9, 0, u64::from(u32::MAX));
    connection.stream().write_all(&header).expect("sent");
    // "Request message": the server refuses it with an error or ends the connection.
    assert!(connection.receive().is_err(), "no reply to a request this client never recorded");
    let mut connection = way.connect();
    let reply = connection.call(CMD_READ, 0, 0, u32::MAX, &[]);
    assert!(reply.is_err() || reply.is_ok_and(|reply| [EINVAL, EOVERFLOW].contains(&reply.error)));
}

fn never_reads(way: &Way) {
    let mut greedy = way.connect();
    let mut length = 0;
    for cookie in 0..64u64 {
        // The kernel buffers some replies; the server must not keep the others in memory for ever.
        let header = greedy.header(CMD_READ, 0, cookie, 0, 1 << 20);
        greedy.stream().write_all(&header).expect("sent");
        length += 1;
    }
    assert_eq!(length, 64);
    let mut other = way.connect();
    other.write(0, &[8; 4096], 0);
    assert_eq!(other.read(0, 4096), [8; 4096]);
}

const SIZE_BYTES: u64 = 96 << 20;

fn daemon() -> Daemon {
    let mut daemon = Daemon::new(SMALL, &[("disk", "96MiB"), ("other", "1MiB")]);
    // The daemon logs a warning for each bad client.
    daemon.announce("nbd");
    daemon.restart();
    daemon
}

#[test]
fn over_tcp() {
    let mut daemon = daemon();
    Way::new(daemon.tcp("disk"), None, SIZE_BYTES).check();
    daemon.stop();
}

#[test]
fn over_a_unix_socket() {
    let mut daemon = daemon();
    Way::new(daemon.unix("disk"), None, SIZE_BYTES).check();
    daemon.stop();
}

#[test]
fn a_read_only_export_refuses_changes() {
    let settings =
        format!("{SMALL}[[volumes]]\nname = \"disk\"\nsize = \"8MiB\"\nread_only = true\n");
    let daemon = Daemon::started(&settings, &[]);
    let mut connection = Connection::open(&daemon.tcp("disk"), &Wanted::everything()).unwrap();
    assert_eq!(connection.info().flags & IS_READ_ONLY, IS_READ_ONLY);
    for (command, payload) in [(CMD_WRITE, &[1; 512][..]), (CMD_TRIM, &[]), (CMD_WRITE_ZEROES, &[])]
    {
        assert_eq!(connection.call(command, 0, 0, 512, payload).unwrap().error, EPERM);
    }
    assert_eq!(connection.read(0, 512), [0; 512]);
}

#[test]
fn extended_headers_carry_lengths_beyond_32_bits() {
    const GIB: u64 = 1 << 30;
    let mut daemon = Daemon::started(SMALL, &[("huge", "1TiB")]);
    let mut connection = Connection::open(&daemon.tcp("huge"), &Wanted::extended()).unwrap();
    for at in [0, 5 * GIB, 9 * GIB] {
        connection.write(at, &[7; 4096], 0);
    }
    let reply = connection.call_long(CMD_TRIM, 0, 0, 6 * GIB, &[]).expect("a reply");
    assert_eq!(reply.error, 0);
    assert_eq!(connection.read(5 * GIB, 4096), [0; 4096], "the trim ends at 32 bits");
    assert_eq!(connection.read(9 * GIB, 4096), [7; 4096], "beyond the trim");
    let reply = connection.call_long(CMD_BLOCK_STATUS, 0, 0, 1 << 40, &[]).expect("a reply");
    let hole = STATE_HOLE | STATE_ZERO;
    assert_eq!(reply.extents, [(9 * GIB, hole), (4096, 0), ((1 << 40) - 9 * GIB - 4096, hole)]);
    let reply = connection.call_long(CMD_WRITE_ZEROES, 0, GIB, 10 * GIB, &[]).expect("a reply");
    assert_eq!(reply.error, 0);
    assert_eq!(connection.read(9 * GIB, 4096), [0; 4096], "the zeroes end at 32 bits");
    // Payloads have their limit, even if the header could state a larger length.
    let reply = connection.call_long(CMD_READ, 0, 0, 64 << 20, &[]).expect("a reply");
    assert_eq!(reply.error, EINVAL);
    connection.disconnect().expect("a goodbye");
    daemon.stop();
}

#[test]
fn a_client_grows_a_volume_where_it_may() {
    let open = |daemon: &Daemon| Connection::open(&daemon.unix("disk"), &Wanted::everything());
    let daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    let mut connection = open(&daemon).expect("it opens");
    assert_eq!(connection.info().flags & CAN_RESIZE, 0, "only where it is configured");
    assert_eq!(connection.call(CMD_RESIZE, 0, 16 << 20, 0, &[]).expect("a reply").error, EINVAL);
    let settings = format!("{SMALL}[nbd]\nallow_resize = true\n");
    let mut daemon = Daemon::started(&settings, &[("disk", "8MiB")]);
    let (mut one, mut other) = (open(&daemon).expect("it opens"), open(&daemon).expect("again"));
    assert_eq!(one.info().flags & CAN_RESIZE, CAN_RESIZE);
    let beyond = 12 << 20;
    assert_eq!(other.call(CMD_WRITE, 0, beyond, 512, &[1; 512]).expect("a reply").error, ENOSPC);
    assert_eq!(one.call(CMD_RESIZE, 0, 16 << 20, 0, &[]).expect("a reply").error, 0);
    other.write(beyond, &[1; 512], 0);
    assert_eq!(open(&daemon).expect("it opens").info().size_bytes, 16 << 20);
    let shrunk = one.call(CMD_RESIZE, 0, 8 << 20, 0, &[]).expect("a reply");
    assert_eq!(shrunk.error, EPERM, "a client may not take away what others use");
    daemon.kill();
    // The configuration still has the first size.
    daemon.announce("the volume is larger than configured and stays so");
    daemon.restart();
    let mut connection = open(&daemon).expect("it opens");
    assert_eq!(connection.info().size_bytes, 16 << 20);
    assert_eq!(connection.read(beyond, 512), [1; 512]);
}
