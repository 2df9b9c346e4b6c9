//! For a VMM that measures its own vCPUs, each on the thread that runs it.
//!
//! Only the VMM knows when `KVM_RUN` began and when it returned. In the part of this time in which
//! the thread neither ran nor waited for a CPU, it slept: in a fault that waited for a page, or
//! because the vCPU had no work. The VMM reads KVM's statistics about once per interval, at a
//! return from `KVM_RUN`, so that they cost an exit nothing.

use crate::Error;
use crate::ioctl::BinaryStats;
use crate::procfs::Files;
use crate::stats::{Changes, Reading, Stats};
use std::time::{Duration, Instant};

/// The account of a vCPU.
#[derive(Debug)]
pub struct Vcpu {
    stats: Stats,
    first: Reading,
    last: Reading,
    waits: Option<(u64, u64)>,
    interval: Duration,
    due: Instant,
    entered: Instant,
    runs: u64,
    inside: Duration,
    longest: Duration,
}

/// The values of a vCPU's account.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// Calls of `KVM_RUN`.
    pub runs: u64,
    /// Time in these calls.
    pub inside: Duration,
    /// The longest of these calls.
    pub longest: Duration,
    /// Time in which the thread was ready and had no CPU, if the kernel counts it.
    pub waited: Option<Duration>,
    /// Changes of KVM's counters of the vCPU, by the kernel's names.
    pub statistics: Changes,
}

impl Vcpu {
    /// Begins an account, on the thread that will run the vCPU. KVM's counters are read about once
    /// per `interval`.
    ///
    /// # Errors
    /// [`Error::Os`] if the kernel has no binary statistics (before 5.14).
    pub fn new(vcpu: &impl BinaryStats, interval: Duration) -> Result<Self, Error> {
        let stats = Stats::open(vcpu)?;
        let mut first = Reading::default();
        stats.read(&mut first)?;
        let now = Instant::now();
        Ok(Self {
            stats,
            last: first.clone(),
            first,
            waits: Files::here().waits(),
            interval,
            due: now + interval,
            entered: now,
            runs: 0,
            inside: Duration::ZERO,
            longest: Duration::ZERO,
        })
    }

    /// Notes the time. Call it right before `KVM_RUN`.
    pub fn enter(&mut self) {
        self.entered = Instant::now();
    }

    /// Accounts for the call. Call it right after `KVM_RUN`. Returns whether counters were read, so
    /// that the caller may show them.
    ///
    /// # Errors
    /// [`Error::Os`] if the counters cannot be read.
    pub fn leave(&mut self) -> Result<bool, Error> {
        let now = Instant::now();
        let took = now.saturating_duration_since(self.entered);
        self.runs += 1;
        self.inside += took;
        self.longest = self.longest.max(took);
        if now < self.due {
            return Ok(false);
        }
        self.due = now + self.interval;
        self.stats.read(&mut self.last)?;
        Ok(true)
    }

    /// Returns the account since its start. It reads the counters first.
    ///
    /// # Errors
    /// [`Error::Os`] if the counters cannot be read.
    pub fn account(&mut self) -> Result<Account, Error> {
        self.stats.read(&mut self.last)?;
        let waits = self.waits.zip(Files::here().waits());
        Ok(Account {
            runs: self.runs,
            inside: self.inside,
            longest: self.longest,
            waited: waits.map(|(from, to)| Duration::from_nanos(to.0.saturating_sub(from.0))),
            statistics: self.stats.changes(&self.first, &self.last),
        })
    }
}
