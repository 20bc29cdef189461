//! Conditions that report why a restored pool is not complete: failures, and segments that its copy
//! lacks. The pool keeps asking for these until they are there or an operator gives them up.
//!
//! Invariants:
//! - The pool releases its pin, and stops reading from the copy, only once nothing is missing, or
//!   the missing segments were given up after they were known. Segments that the copy has but does
//!   not send are never given up.
//! - While something is missing, a condition names it.

use super::{Origin, Restored};
use block::conditions::Report;
use block::{ConditionKind, Error, ErrorKind, Result};
use object_store::path::Path;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tiering::{Lacking, RestoredStore, Tier, is_store_full};
use tokio::sync::Notify;

/// Pause before missing objects are asked for again. Chosen by hand: one or two requests for each
/// object then.
const ASK_AGAIN: Duration = Duration::from_secs(60);
/// Subject of the condition that the pool's own store is full.
const STORE_FULL: &str = "restore";
/// Maximum number of objects that the condition names. Chosen by hand: its text is bounded.
const NAMED_MAX: usize = 4;

/// An operator's decision about segments that the copy lacks. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Decision(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Segments that the condition names.
    missing: Mutex<Arc<BTreeSet<Path>>>,
    given_up: Mutex<Arc<BTreeSet<Path>>>,
    wake: Notify,
}

impl Decision {
    pub(super) fn given_up(&self) -> Arc<BTreeSet<Path>> {
        self.0.given_up.lock().clone()
    }

    /// Drops a decision that was carried out or is obsolete.
    fn forget(&self) {
        *self.0.given_up.lock() = Arc::default();
    }

    /// Waits until it is time to ask the copy again.
    async fn wait(&self) {
        let _ = tokio::time::timeout(ASK_AGAIN, self.0.wake.notified()).await;
    }
}

impl Restored {
    /// Store that reads through to the copy, as long as the pool needs the copy.
    pub fn objects(&self) -> Option<Arc<RestoredStore>> {
        self.objects.clone()
    }

    /// Gives up the segments that the copy lacks, as named by the condition.
    ///
    /// # Errors
    /// `NotFound` if nothing is known to be missing.
    pub fn give_up_missing(&self, tier: &Tier) -> Result<String> {
        let url = &self.origin.url;
        if !tier.conditions().is_raised(ConditionKind::RestoreIncomplete, url) {
            let what = "give up missing segments: the copy is not known to lack any; `spindle \
                        status` shows the progress of the restore";
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let state = &self.decision.0;
        let missing = state.missing.lock().clone();
        if missing.is_empty() {
            let what = "give up missing segments: the copy has all, but does not send some of \
                        them; let the pool read it";
            return Err(Error::new(ErrorKind::NotFound, what));
        }
        let count = missing.len();
        *state.given_up.lock() = missing;
        state.wake.notify_one();
        Ok(format!(
            "the pool gives up {count} segments that the copy {url} does not have, once everything \
             else is here: reads of their data then fail; `spindle status` shows the progress of \
             the restore"
        ))
    }

    /// Ends the conditions of earlier failures after new data has arrived.
    pub(super) fn show_progress(&self, tier: &Tier) {
        tier.conditions().clear(ConditionKind::RestoreFailing, &self.origin.url);
        tier.conditions().clear(ConditionKind::StoreFull, STORE_FULL);
    }

    /// Raises a condition for a failed fetch: the pool's own store is full, or the reason in the
    /// error.
    pub(super) fn show_failure(&self, tier: &Tier, error: &Error) {
        let (url, why) = (&self.origin.url, error.chain());
        if is_store_full(error) {
            let report = Report::new(
                format!(
                    "the pool's own store is full, and takes no more data of the copy {url}: {why}"
                ),
                "the pool still needs the copy, from which it reads the missing data",
                "make room in the pool's own store or enlarge it; the pool then continues to fetch",
            );
            tier.conditions().raise(ConditionKind::StoreFull, STORE_FULL, report);
            tier.conditions().clear(ConditionKind::RestoreFailing, url);
            return;
        }
        let report = Report::new(
            format!(
                "the restored pool still needs the copy {url}, but could not fetch from it: {why}"
            ),
            "reads of missing data fail; the other data is served",
            "bring the copy back where it was, and keep it until the pool has everything; the pool \
             tries again automatically",
        );
        tier.conditions().raise(ConditionKind::RestoreFailing, url, report);
    }

    /// Names the missing objects, and waits until it is time to ask for them again.
    pub(super) async fn wait_lacking(&self, tier: &Tier, lacking: &Lacking) {
        self.show_lacking(tier, lacking);
        self.decision.wait().await;
    }

    /// Ends the condition: the pool does not need the copy any more.
    pub(super) fn end_lacking(&self, tier: &Tier) {
        self.decision.forget();
        self.show_lacking(tier, &Lacking::default());
    }

    /// Names the missing objects; ends the condition if there are none.
    fn show_lacking(&self, tier: &Tier, lacking: &Lacking) {
        *self.decision.0.missing.lock() = Arc::new(lacking.missing.clone());
        let report = (!lacking.is_empty()).then(|| report(&self.origin.url, lacking));
        tier.conditions().set(ConditionKind::RestoreIncomplete, &self.origin.url, report);
    }
}

/// Condition for a pin that could not be released.
pub(super) fn pin_stays(origin: &Origin, error: &Error) -> Report {
    Report::new(
        format!(
            "could not delete the pin {} at the copy {}, which keeps the restored state: {}",
            origin.pin,
            origin.url,
            error.chain()
        ),
        "the copy keeps objects that are no longer needed; the pool has everything",
        "let the pool reach the copy; spindle tries again, also after a restart",
    )
}

fn report(url: &str, lacking: &Lacking) -> Report {
    let (missing, unreadable) = (lacking.missing.len(), lacking.unreadable.len());
    let mut what = match (missing, unreadable) {
        (_, 0) => {
            format!("the copy {url} does not have {missing} segments that the restored pool needs:")
        }
        (0, _) => format!(
            "the copy {url} does not send {unreadable} segments that the restored pool needs, while it sends others:"
        ),
        _ => format!(
            "the copy {url} does not have {missing} segments that the restored pool needs, and does not send {unreadable} \
             others:"
        ),
    };
    for path in lacking.paths().take(NAMED_MAX) {
        what.push_str(&format!(" {path}"));
    }
    if missing + unreadable > NAMED_MAX {
        what.push_str(" and others");
    }
    if let Some(why) = lacking.unreadable.values().next() {
        what.push_str(&format!(" ({why})"));
    }
    Report::new(
        what,
        "reads of their data fail; the pool still needs the copy, and is not scrubbed",
        "bring the objects back in the copy, or put them below segments/ of the pool's own store; \
         the pool asks for them again every minute. Only if they are lost for good: `spindle copy \
         give-up-missing`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_condition_names_objects_and_stays_short() {
        let mut lacking = Lacking::default();
        for number in 0..1000 {
            lacking.missing.insert(format!("segments/1/{number:04}").into());
        }
        let text = report("s3://bucket/copy", &lacking).what;
        assert!(text.contains("1000 segments") && text.contains("segments/1/0003 and others"));
        lacking.missing.clear();
        lacking.unreadable.insert("segments/1/7".into(), "500".to_owned());
        let conditions = block::Conditions::default();
        let found = report("s3://bucket/copy", &lacking);
        assert!(conditions.raise(ConditionKind::RestoreIncomplete, "s3://bucket/copy", found));
        let text = conditions.list().remove(0).report.what;
        assert!(text.contains("does not send 1 segments") && text.contains("segments/1/7 (500)"));
    }
}
