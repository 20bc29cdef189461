//! Attaches a volume of another machine, or of another process, as a device of this machine's
//! kernel.
//!
//! A separate process without a pool serves it: it relays bytes between the kernel's nbd driver and
//! the server, reconnects, and encrypts if the URI asks for it.
//!
//! Invariants:
//! - The device outlives the process: the kernel keeps everything needed to continue in the
//!   device's identifier.
//! - An attachment is recorded here before the server is asked for it, until the kernel has it. If
//!   no answer comes, the same command asks for the same attachment again, and `detach` takes it
//!   back.
//! - An attachment that the server was asked to end is never asked for again, because that request
//!   may still be on its way. The server is asked until it answers, before it is asked for another
//!   one.
//! - A server that has ended the attachment ends the device: its users get errors, and never see
//!   later writes of others.

use crate::blocking::blocking;
use crate::in_use::check_unused;
use crate::links;
use crate::locks::{holder_of, lock, lock_path};
use crate::{identifiers, probe_process, udev};
use block::env::{boot_id, random_bytes};
use block::{Error, ErrorKind, Result};
use nbd::client::{self, Reached, Target};
use nbd::kernel::{self, Device, DeviceOptions, Siblings, Stop};
use nbd::wire::{ClaimRequest, Intent, LABEL_BYTES_MAX, transmission_flag};
use parking_lot::Mutex as SyncMutex;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::watch;
use uuid::Uuid;

/// Buffer of a relay for each direction. Chosen by hand: a large request.
const RELAY_BYTES: usize = 256 << 10;
/// Time for relays to end at an orderly stop. Requests in flight are sent again later.
const LEAVE_GRACE: Duration = Duration::from_millis(500);

/// Longest wait for a process to leave its device. Chosen by hand.
const STOP_WAIT: Duration = Duration::from_secs(10);
/// Longest wait for programs that only look at devices, such as udev, to close a removed one.
/// Chosen by hand.
const GONE_WAIT: Duration = Duration::from_secs(1);
const DISCONNECTED_IN_USE: &str =
    "its device was disconnected while something used it: unmount that, and attach again";
/// Time between two attempts to reach a server. Chosen by hand.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Options for attaching a volume of another machine.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// URI as the user wrote it.
    pub uri: String,
    /// 512 to 4096 bytes.
    pub logical_block_bytes: u32,
    /// Time without this process after which requests fail.
    pub dead_timeout: Duration,
    /// Other clients may write to the volume, too.
    pub is_shared: bool,
}

/// Checks that a URI names an export.
///
/// # Errors
/// `Invalid`, with the expected form.
pub fn check_uri(uri: &str) -> Result<()> {
    Target::parse(uri).map(drop)
}

