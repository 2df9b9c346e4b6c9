//! The hypervisor's functions as the engine's `Platform`.

use crate::abi::{slat_invalidation, slat_maintenance, slat_platform, slat_status};
use core::ffi::c_void;
use core::ptr::NonNull;
use slat::{
    BreakBeforeMake, Frame, Hpa, Invalidation, Maintenance, Platform, Pte, ReaderSlot, Readers,
};

/// The hypervisor's functions; two of them may be missing.
pub struct Machine {
    context: *mut c_void,
    allocate: unsafe extern "C" fn(*mut c_void, usize) -> u64,
    free: unsafe extern "C" fn(*mut c_void, u64, usize),
    phys_to_virt: unsafe extern "C" fn(*mut c_void, u64) -> *mut c_void,
    publish: unsafe extern "C" fn(*mut c_void),
    invalidate: unsafe extern "C" fn(*mut c_void, *const slat_invalidation),
    invalidate_local: Option<unsafe extern "C" fn(*mut c_void, *const slat_invalidation)>,
    maintain: Option<unsafe extern "C" fn(*mut c_void, u64, u64, slat_maintenance)>,
    break_before_make: BreakBeforeMake,
    /// One thread at a time uses a space, and needs no reader slot.
    readers: Readers<[ReaderSlot; 0]>,
}

impl Machine {
    /// # Safety
    /// `of` keeps the promises of [`slat_platform`] for as long as the machine is used.
    pub unsafe fn new(of: &slat_platform) -> Result<Self, slat_status> {
        let null = slat_status::NullPointer;
        Ok(Self {
            context: of.context,
            allocate: of.allocate.ok_or(null)?,
            free: of.free.ok_or(null)?,
            phys_to_virt: of.phys_to_virt.ok_or(null)?,
            publish: of.publish.ok_or(null)?,
            invalidate: of.invalidate.ok_or(null)?,
            invalidate_local: of.invalidate_local,
            maintain: of.maintain,
            break_before_make: match of.break_before_make {
                0 => BreakBeforeMake::Always,
                1 => BreakBeforeMake::ConflictHandled,
                2 => BreakBeforeMake::Never,
                _ => return Err(slat_status::Argument),
            },
            readers: Readers::<[ReaderSlot; 0]>::new([]),
        })
    }
}

impl From<&Invalidation> for slat_invalidation {
    fn from(what: &Invalidation) -> Self {
        Self {
            start: what.range.map_or(0, |range| range.start().0),
            bytes: what.range.map_or(0, |range| range.size()),
            leaf: what.leaf.map_or(0, |leaf| leaf.bytes()),
            vmid: what.vmid.0,
            tables: what.tables,
        }
    }
}

// SAFETY: by the promises of `slat_platform`, which `Machine::new` requires:
// 1. a frame is memory of that size that no other code uses (1); `allocate` here refuses one that
//    is not aligned.
// 2. `ptes` points to it, the same at every call, until it is given back (2).
// 3. `invalidate` returns when no CPU can use what it names any more, and `invalidate_local` when
//    the calling CPU cannot (3).
// 4. `readers` is a field; `break_before_make` was read once, in `new`.
// 5. `fill` is the engine's own.
// 6. functions of C do not unwind (4). The code here panics only if a promise is broken, which ends
//    the program: no function of this crate lets a panic out.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the hypervisor's function, called as it is declared.
        let frame = unsafe { (self.allocate)(self.context, bytes) };
        if frame & (bytes as u64 - 1) != 0 {
            // SAFETY: as above; `allocate` returned the frame, and no other code has it.
            unsafe { (self.free)(self.context, frame, bytes) };
            return None;
        }
        // SAFETY: the frame is memory that `ptes` reaches, that no other code uses, within the
        // addresses that entries hold (promise 1 of `slat_platform`), and aligned, as was checked.
        unsafe { Frame::from_hpa(Hpa(frame)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the hypervisor's function; by this method's contract `allocate` returned the
        // frame for these bytes, and no software or hardware reaches it.
        unsafe { (self.free)(self.context, frame.hpa().0, bytes) };
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        // SAFETY: the hypervisor's function, called as it is declared.
        let ptes = unsafe { (self.phys_to_virt)(self.context, table.0) };
        NonNull::new(ptes.cast()).expect("phys_to_virt of a frame is not null")
    }

    fn publish(&self) {
        // SAFETY: the hypervisor's function, called as it is declared.
        unsafe { (self.publish)(self.context) };
    }

    fn invalidate(&self, what: &Invalidation) {
        let what = slat_invalidation::from(what);
        // SAFETY: the hypervisor's function; `what` lives until it returns.
        unsafe { (self.invalidate)(self.context, &raw const what) };
    }

    fn invalidate_local(&self, what: &Invalidation) {
        let (what, invalidate) =
            (slat_invalidation::from(what), self.invalidate_local.unwrap_or(self.invalidate));
        // SAFETY: as in `invalidate`.
        unsafe { invalidate(self.context, &raw const what) };
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.break_before_make
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, bytes: u64, what: Maintenance) {
        let Some(maintain) = self.maintain else { return };
        let what = match what {
            Maintenance::Data => slat_maintenance::Data,
            Maintenance::Instructions => slat_maintenance::Instructions,
        };
        // SAFETY: the hypervisor's function, called as it is declared.
        unsafe { maintain(self.context, memory.0, bytes, what) };
    }
}
