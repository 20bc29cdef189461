//! Asks the disks under a directory for their wear, by running `smartctl`.
//!
//! Invariants:
//! - A program that hangs is ended and reaped after a limited time, and of its output a limited part is read.
//! - One question for a directory is under way at a time: a disk that hangs keeps one task.
//! - That nothing is known is no error, and changes nothing: `smartctl` may not be installed, and virtual disks have no
//!   wear. A disk that does not answer keeps its last verdict while it is below the directory.

use crate::wear::Wear;
use block::env::Clock;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt;
use tokio::time::timeout;

/// Pause between two questions. Chosen by hand: a drive wears over months.
const PAUSE: Duration = Duration::from_secs(3600);
/// Longest time that the program may take for a disk. Chosen by hand: a disk that was asleep starts.
const TIME_MAX: Duration = Duration::from_secs(30);
/// Longest output that is read. Chosen by hand: that of a disk has a few KiB.
const OUTPUT_BYTES_MAX: u64 = 1 << 20;
/// Most devices that are looked at below a directory, of all levels. Chosen by hand: more than the disks of a shelf, and
/// it ends a loop.
const DEVICE_COUNT_MAX: usize = 128;

/// How disks are found and asked.
#[derive(Clone, Debug)]
pub(crate) struct Smart {
    /// The program: a path, or a name that is looked for in `PATH`.
    program: PathBuf,
    /// The root of sysfs.
    sys: PathBuf,
    time_max: Duration,
}

impl Default for Smart {
    fn default() -> Smart {
        Smart { program: "smartctl".into(), sys: "/sys".into(), time_max: TIME_MAX }
    }
}

impl Smart {
    /// Returns the names of the disks below a block device, through partitions, device mapper and RAID. Reads sysfs only.
    /// Empty for a device that is none of a disk, as those of tmpfs, overlay, btrfs and ZFS.
    fn disks(&self, device: u64) -> BTreeSet<String> {
        let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let mut todo = vec![self.sys.join("dev/block").join(numbers)];
        let mut found = BTreeSet::new();
        for _ in 0..DEVICE_COUNT_MAX {
            let Some(link) = todo.pop() else { break };
            let Ok(mut place) = link.canonicalize() else { continue };
            // A partition is a folder of its disk.
            if place.join("partition").exists() && !place.pop() {
                continue;
            }
            let below = std::fs::read_dir(place.join("slaves"));
            let below = below.into_iter().flatten().flatten().map(|entry| entry.path());
            let below: Vec<PathBuf> = below.collect();
            match place.file_name().and_then(|name| name.to_str()) {
                // The kernel writes `!` for `/`.
                Some(name) if below.is_empty() => drop(found.insert(name.replace('!', "/"))),
                _ => todo.extend(below),
            }
        }
        found
    }

    /// Asks a disk. `None` if nothing is known.
    async fn ask(&self, disk: &str) -> Option<Wear> {
        let mut child = tokio::process::Command::new(&self.program)
            .args(["--json=c", "--health", "--attributes"])
            .arg(format!("/dev/{disk}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .ok()?;
        let mut output = child.stdout.take()?.take(OUTPUT_BYTES_MAX);
        let mut text = Vec::new();
        let read = timeout(self.time_max, output.read_to_end(&mut text)).await;
        // One that has printed everything is not needed any more, and another one must end. Its status says nothing: a
        // disk with errors is one of its failures.
        let _ = child.kill().await;
        match read {
            Ok(Ok(_)) => Wear::parse(&text),
            Ok(Err(_)) | Err(_) => None,
        }
    }

    /// Asks all disks below a directory. Returns them by their names, with the answers of those that have answered.
    async fn wear_below(&self, dir: PathBuf) -> Vec<(String, Option<Wear>)> {
        let this = self.clone();
        let disks = tokio::task::spawn_blocking(move || {
            let found = std::fs::metadata(dir).ok();
            found.map(|found| this.disks(found.dev())).unwrap_or_default()
        });
        let mut found = Vec::new();
        for disk in disks.await.unwrap_or_default() {
            let wear = self.ask(&disk).await;
            found.push((disk, wear));
        }
        found
    }
}

/// Watches the disks below a directory: asks them soon after the start, and then every hour.
#[derive(Debug)]
pub struct WearWatch {
    smart: Smart,
    clock: Arc<dyn Clock>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    asked_at: Option<Instant>,
    is_asking: bool,
    /// The disks that should be replaced, as each has answered last, and why.
    worn: BTreeMap<String, String>,
}

impl State {
    /// Notes the disks that were found, and their answers. What was known of a disk that did not answer stays, and so
    /// does everything if no disk was found.
    fn note(&mut self, found: Vec<(String, Option<Wear>)>) {
        if found.is_empty() {
            return;
        }
        self.worn.retain(|disk, _| found.iter().any(|(present, _)| present == disk));
        for (disk, wear) in found {
            match wear {
                Some(Wear { why: Some(why) }) => drop(self.worn.insert(disk, why)),
                Some(Wear { why: None }) => drop(self.worn.remove(&disk)),
                None => {}
            }
        }
    }

    fn why(&self) -> Option<String> {
        let reasons = self.worn.iter().map(|(disk, why)| format!("{disk}: {why}"));
        let reasons: Vec<String> = reasons.collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

impl WearWatch {
    /// Makes a watch that has not asked yet.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>) -> WearWatch {
        WearWatch::with_smart(clock, Smart::default())
    }

    fn with_smart(clock: Arc<dyn Clock>, smart: Smart) -> WearWatch {
        WearWatch { smart, clock, state: Arc::default() }
    }

    /// Asks the disks below the directory in the background, if it is time to. To be called from a runtime, every few
    /// seconds, while the directory is known to be mounted.
    pub fn look(&self, dir: &Path) {
        let now = self.clock.now();
        {
            let mut state = self.state.lock();
            let is_early = state.asked_at.is_some_and(|asked_at| now < asked_at + PAUSE);
            if state.is_asking || is_early {
                return;
            }
            (state.asked_at, state.is_asking) = (Some(now), true);
        }
        let (smart, state, dir) = (self.smart.clone(), Arc::clone(&self.state), dir.to_owned());
        tokio::spawn(async move {
            let found = smart.wear_below(dir).await;
            let mut state = state.lock();
            state.note(found);
            state.is_asking = false;
        });
    }

    /// Why a disk below the directory should be replaced; absent if none is known to need it.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        self.state.lock().why()
    }

    /// Notes the answer of a disk.
    #[cfg(test)]
    pub(crate) fn note(&self, disk: &str, wear: Wear) {
        self.state.lock().note(vec![(disk.to_owned(), Some(wear))]);
    }
}

#[cfg(test)]
mod tests;
