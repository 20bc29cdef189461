//! Frames and streams between admitted nodes.

use super::*;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn frames_of_all_lengths_arrive_as_they_were_sent() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    let connected = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await;
    let connection = connected.unwrap();
    assert_eq!((connection.peer(), connection.pool()), (first.id(), Some(POOL)));
    let (mut reader, mut writer) = connection.into_frames();
    let payload = Bytes::from((0..3_000_000u32).map(|n| (n % 251) as u8).collect::<Vec<u8>>());
    let lengths = [0, 1, 16_383, 16_384, 16_385, 3_000_000];
    let sending = async {
        for (request, length) in (1..).zip(lengths) {
            let parts =
                [Bytes::new(), payload.slice(..length / 3), payload.slice(length / 3..length)];
            writer.write(7, request, &parts).await.unwrap();
        }
        writer.close().await.unwrap();
    };
    let receiving = async {
        for (request, length) in (1..).zip(lengths) {
            let frame = reader.read().await.unwrap().unwrap();
            assert_eq!((frame.kind, frame.request), (7, request));
            assert!(frame.payload == payload.slice(..length), "{length}");
        }
        assert_eq!(reader.read().await.unwrap(), None);
    };
    timeout(WAIT, async { tokio::join!(sending, receiving) }).await.unwrap();
}

#[tokio::test]
async fn payload_beyond_the_bound_is_not_sent() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    let connected = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await;
    let (mut reader, mut writer) = connected.unwrap().into_frames();
    let max = usize::try_from(Service::Member.payload_bytes_max()).unwrap();
    let part = Bytes::from(vec![0; max / 2 + 1]);
    let error = writer.write(1, 1, &[part.clone(), part]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    writer.write(1, 2, &[]).await.unwrap();
    assert_eq!(reader.read().await.unwrap().unwrap().request, 2);
}

#[tokio::test]
async fn reader_refuses_payloads_beyond_its_own_bound() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    let connected = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await;
    let (mut reader, mut writer) = connected.unwrap().into_frames();
    reader.limit(1000);
    reader.limit(u32::MAX);
    writer.write(1, 1, &[Bytes::from(vec![0; 1000])]).await.unwrap();
    assert_eq!(reader.read().await.unwrap().unwrap().payload.len(), 1000);
    writer.write(1, 2, &[Bytes::from(vec![0; 1001])]).await.unwrap();
    assert_eq!(reader.read().await.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn dropped_call_leaves_no_half_frame() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    let connected = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await;
    let (mut reader, mut writer) = connected.unwrap().into_frames();
    let none = timeout(Duration::from_millis(20), reader.read()).await;
    assert!(none.is_err(), "nothing was sent");
    assert_eq!(reader.read().await.unwrap_err().kind(), ErrorKind::Unavailable);
    // A writer that is polled once and dropped has begun a frame longer than any buffer.
    let part = Bytes::from(vec![0; 32 << 20]);
    let parts = [part];
    let half = timeout(Duration::ZERO, writer.write(1, 1, &parts)).await;
    assert!(half.is_err(), "a frame of 32 MiB fits no buffer");
    assert_eq!(writer.write(1, 2, &[]).await.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn forwarded_stream_is_raw() {
    let clock = ManualClock::new();
    let first = founder("n1", &clock).await;
    let second = joined("n2", &first, &clock).await;
    register_echo(&first);
    let connected = second.cluster.connect(first.id(), Service::Forward, Some(POOL)).await;
    let mut stream = connected.unwrap().into_stream();
    stream.write_all(b"NBDMAGIC").await.unwrap();
    let mut back = [0; 8];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, b"NBDMAGIC");
}
