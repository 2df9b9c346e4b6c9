//! Maintenance of memory when vCPUs switch their caches on or off.
//!
//! A vCPU whose caches are off reads and writes memory at the point of coherency, past the caches.
//! The host, and vCPUs whose caches are on, use the same memory through the caches. Then one side
//! may miss the other's writes: a dirty line hides them, or is written back over them later; a
//! clean line that was fetched too early hides them. With FEAT_S2FWB, and on other architectures, a
//! guest cannot bypass the caches, and none of this happens.
//!
//! Two rules hold under every policy. The engine maintains memory before it is mapped
//! ([`Platform::maintain`]). This crate maintains it after it is unmapped, once the guest cannot
//! access it, because the host may be about to read it. A page that is mapped nowhere needs no
//! maintenance.
//!
//! [`Platform::maintain`]: slat::Platform::maintain

pub(crate) mod flush;
pub(crate) mod switch;

use crate::config::{CachePolicy, Config};
use crate::identity::Identity;
use crate::sync::{AtomicU64, Lock, Ordering};
use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::GpaRange;

/// A change of a vCPU's caches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    On,
    Off,
    SetWay,
    Reset,
}

/// The work that a change needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    Nothing,
    /// All memory has to be maintained, as of this epoch.
    All {
        epoch: u64,
    },
    /// The memory in vCPUs' own views has to be maintained.
    Views,
    /// The memory in this vCPU's view has to be maintained, and the view emptied.
    Leave,
}

/// A bit of a vCPU's state: its caches are on.
const ON: u64 = 1 << 0;
/// The VMM traps the vCPU's writes to the registers that switch caches.
const TRAPS: u64 = 1 << 1;
/// The vCPU has run.
const RAN: u64 = 1 << 2;

#[derive(Debug)]
pub(crate) struct CacheState {
    /// `None` if a guest cannot bypass the caches.
    policy: Option<CachePolicy>,
    /// The state of each vCPU, which only the vCPU's own thread writes.
    vcpus: Box<[AtomicU64]>,
    /// The number of vCPUs that may be bypassing the caches. A vCPU is counted from before it can
    /// bypass them until its writes have been maintained.
    uncached: AtomicU64,
    /// The number of changes that re-arm the policy `First`, and the last epoch that a flush has
    /// covered.
    epoch: AtomicU64,
    flushed: AtomicU64,
    /// Flushes under way, which other threads can help.
    pub running: Lock<Vec<Arc<Flush>>>,
}

impl CacheState {
    /// `forced`: the format always makes the guest use its caches.
    pub fn new(config: &Config, forced: bool) -> Self {
        let policy = (!forced).then_some(config.caches);
        let (state, uncached) = match (config.caches_on, policy) {
            (true, _) => (ON, 0),
            (false, Some(_)) => (TRAPS, config.vcpus),
            (false, None) => (0, config.vcpus),
        };
        Self {
            policy,
            vcpus: (0..config.vcpus).map(|_| AtomicU64::new(state)).collect(),
            uncached: AtomicU64::new(uncached.into()),
            epoch: AtomicU64::new(1),
            flushed: AtomicU64::new(0),
            running: Lock::new(Vec::new()),
        }
    }

    /// Returns whether a guest can bypass the caches.
    pub const fn matters(&self) -> bool {
        self.policy.is_some()
    }

    pub fn is_exact(&self) -> bool {
        self.policy == Some(CachePolicy::Exact)
    }

    /// Returns the view that a vCPU runs on; `None` if it runs on the shared tables.
    pub fn view(&self, id: u16) -> Option<u16> {
        (self.is_exact() && !self.is_on(id)).then_some(id)
    }

    fn is(&self, id: u16, bit: u64) -> bool {
        self.vcpus[id as usize].load(Ordering::Relaxed) & bit != 0
    }

    fn set(&self, id: u16, bit: u64, to: bool) {
        let state = &self.vcpus[id as usize];
        let now = state.load(Ordering::Relaxed);
        state.store(if to { now | bit } else { now & !bit }, Ordering::Relaxed);
    }

    pub fn is_on(&self, id: u16) -> bool {
        self.is(id, ON)
    }

    pub fn traps(&self, id: u16) -> bool {
        self.is(id, TRAPS)
    }

    pub fn set_traps(&self, id: u16, traps: bool) {
        self.set(id, TRAPS, traps && self.matters());
    }

    pub fn has_run(&self, id: u16) -> bool {
        self.is(id, RAN)
    }

    pub fn runs(&self, id: u16) {
        self.set(id, RAN, true);
    }

    /// Returns whether a vCPU may be bypassing the caches.
    pub fn any_uncached(&self) -> bool {
        self.matters() && self.uncached.load(Ordering::Acquire) != 0
    }

    /// Does the part of a change before the work: from now on the vCPU may bypass the caches.
    pub fn begin(&self, id: u16, event: Event) {
        match event {
            Event::Off | Event::Reset if self.is_on(id) => {
                self.uncached.fetch_add(1, Ordering::AcqRel);
                self.set(id, ON, false);
            }
            _ => {}
        }
        if event != Event::On {
            self.epoch.fetch_add(1, Ordering::AcqRel);
        }
    }

    #[cfg_attr(not(feature = "baselines"), expect(unused_variables, reason = "`Vcpu0` asks"))]
    pub fn work(&self, id: u16, event: Event) -> Work {
        use CachePolicy::{Every, Exact};
        let epoch = self.epoch.load(Ordering::Acquire);
        match (self.policy, event) {
            (None, _) => Work::Nothing,
            #[cfg(feature = "baselines")]
            (Some(CachePolicy::Vcpu0), Event::On | Event::Off) if id != 0 => Work::Nothing,
            #[cfg(feature = "baselines")]
            (Some(CachePolicy::First), Event::On)
                if self.flushed.load(Ordering::Acquire) >= epoch =>
            {
                Work::Nothing
            }
            #[cfg(feature = "baselines")]
            (Some(CachePolicy::Vcpu0 | CachePolicy::First), _) => Work::All { epoch },
            (Some(Every), _) => Work::All { epoch },
            (Some(Exact), Event::On | Event::Reset) => Work::Leave,
            // The view is empty, and the engine maintains memory as it is mapped there.
            (Some(Exact), Event::Off) => Work::Nothing,
            (Some(Exact), Event::SetWay) => Work::Views,
        }
    }

    /// Does the part of a change after the work.
    pub fn end(&self, id: u16, event: Event, work: Work) {
        // A flush when a vCPU switches off comes before the vCPU's writes past the caches, so it
        // does not cover them.
        if let (Event::On, Work::All { epoch }) = (event, work) {
            self.flushed.fetch_max(epoch, Ordering::AcqRel);
        }
        if event == Event::On && !self.is_on(id) {
            self.set(id, ON, true);
            self.uncached.fetch_sub(1, Ordering::AcqRel);
        }
        self.set_traps(id, event != Event::On);
    }
}

/// A flush of all memory that the guest has mapped, in chunks that any number of threads take.
///
/// The platform maintains each chunk: [`Platform::maintain`](slat::Platform::maintain) is called
/// with leaves, cut at chunks, and takes the size of a cache line into account.
#[derive(Debug)]
pub struct Flush {
    guest: Identity,
    /// The ranges, each with its offset in their concatenation.
    parts: Vec<(u64, GpaRange)>,
    total: u64,
    next: AtomicU64,
    done: AtomicU64,
    bytes: AtomicU64,
}

#[cfg(test)]
mod tests;
