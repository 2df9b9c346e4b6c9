//! What the host does to the pages of a guest's memory, by system calls.

use super::history::{Act, Span};
use crate::Error;
use crate::idle::{AccessTracking, Marker};
use crate::memory::HostMemory;
use rustix::io::Errno;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

/// `MADV_COLLAPSE`, which the libc crate lacks for some targets.
const COLLAPSE: i32 = 25;

/// Longest time to wait for KSM.
const MERGE: Duration = Duration::from_millis(400);

/// The hands of the host on a guest's memory.
#[derive(Debug)]
pub(super) struct Hands {
    /// A second mapping of the same size, to which pages are moved and back.
    spare: HostMemory,
    page_size: u64,
    /// Whether the memory is a file, so that other mappings may have it as well.
    shared: bool,
    child: Option<Child>,
    tracking: Option<AccessTracking>,
    nodes: Vec<u32>,
    moved: usize,
}

impl Hands {
    pub fn new(bytes: u64, page_size: u64, shared: bool) -> Result<Self, Error> {
        let spare = HostMemory::new(bytes, crate::Backing::Small)?;
        let tracking = AccessTracking::of_host().ok();
        let nodes = crate::numa::nodes();
        Ok(Self { spare, page_size, shared, child: None, tracking, nodes, moved: 0 })
    }

    /// Does something to host pages, but for what a [`Pager`](super::pager::Pager) does.
    pub fn act(&mut self, memory: &HostMemory, act: Act, host: Span) -> Result<(), Error> {
        let range = self.range(memory, host);
        match act {
            Act::Discard => advise(range, libc::MADV_DONTNEED, "MADV_DONTNEED"),
            Act::Remove => advise(range, libc::MADV_REMOVE, "MADV_REMOVE"),
            Act::Balloon => (host.at..host.end()).step_by(2).try_for_each(|page| {
                let page = self.range(memory, Span::new(page, 1));
                match self.shared {
                    true => advise(page, libc::MADV_REMOVE, "MADV_REMOVE"),
                    false => advise(page, libc::MADV_DONTNEED, "MADV_DONTNEED"),
                }
            }),
            // The kernel may refuse to collapse or to page out, and nothing has changed then.
            Act::Collapse => {
                let _ = advise(range, COLLAPSE, "MADV_COLLAPSE");
                Ok(())
            }
            Act::PageOut => {
                let _ = advise(range, libc::MADV_PAGEOUT, "MADV_PAGEOUT");
                Ok(())
            }
            Act::Move => {
                let away = self.range(&self.spare, host);
                remap(range, away.0)?;
                remap(away, range.0)
            }
            Act::Protect => {
                protect(range, libc::PROT_READ)?;
                protect(range, libc::PROT_READ | libc::PROT_WRITE)
            }
            Act::Fork => {
                self.child = None;
                self.child = Some(Child::new()?);
                Ok(())
            }
            Act::SoftDirty => fs::write("/proc/self/clear_refs", "4")
                .map_err(Error::os("write of /proc/self/clear_refs")),
            Act::Age => match self.tracking {
                Some(tracking) => Marker::new(tracking, memory)?.mark(),
                None => Ok(()),
            },
            Act::Merge => {
                let _ = advise(range, libc::MADV_MERGEABLE, "MADV_MERGEABLE");
                Ok(())
            }
            Act::Migrate => self.migrate(range),
            Act::Store | Act::Late | Act::Guard | Act::Minor | Act::Recover | Act::Punch => Ok(()),
        }
    }

    pub fn exchange(
        &mut self,
        memory: &HostMemory,
        first: Span,
        second: Span,
    ) -> Result<(), Error> {
        let away = self.range(&self.spare, first);
        let (first, second) = (self.range(memory, first), self.range(memory, second));
        remap(first, away.0)?;
        remap(second, first.0)?;
        remap(away, second.0)
    }

    /// Waits until KSM has seen all pages twice, which it does before it merges them, for a moment
    /// at most.
    pub fn wait_for_merge(&self) {
        let scans = || crate::procfs::Files::here().number("sys/kernel/mm/ksm/full_scans");
        let (before, begin) = (scans(), Instant::now());
        while before.is_some_and(|before| scans().is_some_and(|now| now < before + 3))
            && begin.elapsed() < MERGE
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the address and the length of host pages, which the caller has checked.
    fn range(&self, memory: &HostMemory, host: Span) -> (u64, usize) {
        let from = memory.host_address() + host.at * self.page_size;
        debug_assert!(host.end() * self.page_size <= memory.len());
        (from, (host.pages * self.page_size) as usize)
    }

    fn migrate(&mut self, (from, len): (u64, usize)) -> Result<(), Error> {
        self.moved += 1;
        let Some(&node) = self.nodes.get(self.moved % self.nodes.len().max(1)) else {
            return Ok(());
        };
        let count = len / self.page_size as usize;
        let pages: Vec<u64> = (0..count as u64).map(|page| from + page * self.page_size).collect();
        let nodes = vec![node as i32; count];
        let mut status = vec![0i32; count];
        // MPOL_MF_MOVE
        let flags = 1 << 1;
        // SAFETY: the three arrays have `count` elements each; the kernel reads the first two and
        // writes the third. Contents of pages that move stay.
        let moved = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                count,
                pages.as_ptr(),
                nodes.as_ptr(),
                status.as_mut_ptr(),
                flags,
            )
        };
        if moved < 0 { Err(Error::os("move_pages")(io::Error::last_os_error())) } else { Ok(()) }
    }
}

