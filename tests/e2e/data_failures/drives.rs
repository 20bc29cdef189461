//! Drives as small file systems in memory, which can be filled, taken away and replaced.
//!
//! Invariants:
//! - A drive is a directory in a file system of its own. One that replaces it has another name.
//! - The mounts end with the guard. If the test fails, their files are copied to its place first.

use crate::data_stores::files;
use std::path::PathBuf;
use tests::Place;
use tests::place::{output, run};

/// Size of each file system. Chosen by hand: several times the fragments of the test's volumes.
const SIZE: &str = "size=96m";

/// The drives of a test.
pub struct Drives {
    place: Place,
    /// How often each has been replaced.
    generations: Vec<usize>,
}

impl Drives {
    /// Makes empty drives. Needs root.
    pub fn new(count: usize) -> Drives {
        let drives = Drives { place: Place::new(), generations: vec![0; count] };
        for number in 0..count {
            let dir = drives.place.join(&format!("fs{number}"));
            std::fs::create_dir(&dir).expect("make a directory");
            let dir = dir.display().to_string();
            run("mount", &["-t", "tmpfs", "-o", SIZE, "spindle-test", &dir]);
            drives.make(number);
        }
        drives
    }

    pub fn count(&self) -> usize {
        self.generations.len()
    }

    /// Returns the name of a drive: the last part of its directory.
    pub fn name(&self, number: usize) -> String {
        format!("nvme{number}-{}", self.generations[number])
    }

    pub fn dir(&self, number: usize) -> PathBuf {
        self.beside(number, &self.name(number))
    }

    fn beside(&self, number: usize, name: &str) -> PathBuf {
        self.place.join(&format!("fs{number}")).join(name)
    }

    fn make(&self, number: usize) {
        std::fs::create_dir(self.dir(number)).expect("make a directory");
    }

    /// Leaves an empty directory, as where a disk is no longer mounted.
    pub fn unmount(&self, number: usize) {
        let aside = self.beside(number, "aside");
        std::fs::rename(self.dir(number), aside).expect("rename");
        self.make(number);
    }

    /// Brings the drive back after [`Drives::unmount`].
    pub fn mount(&self, number: usize) {
        self.remove_unwritten(number);
        std::fs::rename(self.beside(number, "aside"), self.dir(number)).expect("rename");
    }

    /// Loses all files of the drive. Its directory is there, and empty.
    pub fn wipe(&self, number: usize) {
        std::fs::remove_dir_all(self.dir(number)).expect("remove a directory");
        self.make(number);
    }

    /// Makes another drive in the place of one that was wiped.
    pub fn replace(&mut self, number: usize) {
        self.remove_unwritten(number);
        self.generations[number] += 1;
        self.make(number);
    }

    /// Removes the directory of a drive that was away, and insists that nothing was written there.
    fn remove_unwritten(&self, number: usize) {
        let dir = self.dir(number);
        // A folder may be left of a write that was under way.
        assert_eq!(files(&dir), Vec::<PathBuf>::new(), "written without its disk");
        std::fs::remove_dir_all(dir).expect("remove a directory");
    }

    /// Fills the drive's file system to the last page.
    pub fn fill(&self, number: usize) {
        let file = std::fs::File::create(self.beside(number, "ballast")).expect("make a file");
        let mut size_bytes = 0;
        // Smaller and smaller pieces, until not a page is free.
        for step_bytes in [16 << 20, 1 << 20, 64 << 10, 4 << 10] {
            let flags = rustix::fs::FallocateFlags::empty();
            while rustix::fs::fallocate(&file, flags, size_bytes, step_bytes).is_ok() {
                size_bytes += step_bytes;
            }
        }
        assert!(size_bytes > 0, "it was full before");
    }

    /// Makes room after [`Drives::fill`].
    pub fn free(&self, number: usize) {
        std::fs::remove_file(self.beside(number, "ballast")).expect("remove a file");
    }
}

impl Drop for Drives {
    fn drop(&mut self) {
        for number in 0..self.count() {
            let dir = self.place.join(&format!("fs{number}")).display().to_string();
            if std::thread::panicking() {
                let kept = self.place.join(&format!("kept{number}")).display().to_string();
                let _ = output("rm", &["-f", &format!("{dir}/ballast")]);
                let _ = output("cp", &["-a", &dir, &kept]);
            }
            let _ = output("umount", &["--lazy", &dir]);
        }
    }
}
