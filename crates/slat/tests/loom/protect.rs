//! Write-protect against everything else.

use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::Attributes;

const RAM: Attributes = Attributes::RAM;

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
fn after_its_shootdown_no_cpu_writes_to_protected_memory() {
    explore("write_protect || hardware, lazy TLB", || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..BLOCK, CLEAN, BLOCK);
        guest.access(0, true, Use::Always);
        // A write to what was protected fails the access.
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
fn two_write_protects_leave_nothing_writable_and_forget_no_write() {
    // Three threads on one slot: all orders would take minutes.
    bounded("write_protect || write_protect || hardware", 4, || {
        let guest = Guest::new(14, ALWAYS).running().mapped(0..PAGE, CLEAN, PAGE);
        let range = slat::GpaRange::new(slat::Gpa(0), PAGE).unwrap();
        let vcpu = spawn(move || guest.write(0));
        let other = spawn(move || guest.tables().write_protect(range));
        let here = guest.tables().write_protect(range);
        let wrote = vcpu.join().unwrap();
        // Either may have found the page protected already: both shootdowns are needed.
        let [here, other] = [here, other.join().unwrap()].map(|result| match result {
            Ok(done) => (done, true),
            Err(stopped) => (stopped.done, false),
        });
        for (done, _) in [&here, &other] {
            assert!(done.bytes == 0 || done.shootdown.owed().is_some());
        }
        if here.1 || other.1 {
            let (_, state) = guest.leaf(0);
            assert_eq!((state.write, state.dirty), (false, wrote));
        }
        let bytes = here.0.bytes + other.0.bytes;
        assert!(bytes == PAGE || !(here.1 || other.1), "one of them did it");
        let mut both = here.0;
        both.merge(other.0);
        let _ = both.shootdown.complete(guest.world);
        guest.protect_rest(guest.protect(0..PAGE));
        guest.end(0);
    });
}

#[test]
fn write_protect_beside_map_leaves_the_new_leaf_as_mapped_or_protected() {
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
fn write_protect_beside_unmap_brings_nothing_back() {
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
fn translate_beside_write_protect_sees_the_page() {
    explore("write_protect || translate", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let looks = spawn(move || guest.tables().translate(slat::Gpa(0)).unwrap().unwrap());
        assert!(guest.protect(0..PAGE).is_none());
        let saw = looks.join().unwrap();
        assert_eq!((saw.hpa.0, saw.attributes.dirty), (MEMORY, true));
        guest.end(0);
    });
}
