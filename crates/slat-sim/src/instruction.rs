//! Arm's invalidation instructions, decoded from their manual pages (DDI 0487, C5.5). This decoder
//! shares no code with the engine's encoder of operands.

mod power;

use crate::arch::{Arch, Arm};
use crate::machine::Machine;
use crate::tlb::Scope;
use slat::Vmid;
use std::fmt;

/// The operation of a TLBI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Tlbi {
    /// Invalidates by IPA, on this CPU.
    Ipas2e1,
    /// Invalidates by IPA, on all CPUs.
    Ipas2e1is,
    /// Invalidates by IPA, last level only, on all CPUs.
    Ipas2le1is,
    /// Invalidates by IPA, last level only, on this CPU.
    Ipas2le1,
    /// Invalidates a range of IPAs, on this CPU.
    Ripas2e1,
    /// Invalidates a range of IPAs, last level only, on this CPU.
    Ripas2le1,
    /// Invalidates a range of IPAs, on all CPUs.
    Ripas2e1is,
    /// Invalidates a range of IPAs, last level only, on all CPUs.
    Ripas2le1is,
    /// Invalidates stage 1 and combined entries of the current VMID, on this CPU.
    Vmalle1,
    /// Invalidates stage 1 and combined entries of the current VMID, on all CPUs.
    Vmalle1is,
    /// Invalidates everything of the current VMID, on this CPU.
    Vmalls12e1,
    /// Invalidates everything of the current VMID, on all CPUs.
    Vmalls12e1is,
    /// Invalidates everything, on all CPUs.
    Alle1is,
    /// Invalidates by virtual address in the hypervisor's own stage 1.
    Vae2is,
}

impl fmt::Display for Tlbi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// Kind of a DSB, by what it waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Barrier {
    /// All accesses and invalidations, as seen by all CPUs of the guest.
    Ish,
    /// Stores only: this DSB does not wait for invalidations.
    Ishst,
    /// All accesses and invalidations, as seen by this CPU.
    Nsh,
    /// Stores only, as seen by this CPU.
    Nshst,
}

const fn bits(raw: u64, high: u32, low: u32) -> u64 {
    raw >> low & ((1 << (high - low + 1)) - 1)
}

impl Arm {
    /// Returns the base-2 logarithm of the size that `TTL[1:0]` means, if leaves have that level.
    fn hint(&self, level: u64) -> Option<u32> {
        // The manual reserves levels that have no leaves; they are no hint here.
        (self.largest_block() as u64..=3).contains(&level).then(|| self.shift(level as i8))
    }

    /// Returns what `op` with `operand` invalidates, if it is issued on `cpu` with `vmid` current.
    /// Where the manual leaves the extent to the CPU, this is the least.
    pub fn scope(&self, op: Tlbi, operand: u64, cpu: usize, vmid: Vmid) -> Option<Scope> {
        let none = Scope { leaves: false, walks: false, combined: false, ..Scope::guest(vmid) };
        let local = matches!(
            op,
            Tlbi::Ipas2e1
                | Tlbi::Ipas2le1
                | Tlbi::Ripas2e1
                | Tlbi::Ripas2le1
                | Tlbi::Vmalle1
                | Tlbi::Vmalls12e1
        );
        let last_level =
            matches!(op, Tlbi::Ipas2le1 | Tlbi::Ipas2le1is | Tlbi::Ripas2le1 | Tlbi::Ripas2le1is);
        let none = Scope { cpu: local.then_some(cpu), ..none };
        Some(match op {
            Tlbi::Vae2is => return None,
            Tlbi::Alle1is => {
                Scope { vmid: None, leaves: true, walks: true, combined: true, ..none }
            }
            Tlbi::Vmalls12e1 | Tlbi::Vmalls12e1is => {
                Scope { leaves: true, walks: true, combined: true, ..none }
            }
            Tlbi::Vmalle1 | Tlbi::Vmalle1is => Scope { combined: true, ..none },
            Tlbi::Ipas2e1 | Tlbi::Ipas2e1is | Tlbi::Ipas2le1 | Tlbi::Ipas2le1is => {
                // Bits 35:0 are IPA[47:12] with each granule, and with DS IPA[51:48] above; bits
                // 47:44 are TTL.
                let top = if self.lpa2 || self.lpa { 39 } else { 35 };
                let ipa = bits(operand, top, 0) << 12 >> self.granule << self.granule;
                let ttl = if self.ttl { bits(operand, 47, 44) } else { 0 };
                let shift = if ttl >> 2 == 0 {
                    None
                } else if ttl >> 2 == self.tg() {
                    self.hint(ttl & 0b11)
                } else {
                    // The hint is for another granule: the CPU need not drop any entry.
                    return None;
                };
                let range = Some((ipa, ipa + (1 << self.granule)));
                Scope { range, shift, leaves: true, walks: !last_level, ..none }
            }
            Tlbi::Ripas2e1 | Tlbi::Ripas2e1is | Tlbi::Ripas2le1 | Tlbi::Ripas2le1is => {
                // The fields are TG, SCALE, NUM, TTL, and BaseADDR in units of the granule.
                if bits(operand, 47, 46) != self.tg() {
                    return None;
                }
                let (scale, num) = (bits(operand, 45, 44) as u32, bits(operand, 43, 39));
                let shift = match bits(operand, 38, 37) {
                    level if self.ttl && level != 0 => self.hint(level),
                    _ => None,
                };
                // With DS, BaseADDR is in units of 64 KiB.
                let base = bits(operand, 36, 0) << if self.lpa2 { 16 } else { self.granule };
                // With a hint, the bits below the leaf's size count as zero.
                let base = shift.map_or(base, |shift| base >> shift << shift);
                let end = base + ((num + 1) << (5 * scale + 1 + self.granule));
                Scope { range: Some((base, end)), shift, leaves: true, walks: !last_level, ..none }
            }
        })
    }
}

