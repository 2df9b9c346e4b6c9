use super::*;

/// What a fake system gets wrong, with some of the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A write of a vCPU does not reach memory.
    Write,
    /// A write is not in the log.
    Dirty,
    /// A page is protected again, but not after its last fetch: later writes are not in the log.
    Protect,
    /// A deleted memslot can be reached.
    Hole,
    /// A read-only memslot can be written.
    Readonly,
    /// A discarded page keeps its content for the guest alone.
    Stale,
    /// A page that was made private is still shared.
    Convert,
    /// A huge page that is split to execute from it lets its other pages be written.
    Split,
    /// A counter of the system is wrong when a page is discarded.
    Counter,
    /// A vCPU makes no progress.
    Hang,
}

/// A system of which nothing is lost, but for its fault.
struct Fake {
    fault: Fault,
    ring: bool,
    full: bool,
    shared: bool,
    counts: bool,
    /// Pages of the host's memory; those of private memory lie behind them.
    memory: u64,
    private: BTreeSet<u64>,
    host: Vec<Stamp>,
    /// What vCPUs see in place of the host's page.
    stale: BTreeMap<u64, Stamp>,
    slots: BTreeMap<u32, (Place, bool)>,
    log: BTreeSet<(u32, u64)>,
    /// Pages that were fetched and are not protected.
    open: BTreeSet<(u32, u64)>,
    deleted: Vec<Place>,
    /// Read-only huge pages that were read.
    huge: BTreeSet<u64>,
    /// Pages of those that were split.
    loose: BTreeSet<u64>,
    position: Vec<u64>,
    running: Vec<Option<RunningTask>>,
}

/// A task, its steps that are left, and what was done.
type RunningTask = (Task, Vec<(u64, Touch)>, TaskResult);

const EVERY: u64 = 17;
/// Pages of a huge page.
const BLOCK: u64 = 64;

impl Fake {
    fn new(history: &History, fault: Fault) -> Self {
        Self {
            fault,
            ring: history.way == Way::Ring,
            full: history.way == Way::InitiallySet,
            shared: history.backing == Kind::Shared,
            counts: true,
            memory: history.memory,
            private: BTreeSet::new(),
            host: vec![Stamp::default(); 2 * history.memory as usize],
            stale: BTreeMap::new(),
            slots: BTreeMap::new(),
            log: BTreeSet::new(),
            open: BTreeSet::new(),
            deleted: Vec::new(),
            huge: BTreeSet::new(),
            loose: BTreeSet::new(),
            position: (1..=history.vcpus as u64).map(|vcpu| vcpu << 40).collect(),
            running: (0..history.vcpus).map(|_| None).collect(),
        }
    }

    /// Returns whether the fault strikes this page.
    fn fails(&self, fault: Fault, page: u64) -> bool {
        fault == self.fault && page % EVERY == 5
    }

    fn resolve(&self, page: u64) -> Option<(u32, u64, u64, bool, bool)> {
        self.slots.iter().find_map(|(id, (place, log))| {
            place.guest().pages().contains(&page).then(|| {
                let within = page - place.at;
                let private = if self.private.contains(&page) { self.memory } else { 0 };
                (*id, within, place.host + within + private, place.readonly, *log)
            })
        })
    }

    fn hit(&mut self, vcpu: usize, page: u64, touch: Touch, done: &mut TaskResult) {
        let number = self.position[vcpu];
        self.position[vcpu] += 1;
        let found = self.resolve(page);
        match touch {
            Touch::Write => {
                let stamp = Stamp { step: number, at: page };
                let Some((slot, within, host, readonly, log)) = found else {
                    let old = self.deleted.iter().find(|old| old.guest().pages().contains(&page));
                    match old.filter(|_| self.fault == Fault::Hole) {
                        Some(old) => self.host[(old.host + page - old.at) as usize] = stamp,
                        None => _ = done.exits.insert(page),
                    }
                    return;
                };
                let allowed = self.fault == Fault::Readonly || self.loose.contains(&page);
                if readonly && !allowed {
                    done.exits.insert(page);
                    return;
                }
                if log && !self.open.contains(&(slot, within)) && !self.fails(Fault::Dirty, within)
                {
                    self.log.insert((slot, within));
                }
                if !self.fails(Fault::Write, within) {
                    self.host[host as usize] = stamp;
                    self.stale.remove(&host);
                }
            }
            Touch::Sum => {
                let seen = match found {
                    Some((slot, _, host, ..)) => {
                        self.read_huge(page, self.slots[&slot].0);
                        *self.stale.get(&host).unwrap_or(&self.host[host as usize])
                    }
                    None => {
                        done.exits.insert(page);
                        Stamp { step: HOLE, at: HOLE }
                    }
                };
                done.sum = seen.add_to(done.sum);
            }
            Touch::Execute => {
                let block = page / BLOCK * BLOCK;
                if self.fault == Fault::Split && self.huge.remove(&block) {
                    self.loose.extend((block..block + BLOCK).filter(|other| *other != page));
                }
            }
            _ => {}
        }
    }

