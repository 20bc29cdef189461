//! The identity of a node: a key pair, its certificate, and the ids that follow from it.
//!
//! Invariants:
//! - `DIR/node/identity.json` is complete or absent, and only its owner can read it.
//! - A node's id is a hash of its certificate, so an id names one certificate for ever. The id of a
//!   cluster is a hash of its founder's, so a list of nodes cannot change its founder.
//! - The private key never leaves this module but into the TLS configuration of this process.

use aws_lc_rs::digest::{SHA256, digest};
use block::durable_file::{sync_parent, write_durably};
use block::hex::{to_hex, vec_from_hex};
use block::quantities::check_name;
use block::{Error, ErrorKind, Result};
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PKCS_ED25519, SigningKey};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use uuid::Uuid;
use zeroize::{Zeroize, Zeroizing};

/// Version of `identity.json`.
const VERSION: u32 = 1;
/// Bytes of the longest certificate. Chosen by hand: one of ours has about 330.
pub const CERTIFICATE_BYTES_MAX: usize = 1024;
/// Bytes of the longest `identity.json`.
const DOCUMENT_BYTES_MAX: u64 = 16 << 10;
/// Bytes of an Ed25519 signature. Source: RFC 8032, section 5.1.6.
pub const SIGNATURE_BYTES: usize = 64;

/// A SHA-256.
pub type Digest = [u8; 32];

/// Returns the SHA-256 of these bytes.
#[must_use]
pub fn sha256(bytes: &[u8]) -> Digest {
    let hash = digest(&SHA256, bytes);
    let mut out = [0; 32];
    out.copy_from_slice(hash.as_ref());
    out
}

fn id_of(purpose: &[u8], bytes: &[u8]) -> Uuid {
    let hash = sha256(&[purpose, bytes].concat());
    let mut id = [0; 16];
    id.copy_from_slice(hash.split_at(16).0);
    uuid::Builder::from_custom_bytes(id).into_uuid()
}

/// Identifies a node of a cluster: a hash of its certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub Uuid);

