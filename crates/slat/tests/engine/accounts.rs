//! What guards and removals account for.

use crate::common::hardware::ept::Ept;
use crate::common::hardware::grouped::GroupedArm;
use crate::common::stage::{G, K, M, RAM, arm, on_stage, range};
use crate::common::unmap;
use slat::{Attributes, Gpa, Hpa, PageSize, Software, UnmapBatch, UnmapEntry};

const PAGE: PageSize = PageSize::SIZE_4K;

#[test]
fn a_mapped_pages_bytes_count_with_and_without_its_table() {
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        for page in 1..4 {
            let at = range(page * 4 * K, 4 * K);
            assert_eq!(guard.map(at, Hpa(0), RAM, PAGE, cache), Ok(4 * K));
            assert_eq!(guard.counts().bytes_changed, page * 4 * K);
        }
    });
}

#[test]
fn a_commits_bytes_count_whether_it_is_reported_or_not() {
    on_stage::<GroupedArm<12>>((arm(), 40, 8), |_, guard, cache| {
        let (block, mut bytes) = (PageSize::SIZE_2M, 0);
        for (at, largest, size) in [(0, PAGE, 4 * K), (2 * M, block, 2 * M), (4 * M, PAGE, 64 * K)]
        {
            for told in [false, true] {
                let gpa = Gpa(if told { at + 8 * M } else { at });
                let reserved = match size == 64 * K {
                    true => guard.reserve_contiguous(gpa, largest, cache).unwrap(),
                    false => guard.reserve(gpa, largest, cache).unwrap(),
                };
                let done = match told {
                    true => reserved.commit_told(Hpa(0), RAM, || Ok::<_, ()>(())).unwrap(),
                    false => reserved.commit(Hpa(0), RAM),
                };
                assert_eq!(done, Ok(Some(size)));
                bytes += size;
                assert_eq!(guard.counts().bytes_changed, bytes);
            }
        }
    });
}

#[test]
fn a_map_that_builds_tables_apart_counts_its_path_twice() {
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        guard.map(range(0, 4 * K), Hpa(0), RAM, PAGE, cache).unwrap();
        let before = guard.counts();
        guard.map(range(G, 4 * K), Hpa(G), RAM, PAGE, cache).unwrap();
        let after = guard.counts();
        // The root's link and the empty entry below it, twice.
        assert_eq!(after.entries_read - before.entries_read, 4);
        assert_eq!(after.tables_built - before.tables_built, 2);
    });
}

#[test]
fn removals_that_forget_do_so_only_where_there_is_no_room() {
    for (room, handed_out) in [(1, vec![16 * K]), (4, vec![0, 8 * K, 16 * K])] {
        on_stage::<Ept<true>>((Default::default(), 40, 8), |tables, guard, cache| {
            for &at in &[0, 8 * K, 16 * K] {
                guard.map(range(at, 4 * K), Hpa(at), RAM, PAGE, cache).unwrap();
            }
            let mut places: Vec<_> = (0..room).map(|_| UnmapEntry::EMPTY).collect();
            let mut batch = UnmapBatch::new(tables, &mut places).forgetting();
            assert_eq!(guard.unmap(range(0, 20 * K), &mut batch), Ok(12 * K));
            let gone: Vec<_> = batch.complete().map(|run| run.gpa.0).collect();
            assert_eq!(gone, handed_out);
        });
    }
}

/// The descriptor of the second page is that of the first plus a page, but its address is not: the
/// field has overflowed into a software bit.
#[test]
fn pages_at_both_ends_of_the_hosts_memory_are_no_neighbours() {
    on_stage::<Ept<true>>((Default::default(), 40, 8), |_, guard, cache| {
        let last = Hpa((1 << 52) - 4 * K);
        let marked = Attributes { software: Software::A, ..RAM };
        guard.map(range(0, 4 * K), last, RAM, PAGE, cache).unwrap();
        guard.map(range(4 * K, 4 * K), Hpa(0), marked, PAGE, cache).unwrap();
        let gone = unmap(guard, range(0, 8 * K));
        let gone: Vec<_> = gone.into_iter().map(|run| (run.hpa, run.bytes)).collect();
        assert_eq!(gone, [(last, 4 * K), (Hpa(0), 4 * K)]);
    });
}
