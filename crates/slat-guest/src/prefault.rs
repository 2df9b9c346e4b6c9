//! Pages that are mapped before the guest accesses them.

use crate::backing::{Backing, HvaRange};
use crate::fault::{ATTEMPTS, Fault, Mode, PATH, Step};
use crate::host::Host;
use crate::invalidations::InvalidationInProgress;
use crate::outcome::{Outcome, Retry};
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
                    return PrefaultStep::Upto(next, |done| &mut done.no_memory);
                };
                let behind = memslot.spec.range().end().0;
                if memslot.deleting {
                    return PrefaultStep::Upto(behind, |done| &mut done.held);
                }
                if access == Access::Write && memslot.spec.read_only {
                    return PrefaultStep::Upto(behind, |done| &mut done.no_memory);
                }
                if let Ok(Some(leaf)) = inside.guard.translate(gpa)
                    && leaf.attributes.read
                    && (access != Access::Write || leaf.attributes.write)
                    && (!access.is_fetch() || leaf.attributes.execute.permits(access))
                {
                    let next = (gpa.0 & !(leaf.size.bytes() - 1)) + leaf.size.bytes();
                    return PrefaultStep::Upto(next.min(behind), |done| &mut done.there);
                }
                let Some(kind) =
                    GpaRange::new(gpa, page).ok().and_then(|at| memslot.kind_of::<F>(&at))
                else {
                    return PrefaultStep::Upto(gpa.0 + page, |done| &mut done.held);
                };
                let replaced = replacing.as_ref().map(|(of, _)| *of);
                let mode = Mode::of(guest, memslot, (attempt == 0, gpa), replaced);
                let (memslots, id, uncached) = (view, NOBODY, false);
                let fault = Fault { memslots, memslot, kind, gpa, access, id, uncached, mode };
                PrefaultStep::Tried(inside.fault(&fault))
            });
            let step = match found {
                PrefaultStep::Upto(next, count) => return Ok((next.min(end), count)),
                PrefaultStep::Tried(step) => step,
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
                Step::Dry => match self.top_up(1) {
                    Ok(()) => continue,
                    Err(_) => return Err(PrefaultStop::OutOfFrames),
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

enum PrefaultStep {
    Upto(u64, Count),
    Tried(Step),
}
