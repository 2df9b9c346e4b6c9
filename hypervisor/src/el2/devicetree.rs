//! The device tree that Linux boots with. It has the parts of QEMU's `virt` machine that the guest
//! gets.

use alloc::format;
use slat_hypervisor::layout::*;
use slat_hypervisor::options::Options;
use vm_fdt::{Error, FdtWriter};

const GIC: u32 = 1;
const CLOCK: u32 = 2;
/// Interrupt specifiers of a GIC: shared or private; level-sensitive, active high or low.
const SPI: u32 = 0;
const PPI: u32 = 1;
const HIGH: u32 = 4;
const LOW: u32 = 8;

/// Writes the tree to its place in the guest's memory.
///
/// # Errors
/// Returns the error of the tree's writer.
pub fn write(options: &Options<'_>) -> Result<(), Error> {
    let tree = build(options)?;
    let at = (HOME + DEVICE_TREE) as *mut u8;
    // SAFETY: the guest's RAM has 2 MiB there before the initramfs, which is more than a tree
    // takes. EL2 maps this memory at its own address, and the guest does not run yet.
    unsafe { at.copy_from_nonoverlapping(tree.as_ptr(), tree.len()) }
    Ok(())
}

fn build(options: &Options<'_>) -> Result<alloc::vec::Vec<u8>, Error> {
    let mut tree = FdtWriter::new()?;
    let root = tree.begin_node("")?;
    tree.property_string("compatible", "linux,dummy-virt")?;
    tree.property_string("model", "slat")?;
    tree.property_u32("#address-cells", 2)?;
    tree.property_u32("#size-cells", 2)?;
    tree.property_u32("interrupt-parent", GIC)?;

    let chosen = tree.begin_node("chosen")?;
    tree.property_string("bootargs", options.guest)?;
    tree.property_string("stdout-path", "/pl011@9000000")?;
    if options.initrd != 0 {
        tree.property_u64("linux,initrd-start", GUEST_RAM + INITRD)?;
        tree.property_u64("linux,initrd-end", GUEST_RAM + INITRD + options.initrd)?;
    }
    tree.end_node(chosen)?;

    let memory = tree.begin_node(&format!("memory@{GUEST_RAM:x}"))?;
    tree.property_string("device_type", "memory")?;
    tree.property_array_u64("reg", &[GUEST_RAM, options.memory])?;
    tree.end_node(memory)?;

    let cpus = tree.begin_node("cpus")?;
    tree.property_u32("#address-cells", 1)?;
    tree.property_u32("#size-cells", 0)?;
    for cpu in 0..options.vcpus as u32 {
        let node = tree.begin_node(&format!("cpu@{cpu:x}"))?;
        tree.property_string("device_type", "cpu")?;
        tree.property_string("compatible", "arm,armv8")?;
        tree.property_u32("reg", cpu)?;
        tree.property_string("enable-method", "psci")?;
        tree.end_node(node)?;
    }
    tree.end_node(cpus)?;

    let psci = tree.begin_node("psci")?;
    tree.property_string("compatible", "arm,psci-1.0")?;
    tree.property_string("method", "hvc")?;
    tree.end_node(psci)?;

    let timer = tree.begin_node("timer")?;
    tree.property_string("compatible", "arm,armv8-timer")?;
    tree.property_array_u32(
        "interrupts",
        &[PPI, 13, LOW, PPI, 14, LOW, PPI, 11, LOW, PPI, 10, LOW],
    )?;
    tree.property_null("always-on")?;
    tree.end_node(timer)?;

    let gic = tree.begin_node(&format!("intc@{:x}", DISTRIBUTOR.base))?;
    tree.property_string("compatible", "arm,gic-v3")?;
    tree.property_u32("#interrupt-cells", 3)?;
    tree.property_null("interrupt-controller")?;
    let redistributors = redistributors(options.vcpus);
    tree.property_array_u64(
        "reg",
        &[DISTRIBUTOR.base, DISTRIBUTOR.bytes, redistributors.base, redistributors.bytes],
    )?;
    tree.property_phandle(GIC)?;
    tree.end_node(gic)?;

    let clock = tree.begin_node("apb-pclk")?;
    tree.property_string("compatible", "fixed-clock")?;
    tree.property_u32("#clock-cells", 0)?;
    tree.property_u32("clock-frequency", 24_000_000)?;
    tree.property_phandle(CLOCK)?;
    tree.end_node(clock)?;

    let uart = tree.begin_node(&format!("pl011@{:x}", UART.base))?;
    tree.property_string_list("compatible", ["arm,pl011", "arm,primecell"].map(Into::into).into())?;
    tree.property_array_u64("reg", &[UART.base, UART.bytes])?;
    tree.property_array_u32("interrupts", &[SPI, 1, HIGH])?;
    tree.property_array_u32("clocks", &[CLOCK, CLOCK])?;
    tree.property_string_list("clock-names", ["uartclk", "apb_pclk"].map(Into::into).into())?;
    tree.end_node(uart)?;

    tree.end_node(root)?;
    tree.finish()
}
