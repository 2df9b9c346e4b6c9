//! The documentation of axaddrspace on address spaces, checked on tables of each format.

mod common;

use ax_memory_addr::PhysAddr;
use axaddrspace::{
    AddrSpace, AddrSpaceError, GuestMemoryAccessor, MappingFlags, NestedPageTableOps, PageSize,
};
use axvm_types::GuestPhysAddr;
use common::today::Today;
use common::{G, Host, K, M, Table, space, table};
use slat::format::arm64::Arm64K4;
use slat::format::ept::{Ept1G, Ept2M};
use slat::format::npt::Npt1G;
use slat::format::riscv::RiscV;
use slat::{BreakBeforeMake, Format};

const READ: MappingFlags = MappingFlags::READ;
const RAM: MappingFlags = READ.union(MappingFlags::WRITE).union(MappingFlags::EXECUTE);
const BASE: usize = G;
const SIZE: usize = 4 * G;

fn arm() -> Arm64K4 {
    Arm64K4 { split_execute: false, ..Default::default() }
}

/// A test on each format: the work is the same; descriptors, levels and breaks differ.
macro_rules! on_each_format {
    ($($(#[$doc:meta])* fn $name:ident<F>($host:ident, $new:ident) $body:block)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            fn on<F: Format>(format: F, bits: u32, bbm: BreakBeforeMake) {
                let $host = &Host::new(bbm);
                let $new = || space(format, bits, $host, (BASE, SIZE));
                $body
                assert_eq!($host.tables(), 0, "table pages are lost");
            }
            let types = RiscV { memory_types: true, ..Default::default() };
            on(arm(), 39, BreakBeforeMake::Always);
            on(arm(), 48, BreakBeforeMake::Never);
            on(Ept1G::default(), 48, BreakBeforeMake::Never);
            on(Npt1G::default(), 48, BreakBeforeMake::Never);
            on(types, 41, BreakBeforeMake::Never);
        }
    )*};
}

fn gpa(address: usize) -> GuestPhysAddr {
    address.into()
}

fn hpa(address: usize) -> PhysAddr {
    address.into()
}

/// The size of the leaf of an address, in bytes; 0 if nothing is mapped there.
fn leaf<T: NestedPageTableOps>(space: &AddrSpace<T>, address: usize) -> usize {
    space.page_table().query(gpa(address)).map_or(0, |(_, _, size)| size.into())
}

