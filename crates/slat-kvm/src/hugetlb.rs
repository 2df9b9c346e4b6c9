//! The kernel's pools of huge pages (hugetlbfs), as sysfs shows them.
//!
//! A mapping with `MAP_HUGETLB` takes its pages from a pool that the administrator filled
//! beforehand. The check before the mapping reports how many pages are missing, where the kernel
//! would return `ENOMEM` only.

use crate::procfs::Files;
use crate::{Advice, Error};

/// Returns the number of pages of `page_size` bytes that are neither in use nor reserved for a
/// mapping.
pub fn free(page_size: u64) -> u64 {
    pool(Files::here(), page_size).map_or(0, |(_, free)| free)
}

/// Checks that `needed` pages of `page_size` bytes are free.
///
/// # Errors
/// [`Error::NoHugePages`], with advice how to make enough pages available.
pub fn check(page_size: u64, needed: u64) -> Result<(), Error> {
    check_in(Files::here(), page_size, needed)
}

/// Returns the number of pages in the pool, and how many of them are free and not reserved.
fn pool(files: Files<'_>, page_size: u64) -> Option<(u64, u64)> {
    let pool = files.huge_pools().into_iter().find(|pool| pool.page_size == page_size)?;
    Some((pool.total?, pool.free?.saturating_sub(pool.reserved?)))
}

fn check_in(files: Files<'_>, page_size: u64, needed: u64) -> Result<(), Error> {
    let folder = format!("sys/kernel/mm/hugepages/hugepages-{}kB", page_size >> 10);
    let path = files.0.join(folder);
    let lack = |free, advice| Err(Error::NoHugePages { page_size, needed, free, advice });
    match pool(files, page_size) {
        None => lack(0, Advice::NoPool { path: path.display().to_string() }),
        Some((total, free)) if free < needed => {
            let path = path.join("nr_hugepages").display().to_string();
            lack(free, Advice::Reserve { path, pages: total + needed - free })
        }
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

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
        assert_eq!(pool(Files(&root), 2 << 20), Some((20, 6)));
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
}
