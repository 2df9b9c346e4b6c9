//! A host with frames and one piece of memory, and a guest on it.

use core::cell::{Cell, RefCell};
use core::ptr::NonNull;
use loom::sync::Mutex;
use loom::sync::atomic::{AtomicU64, Ordering};
use slat::format::tiny::{Tiny, TwoSlots};
use slat::{
    Access, BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, Maintenance, Memory,
    PageSize, Platform, Pte, ReaderSlot, Readers, Translation, Vmid,
};
use slat_guest::*;

pub const PAGE: u64 = 0x1000;
pub const BLOCK: u64 = 0x2000;
pub const BITS: u32 = 14;
pub const OLD: u64 = 0x10_0000;
pub const NEW: u64 = 0x20_0000;
pub const HOST: u64 = 0x4000;

/// Frames, which are not given back to the allocator within a model.
pub struct World {
    readers: Readers<[ReaderSlot; 3]>,
    pages: RefCell<Vec<Box<[Pte]>>>,
    bbm: BreakBeforeMake,
    /// Private bytes that were reported as mapped, and not as removed.
    pub assigned: Cell<u64>,
    /// Private blocks that were reported as split.
    pub split: Cell<u64>,
    /// Runs when the next piece of a memslot is done.
    piece: Cell<Option<Box<dyn FnOnce()>>>,
    /// What devices were told of each page: its memory, and the bits [`MAPPED`] and [`WRITE`].
    devices: [AtomicU64; 4],
    /// Page 0, which is at [`OLD`]: what the caches have, and what is past them.
    pub cached: AtomicU64,
    pub past_caches: Cell<u64>,
}

impl World {
    pub fn new(bbm: BreakBeforeMake) -> &'static Self {
        let readers = Readers::new([ReaderSlot::new(), ReaderSlot::new(), ReaderSlot::new()]);
        let (pages, assigned, split, piece) = Default::default();
        let (devices, past_caches, cached) =
            ([(); 4].map(|()| AtomicU64::new(0)), Cell::new(0), AtomicU64::new(0));
        Box::leak(Box::new(Self {
            readers,
            pages,
            bbm,
            assigned,
            split,
            piece,
            devices,
            past_caches,
            cached,
        }))
    }

    /// Returns what devices were told of a page, by its number: its memory, and whether they may
    /// write it.
    pub fn told(&self, page: usize) -> Option<(u64, bool)> {
        let told = self.devices[page].load(Ordering::Acquire);
        (told & MAPPED != 0).then_some((told & !(PAGE - 1), told & WRITE != 0))
    }

    pub fn after_a_piece(&self, work: impl FnOnce() + 'static) {
        self.piece.set(Some(Box::new(work)));
    }
}

// SAFETY: pages are boxed and stay; the readers are a field.
unsafe impl Platform for World {
    fn allocate(&self, _bytes: usize) -> Option<Frame> {
        let mut pages = self.pages.borrow_mut();
        pages.push(Box::new([Pte::new(0), Pte::new(0)]));
        // SAFETY: a new page, of two entries: tables of these formats have no more.
        unsafe { Frame::from_hpa(Hpa(pages.len() as u64 * PAGE)) }
    }

    unsafe fn free(&self, _frame: Frame, _bytes: usize) {}

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::from(&self.pages.borrow()[(table.0 / PAGE) as usize - 1][0])
    }

    fn publish(&self) {}

    fn invalidate(&self, _what: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, _bytes: u64, _what: Maintenance) {
        if memory == Hpa(OLD) {
            self.past_caches.set(self.cached.load(Ordering::Acquire));
        }
    }
}

const MAPPED: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;

impl DeviceTables for World {
    fn mapped(&self, leaf: DeviceLeaf) {
        assert_eq!(leaf.bytes, PAGE);
        let told = leaf.hpa.0 | MAPPED | if leaf.write { WRITE } else { 0 };
        self.devices[(leaf.gpa.0 / PAGE) as usize].store(told, Ordering::Release);
    }

