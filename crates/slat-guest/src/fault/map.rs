//! Maps a page that is not mapped, or a block around it.

use super::rare::{no_page, not_reserved};
use super::{Fault, Mode, Step};
use crate::backing::{Backing, Hva, HvaRange, Page};
use crate::config::{ExecuteHuge, Logging};
use crate::device_notifier::DeviceLeaf;
use crate::guest::Guest;
use crate::host::Host;
use crate::outcome::{Outcome, Refusal, Retry};
use crate::private::{MemoryKind, PrivateLeaves};
use crate::ranges::fitting;
use crate::worker::Inside;
use slat::{Access, Attributes, Execute, Format, GpaRange, MapError, PageSize, Software};

impl Fault<'_> {
    /// Returns whether the guest may write the page of the backing that is to be mapped.
    #[inline(always)]
    fn may_write(&self, page: &Page) -> bool {
        page.write && !self.memslot.spec.read_only
    }
}

/// Returns why the page of the backing does not serve the access, if it does not.
#[inline(always)]
fn refusal(fault: &Fault<'_>, page: &Page) -> Option<Refusal> {
    if fault.access.is_fetch() && !page.execute {
        return Some(Refusal::NotExecutable);
    }
    (fault.access == Access::Write && !fault.may_write(page)).then_some(Refusal::NoPage)
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Returns why nothing may be mapped at a range that is reserved, if so. An invalidation that
    /// comes by after the reservation empties it, and the commit fails. One that came by before is
    /// seen here, or ended before the backing is asked.
    #[inline(always)]
    fn withheld(&self, fault: &Fault<'_>, range: &GpaRange) -> Option<Retry> {
        let (spec, start) = (&fault.memslot.spec, range.start().0);
        let (invalidations, start) = match fault.kind {
            MemoryKind::Shared => (&self.invalidations, spec.host_of(start)),
            MemoryKind::Private => (&self.private_invalidations, Hva(spec.private_of(start).0)),
        };
        let asks = HvaRange { start, bytes: range.size() };
        if invalidations.cover(&asks) {
            return Some(Retry::Invalidated);
        }
        let replaces = fault.kind == MemoryKind::Shared
            && fault.access != Access::Write
            && (fault.memslots.aliases || !self.views.is_empty())
            && self.cow_in_flight.cover(&asks);
        replaces.then_some(Retry::Contended)
    }

    /// Returns the attributes of a new leaf of `bytes` around the page.
    #[inline(always)]
    fn attributes(&self, fault: &Fault<'_>, page: &Page, bytes: u64) -> Attributes {
        let written = fault.access == Access::Write;
        let block = bytes > F::size(0).bytes();
        let protects = fault.logs() && self.config.logging == Logging::Protect;
        let execute = page.execute && !(block && self.config.execute_huge != ExecuteHuge::Allowed);
        let may_write = fault.may_write(page);
        let write = may_write && (written || !protects);
        Attributes {
            read: true,
            write,
            execute: if execute { Execute::All } else { Execute::None },
            memory: page.memory,
            accessed: true,
            // If hardware does not mark writes, a writable leaf may have been written.
            dirty: if self.marks_writes { written } else { write },
            software: Software::new(may_write, page.execute),
        }
    }
}

impl<F: Format, H: Host, B: Backing> Inside<'_, '_, F, H, B> {
    /// Returns whether the page must first be unmapped everywhere else: the access is a write to
    /// shared memory, and an alias or another view may map the page that the write replaces.
    #[inline]
    pub(super) fn must_be_alone(&self, fault: &Fault<'_>) -> bool {
        fault.access == Access::Write
            && fault.kind == MemoryKind::Shared
            && fault.mode != Mode::Alone
            && (fault.memslots.aliases
                || !self.guest.views.is_empty() && self.guest.caches.any_uncached())
    }

    /// [`Inside::map`], apart from its caller.
    #[inline(never)]
    pub(crate) fn map_apart(&mut self, fault: &Fault<'_>, largest: PageSize) -> Step {
        self.map(fault, largest)
    }

