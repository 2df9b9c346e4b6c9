//! Cleans and removals under way: they end with their invalidation and not before, for each way to
//! clean and each way to unmap; an invalidation covers nothing that came after it began.

use crate::common::beside::{guest, inside, meanwhile};
use crate::common::hardware::Hardware;
use crate::common::stage::{BBM, K, M, RAM, range};
use crate::common::world::{ALL, GuardOf, TablesOf};
use slat::{
    Attributes, BreakBeforeMake, Gpa, GpaRange, Hpa, PageSize, Pages, UnmapBatch, UnmapEntry,
};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const UNWRITTEN: Attributes = Attributes { dirty: false, ..RAM };

type Guest<H> = &'static TablesOf<'static, H>;

fn map<H: Hardware>(tables: Guest<H>, at: GpaRange, attributes: Attributes, size: PageSize) {
    inside::<H, _>(tables, |guard, cache| {
        guard.map(at, Hpa(at.start().0), attributes, size, cache).unwrap();
    });
}

/// Unmaps by one call, and returns whether each of the leaves is said to be dirty.
fn dirty<H: Hardware>(tables: Guest<H>, at: GpaRange) -> bool {
    inside::<H, _>(tables, |guard, _| {
        let removed = crate::common::unmap(guard, at);
        assert_ne!(removed.len(), 0, "nothing was mapped");
        removed.iter().all(|run| run.attributes.dirty)
    })
}

/// A way to take the dirty state of four pages.
type Clean<H> = fn(&mut GuardOf<'_, 'static, H>);

const PAGES: u64 = 16 * K;

