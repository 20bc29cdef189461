//! The end of a pool as by `kill -9`, for tests.

use super::Pool;
use block::{Error, ErrorKind};

impl Pool {
    /// Ends like a killed process: nothing is flushed, and the files are released.
    pub(crate) async fn kill(&self) {
        self.fence(Error::new(ErrorKind::Io, "killed by the test"));
        self.stop.send_replace(true);
        let jobs = std::mem::take(&mut *self.jobs.lock());
        for job in jobs {
            job.await.unwrap();
        }
        self.shared.tier.close().await.unwrap();
        let log = self.shared.log.clone();
        // It has failed, so it writes nothing more; the point is that its threads have ended.
        let closed = tokio::task::spawn_blocking(move || log.close()).await.unwrap();
        closed.unwrap_err();
    }
}
