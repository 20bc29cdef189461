//! The folder of a pool on a drive of another node, as an object store.
//!
//! Invariants:
//! - A request ends: with its answer, with its connection, or after a time that depends on its bytes.
//! - Small requests do not wait behind large ones, nor those behind reads of whole fragments and checks, for which
//!   no client waits: each kind has a connection of its own, and every listing. That for small ones, among which are the
//!   reads of clients, is served by the runtime that made the store, whichever runtime needs it first: the
//!   background runtime gives way to others.
//! - A request that could not be sent over a broken connection is tried once over a new one. A change may then be
//!   carried out twice, which changes nothing: objects are created and deleted once.
//! - What a node does not answer is an error that is never `NotFound`.

mod offers;
mod wire;

pub use offers::drives_of;

use crate::messages::{Answer, DriveRoom, Listed, Open, PATH_BYTES_MAX, Refusal, Request, VERSION};
use crate::proof::PoolSigner;
use async_trait::async_trait;
use block::Epoch;
use bytes::Bytes;
use cluster::{Cluster, Connection, NodeId, Service};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::timeout;
use uuid::Uuid;
use wire::Lane;

/// Bytes from which a read uses the connection for large requests. Chosen by hand.
const LARGE_BYTES: u64 = 256 << 10;
/// Beginning of the names of large objects. Source: docs/format-fragment.md.
const FRAGMENTS: &str = "fragments/";
/// Longest wait for the next part of a listing. Chosen by hand.
const LIST_MAX: Duration = Duration::from_secs(60);

/// The folder of a pool on a drive of a node.
#[derive(Clone, Debug)]
pub struct NodePlace {
    /// Name or id of the node.
    pub node: String,
    /// Name of the drive; empty for the only one.
    pub drive: String,
    /// The pool.
    pub pool: Uuid,
    /// Its lineage: the name of its folder.
    pub lineage: Uuid,
    /// Epoch of the owner that writes; absent for a command that only reads.
    pub owner: Option<Epoch>,
    /// Proves that the sender has the key of the pool.
    pub signer: PoolSigner,
}

/// A folder on another node, as an object store. Clones share their connections.
#[derive(Clone)]
pub struct NodeObjects(Arc<Shared>);

struct Shared {
    cluster: Cluster,
    place: NodePlace,
    small: Lane,
    large: Lane,
    bulk: Lane,
}

impl fmt::Debug for NodeObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NodeObjects").field(&self.0.place).finish()
    }
}

impl fmt::Display for NodeObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0.place.node)
    }
}

/// The error of a node that does not answer, or does not carry out a request.
fn away(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "data node", source: source.into() }
}

fn not_implemented(operation: &str) -> Error {
    Error::NotImplemented { operation: operation.to_owned(), implementer: "data node".to_owned() }
}

/// Finds a node by its name or id.
fn find(cluster: &Cluster, name: &str) -> Result<NodeId> {
    let id = Uuid::parse_str(name).ok();
    let nodes = cluster.nodes();
    let found = nodes.iter().filter(|node| node.name == name || Some(node.id.0) == id);
    match found.map(|node| node.id).collect::<Vec<_>>()[..] {
        [node] => Ok(node),
        [] => Err(away(format!(
            "the cluster has no node {name}; `spindle node list` shows all of them"
        ))),
        _ => Err(away(format!("several nodes are called {name}; use the id of one"))),
    }
}

impl Shared {
    /// Connects to the node. Returns the connection and the request that opens the folder.
    async fn connect(&self, is_bulk: bool) -> Result<(Connection, Request)> {
        let node = find(&self.cluster, &self.place.node)?;
        let connected = self.cluster.connect(node, Service::Data, Some(self.place.pool)).await;
        let connection = connected.map_err(|error| away(error.chain()))?;
        let NodePlace { drive, lineage, owner, signer, .. } = self.place.clone();
        let open = Open { version: VERSION, owner, is_bulk, lineage, drive };
        let proof = signer.prove(&open, self.cluster.node_id(), node);
        Ok((connection, Request::Open(open, proof)))
    }

