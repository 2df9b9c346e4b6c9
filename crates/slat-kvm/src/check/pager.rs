//! A thread that gives pages back when they are touched, and allows writes to them: userfaultfd.

use super::history::Span;
use crate::Error;
use crate::memory::HostMemory;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Words at the start of a page that are not zero.
const WORDS: usize = 3;

/// The request codes and structures of userfaultfd (include/uapi/linux/userfaultfd.h).
mod uapi {
    const fn request(dir: u64, number: u64, size: usize) -> u64 {
        dir << 30 | (size as u64) << 16 | 0xaa << 8 | number
    }

    #[derive(Debug, Default)]
    #[repr(C)]
    pub struct Api {
        pub api: u64,
        pub features: u64,
        pub ioctls: u64,
    }

    /// A range and two words: `register`, `zeropage`, `writeprotect`, `continue`.
    #[derive(Debug, Default)]
    #[repr(C)]
    pub struct Range {
        pub start: u64,
        pub len: u64,
        pub mode: u64,
        pub answer: u64,
    }

    #[derive(Debug, Default)]
    #[repr(C)]
    pub struct Copy {
        pub dst: u64,
        pub src: u64,
        pub len: u64,
        pub mode: u64,
        pub answer: i64,
    }

    pub const API: u64 = request(3, 0x3f, size_of::<Api>());
    pub const REGISTER: u64 = request(3, 0x00, 32);
    pub const UNREGISTER: u64 = request(2, 0x01, 16);
    pub const WAKE: u64 = request(2, 0x02, 16);
    pub const COPY: u64 = request(3, 0x03, size_of::<Copy>());
    pub const ZEROPAGE: u64 = request(3, 0x04, 32);
    pub const WRITEPROTECT: u64 = request(3, 0x06, 24);
    pub const CONTINUE: u64 = request(3, 0x07, 32);
    pub const MISSING: u64 = 1;
    pub const WP: u64 = 2;
    pub const MINOR: u64 = 4;
    /// Flags of a fault.
    pub const FAULT_WP: u64 = 2;
    pub const FAULT_MINOR: u64 = 4;
    pub const FEATURE_WP: u64 = 1;
    pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
    /// The size of a message, and that of a fault.
    pub const MESSAGE: usize = 32;
    pub const FAULT: u8 = 0x12;
}

/// The contents of the pages that are not there, by address.
type Late = BTreeMap<u64, [u64; WORDS]>;

#[derive(Debug)]
struct Shared {
    file: File,
    late: Mutex<Late>,
    page_size: u64,
    leave: AtomicBool,
}

/// The pager of one memory.
#[derive(Debug)]
pub(super) struct Pager {
    shared: Arc<Shared>,
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

/// Opens a userfaultfd with these features.
fn open(features: u64) -> Result<(File, u64), Error> {
    // SAFETY: the call takes flags and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return Err(Error::os("userfaultfd")(io::Error::last_os_error()));
    }
    // SAFETY: the kernel made the descriptor for this call.
    let file = unsafe { File::from_raw_fd(fd as i32) };
    let mut api = uapi::Api { api: 0xaa, features, ioctls: 0 };
    call(&file, uapi::API, &mut api).map_err(Error::os("UFFDIO_API"))?;
    Ok((file, api.features))
}

