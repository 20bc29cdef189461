//! Deaths while a volume is stalled: its stored data is damaged, so its writes go to spill files.
//! Whichever step the daemon dies at, no acknowledged write is lost, no old data comes back, and
//! the other volume is not affected.
//!
//! Invariants:
//! - Each test ends the process at one fail point while the sick volume has, gets or loses a spill
//!   file, and insists that it was this one.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tests::daemon::{Daemon, SMALL};
use tests::model::{Effect, VolumeModel};
use tests::nbd::wire::{CMD_FLAG_FUA, CMD_READ, CMD_WRITE, EIO};
use tests::nbd::{Connection, Wanted};
use tests::place::{binary, skip};
use tests::seed::{Random, seeds};
use tests::torture::Target;

/// Fail points on the way of a spill file. An ordinary destage passes some of them too.
pub const WITH_SPILL_FILES: &[&str] = &[
    "spill-start",
    "spill-written",
    "spill-committed",
    "spill-released",
    "late-committed",
    "late-dropped",
];

/// Number of damaged bytes at the start of the sick volume.
const ROTTEN_BYTES: u32 = 64 << 10;
/// Longest wait for a state, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sectors of a volume with known contents.
struct Window {
    volume: &'static str,
    model: Mutex<VolumeModel>,
}

impl Window {
    fn new(seed: u64, volume: &'static str, start_sector: u64, sector_count: usize) -> Window {
        let number = u8::from(volume == "good");
        let model = VolumeModel::new(seed, number, start_sector, sector_count);
        Window { volume, model: Mutex::new(model) }
    }
}

/// All acknowledged writes.
struct Written {
    seed: u64,
    /// One sector amid the damage, which keeps the volume stalled, and a window of each volume for
    /// other writes.
    windows: [Window; 3],
    sequence: AtomicU64,
}

/// A daemon with a sick and a good volume.
struct World {
    daemon: Daemon,
    base: Vec<u8>,
    /// The damaged segments in their undamaged form.
    originals: Vec<(PathBuf, Vec<u8>)>,
    written: Written,
}

fn configure(daemon: &Daemon, max_age: &str) {
    let caches =
        ("[cache]\nsize = \"64MiB\"", "[cache]\nsize = \"0\"\n[memory_cache]\nsize = \"0\"");
    let settings = SMALL.replace(caches.0, caches.1).replace("\"1s\"", &format!("{max_age:?}"));
    std::fs::write(daemon.place().join("spindle.toml"), settings).expect("write the configuration");
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("a readable directory");
    entries.map(|entry| entry.expect("a readable entry").path()).collect()
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let (dirs, mut files): (Vec<_>, Vec<_>) =
        entries(dir).into_iter().partition(|path| path.is_dir());
    files.extend(dirs.iter().flat_map(|dir| self::files(dir)));
    files
}

fn open(daemon: &Daemon, volume: &str) -> std::io::Result<Connection> {
    Connection::open(&daemon.endpoint(volume), &Wanted::everything())
}

impl Written {
    fn write(
        &self,
        window: &Window,
        connection: &mut Connection,
        range: std::ops::Range<u64>,
        flags: u16,
    ) -> std::io::Result<()> {
        let sequence = self.sequence.fetch_add(1, Ordering::SeqCst) + 1;
        let model = || window.model.lock().expect("no panic holds it");
        let sent = model().send(sequence, Effect::Write, range.clone());
        let (sent, payload) = sent.expect("one write at a time");
        let length = u32::try_from(payload.len()).expect("small");
        let reply = connection.call(CMD_WRITE, flags, range.start, length, &payload)?;
        assert_eq!(reply.error, 0, "SEED={}: write {range:?} of {}", self.seed, window.volume);
        model().acked(&sent);
        Ok(())
    }

