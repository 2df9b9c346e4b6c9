//! Members of a group of contiguous leaves behind the first: each operation treats all of them as
//! one leaf, whichever member hardware has marked, and whichever is in the way.

use crate::common::beside::{guest, inside, meanwhile};
use crate::common::hardware::Hardware;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{BBM, CLEAN, K, RAM, age, range};
use crate::common::world::{CacheOf, GuardOf, TablesOf, covers};
use crate::common::{Moment, TestPlatform};
use slat::format::arm64::Arm64K4;
use slat::{
    Access, AgeOptions, Attributes, BreakBeforeMake, Gpa, Hpa, MapError, PageSize, Pages, Rights,
    Software, UnmapEntry,
};
use std::sync::atomic::Ordering::SeqCst;

type H = GroupedArm<12>;
type Guest = &'static TablesOf<'static, H>;
type GroupGuard<'t> = GuardOf<'t, 'static, H>;

const PAGE: PageSize = PageSize::SIZE_4K;
const GROUP: u64 = 64 * K;
/// The first member, those next to it, and the last.
const MEMBERS: [u64; 5] = [0, 1, 2, 8, 15];
/// The page of the group that an operation on a part of it is on.
const PART: u64 = 12 * K;

fn groups(bbm: BreakBeforeMake, attributes: Attributes) -> Guest {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let tables = guest::<H>(bbm, format);
    inside::<H, _>(tables, |guard, cache| {
        guard.map_contiguous(range(0, GROUP), Hpa(0), attributes, PAGE, cache).unwrap();
    });
    tables
}

/// Hardware writes to some page, and marks the descriptor of this one.
fn write(hardware: H, platform: &TestPlatform, member: u64) {
    let (pte, _) = hardware.pte(platform, member * 4 * K);
    let raw = pte.load(SeqCst);
    pte.store(hardware.used(raw, true), SeqCst);
}

/// An operation; returns a bit for each page that it reports as written.
type Op = fn(&mut GroupGuard<'_>, &mut CacheOf<'_, H>) -> u64;

fn all() -> slat::GpaRange {
    range(0, GROUP)
}

fn part() -> slat::GpaRange {
    range(PART, 4 * K)
}

fn removed(guard: &mut GroupGuard<'_>, at: slat::GpaRange) -> u64 {
    let runs = crate::common::unmap(guard, at);
    let dirty = runs.iter().filter(|run| run.attributes.dirty);
    dirty.fold(0, |pages, run| {
        (run.gpa.0..run.gpa.0 + run.bytes)
            .step_by(4 << 10)
            .fold(pages, |pages, at| pages | 1 << (at >> 12))
    })
}

/// Operations that lose no dirty state, or report what they take.
const OPS: [(&str, Op); 17] = [
    ("translate", |_, _| 0),
    ("unfold", |guard, _| guard.unfold(all()).map(|_| 0).unwrap()),
    ("write_protect", |guard, _| guard.write_protect(all()).map(|_| 0).unwrap()),
    ("write_protect of a part", |guard, _| guard.write_protect(part()).map(|_| 0).unwrap()),
    ("write_protect_pages", |guard, _| {
        let pages = Pages { start: Gpa(0), bits: &[0b1000] };
        guard.write_protect_pages(&pages).map(|_| 0).unwrap()
    }),
    ("execute_protect of a part", |guard, _| guard.execute_protect(part()).map(|_| 0).unwrap()),
    ("protect of a part", |guard, _| guard.protect(part(), Rights::READ).map(|_| 0).unwrap()),
    ("set_software of a part", |guard, _| {
        guard.set_software(part(), Software::A, Software::NONE).map(|_| 0).unwrap()
    }),
    ("relax of a part", |guard, _| guard.relax(part(), Access::Read).map(|_| 0).unwrap()),
    ("clean of a part", |guard, _| guard.clean(part()).map(|_| 1 << 3).unwrap()),
    ("clean_pages", |guard, _| {
        let pages = Pages { start: Gpa(0), bits: &[0b1000] };
        guard.clean_pages(&pages).map(|_| 1 << 3).unwrap()
    }),
    ("harvest", |guard, _| {
        let mut bits = [0];
        guard.harvest(all(), &mut bits).unwrap();
        bits[0]
    }),
    ("harvest of a part", |guard, _| {
        let mut bits = [0];
        guard.harvest(part(), &mut bits).unwrap();
        bits[0] << 3
    }),
    ("replace of a part, by another type", |guard, _| {
        let new = Attributes { memory: slat::Memory::NonCacheable, ..CLEAN };
        guard.replace(part(), Hpa(PART), Hpa(PART), new).map(|_| 0).unwrap()
    }),
    ("split", |guard, cache| guard.split(all(), PAGE, cache).map(|_| 0).unwrap()),
    ("unmap", |guard, _| removed(guard, all())),
    ("unmap of a part", |guard, _| removed(guard, part())),
];

