//! A machine, a pool, a swap that can fail, and a guest that checks what it reads.

use slat::format::arm64::{Arm64, Arm64K4};
use slat::format::ept::Ept1G;
use slat::{Access, Format, Gpa, Hpa, PageSize, Vmid};
use slat_guest::*;
use slat_reclaim::*;
use slat_sim::fast::{FastCpu, FastMachine};
use slat_sim::{Arch, Arm};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};

pub const VMID: Vmid = Vmid(5);
pub const BASE: u64 = 1 << 32;
pub const HOST: u64 = 1 << 40;
pub const VCPUS: u16 = 2;

/// The machine's memory.
pub struct Mem<'m, A: Arch>(pub &'m FastMachine<A>);

impl<A: Arch> Ram for Mem<'_, A> {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        self.0.copy_out(hpa, page);
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        self.0.copy_in(hpa, page);
    }
}

/// Swap in memory, which fails when its flags say so.
pub struct Flaky {
    /// Bytes of a page.
    page: u64,
    pages: Vec<Mutex<Vec<u8>>>,
    pub fail_writes: AtomicBool,
    pub fail_reads: AtomicBool,
    /// It can neither punch holes nor write zeroes.
    pub fail_forgets: AtomicBool,
    /// It takes long to forget more than 50 slots at once; `forgetting` is set once it does.
    pub slow_forgets: AtomicBool,
    pub forgetting: AtomicBool,
    /// The error of writes that fail: 0 for a full disk.
    pub errno: AtomicI32,
    pub writes: AtomicU64,
}

impl Flaky {
    pub fn new(slots: u32, page: PageSize) -> Self {
        Self {
            page: page.bytes(),
            // All memory for pages is allocated at the start.
            pages: (0..slots)
                .map(|_| Mutex::new(Vec::with_capacity(page.bytes() as usize)))
                .collect(),
            fail_writes: AtomicBool::new(false),
            fail_reads: AtomicBool::new(false),
            fail_forgets: AtomicBool::new(false),
            slow_forgets: AtomicBool::new(false),
            forgetting: AtomicBool::new(false),
            errno: AtomicI32::new(0),
            writes: AtomicU64::new(0),
        }
    }

    fn error(&self) -> SwapError {
        match self.errno.load(Relaxed) {
            0 => SwapError::Full,
            errno => SwapError::System { errno },
        }
    }

    /// Returns the number of slots that have content, used or not.
    pub fn holds(&self) -> usize {
        self.pages.iter().filter(|page| !page.lock().unwrap().is_empty()).count()
    }
}

impl Swap for Flaky {
    fn slots(&self) -> u32 {
        self.pages.len() as u32
    }

    fn page(&self) -> u64 {
        self.page
    }

    fn write(&self, slot: u32, page: &[u8]) -> Result<(), SwapError> {
        let mut kept = self.pages[slot as usize].try_lock().expect("a slot in use was written");
        kept.clear();
        kept.extend_from_slice(page);
        if self.fail_writes.load(Relaxed) {
            // After a failure, the content of the slot is unspecified.
            kept.fill(0xee);
            return Err(self.error());
        }
        self.writes.fetch_add(1, Relaxed);
        Ok(())
    }

    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), SwapError> {
        let kept = self.pages[slot as usize].try_lock().expect("a slot in use was read");
        assert!(!kept.is_empty(), "slot {slot} was forgotten, and is read");
        page.copy_from_slice(&kept);
        if self.fail_reads.load(Relaxed) {
            page.fill(0xdd);
            return Err(SwapError::Short { bytes: 7 });
        }
        Ok(())
    }

    fn forget(&self, slots: std::ops::Range<u32>) -> Result<(), SwapError> {
        if self.fail_forgets.load(Relaxed) {
            return Err(SwapError::System { errno: 5 });
        }
        if self.slow_forgets.load(Relaxed) && slots.len() > 50 {
            self.forgetting.store(true, Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        for slot in slots {
            self.pages[slot as usize].try_lock().expect("a slot in use was forgotten").clear();
        }
        Ok(())
    }
}

pub type TestMemory<'h, A> = PagedMemory<'h, Mem<'h, A>, &'h Flaky>;
pub type TheGuest<'h, F, A> = Guest<'h, F, FastMachine<A>, &'h TestMemory<'h, A>>;
pub type TheWorker<'w, 'h, F, A> = Worker<'w, F, FastMachine<A>, &'h TestMemory<'h, A>>;

/// Setup of a guest.
#[derive(Clone, Copy)]
pub struct Setup {
    pub guest: slat_guest::Config,
    pub reclaim: slat_reclaim::Config,
    /// Pages of the guest, of memory, of swap.
    pub pages: u64,
    pub frames: u64,
    pub swap: u32,
}

impl Setup {
    pub fn new(pages: u64, frames: u64) -> Self {
        Self {
            guest: slat_guest::Config::new(VCPUS, PageSize::SIZE_2M),
            reclaim: slat_reclaim::Config::new(frames as u32),
            pages,
            frames,
            swap: pages as u32 + 64,
        }
    }

    /// Calls `work` with such a guest.
    pub fn run<F: Format, A: Arch + Copy>(
        &self,
        format: F,
        arch: A,
        work: impl for<'h> FnOnce(&Bench<'h, F, A>),
    ) {
        let (page, block) = (F::size(0), F::size(1));
        let bytes = |pages: u64| pages << page.shift();
        let machine = FastMachine::new(arch, VCPUS.into(), bytes(self.frames), 32 << 20).unwrap();
        let swap = Flaky::new(self.swap, page);
        let layout = Layout { base: machine.memory_base(), bytes: bytes(self.frames), page, block };
        let pool = Pool::new(Mem(&machine), layout, &swap).unwrap();
        let paged = PagedMemory::new(&pool, Hva(HOST), bytes(self.pages), self.reclaim, 0).unwrap();
        let config = slat_guest::Config { largest: block, ..self.guest };
        let guest = Guest::new(format, VMID, 39, &machine, &paged, config).unwrap();
        let zeroes = || (0..self.pages).map(|_| AtomicU64::new(0)).collect();
        let (stamps, device) = (zeroes(), zeroes());
        let stop = AtomicBool::new(false);
        let (machine, pool, swap, paged) = (&machine, &pool, &swap, &paged);
        let (page, guest) = (page.bytes(), &guest);
        let bench =
            Bench { machine, pool, swap, paged, guest, stamps, device, stop, setup: self, page };
        Worker::new(guest).unwrap().set_memslot(bench.slot(false)).unwrap();
        work(&bench);
        bench.check_accounts();
    }
}

