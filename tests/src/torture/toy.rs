//! A small NBD server in memory that can be broken in the ways real ones are, to prove that the
//! crash tester finds each fault.
//!
//! Invariants:
//! - Without a fault it keeps every promise: acknowledged changes are present after a kill.
//! - It has two copies of each volume: requests see `live`, and only `kept` survives a kill.

use super::target::{Kill, Target};
use crate::nbd::Endpoint;
use crate::nbd::transport::{Address, take, take_array};
use crate::nbd::wire::*;
use crate::seed::Random;
use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A way in which the server is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault: the tester must find nothing.
    None,
    /// Acknowledges a write about a millisecond before it is kept.
    AcknowledgeEarly,
    /// Acknowledges and shows a trim, but forgets it at the next start.
    TrimLost,
    /// Rounds write-zeroes to whole blocks of 4 KiB and leaves the rest.
    ZeroRounded,
    /// Drops one in 200 writes.
    WriteDropped,
    /// Keeps a big write up to 64 KiB only.
    WriteTorn,
    /// Brings back an older version of a sector at one in 50 starts.
    StaleSector,
    /// Keeps one in 300 writes in another volume, too.
    Misdirected,
    /// Brings back, in a later crash, a write that was lost in an earlier one.
    LateWrite,
    /// Acknowledges flush and FUA before the preceding writes are kept.
    FlushIgnored,
    /// Shows a write to reads only once it is kept.
    ReadBehind,
}

struct Volume {
    live: Vec<u8>,
    kept: Vec<u8>,
}

struct Change {
    volume: usize,
    offset: usize,
    bytes: Vec<u8>,
}

struct State {
    fault: Fault,
    random: Random,
    volumes: Vec<Volume>,
    /// Acknowledged, but not kept yet.
    late: VecDeque<Change>,
    /// Never acknowledged, to come back when they should not.
    ghosts: Vec<Change>,
    /// Older contents, to come back when they should not.
    past: Vec<Change>,
    sockets: Vec<TcpStream>,
    generation: u64,
}

/// A running server.
pub struct Toy {
    state: Arc<Mutex<State>>,
    address: String,
    volume_count: usize,
}

impl Toy {
    /// Makes `volume_count` volumes of `bytes`, named `v0`, `v1`, ….
    #[must_use]
    pub fn new(fault: Fault, seed: u64, volume_count: usize, bytes: usize) -> Toy {
        let volume = || Volume { live: vec![0; bytes], kept: vec![0; bytes] };
        let state = State {
            fault,
            random: Random::new(seed, 99),
            volumes: (0..volume_count).map(|_| volume()).collect(),
            late: VecDeque::new(),
            ghosts: Vec::new(),
            past: Vec::new(),
            sockets: Vec::new(),
            generation: 0,
        };
        Toy { state: Arc::new(Mutex::new(state)), address: String::new(), volume_count }
    }
}

