//! Findings on the kernel's interfaces that tell which pages of a guest were used.

use super::Group::Tracking;
use super::evidence::{Access, SYS_ADMIN};
use super::{Change, Evidence, Finding, For, Subject};
pub use crate::needs::{MGLRU, PAGE_IDLE};

/// Name of the finding on DAMON, the kernel's data access monitor.
const DAMON: &str = "DAMON";

const AGE: For = For::Only(&["age"]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![page_idle(evidence), mglru(evidence), damon(evidence)]
}

fn as_root() -> Change {
    Change::command("sudo slat bench age …")
}

fn page_idle(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Tracking,
        PAGE_IDLE,
        AGE,
        "Marks single pages idle and tells which were used since: each mark is a question to KVM.",
    );
    match evidence.access("sys/kernel/mm/page_idle/bitmap") {
        Access::Absent => subject.missing(
            "no /sys/kernel/mm/page_idle",
            Change::nothing("a kernel with CONFIG_IDLE_PAGE_TRACKING has it"),
        ),
        // The bitmap is indexed by page frame numbers, which the kernel also hides from users
        // without CAP_SYS_ADMIN.
        Access::Readable if evidence.files().is_capable(SYS_ADMIN) => subject.ok("there"),
        _ => subject.limited("there, for root", as_root()),
    }
}

fn mglru(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Tracking,
        MGLRU,
        AGE,
        "Ages a whole control group at a time through /sys/kernel/debug/lru_gen, as reclaim does.",
    );
    const ENABLED: &str = "sys/kernel/mm/lru_gen/enabled";
    let mask = |text: String| {
        let text = text.trim();
        u32::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16)
    };
    let mask = evidence.files().told(ENABLED).map(|text| text.map(mask).transpose());
    let Ok(Ok(mask)) = mask else { return subject.untold(ENABLED) };
    let Some(mask) = mask else {
        return subject.missing(
            "no /sys/kernel/mm/lru_gen",
            Change::nothing("a kernel with CONFIG_LRU_GEN (6.1) has it"),
        );
    };
    let walks = if mask & 2 != 0 { "" } else { ", without walks of page tables" };
    if mask & 1 == 0 {
        return subject.limited("off", Change::command("echo y > /sys/kernel/mm/lru_gen/enabled"));
    }
    match evidence.access("sys/kernel/debug/lru_gen") {
        Access::Readable if mask & 2 == 0 => subject.limited(
            format!("on{walks}"),
            Change::command("echo y > /sys/kernel/mm/lru_gen/enabled"),
        ),
        Access::Readable => subject.ok(format!("on, mask {mask:#06x}")),
        Access::Denied if evidence.files().is_capable(SYS_ADMIN) => {
            let why = super::watch::refusal(evidence, "sys/kernel/debug/lru_gen");
            subject.missing(
                format!("on; its debugfs file is {}", why.unwrap_or_default()),
                super::watch::unlocked(),
            )
        }
        // Only root may enter the folder of debugfs.
        Access::Denied => subject.limited("on; its debugfs file is root's", as_root()),
        Access::Absent if evidence.has_debugfs() && !evidence.files().is_capable(SYS_ADMIN) => {
            subject.limited("on; debugfs is root's", as_root())
        }
        Access::Absent if evidence.has_debugfs() => subject.missing(
            "on, without a file in debugfs",
            Change::nothing("the kernel was built without it, or is locked down"),
        ),
        Access::Absent => subject.limited(
            "on; debugfs is not mounted",
            Change::command("mount -t debugfs none /sys/kernel/debug"),
        ),
    }
}

fn damon(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Tracking,
        DAMON,
        AGE,
        "Samples regions for access; one that runs already clears accessed bits beside any \
         measurement.",
    );
    let folder = "sys/kernel/mm/damon/admin/kdamonds";
    if evidence.access(folder) == Access::Absent {
        return subject.missing(
            "no /sys/kernel/mm/damon",
            Change::nothing("a kernel with CONFIG_DAMON_SYSFS (5.18) has it"),
        );
    }
    let files = evidence.files();
    let runs =
        |name: &String| files.text(format!("{folder}/{name}/state")).as_deref() == Some("on");
    let running = files.names(folder).iter().filter(|name| runs(name)).count();
    match running {
        0 if evidence.files().is_capable(SYS_ADMIN) => subject.ok("there, and no kdamond runs"),
        0 => subject.limited("there, for root", as_root()),
        running => subject.limited(
            format!("{running} kdamond(s) run already"),
            Change::command(
                "for d in /sys/kernel/mm/damon/admin/kdamonds/*/state; do echo off > $d; done",
            ),
        ),
    }
}
