//! A guest's own reader slots and clock on a machine that several guests share. The machine does
//! the rest.
//!
//! A thread takes a reader slot to enter tables. A thread that changes memslots, reads a log that
//! hardware keeps, or frees tables looks at all reader slots of its [`Platform::readers`]. If
//! guests share one, a guest affects the others in three ways:
//! 1. Its threads may take the last reader slot.
//! 2. Guests with the same VMID are not told apart, because a reader slot has the VMID of the
//!    tables.
//! 3. Its threads write the cache line of the clock.
//!
//! [`OwnReaders`] avoids all three.

use crate::device_notifier::DeviceTables;
use crate::host::Host;
use crate::private::PrivateHooks;
use alloc::sync::Arc;
use core::fmt;
use core::num::NonZeroUsize;
use core::ptr::NonNull;
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
    Vmid,
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
/// The guest's threads, vCPUs and workers, take reader slots here, at most `READERS` at a time, and
/// only the guest's own threads wait for them. So a guest whose threads have taken all its reader
/// slots does not keep threads of other guests out, and a guest whose
/// [`Backing::page`](crate::Backing::page) takes long does not delay changes of memslots of other
/// guests, even if two guests have one VMID. Only the guest that runs out of reader slots is
/// refused one ([`TooManyReaders`](slat::TooManyReaders)).
///
/// [`Host::wake`] and [`Events`](crate::Events) of the machine have the VMID alone: they cannot
/// tell guests with one VMID apart.
pub struct OwnReaders<M, const READERS: usize> {
    machine: M,
    readers: Readers<[ReaderSlot; READERS]>,
}

impl<M: sealed::Leads, const READERS: usize> OwnReaders<M, READERS> {
    /// Makes a host on `machine`, with reader slots for `READERS` threads.
    pub fn new(machine: M) -> Self {
        Self {
            machine,
            readers: Readers::<[ReaderSlot; READERS]>::new(core::array::from_fn(|_| {
                ReaderSlot::new()
            })),
        }
    }

    /// Returns the machine.
    pub fn machine(&self) -> &M::Host {
        self.machine.machine()
    }
}

impl<M, const READERS: usize> fmt::Debug for OwnReaders<M, READERS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnReaders").field("readers", &READERS).finish_non_exhaustive()
    }
}

// SAFETY: by the numbers of `Platform`'s contract.
// - 1, 2, 3, 5, 6: the machine meets them, and it is the same machine at every call, because
//   `Leads` is sealed: a frame of one is a frame of the other.
// - 4: `readers` is a field, and `break_before_make` is the machine's. Tables that the guest
//   unlinks wait for its own reader slots alone, and no thread can be inside them without one:
//   `Tables::enter` takes only readers of this platform.
unsafe impl<M: sealed::Leads, const READERS: usize> Platform for OwnReaders<M, READERS> {
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
    fn readers(&self) -> &Readers {
        &self.readers
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

impl<M: sealed::Leads, const READERS: usize> Host for OwnReaders<M, READERS> {
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
