//! Estimates how much of a guest's memory was used within an interval, by the best means of the
//! host.
//!
//! Each means sets a mark and reads it later, and so changes state of the host. The watch uses none
//! unless the user asks for it.

mod generations;
mod idle;
mod referenced;

use crate::procfs::Files;
use crate::watch::metric::Source;
use generations::Generations;
use idle::Idle;
use referenced::ReferencedPages;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// The result of reading a mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UsedBytes {
    /// Bytes that were used since the mark was made.
    used: u64,
    /// Bytes that were examined.
    all: u64,
}

/// A mark in the memory of a process.
#[derive(Debug)]
enum Mark {
    Idle(Idle),
    Generations(Generations),
    Referenced(ReferencedPages),
}

/// All means, the best first.
const MEANS: [Source; 3] = [Source::IdlePages, Source::Generations, Source::Referenced];

impl Mark {
    /// Opens a mark by one means.
    fn by(source: Source, files: &Files<'_>, pid: i32) -> Result<Self, String> {
        match source {
            Source::IdlePages => Idle::open(files, pid).map(Self::Idle),
            Source::Generations => Generations::open(files, pid).map(Self::Generations),
            _ => ReferencedPages::open(files, pid).map(Self::Referenced),
        }
    }

    /// Opens a mark by the best means that this host has.
    fn best(files: &Files<'_>, pid: i32) -> Result<Self, String> {
        let mut why = Vec::new();
        for source in MEANS {
            // A walk of page tables that does not see a guest's accesses is no better than the next
            // means.
            if source == Source::Generations && !generations::sees_guests(files) {
                why.push("MGLRU asks KVM since Linux 6.12 only".to_owned());
                continue;
            }
            match Self::by(source, files, pid) {
                Ok(mark) => return Ok(mark),
                Err(error) => why.push(error),
            }
        }
        Err(why.join("; "))
    }

    fn source(&self) -> Source {
        match self {
            Self::Idle(_) => Source::IdlePages,
            Self::Generations(_) => Source::Generations,
            Self::Referenced(_) => Source::Referenced,
        }
    }

    fn make(&mut self, files: &Files<'_>) -> Result<(), String> {
        match self {
            Self::Idle(it) => it.make(files),
            Self::Generations(it) => it.make(files),
            Self::Referenced(it) => it.make(files),
        }
    }

    fn look(&mut self, files: &Files<'_>) -> Result<UsedBytes, String> {
        match self {
            Self::Idle(it) => it.look(files),
            Self::Generations(it) => it.look(files),
            Self::Referenced(it) => it.look(files),
        }
    }

    fn error(&self, files: &Files<'_>) -> String {
        match self {
            Self::Idle(_) => idle::ERROR.to_owned(),
            Self::Generations(it) => it.error(files),
            Self::Referenced(_) => referenced::ERROR.to_owned(),
        }
    }

    fn changes(&self) -> &'static str {
        match self {
            Self::Idle(_) => idle::CHANGES,
            Self::Generations(_) => generations::CHANGES,
            Self::Referenced(_) => referenced::CHANGES,
        }
    }
}

/// The estimate of a guest's working set.
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
pub struct WorkingSet {
    /// The guest's process.
    pub pid: i32,
    /// The means of the estimate.
    pub by: Source,
    /// Bytes that were used within the last interval.
    pub bytes: u64,
    /// Average of `bytes` over all intervals.
    pub mean_bytes: u64,
    /// Largest `bytes` of all intervals.
    pub largest_bytes: u64,
    /// Bytes that were examined in the last interval.
    pub of_bytes: u64,
    /// Number of intervals.
    pub times: u32,
    /// Average length of an interval, in seconds.
    pub seconds: f64,
    /// Possible error of the estimate, in words.
    pub error: String,
    /// What the means changes in the host, in words.
    pub changes: &'static str,
    /// CPU time that the watch used for all intervals, in seconds.
    pub cpu_seconds: f64,
}

impl WorkingSet {
    fn take(&mut self, seen: UsedBytes, seconds: f64) {
        let before = f64::from(self.times);
        let mean = |mean: f64, now: f64| (mean * before + now) / (before + 1.0);
        self.mean_bytes = mean(self.mean_bytes as f64, seen.used as f64) as u64;
        self.seconds = mean(self.seconds, seconds);
        self.largest_bytes = self.largest_bytes.max(seen.used);
        (self.bytes, self.of_bytes) = (seen.used, seen.all);
        self.times += 1;
    }
}

/// Estimates of all guests that are watched.
#[derive(Debug)]
pub struct WorkingSets {
    every: Duration,
    by: Option<Source>,
    guests: BTreeMap<i32, Result<Of, String>>,
    /// Estimates of guests that ended.
    gone: Vec<WorkingSet>,
}

#[derive(Debug)]
struct Of {
    mark: Mark,
    made: Instant,
    told: WorkingSet,
}

