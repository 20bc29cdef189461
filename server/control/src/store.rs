//! Owns the connection to the object store of a pool: the store, its credentials and timeouts, and the proof that it
//! keeps the promises on which the pool relies.
//!
//! Invariants:
//! - Everything below is relative to the pool's prefix; nothing outside it is touched.
//! - There are two clients: `bulk` for segments and metadata, and `control` with short timeouts for ownership, because
//!   an owner that cannot soon learn whether it still owns the pool must say so.
//! - A store is used only after [`Store::probe`] has shown that it refuses to create an object twice. One that ignores
//!   the condition would let two owners win.
//! - Credentials come from the environment and the machine's identity, never from the URL.

use async_recursion::async_recursion;
use block::{Error, ErrorKind, Result};
use futures::TryStreamExt;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::{HttpError, HttpErrorKind};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ClientConfigKey, ObjectMeta, ObjectStore, RetryConfig};
use proxy::{no_proxy, proxy_of};
use std::collections::BTreeSet;
use std::error::Error as StdError;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tiering::listing;
use tiering::{Answer, one_line};

/// Timeouts and retries of a store, per request unless said otherwise.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Longest time of a bulk request, body included.
    pub bulk_timeout: Duration,
    /// Retries of a bulk request before the caller gets the error.
    pub bulk_retry_count_max: usize,
    /// Time after which no retry of a bulk request starts.
    pub bulk_retry_timeout: Duration,
    /// Longest time of an ownership request.
    pub control_timeout: Duration,
    /// Retries of an ownership request.
    pub control_retry_count_max: usize,
    /// Time after which no retry of an ownership request starts.
    pub control_retry_timeout: Duration,
    /// Longest time to make a connection, for both clients.
    pub connect_timeout: Duration,
}

impl Default for StoreOptions {
    /// Chosen by hand: a 32 MiB segment passes at 5 Mbit/s; an owner knows within half a minute.
    fn default() -> Self {
        StoreOptions {
            bulk_timeout: Duration::from_secs(60),
            bulk_retry_count_max: 4,
            bulk_retry_timeout: Duration::from_secs(120),
            control_timeout: Duration::from_secs(5),
            control_retry_count_max: 2,
            control_retry_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(3),
        }
    }
}

/// Longest wait for the names of the folders of a pool: a dozen, in one page.
const FOLDERS_TIME_MAX: Duration = Duration::from_secs(30);

/// The object store of one pool, narrowed to the pool's prefix. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    url: String,
    bulk: Arc<dyn ObjectStore>,
    control: Arc<dyn ObjectStore>,
    local_dir: Option<PathBuf>,
    /// The proxy that requests go through, for display.
    proxy: Option<String>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.url)
    }
}

impl Store {
    /// Opens `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///path` or a plain local
    /// directory, which is created. No request is sent to a remote store.
    ///
    /// # Errors
    /// `Invalid` for a URL that names no store, or an endpoint without TLS that is not on this machine; `Io` if a local
    /// directory cannot be created.
    pub fn open(url: &str, options: &StoreOptions) -> Result<Store> {
        Store::open_as(url, options, None)
    }

    /// Like [`Store::open`], with the settings of variables that begin with `env_prefix` in place of the usual ones:
    /// with `DR_`, `DR_AWS_ACCESS_KEY_ID` and so on.
    ///
    /// # Errors
    /// Those of [`Store::open`]; `Invalid` for a variable that the store's client does not accept.
    pub fn open_as(url: &str, options: &StoreOptions, env_prefix: Option<&str>) -> Result<Store> {
        let location = Location::parse(url)?;
        let settings = settings_of(env_prefix);
        let variables = settings.clone().unwrap_or_else(|| variables_with(""));
        settings::check(&location, &variables, env_prefix.unwrap_or_default())?;
        if let Location::Directory(dir) = &location {
            let objects = open_directory(dir)?;
            return Ok(Store {
                url: url.to_owned(),
                bulk: Arc::clone(&objects),
                control: objects,
                local_dir: Some(dir.clone()),
                proxy: None,
            });
        }
        location.tell_of_encoding(url);
        Ok(Store {
            url: url.to_owned(),
            bulk: open_remote(&location, &Patience::bulk(options), settings.as_deref())?,
            control: open_remote(&location, &Patience::control(options), settings.as_deref())?,
            local_dir: None,
            proxy: proxy_of(&location, settings.as_deref()),
        })
    }

