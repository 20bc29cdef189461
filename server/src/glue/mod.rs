//! Adapters: what one package asks for, in terms of what another one offers.

pub mod admin;
pub(crate) mod copy_exports;
pub mod exports;
