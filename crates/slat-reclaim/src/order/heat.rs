//! Heat: how often pages were used, and whether that predicts their next use better than recency,
//! the time of their last use.
//!
//! Accessed bits show whether a page in memory was used between two walks; a page that is not in
//! memory shows it by a refault. So uses of all pages are known, and with them the pages that each
//! rule would have kept. The uses of a page count once between two walks. What they add to its heat
//! grows from walk to walk, and every [`HALF_LIFE`] walks all heat is halved, so that old uses
//! fade. Pages of nearly equal heat form a class. The order within a class is fixed: of pages that
//! are used in turn, some then stay until they are used again, whereas by recency each page would
//! leave just before. That order is independent of what pages are used for: it takes runs of 64
//! pages, which are tested together, from all over memory.
//!
//! *Rules*: recency keeps the pages used last, heat the hottest. At the end of each walk, both
//! choose as many pages as are in memory, by a cut through ages, and one through classes. If a page
//! below a rule's cut is used before the next walk, the rule has a miss; a page at the cut counts
//! as part of a miss. Each walk halves the misses so far. Pages are given up by the rule that has
//! fewer misses; heat takes over only when it has clearly fewer.
//!
//! *Memory*: 17 bits a page, allocated at the start.

use alloc::boxed::Box;
use alloc::vec;

/// Pages that are searched in a row.
const RUN: u32 = 64;
/// Walks after which all heat is halved.
const HALF_LIFE: u16 = 256;
/// The heat that a use adds just after a halving; just before the next one it adds twice as much. A
/// page that is used between all walks has at most 3 * `HALF_LIFE` times this.
const USE: u16 = HALF_LIFE / 4;
/// Number of classes, which are quarters of octaves of heat.
const CLASSES: usize = 64;
/// Number of ages that are distinguished, in generations since the last use.
const AGES: usize = 64;
/// The miss of one whole page.
const WHOLE: u64 = 256;
/// Heat takes over when its misses and a 32nd of them are still fewer than those of recency.
const CLEARLY: u64 = 32;
/// With heat, a walk is due once one page in 12 of those in memory has been given up.
const PART: u32 = 12;
/// Most pages that walks read for each page that is given up, which bounds their cost if only a
/// small part of the guest is in memory.
const LOOKED_AT: u32 = 64;

/// The cut of a rule: pages below it are not kept, and only a part of those at it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Cut {
    at: usize,
    /// The part of a miss, in 256ths, that a page at the cut counts.
    part: u64,
}

impl Cut {
    /// Makes a cut through `counts`, the best last, that keeps `kept` pages.
    fn new(counts: &[u32], kept: u32) -> Self {
        let mut left = kept;
        for (at, &count) in counts.iter().enumerate().rev() {
            if count > left {
                return Self { at, part: u64::from(count - left) * WHOLE / u64::from(count) };
            }
            left -= count;
        }
        Self::default()
    }

    const fn miss(self, at: usize) -> u64 {
        if at < self.at {
            WHOLE
        } else if at == self.at {
            self.part
        } else {
            0
        }
    }
}

#[derive(Debug)]
pub(super) struct Heat {
    of: Box<[u16]>,
    /// For each page, whether a use since the last walk was counted.
    counted: Box<[u64]>,
    /// Distance, in runs, from a run to the one that is searched after it.
    stride: u32,
    /// Walks since all heat was halved; and whether the current walk halves it.
    walks: u16,
    halving: bool,
    /// The cuts of both rules, as of the last walk.
    class: Cut,
    age: Cut,
    /// Misses of heat, and of recency.
    misses: [u64; 2],
    leads: bool,
    /// The pages to be given up before the next walk: all of the classes below `last`, and `some`
    /// of `last`. The search continues at `hand`.
    last: usize,
    some: u32,
    hand: u32,
    /// Number of pages that may be given up before the next walk.
    left: u32,
    /// Counts of all pages by age, the youngest last, and by class; and of those in memory by
    /// class.
    ages: [u32; AGES],
    classes: [u32; CLASSES],
    here: [u32; CLASSES],
}

/// Result of a step of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Coldest {
    Page(u32),
    /// No page so far: the search is to be continued.
    Later,
    /// No more page before the next walk.
    None,
}

const fn class(heat: u16) -> usize {
    let heat = (heat as u32 + 1) * 4;
    let octave = heat.ilog2() - 2;
    (octave * 4 + (heat >> octave & 3)) as usize
}

const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

const fn place(age: u32) -> usize {
    (AGES - 1).saturating_sub(age as usize)
}

