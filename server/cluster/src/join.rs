//! Joining: the issuer keeps hashes of its tokens and admits their bearers; the joiner proves the
//! secret to the node that the token pins.
//!
//! Invariants:
//! - The issuer keeps only a hash of a secret, in memory and in `DIR/node/tokens.json`.
//! - A token is on stable storage as used before the list has the node. The same node may use it
//!   again until it expires, so an answer that was lost costs no second token.
//! - The pool's key goes only to a bearer of a token, over the connection that the pinned certificate
//!   protects, and never over a key file that the joiner has.
//! - The joiner sends the secret only after the handshake has proven the pinned certificate, and
//!   keeps nothing of a list that does not have both nodes.

use crate::admission::{AdmissionList, NewNode};
use crate::connection::dial::{Target, dial};
use crate::connection::{Frame, Hello, PeerStream, Service, frames};
use crate::home;
use crate::home::refuse_member;
use crate::identity::{Digest, Identity, NodeId, node_dir, sha256};
use crate::membership::Membership;
use crate::seeded_bugs::seeded_bugs;
use crate::tls;
use crate::token::{SECRET_BYTES, Secret, Token};
use block::durable_file::write_durably;
use block::env::{Clock, Random};
use block::hex::{from_hex, to_hex};
use block::{Error, ErrorKind, Result};
use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use zeroize::{Zeroize, Zeroizing};

/// Life of a token in seconds.
pub const TOKEN_LIFE_SECONDS: u64 = 3600;
/// Seconds for which a token is remembered, so that its bearer learns that it has expired.
const MEMORY_SECONDS: u64 = 24 * 3600;
/// Seconds by which the wall clock may be set back before tokens of the future count as expired.
/// Chosen by hand: more than time daemons step a clock.
const CLOCK_STEP_SECONDS: u64 = 300;
/// Tokens that are remembered. Chosen by hand: a rack at a time.
const TOKEN_COUNT_MAX: usize = 256;
/// Version of `tokens.json`.
const VERSION: u32 = 1;
/// Time for the request and its reply.
const JOIN_TIME_MAX: Duration = Duration::from_secs(10);

/// Kind of the frame with the request of a joiner.
const REQUEST: u8 = 1;
/// Kind of the reply with the list of nodes.
const ADMITTED: u8 = 2;
/// Kind of the message with the key file of the pool, before the list of nodes.
const KEY_FILE: u8 = 4;
/// Longest key file. Chosen by hand: one has a few hundred bytes.
const KEY_FILE_BYTES_MAX: u64 = 64 << 10;
/// Kind of the reply with a refusal: the number of its kind, then a text.
const REFUSED: u8 = 3;
/// Kinds of refusals, by number.
const REFUSALS: [(u8, ErrorKind); 4] = [
    (1, ErrorKind::Denied),
    (2, ErrorKind::Busy),
    (3, ErrorKind::Invalid),
    (4, ErrorKind::Unavailable),
];

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Issued {
    /// SHA-256 of the secret, in hex.
    secret_hash: String,
    /// Seconds since the Unix epoch.
    issued_at: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    used_by: Option<NodeId>,
}

impl Issued {
    fn is_expired(&self, now: u64) -> bool {
        let is_over = now.saturating_sub(self.issued_at) >= TOKEN_LIFE_SECONDS;
        let is_of_the_future = self.issued_at.saturating_sub(now) > CLOCK_STEP_SECONDS;
        (is_over || is_of_the_future) && !seeded_bugs().token_never_expires
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    tokens: Vec<Issued>,
}

/// The tokens that this node has issued. The calls wait for the disk.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    clock: Arc<dyn Clock>,
    issued: Mutex<Vec<Issued>>,
}

