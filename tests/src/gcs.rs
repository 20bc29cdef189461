//! A server of Google's object store for one test: fake-gcs-server, behind a front of the tests'
//! own.
//!
//! The emulator has Google's JSON interface. spindle's client speaks the XML interface, of which
//! the emulator supports reads only, and ignores their conditions. So the front translates each XML
//! request to the request of the JSON interface that does the same, and returns the answer in the
//! form of Google's XML interface.
//!
//! The emulator keeps the objects and their generations, serves listings with their pages, serves
//! ranges, and decides conditional writes: `x-goog-if-generation-match` reaches it as
//! `ifGenerationMatch`, which it checks under the lock under which it writes. The front translates
//! the names of requests and headers, keeps the parts of an upload until it is complete, and checks
//! the token, as the emulator accepts any. Google's own credentials are not tested here.
//!
//! Invariants:
//! - The objects are gone with the guard. Both servers listen on this machine only.
//! - The front refuses a request that it does not know, and never answers it as if it were another.

use crate::http::{Answer, Reply, Request, ask, escape, refusal, xml};
use crate::place::Place;
use crate::process::Process;
use crate::store::{BUCKET, free_address};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The only token that is accepted.
pub const TOKEN: &str = "spindletest-token";

/// A running server with an empty bucket.
pub struct Gcs {
    address: String,
    _process: Process,
    _place: Place,
}

/// Parts of incomplete uploads, by upload and number.
#[derive(Default)]
struct Uploads {
    begun_count: u64,
    parts: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
}

impl Gcs {
    /// Returns the emulator's program, if it was built (see tests/run).
    #[must_use]
    pub fn program() -> Option<PathBuf> {
        let path = PathBuf::from(std::env::var_os("SPINDLE_TEST_FAKE_GCS")?);
        path.exists().then_some(path)
    }

    /// Starts a server with an empty bucket.
    #[must_use]
    pub fn start() -> Gcs {
        let place = Place::new();
        let emulator = free_address();
        let process = start_emulator(&emulator, &place);
        let bucket = format!("{{\"name\":\"{BUCKET}\"}}");
        let json = [("Content-Type", "application/json")];
        let made = ask(&emulator, "POST", "/storage/v1/b?project=tests", &json, bucket.as_bytes());
        assert_eq!(made.expect("it answers").status, 200, "make the bucket");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        // It ends with the test's process.
        std::thread::spawn(move || {
            let uploads = Arc::new(Mutex::new(Uploads::default()));
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let (emulator, uploads) = (emulator.clone(), Arc::clone(&uploads));
                // A client may leave at any moment; replies that it has received stay true.
                std::thread::spawn(move || drop(serve(&stream, &emulator, &uploads)));
            }
        });
        Gcs { address, _process: process, _place: place }
    }

    /// Returns the front's address, `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the environment variables that point a client at it.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("GOOGLE_BASE_URL", format!("http://{}", self.address)),
            ("GOOGLE_BEARER_TOKEN", TOKEN.to_owned()),
        ]
    }
}

