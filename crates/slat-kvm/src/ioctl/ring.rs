//! A vCPU's dirty ring, mapped (api.rst, `KVM_CAP_DIRTY_LOG_RING`).
//!
//! An entry goes from empty to dirty (the kernel, as the vCPU writes), to harvested (user space),
//! to empty (the kernel, in `KVM_RESET_DIRTY_RINGS`, which protects the page again).
//!
//! # Ordering
//!
//! Who owns an entry is told by its flags, and each hand-over is a release that an acquire meets:
//!
//! - The kernel writes slot and page before it sets `KVM_DIRTY_GFN_F_DIRTY`, with a write barrier
//!   in between. User space loads the flags with acquire and then reads slot and page.
//! - User space reads slot and page before it stores `KVM_DIRTY_GFN_F_RESET` with release. The
//!   kernel loads that with acquire, and fills the entry again only after.
//! - The kernel empties an entry with a release store.
//!
//! So between dirty and harvested the kernel writes no part of an entry, and user space reads slot
//! and page in that time alone.

use super::{Error, Result};
use kvm_bindings::{KVM_DIRTY_LOG_PAGE_OFFSET, kvm_dirty_gfn};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// `KVM_DIRTY_GFN_F_DIRTY` and `KVM_DIRTY_GFN_F_RESET`, of which kvm-bindings 0.14.2 has the mask
/// of both alone.
const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

/// Whose an entry is, and what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryState {
    /// It names no page (flags 00): the kernel fills it.
    Empty,
    /// It names a page that was written (flags 01): user space harvests it.
    Dirty,
    /// It was harvested (flags 1X), and waits for `KVM_RESET_DIRTY_RINGS`.
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

/// What an entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirtyPage {
    /// The memslot, with the address space in bits 31:16.
    pub slot: u32,
    /// The page of the slot, counted from 0.
    pub page: u64,
}

/// One vCPU's ring, mapped until it is dropped.
#[derive(Debug)]
pub struct DirtyRing {
    entries: NonNull<kvm_dirty_gfn>,
    count: u32,
    /// The entry that is harvested next, counted over all that ever were. Wraps, as 2^32 is a
    /// multiple of `count`.
    next: u32,
}

// SAFETY: the mapping belongs to the process and to no thread, `DirtyRing` owns it, and `count` and
// `next` are numbers.
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
        // Page 0 is `kvm_run`'s.
        if KVM_DIRTY_LOG_PAGE_OFFSET == 0 {
            return Err(Error::new(libc::ENOTSUP));
        }
        // SAFETY: the call reads and writes no memory of the process, whatever its argument.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if page < 0 {
            return Err(Error::last());
        }
        // SAFETY:
        // - the address is the kernel's choice, so the mapping replaces no other;
        // - the length is not 0, and the offset is a multiple of a page;
        // - the descriptor is a vCPU's, by the contract of this function. What is mapped is memory
        //   that this process and the kernel share, for which this type answers.
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

    /// How many entries the ring has: a power of two.
    pub fn entries(&self) -> u32 {
        self.count
    }

    /// The state of an entry, by its place in the ring, modulo the entries that there are. The load
    /// is an acquire.
    pub fn state(&self, entry: u32) -> EntryState {
        EntryState::of(self.flags(entry).load(Ordering::Acquire))
    }

    /// Harvests the next entry if it is dirty. Entries are harvested in the order in which the
    /// kernel filled them, which skips none.
    ///
    /// The page may be read only after
    /// [`reset_dirty_rings`](super::VmDirtyLog::reset_dirty_rings). Where hardware keeps a buffer
    /// of its own (Intel's PML), what it holds comes into the ring at the vCPU's next exit.
    pub fn harvest_next(&mut self) -> Option<DirtyPage> {
        // Acquire: what the kernel wrote before it set the flag is seen after.
        if self.state(self.next) != EntryState::Dirty {
            return None;
        }
        let slot = self.slot(self.next).load(Ordering::Relaxed);
        let page = self.offset(self.next).load(Ordering::Relaxed);
        // Release: the kernel fills the entry again once it sees this, so the loads come first.
        self.flags(self.next).store(RESET, Ordering::Release);
        self.next = self.next.wrapping_add(1);
        Some(DirtyPage { slot, page })
    }

    /// Harvests what is in the ring, at most one round of it, and tells each page. Answers with how
    /// many entries: as many have to be reset.
    pub fn harvest(&mut self, mut tell: impl FnMut(DirtyPage)) -> u32 {
        let mut taken = 0;
        while taken < self.count {
            let Some(page) = self.harvest_next() else { break };
            tell(page);
            taken += 1;
        }
        taken
    }

    /// A field of an entry of the ring.
    fn field<T>(&self, entry: u32, offset: usize) -> *mut T {
        let entry = self.entries.as_ptr().wrapping_add((entry & (self.count - 1)) as usize);
        entry.cast::<u8>().wrapping_add(offset).cast()
    }

    fn flags(&self, entry: u32) -> &AtomicU32 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, flags));
        // SAFETY:
        // - aligned: the mapping starts on a page, and this is a field of that type;
        // - valid for as long as the result lives: the entry is one of `count`, which the mapping
        //   has by the contract of `map`, and `self` keeps it;
        // - this process accesses it by this function alone, and so atomically. The kernel stores
        //   it in one piece, ordered as the module says.
        unsafe { AtomicU32::from_ptr(field) }
    }

    fn slot(&self, entry: u32) -> &AtomicU32 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, slot));
        // SAFETY: aligned and valid as in `flags`; this process accesses it by this function alone,
        // and so atomically; the kernel does not write it while the entry is dirty, and the callers
        // read it only then.
        unsafe { AtomicU32::from_ptr(field) }
    }

    fn offset(&self, entry: u32) -> &AtomicU64 {
        let field = self.field(entry, offset_of!(kvm_dirty_gfn, offset));
        // SAFETY: as in `slot`; it is the field of 64 bits, which is aligned to them.
        unsafe { AtomicU64::from_ptr(field) }
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        let bytes = self.count as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: the mapping has that address and, as `bytes` of `map` is a power of two and no
        // less than an entry, that length; it is this value's own, and no reference to it outlives
        // the borrows of `self` by which they were made.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_harvested_entry_is_told_by_its_upper_flag_whatever_the_lower_one() {
        let states = [0b00, 0b01, 0b10, 0b11].map(EntryState::of);
        use EntryState::*;
        assert_eq!(states, [Empty, Dirty, Harvested, Harvested]);
        assert_eq!(kvm_bindings::KVM_DIRTY_GFN_F_MASK, DIRTY | RESET);
    }
}
