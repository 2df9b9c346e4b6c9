//! Two CPUs: the second stays in the guest, where it reads and writes a page over and over, while
//! the first changes the page's leaf by the engine. Then the first executes the invalidation in
//! parts, and prints after each whether the second uses the leaf as it was: `STALE` or `new`.
//!
//! The last part completes the invalidation: what is stale then is wrong. If nothing was stale
//! before, a missing invalidation would not be noticed: `cargo xtask test walkers` checks that.

use core::fmt::Write;
use core::sync::atomic::{Ordering::SeqCst, fence};
use slat::{
    AgeBitmaps, AgeOptions, Attributes, Format, Gpa, GpaRange, Guard, Hpa, PageSize, Platform,
    TableCache, UnmapEntry,
};

/// Pages of the guest's memory: the second CPU's program, the page, the report, what the page moves
/// to, and how many there are.
const PROGRAM: u64 = 5;
const DATA: u64 = 8;
const REPORT: u64 = 9;
const ELSEWHERE: u64 = 10;
const PAGES: u64 = 16;
/// Words of the report: what was read, whether to leave, the rounds so far. The page counts rounds
/// at the same place as the report does.
const FOUND: u64 = 0;
const LEAVE: u64 = 8;
const ROUNDS: u64 = 16;
/// What the page has, and what the other memory has.
const OLD: u64 = 1111;
const NEW: u64 = 2222;

/// Returns guest addresses of the second CPU's program, of the page and of the report.
pub const fn addresses(page: u64) -> [u64; 3] {
    [PROGRAM * page, DATA * page, REPORT * page]
}

/// A part of an invalidation, after a change of a page's leaf, and its name.
pub type Part<C> = (&'static str, fn(&mut Pair<'_, '_, C>));

/// Both CPUs of a machine.
pub trait Cpus: Sized + 'static {
    type Format: Format;
    type Platform: Platform;
    /// The last one makes the invalidation complete.
    const PARTS: &'static [Part<Self>];

    /// Makes the platform ignore what the engine invalidates, or obey again.
    fn ignore(platform: &Self::Platform, ignore: bool);

    /// Lets the second CPU enter the guest.
    fn enter(platform: &Self::Platform, forgets: bool);

    /// Returns how often the second CPU has left the guest.
    fn exits() -> u64;
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Unmap,
    Move,
    Protect,
    Clean,
    Age,
}

/// The guest, whose memory lies at `memory`, and what the second CPU does.
pub struct Pair<'t, 'p, C: Cpus> {
    guard: Guard<'t, 'p, C::Format, C::Platform>,
    cache: TableCache<'p, C::Format, C::Platform>,
    pub platform: &'p C::Platform,
    memory: u64,
    /// Bytes of a page.
    bytes: u64,
    is_in: bool,
    exits: u64,
}

impl<'t, 'p, C: Cpus> Pair<'t, 'p, C> {
    /// Maps the guest's memory, which is at `memory`.
    pub fn new(
        platform: &'p C::Platform,
        guard: Guard<'t, 'p, C::Format, C::Platform>,
        cache: TableCache<'p, C::Format, C::Platform>,
        memory: u64,
    ) -> Self {
        let (bytes, is_in, exits) = (1 << C::Format::shift(0), false, 0);
        let mut pair = Self { guard, cache, platform, memory, bytes, is_in, exits };
        pair.map(0, PAGES, 0);
        pair
    }

    fn word(&self, page: u64, at: u64) -> *mut u64 {
        (self.memory + page * self.bytes + at) as *mut u64
    }

    fn get(&self, page: u64, at: u64) -> u64 {
        // SAFETY: memory of the guest, of which the program has no reference, at its own address.
        unsafe { self.word(page, at).read_volatile() }
    }

    fn put(&self, page: u64, at: u64, value: u64) {
        // SAFETY: as for `get`.
        unsafe { self.word(page, at).write_volatile(value) }
        fence(SeqCst);
    }

    fn page(&self) -> GpaRange {
        GpaRange::new(Gpa(DATA * self.bytes), self.bytes).expect("a page")
    }

    /// Makes the second CPU leave the guest and enter it, with its translations or without.
    pub fn again(&mut self, forgets: bool) {
        self.leave();
        self.put(REPORT, LEAVE, 0);
        self.exits = C::exits();
        self.is_in = true;
        C::enter(self.platform, forgets);
    }

