//! Certificates and the names in them.
//!
//! Invariants:
//! - A client's names come only from a certificate that was verified against the configured CA.
//! - Only TLS 1.2 and 1.3, with the cipher library that also seals everything else.

use block::{Error, ErrorKind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Whether a listener's connections are encrypted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsMode {
    /// STARTTLS is unknown.
    #[default]
    Off,
    /// The client may choose TLS.
    On,
    /// The client must start TLS before any other option.
    Required,
}

/// TLS files, all in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsOptions {
    /// The server's certificate, followed by its chain.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// CA for the certificates of clients. If set, every TLS client needs a certificate.
    pub client_ca: Option<PathBuf>,
}

/// Reads the files for a server.
///
/// # Errors
/// `Invalid`, naming the file that is missing or wrong.
pub fn acceptor(options: &TlsOptions) -> Result<TlsAcceptor> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(|error| invalid("choose TLS versions", error))?;
    let builder = match &options.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| invalid(reading(path), error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| invalid(reading(path), error))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let key = PrivateKeyDer::from_pem_file(&options.key)
        .map_err(|error| invalid(reading(&options.key), error))?;
    let config = builder
        .with_single_cert(certificates(&options.certificate)?, key)
        .map_err(|error| invalid(reading(&options.certificate), error))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Reads the files for a client: `dir` holds `ca-cert.pem`, and `client-cert.pem` and
/// `client-key.pem` if the server requires a client certificate. Source of the names: the GnuTLS
/// convention of libnbd and qemu.
///
/// # Errors
/// `Invalid`, naming the file that is missing or wrong.
pub fn connector(dir: &Path) -> Result<TlsConnector> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let ca = dir.join("ca-cert.pem");
    let mut roots = RootCertStore::empty();
    for certificate in certificates(&ca)? {
        roots.add(certificate).map_err(|error| invalid(reading(&ca), error))?;
    }
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(|error| invalid("choose TLS versions", error))?
        .with_root_certificates(roots);
    let (certificate, key) = (dir.join("client-cert.pem"), dir.join("client-key.pem"));
    if !certificate.exists() {
        return Ok(TlsConnector::from(Arc::new(builder.with_no_client_auth())));
    }
    let secret =
        PrivateKeyDer::from_pem_file(&key).map_err(|error| invalid(reading(&key), error))?;
    let config = builder
        .with_client_auth_cert(certificates(&certificate)?, secret)
        .map_err(|error| invalid(reading(&certificate), error))?;
    Ok(TlsConnector::from(Arc::new(config)))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let certificates: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| invalid(reading(path), error))?;
    if certificates.is_empty() {
        let context = format!("{}: there is no certificate in it", reading(path));
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    Ok(certificates)
}

fn reading(path: &Path) -> String {
    format!("read TLS file {}", path.display())
}

fn invalid(
    context: impl Into<String>,
    source: impl std::error::Error + Send + Sync + 'static,
) -> Error {
    Error::with_source(ErrorKind::Invalid, context, source)
}

/// Returns the names in a certificate that the caller has verified: DNS names, then the common
/// name.
#[must_use]
pub fn certificate_names(der: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(der) else { return Vec::new() };
    let mut names: Vec<String> = certificate.valid_dns_names().map(str::to_owned).collect();
    if let Some(name) = common_name(certificate.subject())
        && !names.contains(&name)
    {
        names.push(name);
    }
    names
}

/// Returns the first common name of a subject. `subject` is the contents of an X.501 Name, a
/// sequence of sets of (object identifier, string).
fn common_name(subject: &[u8]) -> Option<String> {
    /// id-at-commonName, 2.5.4.3. Source: RFC 5280 appendix A.1.
    const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
    const SEQUENCE: u8 = 0x30;
    let mut names = Der(subject);
    // Some versions of the parser return the sequence itself rather than its contents.
    if subject.first() == Some(&SEQUENCE) {
        names = Der(names.next()?.1);
    }
    for (_, set) in names {
        for (_, attribute) in Der(set) {
            let mut fields = Der(attribute);
            if let (Some((_, COMMON_NAME)), Some((_, value))) = (fields.next(), fields.next()) {
                return String::from_utf8(value.to_vec()).ok();
            }
        }
    }
    None
}

/// Iterates over the elements (tag, contents) of DER; anything malformed ends the iteration.
struct Der<'a>(&'a [u8]);

impl<'a> Iterator for Der<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (&[tag, first], mut rest) = self.0.split_first_chunk::<2>()?;
        let mut length = usize::from(first);
        if first & 0x80 != 0 {
            let (digits, tail) = rest.split_at_checked(usize::from(first & 0x7f))?;
            if digits.len() > 4 {
                return None;
            }
            length = digits.iter().fold(0, |sum, digit| (sum << 8) | usize::from(*digit));
            rest = tail;
        }
        let (contents, tail) = rest.split_at_checked(length)?;
        self.0 = tail;
        Some((tag, contents))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_come_from_the_certificate() {
        let mut params = rcgen::CertificateParams::new(vec!["db1.example".to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "Example");
        params.distinguished_name.push(rcgen::DnType::CommonName, "db1");
        let certificate = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        assert_eq!(certificate_names(certificate.der()), ["db1.example", "db1"]);
    }

    #[test]
    fn a_missing_file_is_named() {
        let path = PathBuf::from("/nonexistent/server.pem");
        let options = TlsOptions { certificate: path.clone(), key: path, client_ca: None };
        let error = acceptor(&options).err().unwrap();
        assert!(error.chain().contains("/nonexistent/server.pem"), "{}", error.chain());
    }

    proptest! {
        #[test]
        fn no_subject_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = common_name(&bytes);
        }
    }
}
