//! Accessed marks of the tables above a leaf that software makes accessed. An exact scan of ages
//! skips a table without a mark, so each table above needs one, whichever had one before.

use crate::common::Event;
use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{
    CLEAN, EXACT, G, K, M, RAM, age, given, holding, on_stage, range, relax,
};
use crate::common::world::{ALL, CacheOf, GuardOf};
use slat::{
    Access, AgeCounts, AgeOptions, Attributes, Format, Gpa, Hpa, Invalidation, PageSize, Software,
};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

/// A step that makes leaves accessed, and where.
type Step<H> =
    (&'static str, &'static [u64], for<'t, 'p> fn(&mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>));

fn steps<H: Hardware>() -> Vec<Step<H>> {
    vec![
        ("map of a page", &[8 * K], |guard, cache| {
            assert_eq!(guard.map(range(8 * K, 4 * K), Hpa(G), RAM, PAGE, cache), Ok(4 * K));
        }),
        ("map of pages", &[8 * K], |guard, cache| {
            assert_eq!(guard.map(range(8 * K, 8 * K), Hpa(G), RAM, PAGE, cache), Ok(8 * K));
        }),
        ("map of pages of two tables", &[2 * M - 4 * K, 2 * M + 4 * K], |guard, cache| {
            let both = range(2 * M - 4 * K, 12 * K);
            assert_eq!(guard.map(both, Hpa(2 * M - 4 * K), CLEAN, PAGE, cache), Ok(8 * K));
            assert_eq!(relax(guard, both, Access::Read), Ok(12 * K));
        }),
        ("map of pages below a table that was not there", &[3 * G], |guard, cache| {
            assert_eq!(guard.map(range(3 * G, 8 * K), Hpa(G), RAM, PAGE, cache), Ok(8 * K));
        }),
        ("map of a block", &[4 * M], |guard, cache| {
            assert_eq!(guard.map(range(4 * M, 2 * M), Hpa(G), RAM, BLOCK, cache), Ok(2 * M));
        }),
        ("commit of a page", &[8 * K], |guard, cache| {
            let reserved = guard.reserve(Gpa(8 * K), PAGE, cache).unwrap();
            assert_eq!(reserved.commit(Hpa(G), RAM), Ok(Some(4 * K)));
        }),
        ("commit of a block", &[4 * M], |guard, cache| {
            let reserved = guard.reserve(Gpa(4 * M), BLOCK, cache).unwrap();
            assert_eq!(reserved.commit(Hpa(G), RAM), Ok(Some(2 * M)));
        }),
        ("commit that is reported", &[8 * K], |guard, cache| {
            let reserved = guard.reserve(Gpa(8 * K), PAGE, cache).unwrap();
            let done = reserved.commit_told(Hpa(G), RAM, || Ok::<(), ()>(()));
            assert_eq!(done, Ok(Ok(Some(4 * K))));
        }),
        ("other memory for a page", &[0], |guard, _| {
            let page = range(0, 4 * K);
            guard.write_protect(page).unwrap();
            let used = Attributes { accessed: true, write: false, ..CLEAN };
            assert_eq!(guard.replace(page, Hpa(0), Hpa(G), used), Ok(4 * K));
        }),
        ("a read of a page", &[0], |guard, _| {
            assert_eq!(relax(guard, range(0, 4 * K), Access::Read), Ok(4 * K));
        }),
        ("a write of a page", &[0], |guard, _| {
            assert_eq!(relax(guard, range(0, 4 * K), Access::Write), Ok(4 * K));
        }),
        ("an execution of pages", &[0, 2 * M], |guard, _| {
            assert_eq!(relax(guard, range(0, 4 * M), Access::Execute), Ok(8 * K));
        }),
        ("a read of all", &[0, 2 * M], |guard, _| {
            assert_eq!(relax(guard, range(0, 1 << 40), Access::Read), Ok(8 * K));
        }),
        ("a right that is given in place", &[0], |guard, _| {
            assert_eq!(guard.write_protect(range(0, 4 * K)), Ok(4 * K));
            assert_eq!(given(guard.grant_write(Gpa(0), Hpa(0), Software::NONE)), Ok(true));
        }),
    ]
}

