//! Back-pressure: how long an acknowledgement is held back when the log fills. Pure.
//!
//! Invariants:
//! - Below the mark nothing is held back; above it, the rate that is let through falls smoothly
//!   from unbounded to less than what destage frees, so the log never runs into its end while
//!   destage moves.
//! - No acknowledgement is held back for longer than [`DELAY_NS_MAX`].

/// Longest delay of one acknowledgement. Chosen by hand: less than the second that a request may
/// wait at most.
pub(crate) const DELAY_NS_MAX: u64 = 900_000_000;
/// Rate assumed before anything was released, in bytes a second. Chosen by hand.
const RATE_FIRST: f64 = 128.0 * 1024.0 * 1024.0;
/// The rate never falls below this, in bytes a second: with destage at a stand the log is filled
/// slowly, and only when it is full writers wait for space. Chosen by hand.
const RATE_MIN: f64 = 1024.0 * 1024.0;
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
        // As much is let in as is freed half-way from the mark to the end, and next to nothing at
        // the end: even a rate that was guessed five times too high settles before it.
        let over = ((fill - self.mark) / (1.0 - self.mark)).clamp(1e-3, 1.0);
        let rate = (self.rate_now(now_ns) * (1.0 - over) / over).max(RATE_MIN);
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const RING: u64 = 1024 * MIB;

    /// Closed-loop writers against a destage of a fixed rate, in virtual time. Returns the highest
    /// fill, the longest delay, and the bytes a second let in over the second half.
    fn overload(writers: usize, bytes: u64, generation: u64, destage_rate: u64) -> (f64, u64, f64) {
        let mut pace = Pace::new(50, generation);
        let mut ready = vec![0u64; writers];
        let (mut written, mut released, mut destage_free_at) = (0u64, 0u64, 0u64);
        let (mut fill_max, mut delay_max, mut late) = (0f64, 0u64, 0u64);
        let mut frozen = std::collections::VecDeque::new();
        let end_ns = 400_000_000_000;
        loop {
            let writer = (0..writers).min_by_key(|w| ready[*w]).unwrap();
            let now = ready[writer];
            if now >= end_ns {
                return (fill_max, delay_max, late as f64 / 200.0);
            }
            while frozen.front().is_some_and(|done| *done <= now) {
                pace.on_release(frozen.pop_front().unwrap(), generation);
                released += generation;
            }
            let fill = (written - released) as f64 / RING as f64;
            fill_max = fill_max.max(fill);
            if fill >= 1.0 {
                ready[writer] = frozen.front().copied().unwrap_or(end_ns);
                continue;
            }
            if (written + bytes) / generation > written / generation {
                destage_free_at =
                    destage_free_at.max(now) + generation * 1_000_000_000 / destage_rate;
                frozen.push_back(destage_free_at);
            }
            written += bytes;
            late += if now > end_ns / 2 { bytes } else { 0 };
            let delay = pace.delay_ns(now, bytes, fill);
            delay_max = delay_max.max(delay);
            ready[writer] = now + delay.max(20_000);
        }
    }

    #[test]
    fn overload_settles_below_full_without_long_waits_and_without_waste() {
        for (writers, bytes, rate) in
            [(32, 4096, 50 * MIB), (32, 4096, 10 * MIB), (8, MIB, 100 * MIB), (1, 65536, 20 * MIB)]
        {
            let (fill, delay, throughput) = overload(writers, bytes, 64 * MIB, rate);
            let what = format!("{writers} x {bytes} at {rate}: {fill:.2} {delay} {throughput:.0}");
            assert!(fill < 1.0, "the log ran full: {what}");
            assert!(delay < 500_000_000, "a wait of {what}");
            assert!(throughput > 0.8 * rate as f64, "slower than destage: {what}");
        }
    }

    #[test]
    fn below_the_mark_nothing_waits_and_above_it_more_as_it_fills() {
        let mut pace = Pace::new(50, MIB);
        assert_eq!(pace.delay_ns(1000, MIB, 0.5), 0);
        let delays: Vec<u64> = [0.51, 0.6, 0.75, 0.9, 1.0]
            .iter()
            .map(|fill| Pace::new(50, MIB).delay_ns(0, MIB, *fill))
            .collect();
        assert!(delays.is_sorted() && delays[0] < delays[4] / 10, "{delays:?}");
        let mut pace = Pace::new(50, MIB);
        assert_eq!((0..10_000).map(|_| pace.delay_ns(0, MIB, 1.0)).max(), Some(DELAY_NS_MAX));
    }
}
