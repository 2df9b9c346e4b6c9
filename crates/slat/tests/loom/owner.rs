//! Owners of addresses that are not mapped, and tables that are given back when they are empty,
//! against threads that map and unmap.

use crate::guest::*;
use crate::hardware::{Use, WalkedFormat};
use crate::machine::*;
use loom::thread::spawn;
use slat::format::tiny::{Tiny, TinyEpt};
use slat::{Gpa, Hpa, Interruption, MapError, Owner, OwnerError, PageSize};

const ONE: Option<Owner> = Owner::new(1);
const TWO: Option<Owner> = Owner::new(2);

fn own<F: WalkedFormat>(guest: On<F>, page: u64, from: Option<Owner>, to: Option<Owner>) -> Own {
    let mut cache = guest.cache(1);
    let mut inside = guest.inside();
    let done = inside.guard.set_owner(range(&(page..page + PAGE)), from, to, &mut cache);
    done.map(|bytes| assert_eq!(bytes, PAGE)).map_err(|stopped| stopped.reason)
}
type Own = Result<(), OwnerError>;

fn owner<F: WalkedFormat>(guest: On<F>, page: u64) -> Option<Owner> {
    guest.inside().guard.owner(Gpa(page)).expect("a marker was left behind")
}

/// The page has its owner, or is mapped, and both threads know which.
fn one_of_them<F: WalkedFormat>(guest: On<F>, page: u64, owned: Own, mapped: Option<MapError>) {
    let stands = guest.at(page).is_some();
    match owned {
        Ok(()) => assert_eq!((owner(guest, page), stands), (ONE, false)),
        Err(OwnerError::Occupied { .. }) => assert!(stands),
        Err(reason) => assert_eq!(reason, OwnerError::Contended),
    }
    match mapped {
        None => assert!(stands),
        Some(MapError::Owned { owner: found }) => {
            assert_eq!((Some(found), owner(guest, page)), (ONE, ONE));
        }
        Some(reason) => assert_eq!(reason, MapError::Contended),
    }
}

#[test]
fn a_table_with_an_owned_page_empties_beside_a_map_and_stays() {
    bounded("map || unmap, a page that has an owner", 4, || {
        let guest = On::<Tiny>::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        assert_eq!(own(guest, PAGE, None, ONE), Ok(()));
        let mut cache = guest.cache(1);
        let unmaps = spawn(move || guest.unmap(0..BLOCK));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut cache);
        let removed = guest.unmap_rest_unless(unmaps.join().unwrap(), 0..PAGE);
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        assert_eq!(owner(guest, PAGE), ONE);
        assert!(guest.at(0).is_some() || bytes(&removed) == PAGE);
        drop(cache);
        guest.close();
    });
}

fn beside_a_map<F: WalkedFormat>(name: &str) {
    explore(&std::format!("own || map, {name}"), || {
        let guest = On::<F>::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut cache = guest.cache(1);
        let owns = spawn(move || own(guest, PAGE, None, ONE));
        let rest = guest.map(PAGE..BLOCK, RAM, PAGE, &mut cache);
        let owned = owns.join().unwrap();
        one_of_them(guest, PAGE, owned, rest.map(|rest| rest.reason));
        drop(cache);
        guest.close();
    });
    bounded(&std::format!("own || map, no table, {name}"), 3, || {
        let guest = On::<F>::new(14, NEVER);
        let mut cache = guest.cache(1);
        let owns = spawn(move || own(guest, PAGE, None, ONE));
        let rest = guest.map(0..BLOCK, RAM, PAGE, &mut cache);
        let owned = owns.join().unwrap();
        let owner_there = owned.is_ok();
        one_of_them(guest, PAGE, owned, rest.map(|rest| rest.reason));
        assert!(!owner_there || owner(guest, PAGE) == ONE);
        drop(cache);
        guest.close();
    });
    explore(&std::format!("own || reserve and commit, {name}"), || {
        let guest = On::<F>::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let mut cache = guest.cache(1);
        let owns = spawn(move || own(guest, PAGE, None, ONE));
        let mut inside = guest.inside();
        let mapped = match inside.guard.reserve(Gpa(PAGE), F::size(0), &mut cache) {
            Ok(pte) => pte.commit(Hpa(MEMORY + PAGE), RAM).unwrap().is_some(),
            Err(Interruption { reason, .. }) => {
                assert!(matches!(reason, MapError::Owned { .. } | MapError::Contended), "{reason}");
                false
            }
        };
        let owned = owns.join().unwrap();
        assert_eq!(guest.at(PAGE).is_some(), mapped);
        assert!(owned.is_ok() != mapped || owned == Err(OwnerError::Contended));
        assert_eq!(owned.is_ok(), owner(guest, PAGE) == ONE);
        drop((inside, cache));
        guest.close();
    });
}

#[test]
fn a_map_and_a_set_owner_agree_on_the_taker_of_the_page() {
    beside_a_map::<Tiny>("Arm");
    beside_a_map::<TinyEpt>("Intel");
}

