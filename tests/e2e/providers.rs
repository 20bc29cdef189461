//! Three providers for real: a pool in one store is restored in each other kind of store, whole,
//! with a database that starts on it at once.
//!
//! Invariants:
//! - The first pool and its store are gone before the restored pool is read.
//! - Each store has credentials of its own; the variables of the copy's store have a prefix.

use crate::filesystem::{self, Mounted};
use crate::postgres::Postgres;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::gcs::{Gcs, TOKEN};
use tests::http::{ask, escape};
use tests::nbd::{Connection, Wanted};
use tests::place::{binary, skip};
use tests::process::dies_with_us;
use tests::provider::{KINDS, Kind, Provider};
use tests::seed::{Random, seeds};
use tests::store::BUCKET;
use tests::{Place, needs, needs_providers, needs_root};

const MIB: u64 = 1 << 20;
/// Size of the volume.
const VOLUME_MIB: u64 = 24;
/// Prefix of the names of the copy's variables.
const PREFIX: &str = "DR_";

fn others(kind: Kind) -> impl Iterator<Item = Kind> {
    KINDS.into_iter().filter(move |other| *other != kind)
}

fn set(daemon: &mut Daemon, variables: &[(String, String)]) {
    let pairs: Vec<_> =
        variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    daemon.environ(&pairs);
}

/// Makes a daemon, not started, whose pool is in a provider's store.
fn on(provider: &Provider, settings: &str, volumes: &[(&str, &str)]) -> Daemon {
    let mut daemon = Daemon::new(settings, volumes);
    daemon.argue(&["--store", &provider.url("pool")]);
    set(&mut daemon, &provider.environment(""));
    daemon
}

/// Copies the pool to a store, up to the last flushed write.
fn copy_to(source: &Daemon, to: &Provider) {
    let url = to.url("dr");
    let _ = source.json(&["copy", "add", &url, "--env-prefix", PREFIX, "--interval", "1s"]);
    let _ = source.json(&["copy", "sync", &url]);
}

/// Restores a pool from the copy in a store to another place of the same store, and serves it.
/// Returns the daemon and the time from the command to the first byte of `export`.
fn restored(
    at: &Provider,
    key: &Place,
    settings: &str,
    export: &str,
    more: &[&str],
) -> (Daemon, Duration) {
    let key = key.join("key").display().to_string();
    let mut daemon = on(at, settings, &[]);
    daemon.argue(&["--key-file", &key]);
    set(&mut daemon, &at.environment(PREFIX));
    let begun = Instant::now();
    let url = at.url("dr");
    let arguments = ["restore", &url, "--key-file", &key, "--env-prefix", PREFIX];
    let _ = daemon.json(&[&arguments, more].concat());
    daemon.restart();
    let _ = connect(&daemon, export).read(0, 4096);
    (daemon, begun.elapsed())
}

/// Copies the key of a pool to a place that survives its daemon.
fn key_of(source: &Daemon) -> Place {
    let place = Place::new();
    std::fs::copy(source.dir().join("spindle.key"), place.join("key")).expect("it has a key");
    place
}

fn connect(daemon: &Daemon, export: &str) -> Connection {
    Connection::open(&daemon.unix(export), &Wanted::everything()).expect("it opens")
}

/// Computes FNV-1a over the words of an export. Source: Fowler, Noll, Vo, "The FNV
/// Non-Cryptographic Hash Algorithm".
fn checksum(daemon: &Daemon, export: &str, mib_count: u64) -> u64 {
    let mut connection = connect(daemon, export);
    (0..mib_count).fold(0xcbf2_9ce4_8422_2325, |sum, part| {
        let bytes = connection.read(part * MIB, 1 << 20);
        bytes.chunks_exact(8).fold(sum, |sum, word| {
            let word = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            (sum ^ word).wrapping_mul(0x0100_0000_01b3)
        })
    })
}

/// Returns a restored pool's status of hydration.
fn hydration(daemon: &Daemon) -> Value {
    daemon.json(&["status"])["restored"].clone()
}

