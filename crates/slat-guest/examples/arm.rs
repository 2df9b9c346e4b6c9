//! A guest on Arm without FEAT_S2FWB: vCPUs that share tables, and one whose caches are off.

use slat::format::arm64::Arm64K4;
use slat::*;
use slat_guest::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::error::Error;
use std::ptr::NonNull;
use std::time::Instant;

/// Table pages come from the allocator; a frame's address is the address of its memory.
struct Machine {
    readers: Readers<[ReaderSlot; 4]>,
    start: Instant,
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).expect("the engine asks for powers of two")
}

// SAFETY: by the numbers of `Platform`'s contract. 1, 2: `allocate` returns memory of that size and
// alignment that no other code uses, whose address is the frame's, and which stays until `free`. 3:
// no CPU loads these tables. 4: `readers` is a field.
unsafe impl Platform for Machine {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the size of the layout is not zero; the memory is the frame's alone.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }
    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: the frame came from `allocate` with this size.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }
    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        NonNull::new(table.0 as *mut Pte).expect("a frame is not at address 0")
    }
    fn publish(&self) {} // dsb ishst
    fn invalidate(&self, what: &Invalidation) {
        println!("  TLBI and DSB, for {what:?}");
    }
    fn invalidate_local(&self, _: &Invalidation) {}
    fn break_before_make(&self) -> BreakBeforeMake {
        BreakBeforeMake::Always
    }
    fn readers(&self) -> &Readers {
        &self.readers
    }
    fn maintain(&self, memory: Hpa, bytes: u64, _: Maintenance) {
        println!("  DC CIVAC, from {memory} on: {} KiB", bytes >> 10);
    }
}

impl Host for Machine {
    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// Contiguous memory: address 0 of the VMM is at 8 GiB of the machine.
struct OnePiece;

impl Backing for OnePiece {
    fn page(&self, host: Hva, _access: Access) -> Result<Page, NoPage> {
        let (hpa, block) = (Hpa((8 << 30) + host.0), PageSize::SIZE_2M);
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let readers = Readers::new([const { ReaderSlot::new() }; 4]);
    let machine = Machine { readers, start: Instant::now() };
    // Without `caches_on` both vCPUs would begin as vCPU 1 does after its reset.
    let config = Config { caches_on: true, ..Config::new(2, PageSize::SIZE_1G) };
    let guest = Guest::new(Arm64K4::default(), Vmid(1), 40, &machine, OnePiece, config)?;
    let mut vcpu = Vcpu::new(&guest, 0)?;
    let mut secondary = Vcpu::new(&guest, 1)?;
    vcpu.worker().set_memslot(MemslotSpec::new(MemslotId(0), Gpa(0), 64 << 20, Hva(0)))?;

    println!("vCPU 0, its caches on: {:?}", vcpu.fault(Gpa(0x1234), Access::Write));
    assert_eq!(vcpu.root(), guest.tables().root());

    println!("the guest starts vCPU 1 (PSCI CPU_ON), its caches off:");
    let switch = secondary.reset();
    assert!(switch.root_changed && secondary.has_view());
    let (root, trap) = (secondary.root(), switch.trap);
    println!("  VTTBR_EL2 = {root}, then TLBI VMALLS12E1; HCR_EL2.TVM = {trap}");
    println!("vCPU 1: {:?}", secondary.fault(Gpa(0x1234), Access::Write));
    println!("  in its own tables: {:?}", guest.stats().views.by_size()[0]);

    println!("it switches its caches on (a trapped write of SCTLR_EL1):");
    let switch = secondary.set_caches(true);
    assert!(switch.root_changed && secondary.root() == guest.tables().root());
    println!("vCPU 1: {:?}", secondary.fault(Gpa(0x1234), Access::Write));
    drop((vcpu, secondary));
    // SAFETY: no CPU has ever loaded these tables.
    unsafe { guest.destroy() };
    Ok(())
}
