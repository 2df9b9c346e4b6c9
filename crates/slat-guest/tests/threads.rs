//! Threads run vCPUs on real memory, while other threads log, invalidate, age, split, recover and
//! delete. Writers stamp words; the test keeps a copy by means of the log; in the end copy and
//! memory are equal.
//!
//! `ROUNDS=N` for more.
#![cfg(all(not(loom), target_os = "linux"))]

#[path = "../../../tests/seed.rs"]
mod seed;

use slat::format::arm64::{Arm64, Arm64K4};
use slat::format::ept::Ept1G;
use slat::{Access, AgeOptions, Format, Gpa, GpaRange, Hpa, Memory, PageSize, TableBits, Vmid};
use slat_guest::*;
use slat_sim::fast::FastMachine;
use slat_sim::{Arch, Arm, Ept};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};

const VMID: Vmid = Vmid(3);
const BASE: u64 = 1 << 32;
const HOST: u64 = 1 << 40;
const K4: u64 = 4096;
const M2: u64 = 2 << 20;
const BYTES: u64 = 4 * M2;
const PAGES: u64 = BYTES / K4;

/// The location of each page of the guest's memory: one of two places.
struct Ram {
    base: u64,
    block: PageSize,
    /// The pages that are in their second place.
    moved: Vec<AtomicBool>,
    /// A thread that moves pages holds it, within the invalidation; faults hold it while they ask.
    moving: RwLock<()>,
}

impl Ram {
    fn hpa(&self, page: u64) -> Hpa {
        let moved = self.moved[page as usize].load(Ordering::Relaxed);
        Hpa(self.base + page * K4 + if moved { BYTES } else { 0 })
    }
}

impl Backing for &Ram {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let _asks = self.moving.read().unwrap();
        let page = (host.0 - HOST) / K4;
        let table = (page / 512 * 512) as usize;
        let whole = self.moved[table..table + 512].iter().all(|page| !page.load(Ordering::Relaxed));
        Ok(Page {
            hpa: self.hpa(page),
            block: if whole { self.block } else { PageSize::SIZE_4K },
            write: true,
            execute: true,
            memory: Memory::Normal,
        })
    }
}

struct Run<'r, F: Format, A: Arch> {
    machine: &'r FastMachine<A>,
    ram: &'r Ram,
    guest: &'r Guest<'r, F, FastMachine<A>, &'r Ram>,
    stop: AtomicBool,
    stamp: AtomicU64,
    /// The first word of each page, as it was copied.
    copy: Vec<AtomicU64>,
    /// Copies and moves take turns, so that a page does not move while it is copied.
    copying: Mutex<()>,
    epochs: Mutex<Epochs>,
}

fn spec(log_dirty: bool) -> MemslotSpec {
    MemslotSpec { log_dirty, ..MemslotSpec::new(MemslotId(0), Gpa(BASE), BYTES, Hva(HOST)) }
}