fn start_emulator(address: &str, place: &Place) -> Process {
    let (host, port) = address.rsplit_once(':').expect("host:port");
    let mut command = Command::new(Gcs::program().expect("checked by the test"));
    command.args(["-backend", "memory", "-scheme", "http", "-host", host, "-port", port]);
    command.args(["-public-host", address, "-log-level", "warn"]);
    let log = place.join("log");
    let process = Process::start(&mut command, &log).expect("it starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while TcpStream::connect(address).is_err() {
        let log = || std::fs::read_to_string(&log).unwrap_or_default();
        assert!(Instant::now() < deadline, "fake-gcs-server does not come up: {}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    process
}

fn serve(stream: &TcpStream, emulator: &str, uploads: &Mutex<Uploads>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    while let Some(request) = Request::receive(&mut reader)? {
        // If the emulator is gone, the connection ends, as it would if the whole server were gone.
        answer(emulator, uploads, &request)?.send(stream, &request.method)?;
    }
    Ok(())
}

fn answer(emulator: &str, uploads: &Mutex<Uploads>, request: &Request) -> io::Result<Reply> {
    if request.headers.get("authorization").map(String::as_str) != Some(&format!("Bearer {TOKEN}"))
    {
        return Ok(refusal(401, "AuthenticationRequired"));
    }
    let upload = request.query.get("uploadId");
    match (request.method.as_str(), upload) {
        ("GET", None) if request.key.is_empty() => list(emulator, request),
        _ if request.key.is_empty() => Ok(refusal(501, "NotImplemented")),
        ("GET" | "HEAD", None) => get(emulator, request),
        ("PUT", None) if !request.headers.contains_key("x-goog-copy-source") => {
            put(emulator, request, &request.body)
        }
        ("DELETE", None) => delete(emulator, request),
        ("POST", None) if request.query.contains_key("uploads") => Ok(begin(uploads)),
        ("PUT", Some(upload)) => Ok(put_part(uploads, upload, request)),
        ("POST", Some(upload)) => complete(emulator, uploads, upload, request),
        ("DELETE", Some(upload)) => {
            uploads.lock().expect("no panic holds it").parts.remove(upload);
            Ok(Reply::empty(204))
        }
        _ => Ok(refusal(501, "NotImplemented")),
    }
}

/// Returns the object's path in the JSON interface.
fn object(request: &Request) -> String {
    format!("/storage/v1/b/{}/o/{}", escape(&request.bucket), escape(&request.key))
}

/// Returns Google's answer for a request that the emulator has refused.
fn refused(answer: &Answer) -> Reply {
    match answer.status {
        // For a missing bucket or object; neither body says which.
        404 => refusal(404, "NoSuchKey"),
        412 => refusal(412, "PreconditionFailed"),
        416 => refusal(416, "InvalidRange"),
        status => refusal(status, "Refused"),
    }
}

fn json(answer: &Answer) -> io::Result<Value> {
    serde_json::from_slice(&answer.body).map_err(io::Error::other)
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_default()
}

fn put(emulator: &str, request: &Request, body: &[u8]) -> io::Result<Reply> {
    let (bucket, name) = (escape(&request.bucket), escape(&request.key));
    let mut target = format!("/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}");
    if let Some(generation) = request.headers.get("x-goog-if-generation-match") {
        let _ = write!(target, "&ifGenerationMatch={}", escape(generation));
    }
    let headers = [("Content-Type", "application/octet-stream")];
    let answer = ask(emulator, "POST", &target, &headers, body)?;
    if answer.status != 200 {
        return Ok(refused(&answer));
    }
    let made = json(&answer)?;
    let headers = vec![
        ("ETag", format!("\"{}\"", text(&made, "etag"))),
        ("x-goog-generation", text(&made, "generation").to_owned()),
    ];
    Ok(Reply { headers, ..Reply::empty(200) })
}

fn get(emulator: &str, request: &Request) -> io::Result<Reply> {
    let range = request.headers.get("range").map(|range| ("Range", range.as_str()));
    let range: Vec<_> = range.into_iter().collect();
    let target = format!("/download{}", object(request));
    let answer = ask(emulator, "GET", &target, &range, &[])?;
    if !matches!(answer.status, 200 | 206) {
        return Ok(refused(&answer));
    }
    let kept = ["ETag", "Last-Modified", "x-goog-generation", "Content-Range"];
    let headers = kept
        .into_iter()
        .filter_map(|name| Some((name, answer.headers.get(&name.to_ascii_lowercase())?.clone())));
    Ok(Reply { status: answer.status, headers: headers.collect(), body: answer.body })
}

fn delete(emulator: &str, request: &Request) -> io::Result<Reply> {
    let answer = ask(emulator, "DELETE", &object(request), &[], &[])?;
    Ok(if answer.status < 300 { Reply::empty(204) } else { refused(&answer) })
}

fn list(emulator: &str, request: &Request) -> io::Result<Reply> {
    let mut target = format!("/storage/v1/b/{}/o?projection=noAcl", escape(&request.bucket));
    for (theirs, its) in [
        ("prefix", "prefix"),
        ("delimiter", "delimiter"),
        ("continuation-token", "pageToken"),
        ("max-keys", "maxResults"),
        ("start-after", "startOffset"),
    ] {
        if let Some(value) = request.query.get(theirs) {
            let _ = write!(target, "&{its}={}", escape(value));
        }
    }
    let answer = ask(emulator, "GET", &target, &[], &[])?;
    match answer.status {
        200 => {}
        404 => return Ok(refusal(404, "NoSuchBucket")),
        _ => return Ok(refused(&answer)),
    }
    let found = json(&answer)?;
    let all = |name: &str| found[name].as_array().cloned().unwrap_or_default();
    let mut body = "<ListBucketResult>".to_owned();
    for item in all("items") {
        let key = text(&item, "name");
        // A JSON listing that starts at a key includes the key; an XML listing after it does not.
        if request.query.get("start-after").is_some_and(|after| after == key) {
            continue;
        }
        let (size, etag, modified) =
            (text(&item, "size"), text(&item, "etag"), text(&item, "updated"));
        let _ = write!(
            body,
            "<Contents><Key>{key}</Key><Size>{size}</Size><ETag>&quot;{etag}&quot;</ETag>\
             <LastModified>{modified}</LastModified></Contents>"
        );
    }
    for prefix in all("prefixes") {
        let prefix = prefix.as_str().unwrap_or_default();
        let _ = write!(body, "<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>");
    }
    let next = text(&found, "nextPageToken");
    if !next.is_empty() {
        let _ = write!(body, "<NextContinuationToken>{next}</NextContinuationToken>");
    }
    Ok(xml(body + "</ListBucketResult>"))
}

fn begin(uploads: &Mutex<Uploads>) -> Reply {
    let mut uploads = uploads.lock().expect("no panic holds it");
    uploads.begun_count += 1;
    let upload = format!("upload-{}", uploads.begun_count);
    uploads.parts.insert(upload.clone(), BTreeMap::new());
    let result = "InitiateMultipartUploadResult";
    xml(format!("<{result}><UploadId>{upload}</UploadId></{result}>"))
}

fn put_part(uploads: &Mutex<Uploads>, upload: &str, request: &Request) -> Reply {
    let number = request.query.get("partNumber").and_then(|text| text.parse().ok());
    let mut uploads = uploads.lock().expect("no panic holds it");
    let (Some(parts), Some(number)) = (uploads.parts.get_mut(upload), number) else {
        return refusal(404, "NoSuchUpload");
    };
    parts.insert(number, request.body.clone());
    Reply { headers: vec![("ETag", format!("\"{upload}-{number}\""))], ..Reply::empty(200) }
}

fn complete(
    emulator: &str,
    uploads: &Mutex<Uploads>,
    upload: &str,
    request: &Request,
) -> io::Result<Reply> {
    // The upload stays until the object exists, so that the request can be repeated.
    let parts = uploads.lock().expect("no panic holds it").parts.get(upload).cloned();
    let Some(parts) = parts else { return Ok(refusal(404, "NoSuchUpload")) };
    let named = String::from_utf8_lossy(&request.body).matches("<PartNumber>").count();
    if named != parts.len() {
        return Ok(refusal(400, "InvalidPart"));
    }
    let bytes: Vec<u8> = parts.into_values().flatten().collect();
    let made = put(emulator, request, &bytes)?;
    if made.status != 200 {
        return Ok(made);
    }
    uploads.lock().expect("no panic holds it").parts.remove(upload);
    let tag = made.headers.iter().find(|(name, _)| *name == "ETag");
    let tag = tag.map_or("", |(_, tag)| tag.as_str()).replace('"', "&quot;");
    let result = "CompleteMultipartUploadResult";
    let body = xml(format!("<{result}><ETag>{tag}</ETag></{result}>"));
    Ok(Reply { headers: [body.headers, made.headers].concat(), ..body })
}
