//! Ageing without a lock, while other operations change the entries that it reads. No access may go
//! unreported, whether hardware or software marks accesses, and whether or not tables are marked.

use crate::cases::Case;
use crate::common::*;
use slat::{
    Access, AgeBitmaps, AgeOptions, Attributes, Format, Hpa, Reader, TableBits, TableCache,
    UnmapBatch,
};
use slat_sim::{Arch, Machine};
use std::sync::{Arc, Mutex};

/// The operation that runs with a scan.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Other {
    Fault,
    Unmap,
    Split,
    Protect,
    Collapse,
    Scan,
}

const OTHERS: [Other; 6] =
    [Other::Fault, Other::Unmap, Other::Split, Other::Protect, Other::Collapse, Other::Scan];

/// A block, and a table of pages after it, some of which are mapped.
const BYTES: u64 = 4 << 20;
const PAGES: usize = (BYTES >> 12) as usize;
const MAPPED: u64 = 24 << 12;

fn bit(bits: &[u64], page: usize) -> bool {
    bits[page / 64] >> (page % 64) & 1 == 1
}

/// Numbers of pages that are young, or for which a scan has no answer.
type YoungPages = Vec<usize>;

fn scan<F: Format, A: Arch>(guest: &Guest<'_, F, A>, skip: TableBits) -> YoungPages {
    let (mut young, mut unanswered) = ([0u64; PAGES / 64], [0u64; PAGES / 64]);
    let mut reader = Reader::register(guest.machine).unwrap();
    let mut guard = guest.tables.enter(&mut reader).unwrap();
    let how = AgeOptions { clear: true, table_bits: skip, flush_tlb: true };
    let mut ages = AgeBitmaps { young: &mut young, unanswered: &mut unanswered };
    let _ = guard.age(range(BASE, BYTES), &mut ages, how);
    drop(guard);
    (0..PAGES).filter(|&page| bit(&young, page) || bit(&unanswered, page)).collect()
}

fn see<A: Arch>(machine: &Machine<A>, known: &[usize]) {
    for &page in known {
        machine.seen(VMID, range(BASE + ((page as u64) << 12), 0x1000));
    }
}

/// Does `other`; returns the young pages that it learns of.
fn beside<F: Format, A: Arch>(
    guest: &Guest<'_, F, A>,
    other: Other,
    skip: TableBits,
) -> YoungPages {
    let machine = guest.machine;
    let mut storage = [const { None }; 8];
    let mut cache = TableCache::new(machine, &mut storage);
    cache.fill(4).unwrap();
    let mut storage = [slat::UnmapEntry::EMPTY; 64];
    let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
    let mut reader = Reader::register(machine).unwrap();
    let mut guard = guest.tables.enter(&mut reader).unwrap();
    let table = BASE + (2 << 20);
    match other {
        Other::Fault => {
            let _ = guard
                .relax(range(table + 0x5000, 0x1000), Access::Read)
                .map(slat::LocalFlush::not_needed_here);
            let page = range(table + MAPPED, 0x1000);
            let hpa = Hpa(RAM + (2 << 20) + MAPPED);
            let _ = guard.map(page, hpa, Attributes::RAM, K4, &mut cache);
        }
        Other::Unmap => _ = guard.unmap(range(table + 0x6000, 0x3000), &mut batch),
        Other::Split => _ = guard.split(range(BASE, 2 << 20), K4, &mut cache),
        Other::Protect => _ = guard.write_protect(range(BASE, BYTES)),
        Other::Collapse => {
            let _ = guard.split(range(BASE, 2 << 20), K4, &mut cache);
            let _ = guard.collapse(range(BASE, 2 << 20), M2);
        }
        Other::Scan => {
            drop(guard);
            return scan(guest, skip);
        }
    }
    guard.invalidate();
    drop(guard);
    let removed = batch.complete().filter(|leaf| leaf.attributes.accessed);
    removed
        .flat_map(|leaf| {
            let first = ((leaf.gpa.0 - BASE) >> 12) as usize;
            first..first + (leaf.bytes >> 12) as usize
        })
        .collect()
}

