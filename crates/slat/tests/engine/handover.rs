//! Histories of memory that changes hands: owners of addresses that are not mapped, leaves that are
//! replaced in place, empty tables that are given back, VMIDs that change; on every format,
//! compared with a map of pages.

use crate::common::hardware::arm::Arm;
use crate::common::stage::{M, RAM, on_stage, range};
use crate::common::world::covers;
use crate::common::{TestPlatform, destroy, unmap};
use proptest::prelude::*;
use slat::format::arm64::Arm64K4;
use slat::{
    Attributes, BreakBeforeMake, Format, Gpa, GpaRange, Guard, Hpa, Interruption, MapError, Memory,
    Owner, OwnerError, PageSize, ReplaceError, TableCache, Tables, Vmid,
};
use std::collections::BTreeMap;

const PAGE: PageSize = PageSize::SIZE_4K;
const PAGE_4K: u64 = PAGE.bytes();

/// The guest memory of the histories, around the end of a table of tables.
const WINDOW: u64 = 8 * M;
const BASE: u64 = (1 << 30) - WINDOW / 2;
/// The size of a page in the histories, 16K: every format's page is a multiple or a part of it.
const UNIT: u64 = 16 << 10;
const UNITS: u64 = WINDOW / UNIT;
/// Guest and host addresses agree modulo 1 GiB.
const HOST: u64 = 1 << 33;
const FAR: u64 = 1 << 31;

#[derive(Clone, Copy, Debug)]
enum Op {
    Map { at: u64, units: u64, small: bool },
    Unmap { at: u64, units: u64 },
    Own { at: u64, units: u64, from: u64, to: u64, frames: usize },
    Protect { at: u64, units: u64 },
    Move { at: u64, units: u64, attributes: Attributes },
    Retype { at: u64, units: u64, memory: Memory, write: bool },
    GiveUp { at: u64 },
    Prune { at: u64, units: u64 },
    Renew(u16),
}

/// The state of a page.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Page {
    Owned(u64),
    Leaf(u64, Attributes),
}

fn op() -> impl Strategy<Value = Op> {
    let at = prop_oneof![Just(0), Just(128), Just(256), 0..UNITS];
    let units = prop_oneof![2 => Just(128_u64), 1 => Just(384), 2 => 1..200_u64, 2 => Just(1)];
    let span =
        (at.clone(), units).prop_map(|(at, units)| (BASE + at * UNIT, units.min(UNITS - at)));
    let memory = prop_oneof![Just(Memory::Normal), Just(Memory::Device)];
    let written = any::<bool>().prop_map(|write| Attributes { write, ..RAM });
    prop_oneof![
        5 => (span.clone(), any::<bool>()).prop_map(|((at, units), small)| Op::Map {
            at, units, small
        }),
        2 => span.clone().prop_map(|(at, units)| Op::Unmap { at, units }),
        4 => (span.clone(), 0..3u64, 0..3u64, prop_oneof![3 => Just(16), 1 => 0..3usize]).prop_map(
            |((at, units), from, to, frames)| Op::Own { at, units, from, to, frames }
        ),
        2 => span.clone().prop_map(|(at, units)| Op::Protect { at, units }),
        3 => (span.clone(), written).prop_map(|((at, units), attributes)| Op::Move {
            at, units, attributes
        }),
        2 => (span.clone(), memory, any::<bool>()).prop_map(|((at, units), memory, write)| {
            Op::Retype { at, units, memory, write }
        }),
        1 => at.prop_map(|at| Op::GiveUp { at: BASE + at * UNIT }),
        1 => span.prop_map(|(at, units)| Op::Prune { at, units }),
        1 => any::<u16>().prop_map(Op::Renew),
    ]
}

fn owner(word: u64) -> Option<Owner> {
    // 0 is no owner; the others use both ends of a word.
    [None, Owner::new(1), Owner::new((1 << Owner::BITS) - 1)][word as usize]
}

struct World<'t, 'p, F: Format> {
    platform: &'p TestPlatform,
    tables: &'t Tables<'p, F, TestPlatform>,
    model: BTreeMap<u64, Page>,
}

impl<F: Format> World<'_, '_, F> {
    fn pages(&self, range: GpaRange) -> impl Iterator<Item = u64> + use<F> {
        (range.start().0..range.end().0).step_by(F::size(0).bytes() as usize)
    }

    /// Reclaims all retired tables: those that this guard may be in wait until it has left.
    fn reclaim(&self, guard: &mut Guard<'_, '_, F, TestPlatform>) {
        self.tables.reclaim();
        guard.refresh();
        self.tables.reclaim();
    }

