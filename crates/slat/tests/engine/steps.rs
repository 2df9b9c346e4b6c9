//! Operations that run out of something at any possible step: they return where, and go on from
//! there to the same end.

use crate::common::TestPlatform;
use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::hardware::ept::Ept;
#[cfg(feature = "every-format")]
use crate::common::hardware::npt::{self, Npt};
use crate::common::stage::{
    BBM, CLEAN, G, K, M, RAM, arm, ept, host, idle, on_stage, range, refused,
};
use crate::common::world::{GuardOf, Mapping, World, size};
use slat::{
    Attributes, BatchedSplit, BoundedWalk, BreakBeforeMake, EveryEntry, Execute, Gpa, GpaRange,
    Hpa, Interruption, MapError, PageSize, Software, SplitWalk, UnmapEntry, UnmapError,
    UnmappedRun,
};

/// Maps with every number of frames from none to enough, and then fetches the missing frames one by
/// one.
fn a_map_that_runs_dry_at_any_step_stops_and_resumes_there<H: Hardware>(
    enough: usize,
    runs: usize,
) {
    // Pages at both ends, blocks of 2m and 1g between.
    let at = range(G - 4 * M - 8 * K, 2 * G + 12 * M + 16 * K);
    let largest = size(H::sizes()[0]);
    let what = Mapping { hpa: 8 * G - 4 * M - 8 * K, attributes: RAM, largest };
    let map_all = |frames: usize| {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let mut world = World::<H>::new(&platform, BreakBeforeMake::Always, H::usual(), 40);
        let mut stopped = world.map(at, what, frames);
        let mut stops = 0;
        while let Some(from) = stopped {
            let rest = range(from, at.end().0 - from);
            let hpa = what.hpa + (from - at.start().0);
            stopped = world.map(rest, Mapping { hpa, ..what }, 1);
            assert!(stopped.is_none_or(|next| next >= from), "back from {from:#x}");
            stops += 1;
            // A single frame may become a table with nothing in it yet.
            assert!(stops <= enough, "no progress at {from:#x}");
        }
        let runs = world.tree().runs;
        world.destroy();
        (runs, stops)
    };
    let (expected, stops) = map_all(enough);
    assert_eq!((expected.len(), stops), (runs, 0));
    for frames in 0..enough {
        let (runs, stops) = map_all(frames);
        assert!(stops > 0, "{frames} are enough");
        assert_eq!(runs, expected, "with {frames} frames at first");
    }
}
// Without 1g blocks it takes two more tables.
on!(
    a_map_that_runs_dry_at_any_step_stops_and_resumes_there:
    arm_4k(4, 5), ept(5, 5);
    npt(5, 5), ept_2m(7, 3)
);

/// Splits the first `blocks` blocks of 2m of a block of 1g, with each number of frames.
fn splits_dry<H: Hardware, W: SplitWalk>(
    format: H::Format,
    bbm: BreakBeforeMake,
    blocks: u64,
    frames: impl IntoIterator<Item = usize>,
) {
    let part = range(G, blocks * 2 * M);
    let odd = Attributes { software: Software::A, ..CLEAN };
    let what = Mapping { hpa: 4 * G, attributes: odd, largest: PageSize::SIZE_1G };
    let enough = blocks as usize + 1;
    for frames in frames {
        let platform = TestPlatform::new(bbm);
        let mut world = World::<H>::new(&platform, bbm, format, 36);
        assert_eq!(world.map(range(G, G), what, 1), None);
        let stopped = world.split::<W>(part, PageSize::SIZE_4K, frames, usize::MAX);
        // One frame replaces the block, and each further one splits a block of 2m.
        let at = match frames {
            0 => Some(G),
            _ if frames == enough => None,
            _ => Some(G + (frames as u64 - 1) * 2 * M),
        };
        assert_eq!(stopped, at, "{frames} frames");
        world.access(G + 2 * M, true, false);
        world.access(G + 7 * M, false, true);
        if let Some(at) = at {
            let rest = range(at, part.end().0 - at);
            assert_eq!(world.split::<W>(rest, PageSize::SIZE_4K, enough - frames, 3), None);
        }
        for run in world.tree().runs {
            let size = if run.start < part.end().0 { 4 * K } else { 2 * M };
            assert_eq!(run.size, size, "{run:?}");
        }
        world.destroy();
    }
}

#[test]
fn a_split_that_runs_dry_at_any_step_stops_and_resumes_there() {
    for bbm in BBM {
        splits_dry::<Arm<12>, BatchedSplit>(arm(), bbm, 8, 0..=9);
        splits_dry::<Arm<12>, BoundedWalk>(arm(), bbm, 8, 0..=9);
        splits_dry::<Arm<12>, EveryEntry>(arm(), bbm, 8, 0..=9);
    }
    splits_dry::<Arm<12>, BatchedSplit>(arm(), BreakBeforeMake::Always, 512, [342, 512, 513]);
    splits_dry::<Ept<true>, BatchedSplit>(ept(), BreakBeforeMake::Never, 8, 0..=9);
    splits_dry::<Ept<true>, EveryEntry>(ept(), BreakBeforeMake::Always, 8, 0..=9);
    #[cfg(feature = "every-format")]
    splits_dry::<Npt<true>, BatchedSplit>(
        npt::FORMAT,
        BreakBeforeMake::Never,
        512,
        [342, 512, 513],
    );
    #[cfg(feature = "every-format")]
    splits_dry::<Npt<true>, EveryEntry>(npt::FORMAT, BreakBeforeMake::Always, 8, 0..=9);
}

