//! Commands of an operator: volumes, keys, status, mistakes.
//!
//! Invariants:
//! - A mistake gets a sentence with the remedy, and exit code 1 or 2; nothing is changed.

use rustix::process::{Pid, Signal, kill_process_group};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tests::daemon::{Daemon, SMALL};
use tests::nbd::{Connection, Wanted};
use tests::place::{binary, output};
use tests::process::Process;
use tests::{Place, needs};

fn connect(daemon: &Daemon, volume: &str) -> std::io::Result<Connection> {
    Connection::open(&daemon.tcp(volume), &Wanted::everything())
}

#[track_caller]
fn fails(daemon: &Daemon, arguments: &[&str], words: &[&str]) {
    let output = daemon.command(arguments);
    let said = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert!(!output.status.success(), "{arguments:?} must fail");
    for word in words {
        assert!(said.contains(word), "{arguments:?} does not say {word:?}: {said}");
    }
}

#[test]
fn the_demonstration_runs_to_its_end() {
    let path = binary("spindle").display().to_string();
    let shown = output(&path, &["demo", "--exit"]);
    let (out, err) =
        (String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
    assert!(shown.status.success(), "{out}\n{err}");
    assert!(out.contains("every byte"), "{out}");
}

/// A terminal sends SIGINT to the whole process group: to the demonstration and its child
/// processes.
#[test]
fn the_demonstration_serves_until_it_is_interrupted() {
    let place = Place::new();
    let errors = place.join("errors");
    let mut command = Command::new(binary("spindle"));
    let mut demo =
        Process::start(command.arg("demo").process_group(0), &errors).expect("it starts");
    let mut lines = std::iter::from_fn(|| demo.line(Duration::from_secs(60)));
    assert!(lines.any(|line| line.contains("serve --help")), "it says what to type next");
    kill_process_group(Pid::from_raw(demo.id().cast_signed()).expect("a process"), Signal::INT)
        .expect("it is there");
    let status = demo.wait(Duration::from_secs(60)).expect("it ends");
    let said = std::fs::read_to_string(&errors).expect("read a file");
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

#[test]
fn volumes_come_grow_go_and_come_back_while_the_daemon_serves() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    let _ = daemon.json(&["volume", "create", "late", "4MiB"]);
    connect(&daemon, "late").expect("it is exported at once").write(0, b"hello", 0);
    let _ = daemon.json(&["volume", "resize", "late", "1TiB"]);
    let mut connection = connect(&daemon, "late").expect("it opens");
    assert_eq!(connection.info().size_bytes, 1 << 40);
    connection.write((1 << 40) - 5, b"world", 0);
    drop(connection);
    fails(&daemon, &["volume", "resize", "late", "4MiB"], &["shrink"]);
    fails(&daemon, &["volume", "create", "late", "4MiB"], &["late"]);
    fails(&daemon, &["volume", "show", "nothing"], &["nothing"]);
    fails(&daemon, &["volume", "create", "huge", "2PiB"], &["pib"]);
    fails(&daemon, &["volume", "create", "odd", "1000"], &["512"]);
    let _ = daemon.json(&["volume", "rm", "late"]);
    assert!(connect(&daemon, "late").is_err(), "a removed volume is not exported");
    let _ = daemon.json(&["volume", "restore", "late"]);
    let mut connection = connect(&daemon, "late").expect("it is back");
    assert_eq!(connection.read(0, 5), b"hello");
    drop(connection);
    daemon.kill();
    daemon.restart();
    let mut connection = connect(&daemon, "late").expect("it survives a kill");
    assert_eq!(connection.read((1 << 40) - 5, 5), b"world");
    drop(connection);
    daemon.stop();
    // Without a daemon the commands open the pool themselves.
    let listed = daemon.json(&["volume", "list"]);
    let names: Vec<&str> = listed["volumes"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|volume| volume["name"].as_str().expect("a name"))
        .collect();
    assert_eq!(names, ["disk", "late"]);
}

#[test]
fn memory_is_locked_where_that_is_asked_for() {
    for is_asked in [false, true] {
        let text = format!("lock_memory = {is_asked}\n{SMALL}");
        let mut daemon = Daemon::started(&text, &[("disk", "8MiB")]);
        connect(&daemon, "disk").expect("it opens").write(0, &[1; 1 << 20], 0);
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id()));
        let status = status.expect("it runs");
        let locked = status.lines().find(|line| line.starts_with("VmLck:")).expect("a line");
        assert_eq!(!locked.contains(" 0 kB"), is_asked, "{locked}");
        daemon.stop();
    }
}

