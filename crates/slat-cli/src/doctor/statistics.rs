//! Findings on counters and clocks that say where time went.

use super::Group::Statistics;
use super::evidence::{Access, PERFMON, SYS_ADMIN};
use super::{Change, Evidence, Finding, For, Subject};

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![binary(evidence), debugfs(evidence), schedstat(evidence), perf(evidence), pmu(evidence)]
}

fn binary(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Statistics,
        "KVM binary stats",
        For::Guests,
        "KVM_CAP_BINARY_STATS_FD: faults, exits, zapped and split pages of one guest, without \
         root.",
    );
    match &evidence.kvm {
        Ok(kvm) if kvm.binary_stats => subject.ok("yes"),
        Ok(_) => subject.missing("no", Change::nothing("a newer kernel has it: 5.14")),
        Err(_) => subject.missing("not known without KVM", Change::See(super::kvm::DEVICE)),
    }
}

fn debugfs(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Statistics,
        "debugfs",
        For::Only(&["age"]),
        "MGLRU is driven through it; what it says of guests, binary stats say, too.",
    );
    let lockdown = evidence.files().choice("sys/kernel/security/lockdown");
    if let Some(level @ ("integrity" | "confidentiality")) = lockdown.as_deref() {
        return subject.limited(
            format!("restricted: the kernel is locked down ({level})"),
            Change::by_hand("switch Secure Boot off, or boot without lockdown="),
        );
    }
    match (evidence.has_debugfs(), evidence.access("sys/kernel/debug")) {
        (true, Access::Readable) if evidence.files().is_capable(SYS_ADMIN) => subject.ok("mounted"),
        (true, _) => subject.limited("mounted, for root", Change::command("sudo slat bench age …")),
        (false, _) if evidence.may_have("debugfs") => subject
            .missing("not mounted", Change::command("mount -t debugfs none /sys/kernel/debug")),
        (false, _) => subject.missing(
            "this kernel has none",
            Change::nothing("a kernel with CONFIG_DEBUG_FS has it"),
        ),
    }
}

fn schedstat(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Statistics,
        "schedstat",
        For::Guests,
        "How long a vCPU's thread was ready and did not run: a stall that is nobody's page tables.",
    );
    // If all three are 0, the kernel has the file and does not count.
    match evidence.files().text("proc/self/schedstat").as_deref() {
        Some("0 0 0") => subject.missing(
            "there, and not counted",
            Change::command("sysctl kernel.task_delayacct=1 kernel.sched_schedstats=1"),
        ),
        Some(_) => subject.ok("counted for each thread"),
        None => subject.missing(
            "no /proc/self/schedstat",
            Change::nothing("a kernel with CONFIG_SCHED_INFO has it"),
        ),
    }
}

fn perf(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Statistics,
        "perf",
        For::Guests,
        "Profiles of the kernel below a scenario: perf record -g -- slat bench …",
    );
    const PARANOID: &str = "proc/sys/kernel/perf_event_paranoid";
    let paranoid = match evidence.files().told(PARANOID) {
        Ok(text) => text.map(|text| text.trim().parse::<i32>()),
        Err(file) => return subject.untold(file),
    };
    let Ok(paranoid) = paranoid.transpose() else { return subject.untold(PARANOID) };
    let may = evidence.files().is_capable(PERFMON) || evidence.files().is_capable(SYS_ADMIN);
    match paranoid {
        None => subject.missing(
            "this kernel has no perf events",
            Change::nothing("a kernel with CONFIG_PERF_EVENTS has them"),
        ),
        Some(level) if may || level <= 1 => subject.ok(format!("perf_event_paranoid {level}")),
        Some(level) => subject.limited(
            format!("perf_event_paranoid {level}: not of the kernel, for this user"),
            Change::command("sysctl kernel.perf_event_paranoid=1"),
        ),
    }
}

fn pmu(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Statistics,
        "hardware counters",
        For::Guests,
        "Cycles, instructions, TLB misses. Without them perf has its clock.",
    );
    let is_cpu =
        |name: &&String| *name == "cpu" || name.starts_with("cpu_") || name.starts_with("armv8");
    let devices = evidence.files().names("sys/bus/event_source/devices");
    match devices.iter().find(is_cpu) {
        Some(name) => subject.ok(format!("PMU {name}")),
        None if evidence.is_guest() => subject.missing(
            "no PMU",
            Change::by_hand(
                "give this guest a virtual PMU in the hypervisor below (QEMU: -cpu host,pmu=on)",
            ),
        ),
        None => {
            subject.missing("no PMU", Change::nothing("the kernel knows none for this processor"))
        }
    }
}
