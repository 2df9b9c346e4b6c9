//! The guest page tables of ArceOS's hypervisors, on Slat.
//!
//! `axaddrspace::AddrSpace` keeps a guest's regions, and leaves its page table to an implementation
//! of [`NestedPageTableOps`]. [`NestedPageTable`] is such an implementation, on an [`AddressSpace`]
//! of the engine: Arm stage 2, EPT, AMD's nested paging or RISC-V's G-stage, with pages of 4 KiB.
//!
//! [`NestedPageTable::enter`] offers the operations that the trait has no method for: changes while
//! vCPUs run, and dirty logs. Any thread takes a guard from a shared borrow
//! ([`AddrSpace::page_table`](axaddrspace::AddrSpace::page_table)).
//!
//! # Flags
//! [`MappingFlags::WRITE`] includes the right to read, as no format has write alone.
//! [`MappingFlags::DEVICE`] is [`slat::Memory::Device`], [`MappingFlags::UNCACHED`] without it is
//! [`slat::Memory::NonCacheable`]. Where leaves have no memory type (RISC-V without Svpbmt), the
//! physical address decides, and queries return neither flag. [`MappingFlags::USER`] is ignored:
//! the guest's user programs may use every leaf, and queries do not return the flag.
//!
//! # What the trait leaves open
//! A mapping fails as a whole: it unmaps again what it had mapped. Unmapping and protecting accept
//! any range: they split a block that the range cuts, and skip holes. A change of memory type
//! breaks the leaves first, so a vCPU that uses them meanwhile faults, and finds them when it is
//! run again.

#![no_std]
#![warn(missing_docs)]

extern crate alloc;

mod convert;

use alloc::vec::Vec;
use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpaceError, AddrSpaceResult, MappingFlags, NestedPageTableOps, PageSize};
use axvm_types::GuestPhysAddr;
use convert::{aligned, attributes, flags, host, leaf_size, page_size, range, refused};
use core::mem::ManuallyDrop;
use slat::{AddressSpace, Attributes, Format, Gpa, GpaRange, Guard, Hpa, Leaf, Platform, Rights};

/// The source of a guest's memory: what axaddrspace needs from a page table besides mappings.
///
/// Table pages do not come from here, but from the [`Platform`].
pub trait GuestMemory {
    /// Allocates a page of 4 KiB, aligned to that, for the guest alone; `None` when memory is
    /// short.
    fn allocate(&self) -> Option<PhysAddr>;

    /// Takes back a page that [`GuestMemory::allocate`] returned, and that no guest reaches any
    /// more.
    fn free(&self, page: PhysAddr);

    /// Returns the address at which the hypervisor reaches the byte at `address`, of any guest
    /// memory.
    fn address(&self, address: PhysAddr) -> VirtAddr;
}

/// A guest's page table for [`axaddrspace::AddrSpace`], on an address space of the engine.
///
/// Each call of the trait is complete when it returns: no CPU uses what the call removed. Dropping
/// the page table leaks its tables, as hardware may be walking them, except after
/// [`NestedPageTable::freed_when_dropped`].
#[derive(Debug)]
pub struct NestedPageTable<'p, F: Format, P: Platform, M: GuestMemory> {
    /// `drop` takes the space out.
    space: ManuallyDrop<AddressSpace<'p, F, P>>,
    memory: M,
    freed: bool,
}

impl<'p, F: Format, P: Platform, M: GuestMemory> NestedPageTable<'p, F, P, M> {
    /// Makes a page table from `space`; the guest's memory comes from `memory`. It does not compile
    /// for a format whose pages are not of 4 KiB.
    ///
    /// The address bits of the space decide what [`levels`](NestedPageTableOps::levels) returns.
    /// axvm's guests of three levels have 39 bits on Arm (41 on RISC-V), those of four levels 48
    /// (50 on RISC-V).
    pub const fn new(space: AddressSpace<'p, F, P>, memory: M) -> Self {
        const { assert!(F::PAGE_SHIFT == 12, "axaddrspace knows pages of 4 KiB only") };
        Self { space: ManuallyDrop::new(space), memory, freed: false }
    }

    /// Makes the page table give its table pages back when it is dropped.
    ///
    /// # Safety
    /// When the page table is dropped, no CPU has the root loaded, nor loads it later: its guest's
    /// vCPUs are gone.
    #[must_use]
    pub unsafe fn freed_when_dropped(mut self) -> Self {
        self.freed = true;
        self
    }

