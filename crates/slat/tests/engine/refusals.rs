//! Every documented refusal of every public call: its message, and that nothing was done.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
#[cfg(feature = "every-format")]
use crate::common::hardware::npt::{self, Npt};
#[cfg(feature = "every-format")]
use crate::common::hardware::power::Core;
use crate::common::hardware::riscv::Hart;
use crate::common::stage::{
    CLEAN, G, K, M, RAM, ept, host, idle, on_stage, range, refused, relax, says,
};
use crate::common::world::{CacheOf, GuardOf};
use crate::common::{TestPlatform, destroy, unmap};
use slat::format::arm64::{Arm64, Arm64K4};
use slat::format::ept::{Ept1G, Ept2M};
use slat::format::{AttributeError, GeometryError};
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, BreakBeforeMake, ChangeError, EveryEntry, Execute,
    Format, Gpa, GpaRange, Hpa, LeafSizeError, MapError, Memory, NewError, OutOfFrames, PageSize,
    Pages, RangeError, Reader, Software, SplitError, TableCache, Tables, TooManyReaders,
    UnmapEntry, UnmapError, Vmid, WrongPlatform, WrongTables,
};

const SIZE_512G: PageSize = PageSize::from_bytes(512 * G).unwrap();

/// Output addresses as wide as Arm's, so that one test serves both.
/// Every operation that changes the leaves of a range, except unmap.
fn changes<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    range: GpaRange,
    whole: bool,
    mut check: impl FnMut(Result<u64, slat::Interruption<ChangeError>>),
) {
    check(guard.write_protect(range));
    check(guard.execute_protect(range));
    check(guard.clean(range));
    check(relax(guard, range, Access::Write));
    check(relax(guard, range, Access::Execute));
    check(guard.harvest(range, &mut [0; 1024]));
    if whole {
        check(relax(guard, range, Access::Read));
        let (mut young, mut unanswered) = ([0; 1024], [0; 1024]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        check(guard.age(range, &mut ages, AgeOptions::LEAVES).map(|aged| aged.young));
        check(guard.clean_caches(range));
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

fn every_operation_refuses_the_same_ranges<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 4), |_, guard, cache| {
        let hostile = [
            (range(0x1001, 0x1000), "0x1001..0x2001", "4k"),
            (range(0x1000, 0x800), "0x1000..0x1800", "4k"),
            (range((1 << 40) - 0x1000, 0x2000), "40-bit", "0x10000000000"),
            (range(1 << 63, 0x1000), "40-bit", "0x8000000000001000"),
            (range(u64::MAX - 0xfff, 0xfff), "0xfffffffffffff000..0xffffffffffffffff", "4k"),
            (range(u64::MAX - 0x1fff, 0x1000), "40-bit", "0xfffffffffffff000"),
        ];
        for (bad, what, right) in hostile {
            let (start, end) = (bad.start().0, bad.end());
            let reason = if (start | end.0) & 0xfff != 0 {
                RangeError::Unaligned { range: bad, page: 4 * K }
            } else {
                RangeError::BeyondAddressSize { end, bits: 40 }
            };
            let result = guard.map(bad, Hpa(0), RAM, PageSize::SIZE_4K, cache);
            says(&refused(result, start, MapError::Range(reason)), &[what, right]);
            let mut storage = [const { UnmapEntry::EMPTY }; 2];
            let mut batch = guard.unmap_batch(&mut storage);
            let result = guard.unmap(bad, &mut batch);
            says(&refused(result, start, UnmapError::Range(reason)), &[what, right]);
            assert_eq!(batch.complete().next(), None);
            changes::<H>(guard, bad, true, |result| {
                says(&refused(result, start, ChangeError::Range(reason)), &[what, right]);
            });
            let result = guard.split(bad, PageSize::SIZE_4K, cache);
            says(&refused(result, start, SplitError::Range(reason)), &[what, right]);
            let result = guard.split_by::<EveryEntry>(bad, PageSize::SIZE_4K, cache, 1);
            says(&refused(result, start, SplitError::Range(reason)), &[what, right]);
            let result = guard.collapse(bad, PageSize::SIZE_2M);
            says(&refused(result, start, SplitError::Range(reason)), &[what, right]);
            let reason = ChangeError::Range(reason);
            assert_eq!(guard.leaves(bad).err(), Some(reason));
        }
        assert_eq!(cache.len(), 4);
        idle::<H>(guard);
    });
}
on!(every_operation_refuses_the_same_ranges; npt, ept_2m);

