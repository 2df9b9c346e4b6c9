//! The machine: what the guest's memory needs beyond the engine's `Platform`.

use crate::device_notifier::{DeviceTables, NoDevices};
use crate::events::Events;
use crate::private::{NoHooks, PrivateHooks};
#[cfg(not(loom))]
use slat::{AllocPlatform, Invalidation};
use slat::{Platform, Vmid};

/// The machine: a [`Platform`] with a clock. Threads share it, so it is `Sync` if there is more
/// than one.
///
/// # Panics
/// If a method that this crate calls on behalf of an operation panics, the panic passes through the
/// operation, which has done a part of its work, and can be called again. Pages keep their state,
/// their marks stay to be reported, and changes of memslots go on where they stopped. [`Host::now`]
/// and [`Host::wait`] are called while work is half done, so they must not panic; where they do, no
/// memory is used after it was freed. [`Platform`] methods do not panic: its contract says so.
///
/// A machine that has a platform of its own passes the methods of [`Platform`] on to it, and adds
/// the clock. [`AllocPlatform`](slat::AllocPlatform) is a host as it is; its clock stands still.
///
/// ```
/// use slat::*;
/// use slat_guest::Host;
///
/// struct Machine {
///     pages: AllocPlatform,
///     start: std::time::Instant,
/// }
///
/// // SAFETY: each method is that of a platform.
/// unsafe impl Platform for Machine {
///     fn allocate(&self, bytes: usize) -> Option<Frame> {
///         self.pages.allocate(bytes)
///     }
///     unsafe fn free(&self, frame: Frame, bytes: usize) {
///         // SAFETY: the caller's promise is the callee's.
///         unsafe { self.pages.free(frame, bytes) }
///     }
///     fn entries(&self, table: Hpa) -> core::ptr::NonNull<Pte> {
///         self.pages.entries(table)
///     }
///     fn publish(&self) {}
///     fn invalidate(&self, _: &Invalidation) {} // no CPU loads these tables
///     fn break_before_make(&self) -> BreakBeforeMake {
///         BreakBeforeMake::Never
///     }
///     fn readers(&self) -> &Readers {
///         self.pages.readers()
///     }
/// }
///
/// impl Host for Machine {
///     fn now(&self) -> u64 {
///         self.start.elapsed().as_nanos() as u64
///     }
///     fn wait(&self) {
///         std::thread::yield_now();
///     }
/// }
/// ```
pub trait Host: Platform {
    /// Returns the time by a clock that never goes back, in ticks of its own: the unit of
    /// [`Stats`](crate::Stats).
    fn now(&self) -> u64;

    /// Makes all CPUs discard the instructions that they have cached, for a vCPU that is reset (Arm
    /// without CTR_EL0.DIC: `ic ialluis`, `dsb ish`, `isb`; x86: nothing).
    fn invalidate_instructions(&self) {}

    /// Returns the receiver of the guests' events; by default there is none.
    ///
    /// An implementation that has a field for it returns `&self.events`.
    #[inline(always)]
    fn events(&self) -> impl Events {}

    /// Runs between pieces of work on a whole memslot (1 GiB, or the largest leaf): when a memslot
    /// is deleted or moves, a log begins or ends, huge pages are built again, or writes are held.
    /// The thread that does the work calls this, and goes on with it when this returns.
    ///
    /// The thread is outside the tables, so only threads that want to change memslots wait for it:
    /// faults, reads and clears of logs, ageing and invalidations go on, and unlinked tables are
    /// freed. An implementation may take as long as it likes, and yield its CPU. [`Event::Piece`]
    /// reports the progress.
    ///
    /// [`Event::Piece`]: crate::Event::Piece
    fn between_pieces(&self) {}

    /// Returns the hooks that follow private memory, and may refuse it; by default they do nothing.
    fn private_hooks(&self) -> &dyn PrivateHooks {
        &NoHooks
    }

    /// Returns devices' tables that follow the guest's; by default there are none.
    fn device_tables(&self) -> &dyn DeviceTables {
        &NoDevices
    }

    /// Reports that vCPU `vcpu` of the guest with VMID `vmid` may go on: a page that it waits for
    /// has arrived ([`Vcpu::ready`](crate::Vcpu::ready)). A host whose vCPUs sleep meanwhile, or
    /// run something else, wakes the vCPU. A wake-up that comes before the sleep must end the sleep
    /// at once, as with `std::thread::unpark`.
    ///
    /// `vmid` is the VMID of the guest's tables. Where guests have the same VMID, as they may with
    /// [`OwnReaders`](crate::OwnReaders), it does not tell them apart: such a host wakes this vCPU
    /// of each, or gives each guest a machine that knows the guest.
    ///
    /// If it panics, vCPUs that were to be woken after this one are not: [`Guest::arrived`] for the
    /// same memory wakes them.
    ///
    /// [`Guest::arrived`]: crate::Guest::arrived
    fn wake(&self, _vmid: Vmid, _vcpu: u16) {}

    /// Lets other threads run while the caller waits for them.
    fn wait(&self) {
        core::hint::spin_loop();
    }
}

/// A host for tests and user space. Its clock stands still, so times in [`Stats`](crate::Stats) are
/// 0.
#[cfg(not(loom))]
impl<I: Fn(&Invalidation)> Host for AllocPlatform<I> {
    fn now(&self) -> u64 {
        0
    }
}
