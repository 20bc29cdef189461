//! Probes of the path between two nodes, and the bounds of both sides.

use super::*;
use crate::connection::{FrameReader, FrameWriter};
use crate::probe::message::{FILL_BYTES_MAX, REQUEST, Request};
use block::env::SystemClock;
use bytes::Bytes;

/// Bounds of a probe that ends soon.
const SHORT: Limits = Limits { load_count_max: 16, ..Limits::DEFAULT };

/// Two nodes whose clock runs.
async fn two() -> (Running, Running) {
    let clock = ManualClock::new();
    let mut nodes = (founder("n1", &clock).await, None);
    nodes.1 = Some(joined("n2", &nodes.0, &clock).await);
    (nodes.0, nodes.1.expect("it was made"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn path_on_one_machine_is_fast() {
    let (first, second) = two().await;
    let connection = second.cluster.connect(first.id(), Service::Probe, None).await.unwrap();
    let measured = probe::measure(connection, &SystemClock, Limits::DEFAULT).await.unwrap();
    assert!(measured.round_trip < Duration::from_millis(45), "{measured:?}");
    assert!(measured.bytes_per_second > 4 << 20, "{measured:?}");
    // Both directions at once: a node makes one probe while it answers another.
    let both = tokio::join!(first.cluster.measure(second.id()), second.cluster.measure(first.id()));
    assert!(both.0.is_ok() && both.1.is_ok(), "{both:?}");
}

#[tokio::test]
async fn probes_of_one_node_take_turns() {
    let (first, second) = two().await;
    let turn = first.cluster.0.answering.acquire().await.unwrap();
    let connection = second.cluster.connect(first.id(), Service::Probe, None).await.unwrap();
    let waiting = probe::measure(connection, &SystemClock, SHORT);
    tokio::pin!(waiting);
    assert!(timeout(Duration::from_millis(100), &mut waiting).await.is_err(), "it is not its turn");
    drop(turn);
    assert!(timeout(WAIT, waiting).await.unwrap().is_ok());
}

/// Answers probes with bounds of its own, or not at all.
struct Answering(Option<AnswerLimits>);

#[async_trait]
impl Handler for Answering {
    fn check(&self, _peer: NodeId, _pool: Option<Uuid>) -> Result<()> {
        Ok(())
    }

    async fn serve(&self, connection: Connection) {
        match self.0 {
            Some(limits) => drop(probe::answer(connection, &Semaphore::new(1), limits).await),
            None => {
                let _connection = connection;
                std::future::pending::<()>().await;
            }
        }
    }
}

async fn connect(from: &Running, to: &Running, answering: Answering) -> Connection {
    to.cluster.register(Service::Pool, Arc::new(answering));
    from.cluster.connect(to.id(), Service::Pool, None).await.unwrap()
}

#[tokio::test]
async fn probe_that_is_not_answered_ends_in_time() {
    let (first, second) = two().await;
    let connection = connect(&second, &first, Answering(None)).await;
    let limits = Limits { time_max: Duration::from_millis(50), ..SHORT };
    let error = probe::measure(connection, &SystemClock, limits).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let said = "measure the path to node n1: it does not answer within 50 ms";
    assert_eq!(error.to_string(), said);
}

#[tokio::test]
async fn answer_of_another_protocol_is_no_measurement() {
    let (first, second) = two().await;
    register_echo(&first);
    let connection = second.cluster.connect(first.id(), Service::Member, Some(POOL)).await.unwrap();
    let error = probe::measure(connection, &SystemClock, SHORT).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn load_ends_at_its_time_on_a_slow_path() {
    let (first, second) = two().await;
    let connection = second.cluster.connect(first.id(), Service::Probe, None).await.unwrap();
    let limits = Limits { load_time_max: Duration::ZERO, ..Limits::DEFAULT };
    let measured = probe::measure(connection, &SystemClock, limits).await.unwrap();
    assert!(measured.bytes_per_second > 0, "the first large request tells");
}

async fn send(writer: &mut FrameWriter, number: u64, fill_bytes: u32) -> Result<()> {
    let head = Bytes::copy_from_slice(&Request { fill_bytes }.encode());
    let fill = Bytes::from(vec![7; fill_bytes as usize]);
    writer.write(REQUEST, number, &[head, fill]).await
}

/// Sends large requests until the other side ends the connection. Returns the answers.
async fn flood((mut reader, mut writer): (FrameReader, FrameWriter)) -> u64 {
    let mut answer_count = 0;
    for number in 1.. {
        let is_sent = send(&mut writer, number, FILL_BYTES_MAX).await.is_ok();
        if !is_sent || !matches!(reader.read().await, Ok(Some(_))) {
            break;
        }
        answer_count += 1;
    }
    answer_count
}

#[tokio::test]
async fn answering_side_ends_a_connection_beyond_its_bytes() {
    let (first, second) = two().await;
    let connection = second.cluster.connect(first.id(), Service::Probe, None).await.unwrap();
    let flooded = timeout(WAIT, flood(connection.into_frames())).await.unwrap();
    assert_eq!(flooded, AnswerLimits::DEFAULT.bytes_max / u64::from(FILL_BYTES_MAX));
}

#[tokio::test]
async fn answering_side_ends_a_connection_beyond_its_time() {
    let (first, second) = two().await;
    let limits = AnswerLimits { time_max: Duration::from_millis(50), ..AnswerLimits::DEFAULT };
    let connection = connect(&second, &first, Answering(Some(limits))).await;
    let (mut reader, _writer) = connection.into_frames();
    let ended = timeout(WAIT, reader.read()).await.unwrap();
    assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
}

#[tokio::test]
async fn message_that_is_no_probe_ends_the_connection() {
    let (first, second) = two().await;
    for (kind, payload) in [(REQUEST, &[9u8; 8][..]), (9, &[]), (REQUEST, &[])] {
        let connection = second.cluster.connect(first.id(), Service::Probe, None).await.unwrap();
        let (mut reader, mut writer) = connection.into_frames();
        writer.write(kind, 1, &[Bytes::copy_from_slice(payload)]).await.unwrap();
        let ended = timeout(WAIT, reader.read()).await.unwrap();
        assert!(!matches!(ended, Ok(Some(_))), "{ended:?}");
    }
    assert!(first.cluster.connect(second.id(), Service::Probe, None).await.is_ok());
}
