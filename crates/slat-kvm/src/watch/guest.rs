//! The guests of one process, observed from outside: attach, read, release.
//!
//! A process nearly always has one VM. If it has several, KVM does not show other processes which
//! vCPU belongs to which VM. Then all of them are one guest here, and its vCPUs are distinguished
//! by number and order.

mod vcpu;

use self::vcpu::{Vcpu, rows};
use crate::procfs::Files;
use crate::stats::Changes;
use crate::watch::debugfs::{self, Debugfs, VmFolder};
use crate::watch::events::times::Stalls;
use crate::watch::find::{self, Descriptors, GuestProcess, NotFound};
use crate::watch::held::{Process, StatsReadings};
use crate::watch::metric::{Metric, Scope, Sink, Source, Values};
use crate::watch::task::{self, OpenFiles};
use crate::watch::traced::{SPARE, TraceCounts};
use serde::Serialize;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// Why the memory of a guest is unknown that has private memory.
const PRIVATE: &str = "the guest has private memory (guest_memfd or secretmem), which is in no \
                       figure of the process";

/// Why the working set of a guest is unknown that has pages of hugetlbfs.
const HUGETLB: &str = "the guest has pages of hugetlbfs, which no means of a working set looks at";

/// Why a working set is unknown.
const UNASKED: &str = "not measured, as every method changes the host; ask by --working-set TIME";

/// Whether a guest still exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The guest exists.
    Runs,
    /// The guest's process ended.
    ProcessEnded,
    /// The process runs, but it closed the VM or created another one.
    VmClosed,
}

/// The values that are known at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Values of the guest. Values of vCPUs are summed.
    pub guest: Values,
    /// Values of each vCPU.
    pub vcpus: Vec<Values>,
}

impl Reading {
    /// Returns whether both readings have values of the same metrics.
    pub(crate) fn knows_what(&self, other: &Self) -> bool {
        let of = |it: &Self| it.vcpus.len();
        let mut pairs = self.vcpus.iter().zip(&other.vcpus);
        self.guest.keys().eq(other.guest.keys())
            && of(self) == of(other)
            && pairs.all(|(one, other)| one.keys().eq(other.keys()))
    }
}

/// The sources of the known values, and the reasons for the unknown ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Knowledge {
    /// The source of each known metric.
    pub sources: BTreeMap<Metric, Source>,
    /// The reason why each other metric is unknown.
    pub unknown: BTreeMap<Metric, String>,
}

/// A guest that is watched. Dropping it closes all of its descriptors.
#[derive(Debug)]
pub struct Guest {
    found: GuestProcess,
    process: Result<Process, String>,
    vms: usize,
    vm: Vec<StatsReadings>,
    why_no_vm: String,
    folders: Result<Vec<VmFolder>, String>,
    vcpus: Vec<Vcpu>,
    huge: Option<u64>,
    huge_again: Instant,
    /// The process has pages of hugetlbfs.
    hugetlb: bool,
    working_set: Result<(u64, Source), String>,
    kept: OpenFiles,
    readings: u64,
    /// KVM's counters as the VMM tells them, or why it does not, if it was asked.
    told: Option<Result<BTreeMap<String, u64>, String>>,
}

/// `Guest::read` looks for reasons in each of the first readings, and then in one of `REASONS`.
const REASONS: u64 = 16;

impl Guest {
    /// Attaches to a guest: takes the statistics that it may take, and finds the vCPUs' threads.
    pub fn attach(
        files: &Files<'_>,
        debugfs: &Result<Debugfs, String>,
        found: GuestProcess,
    ) -> Self {
        let process = Process::open(found.pid).map_err(|error| format!("pidfd_open: {error}"));
        let folders = debugfs.as_ref().map_err(Clone::clone).and_then(|it| it.of(files, found.pid));
        let has = &found.has;
        let (mut vm, mut why_no_vm) = (Vec::new(), String::new());
        // Several descriptors of statistics may belong to one VM.
        let theirs = match (has.vms.len(), has.vm_stats.len()) {
            (1, 1..) => &has.vm_stats[..1],
            (vms, stats) if vms == stats => &has.vm_stats[..],
            _ => &[],
        };
        match &process {
            Ok(process) => {
                let taken = theirs.iter().map(|fd| process.statistics(*fd));
                let asked = has.vms.iter().map(|fd| process.ask(*fd));
                let all: Result<Vec<StatsReadings>, String> = match theirs.is_empty() {
                    false => taken.collect(),
                    true => asked.collect(),
                };
                match all {
                    Ok(all) => vm = all,
                    Err(why) => why_no_vm = why,
                }
            }
            Err(why) => why_no_vm.clone_from(why),
        }
        let mut told = BTreeMap::new();
        if let Ok([folder]) = folders.as_deref() {
            let each = has.vcpus.iter();
            told.extend(
                each.filter_map(|(vcpu, _)| Some((*vcpu, debugfs::thread(folder, *vcpu)?)))
                    .filter(|(_, tid)| is_thread(files, found.pid, *tid)),
            );
        }
        let mut threads = match has.vcpus.iter().all(|(vcpu, _)| told.contains_key(vcpu)) {
            true => BTreeMap::new(),
            false => find::threads(files, &found),
        };
        threads.extend(told);
        let vcpus = rows(has).into_iter().map(|row| {
            // vCPUs of several VMs have the same numbers.
            let thread = threads.get(&row.index).copied().filter(|_| has.vms.len() == 1);
            Vcpu::new(&process, row, thread)
        });
        let vcpus = vcpus.collect();
        let vms = has.vms.len();
        let (huge, huge_again) = (None, Instant::now());
        let working_set = Err(UNASKED.to_owned());
        let (kept, readings) = Default::default();
        Self {
            process,
            vms,
            vm,
            why_no_vm,
            folders,
            vcpus,
            found,
            huge,
            huge_again,
            hugetlb: false,
            working_set,
            kept,
            readings,
            told: None,
        }
    }

