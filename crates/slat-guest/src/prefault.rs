//! Pages that are mapped before the guest accesses them: a range, by any worker, or pages at hand
//! around a fault.

use crate::backing::{Backing, HvaRange};
use crate::budget::NoPages;
use crate::fault::{ATTEMPTS, Fault, Mode, PATH, Step};
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::outcome::{Outcome, Refusal, Retry, TableLimit};
use crate::private::MemoryKind;
use crate::vcpu::Vcpu;
use crate::worker::Worker;
use slat::{Access, Format, Gpa, GpaRange};

/// The result of [`Worker::prefault`], in bytes. The sum is the size of the range, or less if the
/// call ended early.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PrefaultBytes {
    /// Newly mapped, or given the right that was asked for.
    pub mapped: u64,
    /// Already mapped, with that right.
    pub there: u64,
    /// Not in the backing yet. The backing was asked for each page.
    pub absent: u64,
    /// Not mapped because the host is invalidating them, their memslot is being deleted or moved,
    /// they are being converted, or another thread was changing the entry.
    pub held: u64,
    /// Refused by the backing or the tables.
    pub refused: u64,
    /// In no memslot, or in a read-only one if they were to be written.
    pub no_memory: u64,
    /// Where the call ended early, and why; `None` if it did not.
    pub stop: Option<(Gpa, PrefaultStop)>,
}

/// Why a call of [`Worker::prefault`] ended early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrefaultStop {
    /// `stop` returned `true`.
    Asked,
    /// The platform has no table pages.
    OutOfFrames,
    /// The guest may have no more table pages
    /// ([`Config::table_pages`](crate::Config::table_pages)).
    TableLimit(TableLimit),
}

/// A number that no vCPU has: the bitmap, not a ring, logs what a prefault writes.
const NOBODY: u16 = u16::MAX;

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Maps the guest's memory in `range`, as faults for `access` would: with the largest leaves
    /// that memslots, logs and backing allow, in the tables that vCPUs share. A page that is mapped
    /// for [`Access::Write`] counts as written.
    ///
    /// It does not wait for pages that the backing does not have yet. It calls `stop` before each
    /// leaf. The bounds of `range` are widened to pages.
    pub fn prefault(
        &mut self,
        range: GpaRange,
        access: Access,
        mut stop: impl FnMut() -> bool,
    ) -> PrefaultBytes {
        let page = F::size(0).bytes();
        let mut done = PrefaultBytes::default();
        let mut at = range.start().0 & !(page - 1);
        let end = range.end().0.saturating_add(page - 1) & !(page - 1);
        while at < end {
            if stop() {
                done.stop = Some((Gpa(at), PrefaultStop::Asked));
                break;
            }
            match self.prefault_at(Gpa(at), end, access) {
                Ok((next, count)) => {
                    *count(&mut done) += next - at;
                    at = next;
                }
                Err(reason) => {
                    done.stop = Some((Gpa(at), reason));
                    break;
                }
            }
        }
        done
    }

    /// Maps the memory at `gpa`. Returns the address, at most `end`, up to which it came, and the
    /// sum to which these bytes are added.
    fn prefault_at(
        &mut self,
        gpa: Gpa,
        end: u64,
        access: Access,
    ) -> Result<(u64, Count), PrefaultStop> {
        let guest = self.guest;
        let page = F::size(0).bytes();
        let mut replacing: Option<(HvaRange, InvalidationInProgress<'_>)> = None;
        for attempt in 0..ATTEMPTS {
            let _at_hand = self.top_up(PATH);
            let found = self.with_memslots(&guest.tables, |view, inside| {
                let Some(memslot) = view.at(gpa) else {
                    let rest = GpaRange::new(gpa, end - gpa.0).expect("something is left");
                    let next = view.parts(&rest).next().map_or(end, |(_, part)| part.start().0);
                    return Found::Upto(next, |done| &mut done.no_memory);
                };
                let behind = memslot.spec.range().end().0;
                if memslot.deleting {
                    return Found::Upto(behind, |done| &mut done.held);
                }
                if access == Access::Write && memslot.spec.read_only {
                    return Found::Upto(behind, |done| &mut done.no_memory);
                }
                if let Ok(Some(leaf)) = inside.guard.translate(gpa)
                    && leaf.attributes.read
                    && (access != Access::Write || leaf.attributes.write)
                    && (!access.is_fetch() || leaf.attributes.execute.permits(access))
                {
                    let next = (gpa.0 & !(leaf.size.bytes() - 1)) + leaf.size.bytes();
                    return Found::Upto(next.min(behind), |done| &mut done.there);
                }
                let Some(kind) =
                    GpaRange::new(gpa, page).ok().and_then(|at| memslot.kind_of::<F>(&at))
                else {
                    return Found::Upto(gpa.0 + page, |done| &mut done.held);
                };
                let replaced = replacing.as_ref().map(|(of, _)| *of);
                let mode = Mode::of(guest, view, memslot, (attempt == 0, gpa), replaced);
                let (memslots, id, uncached) = (view, NOBODY, false);
                let fault = Fault { memslots, memslot, kind, gpa, access, id, uncached, mode };
                Found::Tried(inside.fault(&fault))
            });
            let step = match found {
                Found::Upto(next, count) => return Ok((next.min(end), count)),
                Found::Tried(step) => step,
            };
            let (bytes, count): (u64, Count) = match step {
                // The new leaf may have changed its size by now; this steps over the size that was
                // mapped.
                Step::Done(
                    Outcome::Mapped(size)
                    | Outcome::MadeWritable(size)
                    | Outcome::MadeExecutable(size),
                ) => (size.bytes(), |done| &mut done.mapped),
                Step::Done(Outcome::Retry(Retry::Absent(_))) => (page, |done| &mut done.absent),
                Step::Done(Outcome::Retry(_)) => (page, |done| &mut done.held),
                Step::Done(Outcome::Refused(_)) => (page, |done| &mut done.refused),
                Step::Done(_) => (page, |done| &mut done.mapped),
                Step::Absent(..) => (page, |done| &mut done.absent),
                Step::Again => continue,
                Step::Replaces(host) => {
                    replacing = Some((host, self.unmap_elsewhere((&guest.tables, gpa), host)));
                    continue;
                }
                Step::SplitsPrivate => match self.split_private_page(gpa) {
                    Ok(()) => continue,
                    Err(Refusal::TableLimit(limit)) => return Err(PrefaultStop::TableLimit(limit)),
                    Err(Refusal::OutOfFrames) => return Err(PrefaultStop::OutOfFrames),
                    Err(_) => (page, |done| &mut done.refused),
                },
                Step::Dry => match self.top_up(1) {
                    Ok(()) => continue,
                    Err(NoPages::Limit(limit)) => return Err(PrefaultStop::TableLimit(limit)),
                    Err(NoPages::Frames(_)) => return Err(PrefaultStop::OutOfFrames),
                },
            };
            let next = (gpa.0 & !(bytes - 1)) + bytes;
            return Ok((next.min(end), count));
        }
        Ok((gpa.0 + page, |done| &mut done.held))
    }
}

