//! The list of the nodes of a cluster: a set of signed records that only grows.
//!
//! Invariants:
//! - Every record in the set has a valid signature by a key that the set leads to from the founder.
//! - Merging is a union, so any order of merges gives the same list; [`belief`] then says which
//!   records count.
//! - A node that was removed stays removed; its machine joins again under another identity.
//! - The set is bounded by [`NODE_COUNT_MAX`], [`RECORD_COUNT_MAX`] and [`DOCUMENT_BYTES_MAX`]; a merge
//!   that would pass them is refused as a whole.

mod belief;
mod document;
mod record;
#[cfg(test)]
mod tests;

pub use document::DOCUMENT_BYTES_MAX;
pub use record::{ADDRESS_BYTES_MAX, ADDRESS_COUNT_MAX, Record, Statement, is_address};

use crate::identity::{ClusterId, Digest, Identity, NodeId, sha256};
use crate::seeded_bugs::seeded_bugs;
use block::{Error, ErrorKind, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Admissions that a list holds, those of removed nodes included. Chosen by hand: the list goes to
/// each node as a whole.
pub const NODE_COUNT_MAX: usize = 1000;
/// Records that a list holds. Chosen by hand: two nodes may remove the same one at the same time.
pub const RECORD_COUNT_MAX: usize = 3 * NODE_COUNT_MAX;

/// Why a document or a merge is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The bytes are no document of a list.
    Damaged,
    /// The document is of another version.
    Version {
        /// Version of the document.
        theirs: u32,
        /// Version of this program.
        ours: u32,
    },
    /// The document or the merged list has more than the bounds allow.
    TooLarge,
    /// The document is of another cluster.
    Cluster {
        /// The cluster of the document.
        theirs: ClusterId,
        /// The cluster of this list.
        ours: ClusterId,
    },
    /// The list does not have the record of its founder.
    NoFounder,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Damaged => write!(f, "the list of nodes is damaged"),
            Refusal::Version { theirs, ours } => write!(
                f,
                "the list of nodes has version {theirs}, and this program reads version {ours}: \
                 run the same version of the program on all nodes"
            ),
            Refusal::TooLarge => {
                write!(
                    f,
                    "the list of nodes has more than {NODE_COUNT_MAX} nodes, removed ones included"
                )
            }
            Refusal::Cluster { theirs, ours } => {
                write!(f, "the list of nodes is of cluster {theirs}, and this node is in {ours}")
            }
            Refusal::NoFounder => write!(f, "the list of nodes lacks the founder of its cluster"),
        }
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        let kind = match refusal {
            Refusal::Damaged | Refusal::NoFounder => ErrorKind::Corrupt,
            Refusal::Version { .. } => ErrorKind::Unsupported,
            Refusal::TooLarge => ErrorKind::Full,
            Refusal::Cluster { .. } => ErrorKind::Denied,
        };
        Error::new(kind, refusal.to_string())
    }
}

/// A node that is to be admitted, as it describes itself.
#[derive(Clone, Copy, Debug)]
pub struct NewNode<'a> {
    /// Its name.
    pub name: &'a str,
    /// `HOST:PORT` of each address under which other nodes reach it.
    pub addresses: &'a [String],
    /// The label of its zone, such as a data center; nodes without one count as one zone.
    pub zone: Option<&'a str>,
}

impl<'a> NewNode<'a> {
    /// Describes a node without a zone.
    #[must_use]
    pub fn new(name: &'a str, addresses: &'a [String]) -> NewNode<'a> {
        NewNode { name, addresses, zone: None }
    }
}

/// An admitted node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// `HOST:PORT` of each address, in the order in which they are tried.
    pub addresses: Vec<String>,
    /// The label of its zone.
    pub zone: Option<String>,
    /// Its certificate, X.509 in DER.
    pub certificate: Vec<u8>,
    /// The node that admitted it; itself for the founder.
    pub admitted_by: NodeId,
}

