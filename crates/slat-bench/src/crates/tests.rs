//! Compares all crates with one flat model.

use crate::crates::{Leaf, Memory, PEERS, Peer, Tables};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;

const MIB: u64 = 1 << 20;
const HOST: u64 = 8 << 30;

/// Frames for a test.
pub(crate) struct Pages(NonNull<u8>, Layout);

impl Pages {
    /// Allocates `count` frames, none of them zeroed.
    pub(crate) fn new(count: usize) -> Self {
        let layout = Layout::from_size_align(count * 4096, 4096).unwrap();
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { alloc(layout) }).unwrap();
        // SAFETY: the allocation is that long.
        unsafe { start.write_bytes(0xa5, layout.size()) };
        Self(start, layout)
    }

    /// Returns all of them as table memory, for one user at a time.
    pub(crate) fn memory(&self) -> Memory {
        // SAFETY: tests drop the tables before the pages, and make one memory at a time.
        unsafe { Memory::new(self.0, self.1.size()) }.unwrap()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: it is the allocation of `new`.
        unsafe { dealloc(self.0.as_ptr(), self.1) };
    }
}

/// Page to host address and writability.
type Model = BTreeMap<u64, (u64, bool)>;

fn seen(tables: &dyn Tables, gpa: u64, bytes: u64) -> Model {
    let runs = tables.leaves(gpa, bytes).unwrap();
    let pages = runs.iter().flat_map(|run| {
        (0..run.bytes)
            .step_by(4096)
            .map(|offset| (run.gpa + offset, (run.hpa + offset, run.writable)))
    });
    pages.collect()
}

fn model(gpa: u64, hpa: u64, bytes: u64, writable: bool) -> Model {
    (0..bytes).step_by(4096).map(|offset| (gpa + offset, (hpa + offset, writable))).collect()
}

fn leaf_sizes(tables: &dyn Tables, gpa: u64, bytes: u64) -> Vec<u64> {
    let mut sizes: Vec<_> = tables.leaves(gpa, bytes).unwrap().iter().map(|run| run.leaf).collect();
    sizes.dedup();
    sizes
}

/// Runs `test` with new tables of each crate.
fn with_each(frames: usize, test: impl Fn(&Peer, &mut dyn Tables)) {
    for peer in PEERS {
        let pages = Pages::new(frames);
        let mut tables = peer.tables(pages.memory()).unwrap();
        test(peer, &mut *tables);
    }
}

#[test]
fn versions_are_those_that_were_built() {
    let lock = include_str!("../../../../Cargo.lock");
    for peer in PEERS {
        let entry = format!("name = \"{}\"\nversion = \"{}\"\n", peer.name, peer.version);
        let any = format!("name = \"{}\"\n", peer.name);
        assert!(lock.contains(&entry), "{entry}");
        assert_eq!(lock.matches(&any).count(), 1, "{any}");
    }
}

#[test]
fn both_ways_of_mapping_give_leaves_of_the_size_asked() {
    for leaf in [Leaf::Page4K, Leaf::Block2M] {
        with_each(1200, |peer, tables| {
            let bytes = 1 << 30;
            tables.map_each(0, HOST, bytes, leaf).unwrap();
            assert_eq!(seen(tables, 0, bytes), model(0, HOST, bytes, true), "{}", peer.name);
            assert_eq!(leaf_sizes(tables, 0, bytes), [leaf.bytes()], "{}", peer.name);
            let again = tables.map_range(bytes, HOST, bytes, leaf);
            assert_eq!(again.is_ok(), peer.map_range, "{}", peer.name);
            if peer.map_range {
                let expected = model(bytes, HOST, bytes, true);
                assert_eq!(seen(tables, bytes, bytes), expected, "{}", peer.name);
                assert_eq!(leaf_sizes(tables, bytes, bytes), [leaf.bytes()], "{}", peer.name);
            }
        });
    }
}

#[test]
fn a_protected_range_is_read_only_and_its_neighbours_are_not() {
    for leaf in [Leaf::Page4K, Leaf::Block2M] {
        with_each(64, |peer, tables| {
            tables.map_each(0, HOST, 16 * MIB, leaf).unwrap();
            tables.protect_range(4 * MIB, 8 * MIB).unwrap();
            let mut expected = model(0, HOST, 16 * MIB, true);
            expected.extend(model(4 * MIB, HOST + 4 * MIB, 8 * MIB, false));
            assert_eq!(seen(tables, 0, 16 * MIB), expected, "{}", peer.name);
            assert_eq!(leaf_sizes(tables, 0, 16 * MIB), [leaf.bytes()], "{}", peer.name);
        });
    }
}

