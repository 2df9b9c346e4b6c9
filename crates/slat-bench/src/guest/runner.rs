//! A vCPU and the CPU that it runs on, driven by one thread.

use super::fixture::{Ram, TheGuest, TheWorker, VMID};
use super::lock::FairLock;
use super::times::Times;
use anyhow::{bail, ensure};
use slat::{Access, Format, Gpa};
use slat_guest::{Outcome, Vcpu};
use slat_sim::arch::Arch;
use slat_sim::fast::{AccessError, FastCpu, FastMachine};
use std::time::{Duration, Instant};

/// Number of faults of one access in a row that are an error.
const PATIENCE: u32 = 10_000_000;

/// A vCPU and the CPU that it runs on: one thread.
pub struct Runner<'w, 'p, F: Format, A: Arch> {
    vcpu: Vcpu<'w, F, FastMachine<A>, Ram>,
    cpu: FastCpu<'p, A>,
    locks: Locks<'w>,
    /// Extra cost of each fault, which the thread spins away.
    pub exit: Duration,
    /// Time that each fault held the vCPU up, including waits for locks and for a full ring.
    pub times: Times,
}

/// The lock that a fault is handled under.
#[derive(Clone, Copy)]
pub enum Locks<'l> {
    /// None.
    Free,
    /// A lock, shared.
    Shared(&'l FairLock),
    /// A lock, exclusive.
    Exclusive(&'l FairLock),
}

impl<'w, 'p, F: Format, A: Arch> Runner<'w, 'p, F, A> {
    /// Makes vCPU `id` of the guest, on the CPU of that number.
    ///
    /// # Errors
    /// The vCPU or the CPU is in use.
    pub fn new(
        guest: &'w TheGuest<'p, F, A>,
        machine: &'p FastMachine<A>,
        id: u16,
        locks: Locks<'w>,
    ) -> anyhow::Result<Self> {
        let vcpu = Vcpu::new(guest, id)?;
        let mut cpu = machine.cpu(id.into())?;
        cpu.load(VMID, vcpu.root());
        Ok(Self { vcpu, cpu, locks, exit: Duration::ZERO, times: Times::default() })
    }

    /// Returns the vCPU's worker, which can do what any thread can.
    pub const fn worker(&mut self) -> &mut TheWorker<'w, F, A> {
        self.vcpu.worker()
    }

    /// The guest stores a word.
    ///
    /// # Errors
    /// The fault cannot be resolved.
    #[inline]
    pub fn write(&mut self, gpa: u64, value: u64) -> anyhow::Result<()> {
        match self.cpu.write(gpa, value) {
            Ok(()) => Ok(()),
            Err(error) => self.insist(error, |cpu| cpu.write(gpa, value)),
        }
    }

    /// The guest loads a word.
    ///
    /// # Errors
    /// The fault cannot be resolved.
    #[inline]
    pub fn read(&mut self, gpa: u64) -> anyhow::Result<u64> {
        match self.cpu.read(gpa) {
            Ok(word) => Ok(word),
            Err(error) => self.insist(error, |cpu| cpu.read(gpa)),
        }
    }

    /// The guest fetches a word as an instruction.
    ///
    /// # Errors
    /// The fault cannot be resolved.
    #[inline]
    pub fn execute(&mut self, gpa: u64) -> anyhow::Result<u64> {
        match self.cpu.execute(gpa) {
            Ok(word) => Ok(word),
            Err(error) => self.insist(error, |cpu| cpu.execute(gpa)),
        }
    }

    /// Handles faults until the access succeeds.
    #[cold]
    #[inline(never)]
    fn insist<R>(
        &mut self,
        mut error: AccessError,
        mut access: impl FnMut(&mut FastCpu<'p, A>) -> Result<R, AccessError>,
    ) -> anyhow::Result<R> {
        let mut begin = Instant::now();
        let mut full = false;
        for _ in 0..PATIENCE {
            ensure!(error.fault().is_some(), "{error}");
            if !self.exit.is_zero() {
                let left = Instant::now();
                while left.elapsed() < self.exit {
                    std::hint::spin_loop();
                }
            }
            let outcome = self.answer(&error);
            match outcome {
                Outcome::Mmio | Outcome::Refused(_) => {
                    bail!("the guest's {:?} at {:#x} came to {outcome:?}", error.access, error.gpa)
                }
                Outcome::Retry(_) => std::thread::yield_now(),
                Outcome::RingFull => {
                    // The whole wait for the ring counts as one.
                    full = true;
                    std::thread::yield_now();
                    continue;
                }
                _ => {}
            }
            self.times.add(begin.elapsed().as_nanos() as u64);
            if std::mem::take(&mut full) {
                self.times.waited_for_room += 1;
            }
            match access(&mut self.cpu) {
                Ok(result) => return Ok(result),
                Err(again) => error = again,
            }
            begin = Instant::now();
        }
        bail!("the guest's {:?} at {:#x} faults for ever", error.access, error.gpa)
    }

    fn answer(&mut self, error: &AccessError) -> Outcome {
        let access = match error.access {
            slat_sim::Access::Read => Access::Read,
            slat_sim::Access::Write => Access::Write,
            slat_sim::Access::Execute => Access::Execute,
        };
        let gpa = Gpa(error.gpa & !(F::size(0).bytes() - 1));
        match self.locks {
            Locks::Free => self.vcpu.fault(gpa, access),
            Locks::Shared(lock) => lock.shared(|| self.vcpu.fault(gpa, access)),
            Locks::Exclusive(lock) => lock.exclusive(|| self.vcpu.fault(gpa, access)),
        }
    }
}
