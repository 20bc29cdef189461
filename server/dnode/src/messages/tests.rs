//! Messages are read as they were written, and nothing else is.

#![allow(
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a panic fails the test"
)]

use super::*;
use block::hex::to_hex;

fn path() -> String {
    "fragments/0000000000000003/x.01".to_owned()
}

fn requests() -> Vec<Request> {
    let lineage = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
    let open = Open {
        version: VERSION,
        owner: Some(Epoch(17)),
        is_bulk: false,
        lineage,
        drive: "nvme0".into(),
    };
    let proof = Proof { key: [5; KEY_BYTES], signature: [6; SIGNATURE_BYTES] };
    vec![
        Request::Open(open.clone(), proof.clone()),
        Request::Open(Open { is_bulk: true, ..open.clone() }, proof.clone()),
        Request::Open(Open { owner: None, drive: String::new(), ..open }, proof),
        Request::Put(path(), Bytes::from_static(b"fragment")),
        Request::Put(path(), Bytes::new()),
        Request::Read(path(), 256..4352),
        Request::Size(path()),
        Request::Delete(path()),
        Request::List("fragments".to_owned()),
        Request::List(String::new()),
        Request::Check(path()),
        Request::Room,
        Request::Drives(VERSION),
    ]
}

fn offers() -> Vec<DriveOffer> {
    let id = Uuid::from_u128(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10);
    let [group, domain] = ["nvme", "rack-a"].map(|text| Some(text.to_owned()));
    vec![
        DriveOffer { id, name: "nvme0".to_owned(), group, domain },
        DriveOffer { id, name: "hdd0".to_owned(), group: None, domain: None },
    ]
}

fn answers() -> Vec<Answer> {
    let listed = |bytes| Listed { path: path(), bytes };
    vec![
        Answer::Done,
        Answer::Read(9000, Bytes::from_static(b"range")),
        Answer::Read(0, Bytes::new()),
        Answer::Size(77),
        Answer::Checked(Bytes::new()),
        Answer::Checked(Bytes::from_static(&[9; HEADER_BYTES])),
        Answer::Listed(Vec::new(), false),
        Answer::Listed(vec![listed(9), listed(10)], true),
        Answer::Refused(Refusal::NotFound, String::new()),
        Answer::Refused(Refusal::Denied, String::new()),
        Answer::Refused(Refusal::Fenced, "a later owner has come".to_owned()),
        Answer::Room(DriveRoom { total_bytes: 1 << 40, free_bytes: 77, wear: String::new() }),
        Answer::Room(DriveRoom { total_bytes: 9, free_bytes: 0, wear: "nvme0n1: worn".to_owned() }),
        Answer::Drives(Vec::new()),
        Answer::Drives(offers()),
    ]
}

/// All messages, one a line: the kind, and the body.
fn lines() -> String {
    let encoded = requests().iter().map(Request::encode).collect::<Vec<_>>();
    let answered = answers().iter().map(Answer::encode).collect::<Vec<_>>();
    let line =
        |(kind, parts): &(u8, Vec<Bytes>)| format!("{kind:02x} {}\n", to_hex(&parts.concat()));
    encoded.iter().chain(&answered).map(line).collect()
}

#[test]
fn golden_bytes_of_all_messages() {
    let golden = include_str!("../../testdata/messages-v1.hex");
    let golden: String = golden
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    assert_eq!(golden, lines());
}

#[test]
fn messages_are_read_as_they_were_written() {
    for request in requests() {
        let (kind, parts) = request.encode();
        let body = Bytes::from(parts.concat());
        assert_eq!(Request::decode(kind, &body), Some(request.clone()));
        assert_eq!(Answer::decode(kind, &body), None, "{request:?} is no answer");
    }
    for answer in answers() {
        let (kind, parts) = answer.encode();
        let body = Bytes::from(parts.concat());
        assert_eq!(Answer::decode(kind, &body), Some(answer.clone()));
        assert_eq!(Request::decode(kind, &body), None, "{answer:?} is no request");
    }
}

#[test]
fn other_bodies_are_refused_without_a_panic() {
    let reader =
        |request: &Request| matches!(request, Request::Open(open, _) if open.drive.is_empty());
    let open = requests().into_iter().find(reader).expect("there is one").encode().1.concat();
    for end in 0..open.len() {
        assert_eq!(Request::decode(kind::OPEN, &Bytes::copy_from_slice(&open[..end])), None);
    }
    let listed = answers()
        .into_iter()
        .find(|answer| matches!(answer, Answer::Listed(found, _) if found.len() == 2))
        .expect("one lists two")
        .encode()
        .1
        .concat();
    for end in 2..listed.len() {
        let is_read =
            Answer::decode(kind::LISTED, &Bytes::copy_from_slice(&listed[..end])).is_some();
        assert_eq!(is_read, end == 1 + (listed.len() - 1) / 2, "{end}");
    }
    let offered = Answer::Drives(offers()).encode().1.concat();
    let first = Answer::Drives(offers()[..1].to_vec()).encode().1.concat().len();
    for end in 0..=offered.len() {
        let is_read =
            Answer::decode(kind::OFFERED, &Bytes::copy_from_slice(&offered[..end])).is_some();
        assert_eq!(is_read, [0, first, offered.len()].contains(&end), "{end}");
    }
    for kind in 0..=255u8 {
        for len in [0, 1, 2, 3, 8, 9, 10, 16, 27, 28, 401, 1002] {
            let body = Bytes::from(vec![0xff; len]);
            let _ = (Request::decode(kind, &body), Answer::decode(kind, &body));
        }
    }
    let mut backwards = Request::Read(path(), 9..9).encode().1.concat();
    backwards[0] = 10;
    assert_eq!(Request::decode(kind::READ, &backwards.into()), None);
    let long = "x".repeat(PATH_BYTES_MAX + 1);
    for request in [Request::Size(long.clone()), Request::Put(long, Bytes::new())] {
        let (kind, parts) = request.encode();
        assert_eq!(Request::decode(kind, &parts.concat().into()), None);
    }
    // Names go into URLs, and an answer has as many drives as a node.
    let named = |name: &str| vec![DriveOffer { name: name.to_owned(), ..offers()[1].clone() }];
    let many = vec![offers()[0].clone(); DRIVE_COUNT_MAX + 1];
    for drives in [named(""), named("a/b"), named(&"x".repeat(64)), many] {
        let (kind, parts) = Answer::Drives(drives).encode();
        assert_eq!(Answer::decode(kind, &parts.concat().into()), None);
    }
    // The text of a refusal is cut at a character.
    let (kind, parts) = Answer::Refused(Refusal::Full, "ü".repeat(TEXT_BYTES_MAX)).encode();
    let cut = Answer::decode(kind, &parts.concat().into());
    assert_eq!(cut, Some(Answer::Refused(Refusal::Full, "ü".repeat(TEXT_BYTES_MAX / 2))));
    // So is that of wear. A question for the room has no body.
    let worn = |wear: String| Answer::Room(DriveRoom { wear, ..DriveRoom::default() });
    let (kind, parts) = worn("ü".repeat(TEXT_BYTES_MAX)).encode();
    let cut = Answer::decode(kind, &parts.concat().into());
    assert_eq!(cut, Some(worn("ü".repeat(TEXT_BYTES_MAX / 2))));
    assert_eq!(Answer::decode(kind::TOLD, &Bytes::from_static(&[0; 15])), None);
    assert_eq!(Request::decode(kind::ROOM, &Bytes::from_static(b"x")), None);
}
