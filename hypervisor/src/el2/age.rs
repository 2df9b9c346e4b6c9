//! Ageing: the manager scans the accessed flags that hardware sets, without a lock, and finds how
//! much memory the guest uses.

use super::guest::{Hypervisor, PAGE};
use super::manager::{Thread, sleep, wait_for};
use super::report::{record, say};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use alloc::{format, vec};
use core::sync::atomic::Ordering;
use serde_json::json;
use slat::{Ageing, Gpa, GpaRange, Skip};
use slat_hypervisor::layout::GUEST_RAM;

/// Pages of the guest's program, in which it says how large its set is. Its memory is in huge
/// pages, so a set fills the granules that it touches.
const GUEST_PAGE: u64 = 4096;
/// How long the guest runs between two scans, in milliseconds: it goes through its set in less.
const INTERVAL: u64 = 250;
/// Scans of each size, of which the median counts.
const SCANS: usize = 3;

/// Has the guest use all of its set, half, and a quarter, and scans; what it uses with a set of one
/// page is the system's own.
///
/// # Errors
/// The guest never began, or a size was missed by more than 5 %.
pub fn run(hypervisor: &'static Hypervisor, thread: &mut Thread<'_>) -> Result<(), String> {
    wait_for(hypervisor, 1)?;
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
            "a working set of {size} pages: {found} were young, {off:.1} % off; {system} are the system's"
        );
        sizes.push(json!({ "pages": size, "young": young, "system": system }));
        if off > 5.0 {
            missed.get_or_insert(format!("a set of {size} pages was found to have {found}"));
        }
    }
    record(&json!({ "record": "ageing", "sets": sizes }));
    hypervisor.control.stop.store(true, Ordering::Release);
    wait_for(hypervisor, 2)?;
    missed.map_or(Ok(()), Err)
}

fn median(
    hypervisor: &'static Hypervisor,
    thread: &mut Thread<'_>,
    size: u64,
) -> Result<u64, String> {
    hypervisor.control.size.store(size, Ordering::Release);
    sleep(hypervisor, INTERVAL);
    scan(hypervisor, thread)?;
    let mut young = Vec::new();
    for _ in 0..SCANS {
        sleep(hypervisor, INTERVAL);
        young.push(scan(hypervisor, thread)?);
    }
    young.sort_unstable();
    Ok(young[SCANS / 2])
}

/// Pages of the guest's RAM that were used since the last scan.
fn scan(hypervisor: &Hypervisor, thread: &mut Thread<'_>) -> Result<u64, String> {
    let bytes = hypervisor.options.memory;
    let range = GpaRange::new(Gpa(GUEST_RAM), bytes).map_err(|error| error.to_string())?;
    let mut young = vec![0; (bytes / PAGE).div_ceil(64) as usize];
    // Fresh: a page that a TLB holds is used without its flag.
    let how = Ageing { clear: true, skip: Skip::Nothing, fresh: true };
    let aged = thread.worker().age(range, None, &mut young, how).map_err(|e| e.to_string())?;
    if aged.unanswered != 0 {
        return Err(format!("{} pages were not answered", aged.unanswered));
    }
    Ok(aged.young)
}
