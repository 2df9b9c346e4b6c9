//! Events in a guest's memory, as they happen: for a VMM's tracing.

use crate::backing::HvaRange;
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::outcome::Outcome;
use slat::{Access, Gpa, GpaRange, Vmid};

/// A receiver of events: a VMM's tracing. [`Host::events`](crate::Host::events) names it.
///
/// With the default, `()`, no event is made, and there is no code for it.
///
/// The thread that does what an event reports calls it, outside the tables, but with the turn of a
/// change: it works on no guest of the host, and does not wait for a thread that does.
pub trait Events {
    /// Whether `event` is called at all.
    const WANTED: bool = true;

    /// Reports what happened to the guest whose VMID is `guest` by then.
    fn event(&self, guest: Vmid, event: Event);
}

/// Events are not wanted.
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

/// An event. The thread of a `Begin` event is that of the matching `End` event, except for a change
/// of a memslot that is done in pieces ([`Worker::begin_memslot`](crate::Worker::begin_memslot)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A vCPU's access is about to be answered.
    FaultBegin {
        /// The vCPU's number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// The access.
        access: Access,
    },
    /// It was answered.
    FaultEnd {
        /// The vCPU's number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// The fault's outcome.
        outcome: Outcome,
        /// How long it took, by [`Host::now`](crate::Host::now), and as [`Stats`](crate::Stats)
        /// count it.
        ticks: u64,
    },
    /// Blocks were split: in a fault, a clear, or eagerly.
    Split {
        /// Where the split began to look.
        at: Gpa,
        /// Bytes of blocks.
        bytes: u64,
    },
    /// Tables became blocks again.
    Collapse {
        /// The range that was looked at.
        range: GpaRange,
        /// Bytes of blocks.
        bytes: u64,
    },
    /// Memory is about to be taken from the guest.
    InvalidationBegin {
        /// The first of the host's ranges.
        host: HvaRange,
        /// The number of ranges.
        ranges: usize,
    },
    /// The guest cannot reach the memory any more; the host is not done with it.
    InvalidationEnd {
        /// Bytes that were mapped.
        bytes: u64,
    },
    /// A memslot is about to change, to be made or deleted, or to begin or end its log.
    MemslotBegin {
        /// The memslot as it was.
        before: Option<MemslotSpec>,
        /// The memslot as it will be; of no bytes if it is deleted.
        after: MemslotSpec,
    },
    /// A pass over a memslot has finished a piece of it; a change takes one pass or several.
    Piece {
        /// The piece.
        range: GpaRange,
    },
    /// A memslot has changed.
    MemslotEnd {
        /// The memslot's name.
        id: MemslotId,
    },
}

/// Reports the event that `event` makes to `events`, if they are wanted.
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
