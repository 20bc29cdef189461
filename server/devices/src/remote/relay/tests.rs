//! Tests of a relay over several addresses: two servers of one disk, behind proxies that die or
//! fall silent, and a test that plays the kernel.

use super::*;
use block::{AllocationExtent, BlockDevice, Limits, WriteFlags, ZeroFlags};
use bytes::Bytes;
use nbd::wire::{Intent, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, command};
use nbd::{Client, Export, Exports, Listener, Server, ServerOptions, TlsMode};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const DISK_BYTES: usize = 64 << 10;
/// Longest wait for a step of a test.
const WAIT_MAX: Duration = Duration::from_secs(15);

/// A disk that two servers export. Like the product, it ends the requests of a connection before it
/// admits the one that replaces it.
#[derive(Default)]
struct Disk {
    bytes: Mutex<Vec<u8>>,
    /// The newest connection of each attachment and number.
    newest: watch::Sender<BTreeMap<(Vec<u8>, u16), u64>>,
    running: watch::Sender<usize>,
    /// Writes wait while it is set.
    is_stuck: watch::Sender<bool>,
    /// Attachments that are over.
    fenced: Mutex<bool>,
}

type Mutex<T> = SyncMutex<T>;

struct Opened {
    disk: Arc<Disk>,
    key: (Vec<u8>, u16),
    serial: u64,
}

struct Running<'a>(&'a watch::Sender<usize>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

/// One server's view of the disk.
struct Node {
    disk: Arc<Disk>,
    /// This one says that every attachment is over.
    is_deposed: bool,
}

impl Exports for Node {
    type Device = Opened;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        Vec::new()
    }

    async fn open(&self, _name: &str, client: &Client) -> Result<Arc<Opened>> {
        if self.is_deposed || *self.disk.fenced.lock() {
            return Err(Error::new(ErrorKind::Fenced, "the attachment is over"));
        }
        let reservation = client.reservation.as_ref().expect("it says who it is");
        let key = (reservation.attachment.to_vec(), reservation.connection);
        let mut serial = 0;
        self.disk.newest.send_modify(|newest| {
            let newest = newest.entry(key.clone()).or_default();
            *newest += 1;
            serial = *newest;
        });
        let mut running = self.disk.running.subscribe();
        let _ = running.wait_for(|count| *count == 0).await;
        Ok(Arc::new(Opened { disk: self.disk.clone(), key, serial }))
    }

    async fn revoked(&self, device: &Arc<Opened>) {
        let mut newest = self.disk.newest.subscribe();
        let _ = newest.wait_for(|newest| newest[&device.key] > device.serial).await;
    }
}

impl BlockDevice for Opened {
    fn limits(&self) -> Limits {
        Limits {
            size_bytes: DISK_BYTES as u64,
            preferred_block_bytes: 512,
            payload_bytes_max: 1 << 20,
            is_read_only: false,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    async fn read(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let at = usize::try_from(offset).unwrap();
        buf.copy_from_slice(&self.disk.bytes.lock()[at..at + buf.len()]);
        Ok(())
    }

    async fn write(&self, offset: u64, payload: Bytes, _flags: WriteFlags) -> Result<()> {
        self.disk.running.send_modify(|count| *count += 1);
        let _running = Running(&self.disk.running);
        let mut is_stuck = self.disk.is_stuck.subscribe();
        let _ = is_stuck.wait_for(|is_stuck| !is_stuck).await;
        let at = usize::try_from(offset).unwrap();
        self.disk.bytes.lock()[at..at + payload.len()].copy_from_slice(&payload);
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _offset: u64, _length: u64, _fua: bool) -> Result<()> {
        Ok(())
    }

    async fn write_zeroes(&self, _offset: u64, _length: u64, _flags: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn allocation(&self, _: u64, length: u64, _: usize) -> Result<Vec<AllocationExtent>> {
        Ok(vec![AllocationExtent { length_bytes: length, is_hole: false, is_zero: false }])
    }

    async fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, _size_bytes: u64) -> Result<()> {
        Err(Error::new(ErrorKind::Denied, "it has one size"))
    }
}

/// Behaviour of a proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Bytes pass.
    Open,
    /// Bytes of the server do not pass, and nothing is closed.
    Silent,
    /// The client's side is closed, and new connections, too. The server hears nothing of it.
    Cut,
}

/// A server of the disk behind a proxy.
struct Way {
    address: SocketAddr,
    path: watch::Sender<Path>,
}

impl Way {
    async fn to(disk: &Arc<Disk>, is_deposed: bool) -> Way {
        let node = Node { disk: disk.clone(), is_deposed };
        let server = Arc::new(Server::new(Arc::new(node), ServerOptions::default()).unwrap());
        let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), TlsMode::Off).await.unwrap();
        let target = listener.tcp_address().unwrap();
        tokio::spawn(async move { server.serve(listener).await });
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = front.local_addr().unwrap();
        let path = watch::Sender::new(Path::Open);
        let state = path.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = front.accept().await {
                tokio::spawn(pass(client, target, state.subscribe()));
            }
        });
        Way { address, path }
    }

    fn uri(&self) -> String {
        format!("nbd://{}/disk", self.address)
    }
}

