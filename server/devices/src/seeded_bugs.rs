//! The seeded bugs of kernel devices.
//!
//! Invariants: those of [`block::seeded_bugs`].

block::seeded_bugs! {
    /// A device is detached while data written to it before it was closed is still on its way.
    detached_at_once: "detached-at-once",
    /// The daemon exits after the kernel has given a device its number and before the number is
    /// recorded.
    ends_in_attach: "ends-in-attach",
    /// The record that a device has no volatile cache is written only together with its number.
    cache_noted_late: "cache-noted-late",
    /// The daemon itself opens its device to find out whether it is in use.
    opens_own_device: "opens-own-device",
}
