//! The media group of a pool: the drives of data nodes that are its data stores because they are in a group, and not
//! because the configuration names each of them.
//!
//! Invariants:
//! - A drive that the list has does not leave because it was not found: its node may be away.
//! - A drained drive stays in the list, and drained, until its node says that it is not in the group, or was removed
//!   from the cluster. So it never comes back by itself, also if this node does not know the other one yet.
//! - A failure domain that nodes report counts at once, for fragments that are stored already, too. One that the
//!   configuration or a command names comes first.
//! - Of two drives with one identity, neither is added, and none takes the place of a store that works.
//! - All nodes are asked at once, [`ASKED_MAX`] at a time at most, and each has [`ANSWER_MAX`] to answer.
//! - An opening waits for nodes only if something depends on their answers: for all if the list is made, otherwise for
//!   those of stores that would leave, and for [`DECISION_MAX`] only. The job adds drives later.

use super::identity;
use super::list::{List, StoreEntry};
use super::opener::{Opener, entry_of};
use super::{ConfiguredStores, OpenedStores};
use block::conditions::Report;
use block::{ConditionKind, Conditions, Error, ErrorKind, Result};
use cluster::{Cluster, Node, NodeId};
use config::{DATA_STORE_COUNT_MAX, DataSettings, DataStoreSettings, DriveUrl};
use datanode::Scheme;
use dnode::messages::DriveOffer;
use futures::StreamExt;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tiering::tiers::Tiers;
use tokio::time::timeout;

/// Nodes that are asked at a time. Chosen by hand: a connection for each.
const ASKED_MAX: usize = 256;
/// Longest wait for the answer of a node. Chosen by hand: a person waits for the first opening.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Longest wait for the answer of a node whose store would leave. Chosen by hand: a fail-over waits for it, and without
/// an answer the store stays.
const DECISION_MAX: Duration = Duration::from_secs(1);
/// Shortest and longest pause between two rounds of questions. Chosen by hand: a node that has just joined starts to
/// serve its drives within seconds.
const PAUSE_MIN: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// Most nodes or drives in the text of an error.
const SHOWN_MAX: usize = 20;

/// A node as URLs can name it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeName {
    name: String,
    id: String,
    /// Another node has the same name, so that URLs have the id.
    is_ambiguous: bool,
}

impl NodeName {
    fn in_urls(&self) -> &str {
        if self.is_ambiguous { &self.id } else { &self.name }
    }

    fn is(&self, node: &str) -> bool {
        self.name == node || self.id == node
    }
}

/// A drive of a node that has answered.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FoundDrive {
    node: NodeName,
    offer: DriveOffer,
}

impl FoundDrive {
    fn settings(&self) -> DataStoreSettings {
        let url = format!("spindle://{}/{}", self.node.in_urls(), self.offer.name);
        DataStoreSettings { url, domain: self.offer.domain.clone(), env_prefix: None, weight: None }
    }

    /// Whether a URL may be that of this drive, however it spells the node. Without a drive, it means the only one.
    fn is_at(&self, url: &DriveUrl) -> bool {
        self.node.is(&url.node) && (url.drive.is_empty() || url.drive == self.offer.name)
    }
}

/// What the answers say about a store of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Membership {
    /// It is a drive of the group.
    In,
    /// It is not.
    Out,
    /// Its node did not say.
    Unknown,
}

/// The answers of the nodes of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Findings {
    group: String,
    /// The drives of the nodes that answered, in whichever group.
    drives: Vec<FoundDrive>,
    answered: Vec<NodeName>,
    /// Nodes that did not answer, and why.
    silent: Vec<(NodeName, String)>,
    /// Nodes that serve no drives now.
    others: Vec<NodeName>,
    /// Names and ids of the nodes that were removed from the cluster.
    removed: BTreeSet<String>,
}

