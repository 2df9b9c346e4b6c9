//! The histories of `slat check` on `slat-guest`, in the adversarial machine: the same steps and
//! the same checks as on a host's KVM.

use slat::format::ept::Ept1G;
use slat::{Access, Gpa, GpaRange, Hpa, PageSize, Vmid};
use slat_guest::{
    Backing, Config, Guest, Hva, HvaRange, MemoryKind, MemslotId, MemslotSpec, NoPage, Outcome,
    Page, PrivateAt, PrivatePage, PrivateRange, Vcpu,
};
use slat_kvm::check::{
    Act, Counts, HOLE, History, HistoryEnd, Kind, Means, Place, Span, Stamp, System, Task,
    TaskResult, Trouble, Way, check, classes,
};
use slat_kvm::work::Touch;
use slat_sim::{Ept, Machine};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

const K4: u64 = 4 << 10;
const BLOCK: u64 = 512;
const MEMORY: u64 = 2 * BLOCK;
const BASE: u64 = 4 << 30;
const HOST: u64 = 0x7000_0000_0000;
const FIRST_HPA: u64 = 64 << 30;
const RING: u32 = 128;

fn gpa(page: u64) -> u64 {
    BASE + page * K4
}

/// The host's memory: where each page is, and what each frame holds.
#[derive(Debug)]
struct Pages {
    /// The frame of each host page, and whether its block is one of the host's. Pages of private
    /// memory come behind those of the host's memory.
    frames: Vec<(u64, bool)>,
    contents: HashMap<u64, Stamp>,
    next: u64,
}

impl Pages {
    fn take(&mut self, pages: u64) -> u64 {
        let first = self.next.next_multiple_of(pages);
        self.next = first + pages;
        first
    }
}

#[derive(Clone, Debug)]
struct Ram(Arc<Mutex<Pages>>);

impl Ram {
    fn new() -> Self {
        let first = FIRST_HPA / K4;
        let frames = (0..2 * MEMORY).map(|page| (first + page, true)).collect();
        let next = first + 2 * MEMORY;
        Self(Arc::new(Mutex::new(Pages { frames, contents: HashMap::new(), next })))
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.0.lock().unwrap()
    }
}

impl Backing for Ram {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let page = (host.0 - HOST) / K4;
        let (frame, whole) = *self.pages().frames.get(page as usize).ok_or(NoPage::Never)?;
        let block = if whole { PageSize::SIZE_2M } else { PageSize::SIZE_4K };
        let memory = slat::Memory::Normal;
        Ok(Page { hpa: Hpa(frame * K4), block, write: true, execute: true, memory })
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        let frame = self.pages().frames[(MEMORY + at.0 / K4) as usize].0;
        Ok(PrivatePage { hpa: Hpa(frame * K4), block: PageSize::SIZE_4K })
    }
}

/// What the machine has to find out: nothing, or an invalidation that the host leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The host takes a page back without telling the guest's memory.
    NotTold,
}

struct RunningCheck {
    task: Task,
    steps: Vec<(u64, Touch)>,
    next: usize,
    done: TaskResult,
}

struct Engine<'a> {
    machine: &'a Machine<Ept>,
    ram: Ram,
    vcpus: Vec<Vcpu<'a, Ept1G, Machine<Ept>, Ram>>,
    manual: bool,
    private: bool,
    position: Vec<u64>,
    running: Vec<Option<RunningCheck>>,
    fault: Fault,
}

