//! Guests, workers and vCPUs that own what they use, for VMMs whose threads outlive the function
//! that made them.
//!
//! [`Guest`], [`Worker`] and [`Vcpu`] borrow. In this module an [`Arc`] shares a guest, which each
//! thread's part holds; all of them are `'static`. A thread works on its part inside a closure,
//! which gets the part with a lifetime of its own.
//!
//! # Safety of what is inside
//! Parts borrow, for `'static`, memory on the heap that they own: the guest its host, a worker its
//! guest. *Invariant*: no code outside this file ever gets such a lifetime.
//! 1. [`SharedGuest::get`] shortens it to the lifetime of the call's borrow.
//! 2. `with` hands a part out for *every* lifetime `'a`. Its closure has to work for all of them.
//!    So it can keep nothing of `'a`, and can put nothing there that borrows for less. Two parts,
//!    even of one guest, have two lifetimes, and cannot be exchanged.
//! 3. Fields are dropped in the order in which they are declared: the worker, the guest, the host.

use crate::backing::Backing;
use crate::config::Config;
use crate::guest::{Guest, GuestError};
use crate::host::Host;
use crate::vcpu::{Vcpu, VcpuError};
use crate::worker::Worker;
use alloc::sync::Arc;
use core::fmt;
use slat::{Format, TooManyReaders, Vmid};

/// A handle for a guest and its machine, shared by all threads that work on the guest. A clone is
/// another handle.
///
/// The guest is dropped with the last handle, worker or vCPU, and frees the frames of its tables. A
/// caller that loads a root into a CPU promises that no CPU has it loaded by then: the caller takes
/// a vCPU's root out of the CPU before it drops the [`SharedVcpu`].
pub struct SharedGuest<F: Format, H: Host + 'static, B: Backing + 'static>(Arc<Inner<F, H, B>>);

/// The fields are dropped in this order: the guest's tables go back to the machine.
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
        // SAFETY:
        // 1. The machine lies in the `Arc`, which neither moves it nor gives exclusive access to
        //    it.
        // 2. It is dropped after `guest`, the only holder of this reference, by point 3 of this
        //    file's invariant.
        let borrowed: &'static H = unsafe { &*Arc::as_ptr(&host) };
        let guest = Guest::new(format, vmid, address_bits, borrowed, backing, config)?;
        Ok(Self(Arc::new(Inner { guest, host })))
    }

    /// Returns the guest, borrowed from the handle.
    pub fn get(&self) -> &Guest<'_, F, H, B> {
        &self.0.guest
    }

    /// Returns the machine.
    pub fn host(&self) -> &Arc<H> {
        &self.0.host
    }

    /// Makes a thread's part: see [`Worker::new`].
    ///
    /// # Errors
    /// [`TooManyReaders`] if all reader slots among the threads that walk the host's tables are
    /// taken.
    pub fn worker(&self) -> Result<SharedWorker<F, H, B>, TooManyReaders> {
        // SAFETY: the result holds the guest that the part borrows, and drops the part first.
        let part = Worker::new(unsafe { self.forever() })?;
        Ok(SharedWorker { part, guest: self.clone() })
    }

    /// Makes the part of the thread that runs vCPU `id`: see [`Vcpu::new`].
    ///
    /// # Errors
    /// [`VcpuError`].
    pub fn vcpu(&self, id: u16) -> Result<SharedVcpu<F, H, B>, VcpuError> {
        // SAFETY: as above.
        let part = Vcpu::new(unsafe { self.forever() }, id)?;
        Ok(SharedVcpu { part, guest: self.clone() })
    }

    /// # Safety
    /// 1. The caller does not use the reference after the last handle is dropped.
    /// 2. The reference leaves this file only with another lifetime.
    unsafe fn forever(&self) -> &'static Guest<'static, F, H, B> {
        // SAFETY: the guest lies in the `Arc`, which only gives shared access to it. The caller
        // promises the rest.
        unsafe { &*core::ptr::from_ref(&self.0.guest) }
    }
}

