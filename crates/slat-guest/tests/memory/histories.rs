//! Random histories of one guest's memory; vCPUs use it at every step that the machine sees.
//! Writers stamp pages; the test keeps a copy by the log; in the end copy and memory are equal.

use crate::fixture::*;
use slat::{Access, AgeOptions, Gpa, Hpa, Maintenance, PageSize, Platform, TableBits, Vmid};
use slat_guest::*;
use slat_sim::Machine;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const BLOCKS: u64 = 3;
const PAGES: u64 = BLOCKS * 512;
const BYTES: u64 = BLOCKS * M2;
/// The boundary of two pieces of whole-memslot work is behind the first block.
const BASE: u64 = crate::fixture::BASE + G1 - M2;
const HOST: u64 = crate::fixture::HOST + G1 - M2;

fn memslot(bytes: u64) -> MemslotSpec {
    MemslotSpec::new(MemslotId(0), Gpa(BASE), bytes, Hva(HOST))
}

fn logged(bytes: u64) -> MemslotSpec {
    MemslotSpec { log_dirty: true, ..memslot(bytes) }
}

/// The content of the host's pages, and the next stamp.
#[derive(Default, Debug)]
struct Content {
    pages: HashMap<u64, u64>,
    stamp: u64,
}

impl Content {
    fn write(&mut self, hpa: Hpa) {
        self.stamp += 1;
        self.pages.insert(hpa.0 / K4, self.stamp);
    }

    pub fn read(&self, hpa: u64) -> u64 {
        self.pages.get(&(hpa / K4)).copied().unwrap_or(0)
    }
}

pub struct History<'h, 'p, C: Case> {
    pub machine: &'p Machine<C::A>,
    ram: &'h Ram,
    pub guest: &'h TheGuest<'p, C>,
    pub vcpus: Vec<TheVcpu<'h, C>>,
    pub rng: fastrand::Rng,
    content: Arc<Mutex<Content>>,
    /// The copy of the memslot's pages that is made by means of the log.
    copy: HashMap<u64, u64>,
    pub logs: bool,
    tables: u64,
    cleared: u64,
    /// Whether there is a second memslot, whose pages may be private.
    hides: bool,
    /// Pages that have not arrived yet.
    late: Vec<u64>,
    pins: Vec<PagePin<'h>>,
}

impl<'h, 'p, C: Case> History<'h, 'p, C> {
    /// Returns a page that is mostly near an end of a table.
    fn page(&mut self) -> u64 {
        match self.rng.u8(..4) {
            0 => self.rng.u64(..PAGES),
            _ => (self.rng.u64(..BLOCKS) * 512 + self.rng.u64(..24)).saturating_sub(8),
        }
    }

    /// Sets what the vCPUs do at every step.
    pub fn disturb(&self) {
        let (content, seed) = (self.content.clone(), self.rng.clone().u64(..));
        let mut rng = fastrand::Rng::with_seed(seed);
        self.machine.meanwhile(move |machine, _| {
            for cpu in 0..machine.cpus() {
                let page = (rng.u64(..BLOCKS) * 512 + rng.u64(..24)).saturating_sub(8);
                let gpa = BASE + page * K4;
                match rng.u8(..3) {
                    0 => _ = machine.cpu(cpu).read(gpa),
                    // A walk that writes sets accessed and dirty bits, and no content.
                    1 if rng.u8(..4) == 0 => _ = machine.cpu(cpu).walk(gpa),
                    _ => {
                        if let Ok(hpa) = machine.cpu(cpu).write(gpa) {
                            content.lock().unwrap().write(hpa);
                        }
                    }
                }
            }
        });
    }

