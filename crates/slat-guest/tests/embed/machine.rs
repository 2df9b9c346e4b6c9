//! A machine without CPUs that counts its frames and invalidations, and the memory behind a guest.

use slat::format::ept::Ept1G;
use slat::{
    Access, BreakBeforeMake, Frame, Gpa, Hpa, Invalidation, Maintenance, Memory, PageSize,
    Platform, Pte, ReaderSlot, Readers, Vmid,
};
use slat_guest::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub const K4: u64 = 4 << 10;
pub const M2: u64 = 2 << 20;
pub const G1: u64 = 1 << 30;
pub const BASE: u64 = 4 * G1;
pub const HOST: u64 = 0x7000_0000_0000;
const READERS: usize = 128;

/// Frames come from the allocator.
pub struct CountingMachine<E: Events = ()> {
    events: E,
    readers: Readers<[ReaderSlot; READERS]>,
    frames: AtomicU64,
    invalidations: AtomicU64,
    clock: AtomicU64,
    /// The number of calls of `Host::wait`.
    pub waits: AtomicU64,
    /// Whether an entry that changes is not valid meanwhile.
    pub breaks: AtomicBool,
    /// Runs between pieces of a change, and when a leaf is reported to devices.
    between: Mutex<Option<Box<dyn FnMut() + Send>>>,
    /// Runs once, at that moment.
    moment: Mutex<Option<(Moment, Once)>>,
}

type Once = Box<dyn FnOnce() + Send>;

/// A moment at which a thread calls the machine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Moment {
    Invalidation,
    /// Between two pieces of a change.
    Piece,
    /// Devices lose the right to write a leaf.
    Devices,
    /// A leaf's memory is maintained.
    Maintenance,
    /// A private block is about to be split.
    PrivateSplit,
}

impl CountingMachine {
    pub fn new() -> Arc<Self> {
        Self::with(())
    }
}

impl<E: Events> CountingMachine<E> {
    pub fn with(events: E) -> Arc<Self> {
        let readers = Readers::new([const { ReaderSlot::new() }; READERS]);
        Arc::new(Self {
            events,
            readers,
            frames: AtomicU64::new(0),
            invalidations: AtomicU64::new(0),
            clock: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            breaks: AtomicBool::new(false),
            between: Mutex::default(),
            moment: Mutex::default(),
        })
    }

    pub fn between(&self, work: impl FnMut() + Send + 'static) {
        *self.hook() = Some(Box::new(work));
    }

    /// Runs `work` once, when a thread next calls the machine at that moment.
    pub fn at(&self, moment: Moment, work: impl FnOnce() + Send + 'static) {
        *self.moment.lock().unwrap() = Some((moment, Box::new(work)));
    }

    fn now_is(&self, moment: Moment) {
        let work = self.moment.lock().unwrap().take_if(|(at, _)| *at == moment);
        if let Some((_, work)) = work {
            work();
        }
    }

    /// A hook that panicked is replaced.
    fn hook(&self) -> MutexGuard<'_, Option<Box<dyn FnMut() + Send>>> {
        self.between.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn events(&self) -> &E {
        &self.events
    }

    /// Returns the number of invalidations on all CPUs since the last call.
    pub fn invalidations(&self) -> u64 {
        self.invalidations.swap(0, Ordering::Relaxed)
    }

    /// Returns the number of frames that were not given back.
    pub fn frames(&self) -> u64 {
        self.frames.load(Ordering::Relaxed)
    }
}

/// A machine that is dropped before its tables would free their memory.
impl<E: Events> Drop for CountingMachine<E> {
    fn drop(&mut self) {
        assert_eq!(self.frames(), 0, "the machine goes, and not all frames were given back");
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).unwrap()
}

// SAFETY: by the numbers of `Platform`'s contract. 1, 2: `allocate` returns memory of that size and
// alignment that no other code uses, whose address is the frame's, and which stays until `free`. 3:
// no CPU loads these tables. 4: `readers` is a field.
unsafe impl<E: Events> Platform for CountingMachine<E> {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.frames.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the size of the layout is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)).expose_provenance() as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.frames.fetch_sub(1, Ordering::Relaxed);
        let memory = std::ptr::with_exposed_provenance_mut(frame.hpa().0 as usize);
        // SAFETY: the frame came from `allocate` with this size.
        unsafe { dealloc(memory, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(table.0 as usize)).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {
        self.invalidations.fetch_add(1, Ordering::Relaxed);
        self.now_is(Moment::Invalidation);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        match self.breaks.load(Ordering::Relaxed) {
            true => BreakBeforeMake::Always,
            false => BreakBeforeMake::Never,
        }
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, _: Hpa, _: u64, _: Maintenance) {
        self.now_is(Moment::Maintenance);
    }
}

impl<E: Events> PrivateHooks for CountingMachine<E> {
    fn split(&self, _: PrivateLeaves) -> Result<(), Denial> {
        self.now_is(Moment::PrivateSplit);
        Ok(())
    }
}

impl<E: Events> DeviceTables for CountingMachine<E> {
    fn mapped(&self, leaf: DeviceLeaf) {
        if !leaf.write {
            self.now_is(Moment::Devices);
        }
        if let Some(work) = &mut *self.hook() {
            work();
        }
    }
}

impl<E: Events> Host for CountingMachine<E> {
    fn device_tables(&self) -> &dyn DeviceTables {
        self
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self
    }

    fn events(&self) -> impl Events {
        &self.events
    }

    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn between_pieces(&self) {
        self.now_is(Moment::Piece);
        // Not held while it runs: what it does has pieces too.
        let work = self.hook().take();
        if let Some(mut work) = work {
            let readers = Platform::readers(self);
            let period = readers.begin_grace_period();
            assert!(readers.has_elapsed(period), "nobody is inside tables");
            work();
            self.hook().get_or_insert(work);
        }
    }

    fn wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
    }
}

/// Contiguous memory, in blocks of one size.
#[derive(Clone, Copy)]
pub struct OnePiece(pub PageSize);

impl Backing for OnePiece {
    fn page(&self, host: Hva, _: Access) -> Result<Page, NoPage> {
        let hpa = Hpa(host.0 & ((1 << 40) - 1));
        Ok(Page { hpa, block: self.0, write: true, execute: true, memory: Memory::Normal })
    }
}

pub type CountingGuest<B = OnePiece> = SharedGuest<Ept1G, CountingMachine, B>;

pub fn shared<B: Backing + 'static>(
    machine: &Arc<CountingMachine>,
    vmid: u16,
    backing: B,
    config: Config,
) -> CountingGuest<B> {
    let machine = Arc::clone(machine);
    SharedGuest::new(Ept1G::default(), Vmid(vmid), 39, machine, backing, config).unwrap()
}

pub const fn memslot(bytes: u64) -> MemslotSpec {
    MemslotSpec::new(MemslotId(0), Gpa(BASE), bytes, Hva(HOST))
}
