//! Creates an object that must not exist yet.
//!
//! Invariants:
//! - A refusal because the object exists is believed only once the object was seen. Stores also
//!   refuse in this way for a moment while another request for the same name is under way (S3: 409
//!   ConditionalRequestConflict), and then there may be no object.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload, Result};
use std::time::Duration;

/// Attempts while the store refuses and shows no object. Chosen by hand: three seconds including
/// the pauses.
const ATTEMPT_COUNT_MAX: u32 = 6;
/// Pause before the second attempt; it doubles each time.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });

/// Outcome of a creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Created {
    /// The object has the given bytes.
    Ours,
    /// The object existed. An earlier attempt of ours may have created it.
    Exists,
}

/// Creates `path` with `bytes`, unless it exists.
///
/// # Errors
/// Those of the store; `AlreadyExists` if the store keeps refusing for this reason and shows no
/// object.
pub(crate) async fn create(store: &dyn ObjectStore, path: &Path, bytes: &Bytes) -> Result<Created> {
    let mut attempt = 0;
    loop {
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let put = store.put_opts(path, PutPayload::from(bytes.clone()), options).await;
        let refused = match put {
            Ok(_) => return Ok(Created::Ours),
            Err(refused @ (Error::AlreadyExists { .. } | Error::Precondition { .. })) => refused,
            Err(failed) => return Err(failed),
        };
        match store.head(path).await {
            Ok(_) => return Ok(Created::Exists),
            Err(Error::NotFound { .. }) if attempt + 1 < ATTEMPT_COUNT_MAX => {}
            Err(Error::NotFound { .. }) => return Err(refused),
            Err(failed) => return Err(failed),
        }
        tokio::time::sleep(PAUSE * 2u32.saturating_pow(attempt)).await;
        attempt += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Answer, IllStore, Op, Rule};

    #[tokio::test]
    async fn passing_conflict_is_not_taken_for_an_object_that_exists() {
        let (store, path) = (IllStore::default(), Path::from("segments/1"));
        store.add(Rule { count: 3, ..Rule::once(Op::Put, "segments/1", Answer::Conflict) });
        let bytes = Bytes::from_static(b"ours");
        assert_eq!(create(&store, &path, &bytes).await.unwrap(), Created::Ours);
        assert_eq!(store.inner().get(&path).await.unwrap().bytes().await.unwrap(), bytes);
        assert_eq!(create(&store, &path, &bytes).await.unwrap(), Created::Exists);
        assert_eq!(store.injected_count(), 3);
    }

    #[tokio::test]
    async fn conflict_that_does_not_pass_is_an_error_and_not_an_object() {
        let (store, path) = (IllStore::default(), Path::from("segments/1"));
        store.add(Rule::for_good(Op::Put, "", Answer::Conflict));
        let error = create(&store, &path, &Bytes::from_static(b"ours")).await.unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
        assert!(store.names().await.is_empty());
        assert_eq!(store.injected_count(), u64::from(ATTEMPT_COUNT_MAX));
    }
}
