//! The signals that end the demo.

use block::{Error, ErrorKind, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Notices SIGINT, SIGTERM and SIGHUP (its terminal is gone).
pub(super) struct Stop(Receiver<()>);

impl Stop {
    /// Watches for signals from here on.
    ///
    /// # Errors
    /// `Io` if they cannot be watched for.
    pub(super) fn on_signals() -> Result<Stop> {
        let failed = |error| Error::with_source(ErrorKind::Io, "watch for signals", error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(failed)?;
        let (sender, receiver) = channel();
        let signals = {
            use tokio::signal::unix::{SignalKind, signal};
            let _inside = runtime.enter();
            let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
            kinds.map(signal)
        };
        let [interrupt, terminate, hangup] = signals;
        let (mut interrupt, mut terminate, mut hangup) =
            (interrupt.map_err(failed)?, terminate.map_err(failed)?, hangup.map_err(failed)?);
        std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
            });
            // The receiver may have ended the demo already.
            let _ = sender.send(());
        });
        Ok(Stop(receiver))
    }

    /// Waits for a signal; returns false after `timeout`.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        !matches!(self.0.recv_timeout(timeout), Err(RecvTimeoutError::Timeout))
    }

    /// Pauses between two looks at a state that the demo waits for.
    ///
    /// # Errors
    /// `Unavailable` after a signal.
    pub(super) fn pause(&self, time: Duration) -> Result<()> {
        match self.wait(time) {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Unavailable, "run the demo: a signal ended it")),
        }
    }
}
