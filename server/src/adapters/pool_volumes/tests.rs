//! Tests of the users of volumes, with the pool and without a daemon.

use super::*;
use crate::admin::AdminHandler;
use crate::data_stores::pool_config;
use crate::handlers::AdminPool;
use crate::serve;
use api::Request;
use api::volume::{RemoveMode, VolumeRequest};
use block::{ConditionKind, ErrorKind};
use config::{Config, Override};
use engine::open_pool::OpenPool;
use engine::opening::Opening;
use engine::reservations::{Connection, Intent, ReservationRequest};
use nbd::{Server, ServerOptions};
use std::path::PathBuf;

/// Opens a small pool below `place` with the volume `db`.
async fn made(place: &Path) -> (Config, OpenPool) {
    let set = |key, value: &str| Override {
        key,
        flag: "--test",
        value: toml::Value::String(value.to_owned()),
    };
    let path = |name: &str| place.join(name).display().to_string();
    let set = [
        set("dir", &path("pool")),
        set("store", &path("store")),
        set("keys.file", &path("key")),
        set("log.size", "16MiB"),
        set("log.file_size", "1MiB"),
        set("cache.size", "0"),
        set("destage.max_age", "1h"),
    ];
    let config = Config::load(None, &set).unwrap();
    let open = serve::open(&config, Opening::OrNew).await.unwrap();
    open.pool.create_volume("db", 1 << 20, Durability::Flush).await.unwrap();
    (config, open)
}

fn attachments(config: &Config, open: &OpenPool) -> Attachments {
    let epoch = open.ownership.epoch();
    let reservations = Arc::new(open.open_reservations());
    let exports = Arc::new(PoolExports::new(open.pool.clone(), reservations.clone()));
    let options = devices::AttachmentsOptions {
        dir: config.dir().to_owned(),
        pool_name: "main".to_owned(),
        server: Server::new(exports, ServerOptions::default()).unwrap(),
        epoch,
        payload_bytes_max: 8 << 20,
        conditions: open.conditions.clone(),
    };
    Attachments::open(PoolVolumes::new(open.pool.clone(), reservations), options).unwrap()
}

/// Leaves the state of a daemon that was killed while the volume is attached.
fn note_attached(config: &Config, id: VolumeId) -> PathBuf {
    let path = config.dir().join(devices::FILE);
    let text = format!(
        r#"{{"version": 1, "attachments": [{{"volume": {}, "number": 7, "cookie": 9, "epoch": 1, "options":
        {{"queue_count": 1, "queue_depth": 64, "logical_block_bytes": 512, "is_shared": false}}}}]}}"#,
        id.0
    );
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_volume_of_the_pool_is_known_by_its_name() {
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    let id = open.pool.volume("db").unwrap().id();
    note_attached(&config, id);
    let attachments = attachments(&config, &open);
    attachments.show().await;
    assert!(open.conditions.is_raised(ConditionKind::DeviceNotServed, "db"));
    let listed = attachments.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].volume.as_str()), (1, "db"));
    let user = attachments.user_of(id).await.unwrap();
    assert_eq!(user.as_deref(), Some("/dev/spindle/main/db"));
    assert!(attachments.has_users());
    let volumes = attachments.volumes();
    assert_eq!(volumes.name_of(VolumeId(99)), "number-99");
    let kept = volumes.reserve(id, "db", false).unwrap();
    assert_eq!(volumes.reserve(id, "db", false).unwrap_err().kind(), ErrorKind::Busy);
    drop(kept);
    drop(volumes.reserve(id, "db", false).unwrap());
    drop(attachments);
    open.close().await.unwrap();
}

/// Removes the pool without a daemon.
async fn removed(config: &Config) -> Result<engine::removal::PoolRemoved> {
    engine::removal::remove(&pool_config(config), check_detached).await
}

/// Removes `db` without a daemon, and expects a refusal.
async fn refused_offline(config: &Config, words: &[&str]) {
    let (name, mode) = ("db".to_owned(), RemoveMode::Restorable);
    let remove = Request::Volume(VolumeRequest::Remove { name, mode });
    let open = serve::open_offline(config, Opening::Existing).await.unwrap();
    let offline = AdminPool::offline(open).await;
    let of_volume = offline.handle(remove).await.unwrap_err();
    offline.close().await.unwrap();
    let of_pool = removed(config).await.unwrap_err();
    for error in [of_volume, of_pool] {
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        for word in words.iter().chain(&["detach it first", "attach --cleanup"]) {
            assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attached_volume_is_not_removed_without_a_daemon() {
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    let volume = open.pool.volume("db").unwrap();
    let path = note_attached(&config, volume.id());
    let id = volume.id();
    drop(volume);
    open.close().await.unwrap();
    refused_offline(&config, &["/dev/ublkb7"]).await;
    std::fs::remove_file(&path).unwrap();
    let open = serve::open(&config, Opening::Existing).await.unwrap();
    let reservations = Arc::new(open.open_reservations());
    let client = |intent| ReservationRequest {
        intent,
        is_shared: false,
        connection: 0,
        client: [1; 16],
        boot: [2; 16],
        attachment: [3; 16],
        label: "far-away".to_owned(),
    };
    let from = Connection { line: None, label: "a test" };
    let attached = client(Intent::Attach);
    let connected = reservations.connect_from(id.0, "db", false, Some(&attached), from).await;
    drop(connected.unwrap());
    drop(reservations);
    open.close().await.unwrap();
    refused_offline(&config, &["client far-away"]).await;
    // The client ends its attachment.
    let open = serve::open(&config, Opening::Existing).await.unwrap();
    Arc::new(open.open_reservations()).release(id.0, &client(Intent::Go)).await.unwrap();
    open.close().await.unwrap();
    removed(&config).await.unwrap();
}
