//! Random histories of two vCPUs, reclaim and ageing, a host that takes memory back and whose
//! devices use it, and a migration that copies from the dirty log. Each page has a stamp, which
//! every access checks.

use crate::cases::*;
use crate::on_all;
use crate::world::World;
use slat::{Access, AgeOptions, Format, Gpa, GpaRange, Hpa, TableBits};
use slat_guest::*;
use slat_reclaim::*;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

type TheWorld<C> = World<<C as Case>::A>;
type Memory<'h, C> = PagedMemory<'h, &'h TheWorld<C>, &'h TheWorld<C>>;
type Worker<'w, 'h, C> = slat_guest::Worker<'w, <C as Case>::F, TheWorld<C>, &'h Memory<'h, C>>;
type Vcpu<'w, 'h, C> = slat_guest::Vcpu<'w, <C as Case>::F, TheWorld<C>, &'h Memory<'h, C>>;

const VCPUS: usize = 2;
/// The vCPUs, the thread that reclaims, the host, and a migration.
const THREADS: usize = VCPUS + 3;
/// Pages on each side of a table's end that are in use.
const NEAR: u64 = 10;

/// A guest, and how it is used.
struct Bench<'h, C: Case> {
    world: &'h TheWorld<C>,
    pool: &'h Pool<&'h TheWorld<C>, &'h TheWorld<C>>,
    paged: &'h Memory<'h, C>,
    guest: &'h Guest<'h, C::F, TheWorld<C>, &'h Memory<'h, C>>,
    page: u64,
    pages: u64,
    /// The pages that are used.
    used: std::ops::Range<u64>,
    steps: usize,
    /// Pages that are given up at a time, at most.
    most: u32,
    /// Blocks are so small that walks collapse them again: enough of a block is used between walks.
    small_blocks: bool,
    seed: u64,
    /// vCPUs that have not finished.
    running: AtomicUsize,
    /// The pages that the migration has copied.
    copies: Mutex<Vec<u64>>,
}

impl<'h, C: Case> Bench<'h, C> {
    fn host(&self, page: u64, pages: u64) -> HvaRange {
        HvaRange { start: Hva(HOST + page * self.page), bytes: pages * self.page }
    }

    fn range(&self, page: u64, pages: u64) -> GpaRange {
        GpaRange::new(Gpa(BASE + page * self.page), pages * self.page).unwrap()
    }

    fn rng(&self, thread: usize) -> fastrand::Rng {
        fastrand::Rng::with_seed(self.seed << 8 | thread as u64)
    }

    fn some(&self, rng: &mut fastrand::Rng) -> u64 {
        match self.small_blocks && rng.u8(..8) != 0 {
            true => rng.u64(..self.used.end / 2),
            false => rng.u64(self.used.clone()),
        }
    }

    /// Returns a range of pages, which is short most of the time.
    fn few(&self, rng: &mut fastrand::Rng) -> (u64, u64) {
        let page = self.some(rng);
        (page, rng.u64(1..=8).min(self.used.end - page))
    }

    fn slot(&self, log_dirty: bool) -> MemslotSpec {
        MemslotSpec { log_dirty, ..memslot(self.pages * self.page) }
    }

    fn goes_on(&self) -> bool {
        self.world.turns.moment();
        !self.world.turns.failed()
    }

    /// Returns whether vCPUs still run.
    fn is_used(&self) -> bool {
        self.goes_on() && self.running.load(Relaxed) != 0
    }

