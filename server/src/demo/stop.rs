//! The signals that end the demo.

use block::{Error, ErrorKind, Result};

/// Sends a message on SIGINT, SIGTERM or SIGHUP (its terminal is gone).
pub(super) fn stop_on_signals() -> Result<std::sync::mpsc::Receiver<()>> {
    let failed = |error| Error::with_source(ErrorKind::Io, "watch for signals", error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let (sender, receiver) = std::sync::mpsc::channel();
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
    Ok(receiver)
}
