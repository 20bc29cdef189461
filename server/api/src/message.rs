//! The lines on the socket: the version, around a request or around its outcome.
//!
//! Invariants:
//! - The version is read before anything else of a line, so that a line of another version gives an
//!   error about the version and not about a field.
//! - An error about a line quotes nothing of it: a line may hold a secret.

use crate::{Failure, Reply, Request};
use block::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

/// Version of the requests and replies. It grows with every change that an older program would
/// misread.
pub const VERSION: u32 = 1;
/// Longest request line, in bytes. Chosen by hand: a few hundred names.
pub const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Longest reply line, in bytes: 100,000 volumes.
pub const REPLY_BYTES_MAX: u64 = 32 << 20;
/// Name of the socket in the directory of a pool.
pub const SOCKET_NAME: &str = "admin.sock";

/// The only field that lines of all versions have.
#[derive(Deserialize)]
struct Versioned {
    #[serde(default)]
    version: u32,
}

#[derive(Serialize)]
struct RequestOut<'a> {
    version: u32,
    request: &'a Request,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestIn {
    #[serde(rename = "version")]
    _version: u32,
    request: Request,
}

#[derive(Serialize)]
struct OutcomeOut<'a> {
    version: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    ok: Option<&'a Reply>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
}

#[derive(Deserialize)]
struct OutcomeIn {
    ok: Option<Reply>,
    error: Option<Failure>,
}

/// Encodes a request as one line, with its end.
///
/// # Errors
/// `Invalid` if it is longer than [`REQUEST_BYTES_MAX`].
pub fn encode_request(request: &Request) -> Result<Zeroizing<Vec<u8>>> {
    let line = line_of(&RequestOut { version: VERSION, request })?;
    if line.len() as u64 > REQUEST_BYTES_MAX {
        return Err(Error::new(ErrorKind::Invalid, "the request is too long"));
    }
    Ok(line)
}

/// Decodes a request from a line without its end.
///
/// # Errors
/// `Unsupported` for another version, `Invalid` for anything else that is not a request.
pub fn decode_request(line: &str) -> Result<Request> {
    let unclear = |error: serde_json::Error| {
        // Serde's message could quote a secret.
        let what = format!("admin request not understood at column {}", error.column());
        Error::new(ErrorKind::Invalid, what)
    };
    let Versioned { version } = serde_json::from_str(line).map_err(unclear)?;
    if version != VERSION {
        let what = format!(
            "admin request of version {version}: this daemon speaks version {VERSION}; use the \
             program of the daemon's release, or restart the daemon with the newer one"
        );
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    let RequestIn { request, .. } = serde_json::from_str(line).map_err(unclear)?;
    Ok(request)
}

/// Encodes the outcome of a request as one line, with its end.
///
/// # Errors
/// `Invalid` if a reply cannot be encoded, which no reply can cause.
pub fn encode_outcome(outcome: &Result<Reply>) -> Result<Zeroizing<Vec<u8>>> {
    let (ok, error) = match outcome {
        Ok(reply) => (Some(reply), None),
        Err(error) => (None, Some(Failure::from(error))),
    };
    line_of(&OutcomeOut { version: VERSION, ok, error })
}

/// Decodes the outcome of a request from a line without its end.
///
/// # Errors
/// The error in the outcome. `Unsupported` if the daemon speaks another version, `Unavailable` if
/// the line is not understood.
pub fn decode_outcome(line: &str) -> Result<Reply> {
    let unclear = |column: usize| {
        let what = format!("the daemon's reply is not understood (column {column})");
        Error::new(ErrorKind::Unavailable, what)
    };
    let read = |error: serde_json::Error| unclear(error.column());
    let Versioned { version } = serde_json::from_str(line).map_err(read)?;
    if version != VERSION {
        let what = format!(
            "the daemon speaks version {version} of the admin protocol and this program version \
             {VERSION}; use the program of the daemon's release, or restart the daemon with this one"
        );
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    match serde_json::from_str(line).map_err(read)? {
        OutcomeIn { error: Some(failure), .. } => Err(failure.into()),
        OutcomeIn { ok: Some(reply), .. } => Ok(reply),
        OutcomeIn { .. } => Err(unclear(line.len())),
    }
}

fn line_of(message: &impl Serialize) -> Result<Zeroizing<Vec<u8>>> {
    let encoded = serde_json::to_vec(message)
        .map_err(|error| Error::with_source(ErrorKind::Invalid, "encode a message", error))?;
    let mut line = Zeroizing::new(encoded);
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::PoolRequest;

    fn text(line: &[u8]) -> &str {
        std::str::from_utf8(line).unwrap().strip_suffix('\n').unwrap()
    }

    #[test]
    fn requests_and_outcomes_survive_the_wire() {
        let request = Request::Pool(PoolRequest::Status {});
        let line = encode_request(&request).unwrap();
        assert_eq!(text(&line), r#"{"version":1,"request":{"pool":{"action":"status"}}}"#);
        assert_eq!(decode_request(text(&line)).unwrap(), request);
        let reply = Reply::Done { message: "done".to_owned() };
        let line = encode_outcome(&Ok(reply.clone())).unwrap();
        assert_eq!(text(&line), r#"{"version":1,"ok":{"reply":"done","message":"done"}}"#);
        assert_eq!(decode_outcome(text(&line)).unwrap(), reply);
        let line = encode_outcome(&Err(Error::new(ErrorKind::Fenced, "taken over"))).unwrap();
        let error = decode_outcome(text(&line)).unwrap_err();
        assert_eq!((error.kind(), error.to_string().as_str()), (ErrorKind::Fenced, "taken over"));
    }

    #[test]
    fn another_version_gives_an_error_about_the_version() {
        for line in [r#"{"version":2,"demand":"x"}"#, r#"{"request":"status"}"#] {
            let error = decode_request(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("speaks version 1"), "{error}");
        }
        let replies = [r#"{"version":7,"fine":{}}"#, r#"{"ok":{"reply":"done","message":""}}"#];
        for line in replies {
            let error = decode_outcome(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains("this program version 1"), "{error}");
        }
    }

    #[test]
    fn unknown_fields_and_garbage_are_refused_and_not_quoted() {
        for line in [
            "",
            "{",
            "7",
            r#"{"version":1}"#,
            r#"{"version":1,"request":{"pool":{"action":"status"}},"extra":1}"#,
            r#"{"version":1,"request":{"key":{"action":"rotate","new":{"to":"hunter2"}}}}"#,
            r#"{"version":1,"request":{"volume":{"action":"list","hunter2":1}}}"#,
        ] {
            let error = decode_request(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{line}");
            assert!(!error.chain().contains("hunter2"), "{error}");
        }
        for line in ["", "7", r#"{"version":1}"#, r#"{"version":1,"ok":{"reply":"x"}}"#] {
            assert_eq!(decode_outcome(line).unwrap_err().kind(), ErrorKind::Unavailable, "{line}");
        }
    }
}
