//! Tables of devices that follow a guest's.

use slat::{Gpa, GpaRange, Hpa};

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
/// that [`Backing::make_writable`](crate::Backing::make_writable) holds. They must not call the guest, wait for faults, nor take
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
