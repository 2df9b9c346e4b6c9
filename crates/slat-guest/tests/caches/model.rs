//! A model of memory at the point of coherency, with all caches in front of it as one, and an
//! instruction cache.
//!
//! A line may be fetched at any moment if the host or the guest has it mapped cacheable; the host
//! always has. A dirty line may be written back at any moment, a clean one may be dropped. The
//! [`Mood`] decides when.

use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
};
use slat_guest::{Backing, Host, Hva, NoPage, Page};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

pub const LINE: u64 = 64;
/// The host address of the guest's memory. Virtual and physical addresses are the same.
pub const RAM: u64 = 1 << 40;

/// When lines are fetched and written back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mood {
    /// No line is fetched or written back without an access.
    Lazy,
    /// Every line that was ever used is fetched whenever it can be; dirty lines stay.
    Fetch,
    /// Every line is written back and dropped whenever it can be.
    Evict,
    /// Every line is written back at once, and fetched again.
    Both,
    /// A random generator with this seed decides for each line.
    Random(u64),
}

impl Mood {
    pub fn all() -> impl Iterator<Item = Self> {
        let fixed = [Self::Lazy, Self::Fetch, Self::Evict, Self::Both];
        fixed.into_iter().chain((1..100).map(Self::Random))
    }
}

#[derive(Debug, Default)]
struct State {
    memory: BTreeMap<u64, u64>,
    /// The value of each line, and whether it is dirty.
    cache: BTreeMap<u64, (u64, bool)>,
    instructions: BTreeMap<u64, u64>,
    /// Lines that were ever used.
    used: BTreeSet<u64>,
    die: u64,
    /// Bytes of data that were maintained; `skipped` has those that were not, because of `skip`.
    maintained: u64,
    skip: bool,
    skipped: u64,
}

impl State {
    fn roll(&mut self) -> u64 {
        self.die ^= self.die << 13;
        self.die ^= self.die >> 7;
        self.die ^= self.die << 17;
        self.die
    }

    fn memory(&self, line: u64) -> u64 {
        self.memory.get(&line).copied().unwrap_or(0)
    }

    fn fetch(&mut self, line: u64) -> u64 {
        let value = self.memory(line);
        self.cache.entry(line).or_insert((value, false)).0
    }

    fn drop_line(&mut self, line: u64) {
        if let Some((value, true)) = self.cache.remove(&line) {
            self.memory.insert(line, value);
        }
    }
}