    fn unmapped(&self, range: GpaRange) {
        let pages = (range.start().0 / PAGE) as usize..(range.end().0 / PAGE) as usize;
        self.devices[pages].iter().for_each(|page| page.store(0, Ordering::Release));
    }
}

impl Host for World {
    fn now(&self) -> u64 {
        0
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self
    }

    fn device_tables(&self) -> &dyn DeviceTables {
        self
    }

    fn wait(&self) {
        loom::thread::yield_now();
    }

    fn between_pieces(&self) {
        if let Some(work) = self.piece.take() {
            work();
        }
    }
}

impl PrivateHooks for World {
    fn map(&self, leaf: PrivateLeaves) -> Result<(), Denial> {
        self.assigned.set(self.assigned.get() + leaf.bytes);
        Ok(())
    }

    fn split(&self, _block: PrivateLeaves) -> Result<(), Denial> {
        self.split.set(self.split.get() + 1);
        Ok(())
    }

    fn removed(&self, leaves: PrivateLeaves) {
        self.assigned.set(self.assigned.get() - leaves.bytes);
    }
}

// SAFETY: loom runs one thread at a time, and switches only at its own objects.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

/// The host's memory: its place, its block size, and what the guest has written there.
pub struct Ram {
    pub at: Mutex<u64>,
    pub block: u64,
    pub content: Mutex<[u64; 4]>,
    /// For memory that can go: whether it is gone at the moment.
    pub gone: Option<AtomicU64>,
    /// It is shared for reading until a fault asks for a write, which moves it.
    pub shared: bool,
    /// A page that was read becomes writable in place.
    pub grants: bool,
}

impl Ram {
    pub fn new(block: u64) -> &'static Self {
        Box::leak(Box::new(Self::that_stays(block)))
    }

    /// Makes memory that can go without a lock.
    pub fn that_goes(block: u64) -> &'static Self {
        let gone = Some(AtomicU64::new(0));
        Box::leak(Box::new(Self { gone, ..Self::that_stays(block) }))
    }

    /// Makes pages that a fault makes writable in place.
    pub fn that_grants() -> &'static Self {
        Box::leak(Box::new(Self { grants: true, ..Self::that_stays(PAGE) }))
    }

    /// Makes pages that are shared until the guest writes.
    pub fn that_is_shared() -> &'static Self {
        Box::leak(Box::new(Self { shared: true, ..Self::that_stays(PAGE) }))
    }

    fn that_stays(block: u64) -> Self {
        let (at, content) = (Mutex::new(OLD), Mutex::new([0; 4]));
        Self { at, block, content, gone: None, shared: false, grants: false }
    }
}

impl Backing for &'static Ram {
    fn page(&self, host: Hva, access: Access) -> Result<Page, NoPage> {
        if self.gone.as_ref().is_some_and(|gone| gone.load(Ordering::Acquire) != 0) {
            return Err(NoPage::Absent);
        }
        let mut place = self.at.lock().unwrap();
        if self.shared && access == Access::Write {
            *place = NEW;
        }
        let at = *place;
        Ok(Page {
            hpa: Hpa(at + (host.0 - HOST)),
            block: PageSize::from_bytes(self.block).unwrap(),
            write: at == NEW || !(self.shared || self.grants && access == Access::Read),
            execute: true,
            memory: Memory::Normal,
        })
    }

    fn make_writable<R>(&self, host: Hva, grant: impl FnOnce(Page) -> R) -> Option<R> {
        let place = self.grants.then(|| self.at.lock().unwrap())?;
        Some(grant(Page {
            hpa: Hpa(*place + (host.0 - HOST)),
            block: PageSize::from_bytes(self.block).unwrap(),
            write: true,
            execute: true,
            memory: Memory::Normal,
        }))
    }

    fn wait(&self) {
        loom::thread::yield_now();
    }

    fn private_page(&self, at: PrivateAt) -> Result<PrivatePage, NoPage> {
        let block = PageSize::from_bytes(self.block).unwrap();
        Ok(PrivatePage { hpa: Hpa(PRIVATE + at.0), block })
    }
}

/// The address of private memory.
pub const PRIVATE: u64 = 0x30_0000;