/// Attaches the volume of a URI and serves its device until `stopped`, or until the device is gone.
/// Calls `announce` with the device and the link to it.
///
/// # Errors
/// `Busy`: another process serves it. `Fenced`: the server refuses this machine; the device is
/// gone. Errors of the kernel and of reaching the server.
pub async fn serve(
    options: &RemoteOptions,
    stopped: impl Future<Output = ()>,
    announce: impl FnOnce(&Path, &Path),
) -> Result<()> {
    let target = Target::parse(&options.uri)?;
    let _lock = lock(&options.uri)?;
    blocking(kernel::check).await?;
    tokio::pin!(stopped);
    let found = settled(&target).await?;
    let path = attempt_path(&target);
    let attachment = match found {
        Some(attachment) => attachment,
        None => tokio::select! {
            attachment = attempt(&target, &path) => attachment?,
            () = &mut stopped => return Ok(()),
        },
    };
    let claim = claim_of(&target, attachment, options.is_shared);
    let intent = if found.is_some() { Intent::Go } else { Intent::Attach };
    let request = ClaimRequest { intent, ..claim.clone() };
    let reached = reach(&target, &request, found.is_some());
    let reached = tokio::select! {
        reached = reached => reached,
        () = &mut stopped => return Ok(()),
    };
    let first = match (reached, found) {
        (Err(error), Some(_)) if error.kind() == ErrorKind::Fenced => {
            let identifier = identifiers::of_remote(&target, attachment);
            blocking(move || kernel::delete(&identifier).map(drop)).await?;
            unlink(&target);
            return Err(error.context("the device is gone: its users get errors"));
        }
        (reached, _) => reached?,
    };
    let (backend, device_options) = backend_of(options, &target, claim.clone(), first);
    let mut refused = backend.refused.subscribe();
    let mut sizes = backend.size_bytes.subscribe();
    let made = blocking({
        let (backend, options, is_found) = (backend.clone(), device_options, found.is_some());
        move || match Device::recover(&backend, &options)? {
            Some(device) => Ok(device),
            None if is_found => Err(Error::new(ErrorKind::Busy, DISCONNECTED_IN_USE)),
            None => Device::add(&backend, &options),
        }
    });
    let device = match made.await {
        Ok(device) => device,
        Err(error) => {
            if found.is_none() {
                release(&target, attachment).await;
            }
            return Err(error.context(format!("attach {target}")));
        }
    };
    forget(&path); // the kernel knows it from here on
    let path = device.path();
    let link = link(&target, &path);
    announce(&path, &link);
    let mut device = device;
    loop {
        tokio::select! {
            () = &mut stopped => {
                return blocking(move || {
                    device.leave(LEAVE_GRACE);
                    Ok(())
                })
                .await;
            }
            // The device was detached.
            () = device.gone() => {
                tracing::info!(device = %path.display(), "the device was disconnected");
                // Record this before the process can end and lose it.
                if let Err(error) = Attempt::Over(attachment).write(&attempt_path(&target)) {
                    tracing::warn!(error = %error.chain(), "the end of an attachment is not noted");
                }
                unlink(&target);
                let removed = blocking(move || device.remove()).await;
                release(&target, attachment).await;
                return removed;
            }
            refusal = refused.wait_for(Option::is_some) => {
                let error = refusal.ok().and_then(|error| error.clone());
                blocking(move || device.remove()).await?;
                unlink(&target);
                let error = error.unwrap_or_else(|| Error::new(ErrorKind::Fenced, "refused"));
                return Err(error.context("the device is gone: its users get errors"));
            }
            Ok(()) = sizes.changed() => {
                let size_bytes = *sizes.borrow_and_update();
                device = blocking(move || {
                    if let Err(error) = device.resize(size_bytes) {
                        tracing::warn!(error = %error.chain(), "the device keeps its size");
                    }
                    Ok(device)
                })
                .await?;
            }
        }
    }
}

/// Releases the server's state of a device that is gone.
async fn release(target: &Target, attachment: Uuid) {
    if let Err(error) = end(target, attachment).await {
        tracing::warn!(
            error = %error.chain(),
            "the server was not told that an attachment is over: the next `spindle attach` tells it, or \
             `spindle detach --force` there ends it"
        );
    }
}

/// Tells the server that an attachment is over. The caller must hold the lock of the target.
///
/// # Errors
/// Errors reaching the server: it must be told again, and the file of attempts records that.
async fn end(target: &Target, attachment: Uuid) -> Result<()> {
    end_noted(target, attachment, &attempt_path(target)).await
}

async fn end_noted(target: &Target, attachment: Uuid, path: &Path) -> Result<()> {
    // Do not overwrite the record of an attachment that was begun since: it is recorded nowhere
    // else.
    let is_other =
        matches!(Attempt::read(path), Some(Attempt::Begun(other)) if other != attachment);
    let noted = if is_other { Ok(()) } else { Attempt::Over(attachment).write(path) };
    match client::release(target, &claim_of(target, attachment, false)).await {
        Err(error) if error.kind() != ErrorKind::Unsupported => noted.and(Err(error)),
        _ if is_other => Ok(()),
        _ => {
            forget(path);
            Ok(())
        }
    }
}

/// Returns the attachment of this machine's device of a target, if it shall continue. The caller
/// must hold the lock of the target.
///
/// # Errors
/// `Busy`: an attachment that is over is still in use. Kernel errors.
async fn settled(target: &Target) -> Result<Option<Uuid>> {
    let Some(attachment) = find(target)? else { return Ok(None) };
    if Attempt::read(&attempt_path(target)) != Some(Attempt::Over(attachment)) {
        return Ok(Some(attachment));
    }
    // The process that ended it did not get to its device, or the device is disconnected but held
    // open. The kernel then keeps its identifier, by which it would be taken for the next
    // attachment.
    let identifier = identifiers::of_remote(target, attachment);
    let is_gone = blocking(move || {
        kernel::delete(&identifier)?;
        let until = Instant::now() + GONE_WAIT;
        loop {
            let is_gone = kernel::find(&identifier)?.is_none();
            if is_gone || Instant::now() >= until {
                return Ok(is_gone);
            }
            std::thread::sleep(GONE_WAIT / 50);
        }
    });
    if !is_gone.await? {
        return Err(Error::new(ErrorKind::Busy, DISCONNECTED_IN_USE));
    }
    unlink(target);
    Ok(None)
}

