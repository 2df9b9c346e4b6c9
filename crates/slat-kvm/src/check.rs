//! `slat check`: does this host's KVM lose a write?
//!
//! A [`History`] is a list of steps of vCPUs and of the host on a guest's memory, drawn from a
//! seed. [`check()`] runs it on a [`System`] and compares, after each step, with a [`Model`] of
//! what the memory holds and of what the log must tell. The model knows each content, because the
//! guest's stamps are numbers of steps that the host computes as well. A history in which something
//! is lost is cut down by [`minimise()`].
//!
//! | checked | when |
//! |---|---|
//! | each content that the host sees | after each step, except where looking would undo the step |
//! | each content that a guest sees, by a sum over its pages | in each step that reads |
//! | no access outside of memslots, no write to a read-only one reaches memory | in each access |
//! | each page that was written is in the log, or in a ring | in each fetch |
//! | a copy of the memory that follows the log has the last write | in each fetch, vCPUs stopped |
//! | KVM's own counters agree with each other and with the memslots | after each step |
//! | vCPUs that should make progress do | while they are waited for |
//!
//! A vCPU may run beside other steps. Each of its pages then still has one writer, so that its
//! content follows from the number of steps that it has done.

mod classes;
mod counters;
mod generate;
mod history;
mod host;
mod kvm;
mod minimise;
mod model;
mod moves;
mod pager;
mod patience;

pub use classes::{Class, classes};
pub use generate::Means;
pub use history::{Act, History, Kind, Place, Span, Step, Way, stamp_of_host};
pub use kvm::{Host, KvmSystem, run};
pub use minimise::minimise;
pub use model::{HOLE, Model, Slot, Task, Wrong, task};
pub use moves::{moved, set_up_machine};
pub use patience::outlast;

use crate::work::{MULTIPLIER, Touch};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The first two words of a page: the number of the step that wrote it, and its guest address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// The number of the step; 0 if none wrote it. A step of the host has the highest bit.
    pub step: u64,
    /// The guest address at which a vCPU wrote it.
    pub at: u64,
}

impl Stamp {
    /// Adds a page to the sum that a vCPU computes over the pages that it reads.
    pub fn add_to(self, sum: u64) -> u64 {
        let add = |sum: u64, word| sum.wrapping_mul(MULTIPLIER).wrapping_add(word);
        add(add(sum, self.step), self.at)
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            0 if self.at == 0 => f.write_str("zeroes"),
            model::HOLE => f.write_str("no memory"),
            step if step >> 63 == 1 => write!(f, "the host's stamp of step {}", step << 1 >> 1),
            step => write!(
                f,
                "stamp {} of vCPU {} at {:#x}",
                step & ((1 << 40) - 1),
                (step >> 40).wrapping_sub(1),
                self.at
            ),
        }
    }
}

/// The outcome of a vCPU's task.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TaskResult {
    /// Steps that it has done.
    pub steps: u64,
    /// Guest pages of which an access left to the host.
    pub exits: BTreeSet<u64>,
    /// The sum over the pages that it has read.
    pub sum: u64,
}

/// Why a history did not go on.
#[derive(Debug)]
pub enum Trouble {
    /// Something did not end.
    Hang(String),
    /// A vCPU stopped as it never should: a page that it executed held something else.
    Wrong(String),
    /// The system refused something, or lacks it.
    Refused(crate::Error),
}

impl From<crate::Error> for Trouble {
    fn from(error: crate::Error) -> Self {
        match error.is_wrong_result() {
            true => Self::Wrong(error.to_string()),
            false => Self::Refused(error),
        }
    }
}

/// A system on which histories run: KVM of this host, or another MMU.
pub trait System {
    /// Adds, moves, changes or (`None`) deletes a memslot.
    ///
    /// # Errors
    /// [`Trouble`], as for each function here.
    fn set_slot(&mut self, id: u32, slot: Option<(Place, bool)>) -> Result<(), Trouble>;

    /// Starts a vCPU.
    fn start(&mut self, vcpu: usize, task: &Task) -> Result<(), Trouble>;

    /// Waits for a vCPU that was started; with `stop`, stops it. Returns nothing if a ring is full,
    /// and has to be harvested first.
    fn wait(&mut self, vcpu: usize, stop: bool) -> Result<Option<TaskResult>, Trouble>;

    /// Returns how many steps a vCPU has done at least since it was started.
    fn progress(&self, vcpu: usize) -> u64;

