//! Groups of leaves that a TLB may hold as one (Arm's Contiguous bit): descriptors, and histories
//! in which maps fold.

mod fixture;
mod histories;

use crate::common::hardware::grouped::GroupedArm;
use crate::common::hardware::{Access as Accessed, Config, Hardware};
use crate::common::stage::{BBM, G, K, M, RAM, on_stage, range, refused, relax};
use crate::common::world::Rule;
use crate::common::{Event, TestPlatform, destroy};
use fixture::Fixture;
use slat::format::arm64::{Arm64, Arm64K4};
use slat::{
    Access, Attributes, BreakBeforeMake, ChangeError, Execute, Format, Gpa, GpaRange, Hpa,
    PageSize, Relax, Software, TableCache, UnloadedTables, UnmapEntry, UnmapError, Vmid,
};

fn size(bytes: u64) -> PageSize {
    PageSize::from_bytes(bytes).unwrap()
}

/// Maps `ptes` entries of `pte` bytes around groups with folding; returns bit 52 of each entry.
fn folded<const GRANULE: u32>(pte: u64, group: u64, from: u64, ptes: u64, hpa: u64) -> Vec<bool>
where
    GroupedArm<GRANULE>: Hardware<Format = Arm64<GRANULE>>,
{
    let mut bits = Vec::new();
    let format = Arm64::<GRANULE>::default();
    on_stage::<GroupedArm<GRANULE>>((format, 40, 8), |_, guard, cache| {
        let start = 4 * group + from * pte;
        let all = range(start, ptes * pte);
        guard.map_contiguous(all, Hpa(hpa + start), RAM, size(pte), cache).unwrap();
        bits.extend((0..ptes).map(|n| {
            let (raw, found) = guard.descriptor(Gpa(start + n * pte)).unwrap();
            assert_eq!(found.bytes(), pte);
            let plain = format.encode(RAM).unwrap();
            let level = if pte == 1 << GRANULE { 0 } else { 1 };
            let leaf = Arm64::<GRANULE>::leaf(plain, level, Hpa(hpa + start + n * pte));
            assert_eq!(raw & !(1 << 52), leaf);
            raw >> 52 & 1 == 1
        }));
    });
    bits
}

fn runs(lengths: &[(usize, bool)]) -> Vec<bool> {
    lengths.iter().flat_map(|&(count, bit)| vec![bit; count]).collect()
}

#[test]
fn only_whole_aligned_groups_of_the_manuals_sizes_are_folded() {
    // Three entries before, two groups, two entries after them; memory with the alignment of the
    // group.
    let around = |count: usize| runs(&[(3, false), (2 * count, true), (2, false)]);
    assert_eq!(folded::<12>(4 * K, 64 * K, 13, 37, 1 << 39), around(16));
    assert_eq!(folded::<12>(2 * M, 32 * M, 13, 37, 1 << 39), around(16));
    assert_eq!(folded::<14>(16 * K, 2 * M, 125, 261, 1 << 39), around(128));
    assert_eq!(folded::<14>(32 * M, G, 29, 69, 1 << 39), around(32));
    assert_eq!(folded::<16>(64 * K, 2 * M, 29, 69, 1 << 39), around(32));
    assert_eq!(folded::<16>(512 * M, 16 * G, 29, 35, 1 << 39), runs(&[(3, false), (32, true)]));
    // Memory that is only aligned to leaves.
    assert_eq!(folded::<12>(4 * K, 64 * K, 0, 32, 4 * K), runs(&[(32, false)]));
    assert_eq!(folded::<12>(2 * M, 32 * M, 0, 32, 2 * M), runs(&[(32, false)]));
}

#[test]
fn a_folded_page_is_the_descriptor_of_the_manual() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 40, 4), |_, guard, cache| {
        let at = range(0x7_0000, 64 * K);
        guard.map_contiguous(at, Hpa(0x8000_0000), RAM, size(4 * K), cache).unwrap();
        // Contiguous, AF, inner shareable, S2AP=11, write-back, page.
        assert_eq!(guard.descriptor(Gpa(0x7_3000)).unwrap().0, 0x0010_0000_8000_37ff);
        let found = guard.translate(Gpa(0x7_3123)).unwrap().unwrap();
        assert_eq!((found.hpa, found.size), (Hpa(0x8000_3123), size(64 * K)));
        let dump = guard.dump().to_string();
        assert!(dump.contains("1 x 64k"), "{dump}");
        // One page loses a right: all become single leaves, without the bit.
        guard.write_protect(range(0x7_5000, 4 * K)).unwrap();
        assert_eq!(guard.descriptor(Gpa(0x7_3000)).unwrap().0, 0x0000_0000_8000_37ff);
        assert_eq!(guard.descriptor(Gpa(0x7_5000)).unwrap().0, 0x0200_0000_8000_577f);
        let counts = guard.counts();
        assert_eq!((counts.broken, counts.invalidations), (16, 1));
    });
}

