//! An object store that gives, by rule or by seed, the answers that faulty stores and proxies give.
//!
//! Invariants:
//! - Everything is deterministic given the rules or the seed, and the order of the requests.
//! - Stored bytes are never changed. An answer is wrong, late, or missing.
//! - Each faulty answer is counted, so that a test can report how many it has survived.

use super::{Op, Rng};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Objects in a page that is repeated. S3 has 1000; fewer have the same effect.
const PAGE_OBJECT_COUNT: usize = 3;
/// Time after which a hung request fails, like the client's own timeout.
const HANG_TIME: Duration = Duration::from_secs(60);

/// Faulty answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answer {
    /// 409 ConditionalRequestConflict: refused as if the object existed, without effect.
    Conflict,
    /// 404.
    NotFound,
    /// 403.
    Denied,
    /// 500, after the client's own retries.
    Internal,
    /// 503, after the client's own retries.
    Busy,
    /// A listing shows nothing.
    EmptyList,
    /// A listing shows its first page repeatedly.
    RepeatedPage,
    /// A body ends in the middle.
    Truncated,
    /// No answer for a minute (see [`IllStore::set_hang_time`]), then the client times out.
    Hang,
    /// The request takes effect, and its answer is lost.
    DoneButFailed,
    /// The right answer, after as long as a [`Answer::Hang`].
    Late,
}

impl Answer {
    /// All faulty answers; a late one is not faulty.
    pub const ALL: &[Answer] = &[
        Answer::Conflict,
        Answer::NotFound,
        Answer::Denied,
        Answer::Internal,
        Answer::Busy,
        Answer::EmptyList,
        Answer::RepeatedPage,
        Answer::Truncated,
        Answer::Hang,
        Answer::DoneButFailed,
    ];

    /// Returns whether a store may give this answer to such a request.
    #[must_use]
    pub fn fits(self, op: Op) -> bool {
        match self {
            Answer::Conflict => op == Op::Put,
            Answer::NotFound => op != Op::List,
            Answer::EmptyList | Answer::RepeatedPage => op == Op::List,
            Answer::Truncated => matches!(op, Op::Get | Op::List),
            Answer::DoneButFailed => matches!(op, Op::Put | Op::Delete),
            Answer::Denied | Answer::Internal | Answer::Busy | Answer::Hang | Answer::Late => true,
        }
    }

    fn error(self, op: Op, path: &Path) -> Error {
        let said =
            |status: &str| format!("injected: status code: {status} of {op:?} {path}").into();
        let path = path.to_string();
        match self {
            Answer::Conflict => Error::AlreadyExists { path, source: said("409 Conflict") },
            Answer::NotFound => Error::NotFound { path, source: said("404 Not Found") },
            // The client can tell the kind of a failed listing only by its text.
            Answer::Denied if op != Op::List => {
                Error::PermissionDenied { path, source: said("403 Forbidden") }
            }
            Answer::Denied => generic(said("403 Forbidden")),
            Answer::Internal => generic(said("500 Internal Server Error")),
            Answer::Busy => generic(said("503 Service Unavailable")),
            Answer::Hang => generic("injected: operation timed out".into()),
            Answer::EmptyList
            | Answer::RepeatedPage
            | Answer::Truncated
            | Answer::Late
            | Answer::DoneButFailed => generic("injected: connection closed".into()),
        }
    }
}

fn generic(source: Box<dyn std::error::Error + Send + Sync>) -> Error {
    Error::Generic { store: "IllStore", source }
}

/// Selects the requests that get an [`Answer`].
#[derive(Clone, Debug)]
pub struct Rule {
    /// Kind of request; `None` matches every kind that the answer fits.
    pub op: Option<Op>,
    /// Object or listing; a path that ends with a slash matches everything below it, and an empty
    /// one matches all.
    pub path: String,
    /// Number of matching requests that first succeed.
    pub skipped_count: u64,
    /// Number of matching requests after these that get the answer; `u64::MAX` for all.
    pub count: u64,
    /// The answer.
    pub answer: Answer,
}

impl Rule {
    /// Creates a rule for the next request of this kind, for this object or below this folder.
    #[must_use]
    pub fn once(op: Op, path: &str, answer: Answer) -> Rule {
        Rule { op: Some(op), path: path.to_owned(), skipped_count: 0, count: 1, answer }
    }

