//! A read-only store that shows one state of the metadata.
//!
//! Invariants:
//! - Manifests later than the state's own are hidden, so that a search for the newest one finds it.
//! - Nothing is written through it.

use super::database;
use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use slatedb_common::retry::NonRetryable;
use std::sync::Arc;

/// Shows the state of the metadata in `target` whose manifest has this number.
#[must_use]
pub fn state_view(target: Arc<dyn ObjectStore>, manifest: u64) -> Arc<dyn ObjectStore> {
    Arc::new(View { target, manifest })
}

#[derive(Debug)]
struct View {
    target: Arc<dyn ObjectStore>,
    manifest: u64,
}

/// Whether the object is shown: everything except later manifests.
fn is_shown(manifest: u64, path: &Path) -> bool {
    !path.prefix_matches(&database::manifest_folder())
        || database::manifest_number(path).is_some_and(|number| number <= manifest)
}

fn refused(path: &Path) -> Error {
    // Otherwise the database would retry forever.
    let source = NonRetryable("a copy is only read".into()).into();
    Error::PermissionDenied { path: path.to_string(), source }
}

impl std::fmt::Display for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.target)
    }
}

#[async_trait::async_trait]
impl ObjectStore for View {
    async fn put_opts(&self, path: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        Err(refused(path))
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Err(refused(path))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        if !is_shown(self.manifest, path) {
            let source = "it is of another state of the copy".into();
            return Err(Error::NotFound { path: path.to_string(), source });
        }
        self.target.get_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        paths.map(|path| path.and_then(|path| Err(refused(&path)))).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let manifest = self.manifest;
        let listing = self.target.list(prefix);
        let shown = move |found: &Result<ObjectMeta>| {
            let is_kept = found.as_ref().map_or(true, |meta| is_shown(manifest, &meta.location));
            futures::future::ready(is_kept)
        };
        listing.filter(shown).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut found = self.target.list_with_delimiter(prefix).await?;
        found.objects.retain(|meta| is_shown(self.manifest, &meta.location));
        Ok(found)
    }

    async fn copy_opts(&self, _: &Path, to: &Path, _: CopyOptions) -> Result<()> {
        Err(refused(to))
    }
}
