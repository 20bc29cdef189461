//! Requests and replies, in each dialect.

use crate::memory::MemoryDevice;
use crate::{DIALECTS, Random, SIZE, World, pattern};
use block::ErrorKind;
use nbd::wire::{Dialect, command, command_flag, transmission_flag};
use nbd::{ServerOptions, TlsMode};
use std::sync::atomic::Ordering;
use std::time::Duration;

#[tokio::test]
async fn every_command_works_in_every_dialect() {
    let world = World::new().await;
    for dialect in DIALECTS {
        let mut client = world.open(dialect).await;
        let data = pattern(1, 300_001);
        assert_eq!(client.write_at(12_345, &data).await, 0);
        assert_eq!(client.read_at(12_345, data.len() as u64).await, data);
        assert_eq!(client.read_at(12_344, 3).await[1..], data[..2], "unaligned by one");
        for (command, flags) in [
            (command::CACHE, 0),
            (command::WRITE_ZEROES, command_flag::FAST_ZERO),
            (command::WRITE_ZEROES, command_flag::FUA | command_flag::NO_HOLE),
            (command::TRIM, command_flag::FUA),
        ] {
            assert_eq!(client.call(command, flags, 0, 1 << 20).await.error, 0, "{command}");
        }
        assert_eq!(client.call(command::FLUSH, command_flag::FUA, 0, 0).await.error, 0);
        assert_eq!(client.read_at(0, 1 << 20).await, vec![0; 1 << 20]);
        for command in [command::READ, command::WRITE, command::TRIM, command::CACHE] {
            assert_eq!(client.call(command, 0, SIZE, 0).await.error, 0, "no length: {command}");
        }
        let wants_df = dialect != Dialect::Simple;
        assert_eq!(client.flags & transmission_flag::SEND_DF != 0, wants_df);
    }
    assert_eq!(world.disk.flush_count.load(Ordering::Relaxed), 3);
    assert_eq!(world.disk.prefetch_count.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn errors_are_those_of_the_specification() {
    let world = World::new().await;
    for dialect in DIALECTS {
        let mut client = world.open(dialect).await;
        let payload = [7; 4096];
        let past = client.send(command::WRITE, 0, SIZE - 1, 4096, &payload).await;
        assert_eq!(client.reply(past).await.error, 28, "ENOSPC");
        assert_eq!(client.call(command::WRITE_ZEROES, 0, SIZE, 1).await.error, 28);
        for command in [command::READ, command::TRIM, command::CACHE] {
            assert_eq!(client.call(command, 0, SIZE - 1, 2).await.error, 22, "EINVAL");
        }
        assert_eq!(client.call(99, 0, 0, 0).await.error, 22);
        assert_eq!(client.call(command::READ, 0x8000, 0, 512).await.error, 22);
        assert_eq!(client.call(command::RESIZE, 0, SIZE, 0).await.error, 22, "not offered");
        world.disk.has_fast_zero.store(false, Ordering::Relaxed);
        let fast = command_flag::FAST_ZERO;
        assert_eq!(client.call(command::WRITE_ZEROES, fast, 0, 512).await.error, 95, "ENOTSUP");
        world.disk.has_fast_zero.store(true, Ordering::Relaxed);
        for (kind, error) in
            [(ErrorKind::Corrupt, 5), (ErrorKind::Full, 28), (ErrorKind::NotFound, 108)]
        {
            *world.disk.failure.lock().unwrap() = Some(kind);
            let reply = client.call(command::READ, 0, 0, 4096).await;
            assert_eq!(reply.error, error);
            assert_eq!(reply.message.is_empty(), dialect == Dialect::Simple);
            assert_eq!(client.write_at(0, &payload).await, error);
            assert_eq!(client.call(command::FLUSH, 0, 0, 0).await.error, error);
            *world.disk.failure.lock().unwrap() = None;
        }
        assert_eq!(client.read_at(SIZE - 1, 1).await, [0], "refused writes wrote nothing");
    }
    let mut client = world.greet().await.go("fixed", Dialect::Structured).await;
    assert_ne!(client.flags & transmission_flag::READ_ONLY, 0);
    assert_eq!(client.write_at(0, &[1; 512]).await, 1, "EPERM");
    assert_eq!(client.call(command::TRIM, 0, 0, 512).await.error, 1);
    assert_eq!(client.read_at(0, 512).await, [0; 512]);
}

#[tokio::test]
async fn requests_for_another_owner_are_not_answered() {
    let world = World::new().await;
    for dialect in DIALECTS {
        for (command, payload) in
            [(command::READ, &[][..]), (command::WRITE, &[7; 4096]), (command::FLUSH, &[])]
        {
            let mut client = world.open(dialect).await;
            assert_eq!(client.write_at(0, &[1; 512]).await, 0);
            *world.disk.failure.lock().unwrap() = Some(ErrorKind::Fenced);
            let length = if command == command::FLUSH { 0 } else { 4096 };
            client.send(command, 0, 0, length, payload).await;
            let is_closed = client.is_closed_unanswered_within(Duration::from_secs(10)).await;
            assert!(is_closed, "{dialect:?} {command}");
            *world.disk.failure.lock().unwrap() = None;
        }
    }
    world.until("all payload memory is back", |status| status.payload_bytes == 0).await;
}

#[tokio::test]
async fn the_largest_payload_passes_and_one_byte_more_does_not() {
    let world = World::new().await;
    let max = 32u64 << 20;
    let data = pattern(2, max as usize);
    for dialect in DIALECTS {
        let mut client = world.open(dialect).await;
        assert_eq!(client.write_at(1, &data).await, 0);
        let reply = client.call(command::READ, 0, 1, max).await;
        assert_eq!(reply.contents.len() > 1, dialect != Dialect::Simple, "pieces where allowed");
        assert!(reply.bytes() == data);
        if dialect != Dialect::Simple {
            let whole = client.call(command::READ, command_flag::DF, 1, max).await;
            assert_eq!(whole.contents.len(), 1);
            assert!(whole.bytes() == data);
        }
        let mut longer = data.clone();
        longer.push(1);
        assert_eq!(client.write_at(0, &longer).await, 22);
        assert_eq!(client.call(command::READ, 0, 0, max + 1).await.error, 22);
        *world.disk.failure.lock().unwrap() = Some(ErrorKind::Io);
        assert_eq!(client.write_at(0, &data).await, 5, "one answer for all pieces");
        assert_eq!(client.call(command::READ, 0, 0, max).await.error, 5);
        *world.disk.failure.lock().unwrap() = None;
        assert_eq!(client.read_at(1, 512).await, data[..512], "in step after errors");
    }
    world.until("all payload memory is back", |status| status.payload_bytes == 0).await;
}

#[tokio::test]
async fn allocation_is_reported_as_it_is() {
    let world = World::new().await;
    let (block, hole, zero) = (64u64 << 10, 3, 2);
    for dialect in [Dialect::Structured, Dialect::Extended] {
        let mut client = world.open(dialect).await;
        client.call(command::TRIM, 0, 0, SIZE).await;
        client.write_at(block, &pattern(3, block as usize)).await;
        client.call(command::WRITE_ZEROES, command_flag::NO_HOLE, 2 * block, block).await;
        let status = client.call(command::BLOCK_STATUS, 0, 0, SIZE).await;
        let expected = [(block, hole), (block, 0), (block, zero), (SIZE - 3 * block, hole)];
        assert_eq!(status.extents, expected);
        let one = client.call(command::BLOCK_STATUS, command_flag::REQ_ONE, 512, SIZE - 512).await;
        assert_eq!(one.extents, [(block - 512, hole)]);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 1, SIZE).await.error, 22);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 0).await.error, 22);
        if dialect == Dialect::Extended {
            let query = [&block.to_be_bytes()[..], &1u32.to_be_bytes()].concat();
            let length = query.len() as u64;
            let cookie = client.send(command::BLOCK_STATUS, 0, block, length, &query).await;
            assert_eq!(client.reply(cookie).await.extents, [(block, 0)]);
            let cookie = client.send(command::BLOCK_STATUS, 0, block, 9, &[0; 9]).await;
            assert_eq!(client.reply(cookie).await.error, 22);
            let huge = client.call(command::WRITE_ZEROES, 0, 0, 1 << 62).await;
            assert_eq!(huge.error, 28);
        }
    }
}