    /// Creates a rule for all such requests from now on.
    #[must_use]
    pub fn for_good(op: Op, path: &str, answer: Answer) -> Rule {
        Rule { count: u64::MAX, ..Rule::once(op, path, answer) }
    }

    fn is_for(&self, op: Op, path: &Path) -> bool {
        let is_path = match self.path.strip_suffix('/') {
            Some(folder) => Path::from(folder) == *path || path.as_ref().starts_with(&self.path),
            None => self.path.is_empty() || path.as_ref() == self.path,
        };
        self.count > 0 && is_path && self.answer.fits(op) && self.op.is_none_or(|its| its == op)
    }
}

#[derive(Debug, Default)]
struct Orders {
    rules: Vec<Rule>,
    /// Generator, percentage of requests that get a faulty answer, and the answers.
    random: Option<(Rng, u64, Vec<Answer>)>,
    injected_count: u64,
    requests: Vec<(Op, Path)>,
    hang_time: Option<Duration>,
}

impl Orders {
    fn next(&mut self, op: Op, path: &Path) -> Option<Answer> {
        self.requests.push((op, path.clone()));
        let answer = self.by_rule(op, path).or_else(|| self.by_chance(op));
        self.injected_count += u64::from(answer.is_some());
        answer
    }

    fn by_rule(&mut self, op: Op, path: &Path) -> Option<Answer> {
        let rule = self.rules.iter_mut().find(|rule| rule.is_for(op, path))?;
        if rule.skipped_count > 0 {
            rule.skipped_count -= 1;
            return None;
        }
        if rule.count != u64::MAX {
            rule.count -= 1;
        }
        Some(rule.answer)
    }

    fn by_chance(&mut self, op: Op) -> Option<Answer> {
        let (rng, percent, answers) = self.random.as_mut()?;
        if rng.below(100) >= *percent || answers.is_empty() {
            return None;
        }
        let answer = answers[rng.below(answers.len() as u64) as usize];
        answer.fits(op).then_some(answer)
    }
}

/// The faulty store; see the module. It is cheap to clone, and clones share the same rules.
#[derive(Clone, Debug)]
pub struct IllStore {
    inner: Arc<dyn ObjectStore>,
    orders: Arc<Mutex<Orders>>,
}

impl Default for IllStore {
    /// Creates a store in memory.
    fn default() -> IllStore {
        IllStore::new(Arc::new(InMemory::new()))
    }
}

impl IllStore {
    /// Creates a wrapper of another store, at first without faults.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>) -> IllStore {
        IllStore { inner, orders: Arc::default() }
    }

    /// Returns the wrapped store, which has no faults.
    #[must_use]
    pub fn inner(&self) -> &Arc<dyn ObjectStore> {
        &self.inner
    }

    /// Adds a rule. The first matching rule applies.
    pub fn add(&self, rule: Rule) {
        self.orders.lock().rules.push(rule);
    }

    /// Gives one of these answers to `percent` percent of the requests, where it fits, chosen by
    /// `seed`.
    pub fn answer_randomly(&self, seed: u64, percent: u64, answers: &[Answer]) {
        self.orders.lock().random = Some((Rng::new(seed), percent, answers.to_vec()));
    }

    /// Removes all faults.
    pub fn heal(&self) {
        let mut orders = self.orders.lock();
        orders.rules.clear();
        orders.random = None;
    }

    /// Returns the number of faulty answers so far, by rule or by chance.
    #[must_use]
    pub fn injected_count(&self) -> u64 {
        self.orders.lock().injected_count
    }

    /// Returns and clears the list of requests so far.
    pub fn take_requests(&self) -> Vec<(Op, Path)> {
        std::mem::take(&mut self.orders.lock().requests)
    }

    /// Sets how long a request hangs before it fails.
    pub fn set_hang_time(&self, time: Duration) {
        self.orders.lock().hang_time = Some(time);
    }

    /// Returns the names of all objects, in order.
    pub async fn names(&self) -> Vec<String> {
        let listed = self.inner.list(None);
        let mut names: Vec<String> =
            listed.map(|meta| meta.expect("it is well").location.to_string()).collect().await;
        names.sort();
        names
    }

    /// Returns the fault to apply to the answer if the request is carried out.
    async fn enter(&self, op: Op, path: &Path) -> Result<Option<Answer>> {
        let answer = self.orders.lock().next(op, path);
        match answer {
            Some(answer @ (Answer::Truncated | Answer::DoneButFailed)) => Ok(Some(answer)),
            Some(Answer::Hang) => {
                let time = self.orders.lock().hang_time.unwrap_or(HANG_TIME);
                tokio::time::sleep(time).await;
                Err(Answer::Hang.error(op, path))
            }
            Some(Answer::Late) => {
                let time = self.orders.lock().hang_time.unwrap_or(HANG_TIME);
                tokio::time::sleep(time).await;
                Ok(None)
            }
            Some(answer) => Err(answer.error(op, path)),
            None => Ok(None),
        }
    }

    async fn delete_one(self, path: Path) -> Result<Path> {
        let answer = self.enter(Op::Delete, &path).await?;
        self.inner.delete(&path).await?;
        match answer {
            Some(answer) => Err(answer.error(Op::Delete, &path)),
            None => Ok(path),
        }
    }
}

