//! Leaves that are replaced in place, by single calls; `handover` has histories of them.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{M, RAM, host, on_stage, range, refused, says};
use crate::common::world::GuardOf;
use crate::common::{Event, Moment, unmap};
use slat::format::arm64::Arm64K4;
use slat::{Attributes, Format, Gpa, Hpa, Memory, PageSize, ReplaceError};
use std::sync::atomic::Ordering::SeqCst;

const PAGE: PageSize = PageSize::SIZE_4K;
const PAGE_4K: u64 = PAGE.bytes();

#[test]
fn a_writable_page_is_not_moved_and_an_unmapped_one_stays_so() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let (all, first) = (range(0, 4 * PAGE_4K), range(0, PAGE_4K));
        guard.map(first, Hpa(0), RAM, PAGE, cache).unwrap();
        guard.map(range(2 * PAGE_4K, PAGE_4K), Hpa(2 * PAGE_4K), RAM, PAGE, cache).unwrap();
        let read = Attributes { write: false, ..RAM };
        let far = Hpa(1 << 30);
        let moved = |guard: &mut GuardOf<'_, '_, Arm<12>>| guard.replace(all, Hpa(0), far, read);
        let said = refused(moved(guard), 0, ReplaceError::Writable);
        says(&said, &["write-protect", "copy"]);
        guard.write_protect(first).unwrap();
        refused(moved(guard), 2 * PAGE_4K, ReplaceError::Writable);
        assert_eq!(host::<Arm<12>>(guard, 0), Some(far), "what precedes is done");
        guard.write_protect(all).unwrap();
        assert_eq!(moved(guard), Ok(PAGE_4K));
        let broken = guard.counts().broken;
        assert_eq!((broken, guard.counts().invalidations), (2, 2));
        assert_eq!(host::<Arm<12>>(guard, PAGE_4K), None);
        assert_eq!(moved(guard), Ok(0), "it is there");
        // A change of rights alone does not break.
        assert_eq!(guard.replace(all, far, far, RAM), Ok(2 * PAGE_4K));
        assert_eq!(guard.counts().broken, broken);
        let device = Attributes { memory: Memory::Device, ..RAM };
        assert_eq!(guard.replace(all, far, far, device), Ok(2 * PAGE_4K));
        assert_eq!(guard.counts().broken, broken + 2);

        let hpa = Hpa(1 << 48);
        let reason = ReplaceError::HostAddress { hpa, page: PAGE, bits: 48 };
        refused(guard.replace(all, far, hpa, RAM), 0, reason);
        let odd = ReplaceError::Differs { size: PAGE, hpa: far };
        says(&refused(guard.replace(all, Hpa(0), Hpa(PAGE_4K), RAM), 0, odd), &["elsewhere"]);
        guard.map(range(2 * M, 2 * M), Hpa(2 * M), read, PageSize::SIZE_2M, cache).unwrap();
        let block = range(2 * M, 2 * M);
        let unaligned = ReplaceError::Unaligned { size: PageSize::SIZE_2M };
        refused(guard.replace(block, Hpa(2 * M), Hpa(PAGE_4K), read), 2 * M, unaligned);
        let cuts = ReplaceError::CutsBlock { size: PageSize::SIZE_2M };
        refused(guard.replace(range(2 * M, M), Hpa(2 * M), far, read), 2 * M, cuts);
        assert_eq!(guard.replace(block, Hpa(2 * M), Hpa(8 * M), read), Ok(2 * M));
        let beyond = guard.replace(range(1 << 40, PAGE_4K), far, far, RAM).unwrap_err();
        assert!(matches!(beyond.reason, ReplaceError::Range(_)));
    });
}

#[test]
fn neighbours_that_are_moved_share_an_invalidation() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let all = range(0, 64 * PAGE_4K);
        let read = Attributes { write: false, ..RAM };
        guard.map(all, Hpa(0), read, PAGE, cache).unwrap();
        let written = guard.counts().entries_written;
        assert_eq!(guard.replace(all, Hpa(0), Hpa(1 << 30), read), Ok(64 * PAGE_4K));
        assert_eq!((guard.counts().broken, guard.counts().invalidations), (64, 8));
        assert_eq!(guard.counts().entries_written - written, 128, "broken, then filled");
    });
}

