//! Ends the attachment of a volume of another machine: its process, its device, and the server's
//! part.

use super::addresses::Addresses;
use super::{Attempt, Found, attempt_path, end, find, forget, unlink};
use crate::blocking::blocking;
use crate::identifiers;
use crate::in_use::check_unused;
use crate::locks::{Locks, holder_of, lock};
use async_recursion::async_recursion;
use block::env::{Clock, SystemClock};
use block::{Error, ErrorKind, Result};
use nbd::kernel;
use std::fs::File;
use std::time::Duration;

/// Longest wait for a process to leave its device. Chosen by hand.
const STOP_WAIT: Duration = Duration::from_secs(10);

/// Removes the device of an export from the kernel, and tells the server. `uris` is the list of its
/// addresses, or one of them. Also ends an unfinished attempt to attach it, which has no device. Without `is_forced`, the device must not be in use.
///
/// # Errors
/// `NotFound`: there is none. `Busy`: it is in use, or is just being attached. Errors reaching the
/// server if there is no device.
#[async_recursion]
pub async fn detach(uris: &str, is_forced: bool) -> Result<String> {
    let asked = Addresses::parse(uris)?;
    let Some(found) = find(&asked)? else { return detach_attempt(&asked).await };
    let Found { addresses: target, attachment } = found;
    let identifier = identifiers::of_remote(&target, attachment);
    let asked = target.clone();
    let _lock = blocking(move || {
        let Some(number) = kernel::find(&identifier)? else { return lock(&asked.to_string()) };
        let path = kernel::block_path(number);
        let is_served = match lock(&asked.to_string()) {
            Err(error) if error.kind() == ErrorKind::Busy => true,
            lock => lock.map(|_| false)?,
        };
        if !is_forced && !is_served {
            let what = format!(
                "detach {asked}: no process serves {}, so its use cannot be checked; \
                 attach it again first, or use --force, and its users get errors",
                path.display()
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if !is_forced {
            check_unused(&format!("detach {asked}"), &path)?;
        }
        let served = stop_serving(&asked)?;
        if find(&asked)?.is_none_or(|found| found.attachment != attachment) {
            return Ok(served); // it went on its own meanwhile
        }
        // Before the removal: after a crash in between, the next attachment removes the device.
        let path = attempt_path(&asked);
        Attempt::Over(attachment).write(&path)?;
        kernel::delete(&identifier).inspect_err(|error| {
            // If the outcome is unknown, tell the server about the end anyway.
            let is_there = matches!(kernel::find(&identifier), Ok(Some(_)));
            if is_there && error.kind() != ErrorKind::Unavailable {
                forget(&path);
            }
        })?;
        Ok(served)
    })
    .await?;
    unlink(&target);
    Ok(match end(&target, attachment).await {
        Ok(()) => format!("{target} is detached"),
        Err(error) => format!(
            "{target} is detached here, but the server does not know it ({}): detach it once more \
             when the server answers, or run `spindle detach --force {}` there before another \
             machine attaches it",
            error.chain(),
            target.export()
        ),
    })
}

/// Ends an attachment that the server may have made without this machine learning of it.
async fn detach_attempt(target: &Addresses) -> Result<String> {
    let path = attempt_path(target);
    let none = || {
        let what = format!("detach {target}: it is not attached to this machine");
        Error::new(ErrorKind::NotFound, what)
    };
    Attempt::read(&path).ok_or_else(none)?;
    let context = |error: Error| error.context(format!("detach {target}"));
    let mut locks = Locks::default();
    locks.take(target.lock_names()).map_err(context)?;
    // Another process may have continued it meanwhile.
    if find(target)?.is_some() {
        let what = format!("detach {target}: it was just attached; detach it again");
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let before = Attempt::read(&path).ok_or_else(none)?;
    let (Attempt::Begun(attachment) | Attempt::Over(attachment)) = before;
    end(target, attachment).await.map_err(context)?;
    Ok(match before {
        Attempt::Begun(_) => format!("{target} is detached: it had no device yet"),
        Attempt::Over(_) => format!("{target} is detached, and the server knows it"),
    })
}

/// Makes the process that serves the device of a target leave it, and takes its lock. The driver
/// waits for connections that take nothing, and a connection replaced meanwhile would bring the
/// device back.
fn stop_serving(target: &Addresses) -> Result<File> {
    let name = target.to_string();
    let until = SystemClock.now() + STOP_WAIT;
    loop {
        match lock(&name) {
            Err(error) if error.kind() == ErrorKind::Busy && SystemClock.now() < until => {}
            outcome => return outcome,
        }
        if let Some(pid) = holder_of(&name) {
            // It may be gone by now.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        std::thread::sleep(STOP_WAIT / 50);
    }
}
