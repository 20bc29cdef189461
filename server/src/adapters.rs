//! Adapters between the engine and the crates that reach it through traits of their own: exports of
//! the NBD server, and volumes of kernel devices.

pub mod copy_exports;
pub mod exports;
pub mod log_members;
pub mod pool_volumes;
