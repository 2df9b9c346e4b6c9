//! Interleavings, most of which once went wrong, each step by step: the platform calls the test at
//! the points where another thread came in between.

use slat::format::arm64::Arm64K4;
use slat::format::ept::Ept1G;
use slat::*;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

/// The place from which the platform was called, and the address that the call was about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    Entries,
    Invalidate,
    Maintain(u64),
}

type Hook = Arc<dyn Fn(Call) + Send + Sync>;

pub(crate) struct HookedPlatform {
    readers: Readers<[ReaderSlot; 8]>,
    bbm: BreakBeforeMake,
    hook: Mutex<Option<Hook>>,
    invalidations: AtomicUsize,
}

impl HookedPlatform {
    /// Leaked, so that a hook may refer to it.
    pub(crate) fn new(bbm: BreakBeforeMake) -> &'static Self {
        let readers = Readers::new([const { ReaderSlot::new() }; 8]);
        let invalidations = AtomicUsize::new(0);
        Box::leak(Box::new(Self { readers, bbm, hook: Mutex::new(None), invalidations }))
    }

    pub(crate) fn at_each_call(&self, hook: impl Fn(Call) + Send + Sync + 'static) {
        *self.hook.lock().unwrap() = Some(Arc::new(hook));
    }

    fn call(&self, call: Call) {
        let hook = self.hook.lock().unwrap().clone();
        if let Some(hook) = hook {
            hook(call);
        }
    }

    fn invalidations(&self) -> usize {
        self.invalidations.load(SeqCst)
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, bytes).unwrap()
}

// SAFETY: frames come from the allocator with that size and alignment and stay until `free`; a
// frame's address is that of its memory; no CPU loads the tables; hooks do not unwind; `readers` is
// a field.
unsafe impl Platform for HookedPlatform {
    fn allocate(&self, bytes: usize) -> Option<Frame> {
        // SAFETY: the size is not zero, and no other code has the memory.
        unsafe { Frame::from_hpa(Hpa(alloc_zeroed(layout(bytes)) as u64)) }
    }

    unsafe fn free(&self, frame: Frame, bytes: usize) {
        // SAFETY: allocated above with the same layout; the caller gives it up.
        unsafe { dealloc(frame.hpa().0 as *mut u8, layout(bytes)) }
    }

    fn entries(&self, table: Hpa) -> NonNull<Pte> {
        self.call(Call::Entries);
        NonNull::new(table.0 as *mut Pte).unwrap()
    }

    fn publish(&self) {}

    fn invalidate(&self, _: &Invalidation) {
        self.invalidations.fetch_add(1, SeqCst);
        self.call(Call::Invalidate);
    }

    fn break_before_make(&self) -> BreakBeforeMake {
        self.bbm
    }

    fn readers(&self) -> &Readers {
        &self.readers
    }

    fn maintain(&self, memory: Hpa, _: u64, _: Maintenance) {
        self.call(Call::Maintain(memory.0));
    }
}

const PAGE: PageSize = PageSize::SIZE_4K;
const BLOCK: PageSize = PageSize::SIZE_2M;
const MIB2: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
const MEMORY: u64 = 1 << 32;

type Guest = Tables<'static, Arm64K4, HookedPlatform>;

