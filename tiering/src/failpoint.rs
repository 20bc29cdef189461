//! Points at which a test may end the process, between any two steps of destage.
//!
//! Invariants:
//! - Without the feature `failpoints` a point compiles to no code at all.
//!
//! `SPINDLE_FAILPOINT=name` ends the process when `name` is passed for the first time, `name:3` for
//! the third time. Like `kill -9`, this flushes and cleans up nothing.

/// Passes a named point. The name is a string literal, unique in the workspace.
#[macro_export]
macro_rules! fail_point {
    ($name:literal) => {
        #[cfg(feature = "failpoints")]
        $crate::failpoint::pass($name);
    };
}

/// Ends the process if the environment selects this point.
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