pub const fn slot(bytes: u64, log_dirty: bool) -> MemslotSpec {
    MemslotSpec { log_dirty, ..MemslotSpec::new(MemslotId(0), Gpa(BASE), bytes, Hva(HOST)) }
}

/// A guest, and what it must find in its pages.
pub struct Bench<'h, F: Format, A: Arch> {
    pub machine: &'h FastMachine<A>,
    pub pool: &'h Pool<Mem<'h, A>, &'h Flaky>,
    pub swap: &'h Flaky,
    pub paged: &'h TestMemory<'h, A>,
    pub guest: &'h TheGuest<'h, F, A>,
    /// The last write to each page by the one vCPU that writes it.
    pub stamps: Vec<AtomicU64>,
    /// The last write to each page by a device, at another place in it.
    pub device: Vec<AtomicU64>,
    pub stop: AtomicBool,
    pub setup: &'h Setup,
    /// Bytes of a page.
    pub page: u64,
}

/// Where a device writes in a page.
pub const DEVICE: u64 = 1024;

pub const fn stamp(page: u64, version: u64) -> u64 {
    if version == 0 { 0 } else { page << 40 | version }
}

impl<F: Format, A: Arch> Bench<'_, F, A> {
    pub const fn host(&self, page: u64) -> Hva {
        Hva(HOST + page * self.page)
    }

    pub const fn hosts(&self, page: u64, pages: u64) -> HvaRange {
        HvaRange { start: self.host(page), bytes: pages * self.page }
    }

    pub const fn slot(&self, log_dirty: bool) -> MemslotSpec {
        slot(self.setup.pages * self.page, log_dirty)
    }

    /// Returns a buffer of the size of a page.
    pub fn room_for_a_page(&self) -> Vec<u8> {
        vec![0; self.page as usize]
    }

    /// Returns the places of stamps in a page.
    pub const fn places(&self) -> [u64; 3] {
        [0, 2048, self.page - 8]
    }

    /// Checks the accounts while no thread moves a page.
    pub fn check_accounts(&self) {
        check_accounts(self.pool, &[self.paged]);
    }
}

