//! Reservations: which clients are admitted next to others, and which are not admitted any more.

use super::*;
use crate::testing::Roster;
use std::sync::atomic::Ordering;
use std::time::Duration;

fn open(roster: &Roster) -> Arc<Reservations> {
    Arc::new(roster.reservations())
}

fn request(client: u8, attachment: u8, intent: Intent) -> ReservationRequest {
    ReservationRequest {
        intent,
        is_shared: false,
        connection: 0,
        client: [client; 16],
        boot: [attachment; 16],
        attachment: [attachment; 16],
        label: format!("host{client}"),
    }
}

#[tokio::test]
async fn one_device_or_connections_unless_shared() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let first = reservations.connect(1, "v", false, None).await.unwrap();
    let second = reservations.connect(1, "v", false, None).await.unwrap();
    let error = reservations.attach(1, "v", false).unwrap_err();
    assert!(error.to_string().contains("2 NBD connections"), "{error}");
    drop((first, second));
    let device = reservations.attach(1, "v", false).unwrap();
    assert_eq!(
        reservations.connect(1, "v", false, None).await.unwrap_err().kind(),
        ErrorKind::Busy
    );
    assert_eq!(reservations.attach(1, "v", true).unwrap_err().kind(), ErrorKind::Busy);
    assert!(reservations.connect(2, "w", false, None).await.is_ok(), "another volume");
    drop(device);
    let connection = reservations.connect(1, "v", false, None).await.unwrap();
    let shared = reservations.attach(1, "v", true).unwrap();
    assert!(reservations.connect(1, "v", false, None).await.is_ok());
    drop((connection, shared));
    assert!(reservations.users.lock().is_empty());
    assert!(roster.clients(1).is_empty(), "plain connections are not recorded");
}

#[tokio::test]
async fn a_client_has_its_volume_alone_until_it_lets_go() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let early = request(1, 1, Intent::Go);
    let error = reservations.connect(1, "v", false, Some(&early)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "it has never attached");
    let held =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    let another = request(2, 2, Intent::Attach);
    for _ in 0..2 {
        let error = reservations.connect(1, "v", false, Some(&another)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("client host1"), "{error}");
        assert_eq!(
            reservations.connect(1, "v", false, None).await.unwrap_err().kind(),
            ErrorKind::Busy
        );
        assert_eq!(reservations.attach(1, "v", false).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(reservations.attach(1, "v", true).unwrap_err().kind(), ErrorKind::Busy);
    }
    // A lost connection changes nothing, nor does a restart.
    drop(held);
    assert_eq!(
        reservations.connect(1, "v", false, None).await.unwrap_err().kind(),
        ErrorKind::Busy
    );
    let reservations = open(&roster);
    assert_eq!(
        reservations.connect(1, "v", false, None).await.unwrap_err().kind(),
        ErrorKind::Busy
    );
    let held = reservations.connect(1, "v", false, Some(&early)).await.unwrap();
    reservations.release(1, &early).await.unwrap();
    reservations.release(1, &early).await.unwrap();
    assert_eq!(held.permit().unwrap().pass().unwrap_err().kind(), ErrorKind::Fenced);
    drop(held);
    let error = reservations.connect(1, "v", false, Some(&early)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(reservations.connect(1, "v", false, Some(&another)).await.is_ok());
}

#[tokio::test]
async fn a_client_that_was_ended_by_force_is_refused_for_good() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let held =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(1), held.revoked()).await.is_err());
    assert_eq!(reservations.fence(1).await.unwrap(), ["host1"]);
    held.revoked().await;
    assert!(held.permit().unwrap().pass().is_err());
    drop(held);
    let old = request(1, 1, Intent::Go);
    assert_eq!(
        reservations.connect(1, "v", false, Some(&old)).await.unwrap_err().kind(),
        ErrorKind::Fenced
    );
    let next =
        reservations.connect(1, "v", false, Some(&request(2, 2, Intent::Attach))).await.unwrap();
    drop(next);
    let reservations = open(&roster);
    assert_eq!(
        reservations.connect(1, "v", false, Some(&old)).await.unwrap_err().kind(),
        ErrorKind::Fenced
    );
    assert_eq!(reservations.holders_of(1), ["host2"]);
}