/// Returns what this host can do, and for the rest why it cannot.
pub(super) fn able(bytes: u64) -> Vec<(Act, Result<(), String>)> {
    let files = crate::procfs::Files::here();
    let page = rustix::param::page_size() as u64;
    let swap = match files.swap() {
        Some(free) if free >= bytes => Ok(()),
        _ => Err("no swap".to_owned()),
    };
    let merges = match files.number("sys/kernel/mm/ksm/run") {
        Some(1) => Ok(()),
        _ => Err("KSM does not run (/sys/kernel/mm/ksm/run)".to_owned()),
    };
    let nodes = match crate::numa::nodes().len() {
        0 | 1 => Err("one NUMA node".to_owned()),
        _ => Ok(()),
    };
    let moves = || -> Result<(), Error> {
        let memory = HostMemory::new(page, crate::Backing::Small)?;
        Hands::new(page, page, false)?.act(&memory, Act::Move, Span::new(0, 1))
    };
    let told = |error: Error| error.to_string();
    vec![
        (Act::Store, Ok(())),
        (Act::Discard, Ok(())),
        (Act::Remove, Ok(())),
        (Act::Balloon, Ok(())),
        (Act::Collapse, Ok(())),
        (Act::Protect, Ok(())),
        (Act::Fork, Ok(())),
        (Act::SoftDirty, Ok(())),
        (Act::PageOut, swap),
        (Act::Move, moves().map_err(told)),
        (Act::Merge, merges),
        (Act::Migrate, nodes),
        (Act::Age, ages(page).map_err(told)),
    ]
}

fn ages(page: u64) -> Result<(), Error> {
    let memory = HostMemory::new(page, crate::Backing::Small)?;
    memory.write(0, 1);
    Marker::new(AccessTracking::of_host()?, &memory)?.mark()
}

/// A mapping's pages may be given back, moved and protected while a guest has them: all access of
/// this process is by atomic loads and stores, and the thread that calls these functions makes all
/// of them.
fn advise((from, len): (u64, usize), advice: i32, call: &'static str) -> Result<(), Error> {
    // SAFETY: the range lies in a mapping of `HostMemory`, which Rust code does not borrow but for
    // the time of one access.
    match unsafe { libc::madvise(from as *mut _, len, advice) } {
        0 => Ok(()),
        _ => Err(Error::os(call)(io::Error::last_os_error())),
    }
}

fn protect((from, len): (u64, usize), access: i32) -> Result<(), Error> {
    // SAFETY: as in `advise`; the caller makes the range writable again before it is accessed.
    match unsafe { libc::mprotect(from as *mut _, len, access) } {
        0 => Ok(()),
        _ => Err(Error::os("mprotect of guest memory")(io::Error::last_os_error())),
    }
}

/// Moves pages to another place. The place that they leave stays mapped and empty, so that no other
/// mapping can take it meanwhile.
fn remap((from, len): (u64, usize), to: u64) -> Result<(), Error> {
    const DONTUNMAP: i32 = 4;
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | DONTUNMAP;
    // SAFETY: both ranges lie in mappings of `HostMemory` that belong to this system; what `to` had
    // is replaced, and is empty or has been moved elsewhere.
    let moved = unsafe { libc::mremap(from as *mut _, len, len, flags, to as *mut libc::c_void) };
    if moved != libc::MAP_FAILED {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // Before Linux 6.17, a call moves pages of one mapping only, and earlier moves have divided it.
    let page = rustix::param::page_size();
    if error.raw_os_error() == Some(libc::EFAULT) && len > page {
        return (0..len)
            .step_by(page)
            .try_for_each(|at| remap((from + at as u64, page), to + at as u64));
    }
    Err(Error::os("mremap of guest memory")(error))
}

/// A copy of this process that does nothing. While it lives, a write to a page copies it.
#[derive(Debug)]
struct Child(i32);

impl Child {
    fn new() -> Result<Self, Error> {
        // SAFETY: the child calls functions only that are safe after a fork of a process with
        // threads (signal-safety(7)), and never returns.
        match unsafe { libc::fork() } {
            -1 => Err(Error::os("fork")(io::Error::last_os_error())),
            0 => {
                // SAFETY: as above. It ends with its parent's thread, or by SIGKILL; a signal of
                // the terminal is the parent's matter.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::signal(libc::SIGINT, libc::SIG_IGN);
                    libc::signal(libc::SIGTERM, libc::SIG_IGN);
                    loop {
                        libc::pause();
                    }
                }
            }
            child => Ok(Self(child)),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: it is this process's child, which nobody else waits for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            while libc::waitpid(self.0, std::ptr::null_mut(), 0) < 0
                && Errno::from_io_error(&io::Error::last_os_error()) == Some(Errno::INTR)
            {
            }
        }
    }
}
