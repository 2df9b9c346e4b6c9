//! Filling a guest's memory, taking it away, filling it again.
//!
//! The phases are those of Linux's `max_guest_memory_test` and `mmu_stress_test`: the first fill
//! allocates, the second only maps. Under a cgroup's memory limit below the guest's memory the host
//! swaps, and with it asks KVM page by page whether they are in use and takes them away: ageing and
//! eviction beside faults, which is where the order of locks shows.

use crate::Error;
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// Fills, writes again, takes the memory out and puts it back, fills again; `iterations` times.
///
/// # Errors
/// What [`Shape::check`] finds; [`Error::Stopped`]; [`Error::Misread`] or [`Error::WrongStamp`] if
/// a page is not what was written; any other [`Error`] that the guest or the kernel gives cause
/// for.
pub fn run(shape: &Shape, iterations: u32, setting: Setting<'_>) -> Result<Vec<PhaseRun>, Error> {
    let ((), phases) = perform(shape, setting, |stage| {
        stage.populate(Work::each_page(Touch::Read))?;
        for iteration in (1..=iterations).map(Some) {
            stage.vcpus(Phase::Write, iteration, Work::each_page(Touch::Write))?;
            stage
                .calls(Phase::Reset, iteration, |guest, calls| calls.time(|| guest.unmap_all()))?;
            stage.vcpus(Phase::Refill, iteration, Work::each_page(Touch::Write))?;
            stage.vcpus(Phase::Read, iteration, Work::each_page(Touch::Read))?;
        }
        stage.checking()?;
        let guest = stage.guest;
        for (vcpu, part) in guest.parts().iter().enumerate() {
            // The last writes of a vCPU were all of its pages in order, then as many reads.
            let first = guest.position(vcpu) - 2 * part.pages;
            for page in 0..part.pages {
                if page % 4096 == 0 {
                    stage.go_on()?;
                }
                match shape.overlap || iterations == 0 {
                    true => drop(guest.written_by(part.first + page)?),
                    false => guest.check_stamp(part.first + page, first + page)?,
                }
            }
        }
        match guest.misread() {
            0 => Ok(()),
            pages => Err(Error::Misread { pages }),
        }
    })?;
    Ok(phases)
}
