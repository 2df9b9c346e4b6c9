//! The expected state of a guest's memory: contents, memslots, and what a log must have.

use super::Stamp;
use super::history::{Act, History, Place, Span, Step, Way, stamp_of_host};
use crate::work::{Order, Steps, Touch, Work};
use std::collections::{BTreeMap, BTreeSet};

/// The value of each word that a vCPU reads where no memslot is.
pub const HOLE: u64 = u64::MAX;

/// A memslot, and the pages that its log must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Where it lies.
    pub place: Place,
    /// Whether it is logged.
    pub log: bool,
    /// Pages of the memslot that were written since the log was fetched.
    pub must: BTreeSet<u64>,
    /// Pages that were written while the log was fetched, and that it told: the next may tell them
    /// again.
    may: BTreeSet<u64>,
}

/// The work of a vCPU on guest pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    /// The pages.
    pub guest: Span,
    /// The work.
    pub work: Work,
}

/// A vCPU that runs beside the steps.
#[derive(Debug, Clone)]
struct RunningVcpu {
    task: Task,
    steps: Steps,
    done: u64,
    /// The number of a step that was under way when the log was fetched, or started: a vCPU counts
    /// a step only when its write is long done.
    under_way: Option<u64>,
}

/// What the memory holds, and what a copy of it that follows the log holds.
#[derive(Debug, Clone)]
pub struct Model {
    memory: u64,
    window: u64,
    shared: bool,
    way: Way,
    slots: BTreeMap<u32, Slot>,
    content: Vec<Stamp>,
    /// The content of the copy; nothing if the log need not tell the last change.
    copy: Vec<Option<Stamp>>,
    /// The number of each vCPU's next step.
    position: Vec<u64>,
    running: Vec<Option<RunningVcpu>>,
    /// How many vCPUs run on each host page.
    busy: Vec<u8>,
    /// Which guest pages are private, if memslots have private memory: its pages are numbered
    /// behind those of the host's memory, in the same order.
    private: Option<Vec<bool>>,
    gpa: fn(u64) -> u64,
    step: usize,
}

/// A page that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// What is wrong.
    pub what: String,
}

fn wrong<T>(what: String) -> Result<T, Wrong> {
    Err(Wrong { what })
}

impl Model {
    pub(super) fn new(memory: u64, window: u64, vcpus: usize, shared: bool, way: Way) -> Self {
        Self {
            memory,
            window,
            shared,
            way,
            slots: BTreeMap::new(),
            content: vec![Stamp::default(); memory as usize],
            copy: vec![None; memory as usize],
            position: (1..=vcpus as u64).map(|vcpu| vcpu << 40).collect(),
            running: vec![None; vcpus],
            busy: vec![0; memory as usize],
            private: None,
            gpa: |page| page,
            step: 0,
        }
    }

    /// Gives memslots private memory.
    pub(super) fn private(mut self, private: bool) -> Self {
        if private {
            let pages = 2 * self.memory as usize;
            self.content.resize(pages, Stamp::default());
            self.copy.resize(pages, None);
            self.busy.resize(pages, 0);
            self.private = Some(vec![false; self.window as usize]);
        }
        self
    }

    /// Returns whether memslots have private memory.
    pub(super) fn is_of_private(&self) -> bool {
        self.private.is_some()
    }

    /// Returns the number of pages of the memory, with those of private memory.
    pub fn pages(&self) -> u64 {
        self.content.len() as u64
    }

    /// Makes the state before a history. `gpa` returns the guest address of a guest page.
    pub fn of(history: &History, gpa: fn(u64) -> u64) -> Self {
        let shared = history.backing == super::Kind::Shared;
        let new = Self::new(history.memory, history.window, history.vcpus, shared, history.way);
        Self { gpa, ..new.private(history.private) }
    }

    /// Returns the memslots.
    pub fn slots(&self) -> impl Iterator<Item = (u32, &Slot)> {
        self.slots.iter().map(|(id, slot)| (*id, slot))
    }

    /// Returns a memslot.
    pub fn slot(&self, id: u32) -> Option<&Slot> {
        self.slots.get(&id)
    }

    /// Returns the ranges of guest pages that no memslot maps.
    pub fn holes(&self) -> Vec<(u64, u64)> {
        let mut used: Vec<Span> = self.slots.values().map(|slot| slot.place.guest()).collect();
        used.sort_by_key(|span| span.at);
        used.push(Span::new(self.window, 0));
        let mut from = 0;
        let mut holes = Vec::new();
        for span in used {
            if span.at > from {
                holes.push((from, span.at - from));
            }
            from = span.end();
        }
        holes
    }

