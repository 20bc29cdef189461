//! Times and bytes of one write with three members over TLS on loopback; run on demand:
//! `cargo test --release -p ensemble --lib measured -- --ignored --nocapture`.

use super::logs::{self, Open, VOLUME};
use super::over_tls;
use block::env::{Clock, SystemClock};
use bytes::Bytes;
use std::process::Command;
use wal::{EntryKind, NewEntry, Wait};

/// Bytes that the open TCP sockets of this process have sent, headers of packets not included.
fn sent_bytes() -> u64 {
    let output = Command::new("ss").args(["-tinpH"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mine = format!("pid={},", std::process::id());
    let lines: Vec<&str> = text.lines().collect();
    let sockets = lines.windows(2).filter(|pair| pair[0].contains(&mine));
    let fields = sockets.flat_map(|pair| pair[1].split_whitespace());
    fields.filter_map(|field| field.strip_prefix("bytes_sent:")?.parse::<u64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a measurement"]
async fn write_of_4_kib_at_depth_1() {
    let nodes = logs::Nodes::new();
    measure("channels", &nodes.take_over(0, 1).await).await;
    let nodes = over_tls::Nodes::new().await;
    measure("TLS", &nodes.take_over(0, 1).await).await;
}

/// Writes one block after the other, and prints the times and the bytes.
async fn measure(over: &str, owner: &Open) {
    const COUNT: u32 = 5000;
    for wait in [Wait::Written, Wait::Durable] {
        let (before, mut times) = (sent_bytes(), Vec::new());
        let count = if wait == Wait::Written { COUNT } else { COUNT / 10 };
        for number in 0..count {
            let payload = Bytes::from(vec![7; 4096]);
            let (volume, kind) = (VOLUME, EntryKind::Write);
            let start_sector = u64::from(number % 200) * 8;
            let entry = NewEntry { volume, kind, start_sector, sector_count: 8, payload };
            let from = SystemClock.now();
            owner.log.append(entry, wait).await.unwrap();
            times.push(SystemClock.since(from));
            if number % 500 == 499
                && let Some(generation) = owner.log.freeze()
            {
                owner.log.make_durable(generation.last_lsn()).await.unwrap();
                owner.log.release(&generation);
            }
        }
        times.sort_unstable();
        let at = |percent: usize| times[times.len() * percent / 100];
        let sent = sent_bytes().saturating_sub(before) / u64::from(count);
        println!(
            "{over}, {wait:?}: 50 % {:?}, 90 % {:?}, 99 % {:?}; sent {sent} bytes a write",
            at(50),
            at(90),
            at(99)
        );
    }
    let statuses = owner.owned.statuses();
    let of_batches: u64 = statuses.values().map(|status| status.sent_bytes).sum();
    println!("{over}: {of_batches} bytes of batches in {} writes", COUNT + COUNT / 10);
}