    /// A read of a read-only memslot maps a huge page, if both addresses lie alike in it.
    fn read_huge(&mut self, page: u64, place: Place) {
        let block = page / BLOCK * BLOCK;
        let within = place.at <= block && block + BLOCK <= place.guest().end();
        if place.readonly && within && place.at % BLOCK == place.host % BLOCK {
            self.huge.insert(block);
        }
    }

    /// Pages are mapped anew.
    fn unmap(&mut self) {
        self.huge.clear();
        self.loose.clear();
    }

    fn advance(&mut self, vcpu: usize, steps: usize) {
        let Some((task, mut left, mut done)) = self.running[vcpu].take() else { return };
        for _ in 0..steps.min(left.len()) {
            let (page, touch) = left.remove(0);
            self.hit(vcpu, task.guest.at + page, touch, &mut done);
            done.steps += 1;
        }
        self.running[vcpu] = Some((task, left, done));
    }

    /// Some steps of a running vCPU happen beside a call.
    fn beside(&mut self) {
        for vcpu in 0..self.running.len() {
            self.advance(vcpu, 5);
        }
    }

    fn tell(&mut self, slot: Option<u32>) -> BTreeSet<(u32, u64)> {
        self.beside();
        let told: BTreeSet<_> =
            self.log.iter().copied().filter(|(id, _)| slot.is_none_or(|it| it == *id)).collect();
        for page in &told {
            self.log.remove(page);
            if self.fails(Fault::Protect, page.1) {
                self.open.insert(*page);
            }
        }
        self.beside();
        told
    }
}

impl System for Fake {
    fn set_slot(&mut self, id: u32, slot: Option<(Place, bool)>) -> Result<(), Trouble> {
        self.beside();
        self.unmap();
        let old = self.slots.remove(&id);
        let logged = old.is_some_and(|(_, log)| log);
        if let Some((place, log)) = slot {
            self.slots.insert(id, (place, log));
            if log && !logged {
                self.open.retain(|(slot, _)| *slot != id);
                self.log.retain(|(slot, _)| *slot != id);
                let full = if self.full { place.pages } else { 0 };
                self.log.extend((0..full).map(|page| (id, page)));
            }
        } else {
            self.private
                .retain(|page| old.is_none_or(|(place, _)| !place.guest().pages().contains(page)));
            self.deleted.extend(old.map(|(place, _)| place));
        }
        self.beside();
        Ok(())
    }

    fn start(&mut self, vcpu: usize, task: &Task) -> Result<(), Trouble> {
        let steps = task.work.steps(vcpu, task.guest.pages);
        let count = task.work.steps.map_or(task.guest.pages as usize, |_| 1000);
        self.running[vcpu] = Some((*task, steps.take(count).collect(), TaskResult::default()));
        Ok(())
    }

    fn wait(&mut self, vcpu: usize, stop: bool) -> Result<Option<TaskResult>, Trouble> {
        let pages = self.running[vcpu].as_ref().map_or(0, |it| it.0.guest.pages);
        if self.fails(Fault::Hang, pages) {
            return Err(Trouble::Hang("a vCPU".into()));
        }
        // A ring is full after so many pages.
        if self.ring && self.log.len() > 100 {
            return Ok(None);
        }
        let left = self.running[vcpu].as_ref().map_or(0, |it| it.1.len());
        let steps = match stop {
            true => 3,
            false if self.ring => left.min(101),
            false => left,
        };
        self.advance(vcpu, steps);
        match &self.running[vcpu] {
            Some((_, left, _)) if !stop && !left.is_empty() => Ok(None),
            _ => Ok(self.running[vcpu].take().map(|(_, _, done)| done)),
        }
    }

