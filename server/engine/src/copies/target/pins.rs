//! Finds the states of a copy that are being read.
//!
//! Invariants:
//! - Data that a pin keeps is deleted once the pin is gone. A pin counts as gone once several
//!   lookups by its name agree; a listing without it proves nothing.

use super::{PINS, Pin, PinBody, SHORT_PIN_SECONDS, STATES, Target};
use block::Result;
use block::seal::PoolKey;
use control::chain::Document;
use object_store::path::Path as ObjectPath;
use object_store::{GetResult, ObjectMeta, ObjectStoreExt};
use std::collections::BTreeSet;
use tiering::listing::{EMPTY_LOOK_COUNT, list_all, pause_before};

/// Pins or states whose names are held in memory. Chosen by hand: each restore or reader has one.
const LISTED_COUNT_MAX: u64 = 100_000;

impl Target {
    /// Returns the oldest state that is being read. An unreadable pin keeps everything. Short pins
    /// end by age if `may_end` is set; it must not be set after a jump of the clock, which gives a
    /// copy in a directory its times.
    pub(crate) async fn oldest_pin(&self, key: &PoolKey, may_end: bool) -> Result<Option<u64>> {
        let failed = |error| self.store.explain("list the pins", error);
        // By the store's clock, taken from the newest state: if no new state comes, a pin stays
        // longer, never shorter.
        let states = self.listed(STATES).await?;
        let newest = states.iter().map(|state| state.last_modified.timestamp()).max();
        let now = newest.unwrap_or(0);
        let (mut oldest, mut seen): (Option<u64>, BTreeSet<ObjectPath>) = (None, BTreeSet::new());
        for path in self.pins().await? {
            let Some(got) = self.get_pin(&path).await? else { continue };
            let modified_at = got.meta.last_modified.timestamp();
            let bytes = got.bytes().await.map_err(failed)?;
            seen.insert(path.clone());
            let name = path.to_string();
            let read = || -> Result<PinBody> {
                let document = Document::parse(&name, &bytes)?;
                document.verify(key, PINS)?;
                document.body()
            };
            let age = now - modified_at;
            let state = match read() {
                Ok(pin) if may_end && pin.is_short && age > SHORT_PIN_SECONDS => {
                    seen.remove(&path);
                    self.unpin(Pin(path)).await;
                    continue;
                }
                Ok(pin) => pin.state,
                Err(error) => {
                    tracing::warn!(
                        pin = %name, error = %error.chain(),
                        "could not read a pin of the copy, which keeps everything there"
                    );
                    0
                }
            };
            oldest = Some(oldest.map_or(state, |oldest| oldest.min(state)));
        }
        *self.pins_seen.lock() = Some(seen);
        Ok(oldest)
    }

    async fn listed(&self, folder: &str) -> Result<Vec<ObjectMeta>> {
        let (objects, folder) = (self.store.control(), ObjectPath::from(folder));
        let listed = list_all(&objects, Some(&folder), LISTED_COUNT_MAX).await;
        listed.map_err(|error| self.store.explain(&format!("list {folder}"), error))
    }

    /// Returns the pins in the listing, and those that were there the last time. The data of a pin
    /// that is not found is deleted for good, so a single listing proves nothing.
    async fn pins(&self) -> Result<BTreeSet<ObjectPath>> {
        let seen = self.pins_seen.lock().clone();
        let look_count = match seen {
            None if self.store.local_dir().is_none() => EMPTY_LOOK_COUNT,
            _ => 1,
        };
        let mut pins = seen.unwrap_or_default();
        for look in 0..look_count {
            pause_before(look).await;
            pins.extend(self.listed(PINS).await?.into_iter().map(|found| found.location));
        }
        Ok(pins)
    }

    /// Reads a known pin; `None` once several lookups agree that it is gone.
    pub(super) async fn get_pin(&self, path: &ObjectPath) -> Result<Option<GetResult>> {
        let look_count = if self.store.local_dir().is_some() { 1 } else { EMPTY_LOOK_COUNT };
        for look in 0..look_count {
            pause_before(look).await;
            match self.store.control().get(path).await {
                Ok(got) => return Ok(Some(got)),
                Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(self.store.explain("read a pin", error)),
            }
        }
        Ok(None)
    }
}
