//! The host's NUMA nodes, to which a guest's memory and vCPUs can be bound.
//!
//! The kernel allocates a second-level table on the node of the thread that took the fault, and the
//! memory by its policy, so a table walk and an access may each cross to another node. Binding both
//! shows the cost of that.

use crate::Error;
use crate::memory::{Backing, HostMemory};
use crate::procfs::Files;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const FOLDER: &str = "sys/devices/system/node";

/// Returns the list in a file, which is empty if there is no such file.
///
/// # Errors
/// The file, if it cannot be read, or if the kernel cut it.
fn read_list(files: Files<'_>, file: &str) -> Result<Vec<usize>, PathBuf> {
    let file = Path::new(FOLDER).join(file);
    match files.told(&file)? {
        Some(text) if !text.trim().is_empty() => files.list(&file).ok_or(file),
        _ => Ok(Vec::new()),
    }
}

/// Returns the nodes that have memory. It is empty where the kernel has no NUMA nodes, or tells
/// none.
pub fn nodes() -> Vec<u32> {
    nodes_of(Files::here()).unwrap_or_default()
}

fn nodes_of(files: Files<'_>) -> Result<Vec<u32>, PathBuf> {
    Ok(read_list(files, "has_memory")?.into_iter().map(|node| node as u32).collect())
}

/// Returns the CPUs of a node.
///
/// # Errors
/// [`Error::Invalid`] if there is no such node, if it has no CPU, or if the kernel does not tell.
pub fn cpus(node: u32) -> Result<Vec<usize>, Error> {
    cpus_of(Files::here(), node)
}

fn cpus_of(files: Files<'_>, node: u32) -> Result<Vec<usize>, Error> {
    let rule = match read_list(files, &format!("node{node}/cpulist")) {
        Ok(cpus) if !cpus.is_empty() => return Ok(cpus),
        Ok(_) => {
            let known = read_list(files, "has_cpu").unwrap_or_default();
            format!("has no CPU; nodes that have: {}", named(&known))
        }
        Err(file) => format!("cannot be used: /{} does not tell its CPUs", file.display()),
    };
    Err(Error::invalid("NUMA node", node, rule))
}

fn named(nodes: &[impl ToString]) -> String {
    if nodes.is_empty() {
        return "none that the kernel tells".to_owned();
    }
    nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Checks that the nodes `asked` exist and have `bytes` bytes free. If an allocation is bound to
/// nodes without free memory, the kernel kills the process.
///
/// # Errors
/// [`Error::Invalid`] for a node without memory; [`Error::NotEnoughOnNodes`] if too little is free;
/// [`Error::MemoryUntold`] if the kernel does not tell.
pub(crate) fn check(asked: &[u32], bytes: u64, backing: Backing) -> Result<(), Error> {
    check_in(Files::here(), asked, bytes, backing)
}

pub(crate) fn check_in(
    files: Files<'_>,
    asked: &[u32],
    bytes: u64,
    backing: Backing,
) -> Result<(), Error> {
    if asked.is_empty() {
        return Ok(());
    }
    let known = nodes_of(files).map_err(Error::untold)?;
    if let Some(node) = asked.iter().find(|node| !known.contains(node)) {
        let rule = format!("has no memory; nodes that have: {}", named(&known));
        return Err(Error::invalid("NUMA node", node, rule));
    }
    let free = |node: &u32| free(files, *node, backing).map_err(Error::untold);
    let available = asked.iter().map(free).sum::<Result<u64, _>>()?;
    if bytes > available {
        let (needed, available) = (bytes >> 20, available >> 20);
        return Err(Error::NotEnoughOnNodes { needed, available, nodes: named(asked) });
    }
    Ok(())
}

/// Returns the bytes that a node can provide: those free in its hugetlb pool, or its free memory
/// and inactive page cache.
///
/// # Errors
/// The file that does not tell.
fn free(files: Files<'_>, node: u32, backing: Backing) -> Result<u64, PathBuf> {
    let folder = Path::new(FOLDER).join(format!("node{node}"));
    if backing.is_hugetlb() {
        let size = backing.page_size();
        let pool = folder.join(format!("hugepages/hugepages-{}kB/free_hugepages", size >> 10));
        // Without this file, the node has no pool of that size.
        return Ok(files.told_number(pool)?.unwrap_or(0).saturating_mul(size));
    }
    let file = folder.join("meminfo");
    let text = files.told(&file)?.ok_or_else(|| file.clone())?;
    let field = |name| crate::procfs::bytes(&text, &format!("Node {node} {name}"));
    let both = field("MemFree").zip(field("Inactive(file)"));
    both.map(|(free, cache)| free + cache).ok_or(file)
}

/// Binds a memory that is not yet populated to nodes (`mbind`, `MPOL_BIND`). Without nodes, the
/// kernel's default policy stays.
///
/// # Errors
/// [`Error::Os`] if the kernel refuses.
pub(crate) fn bind(memory: &HostMemory, nodes: &[u32]) -> Result<(), Error> {
    const BITS: usize = u64::BITS as usize;
    let Some(&last) = nodes.iter().max() else { return Ok(()) };
    let mut mask = vec![0u64; last as usize / BITS + 1];
    for &node in nodes {
        mask[node as usize / BITS] |= 1 << (node as usize % BITS);
    }
    // SAFETY: the range is one mapping of this process, and a policy does not change its contents.
    // The kernel reads one bit less than the size given, and `mask` has that many.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            memory.host_address(),
            memory.len(),
            libc::c_long::from(libc::MPOL_BIND),
            mask.as_ptr(),
            mask.len() * BITS + 1,
            0 as libc::c_long,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(Error::os("mbind of guest memory")(std::io::Error::last_os_error())),
    }
}

