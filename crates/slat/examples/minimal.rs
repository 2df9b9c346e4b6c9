//! The engine on a host: a platform, and what a hypervisor does to a guest's memory.

use slat::format::arm64::Arm64K4;
use slat::{
    Attributes, BreakBeforeMake, Frame, Gpa, GpaRange, Hpa, Invalidation, PageSize, Platform, Slot,
    TableCache, Tables, Vmid,
};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::error::Error;
use std::ptr::NonNull;

/// Table pages from the allocator; a frame's address is that of its memory.
struct Host;

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: `allocate` returns memory of that size and alignment that is nobody else's, and whose
// address is the frame's; it stays until `free`. No CPU loads these tables.
unsafe impl Platform for Host {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the layout has a size that is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the frame came from `allocate` with these bytes.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn slots(&self, table: Hpa) -> NonNull<Slot> {
        NonNull::new(table.0 as *mut Slot).expect("a frame is not at address 0")
    }

    fn publish(&self) {}

    fn invalidate(&self, what: &Invalidation) {
        println!("  invalidate {what:?}");
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &Host)?;
    let mut storage = [const { None }; 64];
    let mut cache = TableCache::new(&Host, &mut storage);
    cache.fill(64)?;

    println!("map 1 GiB of guest memory by the largest leaves that fit");
    let ram = GpaRange::new(Gpa(1 << 30), 1 << 30)?;
    let _nothing_stale =
        tables.map(ram, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_1G, &mut cache)?;

    println!("protect it: once the shootdown has completed, no write goes unnoticed");
    let _proof = tables.write_protect(ram)?.shootdown.complete(&Host);

    println!("split it: 2 MiB everywhere, 4 KiB where the guest faults");
    let page = GpaRange::new(Gpa(0x4567_8000), 4096)?;
    for (range, size) in [(ram, PageSize::SIZE_2M), (page, PageSize::SIZE_4K)] {
        let done = tables.split(range, size, &mut cache)?;
        println!("  {:?}", done.counts);
        let _proof = done.shootdown.complete(&Host);
    }
    println!("  {:?}", tables.translate(page.start())?);

    println!("unmap it; the memory is free once the shootdown has completed");
    let mut leaves = 0;
    let _proof = tables.unmap(ram, |_leaf| leaves += 1)?.shootdown.complete(&Host);
    println!("  {leaves} leaves");
    tables.destroy();
    Ok(())
}
