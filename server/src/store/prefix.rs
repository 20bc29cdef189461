//! The prefix of a pool or copy as the keys of its objects have it.
//!
//! Invariants:
//! - One prefix has one key, the same one in every version: whatever is typed is encoded by the same rule.

use super::Location;
use object_store::ObjectMeta;
use object_store::path::Path as ObjectPath;
use parking_lot::Mutex;

/// URLs of which it was said that their prefix is encoded. A process has a pool and some copies.
const TOLD_MAX: usize = 256;

/// Whether an object may be the marker by which consoles show a folder: it is empty, and its key ends with a slash, which
/// is not seen here. It holds nothing, so a folder with nothing else in it is empty; spindle makes none there.
pub(crate) fn is_folder_marker(object: &ObjectMeta) -> bool {
    object.size == 0
}

impl Location {
    /// The prefix as the keys of objects have it: percent-encoded where it has letters that are not ASCII, and some that
    /// are. So it was when the first pools were made, and it stays so: there is one key for one prefix.
    fn key_prefix(&self) -> ObjectPath {
        match self {
            Location::Directory(_) => ObjectPath::ROOT,
            Location::S3 { prefix, .. }
            | Location::Gcs { prefix, .. }
            | Location::Azure { prefix, .. } => ObjectPath::from(prefix.as_str()),
        }
    }

    /// Says, once a process, that keys do not begin as the URL reads.
    pub(super) fn tell_of_encoding(&self, url: &str) {
        static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let prefix = self.key_prefix();
        let typed = url.split_once("://").and_then(|(_, rest)| rest.split_once('/'));
        let typed = typed.map_or("", |(_, prefix)| prefix).trim_matches('/');
        let mut told = TOLD.lock();
        if prefix.as_ref() != typed && told.len() < TOLD_MAX && !told.iter().any(|one| one == url) {
            told.push(url.to_owned());
            tracing::info!(
                store = url,
                keys_begin_with = prefix.as_ref(),
                "the prefix is percent-encoded in the keys of the store's objects, where policies and consoles see it"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_the_key_that_it_had_when_the_first_pools_were_made() {
        for (url, key) in [
            ("s3://b/p/q", "p/q"),
            ("s3://b", ""),
            ("s3://b/a b", "a b"),
            ("gs://b/~x", "%7Ex"),
            ("az://b/50%", "50%25"),
            ("s3://b/a%20b", "a%2520b"),
            ("s3://b/größe/x", "gr%C3%B6%C3%9Fe/x"),
            ("/a/größe", ""),
        ] {
            assert_eq!(Location::parse(url).unwrap().key_prefix().as_ref(), key, "{url}");
        }
    }
}
