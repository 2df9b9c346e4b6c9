//! Findings on memory, and on the huge pages that can back a guest.

use super::Group::Memory;
use super::evidence::{Access, PTRACE, SYS_ADMIN};
use super::{Change, Evidence, Finding, For, Subject};
use slat_lab::host::HugePool;
use slat_lab::numbers::bytes;

/// Available memory, in bytes, below which guests of the default size disturb the host.
const COMFORTABLE: u64 = 4 << 30;

/// Memory of a guest of the default size, in bytes.
const DEFAULT_GUEST: u64 = 256 << 20;

const BACKED: For = For::Only(&[
    "populate", "dirty-log", "execute", "memory-stress", "memslot", "migrate", "restore",
    "snapshot", "postcopy", "reclaim",
]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        available(evidence),
        transparent(evidence),
        pools(evidence),
        nodes(evidence),
        userfaultfd(evidence),
        ksm(evidence),
        damon_reclaim(evidence),
    ]
}

fn available(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "memory available",
        For::All,
        "A guest that pushes others out measures reclaim; what a control group leaves counts.",
    );
    match evidence.host.memory.available.0 {
        Some(free) if free >= COMFORTABLE => subject.ok(bytes(free)),
        Some(free) => subject.limited(
            bytes(free),
            Change::by_hand("end what uses the rest, or take a smaller --memory"),
        ),
        None => {
            let files = evidence.files();
            let untold = files.available_memory(&files.memory_bounds()).err();
            let file = untold.unwrap_or_else(|| "proc/meminfo".into());
            subject.limited(
                format!("/{} does not tell", file.display()),
                Change::by_hand("mount /proc, or let this user read the file"),
            )
        }
    }
}

fn userfaultfd(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "userfaultfd",
        For::Only(&["restore", "snapshot", "postcopy"]),
        "A handler brings missing pages by it, and it tells which were written; KVM's own faults \
         take more than a user's.",
    );
    const ALLOWED: &str = "sys/vm/unprivileged_userfaultfd";
    match evidence.files().told(format!("proc/{ALLOWED}")) {
        Ok(None) => {
            subject.missing("none", Change::nothing("a kernel with CONFIG_USERFAULTFD has it"))
        }
        Ok(Some(_)) if evidence.files().is_capable(PTRACE) => subject.ok("there"),
        Ok(Some(allowed)) if allowed.trim() == "1" => subject.ok("there, for every user"),
        _ if evidence.access("dev/userfaultfd") == Access::Readable => {
            subject.ok("there, by /dev/userfaultfd")
        }
        _ => subject
            .limited("there, for root", Change::command("sysctl vm.unprivileged_userfaultfd=1")),
    }
}

fn ksm(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "KSM",
        For::Only(&["fork"]),
        "The kernel merges pages of guests that have the same contents; one that merges already \
         takes CPU time beside any measurement.",
    );
    const RUN: &str = "sys/kernel/mm/ksm/run";
    match evidence.files().told(RUN) {
        Ok(None) => subject.missing("none", Change::nothing("a kernel with CONFIG_KSM has it")),
        Ok(Some(run)) if run.trim() == "1" => {
            subject.limited("it runs already", Change::command("echo 0 > /sys/kernel/mm/ksm/run"))
        }
        Ok(Some(_)) if evidence.files().is_capable(SYS_ADMIN) => subject.ok("there, at rest"),
        Ok(Some(_)) => {
            subject.limited("there, for root", Change::command("sudo slat bench fork --way ksm"))
        }
        Err(_) => subject.untold(RUN),
    }
}

fn damon_reclaim(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "DAMON_RECLAIM",
        For::Only(&["reclaim"]),
        "The kernel takes away what was not used lately, by DAMON.",
    );
    const ENABLED: &str = "sys/module/damon_reclaim/parameters/enabled";
    match evidence.files().told(ENABLED) {
        Ok(None) => {
            subject.missing("none", Change::nothing("a kernel with CONFIG_DAMON_RECLAIM has it"))
        }
        Ok(Some(enabled)) if enabled.trim() == "Y" => {
            subject.limited("it runs already", Change::command(format!("echo N > /{ENABLED}")))
        }
        Ok(Some(_)) if evidence.files().is_capable(SYS_ADMIN) => subject.ok("there, at rest"),
        Ok(Some(_)) => subject
            .limited("there, for root", Change::command("sudo slat bench reclaim --way damon")),
        Err(_) => subject.untold(ENABLED),
    }
}

