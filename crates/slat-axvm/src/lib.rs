//! The guest page tables of ArceOS's hypervisors, kept by Slat.
//!
//! `axaddrspace::AddrSpace` keeps a guest's regions, and leaves its page table to an implementation
//! of [`NestedPageTableOps`]. [`NestedPageTable`] is one, on an [`AddressSpace`] of the engine's:
//! Arm stage 2, EPT, AMD's nested paging or RISC-V's G-stage, with pages of 4 KiB.
//!
//! What the trait has no method for is done through [`NestedPageTable::guard`], which any thread
//! takes from a shared borrow ([`AddrSpace::page_table`](axaddrspace::AddrSpace::page_table)):
//! changes beside running vCPUs, and dirty logs.
//!
//! # Flags
//! [`MappingFlags::WRITE`] brings the right to read, as no format has it alone.
//! [`MappingFlags::DEVICE`] is [`slat::Memory::Device`], [`MappingFlags::UNCACHED`] without it
//! [`slat::Memory::NonCacheable`]; where leaves have no memory type (RISC-V without Svpbmt) the
//! physical address decides, and queries answer neither. [`MappingFlags::USER`] is ignored: every
//! leaf may be used by the guest's user programs, and queries do not answer it.
//!
//! # What the trait leaves open
//! A mapping fails as a whole: what it had mapped is unmapped again. Unmapping and protecting take
//! any range: a block that it cuts is split, holes are stepped over. A change of memory type breaks
//! the leaves first, so that a vCPU that uses them meanwhile faults, and finds them when it is run
//! again.

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

/// Where a guest's memory comes from: what axaddrspace asks of a page table besides mappings.
///
/// Table pages are not taken from here: they are the [`Platform`]'s.
pub trait GuestMemory {
    /// A page of 4 KiB, aligned to that, for the guest alone; `None` when memory is short.
    fn allocate(&self) -> Option<PhysAddr>;

    /// Takes back a page that [`GuestMemory::allocate`] returned: no guest reaches it any more.
    fn free(&self, page: PhysAddr);

    /// Where the hypervisor reaches the byte at `address`, of guest memory of any origin.
    fn address(&self, address: PhysAddr) -> VirtAddr;
}

/// A guest's page table for [`axaddrspace::AddrSpace`], on an address space of the engine's.
///
/// Each call of the trait is whole when it returns: no CPU uses what it took away. Dropped, it
/// leaks its tables, as hardware may be walking them, unless it was told that it may not
/// ([`NestedPageTable::freed_when_dropped`]).
#[derive(Debug)]
pub struct NestedPageTable<'p, F: Format, P: Platform, M: GuestMemory> {
    /// Taken out when it is dropped.
    space: ManuallyDrop<AddressSpace<'p, F, P>>,
    memory: M,
    freed: bool,
}

impl<'p, F: Format, P: Platform, M: GuestMemory> NestedPageTable<'p, F, P, M> {
    /// Keeps `space`, whose guest has memory from `memory`. Does not compile for a format whose
    /// pages are not of 4 KiB.
    ///
    /// axvm's guests of three levels have 39 bits of addresses on Arm (41 on RISC-V), those of four
    /// levels 48 (50 on RISC-V): what the space is made with decides what
    /// [`levels`](NestedPageTableOps::levels) answers.
    pub const fn new(space: AddressSpace<'p, F, P>, memory: M) -> Self {
        const { assert!(F::PAGE_SHIFT == 12, "axaddrspace knows pages of 4 KiB only") };
        Self { space: ManuallyDrop::new(space), memory, freed: false }
    }

    /// The table, which gives its table pages back when it is dropped.
    ///
    /// # Safety
    /// When it is dropped, no CPU has the root loaded, nor will load it: its guest's vCPUs are
    /// gone.
    #[must_use]
    pub unsafe fn freed_when_dropped(mut self) -> Self {
        self.freed = true;
        self
    }

    /// The address space: its root, geometry, format and platform, and lookups.
    pub fn space(&self) -> &AddressSpace<'p, F, P> {
        &self.space
    }

    /// All operations of the engine, beside running vCPUs and the guards of other threads
    /// ([`AddressSpace::guard`]).
    ///
    /// Tables that guards unlink, by unmapping or collapsing, are given back in the next call of
    /// axaddrspace's that may change the table: to map, unmap, or answer a fault.
    ///
    /// axaddrspace does not learn of what is mapped and unmapped so: keep within the regions that
    /// it knows, and give memory of its own back to nobody.
    pub fn guard(&self) -> Guard<'_, 'p, F, P> {
        self.space.guard()
    }

    /// The range of guest addresses, if these tables can have it.
    fn range(&self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult<GpaRange> {
        range(start, size, self.space.geometry().address_bits)
    }

    /// The address space, without the tables that guards have unlinked meanwhile.
    fn reclaimed(&mut self) -> &mut AddressSpace<'p, F, P> {
        self.space.reclaim();
        &mut self.space
    }

    /// Maps a range where nothing is mapped, or leaves it as it was.
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
        self.reclaimed().map(range, hpa, attributes, largest).map_err(|halted| {
            // All that precedes the address is new. If nothing does, there is no such range.
            if let Ok(done) = GpaRange::new(range.start(), halted.at.0 - range.start().0) {
                // It is cut through no leaf, so that nothing can be short.
                let _ = self.space.discard(done);
            }
            refused(halted)
        })
    }

    /// The parts of a range that are mapped: memory, size of leaves and attributes of each.
    fn leaves(&self, range: GpaRange) -> impl Iterator<Item = Leaf> {
        let (space, mut at) = (&self.space, range.start());
        core::iter::from_fn(move || {
            let left = GpaRange::new(at, range.end().0 - at.0).ok()?;
            // Nobody holds an entry: who could has a guard, which borrows this.
            let leaf = space.guard().leaves(left).ok()?.find_map(Result::ok)?;
            let end = (leaf.gpa.0 + leaf.size.bytes()).min(range.end().0);
            let found = Leaf { gpa: at.max(leaf.gpa), ..leaf };
            at = Gpa(end);
            Some(Leaf { hpa: Hpa(leaf.hpa.0 + (found.gpa.0 - leaf.gpa.0)), ..found })
        })
    }

    /// Sets rights and memory type of all that is mapped in a range.
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
                    if first.size == leaf.size
                        && first.gpa.0 + *total == leaf.gpa.0
                        && first.hpa.0 + *total == leaf.hpa.0 =>
                {
                    *total += bytes;
                }
                _ => runs.push((leaf, bytes)),
            }
        }
        for (Leaf { gpa, hpa, size, .. }, bytes) in runs {
            let run = GpaRange::new(gpa, bytes).map_err(|_| AddrSpaceError::InvalidMapping)?;
            // Another memory type of a leaf that CPUs may use breaks it first, on every format.
            self.space.discard(run).map_err(refused)?;
            self.space.map(run, hpa, attributes, size).map_err(refused)?;
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
        let found = self.space.query(Gpa(vaddr.as_usize() as u64));
        let found = found.ok_or(AddrSpaceError::Unmapped { address: vaddr })?;
        let hpa = PhysAddr::from(found.hpa.0 as usize);
        Ok((hpa, flags(found.attributes), page_size(found.size)))
    }
}

impl<F: Format, P: Platform, M: GuestMemory> Drop for NestedPageTable<'_, F, P, M> {
    fn drop(&mut self) {
        if self.freed {
            // SAFETY: `self` ends here, so the space is taken once; no CPU has its root loaded, nor
            // will load it, as the caller of `freed_when_dropped` promised.
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
