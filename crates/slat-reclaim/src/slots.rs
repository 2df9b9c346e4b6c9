//! The slots of swap: which hold a page, and which are free but still have the content of one.
//!
//! A slot is *used*; *stale*: free, with old content of a guest; *clean*: free, without content;
//! or *being wiped*: swap is forgetting its content, and it is not handed out. A fault that frees a
//! slot leaves it stale, which takes no system call. Until a page is written to it, a used slot
//! that was stale is *unwritten*: swap still has what was in it before.
//!
//! # Whose content is where
//! Each slot with old content is in a list of the guest that has to have it forgotten, so that a
//! balloon finds what its guest left behind without a look at other slots. A guest gets its own
//! stale slots first, because an overwrite is the cheapest way to forget; then clean ones; and
//! stale slots of another guest only if no slot is clean. Such a slot is *lent*. The guest that it
//! is from never waits for it: once it wants its content forgotten, the slot is in none of its
//! lists any more, and the thread that has the slot wipes it, should it give it back unwritten.

use crate::bits::Bits;
use crate::lists::Lists;
use alloc::vec::Vec;
use core::ops::Range;
use spin::Mutex;

/// Most slots that swap forgets in one call.
pub(crate) const RUN: u32 = 1024;

/// A guest that has slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner(u32);

/// The lists of a guest: slots that are stale; that are taken by a thread of the same guest, and
/// unwritten; that are lent to another guest, and unwritten; that its threads wipe.
const STALE: u32 = 0;
const TAKEN: u32 = 1;
const LENT: u32 = 2;
const WIPING: u32 = 3;
const KINDS: u32 = 4;

/// The slots of swap, and the state of each.
#[derive(Debug)]
pub(crate) struct Slots {
    total: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    clean: Bits,
    stale: Bits,
    /// Used slots that still have old content.
    unwritten: Bits,
    lists: Lists,
    /// Owners that are gone; their numbers are given to others.
    gone: Vec<Owner>,
    used: u32,
    /// Where the search for a clean slot begins, so that pages that leave together get adjacent
    /// slots.
    next: u32,
    /// How often slots were given back.
    gives: u64,
}

/// A slot for a page, or why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TakenSlot {
    Slot(u32),
    /// All free slots are being wiped, some of them by threads of this guest: one will be free
    /// soon.
    Wait,
    /// All free slots are being wiped by threads of other guests.
    Wiping,
    Full,
}

impl Owner {
    const fn list(self, kind: u32) -> u32 {
        self.0 * KINDS + kind
    }

    const fn of_list(list: u32) -> Self {
        Self(list / KINDS)
    }
}

impl State {
    fn is_free(&self, slot: u32) -> bool {
        self.clean.has(slot) || self.stale.has(slot)
    }

    fn stale(&mut self, slot: u32, owner: Owner) {
        assert!(!self.is_free(slot), "swap slot {slot} was given back twice");
        self.stale.add(slot);
        self.lists.push(owner.list(STALE), slot);
    }

    /// Takes a stale slot, which is unwritten from now on, and is in the list `kind` of its owner.
    fn take_stale(&mut self, slot: u32, kind: u32) {
        self.stale.remove(slot);
        self.unwritten.add(slot);
        if let Some(list) = self.lists.remove(slot) {
            self.lists.push(Owner::of_list(list).list(kind), slot);
        }
    }
}

impl Slots {
    pub fn new(total: u32) -> Self {
        let (clean, stale, unwritten) = (Bits::all(total), Bits::new(total), Bits::new(total));
        let (lists, gone) = (Lists::new(total), Vec::new());
        let state = State { clean, stale, unwritten, lists, gone, used: 0, next: 0, gives: 0 };
        Self { total, state: Mutex::new(state) }
    }

    /// Makes an owner, which has no slots.
    pub fn join(&self) -> Owner {
        let mut state = self.state.lock();
        let number = |state: &mut State| Owner::of_list(state.lists.more(KINDS));
        state.gone.pop().unwrap_or_else(|| number(&mut state))
    }

    /// `owner` has no slots any more, but stale ones that swap could not forget: the next owner of
    /// this number tries that again.
    pub fn leave(&self, owner: Owner) {
        self.state.lock().gone.push(owner);
    }

    pub fn used(&self) -> u32 {
        self.state.lock().used
    }

    /// Returns whether no slot is free.
    pub fn is_full(&self) -> bool {
        self.used() == self.total
    }

