//! Rights and dirty state: write-protect, relax as a fault does it, and harvest, against all other
//! operations.

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{Access, Gpa, Pages};

#[test]
fn a_write_that_hardware_marked_is_remembered_by_write_protect() {
    explore("write_protect || hardware write", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let vcpu = spawn(move || guest.write(0));
        let rest = guest.protect(0..BLOCK);
        let wrote = vcpu.join().unwrap();
        guest.protect_rest(rest);
        let (_, state) = guest.leaf(0);
        assert_eq!((state.write, state.dirty), (false, wrote));
        guest.end(0);
    });
}

#[test]
fn a_hardware_write_survives_a_protection_of_named_pages() {
    explore("write_protect_pages || hardware write", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let vcpu = spawn(move || guest.write(0));
        let mut inside = guest.inside();
        let named = Pages { start: Gpa(0), bits: &[1] };
        let done = inside.guard.write_protect_pages(&named);
        inside.guard.invalidate();
        drop(inside);
        let wrote = vcpu.join().unwrap();
        if done.is_ok() {
            let (_, state) = guest.leaf(0);
            assert_eq!((state.write, state.dirty), (false, wrote));
        }
        guest.end(0);
    });
}

#[test]
fn after_its_shootdown_no_cpu_writes_to_protected_memory() {
    explore("write_protect || hardware, lazy TLB", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BLOCK, CLEAN, BLOCK);
        guest.access(0, true, Use::Always);
        // The model fails an access that writes to a protected page.
        let vcpu = spawn(move || {
            guest.access(0, true, Use::Always);
            guest.access(PAGE, true, Use::Always);
        });
        let rest = guest.protect(0..BLOCK);
        vcpu.join().unwrap();
        guest.protect_rest(rest);
        assert!(guest.access(0, true, Use::Always).is_none());
        assert!(guest.access(0, false, Use::Always).is_some());
        assert!(guest.leaf(0).1.dirty);
        guest.end(0);
    });
}

#[test]
fn two_write_protects_leave_no_right_and_lose_no_write() {
    // Three threads on one entry: all orders would take minutes.
    bounded("write_protect || write_protect || hardware", 4, || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let range = range(&(0..PAGE));
        let vcpu = spawn(move || guest.write(0));
        let protect = move || {
            let mut inside = guest.inside();
            let result = inside.guard.write_protect(range);
            (result, inside.guard)
        };
        let other = spawn(protect);
        let (here, mut guard) = protect();
        let wrote = vcpu.join().unwrap();
        // Either may have found the page protected already: both shootdowns are needed.
        let (other, mut others) = other.join().unwrap();
        for (result, guard) in [(&here, &guard), (&other, &others)] {
            assert!(
                !result.is_ok_and(|bytes| bytes != 0) || guard.pending_invalidation().is_some()
            );
        }
        if here.is_ok() || other.is_ok() {
            let (_, state) = guest.leaf(0);
            assert_eq!((state.write, state.dirty), (false, wrote));
            let owed = u64::from(guard.pending_invalidation().is_some())
                + u64::from(others.pending_invalidation().is_some());
            assert_eq!(owed, 1, "one of them did it");
        }
        let mut both = guest.tables().shootdown(&mut guard).unwrap();
        both.merge(guest.tables().shootdown(&mut others).unwrap());
        both.complete();
        drop((guard, others));
        guest.protect_rest(guest.protect(0..PAGE));
        guest.end(0);
    });
}

#[test]
fn a_write_protect_beside_a_map_leaves_it_whole_or_protected() {
    explore("write_protect || map", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut cache = guest.cache(1);
        let protects = spawn(move || guest.protect(0..BLOCK));
        let rest = guest.map(PAGE..BLOCK, RAM, PAGE, &mut cache);
        guest.protect_rest(protects.join().unwrap());
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        let state = guest.leaf(0).1;
        assert_eq!((state.write, state.dirty), (false, true));
        assert!(guest.leaf(PAGE).1.dirty);
        drop(cache);
        guest.end(0);
    });
}

#[test]
fn write_protect_during_unmap_restores_no_page() {
    explore("write_protect || unmap, retire", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let protects = spawn(move || guest.protect(0..BLOCK));
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        guest.protect_rest(protects.join().unwrap());
        assert_eq!((guest.at(0), guest.at(PAGE)), (None, None));
        assert_eq!(bytes(&removed), PAGE);
        assert!(removed.iter().all(|leaf| leaf.attributes.dirty));
        guest.end(1);
    });
}

