//! The host's NUMA nodes: whose memory a guest gets, whose CPUs run it.
//!
//! A second-level table lies where the thread ran that took the fault, the memory where its policy
//! says: a walk and an access may each cross to another node. Binding both shows what that costs.

use crate::memory::{Backing, HostMemory};
use crate::{Error, meminfo};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const SYSFS: &str = "/sys/devices/system/node";

/// Numbers of a list as sysfs has them: `0-3,8`.
fn list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(numbers)
}

fn read_list(path: &Path) -> Option<Vec<u32>> {
    list(&std::fs::read_to_string(path).ok()?)
}

/// Nodes that have memory; none where the kernel knows no nodes.
pub fn nodes() -> Vec<u32> {
    read_list(&Path::new(SYSFS).join("has_memory")).unwrap_or_default()
}

fn folder(node: u32) -> PathBuf {
    Path::new(SYSFS).join(format!("node{node}"))
}

/// CPUs of a node.
///
/// # Errors
/// [`Error::Invalid`] if there is no such node, or if it has no CPU.
pub fn cpus(node: u32) -> Result<Vec<usize>, Error> {
    let cpus = read_list(&folder(node).join("cpulist")).unwrap_or_default();
    if cpus.is_empty() {
        let all = read_list(&Path::new(SYSFS).join("has_cpu")).unwrap_or_default();
        let rule = format!("has no CPU; nodes that have: {}", named(&all));
        return Err(Error::invalid("NUMA node", node, rule));
    }
    Ok(cpus.into_iter().map(|cpu| cpu as usize).collect())
}

fn named(nodes: &[u32]) -> String {
    if nodes.is_empty() {
        return "none (the kernel knows no NUMA)".to_owned();
    }
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

/// Checks that these nodes are there and can give so much memory: an allocation that is bound to nodes
/// without any kills the process.
///
/// # Errors
/// [`Error::Invalid`] for a node without memory; [`Error::NotEnoughOnNodes`].
pub(crate) fn check(asked: &[u32], bytes: u64, backing: Backing) -> Result<(), Error> {
    if asked.is_empty() {
        return Ok(());
    }
    let known = nodes();
    if let Some(node) = asked.iter().find(|node| !known.contains(node)) {
        let rule = format!("has no memory; nodes that have: {}", named(&known));
        return Err(Error::invalid("NUMA node", node, rule));
    }
    let free = |node: &u32| free(*node, backing).unwrap_or(0);
    let available = asked.iter().map(free).sum();
    if bytes > available {
        let (needed, available) = (bytes >> 20, available >> 20);
        return Err(Error::NotEnoughOnNodes { needed, available, nodes: named(asked) });
    }
    Ok(())
}

/// Bytes that a node can give: of its pool of huge pages, or free memory and the cache of files.
fn free(node: u32, backing: Backing) -> Option<u64> {
    let folder = folder(node);
    if backing.is_hugetlb() {
        let size = backing.page_size();
        let pool = folder.join(format!("hugepages/hugepages-{}kB/free_hugepages", size >> 10));
        let pages: u64 = std::fs::read_to_string(pool).ok()?.trim().parse().ok()?;
        return pages.checked_mul(size);
    }
    let text = std::fs::read_to_string(folder.join("meminfo")).ok()?;
    // Each line begins with the node: `Node 0 MemFree: 1234 kB`.
    let lines = text.lines().filter_map(|line| line.splitn(3, ' ').nth(2));
    let lines = lines.collect::<Vec<_>>().join("\n");
    let field = |name| meminfo::field(&lines, name).unwrap_or(0);
    Some(field("MemFree") + field("Inactive(file)"))
}

/// Binds a memory that nobody has touched yet to nodes (`mbind`, `MPOL_BIND`); to none, leaves it to
/// the kernel.
///
/// # Errors
/// [`Error::Os`].
pub(crate) fn bind(memory: &HostMemory, nodes: &[u32]) -> Result<(), Error> {
    const BITS: usize = u64::BITS as usize;
    let Some(&last) = nodes.iter().max() else { return Ok(()) };
    let mut mask = vec![0u64; last as usize / BITS + 1];
    for &node in nodes {
        mask[node as usize / BITS] |= 1 << (node as usize % BITS);
    }
    // SAFETY: the range is one mapping of this process, whose content a policy does not change; the
    // mask has as many bits as are named, and one more, which the kernel takes off.
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

/// Bytes of a memory on each node, where the kernel tells (`/proc/self/numa_maps`).
pub(crate) fn placement(memory: &HostMemory) -> Option<BTreeMap<u32, u64>> {
    let maps = std::fs::read_to_string("/proc/self/numa_maps").ok()?;
    let start = memory.host_address();
    Some(placed(&maps, start..start + memory.len()))
}

fn placed(maps: &str, range: std::ops::Range<u64>) -> BTreeMap<u32, u64> {
    let mut bytes = BTreeMap::new();
    for line in maps.lines() {
        let mut words = line.split(' ');
        let start = words.next().and_then(|word| u64::from_str_radix(word, 16).ok());
        if !start.is_some_and(|start| range.contains(&start)) {
            continue;
        }
        let words: Vec<(&str, u64)> = words
            .filter_map(|word| word.split_once('='))
            .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
            .collect();
        let page = words.iter().find(|word| word.0 == "kernelpagesize_kB").map_or(4, |word| word.1);
        for (name, pages) in words {
            if let Some(node) = name.strip_prefix('N').and_then(|node| node.parse().ok()) {
                *bytes.entry(node).or_default() += (pages * page) << 10;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_sysfs_has_them() {
        assert_eq!(list("0-2,8\n"), Some(vec![0, 1, 2, 8]));
        assert_eq!(list("\n"), Some(vec![]));
        assert_eq!(list("0-x"), None);
    }

    #[test]
    fn pages_of_the_memory_alone_are_summed_by_node() {
        let maps = "7000 bind:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n\
                    9000 default heap anon=9 N0=9 kernelpagesize_kB=4\n\
                    7f000 bind:1 huge dirty=1 N1=1 kernelpagesize_kB=2048\n";
        let small = BTreeMap::from([(0, 4096), (1, 8192)]);
        assert_eq!(placed(maps, 0x7000..0x8000), small);
        assert_eq!(placed(maps, 0x7f000..0x80000), BTreeMap::from([(1, 2 << 20)]));
        assert_eq!(placed(maps, 0..0), BTreeMap::new());
    }

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