    /// Returns whether less than a 16th of the slots is free: then pages that come back do not keep
    /// theirs.
    pub fn scarce(&self) -> bool {
        self.total - self.used() < self.total.div_ceil(16)
    }

    /// Returns the number of stale slots of `owner`.
    pub fn stale(&self, owner: Owner) -> u32 {
        self.state.lock().lists.len(owner.list(STALE))
    }

    /// Returns how often slots were given back, which makes room in swap.
    pub fn gives(&self) -> u64 {
        self.state.lock().gives
    }

    pub fn take(&self, owner: Owner) -> TakenSlot {
        let mut state = self.state.lock();
        if state.used == self.total {
            return TakenSlot::Full;
        }
        let clean = |state: &State| state.clean.first(state.next).or_else(|| state.clean.first(0));
        let slot = if let Some(slot) = state.lists.first(owner.list(STALE)) {
            state.take_stale(slot, TAKEN);
            slot
        } else if let Some(slot) = clean(&state) {
            state.clean.remove(slot);
            state.next = slot + 1;
            slot
        } else if let Some(slot) = state.stale.first(0) {
            state.take_stale(slot, LENT);
            slot
        } else if state.lists.len(owner.list(WIPING)) != 0 {
            return TakenSlot::Wait;
        } else {
            return TakenSlot::Wiping;
        };
        state.used += 1;
        TakenSlot::Slot(slot)
    }

    /// Gives `slot` back, which has content of `owner`; it becomes stale.
    pub fn give(&self, slot: u32, owner: Owner) {
        let mut state = self.state.lock();
        state.stale(slot, owner);
        state.used -= 1;
        state.gives += 1;
    }

    /// `slot` was taken from a page of which it keeps a copy, and is to have another page of the
    /// same owner.
    pub fn reuse(&self, slot: u32, owner: Owner) {
        let mut state = self.state.lock();
        state.unwritten.add(slot);
        state.lists.push(owner.list(TAKEN), slot);
    }

    /// A whole page was written to `slot`: what was in it before is gone.
    pub fn written(&self, slot: u32) {
        let mut state = self.state.lock();
        if state.unwritten.remove(slot) {
            state.lists.remove(slot);
        }
    }

    /// Gives `slot` back, to which `owner` has written no whole page since it took it: this makes
    /// no room in swap, and does not count in [`Slots::gives`]. Returns true, and withholds the
    /// slot, if it may have content of another guest, which the caller has swap forget.
    pub fn return_unwritten(&self, slot: u32, owner: Owner) -> bool {
        let mut state = self.state.lock();
        let list = state.lists.remove(slot);
        let lent = state.unwritten.remove(slot) && list != Some(owner.list(TAKEN));
        state.used -= 1;
        if lent {
            state.lists.push(owner.list(WIPING), slot);
        } else {
            state.stale(slot, owner);
        }
        lent
    }

    /// Withholds `slot` of `owner`, which is to be wiped: it is not handed out until
    /// [`Slots::wiped`] frees it.
    pub fn withhold(&self, slot: u32, owner: Owner) {
        let mut state = self.state.lock();
        assert!(!state.is_free(slot), "swap slot {slot} was given back twice");
        state.lists.push(owner.list(WIPING), slot);
        state.used -= 1;
    }

    /// Withholds the stale slots of `owner` that have been stale longest, at most `most`, and adds
    /// them to `slots`.
    pub fn withhold_stale(&self, owner: Owner, most: u32, slots: &mut Vec<u32>) {
        let mut state = self.state.lock();
        for _ in 0..most {
            let Some(slot) = state.lists.first(owner.list(STALE)) else { return };
            state.stale.remove(slot);
            state.lists.remove(slot);
            state.lists.push(owner.list(WIPING), slot);
            slots.push(slot);
        }
    }

    /// Frees slots that `owner` withheld; they are stale if swap could not forget their content
    /// (not `clean`).
    pub fn wiped(&self, slots: Range<u32>, owner: Owner, clean: bool) {
        let mut state = self.state.lock();
        for slot in slots {
            state.lists.remove(slot);
            if clean {
                assert!(!state.is_free(slot), "swap slot {slot} was wiped while it was free");
                state.clean.add(slot);
            } else {
                state.stale(slot, owner);
            }
        }
    }

    /// Slots were given back that had been withheld.
    pub fn made_room(&self) {
        self.state.lock().gives += 1;
    }