    fn step(&mut self) {
        match self.rng.u8(..24) {
            0..12 => self.use_page(),
            12..15 if self.logs => self.clear(),
            15 if self.logs => self.take(),
            16 => self.invalidate(),
            17 => self.age(),
            18 => self.split(),
            19 if self.rng.u8(..4) == 0 => self.toggle(),
            20 if self.rng.u8(..8) == 0 => self.replace_slot(),
            20 => self.convert(),
            21 => _ = self.vcpus[0].worker().recover_huge_pages(),
            22 if self.logs => self.read(),
            23 if self.rng.u8(..4) == 0 => self.change_vmid(),
            23 if self.rng.bool() => self.late(),
            23 => self.device(),
            _ => self.use_page(),
        }
        self.guest.reclaim();
        check_mapped(self.vcpus[0].worker());
    }

    pub fn use_page(&mut self) {
        let (cpu, page) = (self.rng.usize(..self.vcpus.len()), self.page());
        let access = [Access::Read, Access::Write, Access::Write, Access::Execute];
        let access = access[self.rng.usize(..4)];
        for _ in 0..4 {
            self.exit();
            let vcpu = &mut self.vcpus[cpu];
            match attempt::<C>(self.machine, vcpu, BASE + page * K4, access) {
                Ok((hpa, _)) => {
                    assert_eq!(hpa.0, self.ram.get(HOST + page * K4).unwrap().hpa);
                    if access == Access::Write {
                        self.content.lock().unwrap().write(hpa);
                    }
                    return;
                }
                Err(Outcome::RingFull) => self.reset(),
                Err(Outcome::Retry(Retry::Absent(Some(arrival)))) => {
                    assert_eq!(arrival.gpa, Gpa(BASE + page * K4));
                    assert!(self.late.contains(&page));
                    if self.rng.bool() {
                        return;
                    }
                    self.arrive();
                    assert!(self.vcpus[cpu].is_ready(&arrival));
                }
                Err(outcome) => panic!("{outcome:?}"),
            }
        }
        panic!("no progress");
    }

    fn copy_page(&mut self, page: u64) {
        let hpa = self.ram.get(HOST + page * K4).unwrap().hpa;
        let content = self.content.lock().unwrap().read(hpa);
        self.copy.insert(page, content);
    }

    fn copy_all(&mut self) {
        (0..PAGES).for_each(|page| self.copy_page(page));
    }

    fn copy_bits(&mut self, first: u64, bits: &[u64]) {
        for page in 0..bits.len() as u64 * 64 {
            if bits[page as usize / 64] >> (page % 64) & 1 == 1 {
                self.copy_page(first + page);
            }
        }
    }

    /// All vCPUs exit: addresses that hardware wrote into their buffers are added to the log.
    fn exit(&mut self) {
        if self.guest.config().log_buffers {
            for cpu in 0..self.machine.cpus() {
                take_buffer::<C>(self.machine, self.vcpus[0].worker(), cpu);
            }
        }
    }

    pub fn read(&mut self) {
        self.exit();
        let mut bits = vec![0; PAGES as usize / 64];
        self.vcpus[0].worker().read_log(MemslotId(0), &mut bits).unwrap();
    }

    /// Reads the log, clears a part of it, and copies that part.
    pub fn clear(&mut self) {
        self.exit();
        let mut bits = vec![0; PAGES as usize / 64];
        let worker = self.vcpus[0].worker();
        worker.read_log(MemslotId(0), &mut bits).unwrap();
        let first = self.rng.usize(..bits.len());
        let words = self.rng.usize(1..=bits.len() - first);
        let mut some = bits[first..first + words].to_vec();
        if self.rng.bool() {
            some.iter_mut().for_each(|word| *word &= self.rng.u64(..));
        }
        let (first, count) = (first as u64 * 64, words as u64 * 64);
        let worker = self.vcpus[0].worker();
        self.cleared += worker.clear_log(MemslotId(0), first, count, &some).unwrap().pages;
        self.copy_bits(first, &some);
    }

    pub fn take(&mut self) {
        self.exit();
        let mut bits = vec![0; PAGES as usize / 64];
        self.cleared += self.vcpus[0].worker().take_log(MemslotId(0), &mut bits).unwrap();
        self.copy_bits(0, &bits);
        self.reset();
    }

