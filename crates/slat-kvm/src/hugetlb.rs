//! The kernel's pools of huge pages (hugetlbfs), read from sysfs.
//!
//! A mapping with `MAP_HUGETLB` takes its pages from a pool that somebody filled beforehand.
//! Asking first turns the kernel's bare `ENOMEM` into an answer that says what is missing.

use crate::{Advice, Error};
use std::path::{Path, PathBuf};

const SYSFS: &str = "/sys/kernel/mm/hugepages";

/// One pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Bytes of one huge page.
    pub page_size: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages that are neither in use nor promised to a mapping.
    pub free: u64,
}

/// The pools of this host, by page size. Empty where the kernel has none.
pub fn available() -> Vec<Pool> {
    pools_in(Path::new(SYSFS))
}

/// Checks that `needed` pages of `page_size` bytes can be had.
///
/// # Errors
/// [`Error::NoHugePages`], with what would change that.
pub fn check(page_size: u64, needed: u64) -> Result<(), Error> {
    check_in(Path::new(SYSFS), page_size, needed)
}

fn folder(root: &Path, page_size: u64) -> PathBuf {
    root.join(format!("hugepages-{}kB", page_size >> 10))
}

fn pools_in(root: &Path) -> Vec<Pool> {
    let Ok(entries) = std::fs::read_dir(root) else { return Vec::new() };
    let mut pools: Vec<Pool> = entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse::<u64>().ok()?;
            pool(root, kib.checked_mul(1024)?)
        })
        .collect();
    pools.sort_by_key(|pool| pool.page_size);
    pools
}

fn pool(root: &Path, page_size: u64) -> Option<Pool> {
    let folder = folder(root, page_size);
    let number = |file: &str| -> Option<u64> {
        std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
    Some(Pool { page_size, total: number("nr_hugepages")?, free })
}

fn check_in(root: &Path, page_size: u64, needed: u64) -> Result<(), Error> {
    let folder = folder(root, page_size);
    let lack = |free, advice| Err(Error::NoHugePages { page_size, needed, free, advice });
    match pool(root, page_size) {
        None => lack(0, Advice::NoPool { path: folder.display().to_string() }),
        Some(pool) if pool.free < needed => {
            let path = folder.join("nr_hugepages").display().to_string();
            lack(pool.free, Advice::Reserve { path, pages: pool.total + needed - pool.free })
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sysfs(name: &str, total: u64, free: u64, reserved: u64) -> PathBuf {
        let root = std::env::temp_dir().join(format!("slat-{name}-{}", std::process::id()));
        let folder = root.join("hugepages-2048kB");
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
        assert_eq!(pools_in(&root), [Pool { page_size: 2 << 20, total: 20, free: 6 }]);
        assert!(check_in(&root, 2 << 20, 6).is_ok());
        match check_in(&root, 2 << 20, 7) {
            Err(Error::NoHugePages { needed: 7, free: 6, advice, .. }) => {
                let path = root.join("hugepages-2048kB/nr_hugepages").display().to_string();
                assert_eq!(advice, Advice::Reserve { path, pages: 21 });
            }
            other => panic!("{other:?}"),
        }
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_missing_pool_is_told_from_an_empty_one() {
        let root = sysfs("missing", 0, 0, 0);
        let missing = check_in(&root, 1 << 30, 1);
        assert!(matches!(missing, Err(Error::NoHugePages { advice: Advice::NoPool { .. }, .. })));
        let empty = check_in(&root, 2 << 20, 1);
        assert!(matches!(empty, Err(Error::NoHugePages { advice: Advice::Reserve { .. }, .. })));
        std::fs::remove_dir_all(root).unwrap();
    }
}