fn every_operation_that_makes_a_leaf_young_marks_its_tables<H: Hardware>() {
    let mark = <H::Format as Format>::TABLE_ACCESSED;
    for (name, at, step) in steps::<H>() {
        // Each combination of tables that had lost their marks before.
        for lost in 1u32..8 {
            on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
                for page in [range(0, 4 * K), range(2 * M, 4 * K)] {
                    let hpa = Hpa(page.start().0);
                    assert_eq!(guard.map(page, hpa, CLEAN, PAGE, cache), Ok(4 * K));
                }
                let (hardware, platform) = (H::of(tables), guard.platform());
                for &at in at {
                    for (number, pte) in hardware.links(platform, at).iter().enumerate() {
                        pte.fetch_or(mark, SeqCst);
                        let clear = if lost >> number & 1 == 1 { mark } else { 0 };
                        pte.fetch_and(!clear, SeqCst);
                    }
                }
                step(guard, cache);
                for &at in at {
                    assert!(guard.translate(Gpa(at)).unwrap().unwrap().attributes.accessed);
                    let links = hardware.links(platform, at);
                    assert!(links.len() >= 2);
                    let marked = links.iter().map(|pte| pte.load(SeqCst) & mark == mark);
                    let marked: Vec<_> = marked.collect();
                    assert!(!marked.contains(&false), "{name}, {lost:#b}: {marked:?}");
                }
            });
        }
    }
}
on!(every_operation_that_makes_a_leaf_young_marks_its_tables: ept; npt);

#[test]
fn tables_of_all_five_levels_are_marked() {
    type Five = Ept<true, true>;
    let format =
        slat::format::ept::Ept { five_levels: true, output_bits: 52, ..Default::default() };
    for pages in [4 * K, 8 * K] {
        on_stage::<Five>((format, 52, 8), |tables, guard, cache| {
            let pages = range(1 << 50, pages);
            assert_eq!(guard.map(pages, Hpa(0), CLEAN, PAGE, cache), Ok(pages.size()));
            let mark = <slat::format::ept::Ept<true> as Format>::TABLE_ACCESSED;
            let links = Five::of(tables).links(guard.platform(), 1 << 50);
            assert_eq!(links.len(), 4);
            links.iter().for_each(|pte| _ = pte.fetch_and(!mark, SeqCst));
            let granted = relax(guard, pages, Access::Read);
            assert_eq!(granted, Ok(pages.size()));
            assert!(links.iter().all(|pte| pte.load(SeqCst) & mark == mark));
        });
    }
}

#[test]
fn an_operation_that_makes_no_leaf_accessed_marks_no_table() {
    let format = slat::format::ept::Ept { output_bits: 48, ..Default::default() };
    on_stage::<Ept<true>>((format, 40, 8), |tables, guard, cache| {
        let pages = range(0, 8 * K);
        assert_eq!(guard.map(pages, Hpa(0), CLEAN, PAGE, cache), Ok(8 * K));
        let mark = <slat::format::ept::Ept<true> as Format>::TABLE_ACCESSED;
        let links = Ept::<true>::of(tables).links(guard.platform(), 0);
        links.iter().for_each(|pte| _ = pte.fetch_and(!mark, SeqCst));
        assert_eq!(guard.write_protect(pages), Ok(8 * K));
        assert!(links.iter().all(|pte| pte.load(SeqCst) & mark == 0));
    });
}

/// A walk that stops early has made leaves before that address accessed.
fn leaves_made_accessed_before_a_stop_are_below_marked_tables<H: Hardware>() {
    for bytes in [64 * K, 2 * M, 4 * M, 2 * G] {
        let mark = <H::Format as Format>::TABLE_ACCESSED;
        on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
            let pages = range(0, 64 * K);
            assert_eq!(guard.map(pages, Hpa(0), CLEAN, PAGE, cache), Ok(64 * K));
            let (hardware, platform) = (H::of(tables), guard.platform());
            for pte in hardware.links(platform, 0) {
                pte.fetch_and(!mark, SeqCst);
            }
            holding(
                (hardware, platform),
                [12 * K],
                |_| H::MARK,
                || {
                    let stopped = relax(guard, range(0, bytes), Access::Read).unwrap_err();
                    assert_eq!(stopped.at, Gpa(12 * K));
                },
            );
            let marked = |pte: &&AtomicU64| pte.load(SeqCst) & mark == mark;
            assert!(hardware.links(platform, 0).iter().all(marked), "{bytes:#x}");
        });
    }
}
on!(leaves_made_accessed_before_a_stop_are_below_marked_tables: ept; npt);

