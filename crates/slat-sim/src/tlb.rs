//! TLB of a CPU: the results of its walks. It drops only those that an invalidation covers.

use crate::arch::{Access, Arch, Leaf, Rights, Sizes};
use slat::Vmid;
use std::collections::BTreeMap;

/// A translation in a TLB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    pub start: u64,
    pub shift: u32,
    pub leaf: Leaf,
    /// The leaf that it was made of: as large as the entry, or one member of a group.
    pub member: u64,
    pub member_shift: u32,
    /// When it was cached.
    pub born: u64,
}

impl Entry {
    pub fn end(&self) -> u64 {
        self.start + (1 << self.shift)
    }

    pub fn hpa(&self, gpa: u64) -> u64 {
        self.leaf.hpa + (gpa - self.start)
    }

    pub fn allows(&self, access: Access) -> bool {
        self.leaf.rights.allow(access)
    }

    fn same(&self, other: &Self) -> bool {
        let like = |entry: &Self| Self { born: 0, member: 0, ..*entry };
        like(self) == like(other)
    }

    pub fn text(&self) -> String {
        let Leaf { hpa, rights, memory, dirty, .. } = self.leaf;
        let right = |on, name| if on { name } else { '-' };
        format!(
            "{:#x}+{:#x} -> {hpa:#x} {}{}{}{} memory type {memory:#06b}",
            self.start,
            1u64 << self.shift,
            right(rights.read, 'r'),
            right(rights.write, 'w'),
            right(rights.execute, 'x'),
            right(dirty, 'd'),
        )
    }
}

/// A store under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LateStore {
    pub vmid: Vmid,
    /// The translation that it used, which the TLB does not have any more.
    pub entry: Entry,
    /// The first invalidation that should have completed it is complete.
    pub is_late: bool,
}

/// A link to a table in a walk cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Walk {
    /// The first address that the table covers.
    pub start: u64,
    pub shift: u32,
    /// The level of its entries.
    pub level: i8,
    pub table: u64,
    pub rights: Rights,
    pub born: u64,
}

impl Walk {
    pub fn end(&self) -> u64 {
        self.start + (1 << self.shift)
    }
}

/// The extent of an invalidation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scope {
    /// One CPU; all CPUs if `None`.
    pub cpu: Option<usize>,
    /// One guest; all guests if `None`.
    pub vmid: Option<Vmid>,
    /// First address and end; all addresses if `None`.
    pub range: Option<(u64, u64)>,
    /// Leaves of this size only, as base-2 logarithm; of all sizes if `None`.
    pub shift: Option<u32>,
    /// Second-stage translations.
    pub leaves: bool,
    /// Links to tables.
    pub walks: bool,
    /// Translations of both stages.
    pub combined: bool,
}

impl Scope {
    /// Creates the scope of everything of `vmid` on all CPUs.
    pub const fn guest(vmid: Vmid) -> Self {
        Self {
            cpu: None,
            vmid: Some(vmid),
            range: None,
            shift: None,
            leaves: true,
            walks: true,
            combined: true,
        }
    }

    fn names(&self, key: &Key, end: u64) -> bool {
        let &(vmid, shift, start) = key;
        self.vmid.is_none_or(|named| named.0 == vmid)
            && self.shift.is_none_or(|named| named == shift)
            && self.range.is_none_or(|(first, last)| start < last && first < end)
    }
}

/// Two entries of one TLB that must not be cached at the same time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Clash {
    /// Another address, memory type or table for the same page.
    Changed,
    /// Another size.
    Resized,
}

/// VMID, base-2 logarithm of the bytes, first address.
type Key = (u16, u32, u64);

/// Cached translations, by what they cover. Several may cover the same addresses, as the tables
/// held them at different times.
#[derive(Default, Debug)]
pub(crate) struct Leaves(BTreeMap<Key, Vec<Entry>>);

fn sizes(map: &BTreeMap<Key, impl Sized>, vmid: Vmid) -> Vec<u32> {
    let mut sizes = Vec::new();
    let mut from = (vmid.0, 0, 0);
    while let Some((key, _)) = map.range(from..).next().filter(|(key, _)| key.0 == vmid.0) {
        sizes.push(key.1);
        from = (vmid.0, key.1 + 1, 0);
    }
    sizes
}

fn overlapping<T: Copy>(
    map: &BTreeMap<Key, Vec<T>>,
    vmid: Vmid,
    start: u64,
    end: u64,
) -> impl Iterator<Item = T> {
    sizes(map, vmid).into_iter().flat_map(move |shift| {
        let first = start >> shift << shift;
        map.range((vmid.0, shift, first)..(vmid.0, shift, end)).flat_map(|(_, v)| v.iter().copied())
    })
}

