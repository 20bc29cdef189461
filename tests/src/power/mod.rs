//! Loss of power, made by replaying what reached a disk: a kernel that logs every write and flush
//! of a device, a history of what a server answered meanwhile, and images of the device as a cut at
//! any moment could have left it.
//!
//! Invariants:
//! - What a cut may do is what a disk with a volatile cache may do: of the writes that were not
//!   flushed each is there, absent, or there in part, by sectors of 512 bytes.

pub mod device;
pub mod guest;
pub mod history;
pub mod image;
pub mod writelog;