/// Connects a client to a server. What the server has is kept open for good once the path is cut.
async fn pass(mut client: TcpStream, target: SocketAddr, mut path: watch::Receiver<Path>) {
    if *path.borrow() == Path::Cut {
        return;
    }
    let mut server = TcpStream::connect(target).await.unwrap();
    let (mut to, mut from) = (vec![0; 4096], vec![0; 4096]);
    loop {
        let state = *path.borrow_and_update();
        if state == Path::Cut {
            drop(client);
            return std::future::pending().await;
        }
        tokio::select! {
            read = client.read(&mut to) => match read {
                Ok(count @ 1..) => server.write_all(&to[..count]).await.unwrap(),
                _ => return,
            },
            read = server.read(&mut from), if state == Path::Open => match read {
                Ok(count @ 1..) => client.write_all(&from[..count]).await.unwrap(),
                _ => return,
            },
            _ = path.changed() => {}
        }
    }
}

/// The kernel's side of a device.
struct Kernel {
    relay: Arc<Relay>,
    stop: watch::Sender<Option<std::time::Instant>>,
    stream: UnixStream,
    served: tokio::task::JoinHandle<()>,
}

impl Kernel {
    async fn attached(ways: &[&Way]) -> Kernel {
        let uris: Vec<String> = ways.iter().map(|way| way.uri()).collect();
        let options = RemoteOptions {
            uris: uris.join(","),
            logical_block_bytes: 512,
            dead_timeout: Duration::from_secs(60),
            is_shared: false,
        };
        let addresses = Addresses::parse(&options.uris).unwrap();
        let reservation = super::super::reservation_of("disk", Uuid::from_u128(7), false);
        let route = Route::new(addresses.clone());
        let request = ReservationRequest { intent: Intent::Attach, ..reservation.clone() };
        let first = route.open(&request).await.unwrap();
        let (relay, _) = Relay::new(&options, route, &addresses, reservation, first);
        let mut relay = Arc::into_inner(relay).unwrap();
        relay.silence_max = Duration::from_millis(300);
        Kernel::connected(Arc::new(relay)).await.unwrap()
    }

    async fn connected(relay: Arc<Relay>) -> Result<Kernel> {
        let reached = relay.dial(0).await?;
        let (stream, theirs) = UnixStream::pair().unwrap();
        let stop = watch::Sender::new(None);
        let (server, stopping) = (relay.clone(), stop.subscribe());
        let served = tokio::spawn(async move { server.relay(reached, theirs, stopping).await });
        Ok(Kernel { relay, stop, stream, served })
    }

    /// Waits for the end of the connection, and closes this end of it as the driver does.
    async fn ended(self) -> Arc<Relay> {
        let Kernel { relay, stop: _stop, mut stream, served } = self;
        let ended = async {
            let _ = stream.read_to_end(&mut Vec::new()).await;
            drop(stream);
            served.await.unwrap();
        };
        tokio::time::timeout(WAIT_MAX, ended).await.expect("the connection ends");
        relay
    }