#[test]
fn an_unmap_removes_the_range_and_the_tables_the_crate_frees() {
    for leaf in [Leaf::Page4K, Leaf::Block2M] {
        with_each(64, |peer, tables| {
            tables.map_each(0, HOST, 16 * MIB, leaf).unwrap();
            let left = tables.frames_left();
            tables.unmap_range(4 * MIB, 8 * MIB).unwrap();
            let mut expected = model(0, HOST, 16 * MIB, true);
            expected.retain(|&gpa, _| !(4 * MIB..12 * MIB).contains(&gpa));
            assert_eq!(seen(tables, 0, 16 * MIB), expected, "{}", peer.name);
            let freed = if peer.frees_tables && leaf == Leaf::Page4K { 4 } else { 0 };
            assert_eq!(tables.frames_left(), left + freed, "{}", peer.name);
            // Freed frames are used again, although the free list has written to them.
            tables.map_each(4 * MIB, HOST, 8 * MIB, leaf).unwrap();
            expected.extend(model(4 * MIB, HOST, 8 * MIB, true));
            assert_eq!(seen(tables, 0, 16 * MIB), expected, "{}", peer.name);
        });
    }
}

#[test]
fn a_split_range_maps_the_same_by_pages() {
    with_each(64, |peer, tables| {
        tables.map_each(0, HOST, 16 * MIB, Leaf::Block2M).unwrap();
        tables.protect_range(6 * MIB, 2 * MIB).unwrap();
        let before = seen(tables, 0, 16 * MIB);
        let split = tables.split(4 * MIB, 8 * MIB);
        assert_eq!(split.is_ok(), peer.split.is_some(), "{}", peer.name);
        assert_eq!(seen(tables, 0, 16 * MIB), before, "{}", peer.name);
        let size = if split.is_ok() { 4096 } else { 2 * MIB };
        assert_eq!(leaf_sizes(tables, 4 * MIB, 8 * MIB), [size], "{}", peer.name);
        assert_eq!(leaf_sizes(tables, 0, 4 * MIB), [2 * MIB], "{}", peer.name);
        assert_eq!(leaf_sizes(tables, 12 * MIB, 4 * MIB), [2 * MIB], "{}", peer.name);
    });
}

#[test]
fn a_sum_of_lookups_is_that_of_the_model() {
    with_each(64, |peer, tables| {
        tables.map_each(0, HOST, 4 * MIB, Leaf::Page4K).unwrap();
        tables.map_each(4 * MIB, 2 * HOST, 4 * MIB, Leaf::Block2M).unwrap();
        tables.protect_range(2 * MIB, 4 * MIB).unwrap();
        let addresses = [0, 0x123, 0x1f_ffff, 0x20_0008, 0x45_6789, 0x60_0000, 0x7f_ffff];
        let model = seen(tables, 0, 8 * MIB);
        let sum = addresses.iter().fold(0u64, |sum, gpa| {
            let (hpa, writable) = model[&(gpa & !0xfff)];
            sum.wrapping_add(hpa + (gpa & 0xfff)).wrapping_add(writable.into())
        });
        assert_eq!(tables.lookup_all(&addresses), Ok(sum), "{}", peer.name);
        let (hpa, writable) = (2 * HOST + 0x5_6789, false);
        assert_eq!(model[&0x45_6000], (hpa & !0xfff, writable), "{}", peer.name);
        tables.lookup_all(&[0, 8 * MIB]).unwrap_err();
        // This must not panic; any result is right.
        let _ = tables.lookup_all(&[u64::MAX, 1 << 63, 1 << peer.address_bits]);
    });
}

#[test]
fn bad_ranges_are_refused_before_anything_changes() {
    with_each(64, |peer, tables| {
        tables.map_each(0, HOST, 4 * MIB, Leaf::Block2M).unwrap();
        let before = seen(tables, 0, 16 * MIB);
        let end = 1 << peer.address_bits;
        for (gpa, hpa, bytes) in [
            (8 * MIB, HOST, 0),
            (8 * MIB + 1, HOST, 0x1000),
            (8 * MIB, HOST + 1, 0x1000),
            (8 * MIB, HOST, 0x1001),
            (end, HOST, 0x1000),
            (end - 0x1000, HOST, 0x2000),
            (8 * MIB, 1 << 48, 0x1000),
            (0x1000, HOST, !0xfff),
        ] {
            tables.map_range(gpa, hpa, bytes, Leaf::Page4K).unwrap_err();
            tables.map_each(gpa, hpa, bytes, Leaf::Page4K).unwrap_err();
            if hpa == HOST {
                tables.protect_range(gpa, bytes).unwrap_err();
                tables.unmap_range(gpa, bytes).unwrap_err();
                tables.split(gpa, bytes).unwrap_err();
                tables.leaves(gpa, bytes).unwrap_err();
            }
        }
        tables.map_each(8 * MIB, HOST + 0x1000, 2 * MIB, Leaf::Block2M).unwrap_err();
        tables.split(0x1000, 2 * MIB).unwrap_err();
        assert_eq!(seen(tables, 0, 16 * MIB), before, "{}", peer.name);
    });
}

