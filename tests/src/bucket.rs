//! An S3 server in memory for one test. It is either correct, or careless in one way in which real
//! servers have been.
//!
//! Invariants:
//! - The correct one serves a pool well, so a pool that refuses a careless one does so for its
//!   carelessness.
//! - It knows one bucket and one access key. It checks no signature, and answers the requests of a
//!   connection in order.

pub mod faults;

use crate::http::{Reply, Request, refusal, xml};
use crate::store::{BUCKET, USER};
use faults::{Fault, Faults, Injection};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufReader};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Objects and folders on a page of a listing, as in S3. With injected faults pages are smaller, so
/// that listings have several.
const PAGE_OBJECTS: usize = 1000;
const PAGE_OBJECTS_SMALL: usize = 7;

/// How it treats the conditions on which a pool's ownership depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Care {
    /// As S3 does.
    Honest,
    /// Ignores `If-None-Match` and `If-Match`: every PUT is carried out.
    IgnoresConditions,
    /// Refuses a conditional PUT that must fail, but carries it out.
    RefusesAndWrites,
    /// Answers `If-None-Match` with "not implemented".
    KnowsNoConditions,
    /// Answers every listing with an empty one.
    ListsNothing,
}

struct State {
    care: Care,
    /// While set, every connection ends at once.
    is_down: bool,
    /// Connections made since it was last down.
    sockets: Vec<TcpStream>,
    /// Objects by key, each with the number of the PUT that made it.
    objects: BTreeMap<String, (u64, Vec<u8>)>,
    put_count: u64,
    page_objects: usize,
    injection: Injection,
}

/// A running server.
pub struct Bucket {
    address: String,
    state: Arc<Mutex<State>>,
}

impl Bucket {
    /// Starts a server with an empty bucket. It ends with the test's process.
    #[must_use]
    pub fn start(care: Care) -> Bucket {
        Bucket::start_at("127.0.0.1", care)
    }

