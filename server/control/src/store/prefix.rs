//! The prefix of a pool or copy, as used in the keys of its objects.
//!
//! Invariants:
//! - One prefix has one key, the same in every version: all input is encoded by the same rule.

use super::Location;
use object_store::ObjectMeta;
use object_store::path::Path as ObjectPath;
use parking_lot::Mutex;

/// Maximum number of URLs for which the encoding of their prefix was announced. A process has a
/// pool and a few copies.
const TOLD_MAX: usize = 256;

/// Reports whether an object may be the marker by which consoles show a folder. A marker is empty,
/// and its key ends with a slash, which is not visible here. It holds no data, so a folder with
/// nothing else in it counts as empty. Spindle makes no empty objects there.
pub fn is_folder_marker(object: &ObjectMeta) -> bool {
    object.size == 0
}

impl Location {
    /// Prefix as used in the keys of objects: percent-encoded if it has letters outside ASCII, or
    /// some within it. The first pools were made that way, and the rule stays, so that one prefix
    /// has one key.
    fn key_prefix(&self) -> ObjectPath {
        match self {
            Location::Directory(_) => ObjectPath::ROOT,
            Location::S3 { prefix, .. }
            | Location::Gcs { prefix, .. }
            | Location::Azure { prefix, .. } => ObjectPath::from(prefix.as_str()),
        }
    }

    /// Logs, once per process, that keys differ from the URL.
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
    fn prefix_keeps_the_key_of_the_first_pools() {
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
