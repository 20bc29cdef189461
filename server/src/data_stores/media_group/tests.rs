//! Which drives of a media group become data stores, and which stores stay.

use super::*;
use uuid::Uuid;

fn node(name: &str) -> NodeName {
    let id = Uuid::new_v5(&Uuid::NAMESPACE_OID, name.as_bytes()).to_string();
    NodeName { name: name.to_owned(), id, is_ambiguous: false }
}

fn drive(at: &str, group: Option<&str>) -> FoundDrive {
    let (of, name) = at.split_once('/').expect("NODE/DRIVE");
    let group = group.map(str::to_owned);
    let id = Uuid::new_v5(&Uuid::NAMESPACE_URL, at.as_bytes());
    let offer = DriveOffer { id, name: name.to_owned(), group, domain: None };
    FoundDrive { node: node(of), offer }
}

/// The answers of these drives' nodes, about the group `nvme`.
fn found(drives: &[(&str, &str)]) -> Findings {
    let drives: Vec<FoundDrive> =
        drives.iter().map(|&(at, group)| drive(at, Some(group))).collect();
    let answered = drives.iter().map(|drive| drive.node.clone()).collect();
    Findings { group: "nvme".to_owned(), drives, answered, ..Findings::default() }
}

fn entry(number: u32, url: &str) -> StoreEntry {
    let (url, id) = (url.to_owned(), format!("id {number}"));
    let settings = DataStoreSettings { url, domain: None, env_prefix: None, weight: None };
    entry_of(&settings, number, &id)
}

fn list(stores: Vec<StoreEntry>) -> List {
    List { scheme: "1+1".to_owned(), stores, is_rebalancing: false }
}

fn urls(drives: &[FoundDrive]) -> Vec<String> {
    drives.iter().map(|drive| drive.settings().url).collect()
}

#[test]
fn drives_of_the_group_that_the_list_lacks_are_new() {
    let findings = found(&[("d1/a", "nvme"), ("d1/b", "hdd"), ("d2/a", "nvme"), ("d3/a", "nvme")]);
    let draining = StoreEntry { is_draining: true, ..entry(1, "spindle://d1/a") };
    // A URL without a drive means the only one.
    let known = list(vec![draining, entry(2, "spindle://d3"), entry(3, "/mnt/nvme0")]);
    assert_eq!(urls(&findings.unlisted(&known)), ["spindle://d2/a"]);
    assert_eq!(findings.unlisted(&list(Vec::new())).len(), 3);
    let full: Vec<StoreEntry> =
        (1..=256).map(|number| entry(number, &format!("/mnt/{number}"))).collect();
    assert!(findings.unlisted(&list(full.clone())).is_empty());
    let mut all = list(full);
    assert!(admit(&mut all, vec![entry(300, "spindle://d2/a")], |_| true).changed.is_empty());
    // One that is drained takes nothing, and leaves its place to another one.
    all.stores[0].is_draining = true;
    assert_eq!(findings.unlisted(&all).len(), 1);
}

#[test]
fn drives_of_one_identity_are_not_added_and_the_one_in_use_stays() {
    let mut findings = found(&[("d1/a", "nvme"), ("d2/b", "nvme"), ("d3/a", "nvme")]);
    findings.drives[1].offer.id = findings.drives[0].offer.id;
    let none = list(Vec::new());
    assert_eq!(urls(&findings.unlisted(&none)), ["spindle://d3/a"]);
    let doubles: Vec<String> = findings.doubles(&none).into_iter().map(|(url, _)| url).collect();
    assert_eq!(doubles, ["spindle://d1/a", "spindle://d2/b"]);
    let one = list(vec![entry(1, "spindle://d1/a")]);
    assert_eq!(urls(&findings.unlisted(&one)), ["spindle://d3/a"]);
    let doubles = findings.doubles(&one);
    assert!(doubles.len() == 1 && doubles[0].0 == "spindle://d2/b", "{doubles:?}");
    assert!(doubles[0].1.chain().contains("spindle://d1/a"), "{doubles:?}");
    // A copy in another group is not used anyway.
    findings.drives[1].offer.group = Some("out".to_owned());
    assert_eq!(urls(&findings.unlisted(&none)), ["spindle://d1/a", "spindle://d3/a"]);
    assert!(findings.doubles(&none).is_empty());
    assert!(findings.is_offered("spindle://d2/b") && !findings.is_offered("spindle://d2/a"));
}

