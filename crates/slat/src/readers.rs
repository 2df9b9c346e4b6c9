//! Grace periods: when no software walker can still be in a table that was unlinked.
//!
//! # Protocol
//! A thread that walks holds a slot. On entry it writes the clock's reading and the guest whose
//! tables it enters into the slot. On leaving it writes that it is outside, and of which guest. A
//! reclaimer, which has unlinked tables, advances the clock. It frees the tables once every slot is
//! outside, is in another guest's tables, or shows a reading at least as late as the reclaimer's.
//!
//! A walker enters, and a reclaimer inspects, by a read-modify-write of the slot, so one of them
//! comes first. If the walker does, the reclaimer sees it inside. If the reclaimer does, the walker
//! reads the value that the reclaimer wrote, synchronises with it, and finds the table unlinked. A
//! thread whose reading is as late as the reclaimer's acquired it from the clock after the clock
//! was advanced, hence after the table was unlinked.
//!
//! A reclaimer does not wait for a thread that is inside another guest's tables. That thread leaves
//! by a store, which hides the reclaimer's value from its next entry. So an entry after a stay in
//! another guest's tables is followed by a sequentially consistent fence, and a reclaimer executes
//! one between the unlinking and its look: either it sees the thread inside its own guest's tables,
//! or the thread finds the table unlinked.
//!
//! No thread ever waits: tables that cannot be freed yet are freed later.
//!
//! A slot also hands out tokens ([`crate::tables::Tokens`]), from a block of numbers that it took
//! from [`Readers`]. So threads that fault in disjoint ranges write no common cache line for
//! tokens.

use crate::format::TOKEN_BITS;
use crate::invalidation::Vmid;
use crate::sync::{AtomicU64, Ordering, agreed};
use core::fmt;
use core::num::NonZeroUsize;
#[cfg(debug_assertions)]
use core::sync::atomic::AtomicUsize;

/// A slot that no thread has taken.
const FREE: u64 = 0;
/// A slot whose thread has not walked yet.
const NEW: u64 = 1;
/// The step of the clock. In the slot of a thread that walks, the reading is above the guest's
/// VMID. The clock does not overflow: at a reading a microsecond, 2^48 readings last for years.
const STEP: u64 = 1 << 16;
/// The clock's first reading. Smaller values are of threads that are not inside.
const START: u64 = 2 * STEP;
/// The number of tokens in a block that a slot takes. The first token of a block is a multiple of
/// it.
const BLOCK: u64 = 1 << 12;

/// Tokens below this belong to slots, all others to guests.
pub(crate) const READERS_TOKENS: u64 = 1 << (TOKEN_BITS - 1);

/// The value of a slot whose thread is inside. Values are in the order of their readings.
#[inline(always)]
const fn inside(reading: u64, guest: Vmid) -> u64 {
    reading | guest.0 as u64
}

/// The value of a slot whose thread was inside a guest's tables last.
#[inline(always)]
const fn outside(guest: Vmid) -> u64 {
    STEP | guest.0 as u64
}

/// The slot of one thread, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct ReaderSlot {
    /// Where its thread is: free, outside, or inside which guest's tables and since which reading.
    place: AtomicU64,
    /// The next token; a multiple of `BLOCK` once the block is used up. Only the slot's thread uses
    /// it.
    token: AtomicU64,
    /// The number of the thread that was inside last
    /// ([`Platform::thread`](crate::Platform::thread)); 0 if it has none. Relaxed: a thread looks
    /// for its own number, and the entry's store to `place` has released those of other threads.
    #[cfg(debug_assertions)]
    thread: AtomicUsize,
}

impl ReaderSlot {
    /// Enters tables of `guest`.
    #[inline(always)]
    pub(crate) fn enter(&self, readers: &Readers, guest: Vmid) -> Inside<'_> {
        let now = inside(readers.clock.load(Ordering::Acquire), guest);
        if self.place.swap(now, Ordering::AcqRel) != outside(guest) {
            agreed();
        }
        Inside { slot: self, guest }
    }

    /// Frees the slot by a read-modify-write, so that the next thread that takes it synchronises
    /// with the reclaimers that looked at it before.
    pub(crate) fn give_back(&self) {
        self.place.swap(FREE, Ordering::AcqRel);
    }

    #[cfg(debug_assertions)]
    pub(crate) fn enters(&self, thread: Option<NonZeroUsize>) {
        self.thread.store(thread.map_or(0, NonZeroUsize::get), Ordering::Relaxed);
    }

    fn thread(&self) -> Option<NonZeroUsize> {
        #[cfg(debug_assertions)]
        return NonZeroUsize::new(self.thread.load(Ordering::Relaxed));
        #[cfg(not(debug_assertions))]
        None
    }
}

macro_rules! constructors {
    ($($const:ident)?) => {
        impl ReaderSlot {
            /// A free slot.
            #[expect(clippy::new_without_default, reason = "a `const fn` beside no other use")]
            pub $($const)? fn new() -> Self {
                Self {
                    place: AtomicU64::new(FREE),
                    token: AtomicU64::new(0),
                    #[cfg(debug_assertions)]
                    thread: AtomicUsize::new(0),
                }
            }
        }

        impl<const READERS: usize> Readers<[ReaderSlot; READERS]> {
            /// Makes readers with these slots, one for each thread that is registered at the
            /// same time.
            pub $($const)? fn new(slots: [ReaderSlot; READERS]) -> Self {
                Self { clock: AtomicU64::new(START), tokens: Line(AtomicU64::new(0)), slots }
            }
        }
    };
}
#[cfg(not(loom))]
constructors!(const);
#[cfg(loom)]
constructors!();

