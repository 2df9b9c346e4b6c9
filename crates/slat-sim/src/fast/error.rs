//! Errors of accesses, and of requests for a CPU.

use crate::arch::{Access, Fault};
use std::fmt;

/// Error of an access, which did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError {
    /// The guest physical address.
    pub gpa: u64,
    /// The access that the guest tried.
    pub access: Access,
    /// Reason why it failed.
    pub reason: Why,
}

/// Reason why an access failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// The MMU faulted; a hypervisor may handle this.
    Mmu(Fault),
    /// The address is not a multiple of 8.
    Unaligned,
    /// The tables lead to an address outside the machine's memory for tables or guests.
    NoMemory {
        /// The address.
        hpa: u64,
    },
}

impl From<Fault> for Why {
    fn from(fault: Fault) -> Self {
        Self::Mmu(fault)
    }
}

impl AccessError {
    /// Returns the MMU's fault, if it faulted.
    pub const fn fault(&self) -> Option<Fault> {
        match self.reason {
            Why::Mmu(fault) => Some(fault),
            _ => None,
        }
    }
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:#x}: ", self.access, self.gpa)?;
        match self.reason {
            Why::Mmu(fault) => write!(f, "{fault:?} fault"),
            Why::Unaligned => f.write_str("not a multiple of 8"),
            Why::NoMemory { hpa } => write!(f, "the tables lead to {hpa:#x}, which is no memory"),
        }
    }
}

impl std::error::Error for AccessError {}

/// Reason why a CPU is not available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuError {
    /// The machine has no CPU of that number.
    Unknown {
        /// Number of CPUs of the machine.
        cpus: usize,
    },
    /// Another thread has it.
    Taken,
}

impl fmt::Display for CpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { cpus } => write!(f, "the machine has {cpus} CPUs, counted from 0"),
            Self::Taken => f.write_str("the CPU is taken; drop it where it is"),
        }
    }
}

impl std::error::Error for CpuError {}
