//! The network and what arrives by it: requests, the effects that a member asks for, and answers.
//!
//! Invariants:
//! - The effects of a request are done in their order, and a process is killed between two of them.

use super::{Bounds, Envelope, Fate, Message, Node, Role, World};
use crate::follower::Effect;
use crate::messages::{Answer, Request};
use crate::quorum::MemberId;
use crate::take_over::Decision;
use block::Lsn;

impl World {
    pub(super) fn send(&mut self, bounds: &Bounds, at: usize, to: usize, fate: Fate) {
        let Some(request) = self.next_request(bounds, at, to) else { return };
        if let Request::Append { previous, batches, .. } = &request
            && let Some(last) = batches.last()
            && let Some(damaged) =
                self.machines[at].disk.damaged(previous.sequence, last.position.sequence)
        {
            self.notice_damage(at, damaged);
            return;
        }
        if let Some(node) = &mut self.machines[at].node
            && let (Role::Candidate(candidate), Request::Read { .. }) = (&mut node.role, &request)
            && let Decision::Continue(tail, _) | Decision::LossPossible(tail, _) =
                candidate.decide()
        {
            let _ = candidate.read(tail, node.follower.log());
        }
        self.note_sent(bounds, at, to);
        let envelope = self.envelope(at, to, Message::Request(request));
        let earlier = self.network.clone();
        match fate {
            Fate::Late => {
                self.used.delays += 1;
                self.network.insert(envelope);
                return;
            }
            Fate::Interrupted(steps) => {
                self.used.crashes += 1;
                self.deliver(envelope, steps);
                self.stop(to);
            }
            Fate::Answered | Fate::AnswerLost | Fate::AnswerLate | Fate::SenderKilled(_) => {
                self.deliver(envelope, usize::MAX);
            }
        }
        if fate == Fate::AnswerLate {
            self.used.delays += 1;
            return;
        }
        self.used.losses += u8::from(fate == Fate::AnswerLost);
        let answers: Vec<Envelope> = self.network.difference(&earlier).cloned().collect();
        self.network = earlier;
        if fate == Fate::AnswerLost || answers.is_empty() && at != to {
            self.disconnect(at, self.machines[to].id);
        }
        if let Fate::SenderKilled(steps) = fate {
            self.used.crashes += 1;
            answers.into_iter().for_each(|answer| self.deliver(answer, steps));
            self.stop(at);
        } else if fate != Fate::AnswerLost {
            answers.into_iter().for_each(|answer| self.deliver(answer, usize::MAX));
        }
    }

    /// Tells an owner what it has sent.
    fn note_sent(&mut self, bounds: &Bounds, at: usize, to: usize) {
        let target = self.machines[to].id;
        if let Some(Node { follower, role: Role::Owner(owner) }) = &mut self.machines[at].node
            && let Some(sending) = owner.sending(&target, follower.log(), bounds.batches)
        {
            owner.on_sent(&target, &sending);
        }
    }

    fn disconnect(&mut self, at: usize, target: MemberId) {
        if let Some(Node { role: Role::Owner(owner), .. }) = &mut self.machines[at].node {
            owner.on_disconnected(&target);
        }
    }

    /// Ends the process of a machine, and all its connections.
    pub(super) fn stop(&mut self, at: usize) {
        self.machines[at].node = None;
        let id = self.machines[at].id;
        (0..self.machines.len()).for_each(|other| self.disconnect(other, id));
    }

    pub(super) fn deliver(&mut self, envelope: Envelope, steps: usize) {
        let Envelope { from, from_id, to, to_id, message } = envelope;
        let now = self.now;
        let is_known = self.machines[to].id == to_id;
        let Some(node) = self.machines[to].node.as_mut().filter(|_| is_known) else { return };
        match message {
            Message::Request(request) => {
                let effects = node.follower.on_request(now, request);
                if let Role::Owner(owner) = &mut node.role {
                    owner.on_own_promise(node.follower.document().promised);
                }
                for (effect, step) in effects.into_iter().zip(0..) {
                    if step < steps {
                        self.perform(to, from, effect);
                    } else {
                        // The process ends during this one.
                        let disk = &mut self.machines[to].disk;
                        disk.is_torn |= matches!(effect, Effect::Write(_));
                        break;
                    }
                }
            }
            Message::Answer(answer) => self.take_answer(to, from_id, answer, steps),
        }
    }

    pub(super) fn perform(&mut self, at: usize, from: usize, effect: Effect) {
        let disk = &mut self.machines[at].disk;
        match effect {
            Effect::Store(document) => disk.document = document,
            Effect::Cut(sequence) => disk.cut(sequence),
            Effect::Reset(before) => disk.reset(before),
            Effect::Release { .. } => {} // the world decides what is released
            Effect::Write(batches) => disk.write(batches),
            Effect::Sync => disk.sync(),
            Effect::Answer(answer) => self.reply(at, from, answer),
            Effect::Send { epoch, mut run, start, previous } => {
                if let Some(damaged) = disk.damaged(previous.sequence, u64::MAX) {
                    self.notice_damage(at, damaged);
                    run += 1;
                }
                let batches = self.machines[at].disk.read_all(previous.sequence).to_vec();
                let answer = Answer::Batches { epoch, run, start, previous, batches };
                self.reply(at, from, answer);
            }
        }
    }

    fn reply(&mut self, at: usize, to: usize, answer: Answer) {
        if at == to {
            let id = self.machines[at].id;
            self.take_answer(at, id, answer, usize::MAX);
        } else {
            let envelope = self.envelope(at, to, Message::Answer(answer));
            self.network.insert(envelope);
        }
    }

    fn take_answer(&mut self, at: usize, from: MemberId, answer: Answer, steps: usize) {
        let is_own = self.machines[at].id == from;
        let Some(node) = &mut self.machines[at].node else { return };
        match &mut node.role {
            Role::Idle => {}
            Role::Owner(owner) => {
                owner.on_answer(&from, &answer, node.follower.log());
            }
            Role::Candidate(candidate) => {
                candidate.on_answer(from, &answer);
                if is_own {
                    candidate.on_own_answer(&answer, node.follower.log());
                }
                let epoch = candidate.epoch();
                if let Answer::Batches { epoch: of, start, previous, batches, .. } = answer
                    && of == epoch
                    && candidate.superseded_by().is_none()
                {
                    let request =
                        candidate.store(start, previous, batches, node.follower.log(), Lsn::NONE);
                    self.own_request(at, request, steps);
                }
            }
        }
    }
}
