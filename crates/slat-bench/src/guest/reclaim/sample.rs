//! Runs one guest once under one policy.

use super::Case;
use super::pattern::{Use, own};
use super::settings::{ReclaimPolicy, SwapPlace};
use super::swap::LabSwap;
use crate::guest::fixture::GUEST_BASE;
use crate::guest::lock::FairLock;
use crate::guest::times::Times;
use crate::threads::Pin;
use anyhow::{Context, bail, ensure};
use rustix::time::{ClockId, clock_gettime};
use slat::{Access, Format, Gpa, Hpa, TableBits, Vmid};
use slat_guest::{Guest, Host, Hva, MemslotId, MemslotSpec, Outcome, Retry, Vcpu, Worker};
use slat_reclaim::{
    Config, Gate, Layout, PageError, PagedMemory, Pager, Policy, Pool, Ram, ReclaimError, Stats,
};
use slat_sim::arch::Arch;
use slat_sim::fast::{AccessError, FastCpu, FastMachine};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const VMID: Vmid = Vmid(1);
const HOST_BASE: u64 = 0x7000_0000_0000;
/// Free pages of each 1,024: the reclaiming thread begins below `LOW`, and stops at `HIGH`.
const LOW: u32 = 4;
const HIGH: u32 = 8;
/// Time for which the reclaiming thread sleeps while enough pages are free.
const NAP: Duration = Duration::from_micros(50);
/// A guest that waits longer than this for a page has failed.
const PATIENCE: Duration = Duration::from_secs(60);

/// The machine's memory.
pub struct MachineRam<'m, A: Arch>(pub &'m FastMachine<A>);

impl<A: Arch> Ram for MachineRam<'_, A> {
    fn read(&self, hpa: Hpa, page: &mut [u8]) {
        self.0.copy_out(hpa, page);
    }

    fn write(&self, hpa: Hpa, page: &[u8]) {
        self.0.copy_in(hpa, page);
    }
}

/// Linux's lock, or none; and how long the reclaiming thread waited for it.
#[derive(Clone, Copy, Default)]
struct LinuxLock<'l> {
    lock: Option<(&'l FairLock, &'l AtomicU64)>,
}

impl Gate for LinuxLock<'_> {
    fn alone(&self, work: &mut dyn FnMut()) {
        let Some((lock, waited)) = self.lock else { return work() };
        let begin = Instant::now();
        lock.exclusive(|| {
            waited.fetch_add(begin.elapsed().as_nanos() as u64, Relaxed);
            work()
        })
    }
}

/// Results of one run. Times are of the part after all pages were written once.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Seconds until the last vCPU finished.
    pub seconds: f64,
    pub accesses: u64,
    pub refaults: u64,
    /// Statistics of reclaim, including threads that wait for their own page.
    pub stats: Stats,
    /// Nanoseconds for which reclaim waited for the lock.
    pub waited: u64,
    /// CPU seconds of the reclaiming thread.
    pub cpu: f64,
    /// Time of each fault, from the access to its success.
    pub faults: Times,
}

/// Memory of a guest.
pub type SampleMemory<'h, A> = PagedMemory<'h, MachineRam<'h, A>, LabSwap>;
/// A guest on the memory of one machine, with swap.
pub type TheGuest<'h, F, A> = Guest<'h, F, FastMachine<A>, &'h SampleMemory<'h, A>>;

/// Runs `case` under `policy`.
pub fn sample<F: Format, A: Arch>(
    format: F,
    machine: &FastMachine<A>,
    case: &Case,
    policy: ReclaimPolicy,
    swap: &SwapPlace,
    cpus: &[usize],
) -> anyhow::Result<Sample> {
    with_guest(format, machine, case, config(case, policy), swap, |guest| {
        run(machine, guest, case, policy, cpus)
    })
}