impl Engine<'_> {
    /// Does one access; returns false if the vCPU's ring is full.
    fn hit(&mut self, vcpu: usize, page: u64, touch: Touch, done: &mut TaskResult) -> bool {
        let (used, access) = match touch {
            Touch::Write => (slat_sim::Access::Write, Access::Write),
            Touch::Execute => (slat_sim::Access::Execute, Access::Execute),
            _ => (slat_sim::Access::Read, Access::Read),
        };
        let mut outcomes = Vec::new();
        let frame = loop {
            assert!(outcomes.len() < 32, "no progress at {page}: {outcomes:?}");
            self.machine.here(vcpu);
            if let Ok(hpa) = self.machine.cpu(vcpu).access(gpa(page), used) {
                break Some(hpa.0 / K4);
            }
            match self.vcpus[vcpu].fault(Gpa(gpa(page)), access) {
                Outcome::RingFull => return false,
                Outcome::Mmio => break None,
                Outcome::Refused(refusal) => panic!("{refusal:?}"),
                outcome => outcomes.push(outcome),
            }
        };
        let mut pages = self.ram.pages();
        let (number, stamp) = (self.position[vcpu], frame.and_then(|it| pages.contents.get(&it)));
        self.position[vcpu] += 1;
        done.steps += 1;
        match (touch, frame) {
            (Touch::Write, Some(frame)) => {
                pages.contents.insert(frame, Stamp { step: number, at: gpa(page) });
            }
            (Touch::Sum, Some(_)) => {
                done.sum = stamp.copied().unwrap_or_default().add_to(done.sum);
            }
            (touch, None) => {
                done.exits.insert(page);
                if touch == Touch::Sum {
                    done.sum = Stamp { step: HOLE, at: HOLE }.add_to(done.sum);
                }
            }
            _ => {}
        }
        true
    }

    /// A vCPU goes on by so many steps at most.
    fn advance(&mut self, vcpu: usize, steps: usize) {
        let Some(mut running) = self.running[vcpu].take() else { return };
        for _ in 0..steps {
            let Some(&(page, touch)) = running.steps.get(running.next) else { break };
            let page = running.task.guest.at + page;
            if !self.hit(vcpu, page, touch, &mut running.done) {
                break;
            }
            running.next += 1;
        }
        self.running[vcpu] = Some(running);
    }

    fn beside(&mut self) {
        (0..self.vcpus.len()).for_each(|vcpu| self.advance(vcpu, 5));
    }

    /// The host changes the frames of pages, while the guest has none of them.
    fn change(&mut self, host: Span, change: impl FnOnce(&mut Pages)) {
        let range = HvaRange { start: Hva(HOST + host.at * K4), bytes: host.pages * K4 };
        match self.fault {
            Fault::None => {
                let held = self.vcpus[0].worker().invalidate(range, |_| {});
                change(&mut self.ram.0.lock().unwrap());
                drop(held);
            }
            Fault::NotTold => change(&mut self.ram.0.lock().unwrap()),
        }
        self.beside();
    }
}

/// Gives pages new frames, with their contents or empty.
fn move_pages(pages: &mut Pages, host: Span, keep: bool) {
    for page in host.pages() {
        let new = pages.take(1);
        let block = (page / BLOCK * BLOCK) as usize;
        pages.frames[block..block + BLOCK as usize].iter_mut().for_each(|it| it.1 = false);
        let old = std::mem::replace(&mut pages.frames[page as usize].0, new);
        let content = pages.contents.remove(&old).filter(|_| keep).unwrap_or_default();
        pages.contents.insert(new, content);
    }
}

