//! A machine as one guest has it: what guests share comes from the machine, seats and clock are the
//! guest's own.
//!
//! A thread takes a seat to be inside tables, and who changes slots, reads a log that hardware
//! keeps, or gives tables back looks at all seats of its [`Platform::grace`]. Where guests share
//! one, three things cross from guest to guest: the number of seats, as threads of one guest may
//! take the last; VMIDs, as seats tell guests apart by that with which they were made; and the
//! cache line of the clock. With [`OwnSeats`] none does.

use crate::host::Host;
use alloc::sync::Arc;
use core::fmt;
use core::ptr::NonNull;
use slat::{BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Seat, Slot};

mod sealed {
    use super::{Arc, Host};

    /// What leads to one machine, always the same.
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

/// A [`Host`] for one guest on a machine that others share: `M` is an `Arc` of it, or a reference.
///
/// Threads of the guest, vCPUs and workers, take seats here, at most `SEATS` at a time, and are
/// waited for by nobody else's: neither does a guest whose threads have taken all seats keep
/// another's from joining, nor one whose [`Backing::page`](crate::Backing::page) takes long delay
/// another's changes of slots, also where two were made with one VMID. Who runs out of seats learns
/// of it alone ([`NoSeat`](slat::NoSeat)).
pub struct OwnSeats<M, const SEATS: usize> {
    machine: M,
    grace: Grace<[Seat; SEATS]>,
}

impl<M: sealed::Leads, const SEATS: usize> OwnSeats<M, SEATS> {
    /// The machine, with seats for so many threads.
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
