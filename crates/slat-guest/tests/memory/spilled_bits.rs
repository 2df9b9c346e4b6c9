//! Marks that one consumer takes from the leaves reach the others: dirty marks that a log has
//! taken, use that a scan has taken, and both if leaves are unmapped while their pages stay.

use crate::fixture::*;
use crate::{on_all, with_guest};
use slat::{Access, AgeOptions, Gpa, PageSize, TableBits};
use slat_guest::*;

const CLEAR: AgeOptions =
    AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };
const TEST: AgeOptions = AgeOptions { clear: false, ..CLEAR };

/// Returns the pages of the memslot that are reported as dirty, and as accessed, when the host
/// takes all of it.
fn taken<C: Case>(vcpu: &mut TheVcpu<'_, C>, bytes: u64) -> (Vec<u64>, Vec<u64>) {
    let (mut dirty, mut accessed) = (Vec::new(), Vec::new());
    drop(vcpu.worker().invalidate(host_range(HOST, bytes), |part| {
        assert_eq!(part.gpa.0 - BASE, part.host.start.0 - HOST);
        let first = (part.gpa.0 - BASE) / K4;
        for page in first..first + part.host.bytes / K4 {
            dirty.extend(part.dirty.then_some(page));
            accessed.extend(part.accessed.then_some(page));
        }
    }));
    dirty.sort_unstable();
    accessed.sort_unstable();
    (dirty, accessed)
}

fn young<C: Case>(vcpu: &mut TheVcpu<'_, C>, how: AgeOptions) -> Vec<u64> {
    let mut bits = [0; 8];
    let aged = vcpu.worker().age(range(BASE, M2), None, &mut bits, how).unwrap();
    let pages: Vec<_> = (0..512).filter(|page| bits[page / 64] >> (page % 64) & 1 == 1).collect();
    assert_eq!((aged.young, aged.unanswered), (pages.len() as u64, 0), "exact counts");
    pages.into_iter().map(|page| page as u64).collect()
}

