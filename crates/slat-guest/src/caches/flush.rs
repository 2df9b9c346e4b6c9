//! Maintenance of memory: all of it, by any number of threads, or memory that the host wrote or is
//! about to read.

use crate::backing::Backing;
use crate::caches::Flush;
use crate::guest::Guest;
use crate::host::Host;
use crate::stats::Counters;
use crate::sync::{AtomicU64, Ordering, agreed};
use crate::worker::{Inside, Worker};
use alloc::sync::Arc;
use alloc::vec::Vec;
use slat::{
    Contention, Execute, Format, Gpa, GpaRange, Hpa, Maintenance, Memory, Tables, WrongTables,
};

impl Flush {
    /// The size of chunks in bytes: some milliseconds of work.
    pub const CHUNK: u64 = 16 << 20;

    /// Makes a flush of all memory that the guest has now. It waits until the faults under way have
    /// returned: the pages that they are about to map were maintained too early.
    ///
    /// The flush is empty if the guest cannot bypass the caches.
    pub fn new<F: Format, H: Host, B: Backing>(worker: &mut Worker<'_, F, H, B>) -> Self {
        let mut parts = Vec::new();
        let mut total = 0;
        if worker.guest.caches.matters() {
            worker.guest.wait_for_faults();
            let ranges = worker
                .look(|view| view.iter().map(|memslot| memslot.spec.range()).collect::<Vec<_>>());
            for range in ranges {
                parts.push((total, range));
                total += range.size();
            }
        }
        let (guest, zero) = (worker.guest.identity.clone(), || AtomicU64::new(0));
        Self { guest, parts, total, next: zero(), done: zero(), bytes: zero() }
    }

    /// Returns whether all of it is maintained.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire) >= self.total
    }

    /// Returns the bytes maintained so far, by all threads.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Takes chunks until none is left; returns the bytes that were mapped there. Other threads may
    /// still work on their chunks: [`Flush::finish`] waits for them.
    ///
    /// # Errors
    /// [`WrongTables`]: the flush is of another guest than the worker's; nothing was done.
    pub fn run<F: Format, H: Host, B: Backing>(
        &self,
        worker: &mut Worker<'_, F, H, B>,
    ) -> Result<u64, WrongTables> {
        if self.guest == worker.guest.identity { Ok(self.share(worker)) } else { Err(WrongTables) }
    }

    /// [`Flush::run`] by a worker of the same guest.
    fn share<F: Format, H: Host, B: Backing>(&self, worker: &mut Worker<'_, F, H, B>) -> u64 {
        let mut bytes = 0;
        while self.next.load(Ordering::Acquire) < self.total {
            let start = self.next.fetch_add(Self::CHUNK, Ordering::AcqRel);
            let end = (start + Self::CHUNK).min(self.total);
            let first = self.parts.partition_point(|&(at, range)| at + range.size() <= start);
            for &(at, range) in self.parts[first..].iter().take_while(|&&(at, _)| at < end) {
                let from = range.start().0 + start.saturating_sub(at);
                let to = range.start().0 + (end - at).min(range.size());
                let piece = GpaRange::new(Gpa(from), to - from).expect("a part is not empty");
                let tables = &worker.guest.tables;
                bytes += worker.maintain(tables, piece, Maintenance::Data);
            }
            self.done.fetch_add(end.saturating_sub(start), Ordering::AcqRel);
        }
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        bytes
    }

    /// Takes chunks until none is left, and waits until other threads have finished theirs.
    ///
    /// # Errors
    /// [`WrongTables`]: the flush is of another guest than the worker's; nothing was done.
    pub fn finish<F: Format, H: Host, B: Backing>(
        &self,
        worker: &mut Worker<'_, F, H, B>,
    ) -> Result<(), WrongTables> {
        self.run(worker)?;
        self.wait(worker);
        Ok(())
    }

    fn wait<F: Format, H: Host, B: Backing>(&self, worker: &Worker<'_, F, H, B>) {
        while !self.is_done() {
            worker.guest.tables.platform().wait();
        }
    }
}

impl<'w, F: Format, H: Host, B: Backing> Worker<'w, F, H, B> {
    /// Helps vCPUs that are flushing; returns the bytes maintained, 0 if no vCPU flushes. A VMM
    /// calls it on idle cores while a vCPU switches its caches.
    pub fn help_flush(&mut self) -> u64 {
        let running = self.guest.caches.running.lock().clone();
        running.iter().map(|flush| flush.share(self)).sum()
    }

