//! Why volumes may have lost answered writes.

use wal::TailLoss;

/// Reasons why answered writes may be gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostWrites {
    /// The machine stopped while writes were answered ahead of stable storage, and the log's end cannot be proven
    /// whole.
    Reboot,
    /// The pool was taken from another machine, without the data that it had not yet copied to the store.
    TakeOver,
    /// The write log of this directory was given up, with the data that the store did not hold yet.
    LostLog,
    /// A write or sync of the log failed, and the kernel has dropped the data that it could not write.
    FailedLog,
    /// The file system of the log was unmounted after the daemon had died, and may not have been written completely.
    Remount,
}

impl From<TailLoss> for LostWrites {
    fn from(loss: TailLoss) -> LostWrites {
        match loss {
            TailLoss::Reboot => LostWrites::Reboot,
            TailLoss::Remount => LostWrites::Remount,
            TailLoss::Failure => LostWrites::FailedLog,
        }
    }
}

impl LostWrites {
    /// The cause in words.
    pub(super) fn why(self) -> &'static str {
        match self {
            LostWrites::Reboot => {
                "the machine stopped while writes were answered ahead of stable storage"
            }
            LostWrites::TakeOver => {
                "the pool was taken over, and the writes that its owner had not copied to the \
                 store are not here"
            }
            LostWrites::LostLog => {
                "the write log of this directory is gone, with the writes that the store did not \
                 hold yet"
            }
            LostWrites::FailedLog => "the disk of the write log failed",
            LostWrites::Remount => {
                "the file system of the write log was unmounted while writes were answered ahead of \
                 stable storage"
            }
        }
    }
}