impl Leaves {
    pub fn at(&self, vmid: Vmid, gpa: u64) -> Vec<Entry> {
        self.within(vmid, gpa, gpa + 1)
    }

    pub fn within(&self, vmid: Vmid, start: u64, end: u64) -> Vec<Entry> {
        overlapping(&self.0, vmid, start, end).collect()
    }

    pub fn all(&self, vmid: Vmid) -> Vec<Entry> {
        self.within(vmid, 0, u64::MAX)
    }

    /// Caches `new`; returns an older entry that must not be cached at the same time.
    pub fn insert(&mut self, arch: &dyn Arch, vmid: Vmid, new: Entry) -> Option<(Clash, Entry)> {
        let at = self.0.entry((vmid.0, new.shift, new.start)).or_default();
        if at.iter().any(|old| old.same(&new)) {
            return None;
        }
        at.push(new);
        overlapping(&self.0, vmid, new.start, new.end())
            .find_map(|old| Some((clash(arch, &old, &new)?, old)))
    }

    pub fn forget(&mut self, scope: &Scope) {
        self.0.retain(|key, _| !scope.names(key, key.2 + (1 << key.1)));
    }
}

fn clash(arch: &dyn Arch, old: &Entry, new: &Entry) -> Option<Clash> {
    let at = old.start.max(new.start);
    let kept = old.hpa(at) == new.hpa(at)
        && (old.leaf.memory, old.leaf.shareability) == (new.leaf.memory, new.leaf.shareability);
    if !kept && arch.breaks() {
        return Some(Clash::Changed);
    }
    let both_code = old.leaf.rights.execute && new.leaf.rights.execute;
    let forbidden = match arch.sizes() {
        Sizes::Forbidden => true,
        Sizes::ForbiddenForCode => both_code,
        Sizes::MayAbort | Sizes::Allowed => false,
    };
    (old.shift != new.shift && forbidden).then_some(Clash::Resized)
}

/// Cached links to tables, by what the tables cover.
#[derive(Default, Debug)]
pub(crate) struct Walks(BTreeMap<Key, Vec<Walk>>);

impl Walks {
    pub fn at(&self, vmid: Vmid, gpa: u64) -> Vec<Walk> {
        self.within(vmid, gpa, gpa + 1)
    }

    pub fn within(&self, vmid: Vmid, start: u64, end: u64) -> Vec<Walk> {
        overlapping(&self.0, vmid, start, end).collect()
    }

    pub fn everywhere(&self) -> impl Iterator<Item = Walk> {
        self.0.values().flatten().copied()
    }

    /// Caches `new`; returns an older link at the same place to another table.
    pub fn insert(&mut self, arch: &dyn Arch, vmid: Vmid, new: Walk) -> Option<Walk> {
        let at = self.0.entry((vmid.0, new.shift, new.start)).or_default();
        if at.iter().any(|old| (old.table, old.rights) == (new.table, new.rights)) {
            return None;
        }
        at.push(new);
        at.iter().find(|old| arch.breaks() && old.table != new.table).copied()
    }

    pub fn forget(&mut self, scope: &Scope) {
        self.0.retain(|key, _| !scope.names(key, key.2 + (1 << key.1)));
    }
}

/// Entries that were found invalid, by what they cover, and the time of that.
#[derive(Default, Debug)]
pub(crate) struct Holes(BTreeMap<Key, u64>);

impl Holes {
    pub fn insert(&mut self, vmid: Vmid, start: u64, shift: u32, born: u64) {
        self.0.entry((vmid.0, shift, start)).or_insert(born);
    }

    /// Returns when the oldest of them that covers `gpa` was cached.
    pub fn at(&self, vmid: Vmid, gpa: u64) -> Option<u64> {
        let held = sizes(&self.0, vmid).into_iter();
        held.filter_map(|shift| self.0.get(&(vmid.0, shift, gpa >> shift << shift)).copied()).min()
    }

    /// Drops what `scope` covers, except `kept`: VMID, first address, base-2 logarithm of the
    /// bytes.
    pub fn forget(&mut self, scope: &Scope, kept: &[(Vmid, u64, u32)]) {
        self.0.retain(|key, _| {
            !scope.names(key, key.2 + (1 << key.1)) || kept.contains(&(Vmid(key.0), key.2, key.1))
        });
    }

    pub fn all(&self) -> impl Iterator<Item = (Vmid, u64, u32)> {
        self.0.keys().map(|&(vmid, shift, start)| (Vmid(vmid), start, shift))
    }
}
