//! The host's memory behind the guest: the owner of each page, and what memory and caches hold of
//! it.
//!
//! The content of a page is a version: the number of writes to it. An access is wrong if it sees an
//! older version than the last one.

use std::collections::{BTreeMap, HashMap};

const PAGE: u32 = 12;

/// One page.
#[derive(Clone, Copy, Default, Debug)]
struct Page {
    latest: u64,
    /// The version at the point of coherency.
    memory: u64,
    /// The version in the data cache, if it holds the page.
    cached: Option<u64>,
    /// The last version that the host wrote; the guest may execute it.
    host: u64,
    /// The version that instruction fetches see.
    fetched: u64,
    taken: bool,
}

/// Reason why an access is wrong.
pub(crate) type Stale = &'static str;

/// All pages.
#[derive(Default, Debug)]
pub(crate) struct Host {
    /// First address and end of each range that was ever given.
    given: BTreeMap<u64, u64>,
    pages: HashMap<u64, Page>,
}

impl Host {
    pub fn give(&mut self, hpa: u64, bytes: u64) {
        let around = self.given.range(..=hpa).next_back();
        if around.is_none_or(|(_, &end)| end < hpa + bytes) {
            self.given.insert(hpa, hpa + bytes);
        }
        if !self.pages.is_empty() {
            for page in hpa >> PAGE..(hpa + bytes) >> PAGE {
                if let Some(page) = self.pages.get_mut(&page) {
                    page.taken = false;
                }
            }
        }
    }

    pub fn take_back(&mut self, hpa: u64, bytes: u64) {
        for page in hpa >> PAGE..(hpa + bytes) >> PAGE {
            self.page(page << PAGE).taken = true;
        }
    }

    /// Returns why the guest must not reach `hpa`, if it must not.
    pub fn refuses(&self, hpa: u64) -> Option<Stale> {
        let given = self.given.range(..=hpa).next_back().is_some_and(|(_, &end)| hpa < end);
        if !given {
            return Some("it was never given to the guest");
        }
        let taken = self.pages.get(&(hpa >> PAGE)).is_some_and(|page| page.taken);
        taken.then_some("it was taken back")
    }

    /// Returns the page. Before the host gave it, it wrote it once through its caches.
    fn page(&mut self, hpa: u64) -> &mut Page {
        self.pages.entry(hpa >> PAGE).or_insert(Page {
            latest: 1,
            cached: Some(1),
            host: 1,
            ..Page::default()
        })
    }

    pub fn host_write(&mut self, hpa: u64) {
        let page = self.page(hpa);
        page.latest += 1;
        page.cached = Some(page.latest);
        page.host = page.latest;
    }

    pub fn host_read(&mut self, hpa: u64) -> Result<(), Stale> {
        let page = self.page(hpa);
        let seen = *page.cached.get_or_insert(page.memory);
        if seen < page.latest {
            return Err("the host reads an old line of its data cache");
        }
        Ok(())
    }

    /// The guest reads or writes, through the caches or, with `bypass`, past them.
    pub fn guest_access(&mut self, hpa: u64, write: bool, bypass: bool) -> Result<(), Stale> {
        let page = self.page(hpa);
        let seen = if bypass { page.memory } else { *page.cached.get_or_insert(page.memory) };
        let fresh = seen == page.latest;
        if write {
            page.latest += 1;
            if bypass {
                page.memory = page.latest;
            } else {
                page.cached = Some(page.latest);
            }
        }
        match (fresh, bypass) {
            (true, _) => Ok(()),
            (false, true) => Err("the guest's uncached access finds memory older than the cache"),
            (false, false) => Err("the guest's cached access finds an old line"),
        }
    }

    pub fn fetch(&mut self, hpa: u64) -> Result<(), Stale> {
        let page = self.page(hpa);
        if page.fetched < page.host {
            return Err("the instruction cache may hold what was there before the host wrote");
        }
        Ok(())
    }

    /// Cleans and invalidates the data cache to the point of coherency.
    pub fn clean(&mut self, hpa: u64, bytes: u64) {
        for page in hpa >> PAGE..(hpa + bytes).div_ceil(1 << PAGE) {
            let page = self.page(page << PAGE);
            if let Some(line) = page.cached.take() {
                // If memory is newer, the line is clean, and is dropped.
                page.memory = page.memory.max(line);
            }
        }
    }

    /// Invalidates the instruction cache.
    pub fn invalidate_instructions(&mut self, hpa: u64, bytes: u64) {
        for page in hpa >> PAGE..(hpa + bytes).div_ceil(1 << PAGE) {
            let page = self.page(page << PAGE);
            page.fetched = page.latest;
        }
    }
}
