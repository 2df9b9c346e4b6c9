//! The memory that is mapped, by the size of leaves. Counters keep it, so that no walk is needed.
//!
//! Each thread has counters, its own or shared with a few ([`crate::stats`]). When it leaves the
//! tables it adds to them what its guard mapped and unmapped ([`slat::Guard::leaf_delta`]).
//!
//! *Invariant*: the counters have the changes of every guard that a worker had in tables of this
//! guest, or will have them when the guard is dropped. So their sum is what is mapped while no
//! thread is inside. A single counter means nothing: a worker can unmap what a vCPU mapped, and its
//! counter goes below zero.

use crate::sync::AtomicCount;
use alloc::vec::Vec;
use slat::{Format, LeafDelta, PageSize};

/// The number of levels that may have leaves.
const LEVELS: usize = 3;

/// Leaves mapped minus leaves unmapped, modulo 2^64, by level. Leaves that belong to groups are in
/// `members` only.
#[derive(Debug, Default)]
pub(crate) struct SizeCells {
    leaves: [AtomicCount; LEVELS],
    members: [AtomicCount; LEVELS],
}

impl SizeCells {
    #[inline]
    pub fn add(&self, sizes: &LeafDelta) {
        for level in 0..LEVELS {
            self.leaves[level].add(sizes.leaves(level as u8) as u64);
            self.members[level].add(sizes.members(level as u8) as u64);
        }
    }
}

/// Bytes of the guest's memory that are mapped, by the size of the leaves that map them.
///
/// The values come from counters; the time to read them depends only on the number of vCPUs. They
/// are exact while no thread works on the guest's memory. While threads do, they are off by at most
/// what the threads inside the tables have changed since they entered, and what changes during the
/// read. A vCPU's fault changes what it maps, or splits, and what it maps ahead; every other
/// operation leaves the tables after each piece of 1 GiB, or of the largest leaf if that is more.
/// No value is below 0.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct MappedBytes {
    sizes: Vec<(PageSize, u64)>,
}

impl MappedBytes {
    /// Returns the bytes for each leaf size of the format, smallest first. If faults fold leaves
    /// ([`Config::contiguous`](crate::Config)), the bytes of groups follow, by the size of the
    /// group.
    pub fn by_size(&self) -> &[(PageSize, u64)] {
        &self.sizes
    }

    /// Returns all bytes that are mapped.
    pub fn bytes(&self) -> u64 {
        self.sizes.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the bytes that are mapped by leaves, or groups, larger than a page. Divided by
    /// [`MappedBytes::bytes`], this is the coverage by huge pages.
    pub fn huge_bytes(&self) -> u64 {
        let page = self.sizes.first().map(|(size, _)| *size);
        let huge = self.sizes.iter().filter(|(size, _)| Some(*size) > page);
        huge.map(|(_, bytes)| bytes).sum()
    }

    pub(crate) fn read<'c, F: Format>(
        cells: impl Iterator<Item = &'c SizeCells> + Clone,
        contiguous: bool,
    ) -> Self {
        let sum = |of: fn(&SizeCells, usize) -> u64, level: u8| {
            let all = cells.clone().map(|cells| of(cells, level as usize));
            // If two threads are inside, the counts of the one that unmapped may be there before
            // those of the one that mapped.
            (all.fold(0u64, u64::wrapping_add) as i64).max(0) as u64
        };
        let levels = 0..=F::LARGEST_LEAF;
        let leaves = levels.clone().map(|level| {
            let count = sum(|cells, level| cells.leaves[level].get(), level);
            (F::size(level), count << F::shift(level))
        });
        let mut sizes: Vec<_> = leaves.collect();
        let groups = levels.filter(|&level| contiguous && F::group(level) > 1);
        sizes.extend(groups.filter_map(|level| {
            let size = PageSize::from_bytes((F::group(level) as u64) << F::shift(level))?;
            let count = sum(|cells, level| cells.members[level].get(), level);
            Some((size, count << F::shift(level)))
        }));
        Self { sizes }
    }
}