#[test]
fn a_fold_in_a_format_without_groups_maps_single_entries() {
    use crate::common::hardware::ept::Ept;
    let format = slat::format::ept::Ept { output_bits: 48, ..Default::default() };
    on_stage::<Ept<true>>((format, 40, 4), |_, guard, cache| {
        let at = range(0, 64 * K);
        assert_eq!(guard.map_contiguous(at, Hpa(0), RAM, size(4 * K), cache), Ok(64 * K));
        assert_eq!(guard.translate(Gpa(0)).unwrap().unwrap().size, PageSize::SIZE_4K);
        assert_eq!(guard.unfold(at), Ok(0));
    });
}

#[test]
fn a_group_is_refilled_only_after_its_old_leaves_invalidation() {
    for bbm in BBM {
        let platform = TestPlatform::new(bbm);
        let mut fixture = Fixture::<12>::new(&platform, bbm, Arm64K4::default(), 31);
        let group = range(2 * M, 64 * K);
        fixture.map(group, G, RAM, size(4 * K), 4, true);
        fixture.world.drops = true;
        fixture.unmap(group);
        fixture.map(group, 2 * G, RAM, size(4 * K), 4, true);
        fixture.world.drops = false;
        fixture.look(2 * M);
        fixture.world.destroy();
    }
}

/// By a map that folds, and by a fault that reserves.
#[test]
fn a_group_with_an_emptied_entry_refills_after_invalidation() {
    let page = size(4 * K);
    let group = range(2 * M, 64 * K);
    for (member, reserves) in [0, 7, 15].into_iter().flat_map(|at| [(at, false), (at, true)]) {
        on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |_, guard, cache| {
            let platform = guard.platform();
            let executed = || {
                let all = platform.take_invalidations().into_iter();
                all.map(|what| (what.range, what.leaf, what.tables)).collect::<Vec<_>>()
            };
            let one = range(2 * M + member * 4 * K, 4 * K);
            // This page keeps the table while other pages are unmapped.
            guard.map(range(3 * M, 4 * K), Hpa(3 * M), RAM, page, cache).unwrap();
            for pending in [true, false] {
                assert_eq!(guard.map(one, Hpa(G), RAM, page, cache), Ok(4 * K));
                let mut storage = [UnmapEntry::EMPTY; 1];
                let mut batch = guard.unmap_batch(&mut storage);
                assert_eq!(guard.unmap(one, &mut batch), Ok(4 * K));
                if !pending {
                    assert_eq!(batch.complete().count(), 1);
                }
                // A group that was never filled needs no invalidation.
                let fresh = range(2 * M + 128 * K, 64 * K);
                executed();
                let hpa = Hpa(4 * G + 128 * K);
                let done = guard.map_contiguous(fresh, hpa, RAM, page, cache);
                assert_eq!(done, Ok(if pending { 64 * K } else { 0 }));
                assert_eq!(executed(), []);
                let before = guard.counts();
                if reserves {
                    let reserved = guard.reserve_contiguous(Gpa(2 * M), page, cache).unwrap();
                    assert_eq!(reserved.range(), group);
                    assert_eq!(reserved.commit(Hpa(2 * G), RAM), Ok(Some(64 * K)));
                } else {
                    let done = guard.map_contiguous(group, Hpa(2 * G), RAM, page, cache);
                    assert_eq!(done, Ok(64 * K));
                }
                let all = executed();
                let after = guard.counts();
                let counted = after.invalidations - before.invalidations;
                assert_eq!(counted, all.len() as u64);
                let whole = (Some(group), None, true);
                // The entry of the fault itself was reserved before the others.
                assert_eq!(all.last(), pending.then_some(&whole), "{member}, {reserves}");
                assert!(pending || all.is_empty());
                if reserves {
                    // Each entry is reserved, then frozen, then filled; the fault's own may have
                    // been reserved before.
                    let alone = u64::from(member != 0);
                    let written = after.entries_written - before.entries_written;
                    assert!((48..=48 + alone).contains(&written), "{written}");
                }
                batch.complete().for_each(drop);
                drop(batch);
                crate::common::unmap(guard, group);
            }
        });
    }
}