/// Asks the other nodes of the cluster for their drives: those of these names or ids, or all. Each has `answer_max`.
async fn ask(
    cluster: &Cluster,
    group: &str,
    only: Option<&BTreeSet<String>>,
    answer_max: Duration,
) -> Findings {
    let nodes = cluster.nodes();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    nodes.iter().for_each(|node| *counts.entry(&node.name).or_default() += 1);
    let name_of = |node: &Node| NodeName {
        name: node.name.clone(),
        id: node.id.to_string(),
        is_ambiguous: counts.get(&*node.name).is_some_and(|count| *count > 1),
    };
    let others = nodes.iter().filter(|node| node.id != cluster.node_id());
    let mut others: Vec<(NodeId, NodeName)> = others.map(|node| (node.id, name_of(node))).collect();
    others.retain(|(_, name)| only.is_none_or(|only| only.iter().any(|node| name.is(node))));
    let asked = others.into_iter().map(|(id, name)| {
        let cluster = cluster.clone();
        async move {
            let answer = timeout(answer_max, dnode::drives_of(&cluster, id)).await;
            let answer = answer.unwrap_or_else(|_| {
                let what = format!("no answer in {} s", answer_max.as_secs());
                Err(Error::new(ErrorKind::Unavailable, what))
            });
            (name, answer)
        }
    });
    let answers: Vec<_> = futures::stream::iter(asked).buffer_unordered(ASKED_MAX).collect().await;
    let removed = cluster.removed_names();
    let mut findings = Findings { group: group.to_owned(), removed, ..Findings::default() };
    for (node, answer) in answers {
        match answer {
            Ok(offers) => {
                let found = |offer| FoundDrive { node: node.clone(), offer };
                findings.drives.extend(offers.into_iter().map(found));
                findings.answered.push(node);
            }
            Err(error) if error.kind() == ErrorKind::Unsupported => findings.others.push(node),
            Err(error) => findings.silent.push((node, error.chain())),
        }
    }
    // The order of answers is that of chance.
    findings.drives.sort_by_cached_key(|drive| drive.settings().url);
    findings.answered.sort_by(|a, b| a.name.cmp(&b.name));
    findings.silent.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    findings
}

impl Findings {
    fn in_group(&self) -> impl Iterator<Item = &FoundDrive> {
        self.drives.iter().filter(|drive| drive.offer.group.as_deref() == Some(&*self.group))
    }

    /// Whether this node has not said which drives it has.
    fn is_unknown(&self, node: &str) -> bool {
        let silent = self.silent.iter().map(|(node, _)| node);
        silent.chain(&self.others).any(|other| other.is(node))
    }

    fn membership(&self, url: &str) -> Membership {
        let Ok(Some(url)) = DriveUrl::parse(url) else { return Membership::Out };
        if self.in_group().any(|drive| drive.is_at(&url)) {
            return Membership::In;
        }
        let has_answered = self.answered.iter().any(|node| node.is(&url.node));
        // A node that this one does not know may have joined: the list of nodes may be an older one.
        let has_said = has_answered || self.removed.contains(&url.node);
        match has_said && !self.is_unknown(&url.node) {
            true => Membership::Out,
            false => Membership::Unknown,
        }
    }

    /// Whether a node has said that it has the drive of a URL, in whichever group.
    fn is_offered(&self, url: &str) -> bool {
        let url = DriveUrl::parse(url).ok().flatten();
        url.is_some_and(|url| self.drives.iter().any(|drive| drive.is_at(&url)))
    }

    /// The drives of the group that the list lacks.
    fn lacking(&self, list: &List) -> Vec<&FoundDrive> {
        let known = list.stores.iter().filter_map(|entry| DriveUrl::parse(&entry.url).ok()?);
        let known: Vec<DriveUrl> = known.collect();
        let is_listed = |drive: &FoundDrive| {
            let mut of_node = known.iter().filter(|url| url.node == drive.node.in_urls());
            of_node.any(|url| drive.is_at(url))
        };
        self.in_group().filter(|drive| !is_listed(drive)).collect()
    }

    /// Another drive of the group with the same identity: one disk is a copy of the other.
    fn twin_of(&self, drive: &FoundDrive) -> Option<&FoundDrive> {
        self.in_group().find(|other| other.offer.id == drive.offer.id && *other != drive)
    }

    /// The drives of the group that the list lacks and that can be added, as many as it has room for.
    fn unlisted(&self, list: &List) -> Vec<FoundDrive> {
        let room = DATA_STORE_COUNT_MAX.saturating_sub(list.in_use_count());
        let lacking = self.lacking(list).into_iter();
        lacking.filter(|drive| self.twin_of(drive).is_none()).take(room).cloned().collect()
    }

    /// The drives of the group that the list lacks and that are not added, as another one has their identity.
    fn doubles(&self, list: &List) -> Vec<(String, Error)> {
        let double = |drive: &FoundDrive| {
            let twin = self.twin_of(drive)?;
            Some((drive.settings().url, same_as(&twin.settings().url)))
        };
        self.lacking(list).into_iter().filter_map(double).collect()
    }

