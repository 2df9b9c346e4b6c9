//! Operations that hold one entry of a table, give up because another thread holds the next, and
//! let go of the first, which hardware marks meanwhile.

use crate::guest::*;
use crate::hardware::WalkedFormat;
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{MapError, Platform, Pte, SplitError};

fn beside_a_write<F: WalkedFormat>(bits: u32, size: u64, give_up: fn(On<F>)) {
    let guest = On::<F>::new(bits, NEVER).running().mapped(0..2 * size, CLEAN, size);
    // SAFETY: linked tables of two entries, which stay until the model ends.
    let pte = |table, index| unsafe { guest.world.entries(table).add(index).as_ref() };
    let held: &Pte = pte(F::table_address(pte(guest.tables().root(), 0).load()), 1);
    let raw = held.load();
    assert_eq!(held.exchange(raw, raw | F::MARK), Ok(()));
    let vcpu = spawn(move || assert!(guest.write(0)));
    give_up(guest);
    vcpu.join().unwrap();
    assert_eq!(held.exchange(raw | F::MARK, raw), Ok(()), "somebody else's entry was changed");
    guest.settle();
    guest.end(0);
}

fn collapse<F: WalkedFormat>(guest: On<F>) {
    let rest = guest.collapse(0..BLOCK, BLOCK).expect("a page is held");
    assert_eq!(rest.reason, SplitError::Contended);
}

fn replace<F: WalkedFormat>(guest: On<F>) {
    assert_eq!(guest.replace_table(0..BIG, CLEAN), Err(MapError::Contended));
}

#[test]
fn a_write_to_a_page_that_a_failed_collapse_let_go_is_kept() {
    explore("collapse, in vain || hardware, Arm", || beside_a_write::<Tiny>(14, PAGE, collapse));
    explore("collapse, in vain || hardware, Intel", || {
        beside_a_write::<TinyEpt>(14, PAGE, collapse);
    });
}

#[test]
fn a_write_to_a_block_that_a_failed_replace_let_go_is_kept() {
    explore("replace, in vain || hardware, Arm", || beside_a_write::<Tiny>(15, BLOCK, replace));
    explore("replace, in vain || hardware, Intel", || {
        beside_a_write::<TinyEpt>(15, BLOCK, replace);
    });
}
