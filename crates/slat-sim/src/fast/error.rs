//! Why an access, or a CPU, was refused.

use crate::arch::{Access, Fault};
use std::fmt;

/// An access that did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessError {
    /// Where.
    pub gpa: u64,
    /// What the guest wanted.
    pub access: Access,
    /// Why it did not get it.
    pub why: Why,
}

/// Why an access did not happen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// The MMU says no; a hypervisor may answer that.
    Mmu(Fault),
    /// The address is not a multiple of 8.
    Unaligned,
    /// The tables lead out of the memory that the machine has for that.
    NoMemory {
        /// Where to.
        hpa: u64,
    },
}

impl From<Fault> for Why {
    fn from(fault: Fault) -> Self {
        Self::Mmu(fault)
    }
}

impl AccessError {
    /// What the MMU said, if it was the MMU.
    pub const fn fault(&self) -> Option<Fault> {
        match self.why {
            Why::Mmu(fault) => Some(fault),
            _ => None,
        }
    }
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:#x}: ", self.access, self.gpa)?;
        match self.why {
            Why::Mmu(fault) => write!(f, "{fault:?} fault"),
            Why::Unaligned => f.write_str("not a multiple of 8"),
            Why::NoMemory { hpa } => write!(f, "the tables lead to {hpa:#x}, which is no memory"),
        }
    }
}

impl std::error::Error for AccessError {}

/// Why a CPU could not be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CpuError {
    /// There is none of that number.
    Unknown {
        /// How many there are.
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
