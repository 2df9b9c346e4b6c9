//! Every documented refusal of every public call: what it says, that nothing was done, and that an
//! operation that ran out of table pages goes on where it stopped.

#![cfg(not(loom))]

mod common;

use common::TestPlatform;
use common::hardware::Regime;
use common::world::{Mapping, World};
use slat::format::arm64::{Arm64, Arm64K4, Arm64K16, Arm64K64};
use slat::{
    Attributes, Batched, Bounded, BreakBeforeMake, ChangeError, Done, EveryEntry, Execute, Format,
    Gpa, GpaRange, Hpa, MapError, NewError, OutOfFrames, PageSize, RangeError, SplitError,
    SplitWalk, Stopped, TableCache, Tables, Vmid,
};
use std::fmt::Debug;
use std::sync::atomic::Ordering;

const K: u64 = 1 << 10;
const M: u64 = 1 << 20;
const G: u64 = 1 << 30;
const RAM: Attributes = Attributes::RAM;
const SIZE_512G: PageSize = PageSize::from_bytes(512 * G).unwrap();
const BBM: [BreakBeforeMake; 3] =
    [BreakBeforeMake::Always, BreakBeforeMake::ConflictHandled, BreakBeforeMake::Never];

fn range(start: u64, size: u64) -> GpaRange {
    GpaRange::new(Gpa(start), size).unwrap()
}

fn storage(frames: usize) -> Vec<Option<slat::Frame>> {
    std::iter::repeat_with(|| None).take(frames).collect()
}

/// Tables of 40 bits with a cache of `frames`; afterwards no frame is missing.
fn with_tables<R>(
    frames: usize,
    body: impl FnOnce(&Tables<Arm64K4, TestPlatform>, &mut TableCache<Arm64K4, TestPlatform>) -> R,
) -> R {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).unwrap();
    let mut storage = storage(frames);
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(frames).unwrap();
    let result = body(&tables, &mut cache);
    drop(cache);
    tables.destroy();
    assert_eq!(platform.live(), 0);
    result
}

/// Refused with nothing done; returns what it says.
#[track_caller]
fn refused<E: Debug + PartialEq + std::fmt::Display>(
    result: Result<Done, Stopped<E>>,
    at: u64,
    why: E,
) -> String {
    let stopped = result.expect_err("accepted");
    assert_eq!(stopped.why, why);
    assert_eq!((stopped.at, stopped.done.bytes), (Gpa(at), 0));
    assert_eq!(stopped.done.shootdown.owed(), None);
    format!("{stopped}")
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    }
}

#[test]
fn a_range_is_refused_if_it_is_empty_or_wraps_and_says_where() {
    let empty = GpaRange::new(Gpa(0x5000), 0).unwrap_err();
    assert_eq!(empty, RangeError::Empty { start: Gpa(0x5000) });
    says(&empty.to_string(), &["0x5000", "at least one page"]);
    let wraps = GpaRange::new(Gpa(u64::MAX), 0x2000).unwrap_err();
    assert_eq!(wraps, RangeError::Overflow { start: Gpa(u64::MAX), size: 0x2000 });
    says(&wraps.to_string(), &["0x2000", "0xffffffffffffffff"]);
}

#[test]
fn every_operation_refuses_the_same_ranges() {
    with_tables(4, |tables, cache| {
        let hostile = [
            (range(0x1001, 0x1000), "0x1001..0x2001", "4k"),
            (range(0x1000, 0x800), "0x1000..0x1800", "4k"),
            (range((1 << 40) - 0x1000, 0x2000), "40-bit", "0x10000000000"),
            (range(1 << 63, 0x1000), "40-bit", "0x8000000000001000"),
            (range(u64::MAX - 0xfff, 0xfff), "0xfffffffffffff000..0xffffffffffffffff", "4k"),
        ];
        for (bad, what, right) in hostile {
            let (start, end) = (bad.start().0, bad.end());
            let why = if (start | end.0) & 0xfff != 0 {
                RangeError::Unaligned { range: bad, page: 4 * K }
            } else {
                RangeError::BeyondAddressSize { end, bits: 40 }
            };
            let result = tables.map(bad, Hpa(0), RAM, PageSize::SIZE_4K, cache);
            says(&refused(result, start, MapError::Range(why)), &[what, right]);
            let result = tables.unmap(bad, |_| panic!("nothing is mapped"));
            says(&refused(result, start, ChangeError::Range(why)), &[what, right]);
            let result = tables.write_protect(bad);
            says(&refused(result, start, ChangeError::Range(why)), &[what, right]);
            for access in [slat::Access::Read, slat::Access::Write] {
                let result = tables.relax(bad, access);
                says(&refused(result, start, ChangeError::Range(why)), &[what, right]);
            }
            let result = tables.split(bad, PageSize::SIZE_4K, cache);
            says(&refused(result, start, SplitError::Range(why)), &[what, right]);
            let result = tables.split_by::<EveryEntry>(bad, PageSize::SIZE_4K, cache);
            says(&refused(result, start, SplitError::Range(why)), &[what, right]);
        }
        assert_eq!(cache.len(), 4);
    });
}

