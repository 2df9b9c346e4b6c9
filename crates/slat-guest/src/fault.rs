//! Resolves vCPUs' faults: accesses that the MMU refused. It takes no lock, unless devices have
//! tables that follow the guest's.

mod execute;
mod rare;

use self::rare::{no_page, not_reserved};
use crate::backing::{Backing, Hva, HvaRange, MAY_WRITE};
use crate::bits::Bits;
use crate::config::{ExecuteHuge, Logging};
use crate::events::Event;
use crate::follow::DeviceLeaf;
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::spec::MemslotId;
use crate::memslots::{Memslot, View};
use crate::outcome::{Outcome, Refused, Retry};
use crate::private::{MemoryKind, PrivateLeaves};
use crate::ranges::fitting;
use crate::vcpu::Vcpu;
use crate::worker::Inside;
use slat::{
    Access, Attributes, ChangeError, Execute, Format, Gpa, GpaRange, Granted, Guard, Halted,
    MapError, PageSize, Removed, Software, SplitError, Translation,
};

/// The number of attempts at a fault while other threads change the same entries.
pub(crate) const ATTEMPTS: u32 = 8;
/// The number of table pages for a path from the root, and for a split along it.
pub(crate) const PATH: usize = 6;

pub(crate) enum Step {
    Done(Outcome),
    /// The leaf that was found has changed: try again.
    Again,
    /// The worker's cache of table pages is empty.
    Dry,
    /// The backing has not got the page yet.
    NotYet(MemslotId, Hva),
    /// The write may replace the page, so it has to be unmapped everywhere else first
    /// ([`Guest::replacing`]).
    Replaces(HvaRange),
    /// The fetch is from a private block that may not be executed: it has to be split first, with
    /// the machine's consent.
    SplitsPrivate,
}

impl From<Outcome> for Step {
    fn from(outcome: Outcome) -> Self {
        Self::Done(outcome)
    }
}

impl<'w, F: Format, H: Host, B: Backing> Vcpu<'w, F, H, B> {
    /// Handles a fault of the guest: its MMU refused `access` to `gpa`. The module `fault` of each
    /// [format](slat::format) decodes both from the CPU's registers.
    ///
    /// If the fault gives a leaf a right, the calling CPU invalidates its own TLB entries of the
    /// leaf ([`slat::Platform::invalidate_local`], which this calls); other CPUs may fault once
    /// more. On RISC-V without Svvptc the caller executes HFENCE.GVMA without an address after
    /// every outcome. Where [`slat::Ran`] is used, the CPU has left it before this call. The guest
    /// may be run again after every outcome except [`Outcome::Mmio`], [`Outcome::RingFull`],
    /// [`Outcome::Convert`] and [`Outcome::Refused`], which say what has to be done first.
    ///
    /// If pages may be private, the access counts as one of the page's kind. A machine that reports
    /// the kind of an access uses [`Vcpu::fault_as`].
    pub fn fault(&mut self, gpa: Gpa, access: Access) -> Outcome {
        self.timed(gpa, access, None)
    }

    /// Handles a fault as [`Vcpu::fault`] does, for an access that wants a page of `kind`, as the
    /// guest's tables, an address bit or the fault's syndrome said. `gpa` is without such a bit. If
    /// the page is of the other kind, the outcome is [`Outcome::Convert`].
    pub fn fault_as(&mut self, gpa: Gpa, access: Access, kind: MemoryKind) -> Outcome {
        self.timed(gpa, access, Some(kind))
    }

    #[inline]
    fn timed(&mut self, gpa: Gpa, access: Access, kind: Option<MemoryKind>) -> Outcome {
        let host = self.worker.guest.tables.platform();
        let (guest, vcpu) = (self.worker.guest, self.id);
        guest.event(|| Event::FaultBegin { vcpu, gpa, access });
        let begin = host.now();
        let outcome = self.answer(gpa, access, kind);
        let ticks = host.now() - begin;
        guest.vcpus[vcpu as usize].fault(&outcome, ticks);
        guest.event(|| Event::FaultEnd { vcpu, gpa, outcome, ticks });
        outcome
    }

