//! The executor of the simulation: tasks of processes, timers in virtual time, and the only source of
//! randomness.
//!
//! Invariants:
//! - One thread runs everything. Which task runs next follows from the seed alone.
//! - Time passes only while no task can run. A process that is stopped has tasks that could run, and they
//!   do not count.
//! - A process that was killed runs nothing any more: its tasks are dropped, and wakers of them do nothing.

use block::env::{Clock, SystemClock};
use block::simulated::{BoxTask, Executor, enter};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant, SystemTime};

/// Identifies a process.
pub(crate) type ProcessId = u64;
/// The process of the surroundings: the network, the clients and the faults. It is never stopped.
pub(crate) const SURROUNDINGS: ProcessId = 0;
/// Polls in one run after which the simulation counts as spinning. Chosen by hand: fifty times what runs
/// need.
const POLLS_MAX: u64 = 50_000_000;

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

struct Task {
    process: ProcessId,
    /// Absent while it is polled.
    future: Option<BoxTask>,
    waker: Arc<TaskWaker>,
}

#[derive(Default)]
struct Process {
    is_stopped: bool,
    ready: Vec<u64>,
}

struct State {
    now_ns: u64,
    rng: Rng,
    next_id: u64,
    tasks: BTreeMap<u64, Task>,
    timers: BTreeMap<(u64, u64), Waker>,
    processes: BTreeMap<ProcessId, Process>,
    trace: u64,
    poll_count: u64,
    /// The process whose task is polled.
    current: ProcessId,
}

/// Tasks that were woken, with their processes.
type Woken = Mutex<Vec<(ProcessId, u64)>>;

struct TaskWaker {
    process: ProcessId,
    id: u64,
    is_queued: AtomicBool,
    woken: Arc<Woken>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        if !self.is_queued.swap(true, Ordering::Relaxed) {
            self.woken.lock().push((self.process, self.id));
        }
    }
}

/// The simulated world's time, tasks and randomness. Clones are handles to the same.
#[derive(Clone)]
pub(crate) struct World {
    state: Arc<Mutex<State>>,
    woken: Arc<Woken>,
    base: Instant,
}

impl World {
    pub(crate) fn new(seed: u64) -> World {
        let state = State {
            now_ns: 0,
            rng: Rng(seed),
            next_id: 1,
            tasks: BTreeMap::new(),
            timers: BTreeMap::new(),
            processes: BTreeMap::from([(SURROUNDINGS, Process::default())]),
            trace: 0xcbf2_9ce4_8422_2325,
            poll_count: 0,
            current: SURROUNDINGS,
        };
        let base = SystemClock.now() + Duration::from_secs(3600);
        World { state: Arc::new(Mutex::new(state)), woken: Arc::default(), base }
    }

    /// Returns a number from 0 up to but not including `end`.
    pub(crate) fn below(&self, end: u64) -> u64 {
        self.state.lock().rng.next() % end
    }

    /// Returns true in `percent` of 100 cases.
    pub(crate) fn chance(&self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn seed(&self) -> u64 {
        self.state.lock().rng.next()
    }

    /// Returns a time between two, in milliseconds.
    pub(crate) fn ms(&self, from: u64, to: u64) -> Duration {
        Duration::from_micros(from * 1000 + self.below((to - from) * 1000 + 1))
    }

    pub(crate) fn now(&self) -> Duration {
        Duration::from_nanos(self.state.lock().now_ns)
    }

    /// Adds an event to the trace.
    pub(crate) fn note(&self, event: u64) {
        self.state.lock().note(event);
    }

    /// Returns the hash of all events.
    pub(crate) fn trace(&self) -> u64 {
        self.state.lock().trace
    }

    /// Returns the process whose task runs.
    pub(crate) fn current(&self) -> ProcessId {
        self.state.lock().current
    }

    pub(crate) fn new_process(&self) -> ProcessId {
        let mut state = self.state.lock();
        let id = state.id();
        state.processes.insert(id, Process::default());
        id
    }

    /// Returns the executor of a process.
    pub(crate) fn executor(&self, process: ProcessId) -> Arc<dyn Executor> {
        let (state, woken) = (Arc::downgrade(&self.state), Arc::clone(&self.woken));
        Arc::new(ProcessExecutor { process, state, woken })
    }

    /// Starts a task of the surroundings.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.executor(SURROUNDINGS).spawn(Box::pin(task));
    }

    pub(crate) async fn sleep(&self, time: Duration) {
        self.executor(SURROUNDINGS).sleep(time).await;
    }

    /// Stops a process, or lets it go on.
    pub(crate) fn stop(&self, process: ProcessId, is_stopped: bool) {
        if let Some(process) = self.state.lock().processes.get_mut(&process) {
            process.is_stopped = is_stopped;
        }
    }

    /// Ends a process: drops its tasks.
    pub(crate) fn kill(&self, process: ProcessId) {
        let executor = self.executor(process);
        let tasks: Vec<Task> = {
            let mut state = self.state.lock();
            state.processes.remove(&process);
            let of_it = |task: &Task| task.process == process;
            let ids: Vec<u64> =
                state.tasks.iter().filter(|(_, task)| of_it(task)).map(|(id, _)| *id).collect();
            ids.iter().filter_map(|id| state.tasks.remove(id)).collect()
        };
        enter(&executor, || drop(tasks));
    }

    /// Ends everything.
    pub(crate) fn end(&self) {
        let processes: Vec<ProcessId> = self.state.lock().processes.keys().copied().collect();
        processes.into_iter().rev().for_each(|process| self.kill(process));
    }

