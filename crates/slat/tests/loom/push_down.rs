//! Write protection of subtrees, and faults that push it down; on Intel only, whose tables have
//! rights. (`pairs` has the pairs of operations; here are models with a CPU, and with three
//! threads.)

use crate::guest::*;
use crate::hardware::Use;
use crate::machine::*;
use loom::thread::spawn;
use slat::Access::Write;

/// Two dirty pages in a table that a first round has protected.
fn protected() -> X86 {
    let guest = X86::new(14, NEVER).running().mapped(0..BLOCK, RAM, PAGE);
    guest.access(0, true, Use::Always);
    guest.access(PAGE, true, Use::Always);
    assert!(guest.round(0..BLOCK).is_none());
    assert!(guest.access(0, true, Use::Always).is_none(), "the round has begun");
    guest
}

/// The guest goes on, and writes to both pages as far as the tables allow.
fn writes(guest: X86) {
    guest.access(PAGE, true, Use::Always);
    guest.access(0, true, Use::Always);
}

fn rounded(guest: X86) {
    assert!(guest.round(0..BLOCK).is_none(), "nobody else is at work");
    writes(guest);
    guest.settle();
    guest.end(0);
}

#[test]
fn a_fault_gives_the_right_to_its_page_alone() {
    explore("relax (push-down) || hardware", || {
        let guest = protected();
        let vcpu = spawn(move || writes(guest));
        let rest = guest.relax(0..PAGE, Write);
        vcpu.join().unwrap();
        guest.relax_rest(rest, Write);
        assert!(guest.leaf(0).1.write && !guest.leaf(PAGE).1.write);
        assert!(guest.access(0, true, Use::Always).is_some());
        assert!(guest.access(PAGE, true, Use::Always).is_none(), "its neighbour stays");
        rounded(guest);
    });
}

#[test]
fn a_round_that_begins_while_a_fault_pushes_down_misses_no_write() {
    bounded("relax (push-down) || round, then hardware", 4, || {
        let guest = protected();
        let rounds = spawn(move || {
            let rest = guest.round(0..BLOCK);
            writes(guest);
            rest
        });
        let rest = guest.relax(0..PAGE, Write);
        drop_rest(rounds.join().unwrap());
        guest.relax_rest(rest, Write);
        rounded(guest);
    });
}

#[test]
fn two_faults_that_push_down_the_same_table_both_get_their_page_and_no_more() {
    bounded("relax (push-down) || relax (push-down), then hardware", 3, || {
        let guest = protected();
        let other = spawn(move || guest.relax(PAGE..BLOCK, Write));
        let rest = guest.relax(0..PAGE, Write);
        writes(guest);
        guest.relax_rest(other.join().unwrap(), Write);
        guest.relax_rest(rest, Write);
        assert!(guest.leaf(0).1.write && guest.leaf(PAGE).1.write);
        rounded(guest);
    });
}

/// A fault has passed the table before a round takes the table's right; another fault pushes down
/// at the same time. If the late one gives a right after its page was passed, the next round must
/// take that again.
#[test]
fn a_fault_that_comes_late_into_a_table_that_is_pushed_down_is_in_the_next_log() {
    bounded("relax || round, relax (push-down) || round, then hardware", 2, || {
        let guest = protected();
        assert!(guest.relax(0..PAGE, Write).is_none());
        let late = spawn(move || guest.relax(PAGE..BLOCK, Write));
        let rounds = spawn(move || guest.round(0..BLOCK));
        drop_rest(guest.round(0..BLOCK));
        let rest = guest.relax(0..PAGE, Write);
        drop_rest(late.join().unwrap());
        drop_rest(rounds.join().unwrap());
        writes(guest);
        guest.relax_rest(rest, Write);
        rounded(guest);
    });
}

/// A contended round did not begin; a contended fault is repeated.
fn drop_rest(rest: Outcome<slat::ChangeError>) {
    assert!(rest.is_none_or(|rest| rest.reason == slat::ChangeError::Contended));
}

