//! Devices that reach a guest's memory: in pages that stay where they are ([`Worker::pin`]), or by
//! tables of their own, which follow the guest's ([`DeviceTables`](crate::DeviceTables)).

use crate::backing::Backing;
use crate::host::Host;
use crate::pins::Pinned;
use crate::worker::{Inside, Worker};
use core::fmt;
use slat::{Format, Gpa, GpaRange};

/// Why pages were not pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PinError {
    /// The range does not begin and end at pages.
    Unaligned,
    /// No memslot has this address.
    Missing {
        /// The address.
        at: Gpa,
    },
    /// Some of the range is private: no device reaches it.
    Private,
    /// A page is pinned as often as can be counted.
    TooOften,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned => f.write_str("what is pinned is a multiple of the page size"),
            Self::Missing { at } => write!(f, "no slot has memory at {at} to pin"),
            Self::TooOften => f.write_str("a page is pinned too often"),
            Self::Private => f.write_str(
                "some of the range is private memory, which no device reaches; convert it first",
            ),
        }
    }
}

impl core::error::Error for PinError {}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Pins `range` until the result is dropped: its tables are not put together, and it does not
    /// become private. When this returns no thread is doing so any more. Ranges may overlap; a page
    /// is pinned until the last pin of it is dropped.
    ///
    /// The caller sees to it that the backing does not take the pages (`slat_reclaim::Pager::pin`),
    /// and that they are there: for a device that writes, by [`Worker::prefault`] with
    /// [`Access::Write`](slat::Access::Write) after this call, so that pages which are shared with
    /// a fork ([`Cow`](crate::Cow)) become the guest's own. Code that moves pages by
    /// [`slat::Guard::replace`] asks [`Worker::is_pinned`] first. Deleting a memslot takes its
    /// pages from the guest, pinned or not.
    ///
    /// Takes turns with changes of memslots and waits for faults: the caller holds no lock that
    /// [`Backing::page`] takes.
    ///
    /// # Errors
    /// [`PinError`]; nothing is pinned.
    pub fn pin(&mut self, range: GpaRange) -> Result<Pinned<'w>, PinError> {
        let guest = self.guest;
        if (range.start().0 | range.size()) & (F::size(0).bytes() - 1) != 0 {
            return Err(PinError::Unaligned);
        }
        let _turn = guest.change_turn();
        let (covered, private) = self.look(|view| {
            let mut covered = range.start();
            for (slot, part) in view.parts(&range) {
                if slot.going || part.start() != covered {
                    break;
                }
                covered = part.end();
            }
            (covered, view.has_private::<F>(&range))
        });
        if covered != range.end() {
            return Err(PinError::Missing { at: covered });
        }
        if private {
            return Err(PinError::Private);
        }
        let pinned = guest.pins.add(range);
        guest.wait_for_faults();
        Ok(pinned)
    }

    /// Whether some of `range` is pinned.
    pub fn is_pinned(&self, range: GpaRange) -> bool {
        self.guest.pins.overlap(&range)
    }

    /// Records that a device used `range`, and wrote it if so: ageing finds its pages used, and
    /// what the device wrote is in the log, and is reported as written to the thread that takes the
    /// page. What is in no memslot, or private, is left out. Called after the device has done so,
    /// and before the log is read for the last time; with an IOMMU that marks what it writes, for
    /// what it marked.
    ///
    /// Use is kept for guests with [`Config::devices`](crate::Config::devices).
    pub fn device_used(&mut self, range: GpaRange, wrote: bool) {
        self.look(|view| {
            for (slot, part) in view.parts(&range) {
                let (start, bytes) = (part.start().0, part.size());
                slot.kept.used.mark::<F>(&slot.spec, start, bytes);
                if wrote {
                    slot.kept.written.mark::<F>(&slot.spec, start, bytes);
                }
                if let Some(log) = slot.log.as_ref().filter(|_| wrote) {
                    log.mark::<F>(&slot.spec, start, bytes);
                }
            }
        });
    }
}

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    /// Whether devices are told what is mapped in these tables.
    #[inline]
    pub fn tells_devices(&self) -> bool {
        self.guest.config.devices && core::ptr::eq(self.tables, &*self.guest.tables)
    }
}
