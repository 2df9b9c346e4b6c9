//! Devices that access a guest's memory: by pages that keep their place ([`Worker::pin`]), or by
//! tables of their own, which follow the guest's ([`DeviceTables`](crate::DeviceTables)).

use crate::backing::{Backing, Hva};
use crate::host::Host;
use crate::pins::PagePin;
use crate::private::MemoryKind;
use crate::worker::{Inside, Worker};
use core::fmt;
use slat::{Format, Gpa, GpaRange};

/// Why pages were not pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PinError {
    /// The range does not begin and end at page boundaries.
    Unaligned,
    /// No memslot has this address.
    Missing {
        /// The address.
        at: Gpa,
    },
    /// No memslot has this host memory.
    NoMemslot {
        /// The host's address.
        at: Hva,
    },
    /// Some of the range is private, and devices cannot access it.
    Private,
    /// A page has as many pins as can be counted.
    TooOften,
}

impl fmt::Display for PinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unaligned => f.write_str("what is pinned is a multiple of the page size"),
            Self::Missing { at } => write!(f, "no memslot has memory at {at} to pin"),
            Self::NoMemslot { at } => {
                write!(f, "no memslot has the memory at {at} of the host to pin")
            }
            Self::TooOften => f.write_str("a page is pinned too often"),
            Self::Private => f.write_str(
                "some of the range is private memory, which no device reaches; convert it first",
            ),
        }
    }
}

impl core::error::Error for PinError {}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Pins `range` until the result is dropped: its tables are not collapsed, and it does not
    /// become private. When this returns, no thread is doing so any more. Ranges may overlap; a
    /// page is pinned until its last pin is dropped.
    ///
    /// The caller makes sure that the backing does not take the pages away
    /// (`slat_reclaim::Pager::pin`), and that they are mapped. For a device that writes it calls
    /// [`Worker::prefault`] with [`Access::Write`](slat::Access::Write) after this call, so that
    /// pages shared with a fork ([`Cow`](crate::Cow)) become the guest's own. Code that moves pages
    /// by [`slat::Guard::replace`] calls [`Worker::is_pinned`] first. Deleting a memslot takes its
    /// pages from the guest, pinned or not.
    ///
    /// This takes turns with changes of memslots and waits for faults: the caller holds no lock
    /// that [`Backing::page`] takes.
    ///
    /// # Errors
    /// [`PinError`]; nothing is pinned.
    pub fn pin(&mut self, range: GpaRange) -> Result<PagePin<'w>, PinError> {
        let guest = self.guest;
        if (range.start().0 | range.size()) & (F::size(0).bytes() - 1) != 0 {
            return Err(PinError::Unaligned);
        }
        let _turn = guest.change_turn();
        let (covered, private) = self.look(|view| {
            let mut covered = range.start();
            for (memslot, part) in view.parts(&range) {
                if memslot.deleting || part.start() != covered {
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

    /// Returns whether some of `range` is pinned.
    pub fn is_pinned(&self, range: GpaRange) -> bool {
        self.guest.pins.overlap(&range)
    }

    /// Records that a device has used `range`, and whether it wrote it. Ageing then finds the pages
    /// used. If the device wrote them, the log has them, and a thread that takes the pages finds
    /// them dirty. Parts of the range that are private, or in no memslot, are ignored.
    ///
    /// The caller calls this after the device's access, and before the log is read for the last
    /// time. If an IOMMU marks the pages that a device writes, the caller reports those pages.
    ///
    /// Writes that are known only when the pages are unmapped
    /// ([`DeviceTables::unmapped`](crate::DeviceTables::unmapped)) come too late for the thread
    /// that takes the pages. It combines [`UnmappedPages::dirty`](crate::UnmappedPages::dirty) with
    /// the record of them that `unmapped` has made.
    ///
    /// Use is kept for guests with [`Config::devices`](crate::Config::devices).
    pub fn device_used(&mut self, range: GpaRange, wrote: bool) {
        self.look(|view| {
            for (memslot, part) in view.parts(&range) {
                for run in memslot.runs::<F>(part, MemoryKind::Shared) {
                    let (start, bytes) = (run.start().0, run.size());
                    memslot.spilled_bits.used.mark::<F>(&memslot.spec, start, bytes);
                    if wrote {
                        memslot.spilled_bits.written.mark::<F>(&memslot.spec, start, bytes);
                    }
                    if let Some(log) = memslot.log.as_ref().filter(|_| wrote) {
                        log.mark::<F>(&memslot.spec, start, bytes);
                    }
                }
            }
        });
    }
}

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    /// Returns whether devices have tables that follow these tables.
    #[inline]
    pub fn tells_devices(&self) -> bool {
        self.guest.config.devices && core::ptr::eq(self.tables, &*self.guest.tables)
    }
}
