//! The job `kexec`: starts another kernel in place of the running one.

mod place;
mod tree;

use anyhow::{Context, bail, ensure};
use place::{Header, Layout};
use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

/// The device tree that the running kernel got.
const TREE: &str = "/sys/firmware/fdt";

/// A segment, in the layout of `kexec_load(2)`.
#[repr(C)]
struct Segment {
    buffer: *const u8,
    size: usize,
    address: u64,
    room: u64,
}

/// Loads a kernel, its device tree and its initramfs, and starts the kernel.
///
/// # Errors
/// Returns an error if a file cannot be read, if there is no room, or if the running kernel
/// refuses. Otherwise it does not return.
pub fn run(image: &Path, cmdline: &str, initrd: Option<&Path>) -> anyhow::Result<ExitCode> {
    let read =
        |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let kernel = read(image)?;
    let header = Header::parse(&kernel).with_context(|| image.display().to_string())?;
    let initrd = initrd.map(read).transpose()?;
    let memory = fs::read_to_string("/proc/iomem").context("cannot read /proc/iomem")?;

    let initrd_size = initrd.as_ref().map_or(0, |initrd| initrd.len() as u64);
    let layout = Layout::of(&memory, header, kernel.len() as u64, initrd_size)?;
    let range = initrd.is_some().then_some(layout.initrd..layout.initrd + initrd_size);
    let tree = tree::edited(&read(Path::new(TREE))?, cmdline, range).context(TREE)?;
    ensure!(tree.len() as u64 <= place::TREE_ROOM, "the device tree is larger than 2 MiB");
    let purgatory = purgatory(layout.tree, layout.kernel);

    let mut segments = vec![
        segment(&kernel, layout.kernel, header.room(kernel.len() as u64)),
        segment(&tree, layout.tree, tree.len() as u64),
        segment(&purgatory, layout.purgatory, purgatory.len() as u64),
    ];
    if let Some(initrd) = &initrd {
        segments.push(segment(initrd, layout.initrd, initrd_size));
    }
    load(layout.purgatory, &segments)?;
    println!(
        "work: kexec: kernel at {:#x}, device tree at {:#x}, initrd at {:#x}",
        layout.kernel, layout.tree, layout.initrd
    );
    // SAFETY: the call ends the running kernel and this process, or returns an error.
    unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    bail!("the loaded kernel was not started: {}", io::Error::last_os_error())
}

fn segment(bytes: &[u8], address: u64, room: u64) -> Segment {
    let room = room.next_multiple_of(place::PAGE);
    Segment { buffer: bytes.as_ptr(), size: bytes.len(), address, room }
}

fn load(entry: u64, segments: &[Segment]) -> anyhow::Result<()> {
    // The architecture of the running kernel (linux/kexec.h).
    const KEXEC_ARCH_DEFAULT: libc::c_ulong = 0;
    // SAFETY: the buffers outlive the call, and `Segment` has the kernel's layout.
    let loaded = unsafe {
        libc::syscall(
            libc::SYS_kexec_load,
            entry,
            segments.len(),
            segments.as_ptr(),
            KEXEC_ARCH_DEFAULT,
        )
    };
    ensure!(loaded == 0, "kexec_load: {}", io::Error::last_os_error());
    Ok(())
}

/// Returns the code that runs between the kernels. Linux enters the code that `kexec_load(2)`
/// loaded with x0 = 0, but an arm64 kernel expects the address of its device tree there
/// (Documentation/arch/arm64/booting.rst).
fn purgatory(tree: u64, kernel: u64) -> Vec<u8> {
    let code: [u32; 6] = [
        0x5800_00c0, // ldr x0, tree
        0x5800_00e4, // ldr x4, kernel
        0xaa1f_03e1, // mov x1, xzr
        0xaa1f_03e2, // mov x2, xzr
        0xaa1f_03e3, // mov x3, xzr
        0xd61f_0080, // br x4
    ];
    let code = code.iter().flat_map(|word| word.to_le_bytes());
    code.chain([tree, kernel].into_iter().flat_map(u64::to_le_bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_purgatory_loads_what_stands_behind_its_code() {
        let bytes = purgatory(0x1111_2222_3333_4444, 0x5555_6666_7777_8888);
        let loaded = |word: usize| {
            let code = u32::from_le_bytes(bytes[word * 4..][..4].try_into().unwrap());
            assert_eq!(code >> 24, 0x58, "ldr of 64 bits, literal");
            let at = word * 4 + ((code >> 5 & 0x7ffff) * 4) as usize;
            (code & 31, u64::from_le_bytes(bytes[at..][..8].try_into().unwrap()))
        };
        assert_eq!(loaded(0), (0, 0x1111_2222_3333_4444));
        assert_eq!(loaded(1), (4, 0x5555_6666_7777_8888));
    }
}
