//! Lines on the admin socket, for both of its ends.
//!
//! Invariants:
//! - Every line and every wait for the peer is bounded.
//! - The memory of a line is wiped: it may hold a secret.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use zeroize::Zeroizing;

/// Longest time that either side waits for the other to read or write a line.
pub const LINE_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits for `work`.
///
/// # Errors
/// Those of `work`; `TimedOut` after `limit`.
pub async fn timeout<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(limit, work).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::new(
            ErrorKind::TimedOut,
            format!("no progress within {} s", limit.as_secs()),
        )),
    }
}

/// Reads one line of at most `bytes_max` bytes, and returns it without its end.
///
/// # Errors
/// Those of reading; `InvalidData` if the line is too long, incomplete or not text.
pub async fn read(read: impl AsyncRead + Unpin, bytes_max: u64) -> Result<Zeroizing<String>> {
    let wrong = |why: &str| Error::new(ErrorKind::InvalidData, why.to_owned());
    let mut line = Zeroizing::new(Vec::new());
    BufReader::new(read.take(bytes_max)).read_until(b'\n', &mut line).await?;
    if line.pop() != Some(b'\n') {
        return Err(wrong("a line is too long or cut short"));
    }
    let text = std::str::from_utf8(&line).map_err(|_| wrong("a line is not text"))?;
    Ok(Zeroizing::new(text.to_owned()))
}

/// Writes one line, which has its end.
///
/// # Errors
/// Those of writing; `TimedOut` if the peer does not read it in [`LINE_TIMEOUT`].
pub async fn write(write: &mut (impl AsyncWrite + Unpin), line: &[u8]) -> Result<()> {
    timeout(LINE_TIMEOUT, async {
        write.write_all(line).await?;
        write.flush().await
    })
    .await
}