/// Request to the server without an answer yet, kept in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// To attach.
    Begun(Uuid),
    /// To end it.
    Over(Uuid),
}

/// Text in the file before the number of an attachment that is over.
const OVER: &str = "over ";

impl Attempt {
    fn read(path: &Path) -> Option<Attempt> {
        let text = std::fs::read_to_string(path).ok()?;
        match text.strip_prefix(OVER) {
            Some(number) => number.parse().ok().map(Attempt::Over),
            None => text.parse().ok().map(Attempt::Begun),
        }
    }

    fn write(self, path: &Path) -> Result<()> {
        let text = match self {
            Attempt::Begun(attachment) => attachment.simple().to_string(),
            Attempt::Over(attachment) => format!("{OVER}{}", attachment.simple()),
        };
        // A half-written file would be useless.
        let next = path.with_extension("attempt.tmp");
        let written = std::fs::write(&next, text).and_then(|()| std::fs::rename(&next, path));
        written.map_err(|error| {
            Error::with_source(ErrorKind::Io, format!("write {}", path.display()), error)
        })
    }
}

/// Chooses the attachment to ask for if there is no device: the one that was asked for before
/// without an outcome, or a new one, once the server knows that the previous one is over.
async fn attempt(target: &Target, path: &Path) -> Result<Uuid> {
    if let Some(Attempt::Over(before)) = Attempt::read(path) {
        let ended = end_noted(target, before, path).await;
        ended.map_err(|error| error.context("end what was attached before"))?;
    }
    begun(path)
}

/// Returns the attachment that file `path` records as begun, or records a new one.
fn begun(path: &Path) -> Result<Uuid> {
    if let Some(Attempt::Begun(before)) = Attempt::read(path) {
        return Ok(before);
    }
    let attachment = Uuid::from_bytes(random_bytes());
    Attempt::Begun(attachment).write(path)?;
    Ok(attachment)
}

fn forget(attempt: &Path) {
    let _ = std::fs::remove_file(attempt); // mostly there is none
}

fn attempt_path(target: &Target) -> PathBuf {
    lock_path(&target.to_string()).with_extension("attempt")
}

/// Reaches the server for the first time. If there is a device, its users wait for it, so this
/// retries while the server is unavailable.
async fn reach(target: &Target, claim: &ClaimRequest, is_waited_for: bool) -> Result<Reached> {
    let mut was_said = false;
    loop {
        match client::open(target, claim).await {
            Err(error) if is_waited_for && error.kind() == ErrorKind::Unavailable => {
                if !was_said {
                    tracing::warn!(
                        error = %error.chain(),
                        "a connection of a device could not be replaced; trying again"
                    );
                    was_said = true;
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
            outcome => return outcome,
        }
    }
}

fn backend_of(
    options: &RemoteOptions,
    target: &Target,
    claim: ClaimRequest,
    first: Reached,
) -> (Arc<Backend>, DeviceOptions) {
    if !first.has_claim {
        tracing::warn!(
            server = %target,
            "the server does not know attachments: nothing keeps others from the volume, and a request \
             of a connection that was lost may still run after it was repeated"
        );
    }
    let device_options = DeviceOptions {
        identifier: identifiers::of_remote(target, Uuid::from_bytes(claim.attachment)),
        size_bytes: first.size_bytes,
        logical_block_bytes: options.logical_block_bytes,
        transmission_flags: first.transmission_flags & !transmission_flag::CAN_MULTI_CONN,
        // With several connections, the kernel would drop one on its own, and the server could not
        // be told in time.
        connection_count: 1,
        dead_timeout: options.dead_timeout,
        set_attribute: probe_process::set_attribute,
    };
    let backend = Backend {
        target: target.clone(),
        claim,
        size_bytes: watch::Sender::new(first.size_bytes),
        first: SyncMutex::new(Some(first)),
        refused: watch::Sender::new(None),
        is_down: AtomicBool::new(false),
    };
    (Arc::new(backend), device_options)
}

/// Removes the device of a URI from the kernel, and tells the server. Also ends an unfinished
/// attempt to attach it, which has no device. Without `is_forced`, the device must not be in use.
///
/// # Errors
/// `NotFound`: there is none. `Busy`: it is in use, or is just being attached. Errors reaching the
/// server if there is no device.
pub async fn detach(uri: &str, is_forced: bool) -> Result<String> {
    let target = Target::parse(uri)?;
    let Some(attachment) = find(&target)? else { return detach_attempt(&target).await };
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
                "detach {asked}: no process serves {}, so that nobody can look whether it is in use; \
                 attach it again first, or use --force, and its users get errors",
                path.display()
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if !is_forced {
            check_unused(&format!("detach {asked}"), &path)?;
        }
        let served = stop_serving(&asked)?;
        if find(&asked)? != Some(attachment) {
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
            "{target} is detached here; the server was not told ({}): detach it once more when the server \
             answers, or run `spindle detach --force {}` there before another machine attaches it",
            error.chain(),
            target.export
        ),
    })
}