    /// Waits for the end of the connection, and replaces it.
    async fn replaced(self) -> Kernel {
        let connected = Kernel::connected(self.ended().await);
        tokio::time::timeout(WAIT_MAX, connected).await.expect("an address works").unwrap()
    }

    async fn send(&mut self, kind: u16, cookie: u64, length: u32, data: &[u8]) {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0, 0]);
        bytes.extend(kind.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(0u64.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes).await.unwrap();
    }

    /// Reads the reply to a request.
    async fn reply(&mut self, cookie: u64, length: usize) -> std::io::Result<Vec<u8>> {
        let mut head = [0; 16];
        self.stream.read_exact(&mut head).await?;
        assert_eq!(head[..4], SIMPLE_REPLY_MAGIC.to_be_bytes());
        assert_eq!(head[4..8], [0; 4], "it is no error");
        assert_eq!(head[8..], cookie.to_be_bytes(), "one reply to each request");
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data).await?;
        Ok(data)
    }

    async fn write(&mut self, cookie: u64, byte: u8) {
        self.send(command::WRITE, cookie, 512, &[byte; 512]).await;
        self.reply(cookie, 0).await.unwrap();
    }

    async fn read(&mut self, cookie: u64) -> u8 {
        self.send(command::READ, cookie, 512, &[]).await;
        let data = self.reply(cookie, 512).await.unwrap();
        assert!(data.iter().all(|byte| *byte == data[0]));
        data[0]
    }
}

async fn disk_with(deposed: [bool; 2]) -> (Arc<Disk>, Way, Way) {
    let disk = Arc::new(Disk { bytes: vec![0; DISK_BYTES].into(), ..Disk::default() });
    let (one, other) = (Way::to(&disk, deposed[0]).await, Way::to(&disk, deposed[1]).await);
    (disk, one, other)
}

#[tokio::test]
async fn device_continues_over_the_next_address_when_a_path_breaks() {
    let (_disk, one, other) = disk_with([false; 2]).await;
    let mut kernel = Kernel::attached(&[&one, &other]).await;
    kernel.write(1, 11).await;
    for (cookie, broken, back) in [(2, &one, &other), (3, &other, &one), (4, &one, &other)] {
        back.path.send_replace(Path::Open);
        broken.path.send_replace(Path::Cut);
        kernel = kernel.replaced().await;
        assert_eq!(kernel.relay.route.current().to_string(), back.uri());
        assert_eq!(kernel.read(cookie).await, 11);
    }
}

#[tokio::test]
async fn device_leaves_an_address_that_owes_an_answer_and_is_silent() {
    let (disk, one, other) = disk_with([false; 2]).await;
    let mut kernel = Kernel::attached(&[&one, &other]).await;
    kernel.write(1, 11).await;
    // Nothing is owed: silence is no failure.
    one.path.send_replace(Path::Silent);
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!kernel.served.is_finished());
    kernel.send(command::READ, 2, 512, &[]).await;
    let mut kernel = kernel.replaced().await;
    assert_eq!(kernel.relay.route.current().to_string(), other.uri());
    assert_eq!(kernel.read(2).await, 11);
    // A server that is slow is left, too, and the other one lets the request finish.
    disk.is_stuck.send_replace(true);
    kernel.send(command::WRITE, 3, 512, &[12; 512]).await;
    one.path.send_replace(Path::Open);
    let mut kernel = kernel.replaced().await;
    assert_eq!(kernel.relay.route.current().to_string(), one.uri());
    disk.is_stuck.send_replace(false);
    kernel.write(3, 12).await;
    assert_eq!(kernel.read(4).await, 12);
}

#[tokio::test]
async fn write_of_the_old_path_never_lands_on_one_of_the_new() {
    let (disk, one, other) = disk_with([false; 2]).await;
    let mut kernel = Kernel::attached(&[&one, &other]).await;
    disk.is_stuck.send_replace(true);
    kernel.send(command::WRITE, 1, 512, &[1; 512]).await;
    let mut running = disk.running.subscribe();
    running.wait_for(|count| *count == 1).await.unwrap();
    // The first server still holds the write, and does not notice that its client is gone.
    one.path.send_replace(Path::Cut);
    let mut kernel = kernel.replaced().await;
    assert_eq!(*disk.running.borrow(), 0, "the write of the old path has ended");
    disk.is_stuck.send_replace(false);
    kernel.write(1, 1).await;
    kernel.write(2, 2).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(kernel.read(3).await, 2);
    assert_eq!(disk.newest.borrow().len(), 1, "all addresses are one client");
}

