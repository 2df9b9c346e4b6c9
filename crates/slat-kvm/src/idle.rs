//! Access tracking: which pages were used, as the kernel reports it to user space.
//!
//! - Idle page tracking marks single pages by their frame, and clears the accessed bits of all
//!   their mappings, KVM's included (Documentation/admin-guide/mm/idle_page_tracking.rst).
//! - The multi-generational LRU ages all memory of a cgroup at once (multigen_lru.rst, "Working set
//!   estimation"). Whether it reads KVM's tables, and for how many pages at once, depends on the
//!   kernel.
//! - DAMON, which is not used here, samples one page of each of its regions.
//!
//! Both need root.

use crate::Error;
use crate::memory::HostMemory;
use crate::pagemap::{self, FRAME, PRESENT};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const BITMAP: &str = "sys/kernel/mm/page_idle/bitmap";
const LRU_GEN: &str = "sys/kernel/debug/lru_gen";
const COMPONENTS: &str = "sys/kernel/mm/lru_gen/enabled";
/// The bit of the components that asks KVM for 64 pages at once, with the series `batched-ageing`.
const BATCHES: u32 = 1 << 3;

/// An interface of the kernel for access tracking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessTracking {
    /// `/sys/kernel/mm/page_idle/bitmap`.
    IdlePages,
    /// `/sys/kernel/debug/lru_gen`, which asks KVM for 64 pages at once.
    Batches,
    /// `/sys/kernel/debug/lru_gen`, which asks KVM for each page.
    Generations,
}

impl AccessTracking {
    /// Returns the interface that this host has, idle page tracking first because it is more exact.
    ///
    /// # Errors
    /// [`Error::NoAccessTracking`].
    pub fn of_host() -> Result<Self, Error> {
        Ok(Self::all_of_host()?[0])
    }

    /// Returns the interfaces that this host has, at least one, the more exact one first.
    ///
    /// # Errors
    /// [`Error::NoAccessTracking`].
    pub fn all_of_host() -> Result<Vec<Self>, Error> {
        Self::below(Path::new("/"))
    }

    pub(crate) fn below(root: &Path) -> Result<Vec<Self>, Error> {
        let writable = |path| OpenOptions::new().write(true).open(root.join(path));
        match (writable(BITMAP), writable(LRU_GEN)) {
            (Ok(_), Err(_)) => Ok(vec![Self::IdlePages]),
            (bitmap, Ok(_)) => {
                let text = std::fs::read_to_string(root.join(COMPONENTS)).unwrap_or_default();
                let batches = components(&text).is_some_and(|mask| mask & BATCHES != 0);
                let all = [(bitmap.is_ok(), Self::IdlePages), (batches, Self::Batches)];
                let all = all.into_iter().chain([(true, Self::Generations)]);
                Ok(all.filter_map(|(has, tracking)| has.then_some(tracking)).collect())
            }
            (bitmap @ Err(_), lru_gen @ Err(_)) => {
                let missing = |why: &io::Error| why.kind() == io::ErrorKind::NotFound;
                let errors = [(BITMAP, bitmap), (LRU_GEN, lru_gen)];
                let refused = errors.into_iter().find_map(|(path, it)| {
                    let why = it.err().filter(|why| !missing(why))?;
                    Some(format!("/{path}: {why}"))
                });
                Err(Error::NoAccessTracking { refused })
            }
        }
    }
}

impl fmt::Display for AccessTracking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            AccessTracking::IdlePages => "page_idle",
            AccessTracking::Batches => "lru_gen, 64 pages at once",
            AccessTracking::Generations => "lru_gen",
        })
    }
}

/// Marks the pages of one memory as not used.
#[derive(Debug)]
pub(crate) enum Marker {
    IdlePages { bitmap: File, words: BTreeMap<u64, u64> },
    Generations { path: PathBuf, group: u64, _before: Option<Components> },
}

/// The components of the multi-generational LRU as they were, which are put back when this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Components(u32);

impl Components {
    /// Turns batches on or off; returns `None` where that changes nothing.
    fn set(batches: bool) -> Result<Option<Self>, Error> {
        let path = Path::new("/").join(COMPONENTS);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let Some(before) = components(&text) else { return Ok(None) };
        let wanted = if batches { before | BATCHES } else { before & !BATCHES };
        if wanted == before {
            return Ok(None);
        }
        let failed = Error::os("write of lru_gen/enabled");
        std::fs::write(path, format!("{wanted:#06x}")).map_err(failed)?;
        Ok(Some(Self(before)))
    }
}

impl Drop for Components {
    fn drop(&mut self) {
        // Nobody can be told; the next run reads what is set.
        let _ = std::fs::write(Path::new("/").join(COMPONENTS), format!("{:#06x}", self.0));
    }
}