#[test]
fn start_keeps_volume_settings_unless_options_name_them() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB"), ("db", "4MiB")]);
    let promises = |daemon: &Daemon, name: &str| {
        let shown = daemon.json(&["volume", "show", name]);
        (shown["durability"].as_str().expect("a word").to_owned(), shown["is_read_only"] == true)
    };
    assert_eq!(promises(&daemon, "db"), ("auto".to_owned(), false));
    let set = daemon.json(&["volume", "set", "db", "--durability", "store"]);
    assert_eq!(set["durability"], "store", "{set}");
    let _ = daemon.json(&["volume", "set", "db", "--read-only", "true"]);
    assert_eq!(promises(&daemon, "db"), ("store".to_owned(), true));
    assert!(daemon.log().contains("the options of the volume have changed"), "{}", daemon.tail());
    daemon.stop();
    // With `--volume db=4MiB`, which does not set these promises.
    daemon.restart();
    assert_eq!(promises(&daemon, "db"), ("store".to_owned(), true));
    daemon.stop();
    // The same without a daemon; options that are not given keep their values.
    let set = daemon.json(&["volume", "set", "db", "--read-only", "false"]);
    assert_eq!((&set["durability"], &set["is_read_only"]), (&"store".into(), &false.into()));
    fails(&daemon, &["volume", "set", "nothing", "--read-only", "true"], &["nothing"]);
    fails(&daemon, &["volume", "set", "db"], &["--durability", "--read-only"]);
    // The configuration's promises apply from the start on.
    let named = "[[volumes]]\nname = \"db\"\nsize = \"4MiB\"\ndurability = \"write\"\n";
    std::fs::write(daemon.place().join("spindle.toml"), format!("{SMALL}{named}"))
        .expect("write the configuration");
    daemon.restart();
    assert_eq!(promises(&daemon, "db"), ("write".to_owned(), false));
    connect(&daemon, "db").expect("it opens").write(0, b"hello", 0);
    daemon.stop();
}

#[test]
fn status_shows_data_at_risk_until_a_flush() {
    let settings = SMALL.replace("max_age = \"1s\"", "max_age = \"1h\"");
    let daemon = Daemon::started(&settings, &[("disk", "8MiB")]);
    connect(&daemon, "disk").expect("it opens").write(0, &[1; 65536], 0);
    let before = daemon.json(&["status"]);
    println!("{before}");
    assert!(before["at_risk"]["bytes"].as_u64().is_some_and(|bytes| bytes >= 65536), "{before}");
    assert!(before["nbd"]["request_count"].as_u64().is_some_and(|count| count > 0), "{before}");
    assert_eq!(before["cache"]["is_on"], true, "{before}");
    assert_eq!(before["key_slots"][0]["kind"], "key-file", "{before}");
    assert_eq!(daemon.json(&["volume", "show", "disk"])["is_stalled"], false);
    let _ = daemon.json(&["drain"]);
    let after = daemon.json(&["status"]);
    assert_eq!(after["at_risk"]["bytes"], 0, "{after}");
    let text = daemon.command(&["status"]);
    let text = String::from_utf8_lossy(&text.stdout).to_lowercase();
    assert!(text.contains("key backup"), "status warns until a recovery key was made: {text}");
}

