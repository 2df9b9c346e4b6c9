//! The values that a CPU loads to walk a guest's tables.

use super::{Format, Geometry};
use crate::addr::Hpa;
use crate::invalidation::Vmid;

/// The root of a guest's tables, with all else that the registers of a CPU hold of them.
///
/// The tables make it: [`Tables::guest_root`](crate::Tables::guest_root),
/// [`AddressSpace::guest_root`](crate::AddressSpace::guest_root). So the values of registers that
/// it returns fit each other; each format has those of its architecture. It is made anew after the
/// guest got [another VMID](crate::Tables::set_vmid).
///
/// A caller that loads such a value is responsible for what is mapped: the guest reaches all of
/// that memory.
///
/// ```
/// use slat::format::riscv::RiscV;
/// use slat::*;
///
/// let host = AllocPlatform::new();
/// let space = AddressSpace::new(RiscV::default(), Vmid(5), 41, &host)?;
/// let hgatp = space.guest_root().hgatp()?;
/// assert_eq!(hgatp, 8 << 60 | 5 << 44 | space.root().0 >> 12);
/// # // SAFETY: no CPU has ever loaded these tables.
/// # unsafe { space.destroy() };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GuestRoot<F: Format> {
    /// The format, as configured.
    pub format: F,
    /// The level at which hardware starts its walks, and the size of the root.
    pub geometry: Geometry,
    /// The address of the root.
    pub root: Hpa,
    /// The guest's VMID, as it was when this was made.
    pub vmid: Vmid,
}

#[cfg(all(
    test,
    feature = "arm64",
    feature = "ept",
    feature = "npt",
    feature = "power",
    feature = "riscv"
))]
mod tests {
    use super::*;
    use crate::format::arm64::{Arm64K4, id::IdRegisters};
    use crate::format::ept::Ept1G;
    use crate::format::npt::{Npt1G, asid::TlbControl};
    use crate::format::power::PowerK4;
    use crate::format::riscv::{Mode, RiscV};

    /// A root whose bits are all told apart from those of the other fields.
    fn root<F: Format>(format: F, address_bits: u32, root: u64) -> GuestRoot<F> {
        let geometry = format.geometry(address_bits).unwrap();
        GuestRoot { format, geometry, root: Hpa(root), vmid: Vmid(0x2a5) }
    }

    #[test]
    fn each_register_has_the_root_and_the_guest_in_its_own_bits() {
        // PARange 5: 48 bits; 4K granule at stage 1 and 2; VMIDBits 2: 16 bits; XNX.
        let cpu = IdRegisters { mmfr0: 5, mmfr1: 2 << 4 | 1 << 28, ..Default::default() };
        let arm = root(Arm64K4::default(), 40, 0x8765_4321_6000);
        assert_eq!(arm.vttbr(&cpu), Ok(0x02a5_8765_4321_6000));
        assert_eq!(arm.vtcr(&cpu), cpu.vtcr(&arm.format, &arm.geometry));

        // A and D, four levels, write-back.
        let ept = root(Ept1G { accessed_dirty: true, ..Ept1G::default() }, 48, 0x8765_4321_6000);
        assert_eq!(ept.eptp(), 0x8765_4321_6000 | 1 << 6 | 3 << 3 | 6);

        let npt = root(Npt1G::default(), 48, 0x8765_4321_6000);
        assert_eq!(npt.ncr3(), 0x8765_4321_6000);
        assert_eq!(npt.asid(TlbControl::FlushGuest), 3 << 32 | 0x2a5);

        // Sv48x4: mode 9; the VMID from bit 44 on; the root's page number.
        let riscv = root(RiscV { widest: Mode::Sv48x4, ..RiscV::default() }, 50, 0x8765_4321_4000);
        assert_eq!(riscv.hgatp(), Ok(9 << 60 | 0x2a5 << 44 | 0x8_7654_3214));

        // HR; RTS 21 as 0b10 and 0b101; 13 bits of index in the root.
        let power = root(PowerK4::default(), 52, 0x8765_4321_0000);
        let entry = 1 << 63 | 0b10 << 61 | 0x8765_4321_0000 | 0b101 << 5 | 13;
        assert_eq!(power.partition_entry(), Ok(entry));
    }
}
