//! Reservations: void for good once another thread has changed the entry, and never mistaken for
//! leaves.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::stage::{K, M, RAM, age, on_stage, range, relax};
use crate::common::world::cache;
use slat::{AgeCounts, AgeOptions, Gpa, Hpa, PageSize, Tables, UnmapEntry, Vmid};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;

fn a_void_reservation_stays_void_after_any_reuse_of_its_entry<H: Hardware>() {
    for bbm in crate::common::stage::BBM {
        let platform = TestPlatform::new(bbm);
        let tables = Tables::new(H::usual(), Vmid(1), 40, &platform).unwrap();
        let (mut first, mut second) = (platform.register(), platform.register());
        let mut frames = Vec::new();
        let mut frames = cache::<H>(&platform, &mut frames, 4);
        let mut guard = tables.enter(&mut first).unwrap();
        // This page keeps the table while other pages are unmapped.
        guard.map(range(M, 4 * K), Hpa(M), RAM, PAGE, &mut frames).unwrap();
        let early = guard.reserve(Gpa(0), PAGE, &mut frames).unwrap();
        let mut other = tables.enter(&mut second).unwrap();
        let mut places = [const { UnmapEntry::EMPTY }; 1];
        let pte = H::of(&tables).pte(&platform, 0).0;
        let token = pte.load(SeqCst);
        for _ in 0..300 {
            let mut batch = other.unmap_batch(&mut places);
            assert_eq!(other.unmap(range(0, 4 * K), &mut batch), Ok(0));
            assert_eq!(batch.complete().count(), 0);
            drop(batch);
            assert_ne!(pte.load(SeqCst), token);
            let _ = other.reserve(Gpa(0), PAGE, &mut frames).unwrap();
            assert_ne!(pte.load(SeqCst), token);
        }
        assert_eq!(early.commit(Hpa(0), RAM), Ok(None));
        drop((guard, other, frames));
        crate::common::destroy(tables);
    }
}
on!(a_void_reservation_stays_void_after_any_reuse_of_its_entry);

/// So threads share no counter, except for one step in many.
fn a_thread_numbers_its_reservations_one_after_the_other<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 4), |tables, guard, cache| {
        for number in 0..5 {
            let at = number * 4 * K;
            let _ = guard.reserve(Gpa(at), PAGE, cache).unwrap();
            let pte = H::of(tables).pte(guard.platform(), at).0;
            let token = <H::Format as slat::Format>::reserved(number);
            assert_eq!(pte.load(SeqCst), token, "{number}");
        }
    });
}
on!(
    a_thread_numbers_its_reservations_one_after_the_other:
    arm_4k, ept
);

/// This holds for a token of any bits.
fn a_reservation_is_never_taken_for_a_leaf<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let pages = range(2 * M, 64 * K);
        let platform = guard.platform();
        let pte = |gpa| H::of(tables).pte(platform, gpa).0;
        // This page keeps the table while other pages are unmapped.
        guard.map(range(3 * M, 4 * K), Hpa(M), RAM, PAGE, cache).unwrap();
        for number in 0..64 {
            // Leaves that were used and written, with a reservation among them.
            let at = 2 * M + number % 8 * 4 * K;
            let first = if at > 2 * M {
                guard.map(range(2 * M, at - 2 * M), Hpa(0), RAM, PAGE, cache).unwrap()
            } else {
                0
            };
            let _ = guard.reserve(Gpa(at), PAGE, cache).unwrap();
            let after = range(at + 4 * K, 60 * K - first);
            let hpa = Hpa(first + 4 * K);
            assert_eq!(guard.map(after, hpa, RAM, PAGE, cache), Ok(60 * K - first));
            let reserved = pte(at).load(SeqCst);
            assert_ne!(reserved, 0);
            let named = 0xffff & !(1 << (number % 8));
            let aged = AgeCounts { young: 15, unanswered: 0 };
            assert_eq!(age(guard, pages, AgeOptions::LEAVES), (aged, [named, 0]));
            let mut dirty = [0];
            assert_eq!(guard.harvest(pages, &mut dirty), Ok(15));
            assert_eq!(dirty, [named]);
            assert_eq!(guard.write_protect(pages), Ok(60 * K));
            assert_eq!(relax(guard, pages, slat::Access::Write), Ok(60 * K));
            assert_eq!(guard.execute_protect(pages), Ok(60 * K));
            assert_eq!(pte(at).load(SeqCst), reserved);
            assert_eq!(guard.leaves(pages).unwrap().count(), 15);
            let removed = crate::common::unmap(guard, pages);
            assert_eq!(removed.iter().map(|run| run.bytes).sum::<u64>(), 60 * K);
        }
    });
}
on!(a_reservation_is_never_taken_for_a_leaf);

fn a_table_too_late_for_its_fault_returns_to_the_cache<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 8), |tables, guard, cache| {
        let there = range(2 * M, 4 * K);
        assert_eq!(guard.map(there, Hpa(0), RAM, PAGE, cache), Ok(4 * K));
        let (hardware, platform) = (H::of(tables), guard.platform());
        let left = cache.len();
        // While the table is filled, another thread reserves the entry that is to link it.
        let mut first = true;
        platform.meanwhile(Some(Box::new(move |platform, _| {
            if std::mem::take(&mut first) {
                let (pte, _) = hardware.pte(platform, 4 * M);
                pte.store(<H::Format as slat::Format>::reserved(77), SeqCst);
            }
        })));
        assert_eq!(guard.reserve(Gpa(4 * M), PAGE, cache).unwrap().range().size(), 4 * K);
        platform.meanwhile(None);
        assert_eq!(cache.len(), left - 1);
    });
}
on!(a_table_too_late_for_its_fault_returns_to_the_cache);
