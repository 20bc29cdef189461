//! Work on devices, which uses threads and commands that block.

use block::{Error, ErrorKind, Result};

/// Runs work that blocks on a thread of its own.
///
/// # Errors
/// Those of the work; `Io` if it panics.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::with_source(ErrorKind::Io, "work on a device", error))?
}