fn a_fault_outside_the_guest_is_refused<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 4), |_, guard, cache| {
        for (gpa, page) in [(1 << 40, 1 << 40), ((1 << 48) + 5, 1 << 48)] {
            let end = Gpa(page + 0x1000);
            let reason = MapError::Range(RangeError::BeyondAddressSize { end, bits: 40 });
            let result = guard.reserve(Gpa(gpa), PageSize::SIZE_4K, cache);
            says(&refused(result, gpa, reason), &["40-bit"]);
        }
        let reason = RangeError::Overflow { start: Gpa(!0xfff), size: 0x1000 };
        let result = guard.reserve(Gpa(u64::MAX), PageSize::SIZE_2M, cache);
        refused(result, u64::MAX, MapError::Range(reason));
        idle::<H>(guard);
    });
}
on!(a_fault_outside_the_guest_is_refused; npt);

fn an_unaligned_or_too_large_host_address_is_refused<H: Hardware>() {
    let format = H::usual();
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let at = range(0x2000, 0x2000);
        for hpa in [1, 0x800, (1 << 48) - 0x1000, 1 << 48, !0xfff, u64::MAX] {
            let reason = MapError::HostAddress { hpa: Hpa(hpa), page: PageSize::SIZE_4K, bits: 48 };
            let result = guard.map(at, Hpa(hpa), RAM, PageSize::SIZE_4K, cache);
            says(&refused(result, 0x2000, reason), &[&format!("{hpa:#x}"), "4k", "48 bits"]);
        }
        let last = guard.map(at, Hpa((1 << 48) - 0x2000), RAM, PageSize::SIZE_4K, cache);
        assert_eq!(last, Ok(0x2000));
        // A fault takes the size of its leaf from the reservation.
        for (hpa, page) in [
            (2 * M + 4 * K, PageSize::SIZE_2M),
            ((1 << 48) - 4 * K, PageSize::SIZE_4K),
            (1 << 48, PageSize::SIZE_4K),
            (u64::MAX, PageSize::SIZE_4K),
        ] {
            let reservation = guard.reserve(Gpa(4 * M), PageSize::SIZE_2M, cache).unwrap();
            assert_eq!(reservation.range(), range(4 * M, 2 * M));
            let reason = MapError::HostAddress { hpa: Hpa(hpa), page, bits: 48 };
            assert_eq!(reservation.commit(Hpa(hpa), RAM), Err(reason));
            assert_eq!(host::<H>(guard, 4 * M), None);
        }
        let reservation = guard.reserve(Gpa(4 * M), PageSize::SIZE_2M, cache).unwrap();
        assert_eq!(reservation.commit(Hpa((1 << 48) - 2 * M), RAM), Ok(Some(2 * M)));
    });
}
on!(an_unaligned_or_too_large_host_address_is_refused; npt, radix_4k);

fn a_leaf_size_the_format_lacks_is_refused_with_valid_ones<H: Hardware>(names: [&str; 2]) {
    let all = H::sizes();
    let of = |bytes| PageSize::from_bytes(bytes).unwrap();
    let (smallest, largest) = (of(all[all.len() - 1]), of(all[0]));
    on_stage::<H>((H::usual(), 40, 4), |_, guard, cache| {
        let others = [PageSize::from_bytes(1).unwrap(), of(2 * smallest.bytes()), SIZE_512G];
        let more = (all[0] < G).then_some(PageSize::SIZE_1G);
        for size in others.into_iter().chain(more).filter(|size| !all.contains(&size.bytes())) {
            let reason = LeafSizeError { size, smallest, largest };
            let words = [&size.to_string(), names[0], names[1]];
            let at = range(0, 512 * M);
            let result = guard.map(at, Hpa(0), RAM, size, cache);
            says(&refused(result, 0, MapError::LeafSize(reason)), &words);
            let result = guard.split(at, size, cache);
            says(&refused(result, 0, SplitError::LeafSize(reason)), &words);
            let result = guard.collapse(at, size);
            says(&refused(result, 0, SplitError::LeafSize(reason)), &words);
            let result = guard.reserve(Gpa(7), size, cache);
            says(&refused(result, 7, MapError::LeafSize(reason)), &words);
            assert_eq!(H::Format::level_of(size), Err(reason));
        }
        idle::<H>(guard);
    });
}
on!(
    a_leaf_size_the_format_lacks_is_refused_with_valid_ones:
    arm_4k(["4k", "1g"]), ept(["4k", "1g"]);
    arm_16k(["16k", "32m"]), arm_64k(["64k", "512m"]), npt(["4k", "1g"]), radix_64k(["64k", "1g"]),
    ept_2m(["4k", "2m"])
);

