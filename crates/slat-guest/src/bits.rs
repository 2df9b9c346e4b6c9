//! Bitmaps of a memslot's pages, or tables: marks that leaves do not have.

use crate::memslots::spec::MemslotSpec;
use crate::sync::{AtomicU64, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;
use slat::Format;

/// One bit for each page of a memslot: its log, or marks kept for its pages.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
}

impl Bits {
    /// Makes bits for `pages`, all set or all clear; `None` if memory is short.
    pub fn new(pages: u64, set: bool) -> Option<Self> {
        let len = pages.div_ceil(64) as usize;
        let mut words = Vec::new();
        words.try_reserve_exact(len).ok()?;
        let all = if set { u64::MAX } else { 0 };
        words.resize_with(len, || AtomicU64::new(all));
        if let (Some(last), rest @ 1..) = (words.last(), pages % 64) {
            last.store(all & ((1 << rest) - 1), Ordering::Relaxed);
        }
        Some(Self { words: words.into_boxed_slice() })
    }

    pub fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Sets the bit of the page at `gpa`, if the memslot has it.
    #[inline]
    pub fn mark_page<F: Format>(&self, memslot: &MemslotSpec, gpa: u64) {
        let offset = gpa.wrapping_sub(memslot.gpa.0);
        if offset < memslot.bytes {
            let page = offset >> F::PAGE_SHIFT;
            self.words[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::AcqRel);
        }
    }

    /// Sets the bits of the pages in `gpa..gpa + bytes` that the memslot has.
    pub fn mark<F: Format>(&self, memslot: &MemslotSpec, gpa: u64, bytes: u64) {
        each_word::<F>(memslot, gpa, bytes, |word, mask| self.add(word, mask));
    }

    /// Sets the bits of `mask`.
    pub fn add(&self, word: usize, mask: u64) {
        if mask != 0 {
            self.words[word].fetch_or(mask, Ordering::AcqRel);
        }
    }

    /// Clears the bits of `mask`, and returns those that were set.
    pub fn swap_out(&self, word: usize, mask: u64) -> u64 {
        if self.get(word, mask) == 0 {
            return 0;
        }
        self.words[word].fetch_and(!mask, Ordering::AcqRel) & mask
    }

    /// Returns the bits of `mask` that are set.
    pub fn get(&self, word: usize, mask: u64) -> u64 {
        self.words[word].load(Ordering::Acquire) & mask
    }
}

/// Calls `word` with each word of a memslot's bits, and the bits in it, for the `bytes` from `gpa`
/// on. Pages that the memslot does not have are left out here, so that no caller makes an index
/// from an unchecked range.
pub(crate) fn each_word<F: Format>(
    memslot: &MemslotSpec,
    gpa: u64,
    bytes: u64,
    mut word: impl FnMut(usize, u64),
) {
    let start = gpa.max(memslot.gpa.0);
    let end = gpa.saturating_add(bytes).min(memslot.gpa.0 + memslot.bytes);
    if start >= end {
        return;
    }
    let mut page = (start - memslot.gpa.0) >> F::PAGE_SHIFT;
    let end = (end - memslot.gpa.0).div_ceil(1 << F::PAGE_SHIFT);
    while page < end {
        let bit = page % 64;
        let count = (64 - bit).min(end - page);
        word((page / 64) as usize, (u64::MAX >> (64 - count)) << bit);
        page += count;
    }
}

/// Marks of a memslot's pages that one operation has taken from the leaves, and that other
/// operations still need.
///
/// *Invariant*: if the guest wrote a page since the host last took it, the page is dirty in its
/// leaf or in `written`, or its mark is being moved from one to the other.
/// 1. A thread that moves marks announces that ([`Moves::begin`]), then cleans or removes leaves,
///    then adds to `written`, then ends the announcement.
/// 2. A thread that removes leaves of pages that stay the guest's may find them clean because
///    another thread moves their marks. If it finds such a move, it adds the pages to `written`
///    itself, before its own move ends (`Guest::spill_marks`).
/// 3. A clear does not know which pages were dirty: it adds those whose leaves are there, and all
///    that it cleaned if a thread may be removing leaves (`Guest::marks_in_flight`,
///    `Guest::host_unmaps`).
/// 4. A thread that takes a page removes its leaf first, then looks for moves, then reads `written`
///    ([`SpilledBits::take`]).
///
/// If the leaf was clean, or gone, by then, the exchange that found it so has acquired the exchange
/// that made it so, and with it the announcement. A thread that finds the move ended has acquired
/// the marks that it added.
#[derive(Debug)]
pub(crate) struct SpilledBits {
    /// Pages that were used since they were last aged.
    pub used: Bits,
    /// Pages that were written since the host last took them.
    pub written: Bits,
    /// Moves of marks from leaves that stay mapped.
    pub moves: Moves,
}