/// Returns the components in the text of `lru_gen/enabled`; `None` if it has no number.
pub(crate) fn components(text: &str) -> Option<u32> {
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

impl Marker {
    /// Finds the frames of `memory`, or the cgroup of this process. `memory` is populated, and its
    /// pages must not move afterwards.
    pub fn new(tracking: AccessTracking, memory: &HostMemory) -> Result<Self, Error> {
        match tracking {
            AccessTracking::IdlePages => {
                let bitmap =
                    OpenOptions::new().read(true).write(true).open(Path::new("/").join(BITMAP));
                let bitmap = bitmap.map_err(Error::os("open of page_idle/bitmap"))?;
                Ok(Self::IdlePages { bitmap, words: frames(memory)? })
            }
            AccessTracking::Batches | AccessTracking::Generations => {
                let path = Path::new("/").join(LRU_GEN);
                let text = lru_gen(&path)?;
                let files = crate::procfs::Files::here();
                if !files.in_first_namespace("cgroup") {
                    // The file has the host's names: another group may have this one's.
                    return Err(Error::invalid(
                        "/sys/kernel/debug/lru_gen",
                        "does not name",
                        "groups as this namespace of control groups does",
                    ));
                }
                let untold = || Error::untold("proc/self/cgroup".into());
                let own = files.group("memory").ok_or_else(untold)?;
                let group = group(&text, &own).ok_or_else(unlisted)?;
                let _before = Components::set(tracking == AccessTracking::Batches)?;
                Ok(Self::Generations { path, group, _before })
            }
        }
    }

    /// Marks all pages as not used.
    pub fn mark(&self) -> Result<(), Error> {
        match self {
            Self::IdlePages { bitmap, words } => words.iter().try_for_each(|(word, bits)| {
                // At the end of memory, the kernel takes the bits of a word that memory does not
                // fill, and answers that it took none of its bytes.
                let written = bitmap.write_at(&bits.to_ne_bytes(), word * 8);
                written.map(drop).map_err(Error::os("write of page_idle/bitmap"))
            }),
            Self::Generations { path, group, .. } => {
                let generations = generations(&lru_gen(path)?, *group);
                if generations.is_empty() {
                    return Err(unlisted());
                }
                for (node, newest) in generations {
                    // The last two numbers allow swap, and make the kernel look at every page.
                    let command = format!("+ {group} {node} {newest} 1 1");
                    std::fs::write(path, command).map_err(Error::os("write of lru_gen"))?;
                }
                Ok(())
            }
        }
    }

    /// Returns how many pages are still marked, where the kernel reports it.
    pub fn idle(&self) -> Result<Option<u64>, Error> {
        let Self::IdlePages { bitmap, words } = self else { return Ok(None) };
        let mut idle = 0;
        for (word, bits) in words {
            let mut bytes = [0; 8];
            bitmap
                .read_exact_at(&mut bytes, word * 8)
                .map_err(Error::os("read of page_idle/bitmap"))?;
            idle += u64::from((u64::from_ne_bytes(bytes) & bits).count_ones());
        }
        Ok(Some(idle))
    }
}

/// Returns the words of the bitmap that cover the memory's pages, by number, with the pages' bits.
fn frames(memory: &HostMemory) -> Result<BTreeMap<u64, u64>, Error> {
    let (mut words, mut hidden) = (BTreeMap::new(), false);
    pagemap::entries(memory, |_, entry| {
        if entry & PRESENT != 0 {
            let frame = entry & FRAME;
            // No process has frame 0: the kernel hides the frames (pagemap.rst).
            hidden |= frame == 0;
            *words.entry(frame / 64).or_default() |= 1 << (frame % 64);
        }
    })?;
    if hidden {
        let refused = "/proc/self/pagemap hides frames without CAP_SYS_ADMIN";
        return Err(Error::NoAccessTracking { refused: Some(refused.to_owned()) });
    }
    Ok(words)
}

fn unlisted() -> Error {
    Error::invalid("/sys/kernel/debug/lru_gen", "does not list", "this control group")
}

/// Returns the text of lru_gen, in which another group's name may be no UTF-8.
fn lru_gen(path: &Path) -> Result<String, Error> {
    std::fs::read(path).map(crate::procfs::lossy).map_err(Error::os("read of lru_gen"))
}

/// Returns the number of a cgroup by its path.
fn group(text: &str, path: &str) -> Option<u64> {
    // Other groups' names with other bytes there would look the same.
    if path.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    let groups = text.lines().filter_map(head);
    groups.into_iter().find(|group| group.path == path).map(|group| group.number)
}

/// A control group in `lru_gen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub number: u64,
    pub path: String,
}

/// Number of anonymous and shared pages of a generation, for a control group on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub node: u64,
    pub generation: u64,
    pub pages: u64,
}

