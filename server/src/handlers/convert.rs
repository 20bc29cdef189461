//! Conversions between the types of `api` and those of the engine.
//!
//! Invariant: a conversion loses nothing that the other side needs, and decides nothing.

use api::config::{ExampleInfo, OptionInfo};
use api::device::{AttachOptions, AttachmentInfo, ClientInfo, Driver, RemoteDeviceInfo};
use api::key::{KeySlotInfo, NewKey, Secret, SlotKind};
use api::pool::{FsckInfo, PoolPurged, PoolRemoved, PoolRestored};
use api::restore::PoolFromCopy;
use config::options;
use control::keys;
use devices::remote::RemoteOptions;
use engine::copies;
use engine::record::Durability;
use engine::removal;
use engine::report::PoolReport;
use engine::reservations;
use engine::restore::PoolOfCopy;
use engine::schedule::Keep;
use std::time::Duration;

pub(super) fn durability_in(durability: api::volume::Durability) -> Durability {
    match durability {
        api::volume::Durability::Auto => Durability::Auto,
        api::volume::Durability::Flush => Durability::Flush,
        api::volume::Durability::Write => Durability::Write,
        api::volume::Durability::Store => Durability::Store,
    }
}

pub(super) fn durability_out(durability: Durability) -> api::volume::Durability {
    match durability {
        Durability::Auto => api::volume::Durability::Auto,
        Durability::Flush => api::volume::Durability::Flush,
        Durability::Write => api::volume::Durability::Write,
        Durability::Store => api::volume::Durability::Store,
    }
}

pub(super) fn keep_in(keep: api::snapshot::Keep) -> Keep {
    let api::snapshot::Keep { hourly, daily, weekly, monthly } = keep;
    Keep { hourly, daily, weekly, monthly }
}

pub(super) fn keep_out(keep: Keep) -> api::snapshot::Keep {
    let Keep { hourly, daily, weekly, monthly } = keep;
    api::snapshot::Keep { hourly, daily, weekly, monthly }
}

pub(super) fn new_copy(copy: api::copy::NewCopy) -> copies::NewCopy {
    copies::NewCopy {
        url: copy.url,
        env_prefix: copy.env_prefix,
        interval_seconds: copy.interval_seconds,
        is_snapshots_only: copy.is_snapshots_only,
        bytes_per_second: copy.bytes_per_second,
        volumes: copy.volumes,
        key_file: copy.key_file,
        is_key_replaced: copy.is_key_replaced,
        created_at: copy.created_at,
    }
}

pub(super) fn new_key(new: NewKey) -> keys::NewKey {
    match new {
        NewKey::File { path } => keys::NewKey::File { path },
        NewKey::Passphrase { secret } => {
            keys::NewKey::Passphrase { secret: keys::Secret::new(secret.expose().to_owned()) }
        }
        NewKey::Command { command } => keys::NewKey::Command { command },
    }
}

/// Returns a secret for the client that asked for it.
pub(crate) fn secret(secret: &keys::Secret) -> Secret {
    Secret::new(secret.expose().to_owned())
}

pub(super) fn slot_kind(kind: keys::SlotKind) -> SlotKind {
    match kind {
        keys::SlotKind::KeyFile => SlotKind::KeyFile,
        keys::SlotKind::Passphrase => SlotKind::Passphrase,
        keys::SlotKind::Command => SlotKind::Command,
        keys::SlotKind::Recovery => SlotKind::Recovery,
    }
}

pub(super) fn key_slots(slots: Vec<(keys::SlotKind, u64)>) -> Vec<KeySlotInfo> {
    let slots = slots.into_iter();
    slots.map(|(kind, created_at)| KeySlotInfo { kind: slot_kind(kind), created_at }).collect()
}

pub(super) fn attach_options(options: AttachOptions) -> devices::AttachOptions {
    devices::AttachOptions {
        driver: match options.driver {
            Driver::Ublk => devices::Driver::Ublk,
            Driver::Nbd => devices::Driver::Nbd,
        },
        queue_count: options.queue_count,
        queue_depth: options.queue_depth,
        logical_block_bytes: options.logical_block_bytes,
        is_shared: options.is_shared,
        dead_timeout_seconds: options.dead_timeout_seconds,
    }
}

/// Returns the options of a device that this process serves itself. Without this process for
/// `dead_timeout`, requests fail.
pub(crate) fn remote_options(
    uris: &str,
    options: &AttachOptions,
    dead_timeout: Duration,
) -> RemoteOptions {
    RemoteOptions {
        uris: uris.to_owned(),
        logical_block_bytes: options.logical_block_bytes,
        dead_timeout,
        is_shared: options.is_shared,
    }
}