    /// Returns the slots with content of `owner` that its own threads are wiping or about to write
    /// to. Hands those that are lent over to the guests that have them.
    pub fn in_flight(&self, owner: Owner) -> Vec<u32> {
        let mut state = self.state.lock();
        while let Some(slot) = state.lists.first(owner.list(LENT)) {
            state.lists.remove(slot);
        }
        let slots = |kind| state.lists.slots(owner.list(kind));
        slots(TAKEN).chain(slots(WIPING)).collect()
    }

    /// Keeps those of `slots` that threads of `owner` are still wiping or about to write to.
    pub fn still_in_flight(&self, owner: Owner, slots: &mut Vec<u32>) {
        let state = self.state.lock();
        let kinds = [TAKEN, WIPING].map(|kind| Some(owner.list(kind)));
        slots.retain(|&slot| kinds.contains(&state.lists.of(slot)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::work;
    use std::collections::{BTreeMap, HashSet};

    const FIRST: Owner = Owner(0);

    /// Slots with two owners.
    fn slots(total: u32) -> Slots {
        let slots = Slots::new(total);
        assert_eq!((slots.join(), slots.join()), (FIRST, Owner(1)));
        slots
    }

    fn take(slots: &Slots) -> Option<u32> {
        match slots.take(FIRST) {
            TakenSlot::Slot(slot) => Some(slot),
            _ => None,
        }
    }

    #[test]
    fn slots_are_handed_out_once_until_there_is_none() {
        for total in [1, 63, 64, 65, 200] {
            let slots = slots(total);
            let taken: HashSet<u32> = std::iter::from_fn(|| take(&slots)).collect();
            assert_eq!((taken.len(), slots.used()), (total as usize, total));
            assert!(taken.iter().all(|slot| *slot < total));
            assert!(slots.is_full());
            slots.give(total / 2, FIRST);
            assert_eq!((slots.stale(FIRST), slots.is_full()), (1, false));
            assert_eq!(slots.take(FIRST), TakenSlot::Slot(total / 2));
            assert_eq!((slots.take(FIRST), slots.stale(FIRST)), (TakenSlot::Full, 0));
        }
        assert_eq!(slots(0).take(FIRST), TakenSlot::Full);
    }

    #[test]
    fn the_last_free_slot_is_found_wherever_it_is() {
        let total = 3 * 64 * 64 + 100;
        let slots = slots(total);
        while take(&slots).is_some() {}
        let mut rng = fastrand::Rng::with_seed(1);
        for (index, free) in [0, 63, 64, 4095, 4096, total - 1]
            .into_iter()
            .chain((0..200).map(|_| rng.u32(..total)))
            .enumerate()
        {
            match index % 3 {
                0 => slots.give(free, FIRST),
                1 => slots.give(free, Owner(1)),
                _ => {
                    slots.withhold(free, FIRST);
                    assert_eq!(
                        slots.take(FIRST),
                        TakenSlot::Wait,
                        "it is free, and not to be had yet"
                    );
                    assert_eq!(slots.take(Owner(1)), TakenSlot::Wiping, "another guest's");
                    slots.wiped(free..free + 1, FIRST, true);
                }
            }
            assert!(slots.scarce());
            assert_eq!(slots.take(FIRST), TakenSlot::Slot(free));
            assert_eq!(slots.take(FIRST), TakenSlot::Full);
            slots.written(free);
        }
    }

    /// Old content is in a slot that is stale, unwritten, or being wiped; a guest finds its own.
    #[test]
    fn each_guest_finds_its_old_content_and_gets_its_slots_first() {
        const TOTAL: u32 = 300;
        let slots = slots(TOTAL);
        let mut rng = fastrand::Rng::with_seed(3);
        let mut used: Vec<(u32, Owner)> = Vec::new();
        let mut wiping: Vec<(u32, Owner)> = Vec::new();
        // Which guest has to have the old content of a slot forgotten, and the kind of list.
        let mut old: BTreeMap<u32, (Owner, u32)> = BTreeMap::new();
        let mut lent = 0;
        for step in 0..40_000 {
            let owner = Owner(rng.u32(..2));
            let of = |kind| old.iter().filter(move |(_, is)| **is == (owner, kind)).count();
            match rng.u8(..8) {
                0..3 => match slots.take(owner) {
                    TakenSlot::Slot(slot) => {
                        let before = old.get(&slot).copied();
                        match before {
                            Some((whose, kind)) => {
                                assert_eq!(kind, STALE);
                                let own = whose == owner;
                                assert!(own || of(STALE) == 0);
                                lent += u32::from(!own);
                                old.insert(slot, (whose, if own { TAKEN } else { LENT }));
                            }
                            None => assert_eq!(of(STALE), 0, "its own are first"),
                        }
                        used.push((slot, owner));
                    }
                    TakenSlot::Wait => assert!(of(WIPING) > 0),
                    TakenSlot::Wiping => assert!(of(WIPING) == 0 && !wiping.is_empty()),
                    TakenSlot::Full => assert_eq!(used.len(), TOTAL as usize),
                },
                3 if !used.is_empty() => {
                    let (slot, owner) = used[rng.usize(..used.len())];
                    slots.written(slot);
                    old.remove(&slot);
                    _ = owner;
                }
                4 if !used.is_empty() => {
                    let (slot, owner) = used.swap_remove(rng.usize(..used.len()));
                    let handed_over =
                        slots.state.lock().unwritten.has(slot) && !old.contains_key(&slot);
                    let mine = old.get(&slot).is_none_or(|(whose, _)| *whose == owner);
                    let wipe = slots.return_unwritten(slot, owner);
                    assert_eq!(wipe, handed_over || !mine, "another guest's content");
                    old.insert(slot, (owner, if wipe { WIPING } else { STALE }));
                    wiping.extend(wipe.then_some((slot, owner)));
                }
                5 if !used.is_empty() => {
                    let (slot, owner) = used.swap_remove(rng.usize(..used.len()));
                    slots.written(slot);
                    if rng.bool() {
                        slots.give(slot, owner);
                        old.insert(slot, (owner, STALE));
                    } else {
                        slots.withhold(slot, owner);
                        old.insert(slot, (owner, WIPING));
                        wiping.push((slot, owner));
                    }
                }
                6 => {
                    let mut found = Vec::new();
                    slots.withhold_stale(owner, rng.u32(..20), &mut found);
                    for slot in found {
                        assert_eq!(old.insert(slot, (owner, WIPING)), Some((owner, STALE)));
                        wiping.push((slot, owner));
                    }
                    let mut flying = slots.in_flight(owner);
                    flying.sort_unstable();
                    let in_flight = |(_, is): &(&u32, &(Owner, u32))| {
                        is.0 == owner && (is.1 == TAKEN || is.1 == WIPING)
                    };
                    assert!(flying.iter().eq(old.iter().filter(in_flight).map(|(slot, _)| slot)));
                    old.retain(|_, is| *is != (owner, LENT));
                    let mut still = flying.clone();
                    slots.still_in_flight(owner, &mut still);
                    assert_eq!(still, flying);
                }
                _ => {
                    for (slot, owner) in wiping.drain(..) {
                        let clean = rng.bool();
                        slots.wiped(slot..slot + 1, owner, clean);
                        match clean {
                            true => _ = old.remove(&slot),
                            false => _ = old.insert(slot, (owner, STALE)),
                        }
                    }
                }
            }
            let stale = old.values().filter(|is| **is == (owner, STALE)).count();
            assert_eq!((slots.used(), slots.stale(owner)), (used.len() as u32, stale as u32));
            let stale = old.values().filter(|is| is.1 == STALE).count();
            let clean = slots.state.lock().clean.count() as usize;
            assert_eq!(clean + stale + used.len() + wiping.len(), TOTAL as usize, "{step}");
        }
        assert!(lent > 100, "{lent}");
    }

    #[test]
    fn no_call_looks_at_more_slots_if_swap_is_larger() {
        let run = |total: u32| {
            let slots = slots(total);
            (0..total - 9).for_each(|_| assert!(take(&slots).is_some()));
            slots.give(3, Owner(1));
            let mut found = Vec::new();
            let calls: [&mut dyn FnMut(); 5] = [
                &mut || slots.give(5, FIRST),
                &mut || assert_eq!(slots.take(FIRST), TakenSlot::Slot(5)),
                &mut || assert!(!slots.return_unwritten(5, FIRST)),
                &mut || assert_eq!(slots.in_flight(FIRST), []),
                &mut || slots.withhold_stale(FIRST, RUN, &mut found),
            ];
            calls.map(work::steps)
        };
        let (small, large) = (run(1 << 10), run(1 << 22));
        assert!(small.iter().chain(&large).all(|steps| *steps <= 12), "{small:?} {large:?}");
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_slot_that_is_given_back_twice_is_noticed() {
        slots(8).give(3, FIRST);
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_free_slot_that_is_to_be_wiped_is_noticed() {
        slots(8).withhold(3, FIRST);
    }
}
