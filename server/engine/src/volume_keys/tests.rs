//! Keys of volumes in stores that misbehave, and under changing owners.

use super::*;
use block::VolumeId;
use control::chain::{Document, seal_document_with};
use control::store::testing::{Fault, FaultyStore};

const POOL: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
const GOLDEN: &str = include_str!("../../testdata/volumekeys-v1.txt");

fn key() -> PoolKey {
    PoolKey::new([0x42; 32])
}

async fn open(store: &Store, epoch: u64) -> Result<VolumeKeyRing> {
    VolumeKeyRing::open(store, &key(), POOL, Epoch(epoch)).await
}

async fn bytes_of(store: &Store, id: u32) -> Option<[u8; 32]> {
    let state = read(store, &key(), POOL).await.unwrap();
    state.keys.get(&KeyId(id)).map(|secret| *secret.expose())
}

async fn documents(faulty: &FaultyStore) -> usize {
    faulty.names().await.iter().filter(|name| name.starts_with("volumekeys/")).count()
}

fn only(id: u32) -> BTreeSet<KeyId> {
    BTreeSet::from([KeyId(id)])
}

#[test]
fn golden_documents_of_version_1() {
    let mut state = State { number: 7, epoch: 3, destroyed_in: 5, ..State::default() };
    let mut text = String::new();
    for keys in [vec![], vec![(2, [0x11; 32]), (300, [0x22; 32])]] {
        state.keys = keys.iter().map(|(id, key)| (KeyId(*id), PoolKey::new(*key))).collect();
        let mut body = body_of(&key(), POOL, &state, [0xa5; SALT_BYTES]);
        body.nonce = "f0".repeat(16);
        let bytes = seal_document_with([0xc0; SALT_BYTES], &key(), FOLDER, &body).unwrap();
        let document = Document::parse("volumekeys", &bytes).unwrap();
        document.verify(&key(), FOLDER).unwrap();
        assert!(document.verify(&key(), "keyring").is_err(), "each has a purpose of its own");
        let read = keys_of("volumekeys", &key(), &document.body::<Body>().unwrap()).unwrap();
        assert_eq!(read.len(), keys.len());
        for (id, key) in keys {
            assert_eq!(read[&KeyId(id)].expose(), &key);
        }
        text += std::str::from_utf8(&bytes).unwrap();
    }
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        print!("{text}");
    }
    assert_eq!(text, GOLDEN);
}

