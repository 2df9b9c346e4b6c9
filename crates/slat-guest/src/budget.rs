//! The table pages that a guest may have, counted exactly.

use crate::host::Host;
use crate::outcome::TableLimit;
use crate::sync::written;
use core::sync::atomic::{AtomicU64, Ordering};
use slat::{Format, OutOfFrames, TableCache};

/// The number of table pages that a worker should have room for: enough for two splits of the
/// largest block, and a map.
pub const TABLE_PAGES: usize = 64;

/// The account of one guest's table pages. A page is charged from before it is allocated until
/// after it is freed, so the guest never has more than it may.
///
/// The count orders no other memory accesses, so the loom models leave it out.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    charged: AtomicU64,
}

impl Budget {
    pub fn new(limit: Option<u32>) -> Self {
        Self { limit: limit.map_or(u64::MAX, u64::from), charged: AtomicU64::new(0) }
    }

    pub fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    /// Charges up to `wanted` pages, as the bound allows; returns the number.
    fn charge(&self, wanted: u64) -> u64 {
        let mut granted = 0;
        written(&self.charged);
        let _always = self.charged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |charged| {
            granted = wanted.min(self.limit.saturating_sub(charged));
            Some(charged + granted)
        });
        granted
    }

    pub fn give_back(&self, pages: u64) {
        if pages != 0 {
            self.charged.fetch_sub(pages, Ordering::Relaxed);
        }
    }

    /// Returns the number of pages that a worker that needs `needed` takes at once: near the bound
    /// no more than its share of the pages that are left, among it and `vcpus`.
    fn portion(&self, needed: u64, vcpus: u16) -> u64 {
        let share = self.limit.saturating_sub(self.charged()) / (u64::from(vcpus) + 1);
        (TABLE_PAGES as u64).min(share).max(needed)
    }

    /// Fills `cache` to at least `needed` pages, as far as guest and platform have them. If it has
    /// to take any, it takes more than that.
    pub fn fill<F: Format, H: Host>(
        &self,
        cache: &mut TableCache<'_, F, H>,
        needed: usize,
        vcpus: u16,
    ) -> Result<(), NoPages> {
        let before = cache.len();
        if before >= needed {
            return Ok(());
        }
        let wanted = self.portion(needed as u64, vcpus).saturating_sub(before as u64);
        let granted = self.charge(wanted);
        let filled = cache.fill(before + granted as usize);
        self.give_back(granted - (cache.len() - before) as u64);
        match filled {
            _ if cache.len() >= needed => Ok(()),
            // If the room is smaller than an operation asks for, fewer pages are enough.
            Ok(()) if granted == wanted && !cache.is_empty() => Ok(()),
            Ok(()) if granted == wanted => {
                Err(NoPages::Frames(OutOfFrames { wanted: needed, available: 0 }))
            }
            Err(error) => Err(NoPages::Frames(error)),
            Ok(()) => Err(NoPages::Limit(TableLimit { pages: self.limit })),
        }
    }
}

/// Why there are no table pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NoPages {
    Frames(OutOfFrames),
    Limit(TableLimit),
}