    /// Returns whether an end of `range` cuts a leaf.
    fn cut(&self, guard: &Guard<'_, '_, F, TestPlatform>, range: GpaRange) -> bool {
        [range.start().0, range.end().0].into_iter().any(|edge| {
            let found = guard.translate(Gpa(edge)).unwrap();
            found.is_some_and(|found| edge & (found.size.bytes() - 1) != 0)
        })
    }

    fn step(
        &mut self,
        op: &Op,
        guard: &mut Guard<'_, '_, F, TestPlatform>,
        cache: &mut TableCache<'_, F, TestPlatform>,
    ) {
        let bytes = |units| units * UNIT;
        match *op {
            Op::Map { at, units, small } => {
                let range = range(at, bytes(units));
                let size = F::size(if small { 0 } else { F::LARGEST_LEAF });
                let done = guard.map(range, Hpa(HOST + at), RAM, size, cache);
                let mine = |gpa| Page::Leaf(HOST + gpa, RAM);
                let other = self
                    .pages(range)
                    .find(|gpa| self.model.get(gpa).is_some_and(|page| *page != mine(*gpa)));
                match (done, other.map(|gpa| self.model[&gpa])) {
                    (Ok(_), None) => {
                        let new = self.pages(range).map(|gpa| (gpa, mine(gpa)));
                        self.model.extend(new);
                    }
                    (
                        Err(Interruption { reason: MapError::Owned { owner }, at }),
                        Some(Page::Owned(word)),
                    ) => {
                        assert_eq!(owner.word(), word);
                        assert_eq!(Some(at.0), other);
                    }
                    (
                        Err(Interruption { reason: MapError::Occupied { .. }, .. }),
                        Some(Page::Leaf(..)),
                    ) => {}
                    odd => panic!("{odd:?}"),
                }
            }
            Op::Unmap { at, units } => {
                let range = range(at, bytes(units));
                if self.cut(guard, range) {
                    return;
                }
                let removed = unmap(guard, range);
                let mut told: Vec<u64> = Vec::new();
                for run in removed {
                    told.extend(self.pages(crate::common::stage::range(run.gpa.0, run.bytes)));
                }
                let gone = |page: &Page| matches!(page, Page::Leaf(..));
                let leaves = self.pages(range).filter(|gpa| self.model.get(gpa).is_some_and(gone));
                assert_eq!(told, leaves.collect::<Vec<_>>());
                told.iter().for_each(|gpa| _ = self.model.remove(gpa));
            }
            Op::Own { at, units, from, to, frames } => {
                self.own((at, bytes(units)), from, to, frames, guard)
            }
            Op::Protect { at, units } => {
                let range = range(at, bytes(units));
                if guard.write_protect(range).is_ok() {
                    for (_, page) in self.model.range_mut(at..at + bytes(units)) {
                        if let Page::Leaf(_, attributes) = page {
                            attributes.write = false;
                        }
                    }
                }
                guard.invalidate();
            }
            Op::Move { at, units, attributes } => {
                self.replace((at, bytes(units)), FAR, attributes, guard);
            }
            Op::Retype { at, units, memory, write } => {
                let attributes = Attributes { memory, write, ..RAM };
                self.replace((at, bytes(units)), 0, attributes, guard);
            }
            Op::GiveUp { at } => {
                drop(guard.reserve(Gpa(at), F::size(0), cache));
            }
            Op::Prune { at, units } => {
                let range = range(at, bytes(units));
                self.reclaim(guard);
                let frames = self.platform.live();
                self.platform.take_events();
                let retired = guard.prune(range).unwrap();
                let told = self.platform.take_invalidations();
                let walks = told.iter().any(|what| what.tables && what.vmid == guard.vmid());
                assert_eq!(walks, retired != 0, "of walk caches");
                self.reclaim(guard);
                assert_eq!(self.platform.live(), frames - retired);
                assert_eq!(guard.prune(range), Ok(0), "once is enough");
            }
            Op::Renew(vmid) => {
                let old = guard.vmid();
                // SAFETY: no CPU runs the guest.
                assert_eq!(unsafe { self.tables.set_vmid(Vmid(vmid)) }, old);
                assert_eq!(guard.vmid(), Vmid(vmid));
            }
        }
    }

