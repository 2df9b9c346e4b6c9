//! Filling a guest's memory, removing it from the guest, and filling it again.
//!
//! The phases are those of Linux's `max_guest_memory_test` and `mmu_stress_test`: the first fill
//! allocates memory, the second only maps it. Under a cgroup's memory limit below the size of the
//! guest's memory, the host swaps. It then ages and unmaps single pages in KVM while the guest
//! faults, which exposes errors in the order of locks.

use crate::Error;
use crate::figure::{Figure::Time, Outcome, Results, Sentence, WHOLE_PHASES};
use crate::guest::Shape;
use crate::phase::{Phase, PhaseRun};
use crate::stage::{Setting, perform};
use crate::work::{Touch, Work};

/// How its results are shown.
pub const RESULTS: Results = Results {
    name: "memory-stress",
    title: "Memory taken away and filled again (KVM)",
    columns: &[
        (Time(Phase::Populate), "fill"),
        (Time(Phase::Write), "write"),
        (Time(Phase::Reset), "reset"),
        (Time(Phase::Refill), "refill"),
        (Time(Phase::Read), "read"),
    ],
    note: WHOLE_PHASES,
    said: Sentence::PerPage(Phase::Refill, "Filling memory again that was taken away"),
};

/// What its runs give.
pub const OUTCOME: Outcome<Vec<PhaseRun>> = Outcome::of(Time(Phase::Refill));

/// Populates the memory; then `iterations` times writes all of it, deletes and adds the memslots,
/// writes again, and reads.
///
/// # Errors
/// The errors of [`Shape::check`]; [`Error::Stopped`]; [`Error::Misread`] or [`Error::WrongStamp`]
/// if a page is wrong; any other [`Error`] of the guest or the kernel.
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
            // Each vCPU last wrote all of its pages in order, and then read each once.
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