/// A fault in an empty tree, with fewer and fewer frames.
fn a_fault_that_runs_dry_at_any_step_resumes_with_its_tables<H: Hardware>(enough: usize) {
    let format = H::usual();
    for frames in 0..=enough {
        on_stage::<H>((format, 40, frames), |_, guard, cache| {
            let at = Gpa(5 * G + 7);
            let result = guard.reserve(at, PageSize::SIZE_4K, cache);
            if frames == enough {
                let reservation = result.unwrap();
                assert_eq!(reservation.range(), range(5 * G, 4 * K));
                assert_eq!(reservation.commit(Hpa(4 * K), RAM), Ok(Some(4 * K)));
                assert_eq!(host::<H>(guard, 5 * G + 7), Some(Hpa(4 * K + 7)));
                return;
            }
            refused(result, at.0, MapError::CacheEmpty);
            assert_eq!((cache.len(), host::<H>(guard, at.0)), (0, None));
            // Tables that were built stay, and need not be built again.
            assert_eq!(guard.counts().tables_built, frames as u64);
        });
    }
    on_stage::<H>((format, 40, 1), |_, guard, cache| {
        // One at a time.
        for done in 1..=enough {
            cache.fill(1).unwrap();
            let result = guard.reserve(Gpa(0), PageSize::SIZE_4K, cache);
            assert_eq!(result.is_ok(), done == enough);
        }
    });
}
on!(
    a_fault_that_runs_dry_at_any_step_resumes_with_its_tables:
    arm_4k(2), ept(3);
    npt(3), ept_2m(3)
);

fn unmap_by<H: Hardware>(
    guard: &mut GuardOf<'_, '_, H>,
    all: GpaRange,
    room: usize,
) -> (Vec<UnmappedRun>, usize) {
    let mut storage = Vec::new();
    storage.resize_with(room, || UnmapEntry::EMPTY);
    let mut batch = guard.unmap_batch(&mut storage);
    let (mut gone, mut stops, mut from) = (Vec::new(), 0, all.start().0);
    loop {
        let result = guard.unmap(range(from, all.end().0 - from), &mut batch);
        let full = batch.is_full();
        gone.extend(batch.complete());
        match result {
            Ok(_) => return (gone, stops),
            Err(Interruption { at, reason }) => {
                assert!(reason == UnmapError::Full && full && at.0 > from, "{reason} at {at}");
                (from, stops) = (at.0, stops + 1);
            }
        }
    }
}

fn an_unmap_that_fills_its_room_at_any_step_resumes_there<H: Hardware>() {
    let format = H::usual();
    let all = range(0, 6 * M);
    // Runs: two pages, two more with other rights, a gap, and two blocks whose memory is not
    // contiguous.
    let mut expected = None;
    for room in 1..8 {
        on_stage::<H>((format, 40, 8), |tables, guard, cache| {
            let data = Attributes { execute: Execute::None, ..RAM };
            let (page, block) = (PageSize::SIZE_4K, PageSize::SIZE_2M);
            let mut map = |at, bytes, hpa, attributes, largest| {
                let done = guard.map(range(at, bytes), Hpa(hpa), attributes, largest, cache);
                assert_eq!(done, Ok(bytes));
            };
            map(0, 8 * K, G, RAM, page);
            map(8 * K, 8 * K, G + 8 * K, data, page);
            map(2 * M, 2 * M, 2 * G, RAM, block);
            map(4 * M, 2 * M, 2 * G + 4 * M, RAM, block);
            let (gone, stops) = unmap_by::<H>(guard, all, room);
            assert_eq!(stops, 4usize.div_ceil(room) - 1, "{room} places");
            let bytes: Vec<_> = gone.iter().map(|run| (run.gpa.0, run.bytes)).collect();
            let runs = [(0, 8 * K), (8 * K, 8 * K), (2 * M, 2 * M), (4 * M, 2 * M)];
            assert_eq!(bytes, runs);
            assert_eq!(expected.get_or_insert(gone.clone()), &gone);
            assert_eq!(tables.reclaim(), 0, "somebody is inside");
            guard.refresh();
            // The table of pages, and those above it, whichever of the calls emptied them.
            let below_the_root = tables.geometry().root_level.into();
            assert_eq!(tables.reclaim(), below_the_root, "{room} places");
        });
    }
    // One place holds any number of neighbours; without a place, nothing is unmapped.
    on_stage::<H>((format, 40, 8), |_, guard, cache| {
        let done = guard.map(range(0, 4 * M), Hpa(0), RAM, PageSize::SIZE_4K, cache);
        assert_eq!(done, Ok(4 * M));
        let mut batch = guard.unmap_batch(&mut []);
        refused(guard.unmap(all, &mut batch), 0, UnmapError::Full);
        assert_eq!(batch.complete().next(), None);
        assert_eq!(host::<H>(guard, 0), Some(Hpa(0)));
        let (gone, stops) = unmap_by::<H>(guard, all, 1);
        assert_eq!((gone.len(), gone[0].bytes, stops), (1, 4 * M, 0));
        let before = guard.counts();
        let mut batch = guard.unmap_batch(&mut []);
        assert_eq!(guard.unmap(all, &mut batch), Ok(0), "nothing needs no room");
        assert_eq!(batch.complete().next(), None);
        assert_eq!(guard.counts().entries_written, before.entries_written);
    });
    on_stage::<H>((format, 40, 0), |_, guard, _| idle::<H>(guard));
}
on!(an_unmap_that_fills_its_room_at_any_step_resumes_there; npt, ept_2m);
