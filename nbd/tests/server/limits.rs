//! The limits of the server, and the orderly stop.

use crate::client::Client;
use crate::memory::{MemoryDevice, MemoryExports};
use crate::{SIZE, World, pattern};
use block::{ConditionKind, Conditions, ErrorKind};
use nbd::wire::{Dialect, command};
use nbd::{Listener, Server, ServerOptions, TlsMode, check_listen_address};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

#[tokio::test]
async fn a_client_that_says_nothing_is_closed_after_the_handshake_timeout() {
    let handshake_timeout = Duration::from_millis(200);
    let options = ServerOptions { handshake_timeout, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let mut silent = Client::over(world.socket().await);
    let mut greeted = world.greet().await;
    greeted.socket.write_all(&[0x49]).await.unwrap();
    assert!(silent.is_closed_within(Duration::from_secs(5)).await);
    assert!(greeted.is_closed_within(Duration::from_secs(5)).await);
    let mut idle = world.open(Dialect::Simple).await;
    tokio::time::sleep(handshake_timeout * 2).await;
    assert_eq!(idle.read_at(0, 512).await, [0; 512], "transmission may idle for ever");
}

#[tokio::test]
async fn one_connection_too_many_is_closed_and_the_rest_live() {
    let options = ServerOptions { connection_count_max: 3, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        clients.push(world.open(Dialect::Structured).await);
    }
    let mut extra = Client::over(world.socket().await);
    assert!(extra.is_closed_within(Duration::from_secs(5)).await);
    assert_eq!(world.server.status().refused_count, 1);
    clients.pop();
    world.until("a place is free", |status| status.connection_count == 2).await;
    clients.push(world.open(Dialect::Structured).await);
    for client in &mut clients {
        assert_eq!(client.read_at(0, 512).await, [0; 512]);
    }
}

#[tokio::test]
async fn announced_writes_hold_one_piece_each_and_never_more_than_the_budget() {
    // The smallest budget: 32 MiB shared, and private shares of 64 KiB, which are less than a
    // piece.
    let stall_timeout = Duration::from_millis(300);
    let options = ServerOptions {
        payload_memory_bytes: 0,
        connection_count_max: 512,
        stall_timeout,
        ..ServerOptions::default()
    };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let mut bystander = world.open(Dialect::Structured).await;
    let mut stalled = Vec::new();
    for _ in 0..31 {
        let mut client = world.open(Dialect::Simple).await;
        let header = client.header(0, command::WRITE, 1, 0, 32 << 20);
        client.socket.write_all(&header).await.unwrap();
        stalled.push(client);
    }
    let held = 31 * block::device::PAYLOAD_BYTES_KEPT as usize;
    world.until("each holds one piece", |status| status.payload_bytes == held).await;
    let data = pattern(5, 1 << 20);
    assert_eq!(bystander.write_at(0, &data).await, 0, "what is left serves others");
    tokio::time::sleep(stall_timeout * 2).await;
    assert_eq!(world.server.status().payload_bytes, held, "nobody waits, so nobody is evicted");

    // A request for all of the shared memory is served once the stalled clients have been
    // disconnected. Small requests are served meanwhile.
    let mut greedy = world.open(Dialect::Simple).await;
    let read = tokio::spawn(async move { greedy.read_at(0, 32 << 20).await });
    for _ in 0..10 {
        assert_eq!(bystander.read_at(0, 4096).await, data[..4096]);
    }
    assert!(read.await.unwrap()[..1 << 20] == data);
    world.until("the stalled ones are gone", |status| status.connection_count <= 1).await;
    for client in &mut stalled {
        assert!(client.is_closed_within(Duration::from_secs(5)).await);
    }
}

#[tokio::test]
async fn a_client_that_reads_no_replies_keeps_others_unharmed() {
    let world = World::new().await;
    let data = pattern(6, 4 << 20);
    let mut slow = world.open(Dialect::Structured).await;
    assert_eq!(slow.write_at(0, &data).await, 0);
    let mut cookies = Vec::new();
    for _ in 0..96 {
        cookies.push(slow.send(command::READ, 0, 0, 1 << 20, &[]).await);
    }
    let mut other = world.open(Dialect::Structured).await;
    for _ in 0..20 {
        assert!(other.read_at(0, 4 << 20).await == data);
    }
    let held = world.server.status().payload_bytes;
    assert!(held <= 48 << 20, "unread replies hold {held} bytes, more than a quarter");
    for cookie in cookies {
        assert!(slow.reply(cookie).await.bytes() == data[..1 << 20]);
    }
}

#[tokio::test]
async fn replies_without_payload_are_bounded_too() {
    let world = World::new().await;
    let mut slow = world.open(Dialect::Extended).await;
    for block in 0..256 {
        slow.write_at(block << 17, &[1; 512]).await;
    }
    let requests = slow.header(0, command::BLOCK_STATUS, 1, 0, SIZE).repeat(100);
    // Each answer has 256 extents, 4 KiB. Beyond its own bound the server answers only as much as
    // the socket buffers took, some MiB; the rest of the flood must wait in the client.
    let flood = async {
        for _ in 0..2500 {
            slow.socket.write_all(&requests).await.unwrap();
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(2), flood).await.is_err());
    let count = world.server.status().request_count;
    assert!((257..20_000).contains(&count), "{count} replies were made that nobody reads");
}

#[tokio::test]
async fn stop_answers_running_requests_and_ends() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_millis(300);
    let world = World::with(ServerOptions::default(), TlsMode::Off, disk).await;
    let mut client = world.open(Dialect::Simple).await;
    let mut idle = world.open(Dialect::Simple).await;
    let mut haggling = world.greet().await;
    let data = pattern(7, 4096);
    let mut cookies = Vec::new();
    for index in 0..8 {
        cookies.push(client.send(command::WRITE, 0, index * 4096, 4096, &data).await);
    }
    // Half a request: it is never completed, and the stop must not wait for it.
    let header = idle.header(0, command::WRITE, 9, 0, 4096);
    idle.socket.write_all(&header[..20]).await.unwrap();
    let running = || world.disk.running_count_peak.load(std::sync::atomic::Ordering::Relaxed);
    while running() < 8 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let start = tokio::time::Instant::now();
    world.server.stop(Duration::from_secs(10));
    for cookie in cookies {
        assert_eq!(client.reply(cookie).await.error, 0);
    }
    for client in [&mut client, &mut idle, &mut haggling] {
        assert!(client.is_closed_within(Duration::from_secs(5)).await);
    }
    drop((client, idle, haggling));
    world.serving.await.unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "an idle client was waited for");
    assert!(tokio::net::TcpStream::connect(world.address).await.is_err());
}

