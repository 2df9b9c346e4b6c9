//! Threads that resolve the faults of a guest's memory by userfaultfd.
//!
//! A chunk is filled by whoever claims it first, and by nobody else: a second fill would undo what
//! the guest has written since. A fault on a claimed chunk needs no answer, because the kernel
//! wakes all that wait for a page when it is mapped, and looks again before it lets anyone wait.

use super::link::{Wire, exact_sleeps};
use crate::image::Image;
use crate::memory::HostMemory;
use crate::uffd::{self, Uffd, feature};
use crate::work::advance;
use crate::{Backing, Error};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A handler that is slow for some pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slow {
    /// The part of the pages, in per cent.
    pub percent: f64,
    /// How long it waits.
    pub delay: Duration,
}

/// How a chunk of the memory is filled.
enum Source<'a> {
    /// Copied from a mapping of the file into anonymous memory.
    Copy(HostMemory),
    /// It is there, and write-protected.
    Protected,
    /// Read from the file by another mapping of the guest's memory, then mapped.
    Continue { image: &'a Image, alias: &'a HostMemory },
    /// Asked for by a link, which brings it later.
    Remote(&'a Wire),
}

/// A memory that is filled on demand.
pub(super) struct Handler<'a> {
    uffd: Uffd,
    memory: &'a HostMemory,
    source: Source<'a>,
    chunk: u64,
    slow: Option<Slow>,
    /// A bit for each chunk that is filled, or is being filled.
    claimed: Vec<AtomicU64>,
    found: Mutex<ServedFaults>,
    error: Mutex<Option<Error>>,
    over: AtomicBool,
    wake: OwnedFd,
}

/// What the threads did.
#[derive(Debug, Default, Clone)]
pub(super) struct ServedFaults {
    /// The pages whose faults were resolved, in their order.
    pub order: Vec<u64>,
    /// CPU time of the threads.
    pub cpu: Duration,
    /// Number of chunks that were made slow, and how long that took.
    pub slowed: (u64, Duration),
}

impl<'a> Handler<'a> {
    /// Registers the memory, which is not populated yet. With `alias`, it is a shared mapping of
    /// the same file, and `huge` says whether of a hugetlb pool.
    pub fn new(
        image: &'a Image,
        memory: &'a HostMemory,
        alias: Option<&'a HostMemory>,
        huge: bool,
        chunk: u64,
        slow: Option<Slow>,
    ) -> Result<Self, Error> {
        let (features, kinds) = match (&alias, huge) {
            (None, _) => (0, uffd::MISSING),
            (Some(_), false) => {
                (feature::MISSING_SHMEM | feature::MINOR_SHMEM, uffd::MISSING | uffd::MINOR)
            }
            (Some(_), true) => {
                (feature::MISSING_HUGETLBFS | feature::MINOR_HUGETLBFS, uffd::MISSING | uffd::MINOR)
            }
        };
        let uffd = Uffd::open(features)?;
        let source = match alias {
            Some(alias) => Source::Continue { image, alias },
            None => Source::Copy(image.map_private()?),
        };
        uffd.register(memory, kinds)?;
        Self::with(uffd, memory, source, chunk, slow)
    }

