//! A Linux source tree: its version, the files that are used, and the differences between trees.

use crate::linux::{Error, cut};
use slat_kernel::Version;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const PGTABLE: &str = "arch/arm64/kvm/hyp/pgtable.c";
const MMU: &str = "arch/arm64/kvm/mmu.c";
const KVM_MAIN: &str = "virt/kvm/kvm_main.c";
const HEADERS: [&str; 2] = ["kvm_pgtable.h", "stage2_pgtable.h"];
pub(crate) const HEADER_FOLDER: &str = "arch/arm64/include/asm";

/// The callers of the walks. The last two have one of two names.
const CALLERS: [(&str, &[&[&str]]); 2] = [
    (
        KVM_MAIN,
        &[
            &["mmu_memory_cache_alloc_obj"],
            &["__kvm_mmu_topup_memory_cache"],
            &["kvm_mmu_topup_memory_cache"],
            &["kvm_mmu_memory_cache_nr_free_objects"],
            &["kvm_mmu_free_memory_cache"],
            &["kvm_mmu_memory_cache_alloc"],
        ],
    ),
    (
        MMU,
        &[
            &["__stage2_range_addr_end"],
            &["stage2_range_addr_end"],
            &["stage2_apply_range"],
            &["kvm_mmu_split_nr_page_tables"],
            &["need_split_memcache_topup_or_resched"],
            &["kvm_mmu_split_huge_pages"],
            &["kvm_stage2_wp_range", "stage2_wp_range"],
            &["kvm_arch_mmu_enable_log_dirty_pt_masked"],
        ],
    ),
];

/// A macro of mmu.c that its functions use, and the function that it calls.
const MACRO: &str = "stage2_apply_range_resched";
const CALLED: &str = "stage2_apply_range";

/// The parts of a Linux source tree that are compiled, as text.
#[derive(Clone, Debug)]
pub struct Tree {
    /// Identifies it among all trees of the process, also those of the same name.
    pub(crate) id: u64,
    /// Its name in results.
    pub name: String,
    /// Its path.
    pub path: PathBuf,
    /// Its version.
    pub version: Version,
    /// `pgtable.c`, edited or not.
    pub(crate) pgtable: String,
    pub(crate) headers: Vec<(&'static str, String)>,
    /// The callers.
    pub(crate) cut: String,
    /// Definitions that the stub kernel needs for this tree.
    pub(crate) defines: Vec<String>,
}

impl Tree {
    /// Reads a tree. Without a name, results call it by its version.
    ///
    /// # Errors
    /// [`Error::NoTree`], [`Error::UnknownVersion`], [`Error::NoFunction`].
    pub fn open(name: Option<&str>, path: &Path) -> Result<Self, Error> {
        let read = |file: &str| {
            std::fs::read_to_string(path.join(file))
                .map_err(|_| Error::NoTree { path: path.to_owned(), missing: file.to_owned() })
        };
        let makefile = read("Makefile")?;
        let version = Version::of(&makefile).ok_or_else(|| Error::NoTree {
            path: path.to_owned(),
            missing: "the version in Makefile".to_owned(),
        })?;
        let known = (6, 6)..(8, 0);
        let any = std::env::var_os("SLAT_ANY_LINUX").is_some_and(|value| value == "1");
        if !known.contains(&(version.major, version.minor)) && !any {
            let (path, version) = (path.to_owned(), version.to_string());
            return Err(Error::UnknownVersion { path, version });
        }
        let pgtable = read(PGTABLE)?;
        let mut headers = Vec::new();
        for header in HEADERS {
            headers.push((header, read(&format!("{HEADER_FOLDER}/{header}"))?));
        }
        let (mut parts, mut defines) = (Vec::new(), Vec::new());
        for (file, functions) in CALLERS {
            let source = read(file)?;
            for names in functions {
                let found =
                    names.iter().find_map(|name| Some((name, cut::function(&source, name)?)));
                let path = || path.to_owned();
                let (name, text) = found.ok_or_else(|| Error::NoFunction {
                    path: path(),
                    file,
                    function: names[0],
                })?;
                if names.len() > 1 {
                    defines.push(format!("-DSLAT_WP_RANGE={name}"));
                }
                parts.push(text.to_owned());
                if name == &CALLED {
                    parts.extend(cut::directive(&source, MACRO).map(str::to_owned));
                }
            }
        }
        let is_mask = u8::from(pgtable.contains("FIELD_PREP(VTCR_EL2_T0SZ"));
        defines.push(format!("-DSLAT_T0SZ_IS_MASK={is_mask}"));
        if headers[0].1.contains("KVM_PGTABLE_WALK_HANDLE_FAULT") {
            let flags = "(KVM_PGTABLE_WALK_SHARED|KVM_PGTABLE_WALK_HANDLE_FAULT)";
            defines.push(format!("-DSLAT_FAULT_FLAGS={flags}"));
        }
        let name = name
            .map_or_else(|| format!("linux-{}.{}", version.major, version.minor), str::to_owned);
        Ok(Self {
            id: next_id(),
            name,
            path: path.to_owned(),
            version,
            pgtable,
            headers,
            cut: parts.join("\n\n"),
            defines,
        })
    }
}

pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_what_to_give() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |folder: &Path| Tree::open(None, folder).unwrap_err().to_string();
        assert!(refusal(folder.path()).contains("Makefile is missing; give the top folder"));
        let makefile = folder.path().join("Makefile");
        std::fs::write(&makefile, "VERSION = 6\nPATCHLEVEL = 12\n").unwrap();
        assert!(refusal(folder.path()).contains("arch/arm64/kvm/hyp/pgtable.c is missing"));
        std::fs::write(&makefile, "VERSION = 5\nPATCHLEVEL = 10\nSUBLEVEL = 3\n").unwrap();
        let text = refusal(folder.path());
        assert!(text.contains("Linux 5.10.3") && text.contains("6.6 to 7.x"), "{text}");
    }
}
