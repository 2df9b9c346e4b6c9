//! Findings on what `slat watch` can see of the guests that run on this host.

use super::Group::Watch;
use super::evidence::{Access, PTRACE, SYS_ADMIN};
use super::{Change, Evidence, Finding, For, Subject, WATCH};

/// Name of the finding on whether the host can have guests, and of which users they are visible.
pub(super) const SEEN: &str = "guests to watch";

const IT: For = For::Only(&[WATCH]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        seen(evidence),
        counters(evidence),
        events(evidence),
        programs(evidence),
        debugfs(evidence),
        pressure(evidence),
        working_sets(evidence),
    ]
}

/// By which means, as the watch takes them.
fn working_sets(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "working sets of guests",
        IT,
        "How much memory a guest uses within a time, asked for by --working-set, as it changes \
         something in the host.",
    );
    let better = Change::nothing(
        "a kernel with CONFIG_IDLE_PAGE_TRACKING, or from 6.12 on with CONFIG_LRU_GEN, tells more",
    );
    let files = evidence.files();
    let there = |path: &str| files.0.join(path).exists();
    let generations = there("sys/kernel/mm/lru_gen/enabled");
    let newer = files.text("proc/sys/kernel/osrelease").is_some_and(|text| {
        let mut numbers = text.split(['.', '-']).map(|it| it.parse::<u32>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 12)
    });
    let refused = refusal(evidence, "sys/kernel/debug/lru_gen");
    let readable = |path: &str| evidence.access(path) == Access::Readable;
    match files.is_capable(SYS_ADMIN) {
        true if readable("sys/kernel/mm/page_idle/bitmap") => subject.ok("by idle page tracking"),
        true if generations && newer && refused.is_some() => subject.limited(
            format!(
                "a lower bound, by referenced pages (clear_refs); lru_gen is {}",
                refused.unwrap_or_default()
            ),
            unlocked(),
        ),
        true if generations && newer => {
            subject.ok("by generations (lru_gen), of VMMs in control groups of their own")
        }
        true => subject.limited("a lower bound, by referenced pages (clear_refs)", better),
        false => subject.limited("a lower bound, by referenced pages of this user's", as_root()),
    }
}

fn as_root() -> Change {
    Change::command("sudo slat watch")
}

/// Returns why root cannot use a file of debugfs or tracefs, if the kernel refuses it: an attempt
/// tells, or, where the file system is not mounted, how the kernel is locked down.
pub(super) fn refusal(evidence: &Evidence, path: &str) -> Option<String> {
    let locked = evidence.files().choice("sys/kernel/security/lockdown");
    let locked = locked.filter(|how| how != "none");
    match (evidence.access(path), locked) {
        (Access::Readable, _) => None,
        (Access::Denied, None) => Some("refused to root: operation not permitted".to_owned()),
        (Access::Denied, Some(how)) => Some(format!("refused: the kernel is locked down ({how})")),
        // Integrity refuses some files only.
        (Access::Absent, Some(how)) if how == "confidentiality" => {
            Some(format!("refused: the kernel is locked down ({how})"))
        }
        (Access::Absent, _) => None,
    }
}

pub(super) fn unlocked() -> Change {
    Change::by_hand("boot with lockdown=none, or without secure boot")
}

fn seen(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        SEEN,
        IT,
        "A guest is found by the descriptors of its VMM, which its user and root may see.",
    );
    match &evidence.kvm {
        Err(slat_kvm::Error::NoKvm) => {
            subject.missing("no guest without KVM", Change::See(super::kvm::DEVICE))
        }
        _ if evidence.files().is_capable(PTRACE) => subject.ok("all users' are seen"),
        _ => subject.limited("this user's alone are seen", as_root()),
    }
}

fn counters(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "counters of guests",
        IT,
        "Faults and exits of each vCPU, by pidfd_getfd (5.6) of what the VMM holds.",
    );
    // Yama's restriction of ptrace: 0 is none, 1 allows only descendants, 2 only root, 3 no
    // process.
    let restricted = evidence.files().told_number("proc/sys/kernel/yama/ptrace_scope");
    let restricted = match restricted {
        Ok(scope) => scope.unwrap_or(0),
        Err(file) => return subject.untold(file),
    };
    match restricted {
        3.. => subject.missing(
            "ptrace_scope 3: nobody may take a descriptor",
            Change::nothing("it cannot be lowered before the next boot"),
        ),
        0 => subject.ok("where the VMM holds statistics descriptors"),
        _ if evidence.files().is_capable(PTRACE) => {
            subject.ok("where the VMM holds statistics descriptors")
        }
        scope => subject.limited(format!("ptrace_scope {scope}: for root"), as_root()),
    }
}

/// Name of the tracer's file system in /proc/mounts and /proc/filesystems.
const TRACER: &str = "tracefs";

fn events(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "KVM's tracepoints",
        IT,
        "Times in faults and other exits, and what the host takes back: kvm_exit, \
         kvm_unmap_hva_range.",
    );
    let without = evidence.files().0.join("sys/module/kvm_pvm").exists();
    let is_root = evidence.files().is_capable(SYS_ADMIN);
    if let Some(why) = refusal(evidence, "sys/kernel/tracing/events/kvm/kvm_exit/id")
        && is_root
    {
        // Programs that count, and read no field of an event, need no file of the tracer's.
        let found = format!("exits to the VMM and logged pages at most; the others are {why}");
        return subject.limited(found, unlocked());
    }
    match is_root {
        _ if !evidence.may_have(TRACER) => subject.missing(
            "this kernel has no tracefs",
            Change::nothing("a kernel with CONFIG_FTRACE and CONFIG_TRACEPOINTS has it"),
        ),
        false => subject.limited("for root", as_root()),
        true if without => subject.limited(
            "what the host takes back, and exits to the VMM; kvm_exit never fires under kvm_pvm",
            Change::nothing("a host with hardware virtualisation tells times in faults"),
        ),
        true => subject.ok("as far as this kernel's KVM has them"),
    }
}

