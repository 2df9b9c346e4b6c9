//! A guest's own seats and clock on a machine that guests share: everything else comes from the
//! machine.
//!
//! A thread takes a seat to be inside tables, and a thread that changes memslots, reads a log that
//! hardware keeps, or gives tables back looks at all seats of its [`Platform::grace`]. Where guests
//! share one, a guest affects others by three things: the number of seats, as its threads may take
//! the last; VMIDs, as seats tell guests apart by the VMID with which they were made; and the cache
//! line of the clock. With [`OwnSeats`] it does not.

use crate::host::Host;
use alloc::sync::Arc;
use core::fmt;
use core::ptr::NonNull;
use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Seat, Slot};

mod sealed {
    use super::{Arc, Host};

    /// A reference or pointer to one machine, always the same.
    pub trait Leads {
        type Host: Host;

        fn machine(&self) -> &Self::Host;
    }

    impl<H: Host> Leads for Arc<H> {
        type Host = H;

        fn machine(&self) -> &H {
            self
        }
    }

    impl<H: Host> Leads for &H {
        type Host = H;

        fn machine(&self) -> &H {
            self
        }
    }
}

/// A [`Host`] for one guest, on a machine that others share: `M` is an `Arc` of it, or a reference.
///
/// Threads of the guest, vCPUs and workers, take seats here, at most `SEATS` at a time, and only
/// the guest's own threads wait for them. So a guest whose threads have taken all seats does not
/// keep another's from joining, and one whose [`Backing::page`](crate::Backing::page) takes long
/// does not delay another's changes of memslots, even if two were made with one VMID. A guest that
/// runs out of seats is the only one to be refused ([`NoSeat`](slat::NoSeat)).
pub struct OwnSeats<M, const SEATS: usize> {
    machine: M,
    grace: Grace<[Seat; SEATS]>,
}

impl<M: sealed::Leads, const SEATS: usize> OwnSeats<M, SEATS> {
    /// Makes a host on `machine`, with seats for `SEATS` threads.
    pub fn new(machine: M) -> Self {
        Self { machine, grace: Grace::<[Seat; SEATS]>::new(core::array::from_fn(|_| Seat::new())) }
    }

    /// The machine.
    pub fn machine(&self) -> &M::Host {
        self.machine.machine()
    }
}

impl<M, const SEATS: usize> fmt::Debug for OwnSeats<M, SEATS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnSeats").field("seats", &SEATS).finish_non_exhaustive()
    }
}

// SAFETY: 1, 2, 3, 5, 6: by the machine, which is the same at every call (`Leads` is sealed): a
// frame of one is the other's. 4: `grace` is a field, `break_before_make` the machine's. Tables
// that the guest unlinks are looked for at its own seats alone, and nobody can be in them without
// one: `Tables::enter` takes members of this very platform.
unsafe impl<M: sealed::Leads, const SEATS: usize> Platform for OwnSeats<M, SEATS> {
    #[inline]
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine().allocate(bytes)
    }

    #[inline]
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller's promise; `allocate` is the machine's.
        unsafe { self.machine().free(frame, bytes) }
    }

    #[inline]
    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        self.machine().slots(table)
    }

    #[inline]
    fn publish(&self) {
        self.machine().publish();
    }

    #[inline]
    fn invalidate(&self, what: &Invalidation) {
        self.machine().invalidate(what);
    }

    #[inline]
    fn invalidate_local(&self, what: &Invalidation) {
        self.machine().invalidate_local(what);
    }

    #[inline]
    fn break_before_make(&self) -> BreakBeforeMake {
        self.machine().break_before_make()
    }

    #[inline]
    fn grace(&self) -> &Grace {
        &self.grace
    }

    #[inline]
    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        self.machine().maintain(memory, bytes, what);
    }

    #[inline]
    fn fill(&self, slots: &mut [Slot], first: u64, step: u64) {
        self.machine().fill(slots, first, step);
    }
}

impl<M: sealed::Leads, const SEATS: usize> Host for OwnSeats<M, SEATS> {
    #[inline]
    fn now(&self) -> u64 {
        self.machine().now()
    }

    #[inline]
    fn events(&self) -> impl crate::events::Events {
        self.machine().events()
    }

    fn forget_instructions(&self) {
        self.machine().forget_instructions();
    }

    fn between_pieces(&self) {
        self.machine().between_pieces();
    }

    fn wait(&self) {
        self.machine().wait();
    }
}