impl<F: Format, A: Arch> Run<'_, F, A> {
    fn vcpu(&self, id: u16, seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut vcpu = Vcpu::new(self.guest, id).unwrap();
        let mut cpu = self.machine.cpu(id as usize).unwrap();
        cpu.load(VMID, vcpu.root());
        while !self.stop.load(Ordering::Relaxed) {
            let page = rng.u64(..PAGES);
            let gpa = BASE + page * K4;
            let access = [Access::Write, Access::Write, Access::Read, Access::Execute];
            let access = access[rng.usize(..4)];
            loop {
                let done = match access {
                    Access::Write => cpu.write(gpa, self.stamp.fetch_add(1, Ordering::Relaxed)),
                    Access::Read => cpu.read(gpa).map(drop),
                    _ => cpu.execute(gpa).map(drop),
                };
                if done.is_ok() || self.stop.load(Ordering::Relaxed) {
                    break;
                }
                match vcpu.fault(Gpa(gpa), access) {
                    Outcome::RingFull | Outcome::Retry(_) => std::thread::yield_now(),
                    Outcome::Refused(reason) => panic!("{reason:?}"),
                    // While the memslot is being replaced.
                    Outcome::Mmio => std::thread::yield_now(),
                    _ => {}
                }
            }
        }
    }

    fn copy_pages(&self, pages: impl Iterator<Item = u64>) {
        let _turn = self.copying.lock().unwrap();
        for page in pages {
            let word = self.machine.read_host(self.ram.hpa(page));
            self.copy[page as usize].store(word, Ordering::Relaxed);
        }
    }

    /// Begins an epoch and aborts it, then begins one and commits it.
    fn epoch(&self, worker: &mut Worker<'_, F, FastMachine<A>, &Ram>) {
        let mut epochs = self.epochs.lock().unwrap();
        drop(epochs.begin(worker).unwrap());
        let epoch = epochs.begin(worker).unwrap();
        self.copy_pages(set(epoch.bitmap()));
        epoch.commit();
    }

    /// Does one round of a migration.
    fn round(&self, worker: &mut Worker<'_, F, FastMachine<A>, &Ram>, take: bool) {
        let mut bits = vec![0; PAGES as usize / 64];
        if take {
            worker.take_log(MemslotId(0), &mut bits).unwrap();
        } else {
            worker.read_log(MemslotId(0), &mut bits).unwrap();
            worker.clear_log(MemslotId(0), 0, PAGES, &bits).unwrap();
        }
        self.copy_pages(set(&bits));
        let none = DirtyPage { memslot: MemslotId(9), page: 0 };
        for vcpu in 0..2 {
            let mut pages = vec![none; 256];
            let count = worker.harvest_ring(vcpu, &mut pages);
            worker.reset_rings().unwrap();
            self.copy_pages(pages[..count].iter().map(|page| page.page));
        }
    }

    /// Does everything else that happens to the memory.
    fn disturb(&self, seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut worker = Worker::new(self.guest).unwrap();
        while !self.stop.load(Ordering::Relaxed) {
            let page = rng.u64(..PAGES);
            let count = rng.u64(1..=32).min(PAGES - page);
            match rng.u8(..9) {
                8 => change_another_slot(&mut worker, &mut rng),
                0 | 1 => self.move_pages(&mut worker, page, count),
                2 => _ = worker.recover_huge_pages(),
                3 => {
                    let table = GpaRange::new(Gpa(BASE + page / 512 * M2), M2).unwrap();
                    EagerSplit::new(table, PageSize::SIZE_4K).run(&mut worker, || false);
                }
                _ => {
                    let skip = [TableBits::Ignored, TableBits::Exact][rng.usize(..2)];
                    let how = AgeOptions { clear: true, table_bits: skip, flush_tlb: rng.bool() };
                    let some = GpaRange::new(Gpa(BASE + page * K4), count * K4).unwrap();
                    worker.age(some, None, &mut [0], how).unwrap();
                }
            }
            self.guest.reclaim();
        }
    }

    /// The host moves pages, with their content.
    fn move_pages(&self, worker: &mut Worker<'_, F, FastMachine<A>, &Ram>, first: u64, count: u64) {
        let range = HvaRange { start: Hva(HOST + first * K4), bytes: count * K4 };
        let _copies = self.copying.lock().unwrap();
        let invalidation = worker.invalidate(range, |_| {});
        let asks = self.ram.moving.write().unwrap();
        let mut content = [0; K4 as usize];
        for page in first..first + count {
            let from = self.ram.hpa(page);
            self.machine.copy_out(from, &mut content);
            self.ram.moved[page as usize].fetch_xor(true, Ordering::Relaxed);
            self.machine.copy_in(self.ram.hpa(page), &content);
            // A thread that still writes to the old place is detected.
            self.machine.write_host(from, u64::MAX);
        }
        drop(asks);
        drop(invalidation);
    }
}

/// Inserts another memslot, of two pieces; it logs, moves and is deleted.
fn change_another_slot<F: Format, H: Host, B: Backing>(
    worker: &mut Worker<'_, F, H, B>,
    rng: &mut fastrand::Rng,
) {
    let gpa = Gpa([BASE, BASE + (8 << 30)][rng.usize(..2)] + (1 << 30) - M2);
    let (id, host, bytes) =
        (MemslotId(1), Hva(2 * HOST), [0, 2 * M2][usize::from(rng.u8(..4) != 0)]);
    let to = MemslotSpec { id, gpa, host, bytes, ..spec(rng.bool()) };
    if let Err(error) = worker.set_memslot(to) {
        assert_eq!(error, MemslotError::Missing { id });
    }
}

