//! The parts of a fault that few faults need: further attempts, missing pages, reasons.

use super::{ATTEMPTS, Fault, Step};
use crate::backing::{Backing, HvaRange, NoPage, Page};
use crate::guest::Guest;
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::outcome::{Outcome, Refusal, Retry};
use crate::private::{MemoryKind, PrivateAt, PrivatePage};
use crate::vcpu::Vcpu;
use slat::{Access, Format, Gpa, MapError, Memory};

impl<F: Format, H: Host, B: Backing> Vcpu<'_, F, H, B> {
    /// Continues after a first attempt that ended with `step`.
    #[cold]
    #[inline(never)]
    pub(super) fn answer_at_length(&mut self, gpa: Gpa, access: Access, mut step: Step) -> Outcome {
        let guest = self.worker.guest;
        let mut left = false;
        let mut replacing: Option<(HvaRange, InvalidationInProgress<'_>)> = None;
        for attempts in 1..=ATTEMPTS {
            match step {
                Step::Done(outcome) => return outcome,
                Step::Again => {}
                Step::Replaces(host) => {
                    let tables = guest.space(self.view);
                    replacing = Some((host, self.worker.unmap_elsewhere((tables, gpa), host)));
                }
                Step::Absent(memslot, host) => {
                    let page = Gpa(gpa.0 & !(F::size(0).bytes() - 1));
                    if let Ok(outcome) = self.wait_for(memslot, page, host) {
                        return outcome;
                    }
                }
                // The pages that the cache had are now in the path, and it is empty.
                Step::Dry => match self.worker.top_up(1) {
                    Ok(()) => {}
                    // The pages that the view maps come back one by one, when the vCPU uses them.
                    Err(_) if self.view.is_some() && !left => {
                        left = true;
                        self.leave_for_room();
                    }
                    Err(_) => return Outcome::Refused(Refusal::OutOfFrames),
                },
            }
            if attempts == ATTEMPTS {
                break;
            }
            let alone = replacing.as_ref().map(|(host, _)| *host);
            step = self.attempt(gpa, access, false, alone);
        }
        Outcome::Retry(Retry::Contended)
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    #[inline(never)]
    pub(super) fn private_page(&self, at: PrivateAt) -> Result<Page, NoPage> {
        let PrivatePage { hpa, block } = self.backing.private_page(at)?;
        Ok(Page { hpa, block, write: true, execute: true, memory: Memory::Normal })
    }
}

/// Returns the step after a reservation that failed.
#[cold]
pub(super) fn not_reserved(reason: MapError) -> Step {
    match reason {
        MapError::Occupied { .. } => Step::Again,
        MapError::CacheEmpty => Step::Dry,
        MapError::Contended => Outcome::Retry(Retry::Contended).into(),
        reason => Outcome::Refused(Refusal::Page(reason)).into(),
    }
}

/// Returns the step after the backing has answered that it has no page at guest address `at`.
#[cold]
pub(super) fn no_page(reason: NoPage, fault: &Fault<'_>, at: u64) -> Step {
    let spec = &fault.memslot.spec;
    match (reason, fault.kind) {
        // Arrivals are reported by addresses of shared memory only.
        (NoPage::Absent, MemoryKind::Private) => Outcome::Retry(Retry::Absent(None)).into(),
        (NoPage::Absent, MemoryKind::Shared) => Step::Absent(spec.id, spec.host_of(at)),
        (NoPage::Never, _) => Outcome::Refused(Refusal::NoPage).into(),
    }
}
