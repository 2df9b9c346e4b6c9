//! Tables that are unlinked: kept while a thread may be in them, then given back.

use crate::common::hardware::Hardware;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{G, K, M, RAM, arm, range};
use crate::common::world::{ALL, TablesOf, VMID, cache};
use crate::common::{Event, TestPlatform, destroy, unmap};
use crate::obligations::guest;
use slat::{BreakBeforeMake, Gpa, Hpa, PageSize, UnmapEntry, Vmid};

fn a_table_is_kept_until_no_thread_can_be_in_it<H: Hardware>() {
    let format = H::usual();
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<H>(&platform, format, VMID);
    let other = guest::<H>(&platform, format, Vmid(9));
    let [mut a, mut b, mut c] = [(); 3].map(|()| platform.register());
    let mut early = tables.enter(&mut a).unwrap();
    let mut guard = tables.enter(&mut b).unwrap();
    let elsewhere = other.enter(&mut c).unwrap();
    // Unlinks the table of pages while another thread is inside.
    assert_eq!(unmap(&mut guard, range(16 * M, 2 * M)).len(), 1);
    let live = platform.live();
    assert_eq!((tables.reclaim(), platform.live()), (0, live));
    guard.refresh();
    assert_eq!(tables.reclaim(), 0, "two are still inside");
    early.refresh();
    // The reclaim does not wait for a thread in another guest's tables.
    platform.take_events();
    assert_eq!((tables.reclaim(), platform.live()), (1, live - 1));
    drop(elsewhere);
    assert_eq!(platform.take_events(), [], "walk caches were invalidated before");
    assert_eq!((tables.reclaim(), other.reclaim()), (0, 0));
    // The reclaim waits for a thread that enters after the unlinking and before the reclaim,
    // but not for one that enters later.
    let mut storage = Vec::new();
    let mut frames = cache::<H>(&platform, &mut storage, 4);
    let page = range(16 * M, 4 * K);
    assert_eq!(guard.map(page, Hpa(0), RAM, PageSize::SIZE_4K, &mut frames), Ok(4 * K));
    assert_eq!(unmap(&mut guard, range(16 * M, 2 * M)).len(), 1);
    drop((early, guard));
    let inside = tables.enter(&mut a).unwrap();
    assert_eq!(tables.reclaim(), 0);
    let late = tables.enter(&mut b).unwrap();
    drop(inside);
    assert_eq!(tables.reclaim(), 1);
    drop((late, frames));
    destroy(tables);
    destroy(other);
    assert_eq!(platform.live(), 0);
}
on!(a_table_is_kept_until_no_thread_can_be_in_it; npt);

/// Unmaps what is in the first 2 MiB, and a page that is mapped there: its table is unlinked, and
/// its invalidation completed.
fn unlink<H: Hardware>(tables: &TablesOf<'_, H>, platform: &TestPlatform) {
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = Vec::new();
    let mut frames = cache::<H>(platform, &mut storage, 1);
    unmap(&mut guard, range(0, 2 * M));
    let page = range(0, 4 * K);
    assert_eq!(guard.map(page, Hpa(0), RAM, PageSize::SIZE_4K, &mut frames), Ok(4 * K));
    assert_eq!(unmap(&mut guard, range(0, 2 * M)).len(), 1);
}

/// [`unlink`]; then the table of the pages is unlinked by removals that are dropped.
fn unlink_both<H: Hardware>(tables: &TablesOf<'_, H>, platform: &TestPlatform) {
    unlink::<H>(tables, platform);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut places = [const { UnmapEntry::EMPTY }; 2];
    let mut batch = guard.unmap_batch(&mut places);
    assert_eq!(guard.unmap(range(16 * M, 2 * M), &mut batch), Ok(32 * K));
}

#[test]
fn one_thread_at_a_time_gives_tables_back() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<Arm<12>>(&platform, arm(), VMID);
    unlink_both::<Arm<12>>(&tables, &platform);
    // As the first reclaim invalidates, another thread unlinks a table, and reclaims.
    let (shared, mut first) = (std::ptr::from_ref(&tables).cast::<()>(), true);
    platform.meanwhile(Some(Box::new(move |platform, _| {
        if std::mem::take(&mut first) {
            // SAFETY: this runs inside the reclaim below, which borrows the tables.
            let tables = unsafe { &*shared.cast::<TablesOf<'_, Arm<12>>>() };
            unlink::<Arm<12>>(tables, platform);
            assert_eq!(tables.reclaim(), 0);
        }
    })));
    assert_eq!(tables.reclaim(), 2);
    platform.meanwhile(None);
    assert_eq!(tables.reclaim(), 1);
    destroy(tables);
    assert_eq!(platform.live(), 0);
}

fn tables_with_and_without_due_invalidation_are_freed_together<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    unlink_both::<H>(&tables, &platform);
    let live = platform.live();
    platform.take_events();
    assert_eq!((tables.reclaim(), platform.live()), (2, live - 2));
    assert_eq!(platform.take_events(), [Event::Invalidate(ALL)]);
    destroy(tables);
    assert_eq!(platform.live(), 0);
}
on!(tables_with_and_without_due_invalidation_are_freed_together);

fn a_prune_says_how_many_tables_it_gave_back<H: Hardware>() {
    let platform = TestPlatform::new(BreakBeforeMake::Never);
    let tables = guest::<H>(&platform, H::usual(), VMID);
    let mut reader = platform.register();
    let mut guard = tables.enter(&mut reader).unwrap();
    let mut storage = Vec::new();
    let mut frames = cache::<H>(&platform, &mut storage, 8);
    // Faults that were given up: two tables of pages and the one above them.
    for at in [G, G + 2 * M] {
        drop(guard.reserve(Gpa(at), PageSize::SIZE_4K, &mut frames).unwrap());
    }
    let live = platform.live();
    assert_eq!(guard.prune(range(0, 2 * G)), Ok(3));
    assert_eq!(tables.reclaim(), 0, "the guard may be in them");
    guard.refresh();
    assert_eq!((tables.reclaim(), platform.live()), (3, live - 3));
    drop((guard, frames));
    destroy(tables);
}
on!(a_prune_says_how_many_tables_it_gave_back);
