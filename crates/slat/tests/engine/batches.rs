//! Tables that become blocks by one invalidation: how many share it, and that each of them, not the
//! first alone, is treated as if it were by itself.

use crate::common::hardware::{Hardware, Run, Tree};
use crate::common::stage::{BBM, CLEAN, G, K, M, RAM, holding, on_stage_of, range, refused};
use crate::common::world::{GuardOf, Mapping, TablesOf, World};
use crate::common::{Moment, TestPlatform};
use slat::{BreakBeforeMake, Gpa, Hpa, PageSize, SplitError};
use std::panic::{AssertUnwindSafe, catch_unwind};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

fn sizes<H: Hardware, const N: usize>(guard: &GuardOf<'_, '_, H>) -> [PageSize; N] {
    core::array::from_fn(|n| guard.translate(Gpa(n as u64 * 2 * M)).unwrap().unwrap().size)
}

/// Gives back the tables that the guard's thread has unlinked.
fn given_back<H: Hardware>(tables: &TablesOf<'_, H>, guard: &mut GuardOf<'_, '_, H>) -> usize {
    let first = tables.reclaim();
    guard.refresh();
    first + tables.reclaim()
}

/// The blocks in a tree, from address 0 on.
fn blocks(tree: &Tree) -> [&Run; 3] {
    [0, 1, 2].map(|n| tree.at(n * 2 * M).unwrap())
}

fn tables_of_a_gib_become_blocks_by_two_invalidations<H: Hardware>() {
    for bbm in BBM {
        let breaks = bbm == BreakBeforeMake::Always;
        // 20 tables share the first invalidation of a call; with a break, each 20 share one.
        for (bytes, shared, broken) in
            [(2 * M, 1, 1), (40 * M, 1, 1), (64 * M, 2, 2), (G, 2, 26), (2 * G, 3, 52)]
        {
            on_stage_of::<H>(bbm, (H::usual(), 40, 1030), |tables, guard, cache| {
                let all = range(0, bytes);
                assert_eq!(guard.map(all, Hpa(0), RAM, PAGE, cache), Ok(bytes));
                assert_eq!(guard.collapse(all, BLOCK), Ok(bytes));
                let counts = guard.counts();
                assert_eq!(counts.invalidations, if breaks { broken } else { shared });
                assert_eq!(counts.broken, if breaks { bytes / (2 * M) } else { 0 });
                assert_eq!(guard.leaves(all).unwrap().count() as u64, bytes / (2 * M));
                assert_eq!(H::of(tables).tree(guard.platform()).marks, 0);
                assert_eq!(given_back::<H>(tables, guard) as u64, bytes / (2 * M));
            });
        }
    }
}
on!(tables_of_a_gib_become_blocks_by_two_invalidations; npt, ept_2m);

/// The state that hardware sets in any table of a batch, until the invalidation has completed.
fn a_page_written_during_a_batch_collapse_dirties_its_block<H: Hardware>() {
    for bbm in BBM {
        for table in 0..3 {
            let platform = TestPlatform::new(bbm);
            let mut world = World::<H>::new(&platform, bbm, H::usual(), 40);
            let what = Mapping { hpa: 0, attributes: CLEAN, largest: PAGE };
            assert_eq!(world.map(range(0, 6 * M), what, 8), None);
            let at = table * 2 * M + 28 * K;
            world.access(at, false, false);
            world.meanwhile(vec![(at, true, false)]);
            world.collapse(range(0, 6 * M), BLOCK);
            platform.meanwhile(None);
            let found = blocks(&world.tree()).map(|run| (run.size, run.leaf.own.dirty));
            assert_eq!(found, [0, 1, 2].map(|n| (2 * M, n == table)), "{bbm:?}");
            world.destroy();
        }
    }
}
on!(
    a_page_written_during_a_batch_collapse_dirties_its_block;
    npt, ept_2m
);