impl State {
    fn crash(&mut self) {
        self.generation += 1;
        for socket in self.sockets.drain(..) {
            // It may be closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.late.clear();
        for volume in &mut self.volumes {
            volume.live.copy_from_slice(&volume.kept);
        }
        if self.fault == Fault::LateWrite && self.generation.is_multiple_of(3) {
            for ghost in std::mem::take(&mut self.ghosts) {
                self.keep(&ghost);
            }
        }
        if self.fault == Fault::StaleSector && self.random.chance(2) && !self.past.is_empty() {
            let index = self.random.below(u64::try_from(self.past.len()).expect("fits"));
            let stale = self.past.swap_remove(usize::try_from(index).expect("below a length"));
            self.keep(&stale);
        }
    }

    fn show(&mut self, change: &Change) {
        let range = change.offset..change.offset + change.bytes.len();
        self.volumes[change.volume].live[range].copy_from_slice(&change.bytes);
    }

    fn keep(&mut self, change: &Change) {
        let range = change.offset..change.offset + change.bytes.len();
        if let Some(place) = self.volumes[change.volume].kept.get_mut(range.clone()) {
            place.copy_from_slice(&change.bytes);
        }
        self.show(change);
    }

    /// Applies a write, trim or zero in this server's way; it is acknowledged when this returns.
    fn change(&mut self, command: u16, fua: bool, mut change: Change) {
        if self.fault == Fault::StaleSector {
            let range = change.offset / 512 * 512..change.offset / 512 * 512 + 512;
            let bytes = self.volumes[change.volume].kept[range.clone()].to_vec();
            self.past.push(Change { volume: change.volume, offset: range.start, bytes });
        }
        match self.fault {
            Fault::AcknowledgeEarly => {
                self.show(&change);
                self.late.push_back(change);
            }
            Fault::FlushIgnored if !fua => {
                self.show(&change);
                self.late.push_back(change);
            }
            Fault::ReadBehind => self.late.push_back(change),
            Fault::TrimLost if command == CMD_TRIM => self.show(&change),
            Fault::ZeroRounded if command == CMD_WRITE_ZEROES => {
                let start = change.offset.next_multiple_of(4096);
                let end = (change.offset + change.bytes.len()) / 4096 * 4096;
                let bytes = vec![0; end.saturating_sub(start)];
                self.keep(&Change { offset: start.min(end), bytes, ..change });
            }
            Fault::WriteDropped if self.random.below(200) == 0 => self.show(&change),
            Fault::WriteTorn if change.bytes.len() > 64 << 10 => {
                self.show(&change);
                change.bytes.truncate(64 << 10);
                self.keep(&change);
            }
            Fault::Misdirected if self.random.below(300) == 0 => {
                self.keep(&change);
                change.volume = (change.volume + 1) % self.volumes.len();
                self.keep(&change);
            }
            _ => self.keep(&change),
        }
    }

    fn tick(&mut self) {
        for change in std::mem::take(&mut self.late) {
            self.keep(&change);
        }
    }
}

impl Target for Toy {
    fn start(&mut self) -> Result<(), String> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
        self.address = listener.local_addr().map_err(|error| error.to_string())?.to_string();
        let generation = self.state.lock().expect("no panic holds it").generation;
        let state = Arc::clone(&self.state);
        let is_current = move |state: &Mutex<State>| {
            state.lock().expect("no panic holds it").generation == generation
        };
        listener.set_nonblocking(true).map_err(|error| error.to_string())?;
        std::thread::spawn(move || {
            while is_current(&state) {
                if let Ok((socket, _)) = listener.accept() {
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || {
                        let result = serve(&socket, &state, generation);
                        // A copy of the socket is kept for a crash, so it is not enough to close
                        // this one.
                        let _ = socket.shutdown(Shutdown::Both);
                        result
                    });
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                    state.lock().expect("no panic holds it").tick();
                }
            }
        });
        Ok(())
    }

    fn start_and_kill(&mut self, delay: Duration) -> Result<(), String> {
        self.start()?;
        std::thread::sleep(delay);
        self.state.lock().expect("no panic holds it").crash();
        Ok(())
    }

    fn endpoint(&self, volume: &str) -> Endpoint {
        Endpoint { address: Address::Tcp(self.address.clone()), export: volume.to_owned() }
    }

    fn killer(&self) -> Kill {
        let state = Arc::clone(&self.state);
        Box::new(move || state.lock().expect("no panic holds it").crash())
    }

    fn reap(&mut self) -> Result<Option<String>, String> {
        Ok(None)
    }

    fn begin_stop(&mut self) {
        let mut state = self.state.lock().expect("no panic holds it");
        state.tick();
        state.crash();
    }

    fn finish_stop(&mut self) -> Result<(), String> {
        assert!(self.volume_count > 0, "a toy serves something");
        Ok(())
    }
}

