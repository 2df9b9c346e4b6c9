//! Measures the time of a thread's own work.

use rustix::time::{ClockId, clock_gettime};

/// Measures the time that a thread is on a CPU, which is all of its time unless other threads need
/// the CPU, too.
pub struct Stopwatch(f64);

impl Stopwatch {
    /// Starts the watch.
    #[inline]
    pub fn start() -> Self {
        Self(Self::now())
    }

    /// Returns the seconds of work since the start.
    #[inline]
    pub fn seconds(&self) -> f64 {
        Self::now() - self.0
    }

    #[inline]
    fn now() -> f64 {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
    }
}
