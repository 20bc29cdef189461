//! The documents of a copy, which another pool's owner, or nobody that is known, may have written.

use crate::documents::{Kind, POOL, numbered, pool_key};
use engine::testing::{CopyDocument, read_copy_document};
use fuzz::corpus;
use uuid::Uuid;

const GOLDEN: &str = "server/engine/testdata/copies-v1.txt";
const LINEAGE: Uuid = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);

/// Returns the golden documents with this field.
fn with_field(field: &str) -> Vec<Vec<u8>> {
    let mark = format!("\"{field}\":");
    let documents = corpus::documents(GOLDEN).into_iter();
    documents.filter(|document| String::from_utf8_lossy(document).contains(&mark)).collect()
}

fn check(
    name: &'static str,
    document: CopyDocument,
    inputs: Vec<Vec<u8>>,
    (purpose, object): (&'static str, &'static str),
) {
    let kind = Kind { name, inputs, key: pool_key(), purpose, object, execution_count: 10_000 };
    kind.check(async |store: control::store::Store| {
        read_copy_document(&store, &pool_key(), (POOL, LINEAGE), document).await
    });
}

#[test]
fn copy_identity() {
    let is_identity = |document: &Vec<u8>| {
        let text = String::from_utf8_lossy(document);
        text.contains("\"lineage\":") && !text.contains("\"is_complete\":")
    };
    let inputs = with_field("lineage").into_iter().filter(is_identity).collect();
    let place = ("identity", "identity/00000000000000000001");
    check("copy_identity", CopyDocument::Identity, inputs, place);
}

#[test]
fn copy_state() {
    let is_state = |document: &Vec<u8>| {
        let text = String::from_utf8_lossy(document);
        text.contains("\"published_at\":") && !text.contains("\"is_complete\":")
    };
    let inputs = numbered(GOLDEN, 7).into_iter().filter(is_state).collect();
    check("copy_state", CopyDocument::State, inputs, ("states", "states/00000000000000000007"));
}

#[test]
fn copy_pin() {
    check("copy_pin", CopyDocument::Pin, with_field("is_short"), ("pins", "pins/1"));
}

#[test]
fn copy_heat() {
    check("copy_heat", CopyDocument::Heat, with_field("segments"), ("heat", "heat"));
}
