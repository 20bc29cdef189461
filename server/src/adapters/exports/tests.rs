//! Volumes as exports: how clients are told apart, and which may write.

use super::*;
use block::{BlockDevice, Epoch, ZeroFlags};
use engine::pool::LostWrites;
use engine::record::Durability;
use engine::testing::{MIB, NO_FUA, Roster, kill, open, open_after_boot, pattern};
use nbd::Over;
use nbd::wire::Intent;
use object_store::memory::InMemory;
use uuid::Uuid;

mod leftovers;

fn reservation(client: u8, boot: Uuid, intent: Intent) -> ReservationRequest {
    ReservationRequest {
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

fn client(reservation: Option<ReservationRequest>) -> Client {
    Client {
        peer: Peer::Unix { uid: None },
        is_tls: false,
        names: Vec::new(),
        reservation,
        line: nbd::Line::default(),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn temporarily_read_only_volume_gets_no_second_writer() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("v", MIB, Durability::Auto).await.unwrap();
    pool.configure_volume("v", None, Some(true), None).await.unwrap();
    let reservations = Arc::new(Roster::default().reservations());
    let exports = PoolExports::new(pool.clone(), reservations.clone());
    let early = exports.open("v", &client(None)).await.unwrap();
    let said = reservation(1, Uuid::from_bytes([9; 16]), Intent::Attach);
    let attached = exports.open("v", &client(Some(said.clone()))).await.unwrap();
    let volume = pool.volume("v").unwrap().id().0;
    assert_eq!(reservations.holders_of(volume), ["host1"], "it is known while nobody may write");
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
    let again = ReservationRequest { intent: Intent::Go, ..said };
    let attached = exports.open("v", &client(Some(again.clone()))).await.unwrap();
    assert_eq!(reservations.fence(volume).await.unwrap(), ["host1"]);
    pool.configure_volume("v", None, Some(false), None).await.unwrap();
    let refused = attached.write(0, pattern(3, 4096), NO_FUA).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert!(exports.open("v", &client(Some(again))).await.is_err());
    drop((early, attached, exports));
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_owner_of_a_pool_ends_an_attachment() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("v", MIB, Durability::Auto).await.unwrap();
    let exports = PoolExports::new(pool.clone(), Arc::new(Roster::default().reservations()));
    // It was attached where another owner served the pool, for all that this one knows.
    let unknown = reservation(1, boot_id(), Intent::Go);
    let refused = exports.open("v", &client(Some(unknown.clone()))).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    pool.lose(Error::new(ErrorKind::Fenced, "serve the pool: another node owns it"));
    let refused = exports.open("v", &client(Some(unknown.clone()))).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.chain().contains("another node"), "{}", refused.chain());
    let refused = exports.release(&unknown, &client(None)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    drop(exports);
    kill(pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_behind_a_tunnel_is_known_by_when_it_was_started() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("v", MIB, Durability::Auto).await.unwrap();
    let reservations = Arc::new(Roster::default().reservations());
    let exports = PoolExports::new(pool.clone(), reservations);
    let here = reservation(1, block::env::boot_id(), Intent::Attach);
    let elsewhere = reservation(2, Uuid::from_bytes([9; 16]), Intent::Attach);
    let attached = exports.open("v", &client(Some(here.clone()))).await.unwrap();
    assert!(!attached.must_be_durable());
    drop(attached);
    exports.release(&here, &client(None)).await.unwrap();
    let attached = exports.open("v", &client(Some(elsewhere.clone()))).await.unwrap();
    assert!(attached.must_be_durable(), "it survives a reboot of this machine");
    drop(attached);
    exports.release(&elsewhere, &client(None)).await.unwrap();
    pool.note_lost_writes(LostWrites::TakeOver, Epoch(2)).await.unwrap();
    let refused = exports.open("v", &client(Some(elsewhere))).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied);
    exports.open("v", &client(Some(here))).await.map(drop).unwrap();
    drop(exports);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_means_write_for_a_client_on_another_machine() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let pool = open(dir.path(), &store, 1).await;
    pool.create_volume("auto", MIB, Durability::Auto).await.unwrap();
    pool.create_volume("named", MIB, Durability::Flush).await.unwrap();
    let exports = PoolExports::new(pool.clone(), Arc::new(Roster::default().reservations()));
    let local = ["127.0.0.1:5", "[::1]:5", "[::ffff:127.0.0.1]:5"].map(str::to_owned);
    let remote = ["192.0.2.7:5", "[2001:db8::7]:5"].map(str::to_owned);
    let tcp = |address: &String| Peer::Tcp(address.parse().unwrap());
    let mut local: Vec<Peer> = local.iter().map(tcp).collect();
    let mut remote: Vec<Peer> = remote.iter().map(tcp).collect();
    local.push(Peer::Unix { uid: None });
    remote.extend([Over::Tcp, Over::Unix].map(|over| Peer::Node { name: "b".into(), over }));
    for (peers, is_remote) in [(local, false), (remote, true)] {
        for peer in peers {
            let address = peer.to_string();
            let client = Client {
                peer,
                is_tls: false,
                names: Vec::new(),
                reservation: None,
                line: nbd::Line::default(),
            };
            let auto = exports.open("auto", &client).await.unwrap();
            assert_eq!(auto.must_be_durable(), is_remote, "{address}");
            auto.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
            let log = pool.log_status();
            assert!(!is_remote || log.durable_lsn == log.last_lsn, "{address}: {log:?}");
            let named = exports.open("named", &client).await.unwrap();
            assert!(!named.must_be_durable(), "{address}: chosen by name");
        }
    }
    drop(exports);
    pool.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn remote_client_loses_no_writes_silently_after_a_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(InMemory::new());
    let client = |peer| Client {
        peer,
        is_tls: false,
        names: Vec::new(),
        reservation: None,
        line: nbd::Line::default(),
    };
    let remote = client(Peer::Tcp("192.0.2.7:5".parse().unwrap()));
    let local = client(Peer::Tcp("127.0.0.1:5".parse().unwrap()));
    let pool = open(dir.path(), &store, 1).await;
    for (name, durability) in [("named", Durability::Flush), ("auto", Durability::Auto)] {
        let volume = pool.create_volume(name, MIB, durability).await.unwrap();
        volume.write(0, pattern(1, 4096), NO_FUA).await.unwrap();
    }
    kill(pool).await;
    // The same boot: every acknowledged write is there.
    let (pool, is_proven) = open_after_boot(dir.path(), &store, 2, 1).await;
    assert!(is_proven);
    pool.volume("named").unwrap().write(0, pattern(2, 4096), NO_FUA).await.unwrap();
    kill(pool).await;
    let (pool, is_proven) = open_after_boot(dir.path(), &store, 3, 2).await;
    assert!(!is_proven);
    pool.note_lost_writes(LostWrites::Reboot, Epoch(2)).await.unwrap();
    let exports = PoolExports::new(pool.clone(), Arc::new(Roster::default().reservations()));
    let refused = exports.open("named", &remote).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Denied);
    assert!(refused.chain().contains("spindle volume accept-loss named"), "{}", refused.chain());
    exports.open("named", &local).await.map(drop).unwrap();
    exports.open("auto", &remote).await.map(drop).unwrap();
    // The next write records that the owner knows about the loss.
    pool.volume("auto").unwrap().write(0, pattern(3, 4096), NO_FUA).await.unwrap();
    drop(exports);
    kill(pool).await;
    // The mark stays, although the log has nothing more to report, until an operator accepts it.
    let (pool, is_proven) = open_after_boot(dir.path(), &store, 4, 2).await;
    assert!(is_proven);
    let exports = PoolExports::new(pool.clone(), Arc::new(Roster::default().reservations()));
    assert!(exports.open("named", &remote).await.is_err());
    assert!(!pool.accept_loss("named", false).await.unwrap().has_lost_writes);
    exports.open("named", &remote).await.map(drop).unwrap();
    // A pool that was taken over has lost the data that existed only on the other machine, whatever
    // the durability.
    exports.open("auto", &remote).await.map(drop).unwrap();
    pool.create_volume("removed", MIB, Durability::Auto).await.unwrap();
    pool.remove_volume("removed", false).await.unwrap();
    pool.note_lost_writes(LostWrites::TakeOver, Epoch(3)).await.unwrap();
    exports.open("auto", &remote).await.map(drop).unwrap_err();
    assert!(pool.restore_volume("removed").await.unwrap().has_lost_writes);
    exports.open("removed", &remote).await.map(drop).unwrap_err();
    pool.accept_loss("named", false).await.unwrap();
    let again = pool.accept_loss("named", false).await.map(drop).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::Invalid);
    drop(exports);
    kill(pool).await;
    let pool = open(dir.path(), &store, 5).await;
    assert!(!pool.volume("named").unwrap().record().has_lost_writes);
    pool.close().await.unwrap();
}
