//! `page-table-generic`, with x86-64 entries defined here: the crate has none of its own.

use crate::crates::memory::{Lent, Memory, at};
use crate::crates::runs::{self, Run};
use crate::crates::{Leaf, Peer, Tables, Way, check, check_both, steps};
use page_table_generic::{
    FrameAllocator, MapConfig, PageTable, PageTableEntry, PagingError, PagingResult, PhysAddr,
    TableMeta, UnmapConfig, VirtAddr,
};
use std::mem::ManuallyDrop;

pub(crate) const PEER: Peer = Peer {
    name: "page-table-generic",
    version: "0.9.1",
    levels: 4,
    address_bits: ADDRESS_BITS,
    map_range: true,
    protect: Way::Range,
    unmap: Way::Range,
    split: Some(Way::EachPage),
    frees_tables: true,
    notes: "Plain stores, one owner. Mapping and unmapping a range recurse, protecting one walks \
            from the root for every leaf. Unmapping scans each table for used entries and frees \
            the empty ones; of a block it clears all, whatever part was named, and behind a hole \
            at the start it leaves as much as it was ahead of the hole: both are refused before \
            the call. Splits by a table that is filled first; keeps no counts, and loses what was \
            mapped of a range that fails.",
    new: |memory| Ok(Box::new(Generic::new(memory)?)),
};

const ADDRESS_BITS: u32 = 47;

/// Bits of an x86-64 entry: Intel SDM, volume 3, section 5.5.4.
const PRESENT: u64 = 1 << 0;
const WRITABLE: u64 = 1 << 1;
const HUGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct Entry(u64);

impl PageTableEntry for Entry {
    /// The bits besides the address and the size.
    type PteConfig = u64;

    fn new_page(paddr: PhysAddr, config: u64, is_huge: bool) -> Self {
        Self(paddr.as_usize() as u64 | config | if is_huge { HUGE } else { 0 })
    }

    fn new_table(paddr: PhysAddr) -> Self {
        Self(paddr.as_usize() as u64 | PRESENT | WRITABLE)
    }

    fn paddr(&self, _: bool) -> PhysAddr {
        PhysAddr::from_usize((self.0 & ADDRESS) as usize)
    }

    fn config(&self, is_dir: bool) -> u64 {
        self.0 & !ADDRESS & !if is_dir { HUGE } else { 0 }
    }

    fn present(&self) -> bool {
        self.0 & PRESENT != 0
    }

    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & HUGE != 0
    }

    fn unused(&self) -> bool {
        self.0 == 0
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// Four levels, blocks of 2 MiB at most; nothing to invalidate.
#[derive(Clone, Copy)]
struct Levels;

impl TableMeta for Levels {
    type P = Entry;
    const PAGE_SIZE: usize = 4096;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 2;
    const STRICT_ADDRESS_WIDTH: bool = true;

    fn flush(_: Option<VirtAddr>) {}
}

impl FrameAllocator for Lent {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        Lent::take().map(PhysAddr::from_usize)
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        // SAFETY: the crate gives back what `alloc_frame` gave, once. It is the same memory that is
        // lent: each table works with its own.
        unsafe { Lent::give(frame.as_usize()) };
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        at(paddr.as_usize())
    }
}

type Table = PageTable<Levels, Lent>;

struct Generic {
    memory: Memory,
    /// Never dropped: the caller owns the memory, so nothing has to be freed.
    table: ManuallyDrop<Table>,
}

impl Generic {
    fn new(mut memory: Memory) -> Result<Self, String> {
        let table = memory.lend(|| Table::new(Lent)).map_err(why)?;
        Ok(Self { memory, table: ManuallyDrop::new(table) })
    }

    #[inline]
    fn work(&mut self, work: impl FnOnce(&mut Table) -> PagingResult) -> Result<(), String> {
        let Self { memory, table } = self;
        memory.lend(|| work(table)).map_err(why)
    }
}

fn virt(gpa: u64) -> VirtAddr {
    VirtAddr::from_usize(gpa as usize)
}

fn phys(hpa: u64) -> PhysAddr {
    PhysAddr::from_usize(hpa as usize)
}

fn why(error: PagingError) -> String {
    error.to_string()
}

impl Tables for Generic {
    fn map_range(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        self.work(|table| {
            table.map(&MapConfig {
                vaddr: virt(gpa),
                paddr: phys(hpa),
                size: bytes as usize,
                pte: PRESENT | WRITABLE,
                allow_huge: leaf == Leaf::Block2M,
                flush: false,
            })
        })
    }

