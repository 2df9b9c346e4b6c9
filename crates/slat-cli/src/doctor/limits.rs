//! Findings on control groups and swap, which limit this process, and which memory pressure needs.

use super::Group::Limits;
use super::{Change, Evidence, Finding, For, Subject};
use slat_kvm::procfs::Version;
use slat_lab::numbers::{bytes, three_digits};
use std::path::PathBuf;

const PRESSURE: For = For::Only(&["age", "memory-stress", "reclaim"]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![memory_controller(evidence), cpu_quota(evidence), swap(evidence)]
}

fn memory_controller(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Limits,
        "cgroup memory",
        PRESSURE,
        "A limit below the guest's memory makes the host reclaim from it, and MGLRU ages by \
         control group.",
    );
    let files = evidence.files();
    let none = (Version::Two, Vec::new());
    let groups = files.control_groups("memory", "memory.limit_in_bytes");
    let (version, folders) = groups.map_or(none, |groups| (groups.version, groups.folders));
    if version == Version::One {
        let change = Change::by_hand("boot with systemd.unified_cgroup_hierarchy=1");
        return subject.limited("version 1", change);
    }
    let has_memory = |list: String| list.split_whitespace().any(|name| name == "memory");
    let controllers = |group: &PathBuf| files.told(group.join("cgroup.controllers"));
    let lists: Result<Vec<_>, _> = folders.iter().map(controllers).collect();
    let lists = match lists {
        Ok(lists) => lists.into_iter().flatten().map(has_memory).collect::<Vec<_>>(),
        Err(file) => return subject.untold(file),
    };
    // This process's own group is the first.
    match lists.first() {
        Some(true) => subject.ok("version 2"),
        Some(false) if lists.contains(&true) => subject.limited(
            format!("version 2, without the memory controller in /{}", folders[0].display()),
            Change::by_hand("run it in a group of its own: systemd-run --scope -p Delegate=yes …"),
        ),
        Some(false) => subject.missing(
            "version 2, without the memory controller",
            Change::by_hand("boot without cgroup_disable=memory, or with cgroup_enable=memory"),
        ),
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
        "A quota stops all threads for the rest of each period: waits that nothing measured \
         explains.",
    );
    match evidence.files().cpu_quota() {
        Ok(None) => subject.ok("none"),
        Err(file) => subject.untold(file),
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
        "A guest's memory is anonymous: without swap none of it can be reclaimed, under any \
         pressure.",
    );
    match evidence.files().swap() {
        None => subject.untold("proc/swaps"),
        Some(0) => subject.missing(
            "none",
            Change::command(
                "fallocate -l 4G /swapfile && chmod 600 /swapfile && mkswap /swapfile && swapon \
                 /swapfile",
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
    fn the_memory_controller_is_that_of_the_processs_own_group() {
        const ROOT: (&str, &str) = ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        let own = ("proc/self/cgroup", "0::/a\n");
        let with = |list| ("sys/fs/cgroup/a/cgroup.controllers", list);
        let of = |files: &[_]| found(memory_controller, files);
        assert_eq!(of(&[own, ROOT, with("memory\n")]), ("ok", "version 2".to_owned()));
        let without = "version 2, without the memory controller";
        let not_in_own = ("limited", format!("{without} in /sys/fs/cgroup/a"));
        assert_eq!(of(&[own, ROOT, with("cpu\n")]), not_in_own);
        assert_eq!(of(&[own, ROOT, with("\n")]), not_in_own);
        // The group is mounted elsewhere, and the usual place has another one.
        let elsewhere = [
            ("proc/self/mountinfo", "31 30 0:28 / /two rw - cgroup2 none rw\n"),
            ("two/a/cgroup.controllers", "cpu\n"),
            ("two/cgroup.controllers", "cpu\n"),
        ];
        let files: Vec<_> = [own, ROOT].into_iter().chain(elsewhere).collect();
        assert_eq!(of(&files), ("missing", without.to_owned()));
        // Hybrid: version 1 has the controller, wherever it is mounted.
        let hybrid = [
            ("proc/self/cgroup", "4:memory:/a\n0::/a\n"),
            ("proc/self/mountinfo", "31 30 0:28 / /mem rw - cgroup cgroup rw,memory\n"),
            ("mem/a/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/unified/a/cgroup.controllers", "\n"),
        ];
        assert_eq!(of(&hybrid), ("limited", "version 1".to_owned()));
        assert_eq!(of(&[own]), ("missing", "none at /sys/fs/cgroup".to_owned()));
        let (status, told) = of(&[own, ROOT, ("sys/fs/cgroup/a/cgroup.controllers/x", "")]);
        assert_eq!(status, "limited");
        assert_eq!(told, "/sys/fs/cgroup/a/cgroup.controllers does not tell");
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