#[test]
fn node_whose_name_another_one_has_is_named_by_its_id() {
    let mut findings = found(&[("d1/a", "nvme")]);
    findings.drives[0].node.is_ambiguous = true;
    let by_id = format!("spindle://{}/a", node("d1").id);
    assert_eq!(urls(&findings.unlisted(&list(Vec::new()))), *std::slice::from_ref(&by_id));
    assert!(findings.unlisted(&list(vec![entry(1, &by_id)])).is_empty());
}

#[test]
fn store_leaves_only_if_its_node_says_that_it_is_not_in_the_group() {
    let mut findings = found(&[("d1/a", "nvme"), ("d2/a", "hdd")]);
    findings.silent.push((node("d3"), "no answer".to_owned()));
    findings.others.push(node("d4"));
    let drained = |number, url| StoreEntry {
        is_draining: true,
        is_added: true,
        is_leaving: true,
        ..entry(number, url)
    };
    let urls = ["spindle://d1/a", "spindle://d2/a", "spindle://d3/a", "spindle://d4/a"];
    findings.removed = BTreeSet::from(["d6".to_owned()]);
    // A node that this one does not know, one that answered without the drive, a directory, and a node that was removed.
    let others = ["spindle://d5/a", "spindle://d2/b", "/mnt/nvme0", "spindle://d6/a"];
    let stores: Vec<StoreEntry> =
        (1..).zip(urls.iter().chain(&others)).map(|(number, url)| drained(number, url)).collect();
    let mut then = list(stores.clone());
    let stays = |entry: &StoreEntry| StoreEntry { is_leaving: false, ..entry.clone() };
    let before: Vec<StoreEntry> = stores.iter().map(stays).collect();
    findings.retain(&mut then, &before);
    let leaving: Vec<bool> = then.stores.iter().map(|entry| entry.is_leaving).collect();
    assert_eq!(leaving, [false, true, false, false, false, true, true, true]);
    assert!(then.stores.iter().all(|entry| entry.is_draining && entry.is_added));
    // Without an answer, a store that was leaving goes on.
    let mut then = list(stores.clone());
    findings.retain(&mut then, &stores);
    assert!(!then.stores[0].is_leaving && then.stores[2].is_leaving);
    let asked: Vec<String> = leaving_nodes(&list(stores)).into_iter().collect();
    assert_eq!(asked, ["d1", "d2", "d3", "d4", "d5", "d6"]);
    // The name of a node that was removed may be that of another one.
    findings.silent.push((node("d6"), "no answer".to_owned()));
    assert_eq!(findings.membership("spindle://d6/a"), Membership::Unknown);
    // One that the configuration has named before stays as a drive of the group.
    let unnamed = StoreEntry { is_leaving: true, ..entry(1, "spindle://d1/a") };
    let mut then = list(vec![unnamed.clone()]);
    findings.retain(&mut then, &[unnamed]);
    assert!(then.stores[0].is_added && !then.stores[0].is_leaving);
}

#[test]
fn found_drive_is_added_once_and_follows_its_drive_to_another_node() {
    let mut known = list(vec![entry(7, "/mnt/nvme0")]);
    let found = entry(3, "spindle://d1/a");
    let added = admit(&mut known, vec![found.clone()], |_| false);
    assert_eq!(added.changed, BTreeSet::from([3]));
    assert_eq!(known.stores.iter().map(|entry| entry.number).collect::<Vec<_>>(), [3, 7]);
    assert!(known.stores[0].is_added);
    known.stores[0].is_draining = true;
    let again = admit(&mut known, vec![found.clone()], |_| true);
    assert!(again.changed.is_empty() && again.refused.is_empty(), "{again:?}");
    let moved = StoreEntry { url: "spindle://d2/a".to_owned(), ..found.clone() };
    let refused = admit(&mut known, vec![moved.clone()], |_| false);
    assert!(refused.changed.is_empty() && known.stores[0].url == found.url, "{refused:?}");
    assert_eq!(refused.refused[0].0, "spindle://d2/a", "the one in use works: the other is a copy");
    let followed = admit(&mut known, vec![moved], |_| true);
    assert_eq!(followed.changed, BTreeSet::from([3]));
    assert_eq!(known.stores[0].url, "spindle://d2/a");
    assert!(known.stores[0].is_draining, "it stays drained");
    // Another store of the number, and one that the configuration names, stay as they are.
    let other = StoreEntry { id: "other".to_owned(), ..found };
    let configured = entry(7, "spindle://d1/a");
    assert!(admit(&mut known, vec![other, configured], |_| true).changed.is_empty());
    assert_eq!(known.stores[1].url, "/mnt/nvme0");
}