fn cleans<H: Hardware>() -> [(&'static str, Clean<H>); 3] {
    const NAMED: Pages<'static> = Pages { start: Gpa(0), bits: &[0b1111] };
    [
        ("clean", |guard| _ = guard.clean(range(0, PAGES)).unwrap()),
        ("clean_pages", |guard| _ = guard.clean_pages(&NAMED).unwrap()),
        ("harvest", |guard| _ = guard.harvest(range(0, PAGES), &mut [0]).unwrap()),
    ]
}

fn a_page_unmapped_during_any_cleans_invalidation_is_dirty<H: Hardware>() {
    for (name, clean) in cleans::<H>() {
        let tables = guest::<H>(BreakBeforeMake::Never, H::usual());
        map::<H>(tables, range(0, PAGES), RAM, PAGE);
        let said = Rc::new(Cell::new(false));
        let says = said.clone();
        let unmaps = move || says.set(dirty::<H>(tables, range(0, 4 * K)));
        meanwhile(tables.platform(), unmaps, || {
            inside::<H, _>(tables, |guard, _| {
                clean(guard);
                guard.invalidate();
            });
        });
        assert!(said.get(), "{name}: written through a TLB, and said to be clean");
        inside::<H, _>(tables, |guard, _| {
            assert!(guard.harvest(range(1 << 41, 4 * K), &mut [0]).is_err());
            assert!(!dirty::<H>(tables, range(8 * K, 4 * K)), "a refused harvest cleans nothing");
        });
        assert!(!dirty::<H>(tables, range(4 * K, 4 * K)), "{name} has completed");
    }
}
on!(a_page_unmapped_during_any_cleans_invalidation_is_dirty);

/// Maps, cleans what `clean` names by another thread, and unmaps; returns whether all of it is said
/// to be dirty.
type Unmap<H> = fn(Guest<H>, &Rc<dyn Fn(GpaRange)>) -> bool;

fn unmaps<H: Hardware>() -> [(&'static str, Unmap<H>); 7] {
    [
        ("a page", |tables, clean| {
            map::<H>(tables, range(0, 4 * K), RAM, PAGE);
            clean(range(0, 4 * K));
            dirty::<H>(tables, range(0, 4 * K))
        }),
        ("a page that continues one that was taken before", |tables, clean| {
            map::<H>(tables, range(0, 4 * K), UNWRITTEN, PAGE);
            map::<H>(tables, range(4 * K, 4 * K), RAM, PAGE);
            let mut places = [const { UnmapEntry::EMPTY }; 1];
            let mut batch = UnmapBatch::new(tables, &mut places);
            inside::<H, _>(tables, |guard, _| {
                guard.unmap(range(0, 4 * K), &mut batch).unwrap();
                clean(range(4 * K, 4 * K));
                guard.unmap(range(4 * K, 4 * K), &mut batch).unwrap();
            });
            batch.complete().all(|run| run.bytes == 8 * K && run.attributes.dirty)
        }),
        ("a page of a larger range", |tables, clean| {
            map::<H>(tables, range(0, 4 * K), RAM, PAGE);
            clean(range(0, 4 * K));
            dirty::<H>(tables, range(0, 8 * K))
        }),
        ("a block", |tables, clean| {
            map::<H>(tables, range(0, 2 * M), RAM, BLOCK);
            clean(range(0, 2 * M));
            dirty::<H>(tables, range(0, 2 * M))
        }),
        ("pages that continue those of the table before", |tables, clean| {
            between_tables::<H>(tables, clean, 16 * K)
        }),
        ("a run of pages that continues those of the table before", |tables, clean| {
            between_tables::<H>(tables, clean, 256 * K)
        }),
        ("a group", |tables, clean| {
            inside::<H, _>(tables, |guard, cache| {
                guard.map_contiguous(range(0, 64 * K), Hpa(0), RAM, PAGE, cache).unwrap();
                // A clean unfolds a group: this one is clean already, and another is cleaned.
                crate::common::unmap(guard, range(0, 64 * K));
                guard.map_contiguous(range(0, 64 * K), Hpa(0), UNWRITTEN, PAGE, cache).unwrap();
                guard.map(range(M, 4 * K), Hpa(M), RAM, PAGE, cache).unwrap();
            });
            clean(range(M, 4 * K));
            dirty::<H>(tables, range(0, 64 * K))
        }),
    ]
}

/// A clean begins when an unmap has taken the pages of one table, and not those of the next.
fn between_tables<H: Hardware>(tables: Guest<H>, clean: &Rc<dyn Fn(GpaRange)>, more: u64) -> bool {
    map::<H>(tables, range(0, 2 * M), UNWRITTEN, PAGE);
    map::<H>(tables, range(2 * M, more), RAM, PAGE);
    let platform = tables.platform();
    let second = H::of(tables).tree(platform).table(2 * M, 1).unwrap().0;
    let (clean, hardware, mut begun) = (clean.clone(), H::of(tables), false);
    platform.entered(Some(Box::new(move |platform, table| {
        if table == second && !begun && hardware.tree(platform).at(0).is_none() {
            begun = true;
            clean(range(2 * M, more));
        }
    })));
    let mut places = [const { UnmapEntry::EMPTY }; 2];
    let mut batch = UnmapBatch::new(tables, &mut places);
    let all = range(0, 2 * M + more);
    inside::<H, _>(tables, |guard, _| guard.unmap(all, &mut batch).unwrap());
    platform.entered(None);
    let runs: Vec<_> = batch.complete().collect();
    assert_eq!(runs.iter().map(|run| run.bytes).sum::<u64>(), all.size());
    assert_eq!(runs.len(), 1, "the second table's pages continue those of the first");
    runs[0].attributes.dirty
}

fn any_unmap_while_a_clean_is_under_way_returns_dirty_pages<H: Hardware>() {
    for dropped in [false, true] {
        for (name, unmap) in unmaps::<H>() {
            let tables = guest::<H>(BreakBeforeMake::Never, H::usual());
            let reader = Box::leak(Box::new(tables.platform().register()));
            let log = RefCell::new(tables.enter(reader).unwrap());
            let clean: Rc<dyn Fn(GpaRange)> = Rc::new(move |at| {
                log.borrow_mut().clean(at).unwrap();
                if dropped {
                    drop(tables.shootdown(&mut log.borrow_mut()).unwrap());
                }
            });
            assert!(unmap(tables, &clean), "{name}, handed on and dropped: {dropped}");
        }
    }
}
on!(any_unmap_while_a_clean_is_under_way_returns_dirty_pages: arm_4k_groups, ept);

/// Drops what is owed, so that the next thread that completes invalidates all of the guest; during
/// that, another thread does `late`.
fn late<H: Hardware>(tables: Guest<H>, late: impl FnOnce() + 'static) {
    inside::<H, _>(tables, |guard, _| {
        guard.write_protect(range(0, 4 * K)).unwrap();
        drop(tables.shootdown(guard).unwrap());
    });
    meanwhile(tables.platform(), late, || inside::<H, _>(tables, |guard, _| guard.invalidate()));
    tables.platform().take_events();
}

/// The invalidation had begun before the drop, so it covers nothing of what was dropped.
fn an_obligation_dropped_during_an_invalidation_is_not_covered<H: Hardware>() {
    for bbm in BBM {
        let page = |number: u64| range(number * 4 * K, 4 * K);
        let new = || {
            let tables = guest::<H>(bbm, H::usual());
            map::<H>(tables, range(0, PAGES), RAM, PAGE);
            tables
        };
        let executed = |tables: Guest<H>| tables.platform().take_invalidations();
        // Rights.
        let tables = new();
        late::<H>(tables, move || {
            inside::<H, _>(tables, |guard, _| {
                guard.write_protect(page(1)).unwrap();
                drop(tables.shootdown(guard).unwrap());
            });
        });
        inside::<H, _>(tables, |guard, _| guard.invalidate());
        assert_eq!(executed(tables), [ALL], "what the other thread dropped");
        inside::<H, _>(tables, |guard, _| guard.invalidate());
        assert_eq!(executed(tables), [], "it is covered now");
        // removals.
        let tables = new();
        late::<H>(tables, move || {
            let mut places = [const { UnmapEntry::EMPTY }; 1];
            let mut batch = UnmapBatch::new(tables, &mut places);
            inside::<H, _>(tables, |guard, _| guard.unmap(page(1), &mut batch).unwrap());
        });
        map::<H>(tables, page(1), RAM, PAGE);
        let breaks = H::REFILL_BREAKS || bbm == BreakBeforeMake::Always;
        assert_eq!(executed(tables).len(), usize::from(breaks), "before the entry is filled");
        // Cleans.
        let tables = new();
        late::<H>(tables, move || {
            inside::<H, _>(tables, |guard, _| {
                guard.clean(page(1)).unwrap();
                drop(tables.shootdown(guard).unwrap());
            });
        });
        assert!(dirty::<H>(tables, page(1)), "it may be written through a TLB");
    }
}
on!(an_obligation_dropped_during_an_invalidation_is_not_covered);

fn an_entry_refilled_during_its_unmap_needs_an_invalidation<H: Hardware>() {
    for bbm in BBM {
        let tables = guest::<H>(bbm, H::usual());
        map::<H>(tables, range(0, 8 * K), RAM, PAGE);
        let count = Rc::new(Cell::new(0));
        let counts = count.clone();
        let refill = move || {
            let before = tables.platform().take_events();
            map::<H>(tables, range(0, 4 * K), RAM, PAGE);
            counts.set(tables.platform().take_invalidations().len());
            *tables.platform().events.borrow_mut() = before;
        };
        let mut places = [const { UnmapEntry::EMPTY }; 1];
        let mut batch = UnmapBatch::new(tables, &mut places);
        inside::<H, _>(tables, |guard, _| guard.unmap(range(0, 4 * K), &mut batch).unwrap());
        meanwhile(tables.platform(), refill, || assert_eq!(batch.complete().count(), 1));
        let breaks = H::REFILL_BREAKS || bbm == BreakBeforeMake::Always;
        assert_eq!(count.get(), usize::from(breaks), "{bbm:?}");
    }
}
on!(an_entry_refilled_during_its_unmap_needs_an_invalidation);

/// A guard that is dropped, with what each operation took.
fn a_guard_that_is_dropped_with_any_right_taken_completes<H: Hardware>() {
    type Take<H> = fn(&mut GuardOf<'_, 'static, H>);
    let all = range(0, 2 * M);
    let calls: [(&str, Take<H>); 8] = [
        ("write_protect", |guard| _ = guard.write_protect(range(0, 8 * K)).unwrap()),
        ("write_protect, a page", |guard| _ = guard.write_protect(range(0, 4 * K)).unwrap()),
        ("write_protect_pages", |guard| {
            let pages = Pages { start: Gpa(0), bits: &[0b101] };
            _ = guard.write_protect_pages(&pages).unwrap();
        }),
        ("execute_protect", |guard| _ = guard.execute_protect(range(0, 8 * K)).unwrap()),
        ("protect", |guard| {
            _ = guard.protect(range(0, 4 * K), slat::Rights::READ).unwrap();
        }),
        ("defer_invalidation", |guard| guard.defer_invalidation(range(0, 4 * K)).unwrap()),
        ("clean", |guard| _ = guard.clean(range(0, 4 * K)).unwrap()),
        ("clean_pages", |guard| {
            _ = guard.clean_pages(&Pages { start: Gpa(0), bits: &[0b101] }).unwrap();
        }),
    ];
    for (name, take) in calls {
        let tables = guest::<H>(BreakBeforeMake::Never, H::usual());
        map::<H>(tables, all, RAM, PAGE);
        tables.platform().take_events();
        inside::<H, _>(tables, |guard, _| take(guard));
        assert_eq!(tables.platform().take_invalidations().len(), 1, "{name}");
    }
}
on!(a_guard_that_is_dropped_with_any_right_taken_completes);