#[test]
fn one_of_two_concurrent_set_owner_calls_gets_an_error() {
    explore("own || own", || {
        let guest = Guest::new(14, NEVER).mapped(0..PAGE, RAM, PAGE);
        let other = spawn(move || own(guest, PAGE, None, TWO));
        let done = [own(guest, PAGE, None, ONE), other.join().unwrap()];
        let found = owner(guest, PAGE);
        for (done, mine) in done.into_iter().zip([ONE, TWO]) {
            match done {
                Ok(()) => assert_eq!(found, mine),
                Err(OwnerError::Owned { owner }) => assert!(owner == found && found != mine),
                Err(reason) => assert_eq!(reason, OwnerError::Contended),
            }
        }
        assert!(found.is_some());
        guest.close();
    });
}

#[test]
fn an_owner_keeps_its_table() {
    for prune in [false, true] {
        let name = if prune { "own || prune" } else { "own || unmap, retire" };
        bounded(name, 4, move || {
            let guest = Guest::new(14, NEVER).with_empty_table(0);
            let takes = spawn(move || {
                if prune {
                    _ = guest.inside().guard.prune(range(&(0..BLOCK)));
                } else {
                    _ = guest.unmap(0..BLOCK);
                }
            });
            let owned = own(guest, 0, None, ONE);
            takes.join().unwrap();
            match owned {
                Ok(()) => assert_eq!(owner(guest, 0), ONE, "an owner was lost"),
                Err(reason) => assert_eq!(reason, OwnerError::Contended),
            }
            guest.close();
        });
    }
}

/// An unmap that has not completed, an owner after it, and then other memory.
#[test]
fn no_cpu_holds_two_memories_of_a_page_owned_in_between() {
    bounded("unmap || own, give up, map to other memory, lazy TLB", 3, || {
        let guest = Guest::new(14, NEVER).running().mapped(0..BLOCK, RAM, PAGE);
        guest.access(0, true, Use::Always);
        let mut cache = guest.cache(1);
        let unmaps = spawn(move || guest.unmap(0..PAGE).1.is_none());
        let rest = match own(guest, 0, None, ONE).and_then(|()| own(guest, 0, ONE, None)) {
            Ok(()) => guest.inside().map_to(2 * MEMORY, 0..PAGE, RAM, PAGE, &mut cache),
            Err(_) => None,
        };
        // A CPU that walks, with entries in its TLB: `access` fails if the TLB has two addresses of
        // it.
        guest.access(0, true, Use::Never);
        assert!(rest.is_none());
        unmaps.join().unwrap();
        drop(cache);
        guest.close();
    });
}

fn prunes<F: WalkedFormat>(name: &str) {
    bounded(&std::format!("prune || map, empty table, {name}"), 5, || {
        let guest = On::<F>::new(14, NEVER).with_empty_table(0);
        let mut cache = guest.cache(1);
        let prune = spawn(move || guest.inside().guard.prune(range(&(0..BLOCK))));
        let rest = guest.map(0..PAGE, RAM, PAGE, &mut cache);
        let pruned = prune.join().unwrap();
        guest.map_rest(rest, RAM, PAGE, &mut cache);
        assert!(guest.at(0).is_some(), "a page was lost");
        let tables = 2 - cache.len();
        drop(cache);
        assert!(pruned.is_err() || pruned == Ok(tables - guest.linked()));
        guest.end(tables - guest.linked());
    });
    bounded(&std::format!("prune || reserve and commit, {name}"), 4, || {
        let guest = On::<F>::new(14, NEVER).with_empty_table(0);
        let mut cache = guest.cache(1);
        let prune = spawn(move || guest.inside().guard.prune(range(&(0..BLOCK))).is_ok());
        let mut inside = guest.inside();
        let page = PageSize::from_bytes(PAGE).unwrap();
        let mapped = match inside.guard.reserve(Gpa(0), page, &mut cache) {
            Ok(pte) => pte.commit(Hpa(MEMORY), RAM).unwrap().is_some(),
            Err(_) => false,
        };
        prune.join().unwrap();
        assert_eq!(guest.at(0).is_some(), mapped);
        drop((inside, cache));
        guest.close();
    });
    explore(&std::format!("prune || prune, {name}"), || {
        let guest = On::<F>::new(14, NEVER).with_empty_table(0);
        let prune = move || guest.inside().guard.prune(range(&(0..BLOCK)));
        let other = spawn(prune);
        let done = [prune(), other.join().unwrap()];
        let sum: usize = done.into_iter().flatten().sum();
        assert_eq!(sum, 1 - guest.linked(), "each table once");
        guest.end(sum);
    });
}

#[test]
fn a_map_into_an_empty_table_being_pruned_is_not_lost() {
    prunes::<Tiny>("Arm");
    prunes::<TinyEpt>("Intel");
}

#[test]
fn a_pruned_table_is_freed_when_no_walk_cache_holds_it() {
    // A frame that a walk cache holds must not be freed.
    explore("prune, reclaim || hardware, walk cache", || {
        let guest = Guest::new(14, NEVER).running().with_empty_table(0);
        guest.access(0, false, Use::Always);
        let vcpu = spawn(move || guest.access(0, false, Use::Always));
        let pruned = guest.inside().guard.prune(range(&(0..BLOCK)));
        vcpu.join().unwrap();
        guest.end(pruned.unwrap_or(0));
    });
}
