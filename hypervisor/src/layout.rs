//! Addresses in the machine, and in the guest's physical memory.

/// Start of the RAM of QEMU's `virt` machine. Devices are below it.
pub const RAM: u64 = 0x4000_0000;

/// Start of the guest's RAM.
pub const GUEST_RAM: u64 = RAM;
/// Offset of Linux's image from the start of the guest's RAM.
pub const KERNEL: u64 = 0x20_0000;
/// Offset of the guest's device tree.
pub const DEVICE_TREE: u64 = 0x0800_0000;
/// Offset of the guest's initramfs.
pub const INITRD: u64 = 0x0820_0000;
/// The smallest RAM of a guest, which holds all three and leaves memory to Linux.
pub const LEAST_RAM: u64 = 0x0c00_0000;

/// The largest RAM of a guest: two copies of it end at 512 GiB, where the hypervisor's own mapping
/// ends.
pub const MOST_RAM: u64 = 255 << 30;

/// Start of the guest's memory in the machine; RAM below it is the hypervisor's. Guest and machine
/// addresses differ by a multiple of 1 GiB, so that blocks of every size can be mapped.
pub const HOME: u64 = 0x8000_0000;

/// Distributor of the interrupt controller, which is passed through to the guest.
pub const DISTRIBUTOR: Device = Device { base: 0x0800_0000, bytes: 0x1_0000 };
/// Redistributors of all CPUs, 128 KiB each, which are passed through. They include that of the
/// manager's CPU, because only the last one says that it is the last.
pub const fn redistributors(vcpus: u64) -> Device {
    Device { base: 0x080a_0000, bytes: 0x2_0000 * (vcpus + 1) }
}
/// The serial line, a PL011, which is passed through.
pub const UART: Device = Device { base: 0x0900_0000, bytes: 0x1000 };

/// The control page, which only the guest has; the machine has nothing at this address. Its
/// registers are [`CONTROL_EVENT`] and those that follow.
pub const CONTROL: Device = Device { base: 0x0b00_0000, bytes: 0x1000 };
/// The guest's program writes 1 if it has started, 2 if it has passed, and 3 if it has failed. It
/// reads 1 if it is to stop.
pub const CONTROL_EVENT: u64 = 0;
/// The program writes a number that its job needs, such as the pages of its working set.
pub const CONTROL_DECLARE: u64 = 4;
/// The program reads how many pages it is to use; 0 means all.
pub const CONTROL_SIZE: u64 = 8;
/// The program writes the numbers of the page frames of its memory, one after the other.
pub const CONTROL_PAGES: u64 = 12;
/// The program writes twice the number of a page frame, plus 1 to make the page private, or plus 0
/// to make it shared. It reads the result of the last conversion, which is 0 if it was done.
pub const CONTROL_CONVERT: u64 = 16;

/// The address range of a device's registers.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// First address.
    pub base: u64,
    /// Size in bytes.
    pub bytes: u64,
}

impl Device {
    /// Returns whether the address is in the range.
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
}

/// Returns the start of the second region, for copies. It is behind the first, whose size is the
/// guest's RAM rounded up to whole GiB.
pub const fn away(ram: u64) -> u64 {
    HOME + ram.next_multiple_of(1 << 30)
}

/// Returns the RAM that the machine needs for two copies of `ram` bytes.
pub const fn machine_ram(ram: u64) -> u64 {
    away(ram) + ram.next_multiple_of(1 << 30) - RAM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_copies_of_the_guests_ram_fit_next_to_the_hypervisor() {
        assert_eq!(machine_ram(512 << 20), 3 << 30);
        assert_eq!(machine_ram(2 << 30), 5 << 30);
        assert_eq!(away(1 << 30), 0xc000_0000);
        assert_eq!(RAM + machine_ram(MOST_RAM), 512 << 30);
    }

    #[test]
    fn a_device_ends_where_it_says() {
        assert!(UART.contains(0x0900_0fff) && !UART.contains(0x0900_1000));
        assert!(!UART.contains(0x08ff_ffff));
    }
}
