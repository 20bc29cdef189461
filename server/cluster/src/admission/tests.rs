//! Tests of the list: merges, removals, forgeries, bounds, golden bytes.

use super::*;
use crate::connection::digits;
use block::hex::to_hex;
use proptest::prelude::*;

fn node(number: u8) -> Identity {
    Identity::from_seed(&format!("n{number}"), [number; 32])
}

fn addresses() -> Vec<String> {
    vec!["10.0.0.1:7400".to_owned()]
}

fn founded(founder: &Identity) -> AdmissionList {
    AdmissionList::found(founder, &addresses(), None).unwrap()
}

fn admit(list: &mut AdmissionList, by: &Identity, node: &Identity) {
    list.admit(by, NewNode::new(node.name(), &addresses()), node.certificate()).unwrap();
}

fn merge(list: &mut AdmissionList, other: &AdmissionList) -> Merged {
    list.merge_bytes(&other.encode()).unwrap()
}

fn ids(list: &AdmissionList) -> BTreeSet<NodeId> {
    list.nodes().keys().copied().collect()
}

fn set(nodes: &[&Identity]) -> BTreeSet<NodeId> {
    nodes.iter().map(|node| node.id()).collect()
}

fn remove_record(list: &AdmissionList, by: &Identity, node: NodeId) -> Record {
    Record::sign(by, list.cluster(), node, Statement::Removal { kept: Vec::new() }).unwrap()
}

fn admit_record(list: &AdmissionList, by: &Identity, node: &Identity) -> Record {
    let statement = Statement::Admission {
        name: node.name().to_owned(),
        addresses: addresses(),
        zone: None,
        certificate: node.certificate().to_vec(),
    };
    Record::sign(by, list.cluster(), node.id(), statement).unwrap()
}

/// Golden: the canonical bytes under the signatures, and the document.
#[test]
fn golden_bytes_of_a_list() {
    let (first, second) = (node(1), node(2));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    let admission = admit_record(&list, &first, &second);
    let golden = digits(include_str!("../../testdata/admission-v1.hex"));
    assert_eq!(to_hex(&admission.canonical()), golden);
    list.remove(&first, second.id()).unwrap();
    let removal = Statement::Removal { kept: vec![[0xab; 32], [0xcd; 32]] };
    let removal = Record::sign(&first, list.cluster(), second.id(), removal).unwrap();
    let golden = digits(include_str!("../../testdata/removal-v1.hex"));
    assert_eq!(to_hex(&removal.canonical()), golden);
    let golden = include_str!("../../testdata/cluster-v1.json").trim_end();
    assert_eq!(String::from_utf8(list.encode()).unwrap(), golden);
    assert_eq!(AdmissionList::decode(golden.as_bytes(), None).unwrap(), list);
}