    /// Sends a request with these bytes behind it, and waits for the answer.
    async fn ask(
        self: &Arc<Self>,
        lane: &Lane,
        request: &Request,
        rest: Vec<Bytes>,
        bytes: u64,
    ) -> Result<Answer> {
        let (kind, mut parts) = request.encode();
        parts.extend(rest);
        let connect = |is_bulk| {
            let shared = Arc::clone(self);
            async move {
                let (connection, open) = shared.connect(is_bulk).await?;
                wire::Wire::open(connection, &open).await
            }
        };
        lane.ask(connect, (kind, parts), bytes).await
    }
}

impl NodeObjects {
    /// Makes the store, whose small requests the current runtime serves. No request is sent.
    #[must_use]
    pub fn new(cluster: Cluster, place: NodePlace) -> NodeObjects {
        let (small, large) = (Lane::new(Handle::try_current().ok()), Lane::new(None));
        NodeObjects(Arc::new(Shared { cluster, place, small, large, bulk: Lane::bulk() }))
    }

    async fn read(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let is_plain = options.if_match.is_none()
            && options.if_none_match.is_none()
            && options.if_modified_since.is_none()
            && options.if_unmodified_since.is_none()
            && options.version.is_none();
        if !is_plain {
            return Err(not_implemented("a conditional read"));
        }
        let shared = &self.0;
        let name = checked(path)?;
        if options.head {
            let answer = shared.ask(&shared.small, &Request::Size(name), Vec::new(), 0).await?;
            let Answer::Size(size) = answer else { return Err(odd(path, answer)) };
            return Ok(found(path, size, 0..0, Bytes::new()));
        }
        let range = match options.range {
            None => 0..u64::MAX,
            Some(GetRange::Bounded(range)) => range,
            Some(GetRange::Offset(from)) => from..u64::MAX,
            Some(GetRange::Suffix(_)) => return Err(not_implemented("a read of the end")),
        };
        let wanted = range.end - range.start;
        // Of an object without a range, the folder tells: fragments have the size of a segment at most, and documents are
        // small.
        let expected = match path.as_ref().starts_with(FRAGMENTS) {
            true => wanted.min(u64::from(Service::Data.payload_bytes_max())),
            false => wanted.min(LARGE_BYTES - 1),
        };
        let lane = match expected {
            _ if range.end == u64::MAX && expected >= LARGE_BYTES => &shared.bulk,
            LARGE_BYTES.. => &shared.large,
            _ => &shared.small,
        };
        let answer =
            shared.ask(lane, &Request::Read(name, range.clone()), Vec::new(), expected).await?;
        let Answer::Read(size, bytes) = answer else { return Err(odd(path, answer)) };
        if bytes.len() as u64 > wanted {
            return Err(away(format!("object {path}: the node sent more than was asked for")));
        }
        let end = range.start + bytes.len() as u64;
        Ok(found(path, size, range.start..end, bytes))
    }

    /// Lets the node verify all of a fragment of about this many bytes. Returns its header; `None` if it is damaged.
    ///
    /// # Errors
    /// `NotFound` if it is not stored; any other error means that the node did not say.
    pub async fn check(&self, path: &Path, bytes: u64) -> Result<Option<Bytes>> {
        let (shared, request) = (&self.0, Request::Check(checked(path)?));
        match shared.ask(&shared.bulk, &request, Vec::new(), bytes).await? {
            Answer::Checked(header) => Ok((!header.is_empty()).then_some(header)),
            other => Err(odd(path, other)),
        }
    }

    /// Asks for the room of the drive.
    ///
    /// # Errors
    /// Any error means that the node did not say.
    pub async fn room(&self) -> Result<DriveRoom> {
        let shared = &self.0;
        match shared.ask(&shared.small, &Request::Room, Vec::new(), 0).await? {
            Answer::Room(room) => Ok(room),
            other => Err(odd(&Path::default(), other)),
        }
    }

    /// Lists over a connection of its own: its end is the end of the listing.
    async fn begin_list(&self, prefix: String) -> Result<wire::Listing> {
        let (connection, open) = self.0.connect(true).await?;
        wire::Listing::begin(connection, &open, &Request::List(prefix)).await
    }
}