#[tokio::test]
async fn stop_closes_connections_that_exceed_its_grace() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_secs(3600);
    let world = World::with(ServerOptions::default(), TlsMode::Off, disk).await;
    let mut client = world.open(Dialect::Simple).await;
    client.send(command::READ, 0, 0, 4096, &[]).await;
    while world.disk.running_count_peak.load(std::sync::atomic::Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    world.server.stop(Duration::from_millis(100));
    world.serving.await.unwrap().unwrap();
    assert!(client.is_closed_within(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn a_unix_socket_is_private_replaced_when_stale_and_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let disk = Arc::new(MemoryDevice::new(SIZE));
    let exports = Arc::new(MemoryExports([("disk".to_owned(), disk)].into()));
    for round in 0..2 {
        if round == 1 {
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap()); // left by a dead process
        }
        let listener = Listener::unix(&path, 0o600, TlsMode::Off).await.unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let server = Server::new(Arc::clone(&exports), ServerOptions::default()).unwrap();
        let serving = tokio::spawn({
            let server = server.clone();
            async move { server.serve(listener).await }
        });
        let busy = Listener::unix(&path, 0o600, TlsMode::Off).await.unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::Busy, "{busy}");
        let socket = UnixStream::connect(&path).await.unwrap();
        let mut client = Client::greet(socket).await.go("disk", Dialect::Extended).await;
        assert_eq!(client.write_at(0, b"unix").await, 0);
        assert_eq!(client.read_at(0, 4).await, b"unix");
        drop(client);
        server.stop(Duration::from_secs(5));
        serving.await.unwrap().unwrap();
        assert!(!path.exists());
    }
    std::fs::write(&path, "a file of somebody").unwrap();
    let refused = Listener::unix(&path, 0o600, TlsMode::Off).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert_eq!(std::fs::read(&path).unwrap(), b"a file of somebody");
}

