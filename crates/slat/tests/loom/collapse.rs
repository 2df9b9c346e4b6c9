//! Collapse against threads whose changes it could lose: a page unmapped or protected at the same
//! time, and writes of hardware through a walk cache after the block is there; the same for two
//! tables that share an invalidation.

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{Access, BreakBeforeMake, ChangeError, SplitError, UnmapError};

fn on_all(name: &str, bound: Option<usize>, models: [fn(BreakBeforeMake); 2]) {
    let [arm, intel] = models;
    run(&std::format!("{name}, Arm"), bound, move || arm(NEVER));
    run(&std::format!("{name}, Arm, break"), bound, move || arm(ALWAYS));
    run(&std::format!("{name}, Intel"), bound, move || intel(NEVER));
}

fn unmap_a_page<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let guest = On::<F>::new(14, bbm).mapped(0..BLOCK, RAM, PAGE);
    let collapses = spawn(move || guest.collapse(0..BLOCK, BLOCK));
    let (removed, rest) = guest.unmap(0..PAGE);
    let _ = collapses.join().unwrap();
    match rest {
        None => assert_eq!(bytes(&removed), PAGE),
        Some(Rest { reason: UnmapError::Contended | UnmapError::CutsBlock { .. }, .. }) => {
            assert!(removed.is_empty());
        }
        Some(rest) => panic!("{rest:?}"),
    }
    assert_eq!(guest.at(0).is_some(), removed.is_empty(), "it came back");
    guest.leaf(PAGE);
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

#[test]
fn a_page_unmapped_while_its_table_collapses_stays_unmapped() {
    on_all("collapse || unmap of a page", Some(4), [unmap_a_page::<Tiny>, unmap_a_page::<TinyEpt>]);
}

fn protect_a_page<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let guest = On::<F>::new(14, bbm).running().mapped(0..BLOCK, RAM, PAGE);
    guest.access(0, true, Use::Always);
    let collapses = spawn(move || guest.collapse(0..BLOCK, BLOCK));
    let rest = guest.protect(0..PAGE);
    // The model fails an access that writes to a protected page.
    guest.access(0, true, Use::Always);
    let _ = collapses.join().unwrap();
    guest.access(0, true, Use::Always);
    assert_eq!(guest.leaf(0).1.write, rest.is_some());
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

#[test]
fn a_page_protected_while_its_table_collapses_is_not_written() {
    let models = [protect_a_page::<Tiny>, protect_a_page::<TinyEpt>];
    on_all("collapse || write_protect of a page || hardware", Some(4), models);
}

fn big<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let guest = On::<F>::new(15, bbm).running().mapped(0..BIG, CLEAN, BLOCK);
    guest.access(0, false, Use::Always);
    let vcpu = spawn(move || {
        // The CPU writes through the walk cache, into the table that may be unlinked by now.
        guest.access(BLOCK, true, Use::Always).is_some()
    });
    let rest = guest.collapse(0..BIG, BIG);
    let wrote = vcpu.join().unwrap();
    assert!(rest.is_none());
    let (size, state) = guest.leaf(BLOCK);
    assert_eq!((size, state.accessed, state.dirty), (BIG, true, wrote));
    assert!(wrote || bbm == ALWAYS, "a fault without a break");
    guest.settle();
    guest.end(1);
}

#[test]
fn blocks_become_a_larger_block_and_no_write_is_lost() {
    on_all("collapse of blocks || hardware", None, [big::<Tiny>, big::<TinyEpt>]);
}

fn both_levels<F: WalkedFormat>(bbm: BreakBeforeMake) {
    let guest = On::<F>::new(15, bbm).running().mapped(0..BIG, CLEAN, PAGE);
    guest.access(0, false, Use::Always);
    let vcpu = spawn(move || guest.access(PAGE, true, Use::Always).is_some());
    let rest = guest.collapse(0..BIG, BIG);
    let wrote = vcpu.join().unwrap();
    assert!(rest.is_none());
    let (size, state) = guest.leaf(PAGE);
    assert_eq!((size, state.dirty), (BIG, wrote));
    guest.settle();
    guest.end(3);
}

#[test]
fn three_tables_become_one_block_and_no_write_is_lost() {
    on_all(
        "collapse, two levels || hardware",
        Some(3),
        [both_levels::<Tiny>, both_levels::<TinyEpt>],
    );
}