    /// Maps the page, or as much around it as `largest`, the memslot and the backing allow. Most
    /// faults do nothing else, so it is inlined.
    #[inline(always)]
    pub(super) fn map(&mut self, fault: &Fault<'_>, largest: PageSize) -> Step {
        if self.must_be_alone(fault) {
            return Step::Replaces(fault.host::<F>());
        }
        let (spec, kind) = (&fault.memslot.spec, fault.kind);
        let tells = self.tells_devices();
        // If fetches split, private memory is mapped in pages: a private block may be split only
        // with the machine's consent, and nothing puts it together again.
        let huge =
            kind == MemoryKind::Shared || self.guest.config.execute_huge == ExecuteHuge::Allowed;
        let mut largest = match fault.logs_pages() || fault.uncached || !huge {
            true => F::size(0),
            false => fitting::<F>(largest, |bytes| spec.fits_in(kind, fault.gpa.0, bytes)),
        };
        let logs = fault.logs();
        let mut folds = fault.mode == Mode::Folds && !logs && !fault.uncached;
        loop {
            // Each result has its own `match`: with a common one, the compiler writes both results
            // to memory.
            let reservation = if folds {
                match self.guard.reserve_contiguous(fault.gpa, largest, self.cache) {
                    Ok(reservation) => reservation,
                    Err(stopped) => return not_reserved(stopped.reason),
                }
            } else {
                match self.guard.reserve(fault.gpa, largest, self.cache) {
                    Ok(reservation) => reservation,
                    Err(stopped) => return not_reserved(stopped.reason),
                }
            };
            let range = reservation.range();
            let bytes = range.size();
            if folds && !spec.fits(fault.gpa.0, bytes) {
                folds = false;
                continue;
            }
            if let Some(reason) = self.guest.withheld(fault, &range) {
                return Outcome::Retry(reason).into();
            }
            // Checked after the reservation, as invalidations are: see `memslots::kinds`.
            if fault.memslot.kind_of::<F>(&range) != Some(kind) {
                if bytes <= F::size(0).bytes() {
                    return Outcome::Retry(Retry::Converting).into();
                }
                largest = fitting::<F>(largest, |smaller| smaller < bytes);
                continue;
            }
            let at = fault.gpa.0 & !(F::size(0).bytes() - 1);
            let page = match kind {
                MemoryKind::Shared => self.guest.backing.page(spec.host_of(at), fault.access),
                MemoryKind::Private => self.guest.private_page(spec.private_of(at)),
            };
            let page = match page {
                Ok(page) => page,
                Err(reason) => return no_page(reason, fault, at),
            };
            if page.block < F::size(0)
                && let Err(error) = F::level_of(page.block)
            {
                return Outcome::Refused(Refusal::Page(MapError::LeafSize(error))).into();
            }
            if page.block.bytes() < bytes {
                if core::mem::take(&mut folds) {
                    continue;
                }
                largest = fitting::<F>(largest, |bytes| bytes <= page.block.bytes());
                continue;
            }
            if let Some(reason) = refusal(fault, &page) {
                return Outcome::Refused(reason).into();
            }
            let attributes = self.guest.attributes(fault, &page, bytes);
            let hpa = slat::Hpa(page.hpa.0.wrapping_sub(at - range.start().0));
            let mut to_log = fault.access == Access::Write;
            let committed = match kind {
                MemoryKind::Private => {
                    let hooks = self.tables.platform().private_hooks();
                    let leaf = PrivateLeaves { gpa: range.start(), hpa, bytes };
                    match reservation.commit_told(hpa, attributes, || hooks.map(leaf)) {
                        Ok(committed) => committed,
                        Err(denied) => return Outcome::Refused(Refusal::Private(denied)).into(),
                    }
                }
                MemoryKind::Shared => {
                    let host = self.tables.platform();
                    let _turn = tells.then(|| self.guest.device_notifier_lock.take(host));
                    let committed = reservation.commit(hpa, attributes);
                    if let (true, Ok(Some(_))) = (tells, &committed) {
                        if core::mem::take(&mut to_log) {
                            self.guest.written(fault, range);
                        }
                        let leaf = DeviceLeaf {
                            gpa: range.start(),
                            hpa,
                            bytes,
                            write: fault.may_write(&page),
                        };
                        host.device_tables().mapped(leaf);
                    }
                    committed
                }
            };
            return match committed {
                Ok(Some(_)) if fault.access.is_fetch() && attributes.execute == Execute::None => {
                    Step::Again
                }
                Ok(Some(_)) => {
                    if to_log {
                        self.guest.written(fault, range);
                    }
                    self.guest.count_maintained(self.counters, bytes, fault.uncached, page.memory);
                    Outcome::Mapped(PageSize::from_bytes(bytes).unwrap_or(F::size(0))).into()
                }
                Ok(None) => Step::Again,
                Err(reason) => Outcome::Refused(Refusal::Page(reason)).into(),
            };
        }
    }
}