#[tokio::test]
async fn requests_run_concurrently_up_to_the_limit() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_millis(30);
    let options = ServerOptions { request_count_max: 16, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, disk).await;
    let mut client = world.open(Dialect::Structured).await;
    let mut cookies = Vec::new();
    for index in 0..64 {
        cookies.push(client.send(command::READ, 0, index * 4096, 4096, &[]).await);
    }
    for cookie in cookies {
        client.reply(cookie).await.bytes();
    }
    assert_eq!(world.disk.running_count_peak.load(Ordering::Relaxed), 16);
}

#[tokio::test]
async fn a_fast_reply_overtakes_a_slow_one() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_millis(500);
    let world = World::with(ServerOptions::default(), TlsMode::Off, disk).await;
    let mut client = world.open(Dialect::Structured).await;
    let slow = client.send(command::READ, 0, 0, 4096, &[]).await;
    let start = tokio::time::Instant::now();
    assert_eq!(client.call(command::CACHE, 0, 0, 4096).await.error, 0);
    assert!(start.elapsed() < Duration::from_millis(400), "waited for the slow request");
    client.reply(slow).await.bytes();
}

#[tokio::test]
async fn disc_finishes_earlier_requests() {
    let mut disk = MemoryDevice::new(SIZE);
    disk.latency = Duration::from_millis(20);
    let world = World::with(ServerOptions::default(), TlsMode::Off, disk).await;
    let mut client = world.open(Dialect::Simple).await;
    let data = pattern(4, 16 << 10);
    for index in 0..32 {
        client.send(command::WRITE, 0, index << 14, 16 << 10, &data).await;
    }
    client.send(command::DISC, 0, 0, 0, &[]).await;
    assert!(client.is_closed_within(Duration::from_secs(5)).await);
    let mut client = world.open(Dialect::Simple).await;
    for index in 0..32 {
        assert!(client.read_at(index << 14, 16 << 10).await == data, "write {index} was lost");
    }
}

