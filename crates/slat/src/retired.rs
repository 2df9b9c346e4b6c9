//! Tables that were unlinked, until neither hardware nor software can be in them.
//!
//! A list of tables is a chain of addresses: the first slot of each holds a retired marker with the
//! address of the next; 0 ends it. A table is in one place: in the chain of the thread that
//! unlinked it, in one of the two lists, or among those that wait for software walkers.
//! *Invariant*: a table in the list `invalidated` was unlinked before an invalidation of its
//! addresses, walk caches included, that has completed.

use crate::addr::Hpa;
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering, Turn};
use crate::table::{self, Frame, Slot};
use core::marker::PhantomData;

/// Tables that one thread has unlinked, and nobody else knows.
#[derive(Debug)]
pub(crate) struct Chain<F> {
    /// The addresses of the first and the last; 0 if there is none.
    head: u64,
    tail: u64,
    len: usize,
    format: PhantomData<F>,
}

impl<F: Format> Chain<F> {
    pub const EMPTY: Self = Self { head: 0, tail: 0, len: 0, format: PhantomData };

    pub const fn is_empty(&self) -> bool {
        self.head == 0
    }

    /// How many tables.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Adds a table whose slots, of which `first` is the first, all say that it is retired.
    pub fn add(&mut self, table: Hpa, first: &Slot) {
        first.release(F::retired(Hpa(0)), F::retired(Hpa(self.head)));
        if self.is_empty() {
            self.tail = table.0;
        }
        self.head = table.0;
        self.len += 1;
    }

    /// Takes all of it.
    pub fn take(&mut self) -> Self {
        core::mem::replace(self, Self::EMPTY)
    }
}

/// A list that is pushed to by many and taken as a whole: so a head that comes back is the list's
/// head, and a link may be rewritten until the push succeeds.
#[derive(Debug)]
struct List(AtomicU64);

impl List {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    #[inline]
    fn push<F: Format>(&self, platform: &impl Platform, chain: &Chain<F>) {
        if chain.is_empty() {
            return;
        }
        // SAFETY: the chain's tables are allocated, and this thread's until the push succeeds.
        let last = unsafe { &table::slots(platform, Hpa(chain.tail), 1)[0] };
        let mut marker = F::retired(Hpa(0));
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            let next = F::retired(Hpa(head));
            last.release(marker, next);
            marker = next;
            let pushed =
                self.0.compare_exchange(head, chain.head, Ordering::AcqRel, Ordering::Relaxed);
            match pushed {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::AcqRel)
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// All tables of a guest that were unlinked and not given back, away from what every walk reads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Retired {
    /// Hardware may hold them in walk caches.
    unlinked: List,
    /// Hardware has forgotten them.
    invalidated: List,
    /// Of both, tables that only software walkers may be in.
    forgotten: Forgotten,
    /// Whose holder alone changes `forgotten`.
    turn: Turn,
}

/// Two lists of tables, and the clock's reading from which on no walker is in them.
///
/// *Invariant*: the reading was taken after the last of the tables was unlinked, and after an
/// invalidation that covers them. Lists are added where both are empty, so the reading is theirs.
#[derive(Debug)]
struct Forgotten {
    lists: [AtomicU64; 2],
    since: AtomicU64,
}

impl Forgotten {
    #[inline]
    fn lists(&self, order: Ordering) -> [u64; 2] {
        let [unlinked, invalidated] = &self.lists;
        [unlinked.load(order), invalidated.load(order)]
    }

    fn set(&self, lists: [u64; 2]) {
        self.lists.iter().zip(lists).for_each(|(list, head)| list.store(head, Ordering::Relaxed));
    }

    /// Gives the tables back if `passed` says of the reading that no walker can be in them.
    fn free<F: Format>(&self, platform: &impl Platform, passed: impl Fn(u64) -> bool) -> usize {
        let lists = self.lists(Ordering::Relaxed);
        if lists == [0, 0] || !passed(self.since.load(Ordering::Relaxed)) {
            return 0;
        }
        self.set([0, 0]);
        lists.into_iter().map(|list| free_list::<F>(platform, list)).sum()
    }
}

impl Retired {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            unlinked: List::new(),
            invalidated: List::new(),
            forgotten: Forgotten { lists: [zero(), zero()], since: zero() },
            turn: Turn::new(),
        }
    }

    /// Keeps tables whose invalidation has completed.
    pub fn invalidated<F: Format>(&self, platform: &impl Platform, chain: &Chain<F>) {
        self.invalidated.push(platform, chain);
    }

    /// Keeps tables that walk caches may hold.
    pub fn unlinked<F: Format>(&self, platform: &impl Platform, chain: &Chain<F>) {
        self.unlinked.push(platform, chain);
    }

    /// Whether there is no table to give back.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.unlinked.is_empty()
            && self.invalidated.is_empty()
            && self.forgotten.lists(Ordering::Acquire) == [0, 0]
    }

    /// Gives back what no walker can be in; returns how many. `invalidate` is called for tables
    /// that hardware may hold, `now` says from which reading on software has left, `passed` whether
    /// it has.
    pub fn reclaim<F: Format>(
        &self,
        platform: &impl Platform,
        invalidate: impl Fn(),
        now: impl Fn() -> u64,
        passed: impl Fn(u64) -> bool,
    ) -> usize {
        if self.is_idle() || !self.turn.take() {
            return 0;
        }
        let mut freed = self.forgotten.free::<F>(platform, &passed);
        if self.forgotten.lists(Ordering::Relaxed) == [0, 0] {
            let lists = [self.unlinked.take(), self.invalidated.take()];
            if lists[0] != 0 {
                invalidate();
            }
            if lists != [0, 0] {
                self.forgotten.since.store(now(), Ordering::Relaxed);
                self.forgotten.set(lists);
                freed += self.forgotten.free::<F>(platform, &passed);
            }
        }
        self.turn.end();
        freed
    }

    /// Gives back all of them: nobody, hardware or software, is in the tables any more.
    pub fn free_all<F: Format>(&self, platform: &impl Platform) {
        self.forgotten.free::<F>(platform, |_| true);
        self.forgotten.set([self.unlinked.take(), self.invalidated.take()]);
        self.forgotten.free::<F>(platform, |_| true);
    }
}

/// Frees the tables of a list that nobody else knows any more.
fn free_list<F: Format>(platform: &impl Platform, mut next: u64) -> usize {
    let mut freed = 0;
    while next != 0 {
        let hpa = Hpa(next);
        // SAFETY: a chain put the table on the list, and this takes the first of its slots; the
        // table is freed below, after its only use.
        let first = unsafe { &table::slots(platform, hpa, 1)[0] };
        next = F::table_address(first.load()).0;
        // SAFETY: the table came from a cache, which allocates so many bytes; it is unlinked;
        // no hardware (`reclaim`) and no software (`passed`) can be in it; and `Forgotten::free`
        // has taken it off the list: nobody else owns it.
        unsafe {
            if let Some(frame) = Frame::from_hpa(hpa) {
                platform.free(frame, F::TABLE_BYTES);
                freed += 1;
            }
        }
    }
    freed
}
