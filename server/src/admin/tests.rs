//! Tests of the admin socket.

use super::*;
use api::key::{KeyRequest, Secret};
use api::pool::PoolRequest;
use api::volume::VolumeRequest;
use cli::client::call;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct Echo;

impl AdminHandler for Echo {
    async fn handle(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Pool(PoolRequest::Status {}) => {
                Err(Error::new(ErrorKind::Fenced, "pool p was taken over"))
            }
            Request::Key(KeyRequest::Backup { .. }) => {
                Ok(Reply::RecoveryKey { key: Secret::new("SPINDLE-RECOVERY-1-ABCD".to_owned()) })
            }
            Request::Volume(VolumeRequest::List {}) => Ok(Reply::Volumes { volumes: Vec::new() }),
            other => Ok(Reply::Done { message: format!("{other:?}") }),
        }
    }
}

/// Runs `body` against a server on a fresh directory.
async fn with_server<F: Future<Output = ()>>(body: impl FnOnce(PathBuf) -> F) {
    let dir = tempfile::tempdir().unwrap();
    let server = AdminServer::bind(dir.path()).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let serving = tokio::spawn(server.serve(Arc::new(Echo), stopped, Duration::from_secs(60)));
    body(dir.path().to_owned()).await;
    stop.send(()).unwrap();
    serving.await.unwrap();
    assert!(!dir.path().join(SOCKET_NAME).exists());
    assert_eq!(call(dir.path(), &Request::Pool(PoolRequest::Status {})).await.unwrap(), None);
}

