//! A machine that boots Linux: what it is made of, and how its kernel finds its lines.

use crate::Architecture;
use crate::qemu::Machine;
use anyhow::Context;
use std::fs;
use std::path::{Path, PathBuf};

/// What is made of a machine that boots Linux.
#[derive(Debug)]
pub struct Linux<'a> {
    /// The architecture.
    pub arch: Architecture,
    /// The CPUs.
    pub cpus: u32,
    /// The memory, in bytes.
    pub memory: u64,
    /// The NUMA nodes, which share both.
    pub numa_nodes: u32,
    /// The kernel.
    pub kernel: &'a Path,
    /// What the kernel unpacks.
    pub initramfs: &'a [u8],
    /// Words for the kernel's command line.
    pub append: &'a str,
    /// The model of the CPUs, if not the one that has all.
    pub cpu: Option<&'a str>,
    /// Whether its clocks count instructions, one a nanosecond, whatever the time outside is. There
    /// is one CPU then.
    pub counts_instructions: bool,
}

impl Architecture {
    /// x86's CPUs take turns on one thread: on threads of their own one may still execute the
    /// breakpoint with which Linux changes its text (QEMU 7.2) when Linux knows no more of it, and
    /// dies of it.
    const fn accelerator(self) -> &'static str {
        match self {
            Self::X86_64 => "tcg,thread=single",
            Self::Aarch64 => "tcg",
        }
    }

    /// The second serial line. Arm's machine has one of its own kind only; the other is on PCI.
    const fn second_line(self) -> [&'static str; 2] {
        match self {
            Self::X86_64 => ["-serial", "chardev:second"],
            Self::Aarch64 => ["-device", "pci-serial,chardev=second"],
        }
    }

    /// What Linux calls the second serial line.
    pub const fn port(self) -> &'static str {
        match self {
            Self::X86_64 => "/dev/ttyS1",
            Self::Aarch64 => "/dev/ttyS0",
        }
    }

    /// Where the kernel's messages go, from the first on. On x86 without the check that the timer
    /// ticks: on a busy machine QEMU's comes too late for it, and Linux panics.
    const fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "earlycon=uart8250,io,0x3f8 console=ttyS0 no_timer_check",
            Self::Aarch64 => "earlycon console=ttyAMA0",
        }
    }
}

impl Linux<'_> {
    /// The machine, and the file that its second serial line is written to.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn machine(&self, folder: &Path) -> anyhow::Result<(Machine, PathBuf)> {
        let mut machine = Machine::new(self.arch.qemu(), folder)?;
        let accelerator =
            if self.counts_instructions { "tcg,thread=single" } else { self.arch.accelerator() };
        machine.args(["-accel", accelerator, "-machine", self.arch.machine()]);
        if self.counts_instructions {
            // 2^0 ns an instruction; a CPU that waits skips to its next timer.
            machine.args(["-icount", "shift=0,sleep=off"]);
        }
        machine.args(["-cpu", self.cpu.unwrap_or(self.arch.cpu())]);
        machine.args(["-smp", &self.cpus.to_string()]);
        machine.args(["-m", &format!("{}k", self.memory >> 10)]);
        if self.numa_nodes > 1 {
            machine.args((0..self.numa_nodes).flat_map(|node| self.node(node)));
        }
        let second = machine.channel("second")?;
        machine.args(self.arch.second_line());
        let initramfs = folder.join("initramfs");
        fs::write(&initramfs, self.initramfs).context("cannot write the initramfs")?;
        machine.args([Path::new("-kernel"), self.kernel, Path::new("-initrd"), &initramfs]);
        // A kernel that panics ends the machine at once: it does not reboot.
        let append = format!("{} panic=-1 {}", self.arch.console(), self.append);
        machine.args(["-append", append.trim_end()]);
        Ok((machine, second))
    }

    /// Options for a node with its share of the CPUs and of the memory.
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
    fn a_machine_is_told_what_it_is_made_of() {
        let linux = Linux {
            arch: Architecture::Aarch64,
            cpus: 3,
            numa_nodes: 2,
            memory: 512 << 20,
            kernel: Path::new("Image"),
            initramfs: b"archive",
            append: "hugepages=4",
            cpu: Some("cortex-a76"),
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
        assert_eq!((after("-cpu"), after("-kernel")), (Some("cortex-a76"), Some("Image")));
        assert_eq!(fs::read(after("-initrd").unwrap()).unwrap(), b"archive");
        assert_eq!(fs::read(second).unwrap(), b"");
        let nodes = words.iter().filter(|word| word.starts_with("node,"));
        let nodes: Vec<_> = nodes.map(|word| word.rsplit('=').next().unwrap()).collect();
        assert_eq!(nodes, ["0-0", "1-2"]);
        assert!(after("-object").unwrap().ends_with("size=262144k"));
        assert_eq!(after("-icount"), Some("shift=0,sleep=off"));
        assert!(after("-append").unwrap().ends_with("panic=-1 hugepages=4"));
    }
}