/// A matter that the operator should settle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Two or more nodes have one name, because different nodes admitted them at the same time.
    SameName {
        /// The name.
        name: String,
        /// The nodes, ascending.
        nodes: Vec<NodeId>,
    },
    /// A node was admitted or removed by a node that others had removed already, so the statement
    /// does not count.
    LaterSignature {
        /// The node that the statement is about.
        node: NodeId,
        /// The removed node that signed it.
        signer: NodeId,
        /// Whether it is a removal.
        is_removal: bool,
    },
}

/// The outcome of a merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Records that were new.
    pub added_count: usize,
    /// Records that no chain of valid signatures leads to; they were left out.
    pub refused_count: usize,
}

/// The records of one cluster, and what follows from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmissionList {
    cluster: ClusterId,
    records: BTreeMap<Digest, Record>,
    nodes: BTreeMap<NodeId, Node>,
    removed: BTreeSet<NodeId>,
    conflicts: Vec<Conflict>,
    digest: Digest,
}

impl AdmissionList {
    fn empty(cluster: ClusterId) -> AdmissionList {
        AdmissionList {
            cluster,
            records: BTreeMap::new(),
            nodes: BTreeMap::new(),
            removed: BTreeSet::new(),
            conflicts: Vec::new(),
            digest: [0; 32],
        }
    }

    /// Begins the list of a cluster that `identity` founds.
    ///
    /// # Errors
    /// `Invalid` for addresses or a zone that are not allowed.
    pub fn found(
        identity: &Identity,
        addresses: &[String],
        zone: Option<&str>,
    ) -> Result<AdmissionList> {
        let mut list = AdmissionList::empty(ClusterId::founded_by(identity.certificate()));
        let founder = NewNode { name: identity.name(), addresses, zone };
        list.admit(identity, founder, identity.certificate())?;
        Ok(list)
    }

    /// Decodes a whole list, every record of which must be believed. `cluster` is the one that the
    /// caller expects, if it knows it.
    ///
    /// # Errors
    /// Those of [`Refusal`].
    pub fn decode(bytes: &[u8], cluster: Option<ClusterId>) -> Result<AdmissionList, Refusal> {
        let (theirs, records) = document::decode(bytes)?;
        if let Some(ours) = cluster.filter(|ours| *ours != theirs) {
            return Err(Refusal::Cluster { theirs, ours });
        }
        let mut list = AdmissionList::empty(theirs);
        let merged = list.merge(records)?;
        if merged.refused_count > 0 {
            return Err(Refusal::Damaged);
        }
        match list.records.values().any(Record::is_founding) {
            true => Ok(list),
            false => Err(Refusal::NoFounder),
        }
    }

