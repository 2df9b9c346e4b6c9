use super::*;
use crate::order::tests::{Memory, check_queues};
use spin::Mutex;

fn generations(pages: u32, window: u32, around: bool) -> (LockedGenerations, Memory) {
    let looks = ScanOptions { window, around, frequency: true };
    let mut order = Generations::new(pages, looks, 0);
    let memory = Memory::all_here(pages);
    (0..pages).for_each(|page| order.arrive(page, None, pages));
    (LockedGenerations(Mutex::new(order)), memory)
}

struct LockedGenerations(Mutex<Generations>);

impl LockedGenerations {
    fn held(&self) -> Stretches<'_, Generations> {
        Stretches::new(&self.0)
    }

    fn now(&self) -> spin::MutexGuard<'_, Generations> {
        self.0.lock()
    }

    fn walk(&self, memory: &mut Memory) {
        Generations::walk(&mut self.held(), memory);
    }

    fn victims(&self, want: usize, memory: &mut Memory) -> Victims {
        Generations::victims(&mut self.held(), want, memory)
    }

    /// Sets the misses of both rules, so that the next walk chooses the one with fewer.
    fn has_missed(&self, heat: u64, recency: u64) {
        self.now().heat.as_mut().unwrap().has_missed(heat, recency);
    }

    fn census(&self) -> Vec<(u64, u64)> {
        Generations::census(&mut self.held(), |_| true).generations
    }
}

#[test]
fn what_is_used_is_kept_and_what_is_not_is_given_up() {
    for (window, around) in [(1, false), (64, true), (1 << 20, true)] {
        let (order, mut memory) = generations(1000, window, around);
        for _ in 0..4 {
            memory.uses(0..500);
            order.walk(&mut memory);
        }
        let found = order.victims(500, &mut memory);
        assert_eq!(found.pages.len(), 500);
        assert!(found.pages.iter().all(|page| *page >= 500), "{window} {around}");
    }
}

#[test]
fn a_page_used_since_the_walk_is_kept_at_its_turn() {
    for around in [false, true] {
        let (order, mut memory) = generations(256, 64, around);
        for _ in 0..4 {
            order.walk(&mut memory);
        }
        memory.uses(10..20);
        let found = order.victims(246, &mut memory);
        assert_eq!(found.pages.len(), 246, "around: {around}");
        assert!(found.pages.iter().all(|page| !(10..20).contains(page)));
        // The first test of neighbours moves them on before their turn.
        assert_eq!(found.kept, if around { 0 } else { 10 });
    }
}

#[test]
fn neighbours_are_asked_about_in_one_call() {
    let (order, mut memory) = generations(256, 256, true);
    for _ in 0..4 {
        order.walk(&mut memory);
    }
    memory.calls = 0;
    assert_eq!(order.victims(256, &mut memory).pages.len(), 256);
    assert_eq!(memory.calls, 4);
}

#[test]
fn some_page_is_given_up_even_if_all_are_used_all_the_time() {
    let (order, mut memory) = generations(128, 64, true);
    memory.always_used = true;
    assert_eq!(order.victims(32, &mut memory).pages.len(), 32);
}

#[test]
fn nothing_is_given_up_that_came_just_now() {
    let (order, mut memory) = generations(128, 64, true);
    memory.new = true;
    let found = order.victims(32, &mut memory);
    assert!(found.pages.is_empty() && found.held > 0);
}

#[test]
fn a_page_that_left_and_came_back_is_given_up_once() {
    let (order, mut memory) = generations(64, 64, false);
    memory.here[5] = false;
    order.now().arrive(5, Some(3), 64);
    memory.here[5] = true;
    let mut all = order.victims(100, &mut memory).pages;
    all.sort_unstable();
    assert_eq!(all, (0..64).collect::<Vec<_>>());
}

