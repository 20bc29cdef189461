//! Decides which clients may write to a volume: one device of this machine's kernel, or NBD clients, or both if that
//! was asked for.
//!
//! A client may identify itself (the option CLAIM of `nbd::wire`). The volume is then attached to that client, as a
//! device attaches it to this machine, until the client releases it or an administrator ends the attachment by force.
//!
//! Invariants:
//! - A volume that is attached exclusively, for its device or its client, has no other writer, and the reverse: two
//!   file systems mounted from one volume would destroy it.
//! - An attachment is recorded durably, with its volume, before its first request. An attachment that was ended by
//!   force is recorded as ended before another client is let in: an old client that comes back is refused.
//! - A connection, device or owner starts after the last request of its predecessors has ended: their entries in the
//!   write log are visible then, or were taken back. A connection counts as ended when its client has closed it, even
//!   if it still has requests to read and to run. Open connections are not affected (`leftovers`).

mod leftovers;
mod permit;
mod request;
mod silent;

use self::leftovers::drain_deadline;
pub(crate) use self::permit::{Permit, PermitUse};
pub use self::request::{Connection, Intent, ReservationRequest};
use crate::client_record::ClientRecord;
use async_recursion::async_recursion;
use block::quantities::unix_seconds_now;
use block::{Epoch, Error, ErrorKind, Result};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use uuid::Uuid;

/// Most clients that a refusal names. Chosen by hand: a line of a terminal or two.
const NAMED_MAX: usize = 4;
/// Most attachments of clients, counting each client of a shared volume. Chosen by hand: all clients of a volume fit
/// into its record ([`crate::record::RECORD_BYTES_MAX`]).
pub(crate) const HOLDER_COUNT_MAX: usize = 1024;

/// The reservations on the volumes of a pool.
#[derive(Debug)]
pub struct Reservations {
    pool: Uuid,
    epoch: Epoch,
    users: Mutex<HashMap<u32, Users>>,
    /// Serialises changes of the attachments of clients.
    changes: tokio::sync::Mutex<()>,
    recorder: Recorder,
    settle: Settle,
    /// Volumes with a device or connection that has ended and may have left entries in batches of the log. The value
    /// counts such ends.
    unsettled: Mutex<HashMap<u32, u64>>,
}

type Recording = dyn Fn(u32, Vec<ClientRecord>) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// Records durably which clients have a volume.
struct Recorder(Box<Recording>);

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

type Settling = dyn Fn(u32) -> BoxFuture<'static, Result<()>> + Send + Sync;

/// Waits until all entries queued for a volume are visible.
struct Settle(Box<Settling>);

impl std::fmt::Debug for Settle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Settle")
    }
}

#[derive(Debug, Default)]
struct Users {
    /// NBD connections that may write, the oldest first.
    connections: Vec<Arc<Permit>>,
    device: Option<IsShared>,
    holders: Vec<Holder>,
    /// Running changes during which nothing may attach.
    change_count: u64,
}

type IsShared = bool;

/// A client that a volume is attached to.
#[derive(Debug)]
struct Holder {
    record: ClientRecord,
    gates: HashMap<u16, Arc<Permit>>,
    /// The attachment is over and no longer on disk, but its queued requests may still arrive.
    is_ended: bool,
}

impl Holder {
    fn new(record: ClientRecord) -> Holder {
        Holder { record, gates: HashMap::new(), is_ended: false }
    }

    /// Says in parentheses that a client is silent or not connected; empty for one that answers.
    fn silence(&self) -> String {
        if self.gates.is_empty() {
            return " (without a connection at the moment)".to_owned();
        }
        let silences = self.gates.values().map(|permit| permit.silence());
        match silences.collect::<Option<Vec<_>>>() {
            Some(all) => all
                .into_iter()
                .min_by_key(|silence| silence.lasts)
                .map_or_else(String::new, |silence| format!(" ({silence})")),
            None => String::new(),
        }
    }
}