    /// Returns the guest's process.
    pub fn pid(&self) -> i32 {
        self.found.pid
    }

    /// Returns the guest's process, as it was found last.
    pub fn found(&self) -> &GuestProcess {
        &self.found
    }

    /// Returns the number of VMs that the process has open.
    pub fn vms(&self) -> usize {
        self.vms
    }

    /// Returns the numbers of the vCPUs, and the threads that run them, where these are known.
    pub fn vcpus(&self) -> impl Iterator<Item = (u32, Option<i32>)> {
        self.vcpus.iter().map(|vcpu| (vcpu.index, vcpu.thread))
    }

    /// Returns a descriptor that becomes ready when the process ends.
    pub(crate) fn ends(&self) -> Option<BorrowedFd<'_>> {
        self.process.as_ref().ok().map(AsFd::as_fd)
    }

    /// Returns whether the guest still exists.
    pub fn state(&self, files: &Files<'_>) -> State {
        let process = self.process.as_ref().ok();
        // A VMM keeps a vCPU's statistics open as long as the vCPU, but may open a VM's for one
        // query.
        let vcpus = self.vcpus.iter().filter_map(|vcpu| vcpu.held.as_ref().ok());
        let held = vcpus.chain(&self.vm).next();
        // A process that ended has no file open.
        match process.zip(held).and_then(|(process, held)| process.still_has(held)) {
            Some(true) => return State::Runs,
            _ if self.has_ended() => return State::ProcessEnded,
            Some(false) => return State::VmClosed,
            None => {}
        }
        // Without a descriptor, the VM's folder tells it from one that was made in its place.
        if let Ok(folders) = &self.folders
            && !folders.iter().all(VmFolder::is_there)
        {
            return match find::descriptors(files, self.found.pid) {
                Err(NotFound::NoProcess) => State::ProcessEnded,
                _ => State::VmClosed,
            };
        }
        let is_vm = |fd: &i32| {
            let link = files.0.join(format!("proc/{}/fd/{fd}", self.found.pid));
            std::fs::read_link(link).is_ok_and(|name| name.as_os_str() == "anon_inode:kvm-vm")
        };
        if self.found.has.vms.iter().any(is_vm) {
            return State::Runs;
        }
        match find::descriptors(files, self.found.pid) {
            Err(NotFound::NoProcess) => State::ProcessEnded,
            // What the process has open cannot be seen any more, which does not close it.
            Err(NotFound::Denied) => State::Runs,
            _ => State::VmClosed,
        }
    }

    /// Finds vCPUs that the VMM created since the attach, and threads that were unknown so far.
    /// Returns whether the process has other VMs than before.
    pub(crate) fn look_again(
        &mut self,
        files: &Files<'_>,
        debugfs: &Result<Debugfs, String>,
        has: &Descriptors,
    ) -> bool {
        let there = self.folders.as_ref().map(|it| it.iter().all(VmFolder::is_there));
        let is_held = !self.vm.is_empty() || self.vcpus.iter().any(|vcpu| vcpu.held.is_ok());
        // The VMM may close one of several descriptors of a VM. A folder stays as long as its VM,
        // and the VM as long as it is held here.
        let known = self.folders.as_ref().is_ok_and(|it| it.len() == self.vms) && !is_held;
        let same = match there {
            Ok(false) => false,
            Ok(true) if known => has.vms.len() == self.vms,
            _ => has.vms == self.found.has.vms,
        };
        if !same {
            return true;
        }
        // Which VM a folder is of may be known only once a vCPU has run.
        if let (Ok(debugfs), Ok(folders)) = (debugfs, &mut self.folders)
            && folders.len() < self.vms
            && let Ok(now) = debugfs.of(files, self.found.pid)
        {
            *folders = now;
        }
        self.found.has.clone_from(has);
        let mut known: Vec<u32> = self.vcpus.iter().map(|vcpu| vcpu.index).collect();
        for row in rows(&self.found.has) {
            if let Some(place) = known.iter().position(|index| *index == row.index) {
                known.swap_remove(place);
                continue;
            }
            let mut vcpu = Vcpu::new(&self.process, row, None);
            vcpu.held = vcpu.held.map(StatsReadings::since_its_beginning);
            self.vcpus.push(vcpu);
        }
        if self.vms == 1 {
            let pid = self.found.pid;
            // KVM knows also a thread that never sleeps in KVM_RUN.
            let only = only(&self.folders);
            let running = find::running(files, &self.found);
            for vcpu in &mut self.vcpus {
                let told = only.and_then(|folder| debugfs::thread(folder, vcpu.index));
                let told = told.filter(|tid| is_thread(files, pid, *tid));
                if let Some(tid) = told.or_else(|| running.get(&vcpu.index).copied()) {
                    vcpu.runs_on(files, pid, tid);
                }
            }
            if self.vcpus.iter().any(|vcpu| vcpu.thread.is_none()) {
                let threads = find::threads(files, &self.found);
                for vcpu in self.vcpus.iter_mut().filter(|vcpu| vcpu.thread.is_none()) {
                    if let Some(tid) = threads.get(&vcpu.index) {
                        vcpu.runs_on(files, pid, *tid);
                    }
                }
            }
        }
        false
    }

    /// Returns why no figure of the process has all of the guest's used memory, if that is so.
    pub(crate) fn unseen(&self) -> Option<&'static str> {
        let private = self.found.has.private_memory.then_some(PRIVATE);
        private.or(self.hugetlb.then_some(HUGETLB))
    }

    /// Returns whether the process is known to have ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.process.as_ref().is_ok_and(Process::has_ended)
    }

    /// Reads all values, including those of tracepoints.
    ///
    /// `share` is the number of guests that share the time for expensive reads.
    pub(crate) fn read(
        &mut self,
        files: &Files<'_>,
        traced: &TraceCounts,
        share: u32,
    ) -> (Reading, Knowledge) {
        let pid = self.found.pid;
        let without_reasons = self.readings >= 4 && !self.readings.is_multiple_of(REASONS);
        self.readings += 1;
        let mut sinks = Vec::new();
        for vcpu in &mut self.vcpus {
            let mut sink = Sink::new(without_reasons);
            if self.vms == 1 && vcpu.thread.is_none() {
                let of_kvm = || only(&self.folders).and_then(|it| debugfs::thread(it, vcpu.index));
                let told = traced.thread(pid, vcpu.index).or_else(of_kvm);
                if let Some(tid) = told.filter(|tid| is_thread(files, pid, *tid)) {
                    vcpu.runs_on(files, pid, tid);
                }
            }
            vcpu.tids.extend(vcpu.thread.filter(|tid| !vcpu.tids.contains(tid)));
            match vcpu.tids.is_empty() {
                false => traced.vcpu(pid, Some(&vcpu.tids), &mut sink),
                true => Metric::of(Scope::Traced)
                    .for_each(|metric| sink.missing(metric, "which thread runs it is not known")),
            }
            match &mut vcpu.held {
                Ok(held) => statistics(std::slice::from_mut(held), Scope::Vcpu, &mut sink),
                Err(why) => {
                    Metric::of(Scope::Vcpu).for_each(|metric| sink.missing(metric, &*why));
                }
            }
            vcpu.threads(files, pid, &mut sink);
            sinks.push(sink);
        }
        let mut guest = Sink::new(without_reasons);
        for metric in Metric::of(Scope::Vcpu).chain(Metric::of(Scope::Thread)) {
            sum(metric, &sinks, &mut guest);
        }
        match self.vm.is_empty() {
            false => statistics(&mut self.vm, Scope::Vm, &mut guest),
            true => {
                let why = &self.why_no_vm;
                Metric::of(Scope::Vm).for_each(|metric| guest.missing(metric, why));
            }
        }
        // debugfs may have what no descriptor has: it has sums over vCPUs, too.
        for metric in Metric::of(Scope::Vcpu).chain(Metric::of(Scope::Vm)) {
            if !guest.values.contains_key(&metric) {
                let found = match &self.folders {
                    // The counts of a part of the VMs are no counts of the guest.
                    Ok(folders) if !folders.is_empty() && folders.len() != self.vms => {
                        Err("debugfs does not show which of its VMs are this process's".to_owned())
                    }
                    Ok(folders) => debugfs::sum(folders, metric.counters()),
                    Err(why) => Err(why.clone()),
                };
                guest.put(metric, Source::Debugfs, found);
            }
            if let Some(told) = &self.told
                && !guest.values.contains_key(&metric)
            {
                let sum = told.as_ref().map_err(Clone::clone).and_then(|counters| {
                    let known = metric.counters().iter().filter_map(|name| counters.get(*name));
                    let lacks = || "QEMU tells no such counter (query-stats)".to_owned();
                    known.copied().reduce(|sum, one| sum + one).ok_or_else(lacks)
                });
                guest.put(metric, Source::QueryStats, sum);
            }
        }
        if Instant::now() >= self.huge_again {
            let began = Instant::now();
            self.huge = task::huge(files, pid);
            self.huge_again = Instant::now() + began.elapsed() * SPARE * share * share.min(4);
        }
        let private = self.found.has.private_memory.then_some(PRIVATE);
        let hugetlb = task::process(files, &mut self.kept, pid, self.huge, private, &mut guest);
        self.hugetlb = hugetlb > 0;
        match &self.working_set {
            Ok((bytes, by)) => guest.put(Metric::WorkingSetBytes, *by, Ok::<_, &str>(*bytes)),
            Err(why) => guest.missing(Metric::WorkingSetBytes, why),
        }
        // Over all threads of the process, so that a thread counts even if its vCPU is unknown.
        traced.vcpu(pid, None, &mut guest);
        traced.guest(pid, &mut guest);
        let knowledge = Knowledge { sources: guest.sources, unknown: guest.unknown };
        let vcpus = sinks.into_iter().map(|sink| sink.values).collect();
        (Reading { guest: guest.values, vcpus }, knowledge)
    }

    /// Takes KVM's counters of the guest from its VMM, for metrics without another source.
    pub(crate) fn take_told(&mut self, told: Result<BTreeMap<String, u64>, String>) {
        self.told = Some(told);
    }

    /// Takes the estimate of the guest's working set.
    pub(crate) fn take_working_set(&mut self, working_set: Result<(u64, Source), String>) {
        self.working_set = working_set;
    }

    /// Returns how long the guest and each vCPU were out of the guest, by reason.
    pub(crate) fn stalls(&self, traced: &TraceCounts) -> (Stalls, Vec<Stalls>) {
        let pid = self.found.pid;
        let each = self.vcpus.iter().map(|vcpu| traced.stalls(pid, Some(&vcpu.tids)));
        (traced.stalls(pid, None), each.collect())
    }

    /// Returns all counters of the VM and of each vCPU that changed since the attach, by the
    /// kernel's names.
    pub fn changes(&self) -> (Changes, Vec<Changes>) {
        let mut vm = Changes::new();
        for (name, change) in self.vm.iter().flat_map(StatsReadings::changes) {
            *vm.entry(name).or_default() += change;
        }
        let changes =
            |vcpu: &Vcpu| vcpu.held.as_ref().map(StatsReadings::changes).unwrap_or_default();
        (vm, self.vcpus.iter().map(changes).collect())
    }
}

