//! Keeps a state of the metadata database while it is being read.
//!
//! The database's collector deletes a table once it is old and neither the newest manifest nor a
//! checkpoint names it. The age is that of the table, not of its replacement. A table older than
//! [`super::database::DatabaseOptions::garbage_age`] is therefore kept only by the compactor's
//! checkpoint, which ends 15 minutes after the compaction. Source: slatedb 0.18
//! `garbage_collector/compacted_gc.rs` and `compactor_state_protocols.rs`. A reader that needs a
//! state for longer makes a checkpoint of it.
//!
//! Invariants:
//! - The checkpoint exists before the state is read, and names that state.
//! - It expires on its own: a reader that is killed keeps tables for [`LIFETIME`] at most.
//! - It is renewed by the same clock by which the owner's collector ends it.

use super::database::{FOLDER, is_refused};
use super::monotonic_clock::MonotonicClock;
use block::{Error, ErrorKind, Result};
use chrono::{DateTime, Utc};
use object_store::ObjectStore;
use parking_lot::Mutex;
use slatedb::CheckpointCreateResult;
use slatedb::admin::{Admin, AdminBuilder};
use slatedb::config::CheckpointOptions;
use slatedb_common::clock::SystemClock;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

/// Time after which a checkpoint ends unless it is renewed. Chosen by hand: as long as several
/// outages of the store, while an hour of garbage is little.
const LIFETIME: Duration = Duration::from_secs(3600);
/// Time after which it is renewed. Chosen by hand: three tries fit into [`LIFETIME`].
const RENEW_AFTER: Duration = Duration::from_secs(900);
/// Interval at which renewal is considered. Chosen by hand: a machine that was asleep renews soon.
const LOOK: Duration = Duration::from_secs(60);
/// Maximum time to make, renew or end a checkpoint. The database itself would retry forever, even
/// if the credentials do not allow writing.
const PATIENCE: Duration = Duration::from_secs(20);

/// A checkpoint of a state, renewed while this value lives. If it is dropped without [`Pin::end`],
/// the checkpoint expires on its own.
pub(super) struct Pin {
    kept: Arc<Kept>,
    renewing: tokio::task::JoinHandle<()>,
}

struct Kept {
    admin: Admin,
    clock: Arc<MonotonicClock>,
    made: CheckpointCreateResult,
    renewed_at: Mutex<DateTime<Utc>>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.renewing.abort();
    }
}

async fn in_time<T>(
    doing: &'static str,
    work: impl Future<Output = Result<T, slatedb::Error>>,
) -> Result<T> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done.map_err(|cause| match is_refused(&cause) {
            true => Error::with_source(ErrorKind::Denied, doing, cause),
            false => super::database::error(doing, cause),
        }),
        Err(_) => {
            let what = format!("{doing}: the store has not taken it in {PATIENCE:?}");
            Err(Error::new(ErrorKind::Unavailable, what))
        }
    }
}

impl Pin {
    /// Keeps the newest state, and also returns the number of its manifest. The checkpoint is
    /// renewed on the caller's runtime.
    ///
    /// # Errors
    /// `Denied` if the store is only a view; `Unavailable`, also if the credentials do not allow
    /// writing.
    pub(super) async fn newest(
        store: Arc<dyn ObjectStore>,
        clock: MonotonicClock,
    ) -> Result<(Pin, u64)> {
        let clock = Arc::new(clock);
        let admin = AdminBuilder::new(FOLDER, store).with_system_clock(clock.clone()).build();
        let renewed_at = Mutex::new(clock.now());
        let options =
            CheckpointOptions { lifetime: Some(LIFETIME), ..CheckpointOptions::default() };
        let made = admin.create_detached_checkpoint(&options);
        let made = in_time("keep a state of the metadata", made).await?;
        let manifest = made.manifest_id;
        let kept = Arc::new(Kept { admin, clock, made, renewed_at });
        let renewing = tokio::spawn({
            let kept = kept.clone();
            async move {
                loop {
                    tokio::time::sleep(LOOK).await;
                    if let Err(error) = kept.renew_if_due().await {
                        // Readers report missing objects themselves.
                        tracing::debug!(
                            error = %error.chain(),
                            "could not renew the checkpoint of the metadata that is read"
                        );
                    }
                }
            }
        });
        Ok((Pin { kept, renewing }, manifest))
    }

    /// Renews it, if it is due. The returned future borrows nothing.
    #[cfg(test)]
    pub(super) fn renew_if_due(&self) -> impl Future<Output = Result<()>> + Send + 'static {
        let kept = self.kept.clone();
        async move { kept.renew_if_due().await }
    }

    /// Ends the checkpoint once the state is no longer read.
    pub(super) async fn end(self) {
        self.renewing.abort();
        let ended = self.kept.admin.delete_checkpoint(self.kept.made.id);
        if let Err(error) = in_time("end a checkpoint of the metadata", ended).await {
            tracing::debug!(
                error = %error.chain(),
                "could not end a checkpoint of the metadata; it expires within an hour"
            );
        }
    }
}

