//! Instruction fetches from leaves that may not be executed.

use super::{Fault, Step};
use crate::backing::{Backing, MAY_EXECUTE};
use crate::config::ExecuteHuge;
use crate::host::Host;
use crate::outcome::{Outcome, Refusal};
use crate::worker::Inside;
use slat::{ChangeError, Format, Interruption, Relax, Translation};

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    pub(super) fn execute(&mut self, fault: &Fault<'_>, leaf: Translation) -> Step {
        if leaf.attributes.execute.permits(fault.access) {
            return match self.relax(fault, leaf.size, MAY_EXECUTE) {
                Step::Done(Outcome::MadeExecutable(_)) => Outcome::MadeAccessed.into(),
                step => step,
            };
        }
        if !leaf.attributes.software.contains(MAY_EXECUTE) {
            return Outcome::Refused(Refusal::NotExecutable).into();
        }
        let (page, fetch) = (F::size(0), fault.access);
        let block = leaf.size > page;
        match self.guest.config.execute_huge {
            ExecuteHuge::Allowed => return self.relax(fault, leaf.size, MAY_EXECUTE),
            #[cfg(feature = "baselines")]
            ExecuteHuge::Zap if block => {
                // The marks of the block's other pages are kept, because its leaf is removed.
                let moving = self.guest.marks_in_flight.begin();
                self.empty(fault, leaf.size, |guest, view, removed| {
                    guest.spill_marks(view, removed)
                });
                drop(moving);
                return match self.map_apart(fault, page) {
                    Step::Done(Outcome::Mapped(_)) => {
                        self.note_table(fault);
                        Outcome::Zapped { from: leaf.size }.into()
                    }
                    step => step,
                };
            }
            ExecuteHuge::Split if block => match self.split_by(fault, |guard, page, cache| {
                guard.split_to_execute(page, cache, fetch, MAY_EXECUTE)
            }) {
                Err(step) => return step,
                // Nothing was split: the leaf is given the right below.
                Ok(granted) if !granted.is_changed() => {
                    granted.not_needed_here();
                }
                Ok(granted) => {
                    self.note_table(fault);
                    granted.flush_local();
                    return Outcome::Split { from: leaf.size }.into();
                }
            },
            ExecuteHuge::SplitPage if block => {
                if let Some(step) = self.split(fault) {
                    return step;
                }
                self.note_table(fault);
            }
            _ => {}
        }
        let granted = match self.guest.config.execute_huge {
            ExecuteHuge::Split => {
                let around = fault.page(F::size(1));
                match self.guard.relax(around, Relax::new(fetch).only_if(MAY_EXECUTE).unmarked()) {
                    Ok(granted) if granted.is_changed() => granted.flush_local(),
                    // The rights of the page itself are checked below.
                    Ok(granted) => granted.not_needed_here(),
                    Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {
                        return Step::Again;
                    }
                    Err(Interruption { reason, .. }) => return Outcome::from(reason).into(),
                }
            }
            _ => 0,
        };
        let step = self.relax(fault, page, MAY_EXECUTE);
        if granted != 0 || matches!(step, Step::Done(Outcome::MadeExecutable(_))) {
            // The table may be one that a log made, and that no fetch has noted.
            self.note_table(fault);
        }
        match step {
            Step::Done(Outcome::MadeExecutable(_) | Outcome::Spurious) if block => {
                Outcome::Split { from: leaf.size }.into()
            }
            Step::Done(Outcome::Spurious) if granted != 0 => Outcome::MadeExecutable(page).into(),
            step => step,
        }
    }
}
