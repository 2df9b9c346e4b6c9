//! Histories: what vCPUs and the host do to a guest's memory, step by step.

use super::Stamp;
use super::model::Model;
use crate::{Backing, Mode};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A history, which runs alike on each system but for the moments at which running vCPUs are met.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct History {
    /// Name of its class.
    pub class: String,
    /// The seed from which it was made.
    pub seed: u64,
    /// Pages of host memory.
    pub memory: u64,
    /// Guest pages, which memslots map or do not.
    pub window: u64,
    /// The kind of host memory.
    pub backing: Kind,
    /// How dirty pages are told.
    pub way: Way,
    /// Number of vCPUs.
    pub vcpus: usize,
    /// The steps, in order. A step that makes no sense where it comes is left out, so that a
    /// history from which steps are taken is a history.
    pub steps: Vec<Step>,
}

impl History {
    /// Returns the history of some of its steps, by their indices.
    pub fn part(&self, steps: &[usize]) -> Self {
        let steps = steps.iter().filter_map(|step| self.steps.get(*step)).cloned().collect();
        Self { steps, ..self.clone() }
    }

    /// Returns whether a vCPU runs beside other steps, so that it may not go alike twice.
    pub fn is_concurrent(&self) -> bool {
        self.steps
            .iter()
            .any(|step| matches!(step, Step::Start { .. } | Step::Harvest { threads: 2.. }))
    }
}

/// Kinds of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Base pages.
    Small,
    /// Transparent huge pages.
    Huge,
    /// A memfd, mapped shared.
    Shared,
}

impl Kind {
    /// Returns the backing of a guest.
    pub fn backing(self) -> Backing {
        match self {
            Self::Small => Backing::Small,
            Self::Huge => Backing::Thp,
            Self::Shared => Backing::Memfd,
        }
    }
}

/// Ways to tell dirty pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// A get clears the log.
    Legacy,
    /// A call of its own clears the log.
    Manual,
    /// The same, and a log starts full.
    InitiallySet,
    /// A ring for each vCPU.
    Ring,
}

impl Way {
    /// Returns the mode of a guest. Rings are small, so that they become full.
    pub fn mode(self) -> Mode {
        match self {
            Self::Legacy => Mode::Legacy,
            Self::Manual => Mode::Manual,
            Self::InitiallySet => Mode::ManualInitiallySet,
            Self::Ring => Mode::Ring { entries: 1024 },
        }
    }
}

/// A range of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// Its first page.
    pub at: u64,
    /// Number of pages.
    pub pages: u64,
}

impl Span {
    /// Makes the range of `pages` pages from `at` on.
    pub fn new(at: u64, pages: u64) -> Self {
        Self { at, pages }
    }

    /// Returns the page after the last.
    pub fn end(self) -> u64 {
        self.at.saturating_add(self.pages)
    }

    /// Returns whether both have a page in common.
    pub fn meets(self, other: Self) -> bool {
        self.at < other.end() && other.at < self.end()
    }

    /// Returns the pages.
    pub fn pages(self) -> std::ops::Range<u64> {
        self.at..self.end()
    }
}

/// Where a memslot lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// First guest page.
    pub at: u64,
    /// First host page.
    pub host: u64,
    /// Number of pages.
    pub pages: u64,
    /// Whether guests may only read it.
    #[serde(default)]
    pub readonly: bool,
}

impl Place {
    /// Returns its guest pages.
    pub fn guest(&self) -> Span {
        Span::new(self.at, self.pages)
    }

    /// Returns its host pages.
    pub fn host(&self) -> Span {
        Span::new(self.host, self.pages)
    }
}

/// A step of a history. Pages are counted from the start of the guest's window, or of the host's
/// memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
#[expect(missing_docs, reason = "the comments of the steps name their fields")]
pub enum Step {
    /// Adds a memslot, or moves it.
    Place { slot: u32, place: Place, log: bool },
    /// Deletes a memslot.
    Delete { slot: u32 },
    /// Switches the log of a memslot.
    Log { slot: u32, on: bool },
    /// A vCPU writes its stamps to guest pages, in order or with a seed at random.
    Write { vcpu: usize, guest: Span, random: Option<u64> },
    /// A vCPU reads guest pages.
    Read { vcpu: usize, guest: Span },
    /// A vCPU executes from guest pages.
    Execute { vcpu: usize, guest: Span },
    /// A vCPU starts to write guest pages at random, beside the steps that follow.
    Start { vcpu: usize, guest: Span, seed: u64 },
    /// The vCPU stops.
    Stop { vcpu: usize },
    /// The vCPU is interrupted by signals, and goes on.
    Kick { vcpu: usize, times: u32 },
    /// The log of a memslot is fetched and cleared, `chunk` pages at a time (0: all).
    Fetch { slot: u32, chunk: u32 },
    /// The rings are harvested, and reset by so many threads.
    Harvest { threads: u32 },
    /// The host does something to its pages.
    Host { act: Act, host: Span },
    /// The host exchanges pages of its memory, by moving their mappings.
    Exchange { first: u64, second: u64, pages: u64 },
}