    /// Does an access of the guest, with its faults; returns false if the page does not come in
    /// because swap fails.
    fn access(&self, vcpu: &mut Vcpu<'_, 'h, C>, page: u64, access: Access) -> bool {
        let cpu = self.world.machine.cpu(vcpu.id() as usize);
        let used = match access {
            Access::Read => slat_sim::Access::Read,
            Access::Write => slat_sim::Access::Write,
            _ => slat_sim::Access::Execute,
        };
        let gpa = BASE + page * self.page;
        for _ in 0..10_000 {
            if !self.goes_on() {
                return false;
            }
            if let Ok(hpa) = cpu.access(gpa, used) {
                match access {
                    Access::Write => self.world.write(page, hpa),
                    _ => self.world.read(page, hpa, "a vCPU"),
                }
                return true;
            }
            match vcpu.fault(Gpa(gpa), access) {
                Outcome::Retry(Retry::Absent(_)) => {
                    let host = self.host(page, 1).start;
                    match Pager::new(vcpu.worker()).bring_in(host, access) {
                        Ok(()) => {}
                        Err(
                            PageError::Read { .. }
                            | PageError::NoRoom {
                                reason: ReclaimError::Swap(_) | ReclaimError::Quota { .. },
                            },
                        ) => return false,
                        Err(error) => self.world.fail(format!("page {page}: {error}")),
                    }
                }
                outcome @ (Outcome::Mmio | Outcome::Refused(_) | Outcome::RingFull) => {
                    self.world.fail(format!("{outcome:?} at page {page}"));
                }
                _ => {}
            }
        }
        self.world.fail(format!("page {page} faults without end"));
        false
    }

    fn vcpu(&self, id: usize) {
        let mut rng = self.rng(id);
        let mut vcpu = Vcpu::<C>::new(self.guest, id as u16).unwrap();
        self.world.machine.here(id);
        for _ in 0..self.steps {
            let page = self.some(&mut rng);
            let access =
                [Access::Read, Access::Read, Access::Write, Access::Write, Access::Execute]
                    [rng.usize(..5)];
            self.access(&mut vcpu, page, access);
        }
        self.running.fetch_sub(1, Relaxed);
    }

    fn reclaim(&self) {
        let mut rng = self.rng(VCPUS);
        let mut worker = Worker::<C>::new(self.guest).unwrap();
        let walks = if self.small_blocks { 3 } else { 1 };
        while self.is_used() {
            match rng.u8(..8) {
                n if n < walks => _ = Pager::new(&mut worker).walk(),
                0..5 => _ = Pager::new(&mut worker).reclaim(rng.u32(1..self.most)),
                5 => {
                    let skip = [TableBits::Ignored, TableBits::Exact][rng.usize(..2)];
                    let how = AgeOptions { clear: true, table_bits: skip, flush_tlb: rng.bool() };
                    let range = self.range(0, self.pages);
                    let mut young = vec![0; self.pages.div_ceil(64) as usize];
                    worker.age(range, None, &mut young, how).unwrap();
                }
                6 => self.pool.resume(),
                _ => _ = self.guest.reclaim(),
            }
            if self.small_blocks {
                self.pauses(300, &mut rng);
            }
        }
    }

    /// The host takes memory and gives it back, its devices use it, and the guest's balloon
    /// discards it.
    fn host_side(&self) {
        let mut rng = self.rng(VCPUS + 1);
        let mut worker = Worker::<C>::new(self.guest).unwrap();
        let world = self.world;
        while self.is_used() {
            let (page, count) = self.few(&mut rng);
            match rng.u8(..12) {
                0..4 => {
                    let held = worker.invalidate(self.host(page, count), |_| {});
                    // No thread can write the range until this ends.
                    let range = self.range(page, count);
                    world.machine.protect(VMID, range);
                    (0..rng.u32(..20)).for_each(|_| world.turns.moment());
                    world.machine.unprotect(VMID, range);
                    drop(held);
                }
                4..9 => {
                    let write = rng.bool();
                    let touch = |hpa| {
                        world.read(page, hpa, "a device");
                        (0..rng.u32(..40)).for_each(|_| world.turns.moment());
                        world.read(page, hpa, "a device, again,");
                        if write {
                            world.write(page, hpa);
                        }
                    };
                    let host = self.host(page, 1).start;
                    let _ = Pager::new(&mut worker).with_page(host, write, touch);
                }
                9 => {
                    let host = self.host(page, count);
                    world.discards(page..page + count, || Pager::new(&mut worker).discard(host));
                }
                _ => _ = self.copy(&mut worker, page),
            }
        }
    }

    fn copy(&self, worker: &mut Worker<'_, 'h, C>, page: u64) -> Result<u64, PageError> {
        let host = self.host(page, 1).start;
        self.world.copies(page, |to| Pager::new(worker).copy(host, to))
    }

