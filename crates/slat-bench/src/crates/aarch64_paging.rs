//! `aarch64-paging`: stage-2 tables of the Arm architecture.

use crate::crates::memory::{FRAME, Memory, at};
use crate::crates::runs::{self, Run};
use crate::crates::{Leaf, Peer, Tables, Way, below_1g, check, check_both, steps};
use ::aarch64_paging::Mapping;
use ::aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes as Bits};
use ::aarch64_paging::paging::{
    BITS_PER_LEVEL, Constraints, LEAF_LEVEL, MemoryRegion, PAGE_SIZE, PageTable, Stage2,
    Translation,
};
use std::ptr::NonNull;

pub(crate) const PEER: Peer = Peer {
    name: "aarch64-paging",
    version: "0.12.3",
    levels: 3,
    address_bits: ADDRESS_BITS,
    map_range: true,
    protect: Way::Range,
    unmap: Way::Range,
    split: Some(Way::EachPage),
    frees_tables: true,
    notes: "Maps over what is mapped without a test. Stores with release order; a protected \
            descriptor is exchanged by an atomic swap, also in tables that no CPU has. Unmapping \
            drops whole subtables without reading their entries; a subtable emptied by parts stays \
            until the whole tree is searched. Keeps no counts. Without memory it panics: the \
            tables that a range could need are counted before the call. A look-up is a walk of a \
            range of one page.",
    new: |memory| Ok(Box::new(Arm::new(memory)?)),
};

/// Address bits of three levels: 512 GiB.
const ADDRESS_BITS: u32 = 39;
const ROOT_LEVEL: usize = 1;

/// The bit of `S2AP_ACCESS_RW` that read-only leaves lack.
const WRITE: Bits = Bits::S2AP_ACCESS_WO;

const RAM: Bits = Bits::VALID
    .union(Bits::MEMATTR_NORMAL_INNER_WB)
    .union(Bits::MEMATTR_NORMAL_OUTER_WB)
    .union(Bits::S2AP_ACCESS_RW)
    .union(Bits::SH_INNER)
    .union(Bits::ACCESS_FLAG);

/// Most tables that are made for the edges of a range, inside blocks or empty entries: two levels,
/// two edges.
const EDGES: u64 = 4;

struct Identity(Memory);

impl Translation<Bits> for Identity {
    fn allocate_table(&mut self) -> (NonNull<PageTable<Bits>>, PhysicalAddress) {
        let frame = self.0.take().expect("operations count what they may need");
        // SAFETY: the frame is writable memory of this size that nothing else uses.
        unsafe { at(frame).write_bytes(0, FRAME) };
        (self.physical_to_virtual(PhysicalAddress(frame)), PhysicalAddress(frame))
    }

    unsafe fn deallocate_table(&mut self, table: NonNull<PageTable<Bits>>) {
        // SAFETY: the caller promises that it came from `allocate_table`, and is not used any more.
        unsafe { self.0.give(table.as_ptr().addr()) };
    }

    fn physical_to_virtual(&self, pa: PhysicalAddress) -> NonNull<PageTable<Bits>> {
        NonNull::new(at(pa.0).cast()).expect("no table is at 0")
    }
}

struct Arm(Mapping<Identity, Stage2>);

impl Arm {
    fn new(memory: Memory) -> Result<Self, String> {
        if memory.left() == 0 {
            return Err("no memory for the root".into());
        }
        Ok(Self(Mapping::new(Identity(memory), ROOT_LEVEL, Stage2)))
    }

    fn check_left(&self, tables: u64) -> Result<(), String> {
        let left = self.frames_left();
        if tables > left as u64 {
            return Err(format!("{left} frames are left, and {tables} tables may be needed"));
        }
        Ok(())
    }

    /// Refuses maps that the crate cannot do: those that need more tables than there is memory for,
    /// and those below 2 MiB over a part of a block, where a subtraction in the crate underflows.
    fn check_map(&self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        check_both(gpa, hpa, bytes, leaf, ADDRESS_BITS)?;
        let spans = |shift: u32| ((gpa + bytes - 1) >> shift) - (gpa >> shift) + 1;
        let pages = if leaf == Leaf::Page4K { spans(21) } else { 0 };
        self.check_left(spans(30) + pages)?;
        if hpa < gpa % Leaf::Block2M.bytes()
            && self.leaves(gpa, PAGE_SIZE as u64)?.iter().any(|run| run.leaf > 4096)
        {
            return Err(format!("{gpa:#x} is in a block, and {hpa:#x} too low to map it to"));
        }
        Ok(())
    }
}

fn region(gpa: u64, bytes: u64) -> MemoryRegion {
    MemoryRegion::new(gpa as usize, (gpa + bytes) as usize)
}

/// Returns the constraints that keep the crate from leaves larger than `leaf`.
fn constraints(leaf: Leaf) -> Constraints {
    match leaf {
        Leaf::Page4K => Constraints::NO_BLOCK_MAPPINGS,
        Leaf::Block2M => Constraints::empty(),
    }
}

/// Returns the bytes that an entry of `level` covers.
fn entry_bytes(level: usize) -> u64 {
    (PAGE_SIZE as u64) << ((LEAF_LEVEL - level) * BITS_PER_LEVEL)
}

fn why(error: ::aarch64_paging::MapError) -> String {
    error.to_string()
}

impl Tables for Arm {
    fn map_range(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        self.check_map(gpa, hpa, bytes, leaf)?;
        let constraints = constraints(leaf);
        let mut map = |gpa, hpa: u64, bytes| {
            let hpa = PhysicalAddress(hpa as usize);
            self.0.map_range(&region(gpa, bytes), hpa, RAM, constraints).map_err(why)
        };
        match leaf {
            Leaf::Page4K => map(gpa, hpa, bytes),
            Leaf::Block2M => below_1g(gpa, bytes)
                .try_for_each(|(gpa, offset, bytes)| map(gpa, hpa + offset, bytes)),
        }
    }

