//! Adapters: implement the interfaces that one package requires with those that another one offers.

pub mod pool_volumes;
