//! The volumes of the open pool as NBD exports.
//!
//! Invariants:
//! - The name of an export is the name of its volume; the empty name is the only volume, if there
//!   is exactly one. `VOLUME@NAME` is a snapshot, which is read-only.
//! - Over a plain or remote socket a volume is served with at least the durability that its client
//!   needs: a client on another machine survives a reboot of this one, so the writes acknowledged
//!   to it must survive it as well.
//! - A client that has not identified itself and that connected while its volume was read-only
//!   stays a reader, because it was admitted next to a writer.

use block::env::boot_id;
use block::{BlockDevice, Error, ErrorKind, Limits, Result};
use engine::pool::Pool;
use engine::reservations::{self, Connection, Reservations};
use engine::session::Attachment;
use engine::volume::Volume;
use nbd::wire::{Intent, ReservationRequest};
use nbd::{Client, Export, Exports, Peer};
use std::sync::Arc;

/// Snapshots listed to a client that asks for all exports. Chosen by hand: a snapshot is found by
/// its name whether it is in the list or not.
const LISTED_SNAPSHOTS_MAX: usize = 1000;

/// Exports of the NBD server.
pub struct PoolExports {
    pool: Arc<Pool>,
    reservations: Arc<Reservations>,
}

impl PoolExports {
    /// Serves every volume of `pool`, including those made later, as far as `reservations` allows.
    #[must_use]
    pub(crate) fn new(pool: Arc<Pool>, reservations: Arc<Reservations>) -> Self {
        PoolExports { pool, reservations }
    }

    fn find(&self, name: &str) -> Result<Arc<Volume>> {
        let not_found = || {
            let what = format!("open export {name:?}: there is no such volume");
            Error::new(ErrorKind::NotFound, what)
        };
        if let Some(error) = self.pool.fatal() {
            return Err(error);
        }
        if name.is_empty() {
            let mut volumes = self.pool.volumes();
            return match (volumes.pop(), volumes.len()) {
                (Some(volume), 0) if !self.pool.is_any_held() => Ok(volume),
                _ => Err(not_found()),
            };
        }
        match name.split_once('@') {
            Some((volume, snapshot)) => self.pool.snapshot_view(volume, snapshot),
            None => self.pool.volume(name).ok_or_else(|| match self.pool.why_not(name) {
                busy if busy.kind() == ErrorKind::Busy => busy,
                _ => not_found(),
            }),
        }
    }
}

/// Reports whether a client may continue when this machine reboots. A client that has identified
/// itself may come from another machine by a tunnel or a forwarded socket.
fn outlives_this_machine(client: &Client) -> bool {
    if client.reservation.as_ref().is_some_and(|said| said.boot != boot_id().into_bytes()) {
        return true;
    }
    match &client.peer {
        Peer::Unix { .. } | Peer::Kernel => false,
        // The other node's machine stays, and the client with it.
        Peer::Node { .. } => true,
        Peer::Tcp(address) => !address.ip().to_canonical().is_loopback(),
    }
}

/// Translates a reservation as the wire carries it.
fn request_of(said: &ReservationRequest) -> reservations::ReservationRequest {
    reservations::ReservationRequest {
        intent: match said.intent {
            Intent::Attach => reservations::Intent::Attach,
            Intent::Go => reservations::Intent::Go,
            Intent::Release => reservations::Intent::Release,
        },
        is_shared: said.is_shared,
        connection: said.connection,
        client: said.client,
        boot: said.boot,
        attachment: said.attachment,
        label: said.label.clone(),
    }
}

impl Exports for PoolExports {
    type Device = Attachment;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        let export = |name| Export { name, description: String::new() };
        let records = self.pool.volumes().into_iter().map(|volume| volume.record());
        let mut exports: Vec<Export> = records.map(|record| export(record.name)).collect();
        let snapshots = self.pool.snapshots(None).unwrap_or_default();
        let listed = snapshots.iter().take(LISTED_SNAPSHOTS_MAX);
        exports.extend(listed.map(|one| Export {
            name: format!("{}@{}", one.volume, one.record.name),
            description: "a snapshot, read-only".to_owned(),
        }));
        exports
    }

    async fn open(&self, name: &str, client: &Client) -> Result<Arc<Attachment>> {
        match self.admit(name, client).await {
            Err(error) => Err(self.confirmed(error).await),
            admitted => admitted,
        }
    }

    async fn release(&self, reservation: &ReservationRequest, _client: &Client) -> Result<()> {
        let released = async {
            let volume = self.find(&reservation.export)?;
            self.reservations.release(volume.id().0, &request_of(reservation)).await
        };
        match released.await {
            Err(error) => Err(self.confirmed(error).await),
            released => released,
        }
    }

    async fn revoked(&self, device: &Arc<Attachment>) {
        device.revoked().await
    }

    async fn describe(&self, name: &str, client: &Client) -> Result<(Export, Limits)> {
        // A query does not attach the client.
        let anybody = Client { reservation: None, ..client.clone() };
        let device = self.open(name, &anybody).await?;
        let export = Export { name: name.to_owned(), description: String::new() };
        Ok((export, device.limits()))
    }
}

impl PoolExports {
    /// Returns the error that ends an attachment for good only if this process owns the pool. A process that does not
    /// know that another one owns it does not know the clients that have attached there.
    async fn confirmed(&self, error: Error) -> Error {
        if error.kind() != ErrorKind::Fenced {
            return error;
        }
        match self.pool.confirm_ownership().await {
            Ok(()) => error,
            Err(cause) => {
                let what = "admit a client: another node may own the pool; try again";
                Error::with_source(ErrorKind::Unavailable, what, cause)
            }
        }
    }

    async fn admit(&self, name: &str, client: &Client) -> Result<Arc<Attachment>> {
        let volume = self.find(name)?;
        let is_remote = outlives_this_machine(client);
        if volume.is_snapshot() && client.reservation.is_some() {
            let what = format!(
                "open export {name:?}: a snapshot is not attached as a volume is; connect without a reservation"
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let record = volume.record();
        if is_remote && record.has_lost_writes {
            let what = format!(
                "open export {name:?}: writes that were answered may be gone since a reboot, a \
                 take-over, or a loss or failure of the write log, and a client that continues \
                 could notice it too late; unmount or restart every client from before, then run \
                 `spindle volume accept-loss {}` on the server",
                record.name
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let said = client.reservation.as_ref();
        if said.is_some_and(|said| said.export != name) {
            let what = format!("open export {name:?}: this client has reserved another");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        // The volume may become writable while it is attached, or while its client is away. A
        // snapshot never does, and needs no reservation.
        let reservation = match volume.is_snapshot() || (record.is_read_only && said.is_none()) {
            true => None,
            false => {
                let (id, has_lost_writes) = (record.id, record.has_lost_writes);
                let label = client.label();
                let line: Arc<dyn block::Line> = Arc::new(client.line.clone());
                let from = Connection { line: Some(line), label: &label };
                let said = said.map(request_of);
                let reservations = &self.reservations;
                Some(
                    reservations
                        .connect_from(id, &record.name, has_lost_writes, said.as_ref(), from)
                        .await?,
                )
            }
        };
        Ok(Arc::new(Attachment::of_client(volume, is_remote, reservation)))
    }
}

#[cfg(test)]
mod tests;
