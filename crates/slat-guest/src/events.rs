//! What happens to a guest's memory, as it happens: for a VMM's tracing.

use crate::backing::HvaRange;
use crate::outcome::Outcome;
use crate::slots::spec::{SlotId, SlotSpec};
use slat::{Access, Gpa, GpaRange, Vmid};

/// Takes note of what happens: a VMM's tracing. [`Host::events`](crate::Host::events) names it.
///
/// `()` does not: with it, which is the default, no event is made, and no code is there for it.
///
/// It is called by the thread that does what it hears of, outside the tables, but with a change's
/// turn: it works on no guest of the host, and does not wait for somebody who does.
pub trait Events {
    /// Whether it is called at all.
    const WANTED: bool = true;

    /// Something happened to the guest whose VMID is `guest` by then.
    fn event(&self, guest: Vmid, event: Event);
}

/// Nobody listens.
impl Events for () {
    const WANTED: bool = false;

    #[inline(always)]
    fn event(&self, _: Vmid, _: Event) {}
}

impl<E: Events + ?Sized> Events for &E {
    const WANTED: bool = E::WANTED;

    #[inline]
    fn event(&self, guest: Vmid, event: Event) {
        (**self).event(guest, event);
    }
}

/// What happens. What begins ends by the same thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A vCPU's access is about to be answered.
    FaultBegin {
        /// Its number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// What it wanted.
        access: Access,
    },
    /// It was answered.
    FaultEnd {
        /// The vCPU's number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// What it came to.
        outcome: Outcome,
        /// How long it took, as [`Host::now`](crate::Host::now) has it, and
        /// [`Stats`](crate::Stats) count it.
        ticks: u64,
    },
    /// Blocks were split: in a fault, a clear, or eagerly.
    Split {
        /// Where it began to look.
        at: Gpa,
        /// How many bytes of blocks.
        bytes: u64,
    },
    /// Tables became blocks again.
    Collapse {
        /// Somewhere in here.
        range: GpaRange,
        /// How many bytes of blocks.
        bytes: u64,
    },
    /// Memory is about to be taken from the guest.
    InvalidationBegin {
        /// The first range of the host's.
        host: HvaRange,
        /// How many there are.
        ranges: usize,
    },
    /// The guest cannot reach it any more; the host is not done with it.
    InvalidationEnd {
        /// How many bytes were mapped.
        bytes: u64,
    },
    /// A slot is about to change, or to come, to go, or to begin or end its log.
    SlotBegin {
        /// As it was.
        before: Option<SlotSpec>,
        /// As it will be; of no bytes if it goes.
        after: SlotSpec,
    },
    /// A pass over a slot is through with a piece of it; a change takes one pass or several.
    Piece {
        /// The piece.
        range: GpaRange,
    },
    /// It has changed.
    SlotEnd {
        /// Its name.
        id: SlotId,
    },
}

/// Tells `events`, if they are wanted, of what `event` says.
#[inline(always)]
pub(crate) fn tell<E: Events>(
    events: E,
    guest: impl FnOnce() -> Vmid,
    event: impl FnOnce() -> Event,
) {
    if E::WANTED {
        events.event(guest(), event());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Neither the event nor what is told with it is evaluated: `WANTED` is a constant.
    #[test]
    fn by_default_no_event_is_even_made() {
        tell((), || panic!("a VMID was read"), || panic!("an event was made"));
        let nobody: &() = &();
        tell(nobody, || panic!("a VMID was read"), || panic!("an event was made"));
        const { assert!(!<() as Events>::WANTED && !<&() as Events>::WANTED) };
    }
}