on_each_format! {
    fn an_empty_address_space_translates_nothing<F>(host, new) {
        let space = new();
        assert_eq!((space.base(), space.end(), space.size()), (gpa(BASE), gpa(BASE + SIZE), SIZE));
        assert!(space.contains_range(gpa(BASE), SIZE) && !space.contains_range(gpa(BASE - K), M));
        assert_eq!((space.translate(gpa(BASE)), space.translate(gpa(0))), (None, None));
        assert_eq!(space.page_table_root().as_usize() % (4 * K), 0);
        let levels = space.page_table_levels();
        assert!(levels == 3 || levels == 4);
        assert_eq!(host.tables(), 1, "the root");
    }

    fn a_linear_area_has_the_largest_leaves_that_fit_on_both_sides<F>(host, new) {
        let mut space = new();
        let (start, memory) = (BASE + 2 * G - 2 * M - 4 * K, 8 * G - 2 * M - 4 * K);
        let size = 4 * K + 2 * M + G + 2 * M + 4 * K;
        space.map_linear(gpa(start), hpa(memory), size, RAM).unwrap();
        let leaves = [4 * K, 2 * M, G, 2 * M, 4 * K];
        let mut at = start;
        for size in leaves {
            assert_eq!(leaf(&space, at), size);
            assert_eq!(space.translate(gpa(at + 24)), Some(hpa(memory + (at - start) + 24)));
            at += size;
        }
        assert_eq!((leaf(&space, start - 1), leaf(&space, at)), (0, 0));
        let (_, flags, _) = space.page_table().query(gpa(start)).unwrap();
        assert_eq!(flags, RAM);
        // Memory may be above the guest's address of it, or below.
        space.map_linear(gpa(BASE + 3 * G + 4 * M), hpa(2 * M), 2 * M, READ).unwrap();
        assert_eq!(space.translate(gpa(BASE + 3 * G + 5 * M)), Some(hpa(3 * M)));
        drop(space);
        assert!(host.invalidations().len() > 1, "what was unmapped at the end");
    }

    fn a_populated_area_has_a_page_for_each_address_and_frees_all<F>(host, new) {
        let mut space = new();
        space.map_alloc(gpa(BASE), 64 * K, RAM, true).unwrap();
        assert_eq!(host.pages(), 16);
        let mut pages: Vec<_> =
            (0..16).map(|page| space.translate(gpa(BASE + page * 4 * K)).unwrap()).collect();
        pages.sort();
        pages.dedup();
        assert_eq!(pages.len(), 16);
        // Every page is populated, so a fault has nothing to do.
        assert!(!space.handle_page_fault(gpa(BASE), READ));
        space.unmap(gpa(BASE + 16 * K), 16 * K).unwrap();
        assert_eq!((host.pages(), space.translate(gpa(BASE + 16 * K))), (12, None));
        assert!(space.translate(gpa(BASE + 32 * K)).is_some());
        drop(space);
        assert_eq!(host.pages(), 0);
    }

    fn an_unpopulated_area_gets_a_page_at_each_allowed_fault<F>(host, new) {
        let mut space = new();
        space.map_alloc(gpa(BASE), 64 * K, READ | MappingFlags::WRITE, false).unwrap();
        assert_eq!((host.pages(), space.translate(gpa(BASE))), (0, None));
        // An address in the middle of a page.
        assert!(space.handle_page_fault(gpa(BASE + 5 * K), MappingFlags::WRITE));
        assert_eq!(host.pages(), 1);
        let (_, flags, size) = space.page_table().query(gpa(BASE + 4 * K)).unwrap();
        assert_eq!((flags, size), (READ | MappingFlags::WRITE, PageSize::Size4K));
        assert_eq!(space.translate(gpa(BASE + 8 * K)), None);
        // Rights that the area does not have, no area, no memory, and an address beyond the address
        // space.
        assert!(!space.handle_page_fault(gpa(BASE), MappingFlags::EXECUTE));
        assert!(!space.handle_page_fault(gpa(BASE + M), READ));
        assert!(!space.handle_page_fault(gpa(0), READ));
        host.limit_pages(1);
        assert!(!space.handle_page_fault(gpa(BASE), READ));
        // Pages that were never populated are no obstacle.
        space.unmap(gpa(BASE), 64 * K).unwrap();
        assert_eq!((host.pages(), space.translate(gpa(BASE + 4 * K))), (0, None));
    }

    fn a_linear_area_takes_no_fault<F>(host, new) {
        let mut space = new();
        space.map_linear(gpa(BASE), hpa(0), 2 * M, READ).unwrap();
        assert!(!space.handle_page_fault(gpa(BASE), READ));
        assert_eq!(host.pages(), 0);
    }

    fn of_a_block_that_is_unmapped_in_part_the_rest_stays<F>(host, new) {
        let mut space = new();
        space.map_linear(gpa(BASE), hpa(G), G, RAM).unwrap();
        assert_eq!(leaf(&space, BASE), G);
        host.invalidations();
        space.unmap(gpa(BASE + 6 * M), 4 * K).unwrap();
        assert_eq!(space.translate(gpa(BASE + 6 * M)), None);
        assert_eq!(space.translate(gpa(BASE + 6 * M + 4 * K)), Some(hpa(G + 6 * M + 4 * K)));
        assert_eq!(space.translate(gpa(BASE + 6 * M - 1)), Some(hpa(G + 6 * M - 1)));
        assert_eq!((leaf(&space, BASE), leaf(&space, BASE + 7 * M)), (2 * M, 4 * K));
        assert!(!host.invalidations().is_empty());
        // Both ends cut a block, across what is left.
        space.unmap(gpa(BASE + 5 * M), 512 * M).unwrap();
        assert_eq!(space.translate(gpa(BASE + 5 * M - 1)), Some(hpa(G + 5 * M - 1)));
        assert_eq!(space.translate(gpa(BASE + 517 * M)), Some(hpa(G + 517 * M)));
        assert_eq!(space.translate(gpa(BASE + 100 * M)), None);
    }

    fn areas_never_overlap_and_an_unmapped_range_is_free_again<F>(host, new) {
        let mut space = new();
        space.map_linear(gpa(BASE), hpa(0), 4 * M, RAM).unwrap();
        let conflict = space.map_linear(gpa(BASE + 2 * M), hpa(G), 4 * M, RAM);
        assert_eq!(conflict, Err(AddrSpaceError::MappingConflict));
        assert_eq!(space.map_alloc(gpa(BASE), 4 * K, RAM, true), conflict);
        assert_eq!((host.pages(), space.translate(gpa(BASE + 4 * M))), (0, None));
        space.unmap(gpa(BASE + 2 * M), 2 * M).unwrap();
        space.map_linear(gpa(BASE + 2 * M), hpa(G), 4 * M, READ).unwrap();
        assert_eq!(space.translate(gpa(BASE + 2 * M)), Some(hpa(G)));
        assert_eq!(space.translate(gpa(BASE)), Some(hpa(0)));
    }

    fn clearing_unmaps_all_areas_and_leaves_the_root_alone<F>(host, new) {
        let mut space = new();
        space.map_linear(gpa(BASE), hpa(4 * K), 2 * M, RAM).unwrap();
        space.map_alloc(gpa(BASE + G), 64 * K, RAM, true).unwrap();
        space.map_alloc(gpa(BASE + 2 * G), 64 * K, RAM, false).unwrap();
        assert!(space.handle_page_fault(gpa(BASE + 2 * G), READ));
        space.clear();
        for at in [0, M, G, 2 * G] {
            assert_eq!(space.translate(gpa(BASE + at)), None);
        }
        assert_eq!((host.pages(), host.tables()), (0, 1));
    }

    fn ranges_that_cannot_be_are_refused_and_nothing_is_mapped<F>(host, new) {
        let mut space = new();
        let out = |size| AddrSpaceError::OutOfRange {
            start: gpa(BASE + SIZE),
            size,
            space_start: gpa(BASE),
            space_end: gpa(BASE + SIZE),
        };
        let end = gpa(BASE + SIZE);
        assert_eq!(space.map_linear(end, hpa(0), 4 * K, RAM), Err(out(4 * K)));
        assert_eq!(space.map_alloc(end, 8 * K, RAM, true), Err(out(8 * K)));
        assert_eq!(space.unmap(end, 4 * K), Err(out(4 * K)));
        let odd = |result| matches!(result, Err(AddrSpaceError::Unaligned { alignment: 4096, .. }));
        assert!(odd(space.map_linear(gpa(BASE + 1), hpa(0), 4 * K, RAM)));
        assert!(odd(space.map_linear(gpa(BASE), hpa(1), 4 * K, RAM)));
        assert!(odd(space.map_alloc(gpa(BASE), 4 * K + 1, RAM, false)));
        assert!(odd(space.unmap(gpa(BASE), 1)));
        let over = space.map_linear(gpa(BASE), hpa(usize::MAX - 4 * K + 1), 8 * K, RAM);
        assert!(matches!(over, Err(AddrSpaceError::AddressOverflow { .. })));
        // Host addresses that do not fit into a descriptor, and leaves without any right.
        let beyond = space.map_linear(gpa(BASE), hpa(1 << 60), 4 * K, RAM);
        assert!(beyond.is_err());
        assert!(space.map_linear(gpa(BASE), hpa(0), 4 * K, MappingFlags::empty()).is_err());
        assert_eq!((space.translate(gpa(BASE)), host.tables()), (None, 1));
    }

    fn an_area_without_enough_table_pages_is_not_mapped_at_all<F>(host, new) {
        let mut space = new();
        let levels = space.page_table_levels();
        // As many pages as the first 2 MiB need.
        host.limit_tables(levels);
        let mapped = space.map_linear(gpa(BASE), hpa(4 * K), 8 * M, RAM);
        assert_eq!(mapped, Err(AddrSpaceError::MappingState));
        assert_eq!(space.translate(gpa(BASE)), None);
        host.limit_tables(usize::MAX);
        space.map_linear(gpa(BASE), hpa(4 * K), 8 * M, RAM).unwrap();
        assert_eq!(space.translate(gpa(BASE + 8 * M - 1)), Some(hpa(8 * M + 4 * K - 1)));
    }

    fn a_buffer_is_translated_in_pieces_that_are_the_guests_memory<F>(host, new) {
        let mut space = new();
        space.map_alloc(gpa(BASE), 16 * K, RAM, true).unwrap();
        let pieces = space.translated_byte_buffer(gpa(BASE + K), 9 * K).unwrap();
        let sizes: Vec<_> = pieces.iter().map(|piece| piece.len()).collect();
        assert_eq!(sizes, [3 * K, 4 * K, 2 * K]);
        for (piece, byte) in pieces.into_iter().zip(1..) {
            piece.fill(byte);
        }
        let first = |address| {
            let at = space.page_table().phys_to_virt(space.translate(gpa(address)).unwrap());
            // SAFETY: the page belongs to the guest, as it is mapped, and no code writes it now.
            unsafe { at.as_ptr().read() }
        };
        assert_eq!([K, 4 * K, 8 * K, 0].map(|at| first(BASE + at)), [1, 2, 3, 0]);
        assert!(space.translated_byte_buffer(gpa(BASE), 17 * K).is_none());
        assert!(space.translated_byte_buffer(gpa(BASE + M), K).is_none());
        let (at, limit) = space.translate_and_get_limit(gpa(BASE + 5 * K)).unwrap();
        assert_eq!((Some(at), limit), (space.translate(gpa(BASE + 5 * K)), 16 * K));
        assert!(space.translate_and_get_limit(gpa(BASE + M)).is_none());
        // Code that reads and writes guest memory for devices uses the same path.
        let memory = ByTable(&space);
        memory.write_buffer(gpa(BASE + 3 * K), &[7; 3 * K]).unwrap();
        memory.write_obj(gpa(BASE + 12 * K), 0x1234_u32).unwrap();
        let mut read = [0; 3 * K];
        memory.read_buffer(gpa(BASE + 3 * K), &mut read).unwrap();
        assert_eq!((read, memory.read_obj(gpa(BASE + 12 * K))), ([7; 3 * K], Ok(0x1234_u32)));
        assert_eq!(first(BASE + 6 * K), 2, "what was not written");
        assert!(memory.write_obj(gpa(BASE + M), 0_u8).is_err());
    }
}