#[tokio::test]
async fn attachment_is_over_when_a_server_says_so_and_none_admits_the_client() {
    let (disk, one, other) = disk_with([true, false]).await;
    let mut kernel = Kernel::attached(&[&one, &other]).await;
    kernel.write(1, 11).await;
    let refusal = kernel.relay.refusal();
    drop(kernel.relay.dial(1).await.unwrap());
    assert!(refusal.borrow().is_none(), "the other server admits it");
    // A server confirms that it owns the pool before it refuses, so the others need not be reachable.
    one.path.send_replace(Path::Cut);
    *disk.fenced.lock() = true;
    let error = kernel.relay.dial(0).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{}", error.chain());
    assert!(refusal.borrow().is_some(), "the device ends");
}

#[tokio::test]
async fn attachment_lasts_while_no_server_can_tell() {
    let (_disk, one, other) = disk_with([false; 2]).await;
    let mut kernel = Kernel::attached(&[&one, &other]).await;
    kernel.write(1, 11).await;
    let refusal = kernel.relay.refusal();
    one.path.send_replace(Path::Cut);
    other.path.send_replace(Path::Cut);
    let relay = kernel.ended().await;
    let error = relay.dial(0).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(refusal.borrow().is_none());
    other.path.send_replace(Path::Open);
    let mut kernel = Kernel::connected(relay).await.unwrap();
    assert_eq!(kernel.read(2).await, 11);
}

#[tokio::test]
async fn single_address_is_waited_for_however_long_it_is_silent() {
    let (disk, one, _other) = disk_with([false; 2]).await;
    let mut kernel = Kernel::attached(&[&one]).await;
    disk.is_stuck.send_replace(true);
    kernel.send(command::WRITE, 1, 512, &[1; 512]).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert!(!kernel.served.is_finished());
    disk.is_stuck.send_replace(false);
    kernel.reply(1, 0).await.unwrap();
}

#[tokio::test]
async fn address_in_use_is_shown_and_unfit_servers_are_not_used() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("device.address");
    let (_disk, one, other) = disk_with([false; 2]).await;
    let route = |ways: &[&Way]| {
        let uris: Vec<String> = ways.iter().map(|way| way.uri()).collect();
        Route::new(Addresses::parse(&uris.join(",")).unwrap())
    };
    let reservation = super::super::reservation_of("disk", Uuid::from_u128(7), false);
    let both = route(&[&one, &other]);
    one.path.send_replace(Path::Cut);
    let flags = both.open(&reservation).await.unwrap().transmission_flags;
    both.show_in(path.clone());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), other.uri());
    one.path.send_replace(Path::Open);
    both.move_on();
    both.open(&reservation).await.unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), one.uri());
    let reached = |has_reservation, transmission_flags| {
        let wire: Box<dyn nbd::client::Wire> = Box::new(tokio::io::duplex(8).0);
        Reached { wire, size_bytes: DISK_BYTES as u64, transmission_flags, has_reservation }
    };
    let target = both.current().clone();
    for (reached, words) in [
        (reached(false, flags), "does not know attachments"),
        (reached(true, flags & !transmission_flag::SEND_FLUSH), "features"),
    ] {
        let error = both.check(&target, reached).map(drop).unwrap_err();
        assert!(error.chain().contains(words), "{}", error.chain());
    }
    both.check(&target, reached(true, flags | transmission_flag::READ_ONLY)).map(drop).unwrap();
    let single = route(&[&one]);
    single.check(&target, reached(false, flags)).map(drop).unwrap();
    single.check(&target, reached(false, 1)).map(drop).unwrap();
    drop(both);
    assert!(!path.exists());
}
