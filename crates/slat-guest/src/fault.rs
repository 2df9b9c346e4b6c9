//! Resolves vCPUs' faults: accesses that the MMU refused. It takes no lock, unless devices have
//! tables that follow the guest's.

mod execute;
mod map;
mod rare;

use crate::backing::{Backing, Hva, HvaRange, MAY_WRITE};
use crate::bits::Bits;
use crate::config::{ExecuteHuge, Logging};
use crate::device_notifier::DeviceLeaf;
use crate::events::Event;
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::spec::MemslotId;
use crate::memslots::{Memslot, MemslotSnapshot};
use crate::outcome::{Outcome, Retry};
use crate::private::MemoryKind;
use crate::vcpu::Vcpu;
use crate::worker::Inside;
use slat::{
    Access, ChangeError, Format, Gpa, GpaRange, Guard, Interruption, LocalFlush, PageSize, Relax,
    Software, SplitError, Translation, UnmappedRun,
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
    Absent(MemslotId, Hva),
    /// The write may replace the page, so it has to be unmapped everywhere else first
    /// ([`Guest::cow_in_flight`]).
    Replaces(HvaRange),
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
    /// every outcome. The guest may be run again after every outcome except [`Outcome::Mmio`],
    /// [`Outcome::RingFull`] and [`Outcome::Refused`], which say what has to be done first.
    #[inline]
    pub fn fault(&mut self, gpa: Gpa, access: Access) -> Outcome {
        let host = self.worker.guest.tables.platform();
        let (guest, vcpu) = (self.worker.guest, self.id);
        guest.event(|| Event::FaultBegin { vcpu, gpa, access });
        let begin = host.now();
        let outcome = self.answer(gpa, access);
        let ticks = host.now() - begin;
        guest.vcpus[vcpu as usize].fault(&outcome, ticks);
        guest.event(|| Event::FaultEnd { vcpu, gpa, outcome, ticks });
        outcome
    }

    #[inline]
    fn answer(&mut self, gpa: Gpa, access: Access) -> Outcome {
        if access == Access::Write && self.ring_is_full() {
            return Outcome::RingFull;
        }
        self.announce();
        let outcome = match self.attempt(gpa, access, true, None) {
            Step::Done(outcome) => outcome,
            step => self.answer_at_length(gpa, access, step),
        };
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
        first: bool,
        replaced: Option<HvaRange>,
    ) -> Step {
        let guest = self.worker.guest;
        // If there are no more pages, those in the cache may be enough. If not, the attempt ends
        // with `Dry`, and the fault asks again.
        let _at_hand = self.worker.top_up(PATH);
        let (id, uncached, tables) = (self.id, self.view.is_some(), guest.space(self.view));
        self.worker.with_memslots(tables, |view, inside| {
            let Some(memslot) = view.at(gpa) else {
                return Outcome::Mmio.into();
            };
            if memslot.deleting {
                return Outcome::Retry(Retry::MemslotDeleting).into();
            }
            let page = Gpa(gpa.0 & !(F::size(0).bytes() - 1));
            let page = GpaRange::new(page, F::size(0).bytes()).expect("a page");
            let Some(kind) = memslot.kind_of::<F>(&page) else {
                return Outcome::Retry(Retry::Converting).into();
            };
            if access == Access::Write && memslot.spec.read_only {
                return Outcome::Mmio.into();
            }
            let mode = Mode::of(guest, memslot, (first, page.start()), replaced);
            inside.fault(&Fault { memslots: view, memslot, kind, gpa, access, id, uncached, mode })
        })
    }
}

/// One attempt at a fault.
pub(crate) struct Fault<'f> {
    pub memslots: &'f MemslotSnapshot,
    pub memslot: &'f Memslot,
    /// The page's kind.
    pub kind: MemoryKind,
    pub gpa: Gpa,
    pub access: Access,
    /// The vCPU's number, or one that no vCPU has.
    pub id: u16,
    /// The vCPU runs on its own view.
    pub uncached: bool,
    pub mode: Mode,
}

/// What an attempt may do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Usual,
    /// The attempt may fold leaves.
    Folds,
    /// The page that a write replaces is mapped nowhere else, and no other fault maps it.
    Alone,
}

impl Mode {
    /// Returns the mode of an attempt for an access to `page`. `first`: it is the first for this
    /// access. `replaced`: host memory that has been unmapped everywhere else.
    #[inline]
    pub fn of<F: Format, H: Host, B: Backing>(
        guest: &Guest<'_, F, H, B>,
        memslot: &Memslot,
        (first, page): (bool, Gpa),
        replaced: Option<HvaRange>,
    ) -> Self {
        let host = HvaRange { start: memslot.spec.host_of(page.0), bytes: F::size(0).bytes() };
        // Two faults that fold one group may void each other's reservations, so only first attempts
        // fold. All pages of a group are of one kind.
        let allowed = guest.config.execute_huge == ExecuteHuge::Allowed && memslot.kinds.is_none();
        match replaced {
            Some(replaced) if replaced == host => Self::Alone,
            _ if first && guest.config.contiguous && allowed => Self::Folds,
            _ => Self::Usual,
        }
    }
}

