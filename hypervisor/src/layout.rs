//! Where things are: in the machine, and as the guest sees it.

/// RAM of QEMU's `virt` machine. Below are devices.
pub const RAM: u64 = 0x4000_0000;

/// The guest's RAM starts there.
pub const GUEST_RAM: u64 = RAM;
/// Linux's image, from the start of the guest's RAM.
pub const KERNEL: u64 = 0x20_0000;
/// Its device tree.
pub const DEVICE_TREE: u64 = 0x0800_0000;
/// Its initramfs.
pub const INITRD: u64 = 0x0820_0000;
/// The least RAM that holds all three, and leaves Linux some.
pub const LEAST_RAM: u64 = 0x0c00_0000;

/// The most RAM: two copies of it end with what the hypervisor maps for itself, 512 GiB.
pub const MOST_RAM: u64 = 255 << 30;

/// Where the guest's memory begins in the machine: the hypervisor has what is below to itself.
/// Guest and machine addresses differ by a multiple of 1 GiB, so blocks of every size fit.
pub const HOME: u64 = 0x8000_0000;

/// What is passed through: the interrupt controller's distributor, the redistributors of all CPUs,
/// the serial line.
pub const DISTRIBUTOR: Device = Device { base: 0x0800_0000, bytes: 0x1_0000 };
/// As above: 128 KiB a CPU, the manager's among them, since the last one says that it is the last.
pub const fn redistributors(vcpus: u64) -> Device {
    Device { base: 0x080a_0000, bytes: 0x2_0000 * (vcpus + 1) }
}
/// A PL011.
pub const UART: Device = Device { base: 0x0900_0000, bytes: 0x1000 };

/// What only the guest sees: see [`CONTROL_EVENT`] and its neighbours. Nothing is there in the
/// machine.
pub const CONTROL: Device = Device { base: 0x0b00_0000, bytes: 0x1000 };
/// Written by the guest's program: 1 it has started, 2 it has passed, 3 it has failed. Read: 1 if
/// it is to stop.
pub const CONTROL_EVENT: u64 = 0;
/// Written: how many pages its working set has.
pub const CONTROL_DECLARE: u64 = 4;
/// Read: to how many pages it is to keep, unless 0.
pub const CONTROL_SIZE: u64 = 8;
/// Written: the number of a page frame of the program's memory, one after the other.
pub const CONTROL_PAGES: u64 = 12;
/// Written: twice the number of a page frame, and 1 to make the page private, 0 to make it shared.
/// Read: what the last such conversion came to, 0 if it was done.
pub const CONTROL_CONVERT: u64 = 16;

/// A device's registers.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// Their first address.
    pub base: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Device {
    /// Whether the address is one of them.
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
}

/// The second region, for copies: as far from the first as the guest's RAM takes, in whole GiB.
pub const fn away(ram: u64) -> u64 {
    HOME + ram.next_multiple_of(1 << 30)
}

/// RAM that the machine needs for a guest with so much, twice.
pub const fn machine_ram(ram: u64) -> u64 {
    away(ram) + ram.next_multiple_of(1 << 30) - RAM
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_copies_of_the_guests_ram_fit_beside_the_hypervisor() {
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