#[test]
fn mapping_over_a_mapping_replaces_it_or_is_refused() {
    with_each(64, |peer, tables| {
        for leaf in [Leaf::Page4K, Leaf::Block2M] {
            for over in [Leaf::Page4K, Leaf::Block2M] {
                let old = model(4 * MIB, HOST, 4 * MIB, true);
                tables.map_each(4 * MIB, HOST, 4 * MIB, leaf).unwrap();
                for each in [true, false] {
                    let done = if each {
                        tables.map_each(6 * MIB, 2 * HOST, 2 * MIB, over)
                    } else {
                        tables.map_range(6 * MIB, 2 * HOST, 2 * MIB, over)
                    };
                    let mut expected = old.clone();
                    if done.is_ok() {
                        expected.extend(model(6 * MIB, 2 * HOST, 2 * MIB, true));
                    }
                    assert_eq!(done.is_ok(), peer.name == "aarch64-paging", "{}", peer.name);
                    assert_eq!(seen(tables, 0, 16 * MIB), expected, "{}", peer.name);
                }
                tables.unmap_range(4 * MIB, 4 * MIB).unwrap();
                if !peer.frees_tables {
                    return;
                }
            }
        }
    });
}

#[test]
fn memory_that_runs_dry_is_an_error_and_keeps_what_was_mapped() {
    for peer in PEERS {
        let none = Pages::new(1);
        let mut memory = none.memory();
        memory.take().unwrap();
        assert!(peer.tables(memory).is_err(), "{}", peer.name);
        for frames in 4..12 {
            let pages = Pages::new(frames);
            let mut tables = peer.tables(pages.memory()).unwrap();
            let room = (tables.frames_left() as u64 - (u64::from(peer.levels) - 2)) * 2 * MIB;
            tables.map_each(0, HOST, room, Leaf::Page4K).unwrap();
            for each in [true, false] {
                let (gpa, hpa, bytes) = (room, HOST + room, 4 * MIB);
                let dry = if each {
                    tables.map_each(gpa, hpa, bytes, Leaf::Page4K)
                } else {
                    tables.map_range(gpa, hpa, bytes, Leaf::Page4K)
                };
                dry.unwrap_err();
            }
            let _ = tables.protect_range(0x1000, 0x1000);
            assert_eq!(seen(&*tables, 0, room).len() as u64, room >> 12, "{}", peer.name);
        }
        if peer.split.is_some() {
            let pages = Pages::new(5);
            let mut tables = peer.tables(pages.memory()).unwrap();
            tables.map_each(0, HOST, 16 * MIB, Leaf::Block2M).unwrap();
            tables.split(0, 16 * MIB).unwrap_err();
            assert_eq!(seen(&*tables, 0, 16 * MIB), model(0, HOST, 16 * MIB, true));
        }
    }
}

#[test]
fn any_sequence_does_what_the_model_does_or_is_refused() {
    const SPACE: u64 = 8 * MIB;
    with_each(4096, |peer, tables| {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut below = |limit| rng.u64(..limit);
        let mut expected = Model::new();
        let mut done = [0; 4];
        for _ in 0..2000 {
            let leaf = if below(2) == 0 { Leaf::Page4K } else { Leaf::Block2M };
            let leaves = SPACE / leaf.bytes();
            let first = below(leaves);
            let bytes = (1 + below((leaves - first).min(700))) * leaf.bytes();
            let gpa = first * leaf.bytes();
            let end = gpa + bytes;
            let hpa = HOST + (below(64) << 21);
            let kind = below(4) as usize;
            let result = match kind {
                // Maps over leaves have a test of their own.
                0 if expected.range(gpa..end).next().is_some() => continue,
                0 if below(2) == 0 => tables.map_range(gpa, hpa, bytes, leaf),
                0 => tables.map_each(gpa, hpa, bytes, leaf),
                1 => tables.protect_range(gpa, bytes),
                2 => tables.unmap_range(gpa, bytes),
                _ => tables.split(gpa, bytes),
            };
            let now = seen(tables, 0, SPACE);
            if result.is_ok() {
                done[kind] += 1;
                match kind {
                    0 => expected.extend(model(gpa, hpa, bytes, true)),
                    1 => expected.range_mut(gpa..end).for_each(|(_, (_, writable))| {
                        *writable = false;
                    }),
                    2 => expected.retain(|page, _| !(gpa..end).contains(page)),
                    _ => {}
                }
            } else {
                // A part of the range may have changed, and nothing else.
                expected.retain(|page, _| !(gpa..end).contains(page));
                expected.extend(now.range(gpa..end).map(|(page, to)| (*page, *to)));
            }
            assert!(now == expected, "{}: {kind} at {gpa:#x} for {bytes:#x}", peer.name);
        }
        assert!(done[..3].iter().all(|&count| count > 0), "{}: {done:?}", peer.name);
        assert_eq!(done[3] > 0, peer.split.is_some(), "{}", peer.name);
    });
}