#[test]
fn walks_without_end_keep_a_bounded_number_of_generations() {
    let (order, mut memory) = generations(100, 64, false);
    for _ in 0..200 {
        memory.uses(0..30);
        order.walk(&mut memory);
    }
    assert_eq!(order.now().queues.len(), IDLE + 1);
    assert!(order.now().youngest() <= LAST + IDLE as u32 + 1, "numbers begin anew");
    assert_eq!(order.census().iter().map(|row| row.1).sum::<u64>(), 100);
    let found = order.victims(70, &mut memory).pages;
    assert!(found.len() == 70 && found.iter().all(|page| *page >= 30));
}

#[test]
fn a_pages_idle_time_is_the_same_for_a_walk_and_a_search() {
    for by_walk in [false, true] {
        let (order, mut memory) = generations(64, 64, true);
        (0..6).for_each(|_| order.walk(&mut memory));
        memory.uses(5..6);
        match by_walk {
            true => order.walk(&mut memory),
            false => assert_eq!(order.victims(1, &mut memory).pages.len(), 1),
        }
        let order = order.now();
        let woken = order.woken.iter().enumerate().filter(|(_, pages)| **pages != 0);
        assert_eq!(woken.collect::<Vec<_>>(), [(6, &1)], "by a walk: {by_walk}");
    }
}

#[test]
fn of_pages_that_are_all_in_use_those_used_last_stay() {
    let (order, mut memory) = generations(128, 64, false);
    // The first half of the pages are used again.
    memory.uses(0..64);
    order.walk(&mut memory);
    let mut found = Victims { walks: 2, ..Victims::default() };
    Generations::take_regardless(&mut order.held(), 64, &mut memory, &mut found);
    assert!(found.pages.len() == 64 && found.pages.iter().all(|page| *page >= 64));
    Generations::take_regardless(&mut order.held(), 100, &mut memory, &mut found);
    assert_eq!(found.pages.len(), 100);
}

#[test]
fn the_census_reports_how_long_pages_were_idle() {
    let (order, mut memory) = generations(100, 64, false);
    for now in 1..=3 {
        memory.time = now * 10;
        memory.uses(0..30);
        order.walk(&mut memory);
    }
    let census = order.census();
    assert_eq!(census[0], (30, 30));
    assert_eq!(census.iter().map(|row| row.1).sum::<u64>(), 100);
    assert_eq!(census[3].1, 70, "idle since the first: {census:?}");
    assert_eq!(order.now().woken[0], 90);
}

/// After any sequence of events, a page is in one queue at most, and in one if it is in memory and
/// was not given up.
#[test]
fn every_resident_page_is_in_exactly_one_queue() {
    const PAGES: u32 = 150;
    let mut led = 0;
    for seed in 0..4 {
        let (order, mut memory) = generations(PAGES, 64, seed % 2 == 0);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut evicted: Vec<u32> = vec![];
        for _ in 0..2000 {
            let page = rng.u32(..PAGES);
            let index = page as usize;
            match rng.u8(..16) {
                // A balloon takes the page; the guest may touch it again later.
                0..5 => memory.here[index] = false,
                5..11 if !evicted.contains(&page) => {
                    memory.here[index] = true;
                    let distance = [None, Some(rng.u32(..2 * PAGES))][rng.usize(..2)];
                    order.now().arrive(page, distance, PAGES);
                }
                11 => memory.uses(index..(index + 20).min(PAGES as usize)),
                12 => {
                    let (heat, recency) = [(0, 1 << 20), (1 << 20, 0)][rng.usize(..2)];
                    order.has_missed(heat, recency);
                    order.walk(&mut memory);
                    led += u32::from(order.now().heat.as_ref().unwrap().leads());
                }
                13 => memory.new = rng.u8(..4) == 0,
                roll => {
                    // Before a search, all pages found earlier were given up or put back.
                    evicted.drain(..).for_each(|page| match rng.bool() {
                        true => order.now().put_back(page, rng.bool()),
                        false => memory.here[page as usize] = false,
                    });
                    let want = if roll == 14 { 0 } else { rng.usize(1..40) };
                    for page in order.victims(want, &mut memory).pages {
                        assert!(memory.is_here(page) && !evicted.contains(&page), "{page}");
                        evicted.push(page);
                    }
                }
            }
            let order = order.now();
            let queues = order.queues.iter().map(|it| &it.pages);
            // Cold pages stay where they are until their turn.
            check_queues(&order.links, queues, &memory, &evicted, true);
        }
    }
    assert!(led > 100, "heat led after {led} walks");
}

