//! Tests of the list of devices that need no kernel support.

use super::*;
use crate::admin::AdminHandler;
use crate::config::{Config, Override};
use crate::handlers::AdminPool;
use crate::serve;
use api::Request;
use api::volume::{RemoveMode, VolumeRequest};
use engine::open_pool::OpenPool;
use engine::opening::Opening;
use engine::record::Durability;
use nbd::ServerOptions;

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
    open.pool().create_volume("db", 1 << 20, Durability::Flush).await.unwrap();
    (config, open)
}

fn attachments(config: &Config, open: &OpenPool) -> Attachments {
    let epoch = open.ownership.epoch();
    let claims = Arc::new(Claims::open(config.dir(), epoch, Epoch(0), |_, _, _| true).unwrap());
    let exports = Arc::new(PoolExports::new(open.pool.clone(), claims.clone()));
    let server = Server::new(exports, ServerOptions::default()).unwrap();
    let (dir, pool) = (config.dir(), open.pool.clone());
    Attachments::open(dir, "main", pool, claims, server, epoch, 8 << 20).unwrap()
}

const OPTIONS: AttachOptions = AttachOptions {
    driver: Driver::Ublk,
    queue_count: 1,
    queue_depth: 64,
    logical_block_bytes: 512,
    is_shared: false,
    dead_timeout_seconds: 0,
};

/// Leaves the state of a daemon that was killed while the volume is attached.
fn note_attached(config: &Config, volume: &Volume) -> PathBuf {
    let record = Record {
        volume: volume.id().0,
        number: Some(7),
        cookie: 9,
        epoch: 1,
        is_stepped_back: false,
        is_write_through: false,
        options: OPTIONS,
    };
    let path = config.dir().join(FILE);
    write(&path, vec![record]).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stops_changes_the_list_no_more() {
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    open.pool().create_volume("other", 1 << 20, Durability::Flush).await.unwrap();
    let volume = open.pool().volume("db").unwrap();
    let path = note_attached(&config, &volume);
    let before = std::fs::read(&path).unwrap();
    let attachments = attachments(&config, &open);
    assert_eq!(attachments.list().await.unwrap().len(), 1);
    attachments.leave().await;
    for error in [
        attachments.attach("other", OPTIONS).await.unwrap_err(),
        attachments.detach("db", true).await.unwrap_err(),
        attachments.list().await.unwrap_err(),
        // An attached volume must not be removed as if it were not attached.
        attachments.user_of(volume.id()).await.unwrap_err(),
        attachments.recover(|_| true).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("is stopping"), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    drop((volume, attachments));
    open.close().await.unwrap();
}

/// Removes `db` without a daemon, and expects a refusal.
async fn refused_offline(config: &Config, words: &[&str]) {
    let (name, mode) = ("db".to_owned(), RemoveMode::Restorable);
    let remove = Request::Volume(VolumeRequest::Remove { name, mode });
    let open = serve::open_offline(config, Opening::Existing).await.unwrap();
    let offline = AdminPool::offline(open).await;
    let of_volume = offline.handle(remove).await.unwrap_err();
    offline.close().await.unwrap();
    let of_pool = crate::removal::remove(config).await.unwrap_err();
    for error in [of_volume, of_pool] {
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        for word in words.iter().chain(&["detach it first", "attach --cleanup"]) {
            assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_attached_is_not_removed_without_a_daemon_either() {
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    let volume = open.pool().volume("db").unwrap();
    let path = note_attached(&config, &volume);
    let id = volume.id().0;
    drop(volume);
    open.close().await.unwrap();
    refused_offline(&config, &["/dev/ublkb7"]).await;
    std::fs::remove_file(&path).unwrap();
    let clients = config.dir().join("clients.json");
    let uuid = "00000000-0000-0000-0000-000000000001";
    let text = format!(
        r#"{{"version": 1, "clients": [{{"volume": {id}, "client": "{uuid}", "boot": "{uuid}",
        "attachment": "{uuid}", "label": "far-away", "is_shared": false, "attached_at": 1, "epoch": 1,
        "is_stepped_back": false}}]}}"#
    );
    std::fs::write(&clients, text).unwrap();
    refused_offline(&config, &["client far-away"]).await;
    // A damaged list says nothing about the users of volumes.
    std::fs::write(&clients, "{").unwrap();
    assert_eq!(crate::removal::remove(&config).await.unwrap_err().kind(), ErrorKind::Corrupt);
    std::fs::remove_file(&clients).unwrap();
    crate::removal::remove(&config).await.unwrap();
}