    /// Like [`Store::open_as`], for a store that exists but may be away: its directory is not created. Requests to an
    /// absent directory fail, and succeed once it is there.
    ///
    /// # Errors
    /// Those of [`Store::open_as`].
    pub fn await_as(url: &str, options: &StoreOptions, env_prefix: Option<&str>) -> Result<Store> {
        let Some(dir) = Store::dir_of(url)? else {
            return Store::open_as(url, options, env_prefix);
        };
        let objects: Arc<dyn ObjectStore> = Arc::new(awaited::AwaitedDirectory::new(dir.clone()));
        let (bulk, control) = (Arc::clone(&objects), objects);
        Ok(Store { url: url.to_owned(), bulk, control, local_dir: Some(dir), proxy: None })
    }

    /// The directory of a store in a directory, otherwise `None`.
    ///
    /// # Errors
    /// `Invalid` for a URL that names no store.
    pub fn dir_of(url: &str) -> Result<Option<PathBuf>> {
        match Location::parse(url)? {
            Location::Directory(dir) => Ok(Some(dir)),
            _ => Ok(None),
        }
    }

    /// Wraps an existing store: the memory store of tests, or one with injected faults.
    #[must_use]
    pub fn from_objects(url: &str, objects: Arc<dyn ObjectStore>) -> Store {
        let (bulk, control) = (Arc::clone(&objects), objects);
        Store { url: url.to_owned(), bulk, control, local_dir: None, proxy: None }
    }

    /// Replaces the objects, except for ownership and keys.
    #[must_use]
    pub fn with_bulk(self, bulk: Arc<dyn ObjectStore>) -> Store {
        Store { bulk, ..self }
    }