#[test]
fn the_coldest_pages_go_while_heat_predicts_better() {
    for around in [false, true] {
        let (order, mut memory) = generations(640, 64, around);
        for _ in 0..8 {
            memory.uses(0..320);
            order.walk(&mut memory);
        }
        memory.uses(320..640);
        order.has_missed(0, 100 << 8);
        order.walk(&mut memory);
        let found = order.victims(40, &mut memory).pages;
        assert!(found.iter().all(|page| *page >= 320), "the coldest, around: {around}");
        let (first, next) = (found[0], found[39] + 1);
        found.iter().for_each(|&page| memory.here[page as usize] = false);
        // Pages that were used since stay, and no page is tested twice.
        memory.uses(next as usize..next as usize + 10);
        let found = order.victims(10, &mut memory);
        assert_eq!(found.pages, (next + 10..next + 20).collect::<Vec<_>>());
        assert_eq!(found.kept, if around { 1 } else { 10 });
        // These pages come back, which makes two uses; the others have one.
        (first..next).for_each(|page| order.now().arrive(page, Some(9), 640));
        memory.here.fill(true);
        (0..4).for_each(|_| order.walk(&mut memory));
        order.has_missed(0, 100 << 8);
        order.walk(&mut memory);
        let found = order.victims(40, &mut memory).pages;
        assert!(found.iter().all(|page| *page >= 320 && !(first..next + 10).contains(page)));
        order.now().put_back(found[0], false);
        order.has_missed(100 << 8, 0);
        order.walk(&mut memory);
        let found = order.victims(40, &mut memory).pages;
        assert!(found.iter().all(|page| *page < 320), "{found:?}");
    }
}

#[test]
fn a_cold_page_that_a_device_used_since_stays() {
    for around in [false, true] {
        let (order, mut memory) = generations(640, 64, around);
        order.walk(&mut memory);
        memory.uses(40..640);
        order.has_missed(0, 100 << 8);
        order.walk(&mut memory);
        // A device sets no accessed bit.
        order.now().arrive(5, Some(0), 640);
        let found = order.victims(20, &mut memory).pages;
        assert_eq!(found, (0..21).filter(|page| *page != 5).collect::<Vec<_>>());
    }
}

#[test]
fn a_walk_follows_a_twelfth_given_up_even_by_recency() {
    let (order, mut memory) = generations(640, 64, true);
    (0..8).for_each(|_| order.walk(&mut memory));
    let found = order.victims(53, &mut memory);
    assert_eq!((found.pages.len(), found.walks), (53, 0));
    assert_eq!(order.victims(40, &mut memory).walks, 1, "a twelfth went");
}

#[test]
fn a_page_that_comes_before_its_turn_moves_on_when_that_comes() {
    let (order, mut memory) = generations(64, 64, false);
    (0..4).for_each(|_| order.walk(&mut memory));
    // The page left and came back: it is of the youngest generation, but in the oldest queue.
    order.now().arrive(5, None, 64);
    assert!(order.now().is_young(5));
    let found = order.victims(63, &mut memory).pages;
    assert!(found.len() == 63 && !found.contains(&5));
}

#[test]
fn the_first_time_at_which_a_page_is_old_enough_is_reported() {
    let (order, mut memory) = generations(128, 64, true);
    memory.new = true;
    let found = order.victims(32, &mut memory);
    assert_eq!(found.until, Some(memory.until(0)));
    memory.here[0] = false;
    assert_eq!(order.victims(32, &mut memory).until, Some(memory.until(1)));
}