    /// Harvests the rings, resets them, and copies their pages.
    pub fn reset(&mut self) {
        let none = DirtyPage { memslot: MemslotId(9), page: 0 };
        let mut pages = vec![none; 128];
        let mut all = Vec::new();
        for cpu in 0..self.vcpus.len() as u16 {
            let count = self.vcpus[0].worker().harvest_ring(cpu, &mut pages);
            all.extend_from_slice(&pages[..count]);
        }
        self.vcpus[0].worker().reset_rings().unwrap();
        all.iter().for_each(|page| self.copy_page(page.page));
    }

    pub fn invalidate(&mut self) {
        let page = self.page();
        let count = self.rng.u64(1..=40).min(PAGES - page);
        self.take_back(page, count, false);
    }

    /// Pages go, and arrive later: a vCPU that uses one meanwhile waits for it.
    pub fn late(&mut self) {
        if !self.late.is_empty() && self.rng.bool() {
            self.arrive();
            return;
        }
        let page = self.page();
        let count = self.rng.u64(1..=8).min(PAGES - page);
        self.take_back(page, count, true);
    }

    /// All late pages arrive.
    fn arrive(&mut self) {
        for page in std::mem::take(&mut self.late) {
            self.ram.change(HOST + page * K4, |page| page.ready = true);
            self.guest.arrived(host_range(HOST + page * K4, K4));
        }
        for vcpu in &mut self.vcpus {
            let waits = vcpu.waiting().collect::<Vec<_>>();
            assert!(waits.iter().all(|arrival| vcpu.is_ready(arrival)));
            while vcpu.ready().is_some() {}
        }
    }

    /// A device pins pages, uses some, or unpins them.
    pub fn device(&mut self) {
        let page = self.page();
        let some = range(BASE + page * K4, self.rng.u64(1..=8).min(PAGES - page) * K4);
        match self.rng.u8(..4) {
            0 if self.pins.len() < 4 => {
                self.pins.push(self.vcpus[0].worker().pin(some).unwrap());
            }
            1 if !self.pins.is_empty() => {
                let which = self.rng.usize(..self.pins.len());
                drop(self.pins.swap_remove(which));
            }
            _ if self.guest.config().devices => {
                for gpa in (some.start().0..some.end().0).step_by(K4 as usize) {
                    let write = self.rng.bool();
                    if let Some(hpa) =
                        self.machine.device_access(self.guest.tables().vmid(), Gpa(gpa), write)
                    {
                        if write {
                            self.content.lock().unwrap().write(hpa);
                            // The guest's driver does this before it fetches instructions from
                            // there.
                            self.machine.maintain(hpa, K4, Maintenance::Instructions);
                        }
                        self.vcpus[0].worker().device_used(range(gpa, K4), write);
                    }
                }
                self.claim_followed();
            }
            _ => {}
        }
    }

    /// Asserts that devices' tables have the same pages as the guest's, without private pages and
    /// without pages in views of vCPUs whose caches are off.
    fn claim_followed(&self) {
        let own = self.vcpus.iter().any(|vcpu| vcpu.root() != self.vcpus[0].root());
        if self.guest.config().devices && !self.hides && !own {
            self.machine.claim_followed(self.guest.tables().vmid());
        }
    }

    /// The host moves pages, with their content, except pages that devices have pinned.
    fn take_back(&mut self, page: u64, count: u64, late: bool) {
        if self.vcpus[0].worker().is_pinned(range(BASE + page * K4, count * K4)) {
            return;
        }
        let worker = self.vcpus[0].worker();
        let mut parts = Vec::new();
        let held =
            worker.invalidate(host_range(HOST + page * K4, count * K4), |part| parts.push(part));
        for page in page..page + count {
            let (old, new) = self.ram.migrate(HOST + page * K4);
            let mut content = self.content.lock().unwrap();
            let stamp = content.read(old);
            content.pages.insert(new / K4, stamp);
            drop(content);
            self.machine.take_back(Hpa(old), K4);
            if late && !self.late.contains(&page) {
                self.ram.change(HOST + page * K4, |page| page.ready = false);
                self.late.push(page);
            }
        }
        drop(held);
    }

