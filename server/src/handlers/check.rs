//! Checks of a request by the rules of the engine, before anything is asked.
//!
//! Invariant: a request that fails here would fail in every pool, so the command line reports it as
//! a mistake in its arguments.

use api::Request;
use api::copy::CopyRequest;
use api::data::DataRequest;
use api::device::DeviceRequest;
use api::snapshot::{ScheduleChange, SnapshotRequest};
use api::volume::VolumeRequest;
use block::quantities::check_name;
use block::{Error, ErrorKind, Result};
use config::{DataStoreSettings, check_volume_size};
use control::store::check_url;
use engine::names::check_free_name;
use engine::names::check_not_reserved;
use engine::schedule::Schedule;
use engine::snapshot::SnapshotName;

/// Checks a request.
///
/// # Errors
/// `Invalid` with the rule.
pub(crate) fn check(request: &Request) -> Result<()> {
    match request {
        Request::Volume(request) => check_volume(request),
        Request::Snapshot(request) => check_snapshot(request),
        Request::Copy(CopyRequest::Add { copy }) => check_url(&copy.url),
        Request::Copy(CopyRequest::Remove { url } | CopyRequest::Sync { url }) => check_url(url),
        Request::Data(DataRequest::Replace { new, domain, weight, env_prefix, .. }) => {
            let (url, domain, env_prefix) = (new.clone(), domain.clone(), env_prefix.clone());
            DataStoreSettings { url, domain, env_prefix, weight: *weight }.check()
        }
        Request::Device(DeviceRequest::Attach { name, .. }) => check_volume_name(name),
        _ => Ok(()),
    }
}

fn check_volume(request: &VolumeRequest) -> Result<()> {
    match request {
        VolumeRequest::List {} => Ok(()),
        VolumeRequest::Create { name, size_bytes, .. } => {
            check_not_reserved(name)?;
            check_volume_size(name, *size_bytes)?;
            check_volume_name(name)
        }
        VolumeRequest::Resize { name, size_bytes, .. } => {
            check_volume_size(name, *size_bytes)?;
            check_volume_name(name)
        }
        VolumeRequest::Rename { name, new_name } => {
            check_volume_name(new_name)?;
            check_volume_name(name)
        }
        VolumeRequest::Clone { snapshot, name, .. } => {
            check_volume_name(name)?;
            check_free_name(name)?;
            check_single(snapshot)
        }
        VolumeRequest::Recover { name, of, .. } => {
            check_volume_name(name)?;
            check_free_name(name)?;
            check_volume_name(of)
        }
        VolumeRequest::Show { name }
        | VolumeRequest::Set { name, .. }
        | VolumeRequest::Remove { name, .. }
        | VolumeRequest::Restore { name }
        | VolumeRequest::AcceptLoss { name, .. }
        | VolumeRequest::Promote { name } => check_volume_name(name),
    }
}

fn check_snapshot(request: &SnapshotRequest) -> Result<()> {
    match request {
        SnapshotRequest::Create { snapshot } => snapshot.parse::<SnapshotName>().map(drop),
        SnapshotRequest::List { .. } => Ok(()),
        SnapshotRequest::Diff { older, newer, .. } => {
            check_single(older)?;
            check_single(newer)
        }
        SnapshotRequest::Schedule { volume, change } => {
            check_volume_name(volume)?;
            match change {
                Some(ScheduleChange::Set { cron, keep }) => {
                    Schedule::new(cron, super::convert::keep_in(*keep), 0).map(drop)
                }
                Some(ScheduleChange::Off) | None => Ok(()),
            }
        }
        SnapshotRequest::Rollback { snapshot } | SnapshotRequest::Remove { snapshot } => {
            check_single(snapshot)
        }
    }
}

fn check_volume_name(name: &str) -> Result<()> {
    check_name("volume", name).map_err(|why| Error::new(ErrorKind::Invalid, why))
}

/// Checks `VOLUME@NAME`, of one volume.
fn check_single(snapshot: &str) -> Result<()> {
    snapshot.parse::<SnapshotName>()?.single().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use cli::args::Cli;

    #[test]
    fn requests_are_checked_before_anything_is_asked() {
        for line in [
            "volume create a/b 1G",
            "volume create list 1G",
            "volume create a 1000",
            "volume resize a 2P",
            "volume rm ..",
            "clone db test",
            "snapshot diff a,b@1 a@2",
            "snapshot schedule db never",
            "copy sync ftp://x/y",
            "copy add s3://",
            "copy sync gs:///",
            "copy rm az://",
            "copy add file://",
            "copy add s3:///prefix",
            "data replace /a ftp://x/y",
            "data replace /a spindle://",
            "data replace /a /b --weight 0",
            "data replace /a spindle://d1 --env-prefix A_",
        ] {
            let line = format!("spindle {line} --dir /d");
            let cli = Cli::try_parse_from(line.split(' ')).unwrap();
            let (_, request) = cli.command.request().unwrap().expect("it is a request");
            assert_eq!(check(&request).unwrap_err().kind(), ErrorKind::Invalid, "{line}");
        }
    }
}
