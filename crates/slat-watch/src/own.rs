//! For a VMM that watches its own vCPUs, each on the thread that runs it.
//!
//! A VMM knows what nobody outside does: when `KVM_RUN` began and when it came back. What of that
//! time the thread neither ran nor waited for a CPU, it slept, in a fault that waited for a page or
//! for want of work. KVM's statistics and schedstat are read about once in the time that is asked
//! for, at a return from `KVM_RUN`, so that they cost nothing on the way of an exit.

use slat_kvm::Error;
use slat_kvm::ioctl::BinaryStats;
use slat_kvm::stats::{Changes, Reading, Stats};
use slat_procfs::Files;
use std::time::{Duration, Instant};

/// One vCPU's account.
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

/// What a vCPU's account shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// Calls of `KVM_RUN`.
    pub runs: u64,
    /// Time in them.
    pub inside: Duration,
    /// The longest of them.
    pub longest: Duration,
    /// Time in which the thread was ready and had no CPU, where the kernel counts it.
    pub waited: Option<Duration>,
    /// What KVM's counters of the vCPU did, by the kernel's names, as of the last reading.
    pub statistics: Changes,
}

impl Vcpu {
    /// Begins an account, on the thread that will run the vCPU. Counters are read about once each
    /// `interval`.
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

    /// Right before `KVM_RUN`.
    pub fn enter(&mut self) {
        self.entered = Instant::now();
    }

    /// Right after it. Answers whether counters were read, so that the caller may tell them.
    ///
    /// # Errors
    /// [`Error::Os`] if they cannot be.
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

    /// The account since it began, with counters as they are now.
    ///
    /// # Errors
    /// [`Error::Os`] if they cannot be read.
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