    pub fn age(&mut self) {
        let page = self.page();
        let count = self.rng.u64(1..=200).min(PAGES - page);
        let skip = [TableBits::Ignored, TableBits::Exact][self.rng.usize(..2)];
        let how =
            AgeOptions { clear: self.rng.bool(), table_bits: skip, flush_tlb: self.rng.bool() };
        let mut young = vec![0; 4];
        let some = range(BASE + page * K4, count * K4);
        self.vcpus[0].worker().age(some, None, &mut young, how).unwrap();
    }

    /// Converts pages of the second memslot, and uses some; the machine checks their kind.
    pub fn convert(&mut self) {
        let at = |spec: &MemslotSpec, page: u64| spec.gpa.0 + page * K4;
        let other = MemslotSpec { id: MemslotId(1), gpa: Gpa(BASE + G1), ..hidden(BYTES) };
        let other = MemslotSpec { host: Hva(HOST + G1), ..other };
        if !std::mem::replace(&mut self.hides, true) {
            self.ram.populate(other.host.0, BYTES, PageSize::SIZE_2M);
            self.ram.populate_private(HIDDEN, BYTES, PageSize::SIZE_2M);
            self.vcpus[0].worker().set_memslot(other).unwrap();
        }
        let page = self.page();
        let some = range(at(&other, page), self.rng.u64(1..=40).min(PAGES - page) * K4);
        let to = [MemoryKind::Shared, MemoryKind::Private][usize::from(self.rng.bool())];
        self.vcpus[0].worker().convert(some, to, |_| {}).unwrap();
        self.machine.claim_kind(self.guest.tables().vmid(), some, to);
        for _ in 0..4 {
            let (cpu, page) = (self.rng.usize(..self.vcpus.len()), self.page());
            let vcpu = &mut self.vcpus[cpu];
            match attempt::<C>(self.machine, vcpu, at(&other, page), Access::Write) {
                Ok(_) | Err(Outcome::RingFull) => {}
                Err(outcome) => panic!("{outcome:?}"),
            }
        }
    }

    pub fn split(&mut self) {
        let block = self.rng.u64(..BLOCKS);
        let split = EagerSplit::new(range(BASE + block * M2, M2), PageSize::SIZE_4K);
        split.run(self.vcpus[0].worker(), || false);
        self.tables += 1;
    }

    pub fn toggle(&mut self) {
        self.logs = !self.logs;
        let spec = if self.logs { logged(BYTES) } else { memslot(BYTES) };
        self.vcpus[0].worker().set_memslot(spec).unwrap();
        if self.logs {
            self.begin();
        }
    }

    pub fn change_vmid(&mut self) {
        let vmid = Vmid(self.guest.tables().vmid().0 + 1);
        set_vmid::<C>(self.machine, self.guest, self.vcpus.iter(), vmid);
    }

    /// A log that begins empty has the writes after everything was copied.
    fn begin(&mut self) {
        match self.guest.config().initially_set {
            true => self.copy.clear(),
            false => self.copy_all(),
        }
    }

    /// The memslot is deleted and inserted again, with a new log.
    fn replace_slot(&mut self) {
        let spec = if self.logs { logged(BYTES) } else { memslot(BYTES) };
        let worker = self.vcpus[0].worker();
        let gone = worker.set_memslot(MemslotSpec { bytes: 0, ..spec });
        assert_eq!(gone, Ok(MemslotChange::Deleted));
        assert_eq!(worker.set_memslot(spec), Ok(MemslotChange::Inserted));
        if self.logs {
            self.begin();
        }
    }

