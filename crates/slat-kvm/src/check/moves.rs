//! What an emulated machine needs so that its host moves pages: swap, and KSM.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes of swap: the pages of a disk that zram compresses, or of a RAM disk.
const SWAP: u64 = 256 << 20;
/// Disks that a kernel may have, and the file that gives the first its size.
const DISKS: [&str; 2] = ["/dev/zram0", "/dev/ram0"];
const SIZE: &str = "/sys/block/zram0/disksize";

/// Turns on swap and KSM, as far as the kernel has them. It is for the first process of a machine
/// that nobody else uses: what cannot be turned on stays off.
pub fn set_up_machine() {
    for (name, value) in [("sleep_millisecs", "20"), ("pages_to_scan", "4000"), ("run", "1")] {
        let _ = fs::write(Path::new("/sys/kernel/mm/ksm").join(name), value);
    }
    let _ = fs::write(SIZE, SWAP.to_string());
    let _ = DISKS.into_iter().find(|disk| swap_on(Path::new(disk)).is_ok());
}

/// Writes the header of a swap area (`mkswap`), and turns it on.
fn swap_on(disk: &Path) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(disk)?;
    let page = rustix::param::page_size() as u64;
    let size = io::Seek::seek(&mut &file, io::SeekFrom::End(0))?;
    if size < SWAP {
        return Err(io::ErrorKind::StorageFull.into());
    }
    file.write_all_at(&header(page, size), 0)?;
    file.sync_all()?;
    let path = std::ffi::CString::new(disk.as_os_str().as_encoded_bytes())?;
    // SAFETY: a string that ends in a zero byte, and flags.
    match unsafe { libc::swapon(path.as_ptr(), 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the first page of a swap area (`union swap_header`).
fn header(page: u64, size: u64) -> Vec<u8> {
    const MAGIC: &[u8] = b"SWAPSPACE2";
    let mut header = vec![0; page as usize];
    let last = (size / page - 1) as u32;
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032].copy_from_slice(&last.to_ne_bytes());
    let end = header.len();
    header[end - MAGIC.len()..].copy_from_slice(MAGIC);
    header
}

/// Counters of the host's memory management that tell whether pages moved.
const MOVED: [&str; 6] =
    ["pswpout", "pswpin", "pgmigrate_success", "thp_collapse_alloc", "thp_split_pmd", "cow_ksm"];

/// Returns how often pages of the whole host moved since it booted, by the kernel's names.
pub fn moved() -> std::collections::BTreeMap<String, u64> {
    let text = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let counter = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        MOVED.contains(&name).then_some((name.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(counter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_area_has_its_magic_and_its_last_page() {
        let header = header(4096, 64 << 20);
        assert_eq!(&header[4086..], b"SWAPSPACE2");
        assert_eq!(header[1028..1032], (16_384u32 - 1).to_ne_bytes());
    }
}
