//! A leaf that takes the place of a table: what it keeps of the old leaves, what refuses it, and
//! what threads find that are in the table meanwhile.

use crate::common::hardware::Hardware;
use crate::common::stage::{BBM, CLEAN, RAM, on_stage_uncounted, range};
use crate::common::world::{CacheOf, GuardOf, TablesOf};
use crate::common::{Event, Moment};
use slat::format::ept::{Ept1G, vtd::Vtd};
use slat::{
    AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, Gpa, Hpa, Interruption, MapError, Owner,
    PageSize, TableBits,
};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const BITS: u32 = 40;
/// A host address that is a multiple of each size of the tests.
const HOST: u64 = 3 << 38;

fn size<H: Hardware>(level: u32) -> PageSize {
    PageSize::from_bytes(H::size(level)).unwrap()
}

/// Runs on CPUs that demand a break for each change of size, and on others.
fn staged<H: Hardware>(
    run: impl for<'t, 'p> Fn(&'t TablesOf<'p, H>, &mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>),
) {
    BBM.into_iter().for_each(|bbm| on_stage_uncounted::<H>(bbm, (H::usual(), BITS, 40), &run));
}

/// Maps pages by their numbers to memory at the same addresses.
fn map<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    cache: &mut CacheOf<'_, H>,
    pages: impl IntoIterator<Item = u64>,
    attributes: Attributes,
) {
    let page = H::size(0);
    for number in pages {
        let at = range(number * page, page);
        guard.map(at, Hpa(number * page), attributes, size::<H>(0), cache).unwrap();
    }
}

fn replace<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    gpa: u64,
    attributes: Attributes,
) -> Result<Option<u64>, MapError> {
    let result = guard.replace_table(Gpa(gpa), size::<H>(1), Hpa(HOST), attributes);
    assert_eq!(guard.pending_invalidation(), None);
    result.map_err(|stopped| {
        assert_eq!(stopped.at, Gpa(gpa));
        stopped.reason
    })
}

fn found<H: Hardware>(guard: &GuardOf<'_, '_, H>, gpa: u64) -> (Hpa, PageSize, Attributes) {
    let found = guard.translate(Gpa(gpa)).unwrap().expect("it is mapped");
    (found.hpa, found.size, found.attributes)
}

fn a_block_replaces_a_full_table_as_fast_as_an_empty_one<H: Hardware>() {
    let (page, block, entries) = (H::size(0), H::size(1), H::entries(0) as u64);
    for pages in [0..entries, 0..1, entries - 1..entries] {
        staged::<H>(|tables, guard, cache| {
            map::<H>(guard, cache, pages.clone(), RAM);
            guard.platform().take_events();
            let before = guard.counts();
            let live = guard.platform().live();
            assert_eq!(replace::<H>(guard, page + 5, RAM), Ok(Some(block)));
            let (now, events) = (guard.counts(), guard.platform().take_events());
            assert_eq!(now.entries_written - before.entries_written, 4);
            let path = u64::from(guard.geometry().root_level) + 1;
            assert_eq!(now.entries_read - before.entries_read, path, "old leaves were read");
            assert_eq!((now.invalidations, now.broken), (1, 1));
            assert_eq!(now.bytes_changed - before.bytes_changed, block);
            let Event::Maintain { hpa: HOST, bytes, .. } = events[0] else { panic!("{events:?}") };
            assert_eq!(bytes, block);
            let Event::Invalidate(what) = events[1] else { panic!("{events:?}") };
            assert_eq!((what.range, what.tables), (Some(range(0, block)), true));
            assert_eq!(events[2..], [Event::Publish]);
            assert_eq!(found::<H>(guard, page), (Hpa(HOST + page), size::<H>(1), RAM));
            assert_eq!((tables.reclaim(), guard.platform().live()), (0, live), "it is inside");
            guard.refresh();
            assert_eq!((tables.reclaim(), guard.platform().live()), (1, live - 1));
        });
    }
}
on!(a_block_replaces_a_full_table_as_fast_as_an_empty_one; npt, riscv, radix_64k,
    arm_16k);

