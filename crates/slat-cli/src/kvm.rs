//! Scenarios that measure a guest under the host's KVM: they turn options into runs of `slat-kvm`,
//! and its reports into measurements.
//!
//! Each phase is a measurement with one sample for each time that it ran. Each vCPU's part in a
//! phase is another measurement, with the parameter `vcpu`. Stalls, which vCPUs measure by their
//! own clocks, are reported for the vCPU with the largest value.

pub mod age;
pub mod boot_caches;
pub mod dirty_log;
pub mod execute;
pub mod fork;
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
mod patterns;
mod phases;
pub mod populate;
pub mod postcopy;
mod ranking;
pub mod reclaim;
pub mod repeat;
pub mod restore;
mod restore_tables;
pub mod runs;
pub mod snapshot;
mod stalls;
mod tables;
pub mod tune;
pub mod tune_restore;
pub mod values;
mod visits_tables;
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
        Entry::of::<restore::Restore>(),
        Entry::of::<snapshot::Snapshot>(),
        Entry::of::<postcopy::Postcopy>(),
        Entry::of::<fork::Fork>(),
        Entry::of::<reclaim::Reclaim>(),
    ];
}

/// The scenarios of `slat tune`.
pub struct Tunes;

impl Scenarios for Tunes {
    const ALL: &'static [Entry] =
        &[Entry::of::<tune::TuneDirtyLog>(), Entry::of::<tune_restore::TuneRestore>()];
}
