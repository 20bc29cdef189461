//! Answers the command line on a data node.
//!
//! Invariant: it knows no pool; requests about one are refused with the place to ask.

use super::node;
use crate::admin::AdminHandler;
use api::dnode::{DnodeInfo, DriveInfo};
use api::pool::PoolRequest;
use api::{Reply, Request};
use block::{Error, ErrorKind, Result};
use cluster::Cluster;
use dnode::Drives;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// The handler of a data node.
pub(crate) struct DnodeAdmin {
    /// The node in its cluster.
    pub cluster: Cluster,
    /// Its directory.
    pub dir: PathBuf,
    /// Its drives.
    pub drives: Arc<Drives>,
    /// Set by a request to stop.
    pub stop: watch::Sender<bool>,
}

impl DnodeAdmin {
    fn info(&self) -> DnodeInfo {
        let name = self.cluster.node_name();
        let drives = self.drives.states().into_iter().map(|drive| DriveInfo {
            url: drive_url(name, &drive.name),
            dir: drive.dir,
            group: drive.group,
            domain: drive.domain,
            failure: drive.failure,
            capacity_bytes: drive.capacity_bytes,
            used_bytes: drive.used_bytes,
            available_bytes: drive.available_bytes,
            pool_count: drive.pool_count,
            wear: drive.wear,
        });
        DnodeInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            name: name.to_owned(),
            id: self.cluster.node_id().to_string(),
            cluster: self.cluster.cluster_id().to_string(),
            drives: drives.collect(),
        }
    }
}

/// Returns the URL with which pools name a drive.
pub(crate) fn drive_url(node: &str, drive: &str) -> String {
    format!("spindle://{node}/{drive}")
}

impl AdminHandler for DnodeAdmin {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Pool(PoolRequest::Stop {}) => {
                self.stop.send_replace(true);
                Ok(Reply::Done { message: "stopping".to_owned() })
            }
            Request::Pool(PoolRequest::Status {}) => Ok(Reply::Dnode(self.info())),
            Request::Node(request) => node::answer(Some(&self.cluster), &self.dir, request).await,
            _ => {
                let what = format!(
                    "ask about a pool: {} is a data node, and knows `status`, `node` and `stop`; ask the node that serves \
                     the pool",
                    self.cluster.node_name()
                );
                Err(Error::new(ErrorKind::Unsupported, what))
            }
        }
    }
}