fn transparent(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "transparent huge pages",
        BACKED,
        "--backing 2m asks for them by madvise.",
    );
    const ENABLED: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    // Their size follows that of base pages: 2 MiB is that of 4 KiB only.
    let size = evidence.files().transparent_huge_page().filter(|size| *size != 2 << 20);
    let told = |choice: &str| match size {
        Some(size) => format!("{choice}, of {}", bytes(size)),
        None => choice.to_owned(),
    };
    let change = || Change::command("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    match evidence.host.thp.enabled.0.as_deref() {
        Some(choice @ ("always" | "madvise")) => subject.ok(told(choice)),
        Some(other) => subject.missing(told(other), change()),
        None => match evidence.files().told(ENABLED) {
            Ok(None) => subject.missing(
                "this kernel has none",
                Change::nothing("a kernel with CONFIG_TRANSPARENT_HUGEPAGE has them"),
            ),
            _ => subject.untold(ENABLED),
        },
    }
}

fn pools(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "hugetlb",
        BACKED,
        "--backing hugetlb-SIZE takes huge pages that stay huge, from the pool of that size.",
    );
    const FOLDER: &str = "sys/kernel/mm/hugepages";
    if let Err(folder) = evidence.files().told_names(FOLDER) {
        return subject.untold(folder);
    }
    let told = |pool: &HugePool| Some((pool.page_size, pool.total.0?, pool.free.0?));
    let Some(pools) = evidence.host.hugetlb.iter().map(told).collect::<Option<Vec<_>>>() else {
        return subject.untold(FOLDER);
    };
    let Some((page_size, total, free)) = pools.first() else {
        let change = Change::nothing("processor or kernel lack them");
        return subject.missing("this kernel has no such pools", change);
    };
    let wanted = |page_size: u64| DEFAULT_GUEST.div_ceil(page_size);
    // Pages of the pool that are in use have to stay.
    let pages = total - free.min(total) + wanted(*page_size);
    let change = Change::command(format!(
        "echo {pages} > /{FOLDER}/hugepages-{}kB/nr_hugepages",
        page_size >> 10
    ));
    let each = pools.iter().map(|(page_size, total, free)| {
        let size = match *page_size {
            // Arm has some of 64 KiB.
            small if small < 1 << 20 => format!("{} KiB", small >> 10),
            size => bytes(size),
        };
        format!("{size}: {free} pages free of {total}")
    });
    let found = each.collect::<Vec<_>>().join("; ");
    match pools.iter().any(|(page_size, _, free)| *free >= wanted(*page_size)) {
        true => subject.ok(found),
        false if pools.iter().any(|(.., free)| *free > 0) => subject.limited(found, change),
        false => subject.missing(found, change),
    }
}

fn nodes(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "NUMA",
        For::Guests,
        "Memory of another node is slower, and automatic balancing unmaps pages to see who uses \
         them.",
    );
    const ONLINE: &str = "sys/devices/system/node/online";
    let balancing = evidence.files().number("proc/sys/kernel/numa_balancing");
    match (evidence.host.numa_nodes.0, balancing) {
        (Some(1), _) => subject.ok("one node"),
        (Some(nodes), Some(0)) => subject.limited(
            format!("{nodes} nodes, balancing off"),
            Change::command("slat bench … --cpu-node 0 --memory-node 0"),
        ),
        (Some(nodes), Some(_)) => subject.limited(
            format!("{nodes} nodes, balancing on"),
            Change::command("sysctl kernel.numa_balancing=0"),
        ),
        (Some(nodes), None) => subject.limited(
            format!("{nodes} nodes"),
            Change::command("slat bench … --cpu-node 0 --memory-node 0"),
        ),
        (None, _) => match evidence.files().told(ONLINE) {
            Ok(None) => subject.ok("this kernel knows no nodes"),
            _ => subject.untold(ONLINE),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_have_the_size_that_the_kernel_tells() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("enabled"), "always [madvise] never\n").unwrap();
        for (size, wanted) in [
            (None, "madvise"),
            (Some("2097152\n"), "madvise"),
            (Some("33554432\n"), "madvise, of 32 MiB"),
            (Some("536870912\n"), "madvise, of 512 MiB"),
        ] {
            if let Some(size) = size {
                std::fs::write(folder.join("hpage_pmd_size"), size).unwrap();
            }
            let kvm = Err(slat_kvm::Error::NoKvm);
            let evidence = Evidence::below(root.path().to_owned(), kvm, Vec::new());
            assert_eq!(transparent(&evidence).found, wanted);
        }
    }
}