#[test]
fn a_page_is_as_dirty_as_its_group_whichever_member_is_marked() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let clean = Attributes { dirty: false, accessed: false, ..RAM };
    for (page, write) in (0..16).flat_map(|page| [(page, false), (page, true)]) {
        let platform = TestPlatform::new(BBM[0]);
        let mut fixture = Fixture::<12>::new(&platform, BBM[0], format, 31);
        fixture.map(range(2 * M, 64 * K), G, clean, size(4 * K), 4, true);
        fixture.access(2 * M + page * 4 * K, write);
        // Hardware marked some member; these calls change all of the group.
        fixture.rewrite(range(2 * M, 4 * K), Rule::Clean);
        fixture.rewrite(range(2 * M + 60 * K, 4 * K), Rule::Clean);
        fixture.rewrite(range(2 * M + 32 * K, 4 * K), Rule::WriteProtect);
        fixture.world.destroy();
    }
}

#[test]
fn a_quiet_group_is_not_written_and_ageing_counts_its_entries() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let quiet = Attributes { write: false, dirty: false, accessed: false, ..RAM };
    let platform = TestPlatform::new(BBM[0]);
    let mut fixture = Fixture::<12>::new(&platform, BBM[0], format, 31);
    let group = range(2 * M, 64 * K);
    fixture.map(group, G, quiet, size(4 * K), 4, true);
    // This page keeps the table while other pages are unmapped.
    fixture.map(range(3 * M, 4 * K), 3 * M, quiet, size(4 * K), 0, false);
    // One member is marked; the rest already is as the rules want it.
    fixture.access(2 * M + 20 * K, false);
    for rule in [Rule::WriteProtect, Rule::Clean] {
        fixture.rewrite(group, rule);
        assert_eq!(
            (fixture.counts.entries_written, fixture.counts.bytes_changed),
            (0, 0),
            "{rule:?}"
        );
    }
    // For a part of a group nothing is cleared, and the whole group is read.
    fixture.age(range(2 * M, 32 * K), true);
    assert_eq!((fixture.counts.entries_written, fixture.counts.bytes_changed), (0, 0));
    fixture.age(group, true);
    assert_eq!((fixture.counts.entries_written, fixture.counts.bytes_changed), (1, 4 * K));
    // The walk reads each entry, and the group is read once as a whole.
    assert!((32..64).contains(&fixture.counts.entries_read), "{:?}", fixture.counts);
    fixture.rewrite(group, Rule::Relax(Access::Read));
    assert_eq!((fixture.counts.entries_written, fixture.counts.bytes_changed), (16, 64 * K));
    // Each entry is frozen, then emptied.
    fixture.unmap(group);
    assert_eq!((fixture.counts.entries_written, fixture.counts.bytes_changed), (32, 64 * K));
    fixture.world.destroy();
}

#[test]
fn an_unmap_that_is_full_leaves_the_group_behind_it_as_it_was() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |_, guard, cache| {
        let (page, one, group) = (size(4 * K), range(2 * M, 4 * K), range(2 * M + 64 * K, 64 * K));
        assert_eq!(guard.map(one, Hpa(G), RAM, page, cache), Ok(4 * K));
        assert_eq!(guard.map_contiguous(group, Hpa(2 * G), RAM, page, cache), Ok(64 * K));
        // The range covers the group, or cuts it.
        for bytes in [2 * M, 68 * K] {
            guard.platform().take_events();
            let mut storage = [UnmapEntry::EMPTY; 1];
            let mut batch = guard.unmap_batch(&mut storage);
            let result = guard.unmap(range(2 * M, bytes), &mut batch);
            refused(result, 2 * M + 64 * K, UnmapError::Full);
            assert!(!invalidates(guard.platform()), "the group is not broken");
            assert_eq!(batch.complete().map(|run| run.bytes).collect::<Vec<_>>(), [4 * K]);
            drop(batch);
            let left: Vec<_> =
                guard.leaves(group).unwrap().map(|leaf| leaf.unwrap().size).collect();
            assert_eq!(left, [size(64 * K)]);
            assert_eq!(guard.map(one, Hpa(G), RAM, page, cache), Ok(4 * K));
        }
        let mut storage = [UnmapEntry::EMPTY; 2];
        let mut batch = guard.unmap_batch(&mut storage);
        assert_eq!(guard.unmap(range(2 * M, 2 * M), &mut batch), Ok(68 * K));
        assert_eq!(batch.complete().map(|run| run.bytes).collect::<Vec<_>>(), [4 * K, 64 * K]);
    });
}

