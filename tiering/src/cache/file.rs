//! The cache file: opening, reading and writing, with or without the page cache.
//!
//! Invariants:
//! - Its mode is 0600, and it is under an exclusive lock as long as it is open.
//! - A file of another pool, version or region size is emptied, because its contents are never
//!   needed.
//! - Writes are whole aligned blocks, so that they can bypass the page cache.

use super::format::{self, ALIGN, FileState};
use super::{CacheIo, CacheOptions};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::io::IoSliceMut;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

/// Name of the file within the cache's directory.
pub const FILE_NAME: &str = "frames.cache";

/// The open cache file, with its lock.
#[derive(Debug)]
pub struct CacheFile {
    /// Uses the page cache.
    buffered: File,
    /// Bypasses the page cache, if the file system supports it.
    direct: Option<File>,
    /// Reads bypass the page cache, too.
    is_read_direct: bool,
    /// State in which the file was left. Present only if the header was valid, so that the regions
    /// may be used.
    kept: Option<FileState>,
    pool: [u8; 16],
    region_bytes: u32,
    /// Bytes that still arrive before the simulated kill.
    #[cfg(test)]
    killed_after_bytes: std::sync::atomic::AtomicU64,
    /// Space that the simulated disk has left.
    #[cfg(test)]
    free_bytes: std::sync::atomic::AtomicU64,
}

