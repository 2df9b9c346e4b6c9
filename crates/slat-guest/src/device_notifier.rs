//! Devices' tables that follow a guest's.

use slat::{Gpa, GpaRange, Hpa};

/// Shared memory that a device may access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceLeaf {
    /// The first guest address.
    pub gpa: Gpa,
    /// The memory behind it.
    pub hpa: Hpa,
    /// The size in bytes.
    pub bytes: u64,
    /// Whether devices may write it. The guest's leaf may still be read-only, until a fault makes
    /// it writable.
    pub write: bool,
}

/// An IOMMU's tables that follow a guest's. If the guest has devices
/// ([`Config::devices`](crate::Config::devices)), its threads report here what they map and unmap
/// in the tables that vCPUs share. The default methods do nothing. Devices do not access private
/// memory, so it is not reported.
///
/// # Order
/// - A thread calls [`DeviceTables::mapped`] after the leaf exists, and again, with `write`, when
///   the leaf may be written from then on.
/// - A thread calls [`DeviceTables::unmapped`] after no CPU can access the memory any more, and
///   before the memory is given back: before an invalidation, an eviction, a conversion or a
///   deletion of a memslot returns or reports anything, and before a fault maps another page there.
///   When it returns, no device may access the memory by these addresses.
/// - [`Worker::freeze_writes`](crate::Worker::freeze_writes) takes the right to write: it calls
///   [`DeviceTables::unmapped`], then [`DeviceTables::mapped`] without `write` for the same leaves.
/// - *Invariant*: the calls come in the order in which the leaves were mapped, changed and
///   unmapped. A fault holds a lock from before the leaf exists, or may be written, until it has
///   reported that. A thread that unmaps holds it from before the leaf goes until its invalidation
///   has completed and it has reported that. So faults wait for unmaps, in guests with devices
///   only.
///
/// Both methods run inside the guest's tables and under that lock. `unmapped` also runs under the
/// locks under which [`Worker::invalidate`](crate::Worker::invalidate) is called, and `mapped`
/// under those that [`Backing::make_writable`](crate::Backing::make_writable) holds. They must not
/// call the guest, wait for faults, or take locks that the backing takes.
///
/// If `mapped` panics, the leaf is there, and devices may lack it. If `unmapped` panics for a
/// range, it is still called for the others; it must not panic again then.
pub trait DeviceTables {
    /// Reports that devices may access the memory. A leaf that several vCPUs make writable may be
    /// reported more than once.
    fn mapped(&self, _leaf: DeviceLeaf) {}

    /// Reports that no device may access any of `range` any more. The range may be larger than the
    /// memory that was reported as mapped.
    ///
    /// A write of a device that becomes final, or known to the IOMMU's driver, only in this call
    /// cannot reach [`UnmappedPages::dirty`](crate::UnmappedPages::dirty): the implementation must
    /// not call the guest, so it cannot report it by
    /// [`Worker::device_used`](crate::Worker::device_used). The implementation records the pages
    /// that the IOMMU has marked as written. The page has such a write if either that record or
    /// `UnmappedPages::dirty` says so. The record is complete when `taken` is called with the page
    /// ([`Worker::invalidate`](crate::Worker::invalidate), [`Worker::evict`](crate::Worker::evict),
    /// [`Worker::convert`](crate::Worker::convert)), as this call comes before that one. If the
    /// pages stay the guest's (a memslot that moves, a fault that replaces a page,
    /// `freeze_writes`), the caller passes the record to `device_used` afterwards, so that the log
    /// has them too.
    fn unmapped(&self, _range: GpaRange) {}
}

/// The tables of a host without devices: they do nothing.
#[derive(Clone, Copy, Debug)]
pub struct NoDevices;

impl DeviceTables for NoDevices {}
