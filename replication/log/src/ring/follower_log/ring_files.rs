//! The files of a member's ring: requests to the disk, of which the caller waits for all but the
//! making of files.
//!
//! Invariants:
//! - Files are made in order, one at a time, ahead of need. A file that cannot be made is requested
//!   again when the ring next needs it.
//! - After the first failed write or sync every call fails: a later success would prove nothing about
//!   what the failed one should have written.

use crate::disk::unreadable::is_eio;
use crate::format::batch;
use crate::format::file::FileHeader;
use crate::options::SPARE_FILES_MIN;
use crate::ring::layout::FileState;
use crate::ring::walk::At;
use block::env::{Disk, DiskCompletion, DiskReader, DiskRequest, IoBuffer};
use block::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

/// Ring files made ahead of need. Chosen by hand, as for the owner's ring.
const FILES_AHEAD: u32 = 2;
/// Zeroes that one request writes. Chosen by hand.
const ZERO_BYTES: u64 = 1 << 20;

/// Largest buffer that is kept for the next write. Chosen by hand: twice that of several batches.
const BUFFER_BYTES_MAX: usize = 2 << 20;

/// The completions of interest.
#[derive(Default)]
struct Reaped {
    own: Option<io::Result<()>>,
    refusal: Option<io::Error>,
}

/// The files; see the head of the file.
pub(super) struct RingFiles {
    disk: Box<dyn Disk>,
    pub(super) reader: Arc<dyn DiskReader>,
    /// The header of each file, apart from its slot. Ring and chain are zero before the first file is
    /// made.
    pub(super) shape: FileHeader,
    states: Vec<FileState>,
    /// Files with writes that no sync covers.
    dirty: BTreeSet<u32>,
    failure: Option<Error>,
    next_token: u64,
    completions: Vec<DiskCompletion>,
    buffer: IoBuffer,
}

impl RingFiles {
    /// `made` is the number of files that exist.
    pub(super) fn new(disk: Box<dyn Disk>, shape: FileHeader, made: usize) -> RingFiles {
        let file_count = shape.file_count as usize;
        let state = |slot| if slot < made { FileState::Ready } else { FileState::Absent };
        RingFiles {
            reader: disk.reader(),
            disk,
            shape,
            states: (0..file_count).map(state).collect(),
            dirty: BTreeSet::new(),
            failure: None,
            next_token: 0,
            completions: Vec::new(),
            buffer: IoBuffer::default(),
        }
    }

    /// Returns the error of the write or sync that failed, if one did.
    pub(super) fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Returns whether a file exists, so that the ring has an identity.
    pub(super) fn is_made(&self) -> bool {
        self.states[0] == FileState::Ready
    }