/// Delivers half of the body, then ends the connection.
async fn cut(got: GetResult, path: &Path) -> Result<GetResult> {
    let (meta, range) = (got.meta.clone(), got.range.clone());
    let (attributes, extensions) = (got.attributes.clone(), got.extensions.clone());
    let bytes = got.bytes().await?;
    let half = bytes.slice(..bytes.len() / 2);
    let body = [Ok(half), Err(Answer::Truncated.error(Op::Get, path))];
    let payload = GetResultPayload::Stream(futures::stream::iter(body).boxed());
    Ok(GetResult { payload, meta, range, attributes, extensions })
}

impl std::fmt::Display for IllStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IllStore({})", self.inner)
    }
}

#[async_trait::async_trait]
impl ObjectStore for IllStore {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let answer = self.enter(Op::Put, path).await?;
        let put = self.inner.put_opts(path, payload, options).await;
        answer.map_or(put, |answer| Err(answer.error(Op::Put, path)))
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        match self.enter(Op::Put, path).await? {
            None => self.inner.put_multipart_opts(path, options).await,
            Some(answer) => Err(answer.error(Op::Put, path)),
        }
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let answer = self.enter(Op::Get, path).await?;
        let got = self.inner.get_opts(path, options).await?;
        if answer.is_some() { cut(got, path).await } else { Ok(got) }
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let ill = self.clone();
        paths.then(move |path| delete_each(ill.clone(), path)).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (ill, path) = (self.clone(), prefix.cloned().unwrap_or_default());
        let prefix = prefix.cloned();
        let answer = self.orders.lock().next(Op::List, &path);
        let hang_time = self.orders.lock().hang_time.unwrap_or(HANG_TIME);
        let listed = async move {
            match answer {
                None => ill.inner.list(prefix.as_ref()),
                Some(Answer::EmptyList) => futures::stream::empty().boxed(),
                Some(Answer::RepeatedPage) => {
                    let page = ill.inner.list(prefix.as_ref()).take(PAGE_OBJECT_COUNT);
                    let page: Vec<ObjectMeta> =
                        page.filter_map(async |one| one.ok()).collect().await;
                    futures::stream::iter(page.into_iter().cycle().map(Ok)).boxed()
                }
                Some(answer) => {
                    if answer == Answer::Hang {
                        tokio::time::sleep(hang_time).await;
                    }
                    futures::stream::iter([Err(answer.error(Op::List, &path))]).boxed()
                }
            }
        };
        listed.flatten_stream().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let path = prefix.cloned().unwrap_or_default();
        match self.enter(Op::List, &path).await? {
            None => self.inner.list_with_delimiter(prefix).await,
            Some(answer) => Err(answer.error(Op::List, &path)),
        }
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let answer = self.enter(Op::Put, to).await?;
        let copied = self.inner.copy_opts(from, to, options).await;
        answer.map_or(copied, |answer| Err(answer.error(Op::Put, to)))
    }
}

async fn delete_each(ill: IllStore, path: Result<Path>) -> Result<Path> {
    ill.delete_one(path?).await
}
