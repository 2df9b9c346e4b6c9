//! The device tree of the next kernel: that of this machine, with another command line and
//! initramfs.

use anyhow::anyhow;
use dtoolkit::fdt::Fdt;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};
use std::ops::Range;

/// Returns the tree with this command line, and with this initramfs or none.
///
/// # Errors
/// Returns an error if `tree` is not a device tree.
pub fn edited(tree: &[u8], cmdline: &str, initrd: Option<Range<u64>>) -> anyhow::Result<Vec<u8>> {
    let wrong = |error| anyhow!("this is no device tree: {error}");
    let mut tree = DeviceTree::from_fdt(&Fdt::new(tree).map_err(wrong)?);
    if tree.root.child_mut("chosen").is_none() {
        tree.root.add_child(DeviceTreeNode::new_unchecked("chosen"));
    }
    let chosen = tree.root.child_mut("chosen").expect("it was added");
    chosen.add_property(DeviceTreeProperty::new_unchecked("bootargs", cmdline));
    let (start, end) = ("linux,initrd-start", "linux,initrd-end");
    for name in [start, end] {
        chosen.remove_property(name);
    }
    if let Some(initrd) = initrd {
        chosen.add_property(DeviceTreeProperty::new_unchecked(start, initrd.start));
        chosen.add_property(DeviceTreeProperty::new_unchecked(end, initrd.end));
    }
    Ok(tree.to_dtb())
}

#[cfg(test)]
mod tests {
    use super::*;
    use dtoolkit::{Node, Property};

    fn old() -> Vec<u8> {
        let mut tree = DeviceTree::new();
        let mut chosen = DeviceTreeNode::new("chosen").unwrap();
        for (name, value) in [("linux,initrd-start", 1_u32), ("linux,initrd-end", 2)] {
            chosen.add_property(DeviceTreeProperty::new(name, value).unwrap());
        }
        chosen.add_property(DeviceTreeProperty::new("bootargs", "old").unwrap());
        chosen.add_property(DeviceTreeProperty::new("stdout-path", "/pl011@9000000").unwrap());
        tree.root.add_child(chosen);
        tree.root.add_child(DeviceTreeNode::new("memory@40000000").unwrap());
        tree.to_dtb()
    }

    fn chosen(tree: &[u8], name: &str) -> Option<Vec<u8>> {
        let tree = DeviceTree::from_fdt(&Fdt::new(tree).unwrap());
        assert!(tree.find_node("/memory@40000000").is_some() || tree.root.children().count() == 1);
        Some(tree.find_node("/chosen")?.property(name)?.value().to_vec())
    }

    #[test]
    fn the_next_kernel_has_its_command_line_initrd_and_old_tree() {
        let tree = edited(&old(), "console=ttyAMA0", Some(0x4500_0000..0x4600_0000)).unwrap();
        assert_eq!(chosen(&tree, "bootargs").unwrap(), b"console=ttyAMA0\0");
        assert_eq!(chosen(&tree, "stdout-path").unwrap(), b"/pl011@9000000\0");
        let number = |name| u64::from_be_bytes(chosen(&tree, name).unwrap().try_into().unwrap());
        assert_eq!(
            number("linux,initrd-start")..number("linux,initrd-end"),
            0x4500_0000..0x4600_0000
        );
    }

    #[test]
    fn without_an_initrd_the_old_one_is_not_pointed_to() {
        let tree = edited(&old(), "", None).unwrap();
        assert_eq!(chosen(&tree, "linux,initrd-start"), None);
        assert_eq!(chosen(&tree, "linux,initrd-end"), None);
    }

    #[test]
    fn a_tree_without_a_chosen_node_gets_one() {
        let tree = edited(&DeviceTree::new().to_dtb(), "quiet", None).unwrap();
        assert_eq!(chosen(&tree, "bootargs").unwrap(), b"quiet\0");
        assert!(edited(b"no tree", "quiet", None).is_err());
    }
}
