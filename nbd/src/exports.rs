//! The server's view of the rest of the daemon: names, devices, and access rules.
//!
//! Invariants:
//! - A client sees and opens only the exports that [`Access`] allows, and learns nothing about the
//!   others: the rule is checked before the export is looked up.

use crate::line::Line;
use crate::wire::ReservationRequest;
use block::{BlockDevice, Error, ErrorKind, Limits, Result};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;

/// The kind of socket that a client used at the other node. The rules of that kind apply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// TCP.
    Tcp,
    /// A unix socket.
    Unix,
}

impl std::fmt::Display for Over {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Over::Tcp => "TCP",
            Over::Unix => "unix socket",
        })
    }
}

/// The origin of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A TCP connection.
    Tcp(SocketAddr),
    /// A connection to the unix socket, with the user id that the kernel reports.
    Unix {
        /// Effective user id of the process that connected, when the kernel knows it.
        uid: Option<u32>,
    },
    /// A client that another node of the cluster passes on.
    Node {
        /// The node's name.
        name: Arc<str>,
        /// The kind of socket that the client used there.
        over: Over,
    },
    /// This machine's kernel, for one of its devices.
    Kernel,
}

impl std::fmt::Display for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Peer::Tcp(address) => address.fmt(f),
            Peer::Unix { uid: Some(uid) } => write!(f, "unix socket, uid {uid}"),
            Peer::Unix { uid: None } => f.write_str("unix socket"),
            Peer::Node { name, over } => write!(f, "node {name}, {over}"),
            Peer::Kernel => f.write_str("the kernel"),
        }
    }
}

/// A connected client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The origin of the connection.
    pub peer: Peer,
    /// The connection is encrypted.
    pub is_tls: bool,
    /// Names in its verified certificate (subject alternative DNS names, then the common name);
    /// empty without a certificate.
    pub names: Vec<String>,
    /// Its own statement of identity across connections, if it sent one. Only [`Client::names`] is
    /// proven.
    pub reservation: Option<ReservationRequest>,
    /// Its connection.
    pub line: Line,
}

impl Client {
    /// Returns the first verified name, or the origin of the connection.
    #[must_use]
    pub fn label(&self) -> String {
        self.names.first().cloned().unwrap_or_else(|| self.peer.to_string())
    }
}

/// One line of LIST, or the answer to INFO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Unique, at most 4096 bytes.
    pub name: String,
    /// Text for a person; may be empty; at most 4096 bytes.
    pub description: String,
}

/// The daemon's exports. All methods may be called from any task at any time.
pub trait Exports: Send + Sync + 'static {
    /// An open export. Dropping the last `Arc` of a connection detaches the client.
    type Device: BlockDevice;

    /// Lists the exports that may be shown to `client`.
    fn list(&self, client: &Client) -> impl Future<Output = Vec<Export>> + Send;

    /// Attaches `client`. The empty name is the default export, if the implementation has one.
    ///
    /// # Errors
    /// `NotFound` if the export does not exist, `Denied` or `Busy` if this client may not have it,
    /// `Unavailable` while the daemon stops.
    fn open(
        &self,
        name: &str,
        client: &Client,
    ) -> impl Future<Output = Result<Arc<Self::Device>>> + Send;

    /// Ends the attachment that `reservation` names. Requests from its connections no longer run when
    /// this returns.
    ///
    /// # Errors
    /// `Unsupported` if this implementation has no attachments.
    fn release(
        &self,
        reservation: &ReservationRequest,
        client: &Client,
    ) -> impl Future<Output = Result<()>> + Send {
        let (_, _) = (reservation, client);
        async { Err(Error::new(ErrorKind::Unsupported, "no attachments are kept")) }
    }

    /// Resolves when `device` may no longer be used. The server then closes the connection and
    /// drops the requests that run on it.
    fn revoked(&self, device: &Arc<Self::Device>) -> impl Future<Output = ()> + Send {
        let _ = device;
        std::future::pending()
    }

    /// Describes an export without attaching.
    ///
    /// # Errors
    /// Those of [`Exports::open`].
    fn describe(
        &self,
        name: &str,
        client: &Client,
    ) -> impl Future<Output = Result<(Export, Limits)>> + Send {
        async move {
            let device = self.open(name, client).await?;
            let export = Export { name: name.to_owned(), description: String::new() };
            Ok((export, device.limits()))
        }
    }
}

/// Access rules: the exports that each certificate name may open. By default, every client that
/// completes the negotiation may open every export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    rules: Option<BTreeMap<String, Vec<String>>>,
}

impl Access {
    /// Creates rules that map a certificate name to exports. A `*` at the end of an export matches
    /// any suffix. A client without a listed name may open nothing.
    #[must_use]
    pub fn by_certificate(rules: impl IntoIterator<Item = (String, Vec<String>)>) -> Self {
        Access { rules: Some(rules.into_iter().collect()) }
    }

    /// Whether there are rules, so that some clients may not open every export.
    #[must_use]
    pub fn has_rules(&self) -> bool {
        self.rules.is_some()
    }

    /// Whether `client` may see and open `export`. A client of the unix socket without a
    /// certificate may open everything: the socket is protected by its file mode and owner.
    #[must_use]
    pub fn allows(&self, client: &Client, export: &str) -> bool {
        let Some(rules) = &self.rules else { return true };
        let is_unix =
            matches!(client.peer, Peer::Unix { .. } | Peer::Node { over: Over::Unix, .. });
        if is_unix && client.names.is_empty() {
            return true;
        }
        let patterns = client.names.iter().filter_map(|name| rules.get(name)).flatten();
        patterns.into_iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => export.starts_with(prefix),
            None => pattern == export,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(names: &[&str]) -> Client {
        Client {
            peer: Peer::Tcp("127.0.0.1:1".parse().unwrap()),
            is_tls: true,
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            reservation: None,
            line: Line::default(),
        }
    }

    #[test]
    fn name_opens_only_the_exports_of_its_rule() {
        let access = Access::by_certificate([
            ("db1".to_owned(), vec!["pg".to_owned(), "scratch-*".to_owned()]),
            ("admin".to_owned(), vec!["*".to_owned()]),
        ]);
        assert!(access.allows(&client(&["db1"]), "pg"));
        assert!(access.allows(&client(&["db1"]), "scratch-7"));
        assert!(!access.allows(&client(&["db1"]), "pg2"));
        assert!(access.allows(&client(&["other", "admin"]), "anything"));
        assert!(!access.allows(&client(&["other"]), "pg"));
        assert!(!access.allows(&client(&[]), "pg"));
        assert!(Access::default().allows(&client(&[]), "pg"));
    }
}