impl NodeId {
    /// Returns the id of the node that has this certificate.
    #[must_use]
    pub fn of(certificate: &[u8]) -> NodeId {
        NodeId(id_of(b"spindle node\0", certificate))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identifies a cluster: a hash of the certificate of its founder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClusterId(pub Uuid);

impl ClusterId {
    /// Returns the id of the cluster that the node with this certificate founded.
    #[must_use]
    pub fn founded_by(certificate: &[u8]) -> ClusterId {
        ClusterId(id_of(b"spindle cluster\0", certificate))
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The identity of this node.
pub struct Identity {
    id: NodeId,
    name: String,
    certificate: CertificateDer<'static>,
    key: KeyPair,
}

/// Prints no key.
impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("id", &self.id)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The contents of `identity.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    name: String,
    certificate: String,
    /// PKCS #8, in hex.
    key: String,
}

impl Drop for Document {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

/// Returns the directory of the identity and of the list, `DIR/node`.
#[must_use]
pub fn node_dir(dir: &Path) -> PathBuf {
    dir.join("node")
}

fn path_of(dir: &Path) -> PathBuf {
    node_dir(dir).join("identity.json")
}

impl Identity {
    /// Makes an identity in memory.
    ///
    /// # Errors
    /// `Invalid` for a name that is not allowed; `Io` if no key can be made.
    pub fn generate(name: &str) -> Result<Identity> {
        let key = KeyPair::generate_for(&PKCS_ED25519).map_err(|error| failed("make", error))?;
        Identity::with_key(name, key)
    }

    fn with_key(name: &str, key: KeyPair) -> Result<Identity> {
        check_name("node", name).map_err(|why| Error::new(ErrorKind::Invalid, why))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "spindle node");
        let certificate = params.self_signed(&key).map_err(|error| failed("make", error))?;
        let certificate = certificate.der().clone();
        Ok(Identity { id: NodeId::of(&certificate), name: name.to_owned(), certificate, key })
    }

    /// Makes an identity from an Ed25519 seed, so that golden bytes repeat.
    #[cfg(test)]
    pub(crate) fn from_seed(name: &str, seed: [u8; 32]) -> Identity {
        // PKCS #8 version 1 of RFC 8410, section 7.
        let mut der = vec_from_hex("302e020100300506032b657004220420").expect("digits");
        der.extend_from_slice(&seed);
        let der = PrivatePkcs8KeyDer::from(der);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519).expect("a key");
        Identity::with_key(name, key).expect("an identity")
    }

    /// Opens the identity in `dir`, or makes one in memory if there is none. An existing one keeps
    /// its key and gets this name. [`Identity::store`] makes the result durable.
    ///
    /// # Errors
    /// `Invalid` for a name that is not allowed; those of [`Identity::open`].
    pub fn open_or_generate(dir: &Path, name: &str) -> Result<Identity> {
        if !path_of(dir).exists() {
            return Identity::generate(name);
        }
        check_name("node", name).map_err(|why| Error::new(ErrorKind::Invalid, why))?;
        Ok(Identity { name: name.to_owned(), ..Identity::open(dir)? })
    }

    /// Opens the identity in `dir`.
    ///
    /// # Errors
    /// `NotFound` without one; `Denied` if others can read it; `Corrupt` and `Unsupported` for bytes
    /// that this program cannot use; `Io`.
    pub fn open(dir: &Path) -> Result<Identity> {
        let path = path_of(dir);
        let shown = path.display();
        let io = |error: std::io::Error| {
            let kind = match error.kind() {
                std::io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::Io,
            };
            Error::with_source(kind, format!("read identity {shown}"), error)
        };
        let metadata = std::fs::metadata(&path).map_err(io)?;
        if metadata.permissions().mode() & 0o077 != 0 {
            let context = format!("others can read the private key in {shown}: chmod 600 {shown}");
            return Err(Error::new(ErrorKind::Denied, context));
        }
        let corrupt = || Error::new(ErrorKind::Corrupt, format!("identity {shown} is damaged"));
        if metadata.len() > DOCUMENT_BYTES_MAX {
            return Err(corrupt());
        }
        let bytes = Zeroizing::new(std::fs::read(&path).map_err(io)?);
        Identity::decode(&bytes).map_err(|kind| match kind {
            ErrorKind::Unsupported => {
                let context = format!("identity {shown} is of another version of the program");
                Error::new(ErrorKind::Unsupported, context)
            }
            _ => corrupt(),
        })
    }

    /// Decodes the bytes of `identity.json`. The error says nothing about the contents, which are
    /// secret.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`.
    pub fn decode(bytes: &[u8]) -> Result<Identity, ErrorKind> {
        let document: Document = serde_json::from_slice(bytes).map_err(|_| ErrorKind::Corrupt)?;
        if document.version != VERSION {
            return Err(ErrorKind::Unsupported);
        }
        check_name("node", &document.name).map_err(|_| ErrorKind::Corrupt)?;
        let certificate = vec_from_hex(&document.certificate).ok_or(ErrorKind::Corrupt)?;
        let key = Zeroizing::new(vec_from_hex(&document.key).ok_or(ErrorKind::Corrupt)?);
        let der = PrivatePkcs8KeyDer::from(&key[..]);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ED25519)
            .map_err(|_| ErrorKind::Corrupt)?;
        let identity = Identity {
            id: NodeId::of(&certificate),
            name: document.name.clone(),
            certificate: certificate.into(),
            key,
        };
        // A certificate of another key would be noticed only by the peers.
        let proof = identity.sign(b"identity").map_err(|_| ErrorKind::Corrupt)?;
        match verify(&identity.certificate, b"identity", &proof) {
            true => Ok(identity),
            false => Err(ErrorKind::Corrupt),
        }
    }

    /// Makes the directory of an identity, `DIR/node`, if it is absent.
    ///
    /// # Errors
    /// `Io`.
    pub fn make_dir(dir: &Path) -> Result<()> {
        let node = node_dir(dir);
        let make = || -> std::io::Result<()> {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&node)?;
            sync_parent(&node)
        };
        make().map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("make directory {}", node.display()), error)
        })
    }

    /// Writes the identity to `dir`, which is made if it is absent.
    ///
    /// # Errors
    /// `Io`.
    pub fn store(&self, dir: &Path) -> Result<()> {
        Identity::make_dir(dir)?;
        let document = Document {
            version: VERSION,
            name: self.name.clone(),
            certificate: to_hex(&self.certificate),
            key: to_hex(&Zeroizing::new(self.key.serialize_der())),
        };
        let bytes = Zeroizing::new(serde_json::to_vec(&document).expect("it has only texts"));
        write_durably(&path_of(dir), &bytes, 0o600)
    }

    /// Returns the id of this node.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Returns the name of this node.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the certificate of this node.
    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// Returns the private key, for a TLS configuration.
    pub(crate) fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }

    /// Signs a message with the key of this node.
    ///
    /// # Errors
    /// `Io` if the cipher library refuses.
    pub fn sign(&self, message: &[u8]) -> Result<[u8; SIGNATURE_BYTES]> {
        let signature = self.key.sign(message).map_err(|error| failed("sign with", error))?;
        let wrong = |_| Error::new(ErrorKind::Io, "sign with the node's key: odd length");
        signature.try_into().map_err(wrong)
    }
}

