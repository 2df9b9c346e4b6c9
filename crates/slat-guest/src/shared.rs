//! Guests, workers and vCPUs that own what they use: for VMMs whose threads outlive the function
//! that made them.
//!
//! [`Guest`], [`Worker`] and [`Vcpu`] borrow, which takes no allocation. Here a guest is shared by
//! [`Arc`]; each thread's part holds the guest, and room for its table pages; all of them are
//! `'static`. A thread works on its part inside a closure, which gets it for a lifetime of its own.
//!
//! # Safety of what is inside
//! Parts borrow for `'static` what lies on the heap beside them: the guest its host, a worker its
//! guest and its room. *Invariant*: nothing outside this file ever gets such a lifetime.
//! [`SharedGuest::get`] shortens it to that of the call's borrow. `with` hands a part out for
//! *every* lifetime `'a` that there is, so its closure, which has to work for all of them, can keep
//! nothing of `'a`, nor put anything there that borrows for less; two parts have two lifetimes,
//! even of one guest, and cannot be exchanged. Fields are dropped in the order in which they are
//! declared: the worker, its room, the guest, the host.
//!
//! ```
//! # use slat::{Access, Format, Gpa};
//! # use slat_guest::*;
//! fn run<F: Format, H: Host + 'static, B: Backing + 'static>(vcpu: &mut SharedVcpu<F, H, B>) {
//!     let outcome: Outcome = vcpu.with(|vcpu| vcpu.fault(Gpa(0), Access::Read));
//! #   drop(outcome);
//! }
//! ```
//! # What does not compile
//! What a part borrows does not leave the closure, neither as its result
//! ```compile_fail
//! # use slat::Format;
//! # use slat_guest::*;
//! fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(vcpu: &mut SharedVcpu<F, H, B>) {
//!     let guest = vcpu.with(|vcpu| vcpu.worker().guest());
//! }
//! ```
//! nor by the back door;
//! ```compile_fail
//! # use slat::Format;
//! # use slat_guest::*;
//! fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(vcpu: &mut SharedVcpu<F, H, B>) {
//!     let mut kept = None;
//!     vcpu.with(|vcpu| kept = Some(vcpu.worker().guest()));
//! }
//! ```
//! two parts are not exchanged;
//! ```compile_fail
//! # use slat::Format;
//! # use slat_guest::*;
//! fn swap<F: Format, H: Host + 'static, B: Backing + 'static>(
//!     one: &mut SharedVcpu<F, H, B>,
//!     other: &mut SharedVcpu<F, H, B>,
//! ) {
//!     one.with(|one| other.with(|other| core::mem::swap(one, other)));
//! }
//! ```
//! nor is one replaced by another that borrows for less.
//! ```compile_fail
//! # use slat::Format;
//! # use slat_guest::*;
//! fn replace<F: Format, H: Host + 'static, B: Backing + 'static>(
//!     worker: &mut SharedWorker<F, H, B>,
//!     guest: &SharedGuest<F, H, B>,
//!     room: &mut TableRoom,
//! ) {
//!     worker.with(|worker| *worker = Worker::new(guest.get(), room).unwrap());
//! }
//! ```
//! A reference to the guest goes with the handle that it came from.
//! ```compile_fail,E0505
//! # use slat::Format;
//! # use slat_guest::*;
//! fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(guest: SharedGuest<F, H, B>) {
//!     let inside = guest.get();
//!     drop(guest);
//!     inside.stats();
//! }
//! ```
//! So does the machine that it names.
//! ```compile_fail,E0505
//! # use slat::Format;
//! # use slat_guest::*;
//! fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(guest: SharedGuest<F, H, B>) {
//!     let machine = guest.get().tables().platform();
//!     drop(guest);
//!     machine.now();
//! }
//! ```

use crate::backing::Backing;
use crate::budget::TABLE_PAGES;
use crate::config::Config;
use crate::guest::{Guest, GuestError};
use crate::host::Host;
use crate::vcpu::{Vcpu, VcpuError};
use crate::worker::{TableRoom, Worker};
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;
use core::ptr::NonNull;
use slat::{Format, Frame, NoSeat, Vmid};

/// A guest and its machine, shared by all who work on it. A clone is another handle.
///
/// The guest is dropped with the last handle, worker or vCPU, and gives back the frames of its
/// tables. A caller that loads a root into a CPU promises that no CPU has it loaded by then: the
/// caller takes a vCPU's root out of the CPU before it drops the [`SharedVcpu`].
pub struct SharedGuest<F: Format, H: Host + 'static, B: Backing + 'static>(Arc<Inner<F, H, B>>);

/// Dropped in the order of its fields: the guest's tables go back to the machine.
struct Inner<F: Format, H: Host + 'static, B: Backing + 'static> {
    guest: Guest<'static, F, H, B>,
    host: Arc<H>,
}

impl<F: Format, H: Host + 'static, B: Backing + 'static> Clone for SharedGuest<F, H, B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F: Format, H: Host + 'static, B: Backing + 'static> fmt::Debug for SharedGuest<F, H, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedGuest").field("vmid", &self.get().tables().vmid()).finish()
    }
}

