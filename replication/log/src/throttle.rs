//! Back-pressure: how long an acknowledgement is held back as the log fills. Pure logic without
//! I/O.
//!
//! Invariants:
//! - Below the mark nothing is held back. Above it, the admitted rate falls smoothly from unbounded
//!   to less than the rate that destage frees, so the log never fills up while destage moves.
//! - No acknowledgement is held back for longer than [`DELAY_NS_MAX`].
//! - All acknowledgements that are held back wait at one gate, which opens for all at once: they
//!   cost a single timer, and their next writes gather in one batch. The clock is not read while
//!   the gate is closed or while little is owed.

pub(crate) mod gate;

/// Longest delay of one acknowledgement. Chosen by hand: less than the longest wait of a request,
/// which is a second.
pub(crate) const DELAY_NS_MAX: u64 = 900_000_000;
/// Shorter delays are not waited for but added to the debt. Source: the granularity of tokio's
/// timer.
const SLEEP_NS_MIN: u64 = 1_000_000;
/// Longest period of few writes that counts as credit for later writes. Chosen by hand: ten of the
/// shortest waits.
const CREDIT_NS_MAX: u64 = 10_000_000;
/// Rate assumed before the first release, in bytes a second. Chosen by hand.
const RATE_FIRST: f64 = 128.0 * 1024.0 * 1024.0;
/// Lower limit of the rate, in bytes a second: if destage stands still, the log is filled slowly,
/// and writers wait for space only when it is full. Chosen by hand.
const RATE_MIN: f64 = 1024.0 * 1024.0;
const NS: f64 = 1e9;

/// The decision about an acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It goes at once.
    Go,
    /// It waits until the gate opens.
    Wait,
    /// It waits too. It closed the gate, which its caller has to open after `delay_ns`.
    Close { delay_ns: u64 },
}

/// The regulator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Throttle {
    /// Part of the ring, from 0 to 1, from which writers are slowed.
    mark: f64,
    /// Bytes a second that destage frees.
    rate: f64,
    /// The rate when the clock was last read: see [`Throttle::rate_now`].
    rate_seen: f64,
    /// The moment up to which the admitted bytes are paid for, not counting `owed_ns`.
    paid_ns: u64,
    /// Cost of the bytes admitted since the clock was read at `asked_ns`.
    owed_ns: u64,
    asked_ns: u64,
    is_closed: bool,
    released_ns: Option<u64>,
    released_bytes: f64,
}

impl Throttle {
    pub(crate) fn new(slow_from_percent: u8, generation_bytes: u64) -> Self {
        Throttle {
            mark: f64::from(slow_from_percent) / 100.0,
            rate: RATE_FIRST,
            rate_seen: RATE_FIRST,
            paid_ns: 0,
            owed_ns: 0,
            asked_ns: 0,
            is_closed: false,
            released_ns: None,
            released_bytes: generation_bytes as f64,
        }
    }

    /// Records that destage freed `bytes` of the log by releasing a generation. `share` is how full
    /// that generation was: 1 if it was frozen for being full.
    pub(crate) fn on_release(&mut self, now_ns: u64, bytes: u64, share: f64) {
        let bytes = bytes as f64;
        if let Some(before) = self.released_ns {
            let seconds = (now_ns.saturating_sub(before) as f64 / NS).max(1e-3);
            // Each release has a fixed cost, so a small one says nothing about the rate and counts
            // for little.
            let weight = 0.5 * share.clamp(0.0, 1.0);
            self.rate = ((1.0 - weight) * self.rate + weight * bytes / seconds).max(RATE_MIN);
        }
        self.released_ns = Some(now_ns);
        let share = share.clamp(0.0, 1.0);
        self.released_bytes = ((1.0 - share) * self.released_bytes + share * bytes).max(1.0);
        self.rate_seen = self.rate;
    }

    /// Records that destage is idle: the next release says nothing about its possible speed.
    pub(crate) fn on_idle(&mut self) {
        self.released_ns = None;
    }

    /// Records that destage pauses although it has work: the time to the next release counts from
    /// now.
    pub(crate) fn on_pause(&mut self, now_ns: u64) {
        self.released_ns = Some(now_ns);
    }

