//! An S3 server for one test: MinIO on a directory of its own if it was built, otherwise the tests'
//! own.
//!
//! Invariants:
//! - Dropping the guard deletes its data; its port is free before and after.

use crate::bucket::{Bucket, Care};
use crate::place::Place;
use crate::power::guest::is_inside;
use crate::process::Process;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// Name of the bucket.
pub const BUCKET: &str = "disks";
/// The only access key that it accepts.
pub const USER: &str = "spindletest";
const PASSWORD: &str = "spindletest-password";

/// A running S3 server with an empty bucket.
pub enum Server {
    /// The real server.
    Minio(Minio),
    /// The tests' own (see [`crate::bucket`]).
    Own(Bucket),
}

impl Server {
    /// Starts MinIO if it was built, otherwise the tests' own server. A guest kernel of a busy machine gets the
    /// latter: there a Go program can fall into a loop of its runtime, and answer nothing more.
    #[must_use]
    pub fn start() -> Server {
        Server::start_at("127.0.0.1")
    }

    /// Like [`Server::start`], at another IP address.
    #[must_use]
    pub fn start_at(host: &str) -> Server {
        if is_inside() {
            return Server::Own(Bucket::start_at(host, Care::Honest));
        }
        if Minio::program().is_some() {
            return Server::Minio(Minio::start_at(host));
        }
        println!(
            "no MinIO was built (tests/run does, where Go is installed): the tests' own server"
        );
        Server::Own(Bucket::start_at(host, Care::Honest))
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Server::Minio(minio) => minio.address(),
            Server::Own(bucket) => bucket.address(),
        }
    }

    /// Stops serving; the data stays.
    pub fn down(&mut self) {
        match self {
            Server::Minio(minio) => minio.down(),
            Server::Own(bucket) => bucket.down(),
        }
    }

    /// Starts it again after [`Server::down`].
    pub fn up(&mut self) {
        match self {
            Server::Minio(minio) => minio.up(),
            Server::Own(bucket) => bucket.up(),
        }
    }

    /// Whether it checks signatures.
    #[must_use]
    pub fn checks_signatures(&self) -> bool {
        matches!(self, Server::Minio(_))
    }
}

/// Returns the environment variables that point an S3 client at a server or at a proxy in front of
/// it.
#[must_use]
pub fn environment(address: &str) -> Vec<(&'static str, String)> {
    vec![
        ("AWS_ACCESS_KEY_ID", USER.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", PASSWORD.to_owned()),
        ("AWS_ENDPOINT_URL", format!("http://{address}")),
        ("AWS_ENDPOINT", format!("http://{address}")),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
    ]
}

/// A running MinIO.
pub struct Minio {
    place: Place,
    address: String,
    process: Option<Process>,
}

impl Minio {
    /// Returns the server's program, if it was built (see tests/run).
    #[must_use]
    pub fn program() -> Option<PathBuf> {
        let path = PathBuf::from(std::env::var_os("SPINDLE_TEST_MINIO")?);
        path.exists().then_some(path)
    }

    /// Starts a server with an empty bucket.
    #[must_use]
    pub fn start() -> Minio {
        Minio::start_at("127.0.0.1")
    }

    fn start_at(host: &str) -> Minio {
        let place = Place::new();
        // A bucket of this server is a directory.
        std::fs::create_dir_all(place.join(&format!("data/{BUCKET}"))).expect("make the bucket");
        let mut minio = Minio { place, address: free_address_at(host), process: None };
        minio.up();
        minio
    }

    /// Starts it again after [`Minio::down`].
    pub fn up(&mut self) {
        let program = Self::program().expect("checked by the test");
        let mut command = Command::new(program);
        command.args(["server", "--quiet", "--address", &self.address]);
        command.arg(self.place.join("data"));
        command.env("MINIO_ROOT_USER", USER).env("MINIO_ROOT_PASSWORD", PASSWORD);
        command.env("MINIO_BROWSER", "off").env("HOME", self.place.path());
        let process = Process::start(&mut command, &self.place.join("log")).expect("it starts");
        self.process = Some(process);
        let deadline = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(&self.address).is_err() {
            let log = || std::fs::read_to_string(self.place.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the S3 server does not come up: {}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills the server; its data stays.
    pub fn down(&mut self) {
        self.process = None;
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }
}

/// Returns an address that was free a moment ago.
#[must_use]
pub fn free_address() -> String {
    free_address_at("127.0.0.1")
}

fn free_address_at(host: &str) -> String {
    let listener = TcpListener::bind((host, 0)).expect("a free port");
    listener.local_addr().expect("a bound socket has an address").to_string()
}
