//! Changes of the list by commands, while the pool is open.
//!
//! Invariants:
//! - The list has a change before anything follows from it. A command that has succeeded is seen by every later owner:
//!   the ownership is checked before the write and after it.
//! - The stores that take new fragments and work stay in as many failure domains as the scheme needs.

use super::identity;
use super::list::{self, List, StoreEntry};
use super::opener::entry_of;
use super::{ListWriter, OpenedStores};
use block::{Error, ErrorKind, Result};
use config::{DATA_STORE_COUNT_MAX, DataStoreSettings, DriveUrl};
use datanode::{Scheme, StoreId};
use engine::data_stores::NewDataStore;
use std::collections::BTreeSet;
use tiering::tiers::Tiers;

/// The newest document of the chain, as far as its writer knows.
#[derive(Debug)]
pub(super) struct Newest {
    pub(super) number: u64,
    /// An attempt to change it has failed, so that it may have another list than the one in use.
    pub(super) is_unsure: bool,
}

impl ListWriter {
    /// Writes a list as the newest one.
    ///
    /// # Errors
    /// `Busy` if another document came first, and `Fenced` if another process owns the pool. After any other error the
    /// list may be the newest one.
    pub(super) async fn write(&self, newest: &mut Newest, list: &List) -> Result<()> {
        self.owner.check().await?;
        newest.is_unsure = true;
        let number = &mut newest.number;
        if let Err(error) = list::write(&self.store, &self.key, self.pool, *number + 1, list).await
        {
            // The answer to this attempt may have been lost, or that to an earlier one, which has the number then.
            let (last, found) = list::read(&self.store, &self.key, self.pool).await?;
            *number = last;
            if found.as_ref() != Some(list) {
                return Err(error);
            }
        } else {
            *number += 1;
        }
        self.owner.check().await?;
        newest.is_unsure = false;
        Ok(())
    }
}

impl OpenedStores {
    /// Changes the list: durably, and then the stores that are open.
    ///
    /// # Errors
    /// Those of `edit`, and of [`ListWriter::write`].
    pub(super) async fn change(&self, edit: impl FnOnce(&mut List) -> Result<()>) -> Result<()> {
        let writer = self.writer()?;
        let mut newest = writer.newest.lock().await;
        let mut list = self.list.lock().clone();
        edit(&mut list)?;
        self.commit(writer, &mut newest, list).await
    }

    pub(super) fn writer(&self) -> Result<&ListWriter> {
        self.writer.as_ref().ok_or_else(|| invalid("the pool is open for reading only"))
    }

    pub(super) async fn commit(
        &self,
        writer: &ListWriter,
        newest: &mut Newest,
        list: List,
    ) -> Result<()> {
        if !newest.is_unsure && *self.list.lock() == list {
            return Ok(());
        }
        if let Err(error) = writer.write(newest, &list).await {
            // The number that was taken is known now.
            if error.kind() != ErrorKind::Busy {
                return Err(error);
            }
            writer.write(newest, &list).await?;
        }
        for entry in &list.stores {
            self.segments.set_weight(StoreId(entry.number), entry.present_weight());
            self.segments.set_domain(StoreId(entry.number), &entry.domain);
        }
        self.segments.set_rebalancing(list.is_rebalancing);
        *self.list.lock() = list;
        self.show_few();
        Ok(())
    }

    pub(super) async fn set_draining(&self, names: &[String], is_draining: bool) -> Result<()> {
        let (scheme, failing) = (self.segments.scheme(), self.failing());
        self.change(|list| {
            let before = list.clone();
            for name in names {
                for at in named(list, name)? {
                    let entry = &mut list.stores[at];
                    entry.is_draining = is_draining;
                    if is_draining || !entry.is_leaving {
                        continue;
                    }
                    if self.is_configured && !entry.is_added {
                        let what = format!(
                            "{}: it is no longer configured; name it in `data.stores`, and restart the daemon",
                            entry.url
                        );
                        return Err(invalid(what));
                    }
                    entry.is_leaving = false;
                }
            }
            // In this tier, no fragments are written.
            match self.policy.tiers {
                Tiers::ObjectStore => Ok(()),
                _ => check_domains(&before, list, &failing, scheme),
            }
        })
        .await
    }