/// Otherwise two threads could wait for each other.
fn a_thread_that_waits_for_a_leaf_holds_no_table_itself<H: Hardware>() {
    for bbm in BBM {
        on_stage_of::<H>(bbm, (H::usual(), 40, 8), |tables, guard, cache| {
            let all = range(0, 6 * M);
            assert_eq!(guard.map(all, Hpa(0), RAM, PAGE, cache), Ok(6 * M));
            let of = (H::of(tables), guard.platform());
            holding(
                of,
                [2 * M + 12 * K],
                |raw| raw | H::MARK,
                || {
                    refused(guard.collapse(all, BLOCK), 2 * M, SplitError::Contended);
                },
            );
            // One before it waits, and one for the table behind.
            assert_eq!(guard.counts().invalidations, 2);
            assert_eq!(sizes::<H, 3>(guard), [BLOCK, PAGE, BLOCK]);
            assert_eq!(guard.collapse(all, BLOCK), Ok(2 * M));
        });
    }
}
on!(a_thread_that_waits_for_a_leaf_holds_no_table_itself; npt, ept_2m);

fn a_panic_in_the_collapse_closure_leaves_no_leaf_sealed<H: Hardware>() {
    for bbm in BBM {
        on_stage_of::<H>(bbm, (H::usual(), 40, 8), |tables, guard, cache| {
            let all = range(0, 6 * M);
            assert_eq!(guard.map(all, Hpa(0), RAM, PAGE, cache), Ok(6 * M));
            let asked = std::cell::Cell::new(0);
            let third = || {
                guard.collapse_where(all, BLOCK, |_| {
                    asked.set(asked.get() + 1);
                    assert!(asked.get() < 3, "the closure's own");
                    true
                })
            };
            assert!(catch_unwind(AssertUnwindSafe(third)).is_err());
            assert_eq!(sizes::<H, 3>(guard), [BLOCK, BLOCK, PAGE]);
            assert_eq!(H::of(tables).tree(guard.platform()).marks, 0);
            assert_eq!(given_back::<H>(tables, guard), 2);
        });
    }
}
on!(a_panic_in_the_collapse_closure_leaves_no_leaf_sealed; npt, ept_2m);

fn a_table_that_differs_does_not_end_a_batch<H: Hardware>() {
    for bbm in BBM {
        on_stage_of::<H>(bbm, (H::usual(), 40, 16), |tables, guard, cache| {
            let all = range(0, 16 * M);
            assert_eq!(guard.map(all, Hpa(0), RAM, PAGE, cache), Ok(16 * M));
            crate::common::unmap(guard, range(4 * M + 4 * K, 4 * K));
            assert_eq!(guard.map(range(4 * M + 4 * K, 4 * K), Hpa(0), RAM, PAGE, cache), Ok(4 * K));
            let before = guard.counts().invalidations;
            assert_eq!(guard.collapse(all, BLOCK), Ok(14 * M));
            assert_eq!(guard.counts().invalidations - before, 1);
            assert_eq!(H::of(tables).tree(guard.platform()).marks, 0);
            assert_eq!(sizes::<H, 4>(guard), [BLOCK, BLOCK, PAGE, BLOCK]);
        });
    }
}
on!(a_table_that_differs_does_not_end_a_batch; npt, ept_2m);

/// What the platform sees during the one invalidation of a batch.
fn each_address_translates_or_is_broken_during_a_batch<H: Hardware>() {
    for bbm in BBM {
        on_stage_of::<H>(bbm, (H::usual(), 40, 8), |tables, guard, cache| {
            let all = range(0, 6 * M);
            assert_eq!(guard.map(all, Hpa(0), RAM, PAGE, cache), Ok(6 * M));
            let hardware = H::of(tables);
            let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
            let sees = seen.clone();
            guard.platform().meanwhile(Some(Box::new(move |platform, moment| {
                if moment == Moment::Invalidating {
                    let tree = hardware.tree(platform);
                    let run = |n: u64| tree.at(n * 2 * M).map(|run| run.size);
                    sees.borrow_mut().push([0, 1, 2].map(run));
                }
            })));
            assert_eq!(guard.collapse(all, BLOCK), Ok(6 * M));
            guard.platform().meanwhile(None);
            let there = (bbm != BreakBeforeMake::Always).then_some(2 * M);
            assert_eq!(*seen.borrow(), [[there; 3]]);
        });
    }
}
on!(each_address_translates_or_is_broken_during_a_batch; npt, ept_2m);
