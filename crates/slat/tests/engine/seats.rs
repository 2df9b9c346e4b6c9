//! Seats: which threads have one, and which threads a moment waits for.

use crate::common::TestPlatform;
use crate::common::destroy;
use crate::common::hardware::arm::Arm;
use crate::common::stage::{K, range};
use crate::common::world::TablesOf;
use crate::obligations::arm;
use slat::{BreakBeforeMake, NoSeat, Participant, Platform, Vmid};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
fn a_moment_is_past_once_the_threads_that_were_inside_have_left() {
    // The first guest, at the clock's first reading, counts as any other.
    for vmid in [Vmid(0), Vmid(1)] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = TablesOf::<Arm<12>>::new(arm(), vmid, 40, &platform).unwrap();
        let mut member = platform.join();
        let guard = tables.enter(&mut member).unwrap();
        let moment = platform.grace().moment();
        assert_eq!([tables.is_past(moment), platform.grace().is_past(moment)], [false; 2]);
        drop(guard);
        assert_eq!([tables.is_past(moment), platform.grace().is_past(moment)], [true; 2]);
        drop(member);
        destroy(tables);
    }
}

#[test]
fn a_thread_that_has_left_tables_keeps_its_seat() {
    let platform = TestPlatform::new(BreakBeforeMake::Always);
    let tables = TablesOf::<Arm<12>>::new(arm(), Vmid(0), 40, &platform).unwrap();
    let mut first = platform.join();
    drop(tables.enter(&mut first).unwrap());
    let others = [platform.join(), platform.join(), platform.join()];
    assert_eq!(Participant::register(&platform).err(), Some(NoSeat { seats: 4 }));
    drop((first, others));
    destroy(tables);
}

#[test]
fn a_thread_that_drops_a_guard_that_owes_has_left_also_if_the_invalidation_panics() {
    for panics in [false, true] {
        let platform = TestPlatform::new(BreakBeforeMake::Always);
        let tables = TablesOf::<Arm<12>>::new(arm(), Vmid(1), 40, &platform).unwrap();
        let mut member = platform.join();
        let mut guard = tables.enter(&mut member).unwrap();
        guard.owe(range(0, 4 * K)).unwrap();
        let moment = platform.grace().moment();
        if panics {
            platform.meanwhile(Some(Box::new(|_, _| panic!("the CPU does not answer"))));
        }
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(guard)));
        platform.meanwhile(None);
        assert_eq!((dropped.is_err(), tables.is_past(moment)), (panics, true));
        drop(member);
        destroy(tables);
    }
}
