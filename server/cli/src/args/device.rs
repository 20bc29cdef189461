//! The commands `attach` and `detach`, and what they ask for.
//!
//! Invariant: options that do not fit together are refused before anything is asked.

use super::PoolArgs;
use api::Request;
use api::device::{AttachOptions, DeviceRequest, Driver};
use block::quantities::Span;
use block::{Error, ErrorKind, Result};
use clap::Args;

/// Requests in flight for each connection of the kernel's nbd driver. Source: the driver's default,
/// `drivers/block/nbd.c`, `tag_set.queue_depth`.
const NBD_QUEUE_DEPTH: u16 = 128;
/// Logical block of a device by default. Both drivers use the same size, so that either can use a
/// device formatted with the other. It is the engine's, and the nbd driver reports it as the
/// physical block too.
const LOGICAL_BLOCK_BYTES: u32 = 4096;

/// Options of `attach`.
#[derive(Clone, Debug, Args)]
pub struct AttachArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Name of a volume, or POOL/VOLUME; `list` shows all devices, and with
    /// --nbd this machine's devices for exports elsewhere; with --cleanup, a device; with --nbd also the URI of an
    /// export elsewhere, or several separated by commas, whose device this command then serves until it is stopped
    #[arg(required_unless_present = "cleanup")]
    pub target: Option<String>,
    /// Hardware queues, each with a thread; by default one per processor, at most 4, and fewer if many devices share the
    /// memory
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), conflicts_with = "nbd")]
    pub queues: Option<u16>,
    /// Requests in flight per queue
    #[arg(long, value_name = "COUNT", default_value_t = 64, conflicts_with = "nbd")]
    pub depth: u16,
    /// Logical block of the device, 512 or 4096 bytes (with --nbd also 1024 and 2048); 4096 by default
    #[arg(long, value_name = "BYTES")]
    pub logical_block: Option<u32>,
    /// Use the kernel's nbd driver, for kernels without ublk
    #[arg(long)]
    pub nbd: bool,
    /// Connections between kernel and daemon, 1 to 16
    #[arg(long, value_name = "COUNT", default_value_t = 1, requires = "nbd")]
    pub connections: u16,
    /// Time without a daemon after which requests to an nbd device fail
    #[arg(long, value_name = "DURATION", default_value = "1d", requires = "nbd")]
    pub dead_timeout: Span,
    /// Let NBD clients open the volume and write to it as well
    #[arg(long)]
    pub shared: bool,
    /// With a URI, lock the process that serves the device in memory, for machines that swap
    #[arg(long, requires = "nbd")]
    pub lock_memory: bool,
    /// Remove the devices that the last daemon left, or only the named one; no daemon may be running
    #[arg(long)]
    pub cleanup: bool,
}

/// Options of `detach`.
#[derive(Clone, Debug, Args)]
pub struct DetachArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Name of the volume, POOL/VOLUME, its device, or an attached URI
    pub target: String,
    /// Detach the device even while it is in use; its users get errors
    #[arg(long)]
    pub force: bool,
}

/// What `attach` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachPlan {
    /// Serve the device of an export elsewhere, in this process.
    Remote {
        /// The URIs as the user wrote them, separated by commas.
        uris: String,
        /// Options of the device.
        options: AttachOptions,
    },
    /// Remove this device, which no process serves.
    CleanUpDevice(String),
    /// Remove the devices that the last daemon of the pool left.
    CleanUp,
    /// List devices.
    List,
    /// List this machine's devices for exports elsewhere.
    ListRemote,
    /// Attach this volume: `VOLUME`, or `POOL/VOLUME`.
    Volume(String),
}

/// Tells whether the target of `attach` or `detach` is a URI, which needs no pool.
#[must_use]
pub fn is_uri(target: &str) -> bool {
    target.contains("://")
}

impl AttachArgs {
    /// Returns what the options ask for.
    ///
    /// # Errors
    /// `Invalid` for options that do not fit together.
    pub fn plan(&self) -> Result<AttachPlan> {
        let usage = |why: &str| Err(Error::new(ErrorKind::Invalid, why));
        let target = self.target.as_deref();
        if let Some(uris) = target.filter(|target| is_uri(target)) {
            if !self.nbd {
                return usage("attach a URI: that is what the nbd driver is for; add --nbd");
            }
            if self.connections != 1 {
                return usage("attach a URI: a volume of another machine takes one connection");
            }
            return Ok(AttachPlan::Remote { uris: uris.to_owned(), options: self.options() });
        }
        if self.lock_memory {
            return usage(
                "--lock-memory is for the process that serves the device of a URI; the daemon has \
                 lock_memory in its configuration",
            );
        }
        Ok(match (self.cleanup, target) {
            // The device itself is named, as its directory may be gone, too.
            (true, Some(device)) => AttachPlan::CleanUpDevice(device.to_owned()),
            (true, None) => AttachPlan::CleanUp,
            (false, Some("list")) if self.nbd => AttachPlan::ListRemote,
            (false, Some("list")) => AttachPlan::List,
            (false, target) => AttachPlan::Volume(target.unwrap_or_default().to_owned()),
        })
    }

    /// Returns the request that attaches a volume of the pool.
    #[must_use]
    pub fn request(&self, volume: String) -> Request {
        Request::Device(DeviceRequest::Attach { name: volume, options: self.options() })
    }

    /// Returns the request that lists devices.
    #[must_use]
    pub fn list_request() -> Request {
        Request::Device(DeviceRequest::List {})
    }

    fn options(&self) -> AttachOptions {
        let is_shared = self.shared;
        let logical_block_bytes = self.logical_block.unwrap_or(LOGICAL_BLOCK_BYTES);
        if self.nbd {
            return AttachOptions {
                driver: Driver::Nbd,
                queue_count: self.connections,
                queue_depth: NBD_QUEUE_DEPTH,
                logical_block_bytes,
                is_shared,
                dead_timeout_seconds: self.dead_timeout.duration().as_secs(),
            };
        }
        AttachOptions {
            driver: Driver::Ublk,
            queue_count: self.queues.unwrap_or(0), // the daemon's choice
            queue_depth: self.depth,
            logical_block_bytes,
            is_shared,
            dead_timeout_seconds: 0,
        }
    }
}

impl DetachArgs {
    /// Returns the request that detaches `target` from the pool's daemon.
    #[must_use]
    pub fn request(&self, target: String) -> Request {
        Request::Device(DeviceRequest::Detach { target, force: self.force })
    }
}
