//! A pool on three nodes of one process, from a volume's writes to its reads on another node.

use super::*;
use crate::data_stores::pool_config;
use crate::serve::{open, tests::config};
use async_trait::async_trait;
use block::env::SystemClock;
use block::{BlockDevice, WriteFlags};
use block::{Error, ErrorKind};
use control::manifest::{Changed, Degraded, Member, NodeDir};
use engine::open_pool::OpenPool;
use engine::opening::{self, Opening};
use engine::record::Durability;
use ensemble::Link;
use parking_lot::Mutex;
use replication::MemberId;
use std::collections::BTreeMap;
use std::time::Duration;

/// The members, each of which reaches all others.
#[derive(Default)]
struct Direct(Mutex<BTreeMap<MemberId, LocalMember>>);

#[async_trait]
impl Peers for Direct {
    async fn connect(&self, member: MemberId) -> Result<Link> {
        let there = self.0.lock().get(&member).cloned();
        let unknown = || Error::new(ErrorKind::Unavailable, "the member does not run");
        there.map(|there| there.link()).ok_or_else(unknown)
    }
}

struct Nodes {
    place: tempfile::TempDir,
    names: [&'static str; 3],
    members: BTreeMap<&'static str, Arc<EnsembleMembers>>,
}

impl Nodes {
    /// Makes a pool with one volume, whose log then has three members.
    async fn new() -> Nodes {
        let place = tempfile::tempdir().unwrap();
        let names = ["a", "b", "c"];
        let pool = open(&config(place.path(), "a"), Opening::OrNew).await.unwrap();
        pool.pool.create_volume("db", 1 << 20, Durability::Flush).await.unwrap();
        let id = pool.ownership.manifest().pool;
        let mut ids = vec![pool.node.node_id()];
        for name in &names[1..] {
            let node = NodeDir::open(&place.path().join(name)).unwrap();
            node.join(id).unwrap();
            ids.push(node.node_id());
        }
        let members = ids.iter().zip(names).map(|(id, name)| Member {
            id: *id,
            node: *id,
            node_name: name.to_owned(),
        });
        let degraded = Degraded::Block;
        let next =
            Configuration { members: members.collect(), quorum: 2, degraded, away: Vec::new() };
        let changed = pool.ownership.change_configuration(&pool.node, &next).await.unwrap();
        assert!(matches!(changed, Changed::Ours(_)));
        pool.close().await.unwrap();
        let direct = Arc::new(Direct::default());
        let mut members = BTreeMap::new();
        for (member, name) in ids.iter().zip(names) {
            let dir = place.path().join(name).join("log");
            std::fs::create_dir_all(&dir).unwrap();
            let log = pool_config(&config(place.path(), name)).log;
            let options = EnsembleMembers::local_options(&dir, id, log, Arc::new(SystemClock));
            LocalMember::create(&options, *member).unwrap();
            let local = LocalMember::start(options).unwrap();
            direct.0.lock().insert(*member, local.clone());
            let times = OwnedOptions {
                lease: Duration::from_millis(200),
                heartbeat: Duration::from_millis(40),
                ..OwnedOptions::default()
            };
            let peers = Arc::clone(&direct) as Arc<dyn PoolPeers>;
            let member = EnsembleMembers::new(local, peers, times, Arc::new(SystemClock));
            members.insert(name, Arc::new(member));
        }
        Nodes { place, names, members }
    }

    /// Opens the pool on a node as a member of the log.
    async fn open(&self, name: &str) -> OpenPool {
        let mut config = pool_config(&config(self.place.path(), name));
        config.log_members = Some(Arc::clone(&self.members[name]) as _);
        let opened = opening::open(&config, Opening::Existing);
        let opened = tokio::time::timeout(Duration::from_secs(20), opened);
        opened.await.expect("the opening does not end").unwrap()
    }
}

impl PoolPeers for Direct {
    fn reach(&self, _configuration: &Configuration) {}
}

async fn write(open: &OpenPool, at: u64, text: &'static [u8; 512]) -> Result<()> {
    let volume = open.pool.volume("db").unwrap();
    volume.write(at * 512, text[..].into(), WriteFlags { fua: false }).await
}

async fn read(open: &OpenPool, at: u64) -> Result<[u8; 512]> {
    let mut found = [0; 512];
    open.pool.volume("db").unwrap().read(at * 512, &mut found).await?;
    Ok(found)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unflushed_writes_survive_a_take_over_and_the_deposed_node_serves_nothing() {
    let nodes = Nodes::new().await;
    let first = nodes.open("a").await;
    write(&first, 0, &[1; 512]).await.unwrap();
    write(&first, 1, &[2; 512]).await.unwrap();
    assert_eq!(read(&first, 0).await.unwrap(), [1; 512]);
    // The node still runs, and nothing was flushed or destaged.
    let second = nodes.open("b").await;
    assert!(second.lost_writes.is_none(), "no write is given up");
    assert_eq!(read(&second, 0).await.unwrap(), [1; 512]);
    assert_eq!(read(&second, 1).await.unwrap(), [2; 512]);
    write(&second, 0, &[3; 512]).await.unwrap();
    assert!(read(&first, 0).await.is_err(), "a stale read");
    assert!(write(&first, 1, &[9; 512]).await.is_err(), "a write of a deposed owner");
    first.pool.close().await.unwrap_err();
    drop(first);
    // The deposed node is a member again, and takes the pool back with everything.
    let third = nodes.open("a").await;
    assert_eq!(read(&third, 0).await.unwrap(), [3; 512]);
    assert_eq!(read(&third, 1).await.unwrap(), [2; 512]);
    second.pool.close().await.unwrap_err();
    drop(second);
    // An orderly close moves everything to the store, and any member may go on.
    third.close().await.unwrap();
    let last = nodes.open(nodes.names[2]).await;
    assert_eq!(read(&last, 0).await.unwrap(), [3; 512]);
    last.close().await.unwrap();
}