    #[inline]
    fn answer(&mut self, gpa: Gpa, access: Access, wanted: Option<MemoryKind>) -> Outcome {
        if access == Access::Write && self.ring_is_full() {
            return Outcome::RingFull;
        }
        self.announce();
        let outcome = match self.attempt(gpa, access, wanted, true, None) {
            Step::Done(outcome) => outcome,
            step => self.answer_at_length(gpa, access, wanted, step),
        };
        if self.maps_around(&outcome) {
            self.fault_around(gpa);
        }
        self.waited(gpa, &outcome);
        outcome
    }

    /// Makes one attempt. `first`: it is the first for this access. `replaced`: host memory that
    /// has been unmapped everywhere else.
    #[inline]
    fn attempt(
        &mut self,
        gpa: Gpa,
        access: Access,
        wanted: Option<MemoryKind>,
        first: bool,
        replaced: Option<HvaRange>,
    ) -> Step {
        let guest = self.worker.guest;
        // If there are no more pages, those in the cache may be enough. If not, the attempt ends
        // with `Dry`, and the fault asks again.
        let _at_hand = self.worker.top_up(PATH);
        let (id, own_view, tables) = (self.id, self.view.is_some(), guest.space(self.view));
        self.worker.with_slots(tables, |view, inside| {
            let Some(slot) = view.at(gpa) else {
                // No VMM may emulate a private access.
                return match wanted {
                    Some(to @ MemoryKind::Private) => Outcome::Convert { to }.into(),
                    _ => Outcome::Mmio.into(),
                };
            };
            if slot.deleting {
                return Outcome::Retry(Retry::MemslotGoing).into();
            }
            let page = Gpa(gpa.0 & !(F::size(0).bytes() - 1));
            let page = GpaRange::new(page, F::size(0).bytes()).expect("a page");
            let Some(kind) = slot.kind_of::<F>(&page) else {
                return Outcome::Retry(Retry::Converting).into();
            };
            if let Some(to) = wanted.filter(|&wanted| wanted != kind) {
                return Outcome::Convert { to }.into();
            }
            if access == Access::Write && slot.spec.read_only {
                return Outcome::Mmio.into();
            }
            // Two faults that fold one group may void each other's reservations, so only first
            // attempts fold. All pages of a group are of one kind.
            let allowed = view.execute_huge == ExecuteHuge::Allowed && slot.kinds.is_none();
            let folds = first && guest.config.contiguous && allowed;
            let host = HvaRange { start: slot.spec.host_of(page.start().0), bytes: page.size() };
            let alone = replaced == Some(host);
            let (slots, ahead) = (view, false);
            inside.fault(&Fault {
                slots,
                slot,
                gpa,
                access,
                id,
                own_view,
                folds,
                kind,
                ahead,
                alone,
            })
        })
    }
}

/// One attempt at a fault.
pub(crate) struct Fault<'f> {
    pub slots: &'f View,
    pub slot: &'f Memslot,
    pub gpa: Gpa,
    pub access: Access,
    /// The vCPU's number, or one that no vCPU has.
    pub id: u16,
    /// The vCPU runs on its own view.
    pub own_view: bool,
    /// The attempt may fold leaves.
    pub folds: bool,
    /// The page's kind.
    pub kind: MemoryKind,
    /// No access asked for the page: it is mapped if it is at hand, and does not count as used.
    pub ahead: bool,
    /// The page that a write replaces is mapped nowhere else, and no other fault maps it.
    pub alone: bool,
}

