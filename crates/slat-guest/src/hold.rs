//! Memory that the guest can only read for a time: its writes fault, and ask the backing anew.

use crate::backing::{Backing, HvaRange, MAY_WRITE};
use crate::host::Host;
use crate::invalidations::Invalidation;
use crate::private::MemoryKind;
use crate::worker::Worker;
use alloc::vec::Vec;
use slat::{Format, GpaRange, Software};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Takes the right to write `host` from the guest, which goes on reading it where it is mapped.
    /// When this returns, nothing of the range is written; until the value is dropped no fault maps
    /// any of it, and so no write to it succeeds. The caller tells the backing while it holds the
    /// value; after that the first write to each page asks the backing.
    ///
    /// All of the memory is as of one moment: it has no write that follows another without that
    /// other. Blocks that the range cuts through are protected whole.
    ///
    /// [`Backing::make_writable`] answers `None` for these pages from before this is called, until
    /// the value has been dropped. This waits for faults, of all guests of the host: the caller
    /// holds no lock that the backing takes.
    ///
    /// *Invariant*: a leaf gets the right to write from the backing's answer, or because its
    /// software bit says that it may have it (ADR 7). Faults that asked before the invalidation
    /// began are waited for, and later ones see it and do not ask. Then all leaves lose that bit,
    /// and only then the right itself: nothing gives back the right that a leaf loses here.
    pub fn hold_writes(&mut self, host: HvaRange) -> Invalidation<'w> {
        let guest = self.guest;
        let held = guest.invalidations.begin(&host);
        guest.wait_for_faults();
        // Private memory has no host address.
        let shared = MemoryKind::Shared;
        let ranges: Vec<GpaRange> = self.look(|view| {
            // Also of memslots that are going: the guest writes to the part that is not emptied
            // yet.
            let slots = view.backed_by(host);
            slots.flat_map(|(slot, part)| slot.runs::<F>(part, shared)).collect()
        });
        for tables in guest.spaces() {
            for &range in &ranges {
                self.until_done(tables, range, |guard, rest| {
                    guard.set_software(rest, Software::NONE, MAY_WRITE)
                });
            }
        }
        for tables in guest.spaces() {
            for &range in &ranges {
                self.until_done(tables, range, |guard, rest| guard.write_protect(rest));
            }
        }
        held
    }
}
