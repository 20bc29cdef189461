//! The proof that an owner has the key of its pool: a signature (Ed25519, RFC 8032) by a key that is derived from it.
//!
//! Invariants:
//! - A node has no key of a pool. It keeps the public half of the key of whoever came first to a folder, and serves
//!   the folder to that one only.
//! - A proof names both ends of its connection, which TLS has verified, and the epoch, so another node can use it
//!   neither there nor elsewhere.

use crate::messages::{KEY_BYTES, Open, Proof, SIGNATURE_BYTES};
use crate::seeded_bugs::seeded_bugs;
use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use cluster::NodeId;
use std::fmt;
use std::sync::Arc;
use uuid::Uuid;

/// Keeps the signatures apart from all others. Format: docs/format-peer.md, "Service 7: data".
const CONTEXT: &[u8] = b"spindle data node 1";
/// Keeps the key apart from every other one that is derived from the key of a pool.
const PURPOSE: &str = "data node";

/// The key that signs for a pool. Its clones are one key.
#[derive(Clone)]
pub struct PoolSigner(Arc<Ed25519KeyPair>);

impl fmt::Debug for PoolSigner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoolSigner(…)")
    }
}

impl PoolSigner {
    /// Derives the signer of the pool with this key and lineage.
    #[must_use]
    pub fn new(key: &PoolKey, lineage: Uuid) -> PoolSigner {
        let seed = key.derive_secret(lineage.as_bytes(), PURPOSE);
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed[..]);
        PoolSigner(Arc::new(pair.expect("any 32 bytes are a seed")))
    }

    /// Proves the right to open `open`, from one node at another.
    #[must_use]
    pub(crate) fn prove(&self, open: &Open, from: NodeId, to: NodeId) -> Proof {
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(self.0.public_key().as_ref());
        let mut signature = [0; SIGNATURE_BYTES];
        signature.copy_from_slice(self.0.sign(&statement(open, from, to)).as_ref());
        Proof { key, signature }
    }
}

/// Checks that the proof is that of its key, and of an opening by one node at another.
///
/// # Errors
/// `Denied`.
pub(crate) fn check(proof: &Proof, open: &Open, from: NodeId, to: NodeId) -> Result<()> {
    let key = UnparsedPublicKey::new(&ED25519, &proof.key);
    let verified = key.verify(&statement(open, from, to), &proof.signature);
    match verified.is_ok() || seeded_bugs().proof_unchecked {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Denied,
            "the signature of the opening is not that of the key of a pool",
        )),
    }
}

/// The bytes that are signed.
fn statement(open: &Open, from: NodeId, to: NodeId) -> Vec<u8> {
    // How urgent the requests are is no right.
    let Open { version, owner, is_bulk: _, lineage, drive } = open;
    let mut bytes = CONTEXT.to_vec();
    bytes.extend_from_slice(from.0.as_bytes());
    bytes.extend_from_slice(to.0.as_bytes());
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.push(u8::from(owner.is_some()));
    bytes.extend_from_slice(&owner.map_or(0, |epoch| epoch.0).to_le_bytes());
    bytes.extend_from_slice(lineage.as_bytes());
    bytes.extend_from_slice(drive.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::Epoch;
    use block::hex::to_hex;

    fn node(number: u128) -> NodeId {
        NodeId(Uuid::from_u128(number))
    }

    fn open() -> Open {
        let lineage = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
        Open {
            version: 1,
            owner: Some(Epoch(17)),
            is_bulk: false,
            lineage,
            drive: "nvme0".to_owned(),
        }
    }

    #[test]
    fn proof_is_of_its_pool_opening_and_nodes() {
        let signer = PoolSigner::new(&PoolKey::new([7; 32]), open().lineage);
        let proof = signer.prove(&open(), node(1), node(2));
        assert_eq!(proof, signer.prove(&open(), node(1), node(2)), "Ed25519 is deterministic");
        check(&proof, &open(), node(1), node(2)).unwrap();
        let other = PoolSigner::new(&PoolKey::new([8; 32]), open().lineage);
        let forged = Proof { key: proof.key, ..other.prove(&open(), node(1), node(2)) };
        let changed = |change: fn(&mut Open)| {
            let mut changed = open();
            change(&mut changed);
            changed
        };
        let refused = [
            check(&forged, &open(), node(1), node(2)),
            check(&proof, &open(), node(3), node(2)),
            check(&proof, &open(), node(1), node(3)),
            check(&proof, &changed(|open| open.owner = Some(Epoch(18))), node(1), node(2)),
            check(&proof, &changed(|open| open.owner = None), node(1), node(2)),
            check(&proof, &changed(|open| open.lineage = Uuid::nil()), node(1), node(2)),
            check(&proof, &changed(|open| open.drive.clear()), node(1), node(2)),
        ];
        for result in refused {
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Denied);
        }
    }

    #[test]
    fn golden_proof() {
        let signer = PoolSigner::new(&PoolKey::new([7; 32]), open().lineage);
        let Proof { key, signature } = signer.prove(&open(), node(1), node(2));
        let golden = include_str!("../testdata/proof-v1.hex");
        let lines: Vec<&str> = golden.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(lines, [to_hex(&key), to_hex(&signature)]);
    }
}