fn invalidates(platform: &TestPlatform) -> bool {
    !platform.take_invalidations().is_empty()
}

#[test]
fn groups_that_continue_the_last_run_need_no_room_and_no_break() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |_, guard, cache| {
        let all = range(2 * M, 4 * 64 * K);
        let page = size(4 * K);
        assert_eq!(guard.map_contiguous(all, Hpa(G), RAM, page, cache), Ok(all.size()));
        guard.platform().take_events();
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = guard.unmap_batch(&mut storage);
        assert_eq!(guard.unmap(all, &mut batch), Ok(all.size()));
        assert!(!invalidates(guard.platform()), "no group is broken");
        assert_eq!(batch.complete().map(|run| run.bytes).collect::<Vec<_>>(), [all.size()]);
    });
}

#[test]
fn software_bits_of_a_whole_group_are_set_in_place() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |_, guard, cache| {
        let (group, page) = (range(2 * M, 64 * K), size(4 * K));
        guard.map_contiguous(group, Hpa(0), RAM, page, cache).unwrap();
        guard.platform().take_events();
        for (bit, size) in [(Software::A, 64 * K), (Software::B, 64 * K)] {
            assert_eq!(guard.set_software(group, bit, Software::NONE), Ok(64 * K));
            assert_eq!(guard.set_software(group, bit, Software::NONE), Ok(0), "nothing to do");
            let found = guard.translate(Gpa(2 * M + 60 * K)).unwrap().unwrap();
            assert!(found.attributes.software.contains(bit) && found.size.bytes() == size);
        }
        assert_eq!(guard.set_software(group, Software::NONE, Software::A), Ok(64 * K));
        assert!(!invalidates(guard.platform()) && guard.pending_invalidation().is_none());
        for member in 0..16 {
            let found = guard.translate(Gpa(2 * M + member * 4 * K)).unwrap().unwrap();
            assert_eq!(found.attributes, Attributes { software: Software::B, ..RAM });
        }
        // Of a part of it they are not.
        assert_eq!(guard.set_software(range(2 * M, 4 * K), Software::A, Software::NONE), Ok(4 * K));
        assert!(invalidates(guard.platform()));
        assert_eq!(guard.translate(Gpa(2 * M)).unwrap().unwrap().size, page);
    });
}

#[test]
fn what_is_refused_at_a_group_of_blocks_leaves_it_folded() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |tables, guard, cache| {
        let group = range(64 * M, 32 * M);
        let data = Attributes { execute: Execute::None, software: Software::A, ..RAM };
        let block = size(2 * M);
        assert_eq!(guard.map_contiguous(group, Hpa(G), data, block, cache), Ok(32 * M));
        let folded = |guard: &slat::Guard<'_, '_, Arm64K4, TestPlatform>| {
            let tree = GroupedArm::<12>::of(tables).tree(guard.platform());
            tree.runs.iter().map(|run| (run.start, run.size)).collect::<Vec<_>>()
        };
        assert_eq!(folded(guard), [(64 * M, 32 * M)]);
        guard.platform().take_events();
        let reason = ChangeError::CutsBlock { size: block };
        refused(
            relax(guard, group, Relax::new(Access::Execute).only_if(Software::A).unmarked()),
            64 * M,
            reason,
        );
        refused(guard.write_protect(range(66 * M, 4 * K)), 66 * M, reason);
        refused(relax(guard, range(70 * M, 4 * K), Access::Execute), 70 * M, reason);
        assert_eq!(
            relax(guard, group, Relax::new(Access::Execute).only_if(Software::B).unmarked()),
            Ok(0),
            "it lacks the bit"
        );
        assert_eq!(guard.platform().take_events(), []);
        assert_eq!(folded(guard), [(64 * M, 32 * M)]);
    });
}