/// A client that a volume is attached to, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientInfo {
    /// Name of the volume.
    pub volume: String,
    /// Label that the client gives itself.
    pub label: String,
    /// Other writers are allowed.
    pub is_shared: bool,
    /// Number of open connections.
    pub connection_count: u64,
    /// Seconds since the Unix epoch.
    pub attached_at: u64,
}

/// A reservation, given up when it is dropped.
#[derive(Debug)]
pub struct Reservation {
    reservations: Arc<Reservations>,
    volume: u32,
    /// `None` for a device.
    permit: Option<Arc<Permit>>,
    /// Attachment of a client that identified itself, and the number of its connection.
    named: Option<(Uuid, u16)>,
}

impl Reservation {
    /// Resolves when the reservation is no longer valid.
    pub(crate) async fn revoked(&self) {
        match self.permit() {
            Some(permit) => permit.closed().await,
            None => std::future::pending().await,
        }
    }

    /// The gate that every request of the connection passes.
    pub(crate) fn permit(&self) -> Option<&Arc<Permit>> {
        self.permit.as_ref()
    }
}

/// Keeps a volume from being attached until it is dropped.
#[derive(Debug)]
pub struct DetachGuard {
    reservations: Arc<Reservations>,
    volume: u32,
}

impl Drop for DetachGuard {
    fn drop(&mut self) {
        let mut all = self.reservations.users.lock();
        if let Some(users) = all.get_mut(&self.volume) {
            users.change_count -= 1;
        }
        forget_if_unused(&mut all, self.volume);
    }
}