/// Calls `work` with `case`'s guest, which may have as much memory as `config` says.
pub fn with_guest<F: Format, A: Arch, R>(
    format: F,
    machine: &FastMachine<A>,
    case: &Case,
    config: Config,
    swap: &SwapPlace,
    work: impl FnOnce(&TheGuest<'_, F, A>) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    // Each thread may have pages on their way out.
    let spare = (u32::from(case.vcpus) + 1) * case.batch;
    let swap = LabSwap::new(swap, case.pages + spare, F::size(0))?;
    let layout = Layout {
        base: machine.memory_base(),
        bytes: u64::from(case.memory) * case.page,
        page: F::size(0),
        block: F::size(1),
    };
    let pool = Pool::new(MachineRam(machine), layout, swap)?;
    let bytes = u64::from(case.pages) * case.page;
    let paged = PagedMemory::new(&pool, Hva(HOST_BASE), bytes, config, machine.now())?;
    let largest = F::size(config.huge.into());
    let config = slat_guest::Config::new(case.vcpus, largest);
    let bits = machine.arch().address_bits();
    let guest = Guest::new(format, VMID, bits, machine, &paged, config)?;
    let slot = MemslotSpec::new(MemslotId(0), Gpa(GUEST_BASE), bytes, Hva(HOST_BASE));
    Worker::new(&guest)?.set_memslot(slot).context("the guest's slot")?;
    let result = work(&guest);
    // SAFETY: CPUs are borrowed by threads, which have ended, so none has loaded the guest's
    // tables.
    unsafe { guest.destroy() };
    result
}

fn config(case: &Case, policy: ReclaimPolicy) -> Config {
    let base = Config {
        window: case.window,
        table_bits: TableBits::Ignored,
        fresh: case.fresh,
        huge: case.huge,
        residency: case.residency,
        batch: case.batch,
        ..Config::new(case.memory)
    };
    match policy {
        ReclaimPolicy::Clock => Config { policy: Policy::TwoLists, frequency: false, ..base },
        ReclaimPolicy::LockedPage | ReclaimPolicy::FreePage => {
            Config { window: 1, look_around: false, frequency: false, ..base }
        }
        ReclaimPolicy::FreeRecent => Config { frequency: false, ..base },
        ReclaimPolicy::LockedBitmap | ReclaimPolicy::FreeBitmap => base,
        ReclaimPolicy::FreeExact => {
            Config { window: u32::MAX, table_bits: TableBits::Exact, ..base }
        }
    }
}

const fn is_locked(policy: ReclaimPolicy) -> bool {
    use ReclaimPolicy::{Clock, LockedBitmap, LockedPage};
    matches!(policy, Clock | LockedPage | LockedBitmap)
}

fn run<F: Format, A: Arch>(
    machine: &FastMachine<A>,
    guest: &TheGuest<'_, F, A>,
    case: &Case,
    policy: ReclaimPolicy,
    cpus: &[usize],
) -> anyhow::Result<Sample> {
    let (lock, waited) = (&FairLock::default(), &AtomicU64::new(0));
    let locking = LinuxLock { lock: is_locked(policy).then_some((lock, waited)) };
    let vcpus = usize::from(case.vcpus);
    let (filled, done) = (&Barrier::new(vcpus + 1), &Barrier::new(vcpus + 1));
    let (over, failed) = (&AtomicBool::new(false), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..case.vcpus)
            .map(|id| {
                scope.spawn(move || -> anyhow::Result<(Times, u64)> {
                    // The reclaiming thread has the last CPU, if there are at least two.
                    let pin = Pin::to(cpus[usize::from(id) % (cpus.len() - 1).max(1)]);
                    let mut ready = pin.and_then(|pin| {
                        let mut runner =
                            Runner::new(guest, machine, case, id, locking, Some(failed))?;
                        runner.fill()?;
                        Ok((runner, pin))
                    });
                    failed.fetch_or(ready.is_err(), Relaxed);
                    filled.wait();
                    // The main thread notes the counts so far, between the two barriers.
                    filled.wait();
                    let begin = Instant::now();
                    let used = match &mut ready {
                        Ok((runner, _)) => runner.use_all(),
                        Err(_) => Ok(()),
                    };
                    let seconds = begin.elapsed().as_nanos() as u64;
                    failed.fetch_or(used.is_err(), Relaxed);
                    done.wait();
                    let (runner, _pin) = ready?;
                    used?;
                    Ok((runner.times, seconds))
                })
            })
            .collect();
        let reclaimer = scope.spawn(move || -> anyhow::Result<f64> {
            let _pin = Pin::to(cpus[cpus.len() - 1])?;
            let mut worker = Worker::new(guest)?;
            let mut pager = Pager::gated(&mut worker, &locking);
            let mut start = None;
            let cpu = || {
                let time = clock_gettime(ClockId::ThreadCPUTime);
                time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
            };
            let pool = guest.backing().pool();
            let (low, high) = ((pool.total() >> 10) * LOW, (pool.total() >> 10) * HIGH);
            let mut active = false;
            while !over.load(Relaxed) {
                if start.is_none() && case.started.load(Relaxed) {
                    start = Some(cpu());
                }
                let free = pool.free();
                active = free < low.max(8) || (active && free < high.max(16));
                if !active {
                    std::thread::sleep(NAP);
                    continue;
                }
                if let Err(ReclaimError::Swap(error)) = pager.reclaim(case.batch) {
                    bail!("swap: {error}");
                }
            }
            Ok(cpu() - start.unwrap_or_default())
        });
        case.started.store(false, Relaxed);
        filled.wait();
        let (before, waited_before) = (guest.backing().stats(), waited.load(Relaxed));
        case.started.store(true, Relaxed);
        filled.wait();
        done.wait();
        let (after, waited_after) = (guest.backing().stats(), waited.load(Relaxed));
        over.store(true, Relaxed);
        let cpu = reclaimer.join().expect("the reclaiming thread does not panic")?;
        let mut faults = Times::default();
        let mut longest = 0;
        for thread in threads {
            let (times, nanoseconds) = thread.join().expect("a vCPU does not panic")?;
            faults.merge(&times);
            longest = longest.max(nanoseconds);
        }
        let stats = after.since(&before);
        Ok(Sample {
            seconds: longest as f64 / 1e9,
            accesses: case.uses.iter().map(|uses| uses.len() as u64).sum(),
            refaults: stats.refaults,
            stats,
            waited: waited_after - waited_before,
            cpu,
            faults,
        })
    })
}

