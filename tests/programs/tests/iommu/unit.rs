//! What the history needs of a unit.

use crate::qemu::{Board, Qemu};
use slat::format::Geometry;
use slat::{Format, Hpa, Invalidation};
use std::rc::Rc;

/// The guest: VMID, domain, GSCID.
pub const GUEST: u16 = 7;
/// The device's slot on bus 0.
pub const SLOT: u64 = 4;

/// What a unit does with a page that is not accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Old {
    /// It does not look.
    Used,
    /// It refuses each access.
    Refused,
    /// It refuses reads. A write goes through, and the entry that it leaves in the TLB lets reads
    /// through: QEMU's deviation from RISC-V's manual, which refuses both.
    NotRead,
}

/// An IOMMU.
pub trait Unit: Sized {
    type Format: Format;
    /// Bits of a device's addresses.
    const ADDRESS_BITS: u32;
    const OLD: Old;

    fn board() -> &'static Board;

    /// The unit, not yet on.
    fn new(qemu: Rc<Qemu>) -> Self;

    fn format(&self) -> Self::Format;

    /// Switches translation on, and returns where the device's registers are.
    fn switch_on(&self, root: Hpa, geometry: &Geometry) -> u64;

    /// Executes the commands that `what` needs, of this guest, and waits for them.
    fn invalidate(&self, what: &Invalidation, guest: u16);

    /// Returns whether the unit refused an access since the last call.
    fn take_refused(&self) -> bool;
}
