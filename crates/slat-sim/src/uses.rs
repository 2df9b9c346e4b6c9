//! The guest's accesses to each of its pages, and how many of them software knows of.

use std::collections::HashMap;

/// A page of 4 KiB of a guest.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct UsedPage {
    /// Number of writes.
    pub written: u64,
    /// Number of writes that are in a copy of the host.
    pub copied: u64,
    /// The CPU of the last write; the number of CPUs for a device.
    pub writer: usize,
    /// Number of accesses.
    pub used: u64,
    /// Number of accesses that software knows of.
    pub seen: u64,
}

/// VMID and page number.
type Page = (u16, u64);

#[derive(Default, Debug)]
pub(crate) struct UseLog {
    pages: HashMap<Page, UsedPage>,
    /// Ranges of addresses that must not be written now: VMID, first address, end.
    protected: Vec<(u16, u64, u64)>,
}

impl UseLog {
    pub fn record(&mut self, vmid: u16, gpa: u64, cpu: usize, write: bool) {
        let page = self.pages.entry((vmid, gpa >> 12)).or_default();
        page.used += 1;
        if write {
            page.written += 1;
            page.writer = cpu;
        }
    }

    pub fn within(&self, vmid: u16, start: u64, end: u64) -> Vec<(u64, UsedPage)> {
        let inside = |page: u64| (start..end).contains(&(page << 12));
        let pages = self.pages.iter().filter(|((of, page), _)| *of == vmid && inside(*page));
        let mut pages: Vec<_> = pages.map(|(&(_, page), &used)| (page << 12, used)).collect();
        pages.sort_by_key(|page| page.0);
        pages
    }

    pub fn update(&mut self, vmid: u16, start: u64, end: u64, update: impl Fn(&mut UsedPage)) {
        for ((of, page), used) in &mut self.pages {
            if *of == vmid && (start..end).contains(&(page << 12)) {
                update(used);
            }
        }
    }

    pub fn protect(&mut self, vmid: u16, start: u64, end: u64) {
        self.protected.push((vmid, start, end));
    }

    pub fn unprotect(&mut self, vmid: u16, start: u64, end: u64) {
        let ranges = std::mem::take(&mut self.protected);
        for (of, first, last) in ranges {
            if of != vmid || end <= first || last <= start {
                self.protected.push((of, first, last));
                continue;
            }
            if first < start {
                self.protected.push((of, first, start));
            }
            if end < last {
                self.protected.push((of, end, last));
            }
        }
    }

    pub fn is_protected(&self, vmid: u16, gpa: u64) -> bool {
        self.protected.iter().any(|&(of, start, end)| of == vmid && (start..end).contains(&gpa))
    }
}
