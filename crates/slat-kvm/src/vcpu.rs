//! One vCPU, which runs until its work is done or until it is asked to stop.

use crate::arch::{self, MEMORY_GPA};
use crate::boot;
use crate::machine::Machine;
use crate::mailbox::{Mailbox, word};
use crate::work::{Order, Work};
use crate::{Error, arch::Piece};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// `KVM_EXIT_DIRTY_RING_FULL`.
const RING_FULL: u32 = kvm_bindings::KVM_EXIT_DIRTY_RING_FULL;

/// A range of the memory's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// First page, counted from the start of the memory.
    pub first: u64,
    /// Number of pages.
    pub pages: u64,
}

/// One vCPU of a [`Guest`](crate::guest::Guest), with its part of the memory.
#[derive(Debug)]
pub struct Vcpu {
    // Fields are dropped in this order: the vCPU before the machine.
    pub(crate) fd: VcpuFd,
    pub(crate) machine: Arc<Machine>,
    pub(crate) index: usize,
    pub(crate) part: Part,
    pub(crate) ticks_per_second: f64,
}

impl Vcpu {
    /// Returns the vCPU's index, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the vCPU's part of the memory.
    pub fn part(&self) -> Part {
        self.part
    }

    /// Wakes the thread that waits for full rings, because this vCPU's ring will not become full
    /// any more.
    pub(crate) fn finish(&self) {
        self.machine.gate.finish();
    }

    /// Gives the vCPU another part of the memory, for the next work.
    pub(crate) fn set_part(&mut self, part: Part) {
        self.part = part;
    }

    /// Returns the sum of the vCPU's reads since the last call.
    pub(crate) fn take_sum(&self) -> u64 {
        word!(self.mailbox(), sum).swap(0, Relaxed)
    }

    fn mailbox(&self) -> Mailbox<'_> {
        self.machine.mailbox(self.index)
    }

    /// Loads work for [`Vcpu::run`]. It is a call of its own, so that it is not timed.
    ///
    /// # Errors
    /// [`Error::Invalid`], and the other errors of [`Work::check`].
    pub fn load(&mut self, work: &Work) -> Result<(), Error> {
        work.check()?;
        let mailbox = self.mailbox();
        let page_size = self.machine.page_size;
        let next = boot::piece(match work.order {
            Order::Sequential => Piece::Sequential,
            Order::Random { .. } => Piece::Random,
            Order::Hot { .. } => Piece::Hot,
            Order::Listed { .. } => Piece::Listed,
        });
        let hot_share = match work.order {
            Order::Hot { share, .. } => u64::from(share),
            _ => 0,
        };
        let left = match work {
            Work { endless: true, .. } => u64::MAX,
            _ => work.steps.unwrap_or(self.part.pages),
        };
        let list = match work.order {
            Order::Listed { pages } => pages,
            _ => &[],
        };
        let boot = &self.machine.boot;
        let Some(room) = boot.records().checked_sub(list.len() as u64) else {
            return Err(Error::invalid("recorded accesses", list.len(), "have no room"));
        };
        // One more value is that of the start.
        if work.record && left >= room {
            return Err(Error::invalid("steps", left, format!("exceed a record of {room}")));
        }
        // The list ends where the room of the records does.
        let list_at = boot.records_gpa(self.index) + room * 8;
        for (place, page) in (0..).zip(list) {
            boot.memory().write(list_at + place * 8, page % self.part.pages.max(1));
        }
        let record = if work.record { self.machine.boot.records_gpa(self.index) } else { 0 };
        let period = work.per_second.map_or(0, |pace| (self.ticks_per_second / pace) as u64);
        word!(mailbox, left).store(left, Relaxed);
        word!(mailbox, base).store(MEMORY_GPA + self.part.first * page_size, Relaxed);
        word!(mailbox, pages).store(self.part.pages, Relaxed);
        word!(mailbox, shift).store(page_size.trailing_zeros().into(), Relaxed);
        word!(mailbox, index).store(0, Relaxed);
        word!(mailbox, random).store(work.seed(self.index), Relaxed);
        word!(mailbox, share).store(work.share.into(), Relaxed);
        word!(mailbox, accumulator).store(work.accumulator(), Relaxed);
        word!(mailbox, next).store(next, Relaxed);
        word!(mailbox, hit).store(boot::touching(work.hit), Relaxed);
        word!(mailbox, miss).store(boot::touching(work.miss), Relaxed);
        word!(mailbox, hot_pages).store(work.hot_pages(self.part.pages), Relaxed);
        word!(mailbox, hot_share).store(hot_share, Relaxed);
        word!(mailbox, list).store(list_at, Relaxed);
        word!(mailbox, listed).store(list.len() as u64, Relaxed);
        word!(mailbox, period).store(period, Relaxed);
        word!(mailbox, returns).store(arch::RETURNS, Relaxed);
        word!(mailbox, record).store(record, Relaxed);
        mailbox.ask_to_stop(false);
        Ok(())
    }

    /// Runs until the loaded work is done or the vCPU was asked to stop, and returns the number of
    /// steps done. The next call continues where this one stopped.
    ///
    /// # Errors
    /// [`Error::GuestStopped`] if the guest left its code, [`Error::WorkIncomplete`] if it left
    /// before its work was done without having been asked to stop, [`Error::Stopped`] if its ring
    /// is full and will not be reset any more, [`Error::Os`].
    pub fn run(&mut self) -> Result<u64, Error> {
        self.run_beside(&mut |_| false)
    }

    /// Runs as [`Vcpu::run`], and hands on each exit that the guest's code does not make by itself.
    /// The guest goes on after those for which `handles` returns true.
    pub(crate) fn run_beside(
        &mut self,
        handles: &mut dyn FnMut(&mut VcpuExit<'_>) -> bool,
    ) -> Result<u64, Error> {
        let before = self.mailbox().position();
        let asked = word!(self.mailbox(), left).load(Relaxed);
        if asked == 0 {
            return Ok(0);
        }
        loop {
            match self.fd.run() {
                Ok(exit) if arch::is_done(&exit) => break,
                Ok(VcpuExit::Unsupported(RING_FULL)) => {
                    if !self.machine.gate.wait_for_reset() {
                        return Err(Error::Stopped);
                    }
                }
                Ok(mut exit) => {
                    if handles(&mut exit) {
                        continue;
                    }
                    let exit = format!("{exit:?}");
                    let registers = arch::describe(&self.fd);
                    return Err(Error::GuestStopped { vcpu: self.index, exit, registers });
                }
                // After a signal the guest continues where it was.
                Err(error) => match Errno::from_raw_os_error(error.errno()) {
                    Errno::INTR | Errno::AGAIN if self.machine.gate.is_closed() => {
                        return Err(Error::Stopped);
                    }
                    Errno::INTR | Errno::AGAIN => {}
                    error => return Err(Error::os("KVM_RUN")(error)),
                },
            }
        }
        let mailbox = self.mailbox();
        let steps = mailbox.position().wrapping_sub(before);
        let left = word!(mailbox, left).load(Relaxed);
        let stopped = word!(mailbox, stop).load(Relaxed) != 0;
        if asked.wrapping_sub(steps) != left || (left != 0 && !stopped) {
            return Err(Error::WorkIncomplete { vcpu: self.index, asked, steps, left });
        }
        Ok(steps)
    }
}