impl SpilledBits {
    pub fn new(pages: u64) -> Option<Self> {
        let (used, written) = (Bits::new(pages, false)?, Bits::new(pages, false)?);
        Some(Self { used, written, moves: Moves::new() })
    }

    /// Takes the kept marks of pages that the caller has unmapped: the pages that were written, or
    /// may have been, and those that were used. `mapped`: the pages had leaves. If they had none,
    /// the move of the thread that removed the last leaf is in `in_flight` until `written` has its
    /// mark, or the mark that a log was moving from that leaf.
    pub fn swap_out(&self, word: usize, mask: u64, mapped: bool, in_flight: &Moves) -> (u64, u64) {
        let moving = in_flight.any() || mapped && self.moves.any();
        let (written, used) = (self.written.swap_out(word, mask), self.used.swap_out(word, mask));
        (if moving { mask } else { written }, used)
    }
}

/// The number of threads that are moving marks from leaves to `SpilledBits`.
#[derive(Debug)]
pub(crate) struct Moves(AtomicU64);

impl Moves {
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Announces a move of marks. The move ends when the result is dropped.
    pub fn begin(&self) -> Move<'_> {
        self.0.fetch_add(1, Ordering::AcqRel);
        Move(self)
    }

    pub fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

pub(crate) struct Move<'m>(&'m Moves);

impl Drop for Move<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The tables of a memslot that have executable pages, or may have, and that could otherwise be
/// blocks without the right to execute: one bit each, for this period and the last. Fetches have
/// made or found these tables, or a log has left them.
#[derive(Debug)]
pub(crate) struct Splits {
    /// The words of each period, indexed by its parity.
    words: [Box<[AtomicU64]>; 2],
    period: AtomicU64,
}

impl Splits {
    /// Returns `None` if memory is short.
    pub fn new<F: Format>(memslot: &MemslotSpec) -> Option<Self> {
        let last = memslot.gpa.0 + memslot.bytes.max(1) - 1;
        let tables = (last >> F::shift(1)) - (memslot.gpa.0 >> F::shift(1)) + 1;
        let words = || {
            let len = tables.div_ceil(64) as usize;
            let mut words = Vec::new();
            words.try_reserve_exact(len).ok()?;
            words.extend((0..len).map(|_| AtomicU64::new(0)));
            Some(words.into_boxed_slice())
        };
        Some(Self { words: [words()?, words()?], period: AtomicU64::new(0) })
    }

    pub fn add<F: Format>(&self, memslot: &MemslotSpec, gpa: u64) {
        let table = (gpa >> F::shift(1)) - (memslot.gpa.0 >> F::shift(1));
        let period = self.period.load(Ordering::Relaxed) as usize % 2;
        let word = &self.words[period][(table / 64) as usize];
        if word.load(Ordering::Relaxed) >> (table % 64) & 1 == 0 {
            word.fetch_or(1 << (table % 64), Ordering::AcqRel);
        }
    }

    /// Ends the period; calls `table` with each table that was noted in the previous period.
    pub fn turn<F: Format>(&self, memslot: &MemslotSpec, mut table: impl FnMut(u64)) {
        // Tables that were noted in the period that ends wait for the next call.
        let period = self.period.load(Ordering::Acquire) as usize;
        for (index, word) in self.words[(period + 1) % 2].iter().enumerate() {
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let number = index as u64 * 64 + u64::from(bits.trailing_zeros());
                table(((memslot.gpa.0 >> F::shift(1)) + number) << F::shift(1));
                bits &= bits - 1;
            }
        }
        self.period.fetch_add(1, Ordering::AcqRel);
    }
}
