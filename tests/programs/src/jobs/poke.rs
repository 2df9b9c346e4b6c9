//! The job `poke`: one access to a physical address.

use crate::device::Device;
use std::process::ExitCode;

/// Reads 4 bytes and prints them, or writes them. Returns exit code 3 if nothing responds at the
/// address.
///
/// # Errors
/// Returns an error if the kernel gives no access to the address.
pub fn run(address: u64, value: Option<u32>) -> anyhow::Result<ExitCode> {
    let device = Device::open(address)?;
    let done = match value {
        None => device.load(0).map(|value| println!("work: poke: {address:#x} holds {value:#x}")),
        Some(value) => device.store(0, value),
    };
    Ok(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => {
            println!("work: poke: bus error at {address:#x}");
            ExitCode::from(3)
        }
    })
}
