//! `x86_64`: its `MappedPageTable`.

use crate::crates::memory::{FRAME, Memory, at};
use crate::crates::runs::{self, Run};
use crate::crates::{Leaf, Peer, Tables, Way, check, check_both, steps};
use ::x86_64::structures::paging::mapper::{
    CleanUp, FlagUpdateError, MappedPageTable, Mapper, PageTableFrameMapping, Translate,
    TranslateResult, UnmapError,
};
use ::x86_64::structures::paging::{
    FrameAllocator, FrameDeallocator, Page, PageSize, PageTable, PageTableFlags as Flags,
    PhysFrame, Size2MiB, Size4KiB,
};
use ::x86_64::{PhysAddr, VirtAddr};
use std::fmt::Debug;

pub(crate) const PEER: Peer = Peer {
    name: "x86_64",
    version: "0.15.5",
    levels: 4,
    address_bits: ADDRESS_BITS,
    map_range: false,
    protect: Way::EachPage,
    unmap: Way::EachPage,
    split: None,
    frees_tables: true,
    notes: "Plain stores, one owner, no call for a range: every page is a walk from the root. \
            Unmapping leaves tables; a second call over the range frees the empty ones, and is \
            part of what is timed. Protecting and unmapping have a call for each page size, so \
            that a block costs a refused walk first. Does not split. Returns a flush for each \
            page, which is ignored; keeps no counts. A page refused within a read-only block \
            leaves the block writable.",
    new: |memory| Ok(Box::new(X86::new(memory)?)),
};

const ADDRESS_BITS: u32 = 47;

const READ_ONLY: Flags = Flags::PRESENT;
const RAM: Flags = READ_ONLY.union(Flags::WRITABLE);

const BLOCK: u64 = Leaf::Block2M.bytes();

struct Identity;

// SAFETY: tables are in frames of `Memory`, which are at their address.
unsafe impl PageTableFrameMapping for Identity {
    #[inline]
    fn frame_to_pointer(&self, frame: PhysFrame) -> *mut PageTable {
        at(frame.start_address().as_u64() as usize).cast()
    }
}

// SAFETY: a frame is handed out once until it is given back.
unsafe impl FrameAllocator<Size4KiB> for Memory {
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        Some(PhysFrame::containing_address(PhysAddr::new(self.take()? as u64)))
    }
}

impl FrameDeallocator<Size4KiB> for Memory {
    unsafe fn deallocate_frame(&mut self, frame: PhysFrame) {
        // SAFETY: the caller promises that the frame is unused; the crate frees only tables, which
        // it took here.
        unsafe { self.give(frame.start_address().as_u64() as usize) };
    }
}

struct X86 {
    memory: Memory,
    tables: MappedPageTable<'static, Identity>,
}

impl X86 {
    fn new(mut memory: Memory) -> Result<Self, String> {
        let root = memory.take().ok_or("no memory for the root")?;
        // SAFETY: the frame is writable memory of this size that nothing else uses, and zeroes are
        // a table. The reference stays in this value, together with the memory, which outlives
        // both.
        let root = unsafe {
            at(root).write_bytes(0, FRAME);
            &mut *at(root).cast::<PageTable>()
        };
        // SAFETY: an empty root is a whole hierarchy; tables below it will be frames of this
        // memory, which are at their address.
        let tables = unsafe { MappedPageTable::new(root, Identity) };
        Ok(Self { memory, tables })
    }

    fn map_by<S: PageSize + Debug>(&mut self, gpa: u64, hpa: u64, bytes: u64) -> Result<(), String>
    where
        MappedPageTable<'static, Identity>: Mapper<S>,
    {
        let Self { memory, tables } = self;
        for (gpa, offset) in steps(gpa, bytes, S::SIZE) {
            let frame = PhysFrame::<S>::containing_address(PhysAddr::new_truncate(hpa + offset));
            // SAFETY: no CPU has loaded the tables, so they give access to no memory.
            unsafe { tables.map_to(page::<S>(gpa), frame, RAM, memory) }
                .map_err(|error| format!("{gpa:#x}: {error:?}"))?
                .ignore();
        }
        Ok(())
    }
}

#[inline]
fn page<S: PageSize>(gpa: u64) -> Page<S> {
    Page::containing_address(VirtAddr::new_truncate(gpa))
}

/// Returns whether a block at `gpa` is wholly within a range that ends at `end`.
fn whole_block(gpa: u64, end: u64) -> bool {
    gpa.is_multiple_of(BLOCK) && end - gpa >= BLOCK
}

impl Tables for X86 {
    fn map_each(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        match leaf {
            Leaf::Page4K => self.map_by::<Size4KiB>(gpa, hpa, bytes),
            Leaf::Block2M => self.map_by::<Size2MiB>(gpa, hpa, bytes),
        }
    }

