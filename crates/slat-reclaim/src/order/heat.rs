//! How often pages were used; and whether that predicts their next use better than when they were
//! used last.
//!
//! Between two walks a page was used or not: that is all that accessed bits tell, and a page that
//! is not in memory tells it by coming back. So uses are known of all pages, wherever they are, and
//! of each rule it is known what it would have kept. A use counts once between two walks. What it
//! counts grows from walk to walk, and now and then all heat is halved, so uses of long ago fade.
//! Pages of nearly equal heat are of one class. In a class the order is one that stays: of pages
//! that are used in turn some remain until their turn, while by their last use each leaves just
//! before it. It has nothing to do with what pages are for: runs of 64 pages, which are asked about
//! together, from all over memory.
//!
//! *Rules*: by recency the pages used last are kept, by heat the hottest. At each walk both are
//! drawn up for as many pages as are in memory: a cut through ages, and one through classes. A page
//! that is used before the next walk, and is beyond a cut, is a miss of that rule; at the cut, in
//! part. Misses fade, by half a walk. Pages are given up by the rule that has fewer; heat takes
//! over when it has clearly fewer.
//!
//! *Memory*: 17 bits a page, from the start.

use alloc::boxed::Box;
use alloc::vec;

/// Pages that are searched in a row.
const RUN: u32 = 64;
/// Walks after which what was counted is worth half.
const HALF_LIFE: u16 = 256;
/// What a use counts just after a halving; just before the next, twice that. A page that is used
/// between all walks has 3 * `HALF_LIFE` times that at most.
const USE: u16 = HALF_LIFE / 4;
/// Quarters of octaves.
const CLASSES: usize = 64;
/// Ages that are told apart: generations since the last use.
const AGES: usize = 64;
/// One page, as a miss.
const WHOLE: u64 = 256;
/// Heat takes over when it misses less by more than this part.
const CLEARLY: u64 = 32;
/// The part of memory that is given up between two walks: by recency, if generations have not run
/// out before.
const PART: u32 = 12;
/// The pages that a walk looks at for each page that is given up, at most, however small the part
/// of the guest that is in memory.
const LOOKED_AT: u32 = 64;

/// Where a rule ends: nothing below it is kept, and a part of what is at it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Cut {
    at: usize,
    /// What a page at it counts as a miss.
    part: u64,
}

impl Cut {
    /// Through `counts`, the best last, such that `kept` pages are above.
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
    /// Of each page, whether a use since the last walk was counted.
    counted: Box<[u64]>,
    /// The distance, in runs, from a run to the one that is searched after it.
    stride: u32,
    /// Walks since all was halved; all is being halved.
    walks: u16,
    halving: bool,
    /// The rules, as of the last walk.
    class: Cut,
    age: Cut,
    /// The misses of heat, and of recency.
    misses: [u64; 2],
    leads: bool,
    /// What goes before the next walk: all of the classes below `last`, of that one `some`. The
    /// search goes on at `hand`.
    last: usize,
    some: u32,
    hand: u32,
    /// Pages that may go before the next walk.
    left: u32,
    /// Pages, as they are looked at: by age, the youngest last; by class; those in memory by class.
    ages: [u32; AGES],
    classes: [u32; CLASSES],
    here: [u32; CLASSES],
}

/// What a search came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Coldest {
    Page(u32),
    /// None so far: it goes on.
    Later,
    /// None before the next walk.
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
        // About a golden section further, and by each run once.
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

    /// Whether pages are to be given up by heat.
    pub const fn leads(&self) -> bool {
        self.leads
    }

    /// Whether the result of the last walk is too old, as too much was given up since.
    pub const fn is_stale(&self) -> bool {
        self.left == 0
    }

    /// Whether `page` was used since the last walk, as far as anybody looked.
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

    /// A walk has ended: all pages are about to be looked at, in their order.
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

    /// Looks at `page`, which was used last `age` generations ago.
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

    /// Draws up the rules, and the pages that go until the next walk, once all were looked at.
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

    /// Places in the order of the search; the last run of pages may be shorter than others.
    fn places(&self) -> u32 {
        self.counted.len() as u32 * RUN
    }

    fn page_at(&self, place: u32) -> u32 {
        let runs = self.counted.len() as u64;
        let run = u64::from(place / RUN) * u64::from(self.stride) % runs;
        run as u32 * RUN + place % RUN
    }

    /// The next page that may go, if it is in memory and was not used; within `steps` pages.
    pub fn coldest(&mut self, steps: u32) -> Coldest {
        if self.left == 0 {
            return Coldest::None;
        }
        for _ in 0..steps {
            if self.hand == self.places() {
                return Coldest::None;
            }
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

    /// Records that `page` is to go, by whichever rule.
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

    /// Pages ranked one by one, and each at the cut with its share.
    #[test]
    fn a_cut_keeps_as_many_as_it_is_told() {
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

    /// What a model knows of a page.
    #[derive(Clone, Default)]
    struct Known {
        heat: u32,
        used: bool,
        here: bool,
        age: u32,
    }

    /// Each page by itself, sorted anew where the other has numbers of classes.
    struct Model {
        pages: Vec<Known>,
        walks: u32,
        misses: [u64; 2],
        beyond: [Vec<u64>; 2],
        leads: bool,
        next: Vec<u32>,
        /// Of each page, when it is searched.
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

        /// Of each page, the part of its equals that is not among the first `kept`, in 256ths.
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
    fn heat_and_its_rules_are_those_of_a_model_that_sorts_all_pages() {
        const PAGES: u32 = 130;
        let mut led = 0;
        for seed in slat_seed::seeds(6) {
            let mut rng = Rng::with_seed(seed);
            let mut heat = Heat::new(PAGES);
            let mut model = Model {
                pages: std::vec![Known::default(); PAGES as usize],
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
    fn each_page_is_searched_once_and_no_part_of_memory_before_the_others() {
        for pages in (1..2000).step_by(37).chain([64, 65, 128, 1 << 16, 3 << 17]) {
            let heat = Heat::new(pages);
            let mut order: Vec<u32> = (0..heat.places()).map(|at| heat.page_at(at)).collect();
            if pages > 1 << 12 {
                // Of the first tenth, a half is of either half.
                let part = &order[..pages as usize / 10];
                let low = part.iter().filter(|page| **page < pages / 2).count() * 10;
                assert!((4 * part.len()..6 * part.len()).contains(&low), "{low} of {pages}");
            }
            order.sort_unstable();
            assert!(order.iter().zip(0..).all(|(page, at)| *page == at), "{pages}");
        }
    }

    #[test]
    fn uses_of_long_ago_fade() {
        let mut heat = Heat::new(2);
        for walk in 0..u32::from(3 * HALF_LIFE) {
            // One is used all the time until a third of it has passed, the other from then on.
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
