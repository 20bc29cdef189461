//! The job that looks at the open pool and its devices from time to time.
//!
//! Invariants:
//! - A look never runs on a thread that serves clients: the disk may be slow to answer.

use crate::adapters::pool_volumes::Attachments;
use engine::lookout::Lookout;
use engine::open_pool::OpenPool;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Pause between two looks. Chosen by hand: they cost microseconds.
const LOOK: Duration = Duration::from_secs(1);
/// Number of looks between checks of the devices, each of which has a lock of its own.
const DEVICES_EVERY: u32 = 5;

/// Looks repeatedly until `stop`.
pub(crate) async fn run(
    open: Arc<OpenPool>,
    attachments: Arc<Attachments>,
    mut stop: watch::Receiver<bool>,
) {
    let mut lookout = Lookout::new(&open);
    // Not waited for: a log may have many gigabytes. It does not hold the pool, which may be closed at once.
    drop(tokio::task::spawn_blocking(open.show_superseded_logs()));
    for count in 1u32.. {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        let watched = open.clone();
        // The disk may be slow to answer.
        let looked = tokio::task::spawn_blocking(move || {
            lookout.look(&watched);
            lookout
        });
        let Ok(back) = looked.await else { return };
        lookout = back;
        if count.is_multiple_of(DEVICES_EVERY) {
            attachments.show().await;
        }
    }
}