impl Fault<'_> {
    #[inline]
    fn page(&self, size: PageSize) -> GpaRange {
        let start = self.gpa.0 & !(size.bytes() - 1);
        GpaRange::new(Gpa(start), size.bytes()).expect("a leaf is not empty")
    }

    fn logs(&self) -> bool {
        self.slot.log.is_some()
    }

    /// Returns the page's address range in the backing.
    fn host<F: Format>(&self) -> HvaRange {
        let page = self.page(F::size(0));
        HvaRange { start: self.slot.spec.host_of(page.start().0), bytes: page.size() }
    }

    /// Returns whether the log is of pages, so that blocks are not writable.
    fn logs_pages(&self) -> bool {
        self.logs() && !self.slot.spec.log_blocks
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Logs the pages of `range` as written. Called after the leaf has become writable.
    #[inline]
    pub(crate) fn written(&self, fault: &Fault<'_>, range: GpaRange) {
        if let Some(log) = &fault.slot.log
            && self.config.faults_log()
        {
            self.log(fault, log, range);
        }
    }

    #[inline]
    fn log(&self, fault: &Fault<'_>, log: &Bits, range: GpaRange) {
        let (spec, start) = (&fault.slot.spec, range.start().0);
        if range.size() != F::size(0).bytes() {
            log.mark::<F>(spec, start, range.size());
        } else if !self.pushed(fault, start) {
            log.mark_page::<F>(spec, start);
        }
    }

    /// Returns whether the vCPU's ring took the page.
    #[inline]
    fn pushed(&self, fault: &Fault<'_>, gpa: u64) -> bool {
        let page = || (gpa - fault.slot.spec.gpa.0) >> F::PAGE_SHIFT;
        let ring = self.rings.get(fault.id as usize);
        ring.is_some_and(|ring| ring.push(fault.slot.spec.id, page()))
    }
}

impl<'t, 'w, F: Format, H: Host, B: Backing> Inside<'t, 'w, F, H, B> {
    #[inline]
    pub(crate) fn fault(&mut self, fault: &Fault<'_>) -> Step {
        let Ok(found) = self.guard.translate(fault.gpa) else { return Step::Again };
        match (found, fault.access) {
            (None, _) => self.map(fault, self.guest.config.largest),
            (Some(leaf), Access::Read) => self.relax(fault, leaf.size, Software::NONE),
            (Some(leaf), Access::Write) => self.write(fault, leaf),
            (Some(leaf), _) => self.execute(fault, leaf),
        }
    }

    /// Gives the leaf around the address the right that the access needs, if its software bits have
    /// all of `needed`.
    fn relax(&mut self, fault: &Fault<'_>, size: PageSize, needed: Software) -> Step {
        let range = fault.page(size);
        match self.guard.relax_where(range, fault.access, needed) {
            Ok(granted) => {
                let outcome = match fault.access {
                    // The leaf has the right: the CPU has an older state of it in its TLB.
                    _ if !granted.is_changed() => Outcome::Spurious,
                    Access::Read => Outcome::MadeAccessed,
                    Access::Write => {
                        self.guest.written(fault, range);
                        Outcome::MadeWritable(size)
                    }
                    _ => Outcome::MadeExecutable(size),
                };
                granted.at(fault.gpa).flush_local();
                outcome.into()
            }
            Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => Step::Again,
            Err(Halted { why, .. }) => Outcome::from(why).into(),
        }
    }

    #[inline(always)]
    fn write(&mut self, fault: &Fault<'_>, leaf: Translation) -> Step {
        // A block that lies in two memslots is not made writable as a whole: the write is in one of
        // them.
        let block = leaf.size > F::size(0);
        let crosses = block && !fault.slot.spec.has(fault.gpa.0, leaf.size.bytes());
        if leaf.attributes.write && !crosses {
            // The only bits that can be missing are the accessed bit, and the dirty bit if software
            // sets it.
            return match self.relax(fault, leaf.size, MAY_WRITE) {
                Step::Done(Outcome::MadeWritable(_)) => Outcome::MadeAccessed.into(),
                step => step,
            };
        }
        if !leaf.attributes.software.contains(MAY_WRITE) {
            // The backing shares the page for reading: another page replaces it.
            return self.replace(fault);
        }
        if crosses || block && fault.logs_pages() {
            if let Some(step) = self.split(fault) {
                return step;
            }
            // From here on hardware marks writes by page. Between the split and this, the CPU may
            // have cached any of these pages without the right to write.
            if self.guest.config.logging == Logging::Hardware {
                let around = fault.page(F::size(1));
                match self.guard.allow_write(around, MAY_WRITE) {
                    Ok(granted) if granted.is_changed() => {
                        granted.flush_local();
                    }
                    // The rights of the page itself are checked below.
                    Ok(granted) => {
                        granted.elsewhere();
                    }
                    Err(Halted { why: ChangeError::CutsBlock { .. }, .. }) => return Step::Again,
                    Err(Halted { why, .. }) => return Outcome::from(why).into(),
                }
            }
            return match self.relax(fault, F::size(0), MAY_WRITE) {
                Step::Done(Outcome::MadeWritable(_)) => Outcome::Split { from: leaf.size }.into(),
                step => step,
            };
        }
        match self.relax(fault, leaf.size, MAY_WRITE) {
            // The leaf was read-only when it was read, and this changed nothing: by now it is
            // another leaf.
            Step::Done(Outcome::Spurious) => Step::Again,
            step => step,
        }
    }

