//! Whether EL2 can call PSCI (DEN 0022), by the firmware's own tables.
//!
//! They name the conduit: SMC goes to EL3, and HVC to EL2. A program at EL2 has SMC alone: its own
//! HVC would come to its own vectors.

use dtoolkit::Node;
use dtoolkit::fdt::Fdt;
use dtoolkit::standard::NodeStandard;

const NONE: &str = "the firmware has no PSCI";
const HVC: &str = "PSCI is by HVC, which goes to EL2 and not below it";
const DAMAGED: &str = "the firmware's tables are damaged";

/// Bytes of the header of an ACPI table, and of an RSDP.
const HEADER: usize = 36;
/// Offset of ARM_BOOT_ARCH in the FADT.
const ARM_BOOT_ARCH: usize = 129;
const PSCI_COMPLIANT: u16 = 1 << 0;
const PSCI_USE_HVC: u16 = 1 << 1;

/// Reads so many bytes of the firmware's, at an address.
pub trait ReadFirmware<'m>: Fn(u64, usize) -> Option<&'m [u8]> {}
impl<'m, R: Fn(u64, usize) -> Option<&'m [u8]>> ReadFirmware<'m> for R {}

fn number<const BYTES: usize>(table: &[u8], at: usize) -> Option<[u8; BYTES]> {
    table.get(at..at + BYTES)?.try_into().ok()
}

/// Returns an ACPI table that is whole.
fn table<'m>(at: u64, read: &impl ReadFirmware<'m>) -> Option<&'m [u8]> {
    let bytes = u32::from_le_bytes(number(read(at, HEADER)?, 4)?) as usize;
    let table = read(at, bytes)?;
    let sum = table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    (bytes >= HEADER && sum == 0).then_some(table)
}

/// Returns the FADT's flags for Arm; its revisions before 5.1 have none.
fn boot_flags<'m>(rsdp: u64, read: &impl ReadFirmware<'m>) -> Option<u16> {
    let root = table(u64::from_le_bytes(number(read(rsdp, HEADER)?, 24)?), read)?;
    let tables = root[HEADER..].chunks_exact(8).filter_map(|at| number(at, 0));
    let mut tables = tables.filter_map(|at| table(u64::from_le_bytes(at), read));
    let fadt = tables.find(|table| table.starts_with(b"FACP"))?;
    Some(number(fadt, ARM_BOOT_ARCH).map_or(0, u16::from_le_bytes))
}

/// Looks into the ACPI tables of this RSDP.
///
/// # Errors
/// Returns why EL2 cannot call PSCI.
pub fn by_acpi<'m>(rsdp: u64, read: impl ReadFirmware<'m>) -> Result<(), &'static str> {
    match boot_flags(rsdp, &read) {
        None => Err(DAMAGED),
        Some(flags) if flags & PSCI_COMPLIANT == 0 => Err(NONE),
        Some(flags) if flags & PSCI_USE_HVC != 0 => Err(HVC),
        Some(_) => Ok(()),
    }
}

