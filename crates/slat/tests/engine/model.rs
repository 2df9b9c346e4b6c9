//! Long random histories through the engine and a flat model, on every format and granule and with
//! every break-before-make requirement, while hardware sets accessed and dirty bits and is as lazy
//! as it may be.
//!
//! `PROPTEST_CASES` sets the number of histories for a format.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::npt::{self, Npt};
use crate::common::hardware::power::Core;
#[cfg(feature = "every-format")]
use crate::common::hardware::riscv::Hart;
use crate::common::history::history;
use crate::common::space::Space;
use crate::common::world::{Mapping, World};
use proptest::prelude::*;
use slat::format::arm64::Arm64;
use slat::{
    Attributes, Batched, Bounded, BreakBeforeMake, EveryEntry, Gpa, GpaRange, PageSize, Place,
    Removals,
};

proptest! {
    #![proptest_config(slat_seed::config())]

    #[test]
    fn any_history_on_the_4k_granule_agrees_with_the_flat_model(history in history()) {
        // Roots of 2m entries, of 1g entries (31 bits need sixteen tables of 2m), of 512g entries.
        let bits = [25, 31, 36, 44][history.bits];
        Space::<Arm<12>>::new(bits, 600).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_16k_granule_agrees_with_the_flat_model(history in history()) {
        let bits = [27, 30, 37, 41][history.bits];
        Space::<Arm<14>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_64k_granule_agrees_with_the_flat_model(history in history()) {
        let bits = [31, 33, 43, 47][history.bits];
        Space::<Arm<16>>::new(bits, 20).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_with_lpa2_agrees_with_the_flat_model(history in history()) {
        // The last has sixteen tables of 512g entries.
        let bits = [26, 36, 48, 52][history.bits];
        Space::<Arm<12, true>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_16k_granule_with_lpa2_agrees_with_the_flat_model(history in history()) {
        // Blocks of 64g; the last has a root above them.
        let bits = [28, 41, 47, 52][history.bits];
        Space::<Arm<14, true>>::new(bits, 20).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_64k_granule_with_lpa_agrees_with_the_flat_model(history in history()) {
        // The last two have roots above blocks of 512m.
        let bits = [31, 46, 48, 52][history.bits];
        Space::<Arm<16, true>>::new(bits, 20).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_ept_with_five_levels_agrees_with_the_flat_model(history in history()) {
        // Four levels where these suffice.
        let bits = [31, 48, 49, 52][history.bits];
        Space::<Ept<true, true>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_npt_with_five_levels_agrees_with_the_flat_model(history in history()) {
        let bits = [24, 40, 49, 52][history.bits];
        Space::<Npt<true, true>>::new(bits, 40).play(&history);
    }

    #[test]
    fn any_history_on_ept_agrees_with_the_flat_model(history in history()) {
        // A root of one entry, of two entries, of all.
        let bits = [24, 31, 40, 48][history.bits];
        Space::<Ept<true>>::new(bits, 600).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_ept_without_1g_blocks_agrees_with_the_flat_model(history in history()) {
        let bits = [25, 32, 39, 41][history.bits];
        Space::<Ept<false>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_g_stage_with_svadu_agrees_with_the_flat_model(history in history()) {
        // Part of Sv39x4, and all of it; Sv48x4; Sv57x4.
        let bits = [24, 41, 48, 59][history.bits];
        Space::<Hart<true>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_npt_agrees_with_the_flat_model(history in history()) {
        let bits = [24, 31, 40, 48][history.bits];
        Space::<Npt<true>>::new(bits, 600).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_the_g_stage_without_svadu_agrees_with_the_flat_model(history in history()) {
        let bits = [24, 41, 48, 59][history.bits];
        Space::<Hart<false>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_radix_with_4k_pages_agrees_with_the_flat_model(history in history()) {
        // The root is the same for all: of 512g entries.
        let bits = [24, 32, 41, 52][history.bits];
        Space::<Core<12, false>>::new(bits, 600).play(&history);
    }

    #[test]
    fn any_history_on_radix_with_64k_pages_agrees_with_the_flat_model(history in history()) {
        let bits = [25, 32, 41, 52][history.bits];
        Space::<Core<16, true>>::new(bits, 40).play(&history);
    }

    #[cfg(feature = "every-format")]
    #[test]
    fn any_history_on_npt_without_1g_blocks_agrees_with_the_flat_model(history in history()) {
        let bits = [25, 32, 39, 41][history.bits];
        Space::<Npt<false>>::new(bits, 40).play(&history);
    }
}

#[test]
fn hardware_that_uses_a_block_while_its_tables_are_built_is_not_forgotten() {
    fn split<H: Hardware>(format: H::Format, bbm: BreakBeforeMake, way: u8, large: usize) {
        let platform = TestPlatform::new(bbm);
        let mut world = World::<H>::new(&platform, bbm, format, 40);
        let size = H::sizes()[large];
        let (blocks, page) = (GpaRange::new(Gpa(size), 3 * size).unwrap(), 1 << H::PAGE);
        let attributes = Attributes { accessed: false, dirty: false, ..Attributes::RAM };
        let largest = PageSize::from_bytes(size).unwrap();
        assert_eq!(world.map(blocks, Mapping { hpa: 8 * size, attributes, largest }, 3), None);
        // A read of the first block, then writes to it and to the last.
        let late = false;
        world.meanwhile(vec![
            (size, false, late),
            (2 * size - 1, true, late),
            (3 * size + 5, true, late),
        ]);
        let (to, at) = (PageSize::from_bytes(page).unwrap(), Gpa(2 * size - page));
        let cut = GpaRange::new(at, size + 2 * page).unwrap();
        let split = match way {
            0 => World::split::<EveryEntry>,
            1 => World::split::<Bounded>,
            3 => World::split::<slat::Tested>,
            _ => World::split::<Batched>,
        };
        assert_eq!(split(&mut world, cut, to, 600, usize::MAX), None);
        world.platform.meanwhile(None);
        world.destroy();
    }
    fn arm<const G: u32, const DS: bool>() -> Arm64<G, DS> {
        Arm64 { hardware_dirty: true, ..Default::default() }
    }
    use BreakBeforeMake::{Always, ConflictHandled, Never};
    for (bbm, way) in
        [Always, ConflictHandled, Never].into_iter().zip(0..3).chain([(Never, 0), (Always, 2)])
    {
        split::<Arm<12>>(arm(), bbm, way, 0);
        split::<Arm<12>>(arm(), bbm, way, 1);
        #[cfg(feature = "every-format")]
        split::<Arm<12, true>>(arm(), bbm, way, 1);
        #[cfg(feature = "every-format")]
        split::<Arm<14>>(arm(), bbm, way, 0);
        #[cfg(feature = "every-format")]
        split::<Arm<16>>(arm(), bbm, way, 0);
        split::<Ept<true>>(
            slat::format::ept::Ept { output_bits: 48, ..Default::default() },
            bbm,
            way,
            0,
        );
        #[cfg(feature = "every-format")]
        split::<Ept<false>>(
            slat::format::ept::Ept { output_bits: 48, ..Default::default() },
            bbm,
            way,
            0,
        );
        #[cfg(feature = "every-format")]
        split::<Hart<true>>(slat::format::riscv::RiscV::default(), bbm, way, 0);
        split::<Npt<true>>(npt::FORMAT, bbm, way, 0);
        #[cfg(feature = "every-format")]
        split::<Core<12, true>>(slat::format::power::Power { output_bits: 48 }, bbm, way, 0);
        split::<Core<16, true>>(slat::format::power::Power { output_bits: 48 }, bbm, way, 0);
    }
}

#[test]
fn a_table_is_given_back_only_when_no_walk_cache_can_hold_it() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let format = Arm64::<12>::default();
    let mut world = World::<Arm<12>>::new(&platform, BreakBeforeMake::Never, format, 40);
    let block = GpaRange::new(Gpa(1 << 21), 1 << 21).unwrap();
    let page = GpaRange::new(Gpa(1 << 21), 1 << 12).unwrap();
    let what = Mapping { hpa: 0, attributes: Attributes::RAM, largest: PageSize::SIZE_4K };
    assert_eq!(world.map(page, what, 2), None);
    platform.observe();
    // The machine checks each free: until the shootdown has completed, none may happen.
    let mut storage = [Place::EMPTY; 1];
    let mut member = platform.join();
    let mut removals = Removals::new(&world.tables, &mut storage);
    let mut guard = world.tables.enter(&mut member).unwrap();
    assert_eq!(guard.unmap(block, &mut removals), Ok(1 << 12));
    assert_eq!((platform.live(), world.tables.reclaim(), platform.live()), (3, 0, 3));
    drop(guard);
    assert_eq!((world.tables.reclaim(), platform.live()), (0, 3));
    assert_eq!(removals.complete().count(), 1);
    drop(removals);
    // The table of pages, and the one above it, which became empty.
    assert_eq!((world.tables.reclaim(), platform.live()), (2, 1));
    platform.machine.take();
    // SAFETY: no machine is left.
    unsafe { world.tables.deactivate() }.destroy();
    assert_eq!(platform.live(), 0);
}
