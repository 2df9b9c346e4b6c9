//! A thread's right to walk the tables of a platform's guests.

use crate::grace::{Inside, NoSeat, Seat};
use crate::invalidation::Vmid;
use crate::platform::{Platform, same};

/// A thread's right to walk the tables of a platform's guests: a seat, taken once and kept.
#[derive(Debug)]
pub struct Participant<'p, P: Platform> {
    platform: &'p P,
    seat: &'p Seat,
}

impl<'p, P: Platform> Participant<'p, P> {
    /// Takes a seat.
    ///
    /// # Errors
    /// [`NoSeat`] if all are taken.
    pub fn register(platform: &'p P) -> Result<Self, NoSeat> {
        platform.grace().take_seat().map(|seat| Self { platform, seat })
    }

    /// Returns whether the seat belongs to `platform`.
    #[inline(always)]
    pub(crate) fn serves(&self, platform: &P) -> bool {
        same(self.platform, platform)
    }

    #[inline(always)]
    pub(crate) fn enter(&mut self, guest: Vmid) -> Inside<'_> {
        #[cfg(debug_assertions)]
        self.seat.enters(self.platform.thread());
        self.seat.enter(self.platform.grace(), guest)
    }
}

impl<P: Platform> Drop for Participant<'_, P> {
    fn drop(&mut self) {
        self.seat.give_back();
    }
}
