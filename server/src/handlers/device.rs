//! Requests about block devices of this machine.

use super::{AdminPool, convert};
use crate::adapters::pool_volumes::Attachments;
use api::Reply;
use api::device::DeviceRequest;
use block::{Error, ErrorKind, Result};
use std::sync::Arc;

impl AdminPool {
    pub(super) async fn device(&self, request: DeviceRequest) -> Result<Reply> {
        let all = self.attachments()?;
        match request {
            DeviceRequest::Attach { name, options } => {
                let attached = all.attach(&name, convert::attach_options(options)).await?;
                Ok(Reply::Attached(convert::attachment(attached)))
            }
            DeviceRequest::Detach { target, force } => {
                let name = all.detach(&target, force).await?;
                Ok(Reply::Done { message: format!("volume {name} is detached") })
            }
            DeviceRequest::List {} => {
                let attachments = all.list().await?.into_iter().map(convert::attachment).collect();
                let clients = all.volumes().clients().into_iter().map(convert::client).collect();
                Ok(Reply::Attachments { attachments, clients })
            }
        }
    }

    fn attachments(&self) -> Result<&Arc<Attachments>> {
        self.attachments.as_ref().ok_or_else(|| {
            let what = "attach and detach volumes: no daemon runs on this directory, and only a daemon \
                        can serve a device; start `spindle serve`";
            Error::new(ErrorKind::Unavailable, what)
        })
    }
}
