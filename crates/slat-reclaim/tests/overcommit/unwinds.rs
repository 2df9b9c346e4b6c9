//! A callback unwinds: the operation ends, no content is lost, and nothing is unusable afterwards.

use crate::fixture::check_accounts;
use crate::hooked::*;
use crate::shares::{at, pages};
use slat::Access;
use slat_reclaim::*;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

type Work = fn(&mut Thread<'_, '_>);

/// Operations, on a guest of which pages 0 to 3 are in memory with a copy, 4 to 7 in memory, and 8
/// to 15 in swap.
const WORKS: [(&str, Work); 10] = [
    ("first touch", |it| _ = Pager::new(it).bring_in(at(20), Access::Write)),
    ("first touch of a block", |it| _ = Pager::new(it).bring_in(at(600), Access::Write)),
    ("read again", |it| _ = Pager::new(it).bring_in(at(8), Access::Read)),
    ("written again", |it| _ = Pager::new(it).bring_in(at(9), Access::Write)),
    ("reclaim", |it| _ = Pager::new(it).reclaim(8)),
    ("discard", |it| Pager::new(it).discard(pages(2, 10))),
    ("copy from memory", |it| _ = Pager::new(it).copy(at(0), &mut [0; 4096])),
    ("copy from swap", |it| _ = Pager::new(it).copy(at(8), &mut [0; 4096])),
    ("pin", |it| drop(Pager::new(it).pin(pages(6, 4)))),
    ("collapse", |it| {
        (0..512).for_each(|page| _ = Pager::new(it).bring_in(at(page), Access::Read));
        _ = (Pager::new(it).walk(), Pager::new(it).walk());
    }),
];

/// Unwinds from the call that is `.1` calls of this kind away.
type Fuse = Mutex<Option<(Call, u32)>>;

fn burn(fuse: &Fuse, call: Call) {
    let mut left = fuse.lock().unwrap();
    match &mut *left {
        Some((kind, 0)) if *kind == call => {
            *left = None;
            drop(left);
            resume_unwind(Box::new(Unwound));
        }
        Some((kind, left)) if *kind == call => *left -= 1,
        _ => {}
    }
}

fn content(thread: &mut Thread<'_, '_>, page: u64) -> u64 {
    let mut content = [0; 4096];
    Pager::new(thread).copy(at(page), &mut content).unwrap();
    u64::from_ne_bytes(*content.first_chunk().unwrap())
}

/// Sends all pages of the guest to swap.
fn send_all(thread: &mut Thread<'_, '_>) {
    for _ in 0..10_000 {
        if Pager::new(thread).reclaim(64) == Err(ReclaimError::Nothing) {
            return;
        }
    }
    let places = thread.guest().backing().places();
    panic!("pages in memory are not found: {places:?}");
}

#[test]
fn a_callback_that_unwinds_loses_no_page_frame_or_slot() {
    const KINDS: [Call; 5] =
        [Call::RamRead, Call::RamWrite, Call::SwapWrite, Call::SwapRead, Call::SwapForget];
    let mut unwound = BTreeMap::new();
    for huge in [false, true] {
        for (name, work) in WORKS {
            for (kind, after) in KINDS.into_iter().flat_map(|kind| [0, 1, 3].map(|n| (kind, n))) {
                let what = format!("{name}, {kind:?} after {after}, huge {huge}");
                let fuse = Fuse::default();
                let config = slat_reclaim::Config { huge, ..slat_reclaim::Config::new(2048) };
                let hook = |call| burn(&fuse, call);
                hooked(&hook, 2048, 2048, &[(1024, config)], |pool, _, mut threads| {
                    let [mut it, _] = threads.pop().unwrap();
                    let machine = it.guest().tables().platform().inner;
                    let paged = *it.guest().backing();
                    for page in 0..16 {
                        let write = |hpa| machine.write_host(hpa, page + 1);
                        Pager::new(&mut it).with_page(at(page), true, write).unwrap();
                    }
                    send_all(&mut it);
                    for page in 0..8 {
                        let access = if page < 4 { Access::Read } else { Access::Write };
                        Pager::new(&mut it).bring_in(at(page), access).unwrap();
                    }
                    *fuse.lock().unwrap() = Some((kind, after));
                    if catch_unwind(AssertUnwindSafe(|| work(&mut it))).is_err() {
                        *unwound.entry(format!("{kind:?}")).or_insert(0) += 1;
                        *unwound.entry(name.into()).or_insert(0) += 1;
                    }
                    *fuse.lock().unwrap() = None;
                    check_accounts(pool, &[paged]);
                    assert_eq!(pool.trouble(), None, "{what}");
                    let check = |it: &mut Thread<'_, '_>| {
                        for page in 0..16 {
                            let given = name == "discard" && (2..12).contains(&page);
                            let found = content(it, page);
                            assert!(found == page + 1 || given && found == 0, "{what}: {page}");
                        }
                    };
                    check(&mut it);
                    send_all(&mut it);
                    assert_eq!(paged.resident(), 0, "{what}");
                    check(&mut it);
                    for page in 0..32 {
                        Pager::new(&mut it).bring_in(at(page), Access::Write).unwrap();
                    }
                    check(&mut it);
                    drop(Pager::new(&mut it).pin(pages(0, 32)).unwrap());
                    Pager::new(&mut it).discard(pages(0, 1024));
                    assert_eq!((paged.resident(), paged.swapped()), (0, 0), "{what}");
                });
            }
        }
    }
    for name in WORKS.map(|work| work.0.into()).into_iter().chain(KINDS.map(|it| format!("{it:?}")))
    {
        assert!(unwound.contains_key(&name), "{name} did not unwind: {unwound:?}");
    }
}

/// The guest has more slots than swap forgets in one call, and pages in memory behind those.
#[test]
fn a_guest_that_goes_gives_back_all_even_if_swap_unwinds() {
    for after in [0, 1] {
        let fuse = Fuse::default();
        let hook = |call| burn(&fuse, call);
        let config = slat_reclaim::Config::new(2048);
        hooked(&hook, 2048, 2048, &[(2048, config)], |_, _, mut threads| {
            let [mut it, _] = threads.pop().unwrap();
            let bring = |it: &mut Thread<'_, '_>, of: std::ops::Range<u64>| {
                of.for_each(|page| Pager::new(it).bring_in(at(page), Access::Write).unwrap());
            };
            bring(&mut it, 0..1500);
            send_all(&mut it);
            bring(&mut it, 1500..1600);
            *fuse.lock().unwrap() = Some((Call::SwapForget, after));
        });
        assert!(fuse.lock().unwrap().is_none(), "swap was not called {after} times");
    }
}