    /// Lets stores stay that would leave as they are not configured, if they are in the group, or their nodes do not
    /// say. `before` has the stores of the list as it was.
    fn retain(&self, list: &mut List, before: &[StoreEntry]) {
        for entry in list.stores.iter_mut().filter(|entry| entry.is_leaving) {
            match self.membership(&entry.url) {
                Membership::In => (entry.is_leaving, entry.is_added) = (false, true),
                Membership::Unknown => {
                    let earlier = before.iter().find(|earlier| earlier.number == entry.number);
                    entry.is_leaving = earlier.is_none_or(|earlier| earlier.is_leaving);
                }
                Membership::Out => {}
            }
        }
    }

    /// Gives the stores the failure domains that their nodes report, or else that of the node, unless a command has
    /// named another one, or the configuration has: `explicit` are the URLs of these.
    fn label(&self, list: &mut List, explicit: &BTreeSet<String>) {
        let is_of_node =
            |entry: &&mut StoreEntry| !entry.is_domain_given && !explicit.contains(&entry.url);
        for entry in list.stores.iter_mut().filter(is_of_node) {
            let Ok(Some(url)) = DriveUrl::parse(&entry.url) else { continue };
            let mut of_node = self.drives.iter().filter(|drive| drive.node.in_urls() == url.node);
            if let Some(found) = of_node.find(|drive| drive.is_at(&url)) {
                let settings = DataStoreSettings { url: entry.url.clone(), ..found.settings() };
                settings.domain().clone_into(&mut entry.domain);
            }
        }
    }

    /// The error for a list that cannot be made.
    fn too_few(&self, scheme: Scheme, count: usize, failures: &[(String, Error)]) -> Error {
        let group = &self.group;
        let answered = self.answered.iter().map(|node| {
            let drives = self.in_group().filter(|drive| drive.node == *node).count();
            format!("{} ({drives} drives of the group)", node.name)
        });
        let answered = shown("no data node answered", "answered: ", answered);
        let silent = self.silent.iter().map(|(node, why)| format!("{} ({why})", node.name));
        let silent = shown("every node of the cluster answered", "did not answer: ", silent);
        let failed = failures.iter().map(|(url, error)| format!("{url} ({})", error.chain()));
        let failed = shown("", "; could not use: ", failed);
        let groups = self.drives.iter().filter_map(|drive| drive.offer.group.clone());
        let groups: BTreeSet<String> = groups.collect();
        let groups = shown("none", "", groups.into_iter());
        let what = format!(
            "make the list of data stores: {scheme} needs drives in {} failure domains, and the media group {group} \
             and `data.stores` have {count}; {answered}; {silent}{failed}; groups of the drives: {groups}. Start the \
             data nodes that did not answer, give more drives the group (`dnode.group`), or use a scheme with fewer \
             fragments",
            scheme.fragments()
        );
        let kind = match self.silent.is_empty() && failures.is_empty() {
            true => ErrorKind::Invalid,
            false => ErrorKind::Unavailable,
        };
        Error::new(kind, what)
    }
}

/// A list for people, of which a long one is cut.
fn shown(none: &str, some: &str, items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.take(SHOWN_MAX + 1).collect();
    match items.len() {
        0 => none.to_owned(),
        count if count > SHOWN_MAX => format!("{some}{} and others", items[..SHOWN_MAX].join(", ")),
        _ => format!("{some}{}", items.join(", ")),
    }
}

/// The error for a drive that is not used, as the one of this URL is the same store.
fn same_as(url: &str) -> Error {
    let what = format!(
        "it has the identity of {url}: one disk may be a copy of the other; empty the copy and mount it under another \
         name, or take it out of the media group"
    );
    Error::new(ErrorKind::Invalid, what)
}

/// URLs of the stores whose failure domains the configuration names.
fn explicit_in(settings: &DataSettings) -> BTreeSet<String> {
    let explicit = settings.stores.iter().filter(|store| store.domain.is_some());
    explicit.map(|store| store.url.clone()).collect()
}

/// The nodes whose drives would leave the list.
fn leaving_nodes(list: &List) -> BTreeSet<String> {
    let leaving = list.stores.iter().filter(|entry| entry.is_leaving);
    leaving.filter_map(|entry| Some(DriveUrl::parse(&entry.url).ok()??.node)).collect()
}

/// The outcome for the entries of found drives.
#[derive(Debug, Default)]
struct Admitted {
    /// Numbers of the stores that the list did not have, and of those that are at another node now.
    changed: BTreeSet<u32>,
    /// Drives that are not used, and why.
    refused: Vec<(String, Error)>,
}

