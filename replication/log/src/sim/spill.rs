//! Spill files of the simulation.
//!
//! Invariants:
//! - A spill file is durable as soon as it is written, like the real one once it has its name.

use crate::overlay::spill_resident::SpillBytes;
use crate::spill::SpillSink;
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;

/// A spill file in memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct SimSpill(pub(crate) Arc<Mutex<Vec<u8>>>);

impl SpillSink for SimSpill {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (mut held, at) = (self.0.lock(), offset as usize);
        let len = held.len().max(at + bytes.len());
        held.resize(len, 0);
        held[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

impl SpillBytes for SimSpill {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let (held, at) = (self.0.lock(), offset as usize);
        let found = held.get(at..at + buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(found);
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }
}
