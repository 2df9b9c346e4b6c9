//! Quiescence: when no software walker can still be in a table that was unlinked.
//!
//! # Protocol
//! A thread that walks holds a seat. Entering, it writes the clock's reading into the seat, and
//! whose tables it enters; leaving, it writes that it is outside. A reclaimer, which has unlinked
//! tables, advances the clock, and frees them once every seat is outside, in another guest's
//! tables, or shows a reading at least as late.
//!
//! Entering and looking are read-modify-writes of the seat, so one of them comes first. If entering
//! does, the reclaimer sees the walker inside. If looking does, entering reads what it
//! wrote, synchronises with it, and the walk finds the table unlinked. A reading as late as the
//! reclaimer's was acquired from the clock after it was advanced, hence after the unlinking.
//!
//! No thread ever waits: what cannot be freed yet is freed later.
//!
//! A seat also hands out tokens ([`crate::ops::Tokens`]), from a block of them that it took from
//! the clock's side: threads that fault in disjoint ranges write no common cache line for them.

use crate::ops::SEATS_TOKENS;
use crate::platform::{Platform, same};
use crate::shootdown::Vmid;
use crate::sync::{AtomicU64, Ordering};
use core::fmt;

/// A seat that nobody has taken.
const FREE: u64 = 0;
/// A seat of a thread that is not walking.
const OUTSIDE: u64 = 1;
/// What the clock advances by. In the seat of a thread that walks, the reading stands above the
/// guest's VMID. The clock does not end: 2^48 readings are years of one a microsecond.
const STEP: u64 = 1 << 16;
/// The clock's first reading.
const START: u64 = STEP;
/// Tokens that a seat takes at a time. The first of a block is a multiple of it.
const BLOCK: u64 = 1 << 12;

/// In the order of readings, whosever tables.
#[inline(always)]
const fn inside(reading: u64, guest: Vmid) -> u64 {
    reading | guest.0 as u64
}

/// The place of one thread, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct Seat {
    /// Where its thread is: free, outside, or inside which tables since when.
    place: AtomicU64,
    /// Its next token; a multiple of `BLOCK` once its block is used up. Its thread alone uses it.
    token: AtomicU64,
}

macro_rules! constructors {
    ($($const:ident)?) => {
        impl Seat {
            /// A free seat.
            #[expect(clippy::new_without_default, reason = "a `const fn` beside no other use")]
            pub $($const)? fn new() -> Self {
                Self { place: AtomicU64::new(FREE), token: AtomicU64::new(0) }
            }
        }

        impl<const SEATS: usize> Grace<[Seat; SEATS]> {
            /// With room for so many threads at once.
            pub $($const)? fn new(seats: [Seat; SEATS]) -> Self {
                Self { clock: AtomicU64::new(START), tokens: Line(AtomicU64::new(0)), seats }
            }
        }
    };
}
#[cfg(not(loom))]
constructors!(const);
#[cfg(loom)]
constructors!();

/// Away from what every thread reads as it enters.
#[derive(Debug)]
#[repr(align(128))]
struct Line(AtomicU64);

/// A reading of the clock: see [`Grace::moment`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Moment(pub(crate) u64);

/// The threads that walk, and the clock. A platform has one for all of its guests.
///
/// `&Grace<[Seat; N]>` is taken where `&Grace` is wanted.
#[derive(Debug)]
pub struct Grace<S: ?Sized = [Seat]> {
    clock: AtomicU64,
    /// The first token of the next block.
    tokens: Line,
    seats: S,
}

impl Grace {
    /// A moment; threads that enter after it find what was published before it: for what a user of
    /// the engine reads inside a guard, and gives up or frees once nobody can have read it earlier.
    pub fn moment(&self) -> Moment {
        Moment(self.advance())
    }

    /// Whether all threads that were inside any tables at `moment` have left, or
    /// [refreshed](crate::Guard::refresh) their guards. A caller that is inside waits for itself.
    pub fn is_past(&self, moment: Moment) -> bool {
        self.each(|reading, _| reading >= moment.0)
    }

