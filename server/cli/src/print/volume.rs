//! Text output about volumes.

use super::{pairs, table};
use api::volume::{RecoveredInfo, VolumeInfo};
use block::quantities::{ByteSize, utc};

pub(super) fn volumes(volumes: &[VolumeInfo]) -> String {
    if volumes.is_empty() {
        return "no volumes; make one with: spindle volume create NAME SIZE --dir DIR\n".to_owned();
    }
    let mut rows = vec![["NAME", "SIZE", "DURABILITY", "STATE"].map(str::to_owned).to_vec()];
    rows.extend(volumes.iter().map(|volume| {
        vec![
            volume.name.clone(),
            ByteSize(volume.size_bytes).rounded(),
            durability(volume),
            state(volume),
        ]
    }));
    table(&rows, &[1])
}

pub(super) fn volume(volume: &VolumeInfo) -> String {
    let mut text = pairs(&[
        ("name", volume.name.clone()),
        ("id", volume.id.to_string()),
        ("size", format!("{} ({} bytes)", ByteSize(volume.size_bytes), volume.size_bytes)),
        ("durability", durability(volume)),
        ("state", state(volume)),
        ("created", utc(volume.created_at)),
    ]);
    if let Some(warning) = &volume.warning {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

/// Describes a volume that was made from a log that the pool went on without.
pub(super) fn recovered(info: &RecoveredInfo) -> String {
    let RecoveredInfo { name, size_bytes, of, log, base, entry_count, written_bytes, warning } =
        info;
    let mut text = format!(
        "made volume {name} of {} from {of}@{base} and {entry_count} changes with {} of data, which only the log in {} \
         has\n",
        ByteSize(*size_bytes),
        ByteSize(*written_bytes).rounded(),
        log.display()
    );
    if let Some(warning) = warning {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

fn durability(volume: &VolumeInfo) -> String {
    format!("{:?}", volume.durability).to_lowercase()
}

fn state(volume: &VolumeInfo) -> String {
    match (volume.removed_at, volume.purge_at) {
        (Some(_), Some(purge_at)) => format!("removed, restorable until {}", utc(purge_at)),
        (Some(removed_at), None) => format!("removed {}", utc(removed_at)),
        _ => present_state(volume),
    }
}

fn present_state(volume: &VolumeInfo) -> String {
    let mut words = vec![if volume.is_read_only { "read-only" } else { "read-write" }];
    if volume.is_closed {
        words = vec!["not served"];
    }
    if volume.dedicated_key.is_some() {
        words.push("dedicated key");
    }
    let dedup = volume.dedup.map(|dedup| match dedup.is_on {
        true => format!("dedup x {:.2}", dedup.ratio),
        false => format!("dedup off (was x {:.2})", dedup.ratio),
    });
    words.extend(dedup.as_deref());
    if volume.is_stalled {
        words.push("stalled");
    }
    if volume.has_lost_writes {
        words.push("refuses other machines");
    }
    let mut text = words.join(", ");
    if volume.origin.is_some() {
        text.push_str(", ");
        text.push_str(&origin(volume));
    }
    if let Some(expires_at) = volume.expires_at {
        text.push_str(&format!(", until {}", utc(expires_at)));
    }
    text
}

/// Describes the snapshot that a volume depends on, if any.
fn origin(volume: &VolumeInfo) -> String {
    match (&volume.origin, volume.promoted_bytes) {
        (Some(origin), Some(bytes)) => {
            let percent = u128::from(bytes) * 100 / u128::from(volume.size_bytes.max(1));
            format!("from {origin}, {percent} % independent")
        }
        (Some(origin), None) => format!("from {origin}"),
        (None, _) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::volume::{DedupInfo, Durability};

    fn info(name: &str) -> VolumeInfo {
        VolumeInfo {
            id: 1,
            name: name.to_owned(),
            size_bytes: 100 << 30,
            durability: Durability::Flush,
            ..VolumeInfo::default()
        }
    }

    #[test]
    fn tables_line_up() {
        let text = volumes(&[info("a"), info("a-longer-name")]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "NAME              SIZE  DURABILITY  STATE");
        assert_eq!(lines[1], "a              100 GiB  flush       read-write");
        assert_eq!(lines[2], "a-longer-name  100 GiB  flush       read-write");
    }

    #[test]
    fn a_removed_volume_says_until_when_it_can_be_restored() {
        let found = DedupInfo { is_on: true, block_count: 30, duplicate_count: 10, ratio: 1.5 };
        let dedup = VolumeInfo { dedup: Some(found), ..info("a") };
        assert_eq!(state(&dedup), "read-write, dedup x 1.50");
        let removed = VolumeInfo { removed_at: Some(0), purge_at: Some(86_400), ..info("a") };
        assert!(volume(&removed).contains("removed, restorable until 1970-01-02"));
    }

    #[test]
    fn a_volume_that_needs_an_operator_says_so_in_the_list() {
        let stalled = VolumeInfo { is_stalled: true, has_lost_writes: true, ..info("a") };
        let text = volumes(std::slice::from_ref(&stalled));
        assert!(text.contains("read-write, stalled, refuses other machines"), "{text}");
        let closed = VolumeInfo { is_closed: true, ..stalled };
        assert!(volumes(&[closed]).contains("not served, stalled"));
    }

    #[test]
    fn clone_shows_its_origin() {
        let mut clone = VolumeInfo { origin: Some("db@monday".to_owned()), ..info("test") };
        assert!(volume(&clone).contains("read-write, from db@monday\n"));
        (clone.promoted_bytes, clone.expires_at) = (Some(clone.size_bytes / 4), Some(0));
        let text = volumes(&[clone]);
        let said = "read-write, from db@monday, 25 % independent, until 1970-01-01";
        assert!(text.contains(said), "{text}");
    }
}