/// A word apart from the cache line that every thread reads as it enters.
#[derive(Debug)]
#[repr(align(128))]
struct Line(AtomicU64);

/// The time until all threads that were inside when it began have left, from
/// [`Readers::begin_grace_period`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct GracePeriod(pub(crate) u64);

/// The slots of the threads that walk, and the clock. A platform has one for all of its guests.
///
/// `&Readers<[ReaderSlot; N]>` is accepted where `&Readers` is expected.
#[derive(Debug)]
pub struct Readers<S: ?Sized = [ReaderSlot]> {
    clock: AtomicU64,
    /// The first token of the next block.
    tokens: Line,
    slots: S,
}

impl Readers {
    /// Takes a free slot.
    pub(crate) fn take_slot(&self) -> Result<&ReaderSlot, TooManyReaders> {
        let free = |slot: &&ReaderSlot| {
            let taken = slot.place.compare_exchange(FREE, NEW, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        self.slots.iter().find(free).ok_or(TooManyReaders { slots: self.slots.len() })
    }

    /// Advances the clock and returns its reading. Threads that enter later find what was published
    /// before. To retire a value that threads read inside a guard, replace it, call this, and free
    /// the old value once [`Readers::has_elapsed`] returns true.
    pub fn begin_grace_period(&self) -> GracePeriod {
        GracePeriod(self.advance())
    }

    /// Returns whether all threads that were inside any tables when `period` began have left, or
    /// [refreshed](crate::Guard::refresh) their guards. If the caller itself entered before
    /// that, this is false until it leaves or refreshes.
    pub fn has_elapsed(&self, period: GracePeriod) -> bool {
        self.each(|reading, _| reading >= period.0)
    }

    /// Advances the clock. Walkers that show the new reading, or a later one, cannot find what was
    /// unlinked before this call.
    pub(crate) fn advance(&self) -> u64 {
        self.clock.fetch_add(STEP, Ordering::AcqRel) + STEP
    }

    /// Returns whether all threads that entered tables of `guest` before `reading` have left or
    /// refreshed.
    pub(crate) fn passed(&self, reading: u64, guest: Vmid) -> bool {
        agreed();
        self.each(|inside, whose| whose != guest || inside >= reading)
    }

    /// Returns whether the thread with this number is inside tables of `guest`. Release builds do
    /// not know.
    pub(crate) fn has(&self, thread: NonZeroUsize, guest: Vmid) -> bool {
        self.slots.iter().any(|slot| {
            let now = slot.place.load(Ordering::Acquire);
            now >= START && Vmid(now as u16) == guest && slot.thread() == Some(thread)
        })
    }

    /// Returns whether `fine` holds for each thread that is inside. Its arguments are the slot's
    /// value, which is at least the thread's reading and less than the next, and the guest whose
    /// tables the thread is in.
    fn each(&self, fine: impl Fn(u64, Vmid) -> bool) -> bool {
        self.slots.iter().all(|slot| {
            let now = slot.place.fetch_add(0, Ordering::AcqRel);
            now < START || fine(now, Vmid(now as u16))
        })
    }
}

/// A thread that is walking. It is left by [`Inside::leave`], not by a drop: the clean-up of a
/// panic would take a guard's address, and so keep every guard in memory.
#[must_use = "the thread stays inside until it leaves"]
#[derive(Debug)]
pub(crate) struct Inside<'m> {
    slot: &'m ReaderSlot,
    guest: Vmid,
}

impl Inside<'_> {
    /// Leaves and enters again, at the cost of a store.
    ///
    /// The reading acquires the unlinking of all tables that the thread lets go; the store releases
    /// the walks before it.
    #[inline(always)]
    pub fn refresh(&mut self, readers: &Readers) {
        let now = inside(readers.clock.load(Ordering::Acquire), self.guest);
        self.slot.place.store(now, Ordering::Release);
    }

    /// Returns a number below 2^47. No two calls return the same number until the platform has
    /// handed out blocks of 2^47 numbers in all.
    #[inline]
    pub fn token(&self, readers: &Readers) -> u64 {
        let ReaderSlot { token, .. } = self.slot;
        // Relaxed: the next thread that takes the slot synchronises with this one by `place`.
        let mut next = token.load(Ordering::Relaxed);
        if next.is_multiple_of(BLOCK) {
            next = readers.tokens.0.fetch_add(BLOCK, Ordering::Relaxed);
        }
        token.store(next + 1, Ordering::Relaxed);
        next & (READERS_TOKENS - 1)
    }

    /// Leaves. The store releases the thread's walks.
    #[inline(always)]
    pub fn leave(self) {
        self.slot.place.store(outside(self.guest), Ordering::Release);
    }
}

/// Leaves when it is dropped, also by a panic.
pub(crate) struct LeaveGuard<'m>(pub Option<Inside<'m>>);

impl Drop for LeaveGuard<'_> {
    fn drop(&mut self) {
        if let Some(inside) = self.0.take() {
            inside.leave();
        }
    }
}

/// All slots are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyReaders {
    /// The number of slots.
    pub slots: usize,
}

impl fmt::Display for TooManyReaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "all {} reader slots are taken; drop a `Reader`, or give the platform more",
            self.slots
        )
    }
}

impl core::error::Error for TooManyReaders {}
