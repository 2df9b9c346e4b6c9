//! Counts and times of reclaim, by part.

use core::sync::atomic::{AtomicU64, Ordering};

/// How often, and how long, in ticks of the host's clock.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Part {
    /// How often.
    pub count: u64,
    /// Ticks in all.
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
    (parts { $($(#[$part_doc:meta])* $part:ident,)* } counts { $($(#[$count_doc:meta])* $count:ident,)* }) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $part: PartCell,)*
            $(pub $count: AtomicU64,)*
        }

        /// Statistics of the reclaim of one guest, since its memory was made.
        #[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$part_doc])* pub $part: Part,)*
            $($(#[$count_doc])* pub $count: u64,)*
        }

        impl Stats {
            /// The difference to `earlier`.
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
        /// Walks over all memory, by calls.
        walk,
        /// Pages about to be given up that were asked about, one by one.
        check,
        /// The same with their neighbours.
        around,
        /// Unmapping and invalidating, by batches.
        unmap,
        /// Writing to swap, by pages.
        write,
        /// Reading from swap, by pages.
        read,
        /// All of giving up pages, by batches: what is above, but reads, and keeping the order.
        reclaim,
    }
    counts {
        /// Pages that came in for the first time.
        first_touches,
        /// Pages that came back.
        refaults,
        /// Of those, pages that as much memory again would have kept.
        soon,
        /// Pages that were given up.
        given_up,
        /// Of those, pages of which swap had a copy already.
        clean,
        /// Pages that were next, and had been used.
        kept,
        /// Pages that were used between the last look and the moment they were unmapped.
        rescued,
        /// Pages that were next, and had come back too recently.
        held,
        /// Pages that a look found no answer for, as another thread held their entries; of a look
        /// that ended early, an upper bound. They are taken for idle; unmapping them finds those
        /// that were used.
        unanswered,
        /// Huge pages that came to be at first touch.
        huge,
        /// Huge pages that were split because they were next.
        split,
        /// Huge pages that were put together again.
        collapsed,
        /// Pages that were copied for that.
        moved,
        /// Pages that could not come in, as the guest has all the swap that it may have.
        over_quota,
        /// As it has no more than it keeps, and others have taken all there is.
        below_protected,
        /// As it uses more than it may have, within its pages' minimum residency.
        thrashing,
        /// As nothing of it could give way otherwise, or swap takes nothing.
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
