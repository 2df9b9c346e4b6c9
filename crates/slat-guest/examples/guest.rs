//! A guest's memory on a host: faults, and a migration's rounds.

use slat::format::ept::Ept1G;
use slat::*;
use slat_guest::*;
use std::error::Error;

/// Contiguous memory: address 0 of the VMM is at 8 GiB of the machine.
struct OnePiece;

impl Backing for OnePiece {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let (hpa, block) = (Hpa((8 << 30) + host.0), PageSize::SIZE_2M);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let machine = AllocPlatform::with(|what| {
        println!("  every CPU that runs the guest: INVEPT, for {what:?}");
    });
    let config = Config::new(1, PageSize::SIZE_1G);
    let guest = Guest::new(Ept1G::default(), Vmid(1), 40, &machine, OnePiece, config)?;
    let mut vcpu = Vcpu::new(&guest, 0)?;
    println!("the vCPU's CPU loads the root at {}", vcpu.root());

    let ram = MemslotSpec::new(MemslotId(0), Gpa(0), 64 << 20, Hva(0));
    vcpu.worker().set_memslot(ram)?;
    println!("a write at 0x1234: {:?}", vcpu.fault(Gpa(0x1234), Access::Write));
    println!("a read of a device: {:?}", vcpu.fault(Gpa(0x1000_0000), Access::Read));

    println!("a migration begins: {:?}", {
        vcpu.worker().set_memslot(MemslotSpec { log_dirty: true, ..ram })?
    });
    println!("a write at 0x5678: {:?}", vcpu.fault(Gpa(0x5678), Access::Write));
    // The VMM writes a page itself, as a device would. Without this the page would not be copied.
    let page = GpaRange::new(Gpa(0x9000), 0x1000)?;
    vcpu.worker().host_wrote(page, Maintenance::Data);
    let mut dirty = [0; 256];
    let pages = vcpu.worker().read_log(MemslotId(0), &mut dirty)?;
    println!("the log has {pages} pages, {:#b}; clear it, then copy it", dirty[0]);
    println!("{:?}", vcpu.worker().clear_log(MemslotId(0), 0, 64, &dirty[..1])?);
    println!("it ends: {:?}", vcpu.worker().set_memslot(ram)?);

    let host = HvaRange { start: Hva(0x5000), bytes: 0x1000 };
    println!("the host wants a page back");
    drop(vcpu.worker().invalidate(host, |taken| println!("  {taken:?}")));
    for &kind in FaultKind::ALL {
        let spent = guest.stats().faults(kind);
        if spent.count != 0 {
            println!("{}: {}", kind.name(), spent.count);
        }
    }
    drop(vcpu);
    // SAFETY: no CPU has ever loaded these tables.
    unsafe { guest.destroy() };
    Ok(())
}