#[test]
fn label_of_a_drive_is_the_failure_domain_of_its_store_unless_another_one_is_named() {
    let mut findings = found(&[("d1/a", "nvme"), ("d2/a", "nvme")]);
    for drive in &mut findings.drives {
        drive.offer.domain = Some("rack-a".to_owned());
    }
    assert_eq!(findings.drives[0].settings().domain(), "rack-a");
    let domains = |known: &List| -> Vec<String> {
        known.stores.iter().map(|entry| entry.domain.clone()).collect()
    };
    let given = StoreEntry {
        is_domain_given: true,
        domain: "rack b".to_owned(),
        ..entry(3, "spindle://d1/a")
    };
    // The first one may be configured without a domain.
    let mut known = list(vec![entry(1, "spindle://d1/a"), entry(2, "spindle://d2/a"), given]);
    let explicit = BTreeSet::from(["spindle://d2/a".to_owned()]);
    findings.label(&mut known, &explicit);
    assert_eq!(domains(&known), ["rack-a", "spindle://d2", "rack b"]);
    // The label is taken away.
    findings.drives[0].offer.domain = None;
    findings.label(&mut known, &explicit);
    assert_eq!(domains(&known), ["spindle://d1", "spindle://d2", "rack b"]);
    // A node that does not answer changes nothing.
    known.stores[0].domain = "rack-a".to_owned();
    found(&[]).label(&mut known, &explicit);
    assert_eq!(domains(&known)[0], "rack-a");
}

#[test]
fn drive_that_cannot_be_added_is_a_condition_until_it_is_or_has_gone() {
    let settings = DataSettings { group: Some("nvme".to_owned()), ..DataSettings::default() };
    let group = MediaGroup::of(&settings).expect("it has one");
    let conditions = Conditions::default();
    let is_shown = || conditions.is_raised(ConditionKind::DataStoreAway, "spindle://d1/a");
    let failed = || vec![("spindle://d1/a".to_owned(), same_as("spindle://d2/b"))];
    let mut findings = found(&[("d1/a", "nvme"), ("d2/b", "nvme")]);
    for _ in 0..2 {
        group.note_failures(&conditions, &findings, failed());
        assert!(is_shown());
    }
    let what = conditions.list()[0].report.what.clone();
    assert!(what.contains("media group nvme") && what.contains("identity"), "{what}");
    group.note_failures(&conditions, &findings, Vec::new());
    assert!(!is_shown());
    group.note_failures(&conditions, &findings, failed());
    // Its node does not answer, and nothing is known then.
    findings.silent.push((node("d1"), "no answer".to_owned()));
    group.note_failures(&conditions, &findings, Vec::new());
    assert!(is_shown());
    group.note_failures(&conditions, &found(&[]), Vec::new());
    assert!(!is_shown() && conditions.list().is_empty());
}

#[test]
fn too_few_drives_are_explained_by_node() {
    let mut findings = found(&[("d1/a", "nvme"), ("d2/a", "hdd")]);
    findings.answered = vec![node("d1"), node("d2")];
    let scheme: Scheme = "2+1".parse().unwrap();
    let error = findings.too_few(scheme, 1, &[]);
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let said = error.chain();
    for word in [
        "2+1 needs drives in 3 failure domains",
        "have 1;",
        "answered: d1 (1 drives of the group), d2 (0 drives of the group)",
        "every node of the cluster answered",
        "groups of the drives: hdd, nvme",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    // A start that is repeated may succeed.
    findings.silent = (0..30).map(|number| (node(&format!("e{number}")), "why".into())).collect();
    let error = findings.too_few(scheme, 1, &[]);
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let said = error.chain();
    assert!(said.contains("did not answer: e0 (why)") && said.contains("and others"), "{said}");
    assert!(said.len() < 2000, "{said}");
}

#[test]
fn group_of_a_store_is_what_its_node_has_told_last() {
    let settings = DataSettings {
        scheme: Some("1+1".to_owned()),
        group: Some("nvme".to_owned()),
        ..DataSettings::default()
    };
    let group = MediaGroup::of(&settings).expect("it has one");
    assert_eq!(group.group_at("spindle://d1/a"), None);
    group.note(&found(&[("d1/a", "nvme"), ("d2/a", "hdd")]));
    assert_eq!(group.group_at("spindle://d1/a").as_deref(), Some("nvme"));
    let mut later = found(&[("d2/a", "nvme")]);
    later.silent.push((node("d1"), "no answer".to_owned()));
    group.note(&later);
    let told = ["d1", "d2"].map(|node| group.group_at(&format!("spindle://{node}/a")));
    assert_eq!(told, [Some("nvme".to_owned()), Some("nvme".to_owned())]);
    group.note(&found(&[]));
    assert_eq!(group.group_at("spindle://d1/a"), None);
}
