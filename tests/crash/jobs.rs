//! Background jobs that die: `status` shows each, and the daemon ends in order if data is at risk
//! without one.

use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Wanted};
use tests::place::{binary, skip};

/// Longest wait for an action of the daemon in the background.
const PATIENCE: Duration = Duration::from_secs(60);

fn dying(job: &str) -> Daemon {
    let mut daemon = Daemon::new(SMALL, &[("db", "8MiB")]);
    daemon.use_binary("spindle-faulty");
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", &format!("panicking-job={job}"))]);
    daemon.announce("background job");
    daemon.announce("panicked at server/engine/src/jobs.rs");
    daemon.announce("could not move the log's tail");
    daemon.announce("the store does not hold the newest writes");
    daemon
}

fn connect(daemon: &Daemon) -> Connection {
    Connection::open(&daemon.tcp("db"), &Wanted::everything()).expect("it is served")
}

fn is_died_job_shown(daemon: &Daemon, job: &str) -> bool {
    let status = daemon.json(&["status"]);
    let conditions = status["conditions"].as_array().expect("a list").iter();
    let mut names = conditions
        .filter(|one| one["kind"] == "job-died")
        .map(|one| one["subject"].as_str().expect("a name").to_owned());
    names.any(|name| name.starts_with(job))
}

#[test]
fn failed_job_shows_in_status_while_clients_are_served() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded bugs is missing (tests/run makes it)");
    }
    for job in ["copy to", "scrub", "upkeep", "snapshot schedules"] {
        let mut daemon = dying(job);
        daemon.restart();
        let url = daemon.place().join("copy").display().to_string();
        let _ = daemon.json(&["copy", "add", &url]);
        let deadline = Instant::now() + PATIENCE;
        while !is_died_job_shown(&daemon, job) {
            assert!(Instant::now() < deadline, "{job} is not in status");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut client = connect(&daemon);
        client.write(0, &[7; 4096], 0);
        assert!(client.read(0, 4096) == [7; 4096]);
        drop(client);
        daemon.stop();
    }
}

#[test]
fn a_daemon_ends_in_order_without_a_job_that_data_depends_on() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded bugs is missing (tests/run makes it)");
    }
    let mut daemon = Daemon::started(SMALL, &[("db", "8MiB")]);
    let mut client = connect(&daemon);
    client.write(0, &[7; 1 << 20], 0);
    drop(client);
    daemon.kill();
    daemon.use_binary("spindle-faulty");
    for job in ["destage", "ownership", "admin socket", "NBD listener"] {
        println!("{job}");
        daemon.announce("background job");
        daemon.announce("panicked at server/engine/src/jobs.rs");
        daemon.announce("could not move the log's tail");
        daemon.announce("the store does not hold the newest writes");
        daemon.environ(&[("SPINDLE_SEEDED_BUGS", &format!("panicking-job={job}"))]);
        let said = match daemon.try_start() {
            Ok(()) => {
                let status = daemon.wait(PATIENCE);
                assert!(!status.success(), "{job}: a supervisor starts it again");
                daemon.tail()
            }
            Err(said) => said,
        };
        assert!(said.contains(&format!("the background job {job}")), "{job}: {said}");
        assert!(said.contains("the daemon stops"), "{job}: {said}");
    }
    daemon.environ(&[("SPINDLE_SEEDED_BUGS", "")]);
    daemon.restart();
    let mut client = connect(&daemon);
    assert!(client.read(0, 1 << 20) == [7; 1 << 20]);
    drop(client);
    daemon.stop();
    daemon.fsck();
}
