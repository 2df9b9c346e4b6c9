//! Operations that change no entry: translate, iterate, dump, and flush of what is mapped.

use super::ChangeError;
use crate::addr::{Gpa, GpaRange, Hpa, Levels, PageSize};
use crate::format::{Attributes, Execute, Format, Kind, Memory, RUN, Software};
use crate::guard::Guard;
use crate::platform::{Maintenance, Platform};
use crate::sync::acquired;
use crate::table::{Pte, folded};
use crate::tables::{Contention, Found, Interruption, Start, Tables, Translation};
use crate::walk::{Entry, Flow, PATIENCE, Visitor, WalkCounts, visit_each};
use core::{fmt, slice};

impl<F: Format, P: Platform> Guard<'_, '_, F, P> {
    /// Returns the translation of `gpa`; `None` if nothing is mapped there.
    ///
    /// # Errors
    /// [`Contention`] if the entry, or one of its group, stands frozen: it may be about to appear
    /// or to vanish.
    #[inline(always)]
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        self.tables.translate(&self.start, gpa)
    }

    /// Returns the descriptor at which a walk for `gpa` ends, and the size of the part of the
    /// address space that its entry covers. For comparison with other implementations.
    pub fn descriptor(&self, gpa: Gpa) -> Option<(u64, PageSize)> {
        if gpa.0 >> self.tables.geometry().address_bits != 0 {
            return None;
        }
        let Found { raw, level, .. } = self.tables.lookup(gpa.0);
        Some((raw, F::size(level)))
    }

    /// Returns the leaves that overlap `range`, in ascending order, each as it is when the iterator
    /// reads it. No address is in two of them: of a leaf that appears around the address that the
    /// iterator has reached, only the rest is shown, as leaves of the sizes that fit.
    ///
    /// # Errors
    /// [`ChangeError::Range`]. An item is [`Contention`] where an entry stands frozen.
    pub fn leaves(&self, range: GpaRange) -> Result<Leaves<'_, F, P>, ChangeError> {
        self.tables.check(&range).map_err(ChangeError::Range)?;
        Ok(Leaves::new(self.tables, range.start().0, range.end().0))
    }

    /// Makes the guest's memory in `range` coherent: of all cacheable leaves that are mapped, as
    /// far as they lie in the range. Returns the bytes. For a guest that accessed the memory
    /// without the caches, or whose memory another party will read without them.
    ///
    /// # Errors
    /// [`ChangeError::Range`]; [`ChangeError::Contended`] at a frozen entry: everything before the
    /// address is done.
    pub fn clean_caches(&mut self, range: GpaRange) -> Result<u64, Interruption<ChangeError>> {
        if let Err(reason) = self.tables.check(&range) {
            return Self::stopped(range.start(), ChangeError::Range(reason));
        }
        let mut visitor = Flush { tables: self.tables, at: range.start().0, flushed: 0 };
        let (start, end) = (range.start().0, range.end().0);
        let result = self.tables.walk(start, end, &mut visitor);
        let flushed = visitor.flushed;
        match result {
            Ok(()) => Ok(flushed),
            Err(at) => Self::stopped(at, ChangeError::Contended),
        }
    }

    /// Returns the tables as text: a line for each run of neighbouring leaves that continue each
    /// other, with S and T for the first two software bits, and S2 and so on for the others.
    pub const fn dump(&self) -> Dump<'_, F, P> {
        Dump { tables: self.tables }
    }
}

