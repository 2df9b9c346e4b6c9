//! The job `age`: the manager reads and clears accessed marks without a lock, and so measures how
//! much memory the guest uses.

use super::guest::{Hypervisor, Thread};
use super::memory::PAGE;
use super::report::{record, say};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::{AgeOptions, Gpa, GpaRange, TableBits};
use slat_hypervisor::layout::GUEST_RAM;

/// Page size in which the guest's program declares its set, in bytes. The program's memory is in
/// huge pages, so a set fills each granule that it touches.
const GUEST_PAGE: u64 = 4096;
/// Time for which the guest runs between two scans, in milliseconds. The program needs less to read
/// its whole set.
const INTERVAL: u64 = 250;
/// Number of scans of each size; their median counts.
const SCANS: usize = 3;

/// Lets the guest use all of its set, a half and a quarter, and measures each. The pages used with
/// a set of one page are those of the guest's system, and are subtracted.
///
/// # Errors
/// Returns an error if the guest does not start, or if a measured size is wrong by more than 5 %.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    hypervisor.wait_for(1)?;
    let declared = hypervisor.control.declared.load(Ordering::Acquire);
    let system = median(hypervisor, thread, 1)?;
    let mut sizes = Vec::new();
    let mut missed = None;
    for pages in [declared, declared / 2, declared / 4] {
        let young = median(hypervisor, thread, pages)?;
        let size = pages * GUEST_PAGE / PAGE;
        let found = young.saturating_sub(system);
        let off = found.abs_diff(size) as f64 / size as f64 * 100.0;
        say!(
            "a working set of {size} pages: {found} were young, {off:.1} % off; {system} are the \
             system's"
        );
        sizes.push(json!({ "pages": size, "young": young, "system": system }));
        if off > 5.0 {
            missed.get_or_insert(format!("a set of {size} pages was found to have {found}"));
        }
    }
    record(&json!({ "record": "ageing", "sets": sizes }));
    hypervisor.control.stop.store(true, Ordering::Release);
    hypervisor.wait_for(2)?;
    missed.map_or(Ok(()), Err)
}

fn median(
    hypervisor: &'static Hypervisor,
    thread: &mut Thread<'_>,
    size: u64,
) -> Result<u64, String> {
    hypervisor.control.size.store(size, Ordering::Release);
    hypervisor.sleep(INTERVAL);
    scan(hypervisor, thread)?;
    let mut young = Vec::new();
    for _ in 0..SCANS {
        hypervisor.sleep(INTERVAL);
        young.push(scan(hypervisor, thread)?);
    }
    young.sort_unstable();
    Ok(young[SCANS / 2])
}

/// Returns the number of pages of the guest's RAM that were used since the last scan.
fn scan(hypervisor: &Hypervisor, thread: &mut Thread<'_>) -> Result<u64, String> {
    let bytes = hypervisor.options.memory;
    let range = GpaRange::new(Gpa(GUEST_RAM), bytes).map_err(|error| error.to_string())?;
    let mut young = vec![0; (bytes / PAGE).div_ceil(64) as usize];
    // `fresh`, because an access through a TLB entry does not set the accessed mark.
    let how = AgeOptions { clear: true, table_bits: TableBits::Ignored, flush_tlb: true };
    let aged = thread.worker().age(range, None, &mut young, how).map_err(|e| e.to_string())?;
    if aged.unanswered != 0 {
        return Err(format!("{} pages were not answered", aged.unanswered));
    }
    Ok(aged.young)
}