impl Heat {
    pub fn new(pages: u32) -> Self {
        let runs = pages.div_ceil(RUN).max(1);
        // A stride near the golden section of all runs, coprime to their number, so that the search
        // visits each run once.
        let near = (u64::from(runs) * 618 / 1000) as u32;
        let stride = (near.max(1)..).find(|&stride| gcd(stride, runs) == 1).unwrap_or(1);
        Self {
            stride,
            of: vec![0; pages as usize].into_boxed_slice(),
            counted: vec![0; pages.div_ceil(64) as usize].into_boxed_slice(),
            walks: 0,
            halving: false,
            class: Cut::default(),
            age: Cut::default(),
            misses: [0; 2],
            leads: false,
            last: 0,
            some: 0,
            hand: 0,
            left: u32::MAX,
            ages: [0; AGES],
            classes: [0; CLASSES],
            here: [0; CLASSES],
        }
    }

    /// Returns whether pages are to be given up by heat.
    pub const fn leads(&self) -> bool {
        self.leads
    }

    /// Returns whether a new walk is due, because too many pages were given up since the last one.
    pub const fn is_stale(&self) -> bool {
        self.left == 0
    }

    /// Returns whether a use of `page` since the last walk has been recorded.
    pub fn is_counted(&self, page: u32) -> bool {
        self.counted[page as usize / 64] >> (page % 64) & 1 != 0
    }

    /// Sets the misses of heat and of recency until now.
    #[cfg(test)]
    pub const fn has_missed(&mut self, heat: u64, recency: u64) {
        self.misses = [heat, recency];
    }

    fn class(&self, page: u32) -> usize {
        class(self.of[page as usize])
    }

    /// Records a use of `page`, `age` generations after its last use; `None` if it is the first.
    pub fn used(&mut self, page: u32, age: Option<u32>) {
        if self.is_counted(page) {
            return;
        }
        self.counted[page as usize / 64] |= 1 << (page % 64);
        if let Some(age) = age {
            self.misses[0] += self.class.miss(self.class(page));
            self.misses[1] += self.age.miss(place(age));
        }
        let heat = &mut self.of[page as usize];
        let use_ = USE + self.walks * USE / HALF_LIFE;
        *heat = heat.saturating_add(use_).min(u16::MAX - 1);
    }

    /// Begins the count at the end of a walk: the caller then calls [`Heat::look`] for all pages,
    /// in the order of their numbers.
    pub fn begin(&mut self) {
        self.walks += 1;
        self.halving = self.walks == HALF_LIFE;
        if self.halving {
            self.walks = 0;
        }
        self.ages = [0; AGES];
        self.classes = [0; CLASSES];
        self.here = [0; CLASSES];
    }

    /// Counts `page`, which was last used `age` generations ago.
    pub fn look(&mut self, page: u32, age: u32, is_here: bool) {
        if page.is_multiple_of(64) {
            self.counted[page as usize / 64] = 0;
        }
        if self.halving {
            self.of[page as usize] /= 2;
        }
        let class = self.class(page);
        self.ages[place(age)] += 1;
        self.classes[class] += 1;
        self.here[class] += u32::from(is_here);
    }

    /// Ends the count: chooses the cuts, the rule, and the pages to be given up before the next
    /// walk.
    pub fn draw_up(&mut self) {
        let resident = self.here.iter().sum();
        self.class = Cut::new(&self.classes, resident);
        self.age = Cut::new(&self.ages, resident);
        let [heat, recency] = self.misses;
        self.leads = heat + if self.leads { 0 } else { heat / CLEARLY } < recency;
        self.misses = self.misses.map(|misses| misses / 2);
        self.left = (resident / PART).max(self.of.len() as u32 / LOOKED_AT).max(1);
        (self.last, self.some, self.hand) = (CLASSES - 1, self.left, 0);
        for (class, &pages) in self.here.iter().enumerate() {
            if pages >= self.some {
                self.last = class;
                break;
            }
            self.some -= pages;
        }
    }

    /// Returns the number of places in the order of the search; the last run of pages may not fill
    /// its own.
    fn places(&self) -> u32 {
        self.counted.len() as u32 * RUN
    }

    fn page_at(&self, place: u32) -> u32 {
        let runs = self.counted.len() as u64;
        let run = u64::from(place / RUN) * u64::from(self.stride) % runs;
        run as u32 * RUN + place % RUN
    }

