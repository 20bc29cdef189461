//! Short texts that a person writes: sizes, spans, names of snapshots, schedules, and addresses.
//!
//! Invariant: a size or a span that is read is printed as a text that reads as the same.

use crate::{SMALL, no_repair};
use block::quantities::{ByteSize, Span};
use engine::schedule::{Keep, Schedule};
use engine::snapshot::SnapshotName;
use fuzz::{AllocationBound, Outcome, Target};

#[test]
fn words() {
    let texts = [
        "10G",
        "512",
        "1.5T",
        "30s",
        "1h",
        "7d",
        "db@before-upgrade",
        "db,wal@2026-01-02",
        "*/15 * * * *",
        "@hourly",
        "0 3 * * 1-5",
        "nbd://host:10809/db",
        "nbds://[::1]/db?tls-certificates=/etc/tls",
        "nbd+unix:///db?socket=/run/spindle/nbd.sock",
    ];
    let decode = |input: &[u8]| {
        let Ok(text) = std::str::from_utf8(input) else {
            return Outcome::Refused("not text".to_owned());
        };
        let size = text.parse::<ByteSize>();
        if let Ok(size) = &size {
            assert_eq!(size.to_string().parse::<ByteSize>().ok().as_ref(), Some(size));
        }
        let span = text.parse::<Span>();
        if let Ok(span) = &span {
            assert_eq!(span.to_string().parse::<Span>().ok().as_ref(), Some(span));
        }
        let name = text.parse::<SnapshotName>();
        let schedule = Schedule::new(text, Keep::default(), 1_700_000_000);
        let target = nbd::client::Target::parse(text);
        let is_read = size.is_ok() || span.is_ok() || name.is_ok() || schedule.is_ok();
        match (is_read, target) {
            (true, _) | (_, Ok(_)) => Outcome::Accepted,
            (_, Err(error)) => Outcome::Refused(error.chain()),
        }
    };
    Target {
        name: "words",
        inputs: texts.iter().map(|text| text.as_bytes().to_vec()).collect(),
        repair: &no_repair,
        decode: &decode,
        execution_count: 20_000,
        input_bytes_max: 512,
        // A schedule holds a set of numbers for each field.
        allocation: AllocationBound { fixed_bytes: 1 << 20, ..SMALL },
    }
    .check();
}