fn the_block_was_used_and_written_if_an_old_leaf_was<H: Hardware>() {
    let last = H::entries(0) as u64 - 1;
    let states = [(false, false), (true, false), (true, true)];
    let cases = [0, 1, last].into_iter().flat_map(|odd| states.map(|state| (odd, state)));
    for (odd, (accessed, dirty)) in cases {
        staged::<H>(|_, guard, cache| {
            let others = (0..=last).filter(|page| *page != odd);
            map::<H>(guard, cache, others, CLEAN);
            map::<H>(guard, cache, [odd], Attributes { accessed, dirty, ..CLEAN });
            assert_eq!(replace::<H>(guard, 0, CLEAN), Ok(Some(H::size(1))));
            let new = found::<H>(guard, 0).2;
            assert_eq!(new, Attributes { accessed, dirty, ..CLEAN }, "{odd}");
        });
    }
    // A page that was protected after it was written, in the place of which reads are answered.
    staged::<H>(|_, guard, cache| {
        map::<H>(guard, cache, [3], RAM);
        guard.write_protect(range(3 * H::size(0), H::size(0))).unwrap();
        guard.invalidate();
        let read = Attributes { write: false, dirty: false, ..RAM };
        assert_eq!(replace::<H>(guard, 0, read), Ok(Some(H::size(1))));
        assert_eq!(found::<H>(guard, 0).2, Attributes { dirty: true, ..read });
    });
}
on!(the_block_was_used_and_written_if_an_old_leaf_was; npt, riscv, radix_64k, arm_16k);

fn where_no_table_is_nothing_is_done<H: Hardware>() {
    staged::<H>(|_, guard, cache| {
        let (page, block) = (H::size(0), H::size(1));
        assert_eq!(replace::<H>(guard, 0, RAM), Ok(None), "empty");
        guard.map(range(0, block), Hpa(0), RAM, size::<H>(1), cache).unwrap();
        map::<H>(guard, cache, [block / page], RAM);
        let counts = guard.counts();
        assert_eq!(replace::<H>(guard, 0, RAM), Ok(None), "a block");
        let one = guard.replace_table(Gpa(block), size::<H>(0), Hpa(HOST), RAM);
        assert_eq!(one, Ok(None), "a page");
        assert_eq!(guard.counts(), counts);
        let wrong = Hpa(HOST + page);
        let refused = guard.replace_table(Gpa(block), size::<H>(1), wrong, RAM);
        let page_size = size::<H>(1);
        let reason = MapError::HostAddress { hpa: wrong, page: page_size, bits: H::OUTPUT };
        assert_eq!(refused, Err(Interruption { at: Gpa(block), reason }));
        let refused = guard.replace_table(Gpa(1 << BITS), size::<H>(1), Hpa(HOST), RAM);
        assert!(matches!(refused, Err(Interruption { reason: MapError::Range(_), .. })));
        let odd = PageSize::from_bytes(page * 2).unwrap();
        let refused = guard.replace_table(Gpa(block), odd, Hpa(HOST), RAM);
        assert!(matches!(refused, Err(Interruption { reason: MapError::LeafSize(_), .. })));
        assert_eq!(guard.counts(), counts);
        assert_eq!(found::<H>(guard, block).1, size::<H>(0));
    });
}
on!(where_no_table_is_nothing_is_done; npt, riscv);

fn a_table_in_which_addresses_may_have_owners_stays<H: Hardware>() {
    staged::<H>(|_, guard, cache| {
        map::<H>(guard, cache, [0], RAM);
        let (page, one) = (H::size(0), Owner::new(1));
        guard.set_owner(range(page, page), None, one, cache).unwrap();
        assert_eq!(replace::<H>(guard, 0, RAM), Ok(None));
        assert_eq!(guard.owner(Gpa(page)), Ok(one));
        assert_eq!(found::<H>(guard, 0).1, size::<H>(0));
    });
}
on!(a_table_in_which_addresses_may_have_owners_stays);

