//! Leaves that are replaced in place, against threads that use, write, unmap or replace them.

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{Access, Attributes, Gpa, Hpa, ReplaceError, Software, UnmapBatch};

const NEW: u64 = 2 * MEMORY;
/// The state of a page while it is moved.
const HELD: Attributes = Attributes { accessed: true, ..PROTECTED };

fn moves<F: crate::hardware::WalkedFormat>(guest: On<F>, to: u64) -> Result<bool, ReplaceError> {
    let mut inside = guest.inside();
    let page = range(&(0..PAGE));
    let moved = inside.guard.replace(page, Hpa(MEMORY), Hpa(to), HELD);
    inside.guard.invalidate();
    moved.map(|bytes| bytes == PAGE).map_err(|stopped| stopped.reason)
}

fn stands<F: crate::hardware::WalkedFormat>(guest: On<F>) -> Option<u64> {
    guest.inside().guard.translate(Gpa(0)).expect("a marker was left behind").map(|leaf| leaf.hpa.0)
}

fn a_write<F: crate::hardware::WalkedFormat>(name: &str) {
    explore(name, || {
        let guest = On::<F>::new(14, NEVER).running().mapped(0..PAGE, HELD, PAGE);
        // It was copied here.
        let vcpu = spawn(move || {
            let rest = guest.relax(0..PAGE, Access::Write);
            rest.is_none().then(|| guest.access(0, true, Use::Never)).flatten()
        });
        let moved = moves(guest, NEW);
        let wrote = vcpu.join().unwrap();
        match moved {
            Ok(true) => assert!(wrote.is_none_or(|hpa| hpa.0 == NEW), "what was written is lost"),
            Err(ReplaceError::Writable | ReplaceError::Contended) => {
                assert!(wrote.is_none_or(|hpa| hpa.0 == MEMORY));
            }
            odd => panic!("{odd:?}"),
        }
        guest.close();
    });
}

#[test]
fn a_write_during_a_move_is_in_the_new_memory_or_prevents_it() {
    a_write::<Tiny>("replace || relax, hardware write, Arm");
    a_write::<TinyEpt>("replace || relax, hardware write, Intel");
}

fn a_write_in_place<F: crate::hardware::WalkedFormat>(name: &str) {
    explore(name, || {
        let guest = On::<F>::new(14, NEVER).running().mapped(0..PAGE, HELD, PAGE);
        let vcpu = spawn(move || {
            let rest = guest.relax(0..PAGE, Access::Write);
            rest.is_none().then(|| guest.access(0, true, Use::Never)).flatten().is_some()
        });
        let mut inside = guest.inside();
        let marked = Attributes { software: Software::A, ..HELD };
        let done = inside.guard.replace(range(&(0..PAGE)), Hpa(MEMORY), Hpa(MEMORY), marked);
        drop(inside);
        let wrote = vcpu.join().unwrap();
        let state = guest.leaf(0).1;
        assert!(!wrote || state.dirty, "a write is lost");
        assert!(done.is_err() || state.software.contains(Software::A));
        guest.close();
    });
}

#[test]
fn a_write_while_a_leafs_attributes_are_replaced_is_not_lost() {
    a_write_in_place::<Tiny>("replace in place || relax, hardware write, Arm");
    a_write_in_place::<TinyEpt>("replace in place || relax, hardware write, Intel");
}

/// The model fails an access if the TLB has two addresses of a page.
fn a_lazy_tlb<F: crate::hardware::WalkedFormat>(name: &str) {
    explore(name, || {
        let guest = On::<F>::new(14, NEVER).running().mapped(0..PAGE, HELD, PAGE);
        guest.access(0, false, Use::Always);
        // The model fails an access that reaches freed memory, or finds two addresses in the TLB.
        let vcpu = spawn(move || {
            guest.access(0, false, Use::Always);
            guest.access(0, false, Use::Never);
        });
        if moves(guest, NEW) == Ok(true) {
            guest.world.ledger.lose(MEMORY..MEMORY + PAGE);
            assert_eq!(guest.access(0, false, Use::Always), Some(Hpa(NEW)));
        }
        vcpu.join().unwrap();
        guest.close();
    });
}

#[test]
fn no_cpu_uses_a_pages_old_memory_while_another_uses_the_new() {
    a_lazy_tlb::<Tiny>("replace || hardware, lazy TLB, Arm");
    a_lazy_tlb::<TinyEpt>("replace || hardware, lazy TLB, Intel");
}