fn checked(path: &Path) -> Result<String> {
    match path.as_ref().len() <= PATH_BYTES_MAX {
        true => Ok(path.as_ref().to_owned()),
        false => Err(away(format!("object {path}: its name is too long for a data node"))),
    }
}

fn meta(path: &Path, size: u64) -> ObjectMeta {
    // Nodes do not tell the time.
    let last_modified = Default::default();
    ObjectMeta { location: path.clone(), last_modified, size, e_tag: None, version: None }
}

fn found(path: &Path, size: u64, range: std::ops::Range<u64>, bytes: Bytes) -> GetResult {
    GetResult {
        payload: GetResultPayload::Stream(futures::stream::iter([Ok(bytes)]).boxed()),
        meta: meta(path, size),
        range,
        attributes: Default::default(),
        extensions: Default::default(),
    }
}

/// The error for an answer that is not the one to the request.
fn odd(path: &Path, answer: Answer) -> Error {
    match answer {
        Answer::Refused(Refusal::NotFound, why) => {
            Error::NotFound { path: path.to_string(), source: why.into() }
        }
        Answer::Refused(Refusal::Exists, why) => {
            Error::AlreadyExists { path: path.to_string(), source: why.into() }
        }
        Answer::Refused(_, why) => away(why),
        _ => away(format!("object {path}: the node gave the answer to another request")),
    }
}

#[async_trait]
impl ObjectStore for NodeObjects {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        if options.mode != PutMode::Create {
            return Err(not_implemented("a write of an object that may exist"));
        }
        let shared = &self.0;
        let bytes = payload.content_length() as u64;
        let lane = if bytes < LARGE_BYTES { &shared.small } else { &shared.large };
        let request = Request::Put(checked(path)?, Bytes::new());
        match shared.ask(lane, &request, payload.iter().cloned().collect(), bytes).await? {
            Answer::Done => {
                Ok(PutResult { e_tag: None, version: None, extensions: Default::default() })
            }
            other => Err(odd(path, other)),
        }
    }

    async fn put_multipart_opts(
        &self,
        _: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(not_implemented("a write in parts"))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.read(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        let deleted = paths.map(move |path| {
            let this = this.clone();
            async move {
                let path = path?;
                let request = Request::Delete(checked(&path)?);
                match this.0.ask(&this.0.small, &request, Vec::new(), 0).await? {
                    Answer::Done => Ok(path),
                    other => Err(odd(&path, other)),
                }
            }
        });
        deleted.buffered(8).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (this, prefix) = (self.clone(), prefix.map(Path::to_string).unwrap_or_default());
        let parts = async move { Ok::<_, Error>(this.begin_list(prefix).await?.parts()) };
        let parts = parts.into_stream().try_flatten();
        let objects = parts.map_ok(|part: Vec<Listed>| {
            let one = |Listed { path, bytes }: Listed| match Path::parse(&path) {
                Ok(path) => Ok(meta(&path, bytes)),
                Err(error) => Err(away(error)),
            };
            futures::stream::iter(part.into_iter().map(one))
        });
        objects.try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let (mut objects, mut folders) = (Vec::new(), BTreeSet::new());
        let folder = prefix.cloned().unwrap_or_default();
        let mut listing = self.list(prefix);
        while let Some(found) = listing.try_next().await? {
            let Some(mut parts) = found.location.prefix_match(&folder) else { continue };
            let first = parts.next();
            match (first, parts.next()) {
                (Some(first), Some(_)) => drop(folders.insert(folder.clone().join(first))),
                _ => {
                    drop(parts);
                    objects.push(found);
                }
            }
        }
        let common_prefixes = folders.into_iter().collect();
        Ok(ListResult { common_prefixes, objects, extensions: Default::default() })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(not_implemented("a copy"))
    }
}

/// Waits for the next part of a listing.
async fn in_time<T>(next: impl Future<Output = T>) -> Result<T> {
    timeout(LIST_MAX, next).await.map_err(|_| {
        away(format!("the node did not continue its listing in {} s", LIST_MAX.as_secs()))
    })
}
