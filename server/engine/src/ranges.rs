//! The sectors of a volume that are being changed. A write that starts or ends inside a sector reads that sector first, and
//! needs it to itself until its own version of the sector is visible.
//!
//! Invariants:
//! - Changes of whole sectors run concurrently; the log orders them. A change of a part of a sector waits for all other
//!   changes of that sector, and the reverse. Changes of other sectors never wait.
//! - Changes of the same sectors run first come, first served.
//! - A dropped future holds no sectors.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ops::Range;
use tokio::sync::oneshot;

/// A range of sector numbers.
pub(crate) type Sectors = Range<u64>;

/// The sectors that a change needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// Whole sectors.
    Whole(Sectors),
    /// Parts of two sectors, which may be the same sector.
    Parts([u64; 2]),
}

impl Want {
    fn touches(&self, other: &Want) -> bool {
        let is_in = |sectors: &Sectors, parts: &[u64; 2]| {
            parts.iter().any(|sector| sectors.contains(sector))
        };
        match (self, other) {
            (Want::Whole(_), Want::Whole(_)) => false,
            (Want::Whole(sectors), Want::Parts(parts))
            | (Want::Parts(parts), Want::Whole(sectors)) => is_in(sectors, parts),
            (Want::Parts(mine), Want::Parts(theirs)) => {
                mine.iter().any(|sector| theirs.contains(sector))
            }
        }
    }
}

/// The running changes of one volume. Bounded by the number of requests that front ends run at once.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Indexed by slot. `free` lists the unused slots, so a change of whole sectors needs no search.
    whole: Vec<Sectors>,
    free: Vec<usize>,
    parts: Vec<(u64, [u64; 2])>,
    waiting: VecDeque<Waiting>,
    next_number: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    want: Want,
    granted: oneshot::Sender<Key>,
}

/// Identifies a granted change.
#[derive(Clone, Copy, Debug)]
enum Key {
    Whole(usize),
    Parts(u64),
}

impl State {
    fn is_free(&self, want: &Want) -> bool {
        // An unused slot has an empty range, which contains no sector.
        let whole = match want {
            Want::Whole(_) => false,
            Want::Parts(parts) => {
                self.whole.iter().any(|sectors| parts.iter().any(|sector| sectors.contains(sector)))
            }
        };
        !whole && !self.parts.iter().any(|(_, parts)| Want::Parts(*parts).touches(want))
    }

    fn grant(&mut self, want: Want) -> Key {
        match want {
            Want::Whole(sectors) => match self.free.pop() {
                Some(place) => {
                    self.whole[place] = sectors;
                    Key::Whole(place)
                }
                None => {
                    self.whole.push(sectors);
                    Key::Whole(self.whole.len() - 1)
                }
            },
            Want::Parts(parts) => {
                self.next_number += 1;
                self.parts.push((self.next_number, parts));
                Key::Parts(self.next_number)
            }
        }
    }

    fn release(&mut self, key: Key) {
        match key {
            Key::Whole(place) => {
                self.whole[place] = 0..0;
                self.free.push(place);
            }
            Key::Parts(number) => self.parts.retain(|(other, _)| *other != number),
        }
        self.grant_waiting();
    }

    fn grant_waiting(&mut self) {
        let mut index = 0;
        while index < self.waiting.len() {
            let want = &self.waiting[index].want;
            let is_behind = self.waiting.range(..index).any(|earlier| earlier.want.touches(want));
            if is_behind || !self.is_free(want) {
                index += 1;
                continue;
            }
            let Waiting { want, granted, .. } = self.waiting.remove(index).expect("it is there");
            let key = self.grant(want);
            // A task that stops waiting takes the lock first and leaves the list, so the send does not get lost.
            let _ = granted.send(key);
        }
    }
}

/// The sectors of a change, until it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    ranges: &'a Ranges,
    key: Key,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ranges.state.lock().release(self.key);
    }
}