/// Converts the description of a device for an export elsewhere.
pub(crate) fn remote_device(info: devices::remote::RemoteDevice) -> RemoteDeviceInfo {
    let devices::remote::RemoteDevice { device, addresses, address, is_served } = info;
    RemoteDeviceInfo { device, addresses, address, is_served }
}

pub(super) fn attachment(info: devices::AttachmentInfo) -> AttachmentInfo {
    AttachmentInfo {
        volume: info.volume,
        device: info.device,
        link: info.link,
        options: AttachOptions {
            driver: match info.options.driver {
                devices::Driver::Ublk => Driver::Ublk,
                devices::Driver::Nbd => Driver::Nbd,
            },
            queue_count: info.options.queue_count,
            queue_depth: info.options.queue_depth,
            logical_block_bytes: info.options.logical_block_bytes,
            is_shared: info.options.is_shared,
            dead_timeout_seconds: info.options.dead_timeout_seconds,
        },
        is_in_use: info.is_in_use,
        read_count: info.read_count,
        write_count: info.write_count,
        flush_count: info.flush_count,
        discard_count: info.discard_count,
        read_bytes: info.read_bytes,
        written_bytes: info.written_bytes,
        failure_count: info.failure_count,
        failure: info.failure,
    }
}

pub(super) fn client(info: reservations::ClientInfo) -> ClientInfo {
    ClientInfo {
        volume: info.volume,
        label: info.label,
        is_shared: info.is_shared,
        connection_count: info.connection_count,
        attached_at: info.attached_at,
    }
}

/// Reports on a walk of the store, with the problems that the data tier cannot see.
pub(crate) fn fsck_info(found: PoolReport) -> FsckInfo {
    let (problem_count, problems) = (found.problem_count(), found.problems());
    let PoolReport { volume_count, report, .. } = found;
    FsckInfo {
        volume_count: volume_count as u64,
        segment_count: report.segment_count,
        object_bytes: report.object_bytes,
        frame_count: report.frame_count,
        page_count: report.page_count,
        block_count: report.block_count,
        reclaimed_count: report.reclaimed_count,
        problem_count,
        problems,
        miscounted: report.miscounted,
    }
}

pub(crate) fn pool_removed(removed: removal::PoolRemoved) -> PoolRemoved {
    let removal::PoolRemoved { name, pool, removed_at, purge_at } = removed;
    PoolRemoved { name, pool: pool.to_string(), removed_at, purge_at }
}

pub(crate) fn pool_restored(restored: removal::PoolRestored) -> PoolRestored {
    let removal::PoolRestored { name, pool, volume_count } = restored;
    PoolRestored { name, pool: pool.to_string(), volume_count }
}

pub(crate) fn pool_purged(purged: removal::PoolPurged) -> PoolPurged {
    let removal::PoolPurged { name, pool, object_count, object_bytes } = purged;
    PoolPurged { name, pool: pool.to_string(), object_count, object_bytes }
}

pub(crate) fn pool_from_copy(made: PoolOfCopy) -> PoolFromCopy {
    PoolFromCopy {
        url: made.url,
        recovery_point: made.state,
        as_of: made.as_of,
        segment_bytes: made.segment_bytes,
        stalled_count: made.stalled_count,
        snapshot: made.snapshot,
        without_snapshot: made.without_snapshot,
        volume_name: made.volume_name,
        excluded: made.excluded,
    }
}

/// Returns the example file with the documentation of all options.
pub(crate) fn example() -> ExampleInfo {
    let info = |option: &options::OptionDoc| OptionInfo {
        key: option.key.to_owned(),
        kind: option.kind.to_owned(),
        range: option.range.to_owned(),
        default: option.default.to_owned(),
        example: option.example.to_owned(),
        about: option.about.to_owned(),
    };
    ExampleInfo { text: options::example(), options: options::OPTIONS.iter().map(info).collect() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use cli::args::{Cli, Command};

    #[test]
    fn the_command_line_knows_the_queue_depth_of_the_nbd_driver() {
        let cli = Cli::try_parse_from(["spindle", "attach", "db", "--nbd"]).unwrap();
        let Command::Attach(args) = cli.command else { panic!("not attach") };
        let api::Request::Device(api::device::DeviceRequest::Attach { options, .. }) =
            args.request("db".to_owned())
        else {
            panic!("not a request to attach")
        };
        assert_eq!(options.queue_depth, nbd::kernel::QUEUE_DEPTH);
    }
}