    /// Returns whether a vCPU runs.
    pub fn runs(&self, vcpu: usize) -> bool {
        self.running.get(vcpu).is_some_and(Option::is_some)
    }

    /// Returns the memslot of a guest page, the page within it, and its host page.
    fn resolve(&self, page: u64) -> Option<(u32, u64, u64)> {
        self.slots.iter().find_map(|(id, slot)| {
            let within = page.checked_sub(slot.place.at)?;
            let private = self.private.as_ref().is_some_and(|private| private[page as usize]);
            let host = slot.place.host + within + if private { self.memory } else { 0 };
            (within < slot.place.pages).then_some((*id, within, host))
        })
    }

    /// Returns the host page of a guest page that a vCPU can write.
    fn writable(&self, page: u64) -> Option<(u32, u64, u64)> {
        self.resolve(page).filter(|(id, ..)| !self.slots[id].place.readonly)
    }

    /// Returns whether a vCPU runs on one of these host pages, which are of the memory.
    fn is_busy(&self, host: Span) -> bool {
        self.busy[host.at as usize..host.end() as usize].iter().any(|vcpus| *vcpus > 0)
    }

    fn is_busy_for(&self, guest: Span) -> bool {
        let is_busy = |page| self.resolve(page).is_some_and(|it| self.is_busy(Span::new(it.2, 1)));
        self.running.iter().any(Option::is_some) && guest.pages().any(is_busy)
    }

    fn within(&self, span: Span, limit: u64) -> bool {
        span.pages > 0 && span.at.checked_add(span.pages).is_some_and(|end| end <= limit)
    }

    /// Returns whether the step makes sense now.
    pub fn allows(&self, step: &Step) -> bool {
        let idle = |vcpu: usize| vcpu < self.running.len() && !self.runs(vcpu);
        match step {
            Step::Place { slot, place, log } => {
                let (guest, host) = (place.guest(), place.host());
                // A read-only memslot is not logged here: nothing is written to it.
                let fits = self.within(guest, self.window) && self.within(host, self.memory);
                let free = self
                    .slots
                    .iter()
                    .all(|(id, other)| id == slot || !other.place.guest().meets(guest));
                // KVM moves a memslot, but neither resizes it nor gives it other host memory.
                let moves = self.slots.get(slot).is_none_or(|old| {
                    old.place.pages == place.pages
                        && old.place.host == place.host
                        && old.place.readonly == place.readonly
                        && old.log == *log
                        && !self.is_busy_for(old.place.guest())
                });
                // A memslot of private memory stays as it is, and shares none of it.
                let shares = |other: &Slot| other.place.host().meets(host);
                let may = self.private.is_none()
                    || !(place.readonly || *log || self.slots.values().any(shares));
                (1..=64).contains(slot) && fits && free && moves && may && !(place.readonly && *log)
            }
            Step::Delete { slot } => {
                self.slots.get(slot).is_some_and(|old| !self.is_busy_for(old.place.guest()))
            }
            Step::Log { slot, on } => {
                self.private.is_none()
                    && self.slots.get(slot).is_some_and(|it| it.log != *on && !it.place.readonly)
            }
            Step::Write { vcpu, guest, .. } | Step::Read { vcpu, guest } => {
                idle(*vcpu) && self.within(*guest, self.window) && !self.is_busy_for(*guest)
            }
            Step::Execute { vcpu, guest } => {
                // Only where there are instructions.
                let written = |page| {
                    self.resolve(page)
                        .is_some_and(|(.., host)| self.content[host as usize].step != 0)
                };
                idle(*vcpu)
                    && self.within(*guest, self.window)
                    && !self.is_busy_for(*guest)
                    && guest.pages().all(written)
            }
            Step::Start { vcpu, guest, .. } => {
                idle(*vcpu)
                    && self.within(*guest, self.window)
                    && !self.is_busy_for(*guest)
                    && guest.pages().all(|page| self.writable(page).is_some())
            }
            Step::Stop { vcpu } | Step::Kick { vcpu, .. } => self.runs(*vcpu),
            Step::Fetch { slot, chunk } => {
                self.way != Way::Ring
                    && chunk.is_multiple_of(64)
                    && self.slots.get(slot).is_some_and(|slot| slot.log)
            }
            Step::Harvest { threads } => self.way == Way::Ring && (1..=8).contains(threads),
            Step::Host { act: Act::Punch, host } => {
                self.private.is_some()
                    && self.within(*host, self.memory)
                    && !self.is_busy(Span::new(host.at + self.memory, host.pages))
            }
            Step::Host { act, host } => {
                self.within(*host, self.memory) && !(act.is_alone() && self.is_busy(*host))
            }
            Step::Convert { guest, .. } => {
                self.private.is_some()
                    && self.within(*guest, self.window)
                    && guest.pages().all(|page| self.resolve(page).is_some())
                    && !self.is_busy_for(*guest)
            }
            Step::Exchange { first, second, pages } => {
                let (first, second) = (Span::new(*first, *pages), Span::new(*second, *pages));
                self.within(first, self.memory)
                    && self.within(second, self.memory)
                    && !first.meets(second)
                    && !self.is_busy(first)
                    && !self.is_busy(second)
            }
        }
    }