    /// Numbers of the stores that fail now.
    pub(super) fn failing(&self) -> BTreeSet<u32> {
        let states = self.segments.states().into_iter();
        states.filter(|state| state.failure.is_some()).map(|state| state.info.id.0).collect()
    }

    pub(super) async fn replace_store(&self, old: &str, new: &NewDataStore) -> Result<()> {
        let mut settings = settings_of(new);
        settings.check()?;
        let writer = self.writer()?;
        let mut newest = writer.newest.lock().await;
        let mut list = self.list.lock().clone();
        let [at] = named(&list, old)?[..] else {
            return Err(invalid(format!(
                "{old} has several drives; name one of them, as `spindle data list` shows it"
            )));
        };
        let is_in_use = |entry: &StoreEntry| !entry.is_leaving && !entry.is_added;
        let twin = list.stores.iter().find(|entry| entry.url == settings.url);
        if let Some(twin) =
            twin.filter(|twin| twin.number != list.stores[at].number && is_in_use(twin))
        {
            return Err(in_use(twin));
        }
        let old = &list.stores[at];
        // The new one takes its place: in a rack, for instance. What the node of the old one has told is not said of the
        // new one for good: its own node may tell otherwise.
        let is_domain_given = settings.domain.is_some() || self.is_domain_given(old);
        let old_settings =
            settings_of(&NewDataStore { url: old.url.clone(), ..NewDataStore::default() });
        if settings.domain.is_none() && old.domain != old_settings.domain() {
            settings.domain = Some(old.domain.clone());
        }
        let is_domain_given = is_domain_given && settings.domain.is_some();
        let failing = self.failing();
        let (before, old_number) = (list.clone(), old.number);
        list.stores[at].is_draining = true;
        // Before anything is written to the place.
        let then = with_added(&list, entry_of(&settings, 0, ""))?;
        check_domains(&before, &then, &failing, self.segments.scheme())?;
        let entry = self.added(&settings, &list, old_number).await?;
        let entry = StoreEntry { is_domain_given, ..entry };
        let opened = self.opener.open_store(&entry)?;
        let added = entry.number;
        list.stores.retain(|known| known.number != added);
        list.stores.push(entry);
        list.stores.sort_unstable_by_key(|entry| entry.number);
        let (store, place) = opened;
        // The list names a store before it gets a fragment.
        self.commit(writer, &mut newest, list).await?;
        self.segments.add(store);
        let mut places = self.places.lock();
        places.retain(|known| known.url() != place.url());
        places.push(place);
        Ok(())
    }

    /// Whether the configuration or a command has named the failure domain of a store, and not its node.
    fn is_domain_given(&self, entry: &StoreEntry) -> bool {
        entry.is_domain_given || self.group.as_ref().is_none_or(|group| group.is_explicit(entry))
    }

    /// The entry of a place that is added, which becomes a data store unless it is one.
    async fn added(
        &self,
        settings: &DataStoreSettings,
        list: &List,
        old_number: u32,
    ) -> Result<StoreEntry> {
        let place = self.opener.open_place(&settings.url, settings.env_prefix.as_deref())?;
        let entry = match identity::read(&place).await? {
            Some(identity) => self.opener.named(settings, &list.stores, &identity)?,
            None if list.stores.iter().any(|known| known.url == settings.url) => {
                let what = format!(
                    "{}: a data store of this name is elsewhere, or not mounted; name another directory",
                    settings.url
                );
                return Err(invalid(what));
            }
            None => {
                let none = List { stores: Vec::new(), ..list.clone() };
                self.opener.make(settings, &place, &list.stores, &none).await?
            }
        };
        if entry.number == old_number {
            return Err(invalid(format!("{} is the store that it would replace", entry.url)));
        }
        let twin = list.stores.iter().find(|known| known.number == entry.number);
        // The answer to an earlier attempt may have been lost.
        if twin.is_some_and(|twin| !twin.is_leaving && !twin.is_added) {
            return Err(in_use(&entry));
        }
        Ok(StoreEntry { is_added: true, ..entry })
    }
}

