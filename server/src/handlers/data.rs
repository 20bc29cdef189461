//! Requests about the data stores.

use super::status::open_data_stores_info;
use api::Reply;
use api::data::DataRequest;
use block::{Error, ErrorKind, Result};
use engine::data_stores::NewDataStore;
use engine::open_pool::OpenPool;

pub(super) async fn handle(open: &OpenPool, request: DataRequest) -> Result<Reply> {
    let Some(stores) = open.data_stores.as_ref() else { return Err(none()) };
    let message = match request {
        DataRequest::List {} => {
            let info = open_data_stores_info(open).ok_or_else(none)?;
            return Ok(Reply::DataStores(Box::new(info)));
        }
        DataRequest::Drain { stores: names } => {
            stores.drain(&names).await?;
            "the fragments move to other data stores; `spindle data list` shows what is left"
                .to_owned()
        }
        DataRequest::Undrain { stores: names } => {
            stores.undrain(&names).await?;
            "new fragments go there again; `spindle data rebalance` moves others back".to_owned()
        }
        DataRequest::Replace { old, new, domain, weight, env_prefix } => {
            let store = NewDataStore { url: new.clone(), env_prefix, domain, weight };
            stores.replace(&old, &store).await?;
            format!(
                "the fragments of {old} move to {new} and other data stores; name {new} in place of {old} in `data.stores` \
                 of every node that may own the pool"
            )
        }
        DataRequest::Rebalance { stop } => {
            stores.set_rebalancing(!stop).await?;
            match stop {
                true => "no further fragments move".to_owned(),
                false => "fragments move to the data stores that would get them now; `spindle data list` shows how far \
                          this is"
                    .to_owned(),
            }
        }
    };
    Ok(Reply::Done { message })
}

/// The error for a pool whose segments are objects.
pub(super) fn none() -> Error {
    let what = "ask about data stores: the pool has none, its segments are objects of its store; name some in \
                `data.stores`";
    Error::new(ErrorKind::Invalid, what)
}