#[test]
fn translate_during_write_protect_sees_the_page() {
    explore("write_protect || translate", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let looks = spawn(move || guest.inside().guard.translate(slat::Gpa(0)).unwrap().unwrap());
        assert!(guest.protect(0..PAGE).is_none());
        let saw = looks.join().unwrap();
        assert_eq!((saw.hpa.0, saw.attributes.dirty), (MEMORY, true));
        guest.end(0);
    });
}

#[test]
fn a_write_fault_beside_write_protect_leaves_the_page_dirty() {
    explore("relax || write_protect", || {
        let guest = Guest::new(14, ALWAYS).mapped(0..PAGE, PROTECTED, PAGE);
        // It is not `protect`, after which the machine counts every later write as an error.
        let other = spawn(move || guest.inside().guard.write_protect(range(&(0..PAGE))).is_ok());
        let rest = guest.relax(0..PAGE, Access::Write);
        let protected = other.join().unwrap();
        let relaxed = rest.is_none();
        guest.relax_rest(rest, Access::Write);
        let (_, state) = guest.leaf(0);
        assert!(state.accessed && state.dirty, "{state:?}");
        assert!(state.write || (protected && relaxed), "{state:?}");
        guest.end(0);
    });
}

#[test]
fn two_faults_on_one_page_leave_it_writable_once() {
    explore("relax || relax", || {
        let guest = Guest::new(14, ALWAYS).mapped(0..PAGE, PROTECTED, PAGE);
        let other = spawn(move || guest.relax(0..PAGE, Access::Read));
        let rest = guest.relax(0..PAGE, Access::Write);
        guest.relax_rest(other.join().unwrap(), Access::Read);
        guest.relax_rest(rest, Access::Write);
        assert_eq!(guest.leaf(0), (PAGE, RAM));
        guest.end(0);
    });
}

#[test]
fn a_read_fault_beside_a_hardware_write_loses_no_state() {
    explore("relax || hardware write", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let vcpu = spawn(move || guest.write(0));
        let rest = guest.relax(0..PAGE, Access::Read);
        let wrote = vcpu.join().unwrap();
        guest.relax_rest(rest, Access::Read);
        let (_, state) = guest.leaf(0);
        assert_eq!((state.accessed, state.dirty), (true, wrote));
        guest.end(0);
    });
}

#[test]
fn a_block_that_is_split_and_relaxed_is_writable_everywhere() {
    for bbm in [NEVER, ALWAYS] {
        explore(&std::format!("relax || split, break {bbm:?}"), move || {
            let guest = Guest::new(14, bbm).mapped(0..BLOCK, PROTECTED, BLOCK);
            let mut cache = guest.cache(1);
            let splits = spawn(move || (guest.split(0..BLOCK, PAGE, &mut cache).1, cache));
            let rest = guest.relax(0..BLOCK, Access::Write);
            let (split, mut cache) = splits.join().unwrap();
            guest.relax_rest(rest, Access::Write);
            guest.split_rest(split, PAGE, &mut cache);
            assert_eq!((guest.leaf(0), guest.leaf(PAGE)), ((PAGE, RAM), (PAGE, RAM)));
            drop(cache);
            guest.end(0);
        });
    }
}

#[test]
fn a_fault_during_unmap_restores_no_page() {
    explore("relax || unmap, retire", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, PROTECTED, PAGE);
        let faults = spawn(move || guest.relax(0..PAGE, Access::Write));
        let result = guest.unmap(0..BLOCK);
        let removed = guest.unmap_rest(result);
        guest.relax_rest(faults.join().unwrap(), Access::Write);
        assert_eq!((guest.at(0), bytes(&removed)), (None, PAGE));
        guest.end(1);
    });
}

fn harvested<F: WalkedFormat>() {
    let guest = On::<F>::new(14, NEVER).running().mapped(0..PAGE, CLEAN, PAGE);
    // The TLB holds the page as written: a write marks nothing.
    guest.access(0, true, Use::Always);
    let vcpu = spawn(move || guest.access(0, true, Use::Always).map(drop));
    let rest = guest.inside().harvest(0..BLOCK);
    guest.access(0, true, Use::Always);
    vcpu.join().unwrap();
    assert!(rest.is_none_or(|rest| rest.reason == slat::ChangeError::Contended));
    guest.settle();
    guest.end(0);
}

#[test]
fn a_write_after_a_harvest_has_returned_is_in_the_next() {
    explore("harvest || hardware, lazy TLB, Arm", harvested::<Tiny>);
    explore("harvest || hardware, lazy TLB, Intel", harvested::<TinyEpt>);
}
