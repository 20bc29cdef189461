//! The faults of a run, one after another, within what the protocol is to survive.
//!
//! Invariants:
//! - Directories are lost and bits flipped one at a time: the next one waits until every member has been
//!   seen to lack nothing. The same holds for the loss of power on single machines, which leaves a log that
//!   proves less.
//! - Fragments are destroyed only when all segments were seen whole: of one store, or by one bit.
//! - Only a loss of power on several machines may lose writes, and the oracle knows of it.

use crate::executor::World;
use crate::network::Weather;
use crate::node::{Machine, Site};
use crate::printing::print;
use crate::stores::Store;
use parking_lot::Mutex;
use replication::Proof;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The machines of a run. Clones are handles to the same.
pub(crate) type Machines = Arc<Mutex<Vec<Machine>>>;

/// Longest time for which members that lack nothing are waited for. Chosen by hand.
const SOUND_WAIT: Duration = Duration::from_secs(20);

/// The faults; see the head of the file.
pub(crate) struct Faults {
    pub(crate) site: Site,
    pub(crate) machines: Machines,
    pub(crate) node_count: usize,
}

impl Faults {
    fn world(&self) -> &World {
        &self.site.world
    }

    fn any(&self) -> usize {
        let count = u64::try_from(self.node_count).expect("a few");
        usize::try_from(self.world().below(count)).expect("a few")
    }

    /// Returns a node, and more often the owner than another.
    fn victim(&self) -> usize {
        let is_owner = |node: &usize| {
            let parts = self.site.network.running(*node).and_then(|running| running.parts());
            parts.is_some_and(|parts| parts.server.is_some())
        };
        let owner = (0..self.node_count).find(is_owner);
        match owner.filter(|_| self.world().chance(50)) {
            Some(owner) => owner,
            None => self.any(),
        }
    }

    fn with<T>(&self, node: usize, change: impl FnOnce(&mut Machine) -> T) -> T {
        change(&mut self.machines.lock()[node])
    }

    /// Injects faults for a time, and repairs everything at its end.
    pub(crate) async fn run(self, until: Duration) {
        self.world().sleep(self.world().ms(500, 2000)).await;
        while self.world().now() < until {
            let fault = self.world().below(130);
            self.world().note(fault);
            self.inject(fault).await;
            self.world().sleep(self.world().ms(50, 2500)).await;
        }
        self.repair();
    }

    fn repair(&self) {
        print(self.world(), format_args!("repairs"));
        self.site.network.heal();
        self.site.chain.fail(0);
        self.site.stores.repair();
        for node in 0..self.node_count {
            self.with(node, |machine| {
                machine.stop(false);
                if !machine.is_up() {
                    machine.start();
                }
            });
        }
    }

    async fn inject(&self, fault: u64) {
        let (world, node) = (self.world().clone(), self.victim());
        print(&world, format_args!("fault {fault} at node {node}"));
        let counts = &self.site.counts;
        match fault {
            0..18 => {
                counts.add("kills");
                self.with(node, Machine::kill);
                self.start_later(node).await;
            }
            18..32 => {
                counts.add("pauses");
                self.with(node, |machine| machine.stop(true));
                let (machines, time) = (Arc::clone(&self.machines), world.ms(20, 4000));
                let waiting = world.clone();
                world.spawn(async move {
                    waiting.sleep(time).await;
                    machines.lock()[node].stop(false);
                });
            }
            32..46 => {
                counts.add("directions cut");
                self.cut(vec![(node, self.any())]);
            }
            46..54 => {
                counts.add("nodes cut off");
                let others = (0..self.node_count).filter(|other| *other != node);
                self.cut(others.flat_map(|other| [(node, other), (other, node)]).collect());
            }
            54..60 => {
                counts.add("bad weather");
                let weather = Weather {
                    is_slow: world.below(30),
                    ends: world.below(300),
                    twice: world.below(50),
                };
                self.site.network.set_weather(weather);
            }
            60..66 => {
                counts.add("store outages");
                self.site.chain.fail(10 + world.below(80));
                let (store, time) = (self.site.chain.clone(), world.ms(200, 6000));
                let waiting = world.clone();
                world.spawn(async move {
                    waiting.sleep(time).await;
                    store.fail(0);
                });
            }
            66..74 => {
                counts.add("take-overs asked for");
                self.with(node, |machine| machine.asked.notify_one());
            }
            74..80 => self.hand_over().await,
            80..85 => self.change_wanted(),
            85..89 => self.with(node, |machine| machine.write_back()),
            89..92 => self.lose_power(node).await,
            92..94 => self.lose_all_power().await,
            94..97 => self.flip(node).await,
            97..100 => self.wipe(node).await,
            _ => self.inject_into_stores(fault, node).await,
        }
    }

    fn any_store(&self) -> usize {
        let count = u64::try_from(self.site.stores.count).expect("a few");
        usize::try_from(self.world().below(count)).expect("a few")
    }