    fn progress(&self, vcpu: usize) -> u64 {
        self.running[vcpu].as_ref().map_or(0, |it| it.2.steps)
    }

    fn kick(&mut self, vcpu: usize, _times: u32) {
        self.advance(vcpu, 7);
    }

    fn fetch(&mut self, id: u32, _pages: u64, _chunk: u32) -> Result<BTreeSet<u64>, Trouble> {
        Ok(self.tell(Some(id)).into_iter().map(|(_, page)| page).collect())
    }

    fn harvest(&mut self, _threads: u32) -> Result<BTreeSet<(u32, u64)>, Trouble> {
        Ok(self.tell(None))
    }

    fn act(&mut self, act: Act, host: Span) -> Result<(), Trouble> {
        self.beside();
        self.unmap();
        let empties = match act {
            Act::Discard => !self.shared,
            Act::Remove | Act::Balloon | Act::Punch => true,
            _ => false,
        };
        if empties {
            self.counts &= self.fault != Fault::Counter;
            let (from, every) = match act {
                Act::Punch => (self.memory, 1),
                Act::Balloon => (0, 2),
                _ => (0, 1),
            };
            for page in host.pages().step_by(every).map(|page| from + page) {
                let old = std::mem::take(&mut self.host[page as usize]);
                if self.fails(Fault::Stale, page) {
                    self.stale.insert(page, old);
                }
            }
        }
        Ok(())
    }

    fn convert(&mut self, guest: Span, private: bool) -> Result<(), Trouble> {
        self.beside();
        for page in guest.pages() {
            match private && !self.fails(Fault::Convert, page) {
                true => self.private.insert(page),
                false => self.private.remove(&page),
            };
        }
        Ok(())
    }

    fn audit(&mut self, _pages: u64, _quiet: bool) -> Result<(), Trouble> {
        self.counts.then_some(()).ok_or_else(|| Trouble::Wrong("a counter".into()))
    }

    fn exchange(&mut self, first: u64, second: u64, pages: u64) -> Result<(), Trouble> {
        for page in 0..pages {
            self.host.swap((first + page) as usize, (second + page) as usize);
            self.stale.remove(&(first + page));
            self.stale.remove(&(second + page));
        }
        Ok(())
    }

    fn peek(&self, host: u64) -> Stamp {
        self.host[host as usize]
    }

    fn poke(&mut self, host: u64, stamp: Stamp) {
        self.host[host as usize] = stamp;
        self.stale.remove(&host);
    }
}

fn means() -> Means {
    let acts = vec![
        Act::Store,
        Act::Discard,
        Act::Remove,
        Act::Collapse,
        Act::Move,
        Act::Fork,
        Act::Late,
        Act::Guard,
        Act::Minor,
        Act::Age,
        Act::Balloon,
        Act::Recover,
        Act::Punch,
    ];
    Means {
        memory: 256,
        block: BLOCK,
        ways: vec![Way::Legacy, Way::Manual, Way::InitiallySet, Way::Ring],
        kinds: vec![Kind::Small, Kind::Huge, Kind::Shared],
        acts,
        readonly: true,
    }
}

fn run(history: &History, fault: Fault) -> HistoryEnd {
    check(history, |page| page, &mut Fake::new(history, fault), &mut |_, _| true)
}

fn histories(of_each: u64) -> impl Iterator<Item = History> {
    let of = move |class: &'static Class| {
        (0..of_each).filter_map(move |number| class.history(7, number, &means()))
    };
    classes().iter().flat_map(of)
}

#[test]
fn a_system_that_loses_nothing_holds() {
    let mut all = Counts::default();
    for history in histories(60) {
        match run(&history, Fault::None) {
            HistoryEnd::Held(counts) => all.add(counts),
            other => panic!("{} {}: {other:?}\n{history:?}", history.class, history.seed),
        }
    }
    assert!(all.writes > 100_000 && all.told > 10_000 && all.contents > 100_000, "{all:?}");
}

#[test]
fn every_loss_is_noticed() {
    use Fault::*;
    for fault in [Write, Dirty, Protect, Hole, Readonly, Stale, Convert, Split, Counter, Hang] {
        let caught = |history: &History| matches!(run(history, fault), HistoryEnd::Lost(_));
        let caught = histories(20).filter(caught).count();
        assert!(caught >= 5, "{fault:?} was noticed in {caught} histories");
    }
}