#[test]
fn both_ends_of_both_address_spaces_can_be_mapped_split_protected_and_unmapped() {
    with_tables(16, |tables, cache| {
        for (gpa, hpa) in [(0, (1 << 48) - 2 * M), ((1 << 40) - 2 * M, 0)] {
            let block = range(gpa, 2 * M);
            let done = tables.map(block, Hpa(hpa), RAM, PageSize::SIZE_1G, cache).unwrap();
            assert_eq!(done.bytes, 2 * M);
            // Beyond the space nothing is mapped, whatever the lower bits would find.
            for beyond in [gpa + (1 << 40), gpa + (1 << 63), u64::MAX] {
                assert_eq!(tables.translate(Gpa(beyond)), Ok(None));
                assert_eq!(tables.descriptor(Gpa(beyond)), None);
            }
            for at in [gpa, gpa + 2 * M - 1] {
                let found = tables.translate(Gpa(at)).unwrap().unwrap();
                assert_eq!((found.hpa, found.size), (Hpa(hpa + (at - gpa)), PageSize::SIZE_2M));
            }
            for end in [range(gpa, 4 * K), range(gpa + 2 * M - 4 * K, 4 * K)] {
                let _ = tables.split(end, PageSize::SIZE_4K, cache).unwrap();
                assert_eq!(tables.write_protect(end).unwrap().bytes, 4 * K);
                assert_eq!(tables.unmap(end, |_| ()).unwrap().bytes, 4 * K);
            }
            assert_eq!(tables.unmap(block, |_| ()).unwrap().bytes, 2 * M - 8 * K);
        }
    });
}

#[test]
fn a_host_address_is_refused_if_unaligned_or_beyond_the_output_size() {
    with_tables(4, |tables, cache| {
        let at = range(0x2000, 0x2000);
        for hpa in [1, 0x800, (1 << 48) - 0x1000, 1 << 48, !0xfff, u64::MAX] {
            let why = MapError::HostAddress { hpa: Hpa(hpa), page: PageSize::SIZE_4K, bits: 48 };
            let result = tables.map(at, Hpa(hpa), RAM, PageSize::SIZE_4K, cache);
            says(&refused(result, 0x2000, why), &[&format!("{hpa:#x}"), "4k", "48 bits"]);
        }
        let last = tables.map(at, Hpa((1 << 48) - 0x2000), RAM, PageSize::SIZE_4K, cache).unwrap();
        assert_eq!(last.bytes, 0x2000);
    });
}

#[test]
fn a_leaf_size_that_the_format_lacks_is_refused_with_those_that_it_has() {
    with_tables(4, |tables, cache| {
        let (smallest, largest) = (PageSize::SIZE_4K, PageSize::SIZE_1G);
        for size in
            [PageSize::from_bytes(1).unwrap(), PageSize::from_bytes(16 * K).unwrap(), SIZE_512G]
        {
            let why = MapError::LeafSize { size, smallest, largest };
            let result = tables.map(range(0, G), Hpa(0), RAM, size, cache);
            let text = refused(result, 0, why);
            says(&text, &[&size.to_string(), "4k", "1g"]);
            let result = tables.split(range(0, G), size, cache);
            let text = refused(result, 0, SplitError::LeafSize { size, smallest, largest });
            says(&text, &[&size.to_string(), "4k", "1g"]);
        }
    });
    assert_eq!(Arm64K16::level_of(PageSize::from_bytes(64 * G).unwrap()), None);
    assert_eq!(Arm64K64::level_of(PageSize::from_bytes(4096 * G).unwrap()), None);
}

