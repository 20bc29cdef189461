//! The server over real sockets, with a client that has its own encoder.
//!
//! Invariants:
//! - Only free ports and temporary directories are used. A test that hangs fails at the client's
//!   time limit.
#![expect(
    clippy::disallowed_methods,
    reason = "real processes and sockets are tested in real time"
)]

mod client;
mod encryption;
mod hostile;
mod limits;
mod memory;
mod negotiation;
mod silence;
mod transmission;

use client::Client;
use memory::{MemoryDevice, MemoryExports};
use nbd::wire::Dialect;
use nbd::{Listener, Server, ServerOptions, TlsMode};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// Size of the export `disk`.
const SIZE: u64 = 256 << 20;

struct World {
    server: Server<MemoryExports>,
    address: SocketAddr,
    disk: Arc<MemoryDevice>,
    serving: JoinHandle<block::Result<()>>,
}

impl World {
    async fn new() -> World {
        World::with(ServerOptions::default(), TlsMode::Off, MemoryDevice::new(SIZE)).await
    }

    /// Serves the exports `disk` and the read-only `fixed`.
    async fn with(options: ServerOptions, tls: TlsMode, disk: MemoryDevice) -> World {
        let disk = Arc::new(disk);
        let fixed = Arc::new(MemoryDevice::new(1 << 20).read_only());
        let exports = [("disk".to_owned(), Arc::clone(&disk)), ("fixed".to_owned(), fixed)];
        let server = Server::new(Arc::new(MemoryExports(exports.into())), options).unwrap();
        let listener = Listener::tcp("127.0.0.1:0".parse().unwrap(), tls).await.unwrap();
        let address = listener.tcp_address().unwrap();
        let serving = tokio::spawn({
            let server = server.clone();
            async move { server.serve(listener).await }
        });
        World { server, address, disk, serving }
    }

    async fn socket(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Connects and stops in negotiation.
    async fn greet(&self) -> Client {
        Client::greet(self.socket().await).await
    }

    /// Connects and enters transmission.
    async fn open(&self, dialect: Dialect) -> Client {
        self.greet().await.go("disk", dialect).await
    }

    /// Waits for a state that must follow from the test's actions.
    async fn until(&self, what: &str, state: impl Fn(nbd::Status) -> bool) {
        for _ in 0..1000 {
            if state(self.server.status()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("never came: {what}; {:?}", self.server.status());
    }
}

const DIALECTS: [Dialect; 3] = [Dialect::Simple, Dialect::Structured, Dialect::Extended];

/// Returns seeded bytes that differ at every position.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> =
        (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

/// SplitMix64: small, seeded, and good enough for the choices of a test.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
