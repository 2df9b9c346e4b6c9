//! What a vCPU's code and the host tell each other, in memory that both see.
//!
//! The host writes what is to be done and the guest's code loads it when it is entered; the guest
//! writes how far it is, and what its own clock showed. A page that is shared costs no exit, so the
//! host can watch and stop vCPUs that go on running.
//!
//! Each word has one writer at a time. The guest stores `position` last, after the access that it
//! counts (x86 keeps stores in order, Arm's store is a release), and the host loads it first: what
//! a position counts has been done.

use crate::memory::HostMemory;
use crate::stall::{BUCKETS, Histogram};

use std::sync::atomic::{AtomicU64, Ordering};

/// The words. The guest's code names them by their offsets.
#[repr(C)]
pub(crate) struct Words {
    /// Steps still to do.
    pub left: u64,
    /// Address of the first page of the vCPU's part.
    pub base: u64,
    /// Pages of it.
    pub pages: u64,
    /// Logarithm of the page size.
    pub shift: u64,
    /// Next page of a sequential order.
    pub index: u64,
    /// State of the random orders.
    pub random: u64,
    /// How much of a hundred a step adds to the accumulator.
    pub share: u64,
    /// A step is a hit when it passes a hundred.
    pub accumulator: u64,
    /// Code that chooses the page.
    pub next: u64,
    /// Code of a hit.
    pub hit: u64,
    /// Code of any other step.
    pub miss: u64,
    /// Pages of the hot set, which begins with the part.
    pub hot_pages: u64,
    /// How many of a hundred steps go there.
    pub hot_share: u64,
    /// Ticks from one step to the next, or 0.
    pub period: u64,
    /// Ticks above which the time between two accesses is a stall.
    pub threshold: u64,
    /// Return instructions, written to each page that is written.
    pub returns: u64,
    /// Other than 0: leave after this step. The host's.
    pub stop: u64,
    /// Steps done since the vCPU was made; the guest's, as are all below.
    pub position: u64,
    /// Stalls, and their ticks.
    pub stalls: u64,
    pub stall_ticks: u64,
    /// The longest since the host set it to 0.
    pub longest: u64,
    /// Ticks that passed unseen while a step was not yet due: who took them, took nothing.
    pub idle_ticks: u64,
    /// Pages that held another page's stamp when they were read.
    pub wrong: u64,
}

/// Bytes from the start of a mailbox to the histogram of times between accesses.
pub(crate) const HISTOGRAM: u64 = 4096;
/// To the end of the guest's stack.
pub(crate) const STACK: u64 = 4 * 4096;
/// From one vCPU's mailbox to the next.
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
    /// The mailbox at an offset of the memory. Nothing if the memory ends before it does.
    pub fn new(memory: &'a HostMemory, at: u64) -> Option<Self> {
        memory.word(at + STACK - 8)?;
        Some(Self { memory, at })
    }

    /// A word, by its offset.
    pub fn word(&self, offset: usize) -> &'a AtomicU64 {
        self.memory.word(self.at + offset as u64).expect("`new` has seen its last word")
    }

    /// Steps done. What is loaded afterwards is at least as new.
    pub fn position(&self) -> u64 {
        word!(self, position).load(Ordering::Acquire)
    }

    /// Asks the guest's code to leave, or takes that back.
    pub fn ask_to_stop(&self, stop: bool) {
        word!(self, stop).store(stop.into(), Ordering::Release);
    }

    /// The times between accesses since the vCPU was made.
    pub fn histogram(&self) -> Histogram {
        Histogram::from_fn(|bucket| {
            self.word(HISTOGRAM as usize + bucket * 8).load(Ordering::Relaxed)
        })
    }
}