impl Tokens {
    /// Reads the tokens in `dir`.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`, `Io`.
    pub fn open(dir: &Path, clock: Arc<dyn Clock>) -> Result<Tokens> {
        let path = node_dir(dir).join("tokens.json");
        let shown = path.display();
        let issued = match std::fs::read(&path) {
            Ok(bytes) => {
                let document: Document = serde_json::from_slice(&bytes).map_err(|error| {
                    let context = format!("read {shown}: delete it, and issue tokens again");
                    Error::with_source(ErrorKind::Corrupt, context, error)
                })?;
                if document.version != VERSION {
                    let context = format!("{shown} is of another version of the program");
                    return Err(Error::new(ErrorKind::Unsupported, context));
                }
                document.tokens
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                return Err(Error::with_source(ErrorKind::Io, format!("read {shown}"), error));
            }
        };
        Ok(Tokens { path, clock, issued: Mutex::new(issued) })
    }

    /// Issues a token that admits one node within [`TOKEN_LIFE_SECONDS`].
    ///
    /// # Errors
    /// `Denied` if this node was removed; `Full` with too many valid tokens; `Io`.
    pub fn issue(&self, membership: &Membership, random: &dyn Random) -> Result<Token> {
        let list = membership.list();
        let Some(own) = list.node_with(membership.identity().certificate()) else {
            let context = "this node was removed from the cluster: issue the token on another";
            return Err(Error::new(ErrorKind::Denied, context));
        };
        let mut secret = Secret([0; SECRET_BYTES]);
        random.fill(&mut secret.0);
        let token = Token {
            cluster: list.cluster(),
            issuer: sha256(&own.certificate),
            secret,
            addresses: own.addresses.clone(),
        };
        let now = self.clock.unix_seconds();
        let mut issued = self.issued.lock();
        let mut next = issued.clone();
        next.retain(|one| now.abs_diff(one.issued_at) < MEMORY_SECONDS);
        if next.len() >= TOKEN_COUNT_MAX {
            next.retain(|one| one.used_by.is_none() && !one.is_expired(now));
        }
        if next.len() >= TOKEN_COUNT_MAX {
            let context = format!("{TOKEN_COUNT_MAX} tokens are valid: use some, or wait an hour");
            return Err(Error::new(ErrorKind::Full, context));
        }
        let secret_hash = to_hex(&sha256(&token.secret.0));
        next.push(Issued { secret_hash, issued_at: now, used_by: None });
        self.store(&next)?;
        *issued = next;
        Ok(token)
    }

    /// Marks the token with this secret as used by `node`.
    ///
    /// # Errors
    /// `Denied` for a secret that this node did not issue, an expired one, or one that another node
    /// has used; `Io`.
    fn redeem(&self, secret: &Secret, node: NodeId) -> Result<()> {
        let denied = |why: &str| Err(Error::new(ErrorKind::Denied, why));
        let hash = to_hex(&sha256(&secret.0));
        let mut issued = self.issued.lock();
        let mut next = issued.clone();
        // The comparison of hashes tells an attacker nothing about a secret.
        let Some(token) = next.iter_mut().find(|one| one.secret_hash == hash) else {
            return denied("the token is not known: it expired long ago, or was never issued here");
        };
        if token.used_by.is_some_and(|user| user != node) && !seeded_bugs().token_stays {
            return denied("the token was used by another node: issue one for each node");
        }
        if token.is_expired(self.clock.unix_seconds()) {
            return denied("the token has expired, it is valid for one hour: issue another");
        }
        token.used_by = Some(node);
        self.store(&next)?;
        *issued = next;
        Ok(())
    }

    fn store(&self, tokens: &[Issued]) -> Result<()> {
        let document = Document { version: VERSION, tokens: tokens.to_vec() };
        let bytes = serde_json::to_vec(&document).expect("it has only texts");
        write_durably(&self.path, &bytes, 0o600)
    }
}

/// The request of a joiner.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    secret: String,
    name: String,
    addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    zone: Option<String>,
    /// The joiner has no file with the pool's key.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    wants_key_file: bool,
}