/// Reads guest memory through the table, a page at a time.
struct ByTable<'s, T: NestedPageTableOps>(&'s AddrSpace<T>);

impl<T: NestedPageTableOps> GuestMemoryAccessor for ByTable<'_, T> {
    fn translate_and_get_limit(&self, address: GuestPhysAddr) -> Option<(PhysAddr, usize)> {
        let (at, _, size) = self.0.page_table().query(address).ok()?;
        let size = usize::from(size);
        let at = self.0.page_table().phys_to_virt(at).as_usize();
        Some((at.into(), size - (address.as_usize() & (size - 1))))
    }
}

/// README.md states this limit: if this test fails with a later version, the sentence can go.
#[test]
fn todays_tables_lose_a_block_at_a_partial_unmap() {
    let mut space = AddrSpace::new_empty(Today::new(), gpa(BASE), SIZE).unwrap();
    space.map_linear(gpa(BASE), hpa(G), 4 * M, RAM).unwrap();
    space.unmap(gpa(BASE + M), 4 * K).unwrap();
    assert_eq!((space.translate(gpa(BASE)), space.translate(gpa(BASE + M + 4 * K))), (None, None));
    assert_eq!(space.translate(gpa(BASE + 2 * M)), Some(hpa(G + 2 * M)));
    let mut table = Today::new();
    table.map_linear(gpa(0), hpa(0), 4 * K, RAM, false).unwrap();
    assert!(
        table.protect_region(gpa(0), 4 * K, READ) && !table.protect_region(gpa(0), 8 * K, READ)
    );
}