#[test]
fn the_budget_has_room_for_many_devices_whose_queues_nobody_counted() {
    let devices_of = |mut room: u64, processors| {
        let mut queues = Vec::new();
        while room > 0 {
            queues.push(queues_of_choice(room, processors));
            room -= u64::from(queues[queues.len() - 1]);
        }
        queues
    };
    assert_eq!(devices_of(20, 8), [4, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]);
    assert_eq!(devices_of(20, 1), [1; 20]);
    assert_eq!(devices_of(1, 8), [1]);
    assert_eq!(queues_of_choice(0, 8), 1, "which has no room, and says so");
}

#[test]
fn what_a_living_process_serves_is_not_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    let record = |volume| Record {
        volume,
        number: Some(volume),
        cookie: 9,
        epoch: 1,
        is_stepped_back: false,
        is_write_through: false,
        options: OPTIONS,
    };
    write(&path, vec![record(1), record(2), record(3)]).unwrap();
    let delete = |record: &Record| match record.volume {
        2 => Err(Error::new(ErrorKind::Busy, "remove /dev/ublkb2: process 12 serves it")),
        number => Ok(Some(kernel::path_of(Driver::Ublk, number))),
    };
    let error = clean_up_list(&path, delete).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    for word in ["process 12 serves it", "/dev/ublkb3, /dev/ublkb1 removed"] {
        assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
    }
    assert_eq!(read(&path).unwrap(), [record(2)]);
    let none = clean_up_list(&path, |_| Ok(None)).unwrap();
    assert_eq!((none.as_str(), read(&path).unwrap()), ("no device was left", vec![]));
}

#[test]
fn a_served_device_of_nbd_is_not_deleted_by_its_record() {
    if !rustix::process::geteuid().is_root() {
        return; // the locks are in /run
    }
    let name = format!("spindle-{:016x}", u64::from_le_bytes(random_bytes()));
    let held = kernel::lock(&name).unwrap();
    let error = kernel::lock_unserved(Path::new("/dev/nbd3"), &name).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("clean up /dev/nbd3: a process serves it"), "{error}");
    drop(held);
    kernel::lock_unserved(Path::new("/dev/nbd3"), &name).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_link_of_another_pool_of_the_same_name_is_left() {
    let mut devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_no_nbd = |name: &std::ffi::OsString| !name.to_string_lossy().starts_with("nbd");
    let Some(name) = devices.find_map(|entry| Some(entry.file_name()).filter(is_no_nbd)) else {
        return; // a machine without disks
    };
    let device = Path::new("/dev").join(name);
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    let mut attachments = attachments(&config, &open);
    attachments.links = place.path().join("links");
    std::fs::create_dir(&attachments.links).unwrap();
    let link = attachments.links.join("db");
    let there = || std::fs::read_link(&link).ok();
    std::os::unix::fs::symlink(&device, &link).unwrap();
    let error = attachments.attach("db", OPTIONS).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    for word in [&*device.to_string_lossy(), "`name` in spindle.toml"] {
        assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
    }
    let own = Path::new("/dev/ublkb-of-a-test");
    attachments.link("db", own);
    attachments.unlink("db", Some(own));
    assert_eq!(there(), Some(device.clone()));
    attachments.unlink("db", Some(&device));
    assert_eq!(there(), None);
    // A link that leads nowhere has no owner.
    std::fs::create_dir_all(&attachments.links).unwrap(); // gone with its last link
    std::os::unix::fs::symlink("/dev/ublkb-that-is-gone", &link).unwrap();
    attachments.link("db", own);
    assert_eq!(there().as_deref(), Some(own));
    attachments.unlink("db", None);
    assert_eq!(there(), None);
    drop(attachments);
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_volume_that_is_not_served_is_a_condition() {
    let place = tempfile::tempdir().unwrap();
    let (config, open) = made(place.path()).await;
    let volume = open.pool().volume("db").unwrap();
    note_attached(&config, &volume);
    let attachments = attachments(&config, &open);
    let failed = |error: &str| {
        let error = Error::new(ErrorKind::Unsupported, error.to_owned());
        State::Failed { error, claim: None, is_ours: true }
    };
    {
        // The state if the kernel does not give the device back.
        let mut live = attachments.live.lock().await;
        live.as_mut().unwrap().get_mut(&volume.id().0).unwrap().state = failed("no driver");
    }
    attachments.show().await;
    let list = open.conditions.list().into_iter();
    let told: Vec<_> =
        list.filter(|condition| condition.kind == ConditionKind::DeviceNotServed).collect();
    assert_eq!((told.len(), &*told[0].subject), (1, "db"));
    assert!(told[0].report.what.contains("no driver"), "{told:?}");
    attachments.live.lock().await.as_mut().unwrap().clear();
    attachments.show().await;
    assert!(!open.conditions.is_raised(ConditionKind::DeviceNotServed, "db"));
    drop((volume, attachments));
    open.close().await.unwrap();
}