#[tokio::test(start_paused = true)]
async fn a_connection_waits_for_the_requests_of_the_one_that_it_replaces() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let held =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    let beside = ReservationRequest { connection: 1, ..request(1, 1, Intent::Go) };
    let beside = reservations.connect(1, "v", false, Some(&beside)).await.unwrap();
    let running = held.permit().unwrap().pass().unwrap();
    let again = request(1, 1, Intent::Go);
    let error = reservations.connect(1, "v", false, Some(&again)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "an old request may still be coming");
    assert!(held.permit().unwrap().pass().is_err(), "and no further one");
    assert!(beside.permit().unwrap().pass().is_ok(), "another connection goes on");
    let (replaced, ()) = tokio::join!(reservations.connect(1, "v", false, Some(&again)), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        drop(running);
    });
    let replaced = replaced.unwrap();
    // The old connection goes after the new one came: the new one stays known.
    drop(held);
    assert_eq!(reservations.list(|_| "v".to_owned())[0].connection_count, 2);
    drop((replaced, beside));
    assert_eq!(reservations.list(|_| "v".to_owned())[0].connection_count, 0);
}

#[tokio::test(start_paused = true)]
async fn queued_requests_of_an_old_client_exclude_new_clients() {
    let roster = Roster::default();
    let log = Arc::new(Permit::default());
    let reservations = Roster::default().reservations().settled_by({
        let log = log.clone();
        move |_| {
            let log = log.clone();
            async move {
                log.drained().await;
                Ok(())
            }
        }
    });
    let reservations = Arc::new(reservations);
    let held =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    let (running, queued) = (held.permit().unwrap().pass().unwrap(), log.pass().unwrap());
    log.close();
    let go = request(1, 1, Intent::Go);
    let late = reservations.fence(1).await.unwrap_err();
    assert!(late.to_string().contains("still running; try again"), "{late}");
    drop(running);
    let late = reservations.fence(1).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable);
    assert!(
        late.to_string().contains("does not make progress with some of them; try again"),
        "{late}"
    );
    assert_eq!(reservations.settle(1).await.unwrap_err().kind(), ErrorKind::Unavailable);
    // It is over anyway, also after a restart, and no other client is admitted.
    let error = reservations.connect(1, "v", false, Some(&go)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert_eq!(reservations.holders_of(1), ["host1"]);
    assert_eq!(reservations.attach(1, "v", true).unwrap_err().kind(), ErrorKind::Busy);
    let next = request(2, 2, Intent::Attach);
    let error = reservations.connect(1, "v", false, Some(&next)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(open(&roster).holders_of(1).is_empty());
    drop(queued);
    assert_eq!(reservations.fence(1).await.unwrap(), ["host1"]);
    drop(held);
    let next = reservations.connect(1, "v", false, Some(&next)).await.unwrap();
    // A connection that has ended completely may have left requests, too.
    drop(next);
    log.running_count.store(1, Ordering::SeqCst);
    let late =
        reservations.connect(1, "v", false, Some(&request(2, 2, Intent::Go))).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable);
    log.running_count.store(0, Ordering::SeqCst);
    assert!(reservations.connect(1, "v", false, Some(&request(2, 2, Intent::Go))).await.is_ok());
    // So may a device that was removed; then a connection of an unidentified client waits, too.
    assert!(reservations.connect(2, "w", false, None).await.is_ok());
    drop(reservations.attach(2, "w", false).unwrap());
    log.running_count.store(1, Ordering::SeqCst);
    for _ in 0..2 {
        let late = reservations.connect(2, "w", false, None).await.unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Unavailable);
    }
    log.running_count.store(0, Ordering::SeqCst);
    let held = reservations.connect(2, "w", false, None).await.unwrap();
    log.running_count.store(1, Ordering::SeqCst);
    let beside = reservations.connect(2, "w", false, None).await.expect("once is enough");
    // So may a connection, for any next client.
    drop(beside);
    assert_eq!(
        reservations.connect(2, "w", false, None).await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    log.running_count.store(0, Ordering::SeqCst);
    assert!(reservations.connect(2, "w", false, None).await.is_ok());
    drop(held);
}

#[tokio::test]
async fn returning_machine_replaces_its_earlier_attachment() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let before =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    let after =
        reservations.connect(1, "v", false, Some(&request(1, 2, Intent::Attach))).await.unwrap();
    assert!(before.permit().unwrap().pass().is_err());
    assert!(after.permit().unwrap().pass().is_ok());
    let old = request(1, 1, Intent::Go);
    assert_eq!(
        reservations.connect(1, "v", false, Some(&old)).await.unwrap_err().kind(),
        ErrorKind::Fenced
    );
    assert_eq!(reservations.holders_of(1), ["host1"]);
    // A client that was not restarted still has it, under another name of the server.
    let again = ReservationRequest { attachment: [3; 16], ..request(1, 2, Intent::Attach) };
    let error = reservations.connect(1, "v", false, Some(&again)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(after.permit().unwrap().pass().is_ok());
}