    /// Splits along the path to the page; returns the next step if that failed.
    fn split(&mut self, fault: &Fault<'_>) -> Option<Step> {
        self.split_by(fault, |guard, page, cache| guard.split(page, F::size(0), cache)).err()
    }

    /// Records for recovery that the table around the page exists because its pages may be
    /// executed, which a block may not.
    fn note_table(&self, fault: &Fault<'_>) {
        if let Some(splits) = &fault.slot.splits {
            splits.add::<F>(&fault.slot.spec, fault.gpa.0);
        }
    }

    /// Splits by `split` along the path to the page; returns its result, or the next step if that
    /// failed.
    fn split_by<T>(
        &mut self,
        fault: &Fault<'_>,
        split: impl FnOnce(
            &mut Guard<'t, 'w, F, H>,
            GpaRange,
            &mut slat::TableCache<'w, F, H>,
        ) -> Result<T, Halted<SplitError>>,
    ) -> Result<T, Step> {
        let page = fault.page(F::size(0));
        let before = self.guard.counts().bytes_changed;
        let result = split(&mut self.guard, page, self.cache);
        let split = self.guard.counts().bytes_changed - before;
        self.guest.count_split(self.counters, fault.gpa, split);
        match result {
            Ok(done) => Ok(done),
            Err(Halted { why: SplitError::CacheEmpty, .. }) => Err(Step::Dry),
            Err(Halted { why, .. }) => Err(Outcome::from(why).into()),
        }
    }

    /// Handles a write to a leaf that may not be written: the leaf becomes writable if the backing
    /// agrees, otherwise another page of the backing replaces it.
    fn replace(&mut self, fault: &Fault<'_>) -> Step {
        if self.must_be_alone(fault) {
            return Step::Replaces(fault.host::<F>());
        }
        if let Some(step) = self.split(fault) {
            return step;
        }
        if let Some(step) = self.grant(fault) {
            return step;
        }
        // The page that is unmapped was never written, and the new page counts as used from the
        // start. If another vCPU has replaced it meanwhile, the page here is the new one, and was
        // written: its mark is kept, because the host may take the page before this fault maps it
        // again. A log may be taking that mark from the leaf.
        let moving = self.guest.leaving.begin();
        self.empty(fault, F::size(0), |guest, view, removed| {
            if removed.attributes.dirty || fault.slot.kept.moves.any() {
                guest.keep_marks(view, removed);
            }
        });
        drop(moving);
        self.map_apart(fault, F::size(0))
    }

    /// Returns whether the page must first be unmapped everywhere else: the access is a write to
    /// shared memory, and an alias or another view may map the page that the write replaces.
    #[inline]
    fn must_be_alone(&self, fault: &Fault<'_>) -> bool {
        fault.access == Access::Write
            && fault.kind == MemoryKind::Shared
            && !fault.alone
            && (fault.slots.aliases
                || !self.guest.views.is_empty() && self.guest.caches.any_uncached())
    }