    /// Interrupts a vCPU, which goes on.
    fn kick(&mut self, vcpu: usize, times: u32);

    /// Fetches the log of a memslot and clears it, `chunk` pages at a time (0: all).
    fn fetch(&mut self, id: u32, pages: u64, chunk: u32) -> Result<BTreeSet<u64>, Trouble>;

    /// Harvests the rings and resets them. Returns memslots and pages.
    fn harvest(&mut self, threads: u32) -> Result<BTreeSet<(u32, u64)>, Trouble>;

    /// Does something to host pages.
    fn act(&mut self, act: Act, host: Span) -> Result<(), Trouble>;

    /// The host has stored to the pages of an act.
    fn stored(&mut self, _act: Act) {}

    /// Makes guest pages private or shared.
    fn convert(&mut self, _guest: Span, _private: bool) -> Result<(), Trouble> {
        let rule = "needs a system with private memory";
        Err(Trouble::Refused(crate::Error::invalid("step", "convert", rule)))
    }

    /// Compares the system's own counters with each other, and with the number of guest pages that
    /// memslots map. `quiet` says that no vCPU runs.
    fn audit(&mut self, _pages: u64, _quiet: bool) -> Result<(), Trouble> {
        Ok(())
    }

    /// Exchanges host pages.
    fn exchange(&mut self, first: u64, second: u64, pages: u64) -> Result<(), Trouble>;

    /// Reads the stamp of a host page.
    fn peek(&self, host: u64) -> Stamp;

    /// Writes the stamp of a host page.
    fn poke(&mut self, host: u64, stamp: Stamp);

    /// Ends: a system that was left in the middle of a step gives up what still runs.
    fn give_up(&mut self) {}
}

/// What was checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Histories.
    pub histories: u64,
    /// Steps.
    pub steps: u64,
    /// Writes of vCPUs.
    pub writes: u64,
    /// Contents that the host compared.
    pub contents: u64,
    /// Pages that a log or a ring had to tell, and told.
    pub told: u64,
}

impl Counts {
    /// Adds the counts of another history.
    pub fn add(&mut self, other: Self) {
        self.histories += other.histories;
        self.steps += other.steps;
        self.writes += other.writes;
        self.contents += other.contents;
        self.told += other.told;
    }
}

/// Something that was lost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// The index of the step after which it was noticed.
    pub step: usize,
    /// What was lost.
    pub what: String,
    /// Whether something did not end, as opposed to a wrong page.
    pub hang: bool,
}

/// How a history ended.
#[derive(Debug)]
pub enum HistoryEnd {
    /// Everything held.
    Held(Counts),
    /// Something was lost.
    Lost(Loss),
    /// The history could not go on, for a reason that is no fault of the system.
    Stopped(crate::Error),
}

/// Runs a history on a system, and compares. `at` is called before each step; the history ends
/// with [`Error::Stopped`](crate::Error::Stopped) if it returns false.
pub fn check(
    history: &History,
    gpa: fn(u64) -> u64,
    system: &mut dyn System,
    at: &mut dyn FnMut(usize, &str) -> bool,
) -> HistoryEnd {
    let mut run = Run {
        model: Model::of(history, gpa),
        system,
        counts: Counts { histories: 1, ..Counts::default() },
        quiet: Vec::new(),
        memory: history.memory,
        ring: history.way == Way::Ring,
    };
    run.quiet = vec![false; run.model.pages() as usize];
    for (index, step) in history.steps.iter().enumerate() {
        if !at(index, &step.to_string()) {
            run.system.give_up();
            return HistoryEnd::Stopped(crate::Error::Stopped);
        }
        let number = run.model.count_step();
        if !run.model.allows(step) {
            continue;
        }
        run.counts.steps += 1;
        let done = run.step(number, step);
        let done = done.and_then(|()| run.contents(false)).and_then(|()| run.audit());
        if let Err(trouble) = done {
            run.system.give_up();
            let lost = |what, hang| HistoryEnd::Lost(Loss { step: index, what, hang });
            return match trouble {
                Trouble::Hang(what) => lost(what, true),
                Trouble::Wrong(what) => lost(what, false),
                Trouble::Refused(error) => HistoryEnd::Stopped(error),
            };
        }
    }
    let step = history.steps.len().saturating_sub(1);
    let end = run.end().and_then(|()| run.contents(true));
    match end {
        Ok(()) => HistoryEnd::Held(run.counts),
        Err(trouble) => {
            run.system.give_up();
            match trouble {
                Trouble::Hang(what) => HistoryEnd::Lost(Loss { step, what, hang: true }),
                Trouble::Wrong(what) => HistoryEnd::Lost(Loss { step, what, hang: false }),
                Trouble::Refused(error) => HistoryEnd::Stopped(error),
            }
        }
    }
}