pub type TheGuest = Guest<'static, Tiny, World, &'static Ram>;
pub type TheVcpu = Vcpu<'static, Tiny, World, &'static Ram>;
pub type TheWorker = Worker<'static, Tiny, World, &'static Ram>;

pub fn config() -> Config {
    Config::new(1, PageSize::from_bytes(BLOCK).unwrap())
}

/// The guest always uses its caches.
pub fn tiny() -> Tiny {
    let TwoSlots(arm) = Tiny::default();
    TwoSlots(slat::format::arm64::Arm64K4 { forced_write_back: true, ..arm })
}

/// Makes a guest on the heap. A model's stack has no room for a guest that is being made, nor for
/// one beside what threads do with it: so this is no part of its caller.
#[inline(never)]
fn boxed(world: &'static World, ram: &'static Ram, bits: u32, config: Config) -> Box<TheGuest> {
    Box::new(Guest::new(tiny(), Vmid(1), bits, world, ram, config).unwrap())
}

pub fn guest(world: &'static World, ram: &'static Ram, config: Config) -> &'static TheGuest {
    Box::leak(boxed(world, ram, BITS, config))
}

/// Makes a guest of three levels; work on its memslots takes two pieces.
pub fn wide(world: &'static World, ram: &'static Ram, config: Config) -> &'static TheGuest {
    Box::leak(boxed(world, ram, BITS + 1, config))
}

pub fn memslot(log_dirty: bool) -> MemslotSpec {
    MemslotSpec { log_dirty, ..MemslotSpec::new(MemslotId(0), Gpa(0), 2 * BLOCK, Hva(HOST)) }
}

/// Memory whose pages may be private.
pub fn hidden() -> MemslotSpec {
    MemslotSpec { private: Some(PrivateAt(0)), ..memslot(false) }
}

pub fn worker(guest: &'static TheGuest) -> TheWorker {
    Worker::new(guest).unwrap()
}

pub fn vcpu(guest: &'static TheGuest) -> TheVcpu {
    vcpu_of(guest, 0)
}

pub fn vcpu_of(guest: &'static TheGuest, id: u16) -> TheVcpu {
    Vcpu::new(guest, id).unwrap()
}

/// Makes a guest whose writes hardware marks, and whose log is of these marks.
pub fn marked(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let TwoSlots(arm) = tiny();
    let format = TwoSlots(slat::format::arm64::Arm64K4 { hardware_dirty: true, ..arm });
    let page = PageSize::from_bytes(PAGE).unwrap();
    let config = Config { logging: Logging::Hardware, largest: page, ..config() };
    Box::leak(Box::new(Guest::new(format, Vmid(1), BITS, world, ram, config).unwrap()))
}

/// Makes a guest whose huge pages are not executed, and whose writes hardware marks although the
/// log is of faults.
pub fn recovered(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let TwoSlots(arm) = tiny();
    let format = TwoSlots(slat::format::arm64::Arm64K4 { hardware_dirty: true, ..arm });
    let config = Config { execute_huge: ExecuteHuge::Split, ..config() };
    Box::leak(Box::new(Guest::new(format, Vmid(1), BITS, world, ram, config).unwrap()))
}

/// Makes a guest whose vCPUs begin on views of their own.
pub fn uncached(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let guest = Guest::new(Tiny::default(), Vmid(1), BITS, world, ram, config()).unwrap();
    Box::leak(Box::new(guest))
}

/// As `uncached`, with two vCPUs.
pub fn uncached_two(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let config = Config::new(2, PageSize::from_bytes(BLOCK).unwrap());
    Box::leak(Box::new(Guest::new(Tiny::default(), Vmid(1), BITS, world, ram, config).unwrap()))
}

/// As `marked`, for a guest whose vCPUs begin on views of their own.
pub fn marked_uncached(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let TwoSlots(arm) = Tiny::default();
    let format = TwoSlots(slat::format::arm64::Arm64K4 { hardware_dirty: true, ..arm });
    let page = PageSize::from_bytes(PAGE).unwrap();
    let config = Config { logging: Logging::Hardware, largest: page, ..config() };
    Box::leak(Box::new(Guest::new(format, Vmid(1), BITS, world, ram, config).unwrap()))
}