/// The list with a store that is added, in place of one of its URL.
///
/// # Errors
/// `Invalid` if it has too many then that take new fragments.
fn with_added(list: &List, entry: StoreEntry) -> Result<List> {
    let mut then = list.clone();
    then.stores.retain(|known| known.url != entry.url);
    then.stores.push(entry);
    match then.in_use_count() > DATA_STORE_COUNT_MAX {
        true => {
            let what = format!("{DATA_STORE_COUNT_MAX} at most take new fragments; drain another");
            Err(invalid(what))
        }
        false => Ok(then),
    }
}

fn in_use(entry: &StoreEntry) -> Error {
    invalid(format!(
        "{} is a data store of the pool already; take the other one out with `spindle data drain`",
        entry.url
    ))
}

/// The places in the list of the stores that a name means: the URL of one, or the URL or the name of a data node.
///
/// # Errors
/// `NotFound` if it means none.
fn named(list: &List, name: &str) -> Result<Vec<usize>> {
    let node = match DriveUrl::parse(name) {
        Ok(Some(url)) if url.drive.is_empty() => url.node,
        Ok(Some(_)) => String::new(),
        Ok(None) | Err(_) => name.to_owned(),
    };
    let is_meant = |entry: &StoreEntry| {
        entry.url == name
            || DriveUrl::parse(&entry.url).is_ok_and(|url| url.is_some_and(|url| url.node == node))
    };
    let stores = list.stores.iter().enumerate();
    let found: Vec<usize> = stores.filter(|(_, entry)| is_meant(entry)).map(|(at, _)| at).collect();
    match found.is_empty() {
        true => {
            let what = format!(
                "find data store {name}: the pool has none of this name; `spindle data list` shows all"
            );
            Err(Error::new(ErrorKind::NotFound, what))
        }
        false => Ok(found),
    }
}

/// Checks that a change leaves enough failure domains, unless it takes none away: in all, and without the stores that fail
/// now.
fn check_domains(
    before: &List,
    after: &List,
    failing: &BTreeSet<u32>,
    scheme: Scheme,
) -> Result<()> {
    let needed = scheme.fragments();
    for (without, note) in [(&BTreeSet::new(), ""), (failing, " that work now")] {
        let count = after.domain_count_without(without);
        if count < before.domain_count_without(without) && count < needed {
            return Err(invalid(format!(
                "new fragments would go to data stores in {count} failure domains{note}, and {scheme} needs {needed}; add \
                 stores in other failure domains first, or use `spindle data replace`"
            )));
        }
    }
    Ok(())
}

fn settings_of(new: &NewDataStore) -> DataStoreSettings {
    let NewDataStore { url, env_prefix, domain, weight } = new.clone();
    DataStoreSettings { url, domain, env_prefix, weight }
}

fn invalid(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format!("change the data stores: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(number: u32) -> StoreEntry {
        let url = format!("/mnt/{number}");
        let settings = settings_of(&NewDataStore { url, ..NewDataStore::default() });
        entry_of(&settings, number, "")
    }

    #[test]
    fn store_is_replaced_in_a_pool_that_has_all_that_it_may_have() {
        let stores: Vec<StoreEntry> = (1..=256).map(entry).collect();
        let mut list = List { scheme: "1+1".to_owned(), stores, is_rebalancing: false };
        let refused = with_added(&list, entry(300)).unwrap_err().chain();
        assert!(refused.contains("256 at most"), "{refused}");
        list.stores[7].is_draining = true;
        let then = with_added(&list, entry(300)).expect("the old one takes nothing");
        assert_eq!((then.stores.len(), then.in_use_count()), (257, 256));
        // The answer to an earlier attempt was lost.
        let again = with_added(&then, entry(300)).expect("it is the same one");
        assert_eq!(again.in_use_count(), 256);
        list.stores[8].is_leaving = true;
        assert!(with_added(&list, entry(301)).is_ok());
    }
}
