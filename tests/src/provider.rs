//! Three kinds of object store, each as a real server on this machine: S3 (MinIO), Azure (Azurite)
//! and Google (fake-gcs-server).
//!
//! Invariants:
//! - All have an empty bucket or container of the same name, so that their URLs differ in the
//!   scheme only.

use crate::azurite::Azurite;
use crate::gcs::Gcs;
use crate::store::{self, BUCKET, Server};

/// A kind of object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// S3.
    S3,
    /// Azure's blobs.
    Azure,
    /// Google's.
    Gcs,
}

/// Every kind.
pub const KINDS: [Kind; 3] = [Kind::S3, Kind::Azure, Kind::Gcs];

impl Kind {
    /// Returns the reason why no server of this kind can be started here, if any.
    #[must_use]
    pub fn lacks(self) -> Option<&'static str> {
        match self {
            // The tests' own server stands in if MinIO was not built.
            Kind::S3 => None,
            Kind::Azure => Azurite::program()
                .is_none()
                .then_some("Azurite is not installed (tests/run does, where npm is)"),
            Kind::Gcs => Gcs::program()
                .is_none()
                .then_some("fake-gcs-server is not built (tests/run does, where Go is)"),
        }
    }

    /// Returns the scheme of the URLs of such a store.
    #[must_use]
    pub fn scheme(self) -> &'static str {
        match self {
            Kind::S3 => "s3",
            Kind::Azure => "az",
            Kind::Gcs => "gs",
        }
    }
}

/// A running server.
pub enum Provider {
    /// An S3 server.
    S3(Server),
    /// Azurite.
    Azure(Azurite),
    /// fake-gcs-server.
    Gcs(Gcs),
}

impl Provider {
    /// Starts a server with an empty bucket. Ask [`Kind::lacks`] first.
    #[must_use]
    pub fn start(kind: Kind) -> Provider {
        match kind {
            Kind::S3 => Provider::S3(Server::start()),
            Kind::Azure => Provider::Azure(Azurite::start()),
            Kind::Gcs => Provider::Gcs(Gcs::start()),
        }
    }

    /// Returns its kind.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            Provider::S3(_) => Kind::S3,
            Provider::Azure(_) => Kind::Azure,
            Provider::Gcs(_) => Kind::Gcs,
        }
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Provider::S3(server) => server.address(),
            Provider::Azure(azurite) => azurite.address(),
            Provider::Gcs(gcs) => gcs.address(),
        }
    }

    /// Returns the URL of a prefix in its bucket.
    #[must_use]
    pub fn url(&self, prefix: &str) -> String {
        format!("{}://{BUCKET}/{prefix}", self.kind().scheme())
    }

    /// Returns a variable with a credential that the server refuses.
    #[must_use]
    pub fn wrong_credential(&self) -> (&'static str, &'static str) {
        match self {
            Provider::S3(server) if server.checks_signatures() => {
                ("AWS_SECRET_ACCESS_KEY", "d3Jvbmc=")
            }
            Provider::S3(_) => ("AWS_ACCESS_KEY_ID", "d3Jvbmc="),
            Provider::Azure(_) => ("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc="),
            Provider::Gcs(_) => ("GOOGLE_BEARER_TOKEN", "d3Jvbmc="),
        }
    }

    /// Names the variables that carry its address.
    #[must_use]
    pub fn endpoint_variables(&self) -> &'static [&'static str] {
        match self {
            Provider::S3(_) => &["AWS_ENDPOINT_URL", "AWS_ENDPOINT"],
            Provider::Azure(_) => &["AZURE_ENDPOINT"],
            Provider::Gcs(_) => &["GOOGLE_BASE_URL"],
        }
    }

    /// Returns the environment variables that point a client at it, each name with `prefix` in
    /// front.
    #[must_use]
    pub fn environment(&self, prefix: &str) -> Vec<(String, String)> {
        let variables = match self {
            Provider::S3(server) => store::environment(server.address()),
            Provider::Azure(azurite) => azurite.environment(),
            Provider::Gcs(gcs) => gcs.environment(),
        };
        variables.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)).collect()
    }
}

/// Leaves the test unless servers of all kinds can be started.
#[macro_export]
macro_rules! needs_providers {
    () => {
        if let Some(why) = $crate::provider::KINDS.iter().find_map(|kind| kind.lacks()) {
            return $crate::place::skip(why);
        }
    };
}
