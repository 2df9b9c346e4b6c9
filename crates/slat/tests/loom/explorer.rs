//! Loom's part of the machine, and the exploration of a model.

use core::sync::atomic::{AtomicUsize, Ordering};
use loom::sync::{Mutex, MutexGuard};
use slat::{Attributes, BreakBeforeMake, UnmappedRun};
use std::sync::Arc;
use std::vec::Vec;

pub const ALWAYS: BreakBeforeMake = BreakBeforeMake::Always;
pub const NEVER: BreakBeforeMake = BreakBeforeMake::Never;
/// Guest memory in host memory, far from the tables.
pub const MEMORY: u64 = 0x10_0000;
/// Protected for dirty logging before it was used.
pub const PROTECTED: Attributes =
    Attributes { write: false, dirty: false, accessed: false, ..Attributes::RAM };
/// Reader slots of a machine: each makes more orders.
pub const SLOTS: usize = 3;

/// Held during each access of a CPU and each invalidation, so an invalidation ends after every
/// access that began before it.
#[derive(Default)]
pub struct Bus {
    lock: Mutex<()>,
    /// Held to report a fault, and to take the log: a thread that takes the log sees what was
    /// reported.
    pub log: Mutex<()>,
}

impl Bus {
    pub fn shared(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap()
    }

    pub fn alone(&self, running: bool) -> Option<MutexGuard<'_, ()>> {
        running.then(|| self.shared())
    }
}

/// Explores a model, and prints how long that took.
pub fn explore(name: &str, model: impl Fn() + Send + Sync + 'static) {
    run(name, None, model);
}

/// Explores a model with at most `preemptions` preemptions in an execution.
pub fn bounded(name: &str, preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    run(name, Some(preemptions), model);
}

/// Returns the tighter of two bounds: `LOOM_MAX_PREEMPTIONS` can only lower a bound. It counts as
/// one less in models of three threads, since those switch more often anyway.
fn least(name: &str, asked: Option<usize>, own: Option<usize>) -> Option<usize> {
    let third = name.matches("||").count().saturating_sub(1);
    asked.map(|asked| asked.saturating_sub(third)).into_iter().chain(own).min()
}

pub fn run(name: &str, preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let executions = Arc::new(AtomicUsize::new(0));
    let count = executions.clone();
    let mut builder = loom::model::Builder::new();
    builder.max_branches = 20_000;
    builder.preemption_bound = least(name, builder.preemption_bound, preemptions);
    let start = std::time::Instant::now();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let seconds = start.elapsed().as_secs_f64();
    let bound = builder.preemption_bound.map_or("all".into(), |n| std::format!("<= {n}"));
    std::eprintln!("| {name} | {bound} | {} | {seconds:.2} |", executions.load(Ordering::Relaxed));
}

/// Bytes that were handed out, each exactly once.
pub fn bytes(removed: &[UnmappedRun]) -> u64 {
    let mut leaves: Vec<_> = removed.iter().map(|r| (r.gpa.0, r.size.bytes())).collect();
    leaves.sort();
    for pair in leaves.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "handed out twice: {leaves:x?}");
    }
    leaves.iter().map(|leaf| leaf.1).sum()
}
