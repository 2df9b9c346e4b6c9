//! Architectures that QEMU emulates with second-stage translation: their names, and the machine
//! that QEMU emulates for each.

use crate::vm::qemu::{AARCH64, PPC64, Qemu, RISCV64, X86_64};
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
    /// RISC-V's G-stage
    #[value(name = "riscv64")]
    Riscv64,
    /// Power's partition-scoped radix trees, little-endian
    #[value(name = "ppc64le")]
    Ppc64le,
}

impl Architecture {
    /// All architectures.
    pub const ALL: [Self; 4] = [Self::X86_64, Self::Aarch64, Self::Riscv64, Self::Ppc64le];

    /// Returns whether slat runs there. On Power it does not, because `kvm-ioctls` has no calls for
    /// it.
    pub const fn runs_slat(self) -> bool {
        !matches!(self, Self::Ppc64le)
    }

    /// Returns the architecture of this machine, if it is one of them.
    pub fn of_this_machine() -> Option<Self> {
        Self::ALL.into_iter().find(|arch| arch.name() == std::env::consts::ARCH)
    }

    /// Returns its name in the names of QEMU's and of GCC's programs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
            Self::Riscv64 => "riscv64",
            Self::Ppc64le => "ppc64le",
        }
    }

    /// Returns its name in Debian's archive.
    pub const fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
            Self::Riscv64 => "riscv64",
            Self::Ppc64le => "ppc64el",
        }
    }

    /// Returns the emulator.
    pub const fn qemu(self) -> Qemu {
        match self {
            Self::X86_64 => X86_64,
            Self::Aarch64 => AARCH64,
            Self::Riscv64 => RISCV64,
            Self::Ppc64le => PPC64,
        }
    }

    /// Returns QEMU's name and options of the machine, with all that second-stage translation
    /// needs.
    pub const fn machine(self) -> &'static str {
        match self {
            Self::X86_64 => "pc",
            Self::Aarch64 => "virt,virtualization=on,gic-version=3",
            Self::Riscv64 => "virt",
            // KVM HV asks QEMU to enter its guests. TCG has no protection from speculation to
            // offer, and its own small firmware is enough for `-kernel`.
            Self::Ppc64le => {
                "pseries,x-vof=on,cap-nested-hv=on,cap-cfpc=broken,cap-sbbc=broken,\
                 cap-ibs=broken,cap-ccf-assist=off,cap-htm=off"
            }
        }
    }

    /// Returns QEMU's name and options of a CPU with all features that QEMU can emulate: SVM with
    /// nested paging, EL2 with VHE, or the hypervisor extension. Of Power's, POWER9, whose nested
    /// hypervisor QEMU has.
    ///
    /// CMPXCHG16B is excluded, because QEMU 7.2 leaves wrong flags after it until they are next
    /// set. An interrupt in between saves and restores them, and Linux 6.12 crashes at a trap flag
    /// that no code set. Pointer authentication uses QEMU's own algorithm, because with the
    /// architected one a run takes four times as long.
    pub const fn cpu(self) -> &'static str {
        match self {
            Self::X86_64 => "max,-cx16",
            Self::Aarch64 => "max,pauth-impdef=on",
            Self::Riscv64 => "rv64,h=true",
            Self::Ppc64le => "power9",
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