/// Returns the sum of a `PrefaultBytes` to which bytes are added.
type Count = fn(&mut PrefaultBytes) -> &mut u64;

enum Found {
    Upto(u64, Count),
    Tried(Step),
}

impl<F: Format, H: Host, B: Backing> Vcpu<'_, F, H, B> {
    /// Maps the pages around a page that was just mapped, if the backing has them at hand, up to
    /// [`Config::fault_around`](crate::Config::fault_around), in one table. They do not count as
    /// used or written.
    pub(crate) fn fault_around(&mut self, gpa: Gpa) {
        let guest = self.worker.guest;
        let page = F::size(0).bytes();
        let bytes = u64::from(guest.config.fault_around) * page;
        let most = F::size(1).bytes().min(1 << bytes.ilog2());
        let (id, uncached, tables) = (self.id, self.view.is_some(), guest.space(self.view));
        let start = gpa.0 & !(most - 1);
        let mapped = self.worker.with_memslots(tables, |view, inside| {
            let Some(memslot) = view.at(gpa).filter(|memslot| !memslot.deleting) else { return 0 };
            let all =
                GpaRange::new(Gpa(start), most).ok().and_then(|all| memslot.spec.common(&all));
            let Some(all) = all else { return 0 };
            let pages = (all.start().0..all.end().0).step_by(page as usize).map(Gpa);
            let mapped = pages.filter(|&gpa| {
                // Asked before a reservation, so that a page that is not at hand costs nothing
                // more.
                if guest.backing.try_page(memslot.spec.host_of(gpa.0)).is_none()
                    || !matches!(inside.guard.translate(gpa), Ok(None))
                {
                    return false;
                }
                // Private pages are not mapped ahead.
                let (access, kind, mode) = (Access::Read, MemoryKind::Shared, Mode::Ahead);
                let fault =
                    Fault { memslots: view, memslot, kind, gpa, access, id, uncached, mode };
                matches!(inside.map_apart(&fault, F::size(0)), Step::Done(Outcome::Mapped(_)))
            });
            mapped.count() as u64
        });
        self.worker.counters.mapped_ahead.add(mapped);
    }

    /// Returns whether the pages around a fault are to be mapped as well.
    #[inline]
    pub(crate) fn maps_around(&self, outcome: &Outcome) -> bool {
        self.worker.guest.config.fault_around > 1 && *outcome == Outcome::Mapped(F::size(0))
    }
}