#[tokio::test]
async fn a_resize_is_seen_by_every_connection() {
    let options = ServerOptions { can_resize: true, ..ServerOptions::default() };
    let world = World::with(options, TlsMode::Off, MemoryDevice::new(SIZE)).await;
    let mut one = world.open(Dialect::Structured).await;
    let mut other = world.open(Dialect::Simple).await;
    assert_ne!(one.flags & transmission_flag::SEND_RESIZE, 0);
    assert_eq!(other.write_at(SIZE, b"beyond").await, 28);
    assert_eq!(one.call(command::RESIZE, 0, SIZE / 2, 0).await.error, 22, "it only grows");
    assert_eq!(one.call(command::RESIZE, 0, SIZE + 4096, 0).await.error, 0);
    assert_eq!(other.write_at(SIZE, b"beyond").await, 0);
    assert_eq!(one.read_at(SIZE, 6).await, b"beyond");
    assert_eq!(world.open(Dialect::Simple).await.size_bytes, SIZE + 4096);
}

/// Random disjoint requests run concurrently and are compared with a model. `SEED=17 cargo test`
/// replays one run.
#[tokio::test]
async fn contents_follow_the_model_with_many_requests_in_flight() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(20);
    for dialect in DIALECTS {
        let world = World::new().await;
        let mut client = world.open(dialect).await;
        let mut random = Random(seed);
        let (slots, slot_bytes) = (24u64, 96u64 << 10);
        let mut model = vec![0u8; (slots * slot_bytes) as usize];
        for round in 0..60 {
            let mut sent = Vec::new();
            for slot in 0..slots {
                let at = slot * slot_bytes + random.below(slot_bytes / 2);
                let length = 1 + random.below(slot_bytes / 2 - 1);
                let range = at as usize..(at + length) as usize;
                let cookie = match random.below(4) {
                    0 => {
                        let data = pattern(random.next(), length as usize);
                        model[range.clone()].copy_from_slice(&data);
                        client.send(command::WRITE, 0, at, length, &data).await
                    }
                    1 => {
                        model[range.clone()].fill(0);
                        let command =
                            [command::TRIM, command::WRITE_ZEROES][random.below(2) as usize];
                        client.send(command, 0, at, length, &[]).await
                    }
                    _ => client.send(command::READ, 0, at, length, &[]).await,
                };
                sent.push((cookie, range));
            }
            for (cookie, range) in sent {
                let reply = client.reply(cookie).await;
                assert_eq!(reply.error, 0, "SEED={seed} {dialect:?} round {round}");
                if !reply.contents.is_empty() {
                    assert!(reply.bytes() == model[range], "SEED={seed} {dialect:?} round {round}");
                }
            }
        }
        assert!(client.read_at(0, model.len() as u64).await == model, "SEED={seed} {dialect:?}");
    }
}