    async fn inject_into_stores(&self, fault: u64, node: usize) {
        let (counts, stores) = (&self.site.counts, &self.site.stores);
        let (store, number) = (self.any_store(), stores.number(self.any_store()));
        match fault {
            100..106 => {
                counts.add("data stores down");
                self.disturb_store(store, |one, is_so| one.is_down = is_so);
                if self.world().chance(30) {
                    self.disturb_store(self.any_store(), |one, is_so| one.is_down = is_so);
                }
            }
            106..110 => {
                counts.add("data stores hanging");
                self.disturb_store(store, |one, is_so| one.is_hanging = is_so);
            }
            110..114 => {
                counts.add("data stores cut off from a node");
                let directions = match self.world().below(3) {
                    0 => vec![(node, number)],
                    1 => vec![(number, node)],
                    _ => vec![(node, number), (number, node)],
                };
                self.cut(directions);
            }
            114..117 => {
                counts.add("data stores cut off");
                let nodes = 0..self.node_count;
                self.cut(nodes.flat_map(|node| [(node, number), (number, node)]).collect());
            }
            117..120 => {
                counts.add("data stores full");
                self.disturb_store(store, |one, is_so| one.is_full = is_so);
            }
            120..125 => {
                if self.are_whole().await && stores.flip() {
                    counts.add("bits of fragments flipped");
                }
            }
            _ => {
                if self.are_whole().await {
                    counts.add("data stores emptied");
                    stores.empty(store);
                }
            }
        }
    }

    /// Lets something be so at a store for a time.
    fn disturb_store(&self, store: usize, set: fn(&mut Store, bool)) {
        let (stores, time) = (self.site.stores.clone(), self.world().ms(200, 6000));
        stores.change(store, |one| set(one, true));
        self.world().spawn(async move {
            stores.network.world.sleep(time).await;
            stores.change(store, |one| set(one, false));
        });
    }

    /// Repairs everything, and waits until all segments have all fragments.
    async fn are_whole(&self) -> bool {
        self.repair();
        let until = self.world().now() + SOUND_WAIT;
        while self.world().now() < until {
            self.world().sleep(Duration::from_millis(200)).await;
            if self.site.stores.may_lose() {
                return true;
            }
        }
        self.site.counts.add("faults left out");
        false
    }

    async fn start_later(&self, node: usize) {
        self.world().sleep(self.world().ms(1, 3000)).await;
        self.with(node, |machine| {
            if !machine.is_up() {
                machine.start();
            }
        });
    }

    fn cut(&self, directions: Vec<(usize, usize)>) {
        let (network, time) = (self.site.network.clone(), self.world().ms(50, 8000));
        directions.iter().for_each(|(from, to)| network.cut(*from, *to, true));
        self.world().spawn(async move {
            network.world.sleep(time).await;
            directions.iter().for_each(|(from, to)| network.cut(*from, *to, false));
        });
    }

    /// Lets the owner give its lease up in favour of another node.
    async fn hand_over(&self) {
        for node in 0..self.node_count {
            let Some(running) = self.site.network.running(node) else { continue };
            let Some(parts) = running.parts().filter(|parts| parts.server.is_some()) else {
                continue;
            };
            let owned = parts.local.owned().await;
            drop(parts);
            if owned.is_some_and(|owned| owned.resign()) {
                self.site.counts.add("hand-overs");
                let next = self.any();
                self.with(next, |machine| machine.asked.notify_one());
            }
        }
    }

    fn change_wanted(&self) {
        let node = self.any();
        let mut wanted = self.site.wanted.lock();
        if !wanted.remove(&node) {
            wanted.insert(node);
        } else if wanted.len() < 3 {
            wanted.insert(node); // three at least
        }
    }

    /// Repairs everything, and waits until all members are known to lack nothing.
    async fn are_sound(&self) -> bool {
        self.repair();
        // A directory is replaced only while the others lack nothing.
        let are_sound = self.become_sound().await
            && (!self.replace_flipped().await || self.become_sound().await);
        if !are_sound {
            self.site.counts.add("faults left out");
        }
        are_sound
    }

    async fn become_sound(&self) -> bool {
        let until = self.world().now() + SOUND_WAIT;
        while self.world().now() < until {
            self.world().sleep(Duration::from_millis(200)).await;
            if self.look().await {
                return true;
            }
        }
        false
    }

    /// Replaces a directory with a flipped bit, which nothing may have noticed. Returns whether there was
    /// one.
    async fn replace_flipped(&self) -> bool {
        let mut is_any = false;
        for node in 0..self.node_count {
            if self.with(node, |machine| machine.is_flipped()) {
                self.site.counts.add("directories replaced");
                self.with(node, Machine::wipe);
                self.start_later(node).await;
                is_any = true;
            }
        }
        is_any
    }

