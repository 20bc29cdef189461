//! The outside world as traits, so that what depends on it can be simulated from a seed.
//!
//! Invariants:
//! - Each trait has two implementations: the real machine, and a simulated twin in `tests/sim`.

/// Monotonic time.
pub trait Clock: Send + Sync + 'static {
    /// Nanoseconds since some fixed moment; never goes back.
    fn now_ns(&self) -> u64;
}

/// Unpredictable bytes, for keys, salts and identities.
pub trait Random: Send + Sync + 'static {
    /// Fills `bytes`. Never fails: without a source of randomness the process must not go on.
    fn fill(&self, bytes: &mut [u8]);
}

/// The kernel's monotonic clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now_ns(&self) -> u64 {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        let elapsed = START.get_or_init(Instant::now).elapsed();
        u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The cipher library's random generator, reseeded from the kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, bytes: &mut [u8]) {
        aws_lc_rs::rand::fill(bytes).expect("the kernel gives random bytes");
    }
}
