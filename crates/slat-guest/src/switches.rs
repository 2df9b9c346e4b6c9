//! The parts of a guest's configuration that can change while the guest runs.
//!
//! [`Config`](crate::Config) has the values with which a guest begins. Whether huge pages may be
//! executed is part of the memslots as faults see them
//! ([`MemslotSnapshot`](crate::memslots::MemslotSnapshot)). A thread that changes it waits, as for
//! a change of memslots, until faults and collapses that saw the old value have left the tables. If
//! it takes the right away, no thread makes an executable block from then on, and the changing
//! thread searches for those that exist. The size of eager splits orders no other access: each log
//! that begins, and each clear, reads it anew.
//!
//! There is no switch for lock-free ageing: there is no lock to go back to. The only cost that a
//! switch could save, looking again at a page whose entry another thread holds, is bounded and
//! counted ([`GuestTotals::ageing_slow`](crate::GuestTotals)).

use crate::backing::Backing;
use crate::bits::Splits;
use crate::config::ExecuteHuge;
use crate::guest::Guest;
use crate::host::Host;
use crate::memslots::spec::MemslotError;
use crate::memslots::work::Unfinished;
use crate::sync::Ordering;
use crate::worker::Worker;
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{
    ChangeError, Contended, Execute, Format, GpaRange, Guard, LeafSizeError, PageSize, Stopped,
};

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Returns the size to which blocks are split ahead of writes. It is
    /// [`Config::eager_split`](crate::Config) when the guest begins.
    pub fn eager_split(&self) -> Option<PageSize> {
        self.eager_split.get()
    }

    /// Changes the size to which blocks are split ahead of writes. Logs that begin, and clears that
    /// begin, after this split to that size; blocks that were already split stay split.
    ///
    /// # Errors
    /// [`LeafSizeError`]: the format has no such leaf; nothing was changed.
    pub fn set_eager_split(&self, size: Option<PageSize>) -> Result<(), LeafSizeError> {
        size.map_or(Ok(()), |size| F::level_of(size).map(drop))?;
        self.eager_split.set(size);
        Ok(())
    }
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Returns whether huge pages may be executed. It is [`Config::execute_huge`](crate::Config)
    /// when the guest begins.
    pub fn execute_huge(&mut self) -> ExecuteHuge {
        self.look(|view| view.execute_huge)
    }

    /// Changes whether huge pages may be executed, while the guest runs; returns the bytes that
    /// lost the right, which fetches give back as they split. The change is for this guest only: a
    /// guest that is trusted not to hang the machine can be exempt by [`ExecuteHuge::Allowed`]
    /// (Linux: `KVM_CAP_VM_DISABLE_NX_HUGE_PAGES`, once, before its vCPUs).
    ///
    /// When this returns after a change to another value than `Allowed`, no huge page may be
    /// executed, no CPU has a translation left by which one could be executed, and
    /// [`Worker::recover_huge_pages`] has the list of tables with executable pages. After a change
    /// to `Allowed`, the first fetch from each huge page gives the right back, in place;
    /// [`Worker::collapse`] turns tables that fetches have made into blocks again, and recovery has
    /// nothing more to do.
    ///
    /// Like a change of memslots, this takes turns with others, and waits for faults.
    ///
    /// # Errors
    /// [`MemslotError::OutOfMemory`]: nothing was changed.
    pub fn set_execute_huge(&mut self, to: ExecuteHuge) -> Result<u64, MemslotError> {
        let guest = self.guest;
        let mut turn = guest.change_turn();
        // SAFETY: the lock is held, and `view` is a copy.
        let mut view = unsafe { guest.memslots.snapshot() }.clone();
        if view.execute_huge == to && guest.unsearched.load(Ordering::Relaxed) == 0 {
            return Ok(0);
        }
        let specs: Vec<_> = view.iter().map(|memslot| memslot.spec).collect();
        let splits = to != ExecuteHuge::Allowed;
        for spec in &specs {
            let has = view.named(spec.id).is_some_and(|memslot| memslot.splits.is_some());
            // Recovery does not handle private memory.
            let splits = splits && spec.private.is_none();
            if has != splits {
                let new = || Splits::new::<F>(spec).map(Arc::new).ok_or(MemslotError::OutOfMemory);
                let new = splits.then(new).transpose()?;
                view.change(spec.id, |memslot| memslot.splits = new);
            }
        }
        // A memslot that moves is inserted again later, with what the new value needs.
        let mut moving: Vec<_> = turn.iter_mut().filter_map(Unfinished::moves).collect();
        let mut new = Vec::new();
        for memslot in &moving {
            let one =
                || Splits::new::<F>(&memslot.spec).map(Arc::new).ok_or(MemslotError::OutOfMemory);
            new.push(splits.then(one).transpose()?);
        }
        moving.iter_mut().zip(new).for_each(|(memslot, splits)| memslot.splits = splits);
        let before = core::mem::replace(&mut view.execute_huge, to);
        let search = to != ExecuteHuge::Allowed
            && (before == ExecuteHuge::Allowed || guest.unsearched.load(Ordering::Relaxed) != 0);
        // If the host panics between pieces, a later call searches.
        guest.unsearched.store(search.into(), Ordering::Relaxed);
        self.replace(view);
        let mut bytes = 0;
        if search {
            for spec in &specs {
                bytes += self.take_execution(spec.range());
                self.hand_to_recovery(spec, spec.range());
            }
            guest.unsearched.store(0, Ordering::Relaxed);
        }
        Ok(bytes)
    }

    /// Takes the right to execute from all blocks, and groups, in `range`; returns the bytes.
    fn take_execution(&mut self, range: GpaRange) -> u64 {
        let guest = self.guest;
        if guest.config.contiguous {
            self.until_done(&guest.tables, range, |guard, rest| guard.unfold(rest));
        }
        let mut bytes = 0;
        // vCPUs' own views have pages only.
        self.until_done(&guest.tables, range, |guard, rest| {
            let mut from = rest;
            while let Some(block) = executable_block(guard, from)? {
                bytes += guard.execute_protect(block)?;
                let left = rest.end().0.saturating_sub(block.end().0);
                let Ok(behind) = GpaRange::new(block.end(), left) else { break };
                from = behind;
            }
            Ok(0)
        });
        bytes
    }
}

/// Returns the first block in `range` that may be executed.
fn executable_block<F: Format, H: Host>(
    guard: &Guard<'_, '_, F, H>,
    range: GpaRange,
) -> Result<Option<GpaRange>, Stopped<ChangeError>> {
    let leaves = guard.leaves(range);
    let leaves = leaves.map_err(|reason| Stopped { at: range.start(), reason })?;
    for leaf in leaves {
        match leaf {
            // Another thread may be splitting this block into blocks that may be executed.
            Err(Contended { at }) => return Err(Stopped { at, reason: ChangeError::Contended }),
            Ok(leaf) if leaf.size > F::size(0) && leaf.attributes.execute != Execute::None => {
                let block = GpaRange::new(leaf.gpa, leaf.size.bytes());
                return Ok(Some(block.expect("a leaf is not empty")));
            }
            Ok(_) => {}
        }
    }
    Ok(None)
}
