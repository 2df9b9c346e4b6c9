//! Compares the refaults of both orders, on sequences of uses that are the same in every run, with
//! those of rules that know more about the uses.
//!
//! `cargo test -p slat-reclaim --lib contest -- --nocapture` prints the table.

use super::tests::Memory;
use super::{Generations, Lists, Order, ScanOptions};
use crate::arrivals::Arrivals;
use crate::bounds::{
    Zipf, fewest_refaults, refaults_by_frequency, refaults_of_lru, refaults_without_foresight,
};
use fastrand::Rng;
use std::boxed::Box;
use std::vec;
use std::vec::Vec;

const PAGES: u32 = 3072;
const MEMORY: usize = 2048;

/// Runs uses through an order; returns the number of refaults.
fn refaults(order: &Order, pages: u32, memory: usize, uses: &[u32]) -> u64 {
    let mut guest = Memory::all_here(pages);
    guest.here.fill(false);
    let (mut here, mut evicted, mut refaults) = (0, 0u32, 0);
    let mut away: Vec<Option<u32>> = vec![None; pages as usize];
    let arrivals = Arrivals::new(pages);
    for page in (0..pages).chain(uses.iter().copied()) {
        let index = page as usize;
        if !guest.here[index] {
            if here == memory {
                for victim in order.victims(memory / 64, &mut guest).pages {
                    assert!(guest.here[victim as usize], "{victim} was found twice");
                    guest.here[victim as usize] = false;
                    guest.accessed[victim as usize] = false;
                    away[victim as usize] = Some(evicted);
                    (here, evicted) = (here - 1, evicted + 1);
                }
            }
            let distance = away[index].map(|since| evicted - since);
            refaults += u64::from(distance.is_some());
            guest.here[index] = true;
            here += 1;
            arrivals.push(page, distance);
            order.note(&arrivals, here as u32, |_| ());
        }
        guest.accessed[index] = true;
    }
    refaults
}

fn generations(pages: u32, frequency: bool) -> Order {
    Order::generations(Generations::new(
        pages,
        ScanOptions { window: 64, around: true, frequency },
        0,
    ))
}

/// Uses by Zipf's law; each seed has other pages that are used often.
fn zipf(seed: u64, pages: u32, count: usize) -> Vec<u32> {
    let mut rng = Rng::with_seed(seed);
    let mut order: Vec<u32> = (0..pages).collect();
    rng.shuffle(&mut order);
    let zipf = Zipf::new(order);
    (0..count).map(|_| zipf.page(rng.f64())).collect()
}

/// Uses of which nine in ten are in a part that fits into memory, which has four places in turn.
fn phase(seed: u64, pages: u32, memory: usize, count: usize) -> Vec<u32> {
    let mut rng = Rng::with_seed(seed);
    let one = |index: usize| {
        let first = (index * 4 / count) as u32 * pages / 4;
        match rng.u32(..10) {
            0 => rng.u32(..pages),
            _ => (first + rng.u32(..memory as u32 * 4 / 5)) % pages,
        }
    };
    (0..count).map(one).collect()
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Costs {
    belady: f64,
    clock: f64,
    recency: f64,
    ours: f64,
}

/// Runs all orders, and prints a row: the refaults of Belady's rule, and those of each order
/// divided by them.
fn costs(name: &str, seed: u64, memory: usize, independent: bool, uses: &[u32]) -> Costs {
    let (all, fit) = (|| uses.iter().copied(), memory as u32);
    let belady = fewest_refaults(PAGES, fit, all()) as f64;
    let lru = refaults_of_lru(PAGES, fit, all()) as f64;
    let by_frequency = refaults_by_frequency(PAGES, fit, all()) as f64;
    let of = |order: Order| refaults(&order, PAGES, memory, uses) as f64;
    let clock = of(Order::lists(Lists::new(PAGES)));
    let (recency, ours) = (of(generations(PAGES, false)), of(generations(PAGES, true)));
    let by = |count: f64| std::format!("{:5.2}", count / belady);
    let known = |count: f64| if independent { by(count) } else { "    -".into() };
    std::println!(
        "{name:18} {seed:4} {belady:7} {} {} {} {} {} {}",
        by(lru),
        by(clock),
        by(recency),
        by(ours),
        known(refaults_without_foresight(PAGES, fit, all())),
        known(by_frequency),
    );
    Costs { belady, clock, recency, ours }
}

fn head() {
    std::println!(
        "uses               seed  belady   lru clock  recency ours no-foresight by-frequency"
    );
}

const USES: usize = 20 * PAGES as usize;

#[test]
fn frequency_saves_more_zipf_refaults_the_longer_a_run_lasts() {
    head();
    for seed in 1..4 {
        let uses = zipf(seed, PAGES, if seed == 1 { 20 } else { 5 } * USES);
        for (name, times, most, of_belady) in
            [("zipf, 20", 1, 0.97, 3.3), ("zipf, 100", 5, 0.88, 2.75), ("zipf, 400", 20, 0.8, 2.5)]
        {
            // The longest sequence runs with one seed only, as it takes long.
            if times > 5 && seed > 1 {
                continue;
            }
            let uses = &uses[..times * USES];
            let costs = costs(name, seed, MEMORY, true, uses);
            assert!(costs.ours <= most * costs.recency, "{name}, {seed}: {costs:?}");
            assert!(costs.ours <= of_belady * costs.belady, "{name}, {seed}: {costs:?}");
            let limit = refaults_without_foresight(PAGES, MEMORY as u32, uses.iter().copied());
            assert!(costs.ours <= 1.1 * limit, "{name}, {seed}: {costs:?}, not {limit}");
        }
    }
}

/// Compares sums over all seeds, because the refaults of one seed are subject to chance.
#[test]
fn frequency_costs_nothing_where_it_predicts_nothing() {
    head();
    for memory in [MEMORY * 3 / 4, MEMORY, MEMORY * 4 / 3] {
        for what in ["uniform", "scan", "phase", "moves"] {
            let name = std::format!("{what}, {:.3}", f64::from(PAGES) / memory as f64);
            let (mut ours, mut recency) = (0.0, 0.0);
            for seed in 1..if what == "scan" { 2 } else { 5 } {
                let mut rng = Rng::with_seed(seed);
                let uses = match what {
                    "uniform" => (0..USES).map(|_| rng.u32(..PAGES)).collect(),
                    "scan" => (0..PAGES).cycle().take(USES).collect(),
                    "phase" => phase(seed, PAGES, memory, USES),
                    _ => [zipf(seed, PAGES, USES), zipf(seed + 9, PAGES, USES)].concat(),
                };
                let costs = costs(&name, seed, memory, what == "uniform", &uses);
                (ours, recency) = (ours + costs.ours, recency + costs.recency);
            }
            assert!(ours <= 1.02 * recency, "{name}: {ours} by {recency}");
        }
    }
}

#[test]
fn generations_need_hardly_more_refaults_than_two_lists() {
    for memory in [1536, 2048, 2793] {
        for scan in [false, true] {
            let uses: Box<[u32]> = match scan {
                true => (0..PAGES).cycle().take(USES).collect(),
                false => zipf(7, PAGES, 2 * USES).into(),
            };
            let theirs = refaults(&Order::lists(Lists::new(PAGES)), PAGES, memory, &uses) as f64;
            for frequency in [false, true] {
                let ours = refaults(&generations(PAGES, frequency), PAGES, memory, &uses) as f64;
                assert!(ours <= 1.03 * theirs, "{memory}, {scan}, {frequency}: {ours} by {theirs}");
            }
        }
    }
}
