//! The host's memory behind the guest: who owns it, what it holds, and what caches hold instead.
//!
//! Content is a version per page: how often it was written. A cache is wrong where a reader sees an
//! older version than the last.

use std::collections::{BTreeMap, HashMap};

const PAGE: u32 = 12;

/// One page.
#[derive(Clone, Copy, Default, Debug)]
struct Page {
    latest: u64,
    /// At the point of coherency.
    memory: u64,
    /// The line in the data cache, if there is one.
    cached: Option<u64>,
    /// The last version that the host wrote, which the guest may want to execute.
    host: u64,
    /// The version that instruction fetches see.
    fetched: u64,
    taken: bool,
}

/// What an access found wrong.
pub(crate) type Stale = &'static str;

/// All pages.
#[derive(Default, Debug)]
pub(crate) struct Host {
    /// First address and end of what was given, ever.
    given: BTreeMap<u64, u64>,
    pages: HashMap<u64, Page>,
}

impl Host {
    pub fn give(&mut self, hpa: u64, bytes: u64) {
        self.given.insert(hpa, hpa + bytes);
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

    /// Why the guest must not reach `hpa`, if it must not.
    pub fn refuses(&self, hpa: u64) -> Option<Stale> {
        let given = self.given.range(..=hpa).next_back().is_some_and(|(_, &end)| hpa < end);
        if !given {
            return Some("it was never given to the guest");
        }
        let taken = self.pages.get(&(hpa >> PAGE)).is_some_and(|page| page.taken);
        taken.then_some("it was taken back")
    }

    /// The page, which the host wrote once, by its caches, before it gave it.
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

    /// The guest reads or writes; `bypass` the caches or not.
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

    /// Data cleaned and invalidated to the point of coherency.
    pub fn clean(&mut self, hpa: u64, bytes: u64) {
        for page in hpa >> PAGE..(hpa + bytes).div_ceil(1 << PAGE) {
            let page = self.page(page << PAGE);
            if let Some(line) = page.cached.take() {
                // A clean line is dropped: memory may be newer.
                page.memory = page.memory.max(line);
            }
        }
    }

    /// Instruction caches forget.
    pub fn forget_instructions(&mut self, hpa: u64, bytes: u64) {
        for page in hpa >> PAGE..(hpa + bytes).div_ceil(1 << PAGE) {
            let page = self.page(page << PAGE);
            page.fetched = page.latest;
        }
    }
}