    fn protect_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        let tables = &mut self.tables;
        let (mut gpa, end) = (gpa, gpa + bytes);
        while gpa < end {
            // Tries a page first, because the call for blocks turns a table into a block. SAFETY:
            // no CPU has loaded the tables, so they give access to no memory.
            let done = match unsafe { tables.update_flags(page::<Size4KiB>(gpa), READ_ONLY) } {
                Ok(flush) => {
                    flush.ignore();
                    Ok(Size4KiB::SIZE)
                }
                Err(FlagUpdateError::ParentEntryHugePage) if whole_block(gpa, end) => {
                    // SAFETY: as above.
                    unsafe { tables.update_flags(page::<Size2MiB>(gpa), READ_ONLY) }.map(|flush| {
                        flush.ignore();
                        BLOCK
                    })
                }
                Err(error) => Err(error),
            };
            gpa += done.map_err(|error| format!("{gpa:#x}: {error:?}"))?;
        }
        Ok(())
    }

    fn unmap_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        let Self { memory, tables } = self;
        let range = Page::range_inclusive(page(gpa), page(gpa + bytes - Size4KiB::SIZE));
        let (mut gpa, end) = (gpa, gpa + bytes);
        while gpa < end {
            let done = match tables.unmap(page::<Size4KiB>(gpa)) {
                Ok((_, flush)) => {
                    flush.ignore();
                    Ok(Size4KiB::SIZE)
                }
                Err(UnmapError::ParentEntryHugePage) if whole_block(gpa, end) => {
                    tables.unmap(page::<Size2MiB>(gpa)).map(|(_, flush)| {
                        flush.ignore();
                        BLOCK
                    })
                }
                Err(error) => Err(error),
            };
            gpa += done.map_err(|error| format!("{gpa:#x}: {error:?}"))?;
        }
        // SAFETY: the tables are frames of this memory, each linked once.
        unsafe { tables.clean_up_addr_range(range, memory) };
        Ok(())
    }

    fn lookup_all(&self, addresses: &[u64]) -> Result<u64, String> {
        let mut sum = 0u64;
        for &gpa in addresses {
            let address = VirtAddr::try_new(gpa).map_err(|_| format!("{gpa:#x}: not canonical"))?;
            let TranslateResult::Mapped { frame, offset, flags } = self.tables.translate(address)
            else {
                return Err(format!("{gpa:#x}: not mapped"));
            };
            let write = flags.contains(Flags::WRITABLE);
            let hpa = frame.start_address().as_u64() + offset;
            sum = sum.wrapping_add(hpa).wrapping_add(write.into());
        }
        Ok(sum)
    }

    fn leaves(&self, gpa: u64, bytes: u64) -> Result<Vec<Run>, String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        Ok(runs::by_queries(gpa, bytes, |gpa| match self.tables.translate(VirtAddr::new(gpa)) {
            TranslateResult::Mapped { frame, offset, flags } => {
                let hpa = frame.start_address().as_u64() + offset;
                Some((hpa, frame.size(), flags.contains(Flags::WRITABLE)))
            }
            _ => None,
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
    fn tables_are_x86_64_entries_bit_for_bit() {
        let pages = Pages::new(8);
        let mut x86 = X86::new(pages.memory()).unwrap();
        x86.map_each(0, 0x4000_0000, 0x1000, Leaf::Page4K).unwrap();
        x86.map_each(BLOCK, 0x8000_0000, BLOCK, Leaf::Block2M).unwrap();
        x86.protect_range(BLOCK, BLOCK).unwrap();
        let mut table = x86.tables.level_4_table();
        for _ in 0..2 {
            // SAFETY: the entry leads to a table in the memory of `pages`, which nothing changes
            // meanwhile.
            table = unsafe { &*at(table[0].addr().as_u64() as usize).cast() };
        }
        assert_eq!(table[0].flags(), Flags::PRESENT | Flags::WRITABLE);
        let block = table[1].addr().as_u64() | table[1].flags().bits();
        assert_eq!(block, 0x8000_0000 | 1 | 1 << 7);
    }

    /// Shows what [`PEER`] notes: if this fails with a later version, remove the note.
    #[test]
    fn a_refused_page_leaves_the_read_only_block_writable() {
        let pages = Pages::new(8);
        let mut x86 = X86::new(pages.memory()).unwrap();
        x86.map_each(0, 0, BLOCK, Leaf::Block2M).unwrap();
        x86.protect_range(0, BLOCK).unwrap();
        assert!(!x86.leaves(0, BLOCK).unwrap()[0].writable);
        let error = x86.map_each(0x1000, 0, 0x1000, Leaf::Page4K).unwrap_err();
        assert_eq!(error, "0x1000: ParentEntryHugePage");
        assert!(x86.leaves(0, BLOCK).unwrap()[0].writable);
    }
}
