//! Findings become replies; pools without data stores.

use super::*;
use tiering::survey::Survey;

fn request(without: Vec<StoresGone>) -> DoctorRequest {
    DoctorRequest::Examine { without }
}

#[tokio::test]
async fn pool_without_data_stores_is_said_to_be_one() {
    let conditions = Conditions::default();
    let asked = |without| answer(None, "s3://b/p", &conditions, None, request(without));
    let Reply::Doctor(info) = asked(Vec::new()).await.unwrap() else { panic!("another reply") };
    assert!(info.summary.contains("objects of the store s3://b/p"), "{}", info.summary);
    assert_eq!(info.data, None);
    let error = asked(vec![StoresGone::Node("b".to_owned())]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("it has none"), "{error}");
}

/// A store of a 2+1 pool, alone in its domain.
fn store(number: u32) -> DataStoreStatus {
    DataStoreStatus {
        number,
        url: format!("/mnt/{number}"),
        domain: format!("rack {number:02}"),
        is_readable: true,
        is_taking: true,
        is_staying: true,
        ..DataStoreStatus::default()
    }
}

fn status(count: u32) -> DataStoresStatus {
    DataStoresStatus {
        scheme: "2+1".to_owned(),
        fragment_count: 3,
        written_min: 2,
        parity_count: 1,
        stores: (1..=count).map(store).collect(),
        ..DataStoresStatus::default()
    }
}

fn outlook(domains: &[(&str, u64)], taking: usize) -> Outlook {
    let bytes = |bytes| Amount { segment_count: 1, bytes };
    let domains = domains.iter().map(|(name, lost)| ((*name).to_owned(), bytes(*lost)));
    Outlook {
        domains: domains.collect(),
        taking_domains: (0..taking).map(|number| number.to_string()).collect(),
        missing_bytes: 10,
        ..Outlook::default()
    }
}

#[test]
fn worst_domains_come_first_and_the_list_is_bounded() {
    let mut stores = status(40);
    stores.stores[1].is_readable = false;
    stores.stores[2].domain = "rack 02".to_owned();
    let names: Vec<String> = (1..=40).map(|number| format!("rack {number:02}")).collect();
    let lost: Vec<(&str, u64)> =
        names.iter().zip(1..).map(|(name, at)| (name.as_str(), at % 3)).collect();
    let found = outlook(&lost, 3);
    let info = outlook_info(&found, &Room::default(), &stores, &["/mnt/5".to_owned()]);
    assert_eq!((info.domains.len(), info.domain_excluded_count), (DOMAINS_MAX, 24));
    let seen: Vec<(&str, u64)> =
        info.domains.iter().map(|one| (one.domain.as_str(), one.unavailable.bytes)).collect();
    assert_eq!(seen[..3], [("rack 02", 2), ("rack 05", 2), ("rack 08", 2)]);
    assert_eq!(seen[13..], [("rack 01", 1), ("rack 04", 1), ("rack 07", 1)]);
    let counts = |index: usize| (info.domains[index].store_count, info.domains[index].away_count);
    assert_eq!((counts(0), counts(1), counts(2)), ((2, 1), (1, 1), (1, 0)));
}

#[test]
fn writes_and_room_follow_from_the_stores_that_are_left() {
    let of = |taking, room: Room| outlook_info(&outlook(&[], taking), &room, &status(4), &[]);
    let room = |known_bytes, unknown_count| Room { known_bytes, unknown_count };
    for (taking, writes) in [
        (4, Writes::Whole),
        (3, Writes::Whole),
        (2, Writes::Lacking),
        (1, Writes::Waiting),
        (0, Writes::Waiting),
    ] {
        assert_eq!(of(taking, room(10, 0)).writes, writes, "{taking} domains");
    }
    assert_eq!(of(3, room(10, 0)).is_room_enough, Some(true));
    assert_eq!(of(3, room(9, 0)).is_room_enough, Some(false));
    assert_eq!(of(3, room(9, 1)).is_room_enough, None);
}

#[test]
fn stores_in_trouble_are_listed_and_what_if_is_told_only_if_it_was_asked() {
    let mut stores = status(4);
    stores.stores[0].is_leaving = true;
    stores.stores[1].failure = Some("no disk".to_owned());
    stores.stores[2].is_lost = true;
    let findings = Findings { stores, ..Findings::default() };
    let found = data_risk(findings.clone(), Vec::new());
    let urls: Vec<&str> = found.troubled.iter().map(|store| store.url.as_str()).collect();
    assert_eq!((urls, found.without), (vec!["/mnt/1", "/mnt/2", "/mnt/3"], None));
    let survey = Survey { then: Some(outlook(&[], 2)), ..Survey::default() };
    let (gone, room_then) = (vec!["/mnt/4".to_owned()], Some(Room::default()));
    let asked = vec![StoresGone::Store("/mnt/4".to_owned())];
    let found = data_risk(Findings { gone, survey, room_then, ..findings }, asked.clone());
    let without = found.without.expect("it was asked");
    assert_eq!((without.asked, without.stores), (asked, vec!["/mnt/4".to_owned()]));
    assert_eq!((without.outlook.writes, found.now.writes), (Writes::Lacking, Writes::Waiting));
}