impl CacheFile {
    /// Opens or creates the file. Blocking.
    ///
    /// # Errors
    /// File system errors; `WouldBlock` if another process holds the lock.
    pub fn open(options: &CacheOptions, pool: &[u8; 16], region_bytes: u32) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(&options.dir)?;
        let path = options.dir.join(FILE_NAME);
        let buffered = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        rustix::fs::flock(&buffered, FlockOperation::NonBlockingLockExclusive)?;
        rustix::fs::fadvise(&buffered, 0, None, Advice::Random)?;
        let mut header = vec![0; ALIGN];
        let is_kept = read_full(&buffered, &mut header, 0)? == ALIGN
            && format::is_file_header(&header, pool, region_bytes);
        let kept = is_kept.then(|| format::file_state(&header));
        if !is_kept {
            buffered.set_len(0)?;
            let header = format::encode_file_header(pool, region_bytes, FileState::default());
            buffered.write_all_at(&header, 0)?;
            buffered.sync_data()?;
        }
        let direct = open_direct(&path);
        let is_read_direct = options.io == CacheIo::Direct && direct.is_some();
        Ok(CacheFile {
            buffered,
            direct,
            is_read_direct,
            kept,
            pool: *pool,
            region_bytes,
            #[cfg(test)]
            killed_after_bytes: u64::MAX.into(),
            #[cfg(test)]
            free_bytes: u64::MAX.into(),
        })
    }

    /// Lets only `bytes` more bytes arrive, in whole blocks. This simulates a kill: the kernel
    /// stops the write of a killed process between two pages.
    #[cfg(test)]
    pub fn kill_after(&self, bytes: u64) {
        self.killed_after_bytes.store(bytes, std::sync::atomic::Ordering::Relaxed);
    }

    #[cfg(test)]
    fn arrives<'a>(&self, aligned: &'a [u8]) -> &'a [u8] {
        use std::sync::atomic::Ordering::Relaxed;
        let left = self.killed_after_bytes.load(Relaxed);
        let count = left.min(aligned.len() as u64) / ALIGN as u64 * ALIGN as u64;
        let is_killed = count < aligned.len() as u64;
        self.killed_after_bytes.store(if is_killed { 0 } else { left - count }, Relaxed);
        &aligned[..count as usize]
    }

    /// State in which the file was left, if it held regions of this cache when it was opened.
    #[must_use]
    pub fn kept(&self) -> Option<FileState> {
        self.kept
    }

    /// Syncs all writes, then records the state in which the file is left if nothing more is
    /// written.
    ///
    /// # Errors
    /// File system errors.
    pub fn note_state(&self, state: FileState) -> io::Result<()> {
        let header = format::encode_file_header(&self.pool, self.region_bytes, state);
        #[cfg(test)]
        if self.arrives(&header).is_empty() {
            return Ok(());
        }
        self.buffered.sync_data()?;
        self.buffered.write_all_at(&header, 0)?;
        self.buffered.sync_data()
    }

    /// Length of the file in bytes.
    ///
    /// # Errors
    /// File system errors.
    pub fn size_bytes(&self) -> io::Result<u64> {
        Ok(self.buffered.metadata()?.len())
    }

    /// Truncates the file to at most this length.
    ///
    /// # Errors
    /// File system errors.
    pub fn shrink(&self, bytes: u64) -> io::Result<()> {
        if self.size_bytes()? > bytes { self.buffered.set_len(bytes) } else { Ok(()) }
    }

    /// Reserves space, so that a full disk is noticed here and not in the middle of a pack, and so
    /// that later writes change no file system metadata that other writers would have to wait for.
    ///
    /// # Errors
    /// `StorageFull` and other file system errors.
    pub fn reserve(&self, offset: u64, bytes: u64) -> io::Result<()> {
        #[cfg(test)]
        match self.free_bytes.load(std::sync::atomic::Ordering::Relaxed) {
            u64::MAX => {}
            free if free < bytes => return Err(io::ErrorKind::StorageFull.into()),
            free => self.set_free_bytes(free - bytes),
        }
        match rustix::fs::fallocate(&self.buffered, FallocateFlags::empty(), offset, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                let end = offset + bytes;
                if self.size_bytes()? < end { self.buffered.set_len(end) } else { Ok(()) }
            }
            result => Ok(result?),
        }
    }

    /// Free bytes on the file's disk; `None` if the file system does not report them.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        #[cfg(test)]
        match self.free_bytes.load(std::sync::atomic::Ordering::Relaxed) {
            u64::MAX => {}
            free => return Some(free),
        }
        let found = rustix::fs::fstatvfs(&self.buffered).ok()?;
        // Some file systems report no size.
        (found.f_blocks > 0).then_some(())?;
        Some(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Simulates a disk with `bytes` of space left; `u64::MAX` ends the simulation.
    #[cfg(test)]
    pub fn set_free_bytes(&self, bytes: u64) {
        self.free_bytes.store(bytes, std::sync::atomic::Ordering::Relaxed);
    }

    /// Writes whole blocks of an aligned buffer. Bypasses the page cache if possible: a segment's
    /// worth of dirty pages would delay every other file's fsync.
    ///
    /// # Errors
    /// File system errors.
    pub fn write(&self, aligned: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        let aligned = self.arrives(aligned);
        match &self.direct {
            Some(direct) => direct.write_all_at(aligned, offset),
            None => self.buffered.write_all_at(aligned, offset),
        }
    }

    /// Reads without waiting for the disk. Returns `false` if that is not possible; the contents of
    /// `bytes` are then undefined.
    pub fn read_now(&self, bytes: &mut [u8], offset: u64) -> bool {
        if self.is_read_direct {
            return false;
        }
        let wanted = bytes.len();
        let mut slices = [IoSliceMut::new(bytes)];
        let read = rustix::io::preadv2(&self.buffered, &mut slices, offset, ReadWriteFlags::NOWAIT);
        read == Ok(wanted)
    }

    /// Reads `count` bytes at `offset` into `buffer`, and returns the part of the buffer that holds
    /// them. Blocking.
    ///
    /// # Errors
    /// File system errors; `UnexpectedEof` past the end.
    pub fn read<'a>(
        &self,
        buffer: &'a mut AlignedBuffer,
        offset: u64,
        count: usize,
    ) -> io::Result<&'a mut [u8]> {
        let direct = self.direct.as_ref().filter(|_| self.is_read_direct);
        let align = ALIGN as u64;
        let (file, start) = match direct {
            Some(direct) => (direct, offset / align * align),
            None => (&self.buffered, offset),
        };
        let skip = (offset - start) as usize;
        let end = match direct {
            Some(_) => (skip + count).next_multiple_of(ALIGN),
            None => count,
        };
        let bytes = buffer.room(end);
        if read_full(file, bytes, start)? < skip + count {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(&mut bytes[skip..skip + count])
    }
}

fn open_direct(path: &Path) -> Option<File> {
    let flags = OFlags::DIRECT.bits() as i32;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).ok()?;
    // Some file systems accept the flag but refuse the first read.
    let mut buffer = AlignedBuffer::default();
    file.read_at(buffer.room(ALIGN), 0).ok()?;
    Some(file)
}

fn read_full(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Reusable buffer for reads and writes; its address is a multiple of [`ALIGN`].
#[derive(Debug, Default)]
pub struct AlignedBuffer {
    bytes: Vec<u8>,
}

impl AlignedBuffer {
    /// Returns `count` bytes with undefined contents.
    pub fn room(&mut self, count: usize) -> &mut [u8] {
        if self.bytes.len() < count + ALIGN {
            self.bytes = vec![0; (count + ALIGN).next_power_of_two()];
        }
        let skip = self.bytes.as_ptr().align_offset(ALIGN);
        &mut self.bytes[skip..skip + count]
    }
}