/// A vCPU on its CPU: it handles its own faults, and checks what it reads.
pub struct Runner<'w, 'h, F: Format, A: Arch> {
    vcpu: Vcpu<'w, F, FastMachine<A>, &'h SampleMemory<'h, A>>,
    cpu: FastCpu<'h, A>,
    case: &'w Case,
    id: u16,
    locking: LinuxLock<'w>,
    /// Set when another vCPU has failed: then this one waits no longer.
    failed: Option<&'w AtomicBool>,
    /// For each page, the version that this vCPU wrote last.
    written: Vec<u32>,
    times: Times,
}

impl<'w, 'h, F: Format, A: Arch> Runner<'w, 'h, F, A> {
    fn new(
        guest: &'w TheGuest<'h, F, A>,
        machine: &'h FastMachine<A>,
        case: &'w Case,
        id: u16,
        locking: LinuxLock<'w>,
        failed: Option<&'w AtomicBool>,
    ) -> anyhow::Result<Self> {
        let vcpu = Vcpu::new(guest, id)?;
        let mut cpu = machine.cpu(id.into())?;
        cpu.load(VMID, vcpu.root());
        let written = vec![0; case.pages as usize];
        Ok(Self { vcpu, cpu, case, id, locking, failed, written, times: Times::default() })
    }

    /// Returns the only vCPU of a guest without locks.
    pub fn alone(
        guest: &'w TheGuest<'h, F, A>,
        machine: &'h FastMachine<A>,
        case: &'w Case,
    ) -> anyhow::Result<Self> {
        Self::new(guest, machine, case, 0, LinuxLock::default(), None)
    }