    /// Like [`Bucket::start`], at another IP address.
    #[must_use]
    pub fn start_at(host: &str, care: Care) -> Bucket {
        let listener = TcpListener::bind((host, 0)).expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (objects, sockets) = (BTreeMap::new(), Vec::new());
        let state = State {
            care,
            is_down: false,
            sockets,
            objects,
            put_count: 0,
            page_objects: PAGE_OBJECTS,
            injection: Injection::default(),
        };
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), state) = (stream, Arc::clone(&shared)) else { return };
                // A client may leave at any moment; replies that it has received stay true.
                std::thread::spawn(move || {
                    drop(serve(&stream, &state));
                    // The list of connections holds it open; the client must see its end.
                    let _ = stream.shutdown(Shutdown::Both);
                });
            }
        });
        Bucket { address, state }
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Ends all connections and refuses further ones. The objects stay.
    pub fn down(&self) {
        let mut state = self.state.lock().expect("no panic holds it");
        state.is_down = true;
        for socket in state.sockets.drain(..) {
            // Its client may have left.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Serves again after [`Bucket::down`].
    pub fn up(&self) {
        self.state.lock().expect("no panic holds it").is_down = false;
    }

    /// Injects faults into all further requests; [`Faults::None`] ends this.
    pub fn inject(&self, faults: Faults) {
        let mut state = self.state.lock().expect("no panic holds it");
        state.page_objects = PAGE_OBJECTS_SMALL;
        state.injection.set(faults);
    }

    /// How often each fault was injected.
    #[must_use]
    pub fn injected(&self) -> BTreeMap<Fault, u64> {
        self.state.lock().expect("no panic holds it").injection.counts()
    }

    /// Returns the keys of all objects.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        self.state.lock().expect("no panic holds it").objects.keys().cloned().collect()
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    {
        let mut state = state.lock().expect("no panic holds it");
        if state.is_down {
            return Ok(());
        }
        state.sockets.retain(|socket| socket.peer_addr().is_ok());
        state.sockets.push(stream.try_clone()?);
    }
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::receive(&mut reader)? {
        let (fault, reply, hang) = {
            let mut state = state.lock().expect("no panic holds it");
            if state.is_down {
                return Ok(());
            }
            let fault = state.injection.choose(&request);
            let hang = (state.injection.generation, state.injection.hang_time());
            (fault, state.answer_with(fault, &request), hang)
        };
        match fault {
            Some(Fault::Hang) => return hang_until_healed(state, hang),
            Some(Fault::Truncated) => return reply.send_half(stream),
            _ => reply.send(stream, &request.method)?,
        }
    }
    Ok(())
}

/// Waits until the faults change or the time has passed, then ends the connection.
fn hang_until_healed(
    state: &Mutex<State>,
    (generation, longest): (u64, Duration),
) -> io::Result<()> {
    let end = Instant::now() + longest;
    while Instant::now() < end
        && state.lock().expect("no panic holds it").injection.generation == generation
    {
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A moment in both notations of S3; no test here looks at it.
const MODIFIED: (&str, &str) = ("Sat, 01 Jan 2000 00:00:00 GMT", "2000-01-01T00:00:00.000Z");

impl State {
    /// Returns the answer to a request that meets this fault.
    fn answer_with(&mut self, fault: Option<Fault>, request: &Request) -> Reply {
        match fault {
            None | Some(Fault::Truncated) => self.answer(request),
            Some(Fault::Hang) => Reply::empty(500),
            Some(Fault::DoneButFailed) => {
                let _ = self.answer(request);
                refusal(500, "InternalError")
            }
            Some(Fault::EmptyList) => {
                xml("<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>".into())
            }
            Some(Fault::RepeatedPage) => self.list(request, ""),
            Some(other) => other.refusal().expect("it needs nothing of the store"),
        }
    }

    fn answer(&mut self, request: &Request) -> Reply {
        let signed = request.headers.get("authorization").map(String::as_str);
        let signer = signed.and_then(|text| text.split("Credential=").nth(1)?.split('/').next());
        if signed.is_some() && signer != Some(USER) {
            return refusal(403, "InvalidAccessKeyId");
        }
        if request.bucket != BUCKET {
            return refusal(404, "NoSuchBucket");
        }
        match request.method.as_str() {
            "PUT" => self.put(request),
            "GET" if request.key.is_empty() => {
                let token = request.query.get("continuation-token").map_or("", String::as_str);
                self.list(request, token)
            }
            "GET" | "HEAD" => self.get(request),
            "DELETE" => {
                self.objects.remove(&request.key);
                Reply::empty(204)
            }
            "POST" if request.query.contains_key("delete") => {
                let body = String::from_utf8_lossy(&request.body);
                let mut text = "<DeleteResult>".to_owned();
                for part in body.split("<Key>").skip(1) {
                    let key = part.split("</Key>").next().unwrap_or_default();
                    self.objects.remove(key);
                    let _ = write!(text, "<Deleted><Key>{key}</Key></Deleted>");
                }
                xml(text + "</DeleteResult>")
            }
            _ => refusal(501, "NotImplemented"),
        }
    }

    fn put(&mut self, request: &Request) -> Reply {
        let found = self.objects.get(&request.key).map(|(number, _)| tag(*number));
        let is_create = request.headers.contains_key("if-none-match");
        let wanted = request.headers.get("if-match");
        if is_create && self.care == Care::KnowsNoConditions {
            return refusal(501, "NotImplemented");
        }
        let is_refused = (is_create && found.is_some())
            || wanted.is_some_and(|wanted| found.as_ref() != Some(wanted));
        if is_refused && !matches!(self.care, Care::IgnoresConditions | Care::RefusesAndWrites) {
            return refusal(412, "PreconditionFailed");
        }
        self.put_count += 1;
        self.objects.insert(request.key.clone(), (self.put_count, request.body.clone()));
        if is_refused && self.care == Care::RefusesAndWrites {
            return refusal(412, "PreconditionFailed");
        }
        Reply { status: 200, headers: vec![("ETag", tag(self.put_count))], body: Vec::new() }
    }

    fn get(&self, request: &Request) -> Reply {
        let Some((number, bytes)) = self.objects.get(&request.key) else {
            return refusal(404, "NoSuchKey");
        };
        let mut headers = vec![("ETag", tag(*number)), ("Last-Modified", MODIFIED.0.to_owned())];
        let range = request.headers.get("range").and_then(|text| text.strip_prefix("bytes="));
        let Some((start, end)) = range.and_then(|text| text.split_once('-')) else {
            return Reply { status: 200, headers, body: bytes.clone() };
        };
        let total = bytes.len();
        let (start, end) = match (start.parse::<usize>(), end.parse::<usize>()) {
            (Ok(start), Ok(last)) => (start, last.saturating_add(1).min(total)),
            (Ok(start), Err(_)) => (start, total),
            (Err(_), Ok(suffix)) => (total.saturating_sub(suffix), total),
            (Err(_), Err(_)) => return refusal(400, "InvalidRange"),
        };
        match bytes.get(start..end) {
            Some(part) if !part.is_empty() => {
                headers.push(("Content-Range", format!("bytes {start}-{}/{total}", end - 1)));
                Reply { status: 206, headers, body: part.to_vec() }
            }
            _ => refusal(416, "InvalidRange"),
        }
    }

    /// Returns a page of a listing: the names after `token`, the last name of the previous page.
    fn list(&self, request: &Request, token: &str) -> Reply {
        let of = |name: &str| request.query.get(name).map_or("", String::as_str);
        let (prefix, delimiter, after) = (of("prefix"), of("delimiter"), of("start-after"));
        // By name: objects have their entry, folders have none.
        let mut found: BTreeMap<String, Option<String>> = BTreeMap::new();
        for (key, (number, bytes)) in &self.objects {
            let Some(rest) = key.strip_prefix(prefix) else { continue };
            if self.care == Care::ListsNothing || key.as_str() <= after {
                continue;
            }
            match rest.find(delimiter).filter(|_| !delimiter.is_empty()) {
                Some(at) => {
                    found.insert(format!("{prefix}{}", &rest[..at + delimiter.len()]), None);
                }
                None => {
                    let entry = format!(
                        "<Contents><Key>{key}</Key><Size>{}</Size><ETag>{}</ETag>\
                         <LastModified>{}</LastModified></Contents>",
                        bytes.len(),
                        tag(*number).replace('"', "&quot;"),
                        MODIFIED.1
                    );
                    found.insert(key.clone(), Some(entry));
                }
            }
        }
        let mut rest = found.into_iter().filter(|(name, _)| name.as_str() > token).peekable();
        let (mut text, mut last) = (String::new(), String::new());
        for (name, entry) in rest.by_ref().take(self.page_objects) {
            text.push_str(&entry.unwrap_or_else(|| {
                format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
            }));
            last = name;
        }
        let more = match rest.peek() {
            Some(_) => format!(
                "<IsTruncated>true</IsTruncated><NextContinuationToken>{last}\
                 </NextContinuationToken>"
            ),
            None => "<IsTruncated>false</IsTruncated>".to_owned(),
        };
        xml(format!("<ListBucketResult>{more}{text}</ListBucketResult>"))
    }
}

fn tag(number: u64) -> String {
    format!("\"{number:016x}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn ask(bucket: &Bucket, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(bucket.address()).unwrap();
        let length = body.len();
        write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        reply
    }

    #[test]
    fn bucket_honours_or_ignores_conditions_as_configured() {
        let create = "PUT /disks/a%2Fb HTTP/1.1\r\nIf-None-Match: *";
        for (care, second, kept) in [
            (Care::Honest, "412", "one"),
            (Care::IgnoresConditions, "200", "two"),
            (Care::RefusesAndWrites, "412", "two"),
        ] {
            let bucket = Bucket::start(care);
            assert!(ask(&bucket, create, "one").starts_with("HTTP/1.1 200"));
            assert!(ask(&bucket, create, "two").starts_with(&format!("HTTP/1.1 {second}")));
            let read = ask(&bucket, "GET /disks/a/b HTTP/1.1", "");
            assert!(read.ends_with(&format!("\r\n\r\n{kept}")), "{care:?}: {read}");
            assert_eq!(bucket.keys(), ["a/b"]);
        }
        assert!(ask(&Bucket::start(Care::KnowsNoConditions), create, "").contains(" 501 "));
    }

    #[test]
    fn another_key_or_bucket_is_refused_and_a_server_that_is_down_answers_nothing() {
        let bucket = Bucket::start(Care::Honest);
        let signed = |user: &str| {
            let head = "PUT /disks/a HTTP/1.1\r\nAuthorization: AWS4-HMAC-SHA256 Credential=";
            ask(&bucket, &format!("{head}{user}/20000101/us-east-1/s3/aws4_request"), "one")
        };
        assert!(signed("somebody").contains(" 403 ") && bucket.keys().is_empty());
        assert!(signed(USER).contains(" 200 "));
        assert!(ask(&bucket, "GET /other/a HTTP/1.1", "").contains("NoSuchBucket"));
        let mut idle = TcpStream::connect(bucket.address()).unwrap();
        write!(idle, "HEAD /disks/a HTTP/1.1\r\n\r\n").unwrap();
        idle.read_exact(&mut [0; 12]).unwrap();
        bucket.down();
        // Requests in flight end one way or the other, and no further ones are answered.
        let mut rest = Vec::new();
        let _ = idle.read_to_end(&mut rest);
        let mut other = TcpStream::connect(bucket.address()).unwrap();
        let _ = write!(other, "GET /disks/a HTTP/1.1\r\n\r\n");
        let mut reply = Vec::new();
        let _ = other.read_to_end(&mut reply);
        assert!(reply.is_empty(), "{}", String::from_utf8_lossy(&reply));
        bucket.up();
        assert!(ask(&bucket, "GET /disks/a HTTP/1.1", "").ends_with("one"));
    }

    #[test]
    fn listings_fold_at_the_delimiter_and_ranges_are_cut() {
        for (care, expected) in [(Care::Honest, true), (Care::ListsNothing, false)] {
            let bucket = Bucket::start(care);
            for key in ["x/1", "x/y/2", "z"] {
                ask(&bucket, &format!("PUT /disks/{key} HTTP/1.1"), "0123456789");
            }
            let list =
                ask(&bucket, "GET /disks?list-type=2&prefix=x%2F&delimiter=%2F HTTP/1.1", "");
            assert_eq!(list.contains("<Key>x/1</Key>"), expected, "{list}");
            assert_eq!(list.contains("<Prefix>x/y/</Prefix>"), expected, "{list}");
            assert!(!list.contains("<Key>z") && !list.contains("x/y/2"), "{list}");
            let part = ask(&bucket, "GET /disks/z HTTP/1.1\r\nRange: bytes=2-4", "");
            assert!(part.contains(" 206 ") && part.ends_with("\r\n\r\n234"), "{part}");
        }
    }
}
