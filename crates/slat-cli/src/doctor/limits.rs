//! Findings on control groups and swap, which limit this process, and which memory pressure needs.

use super::Group::Limits;
use super::{Change, Evidence, Finding, For, Subject};
use slat_lab::numbers::{bytes, three_digits};

const PRESSURE: For = For::Only(&["age", "memory-stress"]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![memory_controller(evidence), cpu_quota(evidence), swap(evidence)]
}

fn memory_controller(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Limits,
        "cgroup memory",
        PRESSURE,
        "A limit below the guest's memory makes the host reclaim from it, and MGLRU ages by control \
         group.",
    );
    let files = evidence.files();
    let controllers = files.text("sys/fs/cgroup/cgroup.controllers");
    let has_memory = |list: &String| list.split_whitespace().any(|name| name == "memory");
    match controllers {
        Some(list) if has_memory(&list) => subject.ok("version 2"),
        Some(_) => subject.missing(
            "version 2, without the memory controller",
            Change::by_hand("boot without cgroup_disable=memory, or with cgroup_enable=memory"),
        ),
        None if files.number("sys/fs/cgroup/memory/memory.limit_in_bytes").is_some() => subject
            .limited("version 1", Change::by_hand("boot with systemd.unified_cgroup_hierarchy=1")),
        None => subject.missing(
            "none at /sys/fs/cgroup",
            Change::command("mount -t cgroup2 none /sys/fs/cgroup"),
        ),
    }
}

fn cpu_quota(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Limits,
        "cgroup CPU quota",
        For::All,
        "A quota stops all threads for the rest of each period: waits that nothing measured explains.",
    );
    match evidence.files().cpu_quota() {
        Ok(None) => subject.ok("none"),
        Err(file) => subject.limited(
            format!("/{} does not tell", file.display()),
            Change::by_hand("let this user read the file"),
        ),
        Ok(Some(cpus)) => subject.limited(
            format!("{} CPUs", three_digits(cpus)),
            Change::by_hand(
                "raise the quota of the container or unit (systemctl set-property UNIT CPUQuota=)",
            ),
        ),
    }
}

fn swap(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Limits,
        "swap",
        PRESSURE,
        "A guest's memory is anonymous: without swap none of it can be reclaimed, under any pressure.",
    );
    match evidence.files().swap() {
        None => subject.limited(
            "/proc/swaps does not tell",
            Change::by_hand("let this user read the file"),
        ),
        Some(0) => subject.missing(
            "none",
            Change::command(
                "fallocate -l 4G /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon /swapfile",
            ),
        ),
        Some(total) => subject.ok(bytes(total)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Returns what is found of one subject on a host that has these files.
    fn found(subject: fn(&Evidence) -> Finding, files: &[(&str, &str)]) -> (&'static str, String) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = root.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let kvm = Err(slat_kvm::Error::NoKvm);
        let finding = subject(&Evidence::below(root.path().to_owned(), kvm, Vec::new()));
        (finding.status.word(), finding.found)
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_not_said_to_be_missing() {
        let own = ("proc/self/cgroup", "0::/a\n");
        // A folder in the file's place, as root may read any file.
        let told = found(cpu_quota, &[own, ("sys/fs/cgroup/a/cpu.max/x", "")]);
        assert_eq!(told, ("limited", "/sys/fs/cgroup/a/cpu.max does not tell".to_owned()));
        let told = found(swap, &[own, ("proc/swaps/x", "")]);
        assert_eq!(told, ("limited", "/proc/swaps does not tell".to_owned()));
    }
}
