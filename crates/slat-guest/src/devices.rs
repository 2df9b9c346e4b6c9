//! Devices that reach a guest's memory: by tables of their own, which follow the guest's
//! ([`DeviceTables`]), and in pages that stay where they are ([`Worker::pin`]).

use crate::backing::Backing;
use crate::host::Host;
use crate::pins::Pinned;
use crate::worker::{Inside, Worker};
use core::fmt;
use slat::{Format, Gpa, GpaRange, Hpa};

/// Shared memory as a device may reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceLeaf {
    /// Where the guest has it.
    pub gpa: Gpa,
    /// The memory behind it.
    pub hpa: Hpa,
    /// Bytes.
    pub bytes: u64,
    /// It may be written, whether or not the guest's leaf waits for a fault to be.
    pub write: bool,
}

/// An IOMMU's tables that follow a guest's: told of what is mapped and unmapped in the tables that
/// vCPUs share, if the guest has devices ([`Config::devices`](crate::Config::devices)). Nothing by
/// default. Private memory is not a device's to reach, and not told.
///
/// # Order
/// - [`DeviceTables::mapped`] comes after the leaf is there; again, with `write`, when it may be
///   written from then on.
/// - [`DeviceTables::unmapped`] comes after no CPU can reach the memory any more, and before it is
///   given back: before an invalidation, an eviction, a conversion or a deletion of a slot returns
///   or tells anybody, and before a fault maps another page there. When it returns no device must
///   reach the memory by these addresses.
/// - *Invariant*: the calls come in the order in which the leaves came, changed and went. A fault
///   holds a lock from before the leaf is there, or may be written, until it has told; who unmaps,
///   from before the leaf goes until its invalidation has completed and it has told. So faults wait
///   for unmaps, which such a guest pays for, and no other.
///
/// Both are called inside the guest's tables and under that lock, `unmapped` also with whatever
/// locks [`Worker::invalidate`](crate::Worker::invalidate) is called under, and `mapped` with those
/// that [`Backing::make_writable`] holds. They must not call the guest, wait for faults, nor take
/// locks that the backing takes.
pub trait DeviceTables {
    /// The memory can be reached. Of a leaf that several vCPUs make writable it may be told again.
    fn mapped(&self, _leaf: DeviceLeaf) {}

    /// Nothing of `range` may be reached any more. It may be more than was told as mapped.
    fn unmapped(&self, _range: GpaRange) {}
}

/// No devices.
#[derive(Clone, Copy, Debug)]
pub struct NoDevices;

impl DeviceTables for NoDevices {}

/// Why pages were not pinned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PinError {
    /// The range is not a multiple of pages.
    Unaligned,
    /// No slot has this address.
    Missing {
        /// It.
        at: Gpa,
    },
    /// Some of it is private: no device reaches it.
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
    /// Has `range` stay as it is until the result is dropped: its tables are not put together, and
    /// it does not become private. When this returns nobody who does so is under way. Ranges may
    /// overlap; each is pinned until the last that has it is dropped.
    ///
    /// That the backing does not take the pages is the caller's to see to
    /// (`slat_reclaim::Pager::pin`), and that they are there. Whoever moves pages by
    /// [`slat::Guard::replace`] asks [`Worker::is_pinned`] first. A slot that is deleted takes its
    /// pages with it, pinned or not.
    ///
    /// Takes turns with changes of slots and waits for faults: no lock may be held that
    /// [`Backing::page`] takes.
    ///
    /// # Errors
    /// [`PinError`]; nothing is pinned.
    pub fn pin(&mut self, range: GpaRange) -> Result<Pinned<'w>, PinError> {
        let guest = self.guest;
        if (range.start().0 | range.size()) & (F::size(0).bytes() - 1) != 0 {
            return Err(PinError::Unaligned);
        }
        let _turn = guest.changing.lock();
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

    /// Says that a device used `range`, and wrote it if so: for ageing its pages were used, and
    /// what it wrote is in the log, and is told as written to who takes the page. What is in no
    /// slot, or private, is left out. To be called after the device has done so, and before the log
    /// is read for the last time; with an IOMMU that marks what it writes, for what it marked.
    ///
    /// What was used is kept by guests with [`Config::devices`](crate::Config::devices).
    pub fn device_used(&mut self, range: GpaRange, wrote: bool) {
        self.look(|view| {
            for (slot, part) in view.parts(&range) {
                let (start, bytes) = (part.start().0, part.size());
                if let Some(kept) = &slot.kept {
                    kept.used.mark::<F>(&slot.spec, start, bytes);
                    if wrote {
                        kept.written.mark::<F>(&slot.spec, start, bytes);
                    }
                }
                if let Some(log) = slot.log.as_ref().filter(|_| wrote) {
                    log.mark::<F>(&slot.spec, start, bytes);
                }
            }
        });
    }
}

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    /// Whether maps in these tables are told to devices.
    pub fn tells_devices(&self) -> bool {
        self.guest.config.devices && core::ptr::eq(self.tables, &*self.guest.tables)
    }
}
