//! The client's end of the admin socket: one JSON request line and one JSON reply line.

use crate::line::{LINE_TIMEOUT, read, timeout, write};
use api::message::{REPLY_BYTES_MAX, SOCKET_NAME, decode_outcome, encode_request};
use api::{Reply, Request};
use block::{Error, ErrorKind, Result};
use std::path::Path;
use tokio::net::UnixStream;

/// Sends one request to the daemon that runs on `dir`. `None` if there is none: the socket is
/// absent or has no listener.
///
/// # Errors
/// The error in the daemon's answer; `Unsupported` if the daemon speaks another version;
/// `Unavailable` if it does not answer.
pub async fn call(dir: &Path, request: &Request) -> Result<Option<Reply>> {
    let path = dir.join(SOCKET_NAME);
    let failed = |error: std::io::Error| {
        let what = format!("ask the daemon at {}", path.display());
        Error::with_source(ErrorKind::Unavailable, what, error)
    };
    let stream = match timeout(LINE_TIMEOUT, UnixStream::connect(&path)).await {
        Ok(stream) => stream,
        Err(error) => {
            return match error.kind() {
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => Ok(None),
                std::io::ErrorKind::PermissionDenied => Err(Error::with_source(
                    ErrorKind::Denied,
                    format!("ask the daemon at {}: run as the daemon's user", path.display()),
                    error,
                )),
                _ => Err(failed(error)),
            };
        }
    };
    let (reader, mut writer) = stream.into_split();
    write(&mut writer, &encode_request(request)?).await.map_err(failed)?;
    let line = timeout(request.timeout(), read(reader, REPLY_BYTES_MAX)).await.map_err(failed)?;
    decode_outcome(&line).map(Some)
}