/// Ends an attachment that the server may have made without this machine learning of it.
async fn detach_attempt(target: &Target) -> Result<String> {
    let path = attempt_path(target);
    let none = || {
        let what = format!("detach {target}: it is not attached to this machine");
        Error::new(ErrorKind::NotFound, what)
    };
    Attempt::read(&path).ok_or_else(none)?;
    let context = |error: Error| error.context(format!("detach {target}"));
    let _lock = lock(&target.to_string()).map_err(context)?;
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
fn stop_serving(target: &Target) -> Result<File> {
    let name = target.to_string();
    let until = Instant::now() + STOP_WAIT;
    loop {
        match lock(&name) {
            Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => {}
            outcome => return outcome,
        }
        if let Some(pid) = holder_of(&name) {
            // It may be gone by now.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        std::thread::sleep(STOP_WAIT / 50);
    }
}

/// Attachment of this machine's device of a target.
fn find(target: &Target) -> Result<Option<Uuid>> {
    Ok(identifiers::attachment_of(target, &kernel::identifiers()?))
}

/// Identifies this machine, the same after a reboot if the machine has an id.
fn client_id() -> Uuid {
    let known = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    if known.trim().is_empty() {
        return boot_id();
    }
    // The id must not be shown to others unchanged. Source: machine-id(5).
    Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("spindle {}", known.trim()).as_bytes())
}

fn claim_of(target: &Target, attachment: Uuid, is_shared: bool) -> ClaimRequest {
    let mut label = rustix::system::uname().nodename().to_string_lossy().into_owned();
    label.truncate(label.floor_char_boundary(LABEL_BYTES_MAX));
    ClaimRequest {
        intent: Intent::Go,
        is_shared,
        connection: 0,
        client: client_id().into_bytes(),
        boot: boot_id().into_bytes(),
        attachment: attachment.into_bytes(),
        label,
        export: target.export.clone(),
    }
}

/// Path of the link to the device of a target.
fn link_path(target: &Target) -> PathBuf {
    let plain = |text: &str| -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let text: String = text.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        match text.starts_with('.') || text.is_empty() {
            true => format!("_{text}"),
            false => text,
        }
    };
    // No pool has such a name.
    let place = match target.place_name() {
        (host, Some(port)) => format!("{}:{port}", plain(host)),
        (socket, None) => {
            let name = Uuid::new_v5(&Uuid::NAMESPACE_URL, socket.as_bytes()).simple().to_string();
            format!("unix:{}", &name[..8])
        }
    };
    Path::new(links::DIR).join(place).join(plain(&target.export))
}

fn link(target: &Target, device: &Path) -> PathBuf {
    let link = link_path(target);
    let parent = link.parent().expect("it has a directory");
    let made = std::fs::create_dir_all(parent).and_then(|()| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(device, &link)
    });
    if let Err(error) = made {
        tracing::warn!(link = %link.display(), %error, "no link to a device was made");
    }
    udev::tell(&link, device);
    link
}

fn unlink(target: &Target) {
    let link = link_path(target);
    udev::forget(&link, None);
    let _ = std::fs::remove_file(&link);
    let _ = link.parent().map(std::fs::remove_dir); // once it is empty
}

/// Relays between the kernel and a server.
struct Backend {
    target: Target,
    claim: ClaimRequest,
    /// Connection by which the export's size was learned.
    first: SyncMutex<Option<Reached>>,
    size_bytes: watch::Sender<u64>,
    /// Set when the server refuses this attachment for good.
    refused: watch::Sender<Option<Error>>,
    is_down: AtomicBool,
}

impl kernel::Backend for Backend {
    type Connection = Reached;

    async fn dial(&self, connection: u16) -> Result<Reached> {
        if connection == 0
            && let Some(first) = self.first.lock().take()
        {
            return Ok(first);
        }
        let claim = ClaimRequest { connection, ..self.claim.clone() };
        let reached =
            client::open(&self.target, &claim).await.inspect_err(|error| match error.kind() {
                ErrorKind::Fenced => drop(self.refused.send_replace(Some(error.clone()))),
                _ => self.is_down.store(true, Ordering::Relaxed),
            })?;
        if self.is_down.swap(false, Ordering::Relaxed) {
            tracing::info!(server = %self.target, "the server answers again");
        }
        Ok(reached)
    }

