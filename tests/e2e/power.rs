//! Loss of power: spindle runs on a disk that logs every write and flush. The disk is then mounted
//! and served again as a cut at many moments would have left it.
//!
//! Invariants:
//! - The test runs in a guest kernel (`tests/guest`): no file system is mounted on this machine,
//!   and a kernel that fails is not this machine's.
//! - Writes that were answered as flushed before a cut are present after it. Log, cache and store
//!   are on the same disk.
//! - The test is proved: it finds a daemon that ignores flushes, and one that answers before it
//!   submits.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tests::daemon::Daemon;
use tests::model::Effect;
use tests::nbd::wire::*;
use tests::nbd::{Connection, Endpoint, Wanted};
use tests::place::{binary, run, skip};
use tests::power::device::{LoggedDisk, Loop, Mount};
use tests::power::guest;
use tests::power::history::{FlushId, History, OpId};
use tests::power::image::{Cut, Replay};
use tests::power::writelog::{self, Event};
use tests::seed::{Random, seeds};
use tests::torture::Target;
use tests::torture::profile::{Kind, Profile};
use tests::{Place, needs, needs_root};

/// The disk: room for the log, the cache and a few hundred MiB of destaged writes.
const DISK_BYTES: u64 = 512 << 20;
/// The log of the disk's writes: room for twice the written data.
const LOG_BYTES: u64 = 3 << 30;
/// The load of one life stops at this amount, so that the disk does not fill.
const LIFE_BYTES_MAX: u64 = 40 << 20;
/// Sectors of the windows that requests go to. They are small, as they are read after every cut.
const WINDOWS: &[(&str, u64, usize)] = &[("db", 0, 8192), ("log", 2048, 4096)];
const SETTINGS: &str = "memory = \"416MiB\"\n\
    [log]\nsize = \"16MiB\"\nfile_size = \"4MiB\"\nio = \"IO\"\n\
    [cache]\nsize = \"64MiB\"\n\
    [destage]\nmax_age = \"1s\"\nsegment_size = \"1MiB\"\n";
/// Expected log line of the daemon after a loss of power.
const TAIL_LOST: &str = "the machine stopped while writes were answered ahead of stable storage";

/// The amount of work.
#[derive(Clone, Copy)]
struct Plan {
    seed: u64,
    /// How often the daemon is started, loaded and killed.
    life_count: u64,
    life: Duration,
    /// Number of cuts.
    cut_count: usize,
    /// No cut is begun after this.
    time: Duration,
    /// The mark from which cuts are allowed.
    from: &'static str,
    /// How the daemon writes its log: `buffered` or `direct`.
    io: &'static str,
}

/// Marks of the disk's log besides the numbers: the file system is made; a new pool is served.
const MADE: &str = "made";
const SERVED: &str = "served";

impl Plan {
    fn of_environment(seed: u64) -> Plan {
        let io = if seed.is_multiple_of(2) { "buffered" } else { "direct" };
        let minutes = std::env::var("SPINDLE_TEST_POWER_MINUTES").ok();
        match minutes.map(|text| text.parse::<u64>().expect("a number of minutes")) {
            None => Plan { seed, io, ..SMOKE },
            Some(minutes) => Plan {
                seed,
                life_count: 4,
                life: Duration::from_secs(2),
                cut_count: usize::MAX,
                time: Duration::from_secs(minutes * 60),
                from: MADE,
                io,
            },
        }
    }
}

const SMOKE: Plan = Plan {
    seed: 0,
    life_count: 2,
    life: Duration::from_millis(1500),
    cut_count: 25,
    time: Duration::from_secs(60),
    from: MADE,
    io: "buffered",
};

