//! Who writes to a volume: one device of this machine's kernel, or NBD clients, or both where that was
//! asked for.
//!
//! Invariants:
//! - A volume that is attached for its device alone has no other writer, and the reverse: two file
//!   systems mounted from one volume would destroy it.

use block::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// The claims on the volumes of a pool.
#[derive(Debug, Default)]
pub struct Claims {
    users: Mutex<HashMap<u32, Users>>,
}

#[derive(Debug, Default)]
struct Users {
    connection_count: u64,
    device: Option<IsShared>,
}

type IsShared = bool;

/// A claim, given up when it is dropped.
#[derive(Debug)]
pub struct Claim {
    claims: Arc<Claims>,
    volume: u32,
    is_device: bool,
}

impl Claims {
    /// For an NBD connection that may write to volume `volume`, which people know as `name`.
    ///
    /// # Errors
    /// `Busy`: the volume is attached, and not shared.
    pub fn connect(self: &Arc<Self>, volume: u32, name: &str) -> Result<Claim> {
        let mut all = self.users.lock();
        let users = all.entry(volume).or_default();
        if users.device == Some(false) {
            let what = format!(
                "open export {name:?}: the volume is attached to this machine as a device, which has it \
                 alone; detach it, or attach it with --shared"
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        users.connection_count += 1;
        Ok(Claim { claims: self.clone(), volume, is_device: false })
    }

    /// For a device.
    ///
    /// # Errors
    /// `Busy`: there is a device already, or, unless it is to be shared, an NBD connection.
    pub fn attach(self: &Arc<Self>, volume: u32, name: &str, is_shared: bool) -> Result<Claim> {
        let mut all = self.users.lock();
        let users = all.entry(volume).or_default();
        if users.device.is_some() {
            let what = format!("attach volume {name}: it is attached already");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        if users.connection_count > 0 && !is_shared {
            let what = format!(
                "attach volume {name}: {} NBD connections have it open; close them, or attach it with \
                 --shared if its users agree on who writes where",
                users.connection_count
            );
            return Err(Error::new(ErrorKind::Busy, what));
        }
        users.device = Some(is_shared);
        Ok(Claim { claims: self.clone(), volume, is_device: true })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut all = self.claims.users.lock();
        let Some(users) = all.get_mut(&self.volume) else { return };
        if self.is_device {
            users.device = None;
        } else {
            users.connection_count -= 1;
        }
        if users.device.is_none() && users.connection_count == 0 {
            all.remove(&self.volume);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_or_connections_unless_shared() {
        let claims = Arc::new(Claims::default());
        let (first, second) = (claims.connect(1, "v").unwrap(), claims.connect(1, "v").unwrap());
        let error = claims.attach(1, "v", false).unwrap_err();
        assert!(error.to_string().contains("2 NBD connections"), "{error}");
        drop((first, second));
        let device = claims.attach(1, "v", false).unwrap();
        assert_eq!(claims.connect(1, "v").unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(claims.attach(1, "v", true).unwrap_err().kind(), ErrorKind::Busy);
        assert!(claims.connect(2, "w").is_ok(), "another volume");
        drop(device);
        let connection = claims.connect(1, "v").unwrap();
        let shared = claims.attach(1, "v", true).unwrap();
        assert!(claims.connect(1, "v").is_ok());
        drop((connection, shared));
        assert!(claims.users.lock().is_empty());
    }
}
