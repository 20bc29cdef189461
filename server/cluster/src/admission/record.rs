//! One record of the list: the admission or the removal of a node, signed by another.
//!
//! Invariants:
//! - A signature covers the canonical bytes, which have one form and name the cluster.
//! - Every field is within its bounds before the signature is examined.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use crate::identity::{
    CERTIFICATE_BYTES_MAX, ClusterId, Digest, Identity, NodeId, SIGNATURE_BYTES, is_usable, sha256,
    verify,
};
use block::Result;
use block::quantities::check_name;

/// First bytes of the canonical bytes.
const MAGIC: &[u8; 8] = b"SPDLNODE";
/// Version of the canonical bytes without a zone.
const VERSION: u16 = 1;
/// Version of the canonical bytes of an admission with a zone.
const VERSION_WITH_ZONE: u16 = 2;
/// Addresses of a node. Chosen by hand: two families on two networks, and room.
pub const ADDRESS_COUNT_MAX: usize = 8;
/// Bytes of an address. Source: a DNS name has at most 253, RFC 1035; then a colon and a port.
pub const ADDRESS_BYTES_MAX: usize = 253 + 6;
/// Records that one removal lets count. Chosen by hand: as many as a list has.
pub const KEPT_COUNT_MAX: usize = 3000;

/// The statement of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    /// The node belongs to the cluster.
    Admission {
        /// Name, unique among the nodes unless two nodes admitted it at the same time.
        name: String,
        /// `HOST:PORT` of each.
        addresses: Vec<String>,
        /// The zone that it is in, such as a data center, if it has a label.
        zone: Option<String>,
        /// X.509 in DER.
        certificate: Vec<u8>,
    },
    /// The node belongs to the cluster no longer.
    Removal {
        /// The records that the node had signed as far as the signer of the removal knew, ascending.
        /// Others do not count.
        kept: Vec<Digest>,
    },
}

/// A signed statement about a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The cluster whose list this is.
    pub cluster: ClusterId,
    /// The node that the statement is about.
    pub node: NodeId,
    /// The node that made the statement.
    pub signer: NodeId,
    /// The statement.
    pub statement: Statement,
    /// The signer's signature of [`Record::canonical`].
    pub signature: [u8; SIGNATURE_BYTES],
}

impl Record {
    /// Makes a record signed by `identity`.
    ///
    /// # Errors
    /// Those of [`Identity::sign`].
    pub fn sign(
        identity: &Identity,
        cluster: ClusterId,
        node: NodeId,
        statement: Statement,
    ) -> Result<Record> {
        let signature = [0; SIGNATURE_BYTES];
        let mut record = Record { cluster, node, signer: identity.id(), statement, signature };
        record.signature = identity.sign(&record.canonical())?;
        Ok(record)
    }

    /// Returns the bytes that the signature covers; docs/format-peer.md has their table.
    #[must_use]
    pub fn canonical(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.version().to_le_bytes());
        bytes.push(match self.statement {
            Statement::Admission { .. } => 1,
            Statement::Removal { .. } => 2,
        });
        bytes.push(0);
        bytes.extend_from_slice(self.cluster.0.as_bytes());
        bytes.extend_from_slice(self.signer.0.as_bytes());
        bytes.extend_from_slice(self.node.0.as_bytes());
        match &self.statement {
            Statement::Admission { name, addresses, zone, certificate } => {
                push(&mut bytes, name.as_bytes());
                push_count(&mut bytes, addresses.len());
                for address in addresses {
                    push(&mut bytes, address.as_bytes());
                }
                push(&mut bytes, certificate);
                if let Some(zone) = zone {
                    push(&mut bytes, zone.as_bytes());
                }
            }
            Statement::Removal { kept } => {
                push_count(&mut bytes, kept.len());
                kept.iter().for_each(|digest| bytes.extend_from_slice(digest));
            }
        }
        bytes
    }

    fn version(&self) -> u16 {
        match &self.statement {
            Statement::Admission { zone: Some(_), .. } => VERSION_WITH_ZONE,
            Statement::Admission { zone: None, .. } | Statement::Removal { .. } => VERSION,
        }
    }

    /// Returns the SHA-256 of the canonical bytes, which identifies the record.
    #[must_use]
    pub fn digest(&self) -> Digest {
        sha256(&self.canonical())
    }

    /// Whether every field is within its bounds and the ids agree with the certificate.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        match &self.statement {
            Statement::Admission { name, addresses, zone, certificate } => {
                check_name("node", name).is_ok()
                    && zone.as_ref().is_none_or(|zone| check_name("zone", zone).is_ok())
                    && (1..=ADDRESS_COUNT_MAX).contains(&addresses.len())
                    && addresses.iter().all(|address| is_address(address))
                    && certificate.len() <= CERTIFICATE_BYTES_MAX
                    && NodeId::of(certificate) == self.node
                    && is_usable(certificate)
            }
            Statement::Removal { kept } => {
                kept.len() <= KEPT_COUNT_MAX && kept.is_sorted_by(|a, b| a < b)
            }
        }
    }

    /// Whether this is the record with which a founder begins the list of its cluster.
    #[must_use]
    pub fn is_founding(&self) -> bool {
        let Statement::Admission { certificate, .. } = &self.statement else { return false };
        self.signer == self.node && ClusterId::founded_by(certificate) == self.cluster
    }

    /// Whether the signature is by the key of this certificate.
    #[must_use]
    pub fn is_signed_by(&self, certificate: &[u8]) -> bool {
        verify(certificate, &self.canonical(), &self.signature)
    }
}

fn push_count(bytes: &mut Vec<u8>, count: usize) {
    // The bounds of a record are far below; a larger count would have no valid signature anyway.
    bytes.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn push(bytes: &mut Vec<u8>, part: &[u8]) {
    push_count(bytes, part.len());
    bytes.extend_from_slice(part);
}

/// Whether this is `HOST:PORT`, with an IPv6 address in brackets, and fit for a log line.
#[must_use]
pub fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_host = match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
        }
    };
    let has_port = port.parse::<u16>().is_ok_and(|port| port != 0) && !port.starts_with('+');
    is_host && has_port && text.len() <= ADDRESS_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in ["10.0.0.1:7400", "n1.example:1", "[::1]:65535", "a_b:7"] {
            assert!(is_address(good), "{good}");
        }
        let long = format!("{}:1", "a".repeat(258));
        for bad in ["", ":1", "a", "a:", "a:0", "a:+1", "a:65536", "::1:7", "[x]:1", "a b:1", &long]
        {
            assert!(!is_address(bad), "{bad}");
        }
    }
}