#[test]
fn attributes_that_the_cpu_lacks_are_refused_with_what_would_do() {
    let format = Arm64K4 { split_execute: false, ..Default::default() };
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = Tables::new(format, Vmid(1), 40, &platform).unwrap();
    let mut storage = storage(2);
    let mut cache = TableCache::new(&platform, &mut storage);
    let mut text = |attributes| {
        let result = tables.map(range(0, 4 * K), Hpa(0), attributes, PageSize::SIZE_4K, &mut cache);
        let Err(Stopped { why: why @ MapError::Attributes(_), done, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(done, Done::nothing(Vmid(1)));
        why.to_string()
    };
    says(
        &text(Attributes { dirty: false, ..RAM }),
        &["map it dirty", "without the right to write"],
    );
    for execute in [Execute::User, Execute::Kernel] {
        says(&text(Attributes { execute, ..RAM }), &["to all or to nobody"]);
    }
    drop(cache);
    tables.destroy();
}

#[test]
fn a_cache_of_another_platform_is_refused_before_its_frames_are_touched() {
    let other = TestPlatform::new(BreakBeforeMake::Always);
    with_tables(4, |tables, own| {
        let done = tables.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M, own).unwrap();
        assert_eq!(done.bytes, 2 * M);
        let mut storage = storage(4);
        let mut foreign = TableCache::new(&other, &mut storage);
        foreign.fill(4).unwrap();
        let result = tables.map(range(G, 4 * K), Hpa(0), RAM, PageSize::SIZE_4K, &mut foreign);
        says(&refused(result, G, MapError::ForeignCache), &["another platform"]);
        let result = tables.split(range(0, 4 * K), PageSize::SIZE_4K, &mut foreign);
        says(&refused(result, 0, SplitError::ForeignCache), &["another platform"]);
        // Refused even where there is nothing to split.
        let result = tables.split(range(0, 4 * K), PageSize::SIZE_1G, &mut foreign);
        says(&refused(result, 0, SplitError::ForeignCache), &["another platform"]);
        assert_eq!(foreign.len(), 4);
    });
    assert_eq!(other.live(), 0);
}

#[test]
fn what_is_mapped_otherwise_is_refused_with_its_size_and_address() {
    let dirty_off = Arm64K4::default();
    let dirty_on = Arm64K4 { hardware_dirty: true, ..dirty_off };
    for format in [dirty_off, dirty_on] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = Tables::new(format, Vmid(1), 40, &platform).unwrap();
        let mut storage = storage(8);
        let mut cache = TableCache::new(&platform, &mut storage);
        cache.fill(8).unwrap();
        let mut map = |at, hpa, attributes| {
            tables.map(at, Hpa(hpa), attributes, PageSize::SIZE_2M, &mut cache)
        };
        assert_eq!(map(range(2 * M, 2 * M), 6 * M, RAM).unwrap().bytes, 2 * M);
        let why = MapError::Occupied { size: PageSize::SIZE_2M, hpa: Hpa(6 * M) };
        // The pages before the block stay unmapped: it was looked for first.
        let result = map(range(2 * M - 8 * K, 4 * M), 0, RAM);
        says(&refused(result, 2 * M, why), &["2m", "0x600000", "unmap it first", "0x200000"]);
        assert_eq!(tables.translate(Gpa(2 * M - 4 * K)), Ok(None));
        let inside = range(2 * M + 4 * K, 4 * K);
        let read_only = Attributes { write: false, ..RAM };
        let others = [
            read_only,
            Attributes { write: false, dirty: false, ..RAM },
            Attributes { execute: Execute::None, ..RAM },
            Attributes { software: true, ..RAM },
            Attributes { read: false, ..RAM },
            Attributes { memory: slat::Memory::Device, ..RAM },
        ];
        for other in others {
            refused(map(inside, 6 * M + 4 * K, other), 2 * M + 4 * K, why);
        }
        let unused = Attributes { accessed: false, ..RAM };
        for same in [RAM, unused] {
            let done = map(inside, 6 * M + 4 * K, same).unwrap();
            assert_eq!((done.bytes, done.counts.slots_written), (0, 0), "left as it is");
        }
        // And the other way round: the right to write is not given by the way.
        assert_eq!(map(range(8 * M, 4 * K), 0, read_only).unwrap().bytes, 4 * K);
        let why = MapError::Occupied { size: PageSize::SIZE_4K, hpa: Hpa(0) };
        refused(map(range(8 * M, 4 * K), 0, RAM), 8 * M, why);
        drop(cache);
        tables.destroy();
    }
}