    /// The URL as the user wrote it; it never holds credentials.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The client for segments and metadata, which retries for a while.
    #[must_use]
    pub fn bulk(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.bulk)
    }

    /// The client for ownership and keys, which answers or fails soon.
    #[must_use]
    pub fn control(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.control)
    }

    /// Removes the leftovers of interrupted puts from a directory; they are neither listed nor read. The pool's owner
    /// must call this before its own first put. Blocks.
    pub fn clean_unfinished(&self, folder: &str) {
        if let Some(dir) = &self.local_dir {
            direct::clean_unfinished(&dir.join(folder));
        }
    }

    /// The directory, if the store is one on this machine.
    #[must_use]
    pub fn local_dir(&self) -> Option<&Path> {
        self.local_dir.as_deref()
    }

    /// Folders of the pool's prefix. Some may be empty if the store is a directory. The set is empty if the store does
    /// not answer.
    pub(crate) async fn folders(&self) -> BTreeSet<String> {
        let listed = tokio::time::timeout(FOLDERS_TIME_MAX, self.control.list_with_delimiter(None));
        let Ok(Ok(listed)) = listed.await else { return BTreeSet::new() };
        let names = listed.common_prefixes.iter().filter_map(ObjectPath::filename);
        names.map(str::to_owned).collect()
    }

    /// Finds an object below one of these folders, and returns it with the folder. `None` once several listings agree.
    ///
    /// # Errors
    /// Those of listing.
    #[async_recursion]
    pub async fn first_below<'a>(
        &self,
        parts: &[&'a str],
    ) -> Result<Option<(&'a str, ObjectMeta)>> {
        let look_count = if self.local_dir.is_some() { 1 } else { listing::EMPTY_LOOK_COUNT };
        for look in 0..look_count {
            listing::pause_before(look).await;
            for part in parts {
                let prefix = ObjectPath::from(*part);
                let mut listed = listing::list(&self.control, Some(&prefix))
                    .try_filter(|found| std::future::ready(!is_folder_marker(found)));
                let found = listed.try_next().await;
                let found = found.map_err(|error| self.explain(&format!("list {part}"), error))?;
                if let Some(found) = found {
                    return Ok(Some((*part, found)));
                }
            }
        }
        Ok(None)
    }

    fn refuse(&self, reason: &str) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "store {}: {reason}. A pool's ownership depends on conditional creates \
                 (If-None-Match: *) and consistent listings; two owners could both win. Update \
                 the store's software, switch conditional writes on, or use another store",
                self.url
            ),
        )
    }

    /// Adds to an error the store's name, the failed operation, and the action that a person can take.
    pub fn explain(&self, doing: &str, error: object_store::Error) -> Error {
        let url = &self.url;
        let reason = Reason::of(&error);
        let mut context = match reason {
            Reason::Said(answer) => format!("store {url}: {doing}: {}", answer.advice()),
            Reason::Denied => format!(
                "store {url}: {doing}: access denied. Check the credentials and that they allow \
                 get, put, delete and list below this prefix"
            ),
            Reason::NoCredentials => {
                format!("store {url}: {doing}: no usable credentials. {}", credential_hint(url))
            }
            Reason::NotFound if self.local_dir.is_none() => format!(
                "store {url}: {doing}: not found. Does the bucket or container exist, and is the \
                 region right? spindle does not create buckets"
            ),
            Reason::NotFound => format!("store {url}: {doing}: not found"),
            Reason::Unsupported => return self.refuse(&format!("{doing}: not implemented")),
            Reason::Unreachable => format!(
                "store {url}: {doing}: no answer from the endpoint. Check its address \
                 (AWS_ENDPOINT_URL and the like), the network, and that the store is up"
            ),
            Reason::Exists | Reason::Other => format!("store {url}: {doing}"),
        };
        if let Some(proxy) = self.proxy.as_ref().filter(|_| reason != Reason::Exists) {
            context += &format!(
                ". Requests go through the proxy {proxy}; to reach the store without it, name its \
                 host in NO_PROXY"
            );
        }
        Error::with_source(reason.kind(), context, Cause(error))
    }
}

/// Reason of a failed request, as far as the caller's next step depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The store refused access.
    Denied,
    /// No credentials were found for the store.
    NoCredentials,
    /// The object or bucket does not exist.
    NotFound,
    /// The object exists, and the request was to create it.
    Exists,
    /// The store does not support the request.
    Unsupported,
    /// The store was not reached, or did not answer.
    Unreachable,
    /// The store has named the cause.
    Said(Answer),
    /// Any other failure.
    Other,
}

