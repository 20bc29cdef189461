//! Devices of this machine through the kernel's nbd driver, for kernels without ublk.
//!
//! The driver is an NBD client inside the kernel. This process passes it sockets by generic netlink
//! and holds the other ends, so no program needs to be installed. Source: drivers/block/nbd.c of
//! the kernel.
//!
//! ```text
//! device   a device and its connections    driver  commands, /sys
//! netlink  bytes of the commands (pure)    siblings  which of several connections are over
//! ```

mod device;
mod driver;
mod netlink;
mod siblings;

pub use device::{
    Backend, CONNECTION_COUNT_MAX, Device, DeviceOptions, QUEUE_DEPTH, Statistics, Stop,
    block_path, check, delete, delete_any, find, identifier_of, identifiers,
};
pub(crate) use siblings::Look;
pub use siblings::Siblings;
