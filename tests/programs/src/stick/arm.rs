//! Arm's stage 2, where the firmware leaves EL2 to its programs: with the 4K granule, and with 64K
//! and 52 bits where the CPU has FEAT_LPA.

mod el2;
#[path = "../../../../hypervisor/src/el2/execute.rs"]
mod execute;
mod second;

use crate::claims::{Bits, Claims, Cpu, Does, Fault, M2, Outcome, judge};
use crate::machine::{Memory, Parts, RIGHT, Serial};
use core::fmt::Write;
use core::sync::atomic::Ordering::SeqCst;
use el2::{CALL, Machine, id_registers, load_root, read, run, write_code};
use slat::format::arm64::{Arm64, Arm64K4};
use slat::{Attributes, Invalidation, Platform, Reader, TableCache, Tables, Vmid};

/// The tables of the cases of two CPUs.
type Tree = Arm64K4;
const VMID: Vmid = Vmid(1);
/// Of the guest.
const ADDRESS_BITS: u32 = 39;
const WIDE_ADDRESS_BITS: u32 = 52;
/// The guest's memory: pages, then a block.
static MEMORY: Memory<{ 4 << 20 }> = Memory::new();

/// Returns what this CPU can do, or why the program must not touch its virtualisation.
pub fn find() -> Result<Parts, &'static str> {
    let _ = writeln!(Serial, "MIDR_EL1 {:#x}", read!("midr_el1"));
    if read!("CurrentEL") >> 2 != 2 {
        return Err("the firmware is not at EL2");
    }
    let hcr = read!("hcr_el2");
    if hcr >> 34 & 1 == 1 {
        return Err("the firmware uses HCR_EL2.E2H");
    }
    if hcr & 1 == 1 {
        return Err("the firmware uses stage 2 itself (HCR_EL2.VM)");
    }
    match id_registers().format::<12, false>() {
        Ok(format) => _ = writeln!(Serial, "{format:?}"),
        Err(_) => return Err("no stage 2 of 4K"),
    }
    Ok(Parts { claims, second: second::run, times: || () })
}

struct El2<'p, const SHIFT: u32, const WIDE: bool>(&'p Machine);

impl<const SHIFT: u32, const WIDE: bool> Cpu for El2<'_, SHIFT, WIDE> {
    type Format = Arm64<SHIFT, WIDE>;
    type Platform = Machine;
    const SAYS_WHY: bool = true;
    const CALL: u64 = CALL;
    const FAULTS: &'static [Fault] = &[
        ("a leaf is invalid", Bits::Clear(1)),
        ("a leaf lacks the right to read", Bits::Clear(1 << 6)),
        ("a leaf keeps the right to write", Bits::Set(1 << 7)),
        ("a leaf keeps the right to execute", Bits::Clear(0b11 << 53)),
        ("a leaf is accessed before", Bits::Set(1 << 10)),
        ("a leaf's address is off by a leaf", Bits::Address),
    ];

    fn run(&self, does: Does) -> Outcome {
        run(does)
    }

    fn write_code(&self, hpa: u64) {
        write_code(hpa);
    }

    fn forget(&self) {
        self.0.invalidate(&Invalidation { vmid: VMID, range: None, leaf: None, tables: true });
    }
}

fn claims() {
    let mut wrong =
        judge::<El2<'_, 12, false>>(Serial, |fault| check::<12, false>("4K", ADDRESS_BITS, fault));
    match id_registers().format::<16, true>() {
        Ok(_) => {
            wrong += judge::<El2<'_, 16, true>>(Serial, |fault| {
                check::<16, true>("64K, 52 bits", WIDE_ADDRESS_BITS, fault)
            });
        }
        Err(missing) => _ = writeln!(Serial, "64K, 52 bits: {missing}"),
    }
    RIGHT.store(wrong == 0, SeqCst);
}

/// Checks tables of this granule, near the end of so many bits of addresses.
fn check<const SHIFT: u32, const WIDE: bool>(
    name: &'static str,
    bits: u32,
    fault: Option<Fault>,
) -> u32 {
    let id = id_registers();
    let format: Arm64<SHIFT, WIDE> = id.format().expect("the caller has seen it");
    let machine = Machine::new(&id, &format);
    let tables = Tables::new(format, VMID, bits, &machine).expect("a frame");
    load_root(&tables.guest_root(), &id);
    let mut storage = [const { None }; 16];
    let mut reader = Reader::register(&machine).expect("a reader slot");
    let mut claims = Claims {
        cpu: El2::<SHIFT, WIDE>(&machine),
        tables: &tables,
        guard: tables.enter(&mut reader).expect("the same platform"),
        cache: TableCache::new(&machine, &mut storage),
        out: Serial,
        name,
        at: (1 << bits) - 16 * M2,
        pages: MEMORY.hpa() + 0x1_0000,
        block: MEMORY.hpa() + M2,
        wrong: 0,
        fault,
        marked_by_faults: 0,
    };
    write_code(MEMORY.hpa());
    let code = Attributes { write: false, dirty: false, ..Attributes::RAM };
    claims.map(0, 1 << SHIFT, MEMORY.hpa(), code);
    claims.check();
    claims.wrong
}