#[test]
fn a_page_back_late_is_one_generation_older_than_a_used_one() {
    let (order, _) = generations(64, 64, false);
    let mut order = order.now();
    let youngest = order.youngest();
    order.arrive(5, Some(65), 64);
    order.arrive(6, Some(64), 64);
    assert_eq!(order.of[5..7], [youngest - 1, youngest]);
}

#[test]
fn no_walk_is_needed_once_four_generations_are_younger() {
    for walks in 0..6u64 {
        let (order, mut memory) = generations(64, 64, false);
        (0..walks).for_each(|_| order.walk(&mut memory));
        let found = order.victims(1, &mut memory);
        // If two walks are not enough, the page that was used longest ago goes.
        assert_eq!((found.pages.len(), found.walks), (1, 4u64.saturating_sub(walks).min(2)));
    }
}

#[test]
fn a_search_passes_over_more_used_pages_than_it_wants() {
    let (order, mut memory) = generations(64, 64, false);
    (0..4).for_each(|_| order.walk(&mut memory));
    memory.uses(0..20);
    let found = order.victims(1, &mut memory);
    assert_eq!((found.pages, found.kept, found.walks), (vec![20], 20, 0));
}

#[test]
fn a_search_passes_over_more_new_pages_than_it_wants() {
    let (order, mut memory) = generations(64, 64, false);
    (0..4).for_each(|_| order.walk(&mut memory));
    memory.new = true;
    let found = order.victims(1, &mut memory);
    // Each is next twice: when its generation is the oldest, and when none was found.
    assert_eq!((found.pages.len(), found.held, found.walks), (0, 128, 2));
}

#[test]
fn a_search_for_cold_pages_walks_twice_at_most() {
    let (order, mut memory) = generations(64, 64, false);
    order.has_missed(0, 100 << 8);
    order.walk(&mut memory);
    assert!(order.now().heat.as_ref().unwrap().leads());
    memory.new = true;
    let found = order.victims(1, &mut memory);
    assert!(found.pages.is_empty() && found.held > 0);
    assert_eq!((found.walks, order.now().walks), (2, 3));
}

#[test]
fn generations_are_renumbered_once_their_numbers_run_out() {
    let (order, mut memory) = generations(64, 64, false);
    let renumbered = || order.now().renumbered;
    // The first generations are merged once there are more than `IDLE` before a walk.
    for _ in 0..IDLE - KEPT + LAST as usize {
        order.walk(&mut memory);
        assert_eq!(renumbered(), 0);
    }
    assert_eq!(order.now().oldest, LAST);
    memory.uses(5..6);
    order.walk(&mut memory);
    assert_eq!((renumbered(), order.now().oldest), (1, 1));
    let census = order.census();
    assert_eq!((census[0].1, census[IDLE].1), (1, 63));
}

#[test]
fn a_page_is_young_until_two_walks_found_it_idle() {
    let (order, mut memory) = generations(64, 64, false);
    // Also where walks merge the oldest generations.
    for _ in 0..2 * IDLE {
        memory.uses(5..6);
        order.walk(&mut memory);
        let is_young = || order.now().is_young(5);
        assert!(is_young());
        order.walk(&mut memory);
        assert!(is_young());
        order.walk(&mut memory);
        assert!(!is_young());
    }
}

#[test]
fn the_census_counts_walks_and_only_pages_that_are_in_memory() {
    let (order, mut memory) = generations(64, 64, false);
    (0..3).for_each(|_| order.walk(&mut memory));
    let census = Generations::census(&mut order.held(), |page| page >= 10);
    assert_eq!(census.walks, 3);
    assert_eq!(census.generations[3].1, 54);
    assert_eq!(census.generations.iter().map(|row| row.1).sum::<u64>(), 54);
}