fn attributes_are_refused<H: Hardware>(
    format: H::Format,
    all: &[(Attributes, AttributeError, &[&str])],
) {
    on_stage::<H>((format, 40, 4), |_, guard, cache| {
        for &(attributes, error, words) in all {
            let reason = MapError::Attributes(error);
            let at = range(0, 4 * K);
            let result = guard.map(at, Hpa(0), attributes, PageSize::SIZE_4K, cache);
            says(&refused(result, 0, reason), words);
            let reservation = guard.reserve(Gpa(G), PageSize::SIZE_1G, cache);
            if let Ok(reservation) = reservation {
                assert_eq!(reservation.commit(Hpa(G), attributes), Err(reason));
            }
            assert_eq!((host::<H>(guard, 0), host::<H>(guard, G)), (None, None));
        }
    });
}

#[test]
fn attributes_the_cpu_lacks_are_refused_with_a_remedy() {
    let clean: &[&str] = &["map it dirty", "without the right to write"];
    let split: &[&str] = &["to all or to nobody"];
    let read: &[&str] = &["unmap what the guest may not read"];
    let (user, kernel) = (
        Attributes { execute: Execute::User, ..RAM },
        Attributes { execute: Execute::Kernel, ..RAM },
    );
    let unclean = (CLEAN, AttributeError::CleanNeedsHardwareDirty, clean);
    let unsplit = AttributeError::ExecuteNeedsSplitRights;
    let plain = Arm64K4 { split_execute: false, ..Default::default() };
    let arm = [unclean, (user, unsplit, split), (kernel, unsplit, split)];
    attributes_are_refused::<Arm<12>>(plain, &arm);
    let plain = Ept1G { accessed_dirty: false, ..ept() };
    let none = Attributes { read: false, ..RAM };
    let all = [unclean, arm[1], arm[2], (none, AttributeError::NeedsRead, read)];
    attributes_are_refused::<Ept<true>>(plain, &all);
    #[cfg(feature = "every-format")]
    attributes_are_refused::<Npt<true>>(npt::FORMAT, &all[1..]);
    let typed = Attributes { memory: slat::Memory::Device, ..RAM };
    let typed = (typed, AttributeError::MemoryType, &["normal memory", "physical address"][..]);
    let all = [arm[1], arm[2], (none, AttributeError::NeedsRead, read), typed];
    #[cfg(feature = "every-format")]
    attributes_are_refused::<Hart<true>>(slat::format::riscv::RiscV::default(), &all);
    let strict = Attributes { memory: slat::Memory::DeviceStrict, ..RAM };
    let (writes, strict) = (Attributes { write: true, ..none }, (strict, typed.1, typed.2));
    let all = [arm[1], arm[2], (writes, AttributeError::NeedsRead, read), strict];
    #[cfg(feature = "every-format")]
    attributes_are_refused::<Core<12, true>>(slat::format::power::Power { output_bits: 48 }, &all);
}

