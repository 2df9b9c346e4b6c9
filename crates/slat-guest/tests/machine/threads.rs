//! Real threads: vCPUs and threads of the hypervisor on one guest.

use crate::cases::Case;
use crate::common::*;
use slat::{
    Access, Attributes, ChangeError, Format, Hpa, Interruption, MapError, Reader, SplitError,
    TableCache, UnmapBatch, UnmapError,
};
use slat_sim::{Arch, Arm, Machine};
use std::sync::atomic::{AtomicBool, Ordering};

/// The share of each thread of the hypervisor: bytes of the guest, and of memory at a time.
const SHARE: u64 = 2 << 20;
const HOST: u64 = 1 << 34;
const WORKERS: u64 = 2;
const ROUNDS: u64 = 24;
/// A thread that holds an entry for this long will never release it.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

/// Repeats `operation` while another thread holds an entry, for as long as a thread without a CPU
/// may need. The engine itself waits some tens of microseconds only.
fn patiently<T, E: PartialEq + std::fmt::Debug>(
    contended: E,
    mut operation: impl FnMut() -> Result<T, Interruption<E>>,
) -> T {
    let started = std::time::Instant::now();
    loop {
        match operation() {
            Err(stopped) if stopped.reason == contended && started.elapsed() < PATIENCE => {
                std::thread::yield_now();
            }
            result => return result.unwrap(),
        }
    }
}

/// With `kept`, another page is mapped, so that tables above the threads' shares stay. Without it,
/// a thread may unlink a table that also covers another thread's share. Hardware may still walk
/// that empty table, until the thread that unlinked it has completed.
fn worker<F: Format, A: Arch>(guest: &Guest<'_, F, A>, index: u64, seed: u64, kept: bool) {
    let machine = guest.machine;
    machine.here(index as usize % machine.cpus());
    let mut rng = fastrand::Rng::with_seed(seed);
    let base = BASE + index * SHARE;
    let share = range(base, SHARE);
    let mut reader = Reader::register(machine).unwrap();
    for round in 0..ROUNDS {
        let hpa = Hpa(HOST + (index * ROUNDS + round) * SHARE);
        let mut storage = [const { None }; 8];
        let mut cache = TableCache::new(machine, &mut storage);
        cache.fill(4).unwrap();
        let mut guard = guest.tables.enter(&mut reader).unwrap();
        let size = if rng.bool() { M2 } else { K4 };
        patiently(MapError::Contended, || guard.map(share, hpa, Attributes::RAM, size, &mut cache));
        for _ in 0..3 {
            let page = range(base + (rng.u64(..512) << 12), 0x1000);
            match rng.u8(..5) {
                0 => {
                    patiently(SplitError::Contended, || guard.split(share, K4, &mut cache));
                }
                1 => _ = patiently(SplitError::Contended, || guard.collapse(share, M2)),
                2 if guard.write_protect(page).is_ok() => {
                    guard.invalidate();
                    machine.protect(VMID, page);
                    std::thread::yield_now();
                    machine.unprotect(VMID, page);
                    patiently(ChangeError::Contended, || {
                        guard.relax(page, Access::Write).map(slat::LocalFlush::not_needed_here)
                    });
                }
                3 => {
                    patiently(ChangeError::Contended, || guard.harvest(share, &mut [0; 8]));
                }
                _ => std::thread::yield_now(),
            }
        }
        guard.invalidate();
        let mut storage = [slat::UnmapEntry::EMPTY; 512];
        let mut batch = UnmapBatch::new(&guest.tables, &mut storage);
        patiently(UnmapError::Contended, || guard.unmap(share, &mut batch));
        for leaf in batch.complete() {
            machine.take_back(leaf.hpa, leaf.bytes);
        }
        if kept {
            machine.claim_fresh(VMID, share);
        }
        drop(guard);
        guest.tables.reclaim();
    }
}

fn run<F: Format + Sync, A: Arch>(machine: &Machine<A>, format: F, seed: u64, kept: bool) {
    machine.give(Hpa(HOST), 1 << 34);
    let guest = Guest::new(machine, format);
    if kept {
        guest.map(BASE + WORKERS * SHARE, RAM, 0x1000, K4);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for cpu in 0..machine.cpus() {
            let stop = &stop;
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + cpu as u64);
                while !stop.load(Ordering::Relaxed) {
                    let gpa = BASE + rng.u64(..WORKERS * SHARE);
                    let access = [slat_sim::Access::Read, slat_sim::Access::Write];
                    let _ = machine.cpu(cpu).access(gpa, access[rng.usize(..2)]);
                }
            });
        }
        let guest = &guest;
        let workers: Vec<_> = (0..WORKERS)
            .map(|index| {
                let seed = seed.wrapping_mul(31) + index;
                scope.spawn(move || worker(guest, index, seed, kept))
            })
            .collect();
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    clean(machine);
}

#[test]
fn threads_on_arm_leave_nothing_behind() {
    for (seed, bbm) in crate::seed::seeds(3).zip([0, 2, 3]) {
        let machine = Machine::new(Arm { bbm, ..arm() }, 2).random(seed);
        run(&machine, arm64::<12>(), seed, bbm != 2);
    }
}

fn threads_leave_nothing_behind<C: Case>() {
    for (seed, kept) in crate::seed::seeds(2).zip([true, false]) {
        let machine = C::machine(2).random(seed);
        run(&machine, C::format(), seed, kept);
    }
}

mod threads_leave_nothing_behind {
    use super::threads_leave_nothing_behind;
    use crate::cases::*;

    on_cases!(threads_leave_nothing_behind: on_intel Intel);
    #[cfg(feature = "every-format")]
    on_cases!(threads_leave_nothing_behind: on_arm_lpa2 Lpa2K4, on_amd Amd, on_riscv Hart,
        on_riscv_without_svadu HartSvade, on_riscv_with_svvptc HartSvvptc);
}
