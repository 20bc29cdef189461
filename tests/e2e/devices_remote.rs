//! Exports of another machine as devices of a kernel: they survive the death of either end of their
//! connection, and a client that was detached by force never returns.
//!
//! Invariants:
//! - The tests run in a guest kernel (`tests/guest`): this machine's devices are left alone.

use crate::devices::{kills_wanted, reader, refused, size_of, variables};
use crate::tls::{self, Authority};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::place::{output, run};
use tests::power::guest;
use tests::process::Process;
use tests::seed::{Random, seeds};
use tests::{Place, needs, needs_root};

/// The process that serves the device of an export.
pub struct Client {
    uri: String,
    more: Vec<&'static str>,
    pub place: Place,
    process: Option<Process>,
    pub device: String,
    link: String,
}

impl Client {
    pub fn started(daemon: &Daemon, uri: &str, more: &[&'static str]) -> Client {
        let mut client = Client {
            uri: uri.to_owned(),
            more: more.to_vec(),
            place: Place::new(),
            process: None,
            device: String::new(),
            link: String::new(),
        };
        client.start(daemon);
        client
    }

    fn start(&mut self, daemon: &Daemon) {
        let arguments = [&["attach", "--nbd", &self.uri][..], &self.more].concat();
        let log = self.place.join("attach.log");
        let process = Process::start(&mut daemon.prepare(&arguments), &log).expect("it starts");
        let wait = Duration::from_secs(30);
        let lines: Vec<String> = (0..3).map_while(|_| process.line(wait)).collect();
        let [device, link, ready] = &lines[..] else { panic!("{lines:?}: {}", self.log()) };
        assert_eq!(ready, "ready");
        assert_eq!(&std::fs::read_link(link).expect("a link").display().to_string(), device);
        assert!(
            self.device.is_empty() || self.device == *device,
            "it is another device: {lines:?}"
        );
        self.device.clone_from(device);
        self.link.clone_from(link);
        self.process = Some(process);
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.place.join("attach.log")).unwrap_or_default()
    }

    fn kill(&mut self) {
        self.process.take().expect("it runs").kill();
    }

    pub fn status(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("it runs");
        let status = process.wait(Duration::from_secs(30));
        status.unwrap_or_else(|| panic!("it does not end: {}", self.log()))
    }

    /// Waits for its end, and returns whether it ended successfully.
    fn end(&mut self) -> bool {
        self.status().success()
    }

    fn stop(&mut self) {
        self.process.as_ref().expect("it runs").terminate();
        assert!(self.end(), "{}", self.log());
    }
}

#[test]
fn an_export_elsewhere_outlives_both_ends_of_its_connection() {
    needs_root!();
    needs!("fio");
    for seed in seeds(1) {
        let name = "devices_remote::an_export_elsewhere_outlives_both_ends_of_its_connection";
        let time = Duration::from_secs(240 + 40 * kills_wanted());
        guest::run(name, time, &variables(seed), || outlives(seed));
    }
}

