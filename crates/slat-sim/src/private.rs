//! The hypervisor's calls about private memory, and the checks that only its owner reaches it.

use crate::arch::Arch;
use crate::machine::Machine;
use crate::owned::{PAGE, PrivateCall};
use crate::state::State;
use crate::tlb::Entry;
use crate::violation::Kind;
use slat::{Gpa, GpaRange, Hpa, Vmid};
use slat_guest::{Denial, MemoryKind, PrivateHooks, PrivateLeaves};

impl State {
    /// Checks an access of the host to `hpa`, by its own mapping.
    pub fn check_host(&mut self, hpa: u64, does: &str) {
        if let Some(reason) = self.owned.refuses_host(hpa) {
            let used = format!("the host {does} {hpa:#x}");
            self.log.report(Kind::PrivateExposed, None, None, used, reason);
        }
    }

    fn assign(&mut self, leaf: PrivateLeaves) {
        for offset in (0..leaf.bytes).step_by(1 << PAGE) {
            let (hpa, gpa) = (leaf.hpa.0 + offset, leaf.gpa.0 + offset);
            if let Some(owner) = self.owned.pages.insert(hpa >> PAGE, gpa >> PAGE) {
                let used = format!("{hpa:#x} is assigned");
                let expected = format!("it is assigned to {:#x} already", owner << PAGE);
                self.log.report(Kind::PrivateExposed, None, Some(gpa), used, &expected);
            }
        }
    }

    fn release(&mut self, leaves: PrivateLeaves) {
        for offset in (0..leaves.bytes).step_by(1 << PAGE) {
            let (hpa, gpa) = (leaves.hpa.0 + offset, leaves.gpa.0 + offset);
            if self.owned.pages.remove(&(hpa >> PAGE)) != Some(gpa >> PAGE) {
                let used = format!("{hpa:#x} is given back");
                let expected = "it is assigned to that address";
                self.log.report(Kind::PrivateExposed, None, Some(gpa), used, expected);
            }
        }
        let (first, last) = (leaves.hpa.0, leaves.hpa.0 + leaves.bytes);
        let inside = |entry: &Entry| entry.leaf.hpa < last && first < entry.hpa(entry.end());
        for vmid in self.vmids.iter().copied().map(Vmid).collect::<Vec<_>>() {
            let ends = (0, u64::MAX);
            self.forbid(vmid, ends, Kind::PrivateExposed, "it is not assigned any more", inside);
        }
    }
}

impl<A: Arch> Machine<A> {
    /// Makes the machine refuse each such call with `code`; with `None` it accepts all.
    pub fn refuse_private(&self, refused: Option<(PrivateCall, u64)>) {
        self.state().owned.refuses = refused;
    }

    /// Returns the calls about private memory since the last call of this function, in order.
    pub fn private_calls(&self) -> Vec<(PrivateCall, PrivateLeaves)> {
        std::mem::take(&mut self.state().owned.told)
    }

    /// Returns whether the page at `memory` is assigned to the guest.
    pub fn is_assigned(&self, memory: Hpa) -> bool {
        self.state().owned.refuses_host(memory.0).is_some()
    }

    /// Returns the number of pages that are assigned.
    pub fn assigned(&self) -> usize {
        self.state().owned.pages.len()
    }

    /// Claims that all memory of `range` that CPUs may reach from now on is of `kind`.
    pub fn claim_kind(&self, vmid: Vmid, range: GpaRange, kind: MemoryKind) {
        let mut state = self.state();
        let (start, end) = (range.start().0, range.end().0);
        for cpu in 0..state.cpus.len() {
            let (held, _) = state.possible(cpu, vmid, start, end);
            for entry in held {
                for gpa in (entry.start.max(start)..entry.end().min(end)).step_by(1 << PAGE) {
                    let assigned = state.owned.refuses_host(entry.hpa(gpa)).is_some();
                    if assigned != (kind == MemoryKind::Private) {
                        let used = format!("it may use {}", entry.text());
                        let expected = format!("{kind:?} memory was said to be there");
                        let report = (Kind::PrivateExposed, Some(cpu), Some(gpa));
                        state.log.report(report.0, report.1, report.2, used, &expected);
                    }
                }
            }
        }
    }
}

impl<A: Arch> PrivateHooks for Machine<A> {
    fn convert(&self, range: GpaRange, to: MemoryKind) -> Result<(), Denial> {
        let leaves = PrivateLeaves { gpa: range.start(), hpa: Hpa(0), bytes: range.size() };
        self.state().owned.ask(PrivateCall::Convert(to), leaves)
    }

    fn map(&self, leaf: PrivateLeaves) -> Result<(), Denial> {
        let mut state = self.state();
        state.owned.ask(PrivateCall::Map, leaf)?;
        state.assign(leaf);
        Ok(())
    }

    fn split(&self, block: PrivateLeaves) -> Result<(), Denial> {
        let mut state = self.state();
        let first = state.owned.pages.get(&(block.hpa.0 >> PAGE)).copied();
        if first != Some(block.gpa.0 >> PAGE) {
            let used = format!("the block at {} is split", block.hpa);
            let expected = "it is assigned to that address";
            let at = Some(Gpa(block.gpa.0).0);
            state.log.report(Kind::PrivateExposed, None, at, used, expected);
        }
        state.owned.ask(PrivateCall::Split, block)
    }

    fn removed(&self, leaves: PrivateLeaves) {
        let mut state = self.state();
        let _cannot_refuse = state.owned.ask(PrivateCall::Removed, leaves);
        state.release(leaves);
    }
}