/// Returns a bit for each page that is mapped as written.
fn written(guard: &GroupGuard<'_>) -> u64 {
    (0..16).fold(0, |pages, page| {
        let found = guard.translate(Gpa(page * 4 * K)).unwrap();
        pages | u64::from(found.is_some_and(|found| found.attributes.dirty)) << page
    })
}

#[test]
fn no_operation_on_a_group_loses_a_write_that_any_member_has() {
    for (bbm, member) in BBM.into_iter().flat_map(|bbm| MEMBERS.map(|member| (bbm, member))) {
        for (name, op) in OPS {
            let tables = groups(bbm, CLEAN);
            write(H::of(tables), tables.platform(), member);
            inside::<H, _>(tables, |guard, cache| {
                let reported = op(guard, cache);
                guard.invalidate();
                assert_eq!(reported | written(guard), 0xffff, "{name}, member {member}, {bbm:?}");
            });
        }
    }
}

/// Without a break a TLB holds the group until the first invalidation has completed.
#[test]
fn a_write_through_any_member_during_an_unfold_dirties_all() {
    for member in MEMBERS {
        for (name, op) in OPS.into_iter().filter(|(name, _)| !name.contains("translate")) {
            let tables = groups(BreakBeforeMake::Never, CLEAN);
            let hardware = H::of(tables);
            let folded = hardware.tree(tables.platform()).runs[0].size == GROUP;
            assert!(folded);
            // Whether it unfolds the group, and so invalidates.
            let mut unfolds = false;
            inside::<H, _>(tables, |guard, cache| {
                let seen = std::rc::Rc::new(std::cell::Cell::new(false));
                let sees = seen.clone();
                guard.platform().meanwhile(Some(Box::new(move |platform, moment| {
                    let leaf = hardware.pte(platform, member * 4 * K).0.load(SeqCst) & 1 == 1;
                    if leaf && moment == Moment::Invalidating && !sees.replace(true) {
                        write(hardware, platform, member);
                    }
                })));
                let reported = op(guard, cache);
                guard.platform().meanwhile(None);
                unfolds |= seen.get();
                let state = reported | written(guard);
                guard.invalidate();
                assert!(!unfolds || state == 0xffff, "{name}, member {member}: {state:#x}");
            });
        }
    }
}

#[test]
fn a_group_that_was_used_by_way_of_any_member_is_young_once() {
    for (bbm, member) in BBM.into_iter().flat_map(|bbm| MEMBERS.map(|member| (bbm, member))) {
        let tables = groups(bbm, CLEAN);
        write(H::of(tables), tables.platform(), member);
        inside::<H, _>(tables, |guard, _| {
            let mut age = |clear| {
                let how = AgeOptions { clear, ..AgeOptions::LEAVES };
                let (_, [young, unanswered]) = age(guard, all(), how);
                assert_eq!(unanswered, 0);
                young
            };
            assert_eq!([age(false), age(true), age(true)], [0xffff, 0xffff, 0], "{member}");
        });
        write(H::of(tables), tables.platform(), member);
        inside::<H, _>(tables, |guard, _| {
            let mut age = || guard.age_leaf(Gpa(PART), true).unwrap().unwrap().1;
            assert_eq!([age(), age()], [true, false], "{member}");
        });
    }
}

