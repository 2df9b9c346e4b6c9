//! Architectures that are emulated with second-stage translation, by the names that others give
//! them, and the machine that QEMU makes of each.

use crate::qemu::{AARCH64, Qemu, X86_64};
use clap::ValueEnum;
use std::fmt;

/// An architecture that can be emulated with second-stage translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// AMD's nested paging (NPT)
    #[value(name = "x86_64")]
    X86_64,
    /// Arm's stage 2, VHE
    #[value(name = "aarch64")]
    Aarch64,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// This machine's.
    pub fn of_this_machine() -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.name() == std::env::consts::ARCH)
    }

    /// Its name in Rust's targets and in QEMU's programs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Its name in Debian's archive.
    pub const fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    /// What emulates it.
    pub const fn qemu(self) -> Qemu {
        match self {
            Self::X86_64 => X86_64,
            Self::Aarch64 => AARCH64,
        }
    }

    /// The machine, by QEMU's name, with all that second-stage translation needs.
    pub const fn machine(self) -> &'static str {
        match self {
            Self::X86_64 => "pc",
            Self::Aarch64 => "virt,virtualization=on,gic-version=3",
        }
    }

    /// A CPU that has all that QEMU can emulate: SVM with nested paging; EL2 with VHE.
    ///
    /// Without CMPXCHG16B, after which QEMU 7.2 has wrong flags until they are next set: an
    /// interrupt in between restores them, and Linux 6.12 dies of a trap flag that nobody set. With
    /// the fast kind of pointer authentication: the other one takes four times as long in all.
    pub const fn cpu(self) -> &'static str {
        match self {
            Self::X86_64 => "max,-cx16",
            Self::Aarch64 => "max,pauth-impdef=on",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