struct Run<'a> {
    model: Model,
    system: &'a mut dyn System,
    counts: Counts,
    /// Host pages that are not looked at, because that would undo what was done to them.
    quiet: Vec<bool>,
    /// Pages of the host's memory, without private memory.
    memory: u64,
    ring: bool,
}

impl From<Wrong> for Trouble {
    fn from(wrong: Wrong) -> Self {
        Self::Wrong(wrong.what)
    }
}

impl Run<'_> {
    fn step(&mut self, number: usize, step: &Step) -> Result<(), Trouble> {
        match *step {
            Step::Place { slot, place, log } => {
                self.system.set_slot(slot, Some((place, log)))?;
                self.model.place(slot, place, log);
            }
            Step::Delete { slot } => {
                self.system.set_slot(slot, None)?;
                self.model.delete(slot);
            }
            Step::Log { slot, on } => {
                let Some(place) = self.model.slot(slot).map(|it| it.place) else { return Ok(()) };
                // What ran before the call need not be in the log that it starts.
                self.system.set_slot(slot, Some((place, on)))?;
                self.catch_up();
                self.model.log(slot, on);
            }
            Step::Write { vcpu, guest, .. }
            | Step::Read { vcpu, guest }
            | Step::Execute { vcpu, guest } => self.access(vcpu, guest, step)?,
            Step::Start { vcpu, .. } => {
                if let Some(task) = task(step) {
                    self.begin(vcpu, &task)?;
                }
            }
            Step::Stop { vcpu } => _ = self.finish(vcpu, true)?,
            Step::Kick { vcpu, times } => self.system.kick(vcpu, times),
            Step::Fetch { slot, chunk } => self.fetch(slot, chunk)?,
            Step::Harvest { threads } => self.harvest(threads)?,
            Step::Host { act, host } => {
                self.system.act(act, host)?;
                if matches!(act, Act::Store | Act::Merge) {
                    for page in host.pages() {
                        let stamp = stamp_of_host(number, page, act == Act::Merge);
                        self.system.poke(page, stamp);
                    }
                    self.system.stored(act);
                }
                self.model.host(act, host);
                let quiet = !matches!(act, Act::Store | Act::Collapse | Act::Protect | Act::Move);
                self.quiet[host.at as usize..host.end() as usize].fill(quiet);
            }
            Step::Exchange { first, second, pages } => {
                self.system.exchange(first, second, pages)?;
                self.model.exchange(first, second, pages);
            }
            Step::Convert { guest, private } => {
                self.system.convert(guest, private)?;
                self.model.convert(guest, private);
            }
        }
        Ok(())
    }

    /// Learns how far running vCPUs are.
    fn catch_up(&mut self) -> BTreeSet<(u32, u64)> {
        let mut wrote = BTreeSet::new();
        for vcpu in self.model.who_runs() {
            let progress = self.system.progress(vcpu);
            wrote.append(&mut self.model.advance(vcpu, progress));
        }
        wrote
    }

    fn begin(&mut self, vcpu: usize, task: &Task) -> Result<(), Trouble> {
        self.system.start(vcpu, task)?;
        self.model.start(vcpu, *task);
        for page in task.guest.pages() {
            if let Some((host, _)) = self.model.expected(page) {
                self.quiet[host as usize] = false;
            }
        }
        Ok(())
    }

    fn finish(&mut self, vcpu: usize, stop: bool) -> Result<TaskResult, Trouble> {
        loop {
            match self.system.wait(vcpu, stop)? {
                Some(done) => {
                    self.model.stop(vcpu, done.steps);
                    self.counts.writes += done.steps;
                    return Ok(done);
                }
                None => self.harvest(1)?,
            }
        }
    }

    fn access(&mut self, vcpu: usize, guest: Span, step: &Step) -> Result<(), Trouble> {
        let Some(task) = task(step) else { return Ok(()) };
        let (sum, exits) = match task.work.hit {
            Touch::Write if matches!(step, Step::Write { random: None, .. }) => {
                (0, Some(self.model.write_exits(guest)))
            }
            Touch::Sum => {
                let (sum, exits) = self.model.reads(guest);
                (sum, Some(exits))
            }
            _ => (0, None),
        };
        self.begin(vcpu, &task)?;
        let done = self.finish(vcpu, false)?;
        if let Some(exits) = exits.filter(|exits| *exits != done.exits) {
            let page = exits.symmetric_difference(&done.exits).next().copied().unwrap_or_default();
            let (what, should) = match exits.contains(&page) {
                true => ("reached memory", "no memslot lets it"),
                false => ("left to the host", "a memslot maps it"),
            };
            return Err(Trouble::Wrong(format!(
                "the access of vCPU {vcpu} to guest page {page} {what}, and {should}"
            )));
        }
        if task.work.hit != Touch::Sum || done.sum == sum {
            return Ok(());
        }
        // Which page? Each is read once more by itself.
        for page in guest.pages() {
            let alone = Span::new(page, 1);
            let expected = self.model.reads(alone).0;
            let task = Task { guest: alone, ..task };
            self.begin(vcpu, &task)?;
            if self.finish(vcpu, false)?.sum != expected {
                let (host, stamp) = self.model.expected(page).unwrap_or_default();
                let (kind, seen) = match host < self.memory {
                    true => {
                        ("host", format!(", and the host sees {} there", self.system.peek(host)))
                    }
                    false => ("private", String::new()),
                };
                return Err(Trouble::Wrong(format!(
                    "vCPU {vcpu} reads something else in guest page {page} ({kind} page {}) than \
                     {stamp}{seen}",
                    host % self.memory
                )));
            }
        }
        Err(Trouble::Wrong(format!(
            "vCPU {vcpu} read something else in guest pages {}+{} than was written; read once \
             more, each page is right",
            guest.at, guest.pages
        )))
    }

    fn fetch(&mut self, slot: u32, chunk: u32) -> Result<(), Trouble> {
        let Some(place) = self.model.slot(slot).map(|it| it.place) else { return Ok(()) };
        self.catch_up();
        let told = self.system.fetch(slot, place.pages, chunk)?;
        let told = told.into_iter().map(|page| (page, self.copied(place, page))).collect();
        self.counts.told += self.model.check_told(slot, &told)?;
        let beside = self.catch_up();
        self.model.told(slot, &told, &beside);
        Ok(self.model.check_copy()?)
    }

    fn copied(&self, place: Place, page: u64) -> Stamp {
        if page < place.pages { self.system.peek(place.host + page) } else { Stamp::default() }
    }

    fn harvest(&mut self, threads: u32) -> Result<(), Trouble> {
        if !self.ring {
            return Ok(());
        }
        self.catch_up();
        let told = self.system.harvest(threads)?;
        let slots: Vec<_> = self.model.slots().map(|(id, slot)| (id, slot.place)).collect();
        let mut all = BTreeMap::new();
        for (id, place) in slots {
            let pages = told.iter().filter(|(slot, _)| *slot == id);
            let told: BTreeMap<u64, Stamp> =
                pages.map(|&(_, page)| (page, self.copied(place, page))).collect();
            self.counts.told += self.model.check_told(id, &told)?;
            all.insert(id, told);
        }
        let beside = self.catch_up();
        for (id, told) in all {
            self.model.told(id, &told, &beside);
        }
        Ok(self.model.check_copy()?)
    }

    /// Compares what the host sees; at the end all of it.
    fn contents(&mut self, all: bool) -> Result<(), Trouble> {
        for host in 0..self.memory {
            let Some(expected) = self.model.content(host) else { continue };
            if !all && (self.quiet[host as usize] || expected == Stamp::default()) {
                continue;
            }
            let found = self.system.peek(host);
            self.counts.contents += 1;
            if found != expected {
                return Err(Trouble::Wrong(format!(
                    "host page {host} holds {found}, and the last write to it is {expected}"
                )));
            }
        }
        Ok(())
    }

    fn audit(&mut self) -> Result<(), Trouble> {
        let pages = self.model.slots().map(|(_, slot)| slot.place.pages).sum();
        let quiet = self.model.who_runs().is_empty();
        self.system.audit(pages, quiet)
    }

    fn end(&mut self) -> Result<(), Trouble> {
        for vcpu in self.model.who_runs() {
            self.finish(vcpu, true)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
