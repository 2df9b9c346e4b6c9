//! A thread that gives pages back when they are touched, and allows writes to them: userfaultfd.

use super::history::Span;
use crate::Error;
use crate::memory::HostMemory;
use crate::uffd::{
    CONTINUE, COPY, FAULT_MINOR, FAULT_WP, MINOR, MISSING, REGISTER, UNREGISTER, Uffd, WAKE, WP,
    WRITE_PROTECT, ZEROPAGE, feature,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Words at the start of a page that are not zero.
const WORDS: usize = 3;

/// The contents of the pages that are not there, by address.
type Late = BTreeMap<u64, [u64; WORDS]>;

#[derive(Debug)]
struct PagerState {
    uffd: Uffd,
    late: Mutex<Late>,
    page_size: u64,
    leave: AtomicBool,
}

/// The pager of one memory.
#[derive(Debug)]
pub(super) struct Pager {
    shared: Arc<PagerState>,
    thread: Option<JoinHandle<()>>,
    registered: bool,
}

/// What userfaultfd can do here.
#[derive(Debug, Clone, Copy)]
pub(super) struct Features {
    pub protects: bool,
    pub minor: bool,
}

fn lock(late: &Mutex<Late>) -> MutexGuard<'_, Late> {
    late.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns what userfaultfd can do for this process.
///
/// # Errors
/// [`Error::NoUserfaultfd`], often for lack of permission.
pub(super) fn features() -> Result<Features, Error> {
    let had = Uffd::features()?;
    Ok(Features { protects: had & feature::WP != 0, minor: had & feature::MINOR_SHMEM != 0 })
}

impl Pager {
    pub fn new(page_size: u64) -> Result<Self, Error> {
        let uffd = Uffd::open(Uffd::features()? & (feature::WP | feature::MINOR_SHMEM))?;
        let (late, leave) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(PagerState { uffd, late, page_size, leave });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("pager".into()).spawn(move || theirs.serve());
        let thread = thread.map_err(Error::os("start of the pager's thread"))?;
        Ok(Self { shared, thread: Some(thread), registered: false })
    }

    /// Takes pages away, and gives each back when it is touched.
    pub fn late(&mut self, memory: &HostMemory, host: Span) -> Result<(), Error> {
        let (start, len) = self.range(memory, host);
        let at = host.at * self.shared.page_size;
        let words = |page: u64| {
            std::array::from_fn(|word| memory.read(page + word as u64 * 8).unwrap_or(0))
        };
        let contents: Late = (at..at + len)
            .step_by(self.shared.page_size as usize)
            .map(|page| (memory.host_address() + page, words(page)))
            .collect();
        lock(&self.shared.late).extend(contents);
        // SAFETY: as in `host.rs`. The pager has the contents of the pages.
        if unsafe { libc::madvise(start as *mut _, len as usize, libc::MADV_DONTNEED) } < 0 {
            return Err(Error::os("MADV_DONTNEED")(io::Error::last_os_error()));
        }
        self.register(start, len, MISSING)
    }

    /// Write-protects pages; the pager allows each write.
    pub fn guard(&mut self, memory: &HostMemory, host: Span) -> Result<(), Error> {
        let (start, len) = self.range(memory, host);
        self.register(start, len, MISSING | WP)?;
        let protect = &mut [start, len, 1, 0, 0];
        self.shared.uffd.call(WRITE_PROTECT, protect).map_err(Error::os("UFFDIO_WRITEPROTECT"))
    }

    /// Unmaps pages of shared memory; the pager maps each again.
    pub fn minor(&mut self, memory: &HostMemory, host: Span) -> Result<(), Error> {
        let (start, len) = self.range(memory, host);
        self.register(start, len, MINOR)?;
        // SAFETY: as in `host.rs`. The file keeps the contents.
        if unsafe { libc::madvise(start as *mut _, len as usize, libc::MADV_DONTNEED) } < 0 {
            return Err(Error::os("MADV_DONTNEED")(io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Gives all pages back, before something else is done to the memory.
    pub fn settle(&mut self, memory: &HostMemory) -> Result<(), Error> {
        if !std::mem::take(&mut self.registered) {
            return Ok(());
        }
        let late: Vec<u64> = lock(&self.shared.late).keys().copied().collect();
        for address in late {
            let _ = memory.read(address - memory.host_address());
        }
        let (start, len) = (memory.host_address(), memory.len());
        let range = &mut [start, len, 0, 0, 0];
        let uffd = &self.shared.uffd;
        uffd.call(UNREGISTER, range).map_err(Error::os("UFFDIO_UNREGISTER"))?;
        // Writes that waited go on.
        let _ = uffd.call(WAKE, range);
        lock(&self.shared.late).clear();
        Ok(())
    }

    fn range(&self, memory: &HostMemory, host: Span) -> (u64, u64) {
        let page = self.shared.page_size;
        (memory.host_address() + host.at * page, host.pages * page)
    }

    fn register(&mut self, start: u64, len: u64, mode: u64) -> Result<(), Error> {
        self.registered = true;
        let range = &mut [start, len, mode, 0, 0];
        self.shared.uffd.call(REGISTER, range).map_err(Error::os("UFFDIO_REGISTER"))
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.shared.leave.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl PagerState {
    fn serve(&self) {
        let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        while !self.leave.load(Ordering::Relaxed) {
            let ready = poll(&mut [PollFd::new(&self.uffd, PollFlags::IN)], Some(&wait));
            if ready.is_ok_and(|ready| ready > 0) {
                while let Ok(Some((flags, page))) = self.uffd.fault() {
                    self.fault(flags, page);
                }
            }
        }
    }

    /// Answers a fault.
    fn fault(&self, flags: u64, page: u64) {
        let len = self.page_size;
        let again = |request| loop {
            match self.uffd.call(request, &mut [page, len, 0, 0, 0]) {
                // The kernel asks again if memory changes meanwhile.
                Err(Errno::AGAIN) => {}
                // EEXIST: another fault was answered first.
                Err(_) => {
                    let _ = self.uffd.call(WAKE, &mut [page, len, 0, 0, 0]);
                    break;
                }
                Ok(()) => break,
            }
        };
        if flags & FAULT_WP != 0 {
            return again(WRITE_PROTECT);
        }
        if flags & FAULT_MINOR != 0 {
            return again(CONTINUE);
        }
        // A page that the host gave back after it came is empty.
        let Some(words) = lock(&self.late).remove(&page) else { return again(ZEROPAGE) };
        let mut content = vec![0u64; len as usize / 8];
        content[..WORDS].copy_from_slice(&words);
        loop {
            let src = content.as_ptr().expose_provenance() as u64;
            match self.uffd.call(COPY, &mut [page, src, len, 0, 0]) {
                Err(Errno::AGAIN) => {}
                Err(_) => return again(WAKE),
                Ok(()) => return,
            }
        }
    }
}
