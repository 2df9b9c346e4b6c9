//! Long random histories through the engine and a flat model, on every format and granule and with
//! every break-before-make requirement, while hardware sets accessed and dirty bits and is as lazy
//! as it may be.
//!
//! `PROPTEST_CASES` sets the number of histories for a format.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::history::history;
use crate::common::space::Space;
use crate::common::world::{Mapping, World};
use proptest::prelude::*;
use slat::format::arm64::Arm64;
use slat::{
    Attributes, BatchedSplit, BoundedWalk, BreakBeforeMake, EveryEntry, Gpa, GpaRange, PageSize,
    UnmapBatch, UnmapEntry,
};

fn any_history_agrees_with_the_flat_model<H: Hardware>(bits: [u32; 4], frames: usize) {
    let config = ProptestConfig { source_file: Some(file!()), ..crate::properties::config() };
    proptest!(config, |(history in history())| {
        Space::<H>::new(bits[history.bits], frames).play(&history);
    });
}
on!(
    any_history_agrees_with_the_flat_model:
    // Roots of 2m entries, of 1g entries (31 bits need sixteen tables of 2m), of 512g entries.
    arm_4k([25, 31, 36, 44], 600),
    // A root of one entry, of two entries, of all.
    ept([24, 31, 40, 48], 600),
    radix_64k([25, 32, 41, 52], 40);
    arm_16k([27, 30, 37, 41], 40),
    arm_64k([31, 33, 43, 47], 20),
    // The last has sixteen tables of 512g entries.
    arm_4k_lpa2([26, 36, 48, 52], 40),
    // Blocks of 64g; the last has a root above them.
    arm_16k_lpa2([28, 41, 47, 52], 20),
    // The last two have roots above blocks of 512m.
    arm_64k_lpa([31, 46, 48, 52], 20),
    // Four levels where these suffice.
    ept_five_levels([31, 48, 49, 52], 40),
    npt_five_levels([24, 40, 49, 52], 40),
    ept_2m([25, 32, 39, 41], 40),
    npt([24, 31, 40, 48], 600),
    npt_2m([25, 32, 39, 41], 40),
    // Part of Sv39x4, and all of it; Sv48x4; Sv57x4.
    riscv([24, 41, 48, 59], 40),
    riscv_without_svadu([24, 41, 48, 59], 40),
    // The root is the same for all: of 512g entries.
    radix_4k_where_software_sets_r_and_c([24, 32, 41, 52], 600)
);

fn a_blocks_use_by_hardware_while_its_tables_are_built_is_kept<H: Hardware>(
    sizes: std::ops::Range<usize>,
) {
    use BreakBeforeMake::{Always, ConflictHandled, Never};
    for (bbm, way) in
        [Always, ConflictHandled, Never].into_iter().zip(0..3).chain([(Never, 0), (Always, 2)])
    {
        for large in sizes.clone() {
            let platform = TestPlatform::new(bbm);
            let mut world = World::<H>::new(&platform, bbm, H::usual(), 40);
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
                1 => World::split::<BoundedWalk>,
                3 => World::split::<slat::FlaggedWalk>,
                _ => World::split::<BatchedSplit>,
            };
            assert_eq!(split(&mut world, cut, to, 600, usize::MAX), None);
            world.platform.meanwhile(None);
            world.destroy();
        }
    }
}
on!(
    a_blocks_use_by_hardware_while_its_tables_are_built_is_kept:
    arm_4k(0..2), ept(0..1), npt(0..1), radix_64k(0..1);
    arm_4k_lpa2(1..2), arm_16k(0..1), arm_64k(0..1), ept_2m(0..1), riscv(0..1), radix_4k(0..1)
);

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
    let mut storage = [UnmapEntry::EMPTY; 1];
    let mut reader = platform.register();
    let mut batch = UnmapBatch::new(&world.tables, &mut storage);
    let mut guard = world.tables.enter(&mut reader).unwrap();
    assert_eq!(guard.unmap(block, &mut batch), Ok(1 << 12));
    assert_eq!((platform.live(), world.tables.reclaim(), platform.live()), (3, 0, 3));
    drop(guard);
    assert_eq!((world.tables.reclaim(), platform.live()), (0, 3));
    assert_eq!(batch.complete().count(), 1);
    drop(batch);
    // The table of pages, and the one above it, which became empty.
    assert_eq!((world.tables.reclaim(), platform.live()), (2, 1));
    platform.machine.take();
    // SAFETY: no machine is left.
    unsafe { world.tables.deactivate() }.destroy();
    assert_eq!(platform.live(), 0);
}
