//! Reader slots: which threads have one, and which threads a grace period waits for.

use crate::common::TestPlatform;
use crate::common::destroy;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{K, arm, range};
use crate::common::world::TablesOf;
use slat::{BreakBeforeMake, Platform, Reader, TooManyReaders, Vmid};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn a_grace_period_elapses_once_the_threads_inside_have_left() {
    // The first guest, at the clock's first reading, counts as any other.
    for vmid in [Vmid(0), Vmid(1)] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = TablesOf::<Arm<12>>::new(arm(), vmid, 40, &platform).unwrap();
        let mut reader = platform.register();
        let guard = tables.enter(&mut reader).unwrap();
        let period = platform.readers().begin_grace_period();
        assert_eq!(
            [tables.has_elapsed(period), platform.readers().has_elapsed(period)],
            [false; 2]
        );
        drop(guard);
        assert_eq!([tables.has_elapsed(period), platform.readers().has_elapsed(period)], [true; 2]);
        drop(reader);
        destroy(tables);
    }
}

#[test]
fn a_thread_that_has_left_tables_keeps_its_slot() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = TablesOf::<Arm<12>>::new(arm(), Vmid(0), 40, &platform).unwrap();
    let mut first = platform.register();
    drop(tables.enter(&mut first).unwrap());
    let others = [platform.register(), platform.register(), platform.register()];
    assert_eq!(Reader::register(&platform).err(), Some(TooManyReaders { slots: 4 }));
    drop((first, others));
    destroy(tables);
}

#[test]
fn a_thread_leaves_though_its_guards_invalidation_panics() {
    for panics in [false, true] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = TablesOf::<Arm<12>>::new(arm(), Vmid(1), 40, &platform).unwrap();
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        guard.defer_invalidation(range(0, 4 * K)).unwrap();
        let period = platform.readers().begin_grace_period();
        if panics {
            platform.meanwhile(Some(Box::new(|_, _| panic!("the CPU does not answer"))));
        }
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(guard)));
        platform.meanwhile(None);
        assert_eq!((dropped.is_err(), tables.has_elapsed(period)), (panics, true));
        drop(reader);
        destroy(tables);
    }
}

#[test]
#[cfg(debug_assertions)]
fn a_thread_knows_the_guests_whose_tables_it_is_inside() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let made = |vmid| TablesOf::<Arm<12>>::new(arm(), Vmid(vmid), 40, &platform).unwrap();
    let (tables, other, same) = (made(1), made(2), made(1));
    let inside = || [&tables, &other, &same].map(|tables| tables.caller_is_inside());
    let mut reader = platform.register();
    assert_eq!(inside(), [false; 3]);
    let mut guard = tables.enter(&mut reader).unwrap();
    assert_eq!(inside(), [true, false, true], "guests of one VMID are not told apart");
    guard.refresh();
    assert_eq!(inside(), [true, false, true]);
    drop(guard);
    assert_eq!(inside(), [false; 3]);
    std::mem::forget(other.enter(&mut reader).unwrap());
    assert_eq!(inside(), [false, true, false], "a guard that is forgotten is not left");
    drop(reader);
    assert_eq!(inside(), [false; 3]);
    [tables, other, same].into_iter().for_each(destroy);
}

#[test]
fn tables_of_an_invalidated_vmid_are_freed_without_another() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let made = || TablesOf::<Arm<12>>::new(arm(), Vmid(1), 40, &platform).unwrap();
    let (tables, other) = (made(), made());
    let mut reader = platform.register();
    drop(tables.enter(&mut reader).unwrap());
    platform.take_events();
    destroy(other);
    assert_eq!(platform.take_events().len(), 1);
    // SAFETY: no CPU has loaded the root, and the VMID's entries were invalidated since.
    unsafe { tables.deactivate_invalidated() }.destroy();
    assert_eq!((platform.take_events(), platform.live()), (vec![], 0));
}
