//! Tests of the key ring.

use super::*;
use crate::chain::seal_document_with;
use crate::store::testing::{Fault, FaultyStore};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use tempfile::TempDir;

const RING_1: &str = "keyring/00000000000000000001";
const RING_2: &str = "keyring/00000000000000000002";

struct World {
    memory: Arc<FaultyStore>,
    store: Store,
    dir: TempDir,
}

impl World {
    fn new() -> World {
        let memory = FaultyStore::new(Fault::None);
        let store = memory.store();
        World { memory, store, dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self) -> KeySource {
        KeySource::File(self.path("spindle.key"))
    }

    async fn create(&self, source: &KeySource) -> KeyRing {
        KeyRing::open_or_create(&self.store, source).await.unwrap()
    }

    async fn open(&self, source: &KeySource) -> Result<KeyRing> {
        KeyRing::open(&self.store, source).await
    }
}

fn passphrase(text: &str) -> KeySource {
    KeySource::Passphrase(Secret::new(text.to_owned()))
}

fn same_keys(a: &KeyRing, b: &KeyRing) -> bool {
    a.pool() == b.pool() && a.newest().key.expose() == b.newest().key.expose()
}

#[tokio::test]
async fn a_key_file_is_made_on_first_use_and_opens_the_pool_again() {
    let world = World::new();
    let ring = world.create(&world.file()).await;
    let metadata = std::fs::metadata(world.path("spindle.key")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert!(!ring.has_recovery());
    let again = world.create(&world.file()).await;
    assert!(same_keys(&ring, &again));
    assert_eq!(world.memory.names().await, [RING_1]);
    // The data key is nowhere in the clear.
    let hex = to_hex(ring.newest().key.expose());
    let stored = world.memory.bytes(RING_1).await;
    assert!(!String::from_utf8_lossy(&stored).contains(&hex));
}

#[tokio::test]
async fn every_kind_of_secret_reopens_its_pool() {
    let world = World::new();
    std::fs::write(world.path("pass"), "correct horse\n").unwrap();
    let echo = vec!["/bin/echo".to_owned(), "kms secret 1".to_owned()];
    for (source, equal) in [
        (KeySource::PassphraseFile(world.path("pass")), passphrase("correct horse")),
        (KeySource::Command(echo.clone()), KeySource::Command(echo)),
    ] {
        let world = World::new();
        let ring = world.create(&source).await;
        assert!(same_keys(&ring, &world.open(&equal).await.unwrap()));
    }
    let file = std::fs::File::open(world.path("pass")).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&file).try_into().unwrap();
    assert_eq!(KeySource::PassphraseFd(number).passphrase().unwrap().expose(), "correct horse");
}

#[tokio::test]
async fn a_wrong_secret_is_an_error_and_changes_nothing() {
    let world = World::new();
    world.create(&passphrase("correct horse")).await;
    let before = world.memory.bytes(RING_1).await;
    let error = world.open(&passphrase("battery staple")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert!(error.to_string().contains("wrong passphrase"), "{error}");
    assert!(!error.chain().contains("battery"), "{}", error.chain());
    // A secret of another kind, and the key file of another pool.
    let other = World::new();
    other.create(&other.file()).await;
    let error = world.open(&other.file()).await.unwrap_err();
    assert!(error.to_string().contains("not opened by a key file"), "{error}");
    let third = World::new();
    third.create(&third.file()).await;
    let error = third.open(&other.file()).await.unwrap_err();
    assert!(error.to_string().contains("wrong key file"), "{error}");
    let error = KeyRing::open_or_create(&world.store, &passphrase("battery staple")).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(world.memory.bytes(RING_1).await, before);
    assert_eq!(world.memory.names().await, [RING_1]);
}

#[tokio::test]
async fn missing_key_file_is_reported_and_not_recreated() {
    let world = World::new();
    world.create(&world.file()).await;
    std::fs::remove_file(world.path("spindle.key")).unwrap();
    let error = KeyRing::open_or_create(&world.store, &world.file()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("--recovery-key-file"), "{error}");
    assert!(!world.path("spindle.key").exists());
}

#[tokio::test]
async fn a_pool_that_lost_its_ring_gets_no_new_one() {
    let world = World::new();
    world.memory.set("segments/0/1", "x").await;
    let error = KeyRing::open_or_create(&world.store, &world.file()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("key ring is gone"), "{error}");
    assert!(!world.path("spindle.key").exists());
}

#[tokio::test]
async fn the_recovery_key_opens_the_pool_when_all_else_is_lost() {
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    let printed = ring.add_recovery(false).await.unwrap();
    assert!(ring.has_recovery());
    std::fs::remove_file(world.path("spindle.key")).unwrap();
    std::fs::write(
        world.path("recovery"),
        format!("# from the safe\n {} \n", printed.expose().to_lowercase()),
    )
    .unwrap();
    let source = KeySource::RecoveryFile(world.path("recovery"));
    let mut recovered = world.open(&source).await.unwrap();
    assert!(same_keys(&ring, &recovered));
    // And back to a new key file; the recovery key stays valid.
    let path = world.path("spindle.key");
    recovered.rotate(&NewKey::File { path }).await.unwrap();
    assert!(same_keys(&ring, &world.open(&world.file()).await.unwrap()));
    assert!(same_keys(&ring, &world.open(&source).await.unwrap()));
    // A typing error is reported as one.
    let typo = printed.expose().replacen(&printed.expose()[20..21], "Z", 1);
    let typo = if typo == printed.expose() { typo.replacen('Z', "Y", 1) } else { typo };
    std::fs::write(world.path("recovery"), typo).unwrap();
    let error = world.open(&source).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{}", error.chain());
    assert!(!error.chain().contains(&printed.expose()[24..40]), "{}", error.chain());
}

#[tokio::test]
async fn replacing_the_recovery_key_ends_the_earlier_ones() {
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    let mut printed = Vec::new();
    for _ in 0..RECOVERY_COUNT_MAX {
        printed.push(ring.add_recovery(false).await.unwrap());
    }
    let error = ring.add_recovery(false).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.to_string().contains("--replace"), "{error}");
    printed.push(ring.add_recovery(true).await.unwrap());
    for (index, key) in printed.iter().enumerate() {
        let path = world.path("recovery");
        std::fs::write(&path, key.expose()).unwrap();
        let outcome = world.open(&KeySource::RecoveryFile(path)).await;
        assert_eq!(outcome.is_ok(), index == RECOVERY_COUNT_MAX, "{index}");
    }
    // Everything that an earlier key could open is gone from the store.
    assert_eq!(world.memory.names().await.len(), 1);
}

#[tokio::test]
async fn a_rotation_in_place_makes_the_old_key_useless() {
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    std::fs::copy(world.path("spindle.key"), world.path("old.key")).unwrap();
    let path = world.path("spindle.key");
    ring.rotate(&NewKey::File { path: path.clone() }).await.unwrap();
    assert!(!next_path(&path).exists());
    assert!(same_keys(&ring, &world.open(&world.file()).await.unwrap()));
    let old = KeySource::File(world.path("old.key"));
    assert_eq!(world.open(&old).await.unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(world.memory.names().await, [RING_2]);
}

#[tokio::test]
async fn a_rotation_cut_short_leaves_a_pool_that_opens() {
    // Killed after the ring was written, before the file was renamed.
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    let (path, next) = (world.path("spindle.key"), next_path(&world.path("spindle.key")));
    source::make_key_file(&next).unwrap();
    ring.rotate_to(&KeySource::File(next.clone())).await.unwrap();
    let opened = world.open(&world.file()).await.unwrap();
    assert!(same_keys(&ring, &opened));
    assert!(!next.exists() && path.exists());
    assert!(world.open(&world.file()).await.is_ok());
    // Killed before the ring was written: the old key still opens, and the next rotation works.
    source::make_key_file(&next).unwrap();
    let mut ring = world.open(&world.file()).await.unwrap();
    ring.rotate(&NewKey::File { path: path.clone() }).await.unwrap();
    assert!(!next.exists());
    assert!(world.open(&world.file()).await.is_ok());
    // Killed while the next key file was being made.
    std::fs::write(&next, "SPINDLE-KEY-1-AB").unwrap();
    let mut ring = world.open(&world.file()).await.unwrap();
    ring.rotate(&NewKey::File { path }).await.unwrap();
    assert!(!next.exists());
    assert!(world.open(&world.file()).await.is_ok());
}

#[tokio::test]
async fn rotation_between_kinds_and_weak_passphrases() {
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    let weak = NewKey::Passphrase { secret: Secret::new("short".to_owned()) };
    assert_eq!(ring.rotate(&weak).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(world.open(&world.file()).await.is_ok());
    let strong = NewKey::Passphrase { secret: Secret::new("correct horse".to_owned()) };
    let rotated = ring.rotate(&strong).await.unwrap();
    assert!(rotated.message.contains("--passphrase-file"));
    assert!(same_keys(&ring, &world.open(&passphrase("correct horse")).await.unwrap()));
    assert_eq!(world.open(&world.file()).await.unwrap_err().kind(), ErrorKind::Denied);
    // A key file that exists and is not in use is used unchanged.
    let path = world.path("spindle.key");
    let before = std::fs::read(&path).unwrap();
    ring.rotate(&NewKey::File { path: path.clone() }).await.unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert!(world.open(&world.file()).await.is_ok());
}

#[tokio::test]
async fn change_by_another_process_is_adopted_and_not_overwritten() {
    let world = World::new();
    let mut first = world.create(&world.file()).await;
    let mut second = world.open(&world.file()).await.unwrap();
    let one = first.add_recovery(false).await.unwrap();
    let two = second.add_recovery(false).await.unwrap();
    assert_eq!(second.slots().len(), 3);
    for key in [one, two] {
        std::fs::write(world.path("recovery"), key.expose()).unwrap();
        world.open(&KeySource::RecoveryFile(world.path("recovery"))).await.unwrap();
    }
    // A ring that is not authentic is not accepted.
    let mut forged = second.body.clone();
    forged.number += 1;
    forged.slots.clear();
    let forged = seal_document(&PoolKey::new([9; 32]), PURPOSE, &forged).unwrap();
    world.memory.set("keyring/00000000000000000004", forged).await;
    assert_eq!(first.add_recovery(false).await.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn a_rotation_whose_outcome_is_unknown_never_loses_the_key() {
    for seed in 0..40 {
        let memory = FaultyStore::new(Fault::Ambiguous(seed));
        let store = memory.store();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spindle.key");
        let source = KeySource::File(path.clone());
        let mut ring = loop {
            if let Ok(ring) = KeyRing::open_or_create(&store, &source).await {
                break ring;
            }
        };
        for _ in 0..6 {
            // Whatever the result, the existing files open the pool.
            let _ = ring.rotate(&NewKey::File { path: path.clone() }).await;
            let opened = KeyRing::open(&store, &source).await;
            let opened = opened.unwrap_or_else(|error| panic!("SEED={seed}: {}", error.chain()));
            assert!(same_keys(&ring, &opened), "SEED={seed}");
        }
    }
}

#[tokio::test]
async fn nodes_that_make_the_pool_at_the_same_moment_agree_on_one_ring() {
    let world = World::new();
    let mut tasks = tokio::task::JoinSet::new();
    for index in 0..8 {
        let (store, path) = (world.store.clone(), world.path(&format!("{index}.key")));
        tasks.spawn(async move { KeyRing::open_or_create(&store, &KeySource::File(path)).await });
    }
    let outcomes = tasks.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert_eq!(world.memory.names().await, [RING_1]);
}

#[tokio::test]
async fn damage_is_distinguished_from_a_wrong_key() {
    let world = World::new();
    world.create(&world.file()).await;
    let bytes = world.memory.bytes(RING_1).await;
    for at in (0..bytes.len()).step_by(5) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 4;
        world.memory.set(RING_1, flipped).await;
        let error = world.open(&world.file()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at}: {error}");
        assert!(error.to_string().contains(RING_1), "{error}");
    }
    for cut in [0, 1, bytes.len() / 2, bytes.len() - 1] {
        world.memory.set(RING_1, bytes.slice(..cut)).await;
        assert_eq!(world.open(&world.file()).await.unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[tokio::test]
async fn key_slots_cannot_be_changed_without_a_key() {
    let world = World::new();
    let mut ring = world.create(&world.file()).await;
    ring.add_recovery(false).await.unwrap();
    let other = World::new();
    let mut foreign = other.create(&other.file()).await;
    foreign.add_recovery(false).await.unwrap();
    let honest = ring.body.clone();
    let forged_seal_key = PoolKey::new([9; 32]);
    let mut dropped = honest.clone();
    dropped.slots.pop();
    let mut added = honest.clone();
    added.slots.push(foreign.body.slots[1].clone());
    let mut cheaper = honest.clone();
    cheaper.slots[0].created_at += 1;
    let mut moved = honest.clone();
    moved.pool = foreign.pool();
    for (what, body) in
        [("dropped", dropped), ("added", added), ("cheaper", cheaper), ("moved", moved)]
    {
        // A valid checksum, and a seal under a key that the forger has.
        let forged = seal_document(&forged_seal_key, PURPOSE, &body).unwrap();
        world.memory.set(RING_2, forged).await;
        let error = world.open(&world.file()).await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Denied),
            "{what}: {}",
            error.chain()
        );
    }
}

#[tokio::test]
async fn absurd_costs_in_a_forged_ring_are_not_paid() {
    let world = World::new();
    let ring = world.create(&passphrase("correct horse")).await;
    let mut body = ring.body.clone();
    body.slots[0].argon2 =
        Some(Argon2Cost { memory_kib: u32::MAX, pass_count: u32::MAX, lane_count: 1 });
    let forged = seal_document(&ring.newest().key, PURPOSE, &body).unwrap();
    world.memory.set(RING_1, forged).await;
    assert!(world.open(&passphrase("correct horse")).await.is_err());
}

#[tokio::test]
async fn key_files_and_commands_that_are_wrong_say_so() {
    let world = World::new();
    let path = world.path("k");
    for (text, word) in [
        ("", "no key"),
        ("# only a comment\n", "no key"),
        ("hunter2hunter2", "does not start with"),
        ("SPINDLE-KEY-1-AAAA", "of 56 characters"),
        ("a\nb\n", "more than one line"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = KeySource::File(path.clone()).load().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(word), "{text}: {error}");
        assert!(!error.chain().contains("hunter2"), "{}", error.chain());
    }
    std::fs::write(&path, vec![b'x'; 10_000]).unwrap();
    assert!(KeySource::PassphraseFile(path).passphrase().is_err());
    let command =
        |words: &[&str]| KeySource::Command(words.iter().map(|word| (*word).to_owned()).collect());
    for (source, word) in [
        (command(&[]), "empty"),
        (command(&["/nonexistent/kms"]), "/nonexistent/kms"),
        (command(&["/bin/sh", "-c", "echo hunter2hunter2; exit 3"]), "failed"),
        (command(&["/bin/true"]), "empty"),
    ] {
        let error = source.load().await.unwrap_err();
        assert!(error.chain().contains(word), "{}", error.chain());
        assert!(!error.chain().contains("hunter2"), "{}", error.chain());
    }
    let error = KeySource::PassphraseEnv("SPINDLE_TEST_UNSET".to_owned()).passphrase().unwrap_err();
    assert!(error.to_string().contains("SPINDLE_TEST_UNSET"));
    assert!(KeySource::PassphraseFd(9999).passphrase().is_err());
}

#[tokio::test]
async fn secrets_are_never_printed() {
    let world = World::new();
    let mut ring = world.create(&passphrase("correct horse")).await;
    let printed = ring.add_recovery(false).await.unwrap();
    let material = passphrase("correct horse").load().await.unwrap();
    let key_hex = to_hex(ring.newest().key.expose());
    let key_debug = format!("{:?}", &ring.newest().key.expose()[..4]);
    for text in [
        format!("{:?}", passphrase("correct horse")),
        format!("{:?}", NewKey::Passphrase { secret: Secret::new("correct horse".to_owned()) }),
        format!("{material:?}"),
        format!("{printed:?}"),
        format!("{ring:?}"),
    ] {
        for secret in [
            "correct",
            "horse",
            &printed.expose()[19..30],
            &key_hex,
            key_debug.trim_matches(['[', ']']),
        ] {
            assert!(!text.contains(secret), "{text}");
        }
    }
}

/// A ring with every kind of slot in version 1, from `testdata/`. Files are added with each
/// version, never edited. It is opened by the key file and the recovery key next to it, and by this
/// passphrase.
const GOLDEN_PASSPHRASE: &str = "correct horse battery staple";
const GOLDEN_RING: &str = include_str!("../../testdata/keyring-v1.txt");
const GOLDEN_KEY_FILE: &str = include_str!("../../testdata/key-file-v1.txt");
const GOLDEN_RECOVERY: &str = include_str!("../../testdata/recovery-key-v1.txt");

async fn golden_ring() -> (RingBody, Vec<DataKey>, bytes::Bytes) {
    let data_keys = [(1, 0x11), (2, 0x22)];
    let data_keys = data_keys.map(|(id, byte)| DataKey { id, key: PoolKey::new([byte; 32]) });
    let secret = Secret::new(GOLDEN_PASSPHRASE.to_owned());
    // A low cost, which shows that the cost is read from the slot.
    let cost = Argon2Cost { memory_kib: 64, pass_count: 2, lane_count: 1 };
    let phrase = |kind| (Material::Phrase(kind, secret.clone()), Some(cost));
    let key = |kind, byte| (Material::Key(kind, Zeroizing::new([byte; 32])), None);
    let mut body = RingBody {
        format: Format::CURRENT,
        pool: Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10),
        number: 7,
        is_apart: false,
        nonce: "f0".repeat(16),
        slots: Vec::new(),
    };
    for (id, (material, argon2)) in (1..).zip([
        key(SlotKind::KeyFile, 0x44),
        phrase(SlotKind::Passphrase),
        phrase(SlotKind::Command),
        key(SlotKind::Recovery, 0x55),
    ]) {
        let slot = Slot {
            id,
            kind: material.kind(),
            created_at: 1_700_000_000 + u64::from(id),
            salt: format!("a{id}").repeat(16),
            argon2,
            nonce: format!("b{id}").repeat(12),
            sealed: String::new(),
        };
        body.slots.push(wrap(&body, slot, &material, &data_keys).await.unwrap());
    }
    let salt = [0xc0; SALT_BYTES];
    let bytes = seal_document_with(salt, &data_keys[1].key, PURPOSE, &body).unwrap();
    (body, data_keys.into(), bytes)
}

#[tokio::test]
async fn golden_key_ring_of_version_1() {
    let (body, data_keys, written) = golden_ring().await;
    let (key_file, recovery) = [("SPINDLE-KEY-1", 0x44), (RECOVERY_PREFIX, 0x55)]
        .map(|(prefix, byte)| printed::encode(prefix, &[byte; 32]))
        .into();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        println!("{}{}\n{}", std::str::from_utf8(&written).unwrap(), *key_file, *recovery);
        return;
    }
    assert_eq!(written, GOLDEN_RING);
    assert_eq!(*key_file, GOLDEN_KEY_FILE.trim_end());
    assert_eq!(*recovery, GOLDEN_RECOVERY.trim_end());
    let world = World::new();
    world.memory.set("keyring/00000000000000000007", GOLDEN_RING).await;
    for (name, text) in [("spindle.key", GOLDEN_KEY_FILE), ("recovery", GOLDEN_RECOVERY)] {
        std::fs::write(world.path(name), text).unwrap();
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(world.path(name), mode).unwrap();
    }
    for source in [
        world.file(),
        passphrase(GOLDEN_PASSPHRASE),
        KeySource::Command(vec!["echo".to_owned(), GOLDEN_PASSPHRASE.to_owned()]),
        KeySource::RecoveryFile(world.path("recovery")),
    ] {
        let ring = world.open(&source).await.unwrap();
        assert_eq!(ring.body, body, "{source:?}");
        let keys = |keys: &[DataKey]| -> Vec<_> {
            keys.iter().map(|entry| (entry.id, *entry.key.expose())).collect()
        };
        assert_eq!(keys(ring.data_keys()), keys(&data_keys), "{source:?}");
    }
}

#[tokio::test]
async fn untypable_passphrases_open_existing_pools_but_create_none() {
    let odd = [
        ("\u{feff}correct horse", "a byte order mark"),
        ("correct horse\r", "a carriage return"),
        ("correct\0horse", "a NUL character"),
        (" correct horse", "begins or ends with a blank"),
        ("correct horse\t", "begins or ends with a blank"),
        ("correct \u{1b}horse", "a control character"),
    ];
    for (secret, why) in odd {
        let world = World::new();
        let error = KeyRing::open_or_create(&world.store, &passphrase(secret)).await.unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains(why), "{error}");
        assert!(!error.to_string().contains("horse"), "{error}");
        assert_eq!(world.memory.names().await, Vec::<String>::new());
        let mut ring = world.create(&passphrase("correct horse staple")).await;
        let new = NewKey::Passphrase { secret: Secret::new(secret.to_owned()) };
        assert_eq!(ring.rotate(&new).await.unwrap_err().kind(), ErrorKind::Invalid);
        // Like an earlier program has made it.
        let material = Material::Phrase(SlotKind::Passphrase, Secret::new(secret.to_owned()));
        let slot = make_slot(&ring.body, &material, &ring.data_keys).await.unwrap();
        ring.body.slots.push(slot);
        ring.body.number += 1;
        let number = ring.body.number;
        let made = ring.chain.create(number, &ring.sealed().unwrap()).await.unwrap();
        assert!(matches!(made, Created::Ours));
        assert!(same_keys(&ring, &world.open(&passphrase(secret)).await.unwrap()), "{why}");
    }
    let fine = World::new();
    fine.create(&passphrase("größer, mit Blank in der Mitte")).await;
}

#[tokio::test]
async fn folder_markers_alone_do_not_prevent_a_new_pool() {
    use object_store::ObjectStoreExt;
    let memory = FaultyStore::new(Fault::None);
    let store = memory.store();
    let put = async |name: &str, bytes: &'static [u8]| {
        let path = object_store::path::Path::from(name);
        store.control().put(&path, bytes.into()).await.unwrap();
    };
    put("segments/marker", b"").await;
    check_empty(&store).await.unwrap();
    put("segments/data", b"x").await;
    assert_eq!(check_empty(&store).await.unwrap_err().kind(), ErrorKind::Corrupt);
    // A ring that no listing shows is not gone.
    put("keyring/00000000000000000003", b"x").await;
    let error = check_empty(&store).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
}

/// The process that made it may have been killed before it was on stable storage.
#[test]
fn key_file_is_synced_before_use_and_nonfiles_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("spindle.key");
    assert_eq!(source::make_durable(&path).unwrap_err().kind(), ErrorKind::Io, "it is missing");
    source::make_key_file(&path).unwrap();
    source::make_durable(&path).unwrap();
    // Opening one would wait for a writer.
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    source::make_durable(&pipe).unwrap();
}
