//! Nodes in one process on loopback: joining, refusals, removal, exchange.

mod joining;
mod probing;
mod refusals;
mod removal;
mod seeded;
mod traffic;

use super::*;
use block::env::{ManualClock, SystemRandom};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longest wait for something that should happen.
const WAIT: Duration = Duration::from_secs(10);

/// A node that serves.
struct Running {
    cluster: Cluster,
    dir: Arc<TempDir>,
    address: String,
    serving: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn environment(clock: &ManualClock) -> Environment {
    Environment { clock: Arc::new(clock.clone()), random: Arc::new(SystemRandom), key_file: None }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

fn serve(cluster: &Cluster, listener: TcpListener) -> JoinHandle<()> {
    let cluster = cluster.clone();
    tokio::spawn(async move { cluster.serve(vec![listener]).await })
}

async fn founder(name: &str, clock: &ManualClock) -> Running {
    let (listener, address) = listen().await;
    let dir = Arc::new(tempfile::tempdir().unwrap());
    let addresses = std::slice::from_ref(&address);
    let cluster =
        Cluster::init(dir.path(), NewNode::new(name, addresses), environment(clock)).unwrap();
    let serving = serve(&cluster, listener);
    Running { cluster, dir, address, serving }
}

async fn joined(name: &str, issuer: &Running, clock: &ManualClock) -> Running {
    let token = issuer.cluster.issue_token().unwrap().to_word();
    try_join(name, &token, clock).await.unwrap()
}

async fn try_join(name: &str, token: &str, clock: &ManualClock) -> Result<Running> {
    let dir = Arc::new(tempfile::tempdir().unwrap());
    try_join_in(dir, name, token, clock).await
}

async fn try_join_in(
    dir: Arc<TempDir>,
    name: &str,
    token: &str,
    clock: &ManualClock,
) -> Result<Running> {
    let (listener, address) = listen().await;
    let addresses = std::slice::from_ref(&address);
    let cluster =
        Cluster::join(dir.path(), NewNode::new(name, addresses), token, environment(clock)).await?;
    let serving = serve(&cluster, listener);
    Ok(Running { cluster, dir, address, serving })
}

impl Running {
    /// Ends it like a process, and returns its directory, which can be opened again.
    async fn stopped(self) -> Arc<TempDir> {
        let dir = Arc::clone(&self.dir);
        self.serving.abort();
        drop(self);
        // The runtime drops the tasks a little later.
        let unlocked = async {
            while crate::home::lock(dir.path()).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(WAIT, unlocked).await.expect("its tasks end");
        dir
    }

    fn id(&self) -> NodeId {
        self.cluster.node_id()
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> =
            self.cluster.nodes().into_iter().map(|node| node.name).collect();
        names.sort();
        names
    }

    /// Waits until the list of this node has exactly these names.
    async fn wait_for(&self, names: &[&str]) {
        let waiting = async {
            let mut watch = self.cluster.watch();
            while self.names() != names {
                watch.changed().await.unwrap();
            }
        };
        let seen = timeout(WAIT, waiting).await;
        assert!(seen.is_ok(), "{}: {:?}", self.cluster.node_name(), self.names());
    }
}

/// Returns the payload of every frame to its sender, and holds raw streams open.
struct Echo;

#[async_trait]
impl Handler for Echo {
    fn check(&self, _peer: NodeId, pool: Option<Uuid>) -> Result<()> {
        match pool {
            Some(POOL) => Ok(()),
            Some(_) => Err(Error::new(ErrorKind::NotFound, "no such pool here")),
            None => Err(Error::new(ErrorKind::Unavailable, "not at this time")),
        }
    }

    async fn serve(&self, connection: Connection) {
        if connection.service() == Service::Forward {
            let (mut read, mut write) = tokio::io::split(connection.into_stream());
            let _ = tokio::io::copy(&mut read, &mut write).await;
            return;
        }
        let (mut reader, mut writer) = connection.into_frames();
        while let Ok(Some(frame)) = reader.read().await {
            let half = frame.payload.len() / 2;
            let parts = [frame.payload.slice(..half), frame.payload.slice(half..)];
            if writer.write(frame.kind, frame.request, &parts).await.is_err() {
                return;
            }
        }
        let _ = writer.close().await;
    }
}

const POOL: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);

fn register_echo(node: &Running) {
    node.cluster.register(Service::Member, Arc::new(Echo));
    node.cluster.register(Service::Forward, Arc::new(Echo));
}