    /// Applies a step as the maker of a history sees it, without a system.
    pub(super) fn foresee(&mut self, step: &Step) {
        match step {
            Step::Place { slot, place, log } => self.place(*slot, *place, *log),
            Step::Delete { slot } => self.delete(*slot),
            Step::Log { slot, on } => self.log(*slot, *on),
            Step::Write { vcpu, guest, .. } => {
                if let Some(task) = task(step) {
                    self.start(*vcpu, task);
                    self.stop(*vcpu, guest.pages);
                }
            }
            Step::Start { vcpu, .. } => {
                if let Some(task) = task(step) {
                    self.start(*vcpu, task);
                }
            }
            Step::Stop { vcpu } => self.stop(*vcpu, 0),
            Step::Host { act, host } => self.host(*act, *host),
            Step::Exchange { first, second, pages } => self.exchange(*first, *second, *pages),
            Step::Convert { guest, private } => self.convert(*guest, *private),
            _ => {}
        }
        self.step += 1;
    }

    /// Counts a step, and returns its number.
    pub fn count_step(&mut self) -> usize {
        self.step += 1;
        self.step
    }

    /// A memslot is added or moved. A log that moves goes on: it does not start full again.
    pub fn place(&mut self, slot: u32, place: Place, log: bool) {
        let moved = self.slots.contains_key(&slot);
        self.forget(slot);
        self.slots.insert(slot, Slot { place, log, must: BTreeSet::new(), may: BTreeSet::new() });
        if log {
            self.begin_log(slot, self.way == Way::InitiallySet && !moved);
        }
    }

    /// A memslot is deleted. Its guest pages are shared then.
    pub fn delete(&mut self, slot: u32) {
        self.forget(slot);
        if let Some(guest) = self.slots.get(&slot).map(|it| it.place.guest()) {
            self.convert(guest, false);
        }
        self.slots.remove(&slot);
    }

    /// Guest pages become private or shared.
    pub fn convert(&mut self, guest: Span, private: bool) {
        if let Some(pages) = &mut self.private {
            pages[guest.at as usize..guest.end() as usize].fill(private);
        }
    }

    /// A log starts or ends.
    pub fn log(&mut self, slot: u32, on: bool) {
        self.forget(slot);
        if let Some(it) = self.slots.get_mut(&slot) {
            it.log = on;
        }
        if on {
            self.excuse(|id, _| id == slot);
            self.begin_log(slot, self.way == Way::InitiallySet);
        }
    }

    /// The log of a memslot tells nothing more: the copies of its pages are of no worth.
    fn forget(&mut self, slot: u32) {
        let Some(it) = self.slots.get_mut(&slot) else { return };
        it.must.clear();
        it.may.clear();
        for page in it.place.host().pages() {
            self.copy[page as usize] = None;
        }
    }

    /// The copy begins with all of the memslot, except for pages that are being written.
    fn begin_log(&mut self, slot: u32, full: bool) {
        let Some(place) = self.slots.get(&slot).map(|it| it.place) else { return };
        for page in place.host().pages() {
            let known = !full && !self.is_busy(Span::new(page, 1));
            self.copy[page as usize] = known.then(|| self.content[page as usize]);
        }
        if full && let Some(it) = self.slots.get_mut(&slot) {
            it.must.extend(0..place.pages);
        }
    }

    fn written(&mut self, page: u64, number: u64) {
        let Some((id, within, host)) = self.writable(page) else { return };
        self.content[host as usize] = Stamp { step: number, at: (self.gpa)(page) };
        match self.slots.get_mut(&id) {
            Some(slot) if slot.log => _ = slot.must.insert(within),
            _ => self.copy[host as usize] = None,
        }
    }