fn a_foreign_cache_is_refused_before_its_frames_are_touched<H: Hardware>() {
    let other = TestPlatform::new(BreakBeforeMake::Always);
    on_stage::<H>((H::usual(), 40, 4), |_, guard, own| {
        assert_eq!(guard.map(range(0, 2 * M), Hpa(0), RAM, PageSize::SIZE_2M, own), Ok(2 * M));
        let mut storage = [const { None }; 4];
        let mut foreign = CacheOf::<H>::new(&other, &mut storage);
        foreign.fill(4).unwrap();
        let result = guard.map(range(G, 4 * K), Hpa(0), RAM, PageSize::SIZE_4K, &mut foreign);
        says(&refused(result, G, MapError::ForeignCache), &["another platform"]);
        let result = guard.split(range(0, 4 * K), PageSize::SIZE_4K, &mut foreign);
        says(&refused(result, 0, SplitError::ForeignCache), &["another platform"]);
        // It is refused even if there is nothing to split.
        let result = guard.split(range(0, 4 * K), PageSize::SIZE_2M, &mut foreign);
        says(&refused(result, 0, SplitError::ForeignCache), &["another platform"]);
        let result = guard.reserve(Gpa(G + 1), PageSize::SIZE_4K, &mut foreign);
        says(&refused(result, G + 1, MapError::ForeignCache), &["another platform"]);
        assert_eq!(foreign.len(), 4);
    });
    assert_eq!(other.live(), 0);
}
on!(a_foreign_cache_is_refused_before_its_frames_are_touched; npt);

#[test]
fn members_removals_and_guards_of_others_are_refused() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let other = TestPlatform::new(BreakBeforeMake::Always);
    let tables = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).unwrap();
    let second = Tables::new(Arm64K4::default(), Vmid(2), 40, &platform).unwrap();
    let mut foreign = other.register();
    // The reclaimer of these tables would not see a reader of another platform.
    let error = tables.enter(&mut foreign).err();
    assert_eq!(error, Some(WrongPlatform));
    says(
        &WrongPlatform.to_string(),
        &["another platform", "register with the platform of these tables"],
    );
    let (mut one, mut two) = (platform.register(), platform.register());
    let (mut guard, beside) = (tables.enter(&mut one).unwrap(), second.enter(&mut two).unwrap());
    let mut storage = [const { UnmapEntry::EMPTY }; 1];
    let mut batch = beside.unmap_batch(&mut storage);
    let result = guard.unmap(range(0, 4 * K), &mut batch);
    says(&refused(result, 0, UnmapError::ForeignBatch), &["other tables"]);
    assert_eq!(batch.complete().next(), None);
    assert_eq!(second.shootdown(&mut guard).err(), Some(WrongTables));
    drop((batch, guard, beside));
    destroy(tables);
    destroy(second);
}

#[test]
fn a_platform_has_as_many_readers_as_slots() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let readers = [(); 4].map(|()| platform.register());
    let error = Reader::register(&platform).err().unwrap();
    assert_eq!(error, TooManyReaders { slots: 4 });
    says(&error.to_string(), &["all 4 reader slots", "drop a `Reader`"]);
    drop(readers);
    assert!(Reader::register(&platform).is_ok());
}

fn an_existing_different_leaf_is_refused_with_size_and_address<H: Hardware>(reads: bool) {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        let mut map =
            |at, hpa, attributes| guard.map(at, Hpa(hpa), attributes, PageSize::SIZE_2M, cache);
        assert_eq!(map(range(2 * M, 2 * M), 6 * M, RAM), Ok(2 * M));
        let reason = MapError::Occupied { size: PageSize::SIZE_2M, hpa: Hpa(6 * M) };
        // The pages before the block stay unmapped: the map looks for obstacles first.
        let result = map(range(2 * M - 8 * K, 4 * M), 0, RAM);
        let words = ["2m", "0x600000", "unmap it first", "0x200000"];
        says(&refused(result, 2 * M, reason), &words);
        let inside = range(2 * M + 4 * K, 4 * K);
        let read_only = Attributes { write: false, ..RAM };
        let others = [
            read_only,
            Attributes { write: false, dirty: false, ..RAM },
            Attributes { execute: Execute::None, ..RAM },
            Attributes { software: Software::A, ..RAM },
            Attributes { memory: Memory::Device, ..RAM },
        ];
        let unread = (!reads).then_some(Attributes { read: false, ..RAM });
        for other in others.into_iter().chain(unread) {
            refused(map(inside, 6 * M + 4 * K, other), 2 * M + 4 * K, reason);
        }
        let unused = Attributes { accessed: false, ..RAM };
        for same in [RAM, unused] {
            assert_eq!(map(inside, 6 * M + 4 * K, same), Ok(0), "left as it is");
        }
        // The other way round: a map does not add the right to write to a leaf.
        assert_eq!(map(range(8 * M, 4 * K), 0, read_only), Ok(4 * K));
        let reason = MapError::Occupied { size: PageSize::SIZE_4K, hpa: Hpa(0) };
        refused(map(range(8 * M, 4 * K), 0, RAM), 8 * M, reason);
        assert_eq!(host::<H>(guard, 2 * M - 4 * K), None);
        // A fault finds the leaf as well, and calls `relax`.
        let result = guard.reserve(Gpa(8 * M + 5), PageSize::SIZE_2M, cache);
        refused(result, 8 * M + 5, reason);
    });
}
on!(
    an_existing_different_leaf_is_refused_with_size_and_address:
    arm_4k(false), ept(true);
    npt(true), ept_2m(true)
);