#[test]
fn the_second_of_two_moves_of_one_page_gets_an_error() {
    explore("replace || replace", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, HELD, PAGE);
        let other = spawn(move || moves(guest, 3 * MEMORY));
        let done = [moves(guest, NEW), other.join().unwrap()];
        let found = stands(guest).expect("a page was lost");
        for (done, to) in done.into_iter().zip([NEW, 3 * MEMORY]) {
            match done {
                Ok(moved) => assert_eq!((moved, found), (true, to)),
                Err(ReplaceError::Differs { hpa, .. }) => assert_eq!(hpa.0, found),
                Err(reason) => assert_eq!(reason, ReplaceError::Contended),
            }
        }
        guest.close();
    });
}

fn an_unmap<F: crate::hardware::WalkedFormat>(name: &str) {
    bounded(name, 4, || {
        let guest = On::<F>::new(14, NEVER).mapped(0..PAGE, HELD, PAGE);
        let unmaps = spawn(move || {
            let mut storage = [const { slat::UnmapEntry::EMPTY }; 2];
            let mut batch = UnmapBatch::new(guest.tables(), &mut storage);
            let done = guest.inside().guard.unmap(range(&(0..PAGE)), &mut batch);
            (done.is_ok(), batch.complete().collect::<std::vec::Vec<_>>())
        });
        let moved = moves(guest, NEW);
        let (unmapped, gone) = unmaps.join().unwrap();
        assert_eq!(unmapped, stands(guest).is_none());
        if unmapped {
            assert_eq!(gone.len(), 1, "handed out once");
            let from = if moved == Ok(true) { NEW } else { MEMORY };
            assert!(gone[0].hpa.0 == from && gone[0].attributes.accessed);
        }
        guest.close();
    });
}

#[test]
fn an_unmap_during_a_move_hands_out_the_latest_memory() {
    an_unmap::<Tiny>("replace || unmap, Arm");
    an_unmap::<TinyEpt>("replace || unmap, Intel");
}

fn a_mark<F: crate::hardware::WalkedFormat>(name: &str) {
    explore(name, || {
        let guest = On::<F>::new(14, NEVER).mapped(0..PAGE, HELD, PAGE);
        let marks = spawn(move || guest.mark(0..PAGE).is_none());
        let moved = moves(guest, NEW);
        let marked = marks.join().unwrap();
        let leaf = guest.inside().guard.translate(Gpa(0)).expect("a marker was left behind");
        let leaf = leaf.expect("a mapping was lost");
        let has = leaf.attributes.software.contains(Software::B);
        assert!(leaf.attributes.accessed && (marked || !has));
        match moved {
            // The mark came before the move, and went with the old leaf, or after it.
            Ok(true) => assert_eq!(leaf.hpa, Hpa(NEW)),
            Err(ReplaceError::Contended) => assert_eq!((leaf.hpa, has), (Hpa(MEMORY), marked)),
            odd => panic!("{odd:?}"),
        }
        assert!(guest.mark(0..PAGE).is_none());
        assert_eq!(stands(guest), Some(leaf.hpa.0));
        guest.close();
    });
}

#[test]
fn a_software_bit_set_during_a_move_restores_no_old_memory() {
    a_mark::<Tiny>("replace || set_software, Arm");
    a_mark::<TinyEpt>("replace || set_software, Intel");
}

#[test]
fn no_cpu_of_a_new_vmid_reaches_memory_unmapped_meanwhile() {
    explore("set_vmid || unmap || hardware, lazy TLB", || {
        let guest = Guest::new(14, NEVER).running().mapped(0..PAGE, RAM, PAGE);
        let enters = spawn(move || {
            // SAFETY: the only CPU is this thread; it holds nothing under the new VMID, and no
            // other guest is there to get the old one.
            unsafe { guest.tables().set_vmid(slat::Vmid(1)) };
            guest.world.loaded.set(guest.tables().vmid());
            guest.access(0, false, Use::Always);
        });
        let result = guest.unmap(0..PAGE);
        enters.join().unwrap();
        guest.unmap_rest(result);
        // The model fails an access that reaches freed memory.
        assert!(guest.access(0, false, Use::Always).is_none());
        guest.end(1);
    });
}