/// Looks into a devicetree. Functions of PSCI 0.1 have numbers that only the tree knows.
///
/// # Errors
/// Returns why EL2 cannot call PSCI.
pub fn by_devicetree(tree: &[u8]) -> Result<(), &'static str> {
    let root = Fdt::new(tree).map_err(|_| DAMAGED)?.root();
    let mut kinds = ["arm,psci-1.0", "arm,psci-0.2"].into_iter();
    let Some(psci) = kinds.find_map(|kind| root.find_compatible(kind).next()) else {
        let is_old = root.find_compatible("arm,psci").next().is_some();
        return Err(if is_old { "PSCI is of version 0.1" } else { NONE });
    };
    match psci.property("method").as_ref().map(dtoolkit::Property::value) {
        Some(b"smc\0") => Ok(()),
        Some(b"hvc\0") => Err(HVC),
        _ => Err(DAMAGED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};

    const FADT: usize = 0x200;

    /// Makes a table with its sum right.
    fn put(memory: &mut [u8], at: usize, name: &[u8; 4], bytes: usize, fill: &[(usize, &[u8])]) {
        memory[at..at + 4].copy_from_slice(name);
        memory[at + 4..at + 8].copy_from_slice(&(bytes as u32).to_le_bytes());
        for (offset, value) in fill {
            memory[at + offset..][..value.len()].copy_from_slice(value);
        }
        memory[at + 9] = 0;
        let sum = memory[at..at + bytes].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
        memory[at + 9] = sum.wrapping_neg();
    }

    /// Tables of a machine with these flags, its FADT of so many bytes.
    fn acpi(flags: u16, bytes: usize) -> Vec<u8> {
        let mut memory = vec![0; 0x400];
        memory[0x20..0x28].copy_from_slice(b"RSD PTR ");
        memory[0x20 + 24..][..8].copy_from_slice(&0x80_u64.to_le_bytes());
        let places = [0x100, FADT as u64].map(u64::to_le_bytes).concat();
        put(&mut memory, 0x80, b"XSDT", 52, &[(36, &places)]);
        put(&mut memory, 0x100, b"APIC", 44, &[]);
        // The specification's own offset.
        let fill: &[(usize, &[u8])] = &[(129, &flags.to_le_bytes())];
        put(&mut memory, FADT, b"FACP", bytes, if bytes > 129 { fill } else { &[] });
        memory
    }

    fn found(memory: &[u8]) -> Result<(), &'static str> {
        by_acpi(0x20, |at, bytes| memory.get(at as usize..)?.get(..bytes))
    }

    #[test]
    fn acpi_names_the_conduit() {
        for (flags, expected) in [(0, Err(NONE)), (1, Ok(())), (2, Err(NONE)), (3, Err(HVC))] {
            assert_eq!(found(&acpi(flags, 276)), expected, "{flags}");
        }
        // A FADT of revision 4, whose last field is RESET_VALUE.
        assert_eq!(found(&acpi(1, 129)), Err(NONE));
    }

    #[test]
    fn damaged_tables_are_not_believed() {
        for at in [0x80, FADT] {
            let mut memory = acpi(1, 276);
            memory[at + 40] ^= 1;
            assert_eq!(found(&memory), Err(DAMAGED), "{at:#x}");
        }
        let mut short = acpi(1, 276);
        put(&mut short, 0x80, b"XSDT", 20, &[]);
        assert_eq!(found(&short), Err(DAMAGED));
        let whole = acpi(1, 276);
        for end in 0..FADT + 276 {
            assert_eq!(found(&whole[..end]), Err(DAMAGED), "{end:#x}");
        }
    }

    fn tree(compatible: &str, method: Option<&str>) -> Vec<u8> {
        let mut tree = DeviceTree::new();
        let mut psci = DeviceTreeNode::new("psci").unwrap();
        psci.add_property(DeviceTreeProperty::new("compatible", compatible).unwrap());
        if let Some(method) = method {
            psci.add_property(DeviceTreeProperty::new("method", method).unwrap());
        }
        tree.root.add_child(DeviceTreeNode::new("memory@40000000").unwrap());
        tree.root.add_child(psci);
        tree.to_dtb()
    }

    #[test]
    fn a_devicetree_names_the_conduit() {
        let all = "arm,psci-1.0\0arm,psci-0.2\0arm,psci";
        for (compatible, method, expected) in [
            (all, Some("smc"), Ok(())),
            (all, Some("hvc"), Err(HVC)),
            ("arm,psci-0.2\0arm,psci", Some("smc"), Ok(())),
            ("arm,psci", Some("smc"), Err("PSCI is of version 0.1")),
            ("arm,scmi", Some("smc"), Err(NONE)),
            (all, Some("smccc"), Err(DAMAGED)),
            (all, None, Err(DAMAGED)),
        ] {
            let found = by_devicetree(&tree(compatible, method));
            assert_eq!(found, expected, "{compatible}, {method:?}");
        }
        assert_eq!(by_devicetree(&[0; 64]), Err(DAMAGED));
    }
}