#[test]
fn keys_open_in_their_own_document_only() {
    let mut state = State { number: 7, epoch: 3, ..State::default() };
    state.keys.insert(KeyId(2), PoolKey::new([0x11; 32]));
    let body = body_of(&key(), POOL, &state, [0xa5; SALT_BYTES]);
    assert!(!body.sealed.contains(&"11".repeat(32)), "they are sealed");
    keys_of("x", &key(), &body).unwrap();
    assert!(keys_of("x", &PoolKey::new([1; 32]), &body).is_err());
    let elsewhere = [
        Body { number: 8, ..body.clone() },
        Body { epoch: 4, ..body.clone() },
        Body { pool: Uuid::nil(), ..body.clone() },
        Body { sealed: body.sealed[2..].to_owned(), ..body.clone() },
        Body { sealed: String::new(), ..body.clone() },
        Body { salt: "zz".to_owned(), ..body.clone() },
    ];
    for other in elsewhere {
        assert_eq!(keys_of("x", &key(), &other).unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[tokio::test]
async fn the_most_keys_fit_a_document() {
    let faulty = FaultyStore::new(Fault::None);
    let store = faulty.store();
    let ring = open(&store, 1).await.unwrap();
    {
        let mut state = ring.state.lock().await;
        let keys: Keys =
            (1..COUNT_MAX as u32).map(|id| (KeyId(id), PoolKey::new([9; 32]))).collect();
        ring.write(&mut state, Some((keys, false))).await.unwrap();
    }
    ring.make(5000).await.unwrap();
    assert_eq!(read(&store, &key(), POOL).await.unwrap().keys.len(), COUNT_MAX);
    assert_eq!(ring.make(5001).await.unwrap_err().kind(), ErrorKind::Full);
    assert!(!ring.table().has(KeyId(5001)) && bytes_of(&store, 5001).await.is_none());
}

#[tokio::test]
async fn a_destroyed_key_is_in_no_document() {
    let faulty = FaultyStore::new(Fault::None);
    let store = faulty.store();
    assert_eq!(open(&store, 1).await.unwrap().table().ids().len(), 0);
    assert_eq!(documents(&faulty).await, 0, "a pool without such keys has none");
    let ring = open(&store, 2).await.unwrap();
    for id in [3, 5, 9] {
        ring.make(id).await.unwrap();
    }
    assert_eq!(documents(&faulty).await, KEEP_COUNT);
    let kept = bytes_of(&store, 5).await.unwrap();
    ring.destroy(&only(3)).await.unwrap();
    assert_eq!((documents(&faulty).await, ring.destroyed_in()), (1, 4));
    assert!(bytes_of(&store, 3).await.is_none());
    // Repeated, and for a key that never existed: nothing is written.
    ring.destroy(&only(3)).await.unwrap();
    ring.destroy(&only(77)).await.unwrap();
    assert_eq!(ring.destroyed_in(), 4);
    drop(ring);
    let ring = open(&store, 3).await.unwrap();
    assert_eq!((ring.table().ids().len(), ring.destroyed_in()), (2, 4));
    assert_eq!(bytes_of(&store, 5).await, Some(kept));
    ring.destroy(&BTreeSet::new()).await.unwrap();
    assert_eq!(documents(&faulty).await, 1, "what an earlier owner may have left is deleted");
}

#[tokio::test]
async fn an_earlier_owner_neither_destroys_nor_makes_keys() {
    let store = FaultyStore::new(Fault::None).store();
    let first = open(&store, 1).await.unwrap();
    first.make(3).await.unwrap();
    let second = open(&store, 2).await.unwrap();
    let kept = bytes_of(&store, 3).await;
    assert_eq!(first.destroy(&only(3)).await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(first.make(4).await.unwrap_err().kind(), ErrorKind::Fenced);
    assert_eq!(bytes_of(&store, 3).await, kept);
    assert!(kept.is_some() && second.table().has(KeyId(3)));
    assert!(matches!(open(&store, 1).await, Err(error) if error.kind() == ErrorKind::Fenced));
    second.make(4).await.unwrap();
}

/// Every answer may be wrong about the outcome. A key that was reported as made exists, and one
/// that was reported as destroyed does not.
#[tokio::test]
async fn reported_key_changes_hold_when_answers_get_lost() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().expect("SEED is a number")],
        Err(_) => (1..=20u64).collect(),
    };
    for seed in seeds {
        let faulty = FaultyStore::new(Fault::Ambiguous(seed));
        let store = faulty.store();
        let mut random = seed;
        let mut below = |end: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % end
        };
        let mut known: BTreeMap<u32, [u8; 32]> = BTreeMap::new();
        let mut gone: BTreeSet<u32> = BTreeSet::new();
        for epoch in 1..6 {
            let Ok(ring) = open(&store, epoch).await else { continue };
            for _ in 0..8 {
                let id = 1 + below(12) as u32;
                let is_known = known.contains_key(&id);
                if is_known {
                    if ring.destroy(&only(id)).await.is_ok() {
                        known.remove(&id);
                        gone.insert(id);
                    } else if below(2) == 0 {
                        // The outcome is open; the caller keeps trying.
                        while ring.destroy(&only(id)).await.is_err() {}
                        known.remove(&id);
                        gone.insert(id);
                    } else {
                        known.remove(&id);
                    }
                } else if ring.make(id).await.is_ok() {
                    let secret = *ring.state.lock().await.keys[&KeyId(id)].expose();
                    known.insert(id, secret);
                    gone.remove(&id);
                } else {
                    gone.remove(&id);
                }
                for (id, bytes) in &known {
                    assert_eq!(bytes_of(&store, *id).await, Some(*bytes), "SEED={seed} {id}");
                }
                for id in &gone {
                    assert!(bytes_of(&store, *id).await.is_none(), "SEED={seed} {id}");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_copy_gets_the_newest_document_alone() {
    let (pool, there) = (FaultyStore::new(Fault::None), FaultyStore::new(Fault::None));
    let (store, copy_store) = (pool.store(), there.store());
    assert_eq!(copy(&store, &copy_store).await.unwrap(), None);
    let ring = open(&store, 1).await.unwrap();
    ring.make(3).await.unwrap();
    assert_eq!(copy(&store, &copy_store).await.unwrap(), Some(1));
    ring.make(4).await.unwrap();
    ring.destroy(&only(3)).await.unwrap();
    assert_eq!(copy(&store, &copy_store).await.unwrap(), Some(ring.destroyed_in()));
    assert_eq!(documents(&there).await, 1);
    assert!(bytes_of(&copy_store, 3).await.is_none() && bytes_of(&copy_store, 4).await.is_some());
    // Keys of an owner that has lost the pool.
    let stale = FaultyStore::new(Fault::None).store();
    open(&stale, 1).await.unwrap().make(9).await.unwrap();
    assert_eq!(copy(&stale, &copy_store).await.unwrap_err().kind(), ErrorKind::Busy);
    let table = load(&copy_store, &key(), POOL).await.unwrap();
    assert_eq!((table.ids().len(), table.of(VolumeId(4))), (1, KeyId::POOL));
}

#[tokio::test]
async fn a_restored_pool_is_not_behind_the_owners_that_the_first_one_had_since() {
    let (copy, new) = (FaultyStore::new(Fault::None), FaultyStore::new(Fault::None));
    let (from, to) = (copy.store(), new.store());
    let ring = open(&from, 9).await.unwrap();
    ring.make(3).await.unwrap();
    ring.make(5).await.unwrap();
    ring.destroy(&only(3)).await.unwrap();
    // The restored state is of epoch 4; an interrupted restore is repeated.
    for _ in 0..2 {
        bring(&from, &to, (&key(), POOL), 4).await.unwrap();
        let brought = read(&to, &key(), POOL).await.unwrap();
        assert_eq!((brought.number, brought.epoch), (ring.state.lock().await.number, 4));
        assert_eq!(bytes_of(&to, 5).await, bytes_of(&from, 5).await);
        assert!(bytes_of(&to, 3).await.is_none());
        assert_eq!(documents(&new).await, 1);
    }
    // A key that is made meanwhile is brought, too, and no earlier one stays.
    ring.make(7).await.unwrap();
    bring(&from, &to, (&key(), POOL), 4).await.unwrap();
    assert_eq!(bytes_of(&to, 7).await, bytes_of(&from, 7).await);
    assert_eq!(documents(&new).await, 1);
    let opened = open(&to, 5).await.unwrap();
    assert_eq!(opened.table().ids().len(), 2);
    // The new pool has changed its keys: the copy's do not replace them.
    opened.make(11).await.unwrap();
    assert_eq!(bring(&from, &to, (&key(), POOL), 4).await.unwrap_err().kind(), ErrorKind::Busy);
    assert!(bytes_of(&to, 11).await.is_some());
    // A copy without such keys has no document, and the pool gets none.
    bring(&FaultyStore::new(Fault::None).store(), &to, (&key(), POOL), 4).await.unwrap();
}
