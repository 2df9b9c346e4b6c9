//! Places the next kernel and its data in physical memory.

use anyhow::{Context, ensure};
use std::ops::Range;

/// Alignment of segments, in bytes. It is a multiple of every page size of arm64, because the
/// running kernel accepts segments of whole pages only.
pub const PAGE: u64 = 64 << 10;
/// Room for the device tree, in bytes: a kernel maps its tree by one block of this size.
pub const TREE_ROOM: u64 = 2 << 20;
const ALIGNMENT: u64 = 2 << 20;

/// Header of a raw arm64 image (Linux, Documentation/arch/arm64/booting.rst).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Offset of the image from a multiple of 2 MiB, in bytes.
    pub text_offset: u64,
    /// Bytes that the kernel needs from there on, including memory that it clears.
    pub image_size: u64,
}

impl Header {
    /// Parses the header of an image.
    ///
    /// # Errors
    /// Returns an error for another format, or for a size or offset that cannot be right.
    pub fn parse(image: &[u8]) -> anyhow::Result<Self> {
        ensure!(image.get(56..60) == Some(b"ARM\x64"), "this is no raw arm64 image");
        let word = |at: usize| image[at..].first_chunk().copied().map_or(0, u64::from_le_bytes);
        let (text_offset, image_size) = (word(8), word(16));
        ensure!(image_size != 0, "kernels before 3.17 do not say what memory they need");
        ensure!(text_offset < ALIGNMENT, "the text offset {text_offset:#x} is not below 2 MiB");
        ensure!(image_size < 1 << 32, "an image of {image_size:#x} bytes is too large");
        Ok(Self { text_offset, image_size })
    }

    /// Returns the bytes that the kernel needs if its file has this size.
    pub fn room(self, file: u64) -> u64 {
        self.image_size.max(file)
    }
}

/// Physical address of each part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub kernel: u64,
    pub tree: u64,
    pub purgatory: u64,
    pub initrd: u64,
}

impl Layout {
    /// Places the parts one behind the other in the first range of RAM in `/proc/iomem` that has
    /// room for all.
    ///
    /// The running kernel may be in the same place: it copies the segments there as its last step.
    ///
    /// # Errors
    /// Returns an error if no range of RAM has room, or if none is shown.
    pub fn of(iomem: &str, header: Header, file: u64, initrd: u64) -> anyhow::Result<Self> {
        let ram: Vec<Range<u64>> = iomem.lines().filter_map(ram).collect();
        ensure!(
            ram.iter().any(|ram| ram.end > 1),
            "/proc/iomem shows no System RAM; only root is shown where it is"
        );
        let fitting = ram.into_iter().find_map(|ram| {
            let kernel = ram.start.next_multiple_of(ALIGNMENT) + header.text_offset;
            let tree = (kernel + header.room(file)).next_multiple_of(ALIGNMENT);
            let purgatory = tree + TREE_ROOM;
            let initrd_at = purgatory + PAGE;
            let end = (initrd_at + initrd).next_multiple_of(PAGE);
            (end <= ram.end).then_some(Self { kernel, tree, purgatory, initrd: initrd_at })
        });
        fitting.context("no RAM has room for the kernel, its device tree and its initrd")
    }
}

/// Returns the range of a line of RAM. Parts of a range are on indented lines, which are left out.
fn ram(line: &str) -> Option<Range<u64>> {
    let (range, name) = line.split_once(" : ")?;
    let (start, last) = range.split_once('-')?;
    let parse = |digits| u64::from_str_radix(digits, 16).ok();
    (name == "System RAM").then_some(parse(start)?..parse(last)?.checked_add(1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IOMEM: &str = "\
09000000-09000fff : pl011@9000000
  09000000-09000fff : 9000000.pl011 pl011@9000000
40000000-40ffffff : System RAM
  40210000-40feffff : Kernel code
41000000-41ffffff : reserved
42100000-5fffffff : System RAM
";
    const HEADER: Header = Header { text_offset: 0x8_0000, image_size: 0x230_0000 };

    #[test]
    fn the_parts_are_aligned_and_do_not_overlap() {
        let layout = Layout::of(IOMEM, HEADER, 0x213_0000, 0x70_0001).unwrap();
        assert_eq!(
            layout,
            Layout {
                kernel: 0x4228_0000,
                tree: 0x4460_0000,
                purgatory: 0x4480_0000,
                initrd: 0x4481_0000
            }
        );
        assert!(layout.kernel + HEADER.image_size <= layout.tree);
    }

    #[test]
    fn memory_without_room_or_without_addresses_is_refused() {
        let error = Layout::of(IOMEM, HEADER, 0, 1 << 30).unwrap_err();
        assert!(error.to_string().contains("no RAM has room"), "{error}");
        let hidden = "00000000-00000000 : System RAM\n";
        let error = Layout::of(hidden, HEADER, 0, 0).unwrap_err();
        assert!(error.to_string().contains("only root"), "{error}");
    }

    #[test]
    fn a_debian_kernels_header_is_read_and_a_packed_one_refused() {
        let mut image = vec![0; 64];
        image[16..20].copy_from_slice(&[0, 0, 0x23, 2]);
        image[56..60].copy_from_slice(b"ARM\x64");
        assert_eq!(
            Header::parse(&image).unwrap(),
            Header { text_offset: 0, image_size: 0x223_0000 }
        );
        assert!(Header::parse(b"\x1f\x8b").is_err());
    }
}
