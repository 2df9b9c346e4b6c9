//! A guest's dirty log: the bitmaps of its memslots, and the rings of its vCPUs.

use super::{FIRST_SLOT, Guest};
use crate::Error;
use crate::bitmap::DirtyBitmap;
use crate::ioctl::{DirtyPage, VmDirtyLog};
use crate::mode::Mode;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use rustix::io::Errno;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Most times in a row that `KVM_RESET_DIRTY_RINGS` may return 0 while harvested entries wait.
const RESETS_IN_VAIN: u32 = 1000;

impl Guest {
    /// Starts logging: sets `KVM_MEM_LOG_DIRTY_PAGES` on all slots.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn start_log(&self) -> Result<(), Error> {
        self.set_slots(KVM_MEM_LOG_DIRTY_PAGES)
    }

    /// Stops logging.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn stop_log(&self) -> Result<(), Error> {
        self.set_slots(0)
    }

    /// Fetches the log of each memslot with `KVM_GET_DIRTY_LOG`.
    ///
    /// # Errors
    /// [`Error::Os`]; [`Error::Invalid`] if the bitmap does not have the memory's number of pages.
    pub fn get_dirty_log(&self, log: &mut DirtyBitmap) -> Result<(), Error> {
        self.check_log_size(log)?;
        let pages = self.pages() / u64::from(self.slots);
        let call = "KVM_GET_DIRTY_LOG";
        for slot in 0..self.slots {
            let words = log.words_of(u64::from(slot) * pages, pages);
            let words = words.ok_or(Errno::INVAL).map_err(Error::os(call))?;
            let bitmap = &mut log.words_mut()[words];
            // SAFETY: the slot has `pages` pages, and `bitmap` has one bit for each.
            unsafe { self.machine.vm.get_dirty_log_into(FIRST_SLOT + slot, bitmap) }
                .map_err(Error::os(call))?;
        }
        Ok(())
    }

    fn check_log_size(&self, log: &DirtyBitmap) -> Result<(), Error> {
        if log.pages() != self.pages() {
            let rule = format!("must be that of the memory, {} pages", self.pages());
            return Err(Error::invalid("size of the dirty log", log.pages(), rule));
        }
        Ok(())
    }

    /// Clears `pages` pages of the log from `first` on with `KVM_CLEAR_DIRTY_LOG`. They lie in one
    /// memslot.
    ///
    /// # Errors
    /// [`Error::Os`]: `EINVAL` if `first` is no multiple of 64, or if `pages` is no multiple of 64
    /// and does not end the slot.
    pub fn clear_dirty_log(&self, log: &DirtyBitmap, first: u64, pages: u32) -> Result<(), Error> {
        let each = self.pages() / u64::from(self.slots);
        let slot = (first / each) as u32;
        let call = "KVM_CLEAR_DIRTY_LOG";
        let words = log.words_of(first, pages.into());
        let words = &log.words()[words.ok_or(Errno::INVAL).map_err(Error::os(call))?];
        self.machine
            .vm
            .clear_dirty_log(FIRST_SLOT + slot, first % each, pages, words)
            .map_err(Error::os(call))
    }

    /// Returns the number of pages of one memslot. One clear covers pages of one memslot only.
    pub fn slot_pages(&self) -> u64 {
        self.pages() / u64::from(self.slots)
    }

    /// Returns how KVM reports dirty pages.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Harvests all dirty rings into `log`, has KVM reset the entries (`KVM_RESET_DIRTY_RINGS`),
    /// and releases vCPUs that stopped at a full ring. Returns the number of entries harvested.
    ///
    /// # Errors
    /// [`Error::Os`], with `EAGAIN` if KVM does not reset the entries that were taken;
    /// [`Error::Invalid`] if the bitmap does not have the memory's number of pages;
    /// [`Error::WrongRing`] if an entry names a page that is not logged.
    pub fn harvest(&self, log: &mut DirtyBitmap) -> Result<u64, Error> {
        self.check_log_size(log)?;
        let each = self.slot_pages();
        let mut wrong = None;
        let taken = self.harvest_with(1, |DirtyPage { slot, page }| {
            let of_ours = (FIRST_SLOT..FIRST_SLOT + self.slots).contains(&slot) && page < each;
            if of_ours {
                log.insert(u64::from(slot - FIRST_SLOT) * each + page);
            } else {
                wrong = Some(Error::WrongRing { slot, page });
            }
        })?;
        wrong.map_or(Ok(taken), Err)
    }

    /// Harvests all dirty rings, has so many threads reset the entries together, and releases vCPUs
    /// that stopped at a full ring. Returns the number of entries harvested.
    pub(crate) fn harvest_with(
        &self,
        threads: u32,
        mut take: impl FnMut(DirtyPage),
    ) -> Result<u64, Error> {
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = rings.iter_mut().map(|ring| u64::from(ring.harvest(&mut take))).sum();
        let left = AtomicU64::new(taken);
        std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..threads).map(|_| scope.spawn(|| self.reset(&left, 1))).collect();
            let own = if threads > 1 { self.reset(&left, 1).map(drop) } else { Ok(()) };
            let joined = others.into_iter().map(|it| it.join());
            joined.fold(own, |own, it| own.and(it.unwrap_or(Err(Error::ThreadPanicked)).map(drop)))
        })?;
        // What another thread has reset is counted by now.
        if !self.reset(&left, RESETS_IN_VAIN)? {
            return Err(Error::os("KVM_RESET_DIRTY_RINGS")(Errno::AGAIN));
        }
        // Done even if nothing was taken: a vCPU may have stopped at its full ring after an earlier
        // harvest had emptied that ring.
        self.machine.gate.reset();
        Ok(taken)
    }

    /// Resets entries of the rings until none of `left` is left. Returns false if so many calls in
    /// a row have reset none.
    fn reset(&self, left: &AtomicU64, most_in_vain: u32) -> Result<bool, Error> {
        let mut in_vain = 0;
        while left.load(Relaxed) > 0 {
            let reset = self.machine.vm.reset_dirty_rings();
            let reset = reset.map_err(Error::os("KVM_RESET_DIRTY_RINGS"))?;
            // A signal ends the call early, and the call returns 0 if the signal was pending
            // before. The signal is delivered before the next call, so calling again makes
            // progress. KVM protects a page again only when it resets the page's entry: without
            // that, the next write to the page would not be logged.
            in_vain = if reset == 0 { in_vain + 1 } else { 0 };
            if in_vain == most_in_vain {
                return Ok(false);
            }
            let _ = left.fetch_update(Relaxed, Relaxed, |it| Some(it.saturating_sub(reset.into())));
        }
        Ok(true)
    }

    /// Waits until a ring is full, until a vCPU has finished its work, or for `at_most`. Returns
    /// whether a ring is full.
    pub fn wait_for_full_ring(&self, at_most: std::time::Duration) -> bool {
        self.machine.gate.wait_for_full(at_most)
    }

    /// Returns whether a vCPU waits at its full ring.
    pub fn has_full_ring(&self) -> bool {
        self.machine.gate.has_full()
    }

    /// Returns how often a vCPU stopped because its ring was full.
    pub fn full_rings(&self) -> u64 {
        self.machine.gate.stops()
    }
}
