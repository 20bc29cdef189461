//! Segments of every kind, counted with stores that are there, away, leaving, and taken as gone.

use super::*;
use crate::keys::KeyId;
use crate::segment::{FragmentPlace, SegmentInfo, SegmentNumber};
use crate::testing::Rng;
use block::Epoch;
use std::sync::Arc;

/// A store with this number, alone in its failure domain, that works.
fn store(number: u32) -> SurveyedStore {
    SurveyedStore {
        number,
        domain: format!("rack {number}"),
        is_readable: true,
        is_taking: true,
        is_staying: true,
        is_gone: false,
    }
}

fn stores(count: u32) -> Vec<SurveyedStore> {
    (1..=count).map(store).collect()
}

fn gone(mut stores: Vec<SurveyedStore>, numbers: &[u32]) -> Vec<SurveyedStore> {
    stores.iter_mut().for_each(|store| store.is_gone = numbers.contains(&store.number));
    stores
}

fn object(object_bytes: u32) -> StoredSegment {
    StoredSegment::from(SegmentInfo {
        number: SegmentNumber(1),
        epoch: Epoch(3),
        id: [7; 16],
        algorithm: block::seal::Algorithm::default(),
        key: KeyId::POOL,
        object_bytes,
        frame_count: 1,
    })
}

/// A segment in fragments on these stores, with pieces of equal size.
fn coded(object_bytes: u32, data: u8, places: &[u32]) -> StoredSegment {
    let parity = u8::try_from(places.len()).unwrap() - data;
    let piece = object_bytes / u32::from(data);
    let fragments = Fragments {
        data,
        parity,
        codec: if data == 1 { 1 } else { 2 },
        ends: (1..=u32::from(data)).map(|count| piece * count).collect(),
        places: places.iter().map(|store| FragmentPlace { store: *store, generation: 1 }).collect(),
        is_copied: false,
    };
    let placement = Placement::Fragments(Arc::new(fragments));
    StoredSegment { info: object(object_bytes).info, placement }
}

fn survey(stores: &[SurveyedStore], segments: &[StoredSegment]) -> Survey {
    let mut counting = Counting::new(stores);
    segments.iter().for_each(|segment| counting.add(segment, true));
    counting.end(true)
}

fn amount(segment_count: u64, bytes: u64) -> Amount {
    Amount { segment_count, bytes }
}

fn survivals(outlook: &Outlook) -> Vec<(Option<u8>, u64)> {
    outlook.survivals.iter().map(|(losses, found)| (*losses, found.bytes)).collect()
}

const NOWHERE: u32 = Fragments::NOWHERE;

#[test]
fn every_class_of_segments_is_counted_once() {
    let mut all = stores(6);
    all[5].is_readable = false;
    all[5].is_taking = false;
    let segments = [
        coded(400, 4, &[1, 2, 3, 4, 5, NOWHERE]),
        coded(8000, 4, &[1, 2, 3, 4, NOWHERE, 6]),
        coded(1000, 4, &[1, 2, 3, NOWHERE, NOWHERE, 6]),
        coded(30, 1, &[1, 2, 3]),
        coded(5, 1, &[6, 4]),
        object(7),
        // A pool that was restored from a copy reads it as an object.
        coded(11, 4, &[91, 92, 93, 94, 95, 96]),
    ];
    let found = survey(&all, &segments);
    let expected = vec![(None, 1000), (Some(0), 8005), (Some(1), 400), (Some(2), 30)];
    assert_eq!(survivals(&found.now), expected);
    // A store that is away for a while keeps its fragments.
    assert_eq!(found.now.lacking, amount(3, 9400));
    assert_eq!((found.space.objects, found.space.coded), (amount(2, 18), amount(5, 9435)));
    assert_eq!((found.then, found.unavailable, found.is_complete), (None, amount(0, 0), true));
    // All pieces that are stored, and those of parity.
    assert_eq!(found.space.data_bytes, 400 + 8000 + 750 + 30 + 5);
    assert_eq!(found.space.parity_bytes, 100 + 2000 + 250 + 60 + 5);
    let mut unknown = Counting::new(&all);
    unknown.add(&segments[0], false);
    let unknown = unknown.end(false);
    assert_eq!((unknown.unknown, unknown.is_complete), (amount(1, 400), false));
    assert_eq!((unknown.space.coded.bytes, unknown.now.survivals.len()), (400, 0));
}

#[test]
fn domains_say_what_would_be_unavailable_without_each() {
    let mut all = stores(5);
    all[1].domain = "rack 1".to_owned();
    let segments = [
        // Two of its fragments are in rack 1, so the loss of the rack takes both.
        coded(100, 2, &[1, 2, 3]),
        coded(20, 2, &[1, 3, 4]),
        coded(3, 2, &[NOWHERE, 3, 4]),
    ];
    let found = survey(&all, &segments).now;
    let lost = |number: u32| found.domains[&format!("rack {number}")];
    assert_eq!(
        (lost(1), lost(3), lost(4), lost(5)),
        (amount(1, 100), amount(1, 3), amount(1, 3), amount(0, 0))
    );
    assert_eq!(found.domains.len(), 4);
    assert_eq!(survivals(&found), [(Some(0), 103), (Some(1), 20)]);
    // Of two fragments in a domain, one has to go elsewhere.
    assert_eq!((found.lacking, found.short), (amount(2, 103), amount(0, 0)));
    assert_eq!(found.missing_bytes, 50 + 1);
}

