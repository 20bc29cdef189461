//! Kernel devices: volumes as block devices of this machine, over its ublk or its nbd driver.
//!
//! This crate owns the list of devices, their return after a restart, their removal, and the links
//! with stable names that lead to them. It sees volumes only through the traits [`Volumes`] and
//! [`Volume`]: it does not know where data lies, who else may write to a volume, who owns the pool,
//! or how an administrator asks for a device.
//!
//! Invariants:
//! - A device outlives the process that serves it, and continues with the next one.
//! - A process that serves devices never waits for one of them: such a wait would keep it from
//!   ending, and its successor from starting.
//!
//! ```text
//! attachments    the devices of a pool: attach, detach, recover    volumes      the traits
//! remote         the device of a volume of another machine         record       attachments.json
//! device         one device, with either driver                    udev         announces links
//! unserved       devices that no process serves                    locks        show who serves
//! in_use         users of a device                                 identifiers  in the nbd driver
//! links          with stable names                                 blocking     threads for work
//! probe_process  operations on devices, in a process of their own
//! stacked        paths on devices that no process serves
//! seeded_bugs    deliberate failures, for tests
//! ```
#![forbid(unsafe_code)]

pub mod attachments;
mod blocking;
mod device;
mod identifiers;
mod in_use;
mod links;
mod locks;
pub mod probe_process;
mod record;
pub mod remote;
mod seeded_bugs;
pub mod stacked;
mod udev;
mod unserved;
pub mod volumes;

pub use attachments::{AttachmentInfo, Attachments, AttachmentsOptions};
pub use blocking::blocking;
pub use record::{AttachOptions, Driver, FILE};
pub use unserved::{clean_up, clean_up_device, device_in};
pub use volumes::{Volume, Volumes};