    fn own(
        &mut self,
        (at, bytes): (u64, u64),
        from: u64,
        to: u64,
        frames: usize,
        guard: &mut Guard<'_, '_, F, TestPlatform>,
    ) {
        let range = range(at, bytes);
        let (from, to) = (owner(from), owner(to));
        let mut storage: Vec<_> = (0..frames).map(|_| None).collect();
        let mut cache = TableCache::new(self.platform, &mut storage);
        cache.fill(frames).unwrap();
        let held = |page: Option<&Page>| match page {
            Some(Page::Owned(word)) => Some(Owner::new(*word)),
            Some(Page::Leaf(..)) => None,
            None => Some(None),
        };
        let mut pages = self.pages(range);
        let bad = pages.find(|gpa| {
            let held = held(self.model.get(gpa));
            held != Some(from) && held != Some(to)
        });
        let done = guard.set_owner(range, from, to, &mut cache);
        let reached = match done {
            Ok(_) => at + bytes,
            Err(Interruption { at, reason: OwnerError::CacheEmpty }) => at.0,
            Err(Interruption { at: stopped, reason }) => {
                assert_eq!(
                    Some(stopped.0).filter(|_| bad != Some(at)),
                    bad.filter(|bad| *bad != at)
                );
                match (reason, self.model.get(&bad.unwrap())) {
                    (OwnerError::Occupied { .. }, Some(Page::Leaf(..))) => {}
                    (OwnerError::Owned { owner }, page) => {
                        assert_eq!(Some(owner), held(page));
                    }
                    odd => panic!("{odd:?}"),
                }
                return;
            }
        };
        assert!(bad.is_none(), "{done:?}");
        let mut changed = 0;
        if at < reached {
            for gpa in self.pages(crate::common::stage::range(at, reached - at)) {
                changed +=
                    if held(self.model.get(&gpa)) == Some(to) { 0 } else { F::size(0).bytes() };
                match to {
                    Some(owner) => _ = self.model.insert(gpa, Page::Owned(owner.word())),
                    None => _ = self.model.remove(&gpa),
                }
            }
        }
        assert!(done.is_err() || done == Ok(changed), "{done:?}, not {changed:#x}");
    }

    /// Moves all of a range by `far`, or changes it in place.
    fn replace(
        &mut self,
        (at, bytes): (u64, u64),
        far: u64,
        attributes: Attributes,
        guard: &mut Guard<'_, '_, F, TestPlatform>,
    ) {
        let range = range(at, bytes);
        let from = Hpa(HOST + at);
        let to = Hpa(from.0 + far);
        if guard.format().encode(attributes).is_err() {
            let stopped = guard.replace(range, from, to, attributes).unwrap_err();
            assert!(matches!(stopped.reason, ReplaceError::Attributes(_)));
            return;
        }
        let cut = self.cut(guard, range);
        self.platform.take_events();
        let done = guard.replace(range, from, to, attributes);
        let reached = match done {
            Ok(_) => range.end().0,
            Err(Interruption { at: stopped, reason }) => {
                let leaf = self.model.get(&stopped.0);
                match reason {
                    ReplaceError::CutsBlock { .. } => {
                        assert!(cut);
                        return;
                    }
                    ReplaceError::Writable => {
                        assert!(matches!(leaf, Some(Page::Leaf(_, a)) if a.write) && far != 0);
                    }
                    ReplaceError::Differs { hpa, .. } => {
                        assert!(matches!(leaf, Some(Page::Leaf(found, _)) if *found == hpa.0
                            && *found != HOST + stopped.0 && *found != HOST + stopped.0 + far));
                    }
                    reason => panic!("{reason}"),
                }
                stopped.0
            }
        };
        assert!(!cut);
        let mut changed = Vec::new();
        for (&gpa, page) in self.model.range_mut(at..reached) {
            if let Page::Leaf(hpa, old) = page {
                assert!(*hpa == HOST + gpa || *hpa == HOST + gpa + far);
                assert!(far == 0 || !old.write || *hpa == HOST + gpa + far);
                if (*hpa, *old) != (HOST + gpa + far, attributes) {
                    changed.push(gpa);
                }
                (*hpa, *old) = (HOST + gpa + far, attributes);
            }
        }
        let size = F::size(0).bytes();
        let sum = changed.len() as u64 * size;
        assert!(done.is_err() || done == Ok(sum), "{done:?}, not {sum:#x}");
        // No TLB has the old leaves when the caller goes on: invalidated inside, or when it
        // completes.
        guard.invalidate();
        let told = self.platform.take_invalidations();
        assert!(told.iter().all(|what| what.vmid == guard.vmid()));
        for gpa in changed {
            assert!(
                told.iter().any(|what| covers(what, gpa, size)),
                "{gpa:#x} was not invalidated"
            );
        }
    }

