//! Draws the history of a seed.

use super::history::{Act, History, Kind, Place, Span, Step, Way};
use super::model::Model;

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `below`, which is not 0.
    pub fn below(&mut self, below: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(below)) >> 64) as u64
    }

    /// Returns true `percent` times of 100.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns one of the items, of which there is at least one.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

/// What histories may use: sizes, and what the system can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Means {
    /// Pages of host memory.
    pub memory: u64,
    /// Pages of a huge page.
    pub block: u64,
    /// Ways of logging.
    pub ways: Vec<Way>,
    /// Kinds of host memory.
    pub kinds: Vec<Kind>,
    /// What the host can do.
    pub acts: Vec<Act>,
    /// Whether memslots can be read-only.
    pub readonly: bool,
}

/// The kinds of steps, of which a class has more or fewer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Draw {
    Place,
    Delete,
    Log,
    Write,
    Read,
    Execute,
    Split,
    Rom,
    Run,
    Kick,
    Fetch,
    Host,
    Exchange,
    Convert,
}

/// Steps of a history, without those that set it up and those that end it.
const STEPS: usize = 48;
/// Memslots of a history at most.
const SLOTS: u32 = 5;

/// The plan of a class: how often each kind of step is drawn, and what the host does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub draws: &'static [(u64, Draw)],
    pub acts: &'static [Act],
    pub ways: &'static [Way],
    pub kinds: &'static [Kind],
    /// Whether memslots have private memory.
    pub private: bool,
}

/// Makes the history of a seed. The same seed, class and means make the same history.
pub(super) fn generate(name: &str, plan: &Plan, seed: u64, means: &Means) -> Option<History> {
    let mut random = Random(seed);
    let among = |all: &[Way], had: &[Way]| -> Vec<Way> {
        all.iter().copied().filter(|way| had.contains(way)).collect()
    };
    let ways = among(plan.ways, &means.ways);
    let kinds: Vec<Kind> = plan.kinds.iter().copied().filter(|k| means.kinds.contains(k)).collect();
    if ways.is_empty() || kinds.is_empty() {
        return None;
    }
    let way = random.pick(&ways);
    let backing = random.pick(&kinds);
    let acts = plan.acts.iter().filter(|act| means.acts.contains(act)).copied();
    // MADV_REMOVE and MINOR are for shared memory, and some kernels guard only private memory.
    let shared = backing == Kind::Shared;
    let fits = |act: &Act| match act {
        Act::Remove | Act::Minor => shared,
        Act::Late | Act::Fork | Act::Merge | Act::Guard => !shared,
        _ => true,
    };
    let acts: Vec<Act> = acts.filter(fits).collect();
    let mut made = Maker {
        model: Model::new(means.memory, means.memory * 2, 2, shared, way).private(plan.private),
        random,
        means,
        acts,
        steps: Vec::new(),
    };
    made.set_up();
    let total: u64 = plan.draws.iter().map(|(weight, _)| weight).sum();
    let mut tries = 0;
    while made.steps.len() < STEPS && tries < STEPS * 20 {
        tries += 1;
        let mut ticket = made.random.below(total);
        let drawn = plan.draws.iter().find(|(weight, _)| {
            let hit = ticket < *weight;
            ticket = ticket.saturating_sub(*weight);
            hit
        });
        if let Some((_, draw)) = drawn {
            made.draw(*draw);
        }
    }
    made.wind_up();
    Some(History {
        class: name.to_owned(),
        seed,
        memory: means.memory,
        window: means.memory * 2,
        backing,
        way,
        vcpus: 2,
        private: plan.private,
        steps: made.steps,
    })
}

struct Maker<'a> {
    model: Model,
    random: Random,
    means: &'a Means,
    acts: Vec<Act>,
    steps: Vec<Step>,
}

