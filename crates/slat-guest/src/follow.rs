//! Devices' tables that follow a guest's.

use slat::{Gpa, GpaRange, Hpa};

/// Shared memory as a device may reach it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceLeaf {
    /// The first guest address.
    pub gpa: Gpa,
    /// The memory behind it.
    pub hpa: Hpa,
    /// Bytes.
    pub bytes: u64,
    /// Whether it may be written, even if the guest's leaf becomes writable by a fault only.
    pub write: bool,
}

/// An IOMMU's tables that follow a guest's. They are told what is mapped and unmapped in the tables
/// that vCPUs share, if the guest has devices ([`Config::devices`](crate::Config::devices)). The
/// default methods do nothing. Devices do not reach private memory, so it is not reported.
///
/// # Order
/// - [`DeviceTables::mapped`] is called after the leaf is there; again, with `write`, when it may
///   be written from then on.
/// - [`DeviceTables::unmapped`] is called after no CPU can reach the memory any more, and before it
///   is given back: before an invalidation, an eviction, a conversion or a deletion of a memslot
///   returns or reports anything, and before a fault maps another page there. When it returns no
///   device must reach the memory by these addresses.
/// - *Invariant*: the calls come in the order in which the leaves came, changed and went. A fault
///   holds a lock from before the leaf is there, or may be written, until it has reported that; an
///   unmapping thread holds it from before the leaf goes until its invalidation has completed and
///   it has reported that. So faults wait for unmaps, in guests with devices only.
///
/// Both are called inside the guest's tables and under that lock; `unmapped` also with the locks
/// that [`Worker::invalidate`](crate::Worker::invalidate) is called under, and `mapped` with those
/// that [`Backing::make_writable`](crate::Backing::make_writable) holds. They must not call the
/// guest, wait for faults, nor take locks that the backing takes.
pub trait DeviceTables {
    /// The memory can be reached. A leaf that several vCPUs make writable may be reported more than
    /// once.
    fn mapped(&self, _leaf: DeviceLeaf) {}

    /// Nothing of `range` may be reached any more. It may be larger than what was reported as
    /// mapped.
    fn unmapped(&self, _range: GpaRange) {}
}

/// No devices.
#[derive(Clone, Copy, Debug)]
pub struct NoDevices;

impl DeviceTables for NoDevices {}
