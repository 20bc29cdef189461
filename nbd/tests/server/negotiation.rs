//! Negotiation options over a socket.

use crate::World;
use crate::client::{Client, named};
use nbd::wire::{Dialect, command, info, option, option_reply};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn list_info_and_go_describe_the_exports() {
    let world = World::new().await;
    let mut client = world.greet().await;
    let (kind, names) = client.option(option::LIST, &[]).await;
    assert_eq!(kind, option_reply::ACK);
    let expected = ["disk", "fixed"].map(|name| (option_reply::SERVER, named(name, &[])));
    assert_eq!(names, expected);
    assert_eq!(client.option(option::LIST, b"x").await.0, option_reply::ERR_INVALID);

    let wants_block_size = [&1u16.to_be_bytes()[..], &info::BLOCK_SIZE.to_be_bytes()].concat();
    let data = named("disk", &wants_block_size);
    let described = client.option(option::INFO, &data).await;
    let block_size = &described.1[1].1;
    let sizes: Vec<u32> = block_size[2..]
        .chunks(4)
        .map(|four| u32::from_be_bytes(four.try_into().unwrap()))
        .collect();
    assert_eq!(sizes, [1, 4096, 32 << 20]);
    for missing in [option::INFO, option::GO] {
        let refused = client.option(missing, &named("nothing", &[0, 0])).await.0;
        assert_eq!(refused, option_reply::ERR_UNKNOWN);
    }
    assert_eq!(client.option(option::GO, &data).await, described, "GO says what INFO said");
}

#[tokio::test]
async fn empty_name_opens_the_default_export() {
    let world = World::new().await;
    let client = world.greet().await.go("", Dialect::Simple).await;
    assert_eq!(client.size_bytes, crate::SIZE);
}

#[tokio::test]
async fn export_name_starts_transmission_without_a_reply_header() {
    let world = World::new().await;
    for (flags, padding) in [(3u32, 0), (1, 124)] {
        let mut socket = world.socket().await;
        socket.read_exact(&mut [0; 18]).await.unwrap();
        socket.write_all(&flags.to_be_bytes()).await.unwrap();
        let mut client = Client::over(socket);
        client.send_option(option::EXPORT_NAME, b"disk").await;
        let mut answer = vec![0xff; 10 + padding];
        client.socket.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer[..8], crate::SIZE.to_be_bytes());
        assert!(answer[10..].iter().all(|byte| *byte == 0));
        assert_eq!(client.read_at(0, 4096).await, [0; 4096]);
    }
    let mut client = world.greet().await;
    client.send_option(option::EXPORT_NAME, b"nothing").await;
    assert!(client.is_closed_within(Duration::from_secs(5)).await);
}

#[tokio::test]
async fn unknown_and_long_options_leave_the_connection_usable() {
    let world = World::new().await;
    let mut client = world.greet().await;
    for (bytes, reply) in [
        (0, option_reply::ERR_UNSUP),
        (40_000, option_reply::ERR_UNSUP),
        (100_000, option_reply::ERR_TOO_BIG),
    ] {
        assert_eq!(client.option(0x4e42_4400, &vec![7; bytes]).await.0, reply, "{bytes} bytes");
    }
    let malformed = named("disk", &[0, 9, 0, 3]);
    assert_eq!(client.option(option::GO, &malformed).await.0, option_reply::ERR_INVALID);
    let mut client = client.go("disk", Dialect::Structured).await;
    assert_eq!(client.read_at(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn handshake_errors_close_the_connection() {
    let world = World::new().await;
    let mut client = world.greet().await;
    client.socket.write_all(&[0x11; 16]).await.unwrap();
    assert!(client.is_closed_within(Duration::from_secs(5)).await, "bad option magic");

    let mut client = world.greet().await;
    assert_eq!(client.option(option::ABORT, &[]).await.0, option_reply::ACK);
    assert!(client.is_closed_within(Duration::from_secs(5)).await, "ABORT");

    let mut socket = world.socket().await;
    socket.write_all(&0x4000_0003u32.to_be_bytes()).await.unwrap();
    let mut client = Client::over(socket);
    assert!(client.is_closed_within(Duration::from_secs(5)).await, "unknown client flags");
}

#[tokio::test]
async fn block_status_needs_a_context_for_this_export() {
    let world = World::new().await;
    let mut client = world.greet().await;
    client.option(option::STRUCTURED_REPLY, &[]).await;
    let query = [&1u32.to_be_bytes()[..], &named("base:allocation", &[])].concat();
    let selected = client.option(option::SET_META_CONTEXT, &named("fixed", &query)).await;
    assert_eq!(selected.1.len(), 1);
    let unknown = client.option(option::LIST_META_CONTEXT, &named("nothing", &query)).await.0;
    assert_eq!(unknown, option_reply::ERR_UNKNOWN);
    client.option(option::GO, &named("disk", &[0, 0])).await;
    client.dialect = Dialect::Structured;
    assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 4096).await.error, 22);
    assert_eq!(client.read_at(0, 512).await, [0; 512]);
}
