//! Azurite, a server of Azure's blob interface, run for one test on a directory of its own.
//!
//! Invariants:
//! - Dropping the guard deletes its data. It listens on this machine only, and sends no telemetry.
//! - No proxy stands between it and its clients: Azurite itself checks signatures and conditions.

use crate::place::{Place, missing};
use crate::process::{Process, dies_with_us};
use crate::store::BUCKET;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The name of its only account.
const ACCOUNT: &str = "spindletest";
/// The account's key; it decodes to 64 bytes.
const KEY: &str =
    "c3BpbmRsZSB0ZXN0cyBzcGluZGxlIHRlc3RzIHNwaW5kbGUgdGVzdHMgc3BpbmRsZSB0ZXN0cyBzcGluZGxlISE=";

/// Makes a container. The request must be signed, and Node, on which Azurite runs, can sign.
const MAKE_CONTAINER: &str = r#"
const [endpoint, account, key, container] = process.argv.slice(1);
const version = "2023-11-03", date = new Date().toUTCString();
const lines = ["PUT", ...Array(11).fill(""), "x-ms-date:" + date, "x-ms-version:" + version,
  `/${account}/${account}/${container}`, "restype:container"];
const signature = require("crypto").createHmac("sha256", Buffer.from(key, "base64"))
  .update(lines.join("\n"), "utf8").digest("base64");
const headers = { "x-ms-date": date, "x-ms-version": version,
  Authorization: `SharedKey ${account}:${signature}` };
fetch(`${endpoint}/${container}?restype=container`, { method: "PUT", headers })
  .then(async (reply) => { if (reply.status != 201) throw new Error(await reply.text()); })
  .catch((error) => { console.error(error); process.exit(1); });
"#;

/// A running Azurite.
pub struct Azurite {
    address: String,
    _process: Process,
    _place: Place,
}

impl Azurite {
    /// Returns the server's program, if both it (see tests/run) and Node are installed.
    #[must_use]
    pub fn program() -> Option<PathBuf> {
        let path = PathBuf::from(std::env::var_os("SPINDLE_TEST_AZURITE")?);
        (path.exists() && missing(&["node"]).is_none()).then_some(path)
    }

    /// Starts a server with an empty container.
    #[must_use]
    pub fn start() -> Azurite {
        let place = Place::new();
        let mut command = Command::new(Self::program().expect("checked by the test"));
        // On a port that the system chooses.
        command.args(["--blobHost", "127.0.0.1", "--blobPort", "0"]);
        command.args(["--disableTelemetry", "--silent", "--location"]).arg(place.join("data"));
        command.env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{KEY}")).env("HOME", place.path());
        let process = Process::start(&mut command, &place.join("log")).expect("it starts");
        let deadline = Instant::now() + Duration::from_secs(60);
        // It prints its address once it listens.
        let address = loop {
            let line = process.line(Duration::from_millis(100)).unwrap_or_default();
            if let Some((_, address)) = line.split_once(" listens on http://") {
                break address.trim().to_owned();
            }
            let log = || std::fs::read_to_string(place.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "Azurite does not come up: {}", log());
        };
        let azurite = Azurite { address, _process: process, _place: place };
        let mut command = Command::new("node");
        command.args(["-e", MAKE_CONTAINER, "--"]);
        command.args([&azurite.endpoint(), ACCOUNT, KEY, BUCKET]).stdin(Stdio::null());
        let made = dies_with_us(&mut command).output().expect("Node is there");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        azurite
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    fn endpoint(&self) -> String {
        format!("http://{}/{ACCOUNT}", self.address)
    }

    /// Returns the environment variables that point a client at it.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT.to_owned()),
            ("AZURE_STORAGE_ACCOUNT_KEY", KEY.to_owned()),
            ("AZURE_ENDPOINT", self.endpoint()),
        ]
    }
}