impl Kept {
    async fn renew_if_due(&self) -> Result<()> {
        let now = self.clock.now();
        let age = now.signed_duration_since(*self.renewed_at.lock());
        // A negative age means that the clock was set back.
        if (0..RENEW_AFTER.as_secs() as i64).contains(&age.num_seconds()) {
            return Ok(());
        }
        let renewed = self.admin.refresh_checkpoint(self.made.id, Some(LIFETIME));
        in_time("keep a state of the metadata for longer", renewed).await?;
        *self.renewed_at.lock() = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::database::{Database, DatabaseOptions};
    use super::*;
    use block::env::{Clock as _, SystemClock as MachineClock};
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use slatedb::WriteBatch;
    use std::collections::BTreeSet;

    const MINUTE: Duration = Duration::from_secs(60);
    /// Maximum time that the test waits for a compaction or a collection.
    const WAIT_MAX: Duration = Duration::from_secs(120);

    async fn commit(db: &Database, number: u32) {
        let mut batch = WriteBatch::new();
        for key in 0..64_u32 {
            batch.put(key.to_be_bytes(), [number.to_be_bytes(), key.to_be_bytes()].concat());
        }
        db.write(batch).await.unwrap();
        db.flush().await.unwrap();
    }

    async fn is_there(store: &Arc<dyn ObjectStore>, path: &Path) -> bool {
        use object_store::ObjectStoreExt;
        store.head(path).await.is_ok()
    }

    /// Commits until the newest state contains no table of `old`.
    async fn replace_all(db: &Database, old: &BTreeSet<Path>, number: &mut u32) {
        let begun = MachineClock.now();
        while db.objects().tables.iter().any(|table| old.contains(table)) {
            assert!(MachineClock.since(begun) < WAIT_MAX, "nothing is compacted");
            *number += 1;
            commit(db, *number).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Reads a state some hours after all of its tables were replaced. Returns whether it was
    /// complete.
    async fn is_whole_after_hours(is_pinned: bool) -> bool {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let options = DatabaseOptions {
            poll_interval: Duration::from_millis(50),
            garbage_age: Duration::from_secs(4), // so that garbage is collected every second
            ..DatabaseOptions::default()
        };
        let db = Database::open(store.clone(), &options, None).await.unwrap();
        let mut number = 0;
        for _ in 0..3 {
            number += 1;
            commit(&db, number).await;
        }
        let read = number;
        let reader = match is_pinned {
            true => Database::read_pinned(store.clone(), &options).await.unwrap(),
            false => Database::read_only(store.clone(), &options).await.unwrap(),
        };
        let mine = reader.objects().tables;
        // The tables of states that are not being read show when the collector has run.
        for round in 0..12 {
            let old = db.objects().tables;
            replace_all(&db, &old, &mut number).await;
            options.clock.advance(20 * MINUTE);
            reader.keep_on().await;
            if round % 4 != 3 {
                continue;
            }
            let others: Vec<Path> = old.difference(&mine).cloned().collect();
            let begun = MachineClock.now();
            for table in others {
                while is_there(&store, &table).await {
                    assert!(MachineClock.since(begun) < WAIT_MAX, "{table} is not collected");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    reader.keep_on().await;
                    // The compactor's checkpoint keeps it, which ends after 15 minutes.
                    options.clock.advance(MINUTE);
                }
            }
        }
        let mut is_complete = true;
        for key in 0..64_u32 {
            match reader.get(&key.to_be_bytes()).await {
                Ok(found) => {
                    let wanted = [read.to_be_bytes(), key.to_be_bytes()].concat();
                    assert_eq!(found.as_deref(), Some(&wanted[..]), "of its own state");
                }
                Err(_) => is_complete = false,
            }
        }
        assert_eq!(is_complete, {
            let mut all = true;
            for table in &mine {
                all &= is_there(&store, table).await;
            }
            all
        });
        reader.close().await.unwrap();
        db.close().await.unwrap();
        is_complete
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn state_is_kept_only_while_it_is_read() {
        assert!(is_whole_after_hours(true).await);
        assert!(!is_whole_after_hours(false).await, "without a checkpoint it is collected");
    }

    #[tokio::test]
    async fn a_checkpoint_is_there_while_its_reader_is_open() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let options = DatabaseOptions::default();
        let db = Database::open(store.clone(), &options, None).await.unwrap();
        commit(&db, 1).await;
        let admin = AdminBuilder::new(FOLDER, store.clone()).build();
        let count = async || admin.list_checkpoints(None).await.unwrap().len();
        assert_eq!(count().await, 0);
        let reader = Database::read_pinned(store.clone(), &options).await.unwrap();
        assert_eq!(count().await, 1);
        let kept = &admin.list_checkpoints(None).await.unwrap()[0];
        assert_eq!(kept.manifest_id, reader.objects().manifest);
        assert!(kept.expire_time.is_some(), "it ends by itself");
        reader.close().await.unwrap();
        assert_eq!(count().await, 0);
        // The owner continues after manifests that it did not write.
        commit(&db, 2).await;
        db.close().await.unwrap();
    }
}
