//! Requests about keys.

use super::convert;
use api::Reply;
use api::key::KeyRequest;
use block::{Error, ErrorKind, Result};
use control::keys::NewKey;
use engine::conditions;
use engine::open_pool::OpenPool;
use std::path::PathBuf;

pub(super) async fn handle(open: &OpenPool, request: KeyRequest) -> Result<Reply> {
    match request {
        KeyRequest::Backup { replace } => {
            let mut keys = open.keys.lock().await;
            let added = keys.add_recovery(replace).await;
            conditions::show_recovery_key(&open.conditions, keys.has_recovery());
            Ok(Reply::RecoveryKey { key: convert::secret(&added?) })
        }
        KeyRequest::Rotate { new } => {
            let new = match new {
                Some(new) => convert::new_key(new),
                None => NewKey::File { path: key_file(open)? },
            };
            let mut keys = open.keys.lock().await;
            let rotated = keys.rotate(&new).await;
            conditions::show_recovery_key(&open.conditions, keys.has_recovery());
            let rotated = rotated?;
            let kind = convert::slot_kind(rotated.kind);
            Ok(Reply::KeyRotated { kind, message: rotated.message })
        }
    }
}

/// The configured key file, for a rotation without an explicit key source.
fn key_file(open: &OpenPool) -> Result<PathBuf> {
    open.config.key_file.clone().ok_or_else(|| {
        let what = "rotate the key: the pool is not opened by a key file; name the new way to open \
                    it (see `spindle key rotate --help`)";
        Error::new(ErrorKind::Invalid, what)
    })
}
