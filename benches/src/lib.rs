//! Measurements, and nothing that others use: `micro/` is one function at a time, `device/` a whole
//! disk beside its competitors, `soak` a long load. README.md beside this package says how to run them.