fn an_exact_scan_takes_the_marks_of_all_tables<H: Hardware>() {
    const TABLES: u64 = 21;
    on_stage::<H>((H::usual(), 40, 32), |tables, guard, cache| {
        for at in (0..TABLES).map(|table| table * 2 * M) {
            assert_eq!(guard.map(range(at, 4 * K), Hpa(at), RAM, PAGE, cache), Ok(4 * K));
        }
        let scan = |guard: &mut GuardOf<'_, '_, H>| {
            let before = guard.counts();
            let (aged, _) = age(guard, range(0, 64 * M), EXACT);
            let after = guard.counts();
            let written = after.entries_written - before.entries_written;
            (aged.young, after.entries_read - before.entries_read, written)
        };
        guard.platform().take_events();
        // It clears tables before leaves, and walks twice for that.
        let (young, read, written) = scan(guard);
        assert_eq!(young, TABLES);
        assert!(written >= 2 * TABLES, "{written} entries were written");
        assert!(read >= 2 * 32 + TABLES * 512, "{read} entries were read");
        let last = guard.platform().take_events();
        let all = Invalidation { vmid: guard.vmid(), range: Some(range(0, 64 * M)), ..ALL };
        assert_eq!(last, [Event::Invalidate(all)]);
        let tree = H::of(tables).tree(guard.platform());
        let marked = tree.tables.values().filter(|table| table.within(0, 64 * M));
        assert_eq!(marked.filter(|table| table.accessed).count(), 0);
        // Now the scan enters no table.
        let (young, read, _) = scan(guard);
        assert!(young == 0 && read < 512, "{read} entries were read");
        // One table is marked, between others that are not.
        let page = range(10 * M, 4 * K);
        assert_eq!(relax(guard, page, Access::Read), Ok(4 * K));
        assert_eq!(scan(guard).0, 1);
        assert_eq!(scan(guard).0, 0);
    });
}
on!(an_exact_scan_takes_the_marks_of_all_tables: ept; npt);

fn a_held_leaf_keeps_its_tables_marked_for_the_next_scan<H: Hardware>() {
    // Sealed, frozen, and in a table that is being unlinked, which the scan begins anew.
    let states: [fn(u64) -> u64; 3] =
        [|raw| raw | H::MARK, |_| H::MARK, |_| <H::Format as Format>::retired(Hpa(0))];
    for held in states {
        on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
            assert_eq!(guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, cache), Ok(4 * K));
            let (hardware, platform) = (H::of(tables), guard.platform());
            let mut scan = || age(guard, range(0, 4 * M), EXACT).0;
            let first = holding((hardware, platform), [0], held, &mut scan);
            assert_eq!(first, AgeCounts { young: 0, unanswered: 1 });
            assert_eq!(scan(), AgeCounts { young: 1, unanswered: 0 });
        });
    }
}
on!(a_held_leaf_keeps_its_tables_marked_for_the_next_scan: ept; npt);

/// Another thread's exact scan has taken the mark, and has not looked at the leaves yet.
fn a_test_scan_enters_tables_that_an_exact_scan_has_noted<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let page = range(0, 4 * K);
        assert_eq!(guard.map(page, Hpa(0), RAM, PAGE, cache), Ok(4 * K));
        for pte in H::of(tables).links(guard.platform(), 0) {
            pte.fetch_and(!<H::Format as Format>::TABLE_ACCESSED, SeqCst);
            pte.fetch_or(<H::Format as Format>::AGEING, SeqCst);
        }
        let how = AgeOptions { clear: false, ..EXACT };
        assert_eq!(age(guard, range(0, 2 * M), how).0.young, 1);
    });
}
on!(a_test_scan_enters_tables_that_an_exact_scan_has_noted: ept; npt);
