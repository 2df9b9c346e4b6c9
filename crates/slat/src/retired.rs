//! Tables that were unlinked, until neither hardware nor software can be in them.
//!
//! A list of tables is a chain of addresses: the first entry of each table holds a retired marker
//! with the address of the next, and address 0 ends the list. A table is in one place: in the chain
//! of the thread that unlinked it, in one of the two lists, or among those that wait for software
//! walkers.
//!
//! *Invariant*: a table in the list `invalidated` was unlinked before an invalidation of its
//! addresses, walk caches included, that has completed.

use crate::addr::Hpa;
use crate::format::Format;
use crate::platform::Platform;
use crate::sync::{AtomicU64, Ordering, Turn};
use crate::table::{self, Frame, Pte};
use core::marker::PhantomData;

/// Tables that one thread has unlinked, and that no other thread knows.
#[derive(Debug)]
pub(crate) struct Chain<F> {
    /// The addresses of the first and the last table; 0 if there is none.
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

    /// Returns the number of tables.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Adds a table. `first` is its first entry, which says that it is retired, as all entries do
    /// unless a block took the place of a table of pages.
    pub fn add(&mut self, table: Hpa, first: &Pte) {
        first.release(F::retired(Hpa(0)), F::retired(Hpa(self.head)));
        if self.is_empty() {
            self.tail = table.0;
        }
        self.head = table.0;
        self.len += 1;
    }

    /// Takes all tables out of the chain.
    pub fn take(&mut self) -> Self {
        core::mem::replace(self, Self::EMPTY)
    }
}

/// A list to which many threads push, and which is taken only as a whole. So a head that was seen
/// before is the head again (no ABA problem), and a push may rewrite its link until it succeeds.
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
        // SAFETY: the chain's tables are allocated, and this thread's own until the push succeeds.
        let last = unsafe { &table::entries(platform, Hpa(chain.tail), 1)[0] };
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

/// All tables of a guest that were unlinked and not given back. They are on a cache line apart from
/// what every walk reads.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct RetiredFrames {
    /// Tables that hardware may still have in walk caches.
    unlinked: List,
    /// Tables that hardware has no entries of.
    invalidated: List,
    /// Tables of both kinds that only software walkers may still be in.
    forgotten: ForgottenLists,
    /// The thread that has the turn is the only one to change `forgotten`.
    turn: Turn,
}

/// Two lists of tables, and the clock's reading from which on no walker is in them.
///
/// *Invariant*: the reading was taken after the last of the tables was unlinked, and after an
/// invalidation that covers them. Lists are put here only where both are empty, so the reading is
/// right for both.
#[derive(Debug)]
struct ForgottenLists {
    lists: [AtomicU64; 2],
    since: AtomicU64,
}

impl ForgottenLists {
    #[inline]
    fn lists(&self, order: Ordering) -> [u64; 2] {
        let [unlinked, invalidated] = &self.lists;
        [unlinked.load(order), invalidated.load(order)]
    }

    fn set(&self, lists: [u64; 2]) {
        self.lists.iter().zip(lists).for_each(|(list, head)| list.store(head, Ordering::Relaxed));
    }

    /// Gives the tables back if `passed`, called with the reading, says that no walker can be in
    /// them.
    fn free<F: Format>(&self, platform: &impl Platform, passed: impl Fn(u64) -> bool) -> usize {
        let lists = self.lists(Ordering::Relaxed);
        if lists == [0, 0] || !passed(self.since.load(Ordering::Relaxed)) {
            return 0;
        }
        self.set([0, 0]);
        lists.into_iter().map(|list| free_list::<F>(platform, list)).sum()
    }
}