    /// Records how much of the log is in use after a release. If there is room, the debt is
    /// dropped.
    pub(crate) fn on_fill(&mut self, fill: f64) {
        if fill <= self.mark {
            self.owed_ns = 0;
        }
    }

    /// Decides on the acknowledgement of an entry that takes `bytes` of the log, with `fill` (0 to
    /// 1) of the log in use. Calls `now_ns` only when enough is owed.
    pub(crate) fn admit(&mut self, bytes: u64, fill: f64, now_ns: impl FnOnce() -> u64) -> Hold {
        if fill <= self.mark {
            return Hold::Go;
        }
        // A debt beyond the longest delay is forgiven: the rising fill asks for more anyway.
        self.owed_ns = self.owed_ns.saturating_add(self.cost_ns(bytes, fill)).min(DELAY_NS_MAX);
        if self.is_closed {
            return Hold::Wait;
        }
        if self.owed_ns < SLEEP_NS_MIN {
            return Hold::Go;
        }
        let now_ns = now_ns();
        self.rate_seen = self.rate_now(now_ns);
        let credit_from = now_ns.saturating_sub(CREDIT_NS_MAX);
        let from_ns = self.paid_ns.max(self.asked_ns).max(credit_from);
        let owed_ns = std::mem::take(&mut self.owed_ns);
        self.paid_ns = from_ns.saturating_add(owed_ns).min(now_ns.saturating_add(DELAY_NS_MAX));
        self.asked_ns = now_ns;
        let delay_ns = self.paid_ns.saturating_sub(now_ns);
        if delay_ns < SLEEP_NS_MIN {
            return Hold::Go;
        }
        self.is_closed = true;
        Hold::Close { delay_ns }
    }

    /// Opens the gate, because the time in [`Hold::Close`] is over or the waiters are gone.
    pub(crate) fn open(&mut self) {
        self.is_closed = false;
    }

    /// Returns whether acknowledgements wait.
    #[cfg(test)]
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns the minimum cost of `bytes`, as time.
    fn cost_ns(&self, bytes: u64, fill: f64) -> u64 {
        // Half-way from the mark to the end, as much is let in as is freed; at the end, next to
        // nothing. Even a rate that was guessed five times too high settles before the end.
        let over = ((fill - self.mark) / (1.0 - self.mark)).clamp(1e-3, 1.0);
        let rate = (self.rate_seen * (1.0 - over) / over).max(RATE_MIN);
        (bytes as f64 / rate * NS) as u64
    }

    /// Returns the rate, which falls while a release is overdue.
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