impl Reason {
    /// Classifies an error of a request.
    pub fn of(error: &object_store::Error) -> Reason {
        match error {
            // Each other kind of error has a meaning on which the caller acts.
            object_store::Error::Generic { .. }
            | object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. }
                if let Some(answer) = Answer::find(&error.to_string()) =>
            {
                Reason::Said(answer)
            }
            object_store::Error::NotFound { .. } => Reason::NotFound,
            object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. } => Reason::Exists,
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => Reason::Denied,
            object_store::Error::NotSupported { .. }
            | object_store::Error::NotImplemented { .. } => Reason::Unsupported,
            other => Reason::of_cause(other),
        }
    }

    /// Looks through the chain of a generic error.
    fn of_cause(error: &object_store::Error) -> Reason {
        let text = error.to_string();
        // The token endpoints of the machine identities of the three clouds.
        if text.contains("169.254.169.254") || text.contains("metadata.google.internal") {
            return Reason::NoCredentials;
        }
        // The client has no kind of error for these: refused listings, and the answers of stores that do not know
        // conditional puts.
        let said = |status: u16| text.contains(&format!("status code: {status} "));
        if said(401) || said(403) {
            return Reason::Denied;
        }
        if said(404) {
            return Reason::NotFound;
        }
        if said(501) {
            return Reason::Unsupported;
        }
        let mut cause: Option<&(dyn StdError + 'static)> = error.source();
        while let Some(source) = cause {
            if let Some(http) = source.downcast_ref::<HttpError>() {
                return match http.kind() {
                    HttpErrorKind::Connect
                    | HttpErrorKind::Timeout
                    | HttpErrorKind::Interrupted => Reason::Unreachable,
                    _ => Reason::Other,
                };
            }
            if let Some(io) = source.downcast_ref::<std::io::Error>()
                && io.kind() == std::io::ErrorKind::PermissionDenied
            {
                return Reason::Denied;
            }
            cause = source.source();
        }
        Reason::Other
    }

    fn kind(self) -> ErrorKind {
        match self {
            Reason::Denied | Reason::NoCredentials | Reason::Said(_) => ErrorKind::Denied,
            Reason::NotFound => ErrorKind::NotFound,
            Reason::Exists => ErrorKind::Busy,
            Reason::Unsupported => ErrorKind::Unsupported,
            Reason::Unreachable | Reason::Other => ErrorKind::Unavailable,
        }
    }
}

/// Keeps the cause. `object_store` includes its causes in its own text, so this ends the chain.
struct Cause(object_store::Error);

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&one_line(&self.0.to_string()))
    }
}

impl StdError for Cause {}

fn credential_hint(url: &str) -> &'static str {
    match url.split_once("://").map(|(scheme, _)| scheme) {
        Some("gs") => {
            "Set GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, or run on a machine \
             with a service account"
        }
        Some("az") => {
            "Set AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or a SAS token, or run \
             on a machine with an identity"
        }
        _ => "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run on a machine with a role",
    }
}

/// The place that a URL names.
#[derive(Debug, PartialEq, Eq)]
enum Location {
    Directory(PathBuf),
    S3 { bucket: String, prefix: String },
    Gcs { bucket: String, prefix: String },
    Azure { container: String, prefix: String },
}

impl Location {
    fn parse(url: &str) -> Result<Location> {
        let invalid = |why: &str| {
            Error::new(
                ErrorKind::Invalid,
                format!(
                    "store {url:?}: {why}. Write s3://bucket/prefix, gs://bucket/prefix, \
                     az://container/prefix, file:///path, or a local directory"
                ),
            )
        };
        let Some((scheme, rest)) = url.split_once("://") else {
            if url.is_empty() {
                return Err(invalid("it is empty"));
            }
            return Ok(Location::Directory(PathBuf::from(url)));
        };
        if scheme == "file" {
            if !rest.starts_with('/') {
                return Err(invalid("a file URL has three slashes and an absolute path"));
            }
            return Ok(Location::Directory(PathBuf::from(rest)));
        }
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(invalid("it names no bucket"));
        }
        // The client panics if a bucket's name makes no address.
        let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-._$@:?".contains(&byte);
        if !bucket.bytes().all(is_letter) {
            return Err(invalid(
                "the name of a bucket has ASCII letters, digits, - . _ and $ only",
            ));
        }
        if bucket.contains(['@', ':', '?']) || prefix.contains(['?', '#']) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "store URL: credentials and parameters do not belong in it; use the environment",
            ));
        }
        let prefix = prefix.trim_matches('/').to_owned();
        ObjectPath::parse(&prefix).map_err(|_| invalid("the prefix is not a plain path"))?;
        let bucket = bucket.to_owned();
        match scheme {
            "s3" => Ok(Location::S3 { bucket, prefix }),
            "gs" => Ok(Location::Gcs { bucket, prefix }),
            "az" => Ok(Location::Azure { container: bucket, prefix }),
            _ => Err(invalid("the scheme is not known")),
        }
    }
}