    /// Writes to a window until the daemon is gone or `is_enough` is set.
    fn load(&self, window: &Window, mut connection: Connection, is_enough: &AtomicBool) {
        let mut random = Random::new(self.seed, self.sequence.load(Ordering::SeqCst));
        let all = window.model.lock().expect("no panic holds it").window();
        while !is_enough.load(Ordering::SeqCst) {
            let length = random.between(1, 16) * 512;
            let start = all.start + random.below((all.end - all.start - length) / 512) * 512;
            let flags = if random.chance(20) { CMD_FLAG_FUA } else { 0 };
            if self.write(window, &mut connection, start..start + length, flags).is_err() {
                return;
            }
            // The daemon refuses writes to the volume once the spill files hold several times the
            // log.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl World {
    /// Makes a world whose daemon is not running. All segments are damaged, and the log holds a
    /// sector from amid the damage, so that the first destage of the next start sets the volume
    /// aside.
    fn new(seed: u64) -> World {
        println!("SEED={seed}");
        let mut daemon = Daemon::new("", &[("bad", "64MiB"), ("good", "64MiB")]);
        daemon.use_binary("spindle-faulty");
        for words in ["volume", "destage", "frame"] {
            daemon.announce(words);
        }
        configure(&daemon, "1h");
        daemon.restart();
        let mut base = vec![0; usize::try_from(ROTTEN_BYTES).expect("small")];
        Random::new(seed, 31).fill(&mut base);
        open(&daemon, "bad").expect("it opens").write(0, &base, 0);
        let _ = daemon.json(&["drain"]);
        let read = |path: PathBuf| {
            let bytes = std::fs::read(&path).expect("a readable file");
            (path, bytes)
        };
        let segments = files(&daemon.dir().join("store/segments"));
        let originals: Vec<_> = segments.into_iter().map(read).collect();
        assert!(!originals.is_empty(), "nothing is in the store");
        for (path, bytes) in &originals {
            let mut rotten = bytes.clone();
            rotten.iter_mut().skip(200).step_by(64).for_each(|byte| *byte ^= 1);
            std::fs::write(path, rotten).expect("a writable file");
        }
        let windows = [
            Window::new(seed, "bad", 4096 / 512, 1),
            Window::new(seed, "bad", u64::from(ROTTEN_BYTES) / 512, (4 << 20) / 512),
            Window::new(seed, "good", 0, (4 << 20) / 512),
        ];
        let written = Written { seed, windows, sequence: AtomicU64::new(0) };
        let amid = &written.windows[0];
        let sector = amid.model.lock().expect("no panic holds it").window();
        let mut connection = open(&daemon, "bad").expect("it opens");
        written.write(amid, &mut connection, sector, 0).expect("it is acknowledged");
        daemon.kill();
        configure(&daemon, "1s");
        World { daemon, base, originals, written }
    }

    /// Writes to both volumes until the daemon is gone or `is_over`, which is called often, returns
    /// true.
    fn load(&self, mut is_over: impl FnMut() -> bool) {
        let windows = &self.written.windows[1..];
        let connect = |window: &Window| open(&self.daemon, window.volume);
        let Ok(connections) = windows.iter().map(connect).collect::<Result<Vec<_>, _>>() else {
            return;
        };
        let is_enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (written, is_enough) = (&self.written, &is_enough);
            let start = |(window, connection)| {
                scope.spawn(move || written.load(window, connection, is_enough))
            };
            let threads: Vec<_> = windows.iter().zip(connections).map(start).collect();
            while !threads.iter().all(|thread| thread.is_finished()) {
                is_enough.store(is_over(), Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
    }

    fn spill_file_count(&self) -> usize {
        let is_side = |path: &PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("spill-"))
        };
        entries(&self.daemon.dir().join("log")).iter().filter(|path| is_side(path)).count()
    }

    fn heal(&self) {
        for (path, bytes) in &self.originals {
            std::fs::write(path, bytes).expect("a writable file");
        }
    }

    /// Starts it with an armed fail point and loads it until it dies there.
    fn die_at(&mut self, point: &str, nth: u64) {
        self.daemon.arm(Some(format!("{point}:{nth}")));
        let started = self.daemon.try_start();
        self.daemon.arm(None);
        if started.is_ok() {
            let deadline = Instant::now() + PATIENCE;
            let mut is_to_heal = point.starts_with("late");
            self.load(|| {
                // By then the spill files hold writes that were acknowledged under load.
                if is_to_heal && self.spill_file_count() > 2 {
                    self.heal();
                    is_to_heal = false;
                }
                Instant::now() > deadline
            });
            // If it never reached the fail point, the kill shows that.
            if Instant::now() > deadline {
                self.daemon.killer()();
            }
        }
        let died = self.daemon.reap();
        let died =
            died.unwrap_or_else(|ended| panic!("SEED={}: {started:?}: {ended}", self.written.seed));
        assert_eq!(died.as_deref(), Some(point), "SEED={}", self.written.seed);
        // An ordinary destage passes some of these points too.
        let is_first = point == "spill-start" && nth == 1;
        assert!(is_first || self.spill_file_count() > 0, "it died without a spill file");
        for window in &self.written.windows {
            window.model.lock().expect("no panic holds it").crashed();
        }
    }

    /// Starts it with the remaining data and checks every sector of the windows.
    fn restart(&mut self) {
        self.daemon.restart();
        for window in &self.written.windows {
            let mut connection = open(&self.daemon, window.volume).expect("it opens");
            let mut model = window.model.lock().expect("no panic holds it");
            let all = model.window();
            for start in all.clone().step_by(256 << 10) {
                let length = (256 << 10).min(all.end - start);
                let bytes = connection.read(start, u32::try_from(length).expect("small"));
                let checked = model.recovered(start, &bytes);
                checked.unwrap_or_else(|wrong| panic!("SEED={}: {wrong}", self.written.seed));
            }
        }
    }

    /// Reads the damaged range: it fails, or if healed shows the original data.
    fn check_base(&self, is_healed: bool) {
        let mut connection = open(&self.daemon, "bad").expect("it opens");
        let reply = connection.call(CMD_READ, 0, 8192, ROTTEN_BYTES - 8192, &[]).expect("a reply");
        if is_healed {
            assert!(
                reply.error == 0 && reply.payload == self.base[8192..],
                "SEED={}",
                self.written.seed
            );
        } else {
            assert_eq!(reply.error, EIO, "SEED={}", self.written.seed);
        }
    }
}

fn a_death_loses_nothing(point: &str, nths: &[u64]) {
    if !binary("spindle-faulty").exists() {
        return skip("the build with fail points is missing (tests/run makes it)");
    }
    for seed in seeds(1) {
        for nth in nths {
            let mut world = World::new(seed);
            world.die_at(point, *nth);
            world.restart();
            world.check_base(point.starts_with("late"));
            // These writes are newer than every spill file, and must stay so when the volume has
            // caught up.
            let end = Instant::now() + Duration::from_secs(1);
            world.load(|| Instant::now() > end);
            world.heal();
            let end = Instant::now() + PATIENCE;
            while !world.daemon.command(&["drain"]).status.success() {
                assert!(Instant::now() < end, "SEED={seed}: it does not catch up");
            }
            assert_eq!(world.spill_file_count(), 0, "SEED={seed}: spill files are left");
            world.daemon.kill();
            world.restart();
            world.check_base(true);
            world.daemon.stop();
            world.daemon.fsck();
        }
    }
}

#[test]
fn crash_before_a_spill_file_is_written_loses_nothing() {
    a_death_loses_nothing("spill-start", &[1, 2]);
}

#[test]
fn crash_after_a_spill_file_is_written_loses_nothing() {
    a_death_loses_nothing("spill-written", &[1, 2]);
}

#[test]
fn crash_after_metadata_names_a_spill_file_loses_nothing() {
    a_death_loses_nothing("spill-committed", &[1, 2]);
}

#[test]
fn crash_after_the_log_released_spilled_data_loses_nothing() {
    a_death_loses_nothing("spill-released", &[1, 2]);
}

#[test]
fn crash_after_a_volume_caught_up_loses_nothing() {
    a_death_loses_nothing("late-committed", &[1]);
}

#[test]
fn crash_after_a_volume_dropped_spill_files_loses_nothing() {
    a_death_loses_nothing("late-dropped", &[1]);
}
