//! Mailboxes: memory by which a vCPU's code and the host communicate.
//!
//! The host writes the work, and the guest's code loads it when it is entered. The guest's code
//! writes its progress and the times that it measured. Access to shared memory causes no exit, so
//! the host can watch and stop vCPUs while they run.
//!
//! Each word has one writer at a time. The guest's code stores `position` after the access that it
//! counts (x86 keeps stores in order; on Arm the store is a release), and the host loads it with
//! acquire. So the host sees the effects of all steps that a position counts.

use crate::memory::HostMemory;
use crate::stall::{BUCKETS, Histogram};

use std::sync::atomic::{AtomicU64, Ordering};

/// The words of a mailbox. The guest's code addresses them by their offsets.
#[repr(C)]
pub(crate) struct Words {
    /// Steps still to do.
    pub left: u64,
    /// Guest address of the first page of the vCPU's part.
    pub base: u64,
    /// Number of pages of the part.
    pub pages: u64,
    /// Binary logarithm of the page size.
    pub shift: u64,
    /// The next page of the sequential order.
    pub index: u64,
    /// State of the random orders.
    pub random: u64,
    /// The share in per cent, which each step adds to the accumulator.
    pub share: u64,
    /// Sum of the shares modulo 100. A step at which it reaches 100 is a hit.
    pub accumulator: u64,
    /// Address of the code that chooses the page.
    pub next: u64,
    /// Address of the code of a hit.
    pub hit: u64,
    /// Address of the code of any other step.
    pub miss: u64,
    /// Number of pages of the hot set, which starts with the part.
    pub hot_pages: u64,
    /// Share of the steps that touch the hot set, in per cent.
    pub hot_share: u64,
    /// Guest address of a list of pages, and the number of its entries.
    pub list: u64,
    pub listed: u64,
    /// Ticks from one step to the next, or 0 for no pace.
    pub period: u64,
    /// Ticks above which the time between two accesses is a stall.
    pub threshold: u64,
    /// Return instructions, which a write stores in its page.
    pub returns: u64,
    /// Not 0 if the guest's code must leave after the current step. Only the host writes it.
    pub stop: u64,
    /// Number of the next step. Only the guest's code writes this word and those below, except that
    /// the host resets `longest`.
    pub position: u64,
    /// Number of stalls, and their sum in ticks.
    pub stalls: u64,
    pub stall_ticks: u64,
    /// The longest stall since the host set this to 0.
    pub longest: u64,
    /// Ticks lost to interruptions while a step was not yet due, which delayed no access.
    pub idle_ticks: u64,
    /// Number of reads that found another page's stamp.
    pub wrong: u64,
    /// Sum over the words that were read. The host resets it.
    pub sum: u64,
    /// Guest address at which the clock is recorded next, or 0 for no record. The host writes it
    /// with the work, and the guest's code advances it.
    pub record: u64,
}

/// Bytes from the start of a mailbox to its histogram of times between accesses.
pub(crate) const HISTOGRAM: u64 = 4096;
/// Bytes from the start of a mailbox to the end of the guest's stack.
pub(crate) const STACK: u64 = 4 * 4096;
/// Bytes from one vCPU's mailbox to the next.
pub(crate) const STRIDE: u64 = STACK;

const _: () = assert!(size_of::<Words>() as u64 <= HISTOGRAM);
const _: () = assert!(HISTOGRAM + BUCKETS as u64 * 8 <= STACK - 4096);

/// A vCPU's mailbox, as the host sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mailbox<'a> {
    memory: &'a HostMemory,
    at: u64,
}

macro_rules! word {
    ($mailbox:expr, $name:ident) => {
        $mailbox.word(std::mem::offset_of!($crate::mailbox::Words, $name))
    };
}
pub(crate) use word;

impl<'a> Mailbox<'a> {
    /// Returns the mailbox at an offset of the memory, or `None` if it would exceed the memory.
    pub fn new(memory: &'a HostMemory, at: u64) -> Option<Self> {
        memory.word(at + STACK - 8)?;
        Some(Self { memory, at })
    }

    /// Returns a word by its offset.
    pub fn word(&self, offset: usize) -> &'a AtomicU64 {
        self.memory.word(self.at + offset as u64).expect("`new` has seen its last word")
    }

    /// Returns the number of the vCPU's next step. Loads after this one see at least the effects of
    /// the steps before it.
    pub fn position(&self) -> u64 {
        word!(self, position).load(Ordering::Acquire)
    }

    /// Asks the guest's code to leave, or withdraws that.
    pub fn ask_to_stop(&self, stop: bool) {
        word!(self, stop).store(stop.into(), Ordering::Release);
    }

    /// Returns the times between accesses since the vCPU was made.
    pub fn histogram(&self) -> Histogram {
        Histogram::from_fn(|bucket| {
            self.word(HISTOGRAM as usize + bucket * 8).load(Ordering::Relaxed)
        })
    }
}