impl<F: Format, P: Platform> Tables<'_, F, P> {
    #[inline(always)]
    fn translate(&self, start: &Start<'_, P>, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        let found = start.lookup_any::<F>(gpa.0);
        // Most are pages: compiled for them, whose size is a constant, and for others.
        match found.level {
            0 => self.translate_found(Found { level: 0, ..found }, gpa),
            _ => self.translate_found(found, gpa),
        }
    }

    /// Returns the translation of `gpa` if `found` is a leaf of its own that no thread is changing.
    /// The caller looked once, and no thread reclaims.
    #[inline(always)]
    pub(crate) fn translation_alone(&self, found: Found, gpa: Gpa) -> Option<Translation> {
        // Compiled for pages and for others, as `translate`.
        match found.level {
            0 => self.alone(Found { level: 0, ..found }, gpa),
            _ => self.alone(found, gpa),
        }
    }

    #[inline(always)]
    fn alone(&self, found: Found, gpa: Gpa) -> Option<Translation> {
        let Found { raw, level, .. } = found;
        if raw & F::MARK != 0 || folded::<F>(raw) || F::kind(raw, level) != Kind::Leaf {
            return None;
        }
        let Leaf { hpa, size, attributes, .. } = self.whole(found, gpa.0, F::size(level));
        Some(Translation { hpa: Hpa(hpa.0 | gpa.0 & (size.bytes() - 1)), size, attributes })
    }

    /// As [`Guard::translate`], which looks once, and compiled once: for what is seldom called. No
    /// thread reclaims.
    pub(crate) fn translate_any(&self, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        self.translation(self.lookup_marked::<false>(gpa.0), gpa)
    }

    #[inline(always)]
    fn translate_found(&self, found: Found, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        if found.raw & F::MARK == 0 {
            return self.translation(found, gpa);
        }
        // Compiled once more: a function that returned the result would return it in memory.
        self.translation(self.lookup_marked::<true>(gpa.0), gpa)
    }

    #[inline(always)]
    fn translation(&self, found: Found, gpa: Gpa) -> Result<Option<Translation>, Contention> {
        match F::kind(found.raw, found.level) {
            Kind::Frozen | Kind::Retired => Err(Contention { at: gpa }),
            Kind::Leaf | Kind::Sealed => {
                let Leaf { hpa, size, attributes, .. } = self.leaf(found, gpa.0)?;
                let hpa = Hpa(hpa.0 | gpa.0 & (size.bytes() - 1));
                Ok(Some(Translation { hpa, size, attributes }))
            }
            Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table => Ok(None),
        }
    }

    /// The leaf, or group, that was found at `gpa`.
    #[inline(always)]
    fn leaf(&self, found: Found, gpa: u64) -> Result<Leaf, Contention> {
        let Found { raw, level, .. } = found;
        if folded::<F>(raw) {
            return match self.folded_state(level, gpa) {
                0 => Err(Contention { at: Gpa(gpa) }),
                raw => {
                    let members = F::group(level).trailing_zeros();
                    let size = PageSize::from_shift(F::shift(level) + members);
                    Ok(self.whole(Found { raw, ..found }, gpa, size))
                }
            };
        }
        Ok(self.whole(found, gpa, F::size(level)))
    }

    /// The leaf, or group, of `size` around `gpa` that was found with its first member.
    #[inline(always)]
    fn whole(&self, found: Found, gpa: u64, size: PageSize) -> Leaf {
        let Found { raw, level } = found;
        Leaf {
            gpa: Gpa(gpa & !(size.bytes() - 1)),
            hpa: F::leaf_address(raw, level),
            size,
            attributes: self.format.decode(raw, level),
        }
    }

    /// Returns the first member of the group at `gpa`, with the state of all; 0 if another thread
    /// is changing the group. It does not unwind, for the reason given at `Tables::lookup_again`.
    #[cold]
    #[inline(never)]
    extern "C" fn folded_state(&self, level: u8, gpa: u64) -> u64 {
        self.group(gpa, level).and_then(|group| group.state()).unwrap_or(0)
    }
}

/// Maintains caches of the memory behind leaves, each once.
struct Flush<'t, F: Format, P: Platform> {
    tables: &'t Tables<'t, F, P>,
    /// The address up to which it is done, as a walk that begins anew visits leaves once more.
    at: u64,
    flushed: u64,
}

impl<F: Format, P: Platform> Flush<'_, F, P> {
    #[inline(always)]
    fn is_cached(&self, raw: u64, level: u8) -> bool {
        self.tables.format.decode(raw, level).memory == Memory::Normal
    }

    #[inline(always)]
    fn maintain(&mut self, hpa: Hpa, bytes: u64) {
        // Orders the load of the leaf before loads of its memory: a walk's load orders nothing.
        acquired();
        self.tables.platform.maintain(hpa, bytes, Maintenance::Data);
        self.flushed += bytes;
    }

    #[inline(always)]
    fn leaf(&mut self, level: u8, entry: &Entry<'_>) {
        if entry.end <= self.at {
            return;
        }
        self.at = entry.end;
        if self.is_cached(entry.raw, level) {
            let offset = entry.start - entry.base::<F>(level);
            let hpa = Hpa(F::leaf_address(entry.raw, level).0 + offset);
            self.maintain(hpa, entry.end - entry.start);
        }
    }
}