    /// Runs until a time has passed, or something holds.
    pub(crate) fn run(&self, time: Duration, is_done: impl Fn() -> bool) {
        let until = self.now() + time;
        let until_ns = u64::try_from(until.as_nanos()).expect("less than 500 years");
        while !is_done() {
            match self.next_task() {
                Some(id) => self.poll(id),
                None if !self.advance(until_ns) => return,
                None => {}
            }
        }
    }

    fn next_task(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let mut woken = std::mem::take(&mut *self.woken.lock());
        // tokio wakes the receivers of a watch in a random order.
        woken.sort_unstable();
        for (process, id) in woken {
            if let Some(process) = state.processes.get_mut(&process) {
                process.ready.push(id);
            }
        }
        let runnable = |process: &Process| if process.is_stopped { 0 } else { process.ready.len() };
        let count: usize = state.processes.values().map(runnable).sum();
        if count == 0 {
            return None;
        }
        let mut index = usize::try_from(state.rng.next() % count as u64).expect("an index");
        for process in state.processes.values_mut().filter(|process| !process.is_stopped) {
            match index.checked_sub(process.ready.len()) {
                Some(rest) => index = rest,
                None => return Some(process.ready.swap_remove(index)),
            }
        }
        None
    }

    fn poll(&self, id: u64) {
        let (mut future, process, task_waker) = {
            let mut state = self.state.lock();
            state.poll_count += 1;
            assert!(state.poll_count < POLLS_MAX, "tasks spin, and no time passes");
            let now_ns = state.now_ns;
            let Some(task) = state.tasks.get_mut(&id) else { return };
            let Some(future) = task.future.take() else { return };
            let (process, waker) = (task.process, Arc::clone(&task.waker));
            state.note(now_ns ^ (id << 40));
            state.current = process;
            (future, process, waker)
        };
        task_waker.is_queued.store(false, Ordering::Relaxed);
        let waker = Waker::from(task_waker);
        let executor = self.executor(process);
        let polled = enter(&executor, || future.as_mut().poll(&mut Context::from_waker(&waker)));
        let left = {
            let mut state = self.state.lock();
            match polled {
                Poll::Ready(()) => {
                    state.tasks.remove(&id);
                    Some(future)
                }
                Poll::Pending => match state.tasks.get_mut(&id) {
                    Some(task) => task.future.replace(future),
                    None => Some(future), // its process was killed by itself
                },
            }
        };
        enter(&executor, || drop(left));
    }

    /// Lets time pass to the next timer. Returns false if there is none before `until_ns`.
    fn advance(&self, until_ns: u64) -> bool {
        let waker = {
            let mut state = self.state.lock();
            let next = state.timers.first_key_value().map(|((at, _), _)| *at);
            let Some(at) = next.filter(|at| *at <= until_ns) else {
                state.now_ns = until_ns;
                return false;
            };
            state.now_ns = state.now_ns.max(at);
            state.timers.pop_first().map(|(_, waker)| waker)
        };
        waker.into_iter().for_each(Waker::wake);
        true
    }
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn note(&mut self, event: u64) {
        self.trace = (self.trace ^ event).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    }
}

struct ProcessExecutor {
    process: ProcessId,
    state: Weak<Mutex<State>>,
    woken: Arc<Woken>,
}

impl Executor for ProcessExecutor {
    fn spawn(&self, task: BoxTask) {
        let Some(state) = self.state.upgrade() else { return };
        let refused = {
            let mut state = state.lock();
            let id = state.id();
            let process = self.process;
            match state.processes.get_mut(&process) {
                Some(running) => {
                    running.ready.push(id);
                    let (is_queued, woken) = (AtomicBool::new(true), Arc::clone(&self.woken));
                    let waker = Arc::new(TaskWaker { process, id, is_queued, woken });
                    state.tasks.insert(id, Task { process, future: Some(task), waker });
                    None
                }
                None => Some(task),
            }
        };
        drop(refused);
    }

    fn sleep(&self, time: Duration) -> BoxTask {
        let at = self.state.upgrade().map_or(0, |state| state.lock().now_ns);
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let at_ns = at.saturating_add(time_ns);
        Box::pin(Sleep { state: Weak::clone(&self.state), at_ns, key: None })
    }
}

struct Sleep {
    state: Weak<Mutex<State>>,
    at_ns: u64,
    key: Option<(u64, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(state) = self.state.upgrade() else { return Poll::Pending };
        let mut state = state.lock();
        if state.now_ns >= self.at_ns {
            return Poll::Ready(());
        }
        let key = match self.key {
            Some(key) => key,
            None => (self.at_ns, state.id()),
        };
        self.key = Some(key);
        state.timers.insert(key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let (Some(key), Some(state)) = (self.key, self.state.upgrade()) {
            let waker = state.lock().timers.remove(&key);
            drop(waker);
        }
    }
}

/// The clocks of one machine, whose uptime runs a little too fast or too slow.
#[derive(Clone)]
pub(crate) struct MachineClock {
    world: World,
    /// Millionths by which the uptime is too fast.
    ahead_ppm: i64,
    booted: Duration,
}

impl MachineClock {
    pub(crate) fn new(world: &World, ahead_ppm: i64, booted: Duration) -> MachineClock {
        MachineClock { world: world.clone(), ahead_ppm, booted }
    }
}

impl std::fmt::Debug for MachineClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MachineClock").finish_non_exhaustive()
    }
}

impl Clock for MachineClock {
    fn now(&self) -> Instant {
        self.world.base + self.world.now()
    }

    fn wall(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.world.now()
    }

    fn uptime(&self) -> Duration {
        let passed = i128::try_from((self.world.now() - self.booted).as_nanos()).expect("years");
        let ahead = passed * i128::from(self.ahead_ppm) / 1_000_000;
        Duration::from_nanos(u64::try_from(passed + ahead).expect("it is positive"))
    }
}