fn set(bits: &[u64]) -> impl Iterator<Item = u64> {
    let set = |page: &u64| bits[*page as usize / 64] >> (page % 64) & 1 == 1;
    (0..bits.len() as u64 * 64).filter(set)
}

fn run<F: Format, A: Arch>(format: F, arch: A, config: Config, seed: u64) {
    let machine = FastMachine::new(arch, 2, 2 * BYTES, 64 << 20).unwrap();
    let ram = Ram {
        base: machine.memory_base().0,
        block: PageSize::SIZE_2M,
        moved: (0..PAGES).map(|_| AtomicBool::new(false)).collect(),
        moving: RwLock::new(()),
    };
    let guest = Guest::new(format, VMID, 39, &machine, &ram, config).unwrap();
    let run = Run {
        machine: &machine,
        ram: &ram,
        guest: &guest,
        stop: AtomicBool::new(false),
        stamp: AtomicU64::new(1),
        copy: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
        copying: Mutex::new(()),
        epochs: Mutex::new(Epochs::new(MemslotId(0))),
    };
    let mut worker = Worker::new(&guest).unwrap();
    worker.set_memslot(spec(false)).unwrap();
    std::thread::scope(|scope| {
        let run = &run;
        let threads = [
            scope.spawn(move || run.vcpu(0, seed)),
            scope.spawn(move || run.vcpu(1, seed + 1)),
            scope.spawn(move || run.disturb(seed + 2)),
        ];
        std::thread::sleep(Duration::from_millis(10));
        worker.set_memslot(spec(true)).unwrap();
        if !config.initially_set {
            run.copy_pages(0..PAGES);
        }
        let start = Instant::now();
        let mut rounds = 0;
        while start.elapsed() < Duration::from_millis(150)
            || (!enough(&guest) && start.elapsed() < Duration::from_secs(60))
        {
            if rounds % 3 == 1 && config.ring.is_none() {
                run.epoch(&mut worker);
            }
            run.round(&mut worker, rounds % 3 == 0);
            rounds += 1;
        }
        run.stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // The vCPUs are stopped: the last round.
        run.round(&mut worker, false);
        run.round(&mut worker, false);
        check_mapped(&mut worker);
    });
    for page in 0..PAGES {
        let there = machine.read_host(ram.hpa(page));
        let copied = run.copy[page as usize].load(Ordering::Relaxed);
        assert_eq!(copied, there, "page {page}, seed {seed}, {config:?}");
        assert_ne!(there, u64::MAX, "page {page} was written where it is no more");
    }
    assert!(enough(&guest), "{:?}", guest.stats().totals);
}

/// While no thread works on the guest, the counters agree with a walk for each size.
fn check_mapped<F: Format, H: Host, B: Backing>(worker: &mut Worker<'_, F, H, B>) {
    let walked = worker.leaves_by_size().into_iter();
    let walked: Vec<_> = walked.map(|(size, count)| (size, count * size.bytes())).collect();
    assert_eq!(worker.guest().stats().mapped.by_size(), walked);
}

/// Returns whether enough was logged for a meaningful comparison, even on a slow machine.
fn enough<F: Format, H: Host, B: Backing>(guest: &Guest<'_, F, H, B>) -> bool {
    let totals = guest.stats().totals;
    totals.log_cleared_pages + totals.ring_resets > 100
}

fn configs(hardware: bool) -> Vec<Config> {
    let config = Config::new(2, PageSize::SIZE_2M);
    let eager_split = Some(PageSize::SIZE_4K);
    let mut all = vec![
        config,
        Config { eager_split, execute_huge: ExecuteHuge::Split, ..config },
        Config { initially_set: true, execute_huge: ExecuteHuge::Zap, ..config },
        Config { ring: Some(128), ..config },
    ];
    if hardware {
        all.push(Config { logging: Logging::Hardware, ..config });
        all.push(Config { logging: Logging::Hardware, initially_set: true, ..config });
    }
    all
}

/// The guest always uses its caches.
const FORCED: Arm = Arm { forced_write_back: true, ..Arm::new(12, 39) };