/// Serves one connection: simple replies, one request after the other.
fn serve(mut socket: &TcpStream, state: &Mutex<State>, generation: u64) -> Option<()> {
    let copy = socket.try_clone().ok()?;
    let volume_bytes = {
        let mut state = state.lock().expect("no panic holds it");
        if state.generation != generation {
            return None;
        }
        state.sockets.push(copy);
        state.volumes[0].live.len()
    };
    socket.set_nonblocking(false).ok()?;
    socket.set_nodelay(true).ok()?;
    let volume = negotiate(&mut socket, volume_bytes).ok()?;
    loop {
        let [header, payload] = request_of(&mut socket).ok()?;
        let command = u16::from_be_bytes([header[6], header[7]]);
        let flags = u16::from_be_bytes([header[4], header[5]]);
        let offset = usize::try_from(number(&header[16..24])).ok()?;
        let length = usize::try_from(number(&header[24..28])).ok()?;
        let mut reply = MAGIC_SIMPLE.to_be_bytes().to_vec();
        reply.extend_from_slice(&0u32.to_be_bytes());
        reply.extend_from_slice(&header[8..16]);
        let mut state = state.lock().expect("no panic holds it");
        if state.generation != generation {
            // In flight when the server died: never acknowledged, and apparently not kept.
            if state.fault == Fault::LateWrite && command == CMD_WRITE {
                state.ghosts.push(Change { volume, offset, bytes: payload });
            }
            return None;
        }
        match command {
            CMD_READ => {
                reply.extend_from_slice(&state.volumes[volume].live[offset..offset + length]);
            }
            CMD_WRITE | CMD_TRIM | CMD_WRITE_ZEROES => {
                let bytes = if command == CMD_WRITE { payload } else { vec![0; length] };
                let change = Change { volume, offset, bytes };
                state.change(command, flags & CMD_FLAG_FUA != 0, change);
            }
            CMD_DISC => return None,
            _ => {}
        }
        drop(state);
        socket.write_all(&reply).ok()?;
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn request_of(socket: &mut &TcpStream) -> io::Result<[Vec<u8>; 2]> {
    let header = take(socket, REQUEST_BYTES)?;
    let is_write = number(&header[6..8]) == u64::from(CMD_WRITE);
    let length = if is_write { number(&header[24..28]) } else { 0 };
    let payload = take(socket, usize::try_from(length).expect("32 bits fit"))?;
    Ok([header, payload])
}

/// Negotiates fixed newstyle with `GO` alone; returns the number of the volume.
fn negotiate(socket: &mut &TcpStream, volume_bytes: usize) -> io::Result<usize> {
    let mut greeting = MAGIC_NBD.to_be_bytes().to_vec();
    greeting.extend_from_slice(&MAGIC_OPTION.to_be_bytes());
    greeting.extend_from_slice(&(FLAG_FIXED_NEWSTYLE | FLAG_NO_ZEROES).to_be_bytes());
    socket.write_all(&greeting)?;
    let _client_flags: [u8; 4] = take_array(socket)?;
    loop {
        let header: [u8; 16] = take_array(socket)?;
        let option = u32::try_from(number(&header[8..12])).expect("32 bits");
        let length = usize::try_from(number(&header[12..16])).expect("32 bits");
        let payload = take(socket, length)?;
        let mut answer = |kind: u32, payload: &[u8]| {
            let mut reply = MAGIC_OPTION_REPLY.to_be_bytes().to_vec();
            reply.extend_from_slice(&option.to_be_bytes());
            reply.extend_from_slice(&kind.to_be_bytes());
            reply.extend_from_slice(&u32::try_from(payload.len()).expect("small").to_be_bytes());
            reply.extend_from_slice(payload);
            socket.write_all(&reply)
        };
        if option != OPT_GO {
            answer(REP_ERR_UNSUP, &[])?;
            continue;
        }
        let name = payload.get(4..payload.len() - 4).unwrap_or_default();
        let digits = String::from_utf8_lossy(name).trim_start_matches('v').to_owned();
        let volume = digits.parse().map_err(io::Error::other)?;
        let flags = 1 | CAN_FLUSH | CAN_FUA | CAN_TRIM | CAN_WRITE_ZEROES | CAN_MULTI_CONN;
        let mut info = INFO_EXPORT.to_be_bytes().to_vec();
        info.extend_from_slice(&u64::try_from(volume_bytes).expect("fits").to_be_bytes());
        info.extend_from_slice(&flags.to_be_bytes());
        answer(REP_INFO, &info)?;
        answer(REP_ACK, &[])?;
        return Ok(volume);
    }
}