impl Location {
    /// The scheme and the path below it. The path of a directory is its real path, even if only a part of it exists
    /// yet.
    fn parts(self) -> (&'static str, PathBuf) {
        match self {
            Location::Directory(dir) => ("file", real(&dir)),
            Location::S3 { bucket, prefix } => ("s3", PathBuf::from(bucket).join(prefix)),
            Location::Gcs { bucket, prefix } => ("gs", PathBuf::from(bucket).join(prefix)),
            Location::Azure { container, prefix } => ("az", PathBuf::from(container).join(prefix)),
        }
    }
}

fn real(dir: &Path) -> PathBuf {
    let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let of = |there: &Path| {
        Some(there.canonicalize().ok()?.join(dir.strip_prefix(there).expect("it is an ancestor")))
    };
    dir.ancestors().find_map(of).unwrap_or_else(|| dir.clone())
}

/// Tells whether a URL names the same place as another one, or a place within it, however they are spelled. Blocks if
/// both are directories, until their file systems answer.
pub fn is_within(url: &str, outer: &str) -> bool {
    match (Location::parse(url), Location::parse(outer)) {
        // Directories are resolved only if both are directories.
        (Ok(Location::Directory(_)), Ok(outer)) if !matches!(outer, Location::Directory(_)) => {
            false
        }
        (Ok(url), Ok(Location::Directory(_))) if !matches!(url, Location::Directory(_)) => false,
        (Ok(url), Ok(outer)) => {
            let ((scheme, path), (outer_scheme, outer_path)) = (url.parts(), outer.parts());
            scheme == outer_scheme && path.starts_with(outer_path)
        }
        _ => false,
    }
}

/// The URL of a folder below the place of a URL.
pub fn below(url: &str, folder: &str) -> String {
    format!("{}/{folder}", url.trim_end_matches('/'))
}

/// Checks that a URL names a store. Nothing is opened.
///
/// # Errors
/// `Invalid`, as for [`Store::open`].
pub fn check_url(url: &str) -> Result<()> {
    Location::parse(url).map(drop)
}

/// Retry and timeout settings of one client.
struct Patience {
    timeout: Duration,
    connect_timeout: Duration,
    retry: RetryConfig,
}

impl Patience {
    fn bulk(options: &StoreOptions) -> Patience {
        Patience {
            timeout: options.bulk_timeout,
            connect_timeout: options.connect_timeout,
            retry: retry(options.bulk_retry_count_max, options.bulk_retry_timeout),
        }
    }

    fn control(options: &StoreOptions) -> Patience {
        Patience {
            timeout: options.control_timeout,
            connect_timeout: options.connect_timeout,
            retry: retry(options.control_retry_count_max, options.control_retry_timeout),
        }
    }

    /// The two timeouts in the form of the builders.
    fn settings(&self) -> [(ClientConfigKey, String); 2] {
        [
            (ClientConfigKey::Timeout, format!("{}ms", self.timeout.as_millis())),
            (ClientConfigKey::ConnectTimeout, format!("{}ms", self.connect_timeout.as_millis())),
        ]
    }
}

fn retry(max_retries: usize, retry_timeout: Duration) -> RetryConfig {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(100), ..BackoffConfig::default() };
    RetryConfig { backoff, max_retries, retry_timeout }
}

fn open_directory(dir: &Path) -> Result<Arc<dyn ObjectStore>> {
    let failed = |error| {
        Error::with_source(ErrorKind::Io, format!("store directory {}", dir.display()), error)
    };
    std::fs::create_dir_all(dir).map_err(failed)?;
    open_existing_directory(dir)
}