    /// Looks whether the owner has all wanted members, and each has everything.
    async fn look(&self) -> bool {
        let wanted = self.site.wanted.lock().clone();
        let ids = self.site.members.lock().clone();
        let mut found = BTreeMap::new();
        let mut owned = None;
        for node in 0..self.node_count {
            let Some(parts) = self.site.network.running(node).and_then(|one| one.parts()) else {
                return false;
            };
            match parts.local.owned().await {
                Some(one) if parts.server.is_some() => owned = Some((node, one)),
                Some(_) => return false,
                None => {
                    let Ok((document, _)) = parts.local.state().await else { return false };
                    found.insert(node, document.proof);
                }
            }
        }
        let Some((owner, owned)) = owned else { return false };
        let statuses = owned.statuses();
        let least = owned.acknowledged();
        let is_whole = |node: &usize| {
            *node == owner
                || found.get(node) == Some(&Proof::All)
                    && statuses.get(&ids[*node]).is_some_and(|one| one.written + 20 >= least)
        };
        let members = self.site.chain.last().configuration.members;
        let is_member = |node: &usize| members.iter().any(|member| member.id == ids[*node]);
        members.len() == wanted.len() && wanted.iter().all(|node| is_member(node) && is_whole(node))
    }

    async fn lose_power(&self, node: usize) {
        if self.are_sound().await {
            self.site.counts.add("machines without power");
            self.with(node, Machine::cut_power);
            self.start_later(node).await;
        }
    }

    /// Returns the owner and two other nodes that should keep the log.
    fn owner_and_others(&self) -> Option<(usize, usize, usize)> {
        let mut wanted: Vec<usize> = self.site.wanted.lock().iter().copied().collect();
        let is_owner = |node: &usize| {
            let parts = self.site.network.running(*node).and_then(|running| running.parts());
            parts.is_some_and(|parts| parts.server.is_some())
        };
        let owner = wanted.iter().copied().find(is_owner)?;
        wanted.retain(|node| *node != owner);
        let first = wanted.swap_remove(usize::try_from(self.world().below(2)).expect("an index"));
        Some((owner, first, *wanted.first()?))
    }

    /// Disturbs some of the changes of the members, just when they are to be recorded: the store is away,
    /// the owner loses a member, and is stopped before the store is back.
    pub(crate) async fn disturb_changes(self, until: Duration) {
        loop {
            self.site.changing.notified().await;
            let world = self.world().clone();
            if world.now() > until || world.chance(50) {
                continue;
            }
            let Some((owner, one, _)) = self.owner_and_others() else { continue };
            self.site.counts.add("changes disturbed");
            print(&world, format_args!("disturbs the change of node {owner}"));
            self.site.chain.fail(100);
            self.cut(vec![(owner, one), (one, owner)]);
            world.sleep(world.ms(20, 400)).await;
            self.with(owner, |machine| machine.stop(true));
            self.site.chain.fail(0);
            // Of two members, none takes the pool over unless it is asked to.
            self.with(one, |machine| machine.asked.notify_one());
            world.sleep(world.ms(500, 4000)).await;
            self.with(owner, |machine| machine.stop(false));
        }
    }

    async fn lose_all_power(&self) {
        if !self.are_sound().await {
            return;
        }
        // One of the logs may be damaged, too: that of the owner has the most.
        let damaged = self.owner_and_others().filter(|_| self.world().chance(60));
        self.site.counts.add("sites without power");
        self.site.oracle.on_power_loss();
        for node in 0..self.node_count {
            self.with(node, Machine::cut_power);
        }
        if let Some((owner, ..)) = damaged
            && self.with(owner, Machine::flip_newest)
        {
            self.site.counts.add("bits flipped");
        }
        for node in 0..self.node_count {
            self.world().sleep(self.world().ms(1, 800)).await;
            self.with(node, Machine::start);
        }
    }

    /// Damages the newest batches of the one member that has them besides the owner, which is cut off.
    async fn flip_of_two(&self) {
        let Some((owner, other, late)) = self.owner_and_others() else { return };
        self.cut(vec![(owner, late), (late, owner)]);
        self.world().sleep(self.world().ms(20, 300)).await;
        self.with(other, Machine::kill);
        if self.with(other, Machine::flip_newest) {
            self.site.counts.add("bits flipped");
        }
        self.with(other, Machine::start);
        let others = (0..self.node_count).filter(|node| *node != owner);
        self.cut(others.flat_map(|node| [(node, owner), (owner, node)]).collect());
    }

    async fn flip(&self, node: usize) {
        if self.world().chance(50) {
            if self.are_sound().await {
                self.flip_of_two().await;
            }
        } else if self.are_sound().await && self.with(node, |machine| machine.flip()) {
            self.site.counts.add("bits flipped");
            if self.world().chance(60) {
                self.with(node, Machine::kill);
                self.start_later(node).await;
            }
        }
    }

    async fn wipe(&self, node: usize) {
        if !self.are_sound().await {
            return;
        }
        match self.world().chance(70) {
            true => {
                self.site.counts.add("directories lost");
                self.with(node, Machine::wipe);
            }
            false => {
                self.site.counts.add("file systems mounted anew");
                self.with(node, Machine::remount);
            }
        }
        self.start_later(node).await;
    }
}
