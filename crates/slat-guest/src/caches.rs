//! What happens to memory when vCPUs switch their caches.

use crate::config::Config;

/// What a switch of a vCPU's caches does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CachePolicy {
    /// Every switch flushes.
    Every,
}

impl CachePolicy {
    /// The cheapest that loses no data.
    pub const DEFAULT: Self = Self::Every;

    pub(crate) const fn needs_views(self) -> bool {
        false
    }
}

#[derive(Debug)]
pub(crate) struct CacheState;

impl CacheState {
    pub fn new(_: &Config) -> Self {
        Self
    }
}