impl<F: Format, H: Host + 'static, B: Backing + 'static> SharedGuest<F, H, B> {
    /// Makes a guest without memory, on a machine that others may share: see [`Guest::new`].
    ///
    /// # Errors
    /// [`GuestError`] says why the guest could not be made.
    pub fn new(
        format: F,
        vmid: Vmid,
        address_bits: u32,
        host: Arc<H>,
        backing: B,
        config: Config,
    ) -> Result<Self, GuestError> {
        // SAFETY: the machine lies in the `Arc`, which neither moves it nor lets anybody have it
        // for themselves. It is dropped after `guest`, the only holder of this reference: the
        // invariant of this file.
        let borrowed: &'static H = unsafe { &*Arc::as_ptr(&host) };
        let guest = Guest::new(format, vmid, address_bits, borrowed, backing, config)?;
        Ok(Self(Arc::new(Inner { guest, host })))
    }

    /// The guest, borrowed from the handle.
    pub fn get(&self) -> &Guest<'_, F, H, B> {
        &self.0.guest
    }

    /// The machine.
    pub fn host(&self) -> &Arc<H> {
        &self.0.host
    }

    /// Makes a thread's part: [`Worker::new`].
    ///
    /// # Errors
    /// [`NoSeat`] if all seats among the threads that walk the host's tables are taken.
    pub fn worker(&self) -> Result<SharedWorker<F, H, B>, NoSeat> {
        let room = Room::new();
        // SAFETY: what both borrow is held by the result, which drops the part first.
        let part = unsafe { Worker::new(self.forever(), room.forever()) }?;
        Ok(SharedWorker { part, _room: room, guest: self.clone() })
    }

    /// Makes the part of the thread that runs vCPU `id`: [`Vcpu::new`].
    ///
    /// # Errors
    /// [`VcpuError`].
    pub fn vcpu(&self, id: u16) -> Result<SharedVcpu<F, H, B>, VcpuError> {
        let room = Room::new();
        // SAFETY: as above.
        let part = unsafe { Vcpu::new(self.forever(), id, room.forever()) }?;
        Ok(SharedVcpu { part, _room: room, guest: self.clone() })
    }

    /// # Safety
    /// The reference is not used after the last handle has gone, and leaves this file with another
    /// lifetime only.
    unsafe fn forever(&self) -> &'static Guest<'static, F, H, B> {
        // SAFETY: it lies in the `Arc`, and is handed out shared only; the rest is the caller's.
        unsafe { &*core::ptr::from_ref(&self.0.guest) }
    }
}

/// Room for a thread's table pages, on the heap: it does not move, and only the part that borrows
/// it touches it. (A `Box` would claim to be the only way to it whenever it is moved.)
struct Room(NonNull<TableRoom>);

// SAFETY: it owns what it points to, as a `Box` does, and a `TableRoom` may be sent.
unsafe impl Send for Room where TableRoom: Send {}
// SAFETY: a shared reference gives nothing.
unsafe impl Sync for Room {}

impl Room {
    fn new() -> Self {
        Self(NonNull::from(Box::leak(Box::new([const { None }; TABLE_PAGES]))))
    }

    /// # Safety
    /// Called once; the reference is not used after `self` was dropped.
    unsafe fn forever(&self) -> &'static mut [Option<Frame>] {
        // SAFETY: it points to a room of a box's, which nobody else refers to: called once.
        unsafe { &mut *self.0.as_ptr() }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: a box was leaked for it, which nobody gave back; who borrowed it has gone.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

macro_rules! part {
    ($(#[$doc:meta])* $name:ident, $part:ident) => {
        $(#[$doc])*
        ///
        /// It may be sent to another thread, and holds the guest.
        pub struct $name<F: Format, H: Host + 'static, B: Backing + 'static> {
            part: $part<'static, F, H, B>,
            _room: Room,
            guest: SharedGuest<F, H, B>,
        }

        impl<F: Format, H: Host + 'static, B: Backing + 'static> $name<F, H, B> {
            /// Does `work` with it.
            pub fn with<R>(
                &mut self,
                work: impl for<'a> FnOnce(&mut $part<'a, F, H, B>) -> R,
            ) -> R {
                let part = (&raw mut self.part).cast::<$part<'_, F, H, B>>();
                // SAFETY: the same type but for a lifetime, of a field that is borrowed for
                // itself. Nothing that borrows for less gets into it, and nothing of it out:
                // `work` has to do for each lifetime.
                work(unsafe { &mut *part })
            }

            /// The guest.
            pub const fn guest(&self) -> &SharedGuest<F, H, B> {
                &self.guest
            }
        }

        impl<F: Format, H: Host + 'static, B: Backing + 'static> fmt::Debug for $name<F, H, B> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("guest", &self.guest).finish()
            }
        }
    };
}

part!(
    /// A thread that works on a guest's memory: a [`Worker`] that owns what it stands on.
    SharedWorker, Worker
);
part!(
    /// A thread that runs one of the guest's vCPUs: a [`Vcpu`] that owns what it stands on.
    SharedVcpu, Vcpu
);
