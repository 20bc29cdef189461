//! Reaches the server of an export over the first of its addresses that works.
//!
//! Invariants:
//! - One connection to the export exists at a time, under one attachment, whichever address it
//!   uses: to the server, all addresses are one client. The server admits a connection that
//!   replaces a lost one only when the requests of the lost one have ended or were dropped.
//! - With several addresses, a server that does not know attachments is not used: it could run a
//!   request of the old path after the new path has repeated it.
//! - A server that offers less than the device was made with is not used.
//! - The attachment counts as ended once a server says so and none admits the client. A server says so only after
//!   it has confirmed that it owns the pool.

use super::addresses::Addresses;
use block::{Error, ErrorKind, Result};
use nbd::client::{self, Reached, Target};
use nbd::wire::{ReservationRequest, transmission_flag};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Features that the kernel relies on once a device was made with them.
const LASTING_FLAGS: u16 = transmission_flag::SEND_FLUSH
    | transmission_flag::SEND_FUA
    | transmission_flag::SEND_TRIM
    | transmission_flag::SEND_WRITE_ZEROES;

/// The addresses of an export, and which of them is in use.
pub(super) struct Route {
    addresses: Addresses,
    /// Index of the address that is tried first.
    current: AtomicUsize,
    /// Lasting flags of the first server that was reached.
    needed_flags: OnceLock<u16>,
    /// File that shows other processes the address in use, and its contents.
    shown: Mutex<Option<(PathBuf, String)>>,
}

impl Route {
    /// Makes a route. Sends nothing.
    pub fn new(addresses: Addresses) -> Route {
        Route {
            addresses,
            current: AtomicUsize::new(0),
            needed_flags: OnceLock::new(),
            shown: Mutex::new(None),
        }
    }

    /// Tells whether there is another address to change to.
    pub fn has_others(&self) -> bool {
        self.addresses.all().len() > 1
    }

    /// The address in use, or the one that is tried next.
    pub fn current(&self) -> &Target {
        &self.addresses.all()[self.index(0)]
    }

    fn index(&self, step: usize) -> usize {
        self.current.load(Ordering::Relaxed).wrapping_add(step) % self.addresses.all().len()
    }

    /// Writes the address in use to `path`, now and at every change.
    pub fn show_in(&self, path: PathBuf) {
        *self.shown.lock() = Some((path, String::new()));
        self.show();
    }

    fn show(&self) {
        let mut shown = self.shown.lock();
        let Some((path, contents)) = &mut *shown else { return };
        let wanted = self.current().to_string();
        if *contents == wanted {
            return;
        }
        // A reader never sees a part of it.
        let next = path.with_extension("address.tmp");
        let written = std::fs::write(&next, &wanted).and_then(|()| std::fs::rename(&next, &*path));
        match written {
            Ok(()) => *contents = wanted,
            Err(error) => tracing::warn!(
                path = %path.display(), %error,
                "could not record the address that a device uses"
            ),
        }
    }

    /// Makes the next attempt begin with the next address, because the connection over the current
    /// one has ended.
    pub fn move_on(&self) {
        self.current.store(self.index(1), Ordering::Relaxed);
    }

    /// Connects over the current address or, if that fails, over the others in turn. Each is tried
    /// once.
    ///
    /// # Errors
    /// Those of [`client::open`] for a single address. For several: `Fenced` if a server says that the
    /// attachment is over, which only the owner of the pool does; `Unavailable` if one of them may answer later; otherwise the error of
    /// the first. `Unsupported`: the server knows no attachments.
    pub async fn open(&self, reservation: &ReservationRequest) -> Result<Reached> {
        let mut errors = Vec::new();
        for step in 0..self.addresses.all().len() {
            let index = self.index(step);
            let target = &self.addresses.all()[index];
            let reached = client::open(target, reservation).await;
            match reached.and_then(|reached| self.check(target, reached)) {
                Ok(reached) => {
                    if self.has_others() && step > 0 {
                        tracing::info!(server = %target, "the device uses another address");
                    }
                    self.current.store(index, Ordering::Relaxed);
                    self.show();
                    return Ok(reached);
                }
                Err(error) => errors.push(error),
            }
        }
        Err(merged(errors))
    }

    /// Checks whether the device can continue with a server.
    pub(super) fn check(&self, target: &Target, reached: Reached) -> Result<Reached> {
        if self.has_others() && !reached.has_reservation {
            let what = format!(
                "use {target}: the server does not know attachments, so a device with several \
                 addresses could repeat a request on one path before the other path has ended it; \
                 attach it by one address"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let flags = reached.transmission_flags & LASTING_FLAGS;
        let needed = *self.needed_flags.get_or_init(|| flags);
        if needed & !flags != 0 && self.has_others() {
            let what = format!(
                "use {target}: the device was made with features {needed:#x}, and this server offers \
                 {flags:#x}"
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        Ok(reached)
    }

    /// Tells the servers that the attachment is over. It is enough that one of them answers: the
    /// addresses are of one volume.
    ///
    /// # Errors
    /// Those of [`client::release`], if no server has taken it.
    pub async fn release(&self, reservation: &ReservationRequest) -> Result<()> {
        let told = self.addresses.all().iter().map(|target| client::release(target, reservation));
        let told = futures::future::join_all(told).await;
        if told.iter().any(Result::is_ok) {
            return Ok(());
        }
        Err(merged(told.into_iter().filter_map(Result::err).collect()))
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        if let Some((path, _)) = self.shown.get_mut() {
            let _ = std::fs::remove_file(path); // it may be in a folder that is gone
        }
    }
}

/// Joins the errors of all addresses, of which there is at least one.
fn merged(mut errors: Vec<Error>) -> Error {
    if errors.len() == 1 {
        return errors.remove(0);
    }
    let has = |kind| errors.iter().any(|error| error.kind() == kind);
    let kind = match errors[0].kind() {
        _ if has(ErrorKind::Fenced) => ErrorKind::Fenced,
        _ if has(ErrorKind::Unavailable) => ErrorKind::Unavailable,
        first => first,
    };
    let all: Vec<String> = errors.iter().map(Error::chain).collect();
    Error::new(kind, format!("no address works: {}", all.join("; ")))
}
