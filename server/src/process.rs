//! The process: its memory, its threads, its log, and its exit code.
//!
//! Invariants:
//! - Exit codes: 0 done, 1 failed, 2 the command line or the configuration is wrong, 3 a second
//!   signal ended the daemon before its stop was done, 4 the server ended the attachment of a
//!   client, 5 the disk of the write log failed.
//! - An error is printed once, at the end, and says what to do.

use crate::commands::{self, Failure};
use crate::data_node::DRIVE_THREAD_COUNT_MAX;
use crate::serve::EXIT_LOG_FAILED;
use block::{Error, ErrorKind, Result};
use cli::args::{Cli, Command};
use rustix::io::Errno;
use std::io::IsTerminal;
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Default log filter of a daemon. Libraries log only unusual events.
const FILTER_DAEMON: &str = "warn,server=info,engine=info,devices=info,control=info,nbd=info,ublk=info,wal=info,tiering=info,dnode=info";
/// Default log filter of a command.
const FILTER_COMMAND: &str = "warn";
/// Threads for files. Chosen by hand: enough for a queue of 32 reads of a cold cache, and some
/// more.
const BLOCKING_THREAD_COUNT_MAX: usize = 40;
/// Polls of tasks between two looks at sockets and at tasks that other threads woke. Chosen by
/// hand: one poll moves up to a quarter of a megabyte, and a small synced write must not wait for
/// many.
const POLLS_BETWEEN_LOOKS: u32 = 4;

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    if let Some(code) = devices::probe_process::serve_if_asked() {
        return code;
    }
    let cli = match cli::output::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    if let Err(error) = start_logging(&cli.command) {
        return fail(&cli, &Failure::Usage(error));
    }
    if cli.command.is_daemon() || cli.command.is_remote_attach() {
        write_back_memory();
    }
    let thread_count_max = match cli.command {
        Command::Dnode(_) => DRIVE_THREAD_COUNT_MAX,
        _ => BLOCKING_THREAD_COUNT_MAX,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(thread_count_max)
        .event_interval(POLLS_BETWEEN_LOOKS)
        .global_queue_interval(POLLS_BETWEEN_LOOKS)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            let error = Error::with_source(ErrorKind::Io, "start the runtime", error);
            return fail(&cli, &Failure::Failed(error));
        }
    };
    let outcome = runtime.block_on(commands::run(&cli));
    // Work that still blocks (an opening that a signal ended) must not delay the exit.
    runtime.shutdown_background();
    match outcome {
        Ok(code) => code,
        Err(failure) => fail(&cli, &failure),
    }
}

/// Tells the kernel that this process and all of its threads write back memory: if memory is short,
/// the kernel must not make it wait for a device that it serves itself.
fn write_back_memory() {
    match rustix::process::configure_io_flusher_behavior(true) {
        Ok(()) | Err(Errno::PERM | Errno::INVAL) => {} // not root, or a kernel before 5.6
        Err(error) => tracing::debug!(
            %error,
            "could not tell the kernel that the process writes back memory"
        ),
    }
}

fn fail(cli: &Cli, failure: &Failure) -> ExitCode {
    let (error, code) = match failure {
        Failure::Usage(error) => (error, 2),
        Failure::Failed(error)
            if error.kind() == ErrorKind::Fenced && cli.command.is_remote_attach() =>
        {
            (error, 4)
        }
        Failure::Failed(error) if wal::is_log_failure(error) && cli.command.is_daemon() => {
            (error, EXIT_LOG_FAILED)
        }
        Failure::Failed(error) => (error, 1),
    };
    cli::output::failure(cli.output, error);
    ExitCode::from(code)
}

fn start_logging(command: &Command) -> Result<()> {
    let filter = match std::env::var("SPINDLE_LOG") {
        Ok(text) => EnvFilter::try_new(&text).map_err(|error| {
            let context = format!("SPINDLE_LOG={text} is not a filter, like info or tiering=debug");
            Error::with_source(ErrorKind::Invalid, context, error)
        })?,
        Err(_) if command.is_daemon() || command.is_remote_attach() => {
            EnvFilter::new(FILTER_DAEMON)
        }
        Err(_) => EnvFilter::new(FILTER_COMMAND),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