impl Fault<'_> {
    #[inline]
    fn page(&self, size: PageSize) -> GpaRange {
        let start = self.gpa.0 & !(size.bytes() - 1);
        GpaRange::new(Gpa(start), size.bytes()).expect("a leaf is not empty")
    }

    fn logs(&self) -> bool {
        self.memslot.log.is_some()
    }

    /// Returns the page's address range in the backing.
    fn host<F: Format>(&self) -> HvaRange {
        let page = self.page(F::size(0));
        HvaRange { start: self.memslot.spec.host_of(page.start().0), bytes: page.size() }
    }

    /// Returns whether the log is of pages, so that blocks are not writable.
    fn logs_pages(&self) -> bool {
        self.logs() && !self.memslot.spec.log_blocks
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Logs the pages of `range` as written. Called after the leaf has become writable.
    #[inline]
    pub(crate) fn written(&self, fault: &Fault<'_>, range: GpaRange) {
        if let Some(log) = &fault.memslot.log
            && self.config.faults_log()
        {
            self.log(fault, log, range);
        }
    }

    #[inline]
    fn log(&self, fault: &Fault<'_>, log: &Bits, range: GpaRange) {
        let (spec, start) = (&fault.memslot.spec, range.start().0);
        if range.size() != F::size(0).bytes() {
            log.mark::<F>(spec, start, range.size());
        } else if !self.pushed(fault, start) {
            log.mark_page::<F>(spec, start);
        }
    }

    /// Returns whether the vCPU's ring took the page.
    #[inline]
    fn pushed(&self, fault: &Fault<'_>, gpa: u64) -> bool {
        let page = || (gpa - fault.memslot.spec.gpa.0) >> F::PAGE_SHIFT;
        let ring = self.rings.get(fault.id as usize);
        ring.is_some_and(|ring| ring.push(fault.memslot.spec.id, page()))
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
        match self.guard.relax(range, Relax::new(fault.access).only_if(needed)) {
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
            Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => Step::Again,
            Err(Interruption { reason, .. }) => Outcome::from(reason).into(),
        }
    }

    #[inline(always)]
    fn write(&mut self, fault: &Fault<'_>, leaf: Translation) -> Step {
        // A block that lies in two memslots is not made writable as a whole: the write is in one of
        // them.
        let block = leaf.size > F::size(0);
        let crosses = block && !fault.memslot.spec.has(fault.gpa.0, leaf.size.bytes());
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
                match self
                    .guard
                    .relax(around, Relax::new(Access::Write).only_if(MAY_WRITE).unmarked())
                {
                    Ok(granted) if granted.is_changed() => {
                        granted.flush_local();
                    }
                    // The rights of the page itself are checked below.
                    Ok(granted) => {
                        granted.not_needed_here();
                    }
                    Err(Interruption { reason: ChangeError::CutsBlock { .. }, .. }) => {
                        return Step::Again;
                    }
                    Err(Interruption { reason, .. }) => return Outcome::from(reason).into(),
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
        if let Some(splits) = &fault.memslot.splits {
            splits.add::<F>(&fault.memslot.spec, fault.gpa.0);
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
        ) -> Result<T, Interruption<SplitError>>,
    ) -> Result<T, Step> {
        let page = fault.page(F::size(0));
        let before = self.guard.counts().bytes_changed;
        let result = split(&mut self.guard, page, self.cache);
        let split = self.guard.counts().bytes_changed - before;
        self.guest.count_split(self.counters, fault.gpa, split);
        match result {
            Ok(done) => Ok(done),
            Err(Interruption { reason: SplitError::CacheEmpty, .. }) => Err(Step::Dry),
            Err(Interruption { reason, .. }) => Err(Outcome::from(reason).into()),
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
        let moving = self.guest.marks_in_flight.begin();
        self.empty(fault, F::size(0), |guest, view, removed| {
            if removed.attributes.dirty || fault.memslot.spilled_bits.moves.any() {
                guest.spill_marks(view, removed);
            }
        });
        drop(moving);
        self.map_apart(fault, F::size(0))
    }

    fn grant(&mut self, fault: &Fault<'_>) -> Option<Step> {
        let range = fault.page(F::size(0));
        let host = fault.memslot.spec.host_of(range.start().0);
        let tells = self.tells_devices();
        let (guard, guest) = (&mut self.guard, self.guest);
        let platform = self.tables.platform();
        let granted = guest.backing.make_writable(host, |page| {
            if !page.write {
                return Ok(None);
            }
            let _turn = tells.then(|| guest.device_notifier_lock.take(platform));
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
                granted.map(LocalFlush::not_needed_here);
                None
            }
            Err(Interruption { reason, .. }) => Some(Outcome::from(reason).into()),
        }
    }

    /// Unmaps the leaf of `size`, or the leaves that replaced it, and completes the invalidation.
    fn empty(
        &mut self,
        fault: &Fault<'_>,
        size: PageSize,
        keep: impl Fn(&Guest<'w, F, H, B>, &MemslotSnapshot, &UnmappedRun),
    ) {
        let (guest, view, range) = (self.guest, fault.memslots, fault.page(size));
        guest.unmap(view, self.tables, &mut self.guard, [range], |removed| {
            keep(guest, view, &removed);
        });
    }
}