#[test]
fn flushed_writes_survive_loss_of_power() {
    let variables = |seed: u64| {
        let minutes = std::env::var("SPINDLE_TEST_POWER_MINUTES").ok();
        let minutes = minutes.map(|minutes| ("SPINDLE_TEST_POWER_MINUTES", minutes));
        [Some(("SEED", seed.to_string())), minutes].into_iter().flatten().collect::<Vec<_>>()
    };
    needs_root!();
    needs!("dmsetup", "mkfs.ext4", "losetup");
    for seed in seeds(1) {
        let time = Plan::of_environment(seed).time * 3 + Duration::from_secs(240);
        let name = "power::flushed_writes_survive_loss_of_power";
        guest::run(name, time, &variables(seed), || {
            println!("SEED={seed}");
            let tried = power_cuts(Plan::of_environment(seed), "spindle", "");
            let tried = tried.unwrap_or_else(|found| panic!("SEED={seed}: {found}"));
            println!("{tried:?}");
            assert!(tried.durable_sector_count > 0 && tried.lost_count > 0, "{tried:?}");
        });
    }
}

/// Bugs that the daemon can be told to have, with the mode in which it writes its log and the
/// number of cuts within which each must be found.
const SEEDED_BUGS: &[(&str, &str, usize)] = &[
    ("flush-ignored", "buffered", 25),
    ("flush-ignored", "direct", 25),
    ("ack-before-write", "direct", 60),
];

#[test]
fn a_daemon_that_breaks_its_promise_is_found() {
    if !binary("spindle-faulty").exists() {
        return skip("the build with seeded bugs is missing (tests/run makes it)");
    }
    needs_root!();
    needs!("dmsetup", "mkfs.ext4", "losetup");
    for seed in seeds(1) {
        let name = "power::a_daemon_that_breaks_its_promise_is_found";
        let variables = [("SEED", seed.to_string())];
        guest::run(name, Duration::from_secs(1800), &variables, || {
            for (bug, io, cut_count) in SEEDED_BUGS {
                let time = Duration::from_secs(1500);
                // A new pool promises nothing until it is served.
                let plan = Plan { seed, cut_count: *cut_count, time, from: SERVED, io, ..SMOKE };
                match power_cuts(plan, "spindle-faulty", bug) {
                    Err(found) => println!("{bug}, {io}: {found}"),
                    Ok(tried) => panic!("SEED={seed}: {bug}, {io} was not found: {tried:?}"),
                }
            }
        });
    }
}

/// The extent of a run, to be printed.
#[derive(Clone, Debug, Default)]
#[expect(dead_code, reason = "some of it is only shown")]
struct Tried {
    op_count: usize,
    flush_count: usize,
    event_count: usize,
    cut_count: usize,
    /// Writes that were lost or torn, over all cuts.
    lost_count: u64,
    /// Sectors that had to hold flushed data, over all cuts.
    durable_sector_count: u64,
}

