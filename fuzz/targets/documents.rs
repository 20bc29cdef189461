//! The sealed documents of a pool, read through a store in memory as the daemon reads them.
//!
//! Invariants:
//! - Each is read with a broken seal and with a valid one under the pool's key.
//! - The object has the number that the valid document names.

use crate::seals::seal_document;
use crate::{LARGE, dir_in_memory, runtime, write};
use block::Result;
use block::seal::PoolKey;
use control::keys::{KeyRing, KeySource};
use control::manifest;
use control::store::Store;
use control::store::testing::{Fault, FaultyStore};
use engine::copies::list;
use engine::{restore, scrub, volume_keys};
use fuzz::{Outcome, Target, corpus};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use uuid::Uuid;

/// The pool of the golden documents of the engine.
pub const POOL: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
/// Inputs are bounded by far less than a document may have, so that a run is quick.
const INPUT_BYTES_MAX: usize = 16 << 10;

/// The key of the golden documents of the engine.
pub fn pool_key() -> PoolKey {
    PoolKey::new([0x42; 32])
}

/// A kind of document.
pub struct Kind {
    /// Name of the target.
    pub name: &'static str,
    /// The golden documents.
    pub inputs: Vec<Vec<u8>>,
    /// Key of the seal.
    pub key: PoolKey,
    /// Purpose of the seal.
    pub purpose: &'static str,
    /// Name of the object.
    pub object: &'static str,
    /// Executions of a run in CI.
    pub execution_count: u64,
}

impl Kind {
    /// Runs the target. `read` gets a store with the document, and returns whether it was taken.
    pub fn check<F: Future<Output = Result<bool>>>(self, read: impl Fn(Store) -> F) {
        let runtime = runtime();
        let decode = |input: &[u8]| {
            runtime.block_on(async {
                let objects = FaultyStore::new(Fault::None);
                objects.set(self.object, input.to_vec()).await;
                match read(objects.store()).await {
                    Ok(true) => Outcome::Accepted,
                    Ok(false) => Outcome::Refused("it says nothing".to_owned()),
                    Err(error) => Outcome::Refused(error.chain()),
                }
            })
        };
        for input in &self.inputs {
            let mut sealed = input.clone();
            seal_document(&mut sealed, &self.key, self.purpose);
            assert_eq!(decode(&sealed), Outcome::Accepted, "{}", self.name);
        }
        Target {
            name: self.name,
            inputs: self.inputs,
            repair: &|input| seal_document(input, &self.key, self.purpose),
            decode: &decode,
            execution_count: self.execution_count,
            input_bytes_max: INPUT_BYTES_MAX,
            allocation: LARGE,
        }
        .check();
    }
}

/// Returns the documents of a golden file whose first line has this number.
pub fn numbered(path: &str, number: u64) -> Vec<Vec<u8>> {
    let mark = format!("\"number\":{number},");
    let documents = corpus::documents(path).into_iter();
    documents.filter(|document| String::from_utf8_lossy(document).contains(&mark)).collect()
}

#[test]
fn manifest() {
    Kind {
        name: "manifest",
        inputs: corpus::documents("server/control/testdata/manifest-v1.txt"),
        key: pool_key(),
        purpose: "manifest",
        object: "manifest/00000000000000000012",
        execution_count: 15_000,
    }
    .check(async |store: Store| {
        // The purge of a pool reads it without a key.
        let unverified = manifest::read_unverified(&store).await;
        let read = manifest::read(&store, &pool_key()).await?;
        assert_eq!(read.as_ref(), unverified?.as_ref());
        Ok(read.is_some())
    });
}

/// Writes a golden key file where a key source reads it.
fn key_file(dir: &Path, name: &str) -> KeySource {
    let (path, golden) = (dir.join(name), format!("server/control/testdata/{name}-v1.txt"));
    write(path.clone(), corpus::text(&golden).as_bytes());
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("the file is ours");
    match name {
        "key-file" => KeySource::File(path),
        _ => KeySource::RecoveryFile(path),
    }
}

#[test]
fn key_ring() {
    let dir = dir_in_memory();
    let sources = ["key-file", "recovery-key"].map(|name| key_file(dir.path(), name));
    Kind {
        name: "key_ring",
        inputs: corpus::documents("server/control/testdata/keyring-v1.txt"),
        key: PoolKey::new([0x22; 32]),
        purpose: "keyring",
        object: "keyring/00000000000000000007",
        execution_count: 10_000,
    }
    .check(async |store: Store| {
        let recovered = KeyRing::open(&store, &sources[1]).await.is_ok();
        let ring = KeyRing::open(&store, &sources[0]).await?;
        assert!(!ring.data_keys().is_empty() && !ring.slots().is_empty());
        Ok(recovered || ring.newest().id > 0)
    });
}

#[test]
fn volume_key_ring() {
    Kind {
        name: "volume_key_ring",
        inputs: corpus::documents("server/engine/testdata/volumekeys-v1.txt"),
        key: pool_key(),
        purpose: volume_keys::FOLDER,
        object: "volumekeys/00000000000000000007",
        execution_count: 15_000,
    }
    .check(async |store: Store| {
        let (keys, _) = volume_keys::load_with_destroyed(&store, &pool_key(), POOL).await?;
        assert!(keys.ids().len() <= volume_keys::COUNT_MAX);
        Ok(true)
    });
}

#[test]
fn scrub_record() {
    Kind {
        name: "scrub_record",
        inputs: corpus::documents("server/engine/testdata/scrub-v1.txt"),
        key: pool_key(),
        purpose: scrub::FOLDER,
        object: "scrub/00000000000000000004",
        execution_count: 15_000,
    }
    .check(async |store: Store| {
        let record = scrub::read(&store, &pool_key(), POOL).await?;
        // The condition and the time of the next run are made of any record.
        scrub::show_bad(&block::Conditions::default(), record.as_ref());
        Ok(record.map(|record| record.next_at()).is_some())
    });
}

#[test]
fn copy_list() {
    Kind {
        name: "copy_list",
        inputs: numbered("server/engine/testdata/copies-v1.txt", 3)
            .into_iter()
            .filter(|document| String::from_utf8_lossy(document).contains("\"copies\":"))
            .collect(),
        key: pool_key(),
        purpose: list::FOLDER,
        object: "copies/00000000000000000003",
        execution_count: 15_000,
    }
    .check(async |store: Store| list::read(&store, &pool_key(), POOL).await.map(|_| true));
}

#[test]
fn restore_origin() {
    Kind {
        name: "restore_origin",
        inputs: corpus::documents("server/engine/testdata/copies-v1.txt")
            .into_iter()
            .filter(|document| String::from_utf8_lossy(document).contains("\"is_complete\":"))
            .collect(),
        key: pool_key(),
        purpose: restore::FOLDER,
        object: "origin/00000000000000000001",
        execution_count: 15_000,
    }
    .check(async |store: Store| {
        restore::read(&store, &pool_key(), POOL).await.map(|origin| origin.is_some())
    });
}