#[test]
fn tables_that_an_iommu_walks_stay() {
    use crate::common::formats::ept as H;
    let format = Ept1G { output_bits: 48, vtd: Some(Vtd { snoop: false }), ..Default::default() };
    on_stage_uncounted::<H>(BreakBeforeMake::Never, (format, BITS, 8), |_, guard, cache| {
        map::<H>(guard, cache, [0], Attributes { dirty: false, ..RAM });
        assert_eq!(replace::<H>(guard, 0, RAM), Ok(None));
        assert_eq!(found::<H>(guard, 0).1, PageSize::SIZE_4K);
    });
}

fn a_block_takes_the_place_of_tables_of_two_levels<H: Hardware>() {
    staged::<H>(|tables, guard, cache| {
        let (page, block, huge) = (H::size(0), H::size(1), H::size(2));
        // A table with one page, a block that was written, another table.
        map::<H>(guard, cache, [1], CLEAN);
        let at = range(block, block);
        let old = Attributes { accessed: true, dirty: true, ..CLEAN };
        guard.map(at, Hpa(block), old, size::<H>(1), cache).unwrap();
        map::<H>(guard, cache, [(huge - page) / page], CLEAN);
        let live = guard.platform().live();
        let done = guard.replace_table(Gpa(block), size::<H>(2), Hpa(HOST), CLEAN);
        assert_eq!(done, Ok(Some(huge)));
        assert_eq!(found::<H>(guard, 7 * block), (Hpa(HOST + 7 * block), size::<H>(2), RAM));
        assert_eq!(guard.counts().invalidations, 1);
        assert_eq!(tables.reclaim(), 0, "it is inside");
        guard.refresh();
        assert_eq!((tables.reclaim(), guard.platform().live()), (3, live - 3));
    });
}
on!(a_block_takes_the_place_of_tables_of_two_levels; npt, riscv);

fn an_entry_held_by_another_thread_keeps_all_tables_unchanged<H: Hardware>() {
    // The first entry of a table of pages; of a higher table, one below the last link.
    for (gpa, level) in [(0, 1), (0, 2), (H::size(2) - H::size(1), 2)] {
        staged::<H>(|tables, guard, cache| {
            let (page, last) = (H::size(0), H::size(2) / H::size(0) - 1);
            map::<H>(guard, cache, [1, 2, last], CLEAN);
            guard.map(range(H::size(1), H::size(1)), Hpa(0), CLEAN, size::<H>(1), cache).unwrap();
            let shape = H::of(tables).tree(guard.platform());
            let mut reader = guard.platform().register();
            let mut other = tables.enter(&mut reader).unwrap();
            let held = other.reserve(Gpa(gpa), size::<H>(0), cache).unwrap();
            assert_eq!(held.range(), range(gpa, page));
            let told = held.commit_told(Hpa(gpa), CLEAN, || {
                let done = guard.replace_table(Gpa(0), size::<H>(level), Hpa(HOST), RAM);
                let reason = MapError::Contended;
                assert_eq!(done, Err(Interruption { at: Gpa(0), reason }));
                Err::<(), ()>(())
            });
            assert_eq!(told, Err(()));
            let tree = H::of(tables).tree(guard.platform());
            assert_eq!((tree.marks, tree.plain()), (0, shape.plain()));
            assert_eq!(tree.shape(), shape.shape());
            // All can go on.
            drop(other);
            map::<H>(guard, cache, [gpa / page], CLEAN);
            let done = guard.replace_table(Gpa(0), size::<H>(level), Hpa(HOST), RAM);
            assert_eq!(done, Ok(Some(H::size(level))));
        });
    }
}
on!(an_entry_held_by_another_thread_keeps_all_tables_unchanged; riscv);

fn a_range_being_replaced_is_held_until_its_invalidation<H: Hardware>() {
    staged::<H>(|tables, guard, cache| {
        map::<H>(guard, cache, 0..4, CLEAN);
        let (hardware, asked) = (H::of(tables), Rc::new(Cell::new(0)));
        let seen = asked.clone();
        guard.platform().meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Invalidating {
                assert_eq!(hardware.part(platform, 0, H::size(1)).runs, []);
                seen.set(seen.get() + 1);
            }
        })));
        assert_eq!(replace::<H>(guard, 0, CLEAN), Ok(Some(H::size(1))));
        guard.platform().meanwhile(None);
        assert_eq!(asked.get(), 1);
    });
}
on!(a_range_being_replaced_is_held_until_its_invalidation; npt, riscv);

