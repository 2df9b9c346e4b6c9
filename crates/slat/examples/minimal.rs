//! The engine on a host: map a guest's memory, answer its faults, log its writes.

use slat::format::arm64::Arm64K4;
use slat::*;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let host = AllocPlatform::with(|what| println!("  invalidate {what:?}"));
    let mut space = AddressSpace::new(Arm64K4::default(), Vmid(1), 40, &host)?;

    println!("map 2 MiB of guest memory, as one block");
    let ram = GpaRange::new(Gpa(1 << 30), 2 << 20)?;
    space.map(ram, Hpa(8 << 30), Attributes::RAM, PageSize::SIZE_2M)?;
    println!("  {:?}", space.query(Gpa(0x4000_1234)));

    println!("begin a dirty log: split the block into pages, which may not be written");
    let mut cache = TableCache::filled(&host, 1)?;
    let mut guest = space.enter();
    guest.split(ram, PageSize::SIZE_4K, &mut cache)?;
    guest.write_protect(ram)?;
    guest.harvest(ram, &mut [0; 8])?;

    println!("the guest writes a page, and faults: let it write this page");
    let page = GpaRange::new(Gpa(0x4000_5000), 0x1000)?;
    guest.relax(page, Access::Write)?.flush_local();

    println!("read the log, and protect the pages again");
    let mut log = [0; 8];
    guest.write_protect(ram)?;
    let pages = guest.harvest(ram, &mut log)?;
    println!("  {pages} page was written: {:#b}, page 5 of the range", log[0]);
    print!("{}", guest.dump());
    drop(guest);

    println!("unmap: the memory is handed out once the guest cannot reach it");
    space.unmap(ram, |gone| println!("  {} at {}", gone.bytes, gone.hpa))?;
    // SAFETY: no CPU has ever loaded these tables.
    unsafe { space.destroy() };
    Ok(())
}