    /// Sends these pages, as the migration.
    fn send(&self, worker: &mut Worker<'_, 'h, C>, pages: impl Iterator<Item = u64>) {
        for page in pages {
            while !self.world.turns.failed() {
                if let Ok(found) = self.copy(worker, page) {
                    self.copies.lock().unwrap()[page as usize] = found;
                    break;
                }
            }
        }
    }

    fn begins_to_log(&self, worker: &mut Worker<'_, 'h, C>) {
        worker.set_memslot(self.slot(true)).unwrap();
        match self.guest.config().initially_set {
            // The whole range is in the log.
            true => self.copies.lock().unwrap().fill(u64::MAX),
            false => self.send(worker, self.used.clone()),
        }
    }

    fn set(bits: &[u64], first: u64) -> impl Iterator<Item = u64> {
        let pages = 0..bits.len() as u64 * 64;
        let pages = pages.filter(|page| bits[*page as usize / 64] >> (page % 64) & 1 == 1);
        pages.map(move |page| first + page)
    }

    fn take(&self, worker: &mut Worker<'_, 'h, C>) {
        let mut bits = vec![0; self.pages.div_ceil(64) as usize];
        match worker.take_log(MemslotId(0), &mut bits) {
            Ok(_) | Err(LogError::Contended { .. }) => {}
            Err(error) => self.world.fail(format!("the log: {error}")),
        }
        let used = |page: &u64| self.used.contains(page);
        self.send(worker, Self::set(&bits, 0).filter(used));
    }

    /// Reads the log, and clears a part of it.
    fn clear(&self, worker: &mut Worker<'_, 'h, C>, rng: &mut fastrand::Rng) {
        let mut bits = vec![0; self.pages.div_ceil(64) as usize];
        if worker.read_log(MemslotId(0), &mut bits).is_err() {
            return;
        }
        let first = rng.usize(..bits.len());
        let mut some = bits[first..].to_vec();
        some.iter_mut().for_each(|word| *word &= rng.u64(..));
        let begin = first as u64 * 64;
        if worker.clear_log(MemslotId(0), begin, self.pages - begin, &some).is_ok() {
            let used = |page: &u64| self.used.contains(page);
            self.send(worker, Self::set(&some, begin).filter(used));
        }
    }

    /// Lets other threads run for a while, unless the vCPUs have finished.
    fn pauses(&self, most: u32, rng: &mut fastrand::Rng) {
        let _ = (0..rng.u32(..most)).all(|_| self.is_used());
    }

    /// Runs migrations that are given up after a while, except the last one.
    fn migrate(&self) {
        let mut rng = self.rng(VCPUS + 2);
        let mut worker = Worker::<C>::new(self.guest).unwrap();
        loop {
            // Without a log there are blocks, and a read maps a writable page as writable.
            self.pauses(3000, &mut rng);
            self.begins_to_log(&mut worker);
            for _ in 0..rng.u32(..8) {
                match rng.u8(..2) {
                    0 => self.clear(&mut worker, &mut rng),
                    _ => self.take(&mut worker),
                }
                self.pauses(200, &mut rng);
            }
            if !self.is_used() {
                return;
            }
            worker.set_memslot(self.slot(false)).unwrap();
        }
    }

    /// Called while no thread moves a page: every frame and every slot of swap belongs to one page,
    /// or is free.
    fn adds_up(&self) {
        let Places { nowhere, here, copied, moving, away } = self.paged.places();
        assert_eq!(moving, 0, "a page is on its way for ever");
        assert_eq!(u64::from(nowhere + here + copied + away), self.pages, "pages");
        assert_eq!(here + copied, self.paged.resident(), "pages in memory");
        assert_eq!(copied + away, self.paged.swapped(), "slots of the guest");
        assert_eq!(copied + away, self.pool.swapped(), "slots");
        assert_eq!(self.pool.free() + here + copied, self.pool.total(), "frames");
    }

