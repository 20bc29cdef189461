//! Fixed replies of the golden tests about the nodes of a cluster.

use super::{Case, case, done, reply, serving};
use crate::print;
use api::Reply;
use api::demo::DataNodesInfo;
use api::dnode::{DnodeInfo, DriveInfo};
use api::key::Secret;
use api::node::{ClusterFounded, ClusterJoined, NodeInfo, NodesInfo, TokenInfo};

const CLUSTER: &str = "99998888-7777-8666-9555-444433332222";

fn node(name: &str, digit: char) -> NodeInfo {
    let id = "aaaaaaaa-bbbb-8ccc-9ddd-eeeeeeeeeee";
    NodeInfo {
        name: name.to_owned(),
        id: format!("{id}{digit}"),
        addresses: vec![format!("10.0.0.{digit}:7400")],
        ..NodeInfo::default()
    }
}

fn token(is_served: bool) -> TokenInfo {
    let token = Secret::new("spindleae5dkmr2".to_owned());
    TokenInfo { token, valid_seconds: 3600, is_served }
}

pub(super) fn data_nodes(wrong_reads: u64) -> DataNodesInfo {
    let names = |numbers: &[u32]| numbers.iter().map(|number| format!("d{number}")).collect();
    DataNodesInfo {
        dir: "/tmp/spindle-demo-1".into(),
        volume: "demo".to_owned(),
        scheme: "4+2".to_owned(),
        data_nodes: names(&[1, 2, 3, 4, 5, 6, 7]),
        killed: names(&[6, 5]),
        spare: "d7".to_owned(),
        written_mib: 128,
        wrong_reads,
        lost_bytes: 0,
        rebuild_seconds: 0.5,
        rebuilt_bytes: 33 << 20,
        read_us_p50_healthy: 210.0,
        read_us_p50_degraded: 390.0,
        degraded_reads: 667,
    }
}

fn dnode() -> DnodeInfo {
    let drive = |name: &str, failure: Option<&str>| DriveInfo {
        url: format!("spindle://d1/{name}"),
        dir: format!("/mnt/{name}").into(),
        group: Some("nvme".to_owned()),
        domain: failure.map(|_| "rack-a".to_owned()),
        failure: failure.map(str::to_owned),
        capacity_bytes: 3 << 40,
        used_bytes: 1 << 40,
        available_bytes: 2 << 40,
        pool_count: 2,
        wear: None,
    };
    let wear = Some("nvme0n1: 97 % of its rated writes are used".to_owned());
    let missing = "/mnt/nvme1/spindle-drive.json is not there: its disk may not be mounted";
    DnodeInfo {
        version: "0.1.0".to_owned(),
        name: "d1".to_owned(),
        id: node("d1", '3').id,
        cluster: CLUSTER.to_owned(),
        drives: vec![DriveInfo { wear, ..drive("nvme0", None) }, drive("nvme1", Some(missing))],
    }
}

pub(super) fn about_nodes() -> Vec<(&'static str, Vec<Case>)> {
    let cluster = || CLUSTER.to_owned();
    let this = NodeInfo { is_this: true, ..node("n1", '1') };
    let mut other = NodeInfo { connection_count: Some(2), ..node("n2", '2') };
    other.addresses.push("[fd00::2]:7400".to_owned());
    let unserved = vec![this.clone(), node("n2", '2')];
    let alone =
        NodesInfo { cluster: cluster(), is_served: false, nodes: unserved, warnings: Vec::new() };
    let warnings = vec!["2 nodes are called n2: aaaa and bbbb".to_owned()];
    let served = NodesInfo {
        cluster: cluster(),
        is_served: true,
        nodes: vec![this.clone(), other],
        warnings,
    };
    let founded = |is_restart_needed| ClusterFounded {
        cluster: cluster(),
        node: this.clone(),
        token: token(false),
        is_restart_needed,
    };
    let joined = |is_restart_needed| ClusterJoined {
        cluster: cluster(),
        node: NodeInfo { is_this: true, ..node("n2", '2') },
        node_count: 2,
        is_restart_needed,
        key_file: None,
    };
    let with_key =
        ClusterJoined { key_file: Some("/var/lib/spindle/spindle.key".into()), ..joined(false) };
    let west = |node: &NodeInfo| NodeInfo { zone: Some("west".to_owned()), ..node.clone() };
    let in_zone = ClusterFounded { node: west(&this), ..founded(false) };
    let mixed = NodesInfo { nodes: vec![west(&this), node("n2", '2')], ..alone.clone() };
    let init = "spindle node init --address 10.0.0.1:7400";
    let join = "spindle node join spindleae5dkmr2 --address 10.0.0.2:7400 --name n2";
    vec![
        (
            "node-init",
            vec![
                case(init, &founded(false), print::cluster_founded),
                case(init, &founded(true), print::cluster_founded),
                case(
                    "spindle node init --address 10.0.0.1:7400 --zone west",
                    &in_zone,
                    print::cluster_founded,
                ),
            ],
        ),
        (
            "node-join",
            vec![
                case(join, &joined(false), print::cluster_joined),
                case(join, &with_key, print::cluster_joined),
                case(
                    "spindle node join - --address 10.0.0.2:7400 --address h:1",
                    &joined(true),
                    print::cluster_joined,
                ),
            ],
        ),
        (
            "node-token",
            vec![
                reply("spindle node token", Reply::NodeToken(token(true))),
                reply("spindle node token", Reply::NodeToken(token(false))),
            ],
        ),
        (
            "node-list",
            vec![
                reply("spindle node list", Reply::Nodes(served)),
                reply("spindle node list", Reply::Nodes(alone)),
                reply("spindle node list", Reply::Nodes(mixed)),
            ],
        ),
        (
            "dnode",
            vec![
                serving(
                    "spindle dnode --dir /d --drive /mnt/nvme0 --drive /mnt/nvme1 --group nvme",
                    &["spindle://d1/nvme0", "spindle://d1/nvme1"],
                ),
                reply("spindle status", Reply::Dnode(dnode())),
            ],
        ),
        (
            "node-remove",
            vec![done(
                "spindle node remove n2",
                "node n2 is removed, and its connections are closed",
            )],
        ),
    ]
}