fn a_fault_in_a_replaced_table_maps_nothing_in_the_block<H: Hardware>() {
    staged::<H>(|tables, guard, cache| {
        let page = H::size(0);
        map::<H>(guard, cache, [0], RAM);
        let mut reader = guard.platform().register();
        let mut other = tables.enter(&mut reader).unwrap();
        let reserved = other.reserve(Gpa(7 * page), size::<H>(0), cache).unwrap();
        assert_eq!(replace::<H>(guard, 0, RAM), Ok(Some(H::size(1))));
        guard.refresh();
        assert_eq!(tables.reclaim(), 0, "a thread is in the table");
        // It took effect before the block.
        assert_eq!(reserved.commit(Hpa(0), RAM), Ok(Some(page)));
        assert_eq!(found::<H>(guard, 7 * page).0, Hpa(HOST + 7 * page));
        let gone = other.reserve(Gpa(7 * page), size::<H>(0), cache);
        assert!(matches!(gone, Err(Interruption { reason: MapError::Occupied { .. }, .. })));
        drop(other);
        guard.refresh();
        assert_eq!(tables.reclaim(), 1);
    });
}
on!(a_fault_in_a_replaced_table_maps_nothing_in_the_block; riscv);

fn a_page_frozen_by_another_thread_counts_as_used_and_written<H: Hardware>() {
    staged::<H>(|tables, guard, cache| {
        let page = H::size(0);
        map::<H>(guard, cache, [0], CLEAN);
        let mut reader = guard.platform().register();
        let mut other = tables.enter(&mut reader).unwrap();
        let held = other.reserve(Gpa(7 * page), size::<H>(0), cache).unwrap();
        let told = held.commit_told(Hpa(0), CLEAN, || {
            assert_eq!(replace::<H>(guard, 0, CLEAN), Ok(Some(H::size(1))));
            Ok::<(), ()>(())
        });
        assert_eq!(told, Ok(Ok(Some(page))));
        assert_eq!(found::<H>(guard, 0).2, RAM);
    });
}
on!(a_page_frozen_by_another_thread_counts_as_used_and_written; riscv);

/// A scan by tables that finds a block where it has noted a table reports it.
fn an_exact_scan_misses_no_page_whose_table_is_replaced<H: Hardware>() {
    staged::<H>(|tables, guard, cache| {
        map::<H>(guard, cache, [3], Attributes { accessed: true, ..CLEAN });
        let mut reader = guard.platform().register();
        let other = tables.enter(&mut reader).unwrap();
        // SAFETY: the hook that has the guard is taken out before the guard goes.
        let other: GuardOf<'static, 'static, H> = unsafe { core::mem::transmute(other) };
        let other = Rc::new(RefCell::new(Some(other)));
        let (once, whole) = (other.clone(), size::<H>(1));
        guard.platform().meanwhile(Some(Box::new(move |_, moment| {
            if moment == Moment::Invalidated
                && let Some(mut other) = once.borrow_mut().take()
            {
                let done = other.replace_table(Gpa(0), whole, Hpa(HOST), CLEAN);
                assert_eq!(done, Ok(Some(whole.bytes())));
            }
        })));
        let (mut young, mut unanswered) = ([0; 8192 / 64], [0; 8192 / 64]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let how = AgeOptions { table_bits: TableBits::Exact, flush_tlb: false, clear: true };
        guard.age(range(0, H::size(1)), &mut ages, how).unwrap();
        guard.platform().meanwhile(None);
        assert!(other.borrow().is_none(), "the scan has invalidated");
        assert_eq!(young[0] >> 3 & 1, 1);
    });
}
on!(an_exact_scan_misses_no_page_whose_table_is_replaced: ept; npt);
