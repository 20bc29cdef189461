//! The list as a document: `DIR/node/cluster.json`, and the same bytes between nodes.
//!
//! Invariants:
//! - A list has one form: records in the order of their digests, without blanks.
//! - Decoding checks form and bounds only; [`super::AdmissionList`] checks signatures.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

use super::record::{Record, Statement};
use super::{RECORD_COUNT_MAX, Refusal};
use crate::identity::{ClusterId, Digest, NodeId};
use block::hex::{from_hex, to_hex, vec_from_hex};
use serde::{Deserialize, Serialize};

/// Version of a document without zones.
const VERSION: u32 = 1;
/// Version of a document with the zone of a node.
const VERSION_WITH_ZONES: u32 = 2;
/// Bytes of the longest document. Chosen by hand: 1,000 admissions have 4.5 MiB if every field is as
/// long as it may be, and a removal keeps few records.
pub const DOCUMENT_BYTES_MAX: usize = 8 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    cluster: ClusterId,
    records: Vec<Row>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum Row {
    Admission {
        id: NodeId,
        name: String,
        addresses: Vec<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        zone: Option<String>,
        certificate: String,
        admitted_by: NodeId,
        signature: String,
    },
    Removal {
        id: NodeId,
        kept: Vec<String>,
        removed_by: NodeId,
        signature: String,
    },
}

/// Encodes the records of a cluster, which come in the order of their digests.
pub fn encode<'a>(cluster: ClusterId, records: impl Iterator<Item = &'a Record>) -> Vec<u8> {
    let row = |record: &Record| match &record.statement {
        Statement::Admission { name, addresses, zone, certificate } => Row::Admission {
            id: record.node,
            name: name.clone(),
            addresses: addresses.clone(),
            zone: zone.clone(),
            certificate: to_hex(certificate),
            admitted_by: record.signer,
            signature: to_hex(&record.signature),
        },
        Statement::Removal { kept } => Row::Removal {
            id: record.node,
            kept: kept.iter().map(|digest| to_hex(digest)).collect(),
            removed_by: record.signer,
            signature: to_hex(&record.signature),
        },
    };
    let records: Vec<Row> = records.map(row).collect();
    let document = Document { version: version_of(&records), cluster, records };
    serde_json::to_vec(&document).expect("it has only texts")
}

fn version_of(records: &[Row]) -> u32 {
    let has_zone = |row: &Row| matches!(row, Row::Admission { zone: Some(_), .. });
    if records.iter().any(has_zone) { VERSION_WITH_ZONES } else { VERSION }
}

/// Decodes a document.
///
/// # Errors
/// [`Refusal::Damaged`], [`Refusal::Version`], [`Refusal::TooLarge`].
pub fn decode(bytes: &[u8]) -> Result<(ClusterId, Vec<Record>), Refusal> {
    #[derive(Deserialize)]
    struct OfAnyVersion {
        version: u32,
    }
    if bytes.len() > DOCUMENT_BYTES_MAX {
        return Err(Refusal::TooLarge);
    }
    let any: OfAnyVersion = serde_json::from_slice(bytes).map_err(|_| Refusal::Damaged)?;
    if ![VERSION, VERSION_WITH_ZONES].contains(&any.version) {
        return Err(Refusal::Version { theirs: any.version, ours: VERSION_WITH_ZONES });
    }
    let document: Document = serde_json::from_slice(bytes).map_err(|_| Refusal::Damaged)?;
    if document.records.len() > RECORD_COUNT_MAX {
        return Err(Refusal::TooLarge);
    }
    if document.version != version_of(&document.records) {
        return Err(Refusal::Damaged);
    }
    let cluster = document.cluster;
    let records = document.records.into_iter().map(|row| record_of(cluster, row));
    let records: Option<Vec<Record>> = records.collect();
    Ok((cluster, records.ok_or(Refusal::Damaged)?))
}

fn record_of(cluster: ClusterId, row: Row) -> Option<Record> {
    let (node, signer, signature, statement) = match row {
        Row::Admission { id, name, addresses, zone, certificate, admitted_by, signature } => {
            let certificate = vec_from_hex(&certificate)?;
            let statement = Statement::Admission { name, addresses, zone, certificate };
            (id, admitted_by, signature, statement)
        }
        Row::Removal { id, kept, removed_by, signature } => {
            let kept: Option<Vec<Digest>> = kept.iter().map(|digest| from_hex(digest)).collect();
            (id, removed_by, signature, Statement::Removal { kept: kept? })
        }
    };
    let record = Record { cluster, node, signer, statement, signature: from_hex(&signature)? };
    record.is_well_formed().then_some(record)
}
