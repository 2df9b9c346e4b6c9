//! Power's invalidation instructions, from the Power ISA, Book III ("TLB Management Instructions").

use crate::arch::Power;
use crate::arch::power::field;
use crate::machine::Machine;
use crate::tlb::Scope;
use slat::Vmid;

impl Power {
    /// Returns the extent of a `tlbie` with R=1 and PRS=0. Where the manual leaves it to the CPU,
    /// this is the least.
    pub fn scope(&self, rb: u64, rs: u64, ric: u8) -> Option<Scope> {
        // RS holds the LPID, and the PID, which partition-scoped entries do not have.
        let guest = Scope::guest(Vmid(field(rs, 32, 63) as u16));
        // RIC 0 is the TLB; 1 the page walk cache; 2 both, and cached process and partition tables.
        let (leaves, walks) = match ric {
            0 => (true, false),
            1 => (false, true),
            2 => (true, true),
            _ => return None,
        };
        let guest = Scope { leaves, walks, combined: leaves, ..guest };
        match field(rb, 52, 53) {
            // One page, of the size in AP. The page walk cache cannot be invalidated by address.
            0 if leaves => {
                let shift = match field(rb, 56, 58) {
                    0 => 12,
                    5 => 16,
                    1 => 21,
                    2 => 30,
                    _ => return None,
                };
                let start = (field(rb, 0, 51) << 12) >> shift << shift;
                let range = Some((start, start + (1 << shift)));
                Some(Scope { range, shift: Some(shift), walks: false, ..guest })
            }
            2 => Some(guest),
            3 => Some(Scope { vmid: None, ..guest }),
            // By PID: this covers no partition-scoped entries.
            _ => None,
        }
    }
}

impl Machine<Power> {
    /// Executes a `tlbie` with PRS=0 and R=1; it takes effect when a `ptesync` waits for it.
    pub fn tlbie(&self, rb: u64, rs: u64, ric: u8) {
        let mut state = self.state();
        if let Some(scope) = self.arch().scope(rb, rs, ric) {
            state.issuer().pending.push(scope);
            if !state.lazy.late_invalidation {
                state.complete(false);
            }
        }
    }

    /// Executes an `eieio`: a later `tlbsync` orders the invalidations before it.
    pub fn eieio(&self) {
        let mut state = self.state();
        let issuer = state.issuer();
        issuer.ordered[0] = issuer.pending.len();
    }

    /// Executes a `tlbsync`: a later `ptesync` waits for the invalidations that are ordered.
    pub fn tlbsync(&self) {
        let mut state = self.state();
        let issuer = state.issuer();
        issuer.ordered[1] = issuer.ordered[0];
    }

    /// Executes a `ptesync`.
    pub fn ptesync(&self) {
        let mut state = self.state();
        let issuer = state.issuer();
        let [_, ordered] = std::mem::take(&mut issuer.ordered);
        let later = issuer.pending.split_off(ordered.min(issuer.pending.len()));
        state.complete(false);
        state.issuer().pending = later;
        // Until this barrier, walkers may have read older values.
        if state.lazy.speculation {
            state.speculate();
        }
        state.drain();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tlbie_by_address_names_pages_of_one_size_and_no_links() {
        let scope = |rb, ric| Power::new(16).scope(rb, 7, ric);
        let page = scope(0x8021_00a0, 0).unwrap();
        assert_eq!((page.range, page.shift), (Some((0x8021_0000, 0x8022_0000)), Some(16)));
        assert!(page.leaves && !page.walks && page.vmid == Some(Vmid(7)));
        assert!(!scope(0x8021_00a0, 2).unwrap().walks);
        assert_eq!(scope(0x8021_00a0, 1), None, "the page walk cache by address");
        assert_eq!(scope(0x8021_0060, 0), None, "a size that there is not");
        let all = scope(0x800, 2).unwrap();
        assert_eq!((all.range, all.leaves, all.walks), (None, true, true));
        assert!(!scope(0x800, 0).unwrap().walks && !scope(0x800, 1).unwrap().leaves);
        assert_eq!(scope(0xc00, 2).unwrap().vmid, None);
    }
}
