//! Requests of a client that disconnects while the log is full: none is applied over acknowledged writes of its successor.

use super::*;
use block::Lsn;
use bytes::Bytes;
use control::store::testing::GatedStore;
use engine::asker::Asker;
use engine::testing::{MAX_AGE, Roster, open_with};
use futures::future::BoxFuture;
use nbd::{Listener, Server, ServerOptions, TlsMode};
use std::future::poll_fn;
use std::path::PathBuf;
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use wal::LogOptions;

/// Longest wait for an action that must not wait for log space.
const SOON: Duration = Duration::from_secs(6);
/// Start of the range, never written before, that the requests of this file write to.
const AT: u64 = 32 * MIB;
/// Offset inside that range that the successor writes to.
const INSIDE: u64 = AT + 8192;
const BLOCK: usize = 4096;

async fn read(volume: &Volume, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0xee; len];
    volume.read(offset, &mut bytes).await?;
    Ok(bytes)
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const RESIZE: u16 = 8;

/// A pool with a small log, served on a unix socket.
struct World {
    dir: tempfile::TempDir,
    store: Arc<GatedStore>,
    pool: Arc<Pool>,
    reservations: Arc<Reservations>,
    server: Server<PoolExports>,
    serving: JoinHandle<Result<()>>,
}

impl World {
    async fn new(options: ServerOptions) -> World {
        let dir = tempfile::tempdir().unwrap();
        let store = GatedStore::new();
        let log_options = LogOptions {
            ring_bytes: 4 * MIB,
            file_bytes: MIB / 2,
            generation_bytes_max: MIB,
            slow_from_percent: 99,
            ..LogOptions::default()
        };
        let pool = open_with(dir.path(), &store, 1, log_options, MAX_AGE).await;
        pool.create_volume("v", 64 * MIB, Durability::Auto).await.unwrap();
        pool.create_volume("filler", 64 * MIB, Durability::Auto).await.unwrap();
        let reservations = Arc::new(Roster::default().reservations().settled_by({
            let pool = Arc::downgrade(&pool);
            move |_| {
                let pool = pool.upgrade().expect("it is open");
                async move { pool.settle().await }
            }
        }));
        let exports = PoolExports::new(pool.clone(), reservations.clone());
        let options = ServerOptions { can_resize: true, ..options };
        let server = Server::new(Arc::new(exports), options).unwrap();
        let listener = Listener::unix(&dir.path().join("s"), 0o600, TlsMode::Off).await.unwrap();
        let serving = tokio::spawn({
            let server = server.clone();
            async move { server.serve(listener).await }
        });
        World { dir, store, pool, reservations, server, serving }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// Connects to volume `v`. This must succeed although the log is full.
    async fn connect(&self) -> Wire {
        let connecting = Wire::connect(self.socket(), "v");
        tokio::time::timeout(SOON, connecting).await.expect("it waits for the log").unwrap()
    }

    /// Keeps the store from taking anything, and writes until the log is full. The last write is
    /// left waiting.
    async fn fill(&self) -> JoinHandle<Result<()>> {
        self.store.set_writes(false);
        let volume = self.pool.volume("filler").unwrap();
        for index in 0u64.. {
            let volume = volume.clone();
            let mut write = Box::pin(async move {
                volume.write(index % 256 * 65536, pattern(index, 65536), NO_FUA).await
            });
            let is_full = poll_fn(|context| {
                if let Poll::Ready(written) = write.as_mut().poll(context) {
                    written.unwrap();
                    return Poll::Ready(false);
                }
                context.waker().wake_by_ref();
                if self.pool.log_status().is_full { Poll::Ready(true) } else { Poll::Pending }
            });
            if is_full.await {
                return tokio::spawn(write);
            }
        }
        unreachable!("the log has an end")
    }

    /// Newest LSN.
    fn last_lsn(&self) -> Lsn {
        self.pool.log_status().last_lsn
    }

    /// Waits until something is queued after `lsn`.
    async fn queued_behind(&self, lsn: Lsn) {
        self.until("something is queued", || self.last_lsn() > lsn).await;
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let waited = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(4 * SOON, waited).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    /// Lets the store take everything, so that all waiting entries get room.
    async fn empty(&self, filler: JoinHandle<Result<()>>) {
        self.store.set_writes(true);
        filler.await.unwrap().unwrap();
    }

    async fn end(self) {
        self.server.stop(Duration::from_secs(5));
        self.serving.await.unwrap().unwrap();
        drop((self.server, self.reservations));
        self.pool.close().await.unwrap();
    }
}

/// A client that speaks the protocol byte by byte, with simple replies.
struct Wire(UnixStream);

impl Wire {
    async fn connect(path: PathBuf, export: &str) -> std::io::Result<Wire> {
        let mut stream = UnixStream::connect(path).await?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).await?;
        // Fixed newstyle, no zeroes; GO without information requests.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend_from_slice(b"IHAVEOPT");
        hello.extend_from_slice(&7u32.to_be_bytes());
        hello.extend_from_slice(&(export.len() as u32 + 6).to_be_bytes());
        hello.extend_from_slice(&(export.len() as u32).to_be_bytes());
        hello.extend_from_slice(export.as_bytes());
        hello.extend_from_slice(&[0, 0]);
        stream.write_all(&hello).await?;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header).await?;
            let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let mut data = vec![0; number(16) as usize];
            stream.read_exact(&mut data).await?;
            match number(12) {
                1 => return Ok(Wire(stream)),
                kind if kind & 1 << 31 != 0 => {
                    return Err(std::io::Error::other(String::from_utf8_lossy(&data).into_owned()));
                }
                _ => {}
            }
        }
    }

    async fn send(&mut self, command: u16, offset: u64, length: u32, payload: &[u8]) {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend_from_slice(&[0, 0]);
        request.extend_from_slice(&command.to_be_bytes());
        request.extend_from_slice(&[0; 8]);
        request.extend_from_slice(&offset.to_be_bytes());
        request.extend_from_slice(&length.to_be_bytes());
        request.extend_from_slice(payload);
        self.0.write_all(&request).await.unwrap();
    }

    /// Reads a reply: its error, and the bytes that follow.
    async fn reply(&mut self, length: usize) -> (u32, Vec<u8>) {
        let mut header = [0; 16];
        self.0.read_exact(&mut header).await.unwrap();
        let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
        let mut data = vec![0; if error == 0 { length } else { 0 }];
        self.0.read_exact(&mut data).await.unwrap();
        (error, data)
    }

    async fn read(&mut self, offset: u64, length: usize) -> Vec<u8> {
        self.send(READ, offset, length as u32, &[]).await;
        let (error, data) = self.reply(length).await;
        assert_eq!(error, 0);
        data
    }

    async fn write_block(&mut self, offset: u64, value: u8) {
        self.send(WRITE, offset, BLOCK as u32, &[value; BLOCK]).await;
        assert_eq!(self.reply(0).await.0, 0);
    }

    async fn flush(&mut self) {
        self.send(FLUSH, 0, 0, &[]).await;
        assert_eq!(self.reply(0).await.0, 0);
    }
}