    fn grant(&mut self, fault: &Fault<'_>) -> Option<Step> {
        let range = fault.page(F::size(0));
        let host = fault.slot.spec.host_of(range.start().0);
        let tells = self.tells_devices();
        let (guard, guest) = (&mut self.guard, self.guest);
        let platform = self.tables.platform();
        let granted = guest.backing.make_writable(host, |page| {
            if !page.write {
                return Ok(None);
            }
            let _turn = tells.then(|| guest.telling.take(platform));
            let granted = guard.grant_write(range.start(), page.hpa, MAY_WRITE)?;
            // Before anything else is called, which may panic: the leaf is writable.
            if granted.is_changed() {
                guest.written(fault, range);
            }
            if tells && granted.is_changed() {
                let (gpa, bytes) = (range.start(), range.size());
                let leaf = DeviceLeaf { gpa, hpa: page.hpa, bytes, write: true };
                platform.device_tables().mapped(leaf);
            }
            Ok(Some(granted))
        })?;
        match granted {
            Ok(Some(granted)) if granted.is_changed() => {
                granted.flush_local();
                Some(Outcome::MadeWritable(F::size(0)).into())
            }
            // Another page replaces it.
            Ok(granted) => {
                granted.map(Granted::elsewhere);
                None
            }
            Err(Halted { why, .. }) => Some(Outcome::from(why).into()),
        }
    }