impl Reservations {
    /// Creates the reservations of pool `pool`, which this process owns in `epoch`, with the clients that have volumes
    /// by their records. Others are refused when they come back.
    ///
    /// `record` stores durably which clients have a volume, as a whole. It is called for one change at a time.
    pub fn new<F>(
        pool: Uuid,
        epoch: Epoch,
        found: impl IntoIterator<Item = (u32, ClientRecord)>,
        record: impl Fn(u32, Vec<ClientRecord>) -> F + Send + Sync + 'static,
    ) -> Reservations
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let mut users: HashMap<u32, Users> = HashMap::new();
        for (volume, client) in found {
            users.entry(volume).or_default().holders.push(Holder::new(client));
        }
        Reservations {
            pool,
            epoch,
            users: Mutex::new(users),
            changes: tokio::sync::Mutex::default(),
            recorder: Recorder(Box::new(move |volume, clients| Box::pin(record(volume, clients)))),
            settle: Settle(Box::new(|_| Box::pin(std::future::ready(Ok(()))))),
            unsettled: Mutex::default(),
        }
    }

    /// Sets `settle`, which resolves when everything queued for a volume before the call is visible.
    #[must_use]
    pub fn settled_by<F>(self, settle: impl Fn(u32) -> F + Send + Sync + 'static) -> Reservations
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        Reservations { settle: Settle(Box::new(move |volume| Box::pin(settle(volume)))), ..self }
    }

    /// Like [`Reservations::connect_from`], without a connection.
    #[cfg(test)]
    pub(crate) async fn connect(
        self: &Arc<Self>,
        volume: u32,
        name: &str,
        has_lost_writes: bool,
        request: Option<&ReservationRequest>,
    ) -> Result<Reservation> {
        let from = Connection { line: None, label: "a test" };
        self.connect_from(volume, name, has_lost_writes, request, from).await
    }

    /// Registers an NBD connection that may write to volume `volume`, which people know as `name`.
    ///
    /// # Errors
    /// `Busy`: the volume is attached to another client and not shared. `Fenced`: the client's attachment was ended.
    /// `Unavailable`: requests of an ended or replaced connection are still running or in the log; try again. Errors of
    /// writing the list.
    pub async fn connect_from(
        self: &Arc<Self>,
        volume: u32,
        name: &str,
        has_lost_writes: bool,
        request: Option<&ReservationRequest>,
        connection: Connection<'_>,
    ) -> Result<Reservation> {
        let until = drain_deadline();
        let Some(request) = request else {
            let reservation = self.connect_unnamed(volume, name, Permit::new(&connection))?;
            // Precedes the first request. If it fails, the reservation is given up.
            self.end_left(volume, reservation.permit(), until).await?;
            return Ok(reservation);
        };
        let _one_at_a_time = self.changes.lock().await;
        self.end_left(volume, None, until).await?; // an ended connection would block it
        let attachment = attachment_of(request);
        let record = ClientRecord {
            pool: self.pool,
            client: Uuid::from_bytes(request.client),
            boot: Uuid::from_bytes(request.boot),
            attachment,
            label: request.label.clone(),
            is_shared: request.is_shared,
            attached_at: unix_seconds_now(),
            epoch: self.epoch.0,
            has_lost_writes,
        };
        let is_new = request.intent == Intent::Attach;
        let (old, replaced) = self.admit(volume, &record, name, request)?;
        let admitted = match self.quiet(volume, &old, until).await {
            Ok(()) if is_new => self.record(volume).await,
            outcome => outcome,
        };
        if let Err(error) = admitted {
            if is_new {
                self.take_back(volume, &record, replaced);
            }
            return Err(error);
        }
        let permit = Permit::new(&connection);
        let reservation = {
            let mut all = self.users.lock();
            let users = all.entry(volume).or_default();
            let is_it = |holder: &&mut Holder| holder.record.attachment == attachment;
            let holder = users.holders.iter_mut().find(is_it).ok_or_else(|| fenced(name))?;
            holder.gates.insert(request.connection, permit.clone());
            users.connections.push(permit.clone());
            let named = Some((attachment, request.connection));
            Reservation { reservations: self.clone(), volume, permit: Some(permit), named }
        };
        self.end_left(volume, reservation.permit(), until).await?;
        Ok(reservation)
    }

    /// Registers a connection that does not identify its client.
    fn connect_unnamed(
        self: &Arc<Self>,
        volume: u32,
        name: &str,
        permit: Arc<Permit>,
    ) -> Result<Reservation> {
        let mut all = self.users.lock();
        let users = all.entry(volume).or_default();
        let allowed = users.check_device(name, None).and_then(|()| users.check_holders(name, None));
        if let Err(error) = allowed {
            forget_if_unused(&mut all, volume);
            return Err(error);
        }
        users.connections.push(permit.clone());
        Ok(Reservation { reservations: self.clone(), volume, permit: Some(permit), named: None })
    }

    /// Decides on a client. A client that attaches holds the volume from here on, so that no other client comes in
    /// while the attachment is being recorded. Returns the closed gates of its replaced connections, and its previous
    /// attachment.
    fn admit(
        &self,
        volume: u32,
        record: &ClientRecord,
        name: &str,
        request: &ReservationRequest,
    ) -> Result<(Vec<Arc<Permit>>, Option<Holder>)> {
        let mut all = self.users.lock();
        let holder_count: usize = all.values().map(|users| users.holders.len()).sum();
        let users = all.entry(volume).or_default();
        let mut allowed = users.check(name, record, request);
        let is_new = request.intent == Intent::Attach;
        if allowed.is_ok() && is_new && holder_count >= HOLDER_COUNT_MAX {
            let what =
                format!("attach export {name:?}: {HOLDER_COUNT_MAX} clients have volumes already");
            allowed = Err(Error::new(ErrorKind::Full, what));
        }
        if let Err(error) = allowed {
            forget_if_unused(&mut all, volume);
            return Err(error);
        }
        let own = users.holders.iter().position(|holder| holder.record.client == record.client);
        let mut old: Vec<Arc<Permit>> = Vec::new();
        let mut replaced = None;
        if is_new {
            replaced = own.map(|own| users.holders.swap_remove(own));
            old.extend(replaced.iter().flat_map(|holder| holder.gates.values().cloned()));
            users.holders.push(Holder::new(record.clone()));
        } else if let Some(own) = own {
            old.extend(users.holders[own].gates.get(&request.connection).cloned());
        }
        old.iter().for_each(|permit| permit.close());
        Ok((old, replaced))
    }

    /// Takes an attachment back that could not be recorded. Gates that were closed stay closed.
    fn take_back(&self, volume: u32, record: &ClientRecord, replaced: Option<Holder>) {
        let mut all = self.users.lock();
        let Some(users) = all.get_mut(&volume) else { return };
        users.holders.retain(|holder| holder.record.attachment != record.attachment);
        users.holders.extend(replaced);
        forget_if_unused(&mut all, volume);
    }

    /// Ends an attachment at the request of its client.
    ///
    /// # Errors
    /// `Unavailable`: it is over, but its requests are still running or queued, and no other client is let in yet; try
    /// again. Those of writing the list.
    #[async_recursion]
    pub async fn release(&self, volume: u32, request: &ReservationRequest) -> Result<()> {
        let _one_at_a_time = self.changes.lock().await;
        let attachment = attachment_of(request);
        self.end(volume, |record| record.attachment == attachment).await.map(drop)
    }

    /// Ends all attachments of clients to a volume by force, durably, and returns the labels of the clients.
    ///
    /// # Errors
    /// `Unavailable`: they are ended, but requests are still running or queued, and no other client is let in yet; try
    /// again. Those of writing the list.
    #[async_recursion]
    pub async fn fence(&self, volume: u32) -> Result<Vec<String>> {
        let _one_at_a_time = self.changes.lock().await;
        self.end(volume, |_| true).await
    }

    async fn end(&self, volume: u32, is_it: impl Fn(&ClientRecord) -> bool) -> Result<Vec<String>> {
        let mut old: Vec<Arc<Permit>> = Vec::new();
        if let Some(users) = self.users.lock().get_mut(&volume) {
            for holder in users.holders.iter_mut().filter(|holder| is_it(&holder.record)) {
                holder.is_ended = true;
                old.extend(holder.gates.values().cloned());
            }
        }
        old.iter().for_each(|permit| permit.close());
        self.record(volume).await?;
        // The attachment is forgotten only afterwards: the next client must not meet requests of this one.
        let until = drain_deadline();
        self.quiet(volume, &old, until).await?;
        let mut all = self.users.lock();
        let Some(users) = all.get_mut(&volume) else { return Ok(Vec::new()) };
        let (ended, rest) = std::mem::take(&mut users.holders)
            .into_iter()
            .partition(|holder: &Holder| is_it(&holder.record));
        users.holders = rest;
        forget_if_unused(&mut all, volume);
        let ended: Vec<Holder> = ended;
        Ok(ended.into_iter().map(|holder| holder.record.label).collect())
    }

    /// Keeps a volume detached during a change that an attached client must not see. The change may wait a long time
    /// for the log.
    ///
    /// # Errors
    /// `Busy`: the volume is attached.
    pub fn guard_detached(self: &Arc<Self>, volume: u32, name: &str) -> Result<DetachGuard> {
        let mut all = self.users.lock();
        let users = all.entry(volume).or_default();
        let allowed = match users.device {
            None => users.check_holders(name, Some(false)),
            Some(_) => {
                let what = format!("change volume {name}: it is attached; detach it first");
                Err(Error::new(ErrorKind::Busy, what))
            }
        };
        if let Err(error) = allowed {
            forget_if_unused(&mut all, volume);
            return Err(error);
        }
        users.change_count += 1;
        Ok(DetachGuard { reservations: self.clone(), volume })
    }

    /// Registers a device.
    ///
    /// # Errors
    /// `Busy`: there is a device already, a client has the volume exclusively, or the device is not to be shared and
    /// there is a client or an NBD connection.
    pub fn attach(
        self: &Arc<Self>,
        volume: u32,
        name: &str,
        is_shared: bool,
    ) -> Result<Reservation> {
        let mut all = self.users.lock();
        let users = all.entry(volume).or_default();
        if users.device.is_some() {
            let what = format!("attach volume {name}: it is attached already");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let is_open = |permit: &&Arc<Permit>| !permit.is_closed_and_drained();
        let allowed = match users.connections.iter().filter(is_open).count() {
            0 => Ok(()),
            _ if is_shared => Ok(()),
            count => Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "attach volume {name}: {count} NBD connections have it open, of {}; close them, or attach it \
                     with --shared if its users agree on who writes where",
                    users.named_connections(None)
                ),
            )),
        };
        let allowed = allowed
            .and_then(|()| users.check_unchanged(name))
            .and_then(|()| users.check_holders(name, Some(is_shared)));
        if let Err(error) = allowed {
            forget_if_unused(&mut all, volume);
            return Err(error);
        }
        users.device = Some(is_shared);
        Ok(Reservation { reservations: self.clone(), volume, permit: None, named: None })
    }

    /// Clients that have volumes. `name_of` maps a volume to its name.
    pub fn list(&self, name_of: impl Fn(u32) -> String) -> Vec<ClientInfo> {
        let all = self.users.lock();
        let holders = all
            .iter()
            .flat_map(|(volume, users)| users.holders.iter().map(|holder| (*volume, holder)));
        let mut infos: Vec<ClientInfo> = holders
            .map(|(volume, Holder { record, gates, .. })| ClientInfo {
                volume: name_of(volume),
                label: record.label.clone(),
                is_shared: record.is_shared,
                connection_count: gates.len() as u64,
                attached_at: record.attached_at,
            })
            .collect();
        infos.sort_by(|a, b| (&a.volume, &a.label).cmp(&(&b.volume, &b.label)));
        infos
    }

    /// Names the clients with NBD connections that may write to a volume; `None` if there are none.
    pub fn connections_of(&self, volume: u32) -> Option<String> {
        let all = self.users.lock();
        let users = all.get(&volume).filter(|users| !users.connections.is_empty())?;
        Some(users.named_connections(None))
    }

    /// Labels of the clients that a volume is attached to.
    pub fn holders_of(&self, volume: u32) -> Vec<String> {
        let all = self.users.lock();
        let holders = all.get(&volume).into_iter().flat_map(|users| &users.holders);
        holders.map(|holder| holder.record.label.clone()).collect()
    }

    /// Records the clients of a volume as they are.
    async fn record(&self, volume: u32) -> Result<()> {
        let mut clients: Vec<ClientRecord> = {
            let all = self.users.lock();
            let holders = all.get(&volume).into_iter().flat_map(|users| &users.holders);
            holders.filter(|holder| !holder.is_ended).map(|holder| holder.record.clone()).collect()
        };
        clients.sort_by_key(|client| client.client);
        (self.recorder.0)(volume, clients).await
    }
}