impl System for Engine<'_> {
    fn set_slot(&mut self, id: u32, slot: Option<(Place, bool)>) -> Result<(), Trouble> {
        self.beside();
        let none = Place { at: 0, host: 0, pages: 0, readonly: false };
        let (place, log_dirty) = slot.unwrap_or((none, false));
        let start = Gpa(gpa(place.at));
        let host = Hva(HOST + place.host * K4);
        let spec = MemslotSpec::new(MemslotId(id as u16), start, place.pages * K4, host);
        let private = self.private.then_some(PrivateAt(place.host * K4));
        let spec = MemslotSpec { read_only: place.readonly, log_dirty, private, ..spec };
        let changed = self.vcpus[0].worker().set_memslot(spec);
        changed.unwrap_or_else(|error| panic!("{spec:?}: {error:?}"));
        self.beside();
        Ok(())
    }

    fn start(&mut self, vcpu: usize, task: &Task) -> Result<(), Trouble> {
        let count = if task.work.endless { 2000 } else { task.guest.pages as usize };
        let steps = task.work.steps(vcpu, task.guest.pages).take(count).collect();
        let running = RunningCheck { task: *task, steps, next: 0, done: TaskResult::default() };
        self.running[vcpu] = Some(running);
        Ok(())
    }

    fn wait(&mut self, vcpu: usize, stop: bool) -> Result<Option<TaskResult>, Trouble> {
        self.advance(vcpu, if stop { 3 } else { usize::MAX });
        match &self.running[vcpu] {
            Some(it) if !stop && it.next < it.steps.len() => Ok(None),
            _ => Ok(self.running[vcpu].take().map(|it| it.done)),
        }
    }

    fn progress(&self, vcpu: usize) -> u64 {
        self.running[vcpu].as_ref().map_or(0, |it| it.done.steps)
    }

    fn kick(&mut self, vcpu: usize, _times: u32) {
        self.advance(vcpu, 7);
    }

    fn fetch(&mut self, id: u32, pages: u64, chunk: u32) -> Result<BTreeSet<u64>, Trouble> {
        self.beside();
        let id = MemslotId(id as u16);
        let mut bits = vec![0; pages.div_ceil(64) as usize];
        if self.manual {
            self.vcpus[0].worker().read_log(id, &mut bits).unwrap();
            self.beside();
            let chunk = if chunk == 0 { pages } else { u64::from(chunk) };
            for first in (0..pages).step_by(chunk as usize) {
                let count = chunk.min(pages - first);
                let words = &bits[(first / 64) as usize..];
                self.vcpus[0].worker().clear_log(id, first, count, words).unwrap();
            }
        } else {
            self.vcpus[0].worker().take_log(id, &mut bits).unwrap();
        }
        Ok((0..pages).filter(|page| bits[(page / 64) as usize] >> (page % 64) & 1 == 1).collect())
    }

    fn harvest(&mut self, _threads: u32) -> Result<BTreeSet<(u32, u64)>, Trouble> {
        self.beside();
        let none = slat_guest::DirtyPage { memslot: MemslotId(0), page: 0 };
        let (mut told, mut some) = (BTreeSet::new(), vec![none; RING as usize]);
        for vcpu in 0..self.vcpus.len() as u16 {
            let count = self.vcpus[0].worker().harvest_ring(vcpu, &mut some);
            told.extend(some[..count].iter().map(|it| (u32::from(it.memslot.0), it.page)));
        }
        self.vcpus[0].worker().reset_rings().unwrap();
        Ok(told)
    }

    fn act(&mut self, act: Act, host: Span) -> Result<(), Trouble> {
        let empties = matches!(act, Act::Discard | Act::Remove);
        match act {
            Act::Store => {}
            Act::Collapse => self.change(host, |pages| {
                let first = pages.take(BLOCK);
                for (page, new) in host.pages().zip(first..) {
                    let old = std::mem::replace(&mut pages.frames[page as usize], (new, true)).0;
                    let content = pages.contents.remove(&old).unwrap_or_default();
                    pages.contents.insert(new, content);
                }
            }),
            Act::Punch => {
                let bytes = host.pages * K4;
                let range = PrivateRange { start: PrivateAt(host.at * K4), bytes };
                let held = self.vcpus[0].worker().invalidate_private(range, |_| {}).unwrap();
                let hidden = Span::new(MEMORY + host.at, host.pages);
                move_pages(&mut self.ram.pages(), hidden, false);
                drop(held);
                self.beside();
            }
            Act::Balloon => host
                .pages()
                .step_by(2)
                .map(|page| Span::new(page, 1))
                .for_each(|page| self.change(page, |pages| move_pages(pages, page, false))),
            _ => self.change(host, |pages| move_pages(pages, host, !empties)),
        }
        Ok(())
    }

    fn convert(&mut self, guest: Span, private: bool) -> Result<(), Trouble> {
        let kind = if private { MemoryKind::Private } else { MemoryKind::Shared };
        let range = GpaRange::new(Gpa(gpa(guest.at)), guest.pages * K4).unwrap();
        self.vcpus[0].worker().convert(range, kind, |_| {}).unwrap();
        self.beside();
        Ok(())
    }

    fn exchange(&mut self, first: u64, second: u64, count: u64) -> Result<(), Trouble> {
        let both = |pages: &mut Pages| {
            for page in 0..count {
                let (first, second) = ((first + page) as usize, (second + page) as usize);
                for page in [first, second] {
                    let block = page / BLOCK as usize * BLOCK as usize;
                    let block = &mut pages.frames[block..block + BLOCK as usize];
                    block.iter_mut().for_each(|it| it.1 = false);
                }
                pages.frames.swap(first, second);
            }
        };
        let span = Span::new(first.min(second), first.abs_diff(second) + count);
        self.change(span, both);
        Ok(())
    }

    fn peek(&self, host: u64) -> Stamp {
        let pages = self.ram.pages();
        pages.contents.get(&pages.frames[host as usize].0).copied().unwrap_or_default()
    }

    fn poke(&mut self, host: u64, stamp: Stamp) {
        let mut pages = self.ram.pages();
        let frame = pages.frames[host as usize].0;
        pages.contents.insert(frame, stamp);
    }
}

