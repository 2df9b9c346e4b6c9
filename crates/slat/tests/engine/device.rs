//! A device's registers, which one caller maps in the same way on every format.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::npt::{self, Npt};
use crate::common::hardware::power::Core;
use crate::common::hardware::riscv::Hart;
use crate::common::stage::{on_stage, range};
use slat::format::arm64::{Arm64K4, Arm64K16, Arm64K64, Arm64Lpa2K4, Arm64Lpa2K16, Arm64LpaK64};
use slat::format::ept::{Ept1G, Ept2M};
use slat::format::npt::{Npt1G, Npt2M};
use slat::format::power::{Power, PowerK4, PowerK64};
use slat::format::riscv::RiscV;
use slat::{
    AddressSpace, AnyAddressSpace, Attributes, BreakBeforeMake, Execute, Format, Gpa, Hpa, Memory,
    PageSize, Vmid,
};

const TYPED: RiscV =
    RiscV { widest: slat::format::riscv::Mode::Sv48x4, memory_types: true, output_bits: 48 };
const UNTYPED: RiscV = RiscV { memory_types: false, ..TYPED };

/// The attributes that hardware finds, to be compared with the manual's names.
fn found<H: Hardware>(format: H::Format) -> Memory {
    let page = 1 << H::PAGE;
    let mut memory = None;
    on_stage::<H>((format, 40, 8), |tables, guard, cache| {
        let (at, device) = (range(page, page), Attributes::device(&format));
        let size = PageSize::from_bytes(page).unwrap();
        assert_eq!(guard.map(at, Hpa(0x1000_0000), device, size, cache), Ok(page));
        let own = H::of(tables).tree(guard.platform()).runs[0].leaf.own;
        assert_eq!(own, device);
        assert!(own.read && own.write && own.execute == Execute::None);
        memory = Some(own.memory);
        crate::common::unmap(guard, at);
    });
    memory.unwrap()
}

#[test]
fn a_device_has_the_strictest_type_that_the_format_has() {
    // Device-nGnRnE; UC regardless of the guest's PAT; UC.
    assert_eq!(found::<Arm<12>>(Default::default()), Memory::DeviceStrict);
    let ept = Ept1G { output_bits: 48, ..Default::default() };
    assert_eq!(found::<Ept<true>>(ept), Memory::DeviceStrict);
    assert_eq!(found::<Npt<true>>(npt::FORMAT), Memory::DeviceStrict);
    // I/O by Svpbmt; without it the physical memory attributes decide.
    assert_eq!(found::<Hart<true>>(TYPED), Memory::Device);
    assert_eq!(found::<Hart<true>>(UNTYPED), Memory::Normal);
    // Non-idempotent I/O.
    assert_eq!(found::<Core<16, true>>(Power { output_bits: 48 }), Memory::Device);
}

#[test]
fn one_caller_maps_a_device_on_every_format() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    fn space<'p, F: Format>(
        format: F,
        platform: &'p TestPlatform,
    ) -> (AnyAddressSpace<'p, TestPlatform>, PageSize)
    where
        AnyAddressSpace<'p, TestPlatform>: From<AddressSpace<'p, F, TestPlatform>>,
    {
        let space = AddressSpace::new(format, Vmid(1), 40, platform).unwrap();
        (AnyAddressSpace::from(space), F::size(0))
    }
    let on = &platform;
    let all = [
        space(Arm64K4::default(), on),
        space(Arm64K16::default(), on),
        space(Arm64K64 { forced_write_back: true, ..Default::default() }, on),
        space(Arm64Lpa2K4::default(), on),
        space(Arm64Lpa2K16::default(), on),
        space(Arm64LpaK64::default(), on),
        space(Ept1G { output_bits: 48, ..Default::default() }, on),
        space(Ept2M { output_bits: 48, accessed_dirty: false, ..Default::default() }, on),
        space(npt::FORMAT, on),
        space(Npt2M { output_bits: 48, ..Default::default() }, on),
        space(PowerK4 { output_bits: 48 }, on),
        space(PowerK64 { output_bits: 48 }, on),
        space(TYPED, on),
        space(UNTYPED, on),
        space(Npt1G { five_levels: true, output_bits: 48 }, on),
    ];
    for (mut space, page) in all {
        let (device, at) = (space.device(), range(0x1000_0000, page.bytes()));
        space.map(at, Hpa(0x2000_0000), device, page).unwrap();
        let found = space.query(Gpa(0x1000_0004)).unwrap();
        assert_eq!((found.hpa, found.attributes), (Hpa(0x2000_0004), device));
        // SAFETY: no CPU has these tables loaded.
        unsafe { space.destroy() };
    }
    assert_eq!(platform.live(), 0);
}
