//! An architecture without guest code: the crate builds, and [`check`] returns an error.

use super::Piece;
use crate::Error;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

pub(crate) const DEVICE: Option<(u64, u64)> = None;
pub(crate) const BOOT_LIMIT: u64 = 1 << 30;
pub(crate) const RETURNS: u64 = 0;

pub(crate) const fn table(gpa: u64) -> u64 {
    gpa
}

pub(crate) const fn page_2m(gpa: u64) -> u64 {
    gpa
}

#[cfg(test)]
pub(crate) const fn address(entry: u64) -> u64 {
    entry
}

fn unsupported<T>() -> Result<T, Error> {
    Err(Error::UnsupportedArch(std::env::consts::ARCH))
}

pub(crate) fn code() -> &'static [u8] {
    &[]
}

pub(crate) fn offset(_piece: Piece) -> u64 {
    0
}

pub(crate) fn check(_kvm: &Kvm, _bytes: u64) -> Result<(), Error> {
    unsupported()
}

pub(crate) fn set_up_vm(_vm: &VmFd) -> Result<(), Error> {
    unsupported()
}

pub(crate) fn set_up_vcpu(
    _kvm: &Kvm,
    _vm: &VmFd,
    _vcpu: &VcpuFd,
    _mailbox: u64,
) -> Result<(), Error> {
    unsupported()
}

pub(crate) fn is_done(_exit: &VcpuExit<'_>) -> bool {
    false
}

pub(crate) fn ticks_per_second(_vcpu: &VcpuFd) -> Result<f64, Error> {
    unsupported()
}

pub(crate) fn describe(_vcpu: &VcpuFd) -> String {
    String::new()
}