macro_rules! part {
    ($(#[$doc:meta])* $name:ident, $part:ident) => {
        $(#[$doc])*
        pub struct $name<F: Format, H: Host + 'static, B: Backing + 'static> {
            part: $part<'static, F, H, B>,
            guest: SharedGuest<F, H, B>,
        }

        impl<F: Format, H: Host + 'static, B: Backing + 'static> $name<F, H, B> {
            /// Calls `work` with the part.
            pub fn with<R>(
                &mut self,
                work: impl for<'a> FnOnce(&mut $part<'a, F, H, B>) -> R,
            ) -> R {
                let part = (&raw mut self.part).cast::<$part<'_, F, H, B>>();
                // SAFETY: the two types differ in a lifetime only, and the field is exclusively
                // borrowed. By point 2 of this file's invariant `work` can put nothing into it that
                // borrows for less, and keeps nothing of it.
                work(unsafe { &mut *part })
            }

            /// Returns the guest.
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
    /// A thread that works on a guest's memory: a [`Worker`] that owns what it uses. It may be sent
    /// to another thread, and keeps the guest alive.
    SharedWorker, Worker
);
part!(
    /// A thread that runs one of the guest's vCPUs: a [`Vcpu`] that owns what it uses. It may be
    /// sent to another thread, and keeps the guest alive.
    ///
    /// ```
    /// # use slat::{Access, Format, Gpa};
    /// # use slat_guest::*;
    /// fn run<F: Format, H: Host + 'static, B: Backing + 'static>(vcpu: &mut SharedVcpu<F, H, B>) {
    ///     let outcome: Outcome = vcpu.with(|vcpu| vcpu.fault(Gpa(0), Access::Read));
    /// #   drop(outcome);
    /// }
    /// ```
    ///
    /// # What does not compile
    /// A reference that a part borrows cannot leave the closure as its result.
    /// ```compile_fail
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(
    ///     vcpu: &mut SharedVcpu<F, H, B>,
    /// ) {
    ///     let guest = vcpu.with(|vcpu| vcpu.worker().guest());
    /// }
    /// ```
    /// It cannot leave by a captured variable.
    /// ```compile_fail
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(
    ///     vcpu: &mut SharedVcpu<F, H, B>,
    /// ) {
    ///     let mut kept = None;
    ///     vcpu.with(|vcpu| kept = Some(vcpu.worker().guest()));
    /// }
    /// ```
    /// Two parts cannot be exchanged.
    /// ```compile_fail
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn swap<F: Format, H: Host + 'static, B: Backing + 'static>(
    ///     one: &mut SharedVcpu<F, H, B>,
    ///     other: &mut SharedVcpu<F, H, B>,
    /// ) {
    ///     one.with(|one| other.with(|other| core::mem::swap(one, other)));
    /// }
    /// ```
    /// A part cannot be replaced by another that borrows for less.
    /// ```compile_fail
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn replace<F: Format, H: Host + 'static, B: Backing + 'static>(
    ///     worker: &mut SharedWorker<F, H, B>,
    ///     guest: &SharedGuest<F, H, B>,
    /// ) {
    ///     worker.with(|worker| *worker = Worker::new(guest.get()).unwrap());
    /// }
    /// ```
    /// A reference to the guest cannot outlive the handle that it came from.
    /// ```compile_fail,E0505
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(guest: SharedGuest<F, H, B>) {
    ///     let inside = guest.get();
    ///     drop(guest);
    ///     inside.stats();
    /// }
    /// ```
    /// Neither can a reference to its machine.
    /// ```compile_fail,E0505
    /// # use slat::Format;
    /// # use slat_guest::*;
    /// fn keep<F: Format, H: Host + 'static, B: Backing + 'static>(guest: SharedGuest<F, H, B>) {
    ///     let machine = guest.get().tables().platform();
    ///     drop(guest);
    ///     machine.now();
    /// }
    /// ```
    SharedVcpu, Vcpu
);