    fn map_each(&mut self, gpa: u64, hpa: u64, bytes: u64, leaf: Leaf) -> Result<(), String> {
        self.check_map(gpa, hpa, bytes, leaf)?;
        let constraints = constraints(leaf);
        for (gpa, offset) in steps(gpa, bytes, leaf.bytes()) {
            let hpa = PhysicalAddress((hpa + offset) as usize);
            self.0.map_range(&region(gpa, leaf.bytes()), hpa, RAM, constraints).map_err(why)?;
        }
        Ok(())
    }

    fn protect_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        self.check_left(EDGES)?;
        self.0
            .modify_range(&region(gpa, bytes), &|_, leaf| leaf.modify_flags(Bits::empty(), WRITE))
            .map_err(why)
    }

    fn unmap_range(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        self.check_left(EDGES)?;
        // The crate documents that it ignores the address, but computes with it: an address with
        // the alignment of the range keeps blocks whole, and no subtraction underflows.
        let same = PhysicalAddress(gpa as usize);
        self.0
            .map_range(&region(gpa, bytes), same, Bits::empty(), Constraints::empty())
            .map_err(why)
    }

    /// Splits a block by a modification of a part of it, which may leave the part unchanged.
    fn split(&mut self, gpa: u64, bytes: u64) -> Result<(), String> {
        check(gpa, bytes, Leaf::Block2M, ADDRESS_BITS)?;
        // A table for each block, and one of the level above where nothing is mapped.
        self.check_left((bytes >> 21) + (bytes >> 30) + 2)?;
        for (gpa, _) in steps(gpa, bytes, Leaf::Block2M.bytes()) {
            self.0.modify_range(&region(gpa, 4096), &|_, _| Ok(())).map_err(why)?;
        }
        Ok(())
    }

    fn lookup_all(&self, addresses: &[u64]) -> Result<u64, String> {
        let mut sum = 0u64;
        for &gpa in addresses {
            // The end of the region would overflow.
            if gpa >> ADDRESS_BITS != 0 {
                return Err(format!("{gpa:#x}: beyond {ADDRESS_BITS} bits"));
            }
            let page = gpa & !(PAGE_SIZE as u64 - 1);
            self.0
                .walk_range(&region(page, PAGE_SIZE as u64), &mut |_, leaf, level| {
                    if !leaf.is_valid() {
                        return Err(());
                    }
                    let offset = gpa & (entry_bytes(level) - 1);
                    let write = leaf.flags().contains(WRITE);
                    let hpa = leaf.output_address().0 as u64 + offset;
                    sum = sum.wrapping_add(hpa).wrapping_add(write.into());
                    Ok(())
                })
                .map_err(|error| format!("{gpa:#x}: {error}"))?;
        }
        Ok(sum)
    }

    fn leaves(&self, gpa: u64, bytes: u64) -> Result<Vec<Run>, String> {
        check(gpa, bytes, Leaf::Page4K, ADDRESS_BITS)?;
        let mut runs = Vec::new();
        self.0
            .walk_range(&region(gpa, bytes), &mut |chunk, leaf, level| {
                if leaf.is_valid() {
                    let gpa = chunk.start().0 as u64;
                    let offset = gpa & (entry_bytes(level) - 1);
                    let run = Run {
                        gpa,
                        hpa: leaf.output_address().0 as u64 + offset,
                        bytes: chunk.len() as u64,
                        leaf: entry_bytes(level),
                        writable: leaf.flags().contains(WRITE),
                    };
                    runs::push(&mut runs, run);
                }
                Ok(())
            })
            .map_err(why)?;
        Ok(runs)
    }

    fn frames_left(&self) -> usize {
        self.0.translation().0.left()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crates::tests::Pages;

    #[test]
    fn leaves_are_stage_2_descriptors_bit_for_bit() {
        let pages = Pages::new(8);
        let mut arm = Arm::new(pages.memory()).unwrap();
        arm.map_range(0x20_0000, 0x4000_0000, 0x1000, Leaf::Page4K).unwrap();
        arm.map_range(0x40_0000, 0x8000_0000, 0x20_0000, Leaf::Block2M).unwrap();
        arm.protect_range(0x40_0000, 0x20_0000).unwrap();
        // A page: valid, not a block, write-back memory, read and write, inner shareable,
        // accessed. The block: the same without bits 1 and 7.
        assert!(arm.0.root_address().0 != 0);
        let mut seen = Vec::new();
        let region = region(0x20_0000, 0x40_0000);
        let mut see = |_: &_, leaf: &::aarch64_paging::descriptor::Descriptor<Bits>, _| {
            seen.push(leaf.output_address().0 | leaf.flags().bits());
            Ok(())
        };
        arm.0.walk_range(&region, &mut see).unwrap();
        assert_eq!(seen[0], 0x4000_07ff);
        assert_eq!(seen[512], 0x8000_077d);
    }

    #[test]
    fn what_the_crate_would_subtract_beyond_0_is_refused() {
        let pages = Pages::new(16);
        let mut arm = Arm::new(pages.memory()).unwrap();
        arm.unmap_range(0x10_1000, 0x1000).unwrap();
        arm.map_range(0x20_0000, 0x4000_0000, 0x20_0000, Leaf::Block2M).unwrap();
        let error = arm.map_range(0x30_0000, 0x1000, 0x1000, Leaf::Page4K).unwrap_err();
        assert_eq!(error, "0x300000 is in a block, and 0x1000 too low to map it to");
    }
}