/// Requests of the first client: name, command, range and payload.
fn requests() -> Vec<(&'static str, u16, u64, u32, Vec<u8>)> {
    let length = 64 << 10;
    let ragged = length - 2;
    let written = |length: u32| vec![b'A'; length as usize];
    vec![
        ("an aligned write", WRITE, AT, length, written(length)),
        ("a ragged write", WRITE, AT + 1, ragged, written(ragged)),
        ("aligned zeroes", WRITE_ZEROES, AT, length, Vec::new()),
        ("ragged zeroes", WRITE_ZEROES, AT + 1, ragged, Vec::new()),
        ("an aligned trim", TRIM, AT, length, Vec::new()),
        ("a ragged trim", TRIM, AT + 1, ragged, Vec::new()),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_a_disconnected_client_never_overwrites_its_successor() {
    for (name, command, offset, length, payload) in requests() {
        let world = World::new(ServerOptions::default()).await;
        let filler = world.fill().await;
        let before = world.last_lsn();
        let mut gone = world.connect().await;
        gone.send(command, offset, length, &payload).await;
        world.queued_behind(before).await;
        drop(gone);
        let mut next = world.connect().await;
        let seen = next.read(AT, 64 << 10).await;
        next.send(WRITE, INSIDE, BLOCK as u32, &[b'B'; BLOCK]).await;
        world.queued_behind(before).await;
        world.empty(filler).await;
        assert_eq!(next.reply(0).await.0, 0);
        next.flush().await;
        // Give a late request time to be applied.
        for value in 0..20 {
            next.write_block(0, value).await;
            next.flush().await;
        }
        let found = next.read(AT, 64 << 10).await;
        let inside = (INSIDE - AT) as usize;
        assert!(
            found[inside..][..BLOCK] == [b'B'; BLOCK],
            "{name} was applied over its successor's write"
        );
        assert!(
            found[..inside] == seen[..inside],
            "{name} was applied after its successor had read"
        );
        assert!(
            found[inside + BLOCK..] == seen[inside + BLOCK..],
            "{name} was applied after its successor had read"
        );
        drop(next);
        world.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_requests_of_a_disconnected_client_never_start() {
    let world =
        World::new(ServerOptions { request_count_max: 2, ..ServerOptions::default() }).await;
    let filler = world.fill().await;
    let before = world.last_lsn();
    let mut gone = world.connect().await;
    for _ in 0..8 {
        gone.send(WRITE, AT, BLOCK as u32, &[b'A'; BLOCK]).await;
    }
    world.queued_behind(Lsn(before.0 + 1)).await;
    drop(gone);
    // Its session also ends without another client, and leaves nothing in the queue.
    world.until("its session has ended", || world.server.status().connection_count == 0).await;
    assert_eq!(world.last_lsn(), before);
    let mut next = world.connect().await;
    world.empty(filler).await;
    next.write_block(AT, b'B').await;
    next.flush().await;
    assert_eq!(next.read(AT, BLOCK).await, [b'B'; BLOCK]);
    drop(next);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_connections_are_not_affected_when_another_one_ends() {
    let world = World::new(ServerOptions::default()).await;
    let filler = world.fill().await;
    let mut open = world.connect().await;
    let mut gone = world.connect().await;
    let before = world.last_lsn();
    open.send(WRITE, AT, BLOCK as u32, &[b'O'; BLOCK]).await;
    world.queued_behind(before).await;
    gone.send(WRITE, AT, BLOCK as u32, &[b'A'; BLOCK]).await;
    world.queued_behind(Lsn(before.0 + 1)).await;
    drop(gone);
    // It waits for neither the log nor the open connection.
    let mut next = world.connect().await;
    world.empty(filler).await;
    assert_eq!(open.reply(0).await.0, 0, "its waiting write is answered");
    assert_eq!(next.read(AT, BLOCK).await, [b'O'; BLOCK]);
    drop((open, next));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_is_attached_after_requests_of_a_closed_connection_were_dropped() {
    let world = World::new(ServerOptions::default()).await;
    let filler = world.fill().await;
    let before = world.last_lsn();
    let mut gone = world.connect().await;
    gone.send(WRITE, AT, BLOCK as u32, &[b'A'; BLOCK]).await;
    world.queued_behind(before).await;
    drop(gone);
    let volume = world.pool.volume("v").unwrap();
    let id = volume.id().0;
    let ended = tokio::time::timeout(SOON, world.reservations.end_leftovers(id)).await;
    ended.expect("it waits for the log").unwrap();
    let reservation = world.reservations.attach(id, "v", false).expect("no connection has it open");
    assert_eq!(world.last_lsn(), before, "nothing is left in the queue");
    world.empty(filler).await;
    volume.write(AT, pattern(1, BLOCK), NO_FUA).await.unwrap();
    assert_eq!(read(&volume, AT, BLOCK).await.unwrap(), pattern(1, BLOCK));
    drop((reservation, volume));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resize_of_a_disconnected_client_is_dropped() {
    let world = World::new(ServerOptions::default()).await;
    let filler = world.fill().await;
    let before = world.last_lsn();
    let mut gone = world.connect().await;
    gone.send(RESIZE, 128 * MIB, 0, &[]).await;
    world.queued_behind(before).await;
    drop(gone);
    let next = world.connect().await;
    assert_eq!(world.last_lsn(), before, "nothing is left in the queue");
    world.empty(filler).await;
    let volume = world.pool.volume("v").unwrap();
    assert_eq!(volume.record().size_bytes, 64 * MIB);
    // A resize by a connected client is carried out.
    let mut next = next;
    next.send(RESIZE, 96 * MIB, 0, &[]).await;
    assert_eq!(next.reply(0).await.0, 0);
    assert_eq!((volume.record().size_bytes, volume.limits().size_bytes), (96 * MIB, 96 * MIB));
    drop((next, volume));
    world.end().await;
}

/// Runs an admin request whose client disconnects while it waits for the log.
async fn given_up<T: Send + 'static>(
    world: &World,
    request: impl Future<Output = Result<T>> + Send + 'static,
) -> Error {
    let before = world.last_lsn();
    let (waits, asker) = Asker::new();
    let request = tokio::spawn(asker.scope(request));
    world.queued_behind(before).await;
    drop(waits);
    let outcome = tokio::time::timeout(SOON, request).await.expect("it waits for the log");
    assert_eq!(world.last_lsn(), before, "nothing is left in the queue");
    outcome.unwrap().map(drop).unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_admin_request_of_a_disconnected_client_is_dropped() {
    let world = World::new(ServerOptions::default()).await;
    let volume = world.pool.volume("v").unwrap();
    volume.write(AT, pattern(1, BLOCK), NO_FUA).await.unwrap();
    world.pool.create_snapshots(&"v@old".parse().unwrap()).await.unwrap();
    world.pool.create_volume("x", MIB, Durability::Auto).await.unwrap();
    let filler = world.fill().await;
    let pool = || world.pool.clone();
    let shrink = {
        let pool = pool();
        async move { pool.resize_volume("v", MIB, true).await }
    };
    let make = {
        let pool = pool();
        async move { pool.create_snapshots(&"v@new".parse().unwrap()).await }
    };
    let unmake = {
        let pool = pool();
        async move { pool.remove_snapshot("v", "old").await }
    };
    let create = {
        let pool = pool();
        async move { pool.create_volume("w", MIB, Durability::Auto).await }
    };
    let remove = {
        let pool = pool();
        async move { pool.remove_volume("x", false).await }
    };
    let mut errors = vec![given_up(&world, shrink).await, given_up(&world, make).await];
    errors.push(given_up(&world, unmake).await);
    errors.push(given_up(&world, create).await);
    errors.push(given_up(&world, remove).await);
    for error in &errors {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.chain().contains("disconnected before there was room"), "{}", error.chain());
    }
    world.empty(filler).await;
    world.store.set_writes(true);
    let record = world.pool.resize_volume("v", 65 * MIB, false).await.unwrap();
    assert_eq!(record.size_bytes, 65 * MIB);
    assert_eq!(read(&volume, AT, BLOCK).await.unwrap(), pattern(1, BLOCK), "it was not shrunk");
    let names: Vec<String> =
        world.pool.snapshots(Some("v")).unwrap().into_iter().map(|one| one.record.name).collect();
    assert_eq!(names, ["old"]);
    assert!(world.pool.volume("w").is_none());
    let kept = world.pool.volume("x").expect("it was not removed");
    kept.write(0, pattern(2, BLOCK), NO_FUA).await.unwrap();
    drop((volume, kept));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ragged_range_is_one_step_among_other_writes() {
    let world = World::new(ServerOptions::default()).await;
    let filler = world.fill().await;
    let volume = world.pool.volume("v").unwrap();
    let before = world.last_lsn();
    let zeroes = tokio::spawn({
        let volume = volume.clone();
        async move { volume.write_zeroes(AT + 1, 65_534, ZeroFlags::default()).await }
    });
    world.queued_behind(before).await;
    assert_eq!(world.last_lsn(), Lsn(before.0 + 3), "its ends and the range between them");
    // It is ordered after all three, though it does not touch the ends.
    let later = tokio::spawn({
        let volume = volume.clone();
        async move { volume.write(INSIDE, pattern(1, BLOCK), NO_FUA).await }
    });
    world.queued_behind(Lsn(before.0 + 3)).await;
    world.empty(filler).await;
    zeroes.await.unwrap().unwrap();
    later.await.unwrap().unwrap();
    assert_eq!(read(&volume, INSIDE, BLOCK).await.unwrap(), pattern(1, BLOCK));
    drop(volume);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ragged_write_that_waits_for_the_store_blocks_only_its_own_sectors() {
    let world = World::new(ServerOptions::default()).await;
    let volume = world.pool.volume("v").unwrap();
    volume.write(AT, pattern(1, 65536), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap();
    world.store.set_reads(false);
    let mut waiting = tokio::task::JoinSet::new();
    for (index, value) in [(0, b'R'), (1, b'S')] {
        let volume = volume.clone();
        let bytes = Bytes::from(vec![value; 1000]);
        waiting.spawn(async move { volume.write(AT + 100 + index * 8192, bytes, NO_FUA).await });
    }
    let zeroed = volume.clone();
    waiting
        .spawn(async move { zeroed.write_zeroes(AT + 32_769, 8190, ZeroFlags::default()).await });
    world.until("they read the store", || world.store.waiting_reads() > 0).await;
    let soon = |what: &'static str, change: BoxFuture<'static, Result<()>>| async move {
        let changed = tokio::time::timeout(SOON, change).await;
        changed.unwrap_or_else(|_| panic!("{what} waits for the store")).unwrap();
    };
    let others = volume.clone();
    soon(
        "a write of other sectors",
        Box::pin(async move { others.write(AT + 4096, pattern(2, 4096), NO_FUA).await }),
    )
    .await;
    let between = volume.clone();
    soon(
        "a write between the ends of a range",
        Box::pin(async move { between.write(AT + 36_864, pattern(3, 512), NO_FUA).await }),
    )
    .await;
    let pool = world.pool.clone();
    soon(
        "a resize",
        Box::pin(async move { pool.resize_volume("v", 65 * MIB, false).await.map(drop) }),
    )
    .await;
    let same = volume.clone();
    let mut same = Box::pin(async move { same.write(AT, pattern(4, 512), NO_FUA).await });
    assert!(
        tokio::time::timeout(Duration::from_millis(50), &mut same).await.is_err(),
        "it would be overwritten with the bytes read before"
    );
    world.store.set_reads(true);
    while let Some(written) = waiting.join_next().await {
        written.unwrap().unwrap();
    }
    same.await.unwrap();
    let found = read(&volume, AT, 65536).await.unwrap();
    let old = pattern(1, 65536);
    assert_eq!(found[..512], pattern(4, 512), "it came after the ragged one");
    assert_eq!(found[512..1100], [b'R'; 588]);
    assert_eq!(found[1100..4096], old[1100..4096]);
    assert_eq!(found[4096..8192], pattern(2, 4096));
    assert_eq!(found[8292..9292], [b'S'; 1000]);
    assert_eq!((found[32_768], found[40_959]), (old[32_768], old[40_959]), "outside of the range");
    assert!(found[32_769..36_864].iter().all(|byte| *byte == 0));
    drop(volume);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ragged_write_does_not_restore_bytes_that_a_resize_cut_off() {
    let world = World::new(ServerOptions::default()).await;
    let volume = world.pool.volume("v").unwrap();
    volume.write(AT, pattern(1, BLOCK), NO_FUA).await.unwrap();
    world.pool.destage_all().await.unwrap();
    world.store.set_reads(false);
    let ragged = tokio::spawn({
        let volume = volume.clone();
        async move { volume.write(AT + 1, Bytes::from_static(b"R"), NO_FUA).await }
    });
    world.until("it reads the store", || world.store.waiting_reads() > 0).await;
    world.pool.resize_volume("v", AT, true).await.unwrap();
    world.pool.resize_volume("v", 64 * MIB, false).await.unwrap();
    world.store.set_reads(true);
    ragged.await.unwrap().unwrap();
    let mut wanted = [0; 512];
    wanted[1] = b'R';
    assert_eq!(read(&volume, AT, 512).await.unwrap(), wanted);
    drop(volume);
    world.end().await;
}
