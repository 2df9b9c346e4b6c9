//! Relax, as a fault does it, against everything else.

use crate::machine::*;
use loom::thread::spawn;
use slat::{Access, Attributes};

const RAM: Attributes = Attributes::RAM;
/// Protected for dirty logging before it was used.
const PROTECTED: Attributes =
    Attributes { write: false, dirty: false, accessed: false, ..Attributes::RAM };

#[test]
fn a_write_fault_beside_write_protect_leaves_the_page_writable_or_protected_and_always_dirty() {
    explore("relax || write_protect", || {
        let guest = Guest::new(14, ALWAYS).mapped(0..PAGE, PROTECTED, PAGE);
        // Not `protect`, after which the machine takes every later write for a fault.
        let other = spawn(move || {
            let range = slat::GpaRange::new(slat::Gpa(0), PAGE).unwrap();
            guest.tables().write_protect(range).map(drop).is_ok()
        });
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
fn a_read_fault_beside_a_hardware_write_forgets_neither() {
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
fn a_fault_beside_unmap_brings_nothing_back() {
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
