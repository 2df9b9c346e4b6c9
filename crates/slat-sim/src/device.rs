//! A device behind an IOMMU whose tables follow a guest's: the device reaches a page from
//! [`DeviceTables::mapped`] to [`DeviceTables::unmapped`].

use crate::arch::Arch;
use crate::machine::Machine;
use crate::state::State;
use crate::violation::Kind;
use slat::{Gpa, GpaRange, Hpa, Vmid};
use slat_guest::{DeviceLeaf, DeviceTables};
use std::collections::BTreeMap;

const PAGE: u32 = 12;

impl State {
    /// Reports each page of the host in `first..last` that a device may still reach.
    pub fn forbid_devices(&mut self, first: u64, last: u64) {
        let inside = |hpa: u64| (first..last).contains(&(hpa << PAGE));
        let reached = self.iommu.pages.iter().filter(|(_, (hpa, _))| inside(*hpa));
        for (gpa, (hpa, _)) in reached.map(|(gpa, page)| (*gpa, *page)).collect::<Vec<_>>() {
            let used = format!("a device may reach {:#x}", hpa << PAGE);
            let at = Some(gpa << PAGE);
            self.log.report(Kind::FreedMemory, None, at, used, "it was taken back");
        }
    }
}

impl<A: Arch> Machine<A> {
    /// Makes a device read or write the guest's memory at `gpa`. Returns `None` if the IOMMU's
    /// tables do not allow it.
    pub fn device_access(&self, vmid: Vmid, gpa: Gpa, write: bool) -> Option<Hpa> {
        let mut state = self.state();
        let (hpa, _) = state
            .iommu
            .pages
            .get(&(gpa.0 >> PAGE))
            .copied()
            .filter(|(_, may_write)| *may_write || !write)?;
        let hpa = hpa << PAGE;
        if let Some(reason) = state.host.refuses(hpa).or_else(|| state.owned.refuses_host(hpa)) {
            let used = format!("a device reaches {hpa:#x}");
            state.log.report(Kind::FreedMemory, None, Some(gpa.0), used, reason);
        }
        let nobody = state.cpus.len();
        state.uses.record(vmid.0, gpa.0, nobody, write);
        if write {
            state.host.host_write(hpa);
        }
        Some(Hpa(hpa))
    }

    /// Claims that the IOMMU's tables map what the guest's tables map, and nothing else.
    pub fn claim_followed(&self, vmid: Vmid) {
        let mut state = self.state();
        let (present, _) = state.present(vmid);
        let mut there = BTreeMap::new();
        for entry in present.values() {
            for gpa in (entry.start..entry.end()).step_by(1 << PAGE) {
                there.insert(gpa >> PAGE, entry.hpa(gpa) >> PAGE);
            }
        }
        let pages = state.iommu.pages.iter().map(|(gpa, (hpa, _))| (*gpa, *hpa));
        let followed: BTreeMap<_, _> = pages.collect();
        let all = there.keys().chain(followed.keys());
        let wrong = all.filter(|gpa| there.get(gpa) != followed.get(gpa)).min().copied();
        if let Some(gpa) = wrong {
            let used = format!("the device's tables have {:x?}", followed.get(&gpa));
            let expected = format!("the guest's have {:x?}", there.get(&gpa));
            let at = Some(gpa << PAGE);
            state.log.report(Kind::StaleTranslation, None, at, used, &expected);
        }
    }
}

impl<A: Arch> DeviceTables for Machine<A> {
    fn mapped(&self, leaf: DeviceLeaf) {
        let mut state = self.state();
        for offset in (0..leaf.bytes).step_by(1 << PAGE) {
            let (gpa, hpa) = ((leaf.gpa.0 + offset) >> PAGE, (leaf.hpa.0 + offset) >> PAGE);
            let old = state.iommu.pages.insert(gpa, (hpa, leaf.write));
            if old.is_some_and(|(old, write)| old != hpa || write && !leaf.write) {
                let used = format!("{:#x} is told as mapped", hpa << PAGE);
                let expected = format!("{old:x?} is told as unmapped first");
                state.log.report(Kind::StaleTranslation, None, Some(gpa << PAGE), used, &expected);
            }
        }
    }

    fn unmapped(&self, range: GpaRange) {
        let pages = range.start().0 >> PAGE..range.end().0 >> PAGE;
        self.state().iommu.pages.retain(|gpa, _| !pages.contains(gpa));
    }
}