    fn with(
        uffd: Uffd,
        memory: &'a HostMemory,
        source: Source<'a>,
        chunk: u64,
        slow: Option<Slow>,
    ) -> Result<Self, Error> {
        let words = memory.len().div_ceil(chunk).div_ceil(64);
        Ok(Self {
            uffd,
            memory,
            source,
            chunk,
            slow,
            claimed: (0..words).map(|_| AtomicU64::new(0)).collect(),
            found: Mutex::default(),
            error: Mutex::default(),
            over: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC).map_err(Error::os("eventfd"))?,
        })
    }

    /// Registers a memory whose writes are to be told, at first of no page.
    pub fn of_writes(memory: &'a HostMemory, shared: bool) -> Result<Self, Error> {
        let uffd = Uffd::open(if shared { feature::WP_SHMEM } else { 0 })?;
        uffd.register(memory, uffd::WP)?;
        Self::with(uffd, memory, Source::Protected, Backing::Small.page_size(), None)
    }

    /// Registers a memory whose pages come by a link: those that are asked for, and all others.
    pub fn of_remote(memory: &'a HostMemory, wire: &'a Wire) -> Result<Self, Error> {
        let uffd = Uffd::open(0)?;
        uffd.register(memory, uffd::MISSING)?;
        Self::with(uffd, memory, Source::Remote(wire), Backing::Small.page_size(), None)
    }

    /// Receives all pages, in a thread of the caller, and returns when the last one has come, or
    /// the link is cut.
    pub fn receive(&self, wire: &Wire) {
        let size = Backing::Small.page_size();
        let received = wire.receive(self.memory.len() / size, |first, contents| {
            let range = first * size..first * size + contents.len() as u64;
            for page in first..range.end / size {
                // From here on, nobody asks for it.
                self.claim(page);
            }
            self.uffd.copy_bytes(contents, self.memory, range)
        });
        self.note(received);
    }

    /// Keeps the first error. A thread that ends early must not leave a vCPU waiting.
    pub fn note(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.uffd.unregister(self.memory);
            lock(&self.error).get_or_insert(error);
        }
    }

    /// Write-protects all pages, and forgets which were written.
    pub fn protect(&self) -> Result<(), Error> {
        lock(&self.found).order.clear();
        self.claimed.iter().for_each(|word| word.store(0, Ordering::Release));
        self.uffd.protect(self.memory, 0..self.memory.len(), true)
    }

    /// Fills chunks ahead of any fault.
    pub fn prefetch(&self, pages: &[Range<u64>]) -> Result<(), Error> {
        for range in pages {
            let (first, end) = (range.start / self.chunk, range.end.div_ceil(self.chunk));
            // Chunks in a row are filled by one call.
            let (mut from, mut at) = (first, first);
            while at < end {
                if self.claim(at) {
                    at += 1;
                    continue;
                }
                self.fill(from..at)?;
                at += 1;
                from = at;
            }
            self.fill(from..end)?;
        }
        Ok(())
    }

    /// Runs `act` while `threads` threads resolve the faults that it causes.
    ///
    /// # Errors
    /// The error of a thread, else that of `act`.
    pub fn serve<T>(
        &self,
        threads: u32,
        act: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let result = std::thread::scope(|scope| {
            let end = End(self);
            for _ in 0..threads {
                std::thread::Builder::new()
                    .name("handler".into())
                    .spawn_scoped(scope, || self.note(self.answer()))
                    .map_err(Error::os::<std::io::Error>("start of a thread"))?;
            }
            let result = act();
            drop(end);
            result
        });
        match lock(&self.error).take() {
            Some(error) => Err(error),
            None => result,
        }
    }

    /// Returns what the threads have done so far.
    pub fn so_far(&self) -> ServedFaults {
        lock(&self.found).clone()
    }

    fn answer(&self) -> Result<(), Error> {
        if self.slow.is_some() {
            exact_sleeps();
        }
        let mut counted = Duration::ZERO;
        while !self.over.load(Ordering::Acquire) {
            let mut ready =
                [PollFd::new(&self.uffd, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(answer) => return Err(Error::os("poll of a userfaultfd")(answer)),
            }
            while let Some(address) = self.uffd.take()? {
                let at = address.wrapping_sub(self.memory.host_address());
                self.resolve(at / Backing::Small.page_size())?;
            }
            let now = clock_gettime(ClockId::ThreadCPUTime);
            let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
            lock(&self.found).cpu += now.saturating_sub(counted);
            counted = now;
        }
        Ok(())
    }

    fn resolve(&self, page: u64) -> Result<(), Error> {
        let chunk = page * Backing::Small.page_size() / self.chunk;
        if !self.claim(chunk) {
            return Ok(());
        }
        lock(&self.found).order.push(page);
        if let Some(slow) = self.slow.filter(|slow| slow.has(chunk)) {
            let begin = Instant::now();
            std::thread::sleep(slow.delay);
            let mut found = lock(&self.found);
            found.slowed.0 += 1;
            found.slowed.1 += begin.elapsed();
        }
        self.fill(chunk..chunk + 1)
    }

    /// Returns whether the caller is the one that fills the chunk.
    fn claim(&self, chunk: u64) -> bool {
        let bit = 1 << (chunk % 64);
        let word = self.claimed.get((chunk / 64) as usize);
        word.is_some_and(|word| word.fetch_or(bit, Ordering::AcqRel) & bit == 0)
    }

    fn fill(&self, chunks: Range<u64>) -> Result<(), Error> {
        if chunks.is_empty() {
            return Ok(());
        }
        let range = chunks.start * self.chunk..(chunks.end * self.chunk).min(self.memory.len());
        match &self.source {
            Source::Protected => self.uffd.protect(self.memory, range, false),
            Source::Remote(wire) => {
                let size = Backing::Small.page_size();
                (range.start / size..range.end / size).try_for_each(|page| wire.ask(page))
            }
            Source::Copy(from) => self.uffd.copy(from, self.memory, range),
            Source::Continue { image, alias } => {
                alias.fill(image.file(), range.clone())?;
                self.uffd.go_on(self.memory, range)
            }
        }
    }
}

/// Locks a mutex even if it is poisoned: no lock is held across a partial update.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the threads when it is dropped, also by an error or a panic, and lets everyone go on that
/// still waits for a page.
struct End<'a>(&'a Handler<'a>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
        self.0.uffd.unregister(self.0.memory);
        // The counter is never read, so that one write wakes all threads. It cannot overflow.
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
    }
}

impl Slow {
    /// Returns whether a chunk is among those that are slow.
    fn has(&self, chunk: u64) -> bool {
        let draw = advance(advance(chunk)) >> 32;
        (draw as f64) < self.percent / 100.0 * f64::from(u32::MAX)
    }
}