/// The table itself, without the areas of an address space.
fn alone<F: Format>(format: F, bits: u32, body: impl FnOnce(&Host, &mut Table<'_, F>)) {
    let host = Host::new(BreakBeforeMake::Always);
    body(&host, &mut table(format, bits, &host));
    assert_eq!(host.tables(), 0, "table pages are lost");
}

#[test]
fn a_single_leaf_is_mapped_queried_and_unmapped_by_its_size() {
    alone(arm(), 39, |host, table| {
        let block = table.map(gpa(2 * M), hpa(G), PageSize::Size2M, RAM);
        assert_eq!(block, Ok(()));
        table.map(gpa(8 * M), hpa(0), PageSize::Size4K, READ).unwrap();
        let found = table.query(gpa(3 * M + 5));
        assert_eq!(found, Ok((hpa(G + M + 5), RAM, PageSize::Size2M)));
        assert_eq!(table.translate(gpa(3 * M)), Some(hpa(G + M)));
        // A mapped range is not mapped again, even to the same memory.
        for (address, size) in [(2 * M, PageSize::Size2M), (3 * M, PageSize::Size4K)] {
            let again = table.map(gpa(address), hpa(G + address - 2 * M), size, RAM);
            assert_eq!(again, Err(AddrSpaceError::MappingConflict));
        }
        let over = table.map(gpa(0), hpa(0), PageSize::Size1G, RAM);
        assert_eq!(over, Err(AddrSpaceError::MappingConflict));
        host.invalidations();
        assert_eq!(table.unmap(gpa(3 * M)), Ok((hpa(G), RAM, PageSize::Size2M)));
        assert_eq!(host.invalidations().len(), 1);
        let unmapped = AddrSpaceError::Unmapped { address: gpa(3 * M) };
        assert_eq!(table.unmap(gpa(3 * M)), Err(unmapped.clone()));
        assert_eq!(table.query(gpa(3 * M)), Err(unmapped));
        assert_eq!(table.unmap(gpa(8 * M)), Ok((hpa(0), READ, PageSize::Size4K)));
        let odd = table.map(gpa(M), hpa(0), PageSize::Size2M, RAM);
        assert!(matches!(odd, Err(AddrSpaceError::Unaligned { alignment: 0x20_0000, .. })));
        let odd = table.map(gpa(0), hpa(M), PageSize::Size2M, RAM);
        assert!(matches!(odd, Err(AddrSpaceError::Unaligned { alignment: 0x20_0000, .. })));
        let beyond = table.map(gpa(1 << 39), hpa(0), PageSize::Size4K, RAM);
        assert!(matches!(beyond, Err(AddrSpaceError::OutOfRange { .. })));
        let beyond = table.query(gpa(usize::MAX));
        assert!(matches!(beyond, Err(AddrSpaceError::Unmapped { .. })));
        let none = table.map_linear(gpa(0), hpa(0), 0, RAM, true);
        assert_eq!(none, Err(AddrSpaceError::InvalidMapping));
    });
}

#[test]
fn a_size_that_the_format_lacks_is_refused() {
    alone(Ept2M::default(), 48, |_, table| {
        for size in [PageSize::Size1M, PageSize::Size1G] {
            let refused = table.map(gpa(0), hpa(0), size, RAM);
            assert_eq!(refused, Err(AddrSpaceError::InvalidMapping));
        }
        table.map_linear(gpa(0), hpa(0), G, RAM, true).unwrap();
        assert_eq!(table.query(gpa(G - 1)), Ok((hpa(G - 1), RAM, PageSize::Size2M)));
        table.unmap_region(gpa(0), G).unwrap();
        table.map_linear(gpa(0), hpa(0), 2 * M, RAM, false).unwrap();
        assert_eq!(table.query(gpa(0)), Ok((hpa(0), RAM, PageSize::Size4K)));
    });
}

#[test]
fn remap_replaces_one_page_whatever_is_mapped_there() {
    alone(arm(), 39, |host, table| {
        table.map_linear(gpa(0), hpa(G), 2 * M, RAM, true).unwrap();
        host.invalidations();
        assert!(table.remap(gpa(M + 5), hpa(8 * G), READ));
        assert!(!host.invalidations().is_empty());
        assert_eq!(table.query(gpa(M)), Ok((hpa(8 * G), READ, PageSize::Size4K)));
        assert_eq!(table.query(gpa(M + 4 * K)), Ok((hpa(G + M + 4 * K), RAM, PageSize::Size4K)));
        // It maps where nothing is mapped, and refuses what is not valid.
        assert!(table.remap(gpa(4 * M), hpa(0), RAM));
        assert!(!table.remap(gpa(4 * M), hpa(5), RAM) && !table.remap(gpa(1 << 40), hpa(0), RAM));
        assert_eq!(table.translate(gpa(4 * M)), Some(hpa(0)));
    });
}

#[test]
fn protect_changes_the_range_exactly_and_skips_holes() {
    alone(arm(), 39, |host, table| {
        table.map_linear(gpa(0), hpa(G), 4 * M, RAM, true).unwrap();
        table.map_linear(gpa(8 * M), hpa(G), 2 * M, RAM, true).unwrap();
        host.invalidations();
        assert!(table.protect_region(gpa(M), 8 * M, READ));
        assert!(!host.invalidations().is_empty());
        let is = |table: &Table<'_, _>, at, flags| {
            let (_, found, _) = table.query(gpa(at)).unwrap();
            assert_eq!(found, flags, "{at:#x}");
        };
        is(table, M - 1, RAM);
        for at in [M, 4 * M - 1, 8 * M, 9 * M - 1] {
            is(table, at, READ);
        }
        is(table, 9 * M, RAM);
        assert_eq!(table.translate(gpa(5 * M)), None);
        // Another memory type, with leaves of the same sizes to the same memory.
        let device = READ | MappingFlags::WRITE | MappingFlags::DEVICE;
        assert!(table.protect_region(gpa(3 * M), 6 * M, device));
        for at in [3 * M, 4 * M - 1, 8 * M, 9 * M - 1] {
            is(table, at, device);
        }
        is(table, 3 * M - 1, READ);
        is(table, 9 * M, RAM);
        assert_eq!(table.translate(gpa(3 * M + 5)), Some(hpa(G + 3 * M + 5)));
        assert_eq!(table.translate(gpa(8 * M + 5)), Some(hpa(G + 5)));
        assert!(!table.protect_region(gpa(0), 4 * K, MappingFlags::empty()));
        assert!(!table.protect_region(gpa(0), 0, READ) && !table.protect_region(gpa(1), M, READ));
        // The leaves of whole tables change in place: without any table page, none is lost.
        assert!(table.protect_region(gpa(2 * M), 8 * M, device));
        host.limit_tables(0);
        assert!(table.protect_region(gpa(2 * M), 8 * M, RAM));
        for at in [2 * M, 4 * M - 1, 8 * M, 9 * M - 1] {
            is(table, at, RAM);
        }
        assert_eq!(table.translate(gpa(8 * M + 5)), Some(hpa(G + 5)));
        host.limit_tables(host.tables());
        table.map_linear(gpa(12 * M), hpa(0), 2 * M, RAM, true).unwrap();
        assert!(!table.protect_region(gpa(12 * M), 4 * K, READ), "a block cannot be split");
        is(table, 12 * M, RAM);
    });
}

