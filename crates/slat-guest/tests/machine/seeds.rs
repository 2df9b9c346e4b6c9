//! The seed of random tests.

use crate::seed::{chosen, seed, seeds};

#[test]
fn a_seed_that_is_given_wins_and_ci_has_always_the_same() {
    assert_eq!((chosen(Some("7"), true), chosen(Some("7"), false)), (7, 7));
    assert_eq!((chosen(None, true), chosen(None, true)), (0, 0));
}

#[test]
fn elsewhere_seeds_differ() {
    let some: std::collections::BTreeSet<_> = (0..8).map(|_| chosen(None, false)).collect();
    assert!(some.len() > 1 && some.iter().all(|&seed| seed >> 32 == 0), "{some:?}");
}

#[test]
#[should_panic(expected = "SLAT_SEED=x is not a number")]
fn a_seed_that_is_no_number_is_refused() {
    chosen(Some("x"), false);
}

#[test]
fn seeds_begin_with_the_seed_that_is_printed() {
    assert_eq!(seeds(3).collect::<Vec<_>>(), [0, 1, 2].map(|more| seed() + more));
}