impl Maker<'_> {
    /// Adds a step if it makes sense now.
    fn add(&mut self, step: Step) -> bool {
        let allowed = self.model.allows(&step);
        if allowed {
            self.model.foresee(&step);
            self.steps.push(step);
        }
        allowed
    }

    fn set_up(&mut self) {
        let whole = Place { at: 0, host: 0, pages: self.means.memory, readonly: false };
        if self.random.chance(60) || self.model.is_of_private() {
            self.add(Step::Place { slot: 1, place: whole, log: false });
        } else {
            for slot in 1..=3 {
                let place = self.place();
                self.add(Step::Place { slot, place, log: false });
            }
        }
        let slots: Vec<Span> = self.model.slots().map(|(_, slot)| slot.place.guest()).collect();
        for guest in slots {
            self.add(Step::Write { vcpu: 0, guest, random: None });
        }
    }

    fn wind_up(&mut self) {
        for vcpu in 0..2 {
            self.add(Step::Stop { vcpu });
        }
        self.fetch_all();
        let slots: Vec<Span> = self.model.slots().map(|(_, slot)| slot.place.guest()).collect();
        for (vcpu, guest) in slots.into_iter().enumerate() {
            self.add(Step::Read { vcpu: vcpu % 2, guest });
        }
        // What no memslot maps.
        for (at, pages) in self.model.holes() {
            self.add(Step::Read { vcpu: 0, guest: Span::new(at, pages.min(2)) });
            self.add(Step::Write { vcpu: 1, guest: Span::new(at, pages.min(2)), random: None });
        }
    }

    fn fetch_all(&mut self) {
        let slots: Vec<u32> = self.model.slots().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.add(Step::Fetch { slot, chunk: 0 });
        }
        self.add(Step::Harvest { threads: 1 });
    }

    fn draw(&mut self, draw: Draw) {
        let vcpu = self.random.below(2) as usize;
        match draw {
            Draw::Place => {
                let slot = 1 + self.random.below(u64::from(SLOTS)) as u32;
                let (place, log) = (self.place(), self.random.chance(40));
                let log = log && !self.model.is_of_private();
                self.add(Step::Place { slot, place, log });
            }
            Draw::Delete => {
                let slot = self.slot();
                self.add(Step::Delete { slot });
            }
            Draw::Log => {
                let (slot, on) = (self.slot(), self.random.chance(65));
                self.add(Step::Log { slot, on });
            }
            Draw::Write => {
                let guest = self.guest();
                let random = self.random.chance(30).then(|| self.random.draw());
                self.add(Step::Write { vcpu, guest, random });
            }
            Draw::Read => {
                let guest = self.guest();
                self.add(Step::Read { vcpu, guest });
            }
            Draw::Execute => {
                let guest = self.guest();
                self.add(Step::Execute { vcpu, guest });
            }
            Draw::Split => self.split(vcpu),
            Draw::Rom => self.rom(),
            Draw::Run => {
                if !self.add(Step::Stop { vcpu }) {
                    let (guest, seed) = (self.guest(), self.random.draw());
                    self.add(Step::Start { vcpu, guest, seed });
                }
            }
            Draw::Kick => {
                let times = 1 + self.random.below(20) as u32;
                self.add(Step::Kick { vcpu, times });
            }
            Draw::Fetch => {
                let (slot, chunk) = (self.slot(), self.random.pick(&[0, 0, 64, 192, 512]));
                self.add(Step::Fetch { slot, chunk });
                let threads = 1 + self.random.below(2) as u32;
                self.add(Step::Harvest { threads });
            }
            Draw::Host => {
                if !self.acts.is_empty() {
                    let act = self.random.pick(&self.acts);
                    if act == Act::Punch {
                        return self.punch(vcpu);
                    }
                    let host = self.host(act == Act::Collapse);
                    self.add(Step::Host { act, host });
                }
            }
            Draw::Exchange => {
                let pages = self.random.pick(&[1, 1, 3, 17]);
                let (first, second) =
                    (self.random.below(self.means.memory), self.random.below(self.means.memory));
                self.add(Step::Exchange { first, second, pages });
            }
            Draw::Convert => {
                let (guest, private) = (self.guest(), self.random.chance(55));
                self.add(Step::Convert { guest, private });
            }
        }
    }

    /// Reads a huge page, executes from one of its pages, and writes all of them: a split to
    /// execute must leave each page the rights that the huge page had.
    fn split(&mut self, vcpu: usize) {
        let (guest, block) = (self.guest(), self.means.block);
        let whole = Span::new(guest.at / block * block, block);
        self.add(Step::Read { vcpu, guest: whole });
        self.add(Step::Execute { vcpu, guest: Span::new(guest.at, 1) });
        self.add(Step::Write { vcpu, guest: whole, random: None });
    }

    /// Adds a read-only memslot of one huge page, as firmware has, which the host fills with
    /// instructions.
    fn rom(&mut self) {
        let (memory, block) = (self.means.memory, self.means.block);
        let slot = 1 + self.random.below(u64::from(SLOTS)) as u32;
        let mut whole = |pages| self.random.below(pages / block) * block;
        let (at, host) = (whole(2 * memory), whole(memory));
        let place = Place { at, host, pages: block, readonly: true };
        if self.means.readonly && self.add(Step::Place { slot, place, log: false }) {
            self.add(Step::Host { act: Act::Store, host: place.host() });
        }
    }

    /// Punches a hole where a memslot has private memory, and a vCPU reads there.
    fn punch(&mut self, vcpu: usize) {
        let guest = self.guest();
        if let Some((page, _)) = self.model.expected(guest.at) {
            let host = Span::new(page % self.means.memory, guest.pages);
            self.add(Step::Host { act: Act::Punch, host });
            self.add(Step::Read { vcpu, guest });
        }
    }

    /// Draws a memslot that there is, if there is any.
    fn slot(&mut self) -> u32 {
        let slots: Vec<u32> = self.model.slots().map(|(slot, _)| slot).collect();
        if slots.is_empty() { 1 } else { self.random.pick(&slots) }
    }

    /// Draws a number of pages: few, odd, or about one or two huge pages.
    fn size(&mut self, most: u64) -> u64 {
        let block = self.means.block;
        let size = match self.random.below(8) {
            0 => 1,
            1 => 3,
            2 => 1 + self.random.below(64),
            3 | 4 => 1 + self.random.below(block),
            5 => block,
            6 => block + self.random.below(block),
            _ => most,
        };
        size.clamp(1, most)
    }

    fn place(&mut self) -> Place {
        let (memory, block) = (self.means.memory, self.means.block);
        let pages = self.size(memory);
        let window = memory * 2;
        let host = self.random.below(memory - pages + 1);
        let at = match self.random.below(4) {
            // Alike within huge pages, twice as often as not.
            0 | 1 => {
                let at = self.random.below(window / block) * block + host % block;
                if at + pages <= window { at } else { host }
            }
            _ => self.random.below(window - pages + 1),
        };
        let readonly = self.means.readonly && self.random.chance(15) && !self.model.is_of_private();
        Place { at, host, pages, readonly }
    }

    /// Draws guest pages: mostly of a memslot, with a page before or after it now and then.
    fn guest(&mut self) -> Span {
        let slot = self.slot();
        let Some(place) = self.model.slots().find(|(id, _)| *id == slot).map(|(_, s)| s.place)
        else {
            return Span::new(0, 1);
        };
        let pages = self.size(place.pages);
        let mut span = Span::new(place.at + self.random.below(place.pages - pages + 1), pages);
        if self.random.chance(10) && span.end() < self.means.memory * 2 {
            span.pages += 1;
        }
        span
    }

    fn host(&mut self, whole: bool) -> Span {
        let (memory, block) = (self.means.memory, self.means.block);
        if whole && memory >= block {
            return Span::new(self.random.below(memory / block) * block, block);
        }
        let pages = self.size(memory);
        Span::new(self.random.below(memory - pages + 1), pages)
    }
}
