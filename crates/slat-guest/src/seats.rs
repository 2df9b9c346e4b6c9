//! A guest's own seats and clock on a machine that several guests share. The machine does the rest.
//!
//! A thread takes a seat to enter tables. A thread that changes memslots, reads a log that hardware
//! keeps, or frees tables looks at all seats of its [`Platform::grace`]. If guests share one, a
//! guest affects the others in three ways:
//! 1. Its threads may take the last seat.
//! 2. Guests with the same VMID are not told apart, because a seat has the VMID of the tables.
//! 3. Its threads write the cache line of the clock.
//!
//! [`OwnSeats`] avoids all three.

use crate::follow::DeviceTables;
use crate::host::Host;
use crate::private::PrivateHooks;
use alloc::sync::Arc;
use core::fmt;
use core::num::NonZeroUsize;
use core::ptr::NonNull;
use slat::{
    BreakBeforeMake, Frame, Grace, Hpa, Invalidation, Maintenance, Platform, Pte, Seat, Vmid,
};

mod sealed {
    use super::{Arc, Host};

    /// A reference or pointer that always leads to the same machine.
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

/// A [`Host`] for one guest, on a machine that several guests share. `M` is an `Arc` of the
/// machine, or a reference.
///
/// The guest's threads, vCPUs and workers, take seats here, at most `SEATS` at a time, and only the
/// guest's own threads wait for them. So a guest whose threads have taken all its seats does not
/// keep threads of other guests out, and a guest whose [`Backing::page`](crate::Backing::page)
/// takes long does not delay changes of memslots of other guests, even if two guests have one VMID.
/// Only the guest that runs out of seats is refused one ([`NoSeat`](slat::NoSeat)).
///
/// [`Host::wake`] and [`Events`](crate::Events) of the machine have the VMID alone: they cannot
/// tell guests with one VMID apart.
pub struct OwnSeats<M, const SEATS: usize> {
    machine: M,
    grace: Grace<[Seat; SEATS]>,
}

impl<M: sealed::Leads, const SEATS: usize> OwnSeats<M, SEATS> {
    /// Makes a host on `machine`, with seats for `SEATS` threads.
    pub fn new(machine: M) -> Self {
        Self { machine, grace: Grace::<[Seat; SEATS]>::new(core::array::from_fn(|_| Seat::new())) }
    }

    /// Returns the machine.
    pub fn machine(&self) -> &M::Host {
        self.machine.machine()
    }
}

impl<M, const SEATS: usize> fmt::Debug for OwnSeats<M, SEATS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnSeats").field("seats", &SEATS).finish_non_exhaustive()
    }
}

// SAFETY: by the numbers of `Platform`'s contract.
// - 1, 2, 3, 5, 6: the machine meets them, and it is the same machine at every call, because
//   `Leads` is sealed: a frame of one is a frame of the other.
// - 4: `grace` is a field, and `break_before_make` is the machine's. Tables that the guest unlinks
//   wait for its own seats alone, and no thread can be inside them without one: `Tables::enter`
//   takes only members of this platform.
unsafe impl<M: sealed::Leads, const SEATS: usize> Platform for OwnSeats<M, SEATS> {
    #[inline]
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        self.machine().allocate(bytes)
    }

    #[inline]
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the caller promises it; the frame is from `allocate`, which is the machine's.
        unsafe { self.machine().free(frame, bytes) }
    }

    #[inline]
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.machine().entries(table)
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
    fn thread(&self) -> Option<NonZeroUsize> {
        self.machine().thread()
    }

    #[inline]
    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        self.machine().maintain(memory, bytes, what);
    }

    #[inline]
    fn fill(&self, slots: &mut [Pte], first: u64, step: u64) {
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

    fn invalidate_instructions(&self) {
        self.machine().invalidate_instructions();
    }

    fn between_pieces(&self) {
        self.machine().between_pieces();
    }

    fn private_hooks(&self) -> &dyn PrivateHooks {
        self.machine().private_hooks()
    }

    fn device_tables(&self) -> &dyn DeviceTables {
        self.machine().device_tables()
    }

    fn wake(&self, vmid: Vmid, vcpu: u16) {
        self.machine().wake(vmid, vcpu);
    }

    fn wait(&self) {
        self.machine().wait();
    }
}