    /// Lets the guest run for a while; returns whether it is still running.
    fn runs(&mut self) -> bool {
        let until = self.get(REPORT, ROUNDS) + 2000;
        let mut spins = 0_u64;
        while self.is_in && self.get(REPORT, ROUNDS) < until {
            self.is_in = C::exits() == self.exits;
            spins += 1;
            assert!(spins < 1 << 34, "the second CPU does not run its guest");
        }
        fence(SeqCst);
        self.is_in
    }

    fn leave(&mut self) {
        self.put(REPORT, LEAVE, 1);
        while self.is_in {
            self.is_in = C::exits() == self.exits;
        }
    }

    fn map(&mut self, page: u64, pages: u64, to: u64) {
        self.cache.fill(8).expect("memory for tables");
        let size = PageSize::from_bytes(self.bytes).expect("the format's own");
        let range = GpaRange::new(Gpa(page * self.bytes), pages * self.bytes).expect("pages");
        let at = Hpa(self.memory + to * self.bytes);
        let mapped = self.guard.map(range, at, Attributes::RAM, size, &mut self.cache);
        mapped.expect("nothing is in the way");
    }

    fn unmap(&mut self) {
        let mut storage = [UnmapEntry::EMPTY; 1];
        let mut batch = self.guard.unmap_batch(&mut storage);
        self.guard.unmap(self.page(), &mut batch).expect("room");
        batch.complete().for_each(drop);
    }

    /// Changes the leaf without an invalidation.
    fn change(&mut self, change: Change) {
        C::ignore(self.platform, true);
        match change {
            Change::Unmap => self.unmap(),
            Change::Move => {
                self.unmap();
                self.map(DATA, 1, ELSEWHERE);
            }
            Change::Protect => drop(self.guard.write_protect(self.page()).expect("mapped")),
            Change::Clean => drop(self.guard.clean(self.page()).expect("mapped")),
            Change::Age => {
                let mut ages = AgeBitmaps { young: &mut [0], unanswered: &mut [0] };
                self.guard.age(self.page(), &mut ages, AgeOptions::LEAVES).expect("mapped");
            }
        }
        self.guard.invalidate();
        C::ignore(self.platform, false);
    }

    /// Returns whether the second CPU uses the leaf as it was.
    fn is_stale(&mut self, change: Change) -> bool {
        let runs = self.runs();
        let leaf = self.guard.translate(self.page().start()).ok().flatten();
        let marks = leaf.map(|leaf| (leaf.attributes.accessed, leaf.attributes.dirty));
        match change {
            Change::Unmap | Change::Protect => runs,
            Change::Move => self.get(REPORT, FOUND) == OLD,
            // Where hardware does not mark, it faults.
            Change::Clean => runs && marks == Some((true, false)),
            Change::Age => runs && marks.is_some_and(|(accessed, _)| !accessed),
        }
    }

    /// Checks one change; returns whether it was right.
    fn check(&mut self, change: Change, out: &mut impl Write) -> bool {
        self.leave();
        self.unmap();
        self.put(DATA, FOUND, OLD);
        self.put(ELSEWHERE, FOUND, NEW);
        self.map(DATA, 1, DATA);
        self.again(true);
        let mut right = self.runs() && self.get(REPORT, FOUND) == OLD;
        let _ = write!(out, "{change:?}: ");
        self.change(change);
        for (n, (name, part)) in C::PARTS.iter().enumerate() {
            part(self);
            let is_stale = self.is_stale(change);
            let (word, end) = (if is_stale { "STALE" } else { "new" }, n + 1 == C::PARTS.len());
            let _ = write!(out, "{name}: {word}{}", if end { "\n" } else { "; " });
            right &= !(end && is_stale);
        }
        let right_or = if right { "right" } else { "wrong" };
        let _ = writeln!(out, "{right_or}: {change:?} is seen by the second CPU");
        right
    }

    /// Checks all changes; returns whether all were right. The second CPU has left the guest.
    pub fn run(&mut self, out: &mut impl Write) -> bool {
        let changes = [Change::Unmap, Change::Move, Change::Protect, Change::Clean, Change::Age];
        let right = changes.into_iter().filter(|&change| !self.check(change, out)).count() == 0;
        self.leave();
        right
    }
}