#[test]
fn a_pool_is_removed_restored_and_purged() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    connect(&daemon, "disk").expect("it opens").write(0, b"precious", 0);
    fails(&daemon, &["pool", "rm"], &["in use by process", "stop"]);
    connect(&daemon, "disk").expect("it is served on").write(8, b" data", 0);
    daemon.stop();
    fails(&daemon, &["pool", "purge", "--now"], &["not removed", "pool rm"]);
    let removed = daemon.json(&["pool", "rm"]);
    assert_eq!(removed["name"], "main", "{removed}");
    let moment = |key: &str| removed[key].as_u64().expect("a moment");
    assert_eq!(moment("purge_at") - moment("removed_at"), 7 * 86_400);
    fails(&daemon, &["status"], &["was removed at", "pool restore"]);
    let said = daemon.refuses_to_start();
    assert!(said.contains("was removed at") && said.contains("pool restore"), "{said}");
    daemon.fsck();
    fails(&daemon, &["pool", "purge"], &["is kept until", "--now"]);

    assert_eq!(daemon.json(&["pool", "restore"])["volume_count"], 1);
    daemon.restart();
    assert_eq!(connect(&daemon, "disk").expect("it is back").read(0, 13), b"precious data");
    daemon.stop();

    let _ = daemon.json(&["pool", "rm"]);
    let store = daemon.dir().join("store");
    std::fs::write(store.join("of somebody else"), b"stays").expect("the store is there");
    let purged = daemon.command(&["pool", "purge", "--now"]);
    let said = String::from_utf8_lossy(&purged.stdout);
    assert!(purged.status.success() && said.contains("may be deleted"), "{said}");
    assert_eq!(files_below(&store), [store.join("of somebody else")]);
    fails(&daemon, &["pool", "restore"], &["there is no pool"]);
}

/// Returns all files below a directory.
fn files_below(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let (mut found, mut todo) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).expect("a readable directory") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() { todo.push(path) } else { found.push(path) }
        }
    }
    found
}

#[test]
fn a_recovery_key_opens_the_pool_when_the_key_file_is_lost() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    connect(&daemon, "disk").expect("it opens").write(0, b"precious", 0);
    let backup = daemon.json(&["key", "backup"]);
    let recovery = backup["key"].as_str().expect("a recovery key").to_owned();
    daemon.stop();
    std::fs::remove_file(daemon.dir().join("spindle.key")).expect("the key file is there");
    let said = daemon.refuses_to_start().to_lowercase();
    assert!(said.contains("key"), "{said}");
    let path = daemon.place().join("recovery");
    std::fs::write(&path, &recovery).expect("write the recovery key");
    tests::place::run("chmod", &["600", &path.display().to_string()]);
    daemon.argue(&["--recovery-key-file", &path.display().to_string()]);
    daemon.restart();
    assert_eq!(connect(&daemon, "disk").expect("it opens").read(0, 8), b"precious");
}

#[test]
fn a_rotated_key_replaces_the_old_one() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    connect(&daemon, "disk").expect("it opens").write(0, b"precious", 0);
    let key = daemon.dir().join("spindle.key");
    let old = std::fs::read(&key).expect("the key file is there");
    let _ = daemon.json(&["key", "rotate"]);
    assert_ne!(std::fs::read(&key).expect("the key file is there"), old);
    daemon.kill();
    daemon.restart();
    assert_eq!(connect(&daemon, "disk").expect("it opens").read(0, 8), b"precious");
    daemon.stop();
    std::fs::write(&key, old).expect("write the old key");
    let said = daemon.refuses_to_start().to_lowercase();
    assert!(said.contains("key"), "{said}");
}

#[test]
fn daemon_checks_its_pool_after_a_key_change() {
    let mut daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    connect(&daemon, "disk").expect("it opens").write(0, b"precious", 0);
    let _ = daemon.json(&["drain"]);
    daemon.environ(&[("NEW_PHRASE", "correct horse battery staple")]);
    let _ = daemon.json(&["key", "rotate", "--new-passphrase-env", "NEW_PHRASE"]);
    // The configuration still names the old key file, which opens nothing any more.
    daemon.fsck();
    daemon.stop();
    fails(&daemon, &["fsck"], &["not opened by a key file"]);
}

