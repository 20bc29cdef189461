//! The arguments of the doctor, and the request that it sends.

use super::PoolArgs;
use api::Request;
use api::doctor::{DoctorRequest, StoresGone};
use clap::Args;

/// Arguments of the doctor.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorArgs {
    /// The pool.
    #[command(flatten)]
    pub pool: PoolArgs,
    /// Take data stores as gone: node=NAME, store=URL or domain=NAME; may be repeated, and all are gone together
    #[arg(long, value_name = "STORES", value_parser = stores_gone)]
    pub what_if: Vec<StoresGone>,
}

impl DoctorArgs {
    pub(super) fn request(&self) -> (&PoolArgs, Request) {
        let without = self.what_if.clone();
        (&self.pool, Request::Doctor(DoctorRequest::Examine { without }))
    }
}

fn stores_gone(text: &str) -> Result<StoresGone, String> {
    let of = |kind: &str| text.strip_prefix(kind).filter(|rest| !rest.is_empty());
    let node = of("node=").map(|name| StoresGone::Node(name.to_owned()));
    let store = || of("store=").map(|url| StoresGone::Store(url.to_owned()));
    let domain = || of("domain=").map(|name| StoresGone::Domain(name.to_owned()));
    let found = node.or_else(store).or_else(domain);
    found.ok_or_else(|| "write node=NAME, store=URL or domain=NAME".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_are_named_in_three_ways() {
        let text = str::to_owned;
        assert_eq!(stores_gone("node=b"), Ok(StoresGone::Node(text("b"))));
        assert_eq!(stores_gone("store=/mnt/a=b"), Ok(StoresGone::Store(text("/mnt/a=b"))));
        assert_eq!(stores_gone("domain=rack 1"), Ok(StoresGone::Domain(text("rack 1"))));
        for wrong in ["", "b", "node=", "node", "drive=b", "Node=b", "store ="] {
            assert!(stores_gone(wrong).unwrap_err().contains("node=NAME"), "{wrong}");
        }
    }
}