    /// Runs closed-loop writers against a destage of a fixed rate, in virtual time. Returns the
    /// highest fill, the longest delay, and the bytes a second let in over the second half.
    fn overload(writers: usize, bytes: u64, generation: u64, destage_rate: u64) -> (f64, u64, f64) {
        let mut throttle = Throttle::new(50, generation);
        let mut ready = vec![0u64; writers];
        let (mut written, mut released, mut destage_free_at) = (0u64, 0u64, 0u64);
        let (mut fill_max, mut delay_max, mut late) = (0f64, 0u64, 0u64);
        let mut frozen = std::collections::VecDeque::new();
        let (mut opens_at, mut waiting) = (u64::MAX, Vec::new());
        let end_ns = 400_000_000_000;
        loop {
            let writer = (0..writers).min_by_key(|w| ready[*w]).unwrap();
            let now = ready[writer].min(opens_at);
            if now >= end_ns {
                return (fill_max, delay_max, late as f64 / 200.0);
            }
            if now == opens_at {
                throttle.open();
                for (writer, since) in waiting.drain(..) {
                    ready[writer] = now + 20_000;
                    delay_max = delay_max.max(now - since);
                }
                opens_at = u64::MAX;
                continue;
            }
            while frozen.front().is_some_and(|done| *done <= now) {
                throttle.on_release(frozen.pop_front().unwrap(), generation, 1.0);
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
            ready[writer] = match throttle.admit(bytes, fill, || now) {
                Hold::Go => now + 20_000,
                held => {
                    if let Hold::Close { delay_ns } = held {
                        assert_eq!(opens_at, u64::MAX, "closed twice");
                        opens_at = now + delay_ns;
                    }
                    waiting.push((writer, now));
                    u64::MAX
                }
            };
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
        let mut throttle = Throttle::new(50, MIB);
        assert_eq!(throttle.admit(100 * MIB, 0.5, || panic!("nothing is owed")), Hold::Go);
        let delays: Vec<u64> = [0.51, 0.6, 0.75, 0.9, 1.0]
            .iter()
            .map(|fill| match Throttle::new(50, MIB).admit(16 * MIB, *fill, || 0) {
                Hold::Close { delay_ns } => delay_ns,
                other => panic!("{other:?} with {fill} of the log in use"),
            })
            .collect();
        assert!(delays.is_sorted() && delays[0] < delays[4] / 10, "{delays:?}");
        let mut throttle = Throttle::new(50, MIB);
        let mut longest = 0;
        for _ in 0..10_000 {
            if let Hold::Close { delay_ns } = throttle.admit(MIB, 1.0, || 0) {
                longest = longest.max(delay_ns);
                throttle.open();
            }
        }
        assert_eq!(longest, DELAY_NS_MAX);
    }

    #[test]
    fn writers_wait_at_a_closed_gate_and_the_next_one_pays_their_debt() {
        let mut throttle = Throttle::new(50, MIB);
        let Hold::Close { delay_ns } = throttle.admit(MIB, 0.75, || 0) else {
            panic!("it is too much")
        };
        for _ in 0..4 {
            assert_eq!(
                throttle.admit(MIB, 0.75, || panic!("they wait whatever time it is")),
                Hold::Wait
            );
        }
        assert_eq!(
            throttle.admit(MIB, 0.4, || panic!("nothing is owed")),
            Hold::Go,
            "there is room again"
        );
        throttle.open();
        let Hold::Close { delay_ns: next } = throttle.admit(MIB, 0.75, || delay_ns) else {
            panic!("five are owed for")
        };
        assert!(next.abs_diff(5 * delay_ns) <= 5, "{next} after {delay_ns}");
    }

    #[test]
    fn debt_is_dropped_once_there_is_room() {
        let mut throttle = Throttle::new(50, MIB);
        assert!(matches!(throttle.admit(4 * MIB, 0.75, || 0), Hold::Close { .. }));
        assert_eq!(throttle.admit(64 * MIB, 0.75, || 0), Hold::Wait);
        throttle.open();
        throttle.on_fill(0.51);
        assert!(matches!(throttle.admit(1, 0.51, || 0), Hold::Close { .. }), "it is owed");
        throttle.open();
        assert_eq!(throttle.admit(64 * MIB, 0.4, || 0), Hold::Go);
        throttle.admit(MIB / 64, 0.51, || 0);
        throttle.on_fill(0.5);
        assert_eq!(throttle.admit(1, 0.501, || panic!("nothing is owed")), Hold::Go);
    }

    #[test]
    fn release_counts_for_the_rate_in_proportion_to_its_size() {
        let rate_after = |share| {
            let mut throttle = Throttle::new(50, 128 * MIB);
            for n in 0..5 {
                throttle.on_release(n * 1_000_000_000, MIB, share);
            }
            throttle.rate / (MIB as f64)
        };
        // As for a generation frozen for its extents: a MiB each second.
        assert!(rate_after(1.0) < 10.0, "{}", rate_after(1.0));
        assert!(rate_after(1.0 / 128.0) > 120.0, "{}", rate_after(1.0 / 128.0));
    }

    #[test]
    fn a_pause_counts_for_a_moment_only() {
        let mut throttle = Throttle::new(50, MIB);
        let Hold::Close { delay_ns } = throttle.admit(4 * MIB, 0.75, || 0) else {
            panic!("too much")
        };
        throttle.open();
        let later = 3_600 * 1_000_000_000;
        let Hold::Close { delay_ns: next } = throttle.admit(4 * MIB, 0.75, || later) else {
            panic!("an hour without a write lets a burst in")
        };
        assert_eq!(next, delay_ns - CREDIT_NS_MAX);
    }
}
