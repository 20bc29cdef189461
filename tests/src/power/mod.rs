//! Loss of power, simulated by replaying the writes that reached a disk. This takes a kernel that
//! logs every write and flush of a device, a history of a server's answers meanwhile, and images of
//! the device as a cut at any moment could have left it.
//!
//! Invariants:
//! - A cut may do what a disk with a volatile cache may do: each write that was not flushed is
//!   present, absent, or present in part, by sectors of 512 bytes.

pub mod device;
pub mod guest;
pub mod history;
pub mod image;
pub mod writelog;
