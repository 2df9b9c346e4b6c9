//! Tests of operands against the fields of `tlbie` in the manual's numbering, and against the
//! computation in Linux's `arch/powerpc/mm/book3s64/radix_tlb.c` (`__tlbie_lpid_va`,
//! `__tlbie_lpid`).

use super::*;
use crate::addr::{Gpa, GpaRange, PageSize};
use std::vec::Vec;

fn what(range: Option<(u64, u64)>, leaf: Option<u64>, tables: bool) -> Invalidation {
    let range = range.map(|(at, bytes)| GpaRange::new(Gpa(at), bytes).unwrap());
    let leaf = leaf.map(|bytes| PageSize::from_bytes(bytes).unwrap());
    Invalidation { vmid: Vmid(0x123), range, leaf, tables }
}

/// Returns the instructions between the first `ptesync` and `eieio; tlbsync; ptesync`.
fn tlbies(what: &Invalidation) -> Vec<Instruction> {
    use Instruction::{Eieio, Ptesync, Tlbsync};
    let all: Vec<_> = Tlbie::default().sequence(what).collect();
    let (last, rest) = all.split_at(all.len() - 3);
    assert_eq!((last[0], rest), (Ptesync, &[Eieio, Tlbsync, Ptesync][..]));
    last[1..].to_vec()
}

#[test]
fn a_page_is_named_by_its_address_and_its_size() {
    // EPN in bits 0:51, IS 0, AP in bits 56:58: 0, 5, 1, 2 for 4k, 64k, 2m, 1g.
    let rb = |at, bytes| match tlbies(&what(Some((at, bytes)), Some(bytes), false))[..] {
        [Instruction::Tlb(Operands { rb, rs: 0x123 })] => rb,
        ref other => panic!("{other:?}"),
    };
    assert_eq!(rb(0x000f_1234_5678_9000, 0x1000), 0x000f_1234_5678_9000);
    assert_eq!(rb(0x000f_1234_5678_0000, 0x1_0000), 0x000f_1234_5678_00a0);
    assert_eq!(rb(0x000f_1234_5660_0000, 2 << 20), 0x000f_1234_5660_0020);
    assert_eq!(rb(0x000f_1234_4000_0000, 1 << 30), 0x000f_1234_4000_0040);
}

#[test]
fn each_page_is_named_once_and_a_part_names_its_block() {
    let rbs = |range, leaf| -> Vec<u64> {
        let rb = |i: &Instruction| match i {
            Instruction::Tlb(operands) => operands.rb,
            other => panic!("{other:?}"),
        };
        tlbies(&what(Some(range), Some(leaf), false)).iter().map(rb).collect()
    };
    assert_eq!(rbs((0x3_0000, 0x3_0000), 0x1_0000), [0x3_00a0, 0x4_00a0, 0x5_00a0]);
    assert_eq!(rbs((0x3f_f000, 0x2000), 2 << 20), [0x20_0020, 0x40_0020]);
    assert_eq!(rbs((0, 33 * 4096), 4096).len(), 33);
}

#[test]
fn too_many_pages_or_mixed_sizes_invalidate_the_whole_guest() {
    let all = Operands { rb: 0x800, rs: 0x123 };
    for what in [
        what(Some((0, 34 * 4096)), Some(4096), false),
        what(Some((0, 4096)), None, false),
        what(Some((0, 16 << 20)), Some(16 << 20), false),
        what(None, None, false),
    ] {
        assert_eq!(tlbies(&what), [Instruction::Tlb(all)]);
    }
}

#[test]
fn an_unlinked_table_invalidates_the_page_walk_cache_too() {
    let all = Operands { rb: 0x800, rs: 0x123 };
    for what in [
        what(Some((0, 2 << 20)), None, true),
        what(Some((0, 4096)), Some(4096), true),
        what(None, None, true),
    ] {
        assert_eq!(tlbies(&what), [Instruction::All(all)]);
    }
    let text = std::format!("{}", Instruction::All(all));
    assert_eq!(text, "tlbie r3, r4, 2, 0, 1 # r3 = 0x800, r4 = 0x123");
}

#[test]
fn a_local_tlbie_names_a_page_the_same_and_uses_lpidr() {
    let page = what(Some((0x8020_0000, 2 << 20)), Some(2 << 20), false);
    let all: Vec<_> = Tlbie::default().local_sequence(&page).collect();
    let named = Instruction::TlbLocal(Operands { rb: 0x8020_0020, rs: 0 });
    assert_eq!(all, [Instruction::Ptesync, named, Instruction::Ptesync]);
    assert_eq!(std::format!("{named}"), "tlbiel r3, r4, 0, 0, 1 # r3 = 0x80200020, r4 = 0x0");
}

/// As `__tlbiel_lpid` of Linux 5.1 computes it for each set, the first with RIC=2.
#[test]
fn a_local_flush_goes_set_by_set_with_the_walk_cache_first() {
    for (tables, sets) in [(true, 128), (false, 128), (true, 1)] {
        let cpu = Tlbie { local_sets: sets, ..Tlbie::default() };
        let all: Vec<_> = cpu.local_sequence(&what(None, None, tables)).collect();
        let (inner, ends) = (&all[1..all.len() - 1], [all[0], all[all.len() - 1]]);
        assert_eq!(ends, [Instruction::Ptesync; 2]);
        let expected = (0..sets).map(|set| {
            let operands = Operands { rb: 1 << (63 - 52) | set << (63 - 51), rs: 0 };
            match tables && set == 0 {
                true => Instruction::AllLocal(operands),
                false => Instruction::TlbLocal(operands),
            }
        });
        assert_eq!(inner, expected.collect::<Vec<_>>());
    }
}