/// The machine.
pub struct Machine {
    readers: Readers<[ReaderSlot; 16]>,
    pub mood: Mood,
    forced_write_back: bool,
    /// The number of frames that are free.
    pub room: AtomicU64,
    state: Mutex<State>,
    clock: AtomicU64,
    after: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    waiting: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Machine {
    pub fn forces_caches(&self) -> bool {
        self.forced_write_back
    }

    pub fn new(mood: Mood, forced_write_back: bool) -> Self {
        let die = match mood {
            Mood::Random(seed) => seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            _ => 1,
        };
        Self {
            readers: Readers::new([const { ReaderSlot::new() }; 16]),
            mood,
            forced_write_back,
            room: AtomicU64::new(u64::MAX),
            state: Mutex::new(State { die, ..State::default() }),
            clock: AtomicU64::new(0),
            after: Mutex::new(None),
            waiting: Mutex::new(None),
        }
    }

    /// A moment at which lines are fetched and dropped.
    pub fn moment(&self) {
        let mut state = self.state.lock().unwrap();
        for line in state.used.clone() {
            match self.mood {
                Mood::Lazy => {}
                Mood::Fetch => _ = state.fetch(line),
                Mood::Evict => state.drop_line(line),
                Mood::Both => {
                    state.drop_line(line);
                    state.fetch(line);
                }
                Mood::Random(_) => match state.roll() >> 32 & 7 {
                    0 | 1 => _ = state.fetch(line),
                    2 => state.drop_line(line),
                    3 => {
                        state.drop_line(line);
                        state.fetch(line);
                    }
                    _ => {}
                },
            }
        }
    }

    fn at<R>(&self, hpa: u64, access: impl FnOnce(&mut State, u64) -> R) -> R {
        self.state.lock().unwrap().used.insert(hpa / LINE);
        self.moment();
        let result = access(&mut self.state.lock().unwrap(), hpa / LINE);
        self.moment();
        result
    }

    pub fn read(&self, hpa: u64, cached: bool) -> u64 {
        self.at(hpa, |state, line| match cached || self.forced_write_back {
            true => state.fetch(line),
            false => state.memory(line),
        })
    }

    pub fn write(&self, hpa: u64, value: u64, cached: bool) {
        self.at(hpa, |state, line| match cached || self.forced_write_back {
            true => _ = state.cache.insert(line, (value, true)),
            false => _ = state.memory.insert(line, value),
        });
    }

    /// Fetches an instruction: the instruction cache keeps it until it is invalidated.
    pub fn execute(&self, hpa: u64, cached: bool) -> u64 {
        let value = self.read(hpa, cached);
        *self.state.lock().unwrap().instructions.entry(hpa / LINE).or_insert(value)
    }

    /// The guest's own `dc civac`.
    pub fn clean(&self, hpa: u64) {
        self.at(hpa, |state, line| state.drop_line(line));
    }

    /// If `skip`, the machine maintains nothing from now on, although it is asked to.
    pub fn skip(&self, skip: bool) {
        self.state.lock().unwrap().skip = skip;
    }

    /// Sets what runs once, after the next maintenance.
    pub fn after_maintenance(&self, run: Box<dyn FnOnce() + Send>) {
        *self.after.lock().unwrap() = Some(run);
    }

    /// Holds the next thread that maintains, until the sender is used, for 200 ms at most. The
    /// receiver is told when the thread is held.
    pub fn hold_maintenance(&self) -> (Receiver<()>, Sender<()>) {
        let ((maintained, told), (done, returned)) = (channel(), channel());
        self.after_maintenance(Box::new(move || {
            maintained.send(()).unwrap();
            let _ = returned.recv_timeout(Duration::from_millis(200));
        }));
        (told, done)
    }

    /// Sets what runs once, when a thread next waits for others.
    pub fn when_waiting(&self, run: Box<dyn FnOnce() + Send>) {
        *self.waiting.lock().unwrap() = Some(run);
    }

    /// Returns the bytes of data that were maintained.
    pub fn maintained(&self) -> u64 {
        self.state.lock().unwrap().maintained
    }

    pub fn skipped(&self) -> u64 {
        self.state.lock().unwrap().skipped
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: by the numbers of `Platform`'s contract. 1, 2: `allocate` returns memory of that size and
// alignment that no other code uses, whose address is the frame's, and which stays until `free`. 3:
// no CPU loads these tables; the test walks them by the engine. 4: `readers` is a field. 6: nothing
// unwinds except a failed lock, after a panic elsewhere.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        let less = |room: u64| room.checked_sub(1);
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        // SAFETY: the size of the layout is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        self.room.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the frame came from `allocate` with this size.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }

    fn publish(&self) {
        self.moment();
    }

    fn invalidate(&self, _what: &Invalidation) {
        self.moment();
    }

    /// The vCPUs walk the tables at each access.
    fn invalidate_local(&self, _what: &Invalidation) {}

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        self.moment();
        let mut state = self.state.lock().unwrap();
        if state.skip {
            state.skipped += bytes;
            return;
        }
        let lines = memory.0 / LINE..(memory.0 + bytes).div_ceil(LINE);
        if !self.forced_write_back {
            state.maintained += bytes;
            let cached = state.cache.range(lines.clone()).map(|(&line, _)| line);
            cached.collect::<Vec<_>>().into_iter().for_each(|line| state.drop_line(line));
        }
        if what == Maintenance::Instructions {
            state.instructions.retain(|line, _| !lines.contains(line));
        }
        drop(state);
        self.moment();
        let after = self.after.lock().unwrap().take();
        if let Some(run) = after {
            run();
        }
    }
}

impl Host for Machine {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn invalidate_instructions(&self) {
        self.state.lock().unwrap().instructions.clear();
    }

    fn wait(&self) {
        let waiting = self.waiting.lock().unwrap().take();
        waiting.map_or_else(std::thread::yield_now, |run| run());
    }
}

/// All memory, in blocks of up to 2 MiB. An event may happen while a fault asks for a page.
pub struct Ram<'m> {
    pub machine: &'m Machine,
    /// A write that the host makes to the page while a fault asks for it, once.
    pub interrupts: Mutex<Option<(u64, u64)>>,
}

impl Backing for Ram<'_> {
    fn page(&self, host: Hva, _access: slat::Access) -> Result<Page, NoPage> {
        if let Some((hpa, value)) = self.interrupts.lock().unwrap().take() {
            self.machine.write(hpa, value, true);
        }
        Ok(Page {
            hpa: Hpa(host.0),
            block: slat::PageSize::SIZE_2M,
            write: true,
            execute: true,
            memory: slat::Memory::Normal,
        })
    }
}