    /// Returns the address space: its root, geometry, format and platform, and lookups.
    pub fn space(&self) -> &AddressSpace<'p, F, P> {
        &self.space
    }

    /// Returns a guard with all operations of the engine, which may be used while vCPUs run and
    /// other threads have guards ([`AddressSpace::enter`]).
    ///
    /// The next call of axaddrspace that may change the table (to map, to unmap, or to handle a
    /// fault) gives back the tables that guards unlinked by unmapping or collapsing.
    ///
    /// axaddrspace does not learn what a guard maps and unmaps. So keep within the regions that it
    /// knows, and do not free memory that belongs to it.
    pub fn enter(&self) -> Guard<'_, 'p, F, P> {
        self.space.enter()
    }

    /// Returns the range of guest addresses, if these tables can have it.
    fn range(&self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult<GpaRange> {
        range(start, size, self.space.geometry().address_bits)
    }

    /// Returns the address space, after it gave back the tables that guards have unlinked.
    fn reclaimed(&mut self) -> &mut AddressSpace<'p, F, P> {
        self.space.reclaim();
        &mut self.space
    }

    /// Maps a range where nothing is mapped; if it fails, the range stays as it was.
    fn map_empty(
        &mut self,
        range: GpaRange,
        hpa: Hpa,
        attributes: Attributes,
        largest: slat::PageSize,
    ) -> AddrSpaceResult {
        if self.leaves(range).next().is_some() {
            return Err(AddrSpaceError::MappingConflict);
        }
        self.reclaimed().map(range, hpa, attributes, largest).map_err(|stopped| {
            // All that precedes the address is new. If nothing does, this range is empty, which is
            // an error.
            if let Ok(done) = GpaRange::new(range.start(), stopped.at.0 - range.start().0) {
                // The range cuts no leaf, so this needs no table page.
                let _ = self.space.discard(done);
            }
            refused(stopped)
        })
    }

    /// Returns the parts of a range that are mapped: host address, size and attributes of each
    /// leaf.
    fn leaves(&self, range: GpaRange) -> impl Iterator<Item = Leaf> {
        let (space, mut at) = (&self.space, range.start());
        core::iter::from_fn(move || {
            let left = GpaRange::new(at, range.end().0 - at.0).ok()?;
            // The callers have `&mut self`, so no other thread has a guard, and none holds an
            // entry.
            let leaf = space.enter().leaves(left).ok()?.find_map(Result::ok)?;
            let end = (leaf.gpa.0 + leaf.size.bytes()).min(range.end().0);
            let found = Leaf { gpa: at.max(leaf.gpa), ..leaf };
            at = Gpa(end);
            Some(Leaf { hpa: Hpa(leaf.hpa.0 + (found.gpa.0 - leaf.gpa.0)), ..found })
        })
    }

    /// Sets the rights and memory type of all that is mapped in a range.
    fn protect(&mut self, range: GpaRange, attributes: Attributes) -> AddrSpaceResult {
        let Attributes { read, write, execute, memory, .. } = attributes;
        self.reclaimed().protect(range, Rights { read, write, execute }).map_err(refused)?;
        let others = self.leaves(range).filter(|leaf| leaf.attributes.memory != memory);
        let mut runs: Vec<(Leaf, u64)> = Vec::new();
        for leaf in others {
            let start = leaf.gpa.0 & (leaf.size.bytes() - 1);
            let bytes = (leaf.size.bytes() - start).min(range.end().0 - leaf.gpa.0);
            match runs.last_mut() {
                Some((first, total))
                    if first.gpa.0 + *total == leaf.gpa.0 && first.hpa.0 + *total == leaf.hpa.0 =>
                {
                    *total += bytes;
                }
                _ => runs.push((leaf, bytes)),
            }
        }
        for (Leaf { gpa, hpa, .. }, bytes) in runs {
            let run = GpaRange::new(gpa, bytes).map_err(|_| AddrSpaceError::InvalidMapping)?;
            let mut guard = self.space.enter();
            guard.replace(run, hpa, hpa, attributes).map_err(|_| AddrSpaceError::InvalidMapping)?;
            guard.invalidate();
        }
        Ok(())
    }
}