#[test]
fn read_only_commands_and_wrong_stores_write_nothing() {
    let path = binary("spindle").display().to_string();
    let place = tests::Place::new();
    let at = |name: &str| place.join(name).display().to_string();
    let run = |arguments: &[&str]| {
        let output = output(&path, arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    };
    std::fs::create_dir(place.join("empty")).expect("make a directory");
    for command in [&["status"][..], &["volume", "list"], &["drain"], &["key", "backup"], &["fsck"]]
    {
        for (dir, store) in [("typo", "typo/store"), ("empty", "nowhere"), ("empty", "empty")] {
            let (dir, store) = (at(dir), at(store));
            let (code, said) = run(&[command, &["--dir", &dir, "--store", &store]].concat());
            assert_eq!(code, Some(1), "{command:?}: {said}");
            assert!(said.contains("no pool") || said.contains("does not exist"), "{said}");
        }
    }
    let left = std::fs::read_dir(place.join("empty")).expect("it is there").count();
    assert_eq!(left, 0, "a look left something behind");
    assert!(!place.join("typo").exists() && !place.join("nowhere").exists());
    // Creating a volume also creates its pool.
    let dir = at("dir");
    let (code, said) = run(&["volume", "create", "disk", "8MiB", "--dir", &dir]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = run(&["volume", "list", "--dir", &dir]);
    assert_eq!(code, Some(0), "{said}");
    // Its directory then refuses a store without this pool.
    for store in [at("empty"), at("nowhere")] {
        for command in [&["serve", "--nbd", "127.0.0.1:0"][..], &["volume", "create", "b", "1MiB"]]
        {
            let (code, said) = run(&[command, &["--dir", &dir, "--store", &store]].concat());
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains("belongs to pool") && said.contains("--store"), "{said}");
        }
    }
    assert_eq!(std::fs::read_dir(place.join("empty")).expect("it is there").count(), 0);
    assert!(!place.join("nowhere").exists());
}

#[test]
fn mistakes_get_a_sentence_and_change_nothing() {
    let path = binary("spindle").display().to_string();
    let place = tests::Place::new();
    let refused = |settings: &str, arguments: &[&str], words: &[&str]| {
        let config = place.join("spindle.toml");
        std::fs::write(&config, settings).expect("write the configuration");
        let dir = place.join("dir").display().to_string();
        let config = config.display().to_string();
        let mut all = vec!["serve", "--dir", &dir, "--config", &config];
        all.extend(arguments);
        let output = output(&path, &all);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{settings:?} {arguments:?} must be refused");
        for word in words {
            assert!(
                said.contains(word),
                "{settings:?} {arguments:?} does not say {word:?}: {said}"
            );
        }
    };
    refused("[log]\nsise = \"1GiB\"\n", &[], &["sise", "size"]);
    refused("memory = \"lots\"\n", &[], &["line 1", "lots"]);
    refused("[log]\nsize = \"1MiB\"\n", &[], &["log.size"]);
    refused("", &["--nbd", "0.0.0.0:0"], &["TLS"]);
    refused("", &["--nbd", "nonsense"], &["HOST:PORT"]);
    refused("", &["--volume", "disk"], &["NAME=SIZE"]);
    refused("", &["--volume", "a/b=1G"], &["a/b"]);
    refused("", &["--store", "s3://key:secret@bucket/p"], &["credentials"]);
    refused("", &["--store", "ftp://host/p"], &["ftp://host/p", "s3://bucket/prefix"]);
    assert!(!place.join("dir").exists(), "a refused start made a directory");
}

#[test]
fn every_command_can_speak_json() {
    let path = binary("spindle").display().to_string();
    let spoken = |arguments: &[&str]| {
        let output = output(&path, arguments);
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        let parsed: serde_json::Value = serde_json::from_str(&out)
            .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {out:?}"));
        (output.status.code(), parsed)
    };
    for arguments in [&["stats", "-o", "json"][..], &["-o", "json", "volume", "create", "a", "1X"]]
    {
        let (code, document) = spoken(arguments);
        assert_eq!((code, &document["error"]["kind"]), (Some(2), &"invalid".into()));
        assert!(document["error"]["message"].as_str().is_some_and(|said| said.len() > 10));
    }
    let (code, document) = spoken(&["config", "example", "-o", "json"]);
    assert_eq!(code, Some(0));
    assert!(document["text"].as_str().is_some_and(|text| text.contains("[nbd]")));
    assert!(document["options"].as_array().is_some_and(|options| options.len() > 20));
    let (code, document) = spoken(&["demo", "--exit", "-o", "json"]);
    assert_eq!(code, Some(0));
    assert_eq!((&document["is_verified"], &document["volume"]), (&true.into(), &"demo".into()));
    assert_eq!(document["latencies"].as_array().map(Vec::len), Some(3), "{document}");
    // The daemon prints its addresses in one line, so that a script can wait for it.
    let place = tests::Place::new();
    let mut serve = std::process::Command::new(&path);
    serve.args(["serve", "-o", "json", "--nbd", "127.0.0.1:0", "--volume", "disk=1MiB", "--dir"]);
    serve.arg(place.join("dir")).env("SPINDLE_LOG", "error");
    let mut process = tests::process::Process::start(&mut serve, &place.join("log")).expect("runs");
    let line = process.line(std::time::Duration::from_secs(60)).expect("it becomes ready");
    let ready: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(ready["is_ready"], true, "{ready}");
    let uri = ready["endpoints"][0].as_str().expect("an endpoint");
    assert!(uri.starts_with("nbd://127.0.0.1:") && uri.ends_with("/disk"), "{ready}");
    process.terminate();
    assert!(process.wait(std::time::Duration::from_secs(60)).is_some_and(|end| end.success()));
}

#[test]
fn a_second_daemon_on_the_same_directory_is_refused() {
    let daemon = Daemon::started(SMALL, &[("disk", "8MiB")]);
    let path = binary("spindle").display().to_string();
    let dir = daemon.dir().display().to_string();
    let second = output(&path, &["serve", "--dir", &dir, "--nbd", "127.0.0.1:0"]);
    let said = String::from_utf8_lossy(&second.stderr).to_lowercase();
    assert!(!second.status.success() && said.contains("in use"), "{said}");
    connect(&daemon, "disk").expect("the first is unharmed").write(0, b"x", 0);
}

#[test]
fn systemd_understands_the_units_of_the_packages() {
    needs!("systemd-analyze");
    let place = Place::new();
    let program = binary("spindle").display().to_string();
    let packaging = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
    let says = |text: &str, name: &str| {
        let unit = place.join(name);
        std::fs::write(&unit, text).expect("write a unit");
        let said = output("systemd-analyze", &["verify", &unit.display().to_string()]);
        // Its messages on other units of this machine do not matter.
        let all = String::from_utf8_lossy(&said.stderr).into_owned();
        let ours: Vec<&str> = all.lines().filter(|line| line.contains("spindle")).collect();
        ours.join("\n")
    };
    for name in ["spindle.service", "spindle@.service", "spindle-attach@.service"] {
        let text = std::fs::read_to_string(packaging.join(name)).expect("it is there");
        assert!(text.contains("ExecStart=/usr/bin/spindle "), "{name}");
        let text = text.replace("/usr/bin/spindle", &program);
        assert_eq!(says(&text, name), "", "{name}");
        let wrong = text.replace("RestartSec=", "RestartSeconds=");
        assert!(says(&wrong, name).contains("RestartSeconds"), "a mistake is seen");
    }
}