/// Makes a call of userfaultfd. `T` is the structure of the request.
fn call<T>(file: &File, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: the requests of this module read and write the structure that they come with, and
    // pages of a memory that this process accesses by atomic operations only.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, std::ptr::from_mut(argument)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns what userfaultfd can do for this process.
///
/// # Errors
/// [`Error::Os`], often for lack of permission.
pub(super) fn features() -> Result<Features, Error> {
    let (_, had) = open(0)?;
    Ok(Features {
        protects: had & uapi::FEATURE_WP != 0,
        minor: had & uapi::FEATURE_MINOR_SHMEM != 0,
    })
}

impl Pager {
    pub fn new(page_size: u64) -> Result<Self, Error> {
        let had = features()?;
        let wanted = |has: bool, feature| if has { feature } else { 0 };
        let features =
            wanted(had.protects, uapi::FEATURE_WP) | wanted(had.minor, uapi::FEATURE_MINOR_SHMEM);
        let (file, _) = open(features)?;
        let (late, leave) = (Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { file, late, page_size, leave });
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
        self.register(start, len, uapi::MISSING)
    }

    /// Write-protects pages; the pager allows each write.
    pub fn guard(&mut self, memory: &HostMemory, host: Span) -> Result<(), Error> {
        let (start, len) = self.range(memory, host);
        self.register(start, len, uapi::MISSING | uapi::WP)?;
        let mut range = uapi::Range { start, len, mode: 1, answer: 0 };
        call(&self.shared.file, uapi::WRITEPROTECT, &mut range)
            .map_err(Error::os("UFFDIO_WRITEPROTECT"))
    }

    /// Unmaps pages of shared memory; the pager maps each again.
    pub fn minor(&mut self, memory: &HostMemory, host: Span) -> Result<(), Error> {
        let (start, len) = self.range(memory, host);
        self.register(start, len, uapi::MINOR)?;
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
        let mut range = uapi::Range { start, len, mode: 0, answer: 0 };
        call(&self.shared.file, uapi::UNREGISTER, &mut range)
            .map_err(Error::os("UFFDIO_UNREGISTER"))?;
        // Writes that waited go on.
        let _ = call(&self.shared.file, uapi::WAKE, &mut range);
        lock(&self.shared.late).clear();
        Ok(())
    }

    fn range(&self, memory: &HostMemory, host: Span) -> (u64, u64) {
        let page = self.shared.page_size;
        (memory.host_address() + host.at * page, host.pages * page)
    }

    fn register(&mut self, start: u64, len: u64, mode: u64) -> Result<(), Error> {
        let mut range = uapi::Range { start, len, mode, answer: 0 };
        self.registered = true;
        call(&self.shared.file, uapi::REGISTER, &mut range).map_err(Error::os("UFFDIO_REGISTER"))
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

impl Shared {
    fn serve(&self) {
        let mut message = [0u8; uapi::MESSAGE];
        while !self.leave.load(Ordering::Relaxed) {
            let mut poll =
                libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one structure, which the kernel writes.
            if unsafe { libc::poll(&mut poll, 1, 20) } <= 0 {
                continue;
            }
            while let Ok(uapi::MESSAGE) = (&self.file).read(&mut message) {
                if message[0] == uapi::FAULT {
                    let word = |at: usize| {
                        u64::from_ne_bytes(std::array::from_fn(|byte| message[at + byte]))
                    };
                    self.fault(word(8), word(16) & !(self.page_size - 1));
                }
            }
        }
    }

    /// Answers a fault.
    fn fault(&self, flags: u64, page: u64) {
        let len = self.page_size;
        let mut range = uapi::Range { start: page, len, mode: 0, answer: 0 };
        // The kernel asks again if memory changes meanwhile.
        let mut again = |request| loop {
            match call(&self.file, request, &mut range) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                // EEXIST: another fault was answered first.
                Err(_) => {
                    range = uapi::Range { start: page, len, mode: 0, answer: 0 };
                    break drop(call(&self.file, uapi::WAKE, &mut range));
                }
                Ok(()) => break,
            }
        };
        if flags & uapi::FAULT_WP != 0 {
            return again(uapi::WRITEPROTECT);
        }
        if flags & uapi::FAULT_MINOR != 0 {
            return again(uapi::CONTINUE);
        }
        // A page that the host gave back after it came is empty.
        let Some(words) = lock(&self.late).remove(&page) else { return again(uapi::ZEROPAGE) };
        let mut content = vec![0u64; len as usize / 8];
        content[..WORDS].copy_from_slice(&words);
        loop {
            let src = content.as_ptr().addr() as u64;
            let mut copy = uapi::Copy { dst: page, src, len, mode: 0, answer: 0 };
            match call(&self.file, uapi::COPY, &mut copy) {
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(_) => return again(uapi::WAKE),
                Ok(()) => return,
            }
        }
    }
}
