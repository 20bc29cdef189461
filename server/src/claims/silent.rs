//! Clients that do not answer, as conditions.

use super::Claims;
use block::conditions::Report;
use block::{ConditionKind, Conditions};
use std::collections::BTreeMap;

impl Claims {
    /// Raises a condition for each client with a connection to a volume that may write and does not answer, and ends
    /// those of the others; `name_of` knows what people call a volume.
    pub(crate) fn show_silent(&self, conditions: &Conditions, name_of: impl Fn(u32) -> String) {
        let mut silent = BTreeMap::new();
        {
            let all = self.users.lock();
            for (volume, users) in all.iter() {
                for gate in &users.connections {
                    if let Some(silence) = gate.line.silence() {
                        silent.insert((gate.label.clone(), *volume), silence);
                    }
                }
            }
        }
        let silent: BTreeMap<String, Report> = silent
            .into_iter()
            .map(|((client, volume), silence)| {
                let name = name_of(volume);
                let what = format!("client {client} of volume {name} does not answer: {silence}");
                let cost = "its requests hold memory, and nobody else gets the volume alone until it is given up";
                let remedy = "look at the client's machine and the network to it";
                (format!("{client}, {name}"), Report::new(what, cost, remedy))
            })
            .collect();
        conditions.retain(ConditionKind::ClientSilent, |subject| silent.contains_key(subject));
        for (subject, report) in silent {
            conditions.raise(ConditionKind::ClientSilent, &subject, report);
        }
    }
}