    /// A vCPU starts.
    pub fn start(&mut self, vcpu: usize, task: Task) {
        let steps = task.work.steps(vcpu, task.guest.pages);
        self.running[vcpu] = Some(RunningVcpu { task, steps, done: 0, under_way: None });
        self.count_busy(task.guest, 1);
    }

    fn count_busy(&mut self, guest: Span, by: i8) {
        for page in guest.pages() {
            if let Some((.., host)) = self.resolve(page) {
                let busy = &mut self.busy[host as usize];
                *busy = busy.saturating_add_signed(by);
            }
        }
    }

    /// A running vCPU has done at least so many steps since it started. Returns the pages that it
    /// wrote, by memslot.
    pub fn advance(&mut self, vcpu: usize, done: u64) -> BTreeSet<(u32, u64)> {
        let Some(mut running) = self.running[vcpu].take() else { return BTreeSet::new() };
        let mut wrote = BTreeSet::new();
        while running.done < done {
            let Some((page, touch)) = running.steps.next() else { break };
            running.done += 1;
            let number = self.position[vcpu];
            self.position[vcpu] += 1;
            if touch == Touch::Write {
                let page = running.task.guest.at + page;
                wrote.extend(self.writable(page).map(|(slot, within, _)| (slot, within)));
                let place = self.writable(page).map(|(slot, within, _)| (slot, within));
                let owed = |it: &Self| {
                    place.is_some_and(|(slot, page)| it.slots[&slot].must.contains(&page))
                };
                let was_owed = owed(self);
                self.written(page, number);
                if running.under_way.is_some_and(|step| step + 1 == running.done)
                    && !was_owed
                    && owed(self)
                    && let Some((id, within)) = place
                    && let Some(slot) = self.slots.get_mut(&id)
                {
                    slot.must.remove(&within);
                    slot.may.insert(within);
                }
            }
        }
        self.running[vcpu] = Some(running);
        wrote
    }

    /// A vCPU has stopped after so many steps.
    pub fn stop(&mut self, vcpu: usize, done: u64) {
        self.advance(vcpu, done);
        if let Some(running) = self.running[vcpu].take() {
            self.count_busy(running.task.guest, -1);
        }
    }

    /// The steps that are under way count as done if `done` says it of their memslots and pages.
    fn excuse(&mut self, done: impl Fn(u32, u64) -> bool) {
        for vcpu in 0..self.running.len() {
            let Some(running) = &self.running[vcpu] else { continue };
            let next = running.steps.clone().next().map(|(page, _)| running.task.guest.at + page);
            let place = next.and_then(|page| self.writable(page));
            let (excused, step) = (place.is_some_and(|(id, page, _)| done(id, page)), running.done);
            if let Some(running) = self.running[vcpu].as_mut().filter(|_| excused) {
                running.under_way = Some(step);
            }
        }
    }

    /// Returns the vCPUs that run.
    pub fn who_runs(&self) -> Vec<usize> {
        (0..self.running.len()).filter(|vcpu| self.runs(*vcpu)).collect()
    }

    /// The host did something to its pages.
    pub fn host(&mut self, act: Act, host: Span) {
        let step = self.step;
        if act == Act::Punch {
            let (from, to) = (host.at + self.memory, host.end() + self.memory);
            return self.content[from as usize..to as usize].fill(Stamp::default());
        }
        for page in host.pages() {
            let now = match act {
                Act::Balloon if (page - host.at).is_multiple_of(2) => Stamp::default(),
                Act::Store => stamp_of_host(step, page, false),
                Act::Merge => stamp_of_host(step, page, true),
                Act::Remove => Stamp::default(),
                Act::Discard if !self.shared => Stamp::default(),
                _ => continue,
            };
            self.content[page as usize] = now;
            self.copy[page as usize] = None;
        }
    }

    /// The host exchanged pages.
    pub fn exchange(&mut self, first: u64, second: u64, pages: u64) {
        for page in 0..pages {
            self.content.swap((first + page) as usize, (second + page) as usize);
            self.copy[(first + page) as usize] = None;
            self.copy[(second + page) as usize] = None;
        }
    }

    /// Returns what the sum of a vCPU's reads must be, and the pages whose reads leave to the host.
    pub fn reads(&self, guest: Span) -> (u64, BTreeSet<u64>) {
        let (mut sum, mut exits) = (0, BTreeSet::new());
        for page in guest.pages() {
            let stamp = match self.resolve(page) {
                Some((.., host)) => self.content[host as usize],
                None => {
                    exits.insert(page);
                    Stamp { step: HOLE, at: HOLE }
                }
            };
            sum = stamp.add_to(sum);
        }
        (sum, exits)
    }

