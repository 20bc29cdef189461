//! The file of a node in a pool's directory: its identity.
//!
//! Invariant: an identity that is read is kept by the next opening, which may rewrite the files.

use crate::{LARGE, dir_in_memory, no_repair, write};
use control::manifest::NodeDir;
use fuzz::{Outcome, Target, corpus};

#[test]
fn node_file() {
    let dir = dir_in_memory();
    let path = dir.path();
    let decode = |input: &[u8]| {
        // The copy is damaged in another way, so that only the first file counts.
        write(path.join("node.json"), input);
        write(path.join("node.backup.json"), b"{");
        let read = || NodeDir::open(path).map(|node| (node.node_id(), node.pool(), node.epoch()));
        match read() {
            Ok(found) => {
                // Without a pool, nothing stays when the directory is closed.
                assert!(found.1.is_none() || read().ok() == Some(found));
                Outcome::Accepted
            }
            Err(error) => Outcome::Refused(error.chain()),
        }
    };
    Target {
        name: "node_file",
        inputs: vec![corpus::text("server/control/testdata/node-v1.json").into_bytes()],
        repair: &no_repair,
        decode: &decode,
        execution_count: 3000,
        input_bytes_max: 8192,
        allocation: LARGE,
    }
    .check();
}
