//! Places where a test may end the process, between any two steps of destage.
//!
//! Invariants:
//! - Without the feature `failpoints` a point is no code at all: the macro below is all there is.
//!
//! `SPINDLE_FAILPOINT=name` ends the process the first time that `name` is passed, `name:3` the
//! third time; as with `kill -9`, nothing is flushed or cleaned up.

/// Passes a named point. The name is a string literal, unique in the workspace.
#[macro_export]
macro_rules! fail_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::pass($name);
    };
}

/// Ends the process if the environment says so.
#[cfg(feature = "failpoints")]
pub fn pass(name: &str) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    static CHOSEN: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let chosen = CHOSEN.get_or_init(|| {
        let value = std::env::var("SPINDLE_FAILPOINT").ok()?;
        match value.split_once(':') {
            Some((name, nth)) => Some((name.to_owned(), nth.parse().ok()?)),
            None => Some((value, 1)),
        }
    });
    if let Some((chosen, nth)) = chosen
        && chosen == name
        && PASSED.fetch_add(1, Ordering::SeqCst) + 1 == *nth
    {
        eprintln!("fail point {name}: the process ends here");
        std::process::abort();
    }
}
