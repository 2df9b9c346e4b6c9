//! Reservations whose commit is reported to a closure, which may refuse it.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{K, M, RAM, range};
use crate::common::world::{CacheOf, GuardOf, cache, check_sizes};
use slat::{BreakBeforeMake, Gpa, Hpa, Interruption, MapError, PageSize, Tables, UnmapEntry};
use slat::{UnmapError, Vmid};
use std::panic::{AssertUnwindSafe, catch_unwind};

const PAGE: PageSize = PageSize::SIZE_4K;

/// Two threads in the tables of an empty guest, each with a cache.
struct Two<'g, 't, 'p, 'c, H: Hardware> {
    guard: &'g mut GuardOf<'t, 'p, H>,
    other: &'g mut GuardOf<'t, 'p, H>,
    caches: [&'g mut CacheOf<'c, H>; 2],
}

trait Test {
    fn run<H: Hardware>(two: Two<'_, '_, '_, '_, H>, group: bool);
}

/// On formats with groups and without, for a page and for a group where the format has them.
fn on_formats<T: Test>() {
    fn on<H: Hardware, T: Test>(format: H::Format) {
        for group in [false, true] {
            let platform = TestPlatform::new(BreakBeforeMake::Always);
            let tables = Tables::new(format, Vmid(1), 40, &platform).unwrap();
            let (mut first, mut second) = (platform.register(), platform.register());
            let (mut frames, mut others) = (Vec::new(), Vec::new());
            let mut frames = cache::<H>(&platform, &mut frames, 4);
            let mut others = cache::<H>(&platform, &mut others, 4);
            let mut guard = tables.enter(&mut first).unwrap();
            let mut other = tables.enter(&mut second).unwrap();
            // This page keeps the table while other pages are unmapped.
            guard.map(range(M, 4 * K), Hpa(M), RAM, PAGE, &mut frames).unwrap();
            let caches = [&mut frames, &mut others];
            T::run::<H>(Two { guard: &mut guard, other: &mut other, caches }, group);
            let mut sizes = *guard.leaf_delta();
            sizes += *other.leaf_delta();
            check_sizes::<H>(&H::of(&tables).tree(&platform), sizes);
            drop((guard, other, frames, others));
            crate::common::destroy(tables);
        }
    }
    on::<GroupedArm<12>, T>(Default::default());
    on::<Ept<true>, T>(Default::default());
}

macro_rules! reserve {
    ($guard:expr, $cache:expr, $group:expr) => {
        match $group {
            false => $guard.reserve(Gpa(0), PAGE, $cache).unwrap(),
            true => $guard.reserve_contiguous(Gpa(0), PAGE, $cache).unwrap(),
        }
    };
}

#[test]
fn no_other_thread_changes_a_range_while_its_map_is_reported() {
    struct Alone;
    impl Test for Alone {
        fn run<H: Hardware>(two: Two<'_, '_, '_, '_, H>, group: bool) {
            let Two { guard, other, caches: [cache, others] } = two;
            let pte = reserve!(guard, cache, group);
            let (all, at) = (pte.range(), pte.range().start());
            let mut told = false;
            let done = pte.commit_told(Hpa(0), RAM, || {
                told = true;
                let mut places = [const { UnmapEntry::EMPTY }; 1];
                let mut batch = other.unmap_batch(&mut places);
                let reason = UnmapError::Contended;
                assert_eq!(other.unmap(all, &mut batch), Err(Interruption { at, reason }));
                drop(batch);
                assert!(other.translate(at).is_err(), "somebody changes it");
                let reason = MapError::Contended;
                let reserved = other.reserve(at, PAGE, others);
                assert_eq!(reserved.map(|pte| pte.range()), Err(Interruption { at, reason }));
                let mapped = other.map(range(at.0, 4 * K), Hpa(M), RAM, PAGE, others);
                assert_eq!(mapped, Err(Interruption { at, reason }));
                Ok::<(), ()>(())
            });
            assert_eq!(done, Ok(Ok(Some(all.size()))));
            assert!(told);
            assert_eq!(other.translate(at).unwrap().unwrap().hpa, Hpa(0));
            assert_eq!(crate::common::unmap(other, all)[0].bytes, all.size());
        }
    }
    on_formats::<Alone>();
}

#[test]
fn a_commit_of_a_void_reservation_is_not_reported() {
    struct Void;
    impl Test for Void {
        fn run<H: Hardware>(two: Two<'_, '_, '_, '_, H>, group: bool) {
            let Two { guard, other, caches: [cache, others] } = two;
            for unmapped in [false, true] {
                let pte = reserve!(guard, cache, group);
                let all = pte.range();
                match unmapped {
                    true => assert!(crate::common::unmap(other, all).is_empty()),
                    false => {
                        other.map(range(0, 4 * K), Hpa(M), RAM, PAGE, others).unwrap();
                    }
                }
                let done = pte.commit_told(Hpa(0), RAM, || -> Result<(), ()> {
                    panic!("the reservation is void");
                });
                assert_eq!(done, Ok(Ok(None)));
                let left = crate::common::unmap(other, all);
                assert_eq!(left.len(), usize::from(!unmapped), "{left:?}");
            }
        }
    }
    on_formats::<Void>();
}

#[test]
fn nor_of_a_page_that_cannot_be_mapped() {
    struct Wrong;
    impl Test for Wrong {
        fn run<H: Hardware>(two: Two<'_, '_, '_, '_, H>, group: bool) {
            let Two { guard, caches: [cache, _], .. } = two;
            let pte = reserve!(guard, cache, group);
            let done = pte.commit_told(Hpa(1), RAM, || -> Result<(), ()> {
                panic!("no address of a page");
            });
            assert!(matches!(done, Ok(Err(MapError::HostAddress { .. }))), "{done:?}");
        }
    }
    on_formats::<Wrong>();
}

#[test]
fn what_is_refused_or_panics_leaves_the_reservation_as_it_was() {
    struct Refusal;
    impl Test for Refusal {
        fn run<H: Hardware>(two: Two<'_, '_, '_, '_, H>, group: bool) {
            let Two { guard, other, caches: [cache, others] } = two;
            // The reservation is shared with another fault, which can still use it.
            let pte = reserve!(guard, cache, group);
            let shared = other.reserve(Gpa(0), PAGE, others).unwrap();
            assert_eq!(pte.commit_told(Hpa(0), RAM, || Err("no")), Err("no"));
            let again = reserve!(guard, cache, false);
            let panics = || again.commit_told(Hpa(0), RAM, || -> Result<(), ()> { panic!("told") });
            assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
            // None of the other entries of a group is held either.
            for at in (4 * K..if group { 64 * K } else { 0 }).step_by(4 << 10) {
                assert_eq!(guard.translate(Gpa(at)), Ok(None), "{at:#x}");
            }
            assert_eq!(shared.commit(Hpa(M), RAM), Ok(Some(4 * K)));
            assert_eq!(guard.translate(Gpa(0)).unwrap().unwrap().hpa, Hpa(M));
        }
    }
    on_formats::<Refusal>();
}
