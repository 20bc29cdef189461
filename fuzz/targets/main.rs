//! The fuzz targets: one test for each decoder of bytes from a disk, a store, a peer or a client.
//!
//! Invariants:
//! - A target repairs checksums and seals of most inputs, with keys that it knows, so that the
//!   decoders behind them are reached. It does so by the documented bytes, not with the encoders.
//! - A decoder that accepts an input keeps its promises: it encodes it to the same bytes where the
//!   format has one form, or to bytes that decode to the same value.

mod admin;
mod cache;
mod cluster_nodes;
mod config;
mod copies;
mod data_node;
mod documents;
mod fragment;
mod log;
mod member;
#[path = "../../nbd/tests/server/memory.rs"]
#[allow(dead_code, reason = "the tests of nbd also plant failures and look at the calls")]
mod memory;
mod messages;
mod nbd_session;
mod nbd_wire;
mod node;
mod records;
mod ring;
mod seals;
mod segment;
mod words;

use fuzz::AllocationBound;
use std::path::{Path, PathBuf};

/// The bound of a decoder that holds its input a few times.
const SMALL: AllocationBound = AllocationBound { fixed_bytes: 64 << 10, bytes_per_input_byte: 16 };
/// The bound of a reader with buffers of fixed size, or with a runtime around it.
const LARGE: AllocationBound = AllocationBound { fixed_bytes: 8 << 20, bytes_per_input_byte: 64 };

/// Leaves an input as it is: the format has no checksum.
fn no_repair(_: &mut Vec<u8>) {}

/// Makes a directory in memory if this machine has a file system for that, as some targets write
/// files in every execution.
fn dir_in_memory() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = match memory.is_dir() {
        true => tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()),
        false => tempfile::tempdir(),
    };
    made.expect("a directory")
}

/// Writes a file whose contents the target chooses.
fn write(path: PathBuf, bytes: &[u8]) {
    std::fs::write(&path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// Makes a runtime whose tasks run on the thread of the target, where panics and memory count.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}
