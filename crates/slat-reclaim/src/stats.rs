//! Counts and times of reclaim, by part.

use core::sync::atomic::{AtomicU64, Ordering};

/// Count and total time of one part of reclaim, in ticks of the host's clock.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Part {
    /// Number of times that this part ran.
    pub count: u64,
    /// Ticks in total.
    pub ticks: u64,
}

impl Part {
    const fn since(self, earlier: Self) -> Self {
        Self { count: self.count - earlier.count, ticks: self.ticks - earlier.ticks }
    }
}

#[derive(Debug, Default)]
pub(crate) struct PartCell {
    count: AtomicU64,
    ticks: AtomicU64,
}

impl PartCell {
    pub fn add(&self, ticks: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.ticks.fetch_add(ticks, Ordering::Relaxed);
    }

    fn read(&self) -> Part {
        let get = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        Part { count: get(&self.count), ticks: get(&self.ticks) }
    }
}

macro_rules! stats {
    (parts { $($(#[$part_doc:meta])* $part:ident,)* }
     counts { $($(#[$count_doc:meta])* $count:ident,)* }) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $part: PartCell,)*
            $(pub $count: AtomicU64,)*
        }

        /// Statistics of the reclaim of one guest, since its [`PagedMemory`](crate::PagedMemory)
        /// was made.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$part_doc])* pub $part: Part,)*
            $($(#[$count_doc])* pub $count: u64,)*
        }

        impl Stats {
            /// Returns the difference from `earlier`.
            pub const fn since(&self, earlier: &Self) -> Self {
                Self {
                    $($part: self.$part.since(earlier.$part),)*
                    $($count: self.$count - earlier.$count,)*
                }
            }
        }

        impl Counters {
            pub fn read(&self) -> Stats {
                Stats {
                    $($part: self.$part.read(),)*
                    $($count: self.$count.load(Ordering::Relaxed),)*
                }
            }
        }
    };
}

stats! {
    parts {
        /// Ageing walks over all memory; counts the calls of a walk.
        walk,
        /// Tests of the accessed bits of single pages that were about to be given up.
        check,
        /// Tests of such pages together with the 64 pages around them.
        around,
        /// Unmapping and TLB invalidation; counts batches.
        unmap,
        /// Writes to swap; counts pages.
        write,
        /// Reads from swap; counts pages.
        read,
        /// Reclaim as a whole: all of the above but reads, and the upkeep of the order; counts
        /// reclaims.
        reclaim,
    }
    counts {
        /// Pages that came in for the first time.
        first_touches,
        /// Pages that came back.
        refaults,
        /// Of those, pages that would have stayed with twice the memory.
        refaults_within_set,
        /// Pages that were given up.
        evicted,
        /// Of those, pages that already had a valid copy in swap.
        clean,
        /// Pages that were next to be given up, but had been used.
        kept,
        /// Pages that were used between the last test of their accessed bits and the unmap.
        rescued,
        /// Pages that were next to be given up, but had come in too recently.
        held,
        /// Pages whose accessed bits could not be tested, as another thread held their entries; an
        /// upper bound for tests that ended early. They count as idle; the unmap finds those that
        /// were used.
        unanswered,
        /// Huge pages that were brought in by a first touch.
        huge,
        /// Huge pages that were split because a page of them was next to be given up.
        split,
        /// Huge pages that were collapsed from pages.
        collapsed,
        /// Pages that were copied for those collapses.
        moved,
        /// Pages that could not come in, because the guest had all the swap that it may have.
        over_quota,
        /// Pages that could not come in, because the guest had no more pages than it keeps, and
        /// other guests had taken the rest.
        below_protected,
        /// Pages that could not come in, because all pages of the guest were within the minimum
        /// residency.
        thrashing,
        /// Pages that could not come in for another reason: no page could be given up, or swap took
        /// none.
        no_room,
    }
}

impl Counters {
    pub fn add(counter: &AtomicU64, n: u64) {
        if n != 0 {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }
}
