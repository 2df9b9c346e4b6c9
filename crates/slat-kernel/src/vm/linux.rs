//! A virtual machine that boots Linux: its parts, and its serial lines.

use crate::vm::Architecture;
use crate::vm::qemu::Machine;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// Configuration of a machine that boots Linux.
#[derive(Debug)]
pub struct Linux<'a> {
    /// The architecture.
    pub arch: Architecture,
    /// Number of CPUs.
    pub cpus: u32,
    /// Size of the memory, in bytes.
    pub memory: u64,
    /// Number of NUMA nodes, which divide CPUs and memory.
    pub numa_nodes: u32,
    /// Path of the kernel.
    pub kernel: &'a Path,
    /// The initial file system, as a cpio archive.
    pub initramfs: &'a [u8],
    /// Words to append to the kernel's command line.
    pub append: &'a str,
    /// The model of the CPUs; `None` for one with all features.
    pub cpu: Option<&'a str>,
    /// Whether Linux there tells QEMU which of its memory is free, and QEMU gives it back to this
    /// host (virtio 1.2, 5.5.6). It takes the module `virtio_balloon`.
    pub reports_free_pages: bool,
    /// Whether the machine's clocks advance by one nanosecond per instruction, independently of
    /// real time. Callers use it with one CPU only.
    pub counts_instructions: bool,
}

/// Seconds of the machine's clock after which RCU reports a stall. Of a clock that counts
/// instructions they do not depend on this host's load.
const STALL: &str = "rcupdate.rcu_cpu_stall_timeout=3 ";

impl Architecture {
    /// Returns QEMU's accelerator. x86's CPUs share one thread. With a thread each, a CPU may still
    /// execute the breakpoint by which Linux changes its code (QEMU 7.2) after Linux has forgotten
    /// it, and Linux crashes.
    const fn accelerator(self) -> &'static str {
        match self {
            Self::X86_64 => "tcg,thread=single",
            Self::Aarch64 | Self::Riscv64 | Self::Ppc64le => "tcg",
        }
    }

    /// Returns the options of the second serial line. It is a PCI device where the machine has only
    /// one serial line of its own.
    const fn second_line(self) -> [&'static str; 2] {
        match self {
            Self::X86_64 | Self::Ppc64le => ["-serial", "chardev:second"],
            Self::Aarch64 | Self::Riscv64 => ["-device", "pci-serial,chardev=second"],
        }
    }

    /// Returns Linux's name of the second serial line.
    pub const fn port(self) -> &'static str {
        match self {
            Self::X86_64 | Self::Riscv64 => "/dev/ttyS1",
            Self::Aarch64 => "/dev/ttyS0",
            Self::Ppc64le => "/dev/hvc1",
        }
    }

    /// Returns the kernel parameters that send all messages to the console. On x86 they disable the
    /// check of the timer: on a busy machine QEMU's timer ticks too late for it, and Linux panics.
    const fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "earlycon=uart8250,io,0x3f8 console=ttyS0 no_timer_check",
            Self::Aarch64 => "earlycon console=ttyAMA0",
            Self::Riscv64 => "earlycon console=ttyS0",
            Self::Ppc64le => "console=hvc0",
        }
    }
}

impl Linux<'_> {
    /// Returns the machine, and the path of the file to which its second serial line is written.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn machine(&self, folder: &Path) -> anyhow::Result<(Machine, PathBuf)> {
        let mut machine = Machine::new(self.arch.qemu(), folder)?;
        let accelerator =
            if self.counts_instructions { "tcg,thread=single" } else { self.arch.accelerator() };
        machine.args(["-accel", accelerator, "-machine", self.arch.machine()]);
        if self.counts_instructions {
            // 2^0 ns per instruction. A CPU that waits skips to its next timer.
            machine.args(["-icount", "shift=0,sleep=off"]);
        }
        machine.args(["-cpu", self.cpu.unwrap_or(self.arch.cpu())]);
        machine.args(["-smp", &self.cpus.to_string()]);
        machine.args(["-m", &format!("{}k", self.memory >> 10)]);
        if self.numa_nodes > 1 {
            machine.args((0..self.numa_nodes).flat_map(|node| self.node(node)));
        }
        if self.reports_free_pages {
            machine.args(["-device", "virtio-balloon-pci,free-page-reporting=on"]);
        }
        let second = machine.channel("second")?;
        machine.args(self.arch.second_line());
        let initramfs = folder.join("initramfs");
        fs::write(&initramfs, self.initramfs).context("cannot write the initramfs")?;
        machine.args([Path::new("-kernel"), self.kernel, Path::new("-initrd"), &initramfs]);
        // A kernel that panics ends the machine at once, instead of rebooting it; after an Oops it
        // would go on, and only the time limit would end it.
        let stall = if self.counts_instructions { STALL } else { "" };
        let append = format!("{} oops=panic panic=-1 {stall}{}", self.arch.console(), self.append);
        machine.args(["-append", append.trim_end()]);
        Ok((machine, second))
    }

    /// Returns the options of a NUMA node with its share of the CPUs and of the memory.
    fn node(&self, node: u32) -> [String; 4] {
        let share = (self.memory / u64::from(self.numa_nodes)) >> 10;
        let from = |node: u32| node * self.cpus / self.numa_nodes;
        let (first, last) = (from(node), from(node + 1) - 1);
        [
            "-object".to_owned(),
            format!("memory-backend-ram,id=node{node},size={share}k"),
            "-numa".to_owned(),
            format!("node,nodeid={node},memdev=node{node},cpus={first}-{last}"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulators_arguments_describe_the_machine() {
        let linux = Linux {
            arch: Architecture::Aarch64,
            cpus: 3,
            numa_nodes: 2,
            memory: 512 << 20,
            kernel: Path::new("Image"),
            initramfs: b"archive",
            append: "hugepages=4",
            cpu: Some("cortex-a76"),
            reports_free_pages: true,
            counts_instructions: true,
        };
        let folder = tempfile::tempdir().unwrap();
        let (machine, second) = linux.machine(folder.path()).unwrap();
        let words = machine.words();
        let after = |option: &str| {
            words.iter().position(|word| word == option).map(|place| &*words[place + 1])
        };
        assert_eq!((after("-smp"), after("-m")), (Some("3"), Some("524288k")));
        assert!(after("-machine").unwrap().contains("virtualization=on"));
        assert!(words.iter().any(|it| it.ends_with(",free-page-reporting=on")));
        assert_eq!((after("-cpu"), after("-kernel")), (Some("cortex-a76"), Some("Image")));
        assert_eq!(fs::read(after("-initrd").unwrap()).unwrap(), b"archive");
        assert_eq!(fs::read(second).unwrap(), b"");
        let nodes = words.iter().filter(|word| word.starts_with("node,"));
        let nodes: Vec<_> = nodes.map(|word| word.rsplit('=').next().unwrap()).collect();
        assert_eq!(nodes, ["0-0", "1-2"]);
        assert!(after("-object").unwrap().ends_with("size=262144k"));
        assert_eq!(after("-icount"), Some("shift=0,sleep=off"));
        let append = after("-append").unwrap();
        assert!(append.contains(" oops=panic panic=-1 ") && append.ends_with(" hugepages=4"));
    }
}
