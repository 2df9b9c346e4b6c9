//! CPUs on which a TLBI and its DSB may complete before stores that used the translation.
//!
//! On these CPUs an invalidation removes entries as it should, but a store of another CPU, which
//! the removed entry translated, may become visible after the DSB. Any broadcast TLBI that follows,
//! with its DSB, completes it. An invalidation of the second stage alone completes no store, as
//! translations that combine both stages survive it. (Arm errata 1286807, 2441007, 2441009 and
//! 4118414; after the conditions that Linux 7.3 states under `ARM64_WORKAROUND_REPEAT_TLBI_SYNC`.)

use crate::state::State;
use crate::tlb::{Entry, LateStore, Scope};
use slat::Vmid;

impl State {
    /// Returns the translations by which CPUs but this one may have stored.
    fn stored(&self, but: usize) -> Vec<(usize, Vmid, Entry)> {
        let vmids: Vec<_> = self.vmids.iter().copied().map(Vmid).collect();
        let of = |(index, vmid): (usize, Vmid)| {
            let cpu = &self.cpus[index];
            let held = cpu.leaves.all(vmid).into_iter().chain(cpu.combined.all(vmid));
            let wrote = held.filter(|entry| entry.leaf.rights.write && entry.leaf.dirty);
            wrote.map(|entry| (index, vmid, entry)).collect::<Vec<_>>()
        };
        let cpus = (0..self.cpus.len()).filter(|&cpu| cpu != but);
        cpus.flat_map(|cpu| vmids.iter().map(move |vmid| (cpu, *vmid))).flat_map(of).collect()
    }

    /// Executes an invalidation for all CPUs that is now complete: what it drops, another CPU may
    /// have stored through.
    pub(crate) fn forget_late(&mut self, scope: &Scope, here: usize) {
        let before = self.stored(here);
        self.forget(scope);
        let after = self.stored(here);
        for (cpu, vmid, entry) in before {
            if !after.contains(&(cpu, vmid, entry)) {
                self.cpus[cpu].late.push(LateStore { vmid, entry, is_late: false });
            }
        }
    }

    /// A DSB has waited for broadcast invalidations; `combined` if one of them was of translations
    /// that combine both stages.
    pub(crate) fn land(&mut self, combined: bool) {
        for cpu in &mut self.cpus {
            cpu.late.retain(|store| !store.is_late);
            cpu.late.iter_mut().for_each(|store| store.is_late |= combined);
        }
    }
}