#[test]
fn a_range_that_cuts_a_block_is_refused_with_the_size_before_anything_is_done() {
    with_tables(8, |tables, cache| {
        let done = tables.map(range(0, 4 * M), Hpa(0), RAM, PageSize::SIZE_2M, cache).unwrap();
        assert_eq!(done.bytes, 4 * M);
        for cuts in [range(0, 2 * M + 4 * K), range(4 * K, 4 * M - 4 * K), range(4 * K, 4 * K)] {
            let at = cuts.start().0;
            let size = PageSize::SIZE_2M;
            let result = tables.unmap(cuts, |_| panic!("removed"));
            let text = refused(result, at, ChangeError::CutsBlock { size });
            says(&text, &["2m", "split it first, or cover it"]);
            let result = tables.write_protect(cuts);
            let text = refused(result, at, ChangeError::CutsBlock { size });
            says(&text, &["2m", "split it first, or cover it"]);
            let result = tables.relax(cuts, slat::Access::Write);
            let text = refused(result, at, ChangeError::CutsBlock { size });
            says(&text, &["2m", "split it first, or cover it"]);
            assert!(tables.translate(Gpa(0)).unwrap().unwrap().attributes.write);
        }
        let done = tables.map(range(G, G), Hpa(0), RAM, PageSize::SIZE_1G, cache).unwrap();
        assert_eq!(done.bytes, G);
        let why = ChangeError::CutsBlock { size: PageSize::SIZE_1G };
        says(&refused(tables.unmap(range(0, G + 2 * M), |_| ()), 0, why), &["1g"]);
    });
}

#[test]
fn address_widths_that_the_format_lacks_are_refused_with_the_allowed_ones() {
    fn refuses<const SHIFT: u32>(min: u32) {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        for bits in [0, 1, min - 1, 49, 64, u32::MAX] {
            let result = Tables::new(Arm64::<SHIFT>::default(), Vmid(1), bits, &platform);
            let Err(error @ NewError::Geometry(what)) = result else { panic!("{bits} accepted") };
            assert_eq!((what.address_bits, what.min, what.max), (bits, min, 48));
            let name = Arm64::<SHIFT>::NAME;
            says(&error.to_string(), &[&format!("{bits}-bit"), &format!("{min} to 48"), name]);
        }
        assert_eq!(platform.live(), 0);
    }
    refuses::<12>(25);
    refuses::<14>(26);
    refuses::<16>(30);
}

#[test]
fn a_platform_without_frames_is_said_with_the_bytes_and_the_pages_that_lack() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    platform.limit(0);
    let error = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).err().unwrap();
    assert_eq!(error, NewError::OutOfFrames { bytes: 8192 });
    says(&error.to_string(), &["8192"]);
    platform.limit(3);
    let mut storage = storage(5);
    let mut cache = TableCache::<Arm64K4, _>::new(&platform, &mut storage);
    let error = cache.fill(5).unwrap_err();
    assert_eq!(error, OutOfFrames { wanted: 5, at_hand: 3 });
    says(&error.to_string(), &["3 of 5"]);
    assert_eq!((cache.len(), cache.is_empty(), platform.live()), (3, false, 3));
    platform.limit(9);
    cache.fill(usize::MAX).unwrap();
    assert_eq!((cache.len(), platform.live()), (5, 5), "as many as the storage holds");
    drop(cache);
    assert_eq!(platform.live(), 0);
    assert!(storage.iter().all(Option::is_none));
}

/// Maps with every number of frames from none to enough; each time what lacks is fetched one by one.
#[test]
fn a_map_that_runs_dry_at_any_step_stops_at_an_address_and_goes_on_to_the_same_end() {
    // Pages at both ends, 2m and 1g blocks between: four tables.
    let at = range(G - 4 * M - 8 * K, 2 * G + 12 * M + 16 * K);
    let what = Mapping { hpa: 8 * G - 4 * M - 8 * K, attributes: RAM, largest: PageSize::SIZE_1G };
    let map_all = |frames: usize| {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let mut world = World::new(&platform, BreakBeforeMake::Always, Arm64K4::default(), 40);
        let mut stopped = world.map(at, what, frames);
        let mut stops = 0;
        while let Some(from) = stopped {
            let rest = range(from, at.end().0 - from);
            let hpa = what.hpa + (from - at.start().0);
            stopped = world.map(rest, Mapping { hpa, ..what }, 1);
            assert!(stopped.is_none_or(|next| next >= from), "back from {from:#x}");
            stops += 1;
            // A single frame may become a table with nothing in it yet.
            assert!(stops <= 4, "no progress at {from:#x}");
        }
        let runs = world.tree().runs;
        world.destroy();
        (runs, stops)
    };
    let (expected, stops) = map_all(16);
    assert_eq!((expected.len(), stops), (5, 0));
    for frames in 0..4 {
        let (runs, stops) = map_all(frames);
        assert!(stops > 0, "{frames} are enough");
        assert_eq!(runs, expected, "with {frames} frames at first");
    }
}