    fn map_each(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        let size = leaf.bytes();
        self.work(|table| {
            steps(gpa, bytes, size).try_for_each(|(gpa, offset)| {
                table.map_page(virt(gpa), phys(hpa + offset), size as usize, PRESENT | WRITABLE)
            })
        })
    }

    fn protect_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        self.work(|table| table.protect_region(virt(gpa), bytes as usize, PRESENT))
    }

    fn unmap_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        let leaf = |gpa| self.table.query(virt(gpa)).ok().map(|(_, _, size)| size as u64);
        runs::whole_leaves(gpa, bytes, leaf)?;
        if leaf(gpa).is_none() {
            return Err(format!("{gpa:#x} is in a hole, and the crate would go beyond its end"));
        }
        let range = UnmapConfig { start_vaddr: virt(gpa), size: bytes as usize, flush: false };
        self.work(|table| table.unmap_with_config(&range))
    }

    fn split(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Block2M, ADDRESS_BITS)?;
        self.work(|table| {
            steps(gpa, bytes, Leaf::Block2M.bytes())
                .try_for_each(|(gpa, _)| table.split_huge_page(virt(gpa)).map(drop))
        })
    }

    fn lookup_all(&self, addresses: &[u64]) -> Result<u64, String> {
        let mut sum = 0u64;
        for &gpa in addresses {
            let (hpa, config, _) =
                self.table.query(virt(gpa)).map_err(|error| format!("{gpa:#x}: {error}"))?;
            let write = config & WRITABLE != 0;
            sum = sum.wrapping_add(hpa.as_usize() as u64).wrapping_add(write.into());
        }
        Ok(sum)
    }

    fn leaves(&self, gpa: u64, bytes: u64) -> Result<Vec<Run>, String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        Ok(runs::by_queries(gpa, bytes, |gpa| {
            let (hpa, config, size) = self.table.query(virt(gpa)).ok()?;
            Some((hpa.as_usize() as u64, size as u64, config & WRITABLE != 0))
        }))
    }

    fn frames_left(&self) -> usize {
        self.memory.left()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crates::tests::Pages;

    #[test]
    fn protecting_part_of_a_block_splits_it_and_unmapping_fails() {
        let pages = Pages::new(8);
        let mut tables = Generic::new(pages.memory()).unwrap();
        tables.map_range(0, 0, 0x40_0000, Leaf::Block2M).unwrap();
        let error = tables.unmap_range(0x1000, 0x1000).unwrap_err();
        assert_eq!(error, "0x1000 bytes at 0x1000 are a part of a block");
        tables.protect_range(0x1000, 0x1000).unwrap();
        let runs = tables.leaves(0, 0x40_0000).unwrap();
        let leaves: Vec<_> = runs.iter().map(|run| (run.gpa, run.leaf, run.writable)).collect();
        let page = |gpa, writable| (gpa, 4096, writable);
        let block = (0x20_0000, 2 << 20, true);
        assert_eq!(leaves, [page(0, true), page(0x1000, false), page(0x2000, true), block]);
    }

    /// Shows what [`PEER`] notes: if this fails with a later version, remove the note and the
    /// refusal.
    #[test]
    fn a_range_that_begins_in_a_hole_is_refused_for_this_crate() {
        let pages = Pages::new(8);
        let mut tables = Generic::new(pages.memory()).unwrap();
        tables.map_range(0x20_0000, 0, 0x20_0000, Leaf::Page4K).unwrap();
        let error = tables.unmap_range(0x10_0000, 0x30_0000).unwrap_err();
        assert_eq!(error, "0x100000 is in a hole, and the crate would go beyond its end");
        let range = UnmapConfig { start_vaddr: virt(0x10_0000), size: 0x30_0000, flush: false };
        tables.work(|table| table.unmap_with_config(&range)).unwrap();
        let left = Run { gpa: 0x20_0000, hpa: 0, bytes: 0x10_0000, leaf: 4096, writable: true };
        assert_eq!(tables.leaves(0, 0x40_0000).unwrap(), [left]);
    }

    #[test]
    fn entries_keep_address_bits_and_size_apart() {
        let block = Entry::new_page(phys(0x8000_0000), PRESENT | WRITABLE, true);
        assert_eq!(block.0, 0x8000_0083);
        assert!(block.present() && block.huge(true) && !block.unused());
        assert_eq!((block.paddr(true), block.config(true)), (phys(0x8000_0000), 3));
        assert!(!Entry::new_table(phys(0x1000)).huge(true));
    }
}
