//! Text output about attached devices.

use super::{pairs, table};
use api::device::{AttachmentInfo, ClientInfo, Driver, RemoteDeviceInfo};
use block::quantities::ByteSize;

fn device_of(info: &AttachmentInfo) -> String {
    info.device.as_ref().map_or_else(|| "-".to_owned(), |path| path.display().to_string())
}

/// Queues of a device, or connections to the nbd driver.
fn queues_of(info: &AttachmentInfo) -> String {
    let count = info.options.queue_count;
    match (info.options.driver, count) {
        (Driver::Ublk, 1) => "1 queue".to_owned(),
        (Driver::Ublk, _) => format!("{count} queues"),
        (Driver::Nbd, 1) => "1 connection".to_owned(),
        (Driver::Nbd, _) => format!("{count} connections"),
    }
}

/// Describes a volume that was just attached.
pub(super) fn attached(info: &AttachmentInfo) -> String {
    pairs(&[
        ("volume", info.volume.clone()),
        ("device", format!("{} ({})", device_of(info), queues_of(info))),
        ("link", info.link.display().to_string()),
    ])
}

/// Lists attached volumes, and the clients that have devices elsewhere.
pub(super) fn list(infos: &[AttachmentInfo], clients: &[ClientInfo]) -> String {
    if infos.is_empty() && clients.is_empty() {
        return "nothing is attached; attach a volume with: spindle attach NAME --dir DIR\n"
            .to_owned();
    }
    let head = ["VOLUME", "DEVICE", "LINK", "READ", "WRITTEN", "ERRORS", "STATE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(infos.iter().map(|info| {
        let state = match &info.failure {
            Some(failure) => format!("not served: {failure}"),
            None if info.is_in_use => format!("in use, {}", queues_of(info)),
            None => format!("idle, {}", queues_of(info)),
        };
        vec![
            info.volume.clone(),
            device_of(info),
            info.link.display().to_string(),
            ByteSize(info.read_bytes).rounded(),
            ByteSize(info.written_bytes).rounded(),
            info.failure_count.to_string(),
            state,
        ]
    }));
    rows.extend(clients.iter().map(|client| {
        let state = match client.connection_count {
            0 => "not connected".to_owned(),
            1 => "1 connection".to_owned(),
            count => format!("{count} connections"),
        };
        let (device, none) = (format!("client {}", client.label), || "-".to_owned());
        vec![client.volume.clone(), device, none(), none(), none(), none(), state]
    }));
    table(&rows, &[3, 4, 5])
}

/// Lists devices for exports elsewhere.
pub(super) fn remote_devices(devices: &[RemoteDeviceInfo]) -> String {
    if devices.is_empty() {
        return "this machine has no device for an export elsewhere; make one with: spindle attach --nbd URI\n"
            .to_owned();
    }
    let head = ["DEVICE", "ADDRESS IN USE", "OTHER ADDRESSES", "STATE"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(devices.iter().map(|info| {
        let others = info.addresses.iter().filter(|one| info.address.as_ref() != Some(one));
        let others: Vec<&str> = others.map(String::as_str).collect();
        let state = match info.is_served {
            Some(true) => "served",
            Some(false) => "not served: its users wait",
            None => "unknown",
        };
        vec![
            info.device.display().to_string(),
            info.address.clone().unwrap_or_else(|| "-".to_owned()),
            if others.is_empty() { "-".to_owned() } else { others.join(" ") },
            state.to_owned(),
        ]
    }));
    table(&rows, &[])
}
