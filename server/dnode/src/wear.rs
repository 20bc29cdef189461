//! The wear of a drive, as `smartctl` prints it in JSON (smartmontools 7 and later). Pure logic.
//!
//! Invariants:
//! - A reader never panics. What is absent, or of another type than expected, is not known.
//! - A drive is reported only by what it says of itself, never by counters that differ between makers.

use serde_json::Value;

/// Part of the rated writes, in percent, from which on a drive is reported. Chosen by hand: with a steady load, a tenth of
/// its life is left to replace it.
const USED_PERCENT_MAX: u8 = 90;

/// What a drive says of its health.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wear {
    /// Why the drive should be replaced; absent if it need not be.
    pub(crate) why: Option<String>,
}

impl Wear {
    /// Reads the output of `smartctl --json --health --attributes`. `None` if it says nothing of the health: the device
    /// is a virtual one, for instance, or the output was cut short.
    pub(crate) fn parse(output: &[u8]) -> Option<Wear> {
        let found: Value = serde_json::from_slice(output).ok()?;
        // Anything but an object has no members.
        let passed = found["smart_status"]["passed"].as_bool();
        let nvme = &found["nvme_smart_health_information_log"];
        let warning = nvme["critical_warning"].as_u64();
        let spare = nvme["available_spare"].as_u64();
        let spare = spare.zip(nvme["available_spare_threshold"].as_u64());
        let used = nvme["percentage_used"].as_u64();
        let used = used.or_else(|| found["endurance_used"]["current_percent"].as_u64());
        let used_percent = used.map(|percent| u8::try_from(percent).unwrap_or(u8::MAX));
        if passed.is_none() && warning.is_none() && used_percent.is_none() {
            return None;
        }
        let warning = warning.unwrap_or(0);
        // Virtual drives have zeroes in both.
        let spare = spare.filter(|(left, threshold)| *threshold > 0 && left <= threshold);
        let reasons = [
            (passed == Some(false)).then(|| "it says that it fails".to_owned()),
            (warning != 0).then(|| format!("critical warning {warning:#04x}")),
            spare.map(|(left, threshold)| {
                format!("{left} % of its spare blocks are left, and {threshold} % is the least")
            }),
            used_percent
                .filter(|percent| *percent >= USED_PERCENT_MAX)
                .map(|percent| format!("{percent} % of its rated writes are used")),
        ];
        let reasons: Vec<String> = reasons.into_iter().flatten().collect();
        Some(Wear { why: (!reasons.is_empty()).then(|| reasons.join(", ")) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(output: &str) -> Option<String> {
        Wear::parse(output.as_bytes()).expect("it says something").why
    }

    /// Output of an NVMe drive with these members in its log.
    fn nvme(passed: bool, log: &str) -> String {
        format!(
            r#"{{"json_format_version":[1,0],"smartctl":{{"version":[7,4],"exit_status":0}},
            "device":{{"name":"/dev/nvme0n1","type":"nvme","protocol":"NVMe"}},
            "smart_status":{{"passed":{passed},"nvme":{{"value":0}}}},
            "nvme_smart_health_information_log":{{"temperature":41,"power_on_hours":9000,{log}}}}}"#
        )
    }

    #[test]
    fn drive_with_life_left_is_not_reported() {
        let output = nvme(
            true,
            r#""critical_warning":0,"available_spare":100,"available_spare_threshold":10,"percentage_used":89"#,
        );
        assert_eq!(Wear::parse(output.as_bytes()), Some(Wear::default()));
        // A rotating disk, with attributes that count its errors.
        let ata = r#"{"smart_status":{"passed":true},"ata_smart_attributes":{"table":[{"id":5,"raw":{"value":8}}]}}"#;
        assert_eq!(Wear::parse(ata.as_bytes()), Some(Wear::default()));
        // A virtual drive has no spare blocks.
        let zeroes = r#""critical_warning":0,"available_spare":0,"available_spare_threshold":0,"percentage_used":0"#;
        assert_eq!(why(&nvme(true, zeroes)), None);
    }

    #[test]
    fn drive_is_reported_with_what_it_says_of_itself() {
        let worn = r#""critical_warning":0,"available_spare":99,"available_spare_threshold":10,"percentage_used":97"#;
        assert_eq!(why(&nvme(true, worn)).as_deref(), Some("97 % of its rated writes are used"));
        let spare = r#""critical_warning":1,"available_spare":10,"available_spare_threshold":10,"percentage_used":300"#;
        assert_eq!(
            why(&nvme(false, spare)).as_deref(),
            Some(
                "it says that it fails, critical warning 0x01, 10 % of its spare blocks are left, and 10 % is the least, \
                 255 % of its rated writes are used"
            )
        );
        let sata = r#"{"smart_status":{"passed":true},"endurance_used":{"current_percent":90}}"#;
        assert_eq!(why(sata).as_deref(), Some("90 % of its rated writes are used"));
        let failing = r#"{"device":{"protocol":"ATA"},"smart_status":{"passed":false}}"#;
        assert_eq!(why(failing).as_deref(), Some("it says that it fails"));
        // SCSI drives tell their endurance, and need not tell a status.
        let scsi = r#"{"device":{"protocol":"SCSI"},"endurance_used":{"current_percent":91}}"#;
        assert_eq!(why(scsi).as_deref(), Some("91 % of its rated writes are used"));
    }

    #[test]
    fn output_that_says_nothing_is_not_known_and_never_a_panic() {
        let refused = r#"{"smartctl":{"messages":[{"string":"Permission denied","severity":"error"}],"exit_status":2}}"#;
        for output in [
            refused,
            "",
            "null",
            "[1,2]",
            "97",
            "smartctl 6.6 2016-05-31 r4324",
            r#"{"smart_status":true}"#,
            r#"{"smart_status":{"passed":"no"}}"#,
            r#"{"nvme_smart_health_information_log":{"percentage_used":-3,"critical_warning":1.5}}"#,
        ] {
            assert_eq!(Wear::parse(output.as_bytes()), None, "{output}");
        }
        assert_eq!(Wear::parse(&[0xff; 100]), None);
        assert_eq!(Wear::parse(&[b'['; 100_000]), None);
        let whole = nvme(true, r#""percentage_used":97"#);
        for end in 0..whole.len() {
            assert_eq!(Wear::parse(&whole.as_bytes()[..end]), None, "{end}");
        }
    }
}
