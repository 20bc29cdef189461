//! As much of HTTP as the stand-ins for object stores need: receiving requests, sending replies,
//! and asking another server.
//!
//! Invariants:
//! - A request's path is a bucket and a key, as in the XML interfaces of S3 and of Google's store.
//! - Heads and bodies are bounded. A truncated reply is an error, never a shorter reply.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// Largest head and body of a request. Chosen by hand: objects of tests are a few MiB.
const HEAD_BYTES_MAX: usize = 64 << 10;
const BODY_BYTES_MAX: usize = 64 << 20;

/// A request.
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) bucket: String,
    pub(crate) key: String,
    pub(crate) query: BTreeMap<String, String>,
    /// By lower-case name.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

/// A reply.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    /// Receives the next request; `None` when the client has left.
    pub(crate) fn receive(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<Request>> {
        let Some(lines) = head_of(reader)? else { return Ok(None) };
        let mut words = lines[0].split(' ');
        let (Some(method), Some(target)) = (words.next(), words.next()) else {
            return Err(bad("no request line"));
        };
        let headers: BTreeMap<_, _> = lines[1..].iter().filter_map(|line| header(line)).collect();
        let mut body = vec![0; length_in(&headers)?.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let pair = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            (unescape(name), unescape(value))
        };
        let query = query.split('&').filter(|part| !part.is_empty()).map(pair).collect();
        let path = unescape(path);
        let path = path.trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let (method, bucket, key) = (method.to_owned(), bucket.to_owned(), key.to_owned());
        Ok(Some(Request { method, bucket, key, query, headers, body }))
    }
}

impl Reply {
    /// Makes a reply without a body.
    pub(crate) fn empty(status: u16) -> Reply {
        Reply { status, headers: Vec::new(), body: Vec::new() }
    }

    /// Sends the head and half of the body; the caller ends the connection after it.
    pub(crate) fn send_half(&self, mut stream: &TcpStream) -> io::Result<()> {
        let mut bytes = self.head();
        bytes.extend_from_slice(&self.body[..self.body.len() / 2]);
        stream.write_all(&bytes)
    }

    /// Sends it as the answer to a request with this method.
    pub(crate) fn send(&self, mut stream: &TcpStream, method: &str) -> io::Result<()> {
        let mut bytes = self.head();
        if method != "HEAD" {
            bytes.extend_from_slice(&self.body);
        }
        stream.write_all(&bytes)
    }

    fn head(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} -\r\nContent-Length: ", self.status);
        // A HEAD gets the size of the object only.
        let _ = write!(head, "{}\r\n", self.body.len());
        for (name, value) in &self.headers {
            let _ = write!(head, "{name}: {value}\r\n");
        }
        (head + "\r\n").into_bytes()
    }
}

/// The answer of another server.
pub struct Answer {
    /// From the first line.
    pub status: u16,
    /// By lower-case name.
    pub headers: BTreeMap<String, String>,
    /// The whole body.
    pub body: Vec<u8>,
}

/// Sends a request to another server, on a new connection.
///
/// # Errors
/// When it does not answer, or not completely.
pub fn ask(
    address: &str,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> io::Result<Answer> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    // HTTP/1.0: a body without a stated length ends with the connection, and is never sent in
    // chunks.
    let mut head = format!("{method} {target} HTTP/1.0\r\nHost: {address}\r\n");
    let _ = write!(head, "Content-Length: {}\r\n", body.len());
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    (&stream).write_all(&[(head + "\r\n").as_bytes(), body].concat())?;
    let mut reader = BufReader::new(&stream);
    let lines = head_of(&mut reader)?.ok_or_else(|| bad("no answer"))?;
    let status = lines[0].split(' ').nth(1).and_then(|word| word.parse().ok());
    let status = status.ok_or_else(|| bad("no status"))?;
    let headers: BTreeMap<_, _> = lines[1..].iter().filter_map(|line| header(line)).collect();
    let mut body = Vec::new();
    match length_in(&headers)? {
        Some(length) => {
            body.resize(length, 0);
            reader.read_exact(&mut body)?;
        }
        None => drop(reader.read_to_end(&mut body)?),
    }
    Ok(Answer { status, headers, body })
}

/// Receives the lines before the body; `None` if the other side has left.
fn head_of(reader: &mut BufReader<&TcpStream>) -> io::Result<Option<Vec<String>>> {
    let mut lines = Vec::new();
    let mut head_bytes = 0;
    loop {
        let mut line = String::new();
        head_bytes += reader.by_ref().take(HEAD_BYTES_MAX as u64).read_line(&mut line)?;
        if head_bytes > HEAD_BYTES_MAX {
            return Err(bad("a head that does not end"));
        }
        match line.trim_end() {
            "" if lines.is_empty() => return Ok(None),
            "" => return Ok(Some(lines)),
            line => lines.push(line.to_owned()),
        }
    }
}

fn header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(':')?;
    Some((name.to_ascii_lowercase(), value.trim().to_owned()))
}

fn length_in(headers: &BTreeMap<String, String>) -> io::Result<Option<usize>> {
    let Some(text) = headers.get("content-length") else { return Ok(None) };
    let length = text.parse::<usize>().ok().filter(|length| *length <= BODY_BYTES_MAX);
    length.map(Some).ok_or_else(|| bad("no such length"))
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

fn unescape(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let code = code.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (first, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Escapes a text for use as one part of a path or as a value of a query.
#[must_use]
pub fn escape(text: &str) -> String {
    text.bytes().fold(String::new(), |mut escaped, byte| {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
                escaped.push(char::from(byte));
            }
            _ => drop(write!(escaped, "%{byte:02X}")),
        }
        escaped
    })
}

pub(crate) fn xml(text: String) -> Reply {
    let headers = vec![("Content-Type", "application/xml".to_owned())];
    Reply { status: 200, headers, body: text.into_bytes() }
}

pub(crate) fn refusal(status: u16, code: &str) -> Reply {
    let text = format!("<Error><Code>{code}</Code><Message>{code}</Message></Error>");
    Reply { status, ..xml(text) }
}