/// Returns the folder of a process that has one VM.
fn only(folders: &Result<Vec<VmFolder>, String>) -> Option<&VmFolder> {
    match folders.as_deref() {
        Ok([folder]) => Some(folder),
        _ => None,
    }
}

/// Returns whether the process has this thread, so that a number of KVM's is not that of a thread
/// that ended.
fn is_thread(files: &Files<'_>, pid: i32, tid: i32) -> bool {
    files.0.join(format!("proc/{pid}/task/{tid}")).exists()
}

/// Reads KVM's statistics, summed over files.
fn statistics(held: &mut [StatsReadings], scope: Scope, sink: &mut Sink) {
    let read = held.iter_mut().try_for_each(StatsReadings::read);
    for metric in Metric::of(scope) {
        let sum: Option<u64> = held.iter().map(|held| held.sum(metric.counters())).sum();
        let lacks = || format!("this kernel's KVM has no {}", metric.counters().join(" or "));
        let value = match &read {
            Ok(()) => sum.ok_or_else(lacks),
            Err(error) => Err(error.to_string()),
        };
        sink.put(metric, Source::BinaryStatistics, value);
    }
}

/// Puts the sum over vCPUs, if each vCPU has a value.
fn sum(metric: Metric, sinks: &[Sink], guest: &mut Sink) {
    let sum: Option<u64> = sinks.iter().map(|sink| sink.values.get(&metric).copied()).sum();
    let by = sinks.first().and_then(|sink| sink.sources.get(&metric));
    match sum.zip(by) {
        Some((sum, by)) => guest.put(metric, *by, Ok::<_, &str>(sum)),
        None => {
            let why = sinks.iter().find_map(|sink| sink.unknown.get(&metric));
            guest.missing(metric, why.map_or("the guest has no vCPU yet", |why| why));
        }
    }
}

#[cfg(test)]
mod tests;
