//! Tests of the store connection and its probe.

use super::testing::{Fault, FaultyStore};
use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn s3(bucket: &str, prefix: &str) -> Location {
    Location::S3 { bucket: bucket.to_owned(), prefix: prefix.to_owned() }
}

#[test]
fn urls_name_stores() {
    let directory = |path: &str| Location::Directory(PathBuf::from(path));
    assert_eq!(Location::parse("/a/b").unwrap(), directory("/a/b"));
    assert_eq!(Location::parse("file:///a/b").unwrap(), directory("/a/b"));
    assert_eq!(Location::parse("a").unwrap(), directory("a"));
    assert_eq!(Location::parse("s3://b/p/q/").unwrap(), s3("b", "p/q"));
    assert_eq!(Location::parse("s3://b").unwrap(), s3("b", ""));
    assert!(matches!(Location::parse("gs://b/p").unwrap(), Location::Gcs { .. }));
    assert!(matches!(Location::parse("az://c/p").unwrap(), Location::Azure { .. }));
    for url in ["", "s3://", "s3:///p", "file://a", "ftp://a/b", "s3://b/../c"] {
        let error = Location::parse(url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}");
    }
}

#[test]
fn credentials_in_a_url_are_refused_and_not_repeated() {
    let error = Location::parse("s3://AKIA:hunter2@bucket/p").unwrap_err();
    assert!(error.chain().contains("environment") && !error.chain().contains("hunter2"));
}

#[test]
fn plain_http_is_for_this_machine() {
    for endpoint in ["http://127.0.0.1:9000", "http://localhost", "http://[::1]:9000/x"] {
        assert!(plain_http(Some(endpoint), None).unwrap(), "{endpoint}");
    }
    assert!(!plain_http(Some("https://s3.example"), None).unwrap());
    assert!(!plain_http(None, Some("true")).unwrap());
    assert!(plain_http(Some("http://s3.example"), Some("true")).unwrap());
    for endpoint in ["http://s3.example", "http://localhost.example", "http://127.0.0.1.example"] {
        let error = plain_http(Some(endpoint), Some("false")).unwrap_err().to_string();
        assert!(error.contains("AWS_ALLOW_HTTP"), "{error}");
    }
}

#[test]
fn every_client_is_kept_from_plain_http_to_other_machines() {
    let gcs = Location::Gcs { bucket: "bucket".into(), prefix: "p".into() };
    let azure = Location::Azure { container: "bucket".into(), prefix: "p".into() };
    let cases: [(_, _, _, &[(&str, &str)]); 3] = [
        (
            s3("bucket", "p"),
            "AWS_ENDPOINT_URL",
            "AWS_ALLOW_HTTP",
            &[("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "hunter2")],
        ),
        (gcs, "GOOGLE_BASE_URL", "GOOGLE_ALLOW_HTTP", &[("GOOGLE_BEARER_TOKEN", "hunter2")]),
        (
            azure,
            "AZURE_ENDPOINT",
            "AZURE_ALLOW_HTTP",
            &[("AZURE_STORAGE_ACCOUNT_NAME", "a"), ("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMg==")],
        ),
    ];
    for (location, endpoint, allow, credentials) in cases {
        let open = |more: &[(&str, &str)]| {
            let settings = credentials.iter().chain(more);
            let settings: Vec<_> =
                settings.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            open_remote(&location, &impatient(), Some(&settings))
        };
        let far = (endpoint, "http://store.example");
        for more in [&[far][..], &[far, (allow, "false")]] {
            let error = open(more).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{endpoint}");
            assert!(error.chain().contains("has no TLS"), "{endpoint}: {}", error.chain());
        }
        for more in [&[far, (allow, "true")][..], &[(endpoint, "http://127.0.0.1:9")]] {
            open(more).unwrap_or_else(|error| panic!("{endpoint}: {}", error.chain()));
        }
    }
}

#[test]
fn an_azure_store_without_an_account_says_which_variable_names_it() {
    let azure = Location::Azure { container: "bucket".into(), prefix: "p".into() };
    let error = open_remote(&azure, &impatient(), Some(&[])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("AZURE_STORAGE_ACCOUNT_NAME"), "{error}");
}

#[tokio::test]
async fn a_good_store_passes_the_probe_and_is_left_clean() {
    let memory = FaultyStore::new(Fault::None);
    memory.store().probe().await.unwrap();
    assert_eq!(memory.names().await, [""; 0]);

    let dir = tempfile::tempdir().unwrap();
    let url = format!("file://{}/new/store", dir.path().display());
    let store = Store::open(&url, &StoreOptions::default()).unwrap();
    store.probe().await.unwrap();
    assert_eq!(std::fs::read_dir(dir.path().join("new/store/probe")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_store_that_could_let_two_owners_win_is_refused() {
    for fault in [Fault::IgnoresConditions, Fault::LacksConditions, Fault::ListsNothing] {
        let memory = FaultyStore::new(fault);
        let error = memory.store().probe().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{fault:?}");
        assert!(error.to_string().contains("conditional"), "{error}");
        assert_eq!(memory.names().await, [""; 0], "{fault:?}");
    }
}

#[test]
fn a_local_store_that_cannot_be_made_says_why() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let url = format!("{}/store", file.path().display());
    let error = Store::open(&url, &StoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.chain().contains(&url), "{}", error.chain());
}

fn impatient() -> Patience {
    Patience {
        timeout: Duration::from_millis(500),
        connect_timeout: Duration::from_millis(500),
        retry: retry(0, Duration::from_millis(500)),
    }
}

fn s3_at(endpoint: &str) -> Store {
    let builder = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_region("us-east-1")
        .with_access_key_id("AKIAEXAMPLE")
        .with_secret_access_key("hunter2hunter2")
        .with_endpoint(endpoint);
    Store::from_objects("s3://bucket/p", open_s3(builder, "p", &impatient()).unwrap())
}

/// An endpoint that answers every request the same way.
async fn canned(status: &str, body: &str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let reply = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = [0; 16384];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(reply.as_bytes()).await;
        }
    });
    endpoint
}

#[tokio::test]
async fn each_way_to_fail_reads_differently() {
    let denied = canned("403 Forbidden", "<Error><Code>SignatureDoesNotMatch</Code></Error>").await;
    let missing = canned("404 Not Found", "<Error><Code>NoSuchBucket</Code></Error>").await;
    let unimplemented = canned("501 Not Implemented", "<Error/>").await;
    // A port that was just free and has no listener.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let unreachable = format!("http://{closed}");
    for (endpoint, kind, word) in [
        (denied, ErrorKind::Denied, "credentials"),
        (missing, ErrorKind::NotFound, "bucket"),
        (unreachable, ErrorKind::Unavailable, "no answer"),
    ] {
        let store = s3_at(&endpoint);
        // The probe begins with a put. Commands that only read begin with a listing, for which the
        // client gives less detail.
        let listed = store.control().list(None).try_next().await.unwrap_err();
        for error in [store.probe().await.unwrap_err(), store.explain("list objects", listed)] {
            assert_eq!(error.kind(), kind, "{}", error.chain());
            assert!(error.to_string().contains(word), "{}", error.chain());
            assert!(!error.chain().contains("hunter2"), "{}", error.chain());
            assert!(!error.chain().contains('<'), "{}", error.chain());
        }
    }
    assert!(s3_at(&unimplemented).probe().await.is_err());
}

#[tokio::test]
async fn an_endpoint_that_never_answers_is_given_up_on() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let error = s3_at(&endpoint).probe().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(error.to_string().contains("no answer"), "{}", error.chain());
}
