//! Adapters: what one package asks for, in terms of what another one offers.

pub mod admin;
pub mod exports;