    /// Returns the worker that moves pages on this thread.
    pub fn worker(&mut self) -> &mut Worker<'w, F, FastMachine<A>, &'h SampleMemory<'h, A>> {
        self.vcpu.worker()
    }

    /// Writes this vCPU's share of all pages for the first time.
    pub fn fill(&mut self) -> anyhow::Result<()> {
        own(self.case.pages, self.id, self.case.vcpus)
            .try_for_each(|page| self.apply(Use::new(page, true)))?;
        self.times = Times::default();
        Ok(())
    }

    fn use_all(&mut self) -> anyhow::Result<()> {
        let case = self.case;
        case.uses[usize::from(self.id)].iter().try_for_each(|&one| self.apply(one))
    }

    /// Returns the address of this vCPU's word of a page.
    fn gpa(&self, page: u32) -> u64 {
        GUEST_BASE + u64::from(page) * self.case.page + u64::from(self.id) * 64
    }

    /// Reads a page, checks the value, and writes it if the use is a write.
    #[inline]
    pub fn apply(&mut self, one: Use) -> anyhow::Result<()> {
        let (page, gpa) = (one.page(), self.gpa(one.page()));
        let stamp = |version: u32| u64::from(page) << 32 | u64::from(version);
        let version = self.written[page as usize];
        let found = match self.cpu.read(gpa) {
            Ok(word) => word,
            Err(error) => self.insist(error, |cpu| cpu.read(gpa))?,
        };
        let wanted = if version == 0 { 0 } else { stamp(version) };
        ensure!(found == wanted, "page {page} has {found:#x}, not {wanted:#x}: it was lost");
        if one.writes() {
            let value = stamp(version + 1);
            if let Err(error) = self.cpu.write(gpa, value) {
                self.insist(error, |cpu| cpu.write(gpa, value))?;
            }
            self.written[page as usize] = version + 1;
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn insist<R>(
        &mut self,
        mut error: AccessError,
        mut access: impl FnMut(&mut FastCpu<'h, A>) -> Result<R, AccessError>,
    ) -> anyhow::Result<R> {
        let begin = Instant::now();
        loop {
            ensure!(error.fault().is_some(), "{error}");
            let how = match error.access {
                slat_sim::Access::Read => Access::Read,
                slat_sim::Access::Write => Access::Write,
                slat_sim::Access::Execute => Access::Execute,
            };
            let gpa = Gpa(error.gpa & !(self.case.page - 1));
            let outcome = match self.locking.lock {
                Some((lock, _)) => lock.shared(|| self.vcpu.fault(gpa, how)),
                None => self.vcpu.fault(gpa, how),
            };
            match outcome {
                Outcome::Retry(Retry::Absent(_)) => {
                    use ReclaimError::{InUse, Nothing, Thrashing};
                    let host = Hva(HOST_BASE + (gpa.0 - GUEST_BASE));
                    let mut pager = Pager::gated(self.vcpu.worker(), &self.locking);
                    match pager.bring_in(host, how) {
                        Ok(()) => {}
                        Err(PageError::NoRoom { reason: Thrashing | Nothing | InUse }) => {
                            std::thread::yield_now();
                        }
                        Err(error) => bail!("{error}"),
                    }
                }
                Outcome::Retry(_) => std::thread::yield_now(),
                Outcome::Mmio | Outcome::Refused(_) | Outcome::RingFull => {
                    bail!("the guest's {how:?} at {gpa:?} came to {outcome:?}")
                }
                _ => {}
            }
            match access(&mut self.cpu) {
                Ok(result) => {
                    self.times.add(begin.elapsed().as_nanos() as u64);
                    return Ok(result);
                }
                Err(again) => error = again,
            }
            let failed = self.failed.is_some_and(|failed| failed.load(Relaxed));
            ensure!(!failed, "another vCPU failed");
            ensure!(begin.elapsed() < PATIENCE, "the guest waits for {gpa:?} for ever");
        }
    }
}
