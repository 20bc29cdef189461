//! The data stores of a pool: which ones take fragments.

use serde::{Deserialize, Serialize};

/// A request about the data stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "action", deny_unknown_fields)]
pub enum DataRequest {
    /// Shows the stores, and what is on them.
    List {},
    /// Moves all fragments away from stores, which get no new ones. The answer comes before they have moved.
    Drain {
        /// URLs as the list shows them, or names of data nodes: all of their drives.
        stores: Vec<String>,
    },
    /// Lets stores get new fragments again.
    Undrain {
        /// Like those of `Drain`.
        stores: Vec<String>,
    },
    /// Adds a store, and drains another one. The answer comes before the fragments have moved.
    Replace {
        /// The store that is drained, as the list shows it; it may be lost.
        old: String,
        /// URL of the new one.
        new: String,
        /// Its failure domain; absent: the store itself, or its node.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        domain: Option<String>,
        /// Its share of new fragments; absent: 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weight: Option<u32>,
        /// Prefix of the variables with its settings and credentials.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        env_prefix: Option<String>,
    },
    /// Moves fragments to where they would be if their segments were written now. The answer comes before they have
    /// moved.
    Rebalance {
        /// Do not move any more.
        #[serde(default)]
        stop: bool,
    },
}
