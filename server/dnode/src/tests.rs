//! An owner and a data node in one process, over TLS on loopback.

use super::*;
use crate::wear::Wear;
use block::Epoch;
use block::env::{SystemClock, SystemRandom};
use block::seal::PoolKey;
use bytes::Bytes;
use cluster::{Cluster, Environment, NewNode, Service};
use erasure::fragment::{FragmentHeader, FragmentOwner};
use erasure::{Cuts, Scheme};
use futures::TryStreamExt;
use messages::{Answer, Open, Proof, Refusal, Request, SIGNATURE_BYTES, VERSION};
use object_store::path::Path as ObjectPath;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;

const POOL: Uuid = Uuid::from_u128(7);
/// Longest wait for something that should happen.
const WAIT: Duration = Duration::from_secs(30);

/// A cluster of an owner and a data node.
struct World {
    owner: Cluster,
    node: Option<Cluster>,
    address: String,
    serving: Vec<JoinHandle<()>>,
    drives: parking_lot::Mutex<Option<Arc<Drives>>>,
    dir: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        self.serving.iter().for_each(JoinHandle::abort);
    }
}

fn clock() -> Arc<dyn block::env::Clock> {
    Arc::new(SystemClock)
}

fn environment() -> Environment {
    Environment { clock: Arc::new(SystemClock), random: Arc::new(SystemRandom), key_file: None }
}

fn serve(cluster: &Cluster, listener: TcpListener) -> JoinHandle<()> {
    let cluster = cluster.clone();
    tokio::spawn(async move { cluster.serve(vec![listener]).await })
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

impl World {
    async fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let (listener, own) = listen().await;
        let home = dir.path().join("owner");
        let owner = Cluster::init(&home, NewNode::new("owner", &[own]), environment()).unwrap();
        let mut serving = vec![serve(&owner, listener)];
        let (listener, address) = listen().await;
        let token = owner.issue_token().unwrap().to_word();
        let home = dir.path().join("d1");
        let new = NewNode::new("d1", std::slice::from_ref(&address));
        let node = Cluster::join(&home, new, &token, environment()).await.unwrap();
        serving.push(serve(&node, listener));
        World { owner, node: Some(node), address, serving, drives: Default::default(), dir }
    }

    fn node(&self) -> &Cluster {
        self.node.as_ref().expect("it runs")
    }

    /// Directories of this many drives, and a served node.
    async fn with_drives(count: usize) -> World {
        let world = World::new().await;
        (0..count).for_each(|number| std::fs::create_dir(world.drive(number)).unwrap());
        world.serve_drives(count, None).await.unwrap();
        world
    }

    fn drive(&self, number: usize) -> PathBuf {
        self.dir.path().join(format!("nvme{number}"))
    }

    async fn serve_drives(
        &self,
        count: usize,
        capacity: Option<u64>,
    ) -> block::Result<Arc<Drives>> {
        let options = (0..count).map(|number| DriveOptions {
            name: format!("nvme{number}"),
            dir: self.drive(number),
            capacity_bytes: capacity,
            group: Some("nvme".to_owned()),
            domain: (number > 0).then(|| "rack-a".to_owned()),
        });
        let home = self.dir.path().join("d1");
        let drives =
            Drives::open(&home, self.node().cluster_id(), options.collect(), &clock()).await?;
        DataService::register(self.node(), Arc::clone(&drives), Handle::current());
        *self.drives.lock() = Some(Arc::clone(&drives));
        Ok(drives)
    }

    fn objects(&self, drive: &str, owner: Option<u64>) -> NodeObjects {
        self.objects_at(place(drive, owner))
    }

    fn objects_at(&self, place: NodePlace) -> NodeObjects {
        NodeObjects::new(self.owner.clone(), place)
    }

    fn files(&self, number: usize) -> Vec<PathBuf> {
        let (mut found, mut dirs) = (Vec::new(), vec![self.drive(number)]);
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { dirs.push(path) } else { found.push(path) }
            }
        }
        found
    }
}

fn signer(key: u8) -> PoolSigner {
    PoolSigner::new(&PoolKey::new([key; 32]), POOL)
}

