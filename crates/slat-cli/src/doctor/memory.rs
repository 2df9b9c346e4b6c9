//! Findings on memory, and on the huge pages that can back a guest.

use super::Group::Memory;
use super::{Change, Evidence, Finding, For, Subject};
use slat_lab::numbers::bytes;

/// Available memory, in bytes, below which guests of the default size disturb the host.
const COMFORTABLE: u64 = 4 << 30;

/// Memory of a guest of the default size, in bytes.
const DEFAULT_GUEST: u64 = 256 << 20;

const BACKED: For =
    For::Only(&["populate", "dirty-log", "execute", "memory-stress", "memslot", "migrate"]);

pub(super) fn findings(evidence: &Evidence) -> Vec<Finding> {
    vec![
        available(evidence),
        transparent(evidence),
        pool(evidence, "hugetlb 2m", 2 << 20),
        pool(evidence, "hugetlb 1g", 1 << 30),
        nodes(evidence),
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

fn transparent(evidence: &Evidence) -> Finding {
    let subject = Subject::new(
        Memory,
        "transparent huge pages",
        BACKED,
        "--backing 2m asks for them by madvise.",
    );
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
        None => subject.missing(
            "this kernel has none",
            Change::nothing("a kernel with CONFIG_TRANSPARENT_HUGEPAGE has them"),
        ),
    }
}

fn pool(evidence: &Evidence, name: &'static str, page_size: u64) -> Finding {
    let subject = Subject::new(
        Memory,
        name,
        BACKED,
        "--backing hugetlb-2m and hugetlb-1g take huge pages that stay huge, from a pool.",
    );
    let pool = evidence.host.hugetlb.iter().find(|pool| pool.page_size == page_size);
    let Some(pool) = pool else {
        let sizes = evidence.host.hugetlb.iter().map(|pool| match pool.page_size {
            // Arm has some of 64 KiB.
            small if small < 1 << 20 => format!("{} KiB", small >> 10),
            size => bytes(size),
        });
        let found = match sizes.collect::<Vec<_>>() {
            none if none.is_empty() => "this kernel has no such pool".to_owned(),
            sizes => format!("this kernel has no such pool, but of {}", sizes.join(", ")),
        };
        return subject.missing(found, Change::nothing("processor or kernel lack it"));
    };
    let wanted = DEFAULT_GUEST.div_ceil(page_size);
    let (Some(total), Some(free)) = (pool.total.0, pool.free.0) else {
        let change = Change::by_hand("let this user read /sys/kernel/mm/hugepages");
        return subject.limited("there; its pages are not told", change);
    };
    let found = format!("{free} pages free of {total}");
    // Pages of the pool that are in use have to stay.
    let pages = total - free.min(total) + wanted;
    let change = || {
        let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page_size >> 10);
        Change::command(format!("echo {pages} > {folder}/nr_hugepages"))
    };
    match free {
        0 => subject.missing(found, change()),
        free if free < wanted => subject.limited(found, change()),
        _ => subject.ok(found),
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
        (None, _) => subject.ok("this kernel knows no nodes"),
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