/// What the host does to its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Act {
    /// It writes them.
    Store,
    /// It gives them back (`MADV_DONTNEED`): private memory then holds zeroes.
    Discard,
    /// It gives them back for all mappings (`MADV_REMOVE`).
    Remove,
    /// It makes them a huge page (`MADV_COLLAPSE`).
    Collapse,
    /// It takes them from memory (`MADV_PAGEOUT`).
    PageOut,
    /// It moves their mapping elsewhere and back (`mremap`).
    Move,
    /// It makes them read-only and writable again (`mprotect`).
    Protect,
    /// It forks, so that the next write to each page copies it.
    Fork,
    /// It write-protects all pages to see which are written (`/proc/self/clear_refs`).
    SoftDirty,
    /// It marks all pages as not used.
    Age,
    /// It writes equal contents and lets KSM merge them.
    Merge,
    /// It migrates them to another NUMA node.
    Migrate,
    /// It takes them away, and gives each back when it is touched (userfaultfd, `MISSING`).
    Late,
    /// It write-protects them, and lets a thread allow each write (userfaultfd, `WP`).
    Guard,
    /// It unmaps them, and lets a thread map each again (userfaultfd, `MINOR`).
    Minor,
}

impl Act {
    /// Returns whether it changes contents, or keeps pages away from vCPUs meanwhile: no vCPU may
    /// run on them.
    pub fn is_alone(self) -> bool {
        !matches!(
            self,
            Self::Collapse
                | Self::PageOut
                | Self::Fork
                | Self::SoftDirty
                | Self::Age
                | Self::Migrate
                | Self::Guard
        )
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let span = |span: &Span| format!("{}+{}", span.at, span.pages);
        match self {
            Self::Place { slot, place, log } => {
                let Place { at, host, pages, readonly } = place;
                write!(f, "memslot {slot}: guest {at}+{pages} on host {host}+{pages}")?;
                f.write_str(if *readonly { ", read-only" } else { "" })?;
                f.write_str(if *log { ", logged" } else { "" })
            }
            Self::Delete { slot } => write!(f, "memslot {slot}: delete"),
            Self::Log { slot, on: true } => write!(f, "memslot {slot}: start the log"),
            Self::Log { slot, on: false } => write!(f, "memslot {slot}: end the log"),
            Self::Write { vcpu, guest, random: None } => {
                write!(f, "vCPU {vcpu} writes guest {}", span(guest))
            }
            Self::Write { vcpu, guest, random: Some(_) } => {
                write!(f, "vCPU {vcpu} writes guest {} at random", span(guest))
            }
            Self::Read { vcpu, guest } => write!(f, "vCPU {vcpu} reads guest {}", span(guest)),
            Self::Execute { vcpu, guest } => {
                write!(f, "vCPU {vcpu} executes from guest {}", span(guest))
            }
            Self::Start { vcpu, guest, .. } => {
                write!(f, "vCPU {vcpu} starts to write guest {}", span(guest))
            }
            Self::Stop { vcpu } => write!(f, "vCPU {vcpu} stops"),
            Self::Kick { vcpu, times } => write!(f, "vCPU {vcpu} gets {times} signals"),
            Self::Fetch { slot, chunk: 0 } => write!(f, "memslot {slot}: fetch the log"),
            Self::Fetch { slot, chunk } => {
                write!(f, "memslot {slot}: fetch the log, clear {chunk} pages at a time")
            }
            Self::Harvest { threads } => {
                write!(f, "harvest the rings, reset them by {threads} threads")
            }
            Self::Host { act, host } => {
                let name = serde_json::to_value(act).unwrap_or_default();
                write!(f, "host: {} {}", name.as_str().unwrap_or_default(), span(host))
            }
            Self::Exchange { first, second, pages } => {
                write!(f, "host: exchange {first}+{pages} and {second}+{pages}")
            }
        }
    }
}

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
    Run,
    Kick,
    Fetch,
    Host,
    Exchange,
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
        model: Model::new(means.memory, means.memory * 2, 2, shared, way),
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
        if self.random.chance(60) {
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
        let readonly = self.means.readonly && self.random.chance(15);
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

/// Returns the stamp that the host writes in a step.
pub fn stamp_of_host(step: usize, page: u64, equal: bool) -> Stamp {
    let number = (1 << 63) | step as u64;
    Stamp { step: number, at: if equal { number } else { page } }
}
