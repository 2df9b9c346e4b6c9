//! An image for a USB stick, whose program proves the engine's tables on the machine that boots it,
//! and the report that the program writes. `tests/programs/src/stick` has the program.

use anyhow::{Context, ensure};
use fatfs::{FileSystem, FormatVolumeOptions, FsOptions};
use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};

/// Bytes of a sector, of what precedes the partition, and of the partition.
const SECTOR: usize = 512;
const BEFORE: usize = 1 << 20;
const PARTITION: usize = 47 << 20;
/// An EFI system partition, in a partition table of the old kind.
const EFI_SYSTEM: u8 = 0xef;

/// Where firmware looks for a program on a stick, and what the program writes.
const FOLDERS: [&str; 2] = ["EFI", "EFI/BOOT"];
pub const X86_64: &str = "EFI/BOOT/BOOTX64.EFI";
pub const AARCH64: &str = "EFI/BOOT/BOOTAA64.EFI";
const REPORT: &str = "slat.txt";

/// Writes an image with these programs, each with its place.
pub fn write(programs: &[(&str, PathBuf)], image: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", image.display());
    let mut partition = Cursor::new(vec![0; PARTITION]);
    let label = FormatVolumeOptions::new().volume_label(*b"SLAT       ");
    fatfs::format_volume(&mut partition, label).with_context(failed)?;
    {
        let volume = FileSystem::new(&mut partition, FsOptions::new()).with_context(failed)?;
        for folder in FOLDERS {
            volume.root_dir().create_dir(folder).with_context(failed)?;
        }
        for (place, program) in programs {
            let program = fs::read(program).context("cannot read the program")?;
            let mut file = volume.root_dir().create_file(place).with_context(failed)?;
            file.write_all(&program).with_context(failed)?;
            file.flush().with_context(failed)?;
        }
        volume.unmount().with_context(failed)?;
    }
    let mut bytes = vec![0; BEFORE];
    let entry = &mut bytes[446..462];
    entry[4] = EFI_SYSTEM;
    // Cylinders, heads and sectors say that the sector's number counts.
    entry[1..4].fill(0xff);
    entry[5..8].fill(0xff);
    entry[8..12].copy_from_slice(&((BEFORE / SECTOR) as u32).to_le_bytes());
    entry[12..16].copy_from_slice(&((PARTITION / SECTOR) as u32).to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    bytes.extend(partition.into_inner());
    fs::write(image, bytes).with_context(failed)
}

/// Returns the report that the program wrote.
pub fn report(image: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    ensure!(bytes.len() == BEFORE + PARTITION, "{} is no image of this kind", image.display());
    let volume = Cursor::new(bytes[BEFORE..].to_vec());
    let volume = FileSystem::new(volume, FsOptions::new()).context("the image has no volume")?;
    let mut text = String::new();
    let file = volume.root_dir().open_file(REPORT);
    file.and_then(|mut file| file.read_to_string(&mut text))
        .with_context(|| format!("the image has no {REPORT}"))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_the_program_where_firmware_looks() {
        let folder = tempfile::tempdir().unwrap();
        let [program, image] = ["program", "image"].map(|name| folder.path().join(name));
        fs::write(&program, "MZ").unwrap();
        write(&[(X86_64, program)], &image).unwrap();
        let bytes = fs::read(&image).unwrap();
        assert_eq!((bytes[450], &bytes[510..512]), (EFI_SYSTEM, &[0x55, 0xaa][..]));
        let start = u32::from_le_bytes(bytes[454..458].try_into().unwrap()) as usize * SECTOR;
        let volume = Cursor::new(bytes[start..].to_vec());
        let volume = FileSystem::new(volume, FsOptions::new()).unwrap();
        let mut text = String::new();
        volume.root_dir().open_file(X86_64).unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(text, "MZ");
        assert!(report(&image).unwrap_err().to_string().contains(REPORT));
    }
}
