//! bpf(2) and perf_event_open(2): maps, programs and events as descriptors.
//!
//! Nothing is pinned: each goes with its descriptor, a program once no event runs it.

use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::c_ulong;
use std::fmt;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const MAP_CREATE: i32 = 0;
const MAP_LOOKUP: i32 = 1;
#[cfg(test)]
const MAP_UPDATE: i32 = 2;
const PROG_LOAD: i32 = 5;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const MAP_LOOKUP_BATCH: i32 = 24;

/// `BPF_PROG_TYPE_TRACEPOINT`.
const TRACEPOINT: u32 = 5;

/// The whole text of the verifier is asked for after a refusal.
const LOG: usize = 1 << 16;

/// Kinds of maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Hash = 1,
    Array = 2,
}

/// `union bpf_attr` of `BPF_MAP_CREATE`, up to what is used; the kernel takes the rest as 0.
#[repr(C)]
#[derive(Default)]
struct Create {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

/// Of `BPF_MAP_LOOKUP_ELEM` and `BPF_MAP_UPDATE_ELEM`.
#[repr(C)]
#[derive(Default)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// Of `BPF_MAP_LOOKUP_BATCH`.
#[repr(C)]
#[derive(Default)]
struct Batch {
    from: u64,
    next: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// Of `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel: u32,
    flags: u32,
}

/// Of `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
#[derive(Default)]
struct Info {
    fd: u32,
    size: u32,
    info: u64,
}

/// `struct bpf_prog_info` in words, up to `recursion_misses`, which is the last.
const INFO: usize = 27;

/// # Safety
/// `attribute` is one of the structs above, filled as the command asks for it: each address in it
/// is that of memory that is there for the call, as long as the sizes in it say, and that may be
/// written where the command writes.
unsafe fn bpf<T>(command: i32, attribute: &mut T) -> Result<i32, Errno> {
    // SAFETY: the attribute is there and as long as is said; what it leads to, the caller answers
    // for.
    let answer = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attribute), size_of::<T>())
    };
    match answer {
        0.. => Ok(answer as i32),
        _ => Err(last_error()),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Takes a descriptor that a call has just made.
///
/// # Safety
/// `fd` is open, and nobody else's.
unsafe fn own(fd: i32) -> OwnedFd {
    // SAFETY: as above.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr() as u64
}

/// A map of keys of 64 bits (of an array: 32) and values of words.
#[derive(Debug)]
pub(crate) struct Map {
    fd: OwnedFd,
    kind: Kind,
    words: usize,
    most: usize,
    /// Room for all values, which is kept from one reading to the next.
    room: RefCell<Vec<u64>>,
}

impl Map {
    /// A map of at most so many entries, each of so many words.
    pub fn new(kind: Kind, words: usize, most: usize) -> Result<Self, Errno> {
        let mut create = Create {
            kind: kind as u32,
            key_size: if kind == Kind::Hash { 8 } else { 4 },
            value_size: (words * 8) as u32,
            max_entries: most as u32,
            flags: 0,
        };
        // SAFETY: it leads nowhere; what the kernel answers is a new descriptor.
        let fd = unsafe { own(bpf(MAP_CREATE, &mut create)?) };
        Ok(Self { fd, kind, words, most, room: RefCell::default() })
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// The value of a key.
    pub fn value(&self, key: u64) -> Result<Vec<u64>, Errno> {
        let key = [key];
        let mut value = vec![0; self.words];
        let mut element = Element {
            map: self.fd() as u32,
            key: address(&key),
            value: value.as_mut_ptr() as u64,
            ..Element::default()
        };
        // SAFETY: a key has 8 bytes at most, and a value as many words as the map was made with.
        unsafe { bpf(MAP_LOOKUP, &mut element)? };
        Ok(value)
    }

    /// Sets the value of a key.
    #[cfg(test)]
    pub fn set(&self, key: u64, value: &[u64]) -> Result<(), Errno> {
        assert_eq!(value.len(), self.words);
        let key = [key];
        let mut element = Element {
            map: self.fd() as u32,
            key: address(&key),
            value: address(value),
            ..Element::default()
        };
        // SAFETY: as above; nothing is written.
        unsafe { bpf(MAP_UPDATE, &mut element) }.map(drop)
    }

    /// All entries of a hash, in one call; each is whole, or as its program is about to leave it.
    pub fn entries(&self) -> Result<Vec<(u64, Vec<u64>)>, Errno> {
        assert_eq!(self.kind, Kind::Hash, "keys of an array are 32 bits");
        let mut keys = vec![0u64; self.most];
        let mut values = self.room.borrow_mut();
        if values.is_empty() {
            // The kernel gives pages of it once they are written.
            *values = vec![0; self.most * self.words];
        }
        let mut next = [0u64; 2];
        let mut batch = Batch {
            next: next.as_mut_ptr() as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: self.most as u32,
            map: self.fd() as u32,
            ..Batch::default()
        };
        // SAFETY: keys have 8 bytes and values as many words as the map was made with; there is
        // room for as many as the map takes, which is what it is asked for. Where it would go on,
        // a hash says in 4 bytes, for which there are 16.
        match unsafe { bpf(MAP_LOOKUP_BATCH, &mut batch) } {
            // The end was reached.
            Ok(_) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        let count = (batch.count as usize).min(self.most);
        let values = values.chunks_exact(self.words).map(<[u64]>::to_vec);
        Ok(keys.into_iter().zip(values).take(count).collect())
    }
}

/// A program that the kernel has verified.
#[derive(Debug)]
pub(crate) struct Program(OwnedFd);

/// Why a program was not loaded.
#[derive(Debug)]
pub(crate) struct Refused {
    pub error: Errno,
    /// The last line of what the verifier said, if it did.
    said: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)?;
        if !self.said.is_empty() {
            write!(f, " ({})", self.said)?;
        }
        Ok(())
    }
}

impl Program {
    /// Loads a program for tracepoints.
    pub fn load(instructions: &[u64]) -> Result<Self, Refused> {
        let mut load = Load {
            kind: TRACEPOINT,
            count: instructions.len() as u32,
            instructions: address(instructions),
            license: c"MIT".as_ptr() as u64,
            ..Load::default()
        };
        // SAFETY: as many instructions as are said, and a text that ends by 0; neither is written.
        let error = match unsafe { bpf(PROG_LOAD, &mut load) } {
            // SAFETY: the descriptor is new.
            Ok(fd) => return Ok(Self(unsafe { own(fd) })),
            Err(error) => error,
        };
        let mut log = vec![0u8; LOG];
        (load.log_level, load.log_size, load.log) = (1, LOG as u32, log.as_mut_ptr() as u64);
        // SAFETY: as before, and a text of the size said, which may be written.
        match unsafe { bpf(PROG_LOAD, &mut load) } {
            // SAFETY: the descriptor is new.
            Ok(fd) => Ok(Self(unsafe { own(fd) })),
            Err(_) => {
                let text = String::from_utf8_lossy(&log);
                let mut lines = text.trim_end_matches('\0').lines();
                // The last line is an account of the work.
                let said = lines.rfind(|line| !line.starts_with("processed "));
                Err(Refused { error, said: said.unwrap_or_default().trim().to_owned() })
            }
        }
    }

    /// How often the kernel did not run it because another program ran on that CPU (5.12 counts).
    pub fn missed(&self) -> Result<u64, Errno> {
        Ok(self.info()?[INFO - 1])
    }

    /// Its number, by which the kernel knows it as long as it is there.
    #[cfg(test)]
    pub fn number(&self) -> Result<u32, Errno> {
        Ok((self.info()?[0] >> 32) as u32)
    }

    /// Whether the kernel has a program of this number.
    #[cfg(test)]
    pub fn is_there(number: u32) -> Result<bool, Errno> {
        const PROG_GET_FD_BY_ID: i32 = 13;
        let mut words = [u64::from(number), 0];
        // SAFETY: the attribute leads nowhere; what the kernel answers is a new descriptor.
        match unsafe { bpf(PROG_GET_FD_BY_ID, &mut words) } {
            Ok(fd) => {
                // SAFETY: as said.
                drop(unsafe { own(fd) });
                Ok(true)
            }
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn info(&self) -> Result<[u64; INFO], Errno> {
        let mut words = [0u64; INFO];
        let mut info = Info {
            fd: self.0.as_raw_fd() as u32,
            size: size_of_val(&words) as u32,
            info: words.as_mut_ptr() as u64,
        };
        // SAFETY: as many bytes as are said, which may be written. What the struct asks for in
        // turn, lists of maps and instructions, is asked for with 0 of room.
        unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut info)? };
        Ok(words)
    }
}

/// `struct perf_event_attr`, in words, of version 0.
const ATTRIBUTE: usize = 8;

/// `PERF_TYPE_TRACEPOINT` and the size, as one word.
const OF_TRACEPOINT: u64 = (ATTRIBUTE as u64 * 8) << 32 | 2;

const CLOSE_ON_EXEC: c_ulong = 8;

/// `PERF_EVENT_IOC_SET_BPF`.
const SET_BPF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<u32>(b'$', 8);

/// A tracepoint that somebody listens to, until it is dropped.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    /// Opens an event by its number: of a thread wherever it runs, or of a CPU.
    fn open(number: u64, thread: i32, cpu: i32) -> Result<Self, Errno> {
        let mut attribute = [0u64; ATTRIBUTE];
        (attribute[0], attribute[1]) = (OF_TRACEPOINT, number);
        // SAFETY: the attribute is as long as it says; nothing else is read or written.
        let fd = unsafe {
            let attribute = attribute.as_ptr();
            libc::syscall(libc::SYS_perf_event_open, attribute, thread, cpu, -1, CLOSE_ON_EXEC)
        };
        match fd {
            // SAFETY: the descriptor is new.
            0.. => Ok(Self(unsafe { own(fd as i32) })),
            _ => Err(last_error()),
        }
    }

    /// Counts a tracepoint in a thread.
    pub fn count(number: u64, thread: i32) -> Result<Self, Errno> {
        Self::open(number, thread, -1)
    }

    /// What was counted.
    pub fn counted(&self) -> Result<u64, Errno> {
        let mut value = [0; 8];
        match rustix::io::read(&self.0, &mut value)? {
            8 => Ok(u64::from_ne_bytes(value)),
            _ => Err(Errno::IO),
        }
    }

    /// Runs a program at each hit of a tracepoint, on every CPU: programs hang on the tracepoint,
    /// whatever the event is opened for.
    pub fn run(number: u64, program: &Program) -> Result<Self, Errno> {
        // Any CPU that is there.
        let here = i32::try_from(rustix::thread::sched_getcpu()).unwrap_or_default();
        let this = Self::open(number, -1, here)?;
        // SAFETY:
        // - the request takes a descriptor by its value, and neither reads nor writes memory;
        // - both descriptors are open, and what they are is checked by the kernel.
        let done = unsafe { libc::ioctl(this.0.as_raw_fd(), SET_BPF as _, program.0.as_raw_fd()) };
        if done < 0 { Err(last_error()) } else { Ok(this) }
    }
}