/// Puts the entries of found drives in the list. `has_moved` says whether a store of the list is no longer in its place,
/// so that it may be at another node.
fn admit(
    list: &mut List,
    entries: Vec<StoreEntry>,
    has_moved: impl Fn(&StoreEntry) -> bool,
) -> Admitted {
    let mut admitted = Admitted::default();
    for entry in entries {
        let has_room = list.in_use_count() < DATA_STORE_COUNT_MAX;
        match list.stores.iter_mut().find(|known| known.number == entry.number) {
            Some(known) if known.url == entry.url => {}
            // The configuration says where its own stores are.
            Some(known) if known.is_added && known.id == entry.id && has_moved(known) => {
                admitted.changed.insert(entry.number);
                (known.is_leaving, known.is_domain_given) = (false, false);
                (known.url, known.domain) = (entry.url, entry.domain);
            }
            Some(known) => admitted.refused.push((entry.url, same_as(&known.url))),
            None if has_room => {
                admitted.changed.insert(entry.number);
                list.stores.push(StoreEntry { is_added: true, ..entry });
            }
            None => {}
        }
    }
    list.stores.sort_unstable_by_key(|entry| entry.number);
    admitted
}

/// Opens the places of found drives, and makes them data stores unless they are. Returns the entries, and the drives
/// that cannot be used now.
async fn entries_of(
    opener: &Opener,
    drives: Vec<FoundDrive>,
    list: &List,
) -> (Vec<StoreEntry>, Vec<(String, Error)>) {
    let made = drives.into_iter().map(|drive| async move {
        let settings = drive.settings();
        let entry = entry_at(opener, &settings, list).await;
        (settings.url, entry)
    });
    let (mut entries, mut failures) = (Vec::new(), Vec::new());
    for (url, made) in futures::future::join_all(made).await {
        match made {
            Ok(entry) => entries.push(entry),
            Err(error) => failures.push((url, error)),
        }
    }
    (entries, failures)
}

async fn entry_at(
    opener: &Opener,
    settings: &DataStoreSettings,
    list: &List,
) -> Result<StoreEntry> {
    let place = opener.open_place(&settings.url, None)?;
    match identity::read(&place).await? {
        Some(identity) => opener.named(settings, &list.stores, &identity),
        None => opener.make(settings, &place, &[], list).await,
    }
}

impl ConfiguredStores {
    /// Brings the list, which is in line with the configured stores, in line with the media group.
    ///
    /// # Errors
    /// `Invalid` if the directory belongs to no cluster. When the list is made, `Invalid` or `Unavailable` for too few
    /// drives.
    pub(super) async fn add_group(
        &self,
        opener: &Opener,
        scheme: Scheme,
        found: Option<&List>,
        list: &mut List,
    ) -> Result<()> {
        let Some(group) = &self.settings.group else { return Ok(()) };
        let cluster = opener.cluster(&format!("data.group {group}"))?;
        let explicit = explicit_in(&self.settings);
        // The job that watches the group asks all nodes soon. A node that is away must not delay a fail-over.
        if let Some(found) = found {
            let nodes = leaving_nodes(list);
            if !nodes.is_empty() {
                let findings = ask(&cluster, group, Some(&nodes), DECISION_MAX).await;
                findings.retain(list, &found.stores);
                findings.label(list, &explicit);
            }
            return Ok(());
        }
        let findings = ask(&cluster, group, None, ANSWER_MAX).await;
        let needed = match self.settings.tiers {
            Tiers::ObjectStore => 0,
            _ => scheme.fragments(),
        };
        findings.label(list, &explicit);
        let mut failures = findings.doubles(list);
        let drives = findings.unlisted(list);
        // Before anything is written to the drives.
        let mut then = list.clone();
        then.stores.extend(drives.iter().map(|drive| entry_of(&drive.settings(), 0, "")));
        if then.domain_count() < needed {
            return Err(findings.too_few(scheme, then.domain_count(), &failures));
        }
        let (entries, unusable) = entries_of(opener, drives, list).await;
        failures.extend(unusable);
        failures.extend(admit(list, entries, |_| false).refused);
        match list.domain_count() < needed {
            true => Err(findings.too_few(scheme, list.domain_count(), &failures)),
            false => Ok(()),
        }
    }
}

/// The media group of an open pool.
#[derive(Debug)]
pub(super) struct MediaGroup {
    pub(super) name: String,
    /// URLs of the stores whose failure domains the configuration names.
    explicit: BTreeSet<String>,
    /// The drives that nodes have reported, in whichever group.
    reported: Mutex<Vec<FoundDrive>>,
    /// Drives that could not be added, each of which is a condition.
    failing: Mutex<BTreeSet<String>>,
}

impl MediaGroup {
    /// The media group that the configuration names.
    pub(super) fn of(settings: &DataSettings) -> Option<MediaGroup> {
        let name = settings.group.clone()?;
        let (reported, failing) = (Mutex::default(), Mutex::default());
        Some(MediaGroup { name, explicit: explicit_in(settings), reported, failing })
    }

