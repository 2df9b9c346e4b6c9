//! The choice of the guest that gives up pages, among several guests.

use crate::paged::PagedMemory;
use crate::pool::Ram;
use crate::swap::Swap;

/// Numbers of pages that one guest has, and may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Pages in memory.
    pub resident: u32,
    /// Most pages that the guest may have in memory.
    pub limit: u32,
    /// Of those in memory, pages that were idle for two walks or more.
    pub idle: u32,
    /// Pages that the guest keeps in memory when other guests want memory.
    pub protected: u32,
}

/// Returns the index of the guest that should give up pages next: the one furthest above its limit;
/// if none is above its limit, the one with the most idle pages; if those are equal, the one with
/// the most pages. Leaves out guests that have no more pages than they keep; `None` if that leaves
/// no guest.
pub fn choose(loads: &[Load]) -> Option<usize> {
    let above = |load: &Load| load.resident.saturating_sub(load.limit);
    let key = |load: &Load| (above(load), load.idle, load.resident);
    let keeps = |load: &Load| load.protected.min(load.limit);
    let spare = loads.iter().enumerate().filter(|(_, load)| load.resident > keeps(load));
    spare.max_by_key(|(_, load)| key(load)).map(|(index, _)| index)
}

impl<M: Ram, S: Swap> PagedMemory<'_, M, S> {
    /// Returns the guest's load, for [`choose`].
    pub fn load(&self) -> Load {
        let idle = self.idle().map_or(0, |idle| {
            idle.generations.iter().skip(2).map(|generation| generation.pages).sum()
        });
        let (resident, limit, protected) = (self.resident(), self.limit(), self.protected());
        Load { resident, limit, idle: idle as u32, protected }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn load(resident: u32, limit: u32, idle: u32) -> Load {
        Load { resident, limit, idle, protected: 0 }
    }

    #[test]
    fn guests_above_their_limits_give_pages_first_then_idle_guests() {
        assert_eq!(choose(&[load(10, 20, 9), load(30, 20, 0), load(25, 20, 20)]), Some(1));
        assert_eq!(choose(&[load(10, 20, 9), load(20, 20, 3)]), Some(0));
        assert_eq!(choose(&[load(10, 20, 0), load(20, 20, 0)]), Some(1));
        assert_eq!(choose(&[load(0, 20, 0)]), None);
        assert_eq!(choose(&[]), None);
        let kept = |load: Load, protected| Load { protected, ..load };
        let guests = [kept(load(10, 20, 9), 10), load(3, 20, 0)];
        assert_eq!(choose(&guests), Some(1));
        assert_eq!(choose(&guests[..1]), None);
        assert_eq!(choose(&[kept(load(11, 20, 9), 10), load(3, 20, 0)]), Some(0));
        assert_eq!(choose(&[kept(load(30, 20, 9), 40)]), Some(0), "above its limit it keeps that");
    }
}
