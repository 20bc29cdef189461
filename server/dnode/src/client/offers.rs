//! The question which drives a data node has. It needs no key: the answer has names only.

use crate::messages::{Answer, DriveOffer, Request, VERSION};
use block::{Error, ErrorKind, Result};
use cluster::{Cluster, Frame, NodeId, Service};

/// Longest answer, in bytes. Chosen by hand: 128 drives with three names of 63 bytes each, twice.
const ANSWER_BYTES_MAX: u32 = 64 << 10;

/// Asks a node for its drives, over a connection of its own. The caller bounds the time.
///
/// # Errors
/// Those of [`Cluster::connect`]: `Unsupported` for a node that is no data node; `Unavailable` for one that does not
/// answer the question; `Corrupt` for an answer that is too long.
pub async fn drives_of(cluster: &Cluster, node: NodeId) -> Result<Vec<DriveOffer>> {
    let connection = cluster.connect(node, Service::Data, None).await?;
    let (mut reader, mut writer) = connection.into_frames();
    reader.limit(ANSWER_BYTES_MAX);
    let (kind, parts) = Request::Drives(VERSION).encode();
    writer.write(kind, 0, &parts).await?;
    let unanswered = |why: String| {
        let what = format!("ask the node for its drives: {why}");
        Err(Error::new(ErrorKind::Unavailable, what))
    };
    let Some(Frame { kind, payload, .. }) = reader.read().await? else {
        return unanswered("it closed the connection; it may run an earlier version".to_owned());
    };
    match Answer::decode(kind, &payload) {
        Some(Answer::Drives(drives)) => Ok(drives),
        Some(Answer::Refused(_, why)) => unanswered(why),
        _ => unanswered(format!("a message of kind {kind} is no answer to this")),
    }
}