#[tokio::test]
async fn a_client_that_did_not_hear_the_answer_asks_again() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let asked = request(1, 1, Intent::Attach);
    let unheard = reservations.connect(1, "v", false, Some(&asked)).await.unwrap();
    let heard = reservations.connect(1, "v", false, Some(&asked)).await.unwrap();
    assert!(unheard.permit().unwrap().pass().is_err());
    assert!(heard.permit().unwrap().pass().is_ok());
    drop((unheard, heard));
    let reservations = open(&roster);
    drop(reservations.connect(1, "v", false, Some(&asked)).await.unwrap());
    assert_eq!(reservations.holders_of(1), ["host1"]);
    // The client may release it.
    reservations.release(1, &asked).await.unwrap();
    assert!(reservations.connect(1, "v", false, None).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn clients_are_refused_while_an_attachment_is_recorded() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let before =
        reservations.connect(1, "v", false, Some(&request(1, 1, Intent::Attach))).await.unwrap();
    let running = before.permit().unwrap().pass().unwrap();
    // It waits for the request, and has the volume meanwhile.
    let restarted = request(1, 2, Intent::Attach);
    let (outcome, ()) =
        tokio::join!(reservations.connect(1, "v", false, Some(&restarted)), async {
            assert_eq!(
                reservations.connect(1, "v", false, None).await.unwrap_err().kind(),
                ErrorKind::Busy
            );
            assert_eq!(reservations.attach(1, "v", false).unwrap_err().kind(), ErrorKind::Busy);
        });
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
    drop(running);
    drop(before);
    // A change that could not be written did not happen.
    let reservations = open(&roster);
    roster.is_stuck.store(true, Ordering::SeqCst);
    assert!(
        reservations.connect(2, "w", false, Some(&request(1, 3, Intent::Attach))).await.is_err()
    );
    assert!(reservations.holders_of(2).is_empty());
    assert_eq!(reservations.holders_of(1), ["host1"]);
}

#[tokio::test]
async fn clients_that_share_are_let_in_together() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let shared =
        |client| ReservationRequest { is_shared: true, ..request(client, client, Intent::Attach) };
    let first = reservations.connect(1, "v", false, Some(&shared(1))).await.unwrap();
    let second = reservations.connect(1, "v", false, Some(&shared(2))).await.unwrap();
    assert!(reservations.connect(1, "v", false, None).await.is_ok());
    assert!(reservations.attach(1, "v", true).is_ok());
    assert_eq!(reservations.attach(1, "v", false).unwrap_err().kind(), ErrorKind::Busy);
    let alone = request(3, 3, Intent::Attach);
    assert_eq!(
        reservations.connect(1, "v", false, Some(&alone)).await.unwrap_err().kind(),
        ErrorKind::Busy
    );
    drop((first, second));
    assert_eq!(reservations.fence(1).await.unwrap().len(), 2);
    let device = reservations.attach(1, "v", true).unwrap();
    let refused = reservations.connect(1, "v", false, Some(&alone)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy, "the device writes too");
    assert!(reservations.connect(1, "v", false, Some(&shared(3))).await.is_ok());
    drop(device);
}

#[tokio::test]
async fn shrinking_a_volume_excludes_attachment() {
    let roster = Roster::default();
    let reservations = open(&roster);
    let first = reservations.guard_detached(1, "v").unwrap();
    let second = reservations.guard_detached(1, "v").unwrap();
    drop(first);
    let client = request(1, 1, Intent::Attach);
    for _ in 0..2 {
        let of_device = reservations.attach(1, "v", true).unwrap_err();
        let of_client = reservations.connect(1, "v", false, Some(&client)).await.unwrap_err();
        for error in [of_device, of_client] {
            assert_eq!(error.kind(), ErrorKind::Busy);
            assert!(error.to_string().contains("try again when that is over"), "{error}");
        }
    }
    // They may see the volume in its current state.
    let connection = reservations.connect(1, "v", false, None).await.unwrap();
    drop((second, connection));
    let device = reservations.attach(1, "v", false).unwrap();
    let error = reservations.guard_detached(1, "v").unwrap_err();
    assert!(error.to_string().contains("detach it first"), "{error}");
    drop(device);
    let held = reservations.connect(1, "v", false, Some(&client)).await.unwrap();
    let error = reservations.guard_detached(1, "v").unwrap_err();
    assert!(error.to_string().contains("client host1"), "{error}");
    drop(held);
    reservations.release(1, &client).await.unwrap();
    drop(reservations.guard_detached(1, "v").unwrap());
    assert!(reservations.users.lock().is_empty());
}