    /// Flushes all memory; returns the bytes.
    pub(super) fn flush_all(&mut self) -> u64 {
        let caches = &self.guest.caches;
        let flush = Arc::new(Flush::new(self));
        caches.running.lock().push(flush.clone());
        flush.share(self);
        flush.wait(self);
        caches.running.lock().retain(|other| !Arc::ptr_eq(other, &flush));
        self.guest.counters.flushes.add(1);
        flush.bytes()
    }

    /// Records that the host wrote `range` of the guest's memory: marks it in the log, and
    /// maintains the part of it that a vCPU might not see; returns the bytes maintained. The host
    /// passes [`Maintenance::Instructions`] if it wrote code, for example an image, or pages of a
    /// migration; this is needed even if the guest cannot bypass its caches.
    ///
    /// Until this returns, the write may be missing in the log, and a vCPU whose caches are off may
    /// not see it. If there is such a vCPU this waits for faults under way; so the caller holds no
    /// lock that [`Backing::page`] takes. If the host and such a vCPU write to different parts of
    /// one cache line at the same time, one of the two writes is lost, as on a machine without a
    /// hypervisor.
    pub fn host_wrote(&mut self, range: GpaRange, what: Maintenance) -> u64 {
        self.mark_written(range);
        // Orders the write before the search for live views. A vCPU maps the first page in its view
        // after the view is live.
        agreed();
        self.maintain_for_host(range, what, true)
    }

    /// Prepares for the host to read `range` of the guest's memory: maintains what vCPUs may have
    /// written there past the caches; returns the bytes maintained. A migration calls it between
    /// [`Worker::clear_log`](Worker::clear_log) and the copy.
    pub fn host_reads(&mut self, range: GpaRange) -> u64 {
        agreed();
        self.maintain_for_host(range, Maintenance::Data, false)
    }

    fn maintain_for_host(&mut self, range: GpaRange, what: Maintenance, wait: bool) -> u64 {
        let guest = self.guest;
        let all = what == Maintenance::Instructions;
        let exact = guest.caches.is_exact();
        let live = !exact || guest.spaces().nth(1).is_some();
        if !(all || guest.caches.any_uncached() && live) {
            return 0;
        }
        if wait {
            // A fault that maintained a page before the host wrote it may not have mapped it yet.
            guest.wait_for_faults();
        }
        let mut bytes = 0;
        for tables in guest.spaces() {
            let shared = core::ptr::eq(tables, &*guest.tables);
            if all || !(exact && shared) {
                bytes += self.maintain(tables, range, what);
            }
        }
        bytes
    }

    /// Maintains all cacheable leaves in `range`; for `Maintenance::Instructions`, instructions as
    /// well where leaves are executable. Returns the bytes. Waits for threads that hold an entry.
    pub(crate) fn maintain(
        &mut self,
        tables: &'w Tables<'w, F, H>,
        range: GpaRange,
        what: Maintenance,
    ) -> u64 {
        let host = tables.platform();
        let data = self.guest.caches.matters();
        let (mut start, end, mut bytes) = (range.start().0, range.end().0, 0);
        while start < end {
            let rest = GpaRange::new(Gpa(start), end - start).expect("not empty");
            start = self.inside(tables, |Inside { guard, .. }| {
                for leaf in guard.leaves(rest).into_iter().flatten() {
                    let leaf = match leaf {
                        Ok(leaf) => leaf,
                        Err(Contention { at }) => return at.0,
                    };
                    let code = leaf.attributes.execute != Execute::None;
                    let what = match what {
                        Maintenance::Instructions if code => what,
                        _ if data => Maintenance::Data,
                        _ => continue,
                    };
                    if leaf.attributes.memory != Memory::Normal {
                        continue;
                    }
                    let from = leaf.gpa.0.max(rest.start().0);
                    let to = (leaf.gpa.0 + leaf.size.bytes()).min(end);
                    host.maintain(Hpa(leaf.hpa.0 + (from - leaf.gpa.0)), to - from, what);
                    bytes += to - from;
                }
                end
            });
            if start < end {
                host.wait();
            }
        }
        self.guest.counters.flushed_bytes.add(bytes);
        bytes
    }
}

impl<F: Format, H: Host, B: Backing> Guest<'_, F, H, B> {
    /// Counts the bytes that the engine maintained when a fault mapped them.
    #[inline]
    pub(crate) fn count_maintained(
        &self,
        counters: &Counters,
        bytes: u64,
        uncached: bool,
        memory: Memory,
    ) {
        if !self.caches.matters() || memory != Memory::Normal {
            return;
        }
        match uncached {
            true => counters.touched_bytes.add(bytes),
            false => counters.mapped_bytes.add(bytes),
        }
    }
}