fn guest(platform: &'static HookedPlatform) -> &'static Guest {
    Box::leak(Box::new(Guest::new(Arm64K4::default(), Vmid(1), 40, platform).unwrap()))
}

fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

pub(crate) fn with_cache<F: Format, P: Platform, R>(
    platform: &P,
    pages: usize,
    run: impl FnOnce(&mut TableCache<'_, F, P>) -> R,
) -> R {
    let mut storage = [const { None }; 16];
    let mut cache = TableCache::new(platform, &mut storage);
    cache.fill(pages).unwrap();
    run(&mut cache)
}

/// Maps to the memory at `MEMORY + start`.
fn map(guest: &Guest, start: u64, size: u64, leaves: PageSize, memory: u64) -> u64 {
    let mut reader = Reader::register(guest.platform()).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    with_cache(guest.platform(), 8, |cache| {
        guard.map(range(start, size), Hpa(memory + start), Attributes::RAM, leaves, cache).unwrap()
    })
}

/// Unmaps, completes, and returns how many bytes were mapped.
fn unmap(guest: &Guest, start: u64, size: u64) -> u64 {
    let mut reader = Reader::register(guest.platform()).unwrap();
    let mut places = [const { UnmapEntry::EMPTY }; 16];
    let mut batch = UnmapBatch::new(guest, &mut places);
    guest.enter(&mut reader).unwrap().unmap(range(start, size), &mut batch).unwrap();
    batch.complete().map(|leaves| leaves.bytes).sum()
}

fn hpa(guest: &Guest, gpa: u64) -> Option<u64> {
    let mut reader = Reader::register(guest.platform()).unwrap();
    let found = guest.enter(&mut reader).unwrap().translate(Gpa(gpa)).unwrap();
    found.map(|found| found.hpa.0)
}

fn wait(flag: &AtomicBool) {
    while !flag.load(SeqCst) {
        thread::yield_now();
    }
}

/// Runs `step` once, when `at` becomes true.
fn once(at: impl Fn(Call) -> bool, step: impl Fn()) -> impl Fn(Call) {
    let first = AtomicBool::new(true);
    move |call| {
        if at(call) && first.swap(false, SeqCst) {
            step();
        }
    }
}

/// Makes two tables without a leaf, and their parents.
fn empty_tables(guest: &Guest) {
    let mut reader = Reader::register(guest.platform()).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    with_cache(guest.platform(), 8, |cache| {
        for table in [0, MIB2] {
            let _ = guard.reserve(Gpa(table), PAGE, cache).unwrap();
        }
    });
}

#[test]
fn a_restarted_map_maps_the_rest_and_no_page_unmapped_before() {
    for pages in [1, 8] {
        let platform = HookedPlatform::new(BreakBeforeMake::Never);
        let guest = guest(platform);
        empty_tables(guest);
        let taken = Arc::new(AtomicUsize::new(0));
        let took = taken.clone();
        platform.at_each_call(once(
            |call| call == Call::Maintain(MEMORY + MIB2),
            move || took.store(unmap(guest, 0, GIB) as usize, SeqCst),
        ));
        let mut reader = Reader::register(platform).unwrap();
        let mut guard = guest.enter(&mut reader).unwrap();
        let result = with_cache(platform, pages, |cache| {
            guard.map(range(0, 2 * MIB2), Hpa(MEMORY), Attributes::RAM, PAGE, cache)
        });
        match result {
            Ok(_) => assert_eq!(pages, 8),
            Err(stopped) => assert_eq!((stopped.reason, pages), (MapError::CacheEmpty, 1)),
        }
        assert_eq!(taken.load(SeqCst) as u64, MIB2, "the first table was full");
        assert_eq!(hpa(guest, 0), None, "what was handed out came back");
        assert_eq!(hpa(guest, MIB2).is_some(), pages == 8);
    }
}

#[test]
fn tables_that_were_built_for_nothing_go_back_to_the_cache() {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let guest = guest(platform);
    // Another thread is faster: two levels of tables are there when the first would link its own.
    platform.at_each_call(once(
        |call| call == Call::Maintain(MEMORY),
        move || assert_eq!(map(guest, 0, 4096, PAGE, MEMORY), 4096),
    ));
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    with_cache(platform, 8, |cache| {
        let pages = range(0, 4 * 4096);
        let done = guard.map(pages, Hpa(MEMORY), Attributes::RAM, PAGE, cache);
        assert_eq!((done, cache.len()), (Ok(3 * 4096), 8));
    });
}

#[test]
fn a_restarted_map_maps_no_page_unmapped_meanwhile_twice() {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let guest = guest(platform);
    empty_tables(guest);
    // The table is unlinked while the map is in it, on its second page.
    platform.at_each_call(once(
        |call| call == Call::Maintain(MEMORY + 3 * 4096),
        move || assert_eq!(unmap(guest, 0, GIB), 4096),
    ));
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    let result = with_cache(platform, 8, |cache| {
        let pages = range(2 * 4096, 4 * 4096);
        guard.map(pages, Hpa(MEMORY + 2 * 4096), Attributes::RAM, PAGE, cache)
    });
    drop(guard);
    assert_eq!(result, Ok(4 * 4096));
    let there = [0, 1, 2, 3, 4, 5, 6].map(|page| hpa(guest, page * 4096).is_some());
    assert_eq!(there, [false, false, false, true, true, true, false]);
}

#[test]
fn a_completer_does_not_rely_on_an_unfinished_invalidation() {
    let platform = HookedPlatform::new(BreakBeforeMake::Always);
    let guest = guest(platform);
    map(guest, 0, 4096, PAGE, MEMORY);
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    guard.write_protect(range(0, 4096)).unwrap();
    drop(guest.shootdown(&mut guard).unwrap());
    drop(guard);
    assert_eq!(platform.invalidations(), 0, "the shootdown was dropped, and is owed");
    let covered = Arc::new(AtomicUsize::new(0));
    let seen = covered.clone();
    // While the first thread that completes is inside its invalidation, another completes.
    platform.at_each_call(once(
        |call| call == Call::Invalidate,
        move || {
            let mut reader = Reader::register(platform).unwrap();
            guest.enter(&mut reader).unwrap().invalidate();
            seen.store(platform.invalidations(), SeqCst);
        },
    ));
    guest.enter(&mut reader).unwrap().invalidate();
    assert_eq!(covered.load(SeqCst), 2, "it invalidated by itself");
    guest.enter(&mut reader).unwrap().invalidate();
    assert_eq!(platform.invalidations(), 2, "nothing is owed any more");
}

#[test]
fn an_entry_emptied_by_a_failed_retirement_looks_different() {
    let platform = HookedPlatform::new(BreakBeforeMake::Always);
    let guest = guest(platform);
    map(guest, 0, MIB2, BLOCK, MEMORY);
    map(guest, 2 * MIB2, 4096, PAGE, MEMORY);
    let [emptied, retire, stale, fill]: [&'static AtomicBool; 4] =
        std::array::from_fn(|_| &*Box::leak(Box::new(AtomicBool::new(false))));
    thread::scope(|scope| {
        // Unmaps everything; other threads come in once it has emptied the block.
        let first = scope.spawn(move || {
            platform.at_each_call(once(
                move |call| call == Call::Entries && hpa_of_block(guest).is_none(),
                move || {
                    emptied.store(true, SeqCst);
                    wait(retire);
                },
            ));
            let mut reader = Reader::register(platform).unwrap();
            let mut places = [const { UnmapEntry::EMPTY }; 16];
            let mut batch = UnmapBatch::new(guest, &mut places);
            let _ = guest.enter(&mut reader).unwrap().unmap(range(0, GIB), &mut batch);
            // It is never completed: its invalidation is still to come.
            std::mem::forget(batch);
        });
        wait(emptied);
        // This thread is to fill the entry. It invalidates first, and then is slow to go on.
        platform.at_each_call(once(
            |call| call == Call::Invalidate,
            move || {
                stale.store(true, SeqCst);
                wait(fill);
            },
        ));
        let second = scope.spawn(move || map(guest, 0, MIB2, BLOCK, 2 * MEMORY));
        wait(stale);
        // Meanwhile the entry is filled and emptied again; a neighbour keeps the table.
        map(guest, 0, MIB2, BLOCK, 3 * MEMORY);
        let mut reader = Reader::register(platform).unwrap();
        let mut places = [const { UnmapEntry::EMPTY }; 16];
        let mut batch = UnmapBatch::new(guest, &mut places);
        guest.enter(&mut reader).unwrap().unmap(range(0, MIB2), &mut batch).unwrap();
        map(guest, MIB2, MIB2, BLOCK, 3 * MEMORY);
        let before = platform.invalidations();
        retire.store(true, SeqCst);
        first.join().unwrap();
        fill.store(true, SeqCst);
        second.join().unwrap();
        assert_eq!(hpa(guest, 0), Some(2 * MEMORY));
        assert!(platform.invalidations() > before, "a CPU may hold the block in between");
    });
}

/// Returns the value of the block's entry, without a call of the platform, which would call the
/// hook.
fn hpa_of_block(guest: &Guest) -> Option<u64> {
    let root = guest.root().0 as *const Pte;
    // SAFETY: the root, the first table and its first entry exist for as long as the guest.
    unsafe {
        let table = Arm64K4::table_address((*root).load()).0 as *const Pte;
        let raw = (*table).load();
        (raw & 1 == 1).then_some(raw)
    }
}

#[test]
fn fresh_ageing_invalidates_regardless_of_what_the_bitmap_held() {
    let platform = HookedPlatform::new(BreakBeforeMake::Always);
    let guest = guest(platform);
    map(guest, 0, 4096, PAGE, MEMORY);
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    let (mut young, mut unanswered) = ([1], [0]);
    let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
    let how = AgeOptions { flush_tlb: true, ..AgeOptions::LEAVES };
    let aged = guard.age(range(0, 4096), &mut ages, how).unwrap();
    assert_eq!((aged.young, platform.invalidations()), (0, 1));
}

#[test]
fn a_block_that_is_aged_in_parts_is_young_in_each() {
    let platform = HookedPlatform::new(BreakBeforeMake::Always);
    let guest = guest(platform);
    map(guest, 0, MIB2, BLOCK, MEMORY);
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    let mut age = |part: GpaRange| {
        let (mut young, mut unanswered) = ([0; 8], [0; 8]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        guard.age(part, &mut ages, AgeOptions::LEAVES).unwrap().young
    };
    assert_eq!((age(range(0, 4096)), age(range(4096, MIB2 - 4096))), (1, 511));
    assert_eq!((age(range(0, MIB2)), age(range(0, MIB2))), (512, 0));
}

#[test]
fn one_place_holds_as_many_leaves_as_continue_each_other() {
    let platform = HookedPlatform::new(BreakBeforeMake::Always);
    let guest = guest(platform);
    map(guest, 0, 8192, PAGE, MEMORY);
    map(guest, 8192, 4096, PAGE, 2 * MEMORY);
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    let mut places = [const { UnmapEntry::EMPTY }; 1];
    let mut batch = guard.unmap_batch(&mut places);
    let full = Interruption { at: Gpa(8192), reason: UnmapError::Full };
    assert_eq!(guard.unmap(range(0, 12288), &mut batch), Err(full));
    assert_eq!(batch.complete().map(|leaves| leaves.bytes).collect::<Vec<_>>(), [8192]);
}

#[test]
fn a_reservation_does_not_reach_past_the_end_of_a_small_guest() {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let small = Tables::new(Ept1G::default(), Vmid(1), 29, platform).unwrap();
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = small.enter(&mut reader).unwrap();
    with_cache(platform, 8, |cache| {
        let reserved = guard.reserve(Gpa(0), PageSize::SIZE_1G, cache).unwrap();
        assert_eq!(reserved.range(), range(0, MIB2));
    });
}

#[test]
fn pages_past_the_end_of_the_address_space_are_refused() {
    let platform = HookedPlatform::new(BreakBeforeMake::Never);
    let guest = guest(platform);
    let mut reader = Reader::register(platform).unwrap();
    let mut guard = guest.enter(&mut reader).unwrap();
    for start in [Gpa(u64::MAX), Gpa(!4095), Gpa(1 << 63)] {
        for bits in [[1], [1 << 63], [u64::MAX]] {
            let pages = Pages { start, bits: &bits };
            let reason = guard.write_protect_pages(&pages).unwrap_err().reason;
            assert!(matches!(reason, ChangeError::Range(_)), "{reason:?}");
        }
    }
}

#[test]
fn a_table_that_is_linked_while_a_map_builds_its_own_stays() {
    for number in 0.. {
        let platform = HookedPlatform::new(BreakBeforeMake::Never);
        let guest = Tables::new(Ept1G::default(), Vmid(1), 40, platform).unwrap();
        let guest: &'static Tables<'static, Ept1G, HookedPlatform> = Box::leak(Box::new(guest));
        let map = move |gpa: u64| {
            let mut reader = Reader::register(platform).unwrap();
            let mut guard = guest.enter(&mut reader).unwrap();
            with_cache(platform, 8, |cache| {
                guard.map(range(gpa, 4096), Hpa(gpa), Attributes::RAM, PAGE, cache)
            })
        };
        map(0).unwrap();
        // At some call of the first map, another thread maps the next page, under the same tables.
        let calls = Arc::new(AtomicUsize::new(0));
        let called = calls.clone();
        platform.at_each_call(move |_| {
            if called.fetch_add(1, SeqCst) == number {
                assert_eq!(map(GIB + 4096), Ok(4096));
            }
        });
        assert_eq!(map(GIB), Ok(4096));
        platform.at_each_call(|_| ());
        // The calls of a map by itself.
        if calls.load(SeqCst) <= number {
            assert!(number > 6, "the map made {number} calls");
            break;
        }
        let mut reader = Reader::register(platform).unwrap();
        let guard = guest.enter(&mut reader).unwrap();
        for gpa in [GIB, GIB + 4096] {
            let found = guard.translate(Gpa(gpa)).unwrap();
            assert_eq!(found.map(|found| found.hpa), Some(Hpa(gpa)), "call {number}");
        }
    }
}