    /// The reading from which on walkers cannot find what was unlinked before.
    pub(crate) fn advance(&self) -> u64 {
        self.clock.fetch_add(STEP, Ordering::AcqRel) + STEP
    }

    /// Whether all threads that entered tables of `guest` before `reading` have left.
    pub(crate) fn passed(&self, reading: u64, guest: Vmid) -> bool {
        self.each(|inside, whose| whose != guest || inside >= reading)
    }

    /// Whether `fine` holds of each thread that is inside: of its reading, or more, but less than
    /// the next, and of the guest in whose tables it is.
    fn each(&self, fine: impl Fn(u64, Vmid) -> bool) -> bool {
        self.seats.iter().all(|seat| {
            let now = seat.place.fetch_add(0, Ordering::AcqRel);
            now <= OUTSIDE || fine(now, Vmid(now as u16))
        })
    }
}

/// A thread's right to walk the tables of a platform's guests: a seat, taken once and kept.
#[derive(Debug)]
pub struct Member<'p, P: Platform> {
    platform: &'p P,
    seat: &'p Seat,
}

impl<'p, P: Platform> Member<'p, P> {
    /// Takes a seat.
    ///
    /// # Errors
    /// [`NoSeat`] if all are taken.
    pub fn join(platform: &'p P) -> Result<Self, NoSeat> {
        let seats = &platform.grace().seats;
        let free = |seat: &&Seat| {
            let taken =
                seat.place.compare_exchange(FREE, OUTSIDE, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        };
        match seats.iter().find(free) {
            Some(seat) => Ok(Self { platform, seat }),
            None => Err(NoSeat { seats: seats.len() }),
        }
    }

    /// Whether the seat is among those of `platform`.
    #[inline(always)]
    pub(crate) fn serves(&self, platform: &P) -> bool {
        same(self.platform, platform)
    }

    #[inline(always)]
    pub(crate) fn enter(&mut self, guest: Vmid) -> Inside<'_> {
        let clock = &self.platform.grace().clock;
        self.seat.place.swap(inside(clock.load(Ordering::Acquire), guest), Ordering::AcqRel);
        Inside { seat: self.seat }
    }
}

impl<P: Platform> Drop for Member<'_, P> {
    /// A read-modify-write: the next thread that takes the seat synchronises with those that looked
    /// at it before.
    fn drop(&mut self) {
        self.seat.place.swap(FREE, Ordering::AcqRel);
    }
}

/// A thread is walking.
#[derive(Debug)]
pub(crate) struct Inside<'m> {
    seat: &'m Seat,
}

impl Inside<'_> {
    /// Out and in again, at the cost of a store.
    ///
    /// The reading acquires the unlinking of all that it will let go; the store releases the walks
    /// before it.
    #[inline(always)]
    pub fn refresh(&mut self, grace: &Grace, guest: Vmid) {
        let now = inside(grace.clock.load(Ordering::Acquire), guest);
        self.seat.place.store(now, Ordering::Release);
    }
}

impl Inside<'_> {
    /// A number below 2^47 that no other seat of the platform gets, nor this one again before
    /// 2^47 were handed out.
    #[inline]
    pub fn token(&self, grace: &Grace) -> u64 {
        let Seat { token, .. } = self.seat;
        // Whoever has the seat next synchronises with this thread by `place`.
        let mut next = token.load(Ordering::Relaxed);
        if next.is_multiple_of(BLOCK) {
            next = grace.tokens.0.fetch_add(BLOCK, Ordering::Relaxed);
        }
        token.store(next + 1, Ordering::Relaxed);
        next & (SEATS_TOKENS - 1)
    }
}

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.seat.place.store(OUTSIDE, Ordering::Release);
    }
}

/// All seats are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSeat {
    /// How many there are.
    pub seats: usize,
}

impl fmt::Display for NoSeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "all {} seats are taken; drop a member, or give the platform more", self.seats)
    }
}

impl core::error::Error for NoSeat {}
