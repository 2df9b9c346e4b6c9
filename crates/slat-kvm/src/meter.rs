//! Readings before and after a phase: the kernel's counters, and the vCPUs' clocks.

use crate::Error;
use crate::guest::Guest;
use crate::phase::MappedPages;
use crate::probes::{self, CallCounts};
use crate::stall::{Histogram, PhaseReadings, Stalls, stolen};
use crate::stats::{Changes, Reading};
use crate::vcpu_threads::VcpuWork;

/// The name of KVM's counter of page faults (x86).
const FAULTS: &str = "pf_taken";

/// The clock readings in one vCPU's mailbox.
#[derive(Debug, Clone)]
struct Clock {
    times: Histogram,
    idle: u64,
}

/// Readings before and after a phase.
#[derive(Debug)]
pub(crate) struct Meter<'a> {
    guest: &'a Guest,
    /// The usual ticks between two accesses, for each vCPU; empty before `set_warm`.
    warm: Vec<u64>,
    vm: [Reading; 2],
    vcpus: Vec<[Reading; 2]>,
    clocks: [Vec<Clock>; 2],
    stolen: [f64; 2],
    calls: [CallCounts; 2],
}

impl<'a> Meter<'a> {
    pub fn new(guest: &'a Guest) -> Self {
        let vcpus = guest.vcpu_stats().iter();
        Self {
            guest,
            warm: Vec::new(),
            vm: Default::default(),
            vcpus: vcpus.map(|_| Default::default()).collect(),
            clocks: Default::default(),
            stolen: Default::default(),
            calls: Default::default(),
        }
    }

    fn read(&mut self, when: usize) -> Result<(), Error> {
        if let Some(stats) = self.guest.vm_stats() {
            stats.read(&mut self.vm[when])?;
        }
        for (stats, readings) in self.guest.vcpu_stats().iter().zip(&mut self.vcpus) {
            stats.read(&mut readings[when])?;
        }
        let clock = |vcpu| Clock { times: self.guest.times(vcpu), idle: self.guest.idle(vcpu) };
        self.clocks[when] = (0..self.guest.parts().len()).map(clock).collect();
        self.stolen[when] = stolen()?;
        self.calls[when] = self.guest.calls();
        Ok(())
    }

    /// Takes the readings before a phase.
    pub fn before(&mut self) -> Result<(), Error> {
        self.read(0)?;
        (0..self.guest.parts().len()).for_each(|vcpu| {
            self.guest.take_longest(vcpu);
        });
        Ok(())
    }

    /// Takes the readings after a phase.
    pub fn after(&mut self) -> Result<(), Error> {
        self.read(1)
    }

    /// Takes each vCPU's median of the last phase as the usual time of an access.
    pub fn set_warm(&mut self) {
        let median = |vcpu: usize| self.times(vcpu).median().unwrap_or(1).max(1);
        self.warm = (0..self.guest.parts().len()).map(median).collect();
        for (vcpu, &ticks) in self.warm.iter().enumerate() {
            self.guest.set_warm(vcpu, ticks);
        }
    }

    fn times(&self, vcpu: usize) -> Histogram {
        let [before, after] = &self.clocks;
        after[vcpu].times.since(&before[vcpu].times)
    }

    /// Returns the stalls that a vCPU's clock showed, or `None` before `set_warm`, and where the
    /// kernel does not count waits for a CPU.
    pub fn stalls(&self, vcpu: usize, done: &VcpuWork) -> Option<Stalls> {
        let warm = *self.warm.get(vcpu)?;
        let [before, after] = [0, 1].map(|when| &self.clocks[when][vcpu]);
        let known = PhaseReadings {
            warm,
            ticks_per_second: self.guest.ticks_per_second(),
            idle: after.idle - before.idle,
            longest: self.guest.take_longest(vcpu),
            faults: self.faults(vcpu),
            waits: done.waits,
            stolen: self.stolen(),
        };
        Stalls::new(&self.times(vcpu), known)
    }

    /// Returns the number of a vCPU's faults, where the kernel counts them. A counter that did not
    /// change is missing in the changes, and stands for 0.
    fn faults(&self, vcpu: usize) -> Option<u64> {
        let [_, after] = self.vcpus.get(vcpu)?;
        self.guest.vcpu_stats()[vcpu].value(after, FAULTS)?;
        Some(self.vcpu_changes(vcpu).get(FAULTS).map_or(0, |faults| (*faults).max(0) as u64))
    }

    /// Returns the seconds of steal time during the phase, averaged over the host's CPUs.
    pub fn stolen(&self) -> f64 {
        self.stolen[1] - self.stolen[0]
    }

    pub fn vm_changes(&self) -> Changes {
        let [before, after] = &self.vm;
        let stats = self.guest.vm_stats().map(|stats| stats.changes(before, after));
        let mut changes = stats.unwrap_or_default();
        changes.extend(probes::changes(&self.calls[0], &self.calls[1]));
        changes
    }

    pub fn vcpu_changes(&self, index: usize) -> Changes {
        let stats = self.guest.vcpu_stats().get(index).zip(self.vcpus.get(index));
        stats.map(|(stats, [before, after])| stats.changes(before, after)).unwrap_or_default()
    }

    /// Returns the bytes of all second-level tables on the host, where the kernel counts them.
    pub fn tables(&self) -> Option<u64> {
        crate::meminfo::second_level_tables()
    }

    pub fn mapped(&self) -> Option<MappedPages> {
        let stats = self.guest.vm_stats()?;
        let value = |name| stats.value(&self.vm[1], name);
        Some(MappedPages {
            size_4k: value("pages_4k")?,
            size_2m: value("pages_2m")?,
            size_1g: value("pages_1g")?,
        })
    }
}
