//! Volumes without a pool, for tests: they have names, reservations and clients, and hold zeroes.

use super::{Volume, Volumes};
use block::{
    AllocationExtent, BlockDevice, Epoch, Error, ErrorKind, Limits, Result, VolumeId, WriteFlags,
    ZeroFlags,
};
use bytes::Bytes;
use nbd::{Client, Export, Exports};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::watch;

/// The volumes, by id from 1. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct TwinVolumes {
    volumes: BTreeMap<VolumeId, TwinVolume>,
    reserved: Arc<Mutex<BTreeSet<VolumeId>>>,
    /// The volume and the label of each client.
    clients: Arc<Mutex<Vec<(VolumeId, String)>>>,
}

#[derive(Clone, Debug)]
pub(crate) struct TwinVolume {
    id: VolumeId,
    name: String,
    size_bytes: Arc<watch::Sender<u64>>,
}

/// Given up when it is dropped.
#[derive(Debug)]
pub(crate) struct TwinReservation {
    volume: VolumeId,
    reserved: Arc<Mutex<BTreeSet<VolumeId>>>,
}

impl Drop for TwinReservation {
    fn drop(&mut self) {
        self.reserved.lock().remove(&self.volume);
    }
}

impl TwinVolumes {
    pub(crate) fn named(names: &[&str]) -> TwinVolumes {
        let volumes = (1..).map(VolumeId).zip(names).map(|(id, name)| {
            let size_bytes = Arc::new(watch::Sender::new(1 << 20));
            (id, TwinVolume { id, name: (*name).to_owned(), size_bytes })
        });
        TwinVolumes { volumes: volumes.collect(), ..TwinVolumes::default() }
    }

    /// Attaches a volume to a client.
    pub(crate) fn add_client(&self, volume: VolumeId, label: &str) {
        self.clients.lock().push((volume, label.to_owned()));
    }

    /// Reports whether a device has a volume reserved.
    pub(crate) fn is_reserved(&self, volume: VolumeId) -> bool {
        self.reserved.lock().contains(&volume)
    }
}

impl Volumes for TwinVolumes {
    type Volume = TwinVolume;
    type Reservation = TwinReservation;
    type Exports = TwinVolumes;

    fn find(&self, id: VolumeId) -> Option<TwinVolume> {
        self.volumes.get(&id).cloned()
    }

    fn find_named(&self, name: &str) -> Option<TwinVolume> {
        self.volumes.values().find(|volume| volume.name == name).cloned()
    }

    fn name_of(&self, id: VolumeId) -> String {
        self.volumes.get(&id).map_or_else(|| format!("{id:?}"), |volume| volume.name.clone())
    }

    fn reserve(&self, id: VolumeId, name: &str, _is_shared: bool) -> Result<TwinReservation> {
        let is_free = self.clients_of(id).is_empty() && self.reserved.lock().insert(id);
        let reservation = TwinReservation { volume: id, reserved: self.reserved.clone() };
        is_free.then_some(reservation).ok_or_else(|| Error::new(ErrorKind::Busy, name.to_owned()))
    }

    async fn end_leftovers(&self, _id: VolumeId) -> Result<()> {
        Ok(())
    }

    async fn quiesce(&self, _id: VolumeId) -> Result<()> {
        Ok(())
    }

    fn clients_of(&self, id: VolumeId) -> Vec<String> {
        let clients = self.clients.lock();
        let of_it = clients.iter().filter(|(volume, _)| *volume == id);
        of_it.map(|(_, label)| label.clone()).collect()
    }

    async fn end_clients(&self, id: VolumeId) -> Result<()> {
        self.clients.lock().retain(|(volume, _)| *volume != id);
        Ok(())
    }

    fn has_clients(&self) -> bool {
        !self.clients.lock().is_empty()
    }

    fn report_clients(&self) {}
}

impl Volume for TwinVolume {
    type Session = TwinVolume;

    fn id(&self) -> VolumeId {
        self.id
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn is_write_through(&self) -> bool {
        false
    }

    fn has_lost_writes(&self) -> bool {
        false
    }

    fn has_lost_writes_since(&self, _epoch: Epoch, _had_lost_writes: bool) -> bool {
        false
    }

    fn size_changes(&self) -> watch::Receiver<u64> {
        self.size_bytes.subscribe()
    }

    fn session(&self, _is_write_through: bool) -> Arc<TwinVolume> {
        Arc::new(self.clone())
    }
}

impl Exports for TwinVolumes {
    type Device = TwinVolume;

    async fn list(&self, _client: &Client) -> Vec<Export> {
        Vec::new()
    }

    async fn open(&self, name: &str, _client: &Client) -> Result<Arc<TwinVolume>> {
        let volume = self.find_named(name).map(Arc::new);
        volume.ok_or_else(|| Error::new(ErrorKind::NotFound, name.to_owned()))
    }
}

impl BlockDevice for TwinVolume {
    fn limits(&self) -> Limits {
        Limits {
            size_bytes: *self.size_bytes.borrow(),
            preferred_block_bytes: 4096,
            payload_bytes_max: 1 << 20,
            is_read_only: false,
            is_multi_conn: true,
            has_volatile_cache: true,
        }
    }

    async fn read(&self, _offset: u64, buf: &mut [u8]) -> Result<()> {
        buf.fill(0);
        Ok(())
    }

    async fn write(&self, _offset: u64, _payload: Bytes, _flags: WriteFlags) -> Result<()> {
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _offset: u64, _length: u64, _fua: bool) -> Result<()> {
        Ok(())
    }

    async fn write_zeroes(&self, _offset: u64, _length: u64, _flags: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn allocation(
        &self,
        _offset: u64,
        length: u64,
        _extent_count_max: usize,
    ) -> Result<Vec<AllocationExtent>> {
        Ok(vec![AllocationExtent { length_bytes: length, is_hole: true, is_zero: true }])
    }

    async fn prefetch(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.size_bytes.send_replace(size_bytes);
        Ok(())
    }
}