fn splits_dry<W: SplitWalk>(bbm: BreakBeforeMake, every: usize) {
    let whole = range(G, G);
    let odd = Attributes { accessed: false, dirty: false, software: true, ..RAM };
    let what = Mapping { hpa: 4 * G, attributes: odd, largest: PageSize::SIZE_1G };
    let format = Arm64K4 { hardware_dirty: true, ..Default::default() };
    // Steps are alike but for the first and the last few.
    for frames in [0, 1, 2, 3, 512, 513].into_iter().chain((every..512).step_by(every)) {
        let platform = TestPlatform::new(bbm);
        let mut world = World::new(&platform, bbm, format, 36);
        assert_eq!(world.map(whole, what, 1), None);
        let stopped = world.split::<W>(whole, PageSize::SIZE_4K, frames);
        // One frame replaces the block, each further one splits 2m.
        let at = match frames {
            0 => Some(G),
            513 => None,
            _ => Some(G + (frames as u64 - 1) * 2 * M),
        };
        assert_eq!(stopped, at, "{frames} frames");
        world.access(G + 2 * M, true);
        world.access(G + 7 * M, false);
        if let Some(at) = at {
            assert_eq!(
                world.split::<W>(range(at, 2 * G - at), PageSize::SIZE_4K, 513 - frames),
                None
            );
        }
        assert!(world.tree().runs.iter().all(|run| run.size == 4 * K));
        world.destroy();
    }
}

#[test]
fn a_split_that_runs_dry_at_any_step_stops_at_an_address_and_goes_on_to_the_same_end() {
    for bbm in BBM {
        splits_dry::<Batched>(bbm, 171);
        splits_dry::<Bounded>(bbm, 500);
        splits_dry::<EveryEntry>(bbm, 500);
    }
}

#[test]
fn a_split_that_loses_a_block_and_then_waits_in_vain_stops_at_that_block() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).unwrap();
    let regime = Regime::of(&tables, false);
    let mut storage = storage(4);
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(3).unwrap();
    let all = range(0, 4 * M);
    let done = tables.map(all, Hpa(0), RAM, PageSize::SIZE_2M, &mut cache).unwrap();
    assert_eq!((done.bytes, cache.len()), (4 * M, 2));
    drop(cache);
    let mut cache = TableCache::new(&platform, &mut storage);
    cache.fill(1).unwrap();
    // While the first block's table is built, other software freezes that block. The second
    // block finds the cache dry; the walk goes back to the first, and waits.
    platform.meanwhile(Some(Box::new(move |platform| {
        regime.slot(platform, 0).0.store(0b10, Ordering::SeqCst);
    })));
    let stopped = tables.split(all, PageSize::SIZE_4K, &mut cache).unwrap_err();
    platform.meanwhile(None);
    assert_eq!((stopped.at, stopped.why), (Gpa(0), SplitError::Contended));
    assert_eq!((stopped.done.bytes, cache.len()), (0, 1), "the table went back to the cache");
    says(&stopped.to_string(), &["0x0", "changed by somebody else"]);
    // Everything else says so, too, and touches nothing.
    let block = range(0, 2 * M);
    let contended = tables.translate(Gpa(0x123)).unwrap_err();
    says(&contended.to_string(), &["0x123", "try again"]);
    refused(tables.unmap(block, |_| ()), 0, ChangeError::Contended);
    refused(tables.write_protect(block), 0, ChangeError::Contended);
    let result = tables.map(block, Hpa(0), RAM, PageSize::SIZE_2M, &mut cache);
    refused(result, 0, MapError::Contended);
    regime.slot(&platform, 0).0.store(0, Ordering::SeqCst);
    drop(cache);
    tables.destroy();
    assert_eq!(platform.live(), 0);
}
