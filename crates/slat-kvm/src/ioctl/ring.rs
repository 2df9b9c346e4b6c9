//! A vCPU's dirty ring, mapped (api.rst, `KVM_CAP_DIRTY_LOG_RING`).
//!
//! An empty entry becomes dirty when the vCPU writes (set by the kernel), then harvested (set by
//! user space), then empty again (set by the kernel in `KVM_RESET_DIRTY_RINGS`, which also
//! write-protects the page again).
//!
//! # Ordering
//!
//! The flags of an entry identify its owner, the kernel or user space. Each transfer is a release
//! that is paired with an acquire:
//!
//! 1. The kernel writes slot and page before it sets `KVM_DIRTY_GFN_F_DIRTY`, with a write barrier
//!    in between. User space loads the flags with acquire and then reads slot and page.
//! 2. User space reads slot and page before it stores `KVM_DIRTY_GFN_F_RESET` with release. The
//!    kernel loads that with acquire, and fills the entry again only after it.
//! 3. The kernel empties an entry with a release store.
//!
//! So the kernel writes no part of an entry while it is dirty, and user space reads slot and page
//! only in that time.

use super::{Error, Result};
use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `KVM_DIRTY_GFN_F_DIRTY` and `KVM_DIRTY_GFN_F_RESET`. kvm-bindings 0.14.2 has only the mask of
/// both.
const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

/// The state of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryState {
    /// It names no page (flags 00). The kernel fills it.
    Empty,
    /// It names a page that was written (flags 01). User space harvests it.
    Dirty,
    /// User space has harvested it (flags 1X). `KVM_RESET_DIRTY_RINGS` resets it.
    Harvested,
}

impl EntryState {
    fn of(flags: u32) -> Self {
        match flags {
            _ if flags & RESET != 0 => Self::Harvested,
            _ if flags & DIRTY != 0 => Self::Dirty,
            _ => Self::Empty,
        }
    }
}

/// The page that an entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirtyPage {
    /// The memslot, with the address space in bits 31:16.
    pub slot: u32,
    /// The page, counted from the start of the slot.
    pub page: u64,
}

/// One vCPU's ring. It is unmapped when it is dropped.
#[derive(Debug)]
pub struct DirtyRing {
    entries: NonNull<kvm_dirty_gfn>,
    count: u32,
    /// Number of the next entry to harvest, counted since the ring was made. It may wrap, because
    /// 2^32 is a multiple of `count`.
    next: u32,
}

// SAFETY: the mapping belongs to the process and not to a thread, and `DirtyRing` owns it. `count`
// and `next` are numbers.
unsafe impl Send for DirtyRing {}