impl Users {
    /// Names the clients of all connections except those of `but`, and says which of them are silent.
    fn named_connections(&self, but: Option<&Holder>) -> String {
        let is_own = |permit: &&Arc<Permit>| {
            but.is_some_and(|but| but.gates.values().any(|own| Arc::ptr_eq(own, permit)))
        };
        let others: Vec<&Arc<Permit>> =
            self.connections.iter().filter(|permit| !is_own(permit)).collect();
        let named = others.iter().take(NAMED_MAX).map(|permit| permit.described());
        let named = named.collect::<Vec<_>>().join(", ");
        match others.len().saturating_sub(NAMED_MAX) {
            0 => named,
            more => format!("{named} and {more} more"),
        }
    }

    fn check_unchanged(&self, name: &str) -> Result<()> {
        if self.change_count == 0 {
            return Ok(());
        }
        let what = format!(
            "attach volume {name}: it is just being made smaller or removed; try again when that is over"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Checks whether another writer may come beside the device; `is_shared` as in [`Users::check_holders`].
    fn check_device(&self, name: &str, is_shared: Option<IsShared>) -> Result<()> {
        let why = match self.device {
            None => return Ok(()),
            Some(false) => "which has it alone; detach it there, or attach it with --shared",
            Some(true) if is_shared == Some(false) => {
                "which shares it; detach it there, or attach it here with --shared too"
            }
            Some(true) => return Ok(()),
        };
        let what = format!(
            "open export {name:?}: the volume is attached to the server's machine as a device, {why}"
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    /// Checks whether another writer may come beside the clients that have the volume. `is_shared` tells whether the
    /// newcomer would share it; `None` for a connection that does not say.
    fn check_holders(&self, name: &str, is_shared: Option<IsShared>) -> Result<()> {
        let wants_it_alone = is_shared == Some(false);
        let in_the_way = |holder: &&Holder| wants_it_alone || !holder.record.is_shared;
        let Some(holder) = self.holders.iter().find(in_the_way) else { return Ok(()) };
        let what = format!(
            "open volume {name:?}: it is attached to client {}{}; detach it there, or run `spindle detach \
             --force {name}` on the server, which refuses that client from then on",
            holder.record.label,
            holder.silence()
        );
        Err(Error::new(ErrorKind::Busy, what))
    }

    fn check(&self, name: &str, record: &ClientRecord, request: &ReservationRequest) -> Result<()> {
        let client = record.client;
        let own = self.holders.iter().find(|holder| holder.record.client == client);
        let lives_on = own.filter(|own| !own.is_ended);
        if request.intent != Intent::Attach {
            return match lives_on.is_some_and(|own| own.record.attachment == record.attachment) {
                true => Ok(()),
                false => Err(fenced(name)),
            };
        }
        self.check_unchanged(name)?;
        // Only a restarted machine has lost its attachment. A client that has missed the answer asks for the same
        // attachment again.
        let is_another = |own: &&Holder| {
            own.record.boot == record.boot && own.record.attachment != record.attachment
        };
        if lives_on.filter(is_another).is_some() {
            let what = format!(
                "attach export {name:?}: client {} has it already, perhaps by another URI; detach it \
                 there, or run `spindle detach --force {name}` on the server",
                record.label
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        self.check_device(name, Some(request.is_shared))?;
        let others = self.holders.iter().filter(|holder| holder.record.client != client);
        for holder in others {
            if !request.is_shared || !holder.record.is_shared {
                return self.check_holders(name, Some(request.is_shared));
            }
        }
        let own_count = own.map_or(0, |own| own.gates.len());
        if !request.is_shared && self.connections.len() > own_count {
            let what = format!(
                "attach export {name:?}: {} other NBD connections have it open, of {}; close them, or attach it \
                 with --shared if its users agree on who writes where",
                self.connections.len() - own_count,
                self.named_connections(own)
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Ok(())
    }
}

fn fenced(name: &str) -> Error {
    let what = format!(
        "open export {name:?}: the attachment of this client was ended on the server; unmount the \
         file systems on its device, and attach again"
    );
    Error::new(ErrorKind::Fenced, what)
}

fn attachment_of(request: &ReservationRequest) -> Uuid {
    Uuid::from_bytes(request.attachment)
}

fn forget_if_unused(all: &mut HashMap<u32, Users>, volume: u32) {
    let is_unused = |users: &Users| {
        users.device.is_none()
            && users.connections.is_empty()
            && users.holders.is_empty()
            && users.change_count == 0
    };
    if all.get(&volume).is_some_and(is_unused) {
        all.remove(&volume);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // The order matters: from here on every newcomer waits for the entries that this reservation has left in the log.
        self.reservations.mark_unsettled(self.volume);
        let mut all = self.reservations.users.lock();
        let Some(users) = all.get_mut(&self.volume) else { return };
        match &self.permit {
            None => users.device = None,
            Some(permit) => {
                users.connections.retain(|other| !Arc::ptr_eq(other, permit));
                permit.end();
            }
        }
        if let (Some((attachment, connection)), Some(permit)) = (&self.named, &self.permit) {
            let mut holders = users.holders.iter_mut();
            if let Some(holder) = holders.find(|holder| holder.record.attachment == *attachment)
                && holder.gates.get(connection).is_some_and(|current| Arc::ptr_eq(current, permit))
            {
                holder.gates.remove(connection);
            }
        }
        forget_if_unused(&mut all, self.volume);
    }
}

#[cfg(test)]
mod tests;
