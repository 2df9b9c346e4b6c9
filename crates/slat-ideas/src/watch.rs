//! The time that a thread's own work takes.

use rustix::time::{ClockId, clock_gettime};

/// What a thread's own work takes: the time that it was on a CPU, which is all of it unless others
/// want the CPU, too.
pub struct Watch(f64);

impl Watch {
    /// Starts now.
    #[inline]
    pub fn start() -> Self {
        Self(Self::now())
    }

    /// Seconds of work since then.
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
