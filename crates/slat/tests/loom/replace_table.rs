//! A block that takes the place of a table: of tables of two levels beside threads that work below,
//! and beside a thread that gives an address in the table an owner.

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::*;

/// What another thread does to the first page, its table, or all.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Beside {
    Hardware,
    Unmap,
    UnmapAll,
    Collapse,
    Replace,
    Split,
    Relax,
}

/// A table of a table of two pages and a block.
fn two_levels<F: WalkedFormat>(bbm: BreakBeforeMake, beside: Beside) {
    let mut guest = On::<F>::new(15, bbm);
    let mut attributes = RAM;
    if beside == Beside::Hardware {
        (guest, attributes) = (guest.running(), CLEAN);
    }
    let guest = guest.mapped(0..BLOCK, attributes, PAGE).mapped(BLOCK..BIG, attributes, BLOCK);
    if beside == Beside::Hardware {
        guest.access(PAGE, false, Use::Always);
    }
    let mut cache = guest.cache(1);
    let other = spawn(move || match beside {
        Beside::Hardware => guest.access(PAGE, true, Use::Always).is_some(),
        Beside::Unmap => !guest.unmap(0..PAGE).0.is_empty(),
        // It may find the block as well, behind pages that it has taken out before.
        Beside::UnmapAll => !guest.unmap(0..BIG).0.is_empty(),
        Beside::Collapse => guest.collapse(0..BLOCK, BLOCK).is_none(),
        Beside::Replace => guest.replace_table(0..BLOCK, RAM).is_ok(),
        Beside::Split => guest.split(BLOCK..BIG, PAGE, &mut cache).1.is_none(),
        Beside::Relax => guest.relax(0..PAGE, Access::Write).is_none(),
    });
    let mut replaced = guest.replace_table(0..BIG, attributes);
    let done = other.join().unwrap();
    if replaced == Err(MapError::Contended) {
        replaced = guest.replace_table(0..BIG, attributes);
    }
    match replaced {
        Ok(true) if beside == Beside::UnmapAll && guest.at(0).is_none() => {}
        Ok(true) => {
            let (size, state) = guest.leaf(PAGE);
            // A split may have come afterwards.
            assert!(size == BIG || beside == Beside::Split);
            assert!(state.dirty || beside == Beside::Hardware && !done, "a write was lost");
        }
        Ok(false) => assert!(beside == Beside::UnmapAll && done, "the table is there"),
        Err(reason) => panic!("{reason:?}"),
    }
    guest.settle();
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

#[test]
fn a_block_replaces_tables_of_two_levels_beside_a_thread_below() {
    use Beside::*;
    let all = [Hardware, Unmap, UnmapAll, Collapse, Replace, Split, Relax];
    for beside in all {
        let name = |machine| std::format!("replace of two levels || {beside:?}, {machine}");
        bounded(&name("Arm"), 2, move || two_levels::<Tiny>(NEVER, beside));
        bounded(&name("Arm, break"), 2, move || two_levels::<Tiny>(ALWAYS, beside));
        bounded(&name("Intel"), 2, move || two_levels::<TinyEpt>(NEVER, beside));
    }
}

/// What happens to the second page of a table whose first page was not used.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Second {
    Hardware,
    Retype,
}

fn second_page<F: WalkedFormat>(bbm: BreakBeforeMake, second: Second) {
    let mut guest = On::<F>::new(14, bbm);
    let attributes = if second == Second::Hardware { CLEAN } else { RAM };
    if second == Second::Hardware {
        guest = guest.running();
    }
    let guest = guest.mapped(0..PAGE, CLEAN, PAGE).mapped(PAGE..BLOCK, attributes, PAGE);
    if second == Second::Hardware {
        guest.access(PAGE, false, Use::Always);
    }
    let other = spawn(move || match second {
        Second::Hardware => guest.access(PAGE, true, Use::Always).is_some(),
        Second::Retype => guest.inside().retype(0..BLOCK).is_none(),
    });
    let mut replaced = guest.replace_table(0..BLOCK, CLEAN);
    let done = other.join().unwrap();
    if replaced == Err(MapError::Contended) {
        replaced = guest.replace_table(0..BLOCK, CLEAN);
    }
    assert_eq!(replaced, Ok(true));
    let (size, state) = guest.leaf(0);
    assert_eq!(size, BLOCK);
    assert!(state.dirty || second == Second::Hardware && !done, "a write was lost");
    guest.settle();
    guest.end(1);
}

#[test]
fn a_replacing_block_is_dirty_despite_a_concurrent_leaf_change() {
    use Second::*;
    for second in [Hardware, Retype] {
        let name = |machine| std::format!("replace of a table || {second:?} of a page, {machine}");
        bounded(&name("Arm"), 4, move || second_page::<Tiny>(NEVER, second));
        bounded(&name("Arm, break"), 4, move || second_page::<Tiny>(ALWAYS, second));
        bounded(&name("Intel"), 4, move || second_page::<TinyEpt>(NEVER, second));
    }
}

fn beside_an_owner<F: WalkedFormat>(name: &str) {
    explore(&std::format!("replace of a table || own, {name}"), || {
        let guest = On::<F>::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let one = Owner::new(1);
        let owns = spawn(move || {
            let mut cache = guest.cache(1);
            let mut inside = guest.inside();
            let page = range(&(PAGE..BLOCK));
            inside.guard.set_owner(page, None, one, &mut cache).map_err(|stopped| stopped.reason)
        });
        let replaced = guest.replace_table(0..BLOCK, RAM);
        let owned = owns.join().unwrap();
        let owner = guest.inside().guard.owner(Gpa(PAGE)).expect("a marker was left behind");
        match (owned, replaced) {
            (Ok(bytes), Ok(false) | Err(MapError::Contended)) => {
                assert_eq!((bytes, owner), (PAGE, one), "the owner was lost");
                assert_eq!(guest.leaf(0).0, PAGE);
            }
            (Err(OwnerError::Occupied { .. } | OwnerError::Contended), Ok(true)) => {
                assert_eq!(guest.leaf(PAGE).0, BLOCK);
            }
            (Err(OwnerError::Contended), Ok(false) | Err(MapError::Contended)) => {}
            both => panic!("{both:?}"),
        }
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}

#[test]
fn an_address_that_gets_an_owner_keeps_its_table() {
    beside_an_owner::<Tiny>("Arm");
    beside_an_owner::<TinyEpt>("Intel");
}