/// Each combination of flags, with the flags that a query returns after it was accepted.
fn flags_of<F: Format>(format: F, bits: u32) -> Vec<(MappingFlags, MappingFlags)> {
    let mut accepted = Vec::new();
    alone(format, bits, |_, table| {
        for asked in (0..64).map(MappingFlags::from_bits_truncate) {
            if table.map(gpa(0), hpa(0), PageSize::Size4K, asked).is_ok() {
                let (_, flags, _) = table.unmap(gpa(0)).unwrap();
                accepted.push((asked, flags));
            }
        }
    });
    accepted
}

#[test]
fn flags_are_read_back_as_given_except_those_without_meaning() {
    let plain = |asked: MappingFlags| {
        let mut flags = asked - MappingFlags::USER;
        flags.set(MappingFlags::READ, asked.intersects(READ | MappingFlags::WRITE));
        if flags.contains(MappingFlags::DEVICE) {
            flags.remove(MappingFlags::UNCACHED);
        }
        flags
    };
    let types = RiscV { memory_types: true, ..Default::default() };
    let all = [
        flags_of(arm(), 39),
        flags_of(Ept1G::default(), 48),
        flags_of(Npt1G::default(), 48),
        flags_of(types, 41),
    ];
    for of in &all {
        for &(asked, found) in of {
            assert_eq!(found, plain(asked), "{asked:?}");
        }
        // Each format accepts all flags with a right to read or write; some formats have no leaf
        // with the right to execute alone.
        let usable = |flags: &MappingFlags| flags.intersects(READ | MappingFlags::WRITE);
        assert_eq!(of.iter().filter(|(asked, _)| usable(asked)).count(), 6 * 8);
    }
    // Without memory types, the physical address decides.
    let memory = MappingFlags::DEVICE | MappingFlags::UNCACHED;
    let untyped = flags_of(RiscV::default(), 41);
    assert_eq!(untyped.len(), all[3].len());
    for (asked, found) in untyped {
        assert_eq!(found, plain(asked) - memory);
    }
}

#[test]
fn the_address_bits_of_a_guest_decide_the_reported_levels() {
    alone(arm(), 48, |_, table| assert_eq!(table.levels(), 4));
    alone(arm(), 39, |_, table| assert_eq!(table.levels(), 3));
    alone(RiscV::default(), 41, |_, table| assert_eq!(table.levels(), 3));
    alone(RiscV::default(), 50, |_, table| assert_eq!(table.levels(), 4));
}

#[test]
fn a_dropped_table_keeps_its_pages_without_the_callers_promise() {
    let host = Host::new(BreakBeforeMake::Never);
    let space = slat::AddressSpace::new(arm(), slat::Vmid(1), 39, &host).unwrap();
    let root = space.root();
    drop(slat_axvm::NestedPageTable::new(space, &host));
    assert_eq!(host.tables(), 1);
    // SAFETY: the root came from `allocate` for one page, and no code uses it any more.
    unsafe { slat::Platform::free(&host, slat::Frame::from_hpa(root).unwrap(), 4096) };
}