    async fn serve(
        &self,
        reached: Reached,
        mut stream: UnixStream,
        _siblings: Siblings,
        mut stop: Stop,
    ) {
        // Only once the kernel has this connection: a size change waits for all requests in flight,
        // and those wait for a connection.
        self.size_bytes.send_if_modified(|size_bytes| {
            std::mem::replace(size_bytes, reached.size_bytes) != reached.size_bytes
        });
        let mut wire = reached.wire;
        let relayed = tokio::io::copy_bidirectional_with_sizes(
            &mut stream,
            &mut wire,
            RELAY_BYTES,
            RELAY_BYTES,
        );
        tokio::select! {
            ended = relayed => tracing::debug!(?ended, "a connection ended"),
            _ = stop.wait_for(Option::is_some) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_asks_with_its_own_name() {
        let target = Target::parse("nbd://db1/pg").unwrap();
        let attachment = Uuid::from_bytes([7; 16]);
        assert_eq!(client_id(), client_id());
        let claim = claim_of(&target, attachment, true);
        assert_eq!((claim.export.as_str(), claim.is_shared), ("pg", true));
        assert!(ClaimRequest::decode(&claim.encode()).is_ok());
    }

    #[test]
    fn what_was_asked_for_without_an_answer_is_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device.attempt");
        let first = begun(&path).unwrap();
        assert_eq!(
            Attempt::read(&path),
            Some(Attempt::Begun(first)),
            "it is kept before it is sent"
        );
        assert_eq!(begun(&path).unwrap(), first);
        std::fs::write(&path, "half").unwrap();
        assert_eq!(Attempt::read(&path), None);
        let next = begun(&path).unwrap();
        assert!(next != first && Attempt::read(&path) == Some(Attempt::Begun(next)));
        let (one, other) = ("nbd://db1/pg", "nbd://db1/pg2");
        let place = |uri| attempt_path(&Target::parse(uri).unwrap());
        assert!(place(one) == place(one) && place(one) != place(other));
    }

    /// A server that answers one option of one client, saying that it does not know it.
    async fn answer_once(listener: tokio::net::TcpListener) {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut wire, _) = listener.accept().await.unwrap();
        wire.write_all(b"NBDMAGICIHAVEOPT\0\x03").await.unwrap();
        let mut option = [0; 4 + 16];
        wire.read_exact(&mut option).await.unwrap();
        let data_bytes = u32::from_be_bytes(*option.last_chunk().unwrap());
        wire.read_exact(&mut vec![0; data_bytes as usize]).await.unwrap();
        let mut reply = [0; 20];
        reply[..8].copy_from_slice(&0x0003_e889_0455_65a9_u64.to_be_bytes());
        reply[8..12].copy_from_slice(&option[12..16]);
        reply[12..16].copy_from_slice(&0x8000_0001_u32.to_be_bytes());
        wire.write_all(&reply).await.unwrap();
    }

    /// The request to end an attachment may be on its way for long. It must not find a new
    /// attachment with its number.
    #[tokio::test]
    async fn an_attachment_that_was_to_end_is_never_asked_for_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("device.attempt");
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let target = Target::parse(&format!("nbd://{address}/pg")).unwrap();
        drop(listener);
        let first = attempt(&target, &path).await.unwrap();
        end_noted(&target, first, &path).await.expect_err("nobody answers");
        let error = attempt(&target, &path).await.expect_err("nobody answers");
        assert!(error.chain().to_string().contains("end what was attached before"), "{error:?}");
        assert_eq!(Attempt::read(&path), Some(Attempt::Over(first)), "it is told again");
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let (next, ()) = tokio::join!(attempt(&target, &path), answer_once(listener));
        let next = next.unwrap();
        assert_ne!(next, first);
        assert_eq!(Attempt::read(&path), Some(Attempt::Begun(next)));
    }

    #[test]
    fn links_stay_where_links_are() {
        for (uri, path) in [
            ("nbd://db1/pg", "/dev/spindle/db1:10809/pg"),
            ("nbd://[::1]:7/..%2F..%2Fsda", "/dev/spindle/__1:7/_.._.._sda"),
            ("nbd+unix:///pg?socket=/run/x", "/dev/spindle/unix:5a8d9a25/pg"),
            ("nbd://db1/", "/dev/spindle/db1:10809/_"),
        ] {
            let target = Target::parse(uri).unwrap();
            assert_eq!(link_path(&target), Path::new(path), "{uri}");
        }
    }
}
