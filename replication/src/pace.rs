//! Back-pressure: how long an acknowledgement is held back when the log fills. Pure.
//!
//! Invariants:
//! - Below the mark nothing is held back; above it, the rate that is let through falls smoothly
//!   from unbounded to less than what destage frees, so the log never runs into its end while
//!   destage moves.
//! - No acknowledgement is held back for longer than [`DELAY_NS_MAX`].

/// Longest delay of one acknowledgement. Chosen by hand: half of the second that a request may
/// wait at most.
pub(crate) const DELAY_NS_MAX: u64 = 400_000_000;
/// Rate assumed before anything was released, in bytes a second. Chosen by hand.
const RATE_FIRST: f64 = 256.0 * 1024.0 * 1024.0;
/// The rate never falls below this, in bytes a second: with destage at a stand the log is filled
/// slowly, and only when it is full writers wait for space. Chosen by hand.
const RATE_MIN: f64 = 1024.0 * 1024.0;
/// At this part of the way from the mark to the end, as much is let in as is freed.
const BALANCE: f64 = 0.5;
const NS: f64 = 1e9;

/// The regulator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Part of the ring, from 0 to 1, from which writers are slowed.
    mark: f64,
    /// Bytes a second that destage frees.
    rate: f64,
    /// The moment up to which the admitted bytes have been paid for.
    paid_ns: u64,
    released_ns: Option<u64>,
    released_bytes: f64,
}

impl Pace {
    pub(crate) fn new(slow_from_percent: u8, generation_bytes: u64) -> Self {
        Pace {
            mark: f64::from(slow_from_percent) / 100.0,
            rate: RATE_FIRST,
            paid_ns: 0,
            released_ns: None,
            released_bytes: generation_bytes as f64,
        }
    }

    /// Destage freed `bytes` of the log.
    pub(crate) fn on_release(&mut self, now_ns: u64, bytes: u64) {
        let bytes = bytes as f64;
        if let Some(before) = self.released_ns {
            let seconds = (now_ns.saturating_sub(before) as f64 / NS).max(1e-3);
            self.rate = (0.5 * self.rate + 0.5 * bytes / seconds).max(RATE_MIN);
        }
        self.released_ns = Some(now_ns);
        self.released_bytes = bytes.max(1.0);
    }

    /// Destage ran dry: the next release says nothing about how fast it can be.
    pub(crate) fn on_idle(&mut self) {
        self.released_ns = None;
    }

    /// Nanoseconds to hold back the acknowledgement of an entry that takes `bytes` of the log, with
    /// `fill` (0 to 1) of the log in use.
    pub(crate) fn delay_ns(&mut self, now_ns: u64, bytes: u64, fill: f64) -> u64 {
        if fill <= self.mark {
            self.paid_ns = now_ns;
            return 0;
        }
        let over = ((fill - self.mark) / (1.0 - self.mark)).clamp(1e-3, 1.0);
        let rate = self.rate_now(now_ns) * BALANCE / over;
        let cost_ns = (bytes as f64 / rate * NS) as u64;
        self.paid_ns = self.paid_ns.max(now_ns).saturating_add(cost_ns);
        // A debt beyond the longest delay is forgiven: the fill that rises meanwhile asks for more.
        self.paid_ns = self.paid_ns.min(now_ns.saturating_add(DELAY_NS_MAX));
        self.paid_ns - now_ns
    }

    /// The rate, falling while a release is overdue.
    fn rate_now(&self, now_ns: u64) -> f64 {
        let Some(before) = self.released_ns else { return self.rate };
        let seconds = now_ns.saturating_sub(before) as f64 / NS;
        let due = 2.0 * self.released_bytes;
        if seconds * self.rate > due { (due / seconds).max(RATE_MIN) } else { self.rate }
    }
}