    /// The vCPUs are stopped: the last round.
    pub fn end(&mut self) {
        self.machine.undisturbed();
        self.claim_followed();
        if !self.logs {
            return;
        }
        self.take();
        for page in 0..PAGES {
            let hpa = self.ram.get(HOST + page * K4).unwrap().hpa;
            let there = self.content.lock().unwrap().read(hpa);
            let copied = self.copy.get(&page).copied().unwrap_or(0);
            assert_eq!(copied, there, "page {page}");
        }
    }
}

const EXECUTE_HUGE: [ExecuteHuge; 4] =
    [ExecuteHuge::Allowed, ExecuteHuge::Split, ExecuteHuge::SplitPage, ExecuteHuge::Zap];

fn history<C: Case>(seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let hardware = C::HARDWARE_DIRTY && rng.bool();
    let eager = [None, Some(PageSize::SIZE_4K)];
    let config = Config {
        logging: if hardware { Logging::Hardware } else { Logging::Protect },
        initially_set: rng.bool(),
        eager_split: eager[rng.usize(..2)],
        ring: (!hardware && rng.u8(..3) == 0).then_some(128),
        execute_huge: EXECUTE_HUGE[rng.usize(..4)],
        contiguous: seed & 2 == 2,
        devices: seed & 4 == 4,
        log_buffers: hardware && C::BUFFER.is_some() && seed & 8 == 8,
        ..config()
    };
    // Two to four vCPUs.
    let cpus = 2 + (seed % 3) as usize;
    let config = Config { vcpus: cpus as u16, ..config };
    run::<C>(&C::machine(cpus).random(seed), config, rng, |history| {
        for _ in 0..60 {
            history.step();
        }
    });
}

/// Makes a guest that logs, and takes `steps` steps with it; in the end no write is lost, and no
/// rule is broken.
pub fn run<C: Case>(
    machine: &Machine<C::A>,
    config: Config,
    mut rng: fastrand::Rng,
    steps: impl FnOnce(&mut History<'_, '_, C>),
) {
    let told = format!("{config:?}");
    give_all::<C>(machine);
    let ram = Ram::from(C::FIRST_HPA);
    let backing = [PageSize::SIZE_4K, PageSize::SIZE_2M][usize::from(rng.u8(..4) != 0)];
    ram.populate(HOST, BYTES, backing);
    let guest = guest::<C>(machine, &ram, config);
    let vcpus: Vec<_> = (0..machine.cpus() as u16)
        .map(|id| {
            let vcpu = Vcpu::new(&guest, id).unwrap();
            machine.cpu(id as usize).load(VMID, vcpu.root());
            if config.log_buffers {
                machine.cpu(id as usize).log_marks(PML_ENTRIES);
            }
            vcpu
        })
        .collect();
    let mut history = History::<C> {
        machine,
        ram: &ram,
        guest: &guest,
        vcpus,
        rng,
        content: Arc::default(),
        copy: HashMap::new(),
        logs: false,
        tables: 0,
        cleared: 0,
        hides: false,
        late: Vec::new(),
        pins: Vec::new(),
    };
    history.vcpus[0].worker().set_memslot(memslot(BYTES)).unwrap();
    history.disturb();
    history.toggle();
    steps(&mut history);
    history.end();
    let found: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "{told}");
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The number of histories: `HISTORIES=N`, or few.
pub fn count() -> u64 {
    number("HISTORIES").unwrap_or(6)
}

fn histories<C: Case>() {
    for seed in crate::seed::seeds(count()) {
        let run = std::panic::catch_unwind(|| history::<C>(seed));
        assert!(run.is_ok(), "run it again with SLAT_SEED={seed} HISTORIES=1");
    }
}

mod no_dirty_page_is_missed {
    use super::*;

    mod usual {
        use super::*;
        crate::on_cases! {
            histories: on_arm ArmPlain, on_arm_with_hardware_dirty_state ArmDirty, on_intel Intel
        }
    }
    #[cfg(feature = "every-format")]
    crate::on_others!(histories);
}
