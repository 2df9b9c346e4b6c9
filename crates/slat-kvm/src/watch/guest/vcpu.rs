//! The vCPUs of a guest: their descriptors, and the threads that run them.

use crate::procfs::Files;
use crate::watch::find::Descriptors;
use crate::watch::held::{Process, StatsReadings};
use crate::watch::metric::{Metric, Scope, Sink, Source, Values};
use crate::watch::task::{self, OpenFiles};

#[derive(Debug)]
pub(super) struct Vcpu {
    pub index: u32,
    pub held: Result<StatsReadings, String>,
    pub thread: Option<i32>,
    /// Threads that run the vCPU, or ran it earlier.
    pub tids: Vec<i32>,
    /// Values of threads that ran the vCPU earlier and ended, and the last values of its current
    /// thread.
    told: [Values; 2],
    /// What the current thread had done when it was found to run the vCPU in another's place.
    base: Values,
    kept: OpenFiles,
}

impl Vcpu {
    pub fn new(process: &Result<Process, String>, row: Row, thread: Option<i32>) -> Self {
        let held = process.as_ref().map_err(Clone::clone).and_then(|process| match row.stats {
            Some(stats) => process.statistics(stats),
            None => process.ask(row.fd),
        });
        let tids = Vec::from_iter(thread);
        Self {
            index: row.index,
            held,
            thread,
            tids,
            told: Default::default(),
            base: Values::new(),
            kept: OpenFiles::default(),
        }
    }

    /// Thread `tid` was found to run the vCPU.
    pub fn runs_on(&mut self, files: &Files<'_>, pid: i32, tid: i32) {
        match self.thread {
            Some(thread) if thread == tid => {}
            // It came in place of one that ended: all that it did counts.
            None => self.thread = Some(tid),
            _ => self.moved(files, pid, tid),
        }
    }

    /// Thread `tid` runs the vCPU from now on, and the one before does not. What the thread did
    /// before does not count.
    fn moved(&mut self, files: &Files<'_>, pid: i32, tid: i32) {
        self.leave();
        let mut before = Sink::new(true);
        task::thread(files, &mut self.kept, pid, tid, &mut before);
        self.base = before.values;
        self.thread = Some(tid);
    }

    /// Adds what the thread did so far to what others did before.
    fn leave(&mut self) {
        let [before, last] = &mut self.told;
        for (metric, value) in std::mem::take(last) {
            *before.entry(metric).or_default() += value;
        }
        self.base.clear();
        self.thread = None;
    }

    /// Reads the values of the vCPU's threads. Several threads may run a vCPU one after the other.
    pub fn threads(&mut self, files: &Files<'_>, pid: i32, sink: &mut Sink) {
        let mut now = Sink::new(sink.without_reasons);
        if let Some(tid) = self.thread {
            task::thread(files, &mut self.kept, pid, tid, &mut now);
            if now.values.is_empty() && !files.0.join(format!("proc/{pid}/task/{tid}")).exists() {
                self.leave();
            }
        }
        let why = "which thread runs the vCPU cannot be told: none is seen to sleep in its KVM_RUN \
                   (to see it may take root), and none has the name of a vCPU's";
        for metric in Metric::of(Scope::Thread) {
            if let Some(value) = now.values.get(&metric) {
                let base = self.base.get(&metric).copied().unwrap_or(0);
                self.told[1].insert(metric, value.saturating_sub(base));
            }
            let told = self.told.iter().filter_map(|told| told.get(&metric));
            let sum = told.copied().reduce(|before, last| before + last);
            // What a thread did that is there and cannot be read is not what it did until then.
            let is_read = self.thread.is_none() || now.values.contains_key(&metric);
            let by = match metric {
                Metric::GuestNs => Source::Stat,
                _ => Source::Schedstat,
            };
            let why = now.unknown.get(&metric).map_or(why, |why| why);
            sink.put(metric, by, sum.filter(|_| is_read).ok_or(why));
        }
    }
}

/// A vCPU: its number, its descriptor, and the descriptor of its statistics if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub index: u32,
    pub fd: i32,
    pub stats: Option<i32>,
}

/// Returns the vCPUs of a process, ordered by number.
pub(super) fn rows(has: &Descriptors) -> Vec<Row> {
    let mut rows = Vec::new();
    for vcpus in has.vcpus.chunk_by(|one, next| one.0 == next.0) {
        let index = vcpus[0].0;
        let stats: Vec<i32> =
            has.vcpu_stats.iter().filter(|it| it.0 == index).map(|it| it.1).collect();
        match has.vms.len() {
            // Further descriptors of the same number are duplicates.
            1 => rows.push(Row { index, fd: vcpus[0].1, stats: stats.first().copied() }),
            vms => {
                let told = vms > 1 && stats.len() == vcpus.len();
                rows.extend(vcpus.iter().enumerate().map(|(place, &(_, fd))| {
                    let stats = stats.get(place).copied().filter(|_| told);
                    Row { index, fd, stats }
                }));
            }
        }
    }
    rows
}
