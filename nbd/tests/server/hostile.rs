//! Clients that break the protocol: the server closes or answers them, and serves others
//! undisturbed.

use crate::client::Client;
use crate::{DIALECTS, Random, World, pattern};
use nbd::wire::{Dialect, command, command_flag};
use std::time::Duration;
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_wrong_request_magic_closes_the_connection() {
    let world = World::new().await;
    for dialect in DIALECTS {
        let mut client = world.open(dialect).await;
        let mut header = client.header(0, command::READ, 1, 0, 512);
        header[0] ^= 0x80;
        client.socket.write_all(&header).await.unwrap();
        assert!(client.is_closed_within(Duration::from_secs(5)).await);
    }
}

#[tokio::test]
async fn absurd_lengths_reserve_nothing() {
    let world = World::new().await;
    for length in [u64::from(u32::MAX), 0x8000_0000, 129 << 20] {
        let mut client = world.open(Dialect::Simple).await;
        let header = client.header(0, command::WRITE, 1, 0, length);
        client.socket.write_all(&header).await.unwrap();
        assert!(client.is_closed_within(Duration::from_secs(5)).await, "write of {length}");
        let mut client = world.open(Dialect::Simple).await;
        assert_eq!(client.call(command::READ, 0, 0, length).await.error, 22);
        assert_eq!(client.read_at(0, 512).await, [0; 512]);
    }
    let mut client = world.open(Dialect::Extended).await;
    for length in [1 << 40, u64::MAX] {
        assert_eq!(client.call(command::READ, 0, 0, length).await.error, 22);
    }
    assert_eq!(world.server.status().payload_bytes, 0);
}

#[tokio::test]
async fn payloads_where_none_belong_are_dropped_and_refused() {
    let world = World::new().await;
    let mut client = world.open(Dialect::Extended).await;
    let cookie = client.send(command::READ, 0, 0, 4096, &[7; 4096]).await;
    assert_eq!(client.reply(cookie).await.error, 22);
    // A write that announces no payload carries none.
    assert_eq!(client.call(command::WRITE, 0, 0, 4096).await.error, 22);
    assert_eq!(client.call(command::TRIM, command_flag::PAYLOAD_LEN, 0, 0).await.error, 22);
    assert_eq!(client.read_at(0, 4096).await, [0; 4096]);
}

#[tokio::test]
async fn a_truncated_write_changes_nothing() {
    let world = World::new().await;
    let guard = pattern(8, 64 << 10);
    let mut witness = world.open(Dialect::Simple).await;
    assert_eq!(witness.write_at(0, &guard).await, 0);
    for cut in [1, 27, 28, 29, 28 + (64 << 10) - 1] {
        let mut client = world.open(Dialect::Simple).await;
        let mut request = client.header(0, command::WRITE, 1, 0, 64 << 10);
        request.resize(28 + (64 << 10), 0xcc);
        client.socket.write_all(&request[..cut]).await.unwrap();
        drop(client);
    }
    world.until("the writers are gone", |status| status.connection_count == 1).await;
    assert!(witness.read_at(0, 64 << 10).await == guard);
}

#[tokio::test]
async fn random_bytes_harm_no_other_client() {
    let world = World::new().await;
    let guard = pattern(9, 1 << 20);
    let mut witness = world.open(Dialect::Structured).await;
    // Garbage starts with the wrong magic. The guard also lies out of reach of a header that is
    // valid by chance.
    assert_eq!(witness.write_at(1 << 20, &guard).await, 0);
    let mut random = Random(10);
    for round in 0..120 {
        let length = 1 + random.below(6000) as usize;
        let garbage = pattern(random.next(), length);
        let mut client = match round % 4 {
            0 => Client::over(world.socket().await),
            1 => world.greet().await,
            2 => world.open(Dialect::Simple).await,
            _ => world.open(Dialect::Extended).await,
        };
        // The server may close before it has read all of it.
        let _ = client.socket.write_all(&garbage).await;
        if round % 2 == 0 {
            client.is_closed_within(Duration::from_millis(5)).await;
        }
    }
    world.until("all of them are gone", |status| status.connection_count == 1).await;
    assert!(witness.read_at(1 << 20, 1 << 20).await == guard);
}

#[tokio::test]
async fn connections_that_vanish_with_requests_running_leave_nothing_behind() {
    let world = World::new().await;
    for round in 0..40u64 {
        let mut client = world.open(DIALECTS[round as usize % 3]).await;
        for index in 0..32 {
            client.send(command::READ, 0, index << 16, 256 << 10, &[]).await;
        }
        drop(client);
    }
    world
        .until("all is released", |status| {
            status.connection_count == 0 && status.payload_bytes == 0
        })
        .await;
}

#[tokio::test]
async fn headers_that_arrive_byte_by_byte_are_put_together() {
    let world = World::new().await;
    let mut client = world.open(Dialect::Structured).await;
    let mut request = client.header(0, command::WRITE, 77, 4096, 64);
    request.extend_from_slice(&[5; 64]);
    for byte in request {
        client.socket.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    assert_eq!(client.reply(77).await.error, 0);
    assert_eq!(client.read_at(4096, 64).await, [5; 64]);
}
