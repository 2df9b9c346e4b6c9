//! An architecture without guest code: everything builds, and [`check`] says no.

use super::{Progress, Stretch};
use crate::{Error, memory::HostMemory};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

pub(crate) const MEMORY_GPA: u64 = 1 << 32;

pub(crate) fn check(_kvm: &Kvm, _bytes: u64) -> Result<(), Error> {
    Err(Error::UnsupportedArch(std::env::consts::ARCH))
}

pub(crate) fn boot_bytes(_bytes: u64) -> u64 {
    rustix::param::page_size() as u64
}

pub(crate) fn write_boot(_boot: &HostMemory, _bytes: u64) -> Option<()> {
    None
}

pub(crate) fn set_up_vm(_vm: &VmFd) -> Result<(), Error> {
    Err(Error::UnsupportedArch(std::env::consts::ARCH))
}

pub(crate) fn set_up_vcpu(_kvm: &Kvm, _vcpu: &VcpuFd) -> Result<(), Error> {
    Err(Error::UnsupportedArch(std::env::consts::ARCH))
}

pub(crate) fn is_end_of_stretch(_exit: &VcpuExit<'_>) -> bool {
    false
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Registers;

impl Registers {
    pub(crate) fn at_entry() -> Self {
        Registers
    }

    pub(crate) fn set(&mut self, _stretch: Stretch) {}

    pub(crate) fn store(&self, _vcpu: &VcpuFd) -> Result<(), Error> {
        Err(Error::UnsupportedArch(std::env::consts::ARCH))
    }

    pub(crate) fn fetch(&mut self, _vcpu: &VcpuFd) -> Result<(), Error> {
        Err(Error::UnsupportedArch(std::env::consts::ARCH))
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress { gpa: 0, left: 0, written: 0 }
    }
}