    /// Encodes the list; docs/format-peer.md describes the document.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        document::encode(self.cluster, self.records.values())
    }

    /// Merges the bytes of another node's list.
    ///
    /// # Errors
    /// Those of [`Refusal`]; the list is then as before.
    pub fn merge_bytes(&mut self, bytes: &[u8]) -> Result<Merged, Refusal> {
        let (theirs, records) = document::decode(bytes)?;
        if theirs != self.cluster {
            return Err(Refusal::Cluster { theirs, ours: self.cluster });
        }
        self.merge(records)
    }

    /// Merges records. Those that no chain of valid signatures leads to are left out.
    ///
    /// # Errors
    /// [`Refusal::TooLarge`]; the list is then as before.
    pub fn merge(&mut self, records: Vec<Record>) -> Result<Merged, Refusal> {
        let mut certificates = BTreeMap::new();
        for record in self.records.values() {
            note_certificate(&mut certificates, record);
        }
        let mut all = self.records.clone();
        let mut todo: Vec<(Digest, Record)> = records
            .into_iter()
            .filter(|record| record.cluster == self.cluster && record.is_well_formed())
            .map(|record| (record.digest(), record))
            .filter(|(digest, record)| self.records.get(digest) != Some(record))
            .collect();
        // A record may precede that of its signer, so the walk repeats while it finds some.
        loop {
            let before = todo.len();
            todo.retain(|(digest, record)| {
                let is_believed = match &record.statement {
                    Statement::Admission { certificate, .. } if record.is_founding() => {
                        record.is_signed_by(certificate)
                    }
                    _ => certificates
                        .get(&record.signer)
                        .is_some_and(|certificate: &Vec<u8>| record.is_signed_by(certificate)),
                };
                if !is_believed && !seeded_bugs().signatures_unchecked {
                    return true;
                }
                note_certificate(&mut certificates, record);
                // Of two valid signatures of one statement, the smaller stays on every node.
                let entry = all.entry(*digest).or_insert_with(|| record.clone());
                entry.signature = entry.signature.min(record.signature);
                false
            });
            if todo.len() == before {
                break;
            }
        }
        let is_admission =
            |record: &&Record| matches!(record.statement, Statement::Admission { .. });
        let admission_count = all.values().filter(is_admission).count();
        if admission_count > NODE_COUNT_MAX || all.len() > RECORD_COUNT_MAX {
            return Err(Refusal::TooLarge);
        }
        // Removals may be long, and the list must fit its own file.
        let added_count = all.len().saturating_sub(self.records.len());
        if added_count > 0
            && document::encode(self.cluster, all.values()).len() > DOCUMENT_BYTES_MAX
        {
            return Err(Refusal::TooLarge);
        }
        self.records = all;
        self.evaluate();
        Ok(Merged { added_count, refused_count: todo.len() })
    }

    /// Computes everything that follows from the records.
    fn evaluate(&mut self) {
        let belief = belief::evaluate(&self.records);
        let removals = belief.removals.iter().map(|digest| self.records[digest].node);
        self.removed = removals.collect();
        self.nodes = BTreeMap::new();
        for digest in &belief.admissions {
            let record = &self.records[digest];
            let Statement::Admission { name, addresses, zone, certificate } = &record.statement
            else {
                continue;
            };
            if self.removed.contains(&record.node) {
                continue;
            }
            // Two admissions of one node: that with the smaller digest, on every node.
            self.nodes.entry(record.node).or_insert_with(|| Node {
                id: record.node,
                name: name.clone(),
                addresses: addresses.clone(),
                zone: zone.clone(),
                certificate: certificate.clone(),
                admitted_by: record.signer,
            });
        }
        self.conflicts = self.find_conflicts(&belief);
        let digests: Vec<u8> = self.records.keys().flatten().copied().collect();
        self.digest = sha256(&digests);
    }

    fn find_conflicts(&self, belief: &belief::Belief) -> Vec<Conflict> {
        let mut by_name: BTreeMap<&str, Vec<NodeId>> = BTreeMap::new();
        for node in self.nodes.values() {
            by_name.entry(&node.name).or_default().push(node.id);
        }
        let shared = by_name.into_iter().filter(|(_, nodes)| nodes.len() > 1);
        let names = shared.map(|(name, nodes)| Conflict::SameName { name: name.to_owned(), nodes });
        let counts = |digest: &Digest| {
            belief.admissions.contains(digest) || belief.removals.contains(digest)
        };
        let later = self.records.iter().filter(|(digest, record)| {
            let is_node = self.nodes.contains_key(&record.node);
            // A node that another signature admits or removes needs no attention.
            let matters = match record.statement {
                Statement::Admission { .. } => !is_node && !self.removed.contains(&record.node),
                Statement::Removal { .. } => is_node,
            };
            matters && !counts(digest)
        });
        let later = later.map(|(_, record)| Conflict::LaterSignature {
            node: record.node,
            signer: record.signer,
            is_removal: matches!(record.statement, Statement::Removal { .. }),
        });
        names.chain(later).collect()
    }

    /// Admits the node with this certificate. A node that is admitted already stays as it is.
    ///
    /// # Errors
    /// `Denied` if this node was removed or the other was; `Busy` if the name is taken; `Invalid`
    /// for a name, address, zone or certificate that is not allowed; `Full`.
    pub fn admit(
        &mut self,
        identity: &Identity,
        new: NewNode<'_>,
        certificate: &[u8],
    ) -> Result<()> {
        let NewNode { name, addresses, zone } = new;
        let node = NodeId::of(certificate);
        if !self.records.is_empty() {
            self.check_signer(identity)?;
        }
        if self.removed.contains(&node) {
            let context = format!(
                "node {node} was removed from the cluster: join again from an empty directory"
            );
            return Err(Error::new(ErrorKind::Denied, context));
        }
        if self.nodes.contains_key(&node) {
            return Ok(());
        }
        if let Some(other) = self.nodes.values().find(|other| other.name == name) {
            let context =
                format!("the name {name} is taken by node {}: choose another name", other.id);
            return Err(Error::new(ErrorKind::Busy, context));
        }
        let statement = Statement::Admission {
            name: name.to_owned(),
            addresses: addresses.to_vec(),
            zone: zone.map(str::to_owned),
            certificate: certificate.to_vec(),
        };
        let record = Record::sign(identity, self.cluster, node, statement)?;
        if !record.is_well_formed() {
            let context = format!(
                "node {name:?} needs a name, 1 to {ADDRESS_COUNT_MAX} addresses HOST:PORT, a zone \
                 that is like a name if it has one, and a certificate of this program"
            );
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        self.add(record)
    }

    /// Removes a node.
    ///
    /// # Errors
    /// `Denied` if this node was removed; `Invalid` for this node itself; `NotFound` for a node that
    /// is not admitted; `Full`.
    pub fn remove(&mut self, identity: &Identity, node: NodeId) -> Result<()> {
        self.check_signer(identity)?;
        if node == identity.id() {
            let context = "a node does not remove itself: run the command on another node";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        if !self.nodes.contains_key(&node) {
            let context = format!("node {node} is not in the cluster");
            return Err(Error::new(ErrorKind::NotFound, context));
        }
        let belief = belief::evaluate(&self.records);
        let signed = self.records.iter().filter(|(digest, record)| {
            record.signer == node
                && (belief.admissions.contains(*digest) || belief.removals.contains(*digest))
        });
        let kept = signed.map(|(digest, _)| *digest).collect();
        let removal = Statement::Removal { kept };
        self.add(Record::sign(identity, self.cluster, node, removal)?)
    }

    fn check_signer(&self, identity: &Identity) -> Result<()> {
        match self.nodes.contains_key(&identity.id()) {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Denied,
                "this node was removed from the cluster: use another node",
            )),
        }
    }

    fn add(&mut self, record: Record) -> Result<()> {
        let merged = self.merge(vec![record])?;
        match merged.added_count {
            1 => Ok(()),
            _ => Err(Error::new(ErrorKind::Corrupt, "this node cannot verify its own signature")),
        }
    }

    /// Returns the cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Returns the admitted nodes.
    #[must_use]
    pub fn nodes(&self) -> &BTreeMap<NodeId, Node> {
        &self.nodes
    }

    /// Returns the removed nodes.
    #[must_use]
    pub fn removed(&self) -> &BTreeSet<NodeId> {
        &self.removed
    }

    /// Returns the names and the ids of the removed nodes.
    #[must_use]
    pub fn removed_names(&self) -> BTreeSet<String> {
        let of_removed = self.records.values().filter(|it| self.removed.contains(&it.node));
        let named = of_removed.filter_map(|record| match &record.statement {
            Statement::Admission { name, .. } => Some(name.clone()),
            Statement::Removal { .. } => None,
        });
        named.chain(self.removed.iter().map(NodeId::to_string)).collect()
    }

    /// Returns the node with exactly this certificate, if it is admitted.
    #[must_use]
    pub fn node_with(&self, certificate: &[u8]) -> Option<&Node> {
        let node = self.nodes.get(&NodeId::of(certificate))?;
        (node.certificate == certificate).then_some(node)
    }

    /// Returns the matters that an operator should settle.
    #[must_use]
    pub fn conflicts(&self) -> &[Conflict] {
        &self.conflicts
    }

    /// Returns the SHA-256 over the digests of all records: two nodes with the same have one list.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}

fn note_certificate(certificates: &mut BTreeMap<NodeId, Vec<u8>>, record: &Record) {
    if let Statement::Admission { certificate, .. } = &record.statement {
        certificates.entry(record.node).or_insert_with(|| certificate.clone());
    }
}
