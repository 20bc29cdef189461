//! NBD over a unix socket: the whole server under the bytes of a client, and the client of remote
//! devices under the bytes of a server.
//!
//! Invariants:
//! - A connection ends once its client has sent everything and closed its sending direction.
//! - After each connection the server still answers a client that behaves.

use crate::memory::{MemoryDevice, MemoryExports};
use crate::nbd_wire::{negotiation, option_bytes, request_bytes, requests, reservation};
use crate::{LARGE, dir_in_memory, no_repair, runtime};
use fuzz::{Outcome, Target};
use nbd::wire::{
    Dialect, Intent, command, info, option, option_reply, put_greeting, put_option_reply,
    transmission_flag,
};
use nbd::{Listener, Server, ServerOptions, TlsMode, client};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// Size of the export, so small that the replies to many reads are short.
const SIZE_BYTES: u64 = 128 << 10;
/// Longest time of one execution. Chosen by hand: thousands of times that of a usual one.
const EXECUTION_MAX: Duration = Duration::from_secs(20);

/// Sends `input` on a connection, closes that direction, and reads until the peer closes. Returns
/// the number of bytes that came.
async fn exchange(mut stream: UnixStream, input: &[u8]) -> usize {
    let (mut read, mut write) = stream.split();
    let send = async {
        // The server may close first.
        let _ = write.write_all(input).await;
        let _ = write.shutdown().await;
    };
    let receive = async {
        let (mut buffer, mut sum) = (vec![0; 64 << 10], 0);
        while let Ok(count @ 1..) = read.read(&mut buffer).await {
            sum += count;
        }
        sum
    };
    let both = async { tokio::join!(send, receive).1 };
    tokio::time::timeout(EXECUTION_MAX, both).await.expect("the connection ends")
}

#[test]
fn nbd_session() {
    let dialects = [Dialect::Simple, Dialect::Structured, Dialect::Extended];
    let mut inputs: Vec<Vec<u8>> = dialects
        .into_iter()
        .map(|dialect| [negotiation(dialect), requests(dialect)].concat())
        .collect();
    let old = [&[0, 0, 0, 1][..], &option_bytes(option::EXPORT_NAME, b"disk")].concat();
    let many: Vec<u8> = (0..40)
        .flat_map(|index| {
            request_bytes(Dialect::Simple, (0, command::WRITE), (index * 512, 512), &[7; 512])
        })
        .collect();
    inputs.push([&old[..], &many].concat());
    let (runtime, dir) = (runtime(), dir_in_memory());
    let path = dir.path().join("nbd.sock");
    let served = runtime.block_on(async {
        let disk = Arc::new(MemoryDevice::new(SIZE_BYTES));
        let exports = Arc::new(MemoryExports([("disk".to_owned(), disk)].into()));
        let server = Server::new(exports, ServerOptions::default()).expect("valid options");
        let listener = Listener::unix(&path, 0o600, TlsMode::Off).await.expect("a free path");
        let serving = server.clone();
        tokio::spawn(async move { serving.serve(listener).await });
        server
    });
    let decode = |input: &[u8]| {
        runtime.block_on(async {
            let before = served.status();
            let stream = UnixStream::connect(&path).await.expect("the server listens");
            let received = exchange(stream, input).await;
            let requests = served.status().request_count - before.request_count;
            let errors = served.status().error_count - before.error_count;
            match requests > errors {
                true => Outcome::Accepted,
                false => Outcome::Refused(format!("after {} KiB", received >> 10)),
            }
        })
    };
    Target {
        name: "nbd_session",
        inputs,
        repair: &no_repair,
        decode: &decode,
        execution_count: 3000,
        input_bytes_max: 64 << 10,
        allocation: LARGE,
    }
    .check();
    // Payload memory is given back, and the server still works.
    let whole = [negotiation(Dialect::Extended), requests(Dialect::Extended)].concat();
    assert_eq!(decode(&whole), Outcome::Accepted);
    assert_eq!(served.status().payload_bytes, 0);
}

#[test]
fn nbd_client() {
    let mut greeting = Vec::new();
    put_greeting(&mut greeting);
    let mut answers = greeting.clone();
    put_option_reply(&mut answers, option::RESERVATION, option_reply::ACK, &[]);
    let flags = transmission_flag::HAS_FLAGS | transmission_flag::SEND_FLUSH;
    let export =
        [&info::EXPORT.to_be_bytes()[..], &(1u64 << 30).to_be_bytes(), &flags.to_be_bytes()];
    put_option_reply(&mut answers, option::GO, option_reply::INFO, &export);
    put_option_reply(&mut answers, option::GO, option_reply::INFO, &[&[0, 1], b"disk"]);
    put_option_reply(&mut answers, option::GO, option_reply::ACK, &[]);
    let mut refused = greeting;
    put_option_reply(&mut refused, option::RESERVATION, option_reply::ERR_UNSUP, &[b"unknown"]);
    put_option_reply(&mut refused, option::GO, option_reply::ERR_UNKNOWN, &[b"no such export"]);
    let (runtime, dir) = (runtime(), dir_in_memory());
    let path = dir.path().join("nbd.sock");
    let listener = runtime.block_on(async { UnixListener::bind(&path).expect("a free path") });
    let uri = format!("nbd+unix:///disk?socket={}", path.display());
    let target = client::Target::parse(&uri).expect("a valid address");
    let reservation = reservation(Intent::Attach);
    let decode = |input: &[u8]| {
        runtime.block_on(async {
            let serve = async {
                let (mut stream, _) = listener.accept().await.expect("the client connects");
                let (mut read, mut write) = stream.split();
                // The client may close first.
                let _ = write.write_all(input).await;
                let _ = write.shutdown().await;
                // Its bytes are read, so that its close is no reset.
                let mut buffer = [0; 4096];
                while let Ok(1..) = read.read(&mut buffer).await {}
            };
            let open = async {
                client::open(&target, &reservation).await.map(|reached| reached.size_bytes)
            };
            let both = async { tokio::join!(serve, open).1 };
            let opened = tokio::time::timeout(EXECUTION_MAX, both).await;
            Outcome::of(opened.expect("the client ends").map_err(|error| error.chain()))
        })
    };
    Target {
        name: "nbd_client",
        inputs: vec![answers, refused],
        repair: &no_repair,
        decode: &decode,
        execution_count: 5000,
        input_bytes_max: 8192,
        allocation: LARGE,
    }
    .check();
}