    /// Checks that each page is as the model says.
    fn check(&self, guard: &Guard<'_, '_, F, TestPlatform>, op: &Op) {
        for gpa in self.pages(range(BASE, WINDOW)) {
            let leaf = guard.translate(Gpa(gpa)).unwrap();
            let found = match (leaf, guard.owner(Gpa(gpa)).unwrap()) {
                (Some(leaf), None) => {
                    let state = Attributes { accessed: true, dirty: true, ..leaf.attributes };
                    Some(Page::Leaf(leaf.hpa.0, state))
                }
                (None, owner) => owner.map(|owner| Page::Owned(owner.word())),
                both => panic!("{both:?}"),
            };
            assert_eq!(found, self.model.get(&gpa).copied(), "{gpa:#x} after {op:?}");
        }
    }
}

/// Runs the same history on each format.
fn play<F: Format>(format: F, bbm: BreakBeforeMake, ops: &[Op]) {
    let platform = TestPlatform::new(bbm);
    let mut tables = Tables::new(format, Vmid(3), 40, &platform).unwrap();
    {
        let mut world = World { platform: &platform, tables: &tables, model: BTreeMap::new() };
        let mut reader = platform.register();
        let mut guard = tables.enter(&mut reader).unwrap();
        let mut storage = [const { None }; 32];
        let mut cache = TableCache::new(&platform, &mut storage);
        for op in ops {
            cache.fill(32).unwrap();
            world.step(op, &mut guard, &mut cache);
            world.check(&guard, op);
        }
        drop(cache);
        // Owners and leaves keep their tables; when both are gone, all tables except the root go.
        let all = range(BASE, WINDOW);
        let kept: Vec<_> = world.model.values().filter(|p| matches!(p, Page::Owned(_))).collect();
        let owners = kept.len();
        unmap(&mut guard, all);
        let owned = |gpa| guard.owner(Gpa(gpa)).unwrap().is_some();
        assert_eq!(world.pages(all).filter(|gpa| owned(*gpa)).count(), owners);
        for word in [1, 2] {
            let mut storage = [const { None }; 32];
            let mut cache = TableCache::new(&platform, &mut storage);
            cache.fill(32).unwrap();
            for gpa in world.pages(all) {
                let page = range(gpa, F::size(0).bytes());
                _ = guard.set_owner(page, owner(word), None, &mut cache);
            }
        }
        guard.prune(all).unwrap();
        world.reclaim(&mut guard);
    }
    assert_eq!(platform.live(), 1, "the root is left");
    assert_eq!(tables.enter_mut().prune(range(0, 1 << 40)), Ok(0));
    destroy(tables);
    assert_eq!(platform.live(), 0);
}

proptest! {
    #![proptest_config(crate::properties::config())]

    #[test]
    fn histories_of_owners_and_maps_agree_with_a_map_of_pages(
        ops in prop::collection::vec(op(), 1..16),
        format in 0..6,
    ) {
        on_format!(format, play, &ops);
    }
}

#[test]
fn an_owner_has_a_word_of_48_bits() {
    assert_eq!(Owner::new(1 << 48), None);
    assert_eq!(Owner::new((1 << 48) - 1).unwrap().word(), (1 << 48) - 1);
}

#[test]
fn every_invalidation_names_the_vmid_the_cpus_use() {
    on_stage::<Arm<12>>((Arm64K4::default(), 40, 8), |tables, guard, cache| {
        let page = range(0, PAGE_4K);
        guard.map(page, Hpa(0), RAM, PAGE, cache).unwrap();
        guard.write_protect(page).unwrap();
        // SAFETY: no CPU runs the guest.
        assert_eq!(unsafe { tables.set_vmid(Vmid(9)) }, Vmid(1));
        let platform = guard.platform();
        let told =
            || -> Vec<_> { platform.take_invalidations().iter().map(|what| what.vmid).collect() };
        told();
        assert_eq!(
            guard.pending_invalidation().unwrap().vmid,
            Vmid(9),
            "also of what was changed before"
        );
        guard.invalidate();
        assert_eq!(told(), [Vmid(9)]);
        // The invalidation of a fill of an emptied entry, before the unmap has completed; then that
        // of the whole guest.
        let mut storage = [const { slat::UnmapEntry::EMPTY }; 1];
        let mut batch = guard.unmap_batch(&mut storage);
        guard.unmap(page, &mut batch).unwrap();
        guard.map(page, Hpa(PAGE_4K), RAM, PAGE, cache).unwrap();
        assert_eq!(told(), [Vmid(9)]);
        drop(batch);
        guard.invalidate();
        assert_eq!(told(), [Vmid(9)]);
    });
}