impl DirtyRing {
    /// [`map_dirty_ring`](super::VcpuDirtyRing::map_dirty_ring).
    ///
    /// # Safety
    /// `vcpu` is a vCPU whose ring has `bytes` bytes.
    pub(super) unsafe fn map(vcpu: &impl AsRawFd, bytes: u32) -> Result<Self> {
        let count = bytes / size_of::<kvm_dirty_gfn>() as u32;
        if !bytes.is_power_of_two() || count == 0 {
            return Err(Error::new(libc::EINVAL));
        }
        // Page 0 is `kvm_run`, so an offset of 0 means that kvm-bindings does not know the rings'
        // offset.
        if KVM_DIRTY_LOG_PAGE_OFFSET == 0 {
            return Err(Error::new(libc::ENOTSUP));
        }
        // SAFETY: the call reads and writes no memory of the process, for any argument.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if page < 0 {
            return Err(Error::last());
        }
        // SAFETY:
        // - the kernel chooses the address, so the mapping replaces no other;
        // - the length is not 0, and the offset is a multiple of the page size;
        // - the descriptor is a vCPU's, by the contract of this function. This process and the
        //   kernel share the mapped memory, and this type makes all accesses to it.
        let mapped = unsafe {
            libc::mmap(
                null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                libc::off_t::from(page) * libc::off_t::from(KVM_DIRTY_LOG_PAGE_OFFSET),
            )
        };
        match NonNull::new(mapped.cast()) {
            Some(entries) if mapped != libc::MAP_FAILED => Ok(Self { entries, count, next: 0 }),
            _ => Err(Error::last()),
        }
    }

    /// Returns the number of entries of the ring, a power of two.
    pub fn entries(&self) -> u32 {
        self.count
    }

    /// Returns the state of an entry by its place in the ring, modulo the number of entries. The
    /// load is an acquire.
    pub fn state(&self, entry: u32) -> EntryState {
        EntryState::of(self.flags(entry).load(Ordering::Acquire))
    }

    /// Harvests the next entry if it is dirty. Entries are harvested in the order in which the
    /// kernel filled them, and none is skipped.
    ///
    /// The caller reads the page's contents only after
    /// [`reset_dirty_rings`](super::VmDirtyLog::reset_dirty_rings). Where hardware has a buffer of
    /// its own (Intel's PML), KVM moves its contents to the ring at the vCPU's next exit.
    pub fn harvest_next(&mut self) -> Option<DirtyPage> {
        // Acquire (rule 1): the loads below see the kernel's writes before it set the flag.
        if self.state(self.next) != EntryState::Dirty {
            return None;
        }
        let slot = self.slot(self.next).load(Ordering::Relaxed);
        let page = self.offset(self.next).load(Ordering::Relaxed);
        // Release (rule 2): the kernel may fill the entry again once it sees this, so the loads are
        // done before.
        self.flags(self.next).store(RESET, Ordering::Release);
        self.next = self.next.wrapping_add(1);
        Some(DirtyPage { slot, page })
    }

    /// Harvests the dirty entries, at most once around the ring, and calls `tell` with each page.
    /// Returns the number of entries, all of which must be reset.
    pub fn harvest(&mut self, mut tell: impl FnMut(DirtyPage)) -> u32 {
        let mut taken = 0;
        while taken < self.count {
            let Some(page) = self.harvest_next() else { break };
            tell(page);
            taken += 1;
        }
        taken
    }

    /// Returns a pointer to a field of an entry of the ring.
    fn field<T>(&self, entry: u32, offset: usize) -> *mut T {
        let entry = self.entries.as_ptr().wrapping_add((entry & (self.count - 1)) as usize);
        entry.cast::<u8>().wrapping_add(offset).cast()
    }

    fn flags(&self, entry: u32) -> &AtomicU32 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, flags));
        // SAFETY:
        // - aligned: the mapping starts on a page, and this is a field of that type;
        // - valid for as long as the result lives: the entry is one of `count`, all of which lie in
        //   the mapping by the contract of `map`, and `self` keeps the mapping;
        // - this process accesses the field by this function only, and so atomically. The kernel
        //   stores it in one piece, ordered by the rules of the module.
        unsafe { AtomicU32::from_ptr(field) }
    }

    fn slot(&self, entry: u32) -> &AtomicU32 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, slot));
        // SAFETY: aligned and valid as in `flags`. This process accesses the field by this function
        // only, and so atomically. By rules 1 and 2 of the module, the kernel does not write it
        // while the entry is dirty, and the callers read it only then.
        unsafe { AtomicU32::from_ptr(field) }
    }

    fn offset(&self, entry: u32) -> &AtomicU64 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, offset));
        // SAFETY: as in `slot`; this field has 64 bits and is aligned to them.
        unsafe { AtomicU64::from_ptr(field) }
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        let bytes = self.count as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: `map` made the mapping at this address and with this length, because its `bytes`
        // is a power of two and at least the size of an entry. This value owns the mapping, and no
        // reference into it outlives the borrow of `self` by which it was made.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_entry_is_harvested_if_its_reset_flag_is_set() {
        let states = [0b00, 0b01, 0b10, 0b11].map(EntryState::of);
        use EntryState::*;
        assert_eq!(states, [Empty, Dirty, Harvested, Harvested]);
        assert_eq!(kvm_bindings::KVM_DIRTY_GFN_F_MASK, DIRTY | RESET);
    }
}