impl Machine<Arm> {
    /// Writes VTTBR_EL2 of the calling thread's CPU: sets the guest that its invalidations are for.
    pub fn vttbr(&self, vmid: Vmid) {
        let mut state = self.state();
        state.issuer().vmid = Some(vmid);
    }

    /// Executes a TLBI. It takes effect when a DSB waits for it.
    pub fn tlbi(&self, op: Tlbi, operand: u64) {
        let mut state = self.state();
        let issuer = state.issuer();
        let vmid = issuer.vmid.unwrap_or_default();
        if let Some(scope) = self.arch().scope(op, operand, issuer.cpu, vmid) {
            issuer.pending.push(scope);
            if !state.lazy.late_invalidation {
                state.complete(false);
            }
        }
    }

    /// Executes a DSB.
    pub fn dsb(&self, barrier: Barrier) {
        let mut state = self.state();
        if matches!(barrier, Barrier::Ish | Barrier::Nsh) {
            state.complete(barrier == Barrier::Nsh);
        }
        // Until this barrier, walkers may have read older values.
        if state.lazy.speculation {
            state.speculate();
        }
        state.drain();
    }

    /// Executes an ISB.
    pub fn isb(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Vmid = Vmid(3);

    fn scope(granule: u32, op: Tlbi, operand: u64) -> Option<Scope> {
        Arm::new(granule, 39).scope(op, operand, 1, GUEST)
    }

    fn range(granule: u32, op: Tlbi, operand: u64) -> Option<(u64, u64)> {
        scope(granule, op, operand).unwrap().range
    }

    #[test]
    fn an_address_is_in_units_of_4k_on_every_granule() {
        let operand = 0x8003_5000 >> 12;
        assert_eq!(range(12, Tlbi::Ipas2e1is, operand), Some((0x8003_5000, 0x8003_6000)));
        assert_eq!(range(14, Tlbi::Ipas2e1is, operand), Some((0x8003_4000, 0x8003_8000)));
        assert_eq!(range(16, Tlbi::Ipas2e1is, operand), Some((0x8003_0000, 0x8004_0000)));
    }

    #[test]
    fn a_ttl_hint_covers_leaves_of_its_size_and_granule_only() {
        let hint = |granule, ttl: u64| scope(granule, Tlbi::Ipas2e1is, ttl << 44);
        assert_eq!(hint(12, 0b0111).unwrap().shift, Some(12));
        assert_eq!(hint(12, 0b0110).unwrap().shift, Some(21));
        assert_eq!(hint(12, 0b0101).unwrap().shift, Some(30));
        assert_eq!(hint(12, 0b0100).unwrap().shift, None, "reserved without LPA2");
        assert_eq!(hint(14, 0b1001).unwrap().shift, None, "16K has no leaves there");
        assert_eq!(hint(16, 0b1110).unwrap().shift, Some(29));
        assert_eq!(hint(12, 0b1111), None);
        assert_eq!(hint(12, 0b0011).unwrap().shift, None, "no granule: no hint");
    }

    #[test]
    fn a_range_counts_in_granules_by_num_and_scale() {
        // TG 64K, SCALE 1, NUM 2, base 0x20000000.
        let operand = 0b11 << 46 | 1 << 44 | 2 << 39 | 0x2000_0000 >> 16;
        let bytes = 3 << (5 + 1 + 16);
        assert_eq!(range(16, Tlbi::Ripas2e1is, operand), Some((0x2000_0000, 0x2000_0000 + bytes)));
        assert_eq!(scope(12, Tlbi::Ripas2e1is, operand), None, "of another granule");
    }

    #[test]
    fn lpa2_gives_52_bit_addresses_and_ranges_in_units_of_64k() {
        let scope =
            |op, operand| Arm::new(12, 52).with_lpa2().scope(op, operand, 1, GUEST).unwrap();
        let far = 0xf_1234_5678_9000;
        assert_eq!(scope(Tlbi::Ipas2e1is, far >> 12).range, Some((far, far + 0x1000)));
        let base = far >> 16 << 16;
        let operand = 0b01 << 46 | base >> 16;
        assert_eq!(scope(Tlbi::Ripas2e1is, operand).range, Some((base, base + 0x2000)));
        assert_eq!(scope(Tlbi::Ipas2e1is, 0b0100 << 44).shift, Some(39), "512g");
    }

    #[test]
    fn operations_reach_what_their_names_say() {
        let of = |op| scope(12, op, 1 << 46).unwrap();
        let kinds = |op| (of(op).leaves, of(op).walks, of(op).combined);
        assert_eq!(kinds(Tlbi::Ipas2e1is), (true, true, false));
        assert_eq!(kinds(Tlbi::Ipas2le1is), (true, false, false));
        assert_eq!(kinds(Tlbi::Ripas2le1is), (true, false, false));
        assert_eq!(kinds(Tlbi::Vmalle1is), (false, false, true));
        assert_eq!(kinds(Tlbi::Vmalls12e1is), (true, true, true));
        assert_eq!((of(Tlbi::Vmalle1is).cpu, of(Tlbi::Vmalle1).cpu), (None, Some(1)));
        assert_eq!((of(Tlbi::Alle1is).vmid, of(Tlbi::Ipas2e1).vmid), (None, Some(GUEST)));
        assert_eq!(scope(12, Tlbi::Vae2is, 0), None);
    }
}
