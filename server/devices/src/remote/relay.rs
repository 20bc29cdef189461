//! Relays bytes between the kernel's nbd driver and the server of a volume.

use super::RemoteOptions;
use super::addresses::Addresses;
use super::route::Route;
use super::tap::{Ended, Tapped};
use crate::{identifiers, probe_process};
use block::{Error, ErrorKind, Result};
use nbd::client::Reached;
use nbd::kernel::{Backend, DeviceOptions, Siblings, Stop};
use nbd::wire::{ReservationRequest, transmission_flag};
use parking_lot::Mutex as SyncMutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;
use uuid::Uuid;

/// Buffer of a relay for each direction. Chosen by hand: a large request.
pub(super) const RELAY_BYTES: usize = 256 << 10;
/// Time without a byte of a server that owes an answer, after which another address is tried.
/// Chosen by hand: the users of the device wait this long. A server that waits for its store or
/// for space in its log looks the same, and a change of the address only costs the repetition.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Relays between the kernel and a server.
pub(super) struct Relay {
    route: Route,
    reservation: ReservationRequest,
    /// Connection by which the export's size was learned.
    first: SyncMutex<Option<Reached>>,
    size_bytes: watch::Sender<u64>,
    /// Set when the server refuses this attachment for good.
    refused: watch::Sender<Option<Error>>,
    is_down: AtomicBool,
    silence_max: Duration,
}

impl Relay {
    /// Makes the relay of the attachment in `reservation`, and the options of its device, which the
    /// kernel knows by the addresses `named`. `first` is the connection by which the export's size
    /// was learned.
    pub(super) fn new(
        options: &RemoteOptions,
        route: Route,
        named: &Addresses,
        reservation: ReservationRequest,
        first: Reached,
    ) -> (Arc<Relay>, DeviceOptions) {
        if !first.has_reservation {
            tracing::warn!(
                server = %route.current(),
                "the server does not know attachments: nothing keeps others from the volume, and a request \
                 of a connection that was lost may still run after it was repeated"
            );
        }
        let device_options = DeviceOptions {
            identifier: identifiers::of_remote(named, Uuid::from_bytes(reservation.attachment)),
            size_bytes: first.size_bytes,
            logical_block_bytes: options.logical_block_bytes,
            transmission_flags: first.transmission_flags & !transmission_flag::CAN_MULTI_CONN,
            // With several connections, the kernel would drop one on its own, and the server could
            // not be told in time.
            connection_count: 1,
            dead_timeout: options.dead_timeout,
            set_attribute: probe_process::set_attribute,
        };
        let relay = Relay {
            route,
            reservation,
            size_bytes: watch::Sender::new(first.size_bytes),
            first: SyncMutex::new(Some(first)),
            refused: watch::Sender::new(None),
            is_down: AtomicBool::new(false),
            silence_max: SILENCE_MAX,
        };
        (Arc::new(relay), device_options)
    }

    /// Reports the size of the export whenever a new connection finds another one.
    pub(super) fn size_changes(&self) -> watch::Receiver<u64> {
        self.size_bytes.subscribe()
    }

    /// Reports the error with which the server refuses this attachment for good.
    pub(super) fn refusal(&self) -> watch::Receiver<Option<Error>> {
        self.refused.subscribe()
    }
}

impl Backend for Relay {
    type Connection = Reached;

    async fn dial(&self, connection: u16) -> Result<Reached> {
        if connection == 0
            && let Some(first) = self.first.lock().take()
        {
            return Ok(first);
        }
        let reservation = ReservationRequest { connection, ..self.reservation.clone() };
        let reached =
            self.route.open(&reservation).await.inspect_err(|error| match error.kind() {
                ErrorKind::Fenced => drop(self.refused.send_replace(Some(error.clone()))),
                _ => self.is_down.store(true, Ordering::Relaxed),
            })?;
        if self.is_down.swap(false, Ordering::Relaxed) {
            tracing::info!(server = %self.route.current(), "the server answers again");
        }
        Ok(reached)
    }

    async fn serve(&self, reached: Reached, stream: UnixStream, _siblings: Siblings, stop: Stop) {
        // Only once the kernel has this connection: a size change waits for all requests in flight,
        // and those wait for a connection.
        self.size_bytes.send_if_modified(|size_bytes| {
            std::mem::replace(size_bytes, reached.size_bytes) != reached.size_bytes
        });
        self.relay(reached, stream, stop).await;
    }
}

impl Relay {
    /// Relays between the kernel and the server until either ends, the server is silent and there is
    /// another address, or `stop`.
    async fn relay(&self, reached: Reached, mut stream: UnixStream, mut stop: Stop) {
        let mut wire = reached.wire;
        if !self.route.has_others() {
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
            return;
        }
        let tapped = Tapped::new(stream, wire);
        let ended = tokio::select! {
            ended = tapped.run(self.silence_max) => ended,
            _ = stop.wait_for(Option::is_some) => return,
        };
        let server = self.route.current();
        match ended {
            Ended::Closed(ended) => tracing::debug!(?ended, "a connection ended"),
            Ended::Silent => tracing::warn!(
                %server,
                seconds = self.silence_max.as_secs(),
                "a server owes an answer and sends nothing; the device tries its next address"
            ),
        }
        self.route.move_on();
    }
}

#[cfg(test)]
mod tests;