/// A place in the list of waiting changes.
struct Queued<'a> {
    ranges: &'a Ranges,
    number: u64,
    granted: oneshot::Receiver<Key>,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        let mut state = self.ranges.state.lock();
        let number = self.number;
        if let Some(index) = state.waiting.iter().position(|waiting| waiting.number == number) {
            state.waiting.remove(index);
            state.grant_waiting();
        } else if let Ok(key) = self.granted.try_recv() {
            state.release(key);
        }
    }
}

impl Ranges {
    /// Waits for the sectors of a change.
    pub(crate) async fn hold(&self, want: Want) -> Held<'_> {
        let queued = {
            let mut state = self.state.lock();
            let is_behind = state.waiting.iter().any(|earlier| earlier.want.touches(&want));
            if !is_behind && state.is_free(&want) {
                let key = state.grant(want);
                return Held { ranges: self, key };
            }
            state.next_number += 1;
            let number = state.next_number;
            let (granted, receiver) = oneshot::channel();
            state.waiting.push_back(Waiting { number, want, granted });
            Queued { ranges: self, number, granted: receiver }
        };
        let mut queued = queued;
        match (&mut queued.granted).await {
            Ok(key) => Held { ranges: self, key },
            Err(_) => unreachable!("a waiting change is in the list until it is granted"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn changes_of_whole_sectors_run_concurrently() {
        let ranges = Ranges::default();
        let held: Vec<_> = (0..3)
            .map(|_| ranges.hold(Want::Whole(0..8)).now_or_never().expect("it is free"))
            .collect();
        assert!(ranges.hold(Want::Parts([3, 9])).now_or_never().is_none());
        let other = ranges.hold(Want::Parts([8, 9])).now_or_never().expect("another sector");
        drop((held, other));
        assert!(ranges.hold(Want::Parts([3, 9])).now_or_never().is_some());
    }

    #[test]
    fn only_changes_of_the_same_sectors_wait_for_a_part_of_one() {
        let ranges = Ranges::default();
        let part = ranges.hold(Want::Parts([3, 7])).now_or_never().expect("it is free");
        assert!(ranges.hold(Want::Whole(4..7)).now_or_never().is_some(), "between the two");
        assert!(ranges.hold(Want::Parts([2, 8])).now_or_never().is_some());
        assert!(ranges.hold(Want::Whole(0..4)).now_or_never().is_none());
        assert!(ranges.hold(Want::Parts([7, 7])).now_or_never().is_none());
        drop(part);
        assert!(ranges.hold(Want::Parts([7, 7])).now_or_never().is_some());
        assert!(ranges.state.lock().waiting.is_empty(), "dropped futures have left the list");
    }

    #[test]
    fn changes_of_the_same_sectors_come_in_order_and_others_pass_them() {
        let ranges = Ranges::default();
        let first = ranges.hold(Want::Whole(0..8)).now_or_never().expect("it is free");
        let mut second = Box::pin(ranges.hold(Want::Parts([3, 3])));
        let mut third = Box::pin(ranges.hold(Want::Whole(2..4)));
        let mut fourth = Box::pin(ranges.hold(Want::Parts([3, 20])));
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none(), "it came after the second");
        assert!(fourth.as_mut().now_or_never().is_none());
        assert!(ranges.hold(Want::Whole(4..8)).now_or_never().is_some());
        assert!(ranges.hold(Want::Whole(20..21)).now_or_never().is_none(), "behind the fourth");
        drop(first);
        // It was granted although its task has not run, and gives the sectors back when it is dropped.
        drop(second);
        let third = third.as_mut().now_or_never().expect("the second was dropped");
        assert!(fourth.as_mut().now_or_never().is_none());
        drop(third);
        assert!(fourth.as_mut().now_or_never().is_some());
        let state = ranges.state.lock();
        assert_eq!((state.whole.len() - state.free.len(), state.parts.len()), (0, 0));
    }
}