    /// Unmaps the leaf of `size`, or the leaves that replaced it, and completes the invalidation.
    fn empty(
        &mut self,
        fault: &Fault<'_>,
        size: PageSize,
        keep: impl Fn(&Guest<'w, F, H, B>, &View, &Removed),
    ) {
        let (guest, view, range) = (self.guest, fault.slots, fault.page(size));
        guest.unmap(view, self.tables, &mut self.guard, [range], |removed| {
            keep(guest, view, &removed);
        });
    }

    /// [`Inside::map`], apart from its caller.
    #[inline(never)]
    pub(crate) fn map_apart(&mut self, fault: &Fault<'_>, largest: PageSize) -> Step {
        self.map(fault, largest)
    }

    /// Maps the page, or as much around it as `largest`, the memslot and the backing allow. Most
    /// faults do nothing else, so it is inlined.
    #[inline(always)]
    fn map(&mut self, fault: &Fault<'_>, largest: PageSize) -> Step {
        if self.must_be_alone(fault) {
            return Step::Replaces(fault.host::<F>());
        }
        let (spec, kind) = (&fault.slot.spec, fault.kind);
        let tells = self.tells_devices();
        // If fetches split, private memory is mapped in pages: a private block may be split only
        // with the machine's consent, and nothing puts it together again.
        let huge = kind == MemoryKind::Shared || fault.slots.execute_huge == ExecuteHuge::Allowed;
        let mut largest = match fault.logs_pages() || fault.own_view || !huge {
            true => F::size(0),
            false => fitting::<F>(largest, |bytes| spec.fits_in(kind, fault.gpa.0, bytes)),
        };
        let logs = fault.logs();
        let mut folds = fault.folds && !logs && !fault.own_view;
        loop {
            // Each result has its own `match`: with a common one, the compiler writes both results
            // to memory.
            let reservation = if folds {
                match self.guard.reserve_contiguous(fault.gpa, largest, self.cache) {
                    Ok(reservation) => reservation,
                    Err(halted) => return not_reserved(halted.why),
                }
            } else {
                match self.guard.reserve(fault.gpa, largest, self.cache) {
                    Ok(reservation) => reservation,
                    Err(halted) => return not_reserved(halted.why),
                }
            };
            let range = reservation.range();
            let bytes = range.size();
            if folds && !spec.fits(fault.gpa.0, bytes) {
                folds = false;
                continue;
            }
            let (invalidations, start) = match kind {
                MemoryKind::Shared => (&self.guest.invalidations, spec.host_of(range.start().0)),
                MemoryKind::Private => {
                    let start = spec.private_of(range.start().0);
                    (&self.guest.private_invalidations, Hva(start.0))
                }
            };
            let asks = HvaRange { start, bytes };
            // An invalidation that comes by after this reservation empties it, and the commit
            // fails. One that came by before is seen here, or ended before the backing is asked.
            if invalidations.cover(&asks) {
                return Outcome::Retry(Retry::Invalidated).into();
            }
            if kind == MemoryKind::Shared
                && fault.access != Access::Write
                && (fault.slots.aliases || !self.guest.views.is_empty())
                && self.guest.replacing.cover(&asks)
            {
                return Outcome::Retry(Retry::Contended).into();
            }
            // Checked after the reservation, as invalidations are: see `memslots::kinds`.
            if fault.slot.kind_of::<F>(&range) != Some(kind) {
                if bytes <= F::size(0).bytes() {
                    return Outcome::Retry(Retry::Converting).into();
                }
                largest = fitting::<F>(largest, |smaller| smaller < bytes);
                continue;
            }
            let at = fault.gpa.0 & !(F::size(0).bytes() - 1);
            let page = if kind == MemoryKind::Shared && !fault.ahead {
                match self.guest.backing.page(spec.host_of(at), fault.access) {
                    Ok(page) => page,
                    Err(why) => return no_page(why, fault, at),
                }
            } else {
                match self.guest.page_otherwise(fault, at) {
                    Ok(page) => page,
                    Err(why) => return no_page(why, fault, at),
                }
            };
            if page.block < F::size(0)
                && let Err(error) = F::level_of(page.block)
            {
                return Outcome::Refused(Refused::Page(MapError::LeafSize(error))).into();
            }
            if page.block.bytes() < bytes {
                if core::mem::take(&mut folds) {
                    continue;
                }
                largest = fitting::<F>(largest, |bytes| bytes <= page.block.bytes());
                continue;
            }
            let write = page.write && !spec.read_only;
            if fault.access.is_fetch() && !page.execute {
                return Outcome::Refused(Refused::NotExecutable).into();
            }
            if fault.access == Access::Write && !write {
                return Outcome::Refused(Refused::NoPage).into();
            }
            let written = fault.access == Access::Write;
            let block = bytes > F::size(0).bytes();
            let protects = logs && self.guest.config.logging == Logging::Protect;
            let execute =
                page.execute && !(block && fault.slots.execute_huge != ExecuteHuge::Allowed);
            let mut attributes = Attributes {
                read: true,
                write: write && (written || !protects),
                execute: if execute { Execute::All } else { Execute::None },
                memory: page.memory,
                accessed: !fault.ahead,
                dirty: written,
                software: Software::new(write, page.execute),
            };
            // If hardware does not mark writes, a writable leaf may have been written.
            if !self.guest.marks_writes {
                attributes.dirty = attributes.write;
            }
            let hpa = slat::Hpa(page.hpa.0.wrapping_sub(at - range.start().0));
            let mut to_log = written;
            let committed = match kind {
                MemoryKind::Private => {
                    let hooks = self.tables.platform().private_hooks();
                    let leaf = PrivateLeaves { gpa: range.start(), hpa, bytes };
                    match reservation.commit_told(hpa, attributes, || hooks.map(leaf)) {
                        Ok(committed) => committed,
                        Err(denied) => return Outcome::Refused(Refused::Private(denied)).into(),
                    }
                }
                MemoryKind::Shared => {
                    let host = self.tables.platform();
                    let _turn = tells.then(|| self.guest.telling.take(host));
                    let committed = reservation.commit(hpa, attributes);
                    if let (true, Ok(Some(_))) = (tells, &committed) {
                        if core::mem::take(&mut to_log) {
                            self.guest.written(fault, range);
                        }
                        let leaf = DeviceLeaf { gpa: range.start(), hpa, bytes, write };
                        host.device_tables().mapped(leaf);
                    }
                    committed
                }
            };
            return match committed {
                Ok(Some(_)) if fault.access.is_fetch() && !execute => Step::Again,
                Ok(Some(_)) => {
                    if to_log {
                        self.guest.written(fault, range);
                    }
                    self.guest.count_maintained(self.counters, bytes, fault.own_view, page.memory);
                    Outcome::Mapped(PageSize::from_bytes(bytes).unwrap_or(F::size(0))).into()
                }
                Ok(None) => Step::Again,
                Err(why) => Outcome::Refused(Refused::Page(why)).into(),
            };
        }
    }
}