impl WorkingSets {
    /// Estimates over consecutive intervals of length `every`, by the means `by`, or by the best
    /// that the host has.
    pub fn new(every: Duration, by: Option<Source>) -> Self {
        Self { every, by, guests: BTreeMap::new(), gone: Vec::new() }
    }

    /// Reads the marks of `pids` whose interval is over, and makes new ones.
    pub(crate) fn step(&mut self, files: &Files<'_>, pids: &BTreeSet<i32>) {
        let went: Vec<i32> =
            self.guests.keys().filter(|pid| !pids.contains(pid)).copied().collect();
        let gone = went.iter().filter_map(|pid| self.guests.remove(pid)).filter_map(Result::ok);
        self.gone.extend(gone.map(|of| of.told).filter(|told| told.times > 0));
        for pid in pids {
            let (every, by) = (self.every, self.by);
            let of = self.guests.entry(*pid).or_insert_with(|| Of::begin(files, *pid, by));
            if let Ok(it) = of
                && let Err(why) = it.step(files, every)
            {
                *of = Err(why);
            }
        }
    }

    /// Returns the last estimate of a process, or the reason why there is none.
    pub(crate) fn of(&self, pid: i32) -> Result<(u64, Source), String> {
        match self.guests.get(&pid) {
            Some(Ok(of)) if of.told.times > 0 => Ok((of.told.bytes, of.told.by)),
            Some(Err(why)) => Err(why.clone()),
            _ => Err("the first of the times is not over".to_owned()),
        }
    }

    /// Returns all estimates, including those of guests that ended.
    pub fn told(&self) -> Vec<WorkingSet> {
        let there = self.guests.values().filter_map(|of| of.as_ref().ok()).map(|of| &of.told);
        self.gone.iter().chain(there.filter(|told| told.times > 0)).cloned().collect()
    }
}

impl Of {
    fn begin(files: &Files<'_>, pid: i32, by: Option<Source>) -> Result<Self, String> {
        let began = cpu_time();
        let mut mark = match by {
            Some(source) => Mark::by(source, files, pid)?,
            None => Mark::best(files, pid)?,
        };
        mark.make(files)?;
        let told = WorkingSet {
            pid,
            by: mark.source(),
            bytes: 0,
            mean_bytes: 0,
            largest_bytes: 0,
            of_bytes: 0,
            times: 0,
            seconds: 0.0,
            error: mark.error(files),
            changes: mark.changes(),
            cpu_seconds: (cpu_time() - began).as_secs_f64(),
        };
        Ok(Self { mark, made: Instant::now(), told })
    }

    fn step(&mut self, files: &Files<'_>, every: Duration) -> Result<(), String> {
        let passed = self.made.elapsed();
        // A sample may come a little early, because the mark before was made a little late.
        if passed + every / 20 < every {
            return Ok(());
        }
        let began = cpu_time();
        let seen = self.mark.look(files)?;
        self.told.take(seen, passed.as_secs_f64());
        self.mark.make(files)?;
        self.made = Instant::now();
        self.told.cpu_seconds += (cpu_time() - began).as_secs_f64();
        Ok(())
    }
}

/// Returns the CPU time of this thread. The kernel does all of the work in this thread's calls.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// Returns the size of a page, in bytes.
fn page() -> u64 {
    rustix::param::page_size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::find::tests::FakeProc;

    #[test]
    fn estimates_are_summed_up_by_their_last_mean_and_largest() {
        let host = FakeProc::new();
        let file = "proc/7/smaps_rollup";
        host.write("proc/7/clear_refs", "").write(file, "Rss: 400 kB\nReferenced: 300 kB\n");
        let mut sets = WorkingSets::new(Duration::ZERO, None);
        let pids = BTreeSet::from([7]);
        sets.step(&host.files(), &pids);
        assert_eq!(sets.of(7), Ok((300 << 10, Source::Referenced)));
        host.write(file, "Rss: 400 kB\nReferenced: 100 kB\n");
        sets.step(&host.files(), &pids);
        let told = sets.told();
        let it = &told[0];
        assert_eq!((it.bytes, it.mean_bytes, it.largest_bytes), (100 << 10, 200 << 10, 300 << 10));
        assert_eq!((it.of_bytes, it.times), (400 << 10, 2));
        // The estimate of a guest that ended stays.
        sets.step(&host.files(), &BTreeSet::new());
        assert_eq!(sets.told(), told);
    }

    #[test]
    fn a_host_without_any_means_says_why_of_each() {
        let host = FakeProc::new();
        let mut sets = WorkingSets::new(Duration::ZERO, None);
        sets.step(&host.files(), &BTreeSet::from([7]));
        let why = sets.of(7).unwrap_err();
        for word in ["page_idle", "MGLRU", "clear_refs"] {
            assert!(why.contains(word), "{why}");
        }
        assert!(sets.told().is_empty());
        let long = WorkingSets::new(Duration::from_secs(3600), None);
        assert!(long.of(7).unwrap_err().contains("not over"));
    }
}
