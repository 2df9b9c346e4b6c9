//! What each way to make or change a leaf owes the CPU that faulted: the tables above are marked
//! as used, the leaf is published, memory is coherent before the leaf can be used, and what stood
//! there before is invalidated, of every page.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
use crate::common::stage::{CLEAN, G, K, M, RAM, on_stage_of, range, relax};
use crate::common::world::{CacheOf, GuardOf, invalidations};
use crate::common::{Event, Moment, TestPlatform};
use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::{
    Access, Attributes, BreakBeforeMake, Execute, GpaRange, Hpa, Memory, PageSize, Software,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const READ: Attributes = Attributes { write: false, ..CLEAN };
const DATA: Attributes = Attributes { execute: Execute::None, ..READ };

type Give<H> = for<'t, 'p> fn(&mut GuardOf<'t, 'p, H>, &mut CacheOf<'_, H>, GpaRange);

/// A way to give a leaf that has been used: what is mapped there before, if anything, and where.
struct Way<H: Hardware> {
    name: &'static str,
    before: Option<(Attributes, PageSize)>,
    at: GpaRange,
    give: Give<H>,
}

/// Memory to which pages are moved.
const OTHER: u64 = 8 * G;

fn hpa(at: GpaRange) -> Hpa {
    Hpa(at.start().0)
}

fn ways<H: Hardware>() -> Vec<Way<H>> {
    let (page, pages, run, block) =
        (range(4 * K, 4 * K), range(4 * K, 12 * K), range(0, 64 * K), range(4 * M, 2 * M));
    let far = range(G, 16 * K);
    let mut ways = Vec::new();
    let mut way = |name, before, at, give| ways.push(Way { name, before, at, give });
    let map: Give<H> = |guard, cache, at| _ = guard.map(at, hpa(at), RAM, BLOCK, cache).unwrap();
    for (name, at) in [
        ("map, a page", page),
        ("map, pages", pages),
        ("map, a run", run),
        ("map, a block", block),
        ("map, by new tables", far),
    ] {
        way(name, None, at, map);
    }
    way("commit", None, page, |guard, cache, at| {
        let reserved = guard.reserve(at.start(), PAGE, cache).unwrap();
        assert_eq!(reserved.commit(hpa(at), RAM), Ok(Some(at.size())));
    });
    way("commit_told", None, page, |guard, cache, at| {
        let reserved = guard.reserve(at.start(), PAGE, cache).unwrap();
        let done = reserved.commit_told(hpa(at), RAM, || Ok::<(), ()>(()));
        assert_eq!(done, Ok(Ok(Some(at.size()))));
    });
    way("commit_told, a block", None, block, |guard, cache, at| {
        let reserved = guard.reserve(at.start(), BLOCK, cache).unwrap();
        let done = reserved.commit_told(hpa(at), RAM, || Ok::<(), ()>(()));
        assert_eq!(done, Ok(Ok(Some(at.size()))));
    });
    for (name, at, size) in
        [("a page", page, PAGE), ("pages", pages, PAGE), ("a block", block, BLOCK)]
    {
        let before = Some((DATA, size));
        let write: Give<H> = |guard, _, at| _ = relax(guard, at, Access::Write).unwrap();
        let fetch: Give<H> = |guard, _, at| _ = relax(guard, at, Access::Execute).unwrap();
        way(["relax, write, ", name].concat().leak(), before, at, write);
        way(["relax, fetch, ", name].concat().leak(), before, at, fetch);
    }
    for (name, at, size) in [
        ("a page", page, PAGE),
        ("pages", pages, PAGE),
        ("a run", run, PAGE),
        ("a block", block, BLOCK),
    ] {
        let moves: Give<H> = |guard, _, at| {
            let to = Hpa(OTHER + at.start().0);
            assert_eq!(guard.replace(at, hpa(at), to, RAM), Ok(at.size()));
        };
        let retypes: Give<H> = |guard, _, at| {
            let new = Attributes { memory: Memory::NonCacheable, ..RAM };
            assert_eq!(guard.replace(at, hpa(at), hpa(at), new), Ok(at.size()));
        };
        let changes: Give<H> = |guard, _, at| {
            let new = Attributes { software: Software::A, ..RAM };
            assert_eq!(guard.replace(at, hpa(at), hpa(at), new), Ok(at.size()));
        };
        let before = Some((DATA, size));
        way(["replace by other memory, ", name].concat().leak(), before, at, moves);
        way(["replace by another type, ", name].concat().leak(), before, at, retypes);
        way(["replace in place, ", name].concat().leak(), before, at, changes);
    }
    ways
}

/// Runs each way on tables that have not been used; `check` gets the events.
fn each<H: Hardware>(
    format: H::Format,
    prepare: impl Fn(H, &GuardOf<'_, '_, H>, GpaRange),
    check: impl Fn(H, &GuardOf<'_, '_, H>, &Way<H>, &[Event]),
) {
    for bbm in [BreakBeforeMake::Always, BreakBeforeMake::Never] {
        for way in ways::<H>() {
            on_stage_of::<H>(bbm, (format, 40, 16), |tables, guard, cache| {
                // Tables are there, except for the second GiB.
                let there = range(M, 4 * K);
                guard.map(there, hpa(there), CLEAN, PAGE, cache).unwrap();
                if let Some((attributes, size)) = way.before {
                    guard.map(way.at, hpa(way.at), attributes, size, cache).unwrap();
                }
                let hardware = H::of(tables);
                prepare(hardware, guard, way.at);
                guard.platform().take_events();
                (way.give)(guard, cache, way.at);
                let events = guard.platform().take_events();
                guard.invalidate();
                check(hardware, guard, &way, &events);
            });
        }
    }
}

#[test]
fn tables_above_a_leaf_mapped_as_accessed_are_marked_accessed() {
    type H = Ept<true>;
    let mark = 1 << 8;
    let format = Ept1G { output_bits: 48, ..Default::default() };
    each::<H>(
        format,
        |hardware, guard, at| {
            let forget = move |platform: &TestPlatform| {
                let links = hardware.links(platform, at.start().0);
                links.iter().for_each(|link| _ = link.fetch_and(!mark, SeqCst));
            };
            forget(guard.platform());
            // Another thread ages the guest while new tables are filled.
            guard.platform().meanwhile(Some(Box::new(move |platform, moment| {
                if moment == Moment::Fill {
                    forget(platform);
                }
            })));
        },
        |hardware, guard, way, _| {
            guard.platform().meanwhile(None);
            let links = hardware.links(guard.platform(), way.at.start().0);
            let marked = links.iter().all(|link| link.load(SeqCst) & mark != 0);
            assert!(marked, "{}", way.name);
        },
    );
}

fn what_is_given_is_published_last<H: Hardware>() {
    each::<H>(
        H::usual(),
        |_, _, _| (),
        |_, _, way, events| assert_eq!(events.last(), Some(&Event::Publish), "{}", way.name),
    );
}

on!(what_is_given_is_published_last);

#[test]
fn memory_is_coherent_before_its_leaf_can_be_used() {
    type H = Arm<12>;
    // Without FEAT_S2FWB, and without CTR_EL0.DIC.
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let early = Rc::new(RefCell::new(Vec::new()));
    let seen = early.clone();
    each::<H>(
        format,
        |hardware, guard, at| {
            let (seen, before) = (seen.clone(), guard.translate(at.start()).unwrap());
            seen.borrow_mut().clear();
            guard.platform().meanwhile(Some(Box::new(move |platform, moment| {
                let Moment::Maintain { hpa, bytes } = moment else { return };
                let tree = hardware.tree(platform);
                for page in (hpa..hpa + bytes).step_by(4 << 10) {
                    // The guest does not translate to it with the new attributes yet.
                    let gpa = page % OTHER;
                    let run = tree.at(gpa);
                    let old = |run: &crate::common::hardware::Run| {
                        before.is_some_and(|found| {
                            let now = run.leaf.own;
                            (now.execute, now.memory)
                                == (found.attributes.execute, found.attributes.memory)
                                && run.oa(gpa) == gpa
                        })
                    };
                    if run.is_some_and(|run| !old(run)) {
                        seen.borrow_mut().push((gpa, 0));
                    }
                    seen.borrow_mut().push((gpa, 1));
                }
            })));
        },
        |_, guard, way, _| {
            guard.platform().meanwhile(None);
            let found = early.borrow();
            assert!(found.iter().all(|&(_, fine)| fine == 1), "{}: {found:x?}", way.name);
            let in_place = way.name.contains("in place");
            let needed = !way.name.contains("write") && !in_place;
            for page in (way.at.start().0..way.at.end().0).step_by(4 << 10) {
                let maintained = found.contains(&(page, 1));
                assert!(maintained || !needed, "{}: {page:#x}", way.name);
            }
        },
    );
}

fn every_page_with_replaced_memory_or_type_is_invalidated<H: Hardware>() {
    let format = H::usual();
    each::<H>(
        format,
        |_, _, _| (),
        |_, _, way, events| {
            if !way.name.contains("by other memory") && !way.name.contains("by another type") {
                return;
            }
            let executed = invalidations(events);
            for page in (way.at.start().0..way.at.end().0).step_by(4 << 10) {
                let covers = |range: GpaRange| (range.start().0..range.end().0).contains(&page);
                let covered = executed.iter().any(|what| what.range.is_none_or(covers));
                assert!(covered, "{}: {page:#x}", way.name);
            }
        },
    );
}
on!(every_page_with_replaced_memory_or_type_is_invalidated);
