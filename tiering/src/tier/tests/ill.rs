//! A store with wrong listings: a single listing is never sufficient reason to create, delete or
//! wait for anything.

use super::*;
use crate::testing::{Answer, IllStore, Rule};

/// Makes a closed pool with some blocks, and returns its contents.
async fn closed(ill: &IllStore) -> Model {
    let mut world = World::new(11);
    let tier = Tier::open(options(Arc::new(ill.clone()), 1)).await.unwrap();
    let made = world.window(40);
    tier.destage(made.window, &Payloads).await.unwrap();
    tier.close().await.unwrap();
    made.after
}

#[test]
fn empty_listing_makes_no_metadata_beside_that_which_is_there() {
    for (is_seeded, count) in [(false, 1), (false, 2), (true, 1)] {
        runtime().block_on(async {
            let ill = IllStore::default();
            let model = closed(&ill).await;
            ill.add(Rule { count, ..Rule::once(Op::List, "metadata", Answer::EmptyList) });
            ill.add(Rule { count, ..Rule::once(Op::List, "metadata/manifest", Answer::EmptyList) });
            let mut options = options(Arc::new(ill.clone()), 2);
            options.seeded_bugs.listing_believed = is_seeded;
            let opened = Tier::open(options).await;
            let is_right = match opened {
                Ok(tier) => {
                    let is_there = tier.destaged_lsn() > Lsn(0);
                    if is_there {
                        check_all(&tier, &model).await;
                    }
                    tier.close().await.unwrap();
                    is_there
                }
                Err(_) => false,
            };
            assert_eq!(is_right, !is_seeded, "seeded {is_seeded}, {count} listings");
        });
    }
}

#[test]
fn segments_without_metadata_are_refused_and_left_alone() {
    runtime().block_on(async {
        let ill = IllStore::default();
        let model = closed(&ill).await;
        let before = ill.names().await;
        ill.add(Rule::for_good(Op::List, "metadata", Answer::EmptyList));
        let error = Tier::open(options(Arc::new(ill.clone()), 2)).await.err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.chain());
        assert!(error.chain().contains("Bring them back"), "{}", error.chain());
        assert_eq!(ill.names().await, before);
        ill.heal();
        let tier = Tier::open(options(Arc::new(ill.clone()), 3)).await.unwrap();
        check_all(&tier, &model).await;
        tier.close().await.unwrap();
    });
}

#[test]
fn repeated_pages_end_a_sweep_with_an_error_and_delete_nothing_that_is_named() {
    runtime().block_on(async {
        let ill = IllStore::default();
        let model = closed(&ill).await;
        let tier = Tier::open(options(Arc::new(ill.clone()), 2)).await.unwrap();
        ill.add(Rule::for_good(Op::List, "segments", Answer::RepeatedPage));
        let swept = tokio::time::timeout(Duration::from_secs(30), tier.sweep_orphans()).await;
        let error = swept.expect("it ends").unwrap_err();
        assert!(error.chain().contains("does not end"), "{}", error.chain());
        ill.heal();
        check_all(&tier, &model).await;
        tier.close().await.unwrap();
    });
}