#[tokio::test]
async fn requests_are_answered_and_errors_keep_their_kind() {
    with_server(|dir| async move {
        let mode = std::fs::metadata(dir.join(SOCKET_NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let reply = call(&dir, &Request::Volume(VolumeRequest::List {})).await.unwrap();
        assert_eq!(reply, Some(Reply::Volumes { volumes: Vec::new() }));
        let error = call(&dir, &Request::Pool(PoolRequest::Status {})).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
        assert_eq!(error.to_string(), "pool p was taken over");
        let Some(Reply::RecoveryKey { key }) =
            call(&dir, &Request::Key(KeyRequest::Backup { replace: false })).await.unwrap()
        else {
            panic!("not a recovery key");
        };
        assert_eq!(key.expose(), "SPINDLE-RECOVERY-1-ABCD");
    })
    .await;
}

#[tokio::test]
async fn garbage_and_overlong_lines_are_refused_and_the_next_client_is_served() {
    with_server(|dir| async move {
        let mut long = vec![b'x'; usize::try_from(REQUEST_BYTES_MAX).unwrap() + 10];
        long.push(b'\n');
        let secret =
            br#"{"version":1,"request":{"key":{"action":"rotate","new":{"to":"hunter2"}}}}"#;
        let secret = [&secret[..], b"\n"].concat();
        let empty = b"{\"version\":1}\n".to_vec();
        for line in [b"\n".to_vec(), empty, b"\xff\xfe\n".to_vec(), secret, long] {
            let mut stream = UnixStream::connect(dir.join(SOCKET_NAME)).await.unwrap();
            // The server may answer and close before it has read all.
            let _ = stream.write_all(&line).await;
            let mut reply = String::new();
            let _ = stream.read_to_string(&mut reply).await;
            if line.len() < 1000 {
                assert!(reply.contains("\"kind\":\"invalid\""), "{reply}");
                assert!(!reply.contains("hunter2"), "{reply}");
            }
        }
        for _ in 0..3 {
            // Connects, sends nothing and leaves.
            drop(UnixStream::connect(dir.join(SOCKET_NAME)).await.unwrap());
        }
        assert!(call(&dir, &Request::Volume(VolumeRequest::List {})).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test]
async fn more_clients_than_connections_are_all_served() {
    with_server(|dir| async move {
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..CONNECTION_COUNT_MAX * 3 {
            let dir = dir.clone();
            calls.spawn(async move { call(&dir, &Request::Volume(VolumeRequest::List {})).await });
        }
        while let Some(outcome) = calls.join_next().await {
            assert!(outcome.unwrap().unwrap().is_some());
        }
    })
    .await;
}

#[tokio::test]
async fn a_leftover_socket_counts_as_no_daemon_and_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(call(dir.path(), &Request::Pool(PoolRequest::Status {})).await.unwrap(), None);
    drop(std::os::unix::net::UnixListener::bind(dir.path().join(SOCKET_NAME)).unwrap());
    assert_eq!(call(dir.path(), &Request::Pool(PoolRequest::Status {})).await.unwrap(), None);
    let server = AdminServer::bind(dir.path()).unwrap();
    drop(server);
    assert!(!dir.path().join(SOCKET_NAME).exists());
}

/// Never ends a flush, like while the store is away; signals when it has received one.
struct Stuck(watch::Sender<bool>);

impl AdminHandler for Stuck {
    async fn handle(&self, request: Request) -> Result<Reply> {
        if request == Request::Pool(PoolRequest::Drain {}) {
            self.0.send_replace(true);
            std::future::pending::<()>().await;
        }
        Ok(Reply::Done { message: String::new() })
    }
}

#[tokio::test]
async fn stop_abandons_endless_requests_and_tells_their_clients() {
    let dir = tempfile::tempdir().unwrap();
    let server = AdminServer::bind(dir.path()).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let begun = watch::Sender::new(false);
    let mut begins = begun.subscribe();
    let handler = Arc::new(Stuck(begun));
    let serving = tokio::spawn(server.serve(handler, stopped, Duration::from_millis(50)));
    let path = dir.path().to_owned();
    let flush =
        tokio::spawn(async move { call(&path, &Request::Pool(PoolRequest::Drain {})).await });
    begins.wait_for(|begun| *begun).await.unwrap();
    assert!(call(dir.path(), &Request::Pool(PoolRequest::Status {})).await.unwrap().is_some());
    stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(30), serving).await.expect("it ends").unwrap();
    let error = flush.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("stopped"), "{error}");
}

/// Carries requests out completely, and reports how they ended.
struct Waiting(tokio::sync::mpsc::UnboundedSender<&'static str>);

impl AdminHandler for Waiting {
    async fn handle(&self, request: Request) -> Result<Reply> {
        self.0.send("begun").unwrap();
        let asked = async {
            match request {
                Request::Volume(VolumeRequest::List {}) => std::future::pending().await,
                _ => Ok(Reply::Done { message: "done".to_owned() }),
            }
        };
        tokio::select! {
            biased;
            reply = asked => reply,
            () = engine::asker::gone() => {
                self.0.send("gone").unwrap();
                Err(Error::new(ErrorKind::Unavailable, "no client waits"))
            }
        }
    }
}

#[tokio::test]
async fn request_notices_a_vanished_client_but_no_half_close() {
    let dir = tempfile::tempdir().unwrap();
    let server = AdminServer::bind(dir.path()).unwrap();
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    let grace = Duration::from_secs(60);
    let serving = tokio::spawn(server.serve(Arc::new(Waiting(sender)), stopped, grace));
    let mut next = async || tokio::time::timeout(grace, events.recv()).await.unwrap().unwrap();
    let ask = async |request: &Request| {
        let mut stream = UnixStream::connect(dir.path().join(SOCKET_NAME)).await.unwrap();
        let line = api::message::encode_request(request).unwrap();
        stream.write_all(&line).await.unwrap();
        stream.shutdown().await.unwrap();
        stream
    };
    let gone = ask(&Request::Volume(VolumeRequest::List {})).await;
    assert_eq!(next().await, "begun");
    let mut half_closed = ask(&Request::Pool(PoolRequest::Stop {})).await;
    assert_eq!(next().await, "begun");
    let mut reply = String::new();
    half_closed.read_to_string(&mut reply).await.unwrap();
    assert!(reply.contains("done"), "{reply}");
    drop(gone);
    assert_eq!(next().await, "gone");
    stop.send(()).unwrap();
    serving.await.unwrap();
}
