//! Which tables become blocks, and which do not: one leaf that differs in any way prevents it.

use crate::common::hardware::{Config, Hardware};
use crate::common::stage::{BBM, G, RAM, on_stage, range};
use crate::common::world::{Mapping, Rule, World, size};
use crate::common::{Moment, TestPlatform};
use slat::{Access, Attributes, BreakBeforeMake, Execute, Hpa, Memory, PageSize, Software};

/// How one page of a table differs.
#[derive(Clone, Copy, Debug)]
enum Odd {
    Nothing,
    Hole,
    Elsewhere,
    Mapped(Attributes),
    Rewritten(Rule),
}

const ODD: [(Odd, bool); 11] = [
    (Odd::Nothing, true),
    (Odd::Hole, false),
    (Odd::Elsewhere, false),
    (Odd::Mapped(Attributes { software: Software::A, ..RAM }), false),
    (Odd::Mapped(Attributes { memory: Memory::NonCacheable, ..RAM }), false),
    (Odd::Mapped(Attributes { memory: Memory::Device, ..RAM }), false),
    (Odd::Mapped(Attributes { execute: Execute::None, ..RAM }), false),
    (Odd::Rewritten(Rule::WriteProtect), false),
    (Odd::Rewritten(Rule::ExecuteProtect), false),
    // Accessed and dirty state is merged, not compared.
    (Odd::Rewritten(Rule::Clean), true),
    (Odd::Rewritten(Rule::Relax(Access::Read)), true),
];

fn agrees<H: Hardware>(marks: bool) {
    let config = Config { forced_write_back: false, hardware_marks: marks, split_execute: false };
    let (page, block) = (1u64 << H::PAGE, 1u64 << (H::PAGE + H::LAST_STRIDE));
    let ptes = 1 << H::LAST_STRIDE;
    for (which, (odd, fits)) in [0, 1, ptes - 1].into_iter().flat_map(|at| ODD.map(|o| (at, o))) {
        let bbm = BBM[which as usize % 3];
        let platform = TestPlatform::new(bbm);
        let mut world = World::<H>::new(&platform, bbm, H::format(&config), 40);
        let at = range(block + which * page, page);
        let what = Mapping { hpa: 4 * block, attributes: RAM, largest: size(page) };
        assert_eq!(world.map(range(block, block), what, 8), None);
        let hpa = what.hpa + which * page;
        match odd {
            Odd::Nothing => {}
            Odd::Rewritten(rule) => world.rewrite(at, rule),
            Odd::Hole => assert_eq!(world.unmap(at, 1), None),
            Odd::Elsewhere | Odd::Mapped(_) => {
                assert_eq!(world.unmap(at, 1), None);
                let odd = match odd {
                    Odd::Mapped(attributes) => Mapping { hpa, attributes, ..what },
                    _ => Mapping { hpa: hpa + block, ..what },
                };
                assert_eq!(world.map(at, odd, 0), None);
            }
        }
        // The model predicts it, too; here it is stated explicitly.
        world.collapse(range(block, block), size(block));
        let found = world.tree().at(block).map(|run| run.size);
        assert_eq!(found == Some(block), fits, "{odd:?} at {which}");
        world.destroy();
    }
}

fn a_table_collapses_only_if_leaves_agree_except_in_state<H: Hardware>() {
    for marks in [false, true] {
        agrees::<H>(marks);
    }
}
on!(
    a_table_collapses_only_if_leaves_agree_except_in_state:
    arm_16k, npt, radix_64k, ept_2m
);

fn a_table_with_misaligned_memory_stays_and_so_does_its_range<H: Hardware>() {
    let config = Config { forced_write_back: true, hardware_marks: true, split_execute: true };
    let (page, block) = (1u64 << H::PAGE, 1u64 << (H::PAGE + H::LAST_STRIDE));
    let platform = TestPlatform::new(BBM[0]);
    let mut world = World::<H>::new(&platform, BBM[0], H::format(&config), 40);
    let map = |world: &mut World<'_, H>, at, hpa| {
        let what = Mapping { hpa, attributes: RAM, largest: size(page) };
        assert_eq!(world.map(range(at, block), what, 8), None);
    };
    map(&mut world, 0, 4 * block + page);
    map(&mut world, block, 8 * block);
    world.collapse(range(0, block), size(block));
    // The ranges miss a page at either end, or the limit allows pages only.
    world.collapse(range(block + page, block - page), size(block));
    world.collapse(range(block, block - page), size(block));
    world.collapse(range(0, 2 * block), size(page));
    assert!(world.tree().runs.iter().all(|run| run.size == page));
    world.collapse(range(0, 2 * block), size(block));
    let sizes = [0, block].map(|at| world.tree().at(at).unwrap().size);
    assert_eq!(sizes, [page, block]);
    world.reclaim(true, true);
    world.destroy();
}
on!(
    a_table_with_misaligned_memory_stays_and_so_does_its_range:
    arm_16k, arm_64k, npt, radix_64k, ept_2m
);

/// Hardware uses the table while its invalidation is under way, and afterwards.
fn a_block_has_the_rights_and_the_state_of_its_pages_at_once<H: Hardware>() {
    fn has<H: Hardware>(marks: bool, protected: bool, bbm: BreakBeforeMake) {
        let config =
            Config { forced_write_back: false, hardware_marks: marks, split_execute: false };
        let platform = TestPlatform::new(bbm);
        let mut world = World::<H>::new(&platform, bbm, H::format(&config), 40);
        let (page, block) = (1u64 << H::PAGE, 1u64 << (H::PAGE + H::LAST_STRIDE));
        let what = Mapping { hpa: 4 * block, attributes: RAM, largest: size(page) };
        let all = range(block, block);
        // The first of the leaves was not used yet.
        let unused = Mapping { attributes: Attributes { accessed: false, ..RAM }, ..what };
        assert_eq!(world.map(range(block, page), unused, 8), None);
        let rest = range(block + page, block - page);
        assert_eq!(world.map(rest, Mapping { hpa: what.hpa + page, ..what }, 0), None);
        if protected {
            world.rewrite(all, Rule::WriteProtect);
        }
        let hardware = world.hardware;
        let before = world.tree().runs[1].leaf.own;
        assert_eq!(before.write, !protected);
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Invalidating && bbm != BreakBeforeMake::Always {
                let run = hardware.tree(platform).runs[0];
                assert_eq!((run.size, run.leaf.own), (block, before));
            }
        })));
        world.collapse(all, size(block));
        world.alone();
        let run = world.tree().runs[0];
        assert_eq!((run.size, run.leaf.own), (block, before));
        world.destroy();
    }
    for bbm in BBM {
        for (marks, protected) in [(false, false), (true, false), (false, true), (true, true)] {
            has::<H>(marks, protected, bbm);
        }
    }
}
on!(a_block_has_the_rights_and_the_state_of_its_pages_at_once);

fn all_that_an_entry_of_the_root_covers_becomes_one_block<H: Hardware>() {
    on_stage::<H>((H::usual(), 39, 4), |_, guard, cache| {
        let all = range(0, G);
        assert_eq!(guard.map(all, Hpa(0), RAM, PageSize::SIZE_2M, cache), Ok(G));
        assert_eq!(guard.collapse(all, PageSize::SIZE_1G), Ok(G));
        assert_eq!(guard.leaves(all).unwrap().count(), 1);
    });
}
on!(all_that_an_entry_of_the_root_covers_becomes_one_block);
