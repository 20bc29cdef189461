//! The steps that are possible in a state.
//!
//! Invariants:
//! - Every step is one of one machine, and the bounds limit how often faults occur.

use super::{Action, Bounds, Fate, Node, Role, World};
use crate::messages::Request;

impl World {
    pub(in crate::model) fn actions(&self, bounds: &Bounds, actions: &mut Vec<Action>) {
        for envelope in &self.network {
            actions.push(Action::Deliver(envelope.clone()));
            if self.used.repeats < bounds.repeats {
                actions.push(Action::Repeat(envelope.clone()));
            }
        }
        if self.now < u64::from(bounds.ticks) {
            actions.push(Action::Tick);
        }
        for (at, machine) in self.machines.iter().enumerate() {
            if self.used.damages < bounds.damages {
                let damaged = |batch: &crate::Batch| Action::Damage(at, batch.position.sequence);
                actions.extend(machine.disk.log.iter().map(damaged));
            }
            let Some(node) = &machine.node else {
                actions.push(Action::Start(at));
                if self.used.wipes < bounds.wipes {
                    actions.push(Action::Wipe(at));
                }
                continue;
            };
            if self.used.crashes < bounds.crashes {
                actions.push(Action::Crash(at));
            }
            if self.used.reboots < bounds.reboots {
                let kept = machine.disk.after_power_loss();
                actions.extend(kept.map(|kept| Action::Reboot(at, kept)));
            }
            if self.used.failures < bounds.failures {
                let kept = machine.disk.after_power_loss();
                actions.extend(kept.map(|kept| Action::Fail(at, kept)));
            }
            if self.used.take_overs < bounds.take_overs && self.is_member(at) {
                actions.push(Action::TakeOver(at));
                if bounds.is_alone && self.may_go_alone(at, node) {
                    actions.push(Action::GoAlone(at));
                }
            }
            if self.newest_destaged().is_some_and(|newest| {
                let log = node.follower.log();
                log.has(newest) && log.before() != newest
            }) {
                actions.push(Action::Release(at));
            }
            self.sends(bounds, at, actions);
            self.actions_of(bounds, at, node, actions);
        }
    }

    fn sends(&self, bounds: &Bounds, at: usize, actions: &mut Vec<Action>) {
        for to in 0..self.machines.len() {
            let Some(request) = self.next_request(bounds, at, to) else { continue };
            let mut send = |fate| actions.push(Action::Send(at, to, fate));
            send(Fate::Answered);
            if to == at {
                continue;
            }
            if self.used.losses < bounds.losses {
                send(Fate::AnswerLost);
            }
            if self.used.delays < bounds.delays {
                send(Fate::AnswerLate);
                send(Fate::Late);
            }
            if self.used.crashes < bounds.crashes {
                if matches!(request, Request::Read { .. }) {
                    (1..=3).for_each(|steps| send(Fate::SenderKilled(steps)));
                }
                let target = self.machines[to].node.as_ref();
                let steps = target.map_or(0, |target| {
                    target.follower.clone().on_request(self.now, request).len()
                });
                (1..=steps).for_each(|steps| send(Fate::Interrupted(steps)));
            }
        }
    }

    fn actions_of(&self, bounds: &Bounds, at: usize, node: &Node, actions: &mut Vec<Action>) {
        match &node.role {
            Role::Candidate(candidate) => {
                if self.tail_to_open(bounds, candidate, &node.follower).is_some() {
                    actions.push(Action::Open(at));
                }
            }
            Role::Owner(owner) if owner.superseded_by().is_none() => {
                if owner.is_open() && self.used.writes < bounds.writes {
                    actions.push(Action::Write(at));
                }
                if owner.is_open() && self.used.resigns < bounds.resigns {
                    actions.push(Action::Resign(at));
                }
                let before = node.follower.log().before().sequence;
                if self.used.trims < bounds.trims && owner.acknowledged() > before {
                    actions.push(Action::Trim(at));
                }
                if self.used.changes < bounds.changes && owner.is_open() {
                    let others = (0..self.machines.len()).filter(|to| *to != at);
                    actions.extend(others.map(|to| Action::BeginChange(at, to)));
                }
                let mut ids = self.machines.iter().map(|machine| &machine.id);
                if owner.is_open() && ids.any(|id| owner.progress(id).is_none()) {
                    actions.push(Action::AddLearner(at));
                }
                if owner.change().is_some() {
                    actions.push(Action::GiveUpChange(at));
                }
                if owner.may_record_change() {
                    actions.extend([true, false].map(|learns| Action::Record(at, learns)));
                }
            }
            Role::Owner(_) | Role::Idle => {}
        }
    }
}