#[test]
fn a_block_of_collapsed_groups_and_pages_counts_as_one_block() {
    for (bbm, groups) in BBM.into_iter().flat_map(|bbm| [0, 1, 31, 32].map(|groups| (bbm, groups)))
    {
        let platform = TestPlatform::new(bbm);
        let mut fixture = Fixture::<12>::new(&platform, bbm, Arm64K4::default(), 31);
        let (block, page) = (range(2 * M, 2 * M), size(4 * K));
        let folded = groups * 64 * K;
        if groups > 0 {
            fixture.map(range(2 * M, folded), G, RAM, page, 4, true);
        }
        if groups < 32 {
            fixture.map(range(2 * M + folded, 2 * M - folded), G + folded, RAM, page, 4, false);
        }
        // After each operation the fixture compares the counts with the tree.
        fixture.collapse(block, size(2 * M));
        assert_eq!(fixture.world.tree().at(2 * M).unwrap().size, 2 * M);
        fixture.world.destroy();
    }
}

#[test]
fn a_moved_group_is_unfolded_before_its_pages_are_broken() {
    on_stage::<GroupedArm<12>>((Arm64K4::default(), 39, 4), |_, guard, cache| {
        let (group, page) = (range(2 * M, 64 * K), size(4 * K));
        let read = Attributes { write: false, ..RAM };
        assert_eq!(guard.map_contiguous(group, Hpa(G), read, page, cache), Ok(64 * K));
        guard.platform().take_events();
        assert_eq!(guard.replace(group, Hpa(G), Hpa(2 * G), read), Ok(64 * K));
        let told = guard.platform().take_invalidations();
        assert_eq!(told[0].range, Some(group), "as one leaf");
        let found = guard.translate(Gpa(2 * M + 36 * K)).unwrap().unwrap();
        assert_eq!((found.hpa, found.size), (Hpa(2 * G + 36 * K), page));
    });
}

#[test]
fn inactive_tables_unfold_what_changes_in_part() {
    let platform = TestPlatform::new(BBM[0]);
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let mut tables = UnloadedTables::new(format, Vmid(1), 31, &platform).unwrap();
    let mut storage = [const { None }; 4];
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(4).unwrap();
    let (all, attributes) = (range(2 * M, 256 * K), Attributes { dirty: false, ..RAM });
    let page = size(4 * K);
    assert_eq!(tables.map_contiguous(all, Hpa(0), attributes, page, &mut cache), Ok(256 * K));
    // The machine wrote to a page of the second group.
    let tables = tables.activate();
    let hardware = GroupedArm::<12>::of(&tables);
    let wrote = hardware.access(&platform, hardware.root(), 2 * M + 70 * K, true);
    assert_eq!(wrote, Accessed::Done { start: 2 * M + 64 * K, end: 2 * M + 128 * K });
    // SAFETY: no machine has the root loaded.
    let mut tables = unsafe { tables.deactivate() };
    platform.take_events();
    assert_eq!(tables.write_protect(range(2 * M + 8 * K, 32 * K)), Ok(32 * K));
    let mut gone = Vec::new();
    let part = range(2 * M + 120 * K, 80 * K);
    assert_eq!(tables.unmap(part, |leaves| gone.push(leaves)), Ok(80 * K));
    assert_eq!(platform.take_events(), [Event::Publish; 0], "nothing to invalidate");
    let leaves: Vec<_> =
        gone.iter().map(|l| (l.gpa.0 - 2 * M, l.bytes, l.attributes.dirty)).collect();
    assert_eq!(leaves, [(120 * K, 8 * K, true), (128 * K, 72 * K, false)]);
    let tables = tables.activate();
    let tree = hardware.tree(&platform);
    let found =
        tree.runs.iter().map(|run| (run.start - 2 * M, run.bytes(), run.size, run.leaf.own));
    let protected = Attributes { write: false, ..attributes };
    let expected = [
        (0, 8 * K, 4 * K, attributes),
        (8 * K, 32 * K, 4 * K, protected),
        (40 * K, 24 * K, 4 * K, attributes),
        (64 * K, 56 * K, 4 * K, RAM),
        (200 * K, 56 * K, 4 * K, attributes),
    ];
    assert_eq!(Vec::from_iter(found), expected);
    assert_eq!(tree.marks, 0);
    drop(cache);
    destroy(tables);
}