    /// Lists the files that exist.
    pub(super) fn made(&self) -> impl Iterator<Item = u32> + '_ {
        let ready = self.states.iter().take_while(|state| **state == FileState::Ready);
        (0u32..).zip(ready).map(|(slot, _)| slot)
    }

    /// Writes `parts` one behind the other, from `at` on. Not on stable storage before a sync.
    pub(super) fn write<'a>(
        &mut self,
        at: At,
        len: usize,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<()> {
        self.buffer.reset(len);
        parts.for_each(|part| self.buffer.push(part));
        self.buffer.pad_to(len);
        let (token, buffer) = (self.token(), std::mem::take(&mut self.buffer));
        let At { slot: file, offset } = at;
        let request = DiskRequest::Write { token, file, offset, buffer, is_sync_next: false };
        self.dirty.insert(file);
        let result = self.run(token, request);
        let name = self.reader.name(file);
        self.fail_on(result, || format!("could not write {name} at offset {offset}"))
    }

    /// Overwrites a range of one file with zeroes.
    pub(super) fn zero(&mut self, slot: u32, from: u64, to: u64) -> Result<()> {
        let mut offset = from;
        while offset < to {
            let len = (to - offset).min(ZERO_BYTES);
            let bytes = usize::try_from(len).expect("at most a mebibyte");
            self.write(At { slot, offset }, bytes, std::iter::empty())?;
            offset += len;
        }
        Ok(())
    }

    /// Removes all files: the ring is as one that was never made. After a crash it may be the old one.
    pub(super) fn clear(&mut self) -> Result<()> {
        let is_making = |state: &FileState| matches!(state, FileState::Creating(_));
        self.reap(None);
        while self.states.iter().any(is_making) {
            self.disk.wait();
            self.reap(None);
        }
        let token = self.token();
        let result = self.run(token, DiskRequest::Clear { token });
        self.fail_on(result, || "could not remove the files of the write log".into())?;
        self.states.fill(FileState::Absent);
        self.dirty.clear();
        Ok(())
    }

    /// Counts all files as unsynced.
    pub(super) fn mark_all_dirty(&mut self) {
        self.dirty = self.made().collect();
    }

    /// Writes the bytes from `at` up to `to` again.
    pub(super) fn write_as_read(&mut self, at: At, to: u64) -> Result<()> {
        let mut bytes = Vec::new();
        let mut offset = at.offset;
        while offset < to {
            let len = (to - offset).min(ZERO_BYTES);
            bytes.resize(usize::try_from(len).expect("at most a mebibyte"), 0);
            let here = At { offset, ..at };
            self.read(here, &mut bytes)?;
            self.write(here, bytes.len(), std::iter::once(&bytes[..]))?;
            offset += len;
        }
        Ok(())
    }

    /// Fills `bytes`; with zeroes if the disk does not read them.
    fn read(&self, at: At, bytes: &mut [u8]) -> Result<()> {
        match self.reader.read_at(at.slot, at.offset, bytes) {
            Ok(()) => Ok(()),
            Err(error) if is_eio(&error) => {
                bytes.fill(0);
                Ok(())
            }
            Err(error) => {
                let name = self.reader.name(at.slot);
                let what = format!("could not read {name} at offset {}", at.offset);
                Err(Error::with_source(ErrorKind::Io, what, error))
            }
        }
    }

    /// Returns whether no batch was written to the block at `at`.
    pub(super) fn is_blank(&self, at: At) -> Result<bool> {
        let mut header = [0; batch::BATCH_HEADER_BYTES];
        self.read(at, &mut header)?;
        Ok(header.iter().all(|byte| *byte == 0))
    }

    /// Destroys the header at `at` and leaves the bytes behind it: a loss of power keeps the whole
    /// batch or takes its header.
    pub(super) fn clear_header(&mut self, at: At) -> Result<()> {
        let mut block = [0; batch::BATCH_ALIGN_BYTES];
        self.read(at, &mut block)?;
        block[..batch::BATCH_HEADER_BYTES].fill(0);
        self.write(at, block.len(), std::iter::once(&block[..]))
    }

    /// Puts all writes on stable storage.
    pub(super) fn sync(&mut self) -> Result<()> {
        let files: Vec<u32> = std::mem::take(&mut self.dirty).into_iter().collect();
        if files.is_empty() {
            return Ok(());
        }
        let token = self.token();
        let result = self.run(token, DiskRequest::Sync { token, files });
        self.fail_on(result, || "could not sync the write log".into())
    }

    /// Makes the first file, of a ring with this identity.
    pub(super) fn make_first(&mut self, ring: [u8; 16], chain: [u8; 16]) -> Result<()> {
        (self.shape.ring, self.shape.chain) = (ring, chain);
        self.make(0)
    }

    /// Returns the file behind `slot`, which may be written over; `None` if `is_live` names it. If the
    /// next file cannot be made, the ring ends before it and continues in the first one.
    pub(super) fn next_slot(&mut self, slot: u32, is_live: impl Fn(u32) -> bool) -> Option<u32> {
        let next = self.slot_behind(slot);
        (!is_live(next)).then_some(next)
    }

    /// Returns whether the file behind `slot` may be written over, if it is kept for openings.
    pub(super) fn has_spare(&mut self, slot: u32, is_live: impl Fn(u32) -> bool) -> bool {
        let next = self.slot_behind(slot);
        self.made().count() < SPARE_FILES_MIN || !is_live(next)
    }

    fn slot_behind(&mut self, slot: u32) -> u32 {
        let next = (slot + 1) % self.shape.file_count;
        self.reap(None);
        let is_made = self.states[next as usize] == FileState::Ready || self.make(next).is_ok();
        if is_made { next } else { 0 }
    }

    /// Requests the file that the head will soon reach, if it does not exist and was not refused.
    pub(super) fn prepare(&mut self, head_slot: u32) {
        self.reap(None);
        let made = self.made().count();
        let is_near = made <= (head_slot + FILES_AHEAD) as usize;
        if is_near && self.states.get(made) == Some(&FileState::Absent) {
            self.request(made);
        }
    }

    /// Makes the file `slot` and waits for it.
    fn make(&mut self, slot: u32) -> Result<()> {
        let name = self.reader.name(slot);
        let index = slot as usize;
        if self.made().count() != index {
            // A gap in the numbers would be a file that was taken away.
            let why = format!("could not make {name}: an earlier file could not be made");
            return Err(Error::new(ErrorKind::Io, why));
        }
        if !matches!(self.states[index], FileState::Creating(_)) {
            self.request(index);
        }
        while self.states[index] != FileState::Ready {
            if let Reaped { refusal: Some(error), .. } = self.reap(None) {
                return Err(Error::with_source(
                    ErrorKind::Io,
                    format!("could not make {name}"),
                    error,
                ));
            }
            if self.states[index] != FileState::Ready {
                self.disk.wait();
            }
        }
        Ok(())
    }

    fn request(&mut self, index: usize) {
        let (token, slot) = (self.token(), u32::try_from(index).expect("file count"));
        self.states[index] = FileState::Creating(token);
        let header = FileHeader { slot, ..self.shape }.encode();
        let len = self.shape.file_bytes;
        self.disk.submit(DiskRequest::Create { token, file: slot, len, header });
    }

    /// Takes in completions. Returns that of the request with the token `own`, and the error of a file
    /// that could not be made.
    fn reap(&mut self, own: Option<u64>) -> Reaped {
        let mut reaped = Reaped::default();
        let mut completions = std::mem::take(&mut self.completions);
        self.disk.reap(&mut completions);
        for DiskCompletion { token, result, buffer } in completions.drain(..) {
            if own == Some(token) {
                self.buffer = buffer
                    .filter(|buffer| buffer.capacity() <= BUFFER_BYTES_MAX)
                    .unwrap_or_default();
                reaped.own = Some(result);
                continue;
            }
            let made = FileState::Creating(token);
            let Some(slot) = self.states.iter().position(|state| *state == made) else { continue };
            self.states[slot] = match result {
                Ok(()) => FileState::Ready,
                Err(error) => {
                    tracing::warn!(slot, %error, "could not make a file of the write log; its ring stays short");
                    reaped.refusal = Some(error);
                    FileState::Refused
                }
            };
        }
        self.completions = completions;
        reaped
    }

    /// Runs one request and waits for its completion.
    fn run(&mut self, token: u64, request: DiskRequest) -> io::Result<()> {
        self.disk.submit(request);
        loop {
            if let Some(result) = self.reap(Some(token)).own {
                return result;
            }
            self.disk.wait();
        }
    }

    fn fail_on(&mut self, result: io::Result<()>, what: impl FnOnce() -> String) -> Result<()> {
        result.map_err(|error| {
            let error = crate::disk::failure::error_of(what(), error);
            self.failure = Some(error.clone());
            error
        })
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token
    }
}