impl<'t, F: Format, P: Platform> Visitor<'t, F> for Flush<'_, F, P> {
    const LEVELS: Levels = Levels::ALL;

    #[inline(always)]
    fn visit(&mut self, level: u8, kind: Kind, entry: Entry<'t>, _: &mut WalkCounts) -> Flow {
        if kind == Kind::Leaf {
            self.leaf(level, &entry);
        }
        Flow::Next
    }

    /// Maintains pages that follow each other in the host as one piece.
    #[inline(always)]
    fn visit_run(
        &mut self,
        run: &'t [Pte; RUN],
        raws: &[u64; RUN],
        at: u64,
        tally: &mut WalkCounts,
    ) -> usize {
        let first = F::leaf_address(raws[0], 0).0;
        let mut one_piece = at >= self.at;
        for (index, raw) in raws.iter().enumerate() {
            let hpa = first.wrapping_add((index as u64) << F::PAGE_SHIFT);
            one_piece &= F::kind(*raw, 0) == Kind::Leaf
                && F::leaf_address(*raw, 0).0 == hpa
                && self.is_cached(*raw, 0);
        }
        if !one_piece {
            return visit_each(self, run, raws, at, tally);
        }
        let bytes = (RUN as u64) << F::PAGE_SHIFT;
        self.at = at + bytes;
        self.maintain(Hpa(first), bytes);
        RUN
    }

    #[inline]
    fn held(&mut self, level: u8, entry: &Entry<'t>) -> Flow {
        match F::kind(entry.raw, level) {
            Kind::Sealed => {
                self.leaf(level, entry);
                Flow::Next
            }
            _ => Flow::Stop,
        }
    }

    #[inline]
    fn settle(&mut self, _: u8, _: WalkCounts) {}
}

/// A page, block or group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Leaf {
    /// Its first address.
    pub gpa: Gpa,
    /// The host address that it maps to.
    pub hpa: Hpa,
    /// Its size.
    pub size: PageSize,
    /// Rights, memory type and state; the rights are those of the whole walk.
    pub attributes: Attributes,
}

/// The leaves of a range: see [`Guard::leaves`].
///
/// Within a table of pages it steps from entry to entry. The table stays allocated while the guard
/// is borrowed; if it was retired meanwhile, its entries say so, and the tables are walked anew. If
/// a block took its place, the rest of it is listed as it was.
/// The rights that the tables above withhold are read for each leaf.
#[derive(Debug)]
pub struct Leaves<'g, F: Format, P: Platform> {
    tables: &'g Tables<'g, F, P>,
    /// Addresses from `start` to `at` are done.
    start: u64,
    at: u64,
    end: u64,
    /// How many turns it still waits, for all of its items, for tables that are being unlinked.
    patience: u32,
    /// The rest of a leaf of which a part was done before it appeared.
    rest: Option<(Leaf, u64)>,
    /// The entries from `at` on of the current table of pages; none if there is no such table yet.
    ahead: slice::Iter<'g, Pte>,
}

impl<'g, F: Format, P: Platform> Leaves<'g, F, P> {
    fn new(tables: &'g Tables<'g, F, P>, at: u64, end: u64) -> Self {
        let (patience, rest) = (PATIENCE, None);
        Self { tables, start: at, at, end, patience, rest, ahead: [].iter() }
    }

    /// Does one step by a lookup; returns the entry if it is a leaf or is being changed.
    #[inline(never)]
    fn look(&mut self) -> Option<Result<Leaf, Contention>> {
        if let Some((leaf, end)) = self.rest {
            return Some(Ok(self.piece(leaf, end)));
        }
        let at = self.at;
        let found = self.tables.lookup_within(at, &mut self.patience);
        let level = found.level;
        self.at = ((at >> F::shift(level)) + 1) << F::shift(level);
        let item = match F::kind(found.raw, level) {
            Kind::Leaf | Kind::Sealed => {
                let leaf = self.tables.leaf(found, at);
                if let Ok(leaf) = leaf {
                    let end = leaf.gpa.0 + leaf.size.bytes();
                    if leaf.gpa.0 < at && self.start < at {
                        self.at = at;
                        return Some(Ok(self.piece(leaf, end)));
                    }
                    self.at = end;
                }
                Some(leaf)
            }
            Kind::Frozen | Kind::Retired => Some(Err(Contention { at: Gpa(at) })),
            Kind::Empty | Kind::Reserved | Kind::Owned | Kind::Table => None,
        };
        if level == 0 {
            self.stay(at);
        }
        item
    }

    /// Returns the largest part of `leaf`, up to `end`, that begins at `at` and has a size of this
    /// format's.
    #[cold]
    fn piece(&mut self, leaf: Leaf, end: u64) -> Leaf {
        let (at, far) = (self.at, self.at - leaf.gpa.0);
        let hpa = Hpa(leaf.hpa.0 + far);
        let fits = |bytes: u64| (at | hpa.0) & (bytes - 1) == 0 && bytes <= end - at;
        let level = (1..=F::LARGEST_LEAF).rev().find(|&level| fits(F::size(level).bytes()));
        let size = F::size(level.unwrap_or(0));
        self.at = at + size.bytes();
        self.rest = (self.at < end).then_some((leaf, end));
        Leaf { gpa: Gpa(at), hpa, size, ..leaf }
    }

