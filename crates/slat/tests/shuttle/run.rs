//! The number of schedules, the scheduler, and the replay of one schedule.

use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};
use std::time::Instant;

#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Any thread at each step.
    Random,
    /// Probabilistic concurrency testing (PCT): the thread with the highest priority runs, and
    /// priorities change at a few random steps. It finds bugs that need few preemptions at
    /// particular places.
    Priorities,
}

pub fn config() -> Config {
    let mut config = Config::new();
    config.stack_size = 0x4_0000;
    config.silence_warnings = true;
    config.max_steps = MaxSteps::FailAfter(200_000);
    config
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    let parsed = value.parse();
    Some(parsed.unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

/// The schedule that is to be run again.
pub fn replay() -> Option<String> {
    let schedule = std::env::var("SHUTTLE_REPLAY").ok()?;
    // A long one is printed over several lines.
    Some(schedule.split_whitespace().collect())
}

/// Runs `history` under `iterations` schedules, or as the environment says (see the top of this
/// test).
pub fn sample(name: &str, way: Way, iterations: u64, history: impl Fn() + Send + Sync + 'static) {
    if let Some(schedule) = replay() {
        let mut scheduler = ReplayScheduler::new_from_encoded(&schedule);
        scheduler.set_allow_incomplete();
        explore(scheduler, history);
        return;
    }
    let iterations = number("SHUTTLE_ITERATIONS").unwrap_or(iterations) as usize;
    let seed = crate::seed::seed();
    let begin = Instant::now();
    match way {
        Way::Random => explore(RandomScheduler::new_from_seed(seed, iterations), history),
        Way::Priorities => explore(PctScheduler::new_from_seed(seed, 4, iterations), history),
    };
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("{name}, {way:?}: {iterations} schedules in {seconds:.1} s");
}

pub fn explore(
    scheduler: impl Scheduler + 'static,
    history: impl Fn() + Send + Sync + 'static,
) -> usize {
    Runner::new(scheduler, config()).run(history)
}
