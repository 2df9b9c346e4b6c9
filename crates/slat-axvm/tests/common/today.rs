//! A page table for axaddrspace on page-table-generic, called as axvm 0.8 calls it on Arm, which
//! counts what it invalidates.
//!
//! axvm's tables for Arm invalidate all guests, on all CPUs, in each `flush`, as the crate's hook
//! does not name the guest. On x86 and RISC-V the hook does nothing: there axvm stops the guest,
//! and enters it again with empty TLBs.

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpaceError, AddrSpaceResult, MappingFlags, NestedPageTableOps, PageSize};
use axvm_types::GuestPhysAddr;
use page_table_generic::{FrameAllocator, PageTable, PageTableEntry, PagingError, TableMeta};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;

thread_local! {
    /// The number of invalidations that this thread's tables have asked for.
    static FLUSHES: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of invalidations since the last call, on this thread.
pub fn invalidations() -> u64 {
    FLUSHES.take()
}

/// A descriptor: the flags in its low bits; a link has no flag except `VALID`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Entry(usize);

const VALID: usize = 1 << 11;
const FLAGS: usize = VALID - 1;
const PAGE: usize = 4096;

impl PageTableEntry for Entry {
    type PteConfig = MappingFlags;

    fn new_page(paddr: PhysAddr, config: MappingFlags, _: bool) -> Self {
        Self(paddr.as_usize() | VALID | config.bits())
    }

    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() | VALID)
    }

    fn paddr(&self, _: bool) -> PhysAddr {
        PhysAddr::from(self.0 & !(PAGE - 1))
    }

    fn config(&self, _: bool) -> MappingFlags {
        MappingFlags::from_bits_truncate(self.0 & FLAGS)
    }

    fn present(&self) -> bool {
        self.0 & VALID != 0
    }

    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & FLAGS != 0
    }

    fn unused(&self) -> bool {
        self.0 == 0
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// Three levels, blocks of 2 MiB and 1 GiB, and the count of invalidations.
#[derive(Clone, Copy)]
pub struct CountingMetaData;

impl TableMeta for CountingMetaData {
    type P = Entry;
    const PAGE_SIZE: usize = PAGE;
    const LEVEL_BITS: &[usize] = &[9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;
    const STRICT_ADDRESS_WIDTH: bool = true;

    fn flush(_: Option<page_table_generic::VirtAddr>) {
        FLUSHES.set(FLUSHES.get() + 1);
    }
}

/// Pages from the allocator.
#[derive(Clone, Copy)]
pub struct Pages;

const LAYOUT: Layout = Layout::new::<Page>();

#[repr(align(4096))]
struct Page([u8; PAGE]);

impl FrameAllocator for Pages {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        // SAFETY: the size of a page is not zero.
        let memory = unsafe { alloc_zeroed(LAYOUT) };
        (!memory.is_null()).then(|| PhysAddr::from(memory.expose_provenance()))
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        // SAFETY: the crate, and axaddrspace, free each page that `alloc_frame` returned once.
        unsafe { dealloc(self.phys_to_virt(frame), LAYOUT) }
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(paddr.as_usize())
    }
}

pub struct Today(PageTable<CountingMetaData, Pages>);

impl Today {
    pub fn new() -> Self {
        Self(PageTable::new(Pages).unwrap())
    }
}

fn virt(address: GuestPhysAddr) -> page_table_generic::VirtAddr {
    page_table_generic::VirtAddr::from_usize(address.as_usize())
}

fn why(error: PagingError) -> AddrSpaceError {
    match error {
        PagingError::MappingConflict { .. } => AddrSpaceError::MappingConflict,
        _ => AddrSpaceError::MappingState,
    }
}

fn size_of_leaf(bytes: usize) -> PageSize {
    match bytes {
        0x1000 => PageSize::Size4K,
        0x20_0000 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

impl NestedPageTableOps for Today {
    fn root_paddr(&self) -> PhysAddr {
        self.0.root_paddr()
    }

    fn levels(&self) -> usize {
        3
    }

    fn alloc_frame(&self) -> Option<PhysAddr> {
        Pages.alloc_frame()
    }

    fn dealloc_frame(&self, paddr: PhysAddr) {
        Pages.dealloc_frame(paddr);
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from(paddr.as_usize())
    }

    fn map(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: PageSize,
        flags: MappingFlags,
    ) -> AddrSpaceResult {
        self.0.map_page(virt(vaddr), paddr, size.into(), flags).map_err(why)
    }

    fn unmap(
        &mut self,
        vaddr: GuestPhysAddr,
    ) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, flags, bytes) = self.0.unmap_page(virt(vaddr)).map_err(why)?;
        Ok((paddr, flags, size_of_leaf(bytes)))
    }

    fn map_linear(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
        allow_huge: bool,
    ) -> AddrSpaceResult {
        self.0.map_linear_pages(virt(vaddr), paddr, size, flags, allow_huge).map_err(why)
    }

    fn unmap_region(&mut self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        self.0.unmap(virt(start), size).map_err(why)
    }

    fn remap(&mut self, start: GuestPhysAddr, paddr: PhysAddr, flags: MappingFlags) -> bool {
        let _ = self.unmap(start);
        self.map(start, paddr, PageSize::Size4K, flags).is_ok()
    }

    fn protect_region(
        &mut self,
        start: GuestPhysAddr,
        size: usize,
        new_flags: MappingFlags,
    ) -> bool {
        let mut at = 0;
        while at < size {
            match self.0.protect_page(virt(start + at), new_flags) {
                Ok(bytes) => at += bytes,
                Err(_) => return false,
            }
        }
        true
    }

    fn query(&self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, flags, bytes) = self.0.query(virt(vaddr)).map_err(why)?;
        Ok((paddr, flags, size_of_leaf(bytes)))
    }
}