/// What another thread does to a page of either of two tables that share an invalidation.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Beside {
    Fault,
    Hardware,
    Harvest,
    Age,
    Unmap,
    Split,
    Protect,
    Collapse,
}

fn batch<F: WalkedFormat>(bbm: BreakBeforeMake, beside: Beside, at: u64) {
    let attributes = match beside {
        Beside::Fault => PROTECTED,
        Beside::Hardware => CLEAN,
        _ => RAM,
    };
    let (page, table) = (at..at + PAGE, at & !(BLOCK - 1));
    let mut guest = On::<F>::new(15, bbm);
    if matches!(beside, Beside::Hardware | Beside::Protect) {
        guest = guest.running();
    }
    let guest = guest.mapped(0..BIG, attributes, PAGE);
    if beside == Beside::Hardware {
        guest.access(at, false, Use::Always);
    }
    let mut cache = guest.cache(1);
    let other = spawn(move || match beside {
        Beside::Fault => match guest.relax(page, Access::Write) {
            None => true,
            Some(Rest {
                reason: ChangeError::Contended | ChangeError::CutsBlock { .. }, ..
            }) => false,
            Some(rest) => panic!("{rest:?}"),
        },
        Beside::Hardware => guest.access(at, true, Use::Always).is_some(),
        Beside::Harvest => guest.inside().harvest(0..BIG).is_none(),
        Beside::Age => guest.age(0..BIG, EXACT).1.is_empty(),
        Beside::Unmap => {
            let (gone, rest) = guest.unmap(page);
            let held = matches!(
                rest,
                None | Some(Rest {
                    reason: UnmapError::Contended | UnmapError::CutsBlock { .. },
                    ..
                })
            );
            assert!(held && rest.is_none() != gone.is_empty(), "{rest:?}");
            !gone.is_empty()
        }
        Beside::Split => {
            let rest = guest.split(table..table + BLOCK, PAGE, &mut cache).1;
            rest.is_none_or(|rest| rest.reason != SplitError::Contended)
        }
        Beside::Protect => guest.protect(page).is_none(),
        Beside::Collapse => guest.collapse(0..BIG, BLOCK).is_none(),
    });
    let rest = guest.collapse(0..BIG, BLOCK);
    let done = other.join().unwrap();
    let alone = matches!(beside, Beside::Hardware | Beside::Age);
    for gpa in pages(&(0..BIG)) {
        let there = beside != Beside::Unmap || !done || gpa != at;
        assert_eq!(guest.at(gpa).is_some(), there, "{gpa:#x}");
        if !there {
            continue;
        }
        let (size, state) = guest.leaf(gpa);
        assert!(!alone || rest.is_some() || size == BLOCK, "{gpa:#x}");
        let inside = (table..table + BLOCK).contains(&gpa);
        match beside {
            Beside::Fault => assert_eq!(state.write, done && gpa == at, "{gpa:#x}"),
            Beside::Protect => assert_eq!(state.write, !done || gpa != at, "{gpa:#x}"),
            Beside::Hardware => assert_eq!(state.dirty, done && inside, "{gpa:#x}"),
            _ => assert!(state.write),
        }
    }
    assert!(beside != Beside::Hardware || done || bbm == ALWAYS, "a fault without a break");
    guest.settle();
    let retired = guest.pages() - 1 - guest.linked();
    guest.end(retired);
}

#[test]
fn two_tables_sharing_an_invalidation_lose_no_others_change() {
    use Beside::*;
    // Ageing reads both tables, and many orders of that differ in nothing.
    let whole = [(Harvest, 0, 2), (Age, 0, 1), (Collapse, 0, 1)];
    let one = [Fault, Hardware, Unmap, Split, Protect];
    // A page of the first table, and of the last.
    let one = one.into_iter().flat_map(|beside| [(beside, 0, 2), (beside, BLOCK + PAGE, 2)]);
    for (beside, at, most) in one.chain(whole) {
        let name = |machine| std::format!("collapse of two || {beside:?} {at:#x}, {machine}");
        bounded(&name("Arm"), most, move || batch::<Tiny>(NEVER, beside, at));
        bounded(&name("Arm, break"), most, move || batch::<Tiny>(ALWAYS, beside, at));
        bounded(&name("Intel"), most, move || batch::<TinyEpt>(NEVER, beside, at));
    }
}
