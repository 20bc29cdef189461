//! The same three nodes with logs on disk, over the connections of a cluster on loopback.

use super::logs::{Open, log_options, taking};
use super::{POOL, page_cache, until};
use crate::cluster_peers::{ClusterPeers, MemberNodes};
use crate::disk_log::open_ring;
use crate::frames;
use crate::local::{LocalMember, LocalOptions};
use crate::member_service::MemberService;
use crate::peers::{Link, Peers};
use ::cluster::{Cluster, Connection, Environment, Handler, NewNode, NodeId, Service};
use async_trait::async_trait;
use block::env::{SystemClock, SystemRandom};
use block::{Epoch, ErrorKind, Lsn, Position, Result};
use bytes::Bytes;
use replication::{Answer, Batch, MemberId, Request};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use uuid::Uuid;
use wal::{EntryKind, NewEntry, Wait};

/// Longest wait for something that should happen.
const WAIT: Duration = Duration::from_secs(10);
/// The same where a test with a seeded bug waits for nothing.
const WAIT_SEEDED: Duration = Duration::from_secs(3);
/// Wait for something that must not happen: several leases.
const NEVER: Duration = Duration::from_millis(500);

/// One node that serves its member.
pub(super) struct Node {
    pub(super) cluster: Cluster,
    pub(super) service: Arc<MemberService>,
    running: Option<LocalMember>,
    address: String,
    log_dir: PathBuf,
    serving: JoinHandle<()>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Three nodes that know each other.
pub(super) struct Nodes {
    pub(super) nodes: Vec<Node>,
    pub(super) ids: Vec<MemberId>,
    _dir: tempfile::TempDir,
}

fn start_member(log_dir: &Path) -> LocalMember {
    LocalMember::start(local_options(log_dir)).unwrap()
}

fn local_options(log_dir: &Path) -> LocalOptions {
    LocalOptions {
        dir: log_dir.to_owned(),
        pool: POOL,
        clock: Arc::new(SystemClock),
        open_log: open_ring(log_dir.to_owned(), POOL, log_options(), page_cache),
    }
}

fn serve(cluster: &Cluster, listener: TcpListener) -> JoinHandle<()> {
    let cluster = cluster.clone();
    tokio::spawn(async move { cluster.serve(vec![listener]).await })
}

impl Nodes {
    pub(super) async fn new() -> Nodes {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<MemberId> = (1..=3).map(Uuid::from_u128).collect();
        let mut nodes: Vec<Node> = Vec::new();
        for (number, id) in ids.iter().enumerate() {
            let environment = Environment {
                clock: Arc::new(SystemClock),
                random: Arc::new(SystemRandom),
                key_file: None,
            };
            let (name, home) = (format!("n{number}"), dir.path().join(number.to_string()));
            let log_dir = home.join("log");
            std::fs::create_dir_all(&log_dir).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let new = NewNode::new(&name, std::slice::from_ref(&address));
            let cluster = match nodes.first() {
                None => Cluster::init(&home, new, environment).unwrap(),
                Some(founder) => {
                    let token = founder.cluster.issue_token().unwrap().to_word();
                    Cluster::join(&home, new, &token, environment).await.unwrap()
                }
            };
            LocalMember::create(&local_options(&log_dir), *id).unwrap();
            let member = start_member(&log_dir);
            let service = MemberService::register(&cluster);
            service.insert(POOL, member.clone());
            let serving = serve(&cluster, listener);
            nodes.push(Node { cluster, service, running: Some(member), address, log_dir, serving });
        }
        let nodes = Nodes { nodes, ids, _dir: dir };
        for node in &nodes.nodes {
            node.knows(3).await;
        }
        nodes
    }

    fn node_id(&self, node: usize) -> NodeId {
        self.nodes[node].cluster.node_id()
    }

    fn member_nodes(&self) -> MemberNodes {
        self.ids.iter().copied().zip((0..3).map(|node| self.node_id(node))).collect()
    }

    fn peers(&self, node: usize) -> Arc<ClusterPeers> {
        let cluster = self.nodes[node].cluster.clone();
        Arc::new(ClusterPeers::new(cluster, POOL, self.member_nodes()))
    }

    pub(super) async fn take_over(&self, node: usize, epoch: u64) -> Open {
        let (member, log_dir) = (self.nodes[node].member(), &self.nodes[node].log_dir);
        Open::new(member, &self.ids, self.peers(node), epoch, log_dir).await
    }

