//! What the doctor says of a pool over directories, and what is so when they are taken away.

use super::*;
use crate::admin::AdminHandler;
use crate::handlers::AdminPool;
use api::doctor::{DataRiskInfo, DoctorRequest, StoresGone, Writes};
use api::{Reply, Request};
use engine::data_stores::OpenDataStores;
use engine::doctor::{Findings, Without, examine};
use std::collections::BTreeMap;

async fn findings(open: &OpenPool, without: &[Without]) -> Findings {
    let stores: &dyn OpenDataStores = &**open.data_stores.as_ref().unwrap();
    examine(open.pool.tier(), stores, without).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_if_without_stores_is_what_is_counted_when_they_are_away() {
    let place = Place::new("2+1", 4);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let gone = |index: usize| Without::Store(place.stores[index].display().to_string());
    let whole = findings(&open, &[]).await;
    assert_eq!(whole.survey.then, None);
    assert_eq!(whole.survey.now.survivals.keys().collect::<Vec<_>>(), [&Some(1)]);
    assert!(whole.room.known_bytes > 0 && whole.room.unknown_count == 0);
    for pair in [[0, 1], [1, 3], [2, 3]] {
        let said = findings(&open, &pair.map(gone)).await;
        let then = said.survey.then.expect("stores are taken as gone");
        assert_eq!(said.survey.now, whole.survey.now);
        pair.iter().for_each(|index| place.unmount(*index));
        let found = findings(&open, &[]).await.survey;
        assert_eq!(found.now.survivals, then.survivals, "{pair:?}");
        assert_eq!(found.now.domains, then.domains, "{pair:?}");
        assert_eq!(found.now.taking_domains, then.taking_domains, "{pair:?}");
        let unreadable = found.now.survivals.get(&None).copied().unwrap_or_default();
        assert_eq!(unreadable, said.survey.unavailable, "{pair:?}");
        // The rebuild job counts the same.
        let (counted, _) = open.pool.tier().redundancy().await.unwrap();
        let bytes = found.now.survivals.iter().map(|(losses, found)| (*losses, found.bytes));
        assert_eq!(counted.bytes, bytes.collect::<BTreeMap<_, _>>(), "{pair:?}");
        assert_eq!(counted.space, found.space);
        pair.iter().for_each(|index| place.mount(*index));
        assert_eq!(findings(&open, &[]).await.survey, whole.survey, "they are back");
    }
    open.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn doctor_is_asked_like_any_command() {
    let place = Place::new("1+1", 3);
    let open = place.open().await.unwrap();
    write(&open, 100).await;
    let admin = AdminPool::offline(open).await;
    let ask = async |without: Vec<StoresGone>| {
        let request = Request::Doctor(DoctorRequest::Examine { without });
        let Reply::Doctor(info) = admin.handle(request).await? else { panic!("another reply") };
        Ok::<_, Error>(*info)
    };
    let store = |index: usize| StoresGone::Store(place.stores[index].display().to_string());
    let info = ask(Vec::new()).await.unwrap();
    assert_eq!(info.summary, "no data is at risk: everything survives the loss of any store");
    let DataRiskInfo { now, space, is_complete, .. } = info.data.expect("it has data stores");
    assert!(is_complete && now.writes == Writes::Whole && now.domains.len() == 3);
    assert_eq!((space.data_bytes, space.parity_bytes), (space.coded_bytes, space.coded_bytes));
    // With a single fragment of parity, segments are written without it.
    let info = ask(vec![store(0), store(1)]).await.unwrap();
    assert!(info.summary.contains("segments that lack fragments"), "{}", info.summary);
    let info = ask(vec![store(0), store(1), store(2)]).await.unwrap();
    assert!(info.summary.contains("destage would WAIT"), "{}", info.summary);
    let error = ask(vec![StoresGone::Domain("rack".to_owned())]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains(&place.stores[2].display().to_string()), "{error}");
    admin.close().await.unwrap();
}
