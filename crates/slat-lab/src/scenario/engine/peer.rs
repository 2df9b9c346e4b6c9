//! Another crate's x86-64 tables: `page_table_multiarch`, on the same memory.

use crate::arena::Arena;
use crate::scenario::contest::Watch;
use anyhow::{anyhow, ensure};
use page_table_multiarch::{MappingFlags, PageSize, PageTable64, PagingHandler, PagingMetaData};
use slat::GpaRange;
use std::cell::Cell;

/// The crate.
pub const NAME: &str = "page_table_multiarch";

/// What the lookups found, and how long they took.
pub struct Found {
    pub seconds: f64,
    pub sum: u64,
}

thread_local! {
    /// Table memory that is left: from where, to where.
    static MEMORY: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Four levels; nothing to invalidate.
struct Levels;

impl PagingMetaData for Levels {
    const LEVELS: usize = 4;
    const PA_MAX_BITS: usize = 52;
    const VA_MAX_BITS: usize = 48;
    type VirtAddr = memory_addr::VirtAddr;

    fn flush_tlb(_: Option<Self::VirtAddr>) {}
}

/// Frames stand where they are mapped.
struct Frames;

impl PagingHandler for Frames {
    fn alloc_frames(num: usize, align: usize) -> Option<memory_addr::PhysAddr> {
        let (at, end) = MEMORY.get();
        let at = at.next_multiple_of(align);
        let next = at + num * 4096;
        (next <= end).then(|| {
            MEMORY.set((next, end));
            at.into()
        })
    }

    fn dealloc_frames(_: memory_addr::PhysAddr, _: usize) {}

    fn phys_to_virt(paddr: memory_addr::PhysAddr) -> memory_addr::VirtAddr {
        paddr.as_usize().into()
    }
}

type Table = PageTable64<Levels, page_table_entry::x86_64::X64PTE, Frames>;

/// Maps `range` to `host` by pages, and looks all `addresses` up.
pub fn query(
    arena: &mut Arena,
    range: GpaRange,
    host: u64,
    addresses: &[u64],
) -> anyhow::Result<Found> {
    arena.reset();
    let memory = arena.words(usize::MAX).as_mut_ptr_range();
    MEMORY.set((memory.start as usize, memory.end as usize));
    let why = |error| anyhow!("page_table_multiarch: {error:?}");
    let mut table = Table::try_new().map_err(why)?;
    let flags = MappingFlags::READ | MappingFlags::WRITE | MappingFlags::EXECUTE;
    let mut cursor = table.cursor();
    for gpa in (range.start().0..range.end().0).step_by(4096) {
        let hpa = (gpa - range.start().0 + host) as usize;
        cursor.map((gpa as usize).into(), hpa.into(), PageSize::Size4K, flags).map_err(why)?;
    }
    drop(cursor);
    let mut sum = 0u64;
    let watch = Watch::start();
    for &gpa in addresses {
        let (hpa, flags, _) = table.query((gpa as usize).into()).map_err(why)?;
        let write = flags.contains(MappingFlags::WRITE);
        sum = sum.wrapping_add(hpa.as_usize() as u64).wrapping_add(write.into());
    }
    let seconds = watch.seconds();
    drop(table);
    ensure!(MEMORY.replace((0, 0)).0 != 0, "the tables were not made of this memory");
    Ok(Found { seconds, sum })
}
