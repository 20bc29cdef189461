//! The conditions: each begins, is listed with its start, its cost and the remedy, and ends.
//!
//! Invariants:
//! - A healthy pool lists only the conditions that its operator has left open.

use crate::copies::connect;
use crate::stores::on;
use serde_json::Value;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use tests::bucket::{Bucket, Care};
use tests::cut::{Line, Proxy};
use tests::daemon::Daemon;
use tests::nbd::wire::CMD_WRITE;

/// Returns the lasting conditions of one kind.
pub fn conditions(daemon: &Daemon, kind: &str) -> Vec<Value> {
    let status = daemon.json(&["status"]);
    let all = status["conditions"].as_array().expect("a list");
    all.iter().filter(|condition| condition["kind"] == kind).cloned().collect()
}

/// Returns kind and subject of all conditions.
fn listed(daemon: &Daemon) -> BTreeSet<(String, String)> {
    let status = daemon.json(&["status"]);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let all = status["conditions"].as_array().expect("a list");
    all.iter().map(|one| (text(&one["kind"]), text(&one["subject"]))).collect()
}

fn named(pairs: &[(&str, &str)]) -> BTreeSet<(String, String)> {
    pairs.iter().map(|(kind, subject)| ((*kind).to_owned(), (*subject).to_owned())).collect()
}

/// Waits for longer than a condition has to last before it counts.
fn wait_for(
    what: &str,
    daemon: &Daemon,
    mut is_so: impl FnMut(BTreeSet<(String, String)>) -> bool,
) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let listed = listed(daemon);
        if is_so(listed.clone()) {
            return;
        }
        assert!(Instant::now() < deadline, "not in two minutes: {what}: {listed:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

const LEFT_TO_DO: [(&str, &str); 1] = [("no-recovery-key", "pool")];

#[test]
fn unreachable_store_is_reported_with_its_consequences() {
    let bucket = Bucket::start(Care::Honest);
    let proxy = Proxy::start(bucket.address()).expect("a proxy");
    let mut daemon = on(proxy.address());
    daemon.announce("");
    daemon.restart();
    let mut writer = connect(&daemon, "db");
    writer.write(0, &[1; 65536], 0);
    let _ = daemon.json(&["drain"]);
    assert_eq!(listed(&daemon), named(&LEFT_TO_DO));
    proxy.set(Line::Cut);
    std::thread::scope(|scope| {
        // More than the log holds, so the writer waits for the store.
        let writing = scope.spawn(|| {
            let payload = vec![7; 256 << 10];
            for index in 0..96 {
                let offset = (index % 16) * (256 << 10);
                let reply = writer.call(CMD_WRITE, 0, offset, 256 << 10, &payload);
                assert_eq!(reply.expect("a reply").error, 0);
            }
        });
        let away = named(&[
            ("store-unavailable", "contact"),
            ("store-unavailable", "upload"),
            ("log-full", "log"),
            ("data-at-risk", "pool"),
        ]);
        wait_for("all of it is told", &daemon, |listed| listed.is_superset(&away));
        for kind in ["store-unavailable", "log-full", "data-at-risk"] {
            for condition in conditions(&daemon, kind) {
                for text in ["what", "cost", "remedy"] {
                    let said = condition[text].as_str().expect("a text");
                    assert!(said.len() > 10, "{condition}");
                }
                assert!(condition["since"].as_u64() > Some(1_600_000_000), "{condition}");
                assert!(condition["seconds"].as_u64() < Some(600), "{condition}");
            }
        }
        let status = daemon.json(&["status"]);
        let counts = &status["condition_counts"]["store-unavailable"];
        assert!(counts["raised_count"].as_u64() >= Some(2), "{counts}");
        assert!(counts["lasting_count"].as_u64() >= Some(2), "{counts}");
        assert_eq!(status["condition_excluded_count"], 0);
        // The text output shows the same.
        let shown = daemon.command(&["status"]);
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        for text in
            ["warning: the write log is full", "(log-full)", "  since: ", "  cost: ", "  to do: "]
        {
            assert!(shown.contains(text), "it does not show {text:?}: {shown}");
        }
        proxy.set(Line::Open);
        writing.join().expect("all is written");
    });
    let _ = daemon.json(&["drain"]);
    wait_for("all of it has ended", &daemon, |listed| listed == named(&LEFT_TO_DO));
    let log = daemon.log();
    for (kind, subject) in [("log-full", "log"), ("store-unavailable", "upload")] {
        let of_it = |line: &&str| {
            line.contains(&format!("condition=\"{kind}\""))
                && line.contains(&format!("subject=\"{subject}\""))
        };
        let lines: Vec<&str> = log.lines().filter(of_it).collect();
        let ended = lines.iter().filter(|line| line.contains("the condition has ended")).count();
        assert!(ended >= 1 && lines.len() == 2 * ended, "one line each: {lines:#?}");
    }
    drop(writer);
    daemon.stop();
    // The same conditions are listed without a daemon.
    assert_eq!(listed(&daemon), named(&LEFT_TO_DO));
    let _ = daemon.json(&["key", "backup"]);
    assert_eq!(listed(&daemon), BTreeSet::new());
}