fn a_range_that_cuts_a_block_is_refused_before_any_change<H: Hardware>(huge: bool) {
    on_stage::<H>((H::usual(), 40, 8), |_, guard, cache| {
        let block = range(0, 4 * M);
        let (write, dirty, execute) = (false, false, Execute::None);
        // The leaf lacks the right to each access that is tried below.
        let unfit = Attributes { write, dirty, execute, ..RAM };
        assert_eq!(guard.map(block, Hpa(0), unfit, PageSize::SIZE_2M, cache), Ok(4 * M));
        let size = PageSize::SIZE_2M;
        for cut in [range(0, 2 * M + 4 * K), range(4 * K, 4 * M - 4 * K), range(4 * K, 4 * K)] {
            let at = cut.start().0;
            let mut storage = [const { UnmapEntry::EMPTY }; 2];
            let mut batch = guard.unmap_batch(&mut storage);
            let result = guard.unmap(cut, &mut batch);
            let text = refused(result, at, UnmapError::CutsBlock { size });
            says(&text, &["2m", "split it first, or cover it"]);
            assert_eq!(batch.complete().next(), None);
            changes::<H>(guard, cut, false, |result| {
                let text = refused(result, at, ChangeError::CutsBlock { size });
                says(&text, &["2m", "split it first, or cover it"]);
            });
            let found = guard.translate(Gpa(0)).unwrap().unwrap();
            assert_eq!(found.attributes, unfit);
        }
        // The pages of a bitmap are runs: the first run is done, the one that cuts a block is
        // not.
        assert_eq!(guard.map(range(6 * M, 4 * K), Hpa(0), RAM, size, cache), Ok(4 * K));
        let bits = [1, 1];
        let pages = Pages { start: Gpa(6 * M), bits: &bits };
        assert_eq!(guard.write_protect_pages(&pages), Ok(4 * K));
        let pages = Pages { start: Gpa(0), bits: &bits };
        refused(guard.write_protect_pages(&pages), 0, ChangeError::CutsBlock { size });
        refused(guard.clean_pages(&pages), 0, ChangeError::CutsBlock { size });
        if huge {
            assert_eq!(guard.map(range(G, G), Hpa(0), RAM, PageSize::SIZE_1G, cache), Ok(G));
            let reason = ChangeError::CutsBlock { size: PageSize::SIZE_1G };
            says(&refused(guard.write_protect(range(0, G + 2 * M)), 0, reason), &["1g"]);
        }
    });
}
on!(
    a_range_that_cuts_a_block_is_refused_before_any_change:
    arm_4k(true), ept(true);
    npt(true), ept_2m(false)
);

