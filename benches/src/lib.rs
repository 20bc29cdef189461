//! Measurements only; no package depends on this one. `micro/` measures one function at a time,
//! `device/` a whole disk beside its competitors, `soak` a long load. The README.md of this package
//! says how to run them.
