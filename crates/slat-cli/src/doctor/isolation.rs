//! Findings on other load of the CPUs, and on their frequency.

use super::Group::Isolation;
use super::{Change, Evidence, Finding, For, Subject};
use slat_lab::numbers::three_digits;

/// Part of stolen ticks above which the spread of every measurement grows.
const STOLEN: f64 = 0.01;

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        cpus(evidence),
        governor(evidence),
        turbo(evidence),
        smt(evidence),
        isolated(evidence),
        steal(evidence),
        load(evidence),
    ]
}

fn cpus(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "CPUs",
        For::All,
        "vCPUs beyond the CPUs take turns, and whoever holds a lock may be off.",
    );
    match evidence.host.cpu.usable {
        1 => subject.limited(
            "1 that this process may use",
            Change::by_hand("give this host, or this process (taskset, cpuset), another"),
        ),
        count => subject.ok(format!("{count} that this process may use")),
    }
}

fn governor(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "frequency governor",
        For::All,
        "Any but `performance` changes the frequency with the load, in the middle of a run.",
    );
    match evidence.host.cpu.governor.0.as_deref() {
        Some("performance") => subject.ok("performance"),
        Some(other) => {
            subject.limited(other, Change::command("cpupower frequency-set -g performance"))
        }
        None if evidence.is_guest() => subject.limited(
            "unknown to a guest",
            Change::nothing("the hypervisor below sets the frequency"),
        ),
        None => subject.limited(
            "the kernel sets none",
            Change::by_hand("the firmware does: choose its performance profile"),
        ),
    }
}

fn turbo(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "turbo",
        For::All,
        "A boosted frequency depends on heat, and on what the other cores do.",
    );
    let files = evidence.files();
    let folder = "sys/devices/system/cpu";
    let no_turbo = files.number(format!("{folder}/intel_pstate/no_turbo"));
    let boost = files.number(format!("{folder}/cpufreq/boost"));
    match (no_turbo, boost) {
        (Some(0), _) => subject
            .limited("on", Change::command(format!("echo 1 > /{folder}/intel_pstate/no_turbo"))),
        (None, Some(1)) => {
            subject.limited("on", Change::command(format!("echo 0 > /{folder}/cpufreq/boost")))
        }
        (Some(_), _) | (_, Some(_)) => subject.ok("off"),
        (None, None) => subject.limited(
            "unknown",
            Change::nothing(
                "whoever sets the frequency decides it: firmware, or the hypervisor below",
            ),
        ),
    }
}

fn smt(evidence: &Evidence) -> Finding {
    let subject =
        Subject::new(Isolation, "SMT", For::All, "Siblings share a core, its TLBs and caches.");
    match evidence.host.cpu.smt.0.as_deref() {
        Some("on") => {
            subject.limited("on", Change::command("echo off > /sys/devices/system/cpu/smt/control"))
        }
        Some("notsupported" | "notimplemented") if evidence.is_guest() => subject.limited(
            "none that this guest is told of",
            Change::nothing("the hypervisor below places the vCPUs"),
        ),
        Some("notsupported" | "notimplemented") => subject.ok("none"),
        Some(off) => subject.ok(off),
        None => subject.ok("this kernel knows none"),
    }
}

fn isolated(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "isolated CPUs",
        For::Guests,
        "On CPUs that the scheduler leaves alone, nothing but the host's own ticks interrupts a \
         vCPU.",
    );
    let files = evidence.files();
    let isolated = files.text("sys/devices/system/cpu/isolated");
    let quiet = files.text("sys/devices/system/cpu/nohz_full");
    let quiet = quiet.filter(|cpus| !cpus.contains("null"));
    match (isolated, quiet) {
        (Some(cpus), Some(quiet)) => subject.ok(format!("{cpus}, without ticks {quiet}")),
        (Some(cpus), None) => subject.ok(cpus),
        (None, _) => subject.limited("none", isolate(evidence.host.cpu.usable)),
    }
}

/// Returns the change that isolates the upper half of the CPUs; the lower half keeps the system's
/// tasks.
fn isolate(cpus: usize) -> Change {
    let half = match (cpus / 2, cpus - 1) {
        (0, _) => return Change::nothing("the only CPU is the system's, too"),
        (first, last) if first == last => first.to_string(),
        (first, last) => format!("{first}-{last}"),
    };
    Change::by_hand(format!(
        "boot with isolcpus={half} nohz_full={half}, and run `taskset -c {half} slat …`"
    ))
}

fn steal(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "steal",
        For::All,
        "Time that the hypervisor below gave to others, of all since the host came up.",
    );
    let Some(ticks) = evidence.files().ticks().filter(|ticks| ticks.all > 0) else {
        return subject
            .limited("/proc/stat does not tell", Change::nothing("the kernel counts none"));
    };
    let stolen = ticks.stolen as f64 / ticks.all as f64;
    let found = format!("{} %", three_digits(stolen * 100.0));
    match stolen > STOLEN {
        true => subject.limited(
            found,
            Change::by_hand("run when the machine below is quiet, or on a dedicated one"),
        ),
        false => subject.ok(found),
    }
}

fn load(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Isolation,
        "load",
        For::All,
        "Whatever else runs takes CPUs, caches and memory bandwidth.",
    );
    match evidence.files().load() {
        // With a quarter of the CPUs busy, the scheduler soon runs other tasks on any CPU.
        Some(load) if load * 4.0 > evidence.host.cpu.usable as f64 => subject
            .limited(format!("{load} in the last minute"), Change::by_hand("end what else runs")),
        Some(load) => subject.ok(format!("{load} in the last minute")),
        None => subject.limited("/proc/loadavg does not tell", Change::by_hand("mount /proc")),
    }
}