#[test]
fn a_fault_during_a_collapse_gives_no_right_to_a_page_that_stays_protected() {
    bounded("relax (push-down) || collapse, then hardware", 3, || {
        let guest = protected();
        let collapses = spawn(move || guest.collapse(0..BLOCK, BLOCK));
        let rest = guest.relax(PAGE..BLOCK, Write);
        let _ = collapses.join().unwrap();
        // It was contended, or is a block by now: the fault is repeated.
        let cut = |reason| matches!(reason, slat::ChangeError::CutsBlock { .. });
        assert!(
            rest.is_none_or(|rest| rest.reason == slat::ChangeError::Contended || cut(rest.reason))
        );
        writes(guest);
        assert!(guest.round(0..BLOCK).is_none());
        guest.settle();
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}

#[test]
fn two_rounds_and_a_fault_miss_no_write() {
    bounded("relax (push-down) || round, hardware || round", 2, || {
        let guest = protected();
        let rounds = spawn(move || {
            let rest = guest.round(0..BLOCK);
            writes(guest);
            rest
        });
        let again = spawn(move || guest.round(0..BLOCK));
        let rest = guest.relax(0..PAGE, Write);
        drop_rest(rounds.join().unwrap());
        drop_rest(again.join().unwrap());
        guest.relax_rest(rest, Write);
        rounded(guest);
    });
}

#[test]
fn two_faults_and_a_round_miss_no_write() {
    bounded("relax || relax || round, then hardware", 1, || {
        let guest = protected();
        let faults = spawn(move || guest.relax(PAGE..BLOCK, Write));
        let rounds = spawn(move || {
            let rest = guest.round(0..BLOCK);
            writes(guest);
            rest
        });
        let rest = guest.relax(0..PAGE, Write);
        guest.relax_rest(faults.join().unwrap().filter(|_| false), Write);
        drop_rest(rounds.join().unwrap());
        guest.relax_rest(rest, Write);
        rounded(guest);
    });
}

#[test]
fn protection_is_pushed_down_through_two_levels() {
    bounded("relax (push-down) || round, three levels", 2, || {
        let guest = X86::new(15, NEVER).running().mapped(0..BIG, RAM, PAGE);
        assert!(guest.round(0..BIG).is_none());
        let rounds = spawn(move || {
            let rest = guest.round(0..BIG);
            for page in [0, PAGE, BLOCK] {
                guest.access(page, true, Use::Always);
            }
            rest
        });
        let rest = guest.relax(0..PAGE, Write);
        drop_rest(rounds.join().unwrap());
        guest.relax_rest(rest, Write);
        for page in [PAGE, BLOCK, BLOCK + PAGE] {
            assert!(!guest.leaf(page).1.write, "{page:#x} was never relaxed");
        }
        guest.settle();
        guest.end(0);
    });
}

/// The collapse's block is in the place of a table that the push-down was about to protect: the
/// block loses the right in its turn.
#[test]
fn a_fault_beside_a_collapse_protects_the_block_that_took_the_place_of_a_table() {
    bounded("relax (push-down) || collapse of a neighbour, three levels", 2, || {
        let guest = X86::new(15, NEVER).running().mapped(0..BIG, RAM, PAGE);
        assert!(guest.round(0..BIG).is_none());
        let collapses = spawn(move || guest.collapse(0..BLOCK, BLOCK));
        let rest = guest.relax(BLOCK..BLOCK + PAGE, Write);
        let _ = collapses.join().unwrap();
        guest.relax_rest(rest, Write);
        for page in [0, PAGE, BLOCK + PAGE] {
            assert!(!guest.leaf(page).1.write, "{page:#x} was never relaxed");
        }
        guest.settle();
        let retired = guest.pages() - 1 - guest.linked();
        guest.end(retired);
    });
}
