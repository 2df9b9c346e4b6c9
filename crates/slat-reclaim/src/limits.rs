//! Of several guests, which gives up pages.

use crate::paged::Paged;
use crate::pool::Ram;
use crate::swap::Swap;

/// What one guest has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Pages in memory.
    pub resident: u32,
    /// Pages that it may have.
    pub limit: u32,
    /// Of those in memory, pages that were idle for two walks.
    pub idle: u32,
}

/// The guest that gives up pages next: the one furthest above its limit; with none above it, the
/// one with the most idle pages, or the most at all. `None` if no guest has a page.
pub fn choose(loads: &[Load]) -> Option<usize> {
    let above = |load: &Load| load.resident.saturating_sub(load.limit);
    let key = |load: &Load| (above(load), load.idle, load.resident);
    let with_pages = loads.iter().enumerate().filter(|(_, load)| load.resident != 0);
    with_pages.max_by_key(|(_, load)| key(load)).map(|(index, _)| index)
}

impl<M: Ram, S: Swap> Paged<'_, M, S> {
    /// What it has, for [`choose`].
    pub fn load(&self) -> Load {
        let idle = self.idle().map_or(0, |idle| {
            idle.generations.iter().skip(2).map(|generation| generation.pages).sum()
        });
        Load { resident: self.resident(), limit: self.limit(), idle: idle as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn load(resident: u32, limit: u32, idle: u32) -> Load {
        Load { resident, limit, idle }
    }

    #[test]
    fn who_is_above_its_limit_gives_first_and_then_who_is_idle() {
        assert_eq!(choose(&[load(10, 20, 9), load(30, 20, 0), load(25, 20, 20)]), Some(1));
        assert_eq!(choose(&[load(10, 20, 9), load(20, 20, 3)]), Some(0));
        assert_eq!(choose(&[load(10, 20, 0), load(20, 20, 0)]), Some(1));
        assert_eq!(choose(&[load(0, 20, 0)]), None);
        assert_eq!(choose(&[]), None);
    }
}