fn means() -> Means {
    Means {
        memory: MEMORY,
        block: BLOCK,
        ways: vec![Way::Legacy, Way::Manual, Way::InitiallySet, Way::Ring],
        kinds: vec![Kind::Huge],
        acts: vec![
            Act::Store,
            Act::Discard,
            Act::Collapse,
            Act::Move,
            Act::PageOut,
            Act::Migrate,
            Act::Balloon,
            Act::Punch,
        ],
        readonly: true,
    }
}

fn run(history: &History, fault: Fault) -> HistoryEnd {
    let machine = Machine::new(Ept::default(), history.vcpus);
    machine.give(Hpa(FIRST_HPA), 1 << 38);
    let ram = Ram::new();
    let config = Config {
        initially_set: history.way == Way::InitiallySet,
        ring: (history.way == Way::Ring).then_some(RING),
        eager_split: history.seed.is_multiple_of(2).then_some(PageSize::SIZE_4K),
        ..Config::new(history.vcpus as u16, PageSize::SIZE_1G)
    };
    let (vmid, bits) = (Vmid(7), 39);
    let guest = Guest::new(Ept1G::default(), vmid, bits, &machine, ram.clone(), config).unwrap();
    let vcpus = (0..history.vcpus).map(|id| {
        let vcpu = Vcpu::new(&guest, id as u16).unwrap();
        machine.cpu(id).load(vmid, vcpu.root());
        vcpu
    });
    let mut engine = Engine {
        machine: &machine,
        ram,
        vcpus: vcpus.collect(),
        manual: matches!(history.way, Way::Manual | Way::InitiallySet),
        private: history.private,
        position: (1..=history.vcpus as u64).map(|vcpu| vcpu << 40).collect(),
        running: (0..history.vcpus).map(|_| None).collect(),
        fault,
    };
    check(history, gpa, &mut engine, &mut |_, _| true)
}

fn histories(of_each: u64) -> impl Iterator<Item = History> {
    classes()
        .iter()
        .flat_map(move |class| (0..of_each).filter_map(|it| class.history(11, it, &means())))
}

#[test]
fn the_engine_loses_nothing_in_the_histories_of_slat_check() {
    let mut all = Counts::default();
    for mut history in histories(2) {
        // The machine is slow.
        history.steps.truncate(20);
        match run(&history, Fault::None) {
            HistoryEnd::Held(counts) => all.add(counts),
            other => panic!("{} {}: {other:?}\n{history:?}", history.class, history.seed),
        }
    }
    assert!(all.writes > 10_000 && all.told > 500, "{all:?}");
}

#[test]
fn the_engine_holds_where_riscv_of_linux_6_12_loses() {
    let history = serde_json::from_str(include_str!("histories/riscv-unmap.json")).unwrap();
    let ended = run(&history, Fault::None);
    assert!(matches!(ended, HistoryEnd::Held(counts) if counts.steps == 4), "{ended:?}");
}

#[test]
fn a_host_that_does_not_tell_the_engine_is_found_out() {
    let lost = |history: &History| matches!(run(history, Fault::NotTold), HistoryEnd::Lost(_));
    assert!(histories(2).any(|history| lost(&history)));
}
