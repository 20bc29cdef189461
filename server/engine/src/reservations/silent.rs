//! Raises a condition for each client that does not answer.

use super::Reservations;
use block::conditions::Report;
use block::{ConditionKind, Conditions, Silence};
use std::collections::BTreeMap;

impl Reservations {
    /// Raises a condition for each client that has a connection with write access to a volume and
    /// does not answer, and ends the conditions of the others. `name_of` returns the name of a
    /// volume as operators know it.
    pub fn show_silent(&self, conditions: &Conditions, name_of: impl Fn(u32) -> String) {
        let mut silent = BTreeMap::new();
        {
            let all = self.users.lock();
            for (volume, users) in all.iter() {
                for permit in &users.connections {
                    if let Some(silence) = permit.silence() {
                        silent.insert((permit.label.clone(), *volume), silence);
                    }
                }
            }
        }
        show(conditions, silent, name_of);
    }
}

/// Shows a condition for each silent client, by label and volume, and ends all others.
fn show(
    conditions: &Conditions,
    silent: BTreeMap<(String, u32), Silence>,
    name_of: impl Fn(u32) -> String,
) {
    let reports = silent.into_iter().map(|((client, volume), silence)| {
        let name = name_of(volume);
        let what = format!("client {client} of volume {name} does not answer: {silence}");
        let cost = "its requests hold memory, and no other client gets the volume alone until \
                    spindle drops this one";
        let remedy = "check the client's machine and the network to it";
        (format!("{client}, {name}"), Report::new(what, cost, remedy))
    });
    let reports: BTreeMap<String, Report> = reports.collect();
    conditions.retain(ConditionKind::ClientSilent, |subject| reports.contains_key(subject));
    for (subject, report) in reports {
        conditions.raise(ConditionKind::ClientSilent, &subject, report);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_client_that_does_not_answer_is_a_condition_until_it_does() {
        let conditions = Conditions::default();
        let silence =
            Silence { lasts: Duration::from_secs(31), gives_up_in: Duration::from_secs(89) };
        let silent = |clients: &[&str]| {
            clients.iter().map(|client| (((*client).to_owned(), 7), silence)).collect()
        };
        show(&conditions, silent(&["10.0.0.1:9", "10.0.0.2:9"]), |_| "db".to_owned());
        assert_eq!(conditions.list().len(), 2);
        show(&conditions, silent(&["10.0.0.2:9"]), |_| "db".to_owned());
        let list = conditions.list();
        let [one] = &list[..] else { panic!("{list:?}") };
        assert_eq!((one.kind, &*one.subject), (ConditionKind::ClientSilent, "10.0.0.2:9, db"));
        let what = &one.report.what;
        assert!(what.contains("silent for 31 s, given up within 89 s"), "{what}");
        show(&conditions, BTreeMap::new(), |_| "db".to_owned());
        assert_eq!(conditions.list(), []);
    }
}
