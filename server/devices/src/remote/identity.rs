//! The identity under which this machine asks a server for a volume.

use block::env::boot_id;
use nbd::wire::{Intent, LABEL_BYTES_MAX, ReservationRequest};
use uuid::Uuid;

/// Identifies this machine, the same after a reboot if the machine has an id.
fn client_id() -> Uuid {
    let known = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    if known.trim().is_empty() {
        return boot_id();
    }
    // The id must not be shown to others unchanged. Source: machine-id(5).
    Uuid::new_v5(&Uuid::NAMESPACE_OID, format!("spindle {}", known.trim()).as_bytes())
}

/// The request that names an attachment of this machine to an export. It is the same on every
/// address.
pub(super) fn reservation_of(
    export: &str,
    attachment: Uuid,
    is_shared: bool,
) -> ReservationRequest {
    let mut label = rustix::system::uname().nodename().to_string_lossy().into_owned();
    label.truncate(label.floor_char_boundary(LABEL_BYTES_MAX));
    ReservationRequest {
        intent: Intent::Go,
        is_shared,
        connection: 0,
        client: client_id().into_bytes(),
        boot: boot_id().into_bytes(),
        attachment: attachment.into_bytes(),
        label,
        export: export.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_asks_with_its_own_name() {
        let attachment = Uuid::from_bytes([7; 16]);
        assert_eq!(client_id(), client_id());
        let reservation = reservation_of("pg", attachment, true);
        assert_eq!((reservation.export.as_str(), reservation.is_shared), ("pg", true));
        assert!(ReservationRequest::decode(&reservation.encode()).is_ok());
    }
}
