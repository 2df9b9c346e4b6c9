//! What guests do with their caches. Each scenario returns whether every read found the last write.

use crate::vm::{Cpu, LostWrite, Manners, hpa, page};

/// A scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    BootInOrder,
    BootVcpu0Late,
    BootVcpu0Never,
    Hotplug,
    Kexec,
    HostWrites,
}

impl Scenario {
    pub const ALL: [Self; 6] = [
        Self::BootInOrder,
        Self::BootVcpu0Late,
        Self::BootVcpu0Never,
        Self::Hotplug,
        Self::Kexec,
        Self::HostWrites,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::BootInOrder => "boot in order",
            Self::BootVcpu0Late => "vCPU 0 not first",
            Self::BootVcpu0Never => "vCPU 0 never",
            Self::Hotplug => "hotplug",
            Self::Kexec => "kexec",
            Self::HostWrites => "host writes",
        }
    }

    pub fn run(
        self,
        cpus: [Cpu<'_, '_>; 3],
        machine: &crate::model::Machine,
    ) -> Result<(), LostWrite> {
        let [mut a, mut b, mut c] = cpus;
        // The VMM writes an image into memory before the guest runs.
        machine.write(hpa(IMAGE), 11, true);
        match self {
            Self::BootInOrder => boot(&mut a, &mut [&mut b, &mut c]),
            Self::BootVcpu0Late => boot(&mut b, &mut [&mut a, &mut c]),
            Self::BootVcpu0Never => boot(&mut b, &mut [&mut c]),
            Self::Hotplug => {
                boot_well(&mut a, &mut b, &mut c)?;
                hotplug(&mut a, &mut b, &mut c)
            }
            Self::Kexec => {
                boot_well(&mut a, &mut b, &mut c)?;
                kexec(&mut a, &mut b, &mut c)
            }
            Self::HostWrites => host_writes(&mut a, &mut b, &mut c),
        }
    }
}

const IMAGE: u64 = page(0);
/// In another block than the image.
const KERNEL: u64 = page(1000);
const DATA: u64 = page(2000);

/// The first vCPU reads its image and writes data before it switches on. The others start after it,
/// write data of their own, and switch on one after the other.
fn boot<'w, 'm>(first: &mut Cpu<'w, 'm>, others: &mut [&mut Cpu<'w, 'm>]) -> Result<(), LostWrite> {
    first.start();
    first.expect(IMAGE, 11)?;
    first.read(DATA);
    first.write(DATA, 21);
    first.write(DATA + 64, 22);
    first.on();
    first.expect(DATA, 21)?;
    first.expect(DATA + 64, 22)?;
    first.write(DATA + 64, 23);
    for other in others.iter_mut() {
        other.start();
        other.expect(IMAGE, 11)?;
    }
    for (number, other) in (1..).zip(others.iter_mut()) {
        let own = DATA + number * 4096;
        // Data that other vCPUs have written next to it stays.
        first.read(own);
        other.write(own, 30 + number);
        other.on();
        other.expect(own, 30 + number)?;
        first.expect(own, 30 + number)?;
    }
    first.expect(DATA + 64, 23)
}

/// A boot that loses nothing, before other scenarios.
fn boot_well<'w, 'm>(
    a: &mut Cpu<'w, 'm>,
    b: &mut Cpu<'w, 'm>,
    c: &mut Cpu<'w, 'm>,
) -> Result<(), LostWrite> {
    let manners = a.manners;
    let mut cpus = [a, b, c];
    cpus.iter_mut().for_each(|cpu| cpu.manners = Manners::Cleans);
    let [a, b, c] = &mut cpus;
    let result = boot(a, &mut [b, c]);
    cpus.iter_mut().for_each(|cpu| cpu.manners = manners);
    result
}

/// Two vCPUs switch off and on again while another runs.
fn hotplug<'w, 'm>(
    runs: &mut Cpu<'w, 'm>,
    b: &mut Cpu<'w, 'm>,
    c: &mut Cpu<'w, 'm>,
) -> Result<(), LostWrite> {
    let lines = [DATA + 128, DATA + 192];
    for (cpu, line) in [(&mut *b, lines[0]), (&mut *c, lines[1])] {
        cpu.write(line, 41);
        cpu.off(&[line]);
        cpu.expect(line, 41)?;
        runs.read(line);
    }
    for (cpu, line) in [(&mut *b, lines[0]), (&mut *c, lines[1])] {
        cpu.write(line, 42);
        runs.write(DATA + 256, 43);
        cpu.on();
        cpu.expect(line, 42)?;
        runs.expect(line, 42)?;
        runs.expect(DATA + 256, 43)?;
    }
    // The vCPU is switched off, and started again.
    b.write(lines[0], 44);
    if b.manners == Manners::Cleans {
        b.off(&[lines[0]]);
    }
    b.start();
    b.expect(lines[0], 44)?;
    b.write(lines[0], 45);
    b.on();
    b.expect(lines[0], 45)
}

/// All vCPUs switch off; one writes a new kernel over their data, and starts them again.
fn kexec<'w, 'm>(
    runs: &mut Cpu<'w, 'm>,
    b: &mut Cpu<'w, 'm>,
    c: &mut Cpu<'w, 'm>,
) -> Result<(), LostWrite> {
    let lines = [KERNEL, KERNEL + 64, KERNEL + 4096];
    b.write(lines[0], 51);
    c.write(lines[1], 52);
    b.off(&[lines[0]]);
    c.off(&[lines[1]]);
    runs.off(&lines);
    for (number, line) in (60..).zip(lines) {
        runs.write(line, number);
    }
    for (number, line) in (60..).zip(lines) {
        runs.expect(line, number)?;
    }
    runs.on();
    for (number, line) in (60..).zip(lines) {
        runs.expect(line, number)?;
    }
    b.start();
    c.start();
    for (number, cpu) in [b, c].into_iter().enumerate() {
        let (own, number) = (KERNEL + 8192 + 64 * number as u64, 70 + number as u64);
        cpu.expect(lines[2], 62)?;
        runs.read(own);
        cpu.write(own, number);
        cpu.on();
        cpu.expect(own, number)?;
        cpu.expect(lines[0], 60)?;
    }
    Ok(())
}

/// The host writes pages that vCPUs use past the caches, or are about to use, and reads what the
/// vCPUs wrote.
fn host_writes<'w, 'm>(
    a: &mut Cpu<'w, 'm>,
    b: &mut Cpu<'w, 'm>,
    c: &mut Cpu<'w, 'm>,
) -> Result<(), LostWrite> {
    a.start();
    let (ours, theirs) = (DATA, DATA + 64);
    a.write(ours, 81);
    a.host_writes(theirs, 82);
    a.expect(theirs, 82)?;
    a.write(theirs, 83);
    a.expect(theirs, 83)?;
    if a.host_reads(ours) != 81 || a.host_reads(theirs) != 83 {
        return Err(LostWrite);
    }
    a.on();
    a.expect(ours, 81)?;
    a.expect(theirs, 83)?;
    for (number, cpu) in [b, c].into_iter().enumerate() {
        let line = DATA + 4096 + 128 * number as u64;
        cpu.start();
        cpu.host_writes(line, 91);
        cpu.expect(line, 91)?;
        a.read(line + 64);
        cpu.write(line + 64, 92);
        if cpu.host_reads(line + 64) != 92 {
            return Err(LostWrite);
        }
        cpu.write(line + 64, 93);
        cpu.on();
        cpu.expect(line + 64, 93)?;
        cpu.start();
        cpu.host_writes(line, 94);
        cpu.expect(line, 94)?;
    }
    Ok(())
}