#[test]
fn memory_of_a_new_type_is_maintained_after_the_invalidation() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let page = range(0, PAGE_4K);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        guard.platform().take_events();
        for memory in [Memory::NonCacheable, Memory::Device, Memory::Normal] {
            let attributes = Attributes { memory, ..RAM };
            guard.replace(page, Hpa(0), Hpa(0), attributes).unwrap();
            let events = guard.platform().take_events();
            assert!(
                matches!(
                    events[..],
                    [Event::Invalidate(_), Event::Maintain { .. }, Event::Publish]
                ),
                "{memory:?}: {events:?}"
            );
        }
    });
}

#[test]
fn moved_pages_of_a_new_type_are_maintained_after_invalidation() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |_, guard, cache| {
        let read = Attributes { write: false, ..RAM };
        let far = 1 << 30;
        let page = |n: u64| n * PAGE_4K;
        for n in 0..8 {
            let memory = if n % 2 == 0 { Memory::Normal } else { Memory::NonCacheable };
            let what = Attributes { memory, ..read };
            guard.map(range(page(n), PAGE_4K), Hpa(page(n)), what, PAGE, cache).unwrap();
        }
        guard.platform().take_events();
        assert_eq!(guard.replace(range(0, page(8)), Hpa(0), Hpa(far), read), Ok(page(8)));
        let events = guard.platform().take_events();
        let told = events.iter().position(|event| matches!(event, Event::Invalidate(_))).unwrap();
        let maintained = |events: &[Event]| -> Vec<u64> {
            let at = |event: &Event| match event {
                Event::Maintain { hpa, bytes: PAGE_4K, .. } => Some(hpa - far),
                _ => None,
            };
            events.iter().filter_map(at).collect()
        };
        assert_eq!(maintained(&events[..told]), [0, 2, 4, 6].map(page));
        assert_eq!(maintained(&events[told..]), [1, 3, 5, 7].map(page));
    });
}

#[test]
fn a_replaced_leaf_keeps_its_state_or_gets_the_stated_one() {
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    on_stage::<Arm<12>>((format, 40, 8), |_, guard, cache| {
        let page = range(0, PAGE_4K);
        let used = [(false, false), (true, false), (true, true)];
        let leaf = |(accessed, dirty)| Attributes { accessed, dirty, ..RAM };
        for (was, said) in used.into_iter().flat_map(|was| used.map(|said| (was, said))) {
            guard.map(page, Hpa(0), leaf(was), PAGE, cache).unwrap();
            guard.replace(page, Hpa(0), Hpa(0), leaf(said)).unwrap();
            let found = guard.translate(Gpa(0)).unwrap().unwrap().attributes;
            assert_eq!(found, leaf((was.0 || said.0, was.1 || said.1)), "{was:?}, {said:?}");
            unmap(guard, page);
            cache.fill(8).unwrap();
        }
    });
}

/// It is refused before anything is done; or, if it appears meanwhile, after what precedes it is
/// done.
#[test]
fn a_block_that_appears_while_pages_are_replaced_is_not_cut() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |tables, guard, cache| {
        let all = range(2 * M - PAGE_4K, 2 * PAGE_4K);
        guard.map(all, Hpa(2 * M - PAGE_4K), RAM, PAGE, cache).unwrap();
        let platform = guard.platform();
        let (upper, _) = Arm::<12>::of(tables).tree(platform).table(0, 2).unwrap();
        let link = platform.table(upper, 512)[1].load(SeqCst);
        let bits = guard.format().encode(RAM).unwrap();
        platform.meanwhile(Some(Box::new(move |platform, moment| {
            if moment == Moment::Invalidating {
                let block = Arm64K4::leaf(bits, 1, Hpa(2 * M));
                platform.table(upper, 512)[1].store(block, SeqCst);
            }
        })));
        let device = Attributes { memory: Memory::Device, ..RAM };
        let same = Hpa(2 * M - PAGE_4K);
        let done = guard.replace(all, same, same, device);
        platform.meanwhile(None);
        refused(done, 2 * M, ReplaceError::CutsBlock { size: PageSize::SIZE_2M });
        let memory = |gpa| guard.translate(Gpa(gpa)).unwrap().unwrap().attributes.memory;
        assert_eq!([0, 1].map(|n| memory(same.0 + n * PAGE_4K)), [Memory::Device, Memory::Normal]);
        platform.table(upper, 512)[1].store(link, SeqCst);
    });
}
