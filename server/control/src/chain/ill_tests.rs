//! Tests of chains in a store that gives wrong answers.

use super::*;
use tiering::testing::{Answer, IllStore, Op, Rng, Rule, seeds};

fn chain(ill: &IllStore) -> Chain {
    Chain::new(&Store::from_objects("ill", Arc::new(ill.clone())), "manifest")
}

fn bytes(text: &str) -> Bytes {
    Bytes::from(text.to_owned())
}

const FIRST: &str = "manifest/00000000000000000001";
const LISTING: &str = "manifest";

#[tokio::test]
async fn passing_conflict_is_not_a_lost_race() {
    for count in 1..u64::from(ATTEMPT_COUNT_MAX) {
        let ill = IllStore::default();
        ill.add(Rule { count, ..Rule::once(Op::Put, FIRST, Answer::Conflict) });
        let chain = chain(&ill);
        assert_eq!(chain.create(1, &bytes("ours")).await.unwrap(), Created::Ours, "{count}");
        assert_eq!(ill.injected_count(), count);
        assert_eq!(chain.create(1, &bytes("theirs")).await.unwrap(), Created::Lost);
    }
}

#[tokio::test]
async fn conflict_that_does_not_pass_is_an_error_and_no_lost_race() {
    let ill = IllStore::default();
    ill.add(Rule::for_good(Op::Put, "", Answer::Conflict));
    let error = chain(&ill).create(1, &bytes("ours")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(error.chain().contains("shows no such object"), "{}", error.chain());
    assert_eq!(ill.injected_count(), u64::from(ATTEMPT_COUNT_MAX));
}

#[tokio::test]
async fn conflict_with_a_number_whose_successors_were_pruned_is_a_lost_race() {
    let ill = IllStore::default();
    let chain = chain(&ill);
    for number in 1..=9 {
        chain.create(number, &bytes(&format!("n{number}"))).await.unwrap();
    }
    chain.prune(2).await.unwrap();
    ill.add(Rule::for_good(Op::Put, "manifest/00000000000000000003", Answer::Conflict));
    assert_eq!(chain.create(3, &bytes("paused")).await.unwrap(), Created::Lost);
    assert_eq!(ill.injected_count(), 1, "it is known from the first listing");
}

#[tokio::test]
async fn empty_listing_is_asked_for_again() {
    let ill = IllStore::default();
    let chain = chain(&ill);
    let empty = |count| Rule { count, ..Rule::once(Op::List, LISTING, Answer::EmptyList) };
    // After a create.
    ill.add(empty(u64::from(ATTEMPT_COUNT_MAX) - 1));
    assert_eq!(chain.create(1, &bytes("a")).await.unwrap(), Created::Ours);
    // When the newest document is read.
    ill.add(empty(1));
    assert_eq!(chain.newest().await.unwrap(), Some((1, bytes("a"))));
    // When an owner checks that it still is the owner.
    ill.add(empty(u64::from(ATTEMPT_COUNT_MAX) - 1));
    assert_eq!(chain.newest_from(1).await.unwrap(), Some(1));
    // When revoked documents are deleted.
    chain.create(2, &bytes("b")).await.unwrap();
    ill.add(empty(2));
    chain.delete_below(2).await.unwrap();
    assert_eq!(ill.names().await, ["manifest/00000000000000000002"]);
}

#[tokio::test]
async fn listings_that_stay_empty_are_an_error_while_the_object_is_there() {
    let ill = IllStore::default();
    let chain = chain(&ill);
    chain.create(1, &bytes("a")).await.unwrap();
    ill.add(Rule::for_good(Op::List, LISTING, Answer::EmptyList));
    for outcome in [
        chain.newest_from(1).await.map(drop),
        chain.delete_below(1).await,
        chain.create(2, &bytes("b")).await.map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
        assert!(error.chain().contains("the listing lacks manifest/"), "{}", error.chain());
    }
    ill.heal();
    ill.inner().delete(&ObjectPath::from(FIRST)).await.unwrap();
    ill.inner().delete(&ObjectPath::from("manifest/00000000000000000002")).await.unwrap();
    assert_eq!(chain.newest_from(1).await.unwrap(), None, "now it is gone");
}

#[tokio::test]
async fn repeated_page_is_an_error() {
    let ill = IllStore::default();
    let chain = chain(&ill);
    chain.create(1, &bytes("a")).await.unwrap();
    ill.add(Rule::for_good(Op::List, LISTING, Answer::RepeatedPage));
    let error = chain.newest().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.chain().contains("continuation token"), "{}", error.chain());
}

/// Writers that each take the next number while the store gives random answers. Each number is won
/// by at most one of them, and without a competitor no writer is told that it lost.
#[tokio::test]
async fn ill_answers_let_at_most_one_writer_win_a_number() {
    let mut injected_count = 0;
    for seed in seeds(200) {
        let ill = IllStore::default();
        ill.set_hang_time(Duration::from_millis(1));
        ill.answer_randomly(seed, 30, Answer::ALL);
        let (mut rng, mut won) = (Rng::new(seed), Vec::new());
        for turn in 0..6 {
            // Other writers read the newest number; this one may have been delayed since.
            ill.heal();
            let newest = chain(&ill).newest_number().await.unwrap().unwrap_or(0);
            ill.answer_randomly(seed.wrapping_add(turn), 30, Answer::ALL);
            let number = if rng.below(4) == 0 { newest } else { newest + 1 }.max(1);
            let ours = bytes(&format!("turn {turn}"));
            match chain(&ill).create(number, &ours).await {
                Ok(Created::Ours) => {
                    assert!(!won.contains(&number), "SEED={seed}: {number} was won twice");
                    won.push(number);
                }
                Ok(Created::Lost) => {
                    assert!(number <= newest, "SEED={seed}: nobody else was there")
                }
                Err(_) => {}
            }
            ill.heal();
            if won.contains(&number) {
                let found = chain(&ill).read(number).await.unwrap();
                assert!(found.is_some(), "SEED={seed}: what was won is there");
            }
        }
        injected_count += ill.injected_count();
    }
    println!("{injected_count} wrong answers");
}