/// Returns the bytes of a memory on each node, where the kernel reports them
/// (`/proc/self/numa_maps`).
pub(crate) fn placement(memory: &HostMemory) -> Option<BTreeMap<u32, u64>> {
    let start = memory.host_address();
    Files::here().numa_maps(start..start + memory.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_lies_on_the_node_that_it_was_bound_to() {
        let Some(&node) = nodes().last() else { return };
        let memory = HostMemory::new(1 << 20, Backing::Small).unwrap();
        bind(&memory, &[node]).unwrap();
        (0..256).for_each(|page| memory.write(page * 4096, 1).unwrap());
        if let Some(placed) = placement(&memory) {
            assert_eq!(placed, BTreeMap::from([(node, 1 << 20)]));
        }
    }

    #[test]
    fn a_pool_of_a_node_that_cannot_be_read_is_not_missing() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join(FOLDER).join("node0");
        let pool = node.join("hugepages/hugepages-2048kB");
        std::fs::create_dir_all(&pool).unwrap();
        let of = |backing| free(Files(root.path()), 0, backing);
        assert_eq!(of(Backing::Hugetlb(2 << 20)), Ok(0), "no pool of that size");
        let file = pool.join("free_hugepages");
        std::fs::write(&file, "3\n").unwrap();
        assert_eq!(of(Backing::Hugetlb(2 << 20)), Ok(6 << 20));
        std::fs::write(&file, "?\n").unwrap();
        assert!(of(Backing::Hugetlb(2 << 20)).unwrap_err().ends_with("free_hugepages"));
        assert!(of(Backing::Small).unwrap_err().ends_with("node0/meminfo"));
        let text = "Node 0 MemFree: 4 kB\nNode 0 Inactive(file): 8 kB\n";
        std::fs::write(node.join("meminfo"), text).unwrap();
        assert_eq!(of(Backing::Small), Ok(12 << 10));
    }

    #[test]
    fn a_truncated_list_is_not_taken_for_a_node_without_cpus() {
        let root = tempfile::tempdir().unwrap();
        let files = Files(root.path());
        let node = root.path().join(FOLDER);
        std::fs::create_dir_all(node.join("node0")).unwrap();
        let write = |file: &str, text: &str| std::fs::write(node.join(file), text).unwrap();
        let cpus = || cpus_of(files, 0).map_err(|error| error.to_string());
        let memory = || check_in(files, &[0], 4096, Backing::Small).map_err(|it| it.to_string());
        assert!(cpus().unwrap_err().contains("has no CPU; nodes that have: none that"));
        assert!(memory().unwrap_err().contains("has no memory"));
        for file in ["has_memory", "has_cpu", "node0/cpulist"] {
            write(file, "0,1");
        }
        assert!(cpus().unwrap_err().contains("node0/cpulist does not tell its CPUs"));
        assert!(memory().unwrap_err().contains("has_memory does not tell"));
        write("has_memory", "0\n");
        assert!(memory().unwrap_err().contains("node0/meminfo does not tell"));
        write("node0/cpulist", "\n");
        write("has_cpu", "1\n");
        assert!(cpus().unwrap_err().contains("has no CPU; nodes that have: 1"));
        write("node0/cpulist", "2-3\n");
        assert_eq!(cpus(), Ok(vec![2, 3]));
    }

    #[test]
    fn nodes_that_are_not_there_are_refused_with_those_that_are() {
        let error = check(&[4095], 4096, Backing::Small).unwrap_err().to_string();
        assert!(error.contains("4095") && error.contains("nodes that have"), "{error}");
        assert!(cpus(4095).is_err());
        let Some(&node) = nodes().first() else { return };
        let error = check(&[node], 1 << 60, Backing::Small).unwrap_err();
        assert!(matches!(error, Error::NotEnoughOnNodes { .. }), "{error}");
        assert!(check(&[node], 4096, Backing::Small).is_ok());
    }
}
