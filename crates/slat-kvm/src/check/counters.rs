//! KVM's own counters of a VM, which must agree with what is mapped.

use super::Trouble;
use crate::HostKvm;
use crate::guest::Guest;
use crate::stats::Reading;

/// Counters of what exists, with the base pages of each.
const MAPPED: [(&str, u64); 3] = [("pages_4k", 1), ("pages_2m", 512), ("pages_1g", 512 * 512)];
/// Counters that only grow.
const GROWING: [&str; 2] = ["remote_tlb_flush", "remote_tlb_flush_requests"];
/// Splits of huge pages to execute from them, of which each covers at least this many base pages.
const SPLITS: (&str, u64) = ("nx_lpage_splits", 512);
/// Pages that KVM maps by itself at most.
const OF_KVM: u64 = 16;

/// A VM's counters.
#[derive(Debug)]
pub(super) struct Counters {
    before: [u64; GROWING.len()],
    reading: Reading,
    /// Whether each guest page is mapped once at most: by tables of the second stage, which all
    /// vCPUs share.
    is_once: bool,
    /// Pages of the guest's code, tables and mailboxes.
    own: u64,
}

impl Counters {
    /// Returns nothing if this KVM has no counters.
    pub fn of(guest: &Guest, host: &HostKvm) -> Option<Self> {
        let on = |name: &str| host.parameters.get(name).is_some_and(|it| it == "Y" || it == "1");
        let is_once = on("tdp_mmu") && (on("npt") || on("ept"));
        let own = guest.own_pages() + OF_KVM;
        let has = guest.vm_stats().is_some();
        let (before, reading) = ([0; GROWING.len()], Reading::default());
        has.then_some(Self { before, reading, is_once, own })
    }

    /// Compares the counters with each other, and with the number of guest pages that memslots
    /// map. While vCPUs run, `quiet` is false: counters that change are then read one by one.
    pub fn check(&mut self, guest: &Guest, pages: u64, quiet: bool) -> Result<(), Trouble> {
        let Some(stats) = guest.vm_stats() else { return Ok(()) };
        stats.read(&mut self.reading).map_err(Trouble::Refused)?;
        for (name, before) in GROWING.into_iter().zip(&mut self.before) {
            let Some(now) = stats.value(&self.reading, name) else { continue };
            if now < *before {
                return wrong(format!("KVM's counter {name} fell from {before} to {now}"));
            }
            *before = now;
        }
        let value = |name| stats.value(&self.reading, name).unwrap_or(0);
        for (name, _) in MAPPED.into_iter().chain([SPLITS]) {
            if value(name).cast_signed() < 0 && quiet {
                let below = value(name).cast_signed();
                return wrong(format!("KVM's counter {name} is {below}, below zero"));
            }
        }
        let most = pages + self.own;
        let mapped: u64 = MAPPED.iter().map(|(name, of)| value(name).saturating_mul(*of)).sum();
        let splits = value(SPLITS.0).saturating_mul(SPLITS.1);
        // A huge page that is split to execute from it lies in a memslot as a whole.
        for (name, count) in [("pages_4k, pages_2m and pages_1g", mapped), (SPLITS.0, splits)] {
            if quiet && self.is_once && count > most {
                return wrong(format!(
                    "KVM's counters {name} say that {count} guest pages are mapped, and memslots \
                     have {most} at most"
                ));
            }
        }
        Ok(())
    }
}

fn wrong(what: String) -> Result<(), Trouble> {
    Err(Trouble::Wrong(what))
}