    /// Whether the configuration names the failure domain of a store.
    pub(super) fn is_explicit(&self, entry: &StoreEntry) -> bool {
        self.explicit.contains(&entry.url)
    }

    /// The group in which a store is, as far as its node has reported.
    pub(super) fn group_at(&self, url: &str) -> Option<String> {
        let url = DriveUrl::parse(url).ok().flatten()?;
        let reported = self.reported.lock();
        reported.iter().find(|drive| drive.is_at(&url)).and_then(|drive| drive.offer.group.clone())
    }

    fn note(&self, findings: &Findings) {
        let mut reported = self.reported.lock();
        // What a node has said before holds until it says something else.
        reported.retain(|drive| findings.is_unknown(&drive.node.id));
        reported.extend(findings.drives.iter().cloned());
    }

    /// Shows the drives that could not be added as conditions, and ends those of others. One whose node has not answered
    /// stays.
    fn note_failures(
        &self,
        conditions: &Conditions,
        findings: &Findings,
        failures: Vec<(String, Error)>,
    ) {
        let mut failing = self.failing.lock();
        let is_unknown = |url: &str| {
            let url = DriveUrl::parse(url).ok().flatten();
            url.is_some_and(|url| findings.is_unknown(&url.node))
        };
        failing.retain(|known| {
            let lasts = is_unknown(known) || failures.iter().any(|(url, _)| url == known);
            if !lasts {
                conditions.clear(ConditionKind::DataStoreAway, known);
            }
            lasts
        });
        for (url, error) in failures {
            let (group, error) = (&self.name, error.chain());
            let report = Report::new(
                format!("the drive {url} of the media group {group} could not be added: {error}"),
                "it gets no fragments",
                "correct the cause; it is tried again every minute",
            );
            conditions.raise(ConditionKind::DataStoreAway, &url, report);
            failing.insert(url);
        }
    }
}

impl OpenedStores {
    /// Asks the nodes again and again, soon after the list of nodes has changed. It returns without a media group, for
    /// a reader, and once another process owns the pool.
    pub(super) async fn watch_group(&self) {
        let (Some(group), true) = (&self.group, self.writer.is_some()) else { return };
        let Ok(cluster) = self.opener.cluster(&group.name) else { return };
        let (mut nodes, mut pause) = (cluster.watch(), PAUSE_MIN);
        loop {
            let findings = ask(&cluster, &group.name, None, ANSWER_MAX).await;
            match self.take_group(group, &findings).await {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Fenced => return,
                Err(error) => {
                    tracing::debug!(error = %error.chain(), "could not add drives; it is tried again");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(PAUSE_MAX),
                changed = nodes.changed() => match changed {
                    Ok(()) => pause = PAUSE_MIN,
                    Err(_) => return,
                },
            }
        }
    }

    /// Brings the list in line with what the nodes have reported, and opens the stores that are new.
    async fn take_group(&self, group: &MediaGroup, findings: &Findings) -> Result<()> {
        group.note(findings);
        let known = self.list.lock().clone();
        // A drive that hangs must not keep commands from the list.
        let drives = findings.unlisted(&known);
        let (entries, unusable) = entries_of(&self.opener, drives, &known).await;
        let mut failures = findings.doubles(&known);
        failures.extend(unusable);
        let writer = self.writer()?;
        let mut newest = writer.newest.lock().await;
        let mut list = self.list.lock().clone();
        let before = list.stores.clone();
        findings.retain(&mut list, &before);
        findings.label(&mut list, &group.explicit);
        let failing = self.failing();
        let has_moved = |known: &StoreEntry| {
            failing.contains(&known.number) && !findings.is_offered(&known.url)
        };
        let Admitted { changed, refused } = admit(&mut list, entries, has_moved);
        failures.extend(refused);
        group.note_failures(&self.conditions, findings, failures);
        let is_changed = |entry: &&StoreEntry| changed.contains(&entry.number);
        let opened =
            list.stores.iter().filter(is_changed).map(|entry| self.opener.open_store(entry));
        let opened: Vec<_> = opened.collect::<Result<_>>()?;
        // The list names a store before it gets a fragment.
        self.commit(writer, &mut newest, list).await?;
        for (store, place) in opened {
            tracing::info!(store = store.name, "the pool uses a drive of its media group");
            // One that is at another node now is opened there.
            self.segments.forget(store.info.id);
            self.segments.add(store);
            let mut places = self.places.lock();
            places.retain(|known| known.url() != place.url());
            places.push(place);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