impl Drop for Request {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

/// A node that admits others.
#[derive(Debug)]
pub struct Issuer {
    /// Its place in the cluster.
    pub membership: Arc<Membership>,
    /// Its tokens.
    pub tokens: Arc<Tokens>,
    /// The file with the pool's key.
    pub key_file: Option<PathBuf>,
}

/// The list of nodes with a new one, and the key file that it gets.
type Admitted = (Arc<AdmissionList>, Option<Zeroizing<Vec<u8>>>);

/// Serves one joiner, whose certificate the handshake has proven.
///
/// # Errors
/// For messages: the joiner has its answer, or is gone.
pub async fn serve(stream: PeerStream, certificate: Vec<u8>, issuer: Issuer) -> Result<NodeId> {
    let (mut reader, mut writer) = frames(stream, Service::Join, "a joiner".to_owned());
    let late = |_| Error::new(ErrorKind::Unavailable, "serve a joiner: it took too long");
    let frame = timeout(JOIN_TIME_MAX, reader.read()).await.map_err(late)??;
    let node = NodeId::of(&certificate);
    let admitted =
        tokio::task::spawn_blocking(move || admit(frame.as_ref(), &certificate, &issuer));
    let admitted = admitted.await.unwrap_or_else(|error| {
        Err(Error::with_source(ErrorKind::Unavailable, "admit a node", error))
    });
    let (kind, payload) = match &admitted {
        Ok((list, _)) => (ADMITTED, Bytes::from(list.encode())),
        Err(error) => (REFUSED, refusal_bytes(error)),
    };
    let reply = async {
        // The bound of the service holds for strangers; a list may be longer.
        writer.allow(Service::Admissions);
        if let Ok((_, Some(key))) = &admitted {
            writer.write(KEY_FILE, 0, &[Bytes::copy_from_slice(key)]).await?;
        }
        writer.write(kind, 0, &[payload]).await?;
        writer.close().await?;
        // Only the end counts: a joiner that has its answer may end without a farewell.
        let _ = reader.read().await;
        Ok::<_, Error>(())
    };
    timeout(JOIN_TIME_MAX, reply).await.map_err(late)??;
    admitted.map(|_| node)
}

/// Encodes a refusal. An error of this node itself has no details for strangers.
fn refusal_bytes(error: &Error) -> Bytes {
    let known = REFUSALS.iter().find(|(_, kind)| *kind == error.kind());
    let (number, text) = match known {
        Some((number, _)) => (*number, error.to_string()),
        None => (4, "the node could not admit another: see its log".to_owned()),
    };
    Bytes::from([&[number][..], text.as_bytes()].concat())
}

fn admit(frame: Option<&Frame>, certificate: &[u8], issuer: &Issuer) -> Result<Admitted> {
    let Issuer { membership, tokens, key_file } = issuer;
    let odd = || Error::new(ErrorKind::Invalid, "the request to join is not understood");
    let frame = frame.filter(|frame| frame.kind == REQUEST).ok_or_else(odd)?;
    let request: Request = serde_json::from_slice(&frame.payload).map_err(|_| odd())?;
    let secret = Secret(from_hex(&request.secret).ok_or_else(odd)?);
    tokens.redeem(&secret, NodeId::of(certificate))?;
    membership.change(|list| {
        let (name, addresses) = (&request.name, &request.addresses);
        let node = NewNode { name, addresses, zone: request.zone.as_deref() };
        list.admit(membership.identity(), node, certificate)
    })?;
    let key_file = key_file.as_deref().filter(|_| request.wants_key_file);
    Ok((membership.list(), key_file.and_then(read_key_file)))
}

/// Reads the key file of this node; `None` if it has none, or one that cannot be read.
fn read_key_file(path: &Path) -> Option<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(4096));
    let read =
        File::open(path).and_then(|file| file.take(KEY_FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
    match read {
        Ok(length) if length as u64 <= KEY_FILE_BYTES_MAX => Some(bytes),
        Ok(_) => None,
        Err(error) => {
            if error.kind() != std::io::ErrorKind::NotFound {
                tracing::warn!(%error, "could not read the key file for a node that joins");
            }
            None
        }
    }
}

/// Joins the cluster of a token with the directory `dir`.
///
/// # Errors
/// `Busy` if the directory belongs to a cluster or the name is taken; `Denied` if the token has
/// expired or was used, or another node answers at its addresses; `Unsupported` for another version
/// of the program; `Unavailable` if the issuer cannot be reached; `Io`.
pub async fn join(
    dir: &Path,
    node: NewNode<'_>,
    token: &Token,
    key_file: Option<&Path>,
) -> Result<Membership> {
    refuse_member(dir)?;
    let key_file = key_file.filter(|path| !path.exists());
    let identity = Identity::open_or_generate(dir, node.name)?;
    let target = Target {
        peer: "the issuer of the token".to_owned(),
        addresses: &token.addresses,
        config: tls::joiner(&identity, token.issuer)?,
        impostor: "is not the node that issued the token: it is another node, or one of another \
                   cluster",
    };
    let list: Digest = [0; 32];
    let service = Service::Join.number();
    let hello = Hello { service, cluster: token.cluster, pool: None, list };
    let (stream, _) = dial(&target, &hello, |_| Ok(None)).await?;
    // The token will be bound to this key, so the key must outlive a crash.
    let lock = home::claim(dir, &identity)?;
    let late = |_| Error::new(ErrorKind::Unavailable, "wait for the issuer of the token: too long");
    let reply = timeout(JOIN_TIME_MAX, ask(stream, node, token, key_file.is_some()));
    let (list, key) = reply.await.map_err(late)??;
    let issuer = list.nodes().values().find(|node| sha256(&node.certificate) == token.issuer);
    if issuer.is_none() {
        let context = "the list of nodes does not have the issuer of the token";
        return Err(Error::new(ErrorKind::Corrupt, context));
    }
    if let (Some(path), Some(key)) = (key_file, key) {
        // Before the list, so that the same token brings the key after a crash.
        write_durably(path, &key, 0o600)?;
    }
    Membership::create(dir, identity, lock, list)
}

async fn ask(
    stream: PeerStream,
    node: NewNode<'_>,
    token: &Token,
    wants_key_file: bool,
) -> Result<(AdmissionList, Option<Zeroizing<Vec<u8>>>)> {
    let (mut reader, mut writer) = frames(stream, Service::Admissions, "the issuer".to_owned());
    let secret = to_hex(&token.secret.0);
    let request = Request {
        secret,
        name: node.name.to_owned(),
        addresses: node.addresses.to_vec(),
        zone: node.zone.map(str::to_owned),
        wants_key_file,
    };
    let json = Zeroizing::new(serde_json::to_vec(&request).expect("it has only texts"));
    writer.write(REQUEST, 0, &[Bytes::copy_from_slice(&json)]).await?;
    let gone = || Error::new(ErrorKind::Unavailable, "the issuer of the token gave no answer");
    let mut reply = reader.read().await?.ok_or_else(gone)?;
    let mut key = None;
    if wants_key_file && reply.kind == KEY_FILE {
        key = Some(Zeroizing::new(reply.payload.to_vec()));
        reply = reader.read().await?.ok_or_else(gone)?;
    }
    match reply.kind {
        ADMITTED => Ok((AdmissionList::decode(&reply.payload, Some(token.cluster))?, key)),
        REFUSED => {
            let odd = || Error::new(ErrorKind::Corrupt, "the refusal to join is not understood");
            let (number, text) = reply.payload.split_first().ok_or_else(odd)?;
            let known = REFUSALS.iter().find(|(known, _)| known == number);
            let text: String = String::from_utf8_lossy(text)
                .chars()
                .filter(|character| !character.is_control())
                .take(400)
                .collect();
            Err(Error::new(known.ok_or_else(odd)?.1, text))
        }
        _ => Err(Error::new(ErrorKind::Corrupt, "the answer to the token is not understood")),
    }
}
