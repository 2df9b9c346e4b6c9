//! Events in a guest's memory, reported as they happen, for a VMM's tracing.

use crate::backing::HvaRange;
use crate::memslots::spec::{MemslotId, MemslotSpec};
use crate::outcome::Outcome;
use slat::{Access, Gpa, GpaRange, Vmid};

/// A receiver of events, for a VMM's tracing. [`Host::events`](crate::Host::events) returns it.
///
/// With the default, `()`, no event is made, and no code for events is generated.
///
/// The thread that does the work calls it. The thread may be inside the guest's tables (when a
/// fault splits a block), or hold the lock for changes of memslots. So an implementation works on
/// no guest of the host, and does not wait for a thread that does. If it panics, the operation has
/// done what the event reports, and can be called again.
pub trait Events {
    /// Whether `event` is called.
    const WANTED: bool = true;

    /// Reports an event in the guest whose VMID is now `guest`. Guests that have the same VMID are
    /// not told apart by it: see [`Host::wake`](crate::Host::wake).
    fn event(&self, guest: Vmid, event: Event);
}

/// A receiver for hosts that want no events.
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

/// An event. One thread reports a `Begin` event and the matching `End` event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A vCPU begins to handle a fault.
    FaultBegin {
        /// The vCPU's number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// The access.
        access: Access,
    },
    /// The vCPU has handled the fault.
    FaultEnd {
        /// The vCPU's number.
        vcpu: u16,
        /// The address.
        gpa: Gpa,
        /// The fault's outcome.
        outcome: Outcome,
        /// How long it took, in ticks of [`Host::now`](crate::Host::now), as
        /// [`Stats`](crate::Stats) counts it.
        ticks: u64,
    },
    /// Blocks were split: in a fault, in a clear of the log, or eagerly.
    Split {
        /// The address from which the split looked for blocks.
        at: Gpa,
        /// The bytes of the blocks that were split.
        bytes: u64,
    },
    /// Tables became blocks again.
    Collapse {
        /// The range in which the operation looked for such tables.
        range: GpaRange,
        /// The bytes of the new blocks.
        bytes: u64,
    },
    /// An invalidation by the host begins.
    InvalidationBegin {
        /// The first of the host's ranges.
        host: HvaRange,
        /// The number of ranges.
        ranges: usize,
    },
    /// The guest cannot access the memory any more. The host has not finished with it.
    InvalidationEnd {
        /// Bytes that were mapped.
        bytes: u64,
    },
    /// A change of a memslot begins: it is made, moved or deleted, or its log begins or ends.
    MemslotBegin {
        /// The memslot as it was.
        before: Option<MemslotSpec>,
        /// The memslot as it will be; its size is 0 if it is deleted.
        after: MemslotSpec,
    },
    /// A pass over a memslot has finished a piece of it; a change takes one pass or several.
    Piece {
        /// The piece.
        range: GpaRange,
    },
    /// The change of a memslot has ended.
    MemslotEnd {
        /// The memslot's name.
        id: MemslotId,
    },
}

/// Makes an event with `event` and reports it to `events`, if events are wanted.
#[inline(always)]
pub(crate) fn report<E: Events>(
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

    /// Neither the event nor the VMID is evaluated, because `WANTED` is a constant.
    #[test]
    fn by_default_no_event_is_even_made() {
        report((), || panic!("a VMID was read"), || panic!("an event was made"));
        let nobody: &() = &();
        report(nobody, || panic!("a VMID was read"), || panic!("an event was made"));
        const { assert!(!<() as Events>::WANTED && !<&() as Events>::WANTED) };
    }
}
