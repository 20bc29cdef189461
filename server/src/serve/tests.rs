//! Tests of commands that open a pool or only look at it.

use super::*;
use crate::data_stores::pool_config;
use crate::handlers::answers_closed;
use api::copy::CopyRequest;
use api::key::KeyRequest;
use api::pool::PoolRequest;
use api::scrub::ScrubRequest;
use api::snapshot::SnapshotRequest;
use api::volume::VolumeRequest;
use api::{Reply, Request};
use block::{BlockDevice, ConditionKind, Epoch, WriteFlags};
use config::Override;
use engine::record::Durability;
use std::path::PathBuf;

#[test]
fn huge_pages_are_off_in_a_process_that_opens_pools() {
    limits::keep_pages_small();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    // Kernels before 5.0 do not report it.
    let said = status.lines().find(|line| line.starts_with("THP_enabled:"));
    assert!(said.is_none_or(|line| line.ends_with('0')), "{said:?}");
}

/// Configures a small pool below `place`, served from its directory `dir`. Nothing is destaged
/// without a request.
pub(crate) fn config(place: &Path, dir: &str) -> Config {
    let set = |key, value: &str| Override {
        key,
        flag: "--test",
        value: toml::Value::String(value.to_owned()),
    };
    let path = |name: &str| place.join(name).display().to_string();
    let all = vec![
        set("dir", &path(dir)),
        set("store", &path("store")),
        set("keys.file", &path("key")),
        set("log.size", "16MiB"),
        set("log.file_size", "1MiB"),
        set("cache.size", "0"),
        set("destage.max_age", "1h"),
    ];
    Config::load(None, &all).unwrap()
}

async fn write_flushed(open: &OpenPool, text: &'static [u8]) {
    let volume = open.pool.volume("db").unwrap();
    volume.write(0, text.into(), WriteFlags { fua: false }).await.unwrap();
    volume.flush().await.unwrap();
}

/// Ends a pool like a killed process: nothing is flushed or released.
async fn crash(open: OpenPool) {
    open.pool.fence(Error::new(ErrorKind::Io, "killed by the test"));
    open.close().await.unwrap_err();
}

/// Opens a new pool with one volume.
async fn made(config: &Config) -> OpenPool {
    let pool = open(config, Opening::OrNew).await.unwrap();
    pool.pool.create_volume("db", 1 << 20, Durability::Flush).await.unwrap();
    pool
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_recovery_key_is_a_condition_until_created() {
    let place = tempfile::tempdir().unwrap();
    let pool = made(&config(place.path(), "a")).await;
    let conditions = pool.conditions.clone();
    let is_told = || conditions.is_raised(ConditionKind::NoRecoveryKey, "pool");
    assert!(is_told());
    let admin = AdminPool::offline(pool).await;
    admin.handle(Request::Key(KeyRequest::Backup { replace: false })).await.unwrap();
    assert!(!is_told());
    admin.close().await.unwrap();
}

/// Lists everything below a directory, with sizes.
fn contents(dir: &Path) -> std::collections::BTreeMap<PathBuf, u64> {
    let mut found = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(contents(&path));
        } else {
            found.insert(path.clone(), path.metadata().unwrap().len());
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_that_only_look_take_and_write_nothing() {
    let place = tempfile::tempdir().unwrap();
    let (a, b) = (config(place.path(), "a"), config(place.path(), "b"));
    let pool = made(&a).await;
    write_flushed(&pool, b"kept").await;
    pool.pool.create_snapshots(&"db@one".parse().unwrap()).await.unwrap();
    let looks = [
        Request::Volume(VolumeRequest::List {}),
        Request::Volume(VolumeRequest::Show { name: "db".to_owned() }),
        Request::Snapshot(SnapshotRequest::List { volume: None, space: true }),
        Request::Copy(CopyRequest::List {}),
        Request::Scrub(ScrubRequest::Status {}),
        Request::Pool(PoolRequest::Status {}),
    ];
    std::fs::create_dir(place.path().join("b")).unwrap();
    let refused = engine::closed_pool::look(&pool_config(&b))
        .await
        .err()
        .expect("it is open on the other one");
    assert_eq!(refused.kind(), ErrorKind::Busy, "{}", refused.chain());
    pool.close().await.unwrap();
    let before = contents(&place.path().join("store"));
    for config in [&b, &a] {
        for request in &looks {
            assert!(answers_closed(request));
            let look = engine::closed_pool::look(&pool_config(config))
                .await
                .unwrap()
                .expect("it was closed in order");
            match look.handle(request.clone()).await.unwrap() {
                Reply::Volumes { volumes } => assert_eq!(volumes[0].name, "db"),
                Reply::Volume(volume) => assert_eq!(volume.size_bytes, 1 << 20),
                Reply::Snapshots { snapshots } => {
                    assert_eq!((&*snapshots[0].name, snapshots[0].is_in_store), ("one", true));
                }
                Reply::Copies { copies } => assert!(copies.is_empty()),
                Reply::Scrub(scrub) => assert_eq!(scrub.started_at, None),
                Reply::Status(status) => {
                    assert_eq!((status.volume_count, status.is_offline), (1, true));
                    assert!(!status.has_recovery_key && status.warnings.len() == 1);
                }
                other => panic!("{other:?}"),
            }
            look.close().await.unwrap();
        }
    }
    assert_eq!(contents(&place.path().join("store")), before);
    // Only an opening finds the contents of the log.
    let pool = open(&a, Opening::Existing).await.unwrap();
    assert!(pool.ownership.may_replay(Epoch(1)), "it has always been of this directory");
    crash(pool).await;
    assert!(engine::closed_pool::look(&pool_config(&a)).await.unwrap().is_none());
}