/// Parses the line that begins a control group.
pub(crate) fn head(line: &str) -> Option<Group> {
    // A path may have blanks. The root's is empty.
    let line = line.strip_prefix("memcg")?.trim();
    let (number, path) = line.split_once(' ').unwrap_or((line, "/"));
    Some(Group { number: number.parse().ok()?, path: path.trim().to_owned() })
}

/// Returns the rows of a control group; `None` of a text in another form, as what follows an odd
/// line could count for another node.
pub(crate) fn rows(text: &str, group: u64) -> Option<Vec<Row>> {
    let (mut inside, mut node, mut rows) = (false, 0, Vec::new());
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |word: usize| words.get(word).and_then(|word| word.parse::<u64>().ok());
        match words.first() {
            Some(&"memcg") => inside = number(1) == Some(group),
            Some(&"node") if inside => node = number(1)?,
            Some(_) if inside => {
                // Generation, age in ms, anonymous pages, pages of files. "-0" is a negative number
                // of pages.
                let pages = if words.get(2) == Some(&"-0") { 0 } else { number(2)? };
                rows.push(Row { node, generation: number(0)?, pages });
            }
            _ => {}
        }
    }
    Some(rows)
}

/// Returns each node and its newest generation.
pub(crate) fn newest(rows: &[Row]) -> Vec<(u64, u64)> {
    let nodes = rows.chunk_by(|one, next| one.node == next.node);
    let newest = nodes.filter_map(|rows| rows.iter().max_by_key(|row| row.generation));
    newest.map(|row| (row.node, row.generation)).collect()
}

/// Returns each node and its newest generation of a cgroup; nothing of a text that is none.
fn generations(text: &str, group: u64) -> Vec<(u64, u64)> {
    newest(&rows(text, group).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = concat!(
        "memcg     1 /\n node     0\n          0      1234          5           6\n",
        "          1       234          5           6 \nmemcg    42 /a/b\n",
        " node     0\n          7      1 0 0\n          10      1 0 0\n",
        " node     1\n          3      1 0 0\n",
    );

    #[test]
    fn a_cgroups_generations_are_found_by_its_path() {
        assert_eq!(
            (group(TEXT, "/"), group(TEXT, "/a/b"), group(TEXT, "/c")),
            (Some(1), Some(42), None)
        );
        assert_eq!(generations(TEXT, 42), [(0, 10), (1, 3)]);
        assert_eq!(generations(TEXT, 1), [(0, 1)]);
        assert_eq!(generations(&TEXT.replace("node     1", "node     ?"), 42), []);
        assert_eq!(group("memcg 1 /\u{fffd}\n", "/\u{fffd}"), None);
    }

    #[test]
    fn a_missing_idle_bitmap_is_distinguished_from_a_refused_one() {
        let root = std::env::temp_dir().join(format!("slat-idle-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/kernel/mm/page_idle")).unwrap();
        assert!(matches!(
            AccessTracking::below(&root),
            Err(Error::NoAccessTracking { refused: None })
        ));
        // As a folder, it is there and refused, whoever asks.
        std::fs::create_dir(root.join(BITMAP)).unwrap();
        let refused = AccessTracking::below(&root).unwrap_err().to_string();
        assert!(refused.contains("page_idle/bitmap: Is a directory"), "{refused}");
        std::fs::remove_dir(root.join(BITMAP)).unwrap();
        std::fs::write(root.join(BITMAP), []).unwrap();
        assert_eq!(AccessTracking::below(&root).unwrap(), [AccessTracking::IdlePages]);
        std::fs::create_dir_all(root.join("sys/kernel/debug")).unwrap();
        std::fs::write(root.join(LRU_GEN), []).unwrap();
        let both = [AccessTracking::IdlePages, AccessTracking::Generations];
        assert_eq!(AccessTracking::below(&root).unwrap(), both);
        std::fs::create_dir_all(root.join("sys/kernel/mm/lru_gen")).unwrap();
        std::fs::write(root.join(COMPONENTS), "0x0007\n").unwrap();
        assert_eq!(AccessTracking::below(&root).unwrap(), both);
        std::fs::write(root.join(COMPONENTS), "0x000f\n").unwrap();
        let all = [AccessTracking::IdlePages, AccessTracking::Batches, AccessTracking::Generations];
        assert_eq!(AccessTracking::below(&root).unwrap(), all);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn frames_of_a_memory_are_found_where_the_kernel_shows_them() {
        let memory = HostMemory::new(1 << 20, crate::Backing::Small).unwrap();
        (0..256).for_each(|page| memory.write(page * 4096, 1).unwrap());
        match frames(&memory) {
            Ok(words) => {
                let pages: u32 = words.values().map(|bits| bits.count_ones()).sum();
                assert_eq!(pages, 256, "{words:?}");
            }
            Err(error) => assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}"),
        }
    }
}