/// Checks, while no thread moves a page of these guests, which share a pool, that every frame and
/// every slot of swap belongs to one page or is free, and that all accounts agree.
pub fn check_accounts<M: Ram, S: Swap>(pool: &Pool<M, S>, guests: &[&PagedMemory<'_, M, S>]) {
    let (mut here, mut slots) = (0, 0);
    for guest in guests {
        let Places { nowhere: _, here: alone, copied, moving, away } = guest.places();
        assert_eq!(moving, 0, "a page is on its way for ever");
        assert_eq!(alone + copied, guest.resident(), "pages in memory");
        assert_eq!(copied + away, guest.swapped(), "slots of swap");
        here += alone + copied;
        slots += copied + away;
    }
    assert_eq!(pool.free() + here, pool.total(), "frames");
    assert_eq!(pool.swapped(), slots, "slots of all");
}

/// A vCPU with its CPU, which handles its own faults.
pub struct Runner<'w, 'h, F: Format, A: Arch> {
    bench: &'w Bench<'h, F, A>,
    vcpu: Vcpu<'w, F, FastMachine<A>, &'h TestMemory<'h, A>>,
    cpu: FastCpu<'h, A>,
}

impl<'w, 'h, F: Format, A: Arch> Runner<'w, 'h, F, A> {
    pub fn new(bench: &'w Bench<'h, F, A>, id: u16) -> Self {
        let vcpu = Vcpu::new(bench.guest, id).unwrap();
        let mut cpu = bench.machine.cpu(id.into()).unwrap();
        cpu.load(VMID, vcpu.root());
        Self { bench, vcpu, cpu }
    }

    /// Returns the vCPU's worker, for other operations.
    pub const fn worker(&mut self) -> &mut TheWorker<'w, 'h, F, A> {
        self.vcpu.worker()
    }

    /// Returns `None` if the page does not come in, and the run is to stop.
    fn access<R>(
        &mut self,
        page: u64,
        access: Access,
        mut what: impl FnMut(&mut FastCpu<'h, A>) -> Option<R>,
    ) -> Option<R> {
        loop {
            if let Some(result) = what(&mut self.cpu) {
                return Some(result);
            }
            match self.vcpu.fault(Gpa(BASE + page * self.bench.page), access) {
                Outcome::Retry(Retry::Absent(_)) => {
                    let result =
                        Pager::new(self.vcpu.worker()).bring_in(self.bench.host(page), access);
                    if result.is_err() {
                        if self.bench.stop.load(Relaxed) {
                            return None;
                        }
                        std::thread::yield_now();
                    }
                }
                Outcome::Retry(_) | Outcome::RingFull => std::thread::yield_now(),
                Outcome::Refused(reason) => panic!("{reason:?}"),
                Outcome::Mmio => panic!("the slot is gone"),
                _ => {}
            }
        }
    }

    /// Reads a page of this vCPU, and checks that all its stamps are the last ones.
    pub fn check(&mut self, page: u64) {
        let wanted = stamp(page, self.bench.stamps[page as usize].load(Relaxed));
        for place in self.bench.places() {
            let gpa = BASE + page * self.bench.page + place;
            let Some(found) = self.access(page, Access::Read, |cpu| cpu.read(gpa).ok()) else {
                return;
            };
            assert_eq!(found, wanted, "page {page} at {place}");
        }
    }

    /// Reads a page of any vCPU, and checks that it does not have another page's content.
    pub fn peek(&mut self, page: u64) {
        let gpa = BASE + page * self.bench.page + self.bench.places()[1];
        let found = self.access(page, Access::Read, |cpu| cpu.read(gpa).ok()).unwrap_or(0);
        assert!(found == 0 || found >> 40 == page, "page {page} has {found:#x}");
    }

    /// Writes a page of this vCPU.
    pub fn write(&mut self, page: u64) {
        let version = self.bench.stamps[page as usize].load(Relaxed) + 1;
        for (index, place) in self.bench.places().into_iter().enumerate() {
            let gpa = BASE + page * self.bench.page + place;
            let value = stamp(page, version);
            let mut write = || self.access(page, Access::Write, |cpu| cpu.write(gpa, value).ok());
            while write().is_none() {
                // A page whose first stamp was written is finished; otherwise it is left out.
                if index == 0 {
                    return;
                }
            }
        }
        self.bench.stamps[page as usize].store(version, Relaxed);
    }
}

/// Runs `$check` on each format that differs in its faults or in accessed and dirty marks.
macro_rules! on_all_formats {
    ($name:ident, $check:path) => {
        mod $name {
            $crate::fixture::on_all_formats!($check: ept Intel, arm ArmBreaks,
                arm_without_hardware_dirty_state ArmPlain);
            #[cfg(feature = "every-format")]
            $crate::fixture::on_all_formats!($check: arm_lpa2 ArmLpa2, arm_16k Arm16K, npt Amd,
                riscv Hart, riscv_without_svadu HartSvade, radix_4k Radix,
                radix_4k_where_software_sets_r_and_c RadixAsks, radix_64k Radix64K);
        }
    };
    ($check:path: $($test:ident $Case:ident),*) => {$(
        #[test]
        fn $test() {
            use crate::cases::{Case, $Case};
            $check($Case::format(), *$Case::machine(1).arch());
        }
    )*};
}
pub(crate) use on_all_formats;

pub fn ept() -> Ept1G {
    Ept1G::default()
}

pub fn arm(hardware_dirty: bool) -> (Arm64K4, Arm) {
    let format = Arm64 { hardware_dirty, forced_write_back: true, ..Arm64K4::default() };
    (format, Arm { hardware_dirty, forced_write_back: true, ..Arm::new(12, 39) })
}