#[test]
fn a_history_is_cut_down_to_the_steps_that_it_takes() {
    for fault in [Fault::Hole, Fault::Dirty, Fault::Readonly] {
        let loses = |history: &History| matches!(run(history, fault), HistoryEnd::Lost(_));
        let history = histories(20).find(loses).unwrap();
        let steps = history.steps.len();
        let short = minimise(steps, &mut |steps| Some(loses(&history.part(steps))));
        let short = history.part(&short);
        assert!(loses(&short));
        assert!(short.steps.len() <= 5, "{fault:?}: {:#?}", short.steps);
        for left_out in 0..short.steps.len() {
            let mut shorter = short.clone();
            shorter.steps.remove(left_out);
            assert!(!loses(&shorter), "{fault:?}: step {left_out} of {:#?}", short.steps);
        }
        // It is the same in a file.
        let text = serde_json::to_string(&short).unwrap();
        assert_eq!(serde_json::from_str::<History>(&text).unwrap(), short);
    }
}

#[test]
fn a_cut_that_has_no_more_time_returns_what_it_has() {
    assert_eq!(minimise(9, &mut |_| None), (0..9).collect::<Vec<_>>());
}

#[test]
fn a_seed_makes_one_history_and_another_seed_another() {
    for class in classes() {
        let make = |seed, number| class.history(seed, number, &means()).unwrap();
        assert_eq!(make(1, 0), make(1, 0));
        assert_ne!(make(1, 0).steps, make(1, 1).steps);
        assert_ne!(make(1, 0).steps, make(2, 0).steps);
    }
}

#[test]
fn each_class_takes_the_steps_that_it_is_about() {
    for class in classes() {
        let made: Vec<_> =
            (0..40).filter_map(|number| class.history(3, number, &means())).collect();
        let acts = made.iter().flat_map(|history| &history.steps).filter_map(|step| match step {
            Step::Host { act, .. } => Some(*act),
            _ => None,
        });
        let acts: BTreeSet<Act> = acts.collect();
        for act in class.acts().filter(|act| means().acts.contains(act)) {
            assert!(acts.contains(&act), "{}: {act:?}", class.name);
        }
        assert!(made.iter().all(|history| history.steps.len() >= 30), "{}", class.name);
    }
}

#[test]
fn a_host_that_lacks_something_has_no_history_of_it() {
    let none = Means { ways: vec![Way::Legacy], acts: Vec::new(), ..means() };
    for (name, has) in
        [("rings", false), ("userfaultfd", false), ("guest-memfd", false), ("log", true)]
    {
        assert_eq!(Class::named(name).unwrap().lacks(&none).is_none(), has, "{name}");
    }
}

#[test]
fn steps_out_of_bounds_are_left_out() {
    let whole = Span::new(u64::MAX - 1, 5);
    let mut history = histories(1).next().unwrap();
    let place = Place { at: u64::MAX, host: 3, pages: u64::MAX, readonly: false };
    history.steps = vec![
        Step::Place { slot: 1, place, log: true },
        Step::Write { vcpu: 9, guest: whole, random: None },
        Step::Write { vcpu: 0, guest: whole, random: None },
        Step::Start { vcpu: usize::MAX, guest: whole, seed: 0 },
        Step::Host { act: Act::Discard, host: whole },
        Step::Exchange { first: u64::MAX, second: 0, pages: u64::MAX },
        Step::Exchange { first: 0, second: 1, pages: 2 },
        Step::Fetch { slot: 3, chunk: 7 },
        Step::Stop { vcpu: 0 },
    ];
    let HistoryEnd::Held(counts) = run(&history, Fault::None) else { panic!("a step was done") };
    assert_eq!(counts.steps, 0);
}

/// A model that is slower than the guest would have more to follow at each step, without end.
#[test]
fn a_vcpu_beside_other_steps_ends_by_itself() {
    let work = task(&Step::Start { vcpu: 0, guest: Span::new(0, 8), seed: 1 }).unwrap().work;
    assert!(!work.endless);
    assert!(work.steps.is_some_and(|steps| (10_000..=100_000).contains(&steps)), "{work:?}");
}