    /// Asserts that a take-over does not find a quorum.
    async fn cannot_take_over(&self, node: usize, epoch: u64) {
        let taking = taking(&self.ids, self.peers(node), epoch);
        let taken = timeout(NEVER, taking.run(self.nodes[node].member())).await;
        assert!(taken.is_err(), "node {node} has found a quorum");
    }

    /// Connects node 0 to the member of node 1.
    async fn link(&self) -> (Arc<ClusterPeers>, Link) {
        let peers = self.peers(0);
        let link = peers.connect(self.ids[1]).await.unwrap();
        (peers, link)
    }

    /// Opens a connection from node 0 to the member of node 1, without a link.
    async fn connection(&self) -> Connection {
        let connected = self.nodes[0].cluster.connect(self.node_id(1), Service::Member, Some(POOL));
        connected.await.unwrap()
    }
}

impl Node {
    /// Waits until its list has so many nodes.
    async fn knows(&self, count: usize) {
        let mut watch = self.cluster.watch();
        let waiting = async {
            while self.cluster.nodes().len() != count {
                watch.changed().await.unwrap();
            }
        };
        timeout(WAIT, waiting).await.expect("the list of nodes does not arrive");
    }

    pub(super) fn member(&self) -> &LocalMember {
        self.running.as_ref().expect("it was not killed")
    }

    /// Ends as a process that is killed.
    async fn kill(&mut self, owner: Option<Open>) {
        self.serving.abort();
        if let Some(owner) = owner {
            owner.kill();
        }
        let ended = (&mut self.serving).await;
        assert!(ended.is_err_and(|error| error.is_cancelled()));
        self.service.remove(POOL);
        self.running = None;
    }

    /// Starts as a process on the same files and address.
    async fn start(&mut self) {
        let member = self.running.insert(start_member(&self.log_dir));
        self.service.insert(POOL, member.clone());
        let listener = TcpListener::bind(&self.address).await.unwrap();
        self.serving = serve(&self.cluster, listener);
    }

