//! The addresses of one export, as the user listed them.
//!
//! Invariants:
//! - There are 1 to [`ADDRESS_COUNT_MAX`] of them, no two equal, and all name the same export.
//! - Lists that share an address are lists of the same device.

use block::{Error, ErrorKind, Result};
use nbd::client::Target;

/// Most addresses of one device. Chosen by hand: the members of a pool's log are fewer.
pub(super) const ADDRESS_COUNT_MAX: usize = 8;
/// Bytes of the longest list. Source: the kernel shows it, with the attachment, on a page of 4 KiB.
const LIST_BYTES_MAX: usize = 3 << 10;
/// Starts of a URI. A comma before one of them ends the URI before; another comma is part of it.
const SCHEMES: [&str; 4] = ["nbd://", "nbds://", "nbd+unix://", "nbds+unix://"];

/// A list of addresses of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    all: Vec<Target>,
}

impl std::fmt::Display for Addresses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, target) in self.all.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            write!(f, "{separator}{target}")?;
        }
        Ok(())
    }
}

impl Addresses {
    /// Parses `URI,URI,…`.
    ///
    /// # Errors
    /// `Invalid`, with the mistake in the message.
    pub fn parse(text: &str) -> Result<Addresses> {
        let invalid = |why: &str| {
            Err(Error::new(ErrorKind::Invalid, format!("read the addresses {text}: {why}")))
        };
        if text.len() > LIST_BYTES_MAX {
            return invalid(&format!("they have more than {LIST_BYTES_MAX} bytes"));
        }
        let mut uris: Vec<String> = Vec::new();
        for part in text.split(',') {
            let is_uri = SCHEMES.iter().any(|scheme| part.starts_with(scheme));
            match uris.last_mut().filter(|_| !is_uri) {
                Some(uri) => *uri = format!("{uri},{part}"),
                None => uris.push(part.to_owned()),
            }
        }
        if uris.len() > ADDRESS_COUNT_MAX {
            return invalid(&format!("there are more than {ADDRESS_COUNT_MAX}"));
        }
        let all = uris.iter().map(|uri| Target::parse(uri)).collect::<Result<Vec<Target>>>()?;
        for (index, target) in all.iter().enumerate() {
            if target.export != all[0].export {
                return invalid("they name different exports, and a device has one");
            }
            if all[..index].contains(target) {
                return invalid(&format!("{target} is there twice"));
            }
        }
        Ok(Addresses { all })
    }

    /// The addresses, in the user's order.
    pub fn all(&self) -> &[Target] {
        &self.all
    }

    /// The first address, after which the device's link is named.
    pub fn first(&self) -> &Target {
        &self.all[0]
    }

    /// Name of the export.
    pub fn export(&self) -> &str {
        &self.first().export
    }

    /// Names of the locks that the process of their device holds: one for the list, by which the
    /// kernel knows the device, and one for each address.
    pub fn lock_names(&self) -> Vec<String> {
        let each = self.all.iter().map(ToString::to_string);
        each.chain([self.to_string()]).collect()
    }

    /// Tells whether the two lists are of the same device.
    pub fn meets(&self, other: &Addresses) -> bool {
        self.all.iter().any(|target| other.all.contains(target))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_cut_where_a_uri_begins() {
        for (text, uris) in [
            ("nbd://a/pg", vec!["nbd://a/pg"]),
            ("nbd://a/p,g", vec!["nbd://a/p,g"]),
            ("nbd://a/p,g,nbd://b:7/p,g", vec!["nbd://a/p,g", "nbd://b:7/p,g"]),
            (
                "nbds://a/pg?tls-certificates=/t,nbd+unix:///pg?socket=/x",
                vec!["nbds://a/pg?tls-certificates=/t", "nbd+unix:///pg?socket=/x"],
            ),
        ] {
            let addresses = Addresses::parse(text).unwrap();
            let found: Vec<String> = addresses.all().iter().map(ToString::to_string).collect();
            assert_eq!(found, uris);
            assert_eq!(addresses.to_string(), text);
        }
        let many: Vec<String> = (0..9).map(|host| format!("nbd://h{host}/pg")).collect();
        for (text, words) in [
            ("", "read "),
            (",nbd://a/pg", "read "),
            ("nbd://a/pg,", ""),
            ("nbd://a/pg,nbd://b/other", "different exports"),
            ("nbd://a/pg,nbd://a/pg", "twice"),
            ("nbd://a/pg,nbd:///pg", "no host"),
            (many.join(",").as_str(), "more than 8"),
        ] {
            let outcome = Addresses::parse(text);
            if text == "nbd://a/pg," {
                assert_eq!(outcome.unwrap().export(), "pg,", "a comma may be part of a name");
                continue;
            }
            let error = outcome.expect_err(text);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn lists_with_a_common_address_are_of_one_device() {
        let list = |text: &str| Addresses::parse(text).unwrap();
        let both = list("nbd://a/pg,nbd://b/pg");
        assert!(both.meets(&list("nbd://b/pg")) && list("nbd://c/pg,nbd://a/pg").meets(&both));
        assert!(!both.meets(&list("nbd://c/pg")) && !both.meets(&list("nbd://a/pg2")));
    }
}
