//! The engine on a host: a platform, and the operations of a hypervisor on a guest's memory.

use slat::format::arm64::Arm64K4;
use slat::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::error::Error;
use std::ptr::NonNull;

/// Table pages from the allocator. The address of a frame is the address of its memory.
struct Host {
    grace: Grace<[Seat; 4]>,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: `allocate` returns memory of that size and alignment that no other code uses, at the
// frame's address, until `free`. No CPU loads these tables. `grace` is a field.
unsafe impl Platform for Host {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the layout's size is not zero; only the frame uses the memory.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the frame came from `allocate` with these bytes.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }
    fn publish(&self) {}
    fn invalidate(&self, what: &Invalidation) {
        println!("  invalidate {what:?}");
    }
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }
    fn grace(&self) -> &Grace {
        &self.grace
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let host = Host { grace: Grace::new([const { Seat::new() }; 4]) };
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(&host, &mut storage);
    cache.fill(8)?;
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &host)?;
    let mut participant = Participant::register(&host)?;
    let mut guest = tables.enter(&mut participant)?;

    println!("map 32 MiB of guest memory by the largest leaves that fit");
    let ram = GpaRange::new(Gpa(1 << 30), 32 << 20)?;
    guest.map(ram, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_1G, &mut cache)?;
    println!("log writes: protect all of it; once that is complete, none goes unnoticed");
    guest.write_protect(ram)?;
    guest.complete();
    println!("the guest writes a page and faults: split the path to it, and let it write");
    let page = GpaRange::new(Gpa(0x4056_7000), 4096)?;
    guest.split(page, PageSize::SIZE_4K, &mut cache)?;
    guest.relax(page, Access::Write)?.flush_local();
    print!("{}", guest.dump());
    println!("end of logging: the page is as its neighbours again, and the block comes back");
    guest.relax(ram, Access::Write)?.elsewhere();
    guest.collapse(ram, PageSize::SIZE_2M)?;
    println!("unmap: the memory is known again once the guest cannot reach it");
    let mut removed = [Place::EMPTY; 4];
    let mut removals = Removals::new(&tables, &mut removed);
    guest.unmap(ram, &mut removals)?;
    removals.complete().for_each(|leaves| println!("  {} at {}", leaves.bytes, leaves.hpa));
    drop(removals);
    println!("  {:?}", guest.counts());
    drop(guest);
    println!("{} tables given back", tables.reclaim());
    // SAFETY: no CPU has ever loaded these tables.
    unsafe { tables.deactivate() }.destroy();
    Ok(())
}