fn rounds() -> u64 {
    std::env::var("ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn threads_on_intel_lose_no_write() {
    for seed in crate::seed::seeds(rounds()) {
        configs(true)
            .into_iter()
            .for_each(|config| run(Ept1G::default(), Ept::default(), config, seed));
    }
}

#[test]
fn threads_on_arm_lose_no_write() {
    for seed in crate::seed::seeds(rounds()) {
        for config in configs(false) {
            let arm = Arm { hardware_dirty: false, ..FORCED };
            let format = Arm64 { forced_write_back: true, ..Arm64::default() };
            run::<Arm64K4, _>(format, arm, config, seed);
        }
    }
}

#[test]
fn threads_on_arm_with_hardware_dirty_state_lose_no_write() {
    for seed in crate::seed::seeds(rounds()) {
        for config in configs(true) {
            let format =
                Arm64K4 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() };
            run(format, Arm { bbm: 3, ..FORCED }, config, seed);
        }
    }
}

#[cfg(feature = "every-format")]
mod every {
    use super::*;
    use slat::format::{arm64::Arm64Lpa2K4, npt::Npt1G, power::PowerK4, riscv::RiscV as GStage};
    use slat_sim::{Npt, Power, RiscV};

    fn all<F: Format, A: Arch + Copy>(format: F, arch: A) {
        for seed in crate::seed::seeds(rounds()) {
            configs(true).into_iter().for_each(|config| run(format, arch, config, seed));
        }
    }

    #[test]
    fn threads_on_arm_lpa2_lose_no_write() {
        let format = Arm64 { hardware_dirty: true, forced_write_back: true, ..Arm64::default() };
        all::<Arm64Lpa2K4, _>(format, FORCED.with_lpa2());
    }

    #[test]
    fn threads_on_amd_lose_no_write() {
        all(
            Npt1G { output_bits: Npt::default().physical_bits, ..Default::default() },
            Npt::default(),
        );
    }

    #[test]
    fn threads_on_riscv_lose_no_write() {
        all(GStage::default(), RiscV::default());
    }

    #[test]
    fn threads_on_riscv_without_svadu_lose_no_write() {
        all(GStage::default(), RiscV { hardware_marks: false, ..RiscV::default() });
    }

    #[test]
    fn threads_on_radix_lose_no_write() {
        all(PowerK4 { output_bits: 51 }, Power::new(12));
    }

    #[test]
    fn threads_on_radix_where_software_sets_r_and_c_lose_no_write() {
        all(PowerK4 { output_bits: 51 }, Power { sets: false, ..Power::new(12) });
    }
}

/// Memslots are inserted and deleted while vCPUs fault, a scan ages, and the host invalidates
/// pages.
#[test]
fn a_guest_is_torn_down_during_faults_ageing_and_invalidations() {
    let machine = FastMachine::new(Ept::default(), 2, 2 * BYTES, 64 << 20).unwrap();
    let ram = Ram {
        base: machine.memory_base().0,
        block: PageSize::SIZE_2M,
        moved: (0..PAGES).map(|_| AtomicBool::new(false)).collect(),
        moving: RwLock::new(()),
    };
    let config = Config { execute_huge: ExecuteHuge::Split, ..Config::new(2, PageSize::SIZE_2M) };
    let guest = Guest::new(Ept1G::default(), VMID, 39, &machine, &ram, config).unwrap();
    let run = Run {
        machine: &machine,
        ram: &ram,
        guest: &guest,
        stop: AtomicBool::new(false),
        stamp: AtomicU64::new(1),
        copy: (0..PAGES).map(|_| AtomicU64::new(0)).collect(),
        copying: Mutex::new(()),
        epochs: Mutex::new(Epochs::new(MemslotId(0))),
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads = [
            scope.spawn(move || run.vcpu(0, 1)),
            scope.spawn(move || run.vcpu(1, 2)),
            scope.spawn(move || run.disturb(3)),
        ];
        let mut worker = Worker::new(&guest).unwrap();
        for round in 0..40 {
            assert_eq!(worker.set_memslot(spec(round % 2 == 1)), Ok(MemslotChange::Inserted));
            std::thread::sleep(Duration::from_millis(3));
            worker.set_memslot(MemslotSpec { bytes: 0, ..spec(false) }).unwrap();
            let left: u64 = worker.leaves_by_size().iter().map(|&(_, count)| count).sum();
            assert_eq!(left, 0, "leaves of a memslot that is gone");
        }
        run.stop.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        check_mapped(&mut worker);
    });
    // SAFETY: no CPU is left: they were dropped with their threads.
    unsafe { guest.destroy() };
}
