//! Volumes as exports: how clients are told apart, and which may write.

use super::*;
use crate::claims::Claims;
use nbd::wire::{ClaimRequest, Intent};
use uuid::Uuid;

fn claim(client: u8, boot: Uuid, intent: Intent) -> ClaimRequest {
    ClaimRequest {
        intent,
        is_shared: false,
        connection: 0,
        client: [client; 16],
        boot: boot.into_bytes(),
        attachment: [client; 16],
        label: format!("host{client}"),
        export: "v".to_owned(),
    }
}

fn client(claim: Option<ClaimRequest>) -> Client {
    Client {
        peer: Peer::Unix { uid: None },
        is_tls: false,
        names: Vec::new(),
        claim,
        line: nbd::Line::default(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_volume_that_is_read_only_for_a_while_gets_no_second_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("v", MIB, Durability::Auto).await.unwrap();
    pool.configure_volume("v", None, Some(true), None).await.unwrap();
    let claims = Arc::new(Claims::open(dir.path(), Epoch(1), Epoch(0), |_, _, _| true).unwrap());
    let exports = PoolExports::new(pool.clone(), claims.clone());
    let early = exports.open("v", &client(None)).await.unwrap();
    let said = claim(1, Uuid::from_bytes([9; 16]), Intent::Attach);
    let attached = exports.open("v", &client(Some(said.clone()))).await.unwrap();
    let volume = pool.volume("v").unwrap().id().0;
    assert_eq!(claims.holders_of(volume), ["host1"], "it is known while nobody may write");
    pool.configure_volume("v", None, Some(false), None).await.unwrap();
    attached.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
    assert!(early.limits().is_read_only);
    let refused = early.write(0, pattern(2, 4096), NO_FUA).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied);
    assert!(early.discard(0, 4096, false).await.is_err());
    assert!(early.write_zeroes(0, 4096, ZeroFlags::default()).await.is_err());
    assert!(early.resize(2 * MIB).await.is_err());
    let mut bytes = vec![0; 4096];
    early.read(0, &mut bytes).await.unwrap();
    assert_eq!(bytes, pattern(1, 4096));
    // It returns while the volume is read-only, is ended, and never writes again.
    pool.configure_volume("v", None, Some(true), None).await.unwrap();
    drop(attached);
    let again = ClaimRequest { intent: Intent::Go, ..said };
    let attached = exports.open("v", &client(Some(again.clone()))).await.unwrap();
    assert_eq!(claims.fence(volume).await.unwrap(), ["host1"]);
    pool.configure_volume("v", None, Some(false), None).await.unwrap();
    let refused = attached.write(0, pattern(3, 4096), NO_FUA).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert!(exports.open("v", &client(Some(again))).await.is_err());
    drop((early, attached, exports));
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_behind_a_tunnel_is_known_by_when_it_was_started() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("v", MIB, Durability::Auto).await.unwrap();
    let claims = Arc::new(Claims::open(dir.path(), Epoch(1), Epoch(0), |_, _, _| true).unwrap());
    let exports = PoolExports::new(pool.clone(), claims);
    let here = claim(1, block::env::boot_id(), Intent::Attach);
    let elsewhere = claim(2, Uuid::from_bytes([9; 16]), Intent::Attach);
    let attached = exports.open("v", &client(Some(here.clone()))).await.unwrap();
    assert!(!attached.must_be_durable());
    drop(attached);
    exports.release(&here, &client(None)).await.unwrap();
    let attached = exports.open("v", &client(Some(elsewhere.clone()))).await.unwrap();
    assert!(attached.must_be_durable(), "it survives a reboot of this machine");
    drop(attached);
    exports.release(&elsewhere, &client(None)).await.unwrap();
    pool.note_step_back(StepBack::TakeOver, Epoch(2)).await.unwrap();
    let refused = exports.open("v", &client(Some(elsewhere))).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied);
    exports.open("v", &client(Some(here))).await.map(drop).unwrap();
    drop(exports);
    pool.close().await.unwrap();
}
