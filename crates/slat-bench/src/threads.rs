//! Pinned threads that begin together and report how long they worked.

use crate::stopwatch::Stopwatch;
use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Returns the CPUs that this process may use.
///
/// # Errors
/// The kernel does not report them.
pub fn cpus() -> anyhow::Result<Vec<usize>> {
    let set = sched_getaffinity(None).context("cannot ask which CPUs may be used")?;
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    anyhow::ensure!(!cpus.is_empty(), "the kernel names no CPU that may be used");
    Ok(cpus)
}

/// Keeps the calling thread on one CPU until it is dropped.
pub struct Pin {
    before: CpuSet,
}

impl Pin {
    /// Pins the calling thread.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn to(cpu: usize) -> anyhow::Result<Self> {
        let before = sched_getaffinity(None).context("cannot ask which CPUs may be used")?;
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(None, &set).with_context(|| format!("cannot stay on CPU {cpu}"))?;
        Ok(Self { before })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// A barrier at which threads spin, so that all leave it at once.
pub struct Gate {
    missing: AtomicUsize,
    /// Set when a thread will not come.
    open: AtomicBool,
}

impl Gate {
    /// Waits until all threads are here; then does `work`, and returns the CPU seconds that it
    /// took.
    pub fn pass<R>(&self, work: impl FnOnce() -> R) -> (f64, R) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        while self.missing.load(Ordering::Acquire) != 0 && !self.open.load(Ordering::Relaxed) {
            std::hint::spin_loop();
        }
        let watch = Stopwatch::start();
        let result = work();
        (watch.seconds(), result)
    }
}

/// Releases the waiting threads if a thread ends without having come.
struct Absent<'g>(&'g Gate, bool);

impl Drop for Absent<'_> {
    fn drop(&mut self) {
        if self.1 {
            self.0.open.store(true, Ordering::Relaxed);
        }
    }
}

/// Result of a thread; all that it does before it passes the gate is preparation.
type TimedResult<R> = anyhow::Result<(f64, R)>;

/// Runs a thread for each of `works`, the first on the first CPU, and so on. Returns the seconds of
/// the thread that worked longest, and what each returned.
pub fn together<W, R>(cpus: &[usize], works: Vec<W>) -> anyhow::Result<(f64, Vec<R>)>
where
    W: FnOnce(&Gate) -> TimedResult<R> + Send,
    R: Send,
{
    let gate = &Gate { missing: AtomicUsize::new(works.len()), open: AtomicBool::new(false) };
    let done: Vec<TimedResult<R>> = std::thread::scope(|scope| {
        let threads: Vec<_> = works
            .into_iter()
            .zip(cpus)
            .map(|(work, &cpu)| {
                scope.spawn(move || {
                    let mut absent = Absent(gate, true);
                    let _pin = Pin::to(cpu)?;
                    let done = work(gate)?;
                    absent.1 = false;
                    Ok(done)
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    });
    let done = done.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let seconds = done.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    Ok((seconds, done.into_iter().map(|(_, result)| result).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pin_is_undone_when_it_is_dropped() {
        let before = cpus().unwrap();
        let pin = Pin::to(before[0]).unwrap();
        assert_eq!(cpus().unwrap(), before[..1]);
        drop(pin);
        assert_eq!(cpus().unwrap(), before);
    }

    #[test]
    fn a_thread_that_fails_before_the_gate_blocks_no_other() {
        let cpu = cpus().unwrap()[0];
        let work = |fails: bool| {
            move |gate: &Gate| {
                anyhow::ensure!(!fails, "not today");
                Ok(gate.pass(|| 1))
            }
        };
        let (_, sum) = together(&[cpu, cpu], vec![work(false), work(false)]).unwrap();
        assert_eq!(sum, [1, 1]);
        let refusal = together(&[cpu, cpu], vec![work(false), work(true)]).unwrap_err();
        assert_eq!(refusal.to_string(), "not today");
    }
}
