//! The identifiers by which the kernel's nbd driver knows devices. It keeps them as long as a
//! device, whatever becomes of the process that serves it.

use std::fmt::Display;
use uuid::Uuid;

/// Start of every identifier of spindle.
const OURS: &str = "spindle-";
/// Start of the identifier of a device for a volume of another machine. The list of URIs and the
/// attachment follow.
const REMOTE: &str = "spindle-remote";

/// Identifier of the device of a volume of this process, by the cookie of its record.
pub(crate) fn of_volume(cookie: u64) -> String {
    format!("{OURS}{cookie:016x}")
}

/// Identifier of the device of a volume of another machine.
pub(crate) fn of_remote(uris: &impl Display, attachment: Uuid) -> String {
    format!("{REMOTE} {uris} {}", attachment.simple())
}

/// URIs and attachment in the identifier of a device for a volume of another machine; `None` in any
/// other.
pub(crate) fn remote_of(identifier: &str) -> Option<(&str, Uuid)> {
    let rest = identifier.strip_prefix(REMOTE)?;
    let (uris, attachment) = rest.trim_start().rsplit_once(' ')?;
    Some((uris, attachment.parse().ok()?))
}

/// Reports whether a device is one of spindle.
pub(crate) fn is_ours(identifier: &str) -> bool {
    identifier.starts_with(OURS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_uris_and_attachment() {
        let attachment = Uuid::from_bytes([7; 16]);
        let identifier = of_remote(&"nbd://db1/p g,nbd://db2/p g", attachment);
        assert_eq!(
            identifier,
            "spindle-remote nbd://db1/p g,nbd://db2/p g 07070707070707070707070707070707"
        );
        assert_eq!(remote_of(&identifier), Some(("nbd://db1/p g,nbd://db2/p g", attachment)));
        assert_eq!(remote_of("spindle-remote nbd://db1/pg 07"), None);
        assert_eq!(of_volume(9), "spindle-0000000000000009");
        assert_eq!(remote_of(&of_volume(9)), None);
        assert!(is_ours(&identifier) && is_ours(&of_volume(9)) && !is_ours("another"));
    }
}
