//! The kernel's pools of huge pages (hugetlbfs), as sysfs shows them.
//!
//! A mapping with `MAP_HUGETLB` takes its pages from a pool that the administrator filled
//! beforehand. The check before the mapping reports how many pages are missing, where the kernel
//! would return `ENOMEM` only.

use crate::procfs::{Available, Files};
use crate::{Advice, Error, meminfo};
use std::path::PathBuf;

/// Returns the number of pages of `page_size` bytes that are neither in use nor reserved for a
/// mapping, if the kernel tells it.
pub fn free(page_size: u64) -> Option<u64> {
    pool(Files::here(), page_size).ok().flatten().map(|(_, free)| free)
}

/// Checks that `needed` pages of `page_size` bytes are free, and that this process's control groups
/// leave them.
///
/// # Errors
/// [`Error::NoHugePages`], with advice how to make enough pages available;
/// [`Error::NotEnoughMemory`] if a control group leaves fewer; [`Error::MemoryUntold`] if the pool
/// or the limit of a control group cannot be read.
pub fn check(page_size: u64, needed: u64) -> Result<(), Error> {
    check_in(Files::here(), page_size, needed)
}

fn folder(page_size: u64) -> PathBuf {
    format!("sys/kernel/mm/hugepages/hugepages-{}kB", page_size >> 10).into()
}

/// Returns the number of pages in the pool, and how many of them are free and not reserved; nothing
/// if the kernel has no such pool.
fn pool(files: Files<'_>, page_size: u64) -> Result<Option<(u64, u64)>, Error> {
    let pools = files.huge_pools().map_err(Error::untold)?;
    let Some(pool) = pools.into_iter().find(|pool| pool.page_size == page_size) else {
        return Ok(None);
    };
    let (Some(total), Some(free), Some(reserved)) = (pool.total, pool.free, pool.reserved) else {
        return Err(Error::untold(folder(page_size)));
    };
    Ok(Some((total, free.saturating_sub(reserved))))
}

pub(crate) fn check_in(files: Files<'_>, page_size: u64, needed: u64) -> Result<(), Error> {
    let path = files.0.join(folder(page_size));
    let lack = |free, advice| Err(Error::NoHugePages { page_size, needed, free, advice });
    match pool(files, page_size)? {
        None => {
            let pools = files.huge_pools().map_err(Error::untold)?;
            let sizes = pools.into_iter().map(|pool| pool.page_size).collect();
            lack(0, Advice::NoPool { path: path.display().to_string(), sizes })
        }
        Some((total, free)) if free < needed => {
            let path = path.join("nr_hugepages").display().to_string();
            lack(free, Advice::Reserve { path, pages: total + needed - free })
        }
        Some(_) => {
            let bytes = needed.saturating_mul(page_size);
            let bound = files.huge_page_bound(page_size).map_err(Error::untold)?;
            bound.into_iter().try_for_each(|bound| meminfo::refuse(bytes, bound))?;
            // What the host has available has no pages of pools.
            let counts = files.memory_has_huge_pages();
            let bounds = if counts { meminfo::bounds(files) } else { Vec::new() };
            bounds.into_iter().try_for_each(|bound| {
                let Some(left) = bound.memory.map_err(Error::untold)? else { return Ok(()) };
                meminfo::refuse(bytes, Available { bytes: left, group: Some(bound.group) })
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(name: &str, total: u64, free: u64, reserved: u64) -> PathBuf {
        let root = std::env::temp_dir().join(format!("slat-{name}-{}", std::process::id()));
        let folder = root.join("sys/kernel/mm/hugepages/hugepages-2048kB");
        std::fs::create_dir_all(&folder).unwrap();
        for (file, value) in
            [("nr_hugepages", total), ("free_hugepages", free), ("resv_hugepages", reserved)]
        {
            std::fs::write(folder.join(file), format!("{value}\n")).unwrap();
        }
        root
    }

    #[test]
    fn reserved_pages_are_not_free() {
        let root = sysfs("reserved", 20, 10, 4);
        assert_eq!(pool(Files(&root), 2 << 20).unwrap(), Some((20, 6)));
        assert!(check_in(Files(&root), 2 << 20, 6).is_ok());
        match check_in(Files(&root), 2 << 20, 7) {
            Err(Error::NoHugePages { needed: 7, free: 6, advice, .. }) => {
                let Advice::Reserve { path, pages: 21 } = advice else { panic!("{advice:?}") };
                assert!(path.ends_with("hugepages-2048kB/nr_hugepages"), "{path}");
            }
            other => panic!("{other:?}"),
        }
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_missing_pool_is_distinguished_from_an_empty_one() {
        let root = sysfs("missing", 0, 0, 0);
        let missing = check_in(Files(&root), 1 << 30, 1);
        assert!(matches!(missing, Err(Error::NoHugePages { advice: Advice::NoPool { .. }, .. })));
        let empty = check_in(Files(&root), 2 << 20, 1);
        assert!(matches!(empty, Err(Error::NoHugePages { advice: Advice::Reserve { .. }, .. })));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_pool_that_cannot_be_read_is_not_missing() {
        let root = sysfs("unread", 20, 10, 0);
        let pool = root.join(folder(2 << 20));
        std::fs::write(pool.join("free_hugepages"), "?\n").unwrap();
        let told = check_in(Files(&root), 2 << 20, 1).unwrap_err().to_string();
        assert!(told.contains("hugepages-2048kB does not tell"), "{told}");
        // A file in the folder's place, as root may list any folder.
        let pools = pool.parent().unwrap();
        std::fs::remove_dir_all(pools).unwrap();
        std::fs::write(pools, "").unwrap();
        let told = check_in(Files(&root), 2 << 20, 1).unwrap_err().to_string();
        assert!(told.contains("/sys/kernel/mm/hugepages does not tell"), "{told}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_control_group_bounds_pages_that_the_pool_has() {
        let root = sysfs("bound", 20, 20, 0);
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/self/cgroup", "0::/a\n");
        write("proc/meminfo", "MemAvailable: 1 kB\n");
        write("sys/fs/cgroup/a/hugetlb.2MB.max", "8388608\n");
        let refused = |pages| check_in(Files(&root), 2 << 20, pages).map_err(|it| it.to_string());
        assert_eq!(refused(4), Ok(()));
        assert!(refused(5).unwrap_err().contains("/sys/fs/cgroup/a leaves 8 MiB"));
        // Where groups count them as memory, too, that limit bounds them as well.
        write("sys/fs/cgroup/a/memory.max", "4194304\n");
        assert_eq!(refused(4), Ok(()));
        let mount = "31 30 0:28 / /sys/fs/cgroup rw - cgroup2 none rw,memory_hugetlb_accounting\n";
        write("proc/self/mountinfo", mount);
        assert_eq!(refused(2), Ok(()));
        assert!(refused(3).unwrap_err().contains("/sys/fs/cgroup/a leaves 4 MiB"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
