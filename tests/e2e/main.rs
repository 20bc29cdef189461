//! End to end: the shipped binary, real clients, real stores, real damage.
//!
//! Invariants:
//! - A test that lacks something on this machine says so and is counted as skipped.
#![expect(
    clippy::disallowed_methods,
    reason = "real processes and sockets are tested in real time"
)]

mod clients;
mod clones;
mod conditions;
mod conformance;
mod copies;
mod copies_parts;
mod damage;
mod data_commands;
mod data_failures;
mod data_nodes;
mod data_stores;
mod dedicated_keys;
mod dedup;
mod demo;
mod devices;
mod devices_full_log;
mod devices_many;
mod devices_moments;
mod devices_nodes;
mod devices_remote;
mod devices_units;
mod doctor;
mod fail_over;
mod failed_log;
mod filesystem;
mod guest;
mod ill_store;
mod late;
mod media_groups;
mod members_failing;
mod mounted;
mod neighbour;
mod nodes;
mod nodes_misused;
mod nodes_replaced;
mod one_object;
mod operator;
mod postgres;
mod power;
mod providers;
mod ride;
mod rounds;
mod scrub;
mod shortage;
mod slow_member;
mod snapshots;
mod soak;
mod space;
mod stores;
mod superseded;
mod tiers;
mod tls;
