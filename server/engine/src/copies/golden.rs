//! The documents of copies and restores in version 1.

use super::list;
use super::list::{CopySpec, ListBody, Published};
use super::target::{HEAT, HeatBody, IDENTITY, Identity, PINS, PinBody, STATES, StateRecord};
use crate::restore::{self, Origin};
use block::seal::{PoolKey, SALT_BYTES};
use control::chain::{Document, Format, seal_document_with};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use uuid::Uuid;

const GOLDEN: &str = include_str!("../../testdata/copies-v1.txt");
const POOL: Uuid = Uuid::from_u128(0x1111_2222_3333_4444_5555_6666_7777_8888);
const LINEAGE: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);

/// Seals a document, and checks that it reads back unchanged.
fn sealed<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(
    purpose: &str,
    body: &T,
) -> String {
    let key = PoolKey::new([0x42; 32]);
    let bytes = seal_document_with([0xc0; SALT_BYTES], &key, purpose, body).unwrap();
    let document = Document::parse(purpose, &bytes).unwrap();
    document.verify(&key, purpose).unwrap();
    assert_eq!(document.body::<T>().unwrap(), *body);
    assert!(document.verify(&key, "manifest").is_err(), "each has a purpose of its own");
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn golden_documents_of_version_1() {
    let (format, nonce) = (Format::CURRENT, "f0".repeat(16));
    let state = StateRecord {
        format,
        pool: POOL,
        number: 7,
        as_of: 1_700_000_000,
        published_at: 1_700_000_009,
        manifest: 300,
        epoch: 9,
        destaged_lsn: 123_456,
        commit_number: 280,
        stalled_count: 1,
        segment_count: 40,
        segment_bytes: 1 << 30,
        table_count: 5,
        next_segment: 77,
        volumes: None,
        nonce: nonce.clone(),
    };
    let identity = Identity {
        format,
        pool: POOL,
        lineage: LINEAGE,
        name: "main".to_owned(),
        created_at: 1_600_000_000,
        nonce: nonce.clone(),
    };
    let pin = PinBody {
        format,
        state: 7,
        is_short: true,
        host: "db1".to_owned(),
        created_at: 1_700_000_010,
    };
    let plain = CopySpec {
        url: "/mnt/other".to_owned(),
        env_prefix: None,
        interval_seconds: 60,
        is_snapshots_only: true,
        bytes_per_second: None,
        has_dedicated_key: false,
        volumes: None,
        created_at: 1_600_000_000,
        published: None,
    };
    let published = Published {
        number: 7,
        nonce: "a1".repeat(16),
        previous_nonce: "a0".repeat(16),
        commit_number: 280,
        term: "b2".repeat(16),
        is_refused: false,
    };
    let other = CopySpec {
        url: "gs://dr/prefix".to_owned(),
        env_prefix: Some("DR_".to_owned()),
        is_snapshots_only: false,
        bytes_per_second: Some(50 << 20),
        ..plain.clone()
    };
    let made = CopySpec { published: Some(published.clone()), ..plain.clone() };
    let refused = Published { is_refused: true, ..published };
    let refused = CopySpec { published: Some(refused), ..other.clone() };
    let later = ListBody {
        format,
        pool: POOL,
        number: 4,
        copies: vec![made, refused],
        nonce: nonce.clone(),
    };
    let keyed = CopySpec { has_dedicated_key: true, ..plain.clone() };
    let keyed =
        ListBody { format, pool: POOL, number: 5, copies: vec![keyed], nonce: nonce.clone() };
    let volumes = Some(BTreeSet::from([2, 9]));
    let part = CopySpec { volumes: volumes.clone(), ..plain.clone() };
    let part = ListBody { format, pool: POOL, number: 6, copies: vec![part], nonce: nonce.clone() };
    let state_of_part = StateRecord { volumes: volumes.clone(), ..state.clone() };
    let heat = HeatBody { format, pool: POOL, segments: vec![(76, 1000), (3, 2)] };
    let copies = vec![plain, other];
    let list = ListBody { format, pool: POOL, number: 3, copies, nonce: nonce.clone() };
    let origin = Origin {
        format,
        pool: POOL,
        lineage: LINEAGE,
        url: "gs://dr/prefix".to_owned(),
        env_prefix: Some("DR_".to_owned()),
        state: state.clone(),
        next_segment: 77,
        snapshot: None,
        only: None,
        volume_name: None,
        first_new_volume: None,
        pin: "pins/0123".to_owned(),
        bytes_per_second: None,
        created_at: 1_700_000_011,
        is_complete: false,
        lost_count: 0,
        nonce,
    };
    let origin_of_part = Origin {
        only: volumes,
        volume_name: Some("db-new".to_owned()),
        first_new_volume: Some(9),
        ..origin.clone()
    };
    let written = [
        sealed(IDENTITY, &identity),
        sealed(STATES, &state),
        sealed(PINS, &pin),
        sealed(list::FOLDER, &list),
        sealed(restore::FOLDER, &origin),
        sealed(list::FOLDER, &later),
        sealed(list::FOLDER, &keyed),
        sealed(HEAT, &heat),
        sealed(STATES, &state_of_part),
        sealed(list::FOLDER, &part),
        sealed(restore::FOLDER, &origin_of_part),
    ];
    let written = written.concat();
    if std::env::var_os("SPINDLE_PRINT_GOLDEN").is_some() {
        return print!("{written}");
    }
    assert_eq!(written, GOLDEN, "the bytes have changed: a new version is needed");
}