fn a_bitmap_that_is_too_short_is_refused_with_what_is_needed<H: Hardware>() {
    on_stage::<H>((H::usual(), 40, 4), |_, guard, cache| {
        let all = range(0, 65 * 4 * K);
        let done = guard.map(range(0, 66 * 4 * K), Hpa(0), RAM, PageSize::SIZE_4K, cache);
        assert_eq!(done, Ok(66 * 4 * K));
        let before = guard.counts();
        let reason = ChangeError::Bitmap { needed: 2, given: 1 };
        let mut one = [0];
        says(&refused(guard.harvest(all, &mut one), 0, reason), &["1 words", "needs 2"]);
        let mut two = [0; 2];
        for swapped in [false, true] {
            let (young, unanswered) =
                if swapped { (&mut one[..], &mut two[..]) } else { (&mut two[..], &mut one[..]) };
            let mut ages = AgeBitmaps { young, unanswered };
            refused(guard.age(all, &mut ages, AgeOptions::LEAVES), 0, reason);
        }
        assert_eq!((one, two), ([0], [0; 2]));
        assert_eq!(guard.counts().entries_written, before.entries_written);
        let none = ChangeError::Bitmap { needed: 1, given: 0 };
        refused(guard.harvest(range(0, 4 * K), &mut []), 0, none);
        // Just large enough: the word's other bits stay as they are.
        let mut bits = [1 << 63];
        assert_eq!(guard.harvest(range(0, 63 * 4 * K), &mut bits), Ok(63));
        assert_eq!(bits, [u64::MAX]);
        // A range of all addresses: no bitmap is that long, and nothing overflows.
        let most = ChangeError::Bitmap { needed: 1 << 22, given: 2 };
        refused(guard.harvest(range(0, 1 << 40), &mut two), 0, most);
    });
}
on!(a_bitmap_that_is_too_short_is_refused_with_what_is_needed; npt);

#[test]
fn ages_are_refused_where_nothing_records_them() {
    let format = Ept1G { accessed_dirty: false, ..ept() };
    on_stage::<Ept<true>>((format, 40, 4), |_, guard, _| {
        let (mut young, mut unanswered) = ([0], [0]);
        let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
        let result = guard.age(range(0, 4 * K), &mut ages, AgeOptions::LEAVES);
        let text = refused(result, 0, ChangeError::NotRecorded);
        says(&text, &["does not mark it"]);
        idle::<Ept<true>>(guard);
    });
}

#[test]
fn unsupported_address_widths_are_refused_with_allowed_ones() {
    fn refuses<F: Format>(format: F, min: u32) {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        for bits in [0, 1, min - 1, 49, 64, u32::MAX] {
            let result = Tables::new(format, Vmid(1), bits, &platform);
            let error = result.err().unwrap();
            let what = GeometryError { address_bits: bits, min, max: 48, format: F::NAME };
            assert_eq!(error, NewError::Geometry(what));
            let text = error.to_string();
            says(&text, &[&format!("{bits}-bit"), &format!("{min} to 48"), F::NAME]);
        }
        assert_eq!(platform.live(), 0);
    }
    refuses(Arm64::<12>::default(), 25);
    refuses(Arm64::<14>::default(), 26);
    refuses(Arm64::<16>::default(), 30);
    refuses(Ept1G::default(), 12);
    refuses(Ept2M::default(), 12);
    #[cfg(feature = "every-format")]
    refuses(npt::FORMAT, 12);
}

#[test]
fn a_platform_without_frames_reports_the_missing_bytes() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    platform.limit(0);
    let error = Tables::new(Arm64K4::default(), Vmid(1), 40, &platform).err().unwrap();
    assert_eq!(error, NewError::OutOfFrames { bytes: 8192 });
    says(&error.to_string(), &["8192"]);
    let error = Tables::new(ept::<true>(), Vmid(1), 13, &platform).err().unwrap();
    assert_eq!(error, NewError::OutOfFrames { bytes: 4096 });
    platform.limit(3);
    let mut storage = [const { None }; 5];
    let mut cache = TableCache::<Arm64K4, _>::new(&platform, &mut storage);
    let error = cache.fill(5).unwrap_err();
    assert_eq!(error, OutOfFrames { wanted: 5, available: 3 });
    says(&error.to_string(), &["3 of 5"]);
    assert_eq!((cache.len(), cache.is_empty(), platform.live()), (3, false, 3));
    platform.limit(9);
    cache.fill(usize::MAX).unwrap();
    assert_eq!((cache.len(), platform.live()), (5, 5), "as many as the storage holds");
    drop(cache);
    assert_eq!(platform.live(), 0);
    assert!(storage.iter().all(Option::is_none));
}

#[test]
fn what_was_never_mapped_is_nothing_to_unmap() {
    on_stage::<Ept<true>>((ept(), 40, 0), |_, guard, _| {
        assert_eq!(unmap(guard, range(0, 1 << 40)), []);
        idle::<Ept<true>>(guard);
    });
}
