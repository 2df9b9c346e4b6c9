//! A harvest during which another thread makes a table a block.

use crate::common::stage::{K, M, RAM, range};
use crate::interleavings::{HookedPlatform, with_cache};
use slat::format::ept::Ept1G;
use slat::{
    Attributes, BreakBeforeMake, ChangeError, Gpa, Guard, Hpa, Interruption, PageSize, Reader,
    Tables, Vmid,
};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;

type Call =
    fn(&mut Guard<'_, 'static, Ept1G, HookedPlatform>) -> Result<u64, Interruption<ChangeError>>;

/// Runs a call on a table of pages that are dirty and may be written. Another thread makes the
/// table a block at the call of the platform that has this number. Returns what the call did, and
/// the attributes of the first page and of the last one then.
fn collapsed_at(
    number: usize,
    call: Call,
) -> (Result<u64, Interruption<ChangeError>>, [Attributes; 2]) {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let guest = Tables::new(Ept1G::default(), Vmid(1), 40, platform).unwrap();
    let guest: &'static Tables<'static, Ept1G, HookedPlatform> = Box::leak(Box::new(guest));
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    let all = range(0, 2 * M);
    with_cache(platform, 8, |cache| guard.map(all, Hpa(0), RAM, PAGE, cache).unwrap());
    let calls = AtomicUsize::new(0);
    platform.at_each_call(move |_| {
        if calls.fetch_add(1, SeqCst) == number {
            let mut reader = Reader::register(platform).unwrap();
            let _ = guest.enter(&mut reader).unwrap().collapse(all, BLOCK);
        }
    });
    let done = call(&mut guard);
    platform.at_each_call(|_| ());
    let found = [0, 2 * M - 4 * K].map(|at| guard.translate(Gpa(at)).unwrap().unwrap().attributes);
    (done, found)
}

/// Enough for all calls of the platform that one operation makes.
const CALLS: usize = 24;

#[test]
fn a_block_that_appears_around_a_page_is_not_changed_for_it() {
    let mut cut = 0;
    for number in 0..CALLS {
        let (done, found) =
            collapsed_at(number, |guard| guard.harvest(range(4 * K, 4 * K), &mut [0]));
        if let Err(Interruption { at, reason }) = done {
            assert_eq!((at, reason), (Gpa(4 * K), ChangeError::CutsBlock { size: BLOCK }));
            cut += 1;
        }
        assert_eq!(found, [RAM; 2], "call {number}");
    }
    assert!(cut > 0, "a block was met");
}