fn programs(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "eBPF",
        IT,
        "Sums and histograms of tracepoints in the kernel; without, perf counts events of threads.",
    );
    // This file exists only if the kernel has bpf(2).
    let there = evidence.files().told("proc/sys/kernel/unprivileged_bpf_disabled") != Ok(None);
    let locked = evidence.files().choice("sys/kernel/security/lockdown");
    match evidence.files().is_capable(SYS_ADMIN) {
        _ if !there => subject.missing(
            "this kernel has none",
            Change::nothing("a kernel with CONFIG_BPF_SYSCALL and CONFIG_BPF_EVENTS has it"),
        ),
        false => subject.limited("for root", as_root()),
        true if locked.as_deref() == Some("confidentiality") => subject.limited(
            "counts alone: the kernel is locked down (confidentiality), and lets none read it",
            Change::by_hand("boot with lockdown=integrity, or without"),
        ),
        true => subject.ok("for root"),
    }
}

fn debugfs(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "KVM's debugfs",
        IT,
        "Sums of a VM whose VMM holds no statistics descriptors, and which thread runs which vCPU.",
    );
    let is_mounted = evidence.has_debugfs();
    let is_root = evidence.files().is_capable(SYS_ADMIN);
    let folder = "sys/kernel/debug/kvm";
    let names = evidence.files().names(folder).into_iter().map(|name| format!("{folder}/{name}"));
    let mut files: Vec<_> = names.filter(|it| !evidence.files().0.join(it).is_dir()).collect();
    if files.is_empty() {
        files.push(format!("{folder}/file"));
    }
    if let Some(why) = files.iter().find_map(|file| refusal(evidence, file))
        && is_root
    {
        // A lockdown refuses what somebody may write, such as counters.
        return match files.iter().any(|file| evidence.access(file) == Access::Readable) {
            true => {
                subject.limited(format!("a part of its files; the others are {why}"), unlocked())
            }
            false => subject.missing(why, unlocked()),
        };
    }
    match is_root {
        _ if !evidence.may_have("debugfs") => subject.missing(
            "this kernel has none",
            Change::nothing("a kernel with CONFIG_DEBUG_FS has it"),
        ),
        true if is_mounted => subject.ok("mounted"),
        true => subject.ok("not mounted; the watch mounts it for itself alone"),
        false => subject.limited("for root", as_root()),
    }
}

fn pressure(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Watch,
        "pressure of guests",
        IT,
        "How long a VMM's control group waited for memory: memory.pressure, of version 2.",
    );
    let counts = match evidence.files().told("proc/pressure/memory") {
        Ok(text) => text.is_some(),
        Err(file) => return subject.untold(file),
    };
    let groups = ["sys/fs/cgroup", "sys/fs/cgroup/unified"];
    let controllers = groups.map(|group| format!("{group}/cgroup.controllers"));
    match (counts, controllers.iter().any(|file| evidence.files().0.join(file).exists())) {
        (false, _) => subject.missing(
            "not counted",
            Change::by_hand("boot with psi=1; a kernel with CONFIG_PSI has it"),
        ),
        (true, false) => subject.missing(
            "no control groups of version 2",
            Change::by_hand("boot with systemd.unified_cgroup_hierarchy=1"),
        ),
        (true, true) => subject.ok("where the VMM has a control group of its own"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Status;
    use slat_lab::fake::files as fake;

    #[test]
    fn what_a_lockdown_refuses_is_told_in_place_of_ok() {
        let root = fake(&[
            ("proc/self/status", "CapEff:\t000001ffffffffff\n"),
            ("proc/sys/kernel/osrelease", "6.12.1\n"),
            ("proc/filesystems", "nodev\tdebugfs\nnodev\ttracefs\n"),
            ("proc/mounts", "debugfs /sys/kernel/debug debugfs rw 0 0\n"),
            ("sys/kernel/mm/lru_gen/enabled", "0x0007\n"),
            ("sys/kernel/security/lockdown", "none integrity [confidentiality]\n"),
        ]);
        let kvm = Err(slat_kvm::Error::NoKvm);
        let evidence = Evidence::below(root.path().to_owned(), kvm, Vec::new());
        for finding in [events(&evidence), debugfs(&evidence), working_sets(&evidence)] {
            let told = format!("{finding:?}");
            assert!(told.contains("locked down (confidentiality)"), "{told}");
        }
        assert_eq!(debugfs(&evidence).status, Status::Missing);
        let kvm = root.path().join("sys/kernel/debug/kvm");
        std::fs::create_dir_all(kvm.join("7-4")).unwrap();
        std::fs::write(kvm.join("blocking"), "0\n").unwrap();
        // A link to itself, as root may open any file.
        std::os::unix::fs::symlink("exits", kvm.join("exits")).unwrap();
        let part = debugfs(&evidence);
        assert_eq!(part.status, Status::Limited);
        assert!(part.found.contains("a part of its files; the others are refused"), "{part:?}");
    }
}