    /// Finds, within `steps` places, the next page that may be given up if it is in memory and was
    /// not used.
    pub fn coldest(&mut self, steps: u32) -> Coldest {
        if self.left == 0 {
            return Coldest::None;
        }
        for _ in 0..steps {
            if self.hand == self.places() {
                return Coldest::None;
            }
            crate::work::step();
            let page = self.page_at(self.hand);
            self.hand += 1;
            if page as usize >= self.of.len() {
                continue;
            }
            let class = self.class(page);
            if class < self.last || (class == self.last && self.some > 0) {
                return Coldest::Page(page);
            }
        }
        Coldest::Later
    }

    /// Records that `page` is to be given up, by either rule.
    pub fn gives_up(&mut self, page: u32) {
        self.left = self.left.saturating_sub(1);
        if self.class(page) == self.last {
            self.some = self.some.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;
    use std::vec::Vec;

    #[test]
    fn classes_are_quarters_of_octaves_and_all_heat_has_one() {
        assert_eq!((class(0), class(u16::MAX - 1)), (0, CLASSES - 1));
        for heat in 1..u16::MAX {
            let (below, this) = (class(heat - 1), class(heat));
            assert!(this == below || this == below + 1 || heat < 4, "{heat}: {below}, {this}");
        }
        for heat in [100u16, 1000, 10_000, 30_000] {
            assert_eq!(class(2 * heat + 1), class(heat) + 4);
        }
    }

    /// Compares the misses of a cut with the number of pages that it does not keep.
    #[test]
    fn a_cut_keeps_as_many_pages_as_it_is_asked_to() {
        let mut rng = Rng::with_seed(3);
        for _ in 0..1000 {
            let counts: Vec<u32> = (0..8).map(|_| rng.u32(..5)).collect();
            let (all, kept) = (counts.iter().sum::<u32>(), rng.u32(..40));
            let cut = Cut::new(&counts, kept);
            let missed = counts.iter().zip(0..).map(|(&n, at)| u64::from(n) * cut.miss(at));
            let (missed, wanted) = (missed.sum::<u64>(), u64::from(all.saturating_sub(kept)));
            assert!(missed <= wanted * WHOLE && missed + 4 >= wanted * WHOLE, "{counts:?} {kept}");
        }
    }

    /// The model's state of a page.
    #[derive(Clone, Default)]
    struct PageState {
        heat: u32,
        used: bool,
        here: bool,
        age: u32,
    }

    /// A model that has each page by itself, and sorts all of them where `Heat` counts classes.
    struct Model {
        pages: Vec<PageState>,
        walks: u32,
        misses: [u64; 2],
        beyond: [Vec<u64>; 2],
        leads: bool,
        next: Vec<u32>,
        /// For each page, its place in the order of the search.
        place: Vec<u32>,
    }

    impl Model {
        fn used(&mut self, page: u32, was: bool) {
            let known = &mut self.pages[page as usize];
            if known.used {
                return;
            }
            known.used = true;
            known.heat += u32::from(USE) + self.walks % 256 * u32::from(USE) / 256;
            for rule in 0..2 {
                self.misses[rule] += if was { self.beyond[rule][page as usize] } else { 0 };
            }
        }

        /// Returns, for each page, the part of its equals that is not among the first `kept`, in
        /// 256ths.
        fn beyond(keys: &[u32], kept: usize) -> Vec<u64> {
            let beyond = |key: &u32| {
                let better = keys.iter().filter(|other| *other > key).count();
                let equal = keys.iter().filter(|other| *other == key).count();
                let room = kept.saturating_sub(better).min(equal);
                (256 * (equal - room) / equal) as u64
            };
            keys.iter().map(beyond).collect()
        }

        fn walk(&mut self) {
            self.walks += 1;
            for known in &mut self.pages {
                known.heat /= if self.walks.is_multiple_of(256) { 2 } else { 1 };
                known.used = false;
            }
            let here = self.pages.iter().filter(|known| known.here).count();
            let classes: Vec<u32> =
                self.pages.iter().map(|it| class(it.heat as u16) as u32).collect();
            let ages: Vec<u32> = self.pages.iter().map(|it| 63 - it.age.min(63)).collect();
            self.beyond = [Self::beyond(&classes, here), Self::beyond(&ages, here)];
            let [heat, recency] = self.misses;
            self.leads = if self.leads { heat < recency } else { heat + heat / 32 < recency };
            self.misses = self.misses.map(|misses| misses / 2);
            let mut next: Vec<u32> = (0..self.pages.len() as u32).collect();
            next.retain(|page| self.pages[*page as usize].here);
            next.sort_by_key(|page| (classes[*page as usize], self.place[*page as usize]));
            next.truncate((here / 12).max(self.pages.len() / 64).max(1));
            next.sort_by_key(|page| self.place[*page as usize]);
            self.next = next;
        }
    }

    #[test]
    fn heat_and_its_rules_agree_with_a_model_that_sorts_all_pages() {
        const PAGES: u32 = 130;
        let mut led = 0;
        for seed in crate::seed::seeds(6) {
            let mut rng = Rng::with_seed(seed);
            let mut heat = Heat::new(PAGES);
            let mut model = Model {
                pages: std::vec![PageState::default(); PAGES as usize],
                walks: 0,
                misses: [0; 2],
                beyond: [(); 2].map(|()| std::vec![0; PAGES as usize]),
                leads: false,
                next: Vec::new(),
                place: std::vec![0; PAGES as usize],
            };
            for place in 0..heat.places() {
                if let Some(of) = model.place.get_mut(heat.page_at(place) as usize) {
                    *of = place;
                }
            }
            let often = rng.u32(1..PAGES);
            for _ in 0..300 {
                for _ in 0..rng.u32(..60) {
                    let page = if rng.bool() { rng.u32(..often) } else { rng.u32(..PAGES) };
                    let (age, was) = (model.pages[page as usize].age, rng.u8(..8) != 0);
                    heat.used(page, was.then_some(age));
                    model.used(page, was);
                    model.pages[page as usize].here |= rng.u8(..4) == 0;
                }
                heat.begin();
                for (page, known) in (0..).zip(&mut model.pages) {
                    known.age = if known.used { 0 } else { known.age + 1 };
                    heat.look(page, known.age, known.here);
                }
                heat.draw_up();
                model.walk();
                assert_eq!(heat.leads(), model.leads, "seed {seed}");
                assert_eq!(heat.misses, model.misses, "seed {seed}");
                led += u32::from(heat.leads());
                let mut gone = Vec::new();
                loop {
                    match heat.coldest(7) {
                        Coldest::Page(page) if !model.pages[page as usize].here => {}
                        Coldest::Page(page) => {
                            heat.gives_up(page);
                            gone.push(page);
                        }
                        Coldest::Later => {}
                        Coldest::None => break,
                    }
                }
                assert_eq!(gone, model.next, "seed {seed}");
                assert!(heat.is_stale() || gone.len() <= PAGES as usize / 64);
                gone.retain(|_| rng.bool());
                gone.iter().for_each(|page| model.pages[*page as usize].here = false);
            }
        }
        assert!(led > 50, "heat led after {led} walks");
    }

    #[test]
    fn each_page_is_searched_once_and_in_an_even_spread() {
        for pages in (1..2000).step_by(37).chain([64, 65, 128, 1 << 16, 3 << 17]) {
            let heat = Heat::new(pages);
            let mut order: Vec<u32> = (0..heat.places()).map(|at| heat.page_at(at)).collect();
            if pages > 1 << 12 {
                // Half of the first tenth is in the lower half of memory.
                let part = &order[..pages as usize / 10];
                let low = part.iter().filter(|page| **page < pages / 2).count() * 10;
                assert!((4 * part.len()..6 * part.len()).contains(&low), "{low} of {pages}");
            }
            order.sort_unstable();
            assert!(order.iter().zip(0..).all(|(page, at)| *page == at), "{pages}");
        }
    }

    #[test]
    fn a_walk_is_due_after_a_twelfth_of_memory_or_a_64th_of_guest() {
        for (here, left) in [(12, 10), (240, 20), (640, 53)] {
            let mut heat = Heat::new(640);
            heat.begin();
            (0..640).for_each(|page| heat.look(page, 0, page < here));
            heat.draw_up();
            for page in 0..left {
                assert!(!heat.is_stale(), "{here}: {page}");
                heat.gives_up(page);
            }
            assert!(heat.is_stale(), "{here}");
        }
    }

    #[test]
    fn uses_of_long_ago_fade() {
        let mut heat = Heat::new(2);
        for walk in 0..u32::from(3 * HALF_LIFE) {
            // The first page is used in the first third of the walks, the second one from then on.
            heat.used(u32::from(walk >= 256), Some(1));
            heat.begin();
            (0..2).for_each(|page| heat.look(page, 0, true));
            heat.draw_up();
            if walk == 255 {
                assert!(heat.class(0) > heat.class(1));
            }
        }
        assert!(heat.class(0) + 8 < heat.class(1), "{:?}", heat.of);
    }
}
