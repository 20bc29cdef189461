//! The identifiers by which the kernel's nbd driver knows devices. It keeps them as long as a
//! device, whatever becomes of the process that serves it.

use nbd::client::Target;
use uuid::Uuid;

/// Start of every identifier of spindle.
const OURS: &str = "spindle-";
/// Start of the identifier of a device for a volume of another machine. The URI and the attachment
/// follow.
const REMOTE: &str = "spindle-remote";

/// Identifier of the device of a volume of this process, by the cookie of its record.
pub(crate) fn of_volume(cookie: u64) -> String {
    format!("{OURS}{cookie:016x}")
}

/// Identifier of the device of a volume of another machine.
pub(crate) fn of_remote(target: &Target, attachment: Uuid) -> String {
    format!("{REMOTE} {target} {}", attachment.simple())
}

/// Finds the attachment of a target's device among the identifiers of all devices.
pub(crate) fn attachment_of(target: &Target, identifiers: &[String]) -> Option<Uuid> {
    let prefix = format!("{REMOTE} {target} ");
    identifiers.iter().find_map(|identifier| identifier.strip_prefix(&prefix)?.parse().ok())
}

/// URI in the identifier of a device for a volume of another machine; `None` in any other.
pub(crate) fn uri_of(identifier: &str) -> Option<&str> {
    let rest = identifier.strip_prefix(REMOTE)?;
    let (uri, _attachment) = rest.trim_start().rsplit_once(' ')?;
    Some(uri)
}

/// Reports whether a device is one of spindle.
pub(crate) fn is_ours(identifier: &str) -> bool {
    identifier.starts_with(OURS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_uri_and_attachment() {
        let target = Target::parse("nbd://db1/pg").unwrap();
        let attachment = Uuid::from_bytes([7; 16]);
        let identifier = of_remote(&target, attachment);
        assert_eq!(identifier, "spindle-remote nbd://db1/pg 07070707070707070707070707070707");
        assert_eq!(uri_of(&identifier), Some("nbd://db1/pg"));
        let others = [of_volume(9), identifier.clone()];
        assert_eq!(attachment_of(&target, &others), Some(attachment));
        let other = Target::parse("nbd://db1/pg2").unwrap();
        assert_eq!(attachment_of(&other, &others), None);
        assert_eq!(of_volume(9), "spindle-0000000000000009");
        assert_eq!(uri_of(&of_volume(9)), None);
        assert!(is_ours(&identifier) && is_ours(&of_volume(9)) && !is_ours("another"));
    }
}