    /// Called when all threads have stopped: no page was lost, in memory or in swap.
    fn ends(&self) {
        self.adds_up();
        self.world.swap_fails(None);
        self.pool.resume();
        self.paged.set_swap(u32::MAX);
        let mut worker = Worker::<C>::new(self.guest).unwrap();
        self.take(&mut worker);
        for page in self.used.clone() {
            let found = self.copy(&mut worker, page).unwrap();
            self.world.is(page, found, || "the last copy".to_owned());
            let sent = self.copies.lock().unwrap()[page as usize];
            if found != sent {
                self.world.fail(format!("page {page} was sent as {sent:#x}, and is {found:#x}"));
            }
        }
        let mut vcpu = Vcpu::<C>::new(self.guest, 0).unwrap();
        self.world.machine.here(0);
        for page in self.used.clone().chain(self.used.clone()) {
            if !self.access(&mut vcpu, page, Access::Read) {
                return self.world.fail(format!("page {page} does not come in"));
            }
        }
        self.world.machine.claim_fresh(VMID, self.range(0, self.pages));
        self.adds_up();
        Pager::new(&mut worker).discard(self.host(0, self.pages));
        self.adds_up();
        let left = (self.pool.free(), self.pool.swapped(), self.world.holds());
        assert_eq!(left, (self.pool.total(), 0, 0), "frames and swap");
    }
}

/// Runs one history; returns the statistics of its reclaim.
fn history<C: Case>(seed: u64, huge: bool) -> slat_reclaim::Stats {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (small, large) = (C::F::size(0), C::F::size(1));
    let page = small.bytes();
    let table = large.bytes() / page;
    let near = table - NEAR..table + NEAR;
    // Two blocks. If they are small, all pages of both are used; memory has room for both, or for
    // one and a part of the other.
    let all_used = huge && table <= 64;
    let (pages, used, limit, frames) = match huge {
        true if all_used => (2 * table, 0..2 * table, table + table / 2 * rng.u64(1..3), 3 * table),
        true => (2 * table, near, table + NEAR, 2 * table),
        false => (table + NEAR, near, 4 + rng.u64(..12), 4 + rng.u64(..14)),
    };
    let reclaim = slat_reclaim::Config {
        policy: [Policy::Generations, Policy::Generations, Policy::TwoLists][rng.usize(..3)],
        look_around: rng.bool(),
        frequency: rng.bool(),
        window: [1, 64, 1 << 18][rng.usize(usize::from(huge)..3)],
        table_bits: [TableBits::Ignored, TableBits::Exact][rng.usize(..2)],
        fresh: rng.bool(),
        huge,
        batch: [1, 3, 8][rng.usize(..3)],
        // The pages that are used hardly fit into memory and swap, or do not fit.
        swap: if huge { u32::MAX } else { [u32::MAX, 14 + rng.u32(..8)][rng.usize(..2)] },
        ..slat_reclaim::Config::new(limit as u32)
    };
    let logging =
        [Logging::Protect, Logging::Hardware][usize::from(C::HARDWARE_DIRTY && rng.bool())];
    let guest = slat_guest::Config {
        logging,
        initially_set: rng.bool(),
        eager_split: [None, Some(small)][rng.usize(..2)],
        contiguous: rng.bool(),
        ..slat_guest::Config::new(VCPUS as u16, large)
    };
    let told = format!("seed {seed}: {reclaim:?} {guest:?}");

    let machine = C::machine(VCPUS);
    let machine = if seed.is_multiple_of(3) { machine } else { machine.random(seed) };
    let base = C::FIRST_HPA.next_multiple_of(large.bytes());
    (0..frames).for_each(|frame| machine.give(Hpa(base + frame * page), page));
    let swap = pages as u32 + rng.u32(..4);
    let world = World::new(machine, THREADS, seed, page, pages, swap);
    let layout = Layout { base: Hpa(base), bytes: frames * page, page: small, block: large };
    let pool = Pool::new(&world, layout, &world).unwrap();
    let paged = PagedMemory::new(&pool, Hva(HOST), pages * page, reclaim, 0).unwrap();
    let guest = Guest::new(C::format(), VMID, BITS, &world, &paged, guest).unwrap();
    let copies = Mutex::new(vec![0; pages as usize]);
    let bench = &Bench::<C> {
        world: &world,
        pool: &pool,
        paged: &paged,
        guest: &guest,
        page,
        pages,
        used,
        steps: if all_used { 1000 } else { 120 },
        most: if huge && !all_used { 64 } else { 8 },
        small_blocks: all_used,
        seed,
        running: AtomicUsize::new(VCPUS),
        copies,
    };
    Worker::<C>::new(&guest).unwrap().set_memslot(bench.slot(false)).unwrap();
    for cpu in 0..VCPUS {
        world.machine.cpu(cpu).load(VMID, guest.tables().root());
    }
    let fails: [&[_]; 2] = [&[None, Some(10), Some(3)], &[Some(1), Some(3)]];
    world.swap_fails(rng.choice(fails[usize::from(huge && !all_used)].iter().copied()).flatten());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                bench.world.turns.run(thread, || match thread {
                    VCPUS => bench.reclaim(),
                    thread if thread == VCPUS + 1 => bench.host_side(),
                    thread if thread == VCPUS + 2 => bench.migrate(),
                    thread => bench.vcpu(thread),
                });
            });
        }
    });
    if !world.turns.failed() {
        bench.ends();
    }
    let found: Vec<_> = world.machine.finish().iter().map(ToString::to_string).collect();
    assert!(
        found.is_empty() && !world.turns.failed(),
        "{told}: {:?} {found:#?}",
        world.turns.failure()
    );
    (0..VCPUS).for_each(|cpu| world.machine.cpu(cpu).unload());
    paged.stats()
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs `count` histories, or a multiple of that: `HISTORIES` divided by 60. `enough` says whether
/// they did what they are for, all together.
fn histories<C: Case>(huge: bool, count: u64, enough: impl Fn(&[slat_reclaim::Stats]) -> bool) {
    let count = number("HISTORIES").map_or(count, |many| (count * many / 60).max(1));
    let mut seeds = crate::seed::seeds(8 * count);
    let mut run = |many: u64| -> Vec<_> {
        seeds
            .by_ref()
            .take(many as usize)
            .map(|seed| {
                let run = std::panic::catch_unwind(|| history::<C>(seed, huge));
                run.unwrap_or_else(|_| panic!("run it again with SLAT_SEED={seed} HISTORIES=1"))
            })
            .collect()
    };
    let mut stats = run(count);
    // A few histories may do little, because of their seeds: then more are run.
    for _ in 1..8 {
        if !enough(&stats) {
            stats.extend(run(count));
        }
    }
    assert!(enough(&stats), "{stats:#?}");
}