impl RetiredFrames {
    pub fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            unlinked: List::new(),
            invalidated: List::new(),
            forgotten: ForgottenLists { lists: [zero(), zero()], since: zero() },
            turn: Turn::new(),
        }
    }

    /// Adds tables whose invalidation has completed.
    pub fn invalidated<F: Format>(&self, platform: &impl Platform, chain: &Chain<F>) {
        self.invalidated.push(platform, chain);
    }

    /// Adds tables that walk caches may hold.
    pub fn unlinked<F: Format>(&self, platform: &impl Platform, chain: &Chain<F>) {
        self.unlinked.push(platform, chain);
    }

    /// Returns whether there is no table to give back.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.unlinked.is_empty()
            && self.invalidated.is_empty()
            && self.forgotten.lists(Ordering::Acquire) == [0, 0]
    }

    /// Gives back the tables that no walker can be in, and returns how many. It calls `invalidate`
    /// for tables that hardware may hold, `now` for the reading from which on walkers are not in
    /// the tables, and `passed` to learn whether all earlier walkers have left.
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

    /// Takes all tables that hardware cannot be in, after `invalidate` where it still may be.
    /// Leaves them to another thread that has the turn.
    pub fn take<F: Format>(&self, invalidate: impl Fn()) -> RetiredTables<F> {
        let mut taken = RetiredTables { lists: [0, 0], format: PhantomData };
        if !self.is_idle() && self.turn.take() {
            if self.forgotten.lists(Ordering::Relaxed) == [0, 0] {
                taken.lists = [self.unlinked.take(), self.invalidated.take()];
                if taken.lists[0] != 0 {
                    invalidate();
                }
            } else {
                taken.lists = self.forgotten.lists(Ordering::Relaxed);
                self.forgotten.set([0, 0]);
            }
            self.turn.end();
        }
        taken
    }

    /// Gives back all tables. The caller knows that neither hardware nor software is in them any
    /// more.
    pub fn free_all<F: Format>(&self, platform: &impl Platform) {
        self.forgotten.free::<F>(platform, |_| true);
        self.forgotten.set([self.unlinked.take(), self.invalidated.take()]);
        self.forgotten.free::<F>(platform, |_| true);
    }
}

/// Tables that were unlinked and that no hardware can be in, for a hypervisor that waits for
/// threads by its own read-copy-update: the result of
/// [`Tables::take_retired`](crate::Tables::take_retired).
///
/// Dropping it leaks the tables.
#[must_use = "dropped, the tables are leaked"]
#[derive(Debug)]
pub struct RetiredTables<F> {
    lists: [u64; 2],
    format: PhantomData<F>,
}

impl<F: Format> RetiredTables<F> {
    /// Returns whether there is no table.
    pub fn is_empty(&self) -> bool {
        self.lists == [0, 0]
    }

    /// Returns the tables as two words, to be kept by code that knows no Rust.
    pub const fn into_words(self) -> [u64; 2] {
        self.lists
    }

    /// Makes the value again from its words.
    ///
    /// # Safety
    /// [`RetiredTables::into_words`] returned them, and nothing was made of them since.
    pub const unsafe fn from_words(lists: [u64; 2]) -> Self {
        Self { lists, format: PhantomData }
    }

    /// Gives the tables back to the platform, and returns how many.
    ///
    /// # Safety
    /// They are of tables of this platform. No thread is inside that was inside when they were
    /// taken: a grace period has passed.
    pub unsafe fn free(self, platform: &impl Platform) -> usize {
        self.lists.into_iter().map(|list| free_list::<F>(platform, list)).sum()
    }
}

/// Frees the tables of a list that no other thread knows any more.
fn free_list<F: Format>(platform: &impl Platform, mut next: u64) -> usize {
    let mut freed = 0;
    while next != 0 {
        let hpa = Hpa(next);
        // SAFETY: the table is on a list, so it is allocated. This reads its first entry only, and
        // the table is freed below, after that.
        let first = unsafe { &table::entries(platform, hpa, 1)[0] };
        next = F::table_address(first.load()).0;
        // SAFETY: the table came from a cache, which allocates `TABLE_BYTES`; it is unlinked; no
        // hardware (`reclaim`) and no software (`passed`) can be in it; and `ForgottenLists::free`
        // has taken it off the list, so no other code owns it.
        unsafe {
            if let Some(frame) = Frame::from_hpa(hpa) {
                platform.free(frame, F::TABLE_BYTES);
                freed += 1;
            }
        }
    }
    freed
}
