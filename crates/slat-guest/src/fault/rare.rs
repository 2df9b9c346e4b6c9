//! The parts of a fault that few faults need: further attempts, missing pages, reasons.

use super::{ATTEMPTS, Fault, Mode, Step};
use crate::backing::{Backing, HvaRange, NoPage, Page};
use crate::budget::NoPages;
use crate::guest::Guest;
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::outcome::{Outcome, Refusal, Retry};
use crate::private::MemoryKind;
use crate::vcpu::Vcpu;
use slat::{Access, Format, Gpa, MapError, Memory};

impl<F: Format, H: Host, B: Backing> Vcpu<'_, F, H, B> {
    /// Continues after a first attempt that ended with `step`.
    #[cold]
    #[inline(never)]
    pub(super) fn answer_at_length(
        &mut self,
        gpa: Gpa,
        access: Access,
        wanted: Option<MemoryKind>,
        mut step: Step,
    ) -> Outcome {
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
                Step::SplitsPrivate => {
                    if let Err(refused) = self.worker.split_private_page(gpa) {
                        return Outcome::Refused(refused);
                    }
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
                    Err(NoPages::Limit(_)) if self.view.is_some() && !left => {
                        left = true;
                        self.leave_for_room();
                    }
                    Err(NoPages::Limit(limit)) => {
                        return Outcome::Refused(Refusal::TableLimit(limit));
                    }
                    Err(NoPages::Frames(_)) => return Outcome::Refused(Refusal::OutOfFrames),
                },
            }
            if attempts == ATTEMPTS {
                break;
            }
            let alone = replacing.as_ref().map(|(host, _)| *host);
            step = self.attempt(gpa, access, wanted, false, alone);
        }
        Outcome::Retry(Retry::Contended)
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Asks the backing for a page in the less usual cases: private memory, and pages at hand.
    #[inline(never)]
    pub(super) fn page_otherwise(&self, fault: &Fault<'_>, at: u64) -> Result<Page, NoPage> {
        let (backing, spec) = (&self.backing, &fault.memslot.spec);
        match (fault.kind, fault.mode == Mode::Ahead) {
            (MemoryKind::Shared, false) => backing.page(spec.host_of(at), fault.access),
            (MemoryKind::Shared, true) => backing.try_page(spec.host_of(at)).ok_or(NoPage::Absent),
            (MemoryKind::Private, false) => {
                backing.private_page(spec.private_of(at)).map(|page| Page {
                    hpa: page.hpa,
                    block: page.block,
                    write: true,
                    execute: true,
                    memory: Memory::Normal,
                })
            }
            // Private memory is mapped only for an access of the guest.
            (MemoryKind::Private, true) => Err(NoPage::Absent),
        }
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