    async fn catches_up(&self, sequence: u64) {
        let catching_up = async {
            while self.member().state().await.unwrap().1.tail().sequence < sequence {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(WAIT, catching_up).await.expect("it does not catch up");
    }
}

async fn ends(link: &mut Link) {
    let ended = timeout(WAIT_SEEDED, async { while link.answers.recv().await.is_some() {} }).await;
    ended.expect("the link does not end");
}

async fn promised(link: &mut Link, epoch: u64) {
    link.requests.send(Request::Promise { epoch: Epoch(epoch) }).await.unwrap();
    let answer = timeout(WAIT, link.answers.recv()).await.unwrap().unwrap();
    assert!(matches!(answer, Answer::Promised { .. }), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_writes_survive_the_owner_over_tls() {
    let mut nodes = Nodes::new().await;
    let first = nodes.take_over(0, 1).await;
    for sector in 0..100 {
        first.write(sector).await.unwrap();
    }
    first.check(100).await;
    nodes.nodes[0].kill(Some(first)).await;
    let second = nodes.take_over(1, 2).await;
    assert_eq!((second.recovery.tail_loss, second.recovery.last_lsn), (None, Lsn(100)));
    second.check(100).await;
    for sector in 100..200 {
        second.write(sector).await.unwrap();
    }
    assert!(second.log.flush().await.unwrap() >= Lsn(200));
    nodes.nodes[0].start().await;
    nodes.nodes[0].catches_up(second.owned.replicas().acknowledged()).await;
    nodes.nodes[1].kill(Some(second)).await;
    let third = nodes.take_over(0, 3).await;
    third.check(200).await;
    third.write(200).await.unwrap();
    third.check(201).await;
    third.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removed_node_neither_appends_nor_promises() {
    let mut nodes = Nodes::new().await;
    let owner = nodes.take_over(0, 1).await;
    owner.write(0).await.unwrap();
    nodes.nodes[2].catches_up(owner.owned.replicas().acknowledged()).await;
    let removed = nodes.node_id(2);
    until(|| nodes.nodes[0].cluster.connection_count(removed) > 0).await;
    nodes.nodes[0].cluster.remove(removed).unwrap();
    nodes.nodes[1].knows(2).await;
    until(|| nodes.nodes[..2].iter().all(|node| node.cluster.connection_count(removed) == 0)).await;
    until(|| {
        let status = owner.owned.statuses()[&nodes.ids[2]].clone();
        status.error.is_some_and(|error| error.contains("is not in the cluster"))
    })
    .await;
    let before = nodes.nodes[2].member().state().await.unwrap().1.tail();
    for sector in 1..20 {
        owner.write(sector).await.unwrap();
    }
    assert_eq!(nodes.nodes[2].member().state().await.unwrap().1.tail(), before);
    // Neither does it get promises, nor does its own promise count.
    nodes.cannot_take_over(2, 2).await;
    owner.write(20).await.unwrap();
    owner.log.await_lease().await.unwrap();
    nodes.nodes[0].kill(Some(owner)).await;
    nodes.cannot_take_over(1, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owner_that_was_removed_loses_its_lease() {
    let nodes = Nodes::new().await;
    let first = nodes.take_over(0, 1).await;
    first.write(0).await.unwrap();
    first.log.await_lease().await.unwrap();
    nodes.nodes[1].cluster.remove(nodes.node_id(0)).unwrap();
    nodes.nodes[2].knows(2).await;
    until(|| !first.owned.replicas().has_lease()).await;
    let acknowledged = first.owned.replicas().acknowledged();
    let unanswered = tokio::spawn({
        let (log, payload) = (first.log.clone(), Bytes::from(vec![9; 512]));
        let (volume, kind) = (super::logs::VOLUME, EntryKind::Write);
        let entry = NewEntry { volume, kind, start_sector: 0, sector_count: 1, payload };
        async move { log.append(entry, Wait::Written).await }
    });
    let second = nodes.take_over(2, 2).await;
    second.check(1).await;
    second.write(1).await.unwrap();
    assert_eq!(first.owned.replicas().acknowledged(), acknowledged);
    assert!(!first.owned.replicas().has_lease() && !unanswered.is_finished());
    let refusals: Vec<String> =
        first.owned.statuses().values().filter_map(|status| status.error.clone()).collect();
    assert_eq!(refusals.len(), 2, "{refusals:?}");
    first.kill();
    assert_eq!(unanswered.await.unwrap().unwrap_err().kind(), ErrorKind::Io);
    second.check(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_pool_and_other_member_are_refused() {
    let nodes = Nodes::new().await;
    let refused = |peers: ClusterPeers, member| async move {
        let refused = timeout(WAIT, peers.connect(member)).await.unwrap();
        let error = refused.err().expect("it is refused");
        (error.kind(), error.chain())
    };
    let cluster = &nodes.nodes[0].cluster;
    let (other, map) = (Uuid::from_u128(5), nodes.member_nodes());
    let peers = ClusterPeers::new(cluster.clone(), other, map.clone());
    let (kind, text) = refused(peers, nodes.ids[1]).await;
    assert_eq!(kind, ErrorKind::NotFound);
    assert!(text.contains(&format!("this node has no member of pool {other}")), "{text}");
    // A member that was made again has another identity.
    let made_again = [(other, nodes.node_id(1))].into();
    let peers = ClusterPeers::new(cluster.clone(), POOL, made_again);
    let (kind, text) = refused(peers, other).await;
    assert_eq!(kind, ErrorKind::Denied);
    assert!(text.contains(&format!("node n1 has member {}", nodes.ids[1])), "{text}");
    let peers = ClusterPeers::new(cluster.clone(), POOL, map);
    assert_eq!(refused(peers, other).await.0, ErrorKind::NotFound);
    let unnamed = cluster.connect(nodes.node_id(1), Service::Member, None).await.unwrap_err();
    assert_eq!(unnamed.kind(), ErrorKind::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn link_ends_with_its_member_and_with_its_place() {
    let nodes = Nodes::new().await;
    let (_peers, mut link) = nodes.link().await;
    promised(&mut link, 1).await;
    nodes.nodes[1].service.remove(POOL);
    ends(&mut link).await;
    nodes.nodes[1].service.insert(POOL, nodes.nodes[1].member().clone());
    let (peers, mut link) = nodes.link().await;
    promised(&mut link, 2).await;
    // Another member moves: this link stays.
    let mut moved = nodes.member_nodes();
    moved.insert(nodes.ids[2], nodes.node_id(1));
    peers.set_nodes(moved.clone());
    promised(&mut link, 3).await;
    moved.insert(nodes.ids[1], nodes.node_id(2));
    peers.set_nodes(moved);
    ends(&mut link).await;
    // A link that is dropped closes its connection.
    let (_peers, link) = nodes.link().await;
    drop(link);
    until(|| nodes.nodes[1].cluster.connection_count(nodes.node_id(0)) == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frame_that_is_no_request_ends_the_connection() {
    let nodes = Nodes::new().await;
    let promise = Request::Promise { epoch: Epoch(1) }.encode();
    let answer = Answer::Superseded { epoch: Epoch(1), promised: Epoch(2) }.encode();
    let wrong = [
        (frames::ANSWER, 0, &promise),
        (frames::REQUEST, 1, &promise),
        (frames::REQUEST, 0, &answer),
    ];
    for (kind, request, parts) in wrong {
        let (mut reader, mut writer) = nodes.connection().await.into_frames();
        assert_eq!(frames::read_identity(&mut reader).await.unwrap(), nodes.ids[1]);
        writer.write(kind, request, parts).await.unwrap();
        let ended = timeout(WAIT, reader.read()).await.expect("the connection does not end");
        assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
    }
    let (document, _) = nodes.nodes[1].member().state().await.unwrap();
    assert_eq!(document.promised, Epoch(0));
}

/// Names a member, and then answers each frame with one that is no answer.
struct Liar(MemberId);

#[async_trait]
impl Handler for Liar {
    fn check(&self, _peer: NodeId, _pool: Option<Uuid>) -> Result<()> {
        Ok(())
    }

    async fn serve(&self, connection: Connection) {
        let (mut reader, mut writer) = connection.into_frames();
        frames::write_identity(&mut writer, self.0).await.unwrap();
        while let Ok(Some(frame)) = reader.read().await {
            let _ = writer.write(frames::ANSWER, 0, &[frame.payload]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frame_that_is_no_answer_ends_the_link() {
    let nodes = Nodes::new().await;
    nodes.nodes[1].cluster.register(Service::Member, Arc::new(Liar(nodes.ids[1])));
    let (_peers, mut link) = nodes.link().await;
    link.requests.send(Request::Promise { epoch: Epoch(1) }).await.unwrap();
    let ended = timeout(WAIT, link.answers.recv()).await.expect("the link does not end");
    assert_eq!(ended, None);
    let late = Request::Promise { epoch: Epoch(1) };
    assert!(link.requests.send(late).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_on_one_machine_answers_soon() {
    let nodes = Nodes::new().await;
    let (_peers, mut link) = nodes.link().await;
    let promising = promised(&mut link, 1);
    timeout(WAIT_SEEDED, promising).await.expect("the answer is late");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peer_that_reads_late_gets_every_answer() {
    const COUNT: usize = 300;
    let nodes = Nodes::new().await;
    let owner = nodes.take_over(2, 1).await;
    let payload = Bytes::from(vec![1; 256 << 10]);
    let (volume, kind) = (super::logs::VOLUME, EntryKind::Write);
    let entry = NewEntry { volume, kind, start_sector: 0, sector_count: 512, payload };
    owner.log.append(entry, Wait::Written).await.unwrap();
    nodes.nodes[1].catches_up(owner.owned.replicas().acknowledged()).await;
    let (mut reader, mut writer) = nodes.connection().await.into_frames();
    frames::read_identity(&mut reader).await.unwrap();
    // More answers than there is room for, and longer than the kernel holds.
    let read = Request::Read { epoch: Epoch(1), after: Position::START };
    for _ in 0..COUNT {
        frames::write(&mut writer, &read).await.unwrap();
    }
    for _ in 0..COUNT {
        // Everything that the member has got is done.
        nodes.nodes[1].member().state().await.unwrap();
    }
    let is_whole = |batches: &[Batch]| batches.iter().any(|batch| batch.bytes.len() > 256 << 10);
    for number in 0..COUNT {
        let answer = timeout(WAIT_SEEDED, frames::read::<Answer>(&mut reader)).await;
        match answer.unwrap_or_else(|_| panic!("answer {number} is lost")).unwrap() {
            Some(Answer::Batches { batches, .. }) if is_whole(&batches) => {}
            answer => panic!("{answer:?}"),
        }
    }
}
