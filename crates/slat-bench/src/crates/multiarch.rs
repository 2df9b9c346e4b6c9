//! `page_table_multiarch`, with the x86-64 entries of `page_table_entry`.

use crate::crates::memory::{Lent, Memory};
use crate::crates::runs::{self, Run};
use crate::crates::{Leaf, Peer, Tables, Way, below_1g, check, check_both, steps};
use memory_addr::{PhysAddr, VirtAddr};
use page_table_entry::x86_64::X64PTE;
use page_table_multiarch::{
    MappingFlags, PageSize, PageTable64, PageTable64Cursor, PagingError, PagingHandler,
    PagingMetaData, PagingResult,
};
use std::mem::ManuallyDrop;

pub(crate) const PEER: Peer = Peer {
    name: "page_table_multiarch",
    version: "0.6.2",
    levels: 4,
    address_bits: ADDRESS_BITS,
    map_range: true,
    protect: Way::Range,
    unmap: Way::Range,
    split: None,
    frees_tables: false,
    notes: "Plain stores, one owner. A range call walks from the root for every leaf. Unmapping \
            frees no table, so a block does not fit any more where pages were. Does not split: a \
            range that cuts a block makes it panic, which is refused before the call. The cursor \
            notes up to 32 addresses to flush, then all; keeps no counts.",
    new: |memory| Ok(Box::new(Multiarch::new(memory)?)),
};

const ADDRESS_BITS: u32 = 47;

const READ_ONLY: MappingFlags = MappingFlags::READ.union(MappingFlags::EXECUTE);
const RAM: MappingFlags = READ_ONLY.union(MappingFlags::WRITE);

/// Four levels; nothing to invalidate.
struct Levels;

impl PagingMetaData for Levels {
    const LEVELS: usize = 4;
    const PA_MAX_BITS: usize = 52;
    const VA_MAX_BITS: usize = 48;
    type VirtAddr = VirtAddr;

    fn flush_tlb(_: Option<VirtAddr>) {}
}

impl PagingHandler for Lent {
    fn alloc_frames(num: usize, _: usize) -> Option<PhysAddr> {
        // Tables are single frames, and every frame has the alignment of a frame.
        if num == 1 { Lent::take().map(PhysAddr::from) } else { None }
    }

    fn dealloc_frames(frame: PhysAddr, _: usize) {
        // SAFETY: the crate gives back what `alloc_frames` gave, which are single frames, once. It
        // is the same memory that is lent: each table works with its own.
        unsafe { Lent::give(frame.as_usize()) };
    }

    fn phys_to_virt(frame: PhysAddr) -> VirtAddr {
        frame.as_usize().into()
    }
}

type Cursor<'a> = PageTable64Cursor<'a, Levels, X64PTE, Lent>;

struct Multiarch {
    memory: Memory,
    /// Never dropped: the caller owns the memory, so nothing has to be freed.
    table: ManuallyDrop<PageTable64<Levels, X64PTE, Lent>>,
}

impl Multiarch {
    fn new(mut memory: Memory) -> Result<Self, String> {
        let table = memory.lend(PageTable64::try_new).map_err(why)?;
        Ok(Self { memory, table: ManuallyDrop::new(table) })
    }

    #[inline]
    fn work(&mut self, work: impl FnOnce(&mut Cursor<'_>) -> PagingResult) -> Result<(), String> {
        let Self { memory, table } = self;
        memory.lend(|| work(&mut table.cursor())).map_err(why)
    }

    fn check_whole(&self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        runs::whole_leaves(gpa, bytes, |gpa| {
            self.table.query(virt(gpa)).ok().map(|(_, _, size)| size as u64)
        })
    }
}

fn virt(gpa: u64) -> VirtAddr {
    (gpa as usize).into()
}

fn phys(hpa: u64) -> PhysAddr {
    (hpa as usize).into()
}

fn why(error: PagingError) -> String {
    format!("{error:?}")
}

impl Tables for Multiarch {
    fn map_range(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        let host = |at: VirtAddr| phys(at.as_usize() as u64 - gpa + hpa);
        self.work(|cursor| match leaf {
            Leaf::Page4K => cursor.map_region(virt(gpa), host, bytes as usize, RAM, false),
            Leaf::Block2M => below_1g(gpa, bytes).try_for_each(|(gpa, _, bytes)| {
                cursor.map_region(virt(gpa), host, bytes as usize, RAM, true)
            }),
        })
    }

    fn map_each(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        let size = match leaf {
            Leaf::Page4K => PageSize::Size4K,
            Leaf::Block2M => PageSize::Size2M,
        };
        self.work(|cursor| {
            steps(gpa, bytes, leaf.bytes())
                .try_for_each(|(gpa, offset)| cursor.map(virt(gpa), phys(hpa + offset), size, RAM))
        })
    }

    fn protect_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        self.check_whole(gpa, bytes)?;
        self.work(|cursor| cursor.protect_region(virt(gpa), bytes as usize, READ_ONLY))
    }

    fn unmap_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        self.check_whole(gpa, bytes)?;
        self.work(|cursor| cursor.unmap_region(virt(gpa), bytes as usize))
    }

    fn lookup_all(&self, addresses: &[u64]) -> Result<u64, String> {
        let mut sum = 0u64;
        for &gpa in addresses {
            let (hpa, flags, _) =
                self.table.query(virt(gpa)).map_err(|error| format!("{gpa:#x}: {error:?}"))?;
            let write = flags.contains(MappingFlags::WRITE);
            sum = sum.wrapping_add(hpa.as_usize() as u64).wrapping_add(write.into());
        }
        Ok(sum)
    }

    fn leaves(&self, gpa: u64, bytes: u64) -> Result<Vec<Run>, String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        Ok(runs::by_queries(gpa, bytes, |gpa| {
            let (hpa, flags, size) = self.table.query(virt(gpa)).ok()?;
            Some((hpa.as_usize() as u64, size as u64, flags.contains(MappingFlags::WRITE)))
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
    fn a_block_does_not_fit_where_pages_were() {
        let pages = Pages::new(8);
        let mut tables = Multiarch::new(pages.memory()).unwrap();
        tables.map_range(0, 0, 0x20_0000, Leaf::Page4K).unwrap();
        tables.unmap_range(0, 0x20_0000).unwrap();
        let error = tables.map_range(0, 0, 0x20_0000, Leaf::Block2M).unwrap_err();
        assert_eq!(error, "AlreadyMapped");
    }
}
