//! A TCP proxy that can be cut: the network between spindle and its store.
//!
//! Invariants:
//! - While it is cut, existing connections end, and new ones are refused at once or swallowed, as
//!   the test chooses.
//! - It ends with its guard.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The fate of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// Bytes pass.
    Open,
    /// Connections end at once.
    Cut,
    /// Connections stay open and nothing passes.
    Silent,
    /// The listener is closed for ever.
    Gone,
}

struct State {
    line: Line,
    sockets: Vec<TcpStream>,
}

/// A running proxy.
pub struct Proxy {
    state: Arc<Mutex<State>>,
    address: String,
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and connects to `target` (`host:port`).
    ///
    /// # Errors
    /// When it cannot listen.
    pub fn start(target: &str) -> io::Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        listener.set_nonblocking(true)?;
        let state = Arc::new(Mutex::new(State { line: Line::Open, sockets: Vec::new() }));
        let shared = Arc::clone(&state);
        let target = target.to_owned();
        std::thread::spawn(move || {
            loop {
                let line = shared.lock().expect("no panic holds it").line;
                match (line, listener.accept()) {
                    (Line::Gone, _) => return,
                    (Line::Cut, Ok((socket, _))) => drop(socket),
                    (_, Ok((socket, _))) => {
                        // An unreachable target looks like a cut line.
                        let _ = join(&shared, socket, &target);
                    }
                    (_, Err(_)) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        Ok(Proxy { state, address })
    }

    /// Returns its address, `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Changes the fate of all further bytes.
    pub fn set(&self, line: Line) {
        let mut state = self.state.lock().expect("no panic holds it");
        state.line = line;
        if matches!(line, Line::Cut | Line::Gone) {
            for socket in state.sockets.drain(..) {
                // It may have ended already.
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.set(Line::Gone);
    }
}

fn join(state: &Arc<Mutex<State>>, near: TcpStream, target: &str) -> io::Result<()> {
    near.set_nonblocking(false)?;
    let far = TcpStream::connect(target)?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let mut shared = state.lock().expect("no panic holds it");
    shared.sockets.retain(|socket| socket.peer_addr().is_ok());
    shared.sockets.extend([near.try_clone()?, far.try_clone()?]);
    for (from, to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
        let state = Arc::clone(state);
        std::thread::spawn(move || {
            // Ends when either side ends.
            let _ = pass(&state, &from, &to);
            let _ = to.shutdown(Shutdown::Write);
        });
    }
    Ok(())
}

fn pass(state: &Mutex<State>, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
    let mut bytes = vec![0; 128 << 10];
    loop {
        let count = from.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        while state.lock().expect("no panic holds it").line == Line::Silent {
            std::thread::sleep(Duration::from_millis(5));
        }
        to.write_all(&bytes[..count])?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_line_passes_nothing_and_an_open_one_does() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = Proxy::start(&listener.local_addr().unwrap().to_string()).unwrap();
        let mut near = TcpStream::connect(proxy.address()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.write_all(b"hello").unwrap();
        let mut bytes = [0; 5];
        far.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"hello");
        proxy.set(Line::Cut);
        assert_eq!(near.read(&mut bytes).unwrap_or(0), 0, "the connection ended");
        let mut again = TcpStream::connect(proxy.address()).unwrap();
        assert_eq!(again.read(&mut bytes).unwrap_or(0), 0, "a new one ends at once");
        proxy.set(Line::Open);
        let mut near = TcpStream::connect(proxy.address()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        far.write_all(b"world").unwrap();
        near.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"world");
    }
}