/// Golden: the same with the zone of a node.
#[test]
fn golden_bytes_of_a_list_with_a_zone() {
    let (first, second, addresses) = (node(1), node(2), addresses());
    let mut list = founded(&first);
    let new = NewNode { zone: Some("west"), ..NewNode::new("n2", &addresses) };
    list.admit(&first, new, second.certificate()).unwrap();
    let admission = list.records.values().find(|record| record.node == second.id()).unwrap();
    let golden = digits(include_str!("../../testdata/admission-v2.hex"));
    assert_eq!(to_hex(&admission.canonical()), golden);
    let golden = include_str!("../../testdata/cluster-v2.json").trim_end();
    assert_eq!(String::from_utf8(list.encode()).unwrap(), golden);
    assert_eq!(AdmissionList::decode(golden.as_bytes(), None).unwrap(), list);
    let zone = |id: NodeId| list.nodes()[&id].zone.as_deref();
    assert_eq!((zone(first.id()), zone(second.id())), (None, Some("west")));
    // The zone is signed, and the version tells whether there is one.
    for (was, is) in [("west", "east"), ("\"version\":2", "\"version\":1")] {
        let changed = golden.replace(was, is);
        assert_eq!(AdmissionList::decode(changed.as_bytes(), None), Err(Refusal::Damaged));
    }
    let without = String::from_utf8(founded(&first).encode()).unwrap();
    let changed = without.replace("\"version\":1", "\"version\":2");
    assert_eq!(AdmissionList::decode(changed.as_bytes(), None), Err(Refusal::Damaged));
    let new = NewNode { zone: Some("w est"), ..NewNode::new("n3", &addresses) };
    let error = list.admit(&first, new, node(3).certificate()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn nodes_admitted_by_a_removed_node_stay() {
    let (first, second, third) = (node(1), node(2), node(3));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    admit(&mut list, &second, &third);
    list.remove(&third, second.id()).unwrap();
    assert_eq!(ids(&list), set(&[&first, &third]));
    list.remove(&third, first.id()).unwrap();
    assert_eq!(ids(&list), set(&[&third]), "the founder too can be removed");
    assert!(list.conflicts().is_empty(), "{:?}", list.conflicts());
    assert_eq!(AdmissionList::decode(&list.encode(), None).unwrap(), list);
}

#[test]
fn later_signatures_of_a_removed_node_do_not_count() {
    let (first, second, third, fourth) = (node(1), node(2), node(3), node(4));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    admit(&mut list, &first, &third);
    list.remove(&first, second.id()).unwrap();
    let late =
        vec![admit_record(&list, &second, &fourth), remove_record(&list, &second, third.id())];
    list.merge(late).unwrap();
    assert_eq!(ids(&list), set(&[&first, &third]));
    let signer = second.id();
    let of_third = Conflict::LaterSignature { node: third.id(), signer, is_removal: true };
    let of_fourth = Conflict::LaterSignature { node: fourth.id(), signer, is_removal: false };
    assert!(list.conflicts().contains(&of_third) && list.conflicts().contains(&of_fourth));
    assert_eq!(list.conflicts().len(), 2);
    // The nodes that it admits do not count either, nor do theirs.
    let deeper = vec![remove_record(&list, &fourth, first.id())];
    list.merge(deeper).unwrap();
    assert_eq!(ids(&list), set(&[&first, &third]));
    let error =
        list.admit(&second, NewNode::new("n5", &addresses()), node(5).certificate()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(list.remove(&second, first.id()).unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn nearer_node_wins_when_two_remove_each_other() {
    let (first, second, third) = (node(1), node(2), node(3));
    let mut one = founded(&first);
    admit(&mut one, &first, &second);
    admit(&mut one, &first, &third);
    let mut other = one.clone();
    one.remove(&second, third.id()).unwrap();
    other.remove(&third, second.id()).unwrap();
    merge(&mut one, &other);
    let nearer = if second.id() < third.id() { &second } else { &third };
    assert_eq!(ids(&one), set(&[&first, nearer]));
    assert_eq!(one.conflicts().len(), 1, "{:?}", one.conflicts());
    let mut one = other;
    let mut other = one.clone();
    one.remove(&third, first.id()).unwrap();
    other.remove(&first, third.id()).unwrap();
    merge(&mut one, &other);
    // The removal of the second had come before.
    assert_eq!(ids(&one), set(&[&first]));
}

/// A removed node tries to drag its remover along, itself and through a node that it admits, and to
/// void everything that the remover has signed.
#[test]
fn removed_node_cannot_contest_a_nearer_one() {
    let (first, second, third, puppet) = (node(1), node(2), node(3), node(4));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    admit(&mut list, &first, &third);
    list.remove(&first, second.id()).unwrap();
    let mut late = vec![remove_record(&list, &second, first.id())];
    late.push(admit_record(&list, &second, &puppet));
    list.merge(late).unwrap();
    list.merge(vec![remove_record(&list, &puppet, first.id())]).unwrap();
    list.merge(vec![remove_record(&list, &puppet, third.id())]).unwrap();
    assert_eq!(ids(&list), set(&[&first, &third]));
}

#[test]
fn removal_wins_over_an_admission_elsewhere() {
    let (first, second, third) = (node(1), node(2), node(3));
    let mut one = founded(&first);
    admit(&mut one, &first, &second);
    let mut other = one.clone();
    admit(&mut one, &first, &third);
    one.remove(&first, third.id()).unwrap();
    admit(&mut other, &second, &third);
    merge(&mut one, &other);
    merge(&mut other, &one);
    assert_eq!(one, other);
    assert_eq!(ids(&one), set(&[&first, &second]));
    let error =
        one.admit(&first, NewNode::new("n3", &addresses()), third.certificate()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
}

#[test]
fn name_taken_is_refused_and_two_at_once_are_reported() {
    let (first, second) = (node(1), node(2));
    let mut one = founded(&first);
    admit(&mut one, &first, &second);
    let mut other = one.clone();
    let (third, fourth) = (Identity::from_seed("db", [3; 32]), Identity::from_seed("db", [4; 32]));
    admit(&mut one, &first, &third);
    let error =
        one.admit(&first, NewNode::new("db", &addresses()), fourth.certificate()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    admit(&mut other, &second, &fourth);
    merge(&mut one, &other);
    assert_eq!(ids(&one), set(&[&first, &second, &third, &fourth]));
    let nodes = set(&[&third, &fourth]).into_iter().collect();
    assert_eq!(one.conflicts(), [Conflict::SameName { name: "db".to_owned(), nodes }]);
    // The admission of an admitted node changes nothing.
    let before = one.clone();
    admit(&mut one, &second, &third);
    assert_eq!(one, before);
}

#[test]
fn forged_and_foreign_records_are_left_out() {
    let (first, second, stranger) = (node(1), node(2), node(9));
    let mut list = founded(&first);
    let before = list.clone();
    let by_stranger = admit_record(&list, &stranger, &second);
    let mut in_the_name_of_first = admit_record(&list, &stranger, &second);
    in_the_name_of_first.signer = first.id();
    let mut changed = admit_record(&list, &first, &second);
    if let Statement::Admission { name, .. } = &mut changed.statement {
        "other".clone_into(name);
    }
    let other_founder = founded(&stranger).records.values().next().unwrap().clone();
    let mut moved = other_founder.clone();
    moved.cluster = list.cluster();
    let records = vec![by_stranger, in_the_name_of_first, changed, other_founder, moved];
    let merged = list.merge(records).unwrap();
    assert_eq!((merged.added_count, list == before), (0, true));
    let foreign = founded(&stranger);
    let (theirs, ours) = (foreign.cluster(), list.cluster());
    let refusal = list.merge_bytes(&foreign.encode()).unwrap_err();
    assert_eq!(refusal, Refusal::Cluster { theirs, ours });
    let refusal = AdmissionList::decode(&foreign.encode(), Some(ours)).unwrap_err();
    assert_eq!(refusal, Refusal::Cluster { theirs, ours });
}

#[test]
fn damaged_documents_are_refused() {
    let (first, second) = (node(1), node(2));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    let text = String::from_utf8(list.encode()).unwrap();
    let renamed = text.replace("\"n2\"", "\"n3\"");
    assert_eq!(AdmissionList::decode(renamed.as_bytes(), None), Err(Refusal::Damaged));
    let newer = text.replace("\"version\":1", "\"version\":3,\"new\":0");
    let version = Refusal::Version { theirs: 3, ours: 2 };
    assert_eq!(AdmissionList::decode(newer.as_bytes(), None), Err(version));
    let cluster = list.cluster();
    let empty = format!("{{\"version\":1,\"cluster\":\"{cluster}\",\"records\":[]}}");
    assert_eq!(AdmissionList::decode(empty.as_bytes(), None), Err(Refusal::NoFounder));
    let long = vec![b' '; DOCUMENT_BYTES_MAX + 1];
    assert_eq!(AdmissionList::decode(&long, None), Err(Refusal::TooLarge));
}

#[test]
fn list_with_too_many_nodes_is_refused_as_a_whole() {
    let first = node(1);
    let mut list = founded(&first);
    let record = |number: usize| {
        let identity = Identity::generate(&format!("m{number}")).unwrap();
        admit_record(&list, &first, &identity)
    };
    let mut records: Vec<Record> = (1..NODE_COUNT_MAX).map(record).collect();
    let one_more = record(NODE_COUNT_MAX);
    records.push(one_more.clone());
    let before = list.clone();
    assert_eq!(list.merge(records.clone()), Err(Refusal::TooLarge));
    assert_eq!(list, before);
    records.pop();
    list.merge(records).unwrap();
    assert_eq!(list.nodes().len(), NODE_COUNT_MAX);
    assert_eq!(list.merge(vec![one_more]), Err(Refusal::TooLarge));
    assert!(list.encode().len() < DOCUMENT_BYTES_MAX / 4);
}

#[test]
fn list_never_outgrows_its_file() {
    let (first, second) = (node(1), node(2));
    let mut list = founded(&first);
    admit(&mut list, &first, &second);
    let removal = |number: u32| {
        let digest = |at: u32| crate::identity::sha256(&(number << 16 | at).to_le_bytes());
        let mut kept: Vec<Digest> = (0..3000).map(digest).collect();
        kept.sort_unstable();
        let statement = Statement::Removal { kept };
        Record::sign(&first, list.cluster(), second.id(), statement).unwrap()
    };
    let removals: Vec<Record> = (0..60).map(removal).collect();
    let refused = removals.into_iter().find_map(|record| list.merge(vec![record]).err());
    assert_eq!(refused, Some(Refusal::TooLarge));
    assert_eq!(AdmissionList::decode(&list.encode(), None).unwrap(), list);
}

/// One change of a history: at which of the lists, its kind, by which node, and about which other.
type Step = (u8, u8, u8, u8);

/// Makes three lists with a common founder that change apart and sometimes merge. Some nodes sign
/// after their removal, and some removals keep nothing.
fn lists(steps: &[Step]) -> Vec<AdmissionList> {
    let all: Vec<Identity> = (1..=6).map(node).collect();
    let mut lists = vec![founded(&all[0]); 3];
    for (at, kind, by, about) in steps {
        let (at, by) = (usize::from(at % 3), &all[usize::from(by % 6)]);
        let other = lists[usize::from(about % 3)].clone();
        let about = &all[usize::from(about % 6)];
        let list = &mut lists[at];
        match kind % 6 {
            0 | 1 => {
                drop(list.admit(by, NewNode::new(about.name(), &addresses()), about.certificate()))
            }
            2 => drop(list.remove(by, about.id())),
            3 => drop(list.merge(vec![remove_record(list, by, about.id())]).unwrap()),
            4 => drop(list.merge(vec![admit_record(list, by, about)]).unwrap()),
            _ => drop(merge(list, &other)),
        }
    }
    lists
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_order_of_merges_gives_the_same_list(
        steps in proptest::collection::vec(any::<Step>(), 0..40),
        order in Just([0usize, 1, 2]).prop_shuffle(),
    ) {
        let lists = lists(&steps);
        let mut straight = lists[0].clone();
        merge(&mut straight, &lists[1]);
        merge(&mut straight, &lists[2]);
        let mut shuffled = lists[order[0]].clone();
        merge(&mut shuffled, &lists[order[1]]);
        merge(&mut shuffled, &lists[order[1]]);
        merge(&mut shuffled, &lists[order[2]]);
        prop_assert_eq!(&shuffled, &straight);
        // Grouped the other way.
        let mut inner = lists[order[1]].clone();
        merge(&mut inner, &lists[order[2]]);
        let mut grouped = lists[order[0]].clone();
        merge(&mut grouped, &inner);
        prop_assert_eq!(&grouped, &straight);
        let read = AdmissionList::decode(&straight.encode(), None).unwrap();
        prop_assert_eq!(&read, &straight);
    }

    /// Whatever the order of events, a node that was removed by a node that nothing was ever said
    /// against stays removed.
    #[test]
    fn removed_by_the_founder_is_removed_for_ever(
        steps in proptest::collection::vec(any::<Step>(), 0..40),
    ) {
        let founder = node(1);
        let lists = lists(&steps);
        let mut all = lists[0].clone();
        merge(&mut all, &lists[1]);
        merge(&mut all, &lists[2]);
        let removes_founder = |record: &Record| {
            record.node == founder.id() && matches!(record.statement, Statement::Removal { .. })
        };
        prop_assume!(!all.records.values().any(removes_founder));
        for record in all.records.values() {
            let is_removal = matches!(record.statement, Statement::Removal { .. });
            if is_removal && record.signer == founder.id() {
                prop_assert!(!all.nodes().contains_key(&record.node));
            }
        }
        for list in &lists {
            // The founder counts on every list, as nothing was said against it.
            prop_assert!(list.nodes().contains_key(&founder.id()));
        }
    }
}
