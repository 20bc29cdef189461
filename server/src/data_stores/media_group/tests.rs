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
    let offer = DriveOffer { id: Uuid::nil(), name: name.to_owned(), group, domain: None };
    FoundDrive { node: node(of), offer }
}

/// The answers of these drives' nodes, about the group `nvme`.
fn found(drives: &[(&str, &str)]) -> Findings {
    let drives = drives.iter().map(|&(at, group)| drive(at, Some(group))).collect();
    Findings { group: "nvme".to_owned(), drives, ..Findings::default() }
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
    assert!(admit(&mut all, vec![entry(300, "spindle://d2/a")]).is_empty());
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
    // No such node, a node that answered without the drive, and a directory.
    let others = ["spindle://d5/a", "spindle://d2/b", "/mnt/nvme0"];
    let stores: Vec<StoreEntry> =
        (1..).zip(urls.iter().chain(&others)).map(|(number, url)| drained(number, url)).collect();
    let mut then = list(stores.clone());
    let stays = |entry: &StoreEntry| StoreEntry { is_leaving: false, ..entry.clone() };
    let before: Vec<StoreEntry> = stores.iter().map(stays).collect();
    findings.retain(&mut then, &before);
    let leaving: Vec<bool> = then.stores.iter().map(|entry| entry.is_leaving).collect();
    assert_eq!(leaving, [false, true, false, false, true, true, true]);
    assert!(then.stores.iter().all(|entry| entry.is_draining && entry.is_added));
    // Without an answer, a store that was leaving goes on.
    let mut then = list(stores.clone());
    findings.retain(&mut then, &stores);
    assert!(!then.stores[0].is_leaving && then.stores[2].is_leaving);
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
    assert_eq!(admit(&mut known, vec![found.clone()]), BTreeSet::from([3]));
    assert_eq!(known.stores.iter().map(|entry| entry.number).collect::<Vec<_>>(), [3, 7]);
    assert!(known.stores[0].is_added);
    known.stores[0].is_draining = true;
    assert!(admit(&mut known, vec![found.clone()]).is_empty());
    let moved = StoreEntry { url: "spindle://d2/a".to_owned(), ..found.clone() };
    assert_eq!(admit(&mut known, vec![moved]), BTreeSet::from([3]));
    assert_eq!(known.stores[0].url, "spindle://d2/a");
    assert!(known.stores[0].is_draining, "it stays drained");
    // Another store of the number, and one that the configuration names, stay as they are.
    let other = StoreEntry { id: "other".to_owned(), ..found };
    let configured = entry(7, "spindle://d1/a");
    assert!(admit(&mut known, vec![other, configured]).is_empty());
    assert_eq!(known.stores[1].url, "/mnt/nvme0");
}

#[test]
fn label_of_a_drive_is_the_failure_domain_of_a_store_that_is_not_configured() {
    let mut findings = found(&[("d1/a", "nvme"), ("d2/a", "nvme")]);
    for drive in &mut findings.drives {
        drive.offer.domain = Some("rack-a".to_owned());
    }
    assert_eq!(findings.drives[0].settings().domain(), "rack-a");
    let added = |number, url| StoreEntry { is_added: true, ..entry(number, url) };
    let mut known = list(vec![added(1, "spindle://d1/a"), added(2, "spindle://d2/a")]);
    findings.label(&mut known, &BTreeSet::from(["spindle://d2/a".to_owned()]));
    let domains: Vec<&str> = known.stores.iter().map(|entry| &*entry.domain).collect();
    assert_eq!(domains, ["rack-a", "spindle://d2"]);
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
