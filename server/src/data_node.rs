//! Runs a data node: serves the drives of this machine to the nodes of its cluster until told to stop.
//!
//! Invariants:
//! - A data node has a directory of its own, in which no pool is opened, and needs no key of any pool.
//! - It serves as long as it runs, also if all of its drives are away.

use crate::admin::AdminServer;
use crate::handlers::{DnodeAdmin, drive_url};
use crate::serve::Signals;
use crate::{limits, node};
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use config::Config;
use control::manifest::NodeDir;
use dnode::{DataService, DriveOptions, Drives};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::watch;

/// Threads for the files of a data node. Chosen by hand: a drive that hangs keeps 32 of them, and has others beside it.
pub(crate) const DRIVE_THREAD_COUNT_MAX: usize = 512;
/// Pause between two looks at the drives. Chosen by hand.
const LOOK_PAUSE: Duration = Duration::from_secs(5);
/// Time that commands have to finish at a stop. Chosen by hand.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Serves the configured drives until SIGTERM, SIGINT or a request to stop. Calls `announce` with the URLs of the drives
/// when they answer.
///
/// # Errors
/// `NotFound` for a directory that belongs to no cluster; `Invalid` for one that a pool was opened from, and for a
/// directory that cannot be a drive; `Busy` if another process has the directory or a drive; those of listening.
pub(crate) async fn run(config: &Config, announce: impl Fn(&[String])) -> Result<()> {
    let mut signals = Signals::new()?;
    let dir = config.dir();
    let Some(cluster) = node::open(config)? else {
        let what = format!(
            "serve drives: {} belongs to no cluster; print a token with `spindle node token` on one of its nodes, and join \
             with `spindle node join TOKEN --without-key`",
            dir.display()
        );
        return Err(Error::new(ErrorKind::NotFound, what));
    };
    let locked = NodeDir::open(dir)?;
    if let Some(pool) = locked.pool() {
        let what = format!(
            "serve drives: {} is the directory of pool {pool}; a data node has a directory of its own, and joins the cluster \
             as another node",
            dir.display()
        );
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    let dnode = &config.settings().dnode;
    let options: Vec<DriveOptions> =
        dnode.drives.iter().map(|drive| options(dnode, drive)).collect();
    if options.is_empty() {
        let what =
            "serve drives: there are none; name their directories with --drive, or in dnode.drives";
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    limits::prepare();
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let drives = tokio::select! {
        drives = Drives::open(dir, cluster.cluster_id(), options, &clock) => drives?,
        () = signals.stop() => return Ok(()),
    };
    // As many threads as for other requests, for the same reason.
    let background = Background(Some(engine::background::runtime(DRIVE_THREAD_COUNT_MAX)?));
    let handle = background.0.as_ref().map_or_else(Handle::current, |it| it.handle().clone());
    DataService::register(&cluster, Arc::clone(&drives), handle);
    let Some(_serving) = node::serve(&cluster).await? else {
        let what = format!(
            "serve drives: node {} was removed from its cluster; join again from an empty directory, and name the same drives",
            cluster.node_name()
        );
        return Err(Error::new(ErrorKind::Denied, what));
    };
    let (stop, ended) = (watch::Sender::new(false), watch::Sender::new(false));
    let socket = AdminServer::bind(dir)?;
    let handler = DnodeAdmin {
        cluster: cluster.clone(),
        dir: dir.to_owned(),
        drives: Arc::clone(&drives),
        stop: stop.clone(),
    };
    let mut end = ended.subscribe();
    let admin = tokio::spawn(async move {
        let stopped = async move { drop(end.wait_for(|end| *end).await) };
        socket.serve(Arc::new(handler), stopped, STOP_GRACE).await;
    });
    let name = cluster.node_name();
    let urls: Vec<String> =
        drives.states().iter().map(|drive| drive_url(name, &drive.name)).collect();
    announce(&urls);
    tracing::info!(node = name, drives = urls.join(", "), "the data node serves its drives");
    let mut asked = stop.subscribe();
    let looking = async {
        loop {
            tokio::time::sleep(LOOK_PAUSE).await;
            let _ = drives.look().await;
        }
    };
    tokio::select! {
        () = signals.stop() => {}
        _ = asked.wait_for(|asked| *asked) => {}
        () = looking => {}
    }
    tracing::info!(node = name, "the data node is stopping");
    ended.send_replace(true);
    admin.await.map_err(|error| Error::with_source(ErrorKind::Io, "stop a job", error))
}

/// The runtime of connections that no client waits for.
struct Background(Option<Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        // A thread may wait for a drive that hangs.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn options(dnode: &config::DnodeSettings, drive: &config::DriveSettings) -> DriveOptions {
    DriveOptions {
        name: drive.name().to_owned(),
        dir: drive.dir.clone(),
        capacity_bytes: drive.capacity.map(|capacity| capacity.0),
        group: dnode.group_of(drive),
        domain: dnode.domain_of(drive),
    }
}
