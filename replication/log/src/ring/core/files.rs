//! The core's files: the place of the next batch, and files that are made ahead.
//!
//! Invariants: those of [`super`], and:
//! - In a log with other members, batches with entries leave the file behind the head's free: openings
//!   replace nothing there, and need room while the ring is full.

use super::{Core, FILES_AHEAD, Room};
use crate::format::file::{FILE_HEADER_BYTES, FileHeader};
use crate::options::SPARE_FILES_MIN;
use crate::ring::layout::{FileState, LiveFile};
use block::Lsn;
use block::env::{Disk, DiskRequest};

impl Core {
    /// Moves the head to a place with `bytes` of room for a batch with entries, and `reserve` bytes behind
    /// it.
    pub(super) fn make_room(&mut self, bytes: u64, reserve: u64, disk: &mut dyn Disk) -> Room {
        let file_bytes = self.config.file_bytes;
        if self.head.offset + bytes + reserve <= file_bytes {
            // An opening may have begun the file, because the ring was full.
            return match self.room_of_spare(self.head.slot, disk) {
                Room::Yes | Room::Soon => Room::Yes,
                Room::Full => Room::Full,
            };
        }
        assert!(FILE_HEADER_BYTES as u64 + bytes + reserve <= file_bytes, "a batch fits a file");
        let next = match self.slot_behind(self.head.slot, disk) {
            Ok(slot) => slot,
            Err(room) => return room,
        };
        let spare = self.room_of_spare(next, disk);
        if spare != Room::Yes {
            return spare;
        }
        self.head.position += file_bytes - self.head.offset;
        self.head.slot = next;
        self.head.offset = FILE_HEADER_BYTES as u64;
        self.live.push_back(LiveFile { slot: next, last_lsn: Lsn(self.head.next_lsn.0 - 1) });
        self.prepare_files(disk);
        Room::Yes
    }

    /// Returns whether the file behind `slot` is free, if it is kept for openings.
    fn room_of_spare(&mut self, slot: u32, disk: &mut dyn Disk) -> Room {
        let made = self.files.iter().filter(|state| **state == FileState::Ready).count();
        let is_kept = self.replicas.is_some() && made >= SPARE_FILES_MIN;
        if !is_kept || self.config.seeded_bugs.spare_used {
            return Room::Yes;
        }
        self.slot_behind(slot, disk).map_or_else(|room| room, |_| Room::Yes)
    }

    /// Returns the file after `slot`, if it is free. If it cannot be made (the disk is full), the ring ends
    /// before it and continues in the first file.
    fn slot_behind(&mut self, slot: u32, disk: &mut dyn Disk) -> Result<u32, Room> {
        let next = (slot + 1) % self.config.file_count;
        let is_live = |slot| self.live.iter().any(|file| file.slot == slot);
        match self.files[next as usize] {
            FileState::Ready if is_live(next) => Err(Room::Full),
            FileState::Ready => Ok(next),
            FileState::Refused if is_live(0) => Err(Room::Full),
            FileState::Refused => Ok(0),
            FileState::Creating(_) => Err(Room::Soon),
            FileState::Absent => {
                self.prepare_files(disk);
                Err(Room::Soon)
            }
        }
    }

    /// Requests the file that the head will soon reach, if it does not exist. Files are made in
    /// order, one after the other: a gap in their numbers is a file that was taken away.
    pub(crate) fn prepare_files(&mut self, disk: &mut dyn Disk) {
        let made = self.files.iter().take_while(|state| **state == FileState::Ready).count();
        if made <= (self.head.slot + FILES_AHEAD) as usize {
            self.make_next_file(disk);
        }
    }

    /// Requests the first file that does not exist, unless it is already requested.
    pub(super) fn make_next_file(&mut self, disk: &mut dyn Disk) {
        let made = self.files.iter().take_while(|state| **state == FileState::Ready).count();
        let slot = u32::try_from(made).expect("file count");
        if self.files.get(made) != Some(&FileState::Absent) {
            return;
        }
        let token = self.token();
        self.files[made] = FileState::Creating(token);
        let len = self.config.file_bytes;
        disk.submit(DiskRequest::Create { token, file: slot, len, header: self.file_header(slot) });
    }

    fn file_header(&self, slot: u32) -> Vec<u8> {
        FileHeader {
            pool: self.config.identity.pool,
            ring: self.config.ring,
            chain: self.config.chain,
            slot,
            file_count: self.config.file_count,
            file_bytes: self.config.file_bytes,
        }
        .encode()
    }
}
