//! Requests of this machine to attach or to end an attachment, recorded until the server answers.
//!
//! Invariants:
//! - A request to attach is recorded before it is sent: without an answer, the same attachment is
//!   asked for again.
//! - An attachment that is over is never asked for again. The server hears of its end before it is
//!   asked for the next one.

use super::addresses::Addresses;
use super::reservation_of;
use super::route::Route;
use crate::locks::lock_path;
use block::env::random_bytes;
use block::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Request to the server without an answer yet, kept in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// To attach.
    Begun(Uuid),
    /// To end it.
    Over(Uuid),
}

/// Text in the file before the number of an attachment that is over.
const OVER: &str = "over ";

impl Attempt {
    /// Reads the record; `None` if there is none, or only a part of one.
    pub(super) fn read(path: &Path) -> Option<Attempt> {
        let text = std::fs::read_to_string(path).ok()?;
        match text.strip_prefix(OVER) {
            Some(number) => number.parse().ok().map(Attempt::Over),
            None => text.parse().ok().map(Attempt::Begun),
        }
    }

    /// Writes the record.
    ///
    /// # Errors
    /// Those of the file.
    pub(super) fn write(self, path: &Path) -> Result<()> {
        let text = match self {
            Attempt::Begun(attachment) => attachment.simple().to_string(),
            Attempt::Over(attachment) => format!("{OVER}{}", attachment.simple()),
        };
        // A half-written file would be useless.
        let next = path.with_extension("attempt.tmp");
        let written = std::fs::write(&next, text).and_then(|()| std::fs::rename(&next, path));
        written.map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error)
        })
    }
}

/// Chooses the attachment to ask for if there is no device: the one that was asked for before
/// without an outcome, or a new one, once the server knows that the previous one is over.
pub(super) async fn choose(addresses: &Addresses, path: &Path) -> Result<Uuid> {
    if let Some(Attempt::Over(before)) = Attempt::read(path) {
        let ended = end_recorded(addresses, before, path).await;
        ended.map_err(|error| error.context("end the earlier attachment"))?;
    }
    begin(path)
}

/// Returns the attachment that file `path` records as begun, or records a new one.
fn begin(path: &Path) -> Result<Uuid> {
    if let Some(Attempt::Begun(before)) = Attempt::read(path) {
        return Ok(before);
    }
    let attachment = Uuid::from_bytes(random_bytes());
    Attempt::Begun(attachment).write(path)?;
    Ok(attachment)
}

/// Removes the record of a request that was answered, or whose device the kernel has.
pub(super) fn forget(attempt: &Path) {
    let _ = std::fs::remove_file(attempt); // mostly there is none
}

/// Path of the record of an export: that of the first address under which there is one.
pub(super) fn attempt_path(addresses: &Addresses) -> PathBuf {
    let path = |uri: &dyn std::fmt::Display| lock_path(&uri.to_string()).with_extension("attempt");
    let mut paths = addresses.all().iter().map(|target| path(target));
    paths.find(|path| path.exists()).unwrap_or_else(|| path(addresses.first()))
}

/// Releases the server's state of a device that is gone.
pub(super) async fn release(addresses: &Addresses, attachment: Uuid) {
    if let Err(error) = end(addresses, attachment).await {
        tracing::warn!(
            error = %error.chain(),
            "could not tell the server that an attachment is over; run `spindle attach` again, \
             which tells it, or `spindle detach --force` there"
        );
    }
}

/// Tells the server that an attachment is over. The caller must hold the lock of the target.
///
/// # Errors
/// Errors reaching the server: the request must be repeated, and the record says so.
pub(super) async fn end(addresses: &Addresses, attachment: Uuid) -> Result<()> {
    end_recorded(addresses, attachment, &attempt_path(addresses)).await
}

/// Like [`end`], with the record at `path`.
async fn end_recorded(addresses: &Addresses, attachment: Uuid, path: &Path) -> Result<()> {
    // Do not overwrite the record of an attachment that was begun since: it is recorded nowhere
    // else.
    let is_other =
        matches!(Attempt::read(path), Some(Attempt::Begun(other)) if other != attachment);
    let recorded = if is_other { Ok(()) } else { Attempt::Over(attachment).write(path) };
    let reservation = reservation_of(addresses.export(), attachment, false);
    match Route::new(addresses.clone()).release(&reservation).await {
        Err(error) if error.kind() != ErrorKind::Unsupported => recorded.and(Err(error)),
        _ if is_other => Ok(()),
        _ => {
            forget(path);
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unanswered_request_is_repeated_for_the_same_attachment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device.attempt");
        let first = begin(&path).unwrap();
        assert_eq!(
            Attempt::read(&path),
            Some(Attempt::Begun(first)),
            "it is kept before it is sent"
        );
        assert_eq!(begin(&path).unwrap(), first);
        std::fs::write(&path, "half").unwrap();
        assert_eq!(Attempt::read(&path), None);
        let next = begin(&path).unwrap();
        assert!(next != first && Attempt::read(&path) == Some(Attempt::Begun(next)));
        let (one, other) = ("nbd://db1/pg", "nbd://db1/pg2");
        let place = |uris: &str| attempt_path(&Addresses::parse(uris).unwrap());
        assert!(place(one) == place(one) && place(one) != place(other));
        assert_eq!(place("nbd://db1/pg,nbd://db2/pg"), place(one));
    }

    /// A server that answers one option of one client, saying that it does not know it.
    async fn answer_once(listener: tokio::net::TcpListener) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut wire, _) = listener.accept().await.unwrap();
        wire.write_all(b"NBDMAGICIHAVEOPT\0\x03").await.unwrap();
        let mut option = [0; 4 + 16];
        wire.read_exact(&mut option).await.unwrap();
        let data_bytes = u32::from_be_bytes(*option.last_chunk().unwrap());
        wire.read_exact(&mut vec![0; data_bytes as usize]).await.unwrap();
        let mut reply = [0; 20];
        reply[..8].copy_from_slice(&0x0003_e889_0455_65a9_u64.to_be_bytes());
        reply[8..12].copy_from_slice(&option[12..16]);
        reply[12..16].copy_from_slice(&0x8000_0001_u32.to_be_bytes());
        wire.write_all(&reply).await.unwrap();
    }

    /// The request to end an attachment may be on its way for long. It must not find a new
    /// attachment with its number.
    #[tokio::test]
    async fn an_attachment_that_was_to_end_is_never_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device.attempt");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = Addresses::parse(&format!("nbd://{address}/pg")).unwrap();
        drop(listener);
        let first = choose(&target, &path).await.unwrap();
        end_recorded(&target, first, &path).await.expect_err("nobody answers");
        let error = choose(&target, &path).await.expect_err("nobody answers");
        assert!(error.chain().to_string().contains("end the earlier attachment"), "{error:?}");
        assert_eq!(Attempt::read(&path), Some(Attempt::Over(first)), "it is told again");
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let (next, ()) = tokio::join!(choose(&target, &path), answer_once(listener));
        let next = next.unwrap();
        assert_ne!(next, first);
        assert_eq!(Attempt::read(&path), Some(Attempt::Begun(next)));
    }
}
