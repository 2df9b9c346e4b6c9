//! Host memory that the guest may only read for a time: its writes fault, and ask the backing anew.

use crate::backing::{Backing, HvaRange, MAY_WRITE};
use crate::device_notifier::{DeviceLeaf, DeviceTables};
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::memslots::MemslotSnapshot;
use crate::private::MemoryKind;
use crate::ranges::pieces;
use crate::worker::{Inside, Worker};
use alloc::vec::Vec;
use slat::{Contention, Format, GpaRange, Leaf, Software};

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Write-protects the host memory `host`. The guest can still read it where it is mapped. When
    /// this returns, the guest writes nothing of the range; until the result is dropped, no fault
    /// maps any of it, and so no write to it succeeds. The caller makes its change to the backing
    /// while it holds the result; after that the first write to each page asks the backing.
    ///
    /// All of the memory is as of one moment: if it has a write, it has all writes that the guest
    /// made before that one. Blocks that overlap the range are write-protected whole.
    ///
    /// If the guest has devices ([`Config::devices`](crate::Config::devices)), their right to write
    /// this memory is taken as well ([`DeviceTables`]): each leaf is reported as unmapped, then as
    /// mapped without `write`, and the writes of devices fail from then on. They are not part of
    /// the moment above, because they are stopped one after the other. Devices may write a page
    /// again after the guest has written it, or [`Worker::prefault`] has asked for a write.
    ///
    /// From before this call until the result is dropped, [`Backing::make_writable`] must return
    /// `None` for these pages. This waits for faults of all guests of the host: the caller holds no
    /// lock that the backing takes.
    ///
    /// *Invariant*: no thread gives back the right to write that a leaf loses here. A leaf gets
    /// that right from the backing's answer, or because its software bit allows it.
    /// 1. Faults that asked before the invalidation began are waited for; later ones see it, and do
    ///    not ask.
    /// 2. Then all leaves lose the software bit, and only then the right itself.
    pub fn freeze_writes(&mut self, host: HvaRange) -> InvalidationInProgress<'w> {
        let guest = self.guest;
        let held = guest.invalidations.begin(&host);
        guest.wait_for_faults();
        let ranges: Vec<GpaRange> = self.look(|view| {
            // This includes memslots that are being deleted or moved: the guest writes to the part
            // that is not emptied yet.
            view.backed_by(host).map(|(_, part)| part).collect()
        });
        for tables in guest.spaces() {
            for &range in &ranges {
                self.until_done_in(tables, range, shared::<F>, |guard, rest| {
                    guard.set_software(rest, Software::NONE, MAY_WRITE)
                });
            }
        }
        for tables in guest.spaces() {
            for &range in &ranges {
                self.until_done_in(tables, range, shared::<F>, |guard, rest| {
                    guard.write_protect(rest)
                });
            }
        }
        if guest.config.devices {
            for &range in &ranges {
                self.hold_devices(range);
            }
        }
        held
    }

    /// Reports the leaves of `range`, which are write-protected, to devices' tables once more,
    /// without the right to write. No fault gives it back meanwhile.
    fn hold_devices(&mut self, range: GpaRange) {
        let guest = self.guest;
        let platform = guest.tables.platform();
        for piece in pieces(range, F::size(F::LARGEST_LEAF)) {
            self.with_memslots(&guest.tables, |view, Inside { guard, .. }| {
                // Until it is released, no leaf comes or goes, so devices have what is found here.
                let _turn = guest.device_notifier_lock.take(platform);
                shared::<F>(view, piece, &mut |run| {
                    let leaves = loop {
                        let leaves = guard.leaves(run).expect("a memslot's pages");
                        match leaves.collect::<Result<Vec<_>, _>>() {
                            Ok(leaves) => break leaves,
                            Err(Contention { .. }) => platform.wait(),
                        }
                    };
                    notify_again(platform.device_tables(), &leaves);
                });
            });
        }
    }
}

/// Calls `run` with the shared memory in `piece`, as private memory has no host address. Pages
/// become private meanwhile, so the thread asks inside the tables: until it leaves them, what it
/// finds shared has no private leaf.
fn shared<F: Format>(view: &MemslotSnapshot, piece: GpaRange, run: &mut dyn FnMut(GpaRange)) {
    let memslots = view.parts(&piece);
    memslots.flat_map(|(memslot, part)| memslot.runs::<F>(part, MemoryKind::Shared)).for_each(run);
}

/// Takes the right to write `leaves` from devices.
fn notify_again(devices: &dyn DeviceTables, leaves: &[Leaf]) {
    let (Some(first), Some(last)) = (leaves.first(), leaves.last()) else { return };
    let end = last.gpa.0 + last.size.bytes();
    devices.unmapped(GpaRange::new(first.gpa, end - first.gpa.0).expect("a leaf at least"));
    for leaf in leaves {
        let (gpa, hpa, bytes) = (leaf.gpa, leaf.hpa, leaf.size.bytes());
        devices.mapped(DeviceLeaf { gpa, hpa, bytes, write: false });
    }
}
