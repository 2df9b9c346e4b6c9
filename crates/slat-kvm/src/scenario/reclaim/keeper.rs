//! Ways to keep a guest within the memory that it may have.

use super::{Config, Store};
use crate::cgroup::MemoryLimit;
use crate::knobs::Knobs;
use crate::memory::HostMemory;
use crate::{Backing, Error};
use std::ops::Range;
use std::time::Duration;

/// Time between two looks at what the guest has.
pub const INTERVAL: Duration = Duration::from_millis(5);

/// Ways to take memory away from a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Way {
    /// MADV_PAGEOUT of pages in their order, by a VMM that does not know which are used.
    Pageout,
    /// The limit of a control group (needs root).
    // With version 1, the kernel kills a process of which it finds no page that is not in use.
    Limit,
    /// memory.reclaim of a control group of version 2, again and again (needs root).
    MemoryReclaim,
    /// A balloon: the guest gives back pages outside of its hot set (MADV_DONTNEED).
    Balloon,
    /// DAMON_RECLAIM: the kernel takes what was not used for 100 ms; it has no limit (needs root).
    Damon,
}

const DAMON: &str = "/sys/module/damon_reclaim/parameters";
/// What DAMON_RECLAIM is told: pages that were not used for 100 ms, with as much memory and time as
/// it takes, however much memory is free.
const EAGER: &[(&str, &str)] = &[
    ("min_age", "100000"),
    ("quota_ms", "0"),
    ("quota_sz", "0"),
    ("wmarks_interval", "100000"),
    ("wmarks_high", "1000"),
    ("wmarks_mid", "1000"),
    ("wmarks_low", "0"),
    ("enabled", "Y"),
];
/// Memory that the group may have beyond the guest's while nothing is taken away.
const ROOM: u64 = 1 << 30;

impl Way {
    /// Returns whether a page that comes back has its contents.
    pub fn keeps_contents(self) -> bool {
        self != Self::Balloon
    }

    pub(super) fn check(self, store: Store) -> Result<(), Error> {
        match self {
            Self::Damon => Knobs::check(DAMON, "enabled").map_err(|why| Error::NoDamon { why }),
            Self::Balloon if store == Store::File => {
                Err(Error::invalid("store", "file", "has its contents back, which no balloon has"))
            }
            _ => Ok(()),
        }
    }
}

/// Keeps a guest within its limit.
pub(super) struct Keeper {
    way: Way,
    /// Bytes that the guest may have.
    allowed: u64,
    group: Option<MemoryLimit>,
    damon: Option<Knobs>,
    /// The next byte to take away, and those among which it moves.
    hand: u64,
    among: Range<u64>,
    memory: u64,
}

impl Keeper {
    pub fn new(config: &Config) -> Result<Self, Error> {
        let memory = config.shape.memory;
        let page = Backing::Small.page_size();
        let group = match config.way {
            Way::Limit | Way::MemoryReclaim => Some(MemoryLimit::new(memory + ROOM, 0)?),
            _ => None,
        };
        if let (Way::MemoryReclaim, Some(group)) = (config.way, &group) {
            group.takes_requests()?;
        }
        let cold = memory * u64::from(config.hot.0) / 100 / page * page;
        let from = if config.way == Way::Balloon { cold } else { 0 };
        Ok(Self {
            way: config.way,
            allowed: memory * u64::from(config.allowed) / 100,
            group,
            damon: None,
            hand: from,
            among: from..memory,
            memory,
        })
    }

    /// Takes memory away until the guest has what it may have. All of its memory is there.
    pub fn begin(&mut self, memory: &HostMemory) -> Result<(), Error> {
        match self.way {
            Way::Limit => {
                let group = self.group.as_ref().expect("it was made with the keeper");
                // What the process itself holds stays.
                let own = group.held()?.saturating_sub(self.memory);
                group.press(own + self.allowed)
            }
            Way::Damon => {
                let knobs = Knobs::set(DAMON, EAGER).map_err(|why| Error::NoDamon { why })?;
                self.damon = Some(knobs);
                Ok(())
            }
            _ => self.keep(memory, Some(self.memory)),
        }
    }

    /// Takes away what a guest has above its limit. It has `resident` bytes.
    pub fn keep(&mut self, memory: &HostMemory, resident: Option<u64>) -> Result<(), Error> {
        let page = Backing::Small.page_size();
        let excess = resident.unwrap_or(0).saturating_sub(self.allowed) / page * page;
        if excess == 0 {
            return Ok(());
        }
        match self.way {
            Way::Pageout | Way::Balloon => self.sweep(memory, excess),
            Way::MemoryReclaim => {
                self.group.as_ref().expect("it was made with the keeper").reclaim(excess)
            }
            Way::Limit | Way::Damon => Ok(()),
        }
    }

    /// Takes away so many bytes from the hand on, once around at most.
    fn sweep(&mut self, memory: &HostMemory, bytes: u64) -> Result<(), Error> {
        let mut left = bytes.min(self.among.end - self.among.start);
        while left > 0 {
            let end = (self.hand + left).min(self.among.end);
            let range = self.hand..end;
            match self.way {
                Way::Balloon => memory.discard(range)?,
                _ => memory.page_out(range)?,
            }
            left -= end - self.hand;
            self.hand = if end == self.among.end { self.among.start } else { end };
        }
        Ok(())
    }

    /// Ends the limit.
    pub fn end(&mut self) -> Result<(), Error> {
        self.damon = None;
        match &self.group {
            Some(group) => group.press(self.memory + ROOM),
            None => Ok(()),
        }
    }
}