/// As `uncached`, with three levels.
pub fn wide_uncached(world: &'static World, ram: &'static Ram) -> &'static TheGuest {
    let guest = Guest::new(Tiny::default(), Vmid(1), BITS + 1, world, ram, config()).unwrap();
    Box::leak(Box::new(guest))
}

/// A thread's own value, which is sent to it.
pub struct SendCell<T>(pub T);
// SAFETY: as for `World`.
unsafe impl<T> Send for SendCell<T> {}

impl<T> SendCell<T> {
    pub fn get(self) -> T {
        self.0
    }
}

/// The vCPU writes `gpa`, and its faults are handled; returns whether it wrote.
pub fn write(vcpu: &mut TheVcpu, ram: &Ram, gpa: u64, value: u64) -> bool {
    for _ in 0..3 {
        {
            // A write takes effect while its leaf exists, and before an invalidation completes.
            let mut content = ram.content.lock().unwrap();
            if writable(vcpu.worker(), gpa) {
                content[(gpa / PAGE) as usize] = value;
                return true;
            }
        }
        vcpu.fault(Gpa(gpa), Access::Write);
    }
    false
}

/// Returns the guest's leaf at `gpa`.
pub fn at(worker: &mut TheWorker, gpa: u64) -> Option<Translation> {
    worker.translate(Gpa(gpa)).ok().flatten()
}

pub fn writable(worker: &mut TheWorker, gpa: u64) -> bool {
    at(worker, gpa).is_some_and(|leaf| leaf.attributes.write)
}

/// A value that a thread of a model takes or leaves.
struct CarriedValue<T>(T);

// SAFETY: loom runs all threads of a model on one thread of the host.
unsafe impl<T> Send for CarriedValue<T> {}

impl<T, F: FnOnce() -> T> CarriedValue<F> {
    fn run(self) -> CarriedValue<T> {
        CarriedValue(self.0())
    }
}

pub struct Thread<T>(loom::thread::JoinHandle<CarriedValue<T>>);

impl<T> Thread<T> {
    pub fn join(self) -> std::thread::Result<T> {
        self.0.join().map(|result| result.0)
    }
}

/// Starts a thread of a model with a stack of 512 KiB: loom's own, of 32 KiB, is too small for an
/// invalidation within another call.
pub fn spawn<T: 'static>(run: impl FnOnce() -> T + 'static) -> Thread<T> {
    let (run, words) = (CarriedValue(run), 0x1_0000);
    let started = loom::thread::Builder::new().stack_size(words).spawn(move || run.run());
    Thread(started.unwrap())
}

/// Starts a thread in which the vCPU faults on `gpa`, and which gives the vCPU back.
pub fn faulting(vcpu: TheVcpu, gpa: u64, access: Access) -> Thread<SendCell<TheVcpu>> {
    let vcpu = SendCell(vcpu);
    spawn(move || {
        let mut vcpu = vcpu.get();
        vcpu.fault(Gpa(gpa), access);
        SendCell(vcpu)
    })
}

/// Explores a model with at most `preemptions` preemptions in an execution, and prints the cost.
pub fn bounded(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    use core::sync::atomic::{AtomicUsize, Ordering};
    let executions = std::sync::Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    let model = std::sync::Arc::new(model);
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    // `LOOM_MAX_PREEMPTIONS` can lower the bound, not raise it; models of three threads get one
    // less.
    let third = name.matches("||").count().saturating_sub(1);
    let asked = builder.preemption_bound.map(|asked| asked.saturating_sub(third));
    let preemptions = asked.map_or(preemptions, |asked| asked.min(preemptions));
    builder.preemption_bound = Some(preemptions);
    let start = std::time::Instant::now();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        let model = model.clone();
        spawn(move || model()).join().unwrap();
    });
    let (n, seconds) = (executions.load(Ordering::Relaxed), start.elapsed().as_secs_f64());
    std::eprintln!("| {name} | <= {preemptions} | {n} | {seconds:.2} |");
}