    /// Returns the pages whose writes leave to the host.
    pub fn write_exits(&self, guest: Span) -> BTreeSet<u64> {
        guest.pages().filter(|page| self.writable(*page).is_none()).collect()
    }

    /// Returns the content that a guest page must have.
    pub fn expected(&self, page: u64) -> Option<(u64, Stamp)> {
        self.resolve(page).map(|(.., host)| (host, self.content[host as usize]))
    }

    /// Returns the content that a host page must have, unless a vCPU writes it now.
    pub fn content(&self, host: u64) -> Option<Stamp> {
        (!self.is_busy(Span::new(host, 1))).then(|| self.content[host as usize])
    }

    /// The log of a memslot, or rings, told pages, each with the content that was copied after the
    /// page was protected again. Meanwhile, running vCPUs wrote the pages `beside`.
    pub fn told(&mut self, slot: u32, told: &BTreeMap<u64, Stamp>, beside: &BTreeSet<(u32, u64)>) {
        self.excuse(|id, page| id == slot && told.contains_key(&page));
        let Some(it) = self.slots.get_mut(&slot).filter(|it| it.log) else { return };
        it.may.clear();
        for (&page, &copied) in told.range(..it.place.pages) {
            self.copy[(it.place.host + page) as usize] = Some(copied);
            it.must.remove(&page);
            if beside.contains(&(slot, page)) {
                it.may.insert(page);
            }
        }
        // What was written meanwhile by another name, which is not logged, is not in the copy.
        for (id, page) in beside {
            if let Some(other) = self.slots.get(id).filter(|other| !other.log) {
                self.copy[(other.place.host + page) as usize] = None;
            }
        }
    }

    /// Checks that a fetched log, or the rings, told all pages of a memslot that were written.
    ///
    /// # Errors
    /// [`Wrong`], with the page.
    pub fn check_told(&self, slot: u32, told: &BTreeMap<u64, Stamp>) -> Result<u64, Wrong> {
        let Some(it) = self.slots.get(&slot) else { return Ok(0) };
        match it.must.iter().find(|page| !told.contains_key(page)) {
            None => Ok(it.must.len() as u64),
            Some(page) => {
                let missing = it.must.iter().filter(|page| !told.contains_key(page)).count();
                wrong(format!(
                    "the log of memslot {slot} lacks {missing} written pages, the first is page \
                     {page} (guest page {}, host page {})",
                    it.place.at + page,
                    it.place.host + page
                ))
            }
        }
    }

    /// Checks that the copy has what the memory has, for pages that no log still has to tell.
    ///
    /// # Errors
    /// [`Wrong`], with the page.
    pub fn check_copy(&self) -> Result<(), Wrong> {
        for (id, slot) in self.slots.iter().filter(|(_, slot)| slot.log) {
            for (page, host) in (0..).zip(slot.place.host().pages()) {
                let (has, copied) = (self.content[host as usize], self.copy[host as usize]);
                let owed = || {
                    self.slots.values().any(|other| {
                        let within = host.checked_sub(other.place.host);
                        within.is_some_and(|it| other.must.contains(&it) || other.may.contains(&it))
                    })
                };
                if copied.is_some_and(|copied| copied != has)
                    && !owed()
                    && !self.is_busy(Span::new(host, 1))
                {
                    return wrong(format!(
                        "a copy that follows the log misses the last write to page {page} of \
                         memslot {id} (host page {host}): it has {}, the memory {has}",
                        copied.unwrap_or_default()
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Returns the work of a step of vCPUs.
pub fn task(step: &Step) -> Option<Task> {
    let each = Work::each_page;
    Some(match *step {
        Step::Write { guest, random, .. } => {
            let order = random.map_or(Order::Sequential, |seed| Order::Random { seed });
            Task { guest, work: Work { order, ..each(Touch::Write) } }
        }
        Step::Read { guest, .. } => Task { guest, work: each(Touch::Sum) },
        Step::Execute { guest, .. } => Task { guest, work: each(Touch::Execute) },
        Step::Start { guest, seed, .. } => {
            // At a pace at which the model can follow. Where it cannot, as in an emulated machine,
            // the end keeps it from falling behind further at each step.
            let (order, per_second) = (Order::Random { seed }, Some(50_000.0));
            let steps = Some(50_000);
            Task { guest, work: Work { order, steps, per_second, ..each(Touch::Write) } }
        }
        _ => return None,
    })
}