/// Leaks the machine and the guest, because a hook keeps references to them.
fn leaked<C: Case>() -> &'static Guest<'static, C::F, C::A> {
    // Speculative walks would mark tables, and so hide bugs in their marks.
    let machine = C::machine(2).lazy(without(|lazy| lazy.speculation = false));
    let machine = Box::leak(Box::new(machine));
    Box::leak(Box::new(C::guest(machine)))
}

/// Runs a scan and `other`: one of them at the `nth` moment of the other. CPUs use pages from the
/// moment before that on. Returns whether there is an `nth` moment.
fn meet<C: Case>(scan_is_outer: bool, other: Other, skip: TableBits, nth: usize) -> bool {
    let guest = leaked::<C>();
    let machine = guest.machine;
    guest.map(BASE, RAM, 2 << 20, M2);
    let table = BASE + (2 << 20);
    guest.map(table, RAM + (2 << 20), MAPPED, K4);
    see(machine, &scan(guest, skip));
    // Uses before both: this scan or the next one has to report them.
    for page in [1, 5, 6, 7, 20] {
        guest.read(0, table + (page << 12));
    }
    guest.read(1, BASE + 0x9000);
    let known = Arc::new(Mutex::new(YoungPages::new()));
    let (inner, mut calls) = (known.clone(), 0);
    let met = Arc::new(Mutex::new(false));
    let done = met.clone();
    machine.meanwhile(move |machine, _| {
        calls += 1;
        if calls == nth {
            let found = match scan_is_outer {
                true => beside(guest, other, skip),
                false => scan(guest, skip),
            };
            inner.lock().unwrap().extend(found);
            *done.lock().unwrap() = true;
        }
        if calls + 1 >= nth {
            // Pages 3 and 8 were not used before.
            let _ = machine.cpu(1).read(table + 0x3000);
            let _ = machine.cpu(0).read(table + 0x8000);
        }
    });
    let outer = if scan_is_outer { scan(guest, skip) } else { beside(guest, other, skip) };
    machine.undisturbed();
    known.lock().unwrap().extend(outer);
    // A use after all scans: the tables must have its mark.
    let _ = machine.cpu(1).read(table + 0x2000);
    see(machine, &known.lock().unwrap());
    let _ = guest.attempt(0, table + 0x1000, slat_sim::Access::Read);
    machine.claim_old(VMID, range(BASE, BYTES), |gpa| {
        guest.look(gpa).is_some_and(|leaf| leaf.attributes.accessed)
    });
    // The next scan has to report all that is left.
    see(machine, &scan(guest, skip));
    machine.claim_old(VMID, range(BASE, BYTES), |_| false);
    let text: Vec<_> = machine.finish().iter().map(ToString::to_string).collect();
    let order = if scan_is_outer { "during a scan" } else { "with a scan in between" };
    assert!(text.is_empty(), "{other:?} {order}, {skip:?}, moment {nth}: {text:#?}");
    *met.lock().unwrap()
}

fn every_access_is_reported_whatever_runs_during_a_scan<C: Case>() {
    // If tables are not marked, both ways to skip are the same.
    let skips = [TableBits::Ignored, TableBits::Exact];
    let skips = if C::F::TABLE_ACCESSED == 0 { &skips[..1] } else { &skips };
    for &skip in skips {
        for other in OTHERS {
            for scan_is_outer in [false, true] {
                // Each moment, or each third one.
                let step = if cfg!(feature = "every-format") { 1 } else { 3 };
                let moments = (1..40).step_by(step);
                let met = moments.take_while(|&nth| meet::<C>(scan_is_outer, other, skip, nth));
                assert!(met.count() > 0, "{other:?}");
            }
        }
    }
}

mod every_access_is_reported_whatever_runs_during_a_scan {
    use super::every_access_is_reported_whatever_runs_during_a_scan;
    use crate::cases::*;

    on_cases!(every_access_is_reported_whatever_runs_during_a_scan: on_riscv Hart);
    #[cfg(feature = "every-format")]
    on_cases!(every_access_is_reported_whatever_runs_during_a_scan: on_arm ArmK4,
        on_arm_without_dirty_state ArmPlain, on_arm_lpa2 Lpa2K4, on_intel Intel, on_amd Amd,
        on_amd_with_five_levels Amd5,
        on_riscv_without_svadu HartSvade, on_riscv_with_svvptc HartSvvptc);
}