fn outlives(seed: u64) {
    println!("SEED={seed}");
    let mut random = Random::new(seed, 0);
    let authority = Authority::new("authority");
    let mut daemon = tls::daemon(&authority, "");
    daemon.announce("the volume is larger than configured and stays so");
    daemon.keep_port();
    let certificates = Place::new();
    authority.write_for_clients(certificates.path());
    // The name in the certificate.
    let uri = daemon.tcp("disk").uri().replace("nbd://127.0.0.1", "nbds://localhost");
    let uri = format!("{uri}?tls-certificates={}", certificates.path().display());
    let mut client = Client::started(&daemon, &uri, &["--logical-block", "512"]);
    let (mut kills, mut size_mib) = (0, 96);
    while kills < kills_wanted() {
        let mut fio = Command::new("fio");
        fio.args(["--name=load", "--ioengine=libaio", "--direct=1", "--size=32M", "--rate=8M"]);
        fio.args(["--rw=randwrite", "--bsrange=512-64k", "--iodepth=16"]);
        fio.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_backlog=256"]);
        fio.arg(format!("--filename={}", client.device));
        fio.arg(format!("--randseed={}", random.below(1 << 30)));
        fio.current_dir(client.place.path());
        let log = client.place.join("fio.log");
        let mut fio = Process::start(&mut fio, &log).expect("fio starts");
        let status = loop {
            // Moments that are unrelated to the processes' actions.
            if let Some(status) = fio.wait(Duration::from_millis(300 + random.below(900))) {
                break status;
            }
            match random.below(5) {
                0 => {
                    client.kill();
                    client.start(&daemon);
                }
                1 => {
                    client.stop();
                    client.start(&daemon);
                }
                2 => {
                    daemon.kill();
                    daemon.restart();
                }
                3 => {
                    // Both ends at once: the client waits for its server.
                    daemon.kill();
                    client.kill();
                    daemon.restart();
                    client.start(&daemon);
                }
                _ => grow_while_away(&mut daemon, &mut size_mib),
            }
            kills += 1;
        };
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        assert!(status.success(), "SEED={seed}: {status}\n{said}\n{}", client.log());
    }
    println!("{kills} ends");
    grow_while_away(&mut daemon, &mut size_mib);
    let until = Instant::now() + Duration::from_secs(20);
    while size_of(&client.device) != size_mib << 20 {
        assert!(Instant::now() < until, "it stays at {} bytes", size_of(&client.device));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(reader(&client.device).wait().expect("dd ends").success());
    assert!(daemon.command(&["detach", &uri]).status.success());
    assert!(client.end(), "it ends with its device: {}", client.log());
    let listed = daemon.json(&["attach", "list"]);
    assert_eq!(
        listed["clients"].as_array().map(Vec::len),
        Some(0),
        "the server was told: {listed}"
    );
    daemon.stop();
    daemon.fsck();
}

/// Changes the size of the volume while its server is down.
fn grow_while_away(daemon: &mut Daemon, size_mib: &mut u64) {
    daemon.kill();
    *size_mib += 4;
    let _ = daemon.json(&["volume", "resize", "disk", &format!("{size_mib}M")]);
    daemon.restart();
}

#[test]
fn a_client_that_was_ended_by_force_never_comes_back() {
    needs_root!();
    needs!("nbdinfo", "mkfs.ext4");
    let name = "devices_remote::a_client_that_was_ended_by_force_never_comes_back";
    guest::run(name, Duration::from_secs(120), &[], fenced);
}

fn fenced() {
    let mut daemon = Daemon::started(crate::devices::SETTINGS, &[("db", "64M")]);
    daemon.announce("the server disconnected a client: its connection was replaced, or ended");
    let uri = daemon.unix("db").uri();
    refused(&daemon, &["attach", &uri], "add --nbd");
    refused(&daemon, &["attach", "--nbd", "nbds://localhost/db"], "tls-certificates=DIR");
    // Exit code 2 marks errors of the command line, after which a supervisor does not retry.
    for wrong in [&["attach", "--nbd", "nbds://localhost/db"][..], &["detach", "nbd://"]] {
        assert_eq!(daemon.command(wrong).status.code(), Some(2), "{wrong:?}");
    }
    refused(&daemon, &["attach", "--nbd", "nbd+unix:///db?socket=/nowhere"], "No such file");
    refused(&daemon, &["attach", "--nbd", &uri.replace("/db", "/other")], "no such volume");
    refused(&daemon, &["detach", &uri], "not attached to this machine");
    let mut client = Client::started(&daemon, &uri, &[]);
    let device = client.device.clone();
    // The client has the volume exclusively.
    refused(&daemon, &["attach", "--nbd", &uri], "another process serves its device");
    // The same volume by another URI.
    let tcp = daemon.tcp("db").uri();
    refused(&daemon, &["attach", "--nbd", &tcp], "has it already, perhaps by another URI");
    refused(&daemon, &["attach", "--cleanup", &device], "a process serves it");
    refused(&daemon, &["attach", "db"], "NBD connections have it open");
    refused(&daemon, &["volume", "rm", "db"], "detach it first");
    refused(&daemon, &["detach", "db"], "it is attached to client");
    assert!(!output("nbdinfo", &[&uri]).status.success(), "other clients are refused");
    let mountpoint = client.place.join("mnt");
    std::fs::create_dir(&mountpoint).expect("make a directory");
    run("mkfs.ext4", &["-q", &device]);
    run("mount", &[&device, &mountpoint.display().to_string()]);
    refused(&daemon, &["detach", &uri], "is in use");
    // The reservation holds while the client is away, and over a restart.
    client.kill();
    assert!(!output("nbdinfo", &[&uri]).status.success(), "other clients are refused");
    refused(&daemon, &["attach", "db"], "it is attached to client");
    daemon.kill();
    daemon.restart();
    assert!(!output("nbdinfo", &[&uri]).status.success(), "other clients are refused");
    client.start(&daemon);
    std::fs::write(mountpoint.join("file"), b"answered").expect("it is mounted");
    // A forced detach: requests that the client still sends have no effect, and it ends.
    let _ = daemon.json(&["detach", "--force", "db"]);
    assert_eq!(client.status().code(), Some(4), "{}", client.log());
    assert!(client.log().contains("its users get errors"), "{}", client.log());
    assert!(!reader(&device).wait().expect("dd ends").success());
    let next = daemon.json(&["attach", "db"]);
    let next = next["device"].as_str().expect("a device").to_owned();
    let before = output("sha256sum", &[&next]).stdout;
    let _ = output("umount", &[&mountpoint.display().to_string()]);
    run("sh", &["-c", "echo 3 >/proc/sys/vm/drop_caches"]);
    assert_eq!(output("sha256sum", &[&next]).stdout, before, "the old client changed something");
    let _ = daemon.json(&["detach", "db"]);
    // The client may attach again as a new one.
    let mut client = Client::started(&daemon, &uri, &[]);
    assert!(reader(&client.device).wait().expect("dd ends").success());
    // A device without its process can only be removed by force, as its use cannot be determined.
    client.kill();
    refused(&daemon, &["detach", &uri], "no process serves");
    assert!(daemon.command(&["detach", "--force", &uri]).status.success());
    assert!(output("nbdinfo", &[&uri]).status.success(), "the server was told");
    assert!(!Path::new(&client.link).exists());
    // While the server is away it gets no notice of the detach. The next command delivers the
    // notice; an attach does so before anything else.
    for is_detached_again in [false, true] {
        let mut client = Client::started(&daemon, &uri, &[]);
        daemon.kill();
        let until = Instant::now() + Duration::from_secs(20);
        let said = daemon.command(&["detach", "--force", &uri]);
        assert!(Instant::now() < until, "it waits for a server that is away");
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("the server does not know it"), "{said}");
        let _ = client.end();
        daemon.restart();
        refused(&daemon, &["attach", "db"], "it is attached to client");
        if is_detached_again {
            let said = daemon.command(&["detach", &uri]);
            let said = String::from_utf8_lossy(&said.stdout).into_owned();
            assert!(said.contains("the server knows it"), "{said}");
        }
    }
    let _ = daemon.json(&["attach", "db"]);
    let _ = daemon.json(&["detach", "db"]);
    daemon.stop();
    daemon.fsck();
}
