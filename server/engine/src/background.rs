//! The background runtime: a separate runtime for work that no client waits for. The kernel schedules its
//! threads after those that serve clients.
//!
//! Invariants:
//! - Work in this lane gives way to requests but never stops altogether: when the log fills, its
//!   writers are slowed down, and this lane gets the time that they leave.

use block::{Error, ErrorKind, Result};
use std::sync::OnceLock;
use tokio::runtime::{Builder, Handle, Runtime};

/// Steps by which the runtime's threads are nicer: they get a ninth of the share of an ordinary
/// thread. Chosen by hand.
const NICE: i32 = 10;
/// The largest nice value of the kernel.
const NICE_MAX: i32 = 19;
/// Threads for compression, sealing and files. Chosen by hand: enough for segments under
/// construction and for the metadata database's compactions beside them.
const BLOCKING_THREAD_COUNT_MAX: usize = 12;

/// The background runtime of this process. It lives as long as the process.
///
/// # Errors
/// `Io` when threads cannot be started.
pub fn lane() -> Result<Handle> {
    static LANE: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = LANE.get() {
        return Ok(runtime.handle().clone());
    }
    let runtime = runtime(BLOCKING_THREAD_COUNT_MAX)?;
    // If two callers race, the spare runtime is shut down without blocking this thread.
    if let Err(spare) = LANE.set(runtime) {
        spare.shutdown_background();
    }
    Ok(LANE.get().expect("set above").handle().clone())
}

/// Makes another such runtime, with this number of threads for files at most, for a process that has its own use of
/// them.
///
/// # Errors
/// `Io` when threads cannot be started.
pub fn runtime(blocking_thread_count_max: usize) -> Result<Runtime> {
    // The daemon may have been started with another nice value than 0.
    let own = rustix::process::getpriority_process(None).unwrap_or(0);
    let nice = (own + NICE).min(NICE_MAX);
    let built = Builder::new_multi_thread()
        .enable_all()
        .thread_name("spindle-slow")
        .max_blocking_threads(blocking_thread_count_max)
        .on_thread_start(move || give_way(nice))
        .build();
    built.map_err(|error| Error::with_source(ErrorKind::Io, "start the background runtime", error))
}

/// Lowers the calling thread's priority. Should that fail, everything still works, less smoothly.
fn give_way(nice: i32) {
    if let Err(error) = rustix::process::setpriority_process(None, nice) {
        tracing::debug!(%error, "could not lower the priority of the background runtime");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_threads_are_nicer_than_others() {
        let nice = || rustix::process::getpriority_process(None).expect("may be asked");
        let before = nice();
        let lane = lane().expect("starts");
        let worker = lane.spawn(async move { nice() });
        let blocking = lane.spawn_blocking(nice);
        let (worker, blocking) = lane.block_on(async { (worker.await, blocking.await) });
        let lowered = (before + NICE).min(NICE_MAX);
        assert_eq!(worker.expect("runs"), lowered);
        assert_eq!(blocking.expect("runs"), lowered);
        assert_eq!(nice(), before, "and nobody else");
    }
}