on_all! {
    fn a_mark_that_the_log_has_taken_is_still_the_hosts<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        for initially_set in [false, true] {
            let config = Config { logging: Logging::Hardware, initially_set, ..config() };
            with_guest!(C, config, memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
            for page in 0..8 {
                let access = if page < 4 { Access::Write } else { Access::Read };
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, access).unwrap();
            }
            let is_clean = |vcpu: &mut TheVcpu<'_, C>, page: u64| {
                let leaf = vcpu.worker().translate(Gpa(BASE + page * K4)).unwrap().unwrap();
                !leaf.attributes.dirty
            };
            vcpu.worker().set_memslot(logged(M2)).unwrap();
            assert_eq!(is_clean(&mut vcpu, 0), !initially_set, "the log's beginning takes it");
            attempt::<C>(&machine, &mut vcpu, BASE + 4 * K4, Access::Write).unwrap();
            let mut bits = [0; 8];
            vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            vcpu.worker().clear_log(MemslotId(0), 0, 512, &bits).unwrap();
            // Written after the log was read, and cleared with what was read.
            vcpu.worker().read_log(MemslotId(0), &mut bits).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Write).unwrap();
            vcpu.worker().mark_written(range(BASE + 5 * K4, K4));
            vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1 << 5]).unwrap();
            assert!((0..6).all(|page| is_clean(&mut vcpu, page)));
            vcpu.worker().set_memslot(memslot(M2)).unwrap();
            let (dirty, _) = taken::<C>(&mut vcpu, M2);
            match initially_set {
                false => assert_eq!(dirty, [0, 1, 2, 3, 4, 5], "and no other"),
                // A log that begins full has all mapped pages as written.
                true => assert_eq!(dirty, [0, 1, 2, 3, 4, 5, 6, 7]),
            }
            // Marks are taken once: pages that are mapped anew are clean.
            for page in 0..8 {
                attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
            }
            assert_eq!(taken::<C>(&mut vcpu, M2).0, []);
            assert!(machine.finish().is_empty());
        }
    }

    fn nor_is_a_blocks_mark_lost<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        for initially_set in [false, true] {
            let config = Config { logging: Logging::Hardware, initially_set, ..config() };
            with_guest!(C, config, memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
            attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
            attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Read).unwrap();
            vcpu.worker().set_memslot(logged(2 * M2)).unwrap();
            let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1 << 7]).unwrap();
            assert_eq!(cleared.pages, u64::from(initially_set));
            let (dirty, _) = taken::<C>(&mut vcpu, 2 * M2);
            assert_eq!(dirty, (0..512).collect::<Vec<_>>(), "initially set: {initially_set}");
        }
    }

    fn a_clear_leaves_marks_only_on_pages_that_may_be_written<C: Case>() {
        if !C::HARDWARE_DIRTY {
            return;
        }
        let (logging, initially_set) = (Logging::Hardware, true);
        let config = || Config { logging, initially_set, ..config() };
        // A block that was not written: only the page that the clear names.
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        let cleared = vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1 << 7]).unwrap();
        assert_eq!((cleared.pages, cleared.whole), (1, M2));
        assert_eq!(taken::<C>(&mut vcpu, M2).0, [7]);
        assert!(machine.finish().is_empty());
        // A page that the guest may not write.
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        ram.change(HOST + 3 * K4, |page| page.write = false);
        for page in [3, 4] {
            attempt::<C>(&machine, &mut vcpu, BASE + page * K4, Access::Read).unwrap();
        }
        vcpu.worker().set_memslot(logged(M2)).unwrap();
        vcpu.worker().clear_log(MemslotId(0), 0, 64, &[1 << 3 | 1 << 4]).unwrap();
        assert_eq!(taken::<C>(&mut vcpu, M2).0, [4]);
        assert!(machine.finish().is_empty());
    }

    fn a_blocks_page_is_young_once_per_use_in_any_pieces_of_scans<C: Case>() {
        with_guest!(C, config(), memslot(2 * M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        for block in 0..2 {
            attempt::<C>(&machine, &mut vcpu, BASE + block * M2, Access::Read).unwrap();
        }
        for pieces in [vec![64; 8], vec![1, 510, 1], vec![100, 312, 100], vec![512]] {
            attempt::<C>(&machine, &mut vcpu, BASE + 9 * K4, Access::Read).unwrap();
            let mut counts = Vec::new();
            for _ in 0..3 {
                let (mut at, mut count) = (0, 0);
                for &pages in &pieces {
                    let mut bits = [0; 8];
                    let piece = range(BASE + at * K4, pages * K4);
                    let test = vcpu.worker().age(piece, None, &mut [0; 8], TEST).unwrap();
                    let aged = vcpu.worker().age(piece, None, &mut bits, CLEAR).unwrap();
                    assert_eq!(aged, test);
                    let found: u64 = bits.iter().map(|bits| u64::from(bits.count_ones())).sum();
                    assert_eq!((aged.young, aged.unanswered), (found, 0));
                    (at, count) = (at + pages, count + found);
                }
                counts.push(count);
            }
            assert_eq!(counts, [512, 0, 0], "{pieces:?}");
        }
        // Across the end of one block, into the next; also of selected pages.
        let mut bits = [0; 8];
        attempt::<C>(&machine, &mut vcpu, BASE + M2, Access::Read).unwrap();
        let over = range(BASE + M2 - 64 * K4, 128 * K4);
        assert_eq!(vcpu.worker().age(over, None, &mut bits, CLEAR).unwrap().young, 64);
        assert_eq!(bits[..2], [0, u64::MAX]);
        let rest = range(BASE + M2, M2);
        let selected = [u64::MAX, 1, 0, 1 << 63, 0, 0, 0, 0];
        let mut bits = [0; 8];
        let aged = vcpu.worker().age(rest, Some(&selected), &mut bits, CLEAR).unwrap();
        assert_eq!((aged.young, bits), (2, [0, 1, 0, 1 << 63, 0, 0, 0, 0]));
        assert_eq!(vcpu.worker().age(rest, None, &mut [0; 8], CLEAR).unwrap().young, 512 - 64 - 2);
        assert!(machine.finish().is_empty());
    }

    fn a_use_that_a_scan_kept_is_reported_when_the_page_is_taken<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        let mut bits = [0; 8];
        vcpu.worker().age(range(BASE, 64 * K4), None, &mut bits, CLEAR).unwrap();
        let (_, accessed) = taken::<C>(&mut vcpu, M2);
        assert_eq!(accessed, (64..512).collect::<Vec<_>>(), "those told are old");
        // A page that is mapped anew has marks of its own.
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Read).unwrap();
        assert_eq!(young::<C>(&mut vcpu, CLEAR).len(), 512);
        assert_eq!(young::<C>(&mut vcpu, CLEAR), []);
    }

    fn a_slot_that_moves_keeps_what_is_known_of_its_pages<C: Case>() {
        with_guest!(C, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * K4, Access::Write).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + 5 * K4, Access::Read).unwrap();
        let away = MemslotSpec { gpa: Gpa(BASE + G1), ..memslot(M2) };
        assert_eq!(vcpu.worker().set_memslot(away), Ok(MemslotChange::Moved));
        assert_eq!(vcpu.worker().set_memslot(memslot(M2)), Ok(MemslotChange::Moved));
        assert_eq!(young::<C>(&mut vcpu, TEST), [3, 5]);
        let told = taken::<C>(&mut vcpu, M2);
        // If hardware does not mark writes, writable pages count as written.
        let dirty = if C::HARDWARE_DIRTY { vec![3] } else { vec![3, 5] };
        assert_eq!(told, (dirty, vec![3, 5]), "of pages that are mapped nowhere");
        assert_eq!(taken::<C>(&mut vcpu, M2), (vec![], vec![]), "once");
        // A memslot that is deleted loses its marks.
        attempt::<C>(&machine, &mut vcpu, BASE + 3 * K4, Access::Write).unwrap();
        vcpu.worker().set_memslot(MemslotSpec { bytes: 0, ..memslot(0) }).unwrap();
        vcpu.worker().set_memslot(memslot(M2)).unwrap();
        assert_eq!(taken::<C>(&mut vcpu, M2), (vec![], vec![]));
    }

    fn a_block_that_a_fetch_unmaps_leaves_what_it_knew<C: Case>() {
        let config = Config { execute_huge: ExecuteHuge::Zap, ..config() };
        with_guest!(C, config, memslot(M2), PageSize::SIZE_2M => machine, ram, guest, vcpu);
        attempt::<C>(&machine, &mut vcpu, BASE, Access::Write).unwrap();
        attempt::<C>(&machine, &mut vcpu, BASE + K4, Access::Execute).unwrap();
        assert_eq!(young::<C>(&mut vcpu, TEST).len(), 512);
        assert_eq!(taken::<C>(&mut vcpu, M2).0.len(), 512);
    }
}

#[test]
fn a_view_that_is_left_leaves_what_it_knew() {
    with_guest!(ArmUncached, config(), memslot(M2), PageSize::SIZE_4K => machine, ram, guest, vcpu);
    for page in [1, 2] {
        attempt::<ArmUncached>(&machine, &mut vcpu, BASE + page * K4, Access::Write).unwrap();
    }
    attempt::<ArmUncached>(&machine, &mut vcpu, BASE + 5 * K4, Access::Read).unwrap();
    assert_eq!(young::<ArmUncached>(&mut vcpu, TEST), [1, 2, 5]);
    assert!(vcpu.set_caches(true).root_changed);
    for _ in 0..2 {
        assert_eq!(young::<ArmUncached>(&mut vcpu, TEST), [1, 2, 5]);
    }
    assert_eq!(young::<ArmUncached>(&mut vcpu, CLEAR), [1, 2, 5]);
    assert_eq!(young::<ArmUncached>(&mut vcpu, TEST), []);
    let told = taken::<ArmUncached>(&mut vcpu, M2);
    assert_eq!(told, (vec![1, 2], vec![]), "written, and old");
}
