//! Threads that run a vCPU.

use crate::backing::Backing;
use crate::guest::Guest;
use crate::host::Host;
use crate::waits::Places;
use crate::worker::Worker;
use core::fmt;
use core::sync::atomic::Ordering;
use slat::{Format, GuestRoot, Hpa, TooManyReaders};

/// A thread that runs one of the guest's vCPUs and handles its faults.
///
/// ```
/// # use slat::*;
/// # use slat_guest::*;
/// # fn load<F: Format>(_root: GuestRoot<F>) {}
/// # fn enter_guest() -> (Gpa, Access) { (Gpa(0), Access::Read) }
/// # fn emulate(_gpa: Gpa) {}
/// fn run<F: Format, H: Host, B: Backing>(vcpu: &mut Vcpu<'_, F, H, B>) -> Refusal {
///     load(vcpu.guest_root()); // into VTTBR_EL2, EPTP, N_CR3, hgatp
///     loop {
///         let (gpa, access) = enter_guest();
///         match vcpu.fault(gpa, access) {
///             Outcome::Mmio => emulate(gpa),
///             Outcome::RingFull => _ = vcpu.worker().reset_rings(), // after a harvest
///             Outcome::Refused(reason) => return reason,
///             _ => {} // the guest goes on
///         }
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Vcpu<'w, F: Format, H: Host, B: Backing> {
    pub(crate) worker: Worker<'w, F, H, B>,
    pub(crate) id: u16,
    /// The view that it runs on; `None` if it runs on the tables that vCPUs share.
    pub(crate) view: Option<u16>,
    /// It has reported that it runs, and that its view is live.
    pub(crate) announced: bool,
    /// The pages that it waits for.
    pub(crate) waits: Places,
}

/// Why a vCPU could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VcpuError {
    /// All reader slots among the threads that walk the host's tables are taken.
    TooManyReaders(TooManyReaders),
    /// Another `Vcpu` with that number exists.
    Taken,
    /// The guest has no vCPU with that number.
    NoSuchVcpu {
        /// The number of the guest's vCPUs.
        vcpus: u16,
    },
}

impl fmt::Display for VcpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManyReaders(error) => error.fmt(f),
            Self::Taken => {
                f.write_str("a thread runs the vCPU of that number already; drop it first")
            }
            Self::NoSuchVcpu { vcpus } => {
                write!(f, "the guest has vCPUs 0 to {}", vcpus.saturating_sub(1))
            }
        }
    }
}

impl core::error::Error for VcpuError {}

impl<F: Format, H: Host, B: Backing> Drop for Vcpu<'_, F, H, B> {
    fn drop(&mut self) {
        self.wait_for_nothing();
        self.worker.guest.vcpus[self.id as usize].taken.store(false, Ordering::Release);
    }
}

impl<'w, F: Format, H: Host, B: Backing> Vcpu<'w, F, H, B> {
    /// Makes the thread's handle for vCPU `id`. One thread at a time has it.
    ///
    /// # Errors
    /// [`VcpuError`].
    pub fn new(guest: &'w Guest<'w, F, H, B>, id: u16) -> Result<Self, VcpuError> {
        if id >= guest.config.vcpus {
            return Err(VcpuError::NoSuchVcpu { vcpus: guest.config.vcpus });
        }
        let mut worker = Worker::new(guest).map_err(VcpuError::TooManyReaders)?;
        worker.counters = &guest.vcpus[id as usize].totals;
        if guest.vcpus[id as usize].taken.swap(true, Ordering::AcqRel) {
            return Err(VcpuError::Taken);
        }
        Ok(Self {
            worker,
            id,
            view: guest.caches.view(id),
            announced: false,
            waits: Places::default(),
        })
    }

    /// Returns the vCPU's number.
    pub const fn id(&self) -> u16 {
        self.id
    }

    /// Returns the thread's worker, which has the operations that any thread can do.
    pub const fn worker(&mut self) -> &mut Worker<'w, F, H, B> {
        &mut self.worker
    }

    /// Returns the root that a CPU loads before it runs the vCPU. It changes only when the vCPU's
    /// caches are switched on or off, and only if the policy gives the vCPU a view of its own. A
    /// CPU that changes roots first invalidates its own TLB entries of the guest (Arm: both roots
    /// have one VMID, so CnP is 0, and `tlbi vmalls12e1`, `dsb nsh`, `isb` come before the entry).
    ///
    /// A caller that loads it into a CPU promises that no CPU has it loaded when the guest is
    /// dropped.
    pub fn root(&self) -> Hpa {
        self.worker.guest.space(self.view).root()
    }

    /// Returns [`Vcpu::root`] with the guest's VMID, format and geometry, for the registers of the
    /// CPU that runs the vCPU. It is made anew where `root` is read anew, and after
    /// [`Guest::set_vmid`].
    pub fn guest_root(&self) -> GuestRoot<F> {
        self.worker.guest.space(self.view).guest_root()
    }

    #[inline]
    pub(crate) fn ring_is_full(&self) -> bool {
        let ring = self.worker.guest.rings.get(self.id as usize);
        ring.is_some_and(|ring| ring.is_full())
    }
}