impl<F: Format, P: Platform, M: GuestMemory> NestedPageTableOps for NestedPageTable<'_, F, P, M> {
    fn root_paddr(&self) -> PhysAddr {
        PhysAddr::from(self.space.root().0 as usize)
    }

    fn levels(&self) -> usize {
        usize::from(self.space.geometry().root_level) + 1
    }

    fn alloc_frame(&self) -> Option<PhysAddr> {
        self.memory.allocate()
    }

    fn dealloc_frame(&self, paddr: PhysAddr) {
        self.memory.free(paddr);
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        self.memory.address(paddr)
    }

    fn map(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: PageSize,
        flags: MappingFlags,
    ) -> AddrSpaceResult {
        let leaf = leaf_size::<F>(size)?;
        aligned("guest physical address", vaddr.as_usize(), leaf)?;
        let (range, hpa) = (self.range(vaddr, size.into())?, host(paddr, leaf)?);
        self.map_empty(range, hpa, attributes(self.space.format(), flags)?, leaf)
    }

    fn unmap(
        &mut self,
        vaddr: GuestPhysAddr,
    ) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        self.reclaimed();
        let (_, flags, size) = self.query(vaddr)?;
        let bytes = usize::from(size);
        let start = GuestPhysAddr::from(vaddr.as_usize() & !(bytes - 1));
        let (range, mut hpa) = (self.range(start, bytes)?, None);
        self.space.unmap(range, |run| hpa = Some(run.hpa)).map_err(refused)?;
        let Hpa(hpa) = hpa.ok_or(AddrSpaceError::Unmapped { address: vaddr })?;
        Ok((PhysAddr::from(hpa as usize), flags, size))
    }

    fn map_linear(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
        allow_huge: bool,
    ) -> AddrSpaceResult {
        let largest = F::size(if allow_huge { F::LARGEST_LEAF } else { 0 });
        let (range, hpa) = (self.range(vaddr, size)?, host(paddr, F::size(0))?);
        self.map_empty(range, hpa, attributes(self.space.format(), flags)?, largest)
    }

    fn unmap_region(&mut self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        let range = self.range(start, size)?;
        self.space.discard(range).map_err(refused)
    }

    fn remap(&mut self, start: GuestPhysAddr, paddr: PhysAddr, flags: MappingFlags) -> bool {
        let page = F::size(0).bytes() as usize;
        let start = GuestPhysAddr::from(start.as_usize() & !(page - 1));
        let Ok(attributes) = attributes(self.space.format(), flags) else { return false };
        let (Ok(range), Ok(hpa)) = (self.range(start, page), host(paddr, F::size(0))) else {
            return false;
        };
        self.space.discard(range).is_ok()
            && self.space.map(range, hpa, attributes, F::size(0)).is_ok()
    }

    fn protect_region(
        &mut self,
        start: GuestPhysAddr,
        size: usize,
        new_flags: MappingFlags,
    ) -> bool {
        let attributes = attributes(self.space.format(), new_flags);
        let range = self.range(start, size);
        attributes.and_then(|attributes| self.protect(range?, attributes)).is_ok()
    }

    fn query(&self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        // Contended beside a guard of another thread.
        let found = self.space.translate(Gpa(vaddr.as_usize() as u64));
        let found = found.map_err(|_| AddrSpaceError::MappingState)?;
        let found = found.ok_or(AddrSpaceError::Unmapped { address: vaddr })?;
        let hpa = PhysAddr::from(found.hpa.0 as usize);
        Ok((hpa, flags(found.attributes), page_size(found.size)))
    }
}

impl<F: Format, P: Platform, M: GuestMemory> Drop for NestedPageTable<'_, F, P, M> {
    fn drop(&mut self) {
        if self.freed {
            // SAFETY: `self` ends here, so the space is taken once; no CPU has its root loaded, nor
            // loads it later, as the caller of `freed_when_dropped` promised.
            unsafe { ManuallyDrop::take(&mut self.space).destroy() };
        }
    }
}

impl<M: GuestMemory + ?Sized> GuestMemory for &M {
    fn allocate(&self) -> Option<PhysAddr> {
        M::allocate(self)
    }

    fn free(&self, page: PhysAddr) {
        M::free(self, page);
    }

    fn address(&self, address: PhysAddr) -> VirtAddr {
        M::address(self, address)
    }
}
