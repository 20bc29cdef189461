//! Tests of the list of devices that need no kernel support.

use super::attach::queues_of_choice;
use super::*;
use crate::record::Driver;
use crate::volumes::twin::TwinVolumes;
use block::ConditionKind;
use nbd::ServerOptions;
use std::path::Path;

fn attachments(dir: &Path, volumes: &TwinVolumes) -> Attachments<TwinVolumes> {
    let options = AttachmentsOptions {
        dir: dir.to_owned(),
        pool_name: "main".to_owned(),
        server: Server::new(Arc::new(volumes.clone()), ServerOptions::default()).unwrap(),
        epoch: Epoch(2),
        payload_bytes_max: 8 << 20,
        conditions: Conditions::default(),
    };
    Attachments::open(volumes.clone(), options).unwrap()
}

const OPTIONS: AttachOptions = AttachOptions {
    driver: Driver::Ublk,
    queue_count: 1,
    queue_depth: 64,
    logical_block_bytes: 512,
    is_shared: false,
    dead_timeout_seconds: 0,
};

/// Leaves the state of a daemon that was killed while volume 1 is attached.
fn note_attached(dir: &Path) -> PathBuf {
    let record = DeviceRecord {
        volume: 1,
        number: Some(7),
        cookie: 9,
        epoch: 1,
        had_lost_writes: false,
        is_write_through: false,
        options: OPTIONS,
    };
    let path = dir.join(FILE);
    write(&path, vec![record]).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_stops_changes_the_list_no_more() {
    let place = tempfile::tempdir().unwrap();
    let path = note_attached(place.path());
    let before = std::fs::read(&path).unwrap();
    let attachments = attachments(place.path(), &TwinVolumes::named(&["db", "other"]));
    assert_eq!(attachments.list().await.unwrap().len(), 1);
    attachments.leave().await;
    for error in [
        attachments.attach("other", OPTIONS).await.unwrap_err(),
        attachments.detach("db", true).await.unwrap_err(),
        attachments.list().await.unwrap_err(),
        // An attached volume must not be removed as if it were not attached.
        attachments.user_of(VolumeId(1)).await.unwrap_err(),
        attachments.recover(|_| true).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("is stopping"), "{error}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
}

#[test]
fn default_queue_counts_leave_memory_for_many_devices() {
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_link_of_another_pool_of_the_same_name_is_left() {
    let mut devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let is_no_nbd = |name: &std::ffi::OsString| !name.to_string_lossy().starts_with("nbd");
    let Some(name) = devices.find_map(|entry| Some(entry.file_name()).filter(is_no_nbd)) else {
        return; // a machine without disks
    };
    let device = Path::new("/dev").join(name);
    let place = tempfile::tempdir().unwrap();
    let mut attachments = attachments(place.path(), &TwinVolumes::named(&["db"]));
    let dir = place.path().join("links");
    attachments.links = Links::below(dir.clone());
    std::fs::create_dir(&dir).unwrap();
    let link = dir.join("db");
    let there = || std::fs::read_link(&link).ok();
    std::os::unix::fs::symlink(&device, &link).unwrap();
    let error = attachments.attach("db", OPTIONS).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    for word in [&*device.to_string_lossy(), "`name` in spindle.toml"] {
        assert!(error.to_string().contains(word), "it does not say {word:?}: {error}");
    }
    let own = Path::new("/dev/ublkb-of-a-test");
    attachments.links.make("db", own);
    attachments.links.remove("db", Some(own));
    assert_eq!(there(), Some(device.clone()));
    attachments.links.remove("db", Some(&device));
    assert_eq!(there(), None);
    // A link that leads nowhere has no owner.
    std::fs::create_dir_all(&dir).unwrap(); // gone with its last link
    std::os::unix::fs::symlink("/dev/ublkb-that-is-gone", &link).unwrap();
    attachments.links.make("db", own);
    assert_eq!(there().as_deref(), Some(own));
    attachments.links.remove("db", None);
    assert_eq!(there(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attached_volume_that_is_not_served_is_a_condition() {
    let place = tempfile::tempdir().unwrap();
    note_attached(place.path());
    let attachments = attachments(place.path(), &TwinVolumes::named(&["db"]));
    let failed = |error: &str| {
        let error = Error::new(ErrorKind::Unsupported, error.to_owned());
        AttachedState::Failed { error, reservation: None, is_ours: true }
    };
    {
        // The state if the kernel does not give the device back.
        let mut live = attachments.live.lock().await;
        live.as_mut().unwrap().get_mut(&VolumeId(1)).unwrap().state = failed("no driver");
    }
    attachments.show().await;
    let list = attachments.conditions.list().into_iter();
    let raised: Vec<_> =
        list.filter(|condition| condition.kind == ConditionKind::DeviceNotServed).collect();
    assert_eq!((raised.len(), &*raised[0].subject), (1, "db"));
    assert!(raised[0].report.what.contains("no driver"), "{raised:?}");
    attachments.live.lock().await.as_mut().unwrap().clear();
    attachments.show().await;
    assert!(!attachments.conditions.is_raised(ConditionKind::DeviceNotServed, "db"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_of_a_volume_are_detached_only_by_force() {
    let place = tempfile::tempdir().unwrap();
    let volumes = TwinVolumes::named(&["db", "other"]);
    let attachments = attachments(place.path(), &volumes);
    assert!(!attachments.has_users());
    volumes.add_client(VolumeId(1), "far-away");
    assert!(attachments.has_users());
    let user = attachments.user_of(VolumeId(1)).await.unwrap();
    assert_eq!(user.as_deref(), Some("a device of client far-away"));
    let error = attachments.detach("db", false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("attached to client far-away"), "{error}");
    assert_eq!(attachments.detach("db", true).await.unwrap(), "db");
    assert_eq!(attachments.user_of(VolumeId(1)).await.unwrap(), None);
    for unattached in ["db", "other", "nothing"] {
        let error = attachments.detach(unattached, true).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
}

/// Another node has owned the pool meanwhile, so the device is removed and not served. The result
/// does not depend on the drivers that this machine has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn device_of_a_volume_owned_elsewhere_stays_unserved() {
    let place = tempfile::tempdir().unwrap();
    let path = note_attached(place.path());
    let volumes = TwinVolumes::named(&["db"]);
    let attachments = attachments(place.path(), &volumes);
    let mut epochs = Vec::new();
    let is_ours = SyncMutex::new(&mut epochs);
    attachments
        .recover(|epoch| {
            is_ours.lock().push(epoch);
            false
        })
        .await
        .unwrap();
    assert_eq!(epochs, [Epoch(1)], "that in which it was last served");
    // Where the driver is missing, the attachment stays in the list, with its reservation.
    let listed = attachments.list().await.unwrap();
    assert!(listed.iter().all(|one| one.device.is_none() && one.failure.is_some()), "{listed:?}");
    assert_eq!(volumes.is_reserved(VolumeId(1)), !listed.is_empty());
    assert_eq!(read(&path).unwrap().len(), listed.len());
}
