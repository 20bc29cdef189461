//! Threads that do little at a time, and that clients wait for.
//!
//! Invariants:
//! - Only advice to the kernel: where it is not taken, all works, only later on a busy core.

use std::io;

/// Time on a core that the calling thread wants at a time, in nanoseconds. Source: the kernel's
/// smallest for a custom slice (`kernel/sched/syscalls.c`, `__setparam_fair`; Linux 6.12).
const SLICE_NS: u64 = 100_000;

/// `SCHED_FLAG_RESET_ON_FORK` of `linux/sched.h`.
const RESET_ON_FORK: u64 = 0x01;

/// Lets the calling thread run soon after it wakes, though another of its core has not used up its
/// slice of some milliseconds. Its share of the core stays what it is. Threads that it starts have the
/// usual slice. Kernels before 6.12 take no notice; nothing is done where somebody has chosen another
/// scheduling policy than the ordinary one.
///
/// # Errors
/// What the kernel says, where it does not allow it.
pub fn ask_for_short_slice() -> io::Result<()> {
    if policy()? != libc::SCHED_OTHER {
        return Ok(());
    }
    let nice = rustix::process::getpriority_process(None)?;
    set_attributes(&libc::sched_attr {
        size: u32::try_from(size_of::<libc::sched_attr>()).expect("it is small"),
        sched_policy: 0, // SCHED_OTHER
        // The reset would also take a better priority from the threads that this one starts.
        sched_flags: if nice < 0 { 0 } else { RESET_ON_FORK },
        sched_nice: nice,
        sched_priority: 0,
        sched_runtime: SLICE_NS,
        sched_deadline: 0,
        sched_period: 0,
    })
}

/// Scheduling policy of the calling thread, without the flag for its children.
fn policy() -> io::Result<i32> {
    #[expect(unsafe_code, reason = "a system call that no safe library offers")]
    // SAFETY: no memory is passed.
    let policy = unsafe { libc::sched_getscheduler(0) };
    if policy < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(policy & !libc::SCHED_RESET_ON_FORK)
    }
}

#[expect(unsafe_code, reason = "a system call that no safe library offers")]
fn set_attributes(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as `size` says, which is the structure's own.
    let outcome = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attributes, 0) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_changes_the_slice_and_nothing_else() {
        let thread = std::thread::spawn(|| {
            rustix::process::setpriority_process(None, 7).expect("to be nicer is allowed");
            ask_for_short_slice().expect("it is allowed");
            rustix::process::getpriority_process(None).expect("to be read")
        });
        assert_eq!(thread.join().expect("no panic"), 7);
    }
}