/// Like [`open_directory`], for one that exists.
fn open_existing_directory(dir: &Path) -> Result<Arc<dyn ObjectStore>> {
    let local = LocalFileSystem::new_with_prefix(dir)
        .map_err(|error| {
            Error::with_source(
                ErrorKind::Io,
                format!("store directory {}", dir.display()),
                Cause(error),
            )
        })?
        .with_fsync(true);
    Ok(Arc::new(direct::DirectFiles::new(dir.to_owned(), local)))
}

/// The variables of the environment whose names begin with `prefix`, without the prefix; `None` stands for the usual
/// ones.
fn settings_of(prefix: Option<&str>) -> Option<Vec<(String, String)>> {
    prefix.map(variables_with)
}

/// The variables of the environment whose names begin with `prefix`, without the prefix.
fn variables_with(prefix: &str) -> Vec<(String, String)> {
    let with_prefix = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        let name = name.to_str()?.strip_prefix(prefix)?.to_owned();
        Some((name, value.to_str()?.to_owned()))
    };
    std::env::vars_os().filter_map(with_prefix).collect()
}

/// The value of one of these variables, or of a usual one if `settings` is `None`.
fn variable(settings: Option<&[(String, String)]>, name: &str) -> Option<String> {
    match settings {
        None => std::env::var(name).ok(),
        Some(all) => all.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()),
    }
}

/// Applies the variables of this store's client and ignores the others.
fn set_all<B, K: std::str::FromStr>(
    builder: B,
    settings: &[(String, String)],
    family: &str,
    set: impl Fn(B, K, &str) -> B,
) -> B {
    let its = settings.iter().filter(|(name, _)| name.starts_with(family));
    its.fold(builder, |builder, (name, value)| match name.to_ascii_lowercase().parse() {
        Ok(key) => set(builder, key, value),
        Err(_) => {
            tracing::warn!(name, "the store's client does not know this variable");
            builder
        }
    })
}

fn s3_builder(settings: Option<&[(String, String)]>) -> AmazonS3Builder {
    let Some(settings) = settings else { return AmazonS3Builder::from_env() };
    set_all(AmazonS3Builder::new(), settings, "AWS_", |builder, key, value| {
        builder.with_config(key, value)
    })
}

fn gcs_builder(settings: Option<&[(String, String)]>) -> GoogleCloudStorageBuilder {
    let Some(settings) = settings else { return GoogleCloudStorageBuilder::from_env() };
    set_all(GoogleCloudStorageBuilder::new(), settings, "GOOGLE_", |builder, key, value| {
        builder.with_config(key, value)
    })
}

fn azure_builder(settings: Option<&[(String, String)]>) -> MicrosoftAzureBuilder {
    let Some(settings) = settings else { return MicrosoftAzureBuilder::from_env() };
    set_all(MicrosoftAzureBuilder::new(), settings, "AZURE_", |builder, key, value| {
        builder.with_config(key, value)
    })
}

