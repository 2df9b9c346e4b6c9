//! A fault on a machine that does not say what the guest lacks: an entry, a right or a mark.
//!
//! RISC-V has one exception for each kind of access. The hart may have taken it because of an entry
//! that another hart has changed since, which its TLB still has: every result but one ends with a
//! fence of this hart, and so the guest makes progress.

use crate::stage2::{ANY, Errno, Inside, Stage2};
use slat::format::Format;
use slat::{Frame, Gpa, GpaRange, Invalidation, Platform};

/// What a fault found, and got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultAnswer {
    /// Nothing was mapped.
    Mapped = 0,
    /// The leaf was there, and has the rights and the marks now.
    Rights = 1,
    /// A larger leaf was there, and is split.
    Split = 2,
    /// A table was there, in whose place a block is.
    Joined = 3,
}

/// What a fault may map: `size` bytes of memory at `hpa`, a page or a block.
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    /// The address in the guest.
    pub gpa: u64,
    /// The size.
    pub size: u64,
    /// The address of the memory.
    pub hpa: u64,
    /// Bits of `enum kvm_pgtable_prot`.
    pub prot: u64,
}

impl<F: Format, P: Platform> Stage2<'_, F, P> {
    /// Handles a fault of this CPU at `gpa`, for which the kernel has found memory. With
    /// `sees_valid`, the CPU finds entries that became valid without a fence (Svvptc).
    ///
    /// A page inside a block that maps the same memory splits the block, whose other pages stay
    /// mapped. A block takes the place of a table.
    ///
    /// # Errors
    /// As [`Stage2::map`].
    pub fn fault(
        &self,
        gpa: u64,
        leaf: Leaf,
        sees_valid: bool,
        source: &mut (dyn FnMut() -> Option<Frame> + Send),
    ) -> Result<FaultAnswer, Errno> {
        let page = gpa & !(Self::PAGE - 1);
        let mut took_table = false;
        let mut counted = || {
            let frame = source();
            took_table |= frame.is_some();
            frame
        };
        let mut guard = self.enter();
        let given = match guard.descriptor(Gpa(gpa)) {
            Some((_, there)) if there.bytes() == leaf.size => {
                if Self::is_there(&guard, gpa, &leaf) {
                    let rights = crate::protection::accesses(leaf.prot).ok_or(Errno::INVALID)?;
                    match guard.relax_leaf(Gpa(gpa), rights) {
                        Ok(Some(given)) => {
                            // Another hart's change may be of an entry above, and fences by address
                            // order reads of leaves alone.
                            if given.is_changed() || sees_valid {
                                given.at(Gpa(gpa)).flush_local();
                            } else {
                                self.fence_local(None);
                            }
                            return Ok(FaultAnswer::Rights);
                        }
                        _ => return Err(Errno::AGAIN),
                    }
                }
                FaultAnswer::Mapped
            }
            Some((raw, there)) if there.bytes() > leaf.size => match F::kind(raw, 1) {
                slat::format::Kind::Leaf => FaultAnswer::Split,
                _ => FaultAnswer::Mapped,
            },
            Some(_) => FaultAnswer::Joined,
            None => return Err(Errno::INVALID),
        };
        drop(guard);
        self.map(leaf.gpa, leaf.size, leaf.hpa, leaf.prot, &mut counted)?;
        let is_new = given == FaultAnswer::Mapped;
        if !(is_new && sees_valid) {
            let range = GpaRange::new(Gpa(page), Self::PAGE).ok();
            self.fence_local(range.filter(|_| !took_table));
        }
        Ok(given)
    }

    /// Whether the leaf around `gpa` maps the memory of `leaf`.
    fn is_there(guard: &Inside<'_, '_, F, P>, gpa: u64, leaf: &Leaf) -> bool {
        let found = guard.translate(Gpa(gpa)).ok().flatten();
        found.is_some_and(|found| found.hpa.0 == leaf.hpa + (gpa - leaf.gpa))
    }

    /// Removes what this CPU has cached of a range; of the guest, links too, without one.
    fn fence_local(&self, range: Option<GpaRange>) {
        let what = Invalidation { vmid: ANY, range, leaf: None, tables: range.is_none() };
        self.tables().platform().invalidate_local(&what);
    }
}