#[test]
fn what_if_counts_what_could_not_be_read_and_what_survives_with_less() {
    let mut all = stores(6);
    all[3].is_readable = false;
    all[3].is_taking = false;
    let all = gone(all, &[1, 2]);
    let segments = [
        coded(4000, 4, &[1, 2, 3, 4, 5, 6]),
        coded(300, 2, &[1, 3, 5]),
        coded(20, 2, &[3, 5, 6]),
        coded(1, 1, &[2, 1, 4]),
        coded(7, 2, &[NOWHERE, 4, 5]),
        object(50_000),
    ];
    let found = survey(&all, &segments);
    assert_eq!(survivals(&found.now), [(None, 7), (Some(1), 4321)]);
    let then = found.then.as_ref().expect("stores are taken as gone");
    assert_eq!(survivals(then), [(None, 4008), (Some(0), 300), (Some(1), 20)]);
    // The one that cannot be read now is none that these stores make unavailable.
    assert_eq!((found.unavailable, found.thinner), (amount(2, 4001), amount(1, 300)));
    assert_eq!(found.space.objects, amount(1, 50_000));
    let taking: Vec<&str> = then.taking_domains.iter().map(String::as_str).collect();
    assert_eq!(taking, ["rack 3", "rack 5", "rack 6"]);
    assert_eq!(found.now.taking_domains.len(), 5);
    // The fragment of the 300 bytes goes to rack 6.
    assert_eq!((then.short, then.missing_bytes), (amount(0, 0), 150));
    assert_eq!(then.domains["rack 5"], amount(1, 300));
}

#[test]
fn segments_for_which_too_few_domains_are_left_are_short() {
    let mut all = stores(4);
    all[3].is_taking = false;
    let segments = [coded(20, 2, &[1, 2, 3])];
    let found = survey(&gone(all.clone(), &[1]), &segments);
    let then = found.then.expect("one is taken as gone");
    assert_eq!((then.lacking, then.short, then.missing_bytes), (amount(1, 20), amount(1, 20), 10));
    // A full store keeps what it has: a segment there lacks nothing.
    let there = survey(&all, &[coded(20, 2, &[1, 2, 4])]).now;
    assert_eq!((there.lacking, there.short), (amount(0, 0), amount(0, 0)));
    // What leaves can be read, and is rebuilt elsewhere.
    all[0].is_staying = false;
    all[0].is_taking = false;
    all[3].is_taking = true;
    let leaving = survey(&all, &segments).now;
    assert_eq!((leaving.lacking, leaving.short), (amount(1, 20), amount(0, 0)));
    assert_eq!(survivals(&leaving), [(Some(1), 20)]);
}

/// Tries all sets of that many domains.
fn survives(data: usize, counts: &[usize], losses: u32) -> bool {
    let sets = (0u32..1 << counts.len()).filter(|set| set.count_ones() == losses);
    let left = |set: u32| -> usize {
        let is_left = |(index, _): &(usize, &usize)| set & (1 << index) == 0;
        counts.iter().enumerate().filter(is_left).map(|(_, count)| count).sum()
    };
    sets.map(left).all(|left| left >= data)
}

#[test]
fn further_losses_are_those_of_the_worst_choice() {
    let mut rng = Rng::new(7);
    for _ in 0..500 {
        let domains = 1 + rng.below(7) as usize;
        let counts: Vec<usize> = (0..domains).map(|_| rng.below(4) as usize).collect();
        let data = 1 + rng.below(6) as usize;
        let found = further_losses(data, counts.clone());
        match found {
            None => assert!(!survives(data, &counts, 0), "{data} of {counts:?}"),
            Some(losses) => {
                let losses = u32::from(losses);
                assert!(survives(data, &counts, losses), "{losses}: {data} of {counts:?}");
                let is_worst = losses as usize == domains || !survives(data, &counts, losses + 1);
                assert!(is_worst, "{losses}: {data} of {counts:?}");
            }
        }
    }
}

#[test]
fn segment_that_is_an_object_too_survives_everything() {
    let mut all = stores(3);
    all[2].is_readable = false;
    all[2].is_taking = false;
    let copied = |stored: StoredSegment| {
        let Placement::Fragments(fragments) = stored.placement else { panic!("it is coded") };
        let fragments = Fragments { is_copied: true, ..Fragments::clone(&fragments) };
        StoredSegment { placement: Placement::Fragments(Arc::new(fragments)), ..stored }
    };
    let segments = [coded(20, 2, &[1, 2, 3]), copied(coded(400, 2, &[1, 2, 3]))];
    let found = survey(&gone(all, &[1]), &segments);
    assert_eq!(survivals(&found.now), [(Some(0), 20), (Some(ANY_LOSS), 400)]);
    let then = found.then.as_ref().expect("one is taken as gone");
    assert_eq!(survivals(then), [(None, 20), (Some(ANY_LOSS), 400)]);
    // Its fragments are rebuilt all the same.
    assert_eq!((found.unavailable, then.lacking), (amount(1, 20), amount(2, 420)));
    assert_eq!(found.now.domains["rack 2"], amount(1, 20));
    assert_eq!((found.space.coded, found.space.copied), (amount(2, 420), amount(1, 400)));
    assert_eq!(found.space.objects, amount(0, 0));
}
