//! The link to the device of a volume of another machine, named after the first address and the
//! export.

use super::addresses::Addresses;
use crate::{links, udev};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Path of the link to the device of an export.
fn link_path(addresses: &Addresses) -> PathBuf {
    let plain = |text: &str| -> String {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let text: String = text.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
        match text.starts_with('.') || text.is_empty() {
            true => format!("_{text}"),
            false => text,
        }
    };
    let target = addresses.first();
    // No pool has such a name.
    let place = match target.place_name() {
        (host, Some(port)) => format!("{}:{port}", plain(host)),
        (socket, None) => {
            let name = Uuid::new_v5(&Uuid::NAMESPACE_URL, socket.as_bytes()).simple().to_string();
            format!("unix:{}", &name[..8])
        }
    };
    Path::new(links::DIR).join(place).join(plain(&target.export))
}

/// Makes the link to the device of an export, and returns its path.
pub(super) fn link(addresses: &Addresses, device: &Path) -> PathBuf {
    let link = link_path(addresses);
    let parent = link.parent().expect("it has a directory");
    let made = std::fs::create_dir_all(parent).and_then(|()| {
        let _ = std::fs::remove_file(&link);
        std::os::unix::fs::symlink(device, &link)
    });
    if let Err(error) = made {
        tracing::warn!(link = %link.display(), %error, "could not make the link to a device");
    }
    udev::announce(&link, device);
    link
}

/// Removes the link of an export.
pub(super) fn unlink(addresses: &Addresses) {
    let link = link_path(addresses);
    udev::forget(&link, None);
    let _ = std::fs::remove_file(&link);
    let _ = link.parent().map(std::fs::remove_dir); // once it is empty
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_stay_where_links_are() {
        for (uri, path) in [
            ("nbd://db1/pg", "/dev/spindle/db1:10809/pg"),
            ("nbd://[::1]:7/..%2F..%2Fsda", "/dev/spindle/__1:7/_.._.._sda"),
            ("nbd+unix:///pg?socket=/run/x", "/dev/spindle/unix:5a8d9a25/pg"),
            ("nbd://db1/pg,nbd://db2/pg", "/dev/spindle/db1:10809/pg"),
            ("nbd://db1/", "/dev/spindle/db1:10809/_"),
        ] {
            let addresses = Addresses::parse(uri).unwrap();
            assert_eq!(link_path(&addresses), Path::new(path), "{uri}");
        }
    }
}
