//! Serves a volume in memory over NBD, to test clients and to measure the protocol alone.
//!
//! ```text
//! memory --size BYTES [--name NAME] [--tcp ADDRESS] [--unix PATH] [--read-only]
//!        [--tls CERT KEY [--tls-ca CA]] [--tls-optional] [--memory BYTES] [--threads COUNT]
//! ```
//! Prints one URI per listener, then `ready`. SIGTERM or Ctrl-C stops it in an orderly way.

#[path = "../tests/server/memory.rs"]
#[allow(dead_code, reason = "the tests of this package also seed failures and look at the calls")]
mod memory;

use memory::{MemoryDevice, MemoryExports};
use nbd::{Listener, Server, ServerOptions, TlsMode, TlsOptions, check_listen_address};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut size_bytes, mut name, mut threads) = (256u64 << 20, "memory".to_owned(), 1);
    let (mut tcp, mut unix, mut tls, mut tls_ca) = (None, None, None, None);
    let (mut is_read_only, mut is_tls_optional) = (false, false);
    let mut options = ServerOptions { can_resize: true, ..ServerOptions::default() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} wants a value"));
        match argument.as_str() {
            "--size" => size_bytes = value()?.parse()?,
            "--name" => name = value()?,
            "--threads" => threads = value()?.parse()?,
            "--memory" => options.payload_memory_bytes = value()?.parse()?,
            "--tcp" => tcp = Some(value()?.parse()?),
            "--unix" => unix = Some(PathBuf::from(value()?)),
            "--tls" => tls = Some((PathBuf::from(value()?), PathBuf::from(value()?))),
            "--tls-ca" => tls_ca = Some(PathBuf::from(value()?)),
            "--tls-optional" => is_tls_optional = true,
            "--read-only" => is_read_only = true,
            _ => return Err(format!("unknown argument {argument}").into()),
        }
    }
    let mode = match &tls {
        None => TlsMode::Off,
        Some(_) if is_tls_optional => TlsMode::On,
        Some(_) => TlsMode::Required,
    };
    options.tls = tls.map(|(certificate, key)| TlsOptions { certificate, key, client_ca: tls_ca });
    let mut device = MemoryDevice::new(size_bytes);
    if is_read_only {
        device = device.read_only();
    }
    let exports = Arc::new(MemoryExports([(name.clone(), Arc::new(device))].into()));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    runtime.block_on(async move {
        let server = Server::new(exports, options)?;
        let mut serving = tokio::task::JoinSet::new();
        if let Some(address) = tcp {
            check_listen_address(&address, mode, false)?;
            let listener = Listener::tcp(address, mode).await?;
            let scheme = if mode == TlsMode::Off { "nbd" } else { "nbds" };
            println!("{scheme}://{}/{name}", listener.tcp_address().expect("just bound"));
            let server = server.clone();
            serving.spawn(async move { server.serve(listener).await });
        }
        if let Some(path) = unix {
            let listener = Listener::unix(&path, 0o600, TlsMode::Off).await?;
            println!("nbd+unix:///{name}?socket={}", path.display());
            let server = server.clone();
            serving.spawn(async move { server.serve(listener).await });
        }
        println!("ready");
        use tokio::signal::unix::{SignalKind, signal};
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        server.stop(Duration::from_secs(5));
        while let Some(ended) = serving.join_next().await {
            ended??;
        }
        let status = server.status();
        eprintln!("{status:?}");
        Ok(())
    })
}
