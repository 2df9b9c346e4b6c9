//! The dirty rings: each vCPU names the pages that it wrote, and stops when its ring is full
//! (api.rst, `KVM_CAP_DIRTY_LOG_RING`, "KVM_CAP_DIRTY_LOG_RING/KVM_CAP_DIRTY_LOG_RING_ACQ_REL").
//!
//! An entry goes from empty to dirty (the kernel), to harvested (here), to empty (the kernel, in
//! `KVM_RESET_DIRTY_RINGS`, which protects the page again). What a page holds may be read only
//! after that call: a write before it would not be named again.

use crate::Error;
use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The entry's flags (`KVM_DIRTY_GFN_F_DIRTY`, `KVM_DIRTY_GFN_F_RESET`).
const DIRTY: u32 = 1;
const HARVESTED: u32 = 2;

/// One vCPU's ring, mapped.
#[derive(Debug)]
pub(crate) struct Ring {
    entries: NonNull<kvm_dirty_gfn>,
    count: u32,
    /// The entry that is harvested next, of all that ever were.
    next: u32,
}

// SAFETY: the mapping belongs to no thread, and its words are accessed atomically.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring of a vCPU.
    ///
    /// # Safety
    /// `vcpu` is a vCPU of a VM whose dirty rings have `count` entries, a power of two.
    pub unsafe fn map(vcpu: impl AsFd, count: u32) -> Result<Self, Error> {
        let page = rustix::param::page_size() as u64;
        let bytes = count as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let mapped = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                vcpu,
                u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * page,
            )
        }
        .map_err(Error::os("mmap of a dirty ring"))?;
        let entries = NonNull::new(mapped.cast::<kvm_dirty_gfn>())
            .ok_or_else(|| Error::os("mmap of a dirty ring")(rustix::io::Errno::FAULT))?;
        Ok(Self { entries, count, next: 0 })
    }

    fn word32(&self, entry: u32, offset: usize) -> &AtomicU32 {
        let entry = self.entries.as_ptr().wrapping_add((entry & (self.count - 1)) as usize);
        let word = entry.cast::<u8>().wrapping_add(offset).cast::<u32>();
        // SAFETY: aligned, as the mapping starts on a page and the offset is a field's; within the
        // mapping, which `self` keeps; this process accesses it by atomics alone, as the kernel
        // does.
        unsafe { AtomicU32::from_ptr(word) }
    }

    fn word64(&self, entry: u32, offset: usize) -> &AtomicU64 {
        let entry = self.entries.as_ptr().wrapping_add((entry & (self.count - 1)) as usize);
        let word = entry.cast::<u8>().wrapping_add(offset).cast::<u64>();
        // SAFETY: as in `word32`; the one field of 64 bits is aligned to them.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// Takes what is in the ring, and tells each page: the slot, and the page of it.
    pub fn harvest(&mut self, mut page: impl FnMut(u32, u64)) -> u64 {
        let mut taken = 0;
        while taken < u64::from(self.count) {
            let flags = self.word32(self.next, offset_of!(kvm_dirty_gfn, flags));
            // What the kernel wrote before it set the flag is seen after.
            if flags.load(Ordering::Acquire) != DIRTY {
                break;
            }
            let slot = self.word32(self.next, offset_of!(kvm_dirty_gfn, slot));
            let offset = self.word64(self.next, offset_of!(kvm_dirty_gfn, offset));
            page(slot.load(Ordering::Relaxed), offset.load(Ordering::Relaxed));
            // The kernel fills the entry again once it sees this, so the loads come first.
            flags.store(HARVESTED, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            taken += 1;
        }
        taken
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let bytes = self.count as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: the mapping is this value's own, and no reference outlives its methods.
        let _ = unsafe { munmap(self.entries.as_ptr().cast(), bytes) };
    }
}

/// Where vCPUs with full rings and the one who harvests meet.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Grows with each reset.
    resets: u64,
    /// Stops because of a full ring since the guest was made.
    full: u64,
    /// vCPUs that wait.
    waiting: usize,
    /// A vCPU has finished since that was looked at last.
    finished: bool,
    /// Nobody will reset again.
    closed: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A vCPU's ring is full: waits until the rings were reset. False if nobody will.
    pub fn wait_for_reset(&self) -> bool {
        let mut state = self.lock();
        let seen = state.resets;
        state.full += 1;
        state.waiting += 1;
        self.changed.notify_all();
        while state.resets == seen && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        !state.closed
    }

    /// Waits until a vCPU's ring is full or a vCPU's thread has finished its work, or for a time.
    pub fn wait_for_full(&self, at_most: Duration) -> bool {
        let mut state = self.lock();
        if state.waiting == 0 && !state.finished {
            let waited = self.changed.wait_timeout(state, at_most);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.finished = false;
        state.waiting > 0
    }

    /// Whether a vCPU waits.
    pub fn has_full(&self) -> bool {
        self.lock().waiting > 0
    }

    /// A vCPU's thread has finished its work: whoever waits for full rings looks again.
    pub fn finish(&self) {
        self.lock().finished = true;
        self.changed.notify_all();
    }

    /// The rings were reset.
    pub fn reset(&self) {
        self.lock().resets += 1;
        self.changed.notify_all();
    }

    /// Lets all go that wait, now and later.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// How often a vCPU stopped because its ring was full.
    pub fn stops(&self) -> u64 {
        self.lock().full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vcpu_with_a_full_ring_waits_for_the_reset_and_is_let_go_when_nobody_will() {
        let gate = Gate::default();
        std::thread::scope(|scope| {
            let vcpu = scope.spawn(|| (gate.wait_for_reset(), gate.wait_for_reset()));
            while gate.stops() == 0 {
                gate.wait_for_full(Duration::from_millis(1));
            }
            gate.reset();
            while gate.stops() == 1 {
                gate.wait_for_full(Duration::from_millis(1));
            }
            gate.close();
            assert_eq!(vcpu.join().unwrap(), (true, false));
        });
    }
}