/// The folder of the pool on a drive of the node, for the owner of this epoch.
fn place(drive: &str, owner: Option<u64>) -> NodePlace {
    NodePlace {
        node: "d1".to_owned(),
        drive: drive.to_owned(),
        pool: POOL,
        lineage: POOL,
        owner: owner.map(Epoch),
        signer: signer(7),
    }
}

async fn create(
    objects: &NodeObjects,
    path: &ObjectPath,
    bytes: &Bytes,
) -> object_store::Result<()> {
    let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
    // Several parts, which are one object.
    let parts = [bytes.slice(..bytes.len() / 3), bytes.slice(bytes.len() / 3..)];
    objects.put_opts(path, PutPayload::from_iter(parts), options).await.map(drop)
}

fn bytes(count: usize) -> Bytes {
    (0..count).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect::<Vec<u8>>().into()
}

fn path(name: &str) -> ObjectPath {
    ObjectPath::from(format!("fragments/0000000000000001/{name}"))
}

async fn names(objects: &NodeObjects, folder: Option<&str>) -> Vec<String> {
    let folder = folder.map(ObjectPath::from);
    let listed: Vec<_> = objects.list(folder.as_ref()).try_collect().await.unwrap();
    let mut names: Vec<String> = listed.into_iter().map(|found| found.location.into()).collect();
    names.sort();
    names
}