    /// Goes on in the table of pages around `gpa`, if there is more of it.
    fn stay(&mut self, gpa: u64) {
        let (ptes, level) = self.tables.descend(gpa, 0, |_, _| ());
        let table_end = ((gpa >> F::shift(1)) + 1) << F::shift(1);
        let end = self.end.min(table_end);
        if level != 0 || self.at >= end {
            return;
        }
        let first = (self.at >> F::PAGE_SHIFT) as usize & (ptes.len() - 1);
        let pages = ((end - self.at) >> F::PAGE_SHIFT) as usize;
        self.ahead = ptes.get(first..first + pages).unwrap_or(&[]).iter();
    }
}

impl<F: Format, P: Platform> Iterator for Leaves<'_, F, P> {
    type Item = Result<Leaf, Contention>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            while let Some(pte) = self.ahead.next() {
                let raw = pte.load();
                let at = self.at;
                match F::kind(raw, 0) {
                    Kind::Leaf if !folded::<F>(raw) => {
                        self.at += 1 << F::PAGE_SHIFT;
                        let found = Found { raw, level: 0 };
                        return Some(Ok(self.tables.whole(found, at, F::size(0))));
                    }
                    Kind::Empty | Kind::Reserved | Kind::Owned => self.at += 1 << F::PAGE_SHIFT,
                    _ => self.ahead = [].iter(),
                }
            }
            if self.at >= self.end {
                return None;
            }
            if let Some(item) = self.look() {
                return Some(item);
            }
        }
    }
}

/// The tables as text: see [`Guard::dump`].
#[derive(Debug)]
pub struct Dump<'g, F: Format, P: Platform> {
    tables: &'g Tables<'g, F, P>,
}

impl<F: Format, P: Platform> fmt::Display for Dump<'_, F, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tables = self.tables;
        let geometry = tables.geometry();
        writeln!(
            f,
            "{}, {}-bit addresses, root at {} (level {}), VMID {}",
            F::NAME,
            geometry.address_bits,
            tables.root(),
            F::level_name(geometry.root_level),
            tables.vmid().0
        )?;
        let mut run: Option<(Leaf, u64)> = None;
        for leaf in Leaves::new(tables, 0, 1 << geometry.address_bits) {
            let leaf = match leaf {
                Ok(leaf) => leaf,
                Err(Contention { at }) => {
                    write_run(f, run.take())?;
                    writeln!(f, "{at}  being changed")?;
                    continue;
                }
            };
            match &mut run {
                Some((first, bytes))
                    if first.gpa.0 + *bytes == leaf.gpa.0
                        && first.hpa.0 + *bytes == leaf.hpa.0
                        && (first.size, first.attributes) == (leaf.size, leaf.attributes) =>
                {
                    *bytes += leaf.size.bytes();
                }
                _ => {
                    write_run(f, run.take())?;
                    run = Some((leaf, leaf.size.bytes()));
                }
            }
        }
        write_run(f, run)
    }
}

fn write_run(f: &mut fmt::Formatter<'_>, run: Option<(Leaf, u64)>) -> fmt::Result {
    let Some((first, bytes)) = run else { return Ok(()) };
    let attributes = first.attributes;
    let flag = |on: bool, flag: char| if on { flag } else { '-' };
    let software = Numbers(attributes.software.without(Software::A.union(Software::B)));
    let execute = match attributes.execute {
        Execute::None => '-',
        Execute::All => 'x',
        Execute::User => 'u',
        Execute::Kernel => 'k',
    };
    writeln!(
        f,
        "{:#014x}..{:#014x} -> {:#014x}  {:>8} x {:<4} {}{}{execute} {}{}{}{} {:?}{software}",
        first.gpa.0,
        first.gpa.0 + bytes,
        first.hpa.0,
        bytes >> first.size.shift(),
        first.size,
        flag(attributes.read, 'r'),
        flag(attributes.write, 'w'),
        flag(attributes.accessed, 'A'),
        flag(attributes.dirty, 'D'),
        flag(attributes.software.contains(Software::A), 'S'),
        flag(attributes.software.contains(Software::B), 'T'),
        attributes.memory,
    )
}

/// The numbers of software bits that have no letter.
struct Numbers(Software);

impl fmt::Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (0..Software::MOST as u8)
            .filter(|&bit| self.0.contains(Software::bit(bit)))
            .try_for_each(|bit| write!(f, " S{bit}"))
    }
}