fn failed(verb: &str, error: rcgen::Error) -> Error {
    Error::with_source(ErrorKind::Io, format!("{verb} the key of a node"), error)
}

/// Whether `signature` is that of `message` by the key in `certificate`. False too for a certificate
/// that cannot be parsed, or whose key is not Ed25519.
#[must_use]
pub fn verify(certificate: &[u8], message: &[u8], signature: &[u8]) -> bool {
    let der = CertificateDer::from(certificate);
    let Ok(parsed) = webpki::EndEntityCert::try_from(&der) else { return false };
    parsed.verify_signature(webpki::aws_lc_rs::ED25519, message, signature).is_ok()
}

/// Whether these bytes are a certificate with a key whose signatures nodes can verify.
#[must_use]
pub fn is_usable(certificate: &[u8]) -> bool {
    /// AlgorithmIdentifier of id-Ed25519 and the head of the key. Source: RFC 8410, section 4.
    const ED25519_KEY: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    let der = CertificateDer::from(certificate);
    let Ok(parsed) = webpki::EndEntityCert::try_from(&der) else { return false };
    let key = parsed.subject_public_key_info();
    let has_key = key.windows(ED25519_KEY.len()).any(|part| part == ED25519_KEY);
    has_key && certificate.len() <= CERTIFICATE_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reopened_identity_signs_with_the_same_key() {
        let dir = tempfile::tempdir().unwrap();
        let made = Identity::open_or_generate(dir.path(), "n1").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        made.store(dir.path()).unwrap();
        let opened = Identity::open(dir.path()).unwrap();
        assert_eq!((opened.id(), opened.name()), (made.id(), "n1"));
        let signature = opened.sign(b"message").unwrap();
        assert!(verify(made.certificate(), b"message", &signature));
        assert!(!verify(made.certificate(), b"massage", &signature));
        assert!(is_usable(made.certificate()) && !is_usable(b"x"));
        let mode = std::fs::metadata(path_of(dir.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let renamed = Identity::open_or_generate(dir.path(), "n2").unwrap();
        assert_eq!((renamed.id(), renamed.name()), (made.id(), "n2"));
    }

    #[test]
    fn readable_and_damaged_identities_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Identity::open(dir.path()).unwrap_err().kind(), ErrorKind::NotFound);
        Identity::generate("n1").unwrap().store(dir.path()).unwrap();
        let path = path_of(dir.path());
        let good = std::fs::read_to_string(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        assert_eq!(Identity::open(dir.path()).unwrap_err().kind(), ErrorKind::Denied);
        let other = Identity::generate("n1").unwrap();
        let swapped = {
            let mut document: Document = serde_json::from_str(&good).unwrap();
            document.certificate = to_hex(other.certificate());
            serde_json::to_vec(&document).unwrap()
        };
        assert_eq!(Identity::decode(&swapped).unwrap_err(), ErrorKind::Corrupt);
        let newer = good.replace("\"version\":1", "\"version\":2");
        assert_eq!(Identity::decode(newer.as_bytes()).unwrap_err(), ErrorKind::Unsupported);
    }

    #[test]
    fn debug_output_has_no_key() {
        let identity = Identity::from_seed("n1", [0xa7; 32]);
        let shown = format!("{identity:?}");
        assert!(shown.contains("n1") && shown.contains(&identity.id().to_string()), "{shown}");
        assert!(!shown.contains("a7a7") && !shown.contains("167, 167"), "{shown}");
    }
}
