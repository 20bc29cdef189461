//! The separate key ring that a copy may have: the pool's data keys, wrapped once, for one key
//! file.
//!
//! Invariants:
//! - It is written only on an explicit request: a key file that appears at a path never becomes a
//!   copy's only key automatically.
//! - An existing key of a copy stays unless it is to be replaced.

use super::{
    DataKey, KeyRing, KeySource, Material, PURPOSE, RingBody, SlotKind, fresh_nonce, make_slot,
    open_bytes, source,
};
use crate::chain::{Chain, Created, Document, Format, corrupt, seal_document};
use crate::store::Store;
use async_recursion::async_recursion;
use block::seal::PoolKey;
use block::{Error, ErrorKind, Result};
use std::path::Path;
use uuid::Uuid;

impl KeyRing {
    /// Reports whether the ring of a copy is its own rather than the pool's; `None` if there is
    /// none. Verifies the ring.
    ///
    /// # Errors
    /// `Corrupt` for a ring that is damaged or has other data keys; errors reading the store.
    #[async_recursion]
    pub async fn is_apart(store: &Store, key: &PoolKey) -> Result<Option<bool>> {
        let found = Self::find_apart(&Chain::new(store, "keyring"), key).await?;
        Ok(found.map(|(body, _)| body.is_apart))
    }

    async fn find_apart(chain: &Chain, key: &PoolKey) -> Result<Option<(RingBody, bytes::Bytes)>> {
        let Some((number, bytes)) = chain.newest().await? else { return Ok(None) };
        let name = chain.name(number);
        let document = Document::parse(&name, &bytes)?;
        document.verify(key, PURPOSE)?;
        let body: RingBody = document.body()?;
        match body.number == number {
            true => Ok(Some((body, bytes))),
            false => Err(corrupt(&name, "it was written under another number")),
        }
    }

    /// Gives a copy of a pool a ring that only the key file `path` opens, with the same data keys:
    /// changes of the pool's own ring do not affect it. A missing key file is made if `may_make` is
    /// set. An existing key of the copy stays unless `is_to_replace` is set. Only for explicit
    /// requests; nothing does this automatically.
    ///
    /// # Errors
    /// `Busy` if the copy has a dedicated key other than `path`, or another process changed the
    /// ring; errors reading the key file.
    #[async_recursion]
    pub async fn give_apart(
        store: &Store,
        (pool, data_keys): (Uuid, &[DataKey]),
        path: &Path,
        (may_make, is_to_replace): (bool, bool),
    ) -> Result<()> {
        let chain = Chain::new(store, "keyring");
        let newest = data_keys.last().expect("a ring holds at least one data key");
        let there = Self::find_apart(&chain, &newest.key).await?;
        let number = there.as_ref().map_or(0, |(body, _)| body.number);
        let apart = there.filter(|(body, _)| body.is_apart);
        let must_stay = apart.is_some() && !is_to_replace;
        let refused = |why: &str| {
            let what = format!(
                "copy to {}: it has a dedicated key already, and {why}; leave --copy-key-file out to keep that key, or \
                 add --replace-copy-key, after which the old one opens it no more",
                store.url()
            );
            Error::new(ErrorKind::Busy, what)
        };
        let material = match (KeySource::File(path.to_owned())).load().await {
            Ok(material) => material,
            Err(error) if error.kind() == ErrorKind::NotFound && must_stay => {
                return Err(refused(&format!("{} is not there", path.display())));
            }
            Err(error) if error.kind() == ErrorKind::NotFound && !may_make && !is_to_replace => {
                return Err(error.context(
                    "the copy has states already, under which key is not known: put its key file in place, or add \
                     --replace-copy-key to make another one",
                ));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let key = source::make_key_file(path)?;
                tracing::warn!(
                    path = %path.display(),
                    "spindle made a new key file for a copy; keep it where you will read the copy: \
                     nothing else opens it"
                );
                Material::Key(SlotKind::KeyFile, key)
            }
            Err(error) => return Err(error),
        };
        if let Some((body, bytes)) = &apart {
            if open_bytes(chain.clone(), body.number, bytes, &material).await.is_ok() {
                // Also if this was interrupted before.
                return chain.delete_below(body.number).await;
            }
            if must_stay {
                return Err(refused(&format!("{} is another", path.display())));
            }
        }
        let mut body = RingBody {
            format: Format::CURRENT,
            pool,
            number: number + 1,
            is_apart: true,
            nonce: fresh_nonce(),
            slots: Vec::new(),
        };
        body.slots.push(make_slot(&body, &material, data_keys).await?);
        let bytes = seal_document(&newest.key, PURPOSE, &body)?;
        if chain.create(body.number, &bytes).await? == Created::Lost {
            let what = "give the copy a dedicated key: another process changed its key ring at the same moment";
            return Err(Error::new(ErrorKind::Busy, what));
        }
        tracing::info!(copy = store.url(), "from now on, only its dedicated key opens the copy");
        chain.delete_below(body.number).await
    }

    /// Returns the ring of a copy in the form for a pool that is restored from it.
    pub fn for_pool(&self) -> Result<(u64, bytes::Bytes)> {
        let body = RingBody { is_apart: false, ..self.body.clone() };
        Ok((body.number, seal_document(&self.newest().key, PURPOSE, &body)?))
    }
}
