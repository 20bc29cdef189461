//! Tests of chains and sealed documents.

use super::*;
use crate::store::testing::{Fault, FaultyStore};

fn chain(memory: &Arc<FaultyStore>) -> Chain {
    Chain::new(&memory.store(), "manifest")
}

fn bytes(text: &str) -> Bytes {
    Bytes::from(text.to_owned())
}

#[tokio::test]
async fn a_number_is_created_once() {
    let memory = FaultyStore::new(Fault::None);
    let chain = chain(&memory);
    assert_eq!(chain.newest().await.unwrap(), None);
    assert_eq!(chain.create(1, &bytes("a")).await.unwrap(), Created::Ours);
    assert_eq!(chain.create(1, &bytes("b")).await.unwrap(), Created::Lost);
    // The same bytes hold the same nonce: they can only be our own, sent again.
    assert_eq!(chain.create(1, &bytes("a")).await.unwrap(), Created::Ours);
    assert_eq!(chain.newest().await.unwrap(), Some((1, bytes("a"))));
}

#[tokio::test]
async fn a_paused_writer_does_not_win_a_number_whose_successors_were_pruned() {
    let memory = FaultyStore::new(Fault::None);
    let chain = chain(&memory);
    for number in 1..=9 {
        let created = chain.create(number, &bytes(&format!("n{number}"))).await.unwrap();
        assert_eq!(created, Created::Ours);
    }
    chain.prune(2).await.unwrap();
    assert_eq!(chain.numbers().await.unwrap(), [8, 9]);
    assert_eq!(chain.create(3, &bytes("paused")).await.unwrap(), Created::Lost);
    assert_eq!(chain.numbers().await.unwrap(), [8, 9]);
}

#[tokio::test]
async fn the_newest_is_never_pruned() {
    let memory = FaultyStore::new(Fault::None);
    let chain = chain(&memory);
    chain.create(7, &bytes("x")).await.unwrap();
    chain.prune(0).await.unwrap();
    assert_eq!(chain.numbers().await.unwrap(), [7]);
}

#[tokio::test]
async fn other_objects_in_the_chains_place_are_left_alone() {
    let memory = FaultyStore::new(Fault::None);
    let chain = chain(&memory);
    for name in ["manifest/readme", "manifest/5", "manifest/0000000000000000000x", "other/1"] {
        memory.set(name, "x").await;
    }
    assert_eq!(chain.numbers().await.unwrap(), [0u64; 0]);
    chain.create(1, &bytes("x")).await.unwrap();
    chain.prune(1).await.unwrap();
    assert_eq!(memory.names().await.len(), 5);
}

#[tokio::test]
async fn an_ambiguous_answer_is_settled_by_reading_back() {
    for seed in 0..50 {
        let memory = FaultyStore::new(Fault::Ambiguous(seed));
        let chain = chain(&memory);
        let outcome = chain.create(1, &bytes("ours")).await;
        let stored = memory.names().await;
        match outcome {
            Ok(Created::Ours) => assert_eq!(stored.len(), 1, "SEED={seed}"),
            Ok(Created::Lost) => panic!("SEED={seed}: nobody else was there"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "SEED={seed}"),
        }
        assert_eq!(
            chain.create(1, &bytes("theirs")).await.is_ok_and(|c| c == Created::Ours),
            stored.is_empty() && memory.names().await.len() == 1,
            "SEED={seed}"
        );
    }
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Body {
    format: Format,
    text: String,
}

fn body() -> Body {
    Body { format: Format::CURRENT, text: "hello\nworld".to_owned() }
}

#[test]
fn a_document_opens_under_its_key_and_purpose_only() {
    let key = PoolKey::new([1; 32]);
    let sealed = seal_document(&key, "manifest", &body()).unwrap();
    let document = Document::parse("manifest/1", &sealed).unwrap();
    document.verify(&key, "manifest").unwrap();
    assert_eq!(document.body::<Body>().unwrap(), body());
    for error in [
        document.verify(&PoolKey::new([2; 32]), "manifest").unwrap_err(),
        document.verify(&key, "keyring").unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("manifest/1"));
    }
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let key = PoolKey::new([1; 32]);
    let sealed = seal_document(&key, "manifest", &body()).unwrap();
    let open = |bytes: &[u8]| {
        let document = Document::parse("manifest/1", bytes)?;
        document.verify(&key, "manifest")?;
        document.body::<Body>()
    };
    for at in 0..sealed.len() {
        for bit in 0..8 {
            let mut flipped = sealed.to_vec();
            flipped[at] ^= 1 << bit;
            let error = open(&flipped).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at} bit {bit}");
            assert!(error.to_string().contains("manifest/1"));
        }
        assert_eq!(open(&sealed[..at]).unwrap_err().kind(), ErrorKind::Corrupt, "cut at {at}");
    }
}

#[test]
fn a_newer_format_is_refused_as_such() {
    let key = PoolKey::new([1; 32]);
    for format in [
        Format { version: 2, ..Format::CURRENT },
        Format { incompatible: 1, ..Format::CURRENT },
        Format { read_only_compatible: 1, ..Format::CURRENT },
    ] {
        let newer = Body { format, text: String::new() };
        let sealed = seal_document(&key, "manifest", &newer).unwrap();
        let error = Document::parse("manifest/1", &sealed).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("newer"), "{error}");
    }
    let compatible = Format { compatible: 1, ..Format::CURRENT };
    let sealed =
        seal_document(&key, "manifest", &Body { format: compatible, text: String::new() }).unwrap();
    assert!(Document::parse("manifest/1", &sealed).is_ok());
}