#[track_caller]
fn refused<T: std::fmt::Debug>(result: object_store::Result<T>, words: &str) {
    let error = result.unwrap_err();
    assert!(!matches!(error, Error::NotFound { .. }), "{error:?}");
    assert!(error.to_string().contains(words), "it does not say {words:?}: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_are_created_read_listed_and_deleted() {
    let world = World::with_drives(2).await;
    let objects = world.objects("nvme1", Some(1));
    for size in [0, 1, 4096, 300_000, 9 << 20] {
        let (path, bytes) = (path(&size.to_string()), bytes(size));
        create(&objects, &path, &bytes).await.unwrap();
        assert_eq!(objects.head(&path).await.unwrap().size, size as u64);
        assert_eq!(objects.get(&path).await.unwrap().bytes().await.unwrap(), bytes);
        if size > 1 {
            let range = 1..size as u64 / 2;
            let read = objects.get_range(&path, range.clone()).await.unwrap();
            assert_eq!(read, bytes.slice(1..size / 2));
            let end = size as u64 - 1;
            let read = objects.get_range(&path, end..end + 100).await.unwrap();
            assert_eq!(read, bytes.slice(size - 1..), "a range may end behind the object");
        }
        let again = create(&objects, &path, &Bytes::from_static(b"other")).await.unwrap_err();
        assert!(matches!(again, Error::AlreadyExists { .. }), "{again:?}");
    }
    assert_eq!(names(&objects, Some("fragments")).await.len(), 5);
    let found = objects.list_with_delimiter(None).await.unwrap();
    assert_eq!(found.common_prefixes, [ObjectPath::from("fragments")]);
    assert_eq!(found.objects.len(), 1, "the fence: {:?}", found.objects);
    objects.delete(&path("4096")).await.unwrap();
    for result in [
        objects.get(&path("4096")).await.map(drop),
        objects.head(&path("4096")).await.map(drop),
        objects.delete(&path("4096")).await,
    ] {
        assert!(matches!(result, Err(Error::NotFound { .. })), "{result:?}");
    }
    assert_eq!(names(&objects, Some("fragments")).await.len(), 4);
    assert_eq!(names(&objects, Some("other")).await, Vec::<String>::new());
    // The other drive has nothing of it.
    assert!(world.files(0).iter().all(|file| file.ends_with("spindle-drive.json")));
    // Many objects are listed in parts.
    let one = bytes(10);
    for number in 0..messages::LISTED_MAX + 7 {
        let place = world.drive(1).join(POOL.to_string()).join("fragments/0000000000000001");
        std::fs::write(place.join(format!("x{number}")), &one).unwrap();
    }
    assert_eq!(names(&objects, Some("fragments")).await.len(), messages::LISTED_MAX + 11);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_run_side_by_side_and_a_dropped_one_disturbs_no_other() {
    let world = World::with_drives(1).await;
    let objects = world.objects("", Some(1));
    let (large, small) = (bytes(8 << 20), bytes(4096));
    create(&objects, &path("large"), &large).await.unwrap();
    create(&objects, &path("small"), &small).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..64usize {
        let (objects, large, small) = (objects.clone(), large.clone(), small.clone());
        tasks.spawn(async move {
            for round in 0..8 {
                let (name, wanted) =
                    if number % 8 == 0 { ("large", &large) } else { ("small", &small) };
                let path = path(name);
                if number % 4 == 1 {
                    // Given up before the answer.
                    let reading = objects.get_range(&path, 0..100);
                    let _ = timeout(Duration::from_micros(50 * round), reading).await;
                }
                let read = objects.get(&path).await.unwrap().bytes().await.unwrap();
                assert_eq!(read, *wanted);
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    assert_eq!(world.owner.connection_count(world.node().node_id()), 3, "one for each kind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_owner_shuts_an_earlier_one_out_for_good() {
    let mut world = World::with_drives(1).await;
    let (first, second) = (world.objects("", Some(1)), world.objects("", Some(2)));
    create(&first, &path("a"), &bytes(100)).await.unwrap();
    // A reader neither shuts out nor is shut out, and changes nothing.
    let reader = world.objects("", None);
    assert_eq!(reader.head(&path("a")).await.unwrap().size, 100);
    refused(create(&reader, &path("b"), &bytes(1)).await, "only the owner");
    refused(reader.delete(&path("a")).await, "only the owner");
    create(&first, &path("b"), &bytes(100)).await.unwrap();
    assert_eq!(second.head(&path("a")).await.unwrap().size, 100);
    refused(create(&first, &path("c"), &bytes(100)).await, "epoch 2");
    refused(first.delete(&path("a")).await, "epoch 2");
    refused(first.get(&path("a")).await, "epoch 2");
    create(&second, &path("c"), &bytes(100)).await.unwrap();
    // The node starts again.
    world.restart(1).await;
    let late = world.objects("", Some(1));
    refused(create(&late, &path("d"), &bytes(100)).await, "epoch 2");
    let reader = world.objects("", None);
    assert_eq!(names(&reader, Some("fragments")).await.len(), 3);
    let second = world.objects("", Some(2));
    second.delete(&path("a")).await.unwrap();
    refused(second.delete(&ObjectPath::from("spindle-fence.json")).await, "belongs to the node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unmounted_drive_is_away_and_is_not_written() {
    let mut world = World::with_drives(2).await;
    let (first, second) = (world.objects("nvme0", Some(1)), world.objects("nvme1", Some(1)));
    create(&first, &path("a"), &bytes(100)).await.unwrap();
    create(&second, &path("a"), &bytes(100)).await.unwrap();
    let aside = world.dir.path().join("aside");
    std::fs::rename(world.drive(0), &aside).unwrap();
    std::fs::create_dir(world.drive(0)).unwrap();
    // Over the connection that there is, and over a new one, also with a folder that is new to the drive.
    refused(create(&first, &path("b"), &bytes(100)).await, "is not there");
    refused(first.get(&path("a")).await, "is not there");
    refused(world.objects("nvme0", Some(1)).get(&path("a")).await, "may not be mounted");
    let other = NodePlace { lineage: Uuid::from_u128(8), ..place("nvme0", Some(1)) };
    let other = world.objects_at(other);
    refused(create(&other, &path("b"), &bytes(100)).await, "may not be mounted");
    assert_eq!(world.files(0), Vec::<PathBuf>::new(), "nothing is written at the mount point");
    create(&second, &path("b"), &bytes(100)).await.unwrap();
    world.restart(2).await;
    let second = world.objects("nvme1", Some(1));
    assert_eq!(second.get(&path("b")).await.unwrap().bytes().await.unwrap(), bytes(100));
    refused(world.objects("nvme0", Some(1)).get(&path("a")).await, "may not be mounted");
    std::fs::remove_dir(world.drive(0)).unwrap();
    std::fs::rename(&aside, world.drive(0)).unwrap();
    let first = world.objects("nvme0", Some(1));
    assert_eq!(first.get(&path("a")).await.unwrap().bytes().await.unwrap(), bytes(100));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drives_that_are_swapped_while_the_node_runs_take_nothing() {
    let world = World::with_drives(2).await;
    let stores = ["nvme0", "nvme1"].map(|drive| world.objects(drive, Some(1)));
    for store in &stores {
        create(store, &path("a"), &bytes(100)).await.unwrap();
    }
    let before = [world.files(0), world.files(1)].map(|files| files.len());
    let aside = world.dir.path().join("aside");
    for (from, to) in
        [(world.drive(0), aside.clone()), (world.drive(1), world.drive(0)), (aside, world.drive(1))]
    {
        std::fs::rename(from, to).unwrap();
    }
    // Over connections from before, at once: nothing has looked at the drives meanwhile.
    for store in &stores {
        refused(create(store, &path("b"), &bytes(100)).await, "is not there");
        refused(store.delete(&path("a")).await, "is not there");
    }
    let drives = world.drives.lock().clone().unwrap();
    let _ = drives.look().await;
    let failures = drives.states().into_iter().map(|drive| drive.failure.unwrap_or_default());
    assert!(failures.into_iter().all(|failure| failure.contains("that of another drive")));
    for store in &stores {
        refused(create(store, &path("c"), &bytes(100)).await, "");
    }
    assert_eq!([world.files(0), world.files(1)].map(|files| files.len()), before);
    let aside = world.dir.path().join("aside");
    for (from, to) in
        [(world.drive(0), aside.clone()), (world.drive(1), world.drive(0)), (aside, world.drive(1))]
    {
        std::fs::rename(from, to).unwrap();
    }
    for store in &stores {
        create(store, &path("d"), &bytes(100)).await.unwrap();
        store.delete(&path("a")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drive_that_comes_back_on_another_device_is_served_again() {
    let world = World::with_drives(1).await;
    let (first, second) = (world.objects("", Some(1)), world.objects("", Some(2)));
    create(&first, &path("a"), &bytes(100)).await.unwrap();
    create(&second, &path("b"), &bytes(100)).await.unwrap();
    // The same files with other inodes, and no look in between.
    let (drive, aside) = (world.drive(0), world.dir.path().join("aside"));
    std::fs::rename(&drive, &aside).unwrap();
    let copied =
        std::process::Command::new("cp").arg("-a").args([&aside, &drive]).status().unwrap();
    assert!(copied.success());
    refused(create(&second, &path("c"), &bytes(100)).await, "is not there");
    let drives = world.drives.lock().clone().unwrap();
    let _ = drives.look().await;
    let again = async {
        while create(&second, &path("c"), &bytes(100)).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    timeout(WAIT, again).await.expect("it is served again");
    refused(create(&first, &path("d"), &bytes(100)).await, "epoch 2");
    assert_eq!(drives.states()[0].failure, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn object_is_written_once_however_many_write_it() {
    let world = World::with_drives(1).await;
    let (objects, other) = (world.objects("", Some(1)), world.objects("", Some(1)));
    for round in 0..20 {
        let path = path(&round.to_string());
        // Large and small ones are written in different ways.
        let size = if round % 2 == 0 { 100 } else { 2 << 20 };
        let puts = (0..8u8).map(|number| {
            let objects = if number % 2 == 0 { objects.clone() } else { other.clone() };
            let (path, bytes) = (path.clone(), Bytes::from(vec![number; size]));
            async move { create(&objects, &path, &bytes).await }
        });
        let puts = futures::future::join_all(puts).await;
        let winners: Vec<usize> = (0..8).filter(|number| puts[*number].is_ok()).collect();
        assert_eq!(winners.len(), 1, "{puts:?}");
        let read = objects.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(read, vec![u8::try_from(winners[0]).unwrap(); size]);
    }
    let unfinished =
        world.files(0).iter().filter(|file| file.to_string_lossy().contains('#')).count();
    assert_eq!(unfinished, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_requests_say_nothing_of_the_drive() {
    let world = World::with_drives(1).await;
    let objects = world.objects("", Some(1));
    create(&objects, &path("a"), &bytes(100)).await.unwrap();
    refused(objects.get_range(&path("a"), 100..200).await.map(drop), "has 100 bytes");
    refused(create(&objects, &path(&"x".repeat(500)), &bytes(1)).await, "too long");
    let drives = world.drives.lock().clone().unwrap();
    assert_eq!(drives.states()[0].failure, None);
}

impl World {
    /// Ends the node and starts it again, with the same directories.
    async fn restart(&mut self, drive_count: usize) {
        let serving = self.serving.pop().expect("it runs");
        serving.abort();
        let _ = serving.await;
        self.node = None;
        *self.drives.lock() = None;
        let home = self.dir.path().join("d1");
        // Tasks that end have their locks for a moment.
        let opening = async {
            loop {
                match Cluster::open(&home, environment()) {
                    Ok(node) => break node,
                    Err(error) => {
                        assert_eq!(error.kind(), block::ErrorKind::Busy, "{}", error.chain())
                    }
                }
                tokio::task::yield_now().await;
            }
        };
        let node = timeout(WAIT, opening).await.expect("the lock is free");
        let listener = TcpListener::bind(&self.address).await.unwrap();
        self.serving.push(serve(&node, listener));
        self.node = Some(node);
        let serving = async {
            while let Err(error) = self.serve_drives(drive_count, None).await {
                assert_eq!(error.kind(), block::ErrorKind::Busy, "{}", error.chain());
                tokio::task::yield_now().await;
            }
        };
        timeout(WAIT, serving).await.expect("the drives are free");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_drive_takes_nothing_more_until_something_is_deleted() {
    let mut world = World::new().await;
    std::fs::create_dir(world.drive(0)).unwrap();
    let drives = world.serve_drives(1, Some(100_000)).await.unwrap();
    let objects = world.objects("", Some(1));
    let mut count = 0;
    let error = loop {
        match create(&objects, &path(&count.to_string()), &bytes(10_000)).await {
            Ok(()) => count += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("is full"), "{error}");
    assert_eq!(count, 10);
    let _ = drives.look().await;
    let state = drives.states().remove(0);
    assert!(state.used_bytes <= 100_000 && state.capacity_bytes == 100_000, "{state:?}");
    assert_eq!((state.pool_count, &state.failure), (1, &None));
    // A refused object takes no room.
    let again = create(&objects, &path("0"), &bytes(1)).await;
    assert!(matches!(again, Err(Error::AlreadyExists { .. })), "{again:?}");
    assert_eq!(drives.states().remove(0).used_bytes, state.used_bytes);
    objects.delete(&path("0")).await.unwrap();
    create(&objects, &path("0"), &bytes(10_000)).await.unwrap();
    refused(create(&objects, &path("x"), &bytes(10_000)).await, "is full");
    // Another process counts what it finds.
    let used = drives.states().remove(0).used_bytes;
    drop(drives);
    world.restart(1).await;
    let drives = world.serve_drives(1, None).await;
    assert_eq!(drives.unwrap_err().kind(), block::ErrorKind::Busy);
    let found: u64 = world.files(0).iter().map(|file| file.metadata().unwrap().len()).sum();
    assert!(found.abs_diff(used) < 300, "{found} {used}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_tells_the_room_that_a_drive_has_left() {
    let world = World::new().await;
    std::fs::create_dir(world.drive(0)).unwrap();
    let drives = world.serve_drives(1, Some(100_000)).await.unwrap();
    let objects = world.objects("", Some(1));
    let before = objects.room().await.unwrap();
    assert_eq!((before.total_bytes, &*before.wear), (100_000, ""));
    create(&objects, &path("x"), &bytes(10_000)).await.unwrap();
    let after = objects.room().await.unwrap();
    assert_eq!(before.free_bytes - after.free_bytes, 10_000);
    let state = drives.states().remove(0);
    assert_eq!((state.available_bytes, state.used_bytes), (after.free_bytes, 10_000));
    let wear = Wear { why: Some("it says that it fails".to_owned()) };
    drives.find("nvme0").unwrap().wear.note("sda", wear);
    let after = objects.room().await.unwrap();
    assert_eq!(after.wear, "sda: it says that it fails");
    assert_eq!(drives.states().remove(0).wear.as_ref(), Some(&after.wear));
    // An owner that another one has followed is told nothing.
    let later = world.objects("", Some(2));
    assert_eq!(later.room().await.unwrap(), after);
    refused(objects.room().await, "epoch 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_that_ends_is_away_and_heals() {
    let mut world = World::with_drives(1).await;
    let objects = world.objects("", Some(1));
    create(&objects, &path("a"), &bytes(100)).await.unwrap();
    // Its connections are cut, and nothing listens.
    let serving = world.serving.pop().unwrap();
    serving.abort();
    let _ = serving.await;
    let read = timeout(WAIT, objects.get(&path("a"))).await.expect("it ends");
    refused(read.map(drop), "");
    let listener = TcpListener::bind(&world.address).await.unwrap();
    world.serving.push(serve(world.node(), listener));
    let healed = timeout(WAIT, async {
        while objects.get(&path("a")).await.is_err() {
            tokio::task::yield_now().await;
        }
    });
    healed.await.expect("it is asked again");
    let unknown = world.objects_at(NodePlace { node: "d9".to_owned(), ..place("", None) });
    refused(unknown.get(&path("a")).await, "has no node d9");
    refused(world.objects("nvme7", None).get(&path("a")).await, "has no drive nvme7; it has nvme0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn folder_is_served_to_the_key_of_its_pool_only() {
    let world = World::with_drives(1).await;
    let owner = world.objects("", Some(1));
    create(&owner, &path("a"), &bytes(100)).await.unwrap();
    // Another node of the cluster has no key of the pool: it neither shuts the owner out, nor reads, nor deletes.
    for epoch in [None, Some(1), Some(1000)] {
        let thief = world.objects_at(NodePlace { signer: signer(8), ..place("", epoch) });
        refused(thief.get(&path("a")).await, "another key");
        refused(thief.delete(&path("a")).await, "another key");
        refused(create(&thief, &path("b"), &bytes(100)).await, "another key");
        refused(thief.list(None).try_collect::<Vec<_>>().await, "another key");
    }
    create(&owner, &path("b"), &bytes(100)).await.unwrap();
    let reader = world.objects("", None);
    assert_eq!(reader.get(&path("a")).await.unwrap().bytes().await.unwrap(), bytes(100));
    // Another pool has a folder of its own on the same drive.
    let other = NodePlace { lineage: Uuid::from_u128(8), signer: signer(8), ..place("", Some(1)) };
    create(&world.objects_at(other), &path("a"), &bytes(10)).await.unwrap();
}

/// Opens the folder of the pool as the owner of epoch 5, and returns the answer.
async fn open_with(world: &World, proof: Proof) -> Answer {
    let node = world.node().node_id();
    let connection = world.owner.connect(node, Service::Data, Some(POOL)).await.unwrap();
    let (mut reader, mut writer) = connection.into_frames();
    let (kind, parts) = Request::Open(opening(), proof).encode();
    writer.write(kind, 0, &parts).await.unwrap();
    let frame = reader.read().await.unwrap().unwrap();
    Answer::decode(frame.kind, &frame.payload).unwrap()
}

fn opening() -> Open {
    let drive = String::new();
    Open { version: VERSION, owner: Some(Epoch(5)), is_bulk: false, lineage: POOL, drive }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opening_needs_a_proof_for_these_two_nodes() {
    let world = World::with_drives(1).await;
    let owner = world.objects("", Some(4));
    create(&owner, &path("a"), &bytes(100)).await.unwrap();
    let (from, to) = (world.owner.node_id(), world.node().node_id());
    let proof = signer(7).prove(&opening(), from, to);
    // The key alone is no secret: every data node of the pool has it.
    let unsigned = Proof { signature: [0; SIGNATURE_BYTES], ..proof.clone() };
    for wrong in [
        unsigned,
        signer(7).prove(&opening(), to, to),
        signer(7).prove(&opening(), from, from),
        signer(7).prove(&Open { owner: Some(Epoch(6)), ..opening() }, from, to),
    ] {
        let answer = open_with(&world, wrong).await;
        assert!(matches!(answer, Answer::Refused(Refusal::Denied, _)), "{answer:?}");
    }
    create(&owner, &path("b"), &bytes(100)).await.unwrap();
    assert_eq!(open_with(&world, proof).await, Answer::Done);
    refused(create(&owner, &path("c"), &bytes(100)).await, "epoch 5");
}

/// A fragment with a payload of this many bytes.
fn fragment(payload_bytes: u32) -> Vec<u8> {
    let scheme: Scheme = "1+1".parse().unwrap();
    let owner = FragmentOwner { pool: [1; 16], segment: [2; 16], epoch: Epoch(1), number: 3 };
    let cuts = Cuts::new(scheme, payload_bytes, &[]);
    let header =
        FragmentHeader { owner, scheme, index: 0, generation: 1, cuts, directory_bytes: 5 };
    let payload = bytes(header.payload_bytes());
    let trailer = header.trailer(&payload, b"names");
    [&header.encode()[..], &payload, &trailer].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fragment_is_verified_where_it_is() {
    let world = World::with_drives(1).await;
    let objects = world.objects("", Some(1));
    let file = |name: &str| world.drive(0).join(POOL.to_string()).join(path(name).as_ref());
    for size in [1, 4096, 3_000_000] {
        let (name, whole) = (size.to_string(), fragment(size));
        create(&objects, &path(&name), &whole.clone().into()).await.unwrap();
        let (stored, len) = (path(&name), whole.len() as u64);
        let check = || objects.check(&stored, len);
        assert_eq!(check().await.unwrap().unwrap(), whole[..256]);
        // A flipped bit in the header, at both ends of the payload, in the directory and the checksums; a cut; more.
        let payload_end = 256 + size as usize;
        for at in [20, 256, payload_end - 1, payload_end + 2, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(file(&name), damaged).unwrap();
            assert_eq!(check().await.unwrap(), None, "byte {at} of {}", whole.len());
        }
        for other in [&whole[..whole.len() - 1], &whole[..100], &[], &[&whole[..], b"x"].concat()] {
            std::fs::write(file(&name), other).unwrap();
            assert_eq!(check().await.unwrap(), None, "{} of {}", other.len(), whole.len());
        }
    }
    let absent = objects.check(&path("absent"), 0).await;
    assert!(matches!(absent, Err(Error::NotFound { .. })), "{absent:?}");
    let drives = world.drives.lock().clone().unwrap();
    assert_eq!(drives.states()[0].failure, None, "a damaged fragment is no failure of the drive");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_node_of_the_cluster_learns_the_drives_without_a_key() {
    let world = World::with_drives(2).await;
    let ask = async || drives_of(&world.owner, world.node().node_id()).await;
    let found = ask().await.unwrap();
    let shown: Vec<_> = found
        .iter()
        .map(|drive| (&*drive.name, drive.group.as_deref(), drive.domain.as_deref()))
        .collect();
    assert_eq!(shown, [("nvme0", Some("nvme"), None), ("nvme1", Some("nvme"), Some("rack-a"))]);
    assert_ne!(found[0].id, found[1].id);
    // Drives that are away are told, too: they are still in their groups.
    std::fs::remove_dir_all(world.drive(0)).unwrap();
    assert_eq!(ask().await.unwrap(), found);
    let no_data_node = drives_of(world.node(), world.owner.node_id()).await.unwrap_err();
    assert_eq!(no_data_node.kind(), block::ErrorKind::Unsupported, "{}", no_data_node.chain());
}

async fn misused(world: &World, name: &str, dir: &Path) -> String {
    let options = DriveOptions {
        name: name.to_owned(),
        dir: dir.to_owned(),
        capacity_bytes: None,
        group: None,
        domain: None,
    };
    let home = world.dir.path().join("d1");
    let opened = Drives::open(&home, world.node().cluster_id(), vec![options], &clock()).await;
    opened.map(drop).map_err(|error| error.chain()).unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directory_that_cannot_be_a_drive_is_refused() {
    let world = World::with_drives(1).await;
    let place = world.dir.path().join("place");
    assert!(misused(&world, "a", &place).await.contains("must exist"));
    std::fs::create_dir(&place).unwrap();
    std::fs::write(place.join("photos"), "x").unwrap();
    assert!(misused(&world, "a", &place).await.contains("must be an empty directory"));
    std::fs::remove_file(place.join("photos")).unwrap();
    let other = World::with_drives(1).await;
    assert!(misused(&world, "a", &other.drive(0)).await.contains("another cluster"));
    assert!(misused(&world, "nvme0", &world.drive(0)).await.contains("another process serves"));
}
