//! What a guest under the host's KVM pays: from the command line to `slat-kvm` and back.
//!
//! Each phase is a measurement with a sample for each time it came; each vCPU's part in a phase is
//! another, with the parameter `vcpu`. How long vCPUs stood still, by their own clocks, is told of
//! the vCPU that had it worst.

pub mod age;
pub mod boot_caches;
pub mod dirty_log;
pub mod execute;
mod guest;
mod kept;
pub mod live;
pub mod log_options;
mod log_tables;
pub mod logged;
pub mod memory_stress;
pub mod memslot;
pub mod migrate;
mod migrate_tables;
pub mod options;
mod phases;
pub mod populate;
mod ranking;
pub mod repeat;
mod runs;
mod stalls;
mod tables;
pub mod tune;
pub mod values;
pub mod way;

use slat_lab::scenario::{Entry, Scenarios};

/// The scenarios of guests under KVM.
pub struct Guests;

impl Scenarios for Guests {
    const ALL: &'static [Entry] = &[
        Entry::of::<populate::Populate>(),
        Entry::of::<dirty_log::DirtyLog>(),
        Entry::of::<execute::Execute>(),
        Entry::of::<age::Age>(),
        Entry::of::<memory_stress::MemoryStress>(),
        Entry::of::<memslot::Memslot>(),
        Entry::of::<boot_caches::BootCaches>(),
        Entry::of::<migrate::Migrate>(),
    ];
}

/// What is tuned.
pub struct Tunes;

impl Scenarios for Tunes {
    const ALL: &'static [Entry] = &[Entry::of::<tune::TuneDirtyLog>()];
}
