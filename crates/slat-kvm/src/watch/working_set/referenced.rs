//! Referenced pages of a process, from `clear_refs` and `smaps_rollup` (proc(5)). These files do
//! not show a guest's accesses through KVM's own tables.

use super::UsedBytes;
use crate::procfs::{Files, bytes};
use std::fs;

pub(super) const ERROR: &str = "a lower bound: pages that a guest uses through mappings that KVM \
                                has already are not seen";
pub(super) const CHANGES: &str = "clears the referenced bits of the process's pages (clear_refs), \
                                  by which the host's reclaim tells what is used";

#[derive(Debug)]
pub(super) struct ReferencedPages {
    pid: i32,
}

impl ReferencedPages {
    pub fn open(files: &Files<'_>, pid: i32) -> Result<Self, String> {
        let text = files.text(format!("proc/{pid}/smaps_rollup"));
        let has = text.is_some_and(|text| bytes(&text, "Referenced").is_some());
        let file = files.0.join(format!("proc/{pid}/clear_refs"));
        match fs::OpenOptions::new().write(true).open(file) {
            Ok(_) if has => Ok(Self { pid }),
            Ok(_) => Err("smaps_rollup tells no referenced pages: 4.14 does".to_owned()),
            Err(error) => Err(format!("clear_refs: {error}; run as root, or as its user")),
        }
    }

    pub fn make(&self, files: &Files<'_>) -> Result<(), String> {
        let file = files.0.join(format!("proc/{}/clear_refs", self.pid));
        fs::write(file, "1").map_err(|error| format!("clear_refs: {error}"))
    }

    pub fn look(&self, files: &Files<'_>) -> Result<UsedBytes, String> {
        let folder = format!("proc/{}", self.pid);
        let text = files.told(format!("{folder}/smaps_rollup")).ok().flatten();
        let of = |name| text.as_deref().and_then(|text| bytes(text, name));
        let both = of("Referenced").zip(of("Rss"));
        let (used, all) = both.ok_or_else(|| match files.0.join(folder).exists() {
            true => "smaps_rollup cannot be read any more",
            false => "smaps_rollup: the process ended",
        })?;
        Ok(UsedBytes { used, all })
    }
}
