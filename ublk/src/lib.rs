//! ublk front end: block devices of this machine's kernel for any [`block::BlockDevice`].
//!
//! Invariants:
//! - A device outlives the process that serves it. The next process answers the requests in flight,
//!   and users of the device see a pause, never an error.
//! - The kernel's requests are checked like any input: none reaches the device outside the agreed
//!   limits.
//! - The interface is `include/uapi/linux/ublk_cmd.h` of the kernel. This crate implements it
//!   directly, so that the build needs no binding generator.
//!
//! ```text
//! device    add, recover, leave, remove      control  commands of /dev/ublk-control
//! queue     one thread, one ring: requests   wakes    of requests, from any thread
//! params    parameters of a device (pure)    request  checks of one request (pure)
//! abi       bytes <-> types (pure)           errno    ErrorKind -> result of a request
//! memory    of payloads, all queues (pure)   table    reads partition tables before the kernel does
//! seeded_bugs  deliberate failures, for tests
//! ```
#![deny(unsafe_code)]

mod abi;
mod control;
mod device;
mod errno;
mod memory;
mod params;
mod queue;
mod request;
mod seeded_bugs;
mod table;
mod wakes;

pub use abi::{IO_BYTES_MAX, QUEUE_DEPTH_MAX};
pub use device::{Device, Options, Statistics, check, delete, find, is_waiting};
pub use memory::{Memory, own_bytes};