#[test]
fn a_group_is_reserved_after_its_old_entries_are_invalidated() {
    for member in MEMBERS {
        let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
        let tables = guest::<H>(BreakBeforeMake::Never, format);
        let page = range(member * 4 * K, 4 * K);
        inside::<H, _>(tables, |guard, cache| {
            // Another page keeps the table.
            guard.map(range(128 * K, 4 * K), Hpa(128 * K), RAM, PAGE, cache).unwrap();
            guard.map(page, Hpa(page.start().0), RAM, PAGE, cache).unwrap();
            let mut places = [const { UnmapEntry::EMPTY }; 1];
            let mut batch = guard.unmap_batch(&mut places);
            guard.unmap(page, &mut batch).unwrap();
            guard.platform().take_events();
            // Its own entry is another's, so that only the group finds this one.
            let other = Gpa((member + 1) % 16 * 4 * K);
            let reserved = guard.reserve_contiguous(other, PAGE, cache).unwrap();
            assert_eq!(reserved.range(), all());
            assert_eq!(reserved.commit(Hpa(0), RAM), Ok(Some(GROUP)));
            let told = guard.platform().take_invalidations();
            assert!(told.iter().any(|what| covers(what, 0, GROUP)), "member {member}");
            drop(batch);
        });
    }
}

#[test]
fn a_group_commit_that_finds_a_changed_entry_holds_none_after() {
    for (told, member) in [false, true].into_iter().flat_map(|told| MEMBERS.map(|it| (told, it))) {
        let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
        let tables = guest::<H>(BreakBeforeMake::Never, format);
        inside::<H, _>(tables, |guard, cache| {
            let reserved = guard.reserve_contiguous(Gpa(0), PAGE, cache).unwrap();
            let page = range(member * 4 * K, 4 * K);
            inside::<H, _>(tables, |other, cache| {
                other.map(page, Hpa(page.start().0), RAM, PAGE, cache).unwrap();
            });
            let done = match told {
                false => reserved.commit(Hpa(GROUP), RAM),
                true => reserved.commit_told::<()>(Hpa(GROUP), RAM, || panic!("void")).unwrap(),
            };
            assert_eq!(done, Ok(None));
            assert_eq!(H::of(tables).tree(guard.platform()).marks, 0, "member {member}");
            assert_eq!(guard.map(all(), Hpa(0), RAM, PAGE, cache), Ok(GROUP - 4 * K));
        });
    }
}

#[test]
fn a_group_refused_by_another_party_can_be_mapped_whole_later() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    let tables = guest::<H>(BreakBeforeMake::Never, format);
    inside::<H, _>(tables, |guard, cache| {
        let reserved = guard.reserve_contiguous(Gpa(0), PAGE, cache).unwrap();
        assert_eq!(reserved.commit_told(Hpa(0), RAM, || Err("no")), Err("no"));
        assert_eq!(H::of(tables).tree(guard.platform()).marks, 0);
        for page in 0..16 {
            let found = guard.reserve(Gpa(page * 4 * K), PAGE, cache);
            let found = found.map(|pte| pte.range().size()).map_err(|stopped| stopped.reason);
            assert_eq!(found, Ok::<u64, MapError>(4 * K), "{page}");
        }
    });
}

/// Another thread, in the invalidation of an unfold, finds each member held.
#[test]
fn no_other_thread_changes_a_member_of_a_group_being_unfolded() {
    for bbm in BBM {
        for member in MEMBERS {
            let tables = groups(bbm, RAM);
            let page = range(member * 4 * K, 4 * K);
            let tries = move || {
                inside::<H, _>(tables, |other, _| {
                    let contended = slat::ChangeError::Contended;
                    let found = other.write_protect(page).map_err(|stopped| stopped.reason);
                    assert_eq!(found, Err(contended), "member {member}");
                });
            };
            meanwhile(tables.platform(), tries, || {
                inside::<H, _>(tables, |guard, _| guard.unfold(all()).unwrap());
            });
        }
    }
}
