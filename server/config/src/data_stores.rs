//! `[data]`: the scheme of the segments, and the stores of their fragments.

use crate::DriveUrl;
use block::quantities::{Span, check_name};
use block::{Error, ErrorKind, Result};
use erasure::Scheme;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::collections::BTreeSet;
use std::fmt;
use tiering::tiers::{TierPolicy, Tiers};

/// Most data stores of a pool. Chosen by hand: each is looked at every few seconds.
pub const DATA_STORE_COUNT_MAX: usize = 256;

/// Most hundredths of the data stores that may be kept free. Chosen by hand.
const FREE_MIN_MAX: u8 = 90;

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "options::OPTIONS documents every field")]
pub struct DataSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stores: Vec<DataStoreSettings>,
    #[serde(serialize_with = "tiers_name", deserialize_with = "tiers_named")]
    pub tiers: Tiers,
    pub cold_after: Span,
    pub free_min: u8,
    pub lost_after: Span,
}

fn tiers_name<S: Serializer>(tiers: &Tiers, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(tiers.name())
}

fn tiers_named<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Tiers, D::Error> {
    let name = String::deserialize(deserializer)?;
    name.parse().map_err(|unknown| D::Error::custom(format!("data.tiers {name:?}: {unknown}")))
}

impl Default for DataSettings {
    fn default() -> Self {
        DataSettings {
            scheme: None,
            group: None,
            stores: Vec::new(),
            tiers: Tiers::DataStores,
            cold_after: Span::from_secs(7 * 86_400),
            free_min: 20,
            lost_after: Span::from_secs(15 * 60),
        }
    }
}

/// `[[data.stores]]`: a table, or only the URL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs, reason = "options::OPTIONS documents every field")]
pub struct DataStoreSettings {
    pub url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env_prefix: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// The table of a store.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    url: String,
    domain: Option<String>,
    env_prefix: Option<String>,
    weight: Option<u32>,
}

impl<'de> Deserialize<'de> for DataStoreSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StoreVisitor)
    }
}

struct StoreVisitor;

impl<'de> Visitor<'de> for StoreVisitor {
    type Value = DataStoreSettings;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the URL of a store, or a table with its url")
    }

    fn visit_str<E>(self, url: &str) -> Result<DataStoreSettings, E> {
        let url = url.to_owned();
        Ok(DataStoreSettings { url, domain: None, env_prefix: None, weight: None })
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<DataStoreSettings, A::Error> {
        let table = Table::deserialize(MapAccessDeserializer::new(map))?;
        let Table { url, domain, env_prefix, weight } = table;
        Ok(DataStoreSettings { url, domain, env_prefix, weight })
    }
}

impl DataStoreSettings {
    /// The failure domain: by default the node of a drive, and otherwise the store itself.
    #[must_use]
    pub fn domain(&self) -> &str {
        let default = || DriveUrl::domain_of(&self.url).unwrap_or(&self.url);
        self.domain.as_deref().unwrap_or_else(default)
    }

    /// The share of new fragments, relative to other stores.
    #[must_use]
    pub fn weight(&self) -> u32 {
        self.weight.unwrap_or(1)
    }

    /// Checks a store by itself.
    ///
    /// # Errors
    /// `Invalid` for a URL, a domain or a weight that cannot be.
    pub fn check(&self) -> Result<()> {
        let url = &self.url;
        let drive = DriveUrl::parse(url).map_err(|error| error.context("data.stores"))?;
        match (drive, &self.env_prefix) {
            (None, _) => {
                control::store::check_url(url).map_err(|error| error.context("data.stores"))?;
            }
            (Some(_), Some(_)) => {
                let what =
                    format!("data.stores: {url}: a data node needs no env_prefix; leave it out");
                return Err(invalid(what));
            }
            (Some(_), None) => {}
        }
        if self.domain().trim().is_empty() {
            return Err(invalid(format!("data.stores: {url}: the domain is empty")));
        }
        if !(1..=1000).contains(&self.weight()) {
            let weight = self.weight();
            let what = format!("data.stores: {url}: weight {weight}: must be from 1 to 1000");
            return Err(invalid(what));
        }
        Ok(())
    }
}

impl DataSettings {
    /// The scheme of new segments, if there are data stores.
    ///
    /// # Panics
    /// Never for settings of a configuration: they were checked.
    #[must_use]
    pub fn scheme(&self) -> Option<Scheme> {
        let scheme = self.scheme.as_ref()?;
        Some(scheme.parse().expect("checked when the configuration was made"))
    }

    /// Where the segments are to be.
    #[must_use]
    pub fn policy(&self) -> TierPolicy {
        let DataSettings { tiers, free_min, .. } = *self;
        TierPolicy { tiers, cold_after: self.cold_after.duration(), free_min }
    }

    pub(super) fn check(&self) -> Result<()> {
        if !(Span::from_secs(10)..=Span::from_secs(365 * 86_400)).contains(&self.cold_after) {
            return Err(invalid(format!(
                "data.cold_after {}: must be from 10s to 365d",
                self.cold_after
            )));
        }
        if self.free_min > FREE_MIN_MAX {
            return Err(invalid(format!(
                "data.free_min {}: must be from 0 to {FREE_MIN_MAX}",
                self.free_min
            )));
        }
        if !(Span::from_secs(1)..=Span::from_secs(30 * 86_400)).contains(&self.lost_after) {
            return Err(invalid(format!(
                "data.lost_after {}: must be from 1s to 30d",
                self.lost_after
            )));
        }
        if let Some(group) = &self.group {
            check_name("media group", group)
                .map_err(|why| invalid(format!("data.group: {why}")))?;
        }
        let Some(scheme) = &self.scheme else {
            if self.group.is_some() {
                return Err(invalid("data.group needs data.scheme, such as \"4+2\""));
            }
            if self.tiers.is_moving() {
                return Err(invalid("data.tiers needs data.scheme, such as \"4+2\""));
            }
            return match self.stores.is_empty() {
                true => Ok(()),
                false => Err(invalid("data.stores needs data.scheme, such as \"4+2\"")),
            };
        };
        let scheme: Scheme = scheme.parse().map_err(|error: Error| error.context("data.scheme"))?;
        if self.stores.len() > DATA_STORE_COUNT_MAX {
            return Err(invalid(format!("data.stores: a pool has {DATA_STORE_COUNT_MAX} at most")));
        }
        for (index, store) in self.stores.iter().enumerate() {
            store.check()?;
            if self.stores.iter().take(index).any(|earlier| earlier.url == store.url) {
                return Err(invalid(format!("data.stores: {} is named twice", store.url)));
            }
        }
        let domains: BTreeSet<&str> = self.stores.iter().map(DataStoreSettings::domain).collect();
        // Those that are to be empty get no fragments, and only the nodes know which drives a media group has.
        let is_known = self.group.is_none() && self.tiers != Tiers::ObjectStore;
        if is_known && domains.len() < scheme.fragments() {
            return Err(invalid(format!(
                "data.scheme {scheme} needs stores in {} failure domains, and data.stores has {}: add stores, or use \
                 a scheme with fewer fragments",
                scheme.fragments(),
                domains.len()
            )));
        }
        Ok(())
    }
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, why)
}