fn power_cuts(plan: Plan, program: &str, seeded_bug: &str) -> Result<Tried, String> {
    let place = Place::new();
    let boot = Boot::new(&place);
    let mut random = Random::new(plan.seed, 7);
    let disk = LoggedDisk::new(place.path(), "power", DISK_BYTES, LOG_BYTES);
    run(
        "mkfs.ext4",
        &["-q", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", &disk.device()],
    );
    let mounted = place.join("mnt");
    let mount = Mount::new(&disk.device(), &mounted).expect("a new file system is mounted");
    run("sync", &[]);
    disk.mark(MADE).expect("the disk takes marks");
    let windows: Vec<_> = WINDOWS.iter().map(|(_, first, count)| (*first, *count)).collect();
    let record = Record {
        history: Mutex::new(History::new(plan.seed, &windows)),
        disk,
        sent_bytes: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
    };
    let mut daemon = daemon_on(&mounted, program, plan.io);
    if !seeded_bug.is_empty() {
        daemon.environ(&[("SPINDLE_SEEDED_BUGS", seeded_bug)]);
        daemon.announce("");
    }
    for _ in 0..plan.life_count {
        daemon.restart();
        record.disk.mark(SERVED).expect("the disk takes marks");
        record.live(&mut daemon, plan.life, &mut random)?;
    }
    drop(daemon);
    drop(mount);
    let log = record.disk.finish();
    let history = record.history.into_inner().expect("no panic holds it");
    let events = writelog::decode(|at, buffer| {
        std::os::unix::fs::FileExt::read_exact_at(&log, buffer, at)
            .map_err(|error| error.to_string())
    })?;
    let (op_count, flush_count) = history.counts();
    let mut tried = Tried { op_count, flush_count, event_count: events.len(), ..Tried::default() };
    let begun = Instant::now();
    // The time limit covers everything; a second round of cuts begins at the start of the log
    // again.
    while tried.cut_count < plan.cut_count && begun.elapsed() < plan.time {
        let count = (plan.cut_count - tried.cut_count).min(100);
        let replay = Replay::new(&events, &log, place.path(), DISK_BYTES);
        let mut replay = replay.map_err(|error| error.to_string())?;
        for cut in cuts(&events, plan.from, count, &mut random) {
            if begun.elapsed() >= plan.time {
                break;
            }
            tried.cut_count += 1;
            let image = place.join("image");
            let lost_count =
                replay.image(cut, &mut random, &image).map_err(|error| error.to_string())?;
            tried.lost_count += lost_count;
            boot.again(&mut random);
            let found =
                serve_again(&image, &mounted, plan.io, &history, &events[..cut.event_index]);
            tried.durable_sector_count += found.map_err(|error| {
                format!(
                    "SEED={} cut {} of {tried:?}, {cut:?}:\n{error}",
                    plan.seed, tried.cut_count
                )
            })?;
        }
    }
    Ok(tried)
}

/// Makes a daemon whose directory, store included, is in the file system mounted at `mounted`.
fn daemon_on(mounted: &Path, program: &str, io: &str) -> Daemon {
    let volumes: Vec<_> = WINDOWS.iter().map(|(name, _, _)| (*name, "16MiB")).collect();
    let mut daemon = Daemon::new(&SETTINGS.replace("IO", io), &volumes);
    daemon.use_binary(program);
    daemon.announce(TAIL_LOST);
    // The start may come so long after the writes that the condition is raised.
    daemon.announce("condition=\"data-at-risk\"");
    let pool = mounted.join("pool");
    std::fs::create_dir_all(&pool).expect("make a directory");
    std::os::unix::fs::symlink(pool, daemon.dir()).expect("make a link");
    daemon
}

/// Chooses cuts, in the order of the log: at a mark, with nothing lost; just before the end of a
/// flush and anywhere else, with some unflushed writes lost.
fn cuts(events: &[Event], from: &str, count: usize, random: &mut Random) -> Vec<Cut> {
    let is_from = |event: &Event| matches!(event, Event::Mark(text) if text == from);
    let first = events.iter().position(is_from).expect("it was marked") + 1;
    let places = |is_wanted: fn(&Event) -> bool| -> Vec<usize> {
        (first..events.len()).filter(|at| is_wanted(&events[*at])).collect()
    };
    let marks = places(|event| matches!(event, Event::Mark(_)));
    let flushes = places(|event| *event == Event::Flush);
    let mut cuts: Vec<Cut> = (0..count)
        .map(|_| match random.below(5) {
            0 | 1 => Cut { event_index: *random.pick(&marks) + 1, is_lossy: false },
            2 | 3 => Cut { event_index: *random.pick(&flushes), is_lossy: true },
            _ => {
                let at = random.below(u64::try_from(events.len() - first).expect("fits"));
                let at = first + usize::try_from(at).expect("below a length");
                Cut { event_index: at, is_lossy: true }
            }
        })
        .collect();
    cuts.sort_by_key(|cut| cut.event_index);
    cuts
}

/// Returns the newest numbered mark among the events before a cut.
fn newest_mark(events: &[Event]) -> Option<usize> {
    let marks = events.iter().rev().filter_map(|event| match event {
        Event::Mark(text) => text.parse().ok(),
        _ => None,
    });
    marks.max()
}

/// Mounts the remains of a disk that saw `events`, serves them, and checks every sector of the
/// windows. Returns how many of them were known from flushes.
fn serve_again(
    image: &Path,
    mounted: &Path,
    io: &str,
    history: &History,
    events: &[Event],
) -> Result<u64, String> {
    let mark = newest_mark(events);
    let was_served = events.iter().any(|event| matches!(event, Event::Mark(at) if at == SERVED));
    let device = Loop::attach(image);
    let mount = Mount::new(device.device(), mounted)?;
    let mut daemon = daemon_on(mounted, "spindle", io);
    if !was_served {
        // A cut during the first start may leave the backup of a file without the file, as the
        // backup is written first.
        daemon.announce("node.json is missing; spindle uses its backup");
    }
    // It may also leave files of a pool that was not complete yet.
    daemon.try_start()?;
    let mut durable_count = 0;
    for (number, (name, first_sector, sector_count)) in WINDOWS.iter().enumerate() {
        let bytes = read_window(&daemon.unix(name), *first_sector, *sector_count)?;
        durable_count += history.check(number, mark, first_sector * 512, &bytes)?;
    }
    daemon.begin_stop();
    daemon.finish_stop()?;
    daemon.fsck();
    let complaints = daemon.unannounced();
    if !complaints.is_empty() {
        return Err(format!("log lines that nobody announced:\n{}", complaints.join("\n")));
    }
    drop(daemon);
    drop(mount);
    Ok(durable_count)
}

fn read_window(endpoint: &Endpoint, first: u64, count: usize) -> Result<Vec<u8>, String> {
    const STEP: u32 = 1 << 20;
    let failed = |error: std::io::Error| format!("read {}: {error}", endpoint.uri());
    let mut connection = Connection::open(endpoint, &Wanted::default()).map_err(failed)?;
    let (mut bytes, total) = (Vec::new(), count * 512);
    while bytes.len() < total {
        let offset = first * 512 + u64::try_from(bytes.len()).expect("fits");
        let length = STEP.min(u32::try_from(total - bytes.len()).expect("a window is small"));
        let reply = connection.call(CMD_READ, 0, offset, length, &[]).map_err(failed)?;
        if reply.error != 0 {
            return Err(format!("read {} at {offset}: error {}", endpoint.uri(), reply.error));
        }
        bytes.extend_from_slice(&reply.payload);
    }
    connection.disconnect().map_err(failed)?;
    Ok(bytes)
}

/// A false boot id for daemons: each cut is another boot, though the guest keeps running.
pub(crate) struct Boot(PathBuf);

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

impl Boot {
    pub(crate) fn new(place: &Place) -> Boot {
        let path = place.join("boot_id");
        std::fs::copy(BOOT_ID, &path).expect("copy the boot id");
        run("mount", &["--bind", &path.display().to_string(), BOOT_ID]);
        Boot(path)
    }

    pub(crate) fn again(&self, random: &mut Random) {
        let (a, b) = (random.bits(), random.bits());
        let id = format!(
            "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}\n",
            a >> 32,
            a >> 16 & 0xffff,
            a & 0xfff,
            b >> 52,
            b & 0xffff_ffff_ffff
        );
        std::fs::write(&self.0, id).expect("write the boot id");
    }
}

impl Drop for Boot {
    fn drop(&mut self) {
        tests::place::output("umount", &[BOOT_ID]);
    }
}

/// The state shared by the load while the disk logs.
struct Record {
    history: Mutex<History>,
    disk: LoggedDisk,
    sent_bytes: AtomicU64,
    is_over: AtomicBool,
}

enum Flying {
    Op(OpId, bool),
    Flush(FlushId),
}

impl Record {
    /// Runs one life of the daemon: load from several connections, ended by a kill.
    fn live(&self, daemon: &mut Daemon, life: Duration, random: &mut Random) -> Result<(), String> {
        self.is_over.store(false, Ordering::SeqCst);
        self.sent_bytes.store(0, Ordering::SeqCst);
        let results = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for (volume, (name, _, _)) in WINDOWS.iter().enumerate() {
                for _ in 0..2 {
                    let endpoint = daemon.unix(name);
                    let random = Random::new(random.bits(), 1);
                    threads.push(scope.spawn(move || self.drive(volume, &endpoint, random)));
                }
            }
            let deadline = Instant::now() + life;
            while Instant::now() < deadline && threads.iter().any(|thread| !thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(5));
            }
            self.is_over.store(true, Ordering::SeqCst);
            daemon.kill();
            let ended = threads.into_iter().map(|thread| thread.join().expect("no panic"));
            ended.collect::<Result<Vec<()>, String>>()
        });
        self.history.lock().expect("no panic holds it").died();
        results.map(drop)
    }

    fn drive(&self, volume: usize, endpoint: &Endpoint, mut random: Random) -> Result<(), String> {
        let (_, first, count) = WINDOWS[volume];
        let window = first * 512..(first + u64::try_from(count).expect("fits")) * 512;
        let mut connection = Connection::open(endpoint, &Wanted::default())
            .map_err(|error| format!("connect to {}: {error}", endpoint.uri()))?;
        let mut flying = std::collections::HashMap::new();
        while !self.is_over.load(Ordering::SeqCst) {
            // The mix changes now and then. Requests are whole sectors, so that each sector has one
            // writer.
            let mut profile = Profile::random(&mut random);
            profile.alignments = &[512, 4096, 4096];
            profile.bytes_max = profile.bytes_max.min(64 << 10);
            for _ in 0..40 {
                while flying.len() < profile.depth.min(8) && !self.is_full() {
                    let (cookie, request) =
                        match self.send(volume, &mut connection, &profile, &window, &mut random) {
                            Ok(sent) => sent,
                            Err(error) => return self.expected(&error),
                        };
                    flying.insert(cookie, request);
                }
                if flying.is_empty() {
                    return Ok(());
                }
                let reply = match connection.receive() {
                    Ok(reply) => reply,
                    Err(error) => return self.expected(&error),
                };
                let request = flying.remove(&reply.cookie).expect("it was sent");
                if reply.error != 0 {
                    return Err(format!("{}: NBD error {}", endpoint.uri(), reply.error));
                }
                self.answered(&request)?;
            }
        }
        Ok(())
    }

    fn is_full(&self) -> bool {
        self.sent_bytes.load(Ordering::Relaxed) > LIFE_BYTES_MAX
    }

    fn expected(&self, error: &std::io::Error) -> Result<(), String> {
        let is_over = self.is_over.load(Ordering::SeqCst);
        if is_over { Ok(()) } else { Err(format!("{error} while the server should run")) }
    }

    fn send(
        &self,
        volume: usize,
        connection: &mut Connection,
        profile: &Profile,
        window: &std::ops::Range<u64>,
        random: &mut Random,
    ) -> std::io::Result<(u64, Flying)> {
        let (kind, range, is_fua) = profile.request(random, window);
        let mut history = self.history.lock().expect("no panic holds it");
        if matches!(kind, Kind::Flush | Kind::Read) {
            let flush = history.send_flush(volume);
            drop(history);
            return Ok((connection.submit(CMD_FLUSH, 0, 0, 0, &[])?, Flying::Flush(flush)));
        }
        let effect = if kind == Kind::Write { Effect::Write } else { Effect::Zero };
        let (op, payload) = history.send(volume, effect, &range, is_fua);
        drop(history);
        let command = match kind {
            Kind::Write => CMD_WRITE,
            Kind::Trim => CMD_TRIM,
            _ => CMD_WRITE_ZEROES,
        };
        let flags = if is_fua { CMD_FLAG_FUA } else { 0 };
        let length = u32::try_from(range.end - range.start).expect("bounded");
        self.sent_bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        let cookie = connection.submit(command, flags, range.start, length, &payload)?;
        Ok((cookie, Flying::Op(op, is_fua)))
    }

    /// Notes an answer, and marks the disk's log if the answer promised durability.
    fn answered(&self, request: &Flying) -> Result<(), String> {
        let mut history = self.history.lock().expect("no panic holds it");
        let is_durable = match request {
            Flying::Op(op, is_fua) => {
                history.answered(*op);
                *is_fua
            }
            Flying::Flush(flush) => {
                history.flushed(*flush);
                true
            }
        };
        if !is_durable {
            return Ok(());
        }
        // The history stays locked, so that the marks are in the log in their order.
        let mark = history.mark();
        self.disk.mark(&mark.to_string()).map_err(|error| format!("mark the disk's log: {error}"))
    }
}