/// Pages left and came back, some of them with a copy in swap that was still good.
fn pages_come_and_go(stats: &[slat_reclaim::Stats]) -> bool {
    stats.iter().all(|stats| stats.refaults > 10 && stats.clean > 0)
}

fn blocks_are_broken(stats: &[slat_reclaim::Stats]) -> bool {
    stats.iter().all(|stats| stats.huge > 0) && stats.iter().any(|stats| stats.split > 0)
}

#[cfg(feature = "every-format")]
fn blocks_come_and_go(stats: &[slat_reclaim::Stats]) -> bool {
    blocks_are_broken(stats) && stats.iter().any(|stats| stats.collapsed > 0)
}

on_all! {
    fn no_page_is_lost_or_seen_by_others<C: Case>() {
        histories::<C>(false, 3, pages_come_and_go);
    }

    fn no_page_of_a_block_is_lost_or_seen_by_others<C: Case>() {
        histories::<C>(true, 2, blocks_are_broken);
    }
}

#[cfg(feature = "every-format")]
mod larger_pages {
    use super::{blocks_come_and_go, histories, pages_come_and_go};
    use crate::cases::*;

    #[test]
    fn no_page_is_lost_or_seen_by_others_on_arm_16k() {
        histories::<Arm16K>(false, 4, pages_come_and_go);
    }

    #[test]
    fn no_page_is_lost_or_seen_by_others_on_arm_64k() {
        histories::<Arm64K>(false, 1, pages_come_and_go);
    }

    #[test]
    fn no_page_is_lost_or_seen_by_others_on_radix_64k() {
        histories::<Radix64K>(false, 4, pages_come_and_go);
    }

    /// Blocks of 32 pages, all of which are used, and collapse again.
    #[test]
    fn no_page_of_a_block_is_lost_or_seen_by_others_on_radix_64k() {
        histories::<Radix64K>(true, 5, blocks_come_and_go);
    }
}