fn open_remote(
    location: &Location,
    patience: &Patience,
    settings: Option<&[(String, String)]>,
) -> Result<Arc<dyn ObjectStore>> {
    match location {
        Location::Directory(dir) => open_directory(dir),
        Location::S3 { bucket, prefix } => {
            open_s3(s3_builder(settings).with_bucket_name(bucket), prefix, patience)
        }
        Location::Gcs { bucket, prefix } => {
            let mut builder = gcs_builder(settings).with_bucket_name(bucket);
            let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
            // This client accepts plain HTTP by default, so its setting does not tell what the operator allows. The
            // metadata server of Google's machines has no TLS, and its own client.
            let allowed = variable(settings, "GOOGLE_ALLOW_HTTP");
            let is_plain = plain_http(endpoint.as_deref(), allowed.as_deref())?
                || allowed.as_deref().is_some_and(is_yes);
            let allow_http = GoogleConfigKey::Client(ClientConfigKey::AllowHttp);
            builder = builder.with_config(allow_http, is_plain.to_string());
            let own = builder.get_config_value(&GoogleConfigKey::Client(ClientConfigKey::ProxyUrl));
            for (key, value) in patience.settings().into_iter().chain(no_proxy(own.as_deref())) {
                builder = builder.with_config(GoogleConfigKey::Client(key), value);
            }
            narrow(builder.with_retry(patience.retry.clone()).build(), prefix)
        }
        Location::Azure { container, prefix } => {
            let mut builder = azure_builder(settings).with_container_name(container);
            let value = |key| builder.get_config_value(&key);
            let is_emulator = value(AzureConfigKey::UseEmulator).as_deref().is_some_and(is_yes);
            if !is_emulator && value(AzureConfigKey::AccountName).is_none() {
                let hint = credential_hint("az://");
                let what = format!("store az://{container}: no account is named. {hint}");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let endpoint = value(AzureConfigKey::Endpoint);
            let allow_http = AzureConfigKey::Client(ClientConfigKey::AllowHttp);
            if plain_http(endpoint.as_deref(), builder.get_config_value(&allow_http).as_deref())? {
                builder = builder.with_allow_http(true);
            }
            let own = builder.get_config_value(&AzureConfigKey::Client(ClientConfigKey::ProxyUrl));
            for (key, value) in patience.settings().into_iter().chain(no_proxy(own.as_deref())) {
                builder = builder.with_config(AzureConfigKey::Client(key), value);
            }
            narrow(builder.with_retry(patience.retry.clone()).build(), prefix)
        }
    }
}

fn open_s3(
    mut builder: AmazonS3Builder,
    prefix: &str,
    patience: &Patience,
) -> Result<Arc<dyn ObjectStore>> {
    let endpoint = builder
        .get_config_value(&AmazonS3ConfigKey::S3Endpoint)
        .or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
    let allow_http = AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp);
    if plain_http(endpoint.as_deref(), builder.get_config_value(&allow_http).as_deref())? {
        builder = builder.with_allow_http(true);
    }
    let own = builder.get_config_value(&AmazonS3ConfigKey::Client(ClientConfigKey::ProxyUrl));
    for (key, value) in patience.settings().into_iter().chain(no_proxy(own.as_deref())) {
        builder = builder.with_config(AmazonS3ConfigKey::Client(key), value);
    }
    narrow(builder.with_retry(patience.retry.clone()).build(), prefix)
}

fn narrow<T: ObjectStore>(
    built: object_store::Result<T>,
    prefix: &str,
) -> Result<Arc<dyn ObjectStore>> {
    let objects = built.map_err(|error| {
        Error::with_source(ErrorKind::Invalid, "store client settings", Cause(error))
    })?;
    if prefix.is_empty() {
        return Ok(Arc::new(objects));
    }
    Ok(Arc::new(PrefixStore::new(objects, prefix)))
}

/// Tells whether an endpoint is used without TLS: yes for `http://` on this machine, or anywhere if the environment
/// allows it.
fn plain_http(endpoint: Option<&str>, allowed: Option<&str>) -> Result<bool> {
    let Some(rest) = endpoint.and_then(|endpoint| endpoint.strip_prefix("http://")) else {
        return Ok(false);
    };
    if allowed.is_some_and(is_yes) || is_loopback(rest) {
        return Ok(true);
    }
    let host = settings::host_of(rest);
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "store endpoint http://{host} is not on this machine and has no TLS. Use https, or \
             set AWS_ALLOW_HTTP=true (GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP) to allow it"
        ),
    ))
}

/// Tells whether a variable says yes.
fn is_yes(value: &str) -> bool {
    matches!(value, "true" | "1" | "yes" | "on")
}

/// Tells whether `host[:port][/…]` is this machine.
fn is_loopback(authority: &str) -> bool {
    let host = settings::host_of(authority);
    host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

mod awaited;
mod direct;
mod prefix;
mod probe;
mod proxy;
mod settings;

pub use prefix::is_folder_marker;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