fn wait_until_whole(daemon: &Daemon) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while hydration(daemon)["is_complete"] != true {
        assert!(Instant::now() < deadline, "not whole in a minute: {}", hydration(daemon));
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn is_restored_in_each_other(kind: Kind) {
    needs_providers!();
    for seed in seeds(1) {
        println!("SEED={seed}");
        let mut random = Random::new(seed, 21);
        let server = Provider::start(kind);
        let targets: Vec<Provider> = others(kind).map(Provider::start).collect();
        let mut source = on(&server, SMALL, &[("db", &format!("{VOLUME_MIB}MiB"))]);
        for target in &targets {
            set(&mut source, &target.environment(PREFIX));
        }
        source.restart();
        let mut db = connect(&source, "db");
        let mut write = |share: u64| {
            for part in 0..VOLUME_MIB * 4 {
                if random.chance(share) {
                    // Random data, which does not compress.
                    let bytes = (0..MIB / 32).flat_map(|_| random.bits().to_le_bytes());
                    db.write(part * MIB / 4, &bytes.collect::<Vec<u8>>(), 0);
                }
            }
            db.flush();
        };
        write(70);
        let _ = source.json(&["snapshot", "create", "db@nightly"]);
        write(20);
        let sums = ["db", "db@nightly"].map(|export| checksum(&source, export, VOLUME_MIB));
        assert_ne!(sums[0], sums[1]);
        for target in &targets {
            copy_to(&source, target);
        }
        let key = key_of(&source);
        drop(db);
        source.stop();
        drop((source, server));
        for target in &targets {
            let (mut other, took) = restored(target, &key, SMALL, "db", &[]);
            println!("{kind:?} to {:?}: the first byte came after {took:?}", target.kind());
            let check = |other: &Daemon| {
                let found = ["db", "db@nightly"].map(|export| checksum(other, export, VOLUME_MIB));
                assert_eq!(found, sums, "{kind:?} to {:?}", target.kind());
            };
            check(&other);
            wait_until_whole(&other);
            // The restored pool takes writes, and needs no other store.
            connect(&other, "db").write(0, &[7; 4096], 0);
            connect(&other, "db").write(0, &[8; 4096], 0);
            other.stop();
            let key = key.join("key").display().to_string();
            let found = other.json(&["fsck", "--key-file", &key]);
            assert_eq!(found["problem_count"], 0, "{found}");
            let found = other.json(&[
                "fsck",
                "--copy",
                &target.url("dr"),
                "--key-file",
                &key,
                "--env-prefix",
                PREFIX,
            ]);
            assert_eq!(found["problem_count"], 0, "{found}");
            other.restart();
            assert_eq!(connect(&other, "db").read(0, 4096), [8; 4096]);
            assert_eq!(checksum(&other, "db@nightly", VOLUME_MIB), sums[1]);
            other.stop();
        }
    }
}

#[test]
fn a_pool_on_s3_is_restored_on_azure_and_google() {
    is_restored_in_each_other(Kind::S3);
}

#[test]
fn a_pool_on_azure_is_restored_on_s3_and_google() {
    is_restored_in_each_other(Kind::Azure);
}

#[test]
fn a_pool_on_google_is_restored_on_s3_and_azure() {
    is_restored_in_each_other(Kind::Gcs);
}

/// Copies a database while it works, and starts it from its snapshot in another provider's store
/// before half of the data has arrived.
fn a_database_is_restored(from: Kind, to: Kind) {
    needs_providers!();
    needs_root!();
    needs!("nbdfuse", "mkfs.ext4", "losetup", "setpriv");
    let Some(programs) = Postgres::programs() else {
        return skip("PostgreSQL is not installed");
    };
    let (server, target) = (Provider::start(from), Provider::start(to));
    let mut source = on(&server, &filesystem::settings(), &[("db", "512MiB")]);
    set(&mut source, &target.environment(PREFIX));
    source.restart();
    let place = Place::new();
    let mounted = Mounted::mount(&source.unix("db").uri(), &place, true);
    let mut postgres = Postgres::made(programs.clone(), &mounted.mountpoint, &place);
    postgres.bench(&["-i", "-q", "-s", "2"]);
    postgres.sql("create table seen(id bigint primary key)");
    postgres.sql("insert into seen select generate_series(1, 1000)");
    std::thread::scope(|scope| {
        let load = scope.spawn(postgres.load(&["-T", "3", "-c", "4"]));
        let count = || postgres.sql("select count(*) from pgbench_history");
        while count().parse::<u64>().expect("a number") < 100 {
            assert!(!load.is_finished(), "it ended before its history began");
        }
        let _ = source.json(&["snapshot", "create", "db@nightly"]);
        load.join().expect("it runs to its end");
    });
    let after = postgres.sql("select count(*) from pgbench_history");
    postgres.stop();
    mounted.unmount();
    copy_to(&source, &target);
    let sum = checksum(&source, "db@nightly", 512);
    let key = key_of(&source);
    let bytes =
        source.json(&["copy", "list"])["copies"][0]["recovery_point"]["segment_bytes"].clone();
    let bytes = bytes.as_u64().expect("it has a state");
    source.stop();
    drop((source, server));

    // At this rate all of it takes five minutes, so half of it cannot arrive within two and a half.
    let rate = (bytes / 300).max(1024).to_string();
    let settings = filesystem::settings();
    let (mut other, took) = restored(&target, &key, &settings, "db@nightly", &["--rate", &rate]);
    let first = hydration(&other);
    assert!(first["left_bytes"].as_u64() > Some(bytes / 2), "of {bytes}: {first}");
    let _ = other.json(&["clone", "db@nightly", "test"]);
    let place = Place::new();
    let mounted = Mounted::mount(&other.unix("test").uri(), &place, false);
    let mut postgres = Postgres::found(programs, &mounted.mountpoint, &place);
    postgres.check_running();
    assert_eq!(postgres.sql("select count(*), sum(id) from seen"), "1000|500500");
    let there: u64 =
        postgres.sql("select count(*) from pgbench_history").parse().expect("a number");
    assert!(there >= 100 && there < after.parse().expect("a number"), "{there} of {after}");
    // The database works normally.
    postgres.bench(&["-n", "-t", "50", "-c", "2"]);
    postgres.check_running();
    let state = hydration(&other);
    let of = |name: &str| state[name].as_u64().expect("a number");
    let (left, done) = (of("left_bytes"), of("done_bytes"));
    println!(
        "{from:?} to {to:?}: first byte after {took:?}; checked with {done} of {} bytes here",
        left + done
    );
    assert!(state["is_complete"] == false && done < (left + done) / 2, "{state}");
    assert!(left + done > bytes / 2, "of {bytes}: {state}");
    postgres.check();
    mounted.unmount();
    assert_eq!(checksum(&other, "db@nightly", 512), sum, "the clone's writes are its own");
    other.stop();
}

#[test]
fn a_database_on_s3_starts_on_azure_before_half_of_it_is_there() {
    a_database_is_restored(Kind::S3, Kind::Azure);
}

#[test]
fn a_database_on_azure_starts_on_google_before_half_of_it_is_there() {
    a_database_is_restored(Kind::Azure, Kind::Gcs);
}

#[test]
fn a_database_on_google_starts_on_s3_before_half_of_it_is_there() {
    a_database_is_restored(Kind::Gcs, Kind::S3);
}

/// Returns the error text of a failed command: sentences in one line, without markup or a
/// credential.
#[track_caller]
fn reason(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it is accepted");
    let lines: Vec<_> = said.lines().filter(|line| line.starts_with("spindle: ")).collect();
    assert_eq!(lines.len(), 1, "{said}");
    assert!(!lines[0].contains(['<', '{']) && !lines[0].contains("d3Jvbmc="), "{said}");
    lines[0].to_owned()
}

#[test]
fn a_store_that_cannot_be_used_says_why_whichever_provider_it_is() {
    needs_providers!();
    for kind in KINDS {
        let provider = Provider::start(kind);
        let (secret, wrong) = provider.wrong_credential();
        let right = provider.environment("");
        let changed = |names: &[&str], value: &str| -> Vec<(String, String)> {
            let other = |(name, old): &(String, String)| {
                let value = if names.contains(&name.as_str()) { value } else { old };
                (name.clone(), value.to_owned())
            };
            right.iter().map(other).collect()
        };
        let nobody = changed(provider.endpoint_variables(), "http://127.0.0.1:9");
        let here = provider.url("p");
        let nowhere = format!("{}://no-such-bucket/p", kind.scheme());
        for (variables, url, words) in [
            (&changed(&[secret], wrong), &here, "access denied"),
            (&nobody, &here, "no answer from the endpoint"),
            (&right, &nowhere, "not found. Does the bucket or container exist"),
        ] {
            let mut daemon = Daemon::new(SMALL, &[("db", "8MiB")]);
            let prefixed: Vec<_> = variables
                .iter()
                .map(|(name, value)| (format!("{PREFIX}{name}"), value.clone()))
                .collect();
            set(&mut daemon, variables);
            set(&mut daemon, &prefixed);
            let begun = Instant::now();
            let key = daemon.place().join("key").display().to_string();
            let served = ["serve", "--store", url, "--key-file", &key];
            let why = reason(&daemon.command(&served));
            assert!(why.contains(words), "serve: {why}");
            let restore = ["restore", url, "--env-prefix", PREFIX, "--key-file", &key];
            let why = reason(&daemon.command(&restore));
            // Before anything is written, a missing bucket looks like one without a copy.
            assert!(why.contains(words) || why.contains("there is none"), "restore: {why}");
            daemon.restart();
            let why = reason(&daemon.command(&["copy", "add", url, "--env-prefix", PREFIX]));
            assert!(why.contains(words), "copy add: {why}");
            assert_eq!(daemon.json(&["copy", "list"])["copies"], Value::Array(Vec::new()));
            daemon.stop();
            println!("{kind:?}: {why} ({:?})", begun.elapsed());
        }
    }
}

/// Returns the names of the objects below a folder of the Google server's bucket.
fn names(gcs: &Provider, folder: &str) -> Vec<String> {
    let token = format!("Bearer {TOKEN}");
    let target = format!("/{BUCKET}?list-type=2&prefix={}", escape(folder));
    let answer = ask(gcs.address(), "GET", &target, &[("Authorization", &token)], &[]);
    let body = String::from_utf8(answer.expect("it answers").body).expect("it is a text");
    let name = |part: &str| part.split("</Key>").next().unwrap_or_default().to_owned();
    body.split("<Key>").skip(1).map(name).collect()
}

#[test]
fn the_example_keeps_a_database_at_a_second_provider() {
    needs_providers!();
    needs_root!();
    needs!("nbdfuse", "mkfs.ext4", "losetup", "setpriv", "findmnt");
    let Some(programs) = Postgres::programs() else {
        return skip("PostgreSQL is not installed");
    };
    let (server, second) = (Provider::start(Kind::S3), Provider::start(Kind::Gcs));
    let mut source = on(&server, &filesystem::settings(), &[("db", "512MiB")]);
    set(&mut source, &second.environment(PREFIX));
    source.restart();
    let place = Place::new();
    let mounted = Mounted::mount(&source.unix("db").uri(), &place, true);
    let mut postgres = Postgres::made(programs, &mounted.mountpoint, &place);
    postgres.bench(&["-i", "-q", "-s", "1"]);
    let elsewhere = Place::new();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/postgres/dr.sh");
    let run = |arguments: &[&str], changed: &[(&str, &str)]| {
        let mut command = Command::new(&script);
        command.args(arguments).env("DIR", source.dir()).env("SPINDLE", binary("spindle"));
        command.env("DR_CONFIG", "/dev/null").env("TMPDIR", elsewhere.path()).env("KEEP", "1");
        command.env("COPY", second.url("dr")).env("COPY_ENV", PREFIX);
        command.env("DRILL", second.url("drill")).stdin(Stdio::null());
        command.envs(second.environment("")).envs(second.environment(PREFIX));
        command.envs(changed.iter().copied());
        let output = dies_with_us(&mut command).output().expect("it starts");
        let said = [output.stdout.as_slice(), &output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    };
    let done = |arguments: &[&str], changed: &[(&str, &str)]| {
        let (code, said) = run(arguments, changed);
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        said
    };
    let snapshots = || {
        let found = source.json(&["snapshot", "list"]);
        let all = found["snapshots"].as_array().expect("a list").clone();
        all.iter().map(|one| one["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };

    done(&["nightly"], &[("NIGHT", "20260101")]);
    postgres.sql("create table seen as select generate_series(1, 1000) as id");
    let said = done(&["nightly"], &[("NIGHT", "20260102")]);
    assert!(said.contains("removed db@nightly-20260101"), "{said}");
    done(&["nightly"], &[("NIGHT", "20260102")]);
    assert_eq!(snapshots(), ["nightly-20260102"]);
    for _ in 0..2 {
        done(&["testdb"], &[]);
        let made = source.json(&["volume", "show", "db-test"]).to_string();
        assert!(made.contains("nightly-20260102"), "{made}");
    }
    postgres.check();
    mounted.unmount();

    let said = done(&["drill"], &[]);
    println!("{said}");
    assert!(
        said.contains("PostgreSQL answers") && said.contains("pg_amcheck finds nothing"),
        "{said}"
    );
    let nothing = [""; 0];
    assert_eq!(names(&second, "drill/"), nothing, "the drill's pool is purged");
    assert_eq!(names(&second, "dr/copy/pins/"), nothing, "and has given its pin back");

    // Failures are reported, and leave nothing behind either.
    for (arguments, changed, words) in [
        (&["drill"][..], ("COPY", ""), "COPY is not set"),
        (&["drill"], ("COPY", second.url("nowhere").as_str()), "there is none"),
        (&["drill"], ("PGDATA", "elsewhere"), "PostgreSQL does not start"),
        (&["testdb", "db"], ("KEEP", "1"), "choose another name"),
        (&["restore", "somewhere"], ("KEEP", "1"), "restore takes two"),
        (&[], ("KEEP", "1"), "dr.sh nightly"),
    ] {
        let (code, said) = run(arguments, &[changed]);
        assert!(code != Some(0) && said.contains(words), "{arguments:?}: {code:?} {said}");
    }
    assert_eq!(names(&second, "drill/"), nothing);
    assert_eq!(names(&second, "dr/copy/pins/"), nothing);
    let left: Vec<_> = std::fs::read_dir(elsewhere.path()).expect("it is there").collect();
    assert!(left.is_empty(), "{left:?}");
    source.stop();
}

#[test]
fn the_front_of_googles_emulator_keeps_conditions_ranges_and_listings() {
    needs_providers!();
    let gcs = Gcs::start();
    let token = format!("Bearer {TOKEN}");
    let call = |method: &str, target: &str, more: &[(&str, &str)], body: &str| {
        let headers = [&[("Authorization", token.as_str())], more].concat();
        let answer =
            ask(gcs.address(), method, target, &headers, body.as_bytes()).expect("it answers");
        (answer.status, String::from_utf8_lossy(&answer.body).into_owned(), answer.headers)
    };
    let create = [("x-goog-if-generation-match", "0")];
    let (status, _, made) = call("PUT", "/disks/a%2Fb%20c", &create, "0123456789");
    assert_eq!(status, 200);
    assert_eq!(call("PUT", "/disks/a%2Fb%20c", &create, "other").0, 412);
    let (status, body, found) = call("GET", "/disks/a%2Fb%20c", &[("Range", "bytes=2-4")], "");
    assert_eq!((status, body.as_str()), (206, "234"));
    let generation = "x-goog-generation";
    assert!(made[generation] != "0" && found[generation] == made[generation], "{found:?}");
    assert_eq!(found["etag"], made["etag"]);
    // The second update is refused, because the first has changed the generation.
    let update = [("x-goog-if-generation-match", made[generation].as_str())];
    assert_eq!(call("PUT", "/disks/a%2Fb%20c", &update, "second").0, 200);
    assert_eq!(call("PUT", "/disks/a%2Fb%20c", &update, "third").0, 412);
    assert_eq!(call("GET", "/disks/a%2Fb%20c", &[], "").1, "second");

    let (_, begun, _) = call("POST", "/disks/big?uploads=", &[], "");
    let upload = begun.split(['<', '>']).nth(4).expect("a name").to_owned();
    for (number, part) in [(2, "two"), (1, "one")] {
        let target = format!("/disks/big?partNumber={number}&uploadId={upload}");
        assert_eq!(call("PUT", &target, &[], part).0, 200);
    }
    assert_eq!(call("GET", "/disks/big", &[], "").0, 404, "it is not complete");
    let named = "<PartNumber>1</PartNumber><PartNumber>2</PartNumber>";
    assert_eq!(call("POST", &format!("/disks/big?uploadId={upload}"), &[], named).0, 200);
    assert_eq!(call("GET", "/disks/big", &[], "").1, "onetwo");

    let names = |query: &str| {
        let (status, body, _) = call("GET", &format!("/disks?list-type=2&{query}"), &[], "");
        assert_eq!(status, 200);
        body
    };
    assert!(names("prefix=a%2F").contains("<Key>a/b c</Key><Size>6</Size>"));
    assert!(names("delimiter=%2F").contains("<Prefix>a/</Prefix>"));
    let after = names("start-after=a%2Fb%20c");
    assert!(after.contains("<Key>big") && !after.contains("<Key>a/"), "{after}");
    let first = names("max-keys=1");
    let token = first.split("ContinuationToken>").nth(1).expect("there is more");
    let second = names(&format!("continuation-token={}", escape(&token[..token.len() - 6])));
    assert!(first.contains("<Key>a/") && !first.contains("<Key>big"), "{first}");
    assert!(second.contains("<Key>big"), "{second}");

    assert_eq!(call("DELETE", "/disks/big", &[], "").0, 204);
    assert_eq!(call("GET", "/disks/big", &[], "").0, 404);
    assert_eq!(call("PUT", "/nowhere/a", &[], "x").0, 404);
    assert_eq!(call("GET", "/nowhere?list-type=2", &[], "").0, 404);
    let anybody = ask(gcs.address(), "GET", "/disks/a", &[], &[]).expect("it answers");
    assert_eq!(anybody.status, 401);
}
