//! Limits of the process: open files, huge pages, memory that stays in RAM.

use block::{Error, ErrorKind};
use rustix::mm::MlockAllFlags;

/// Locks the memory that this process touches, now and later. Memory that is only reserved is not
/// locked.
///
/// # Errors
/// `Denied` if the limit of the process is too low.
pub(crate) fn lock_memory() -> Result<(), Error> {
    let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(flags).map_err(|errno| {
        let what = "lock the process in memory: raise its limit (LimitMEMLOCK=infinity in the unit, \
                    ulimit -l unlimited in a shell), or set lock_memory = false";
        Error::with_source(ErrorKind::Denied, what, std::io::Error::from(errno))
    })
}

/// Sets up the process for serving.
pub(crate) fn prepare() {
    raise_open_files();
    keep_pages_small();
}

/// Disables huge pages, so that only memory that is needed is in use: buffers come and go, and with
/// huge pages each one that still has a used part counts as 2 MiB. Measured with 75 s of random
/// writes and a budget of 448 MiB: 305 MiB at most instead of 478, 196 MiB at rest instead of 440,
/// and no slower.
pub(crate) fn keep_pages_small() {
    if let Err(error) = rustix::thread::disable_transparent_huge_pages(true) {
        tracing::debug!(%error, "could not disable huge pages");
    }
}

/// Raises the limit of open files to the maximum that the system allows, so that connections, files
/// of the log and spill files do not run out of them at the same time.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    if let Err(error) = raised {
        tracing::warn!(%error, current = ?limit.current, "could not raise the limit of open files");
    }
}