#[test]
fn an_address_that_others_reach_needs_tls_or_permission() {
    for (address, tls, is_allowed, is_fine) in [
        ("127.0.0.1:1", TlsMode::Off, false, true),
        ("[::1]:1", TlsMode::Off, false, true),
        ("[::ffff:127.0.0.1]:1", TlsMode::Off, false, true),
        ("0.0.0.0:1", TlsMode::Off, false, false),
        ("[::]:1", TlsMode::Off, false, false),
        ("192.0.2.1:1", TlsMode::On, false, false),
        ("192.0.2.1:1", TlsMode::Required, false, true),
        ("192.0.2.1:1", TlsMode::Off, true, true),
    ] {
        let verdict = check_listen_address(&address.parse().unwrap(), tls, is_allowed);
        assert_eq!(verdict.is_ok(), is_fine, "{address} {tls:?}");
    }
}

#[tokio::test]
async fn silent_clients_do_not_keep_others_out_for_long() {
    let conditions = Conditions::default();
    let options = ServerOptions {
        connection_count_max: 8,
        handshake_timeout: Duration::from_secs(3600),
        pressed_timeout: Duration::from_millis(500),
        conditions: conditions.clone(),
        ..ServerOptions::default()
    };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    let listener = Listener::unix(&path, 0o600, TlsMode::Off).await.unwrap();
    let local = tokio::spawn({
        let server = world.server.clone();
        async move { server.serve(listener).await }
    });
    let mut attached = world.open(Dialect::Simple).await;
    let mut mute = Vec::new();
    for _ in 0..300 {
        mute.push(world.socket().await);
    }
    let listener = world.address.to_string();
    let is_raised = || conditions.is_raised(ConditionKind::ConnectionsRefused, &listener);
    world.until("most are refused", |status| status.refused_count >= 290).await;
    assert!(is_raised(), "{conditions:?}");
    // Half of the places remain for clients that have negotiated.
    assert!(world.server.status().connection_count <= 5);
    let socket = UnixStream::connect(&path).await.unwrap();
    let mut beside = Client::greet(socket).await.go("disk", Dialect::Simple).await;
    assert_eq!(beside.read_at(0, 512).await, [0; 512]);
    assert!(world.server.place().is_ok(), "a device of the kernel has its place");
    // Silent clients are closed, and a client that negotiates connects.
    world.until("they are gone", |status| status.connection_count <= 3).await;
    let mut remote = world.open(Dialect::Simple).await;
    assert_eq!(remote.read_at(0, 512).await, [0; 512]);
    assert_eq!(attached.read_at(0, 512).await, [0; 512], "transmission may idle for ever");
    world.server.stop(Duration::from_secs(5));
    drop((attached, beside, remote));
    local.await.unwrap().unwrap();
    world.serving.await.unwrap().unwrap();
    assert!(!is_raised(), "a listener that is closed refuses nobody");
}

#[tokio::test]
async fn local_clients_have_places_of_their_own_when_all_others_are_taken() {
    // Clients that are served take all places; the unix socket and the kernel still have theirs.
    let options = ServerOptions { connection_count_max: 2, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let _served = [world.open(Dialect::Simple).await, world.open(Dialect::Simple).await];
    let places: Vec<_> = (0..100).map_while(|_| world.server.place().ok()).collect();
    assert_eq!(places.len(), nbd::RESERVED_COUNT);
    let mut extra = Client::over(world.socket().await);
    assert!(extra.is_closed_within(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn vanished_client_is_noticed_with_all_slots_taken() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_secs(3600);
    let options = ServerOptions { request_count_max: 2, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, disk).await;
    for dialect in [Dialect::Simple, Dialect::Extended] {
        let mut client = world.open(dialect).await;
        for _ in 0..5 {
            client.send(command::WRITE, 0, 0, 4096, &[1; 4096]).await;
        }
        let running = || world.disk.running_count_peak.load(std::sync::atomic::Ordering::Relaxed);
        while running() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // The session reads no end of the stream while all request slots are taken.
        drop(client);
        world.until("its session has ended", |status| status.connection_count == 0).await;
    }
}
