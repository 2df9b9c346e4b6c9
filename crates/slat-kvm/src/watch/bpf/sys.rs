//! bpf(2) and perf_event_open(2): maps, programs and events as descriptors.
//!
//! Nothing is pinned. Each object ends with its descriptor, a program also not before the last
//! event that runs it.

use rustix::io::Errno;
use std::cell::RefCell;
use std::ffi::{CString, c_ulong};
use std::fmt;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const MAP_CREATE: i32 = 0;
const MAP_LOOKUP: i32 = 1;
const MAP_UPDATE: i32 = 2;
const MAP_DELETE: i32 = 3;
const PROG_LOAD: i32 = 5;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const RAW_TRACEPOINT_OPEN: i32 = 17;
const MAP_LOOKUP_BATCH: i32 = 24;

/// What a program of a tracepoint is called with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramInput {
    /// The record that perf makes of the event's fields (`BPF_PROG_TYPE_TRACEPOINT`).
    ByPerf = 5,
    /// The arguments of the event, as words, and no record is made: this takes less of the thread's
    /// time (`BPF_PROG_TYPE_RAW_TRACEPOINT`, Linux 4.17; of modules, 5.0).
    Raw = 17,
}

/// Size of the verifier's log, which is read after a refusal.
const LOG: usize = 1 << 16;

/// Kinds of maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Hash = 1,
    Array = 2,
    /// Maps of the kinds above whose values are maps (Linux 4.12).
    ArrayOfMaps = 12,
    HashOfMaps = 13,
}

impl Kind {
    fn has_words_as_keys(self) -> bool {
        matches!(self, Self::Hash | Self::HashOfMaps)
    }
}

/// `union bpf_attr` of `BPF_MAP_CREATE`, as far as it is used. The kernel takes the rest as 0.
#[repr(C)]
#[derive(Default)]
struct Create {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner: u32,
}

/// `union bpf_attr` of `BPF_MAP_LOOKUP_ELEM`, `BPF_MAP_UPDATE_ELEM` and `BPF_MAP_DELETE_ELEM`.
#[repr(C)]
#[derive(Default)]
struct Element {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` of `BPF_MAP_LOOKUP_BATCH`.
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

/// `union bpf_attr` of `BPF_PROG_LOAD`.
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

/// `union bpf_attr` of `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
#[derive(Default)]
struct Info {
    fd: u32,
    size: u32,
    info: u64,
}

/// `union bpf_attr` of `BPF_RAW_TRACEPOINT_OPEN`.
#[repr(C)]
#[derive(Default)]
struct RawOpen {
    name: u64,
    program: u32,
    pad: u32,
}

/// Words of `struct bpf_prog_info` up to `recursion_misses`, which is the last one used.
const INFO: usize = 27;

/// # Safety
/// `attribute` is one of the structs above, filled as the command asks for it. Each address in it
/// points to memory that is valid for the call and for the sizes in it, and that may be written
/// where the command writes.
unsafe fn bpf<T>(command: i32, attribute: &mut T) -> Result<i32, Errno> {
    // SAFETY: the attribute is valid for the call, and has the size that is passed. The caller
    // guarantees the memory that it points to.
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
/// `fd` is open, and nothing else owns it.
unsafe fn own(fd: i32) -> OwnedFd {
    // SAFETY: the caller guarantees it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn address<T>(of: &[T]) -> u64 {
    of.as_ptr() as u64
}

/// A map. Keys of a hash have 64 bits, those of an array 32; values are words of 64 bits.
#[derive(Debug)]
pub(crate) struct Map {
    fd: OwnedFd,
    kind: Kind,
    words: usize,
    most: usize,
    /// Room for all values, which is kept between readings.
    room: RefCell<Vec<u64>>,
}

impl Map {
    /// Creates a map of at most `most` entries, each of `words` words.
    pub fn new(kind: Kind, words: usize, most: usize) -> Result<Self, Errno> {
        Self::create(kind, words, 8 * words, most, 0)
    }

    /// Creates a map of at most `most` maps that are like `inner`.
    pub fn of_maps(kind: Kind, inner: &Self, most: usize) -> Result<Self, Errno> {
        Self::create(kind, 1, 4, most, inner.fd() as u32)
    }

    fn create(
        kind: Kind,
        words: usize,
        bytes: usize,
        most: usize,
        inner: u32,
    ) -> Result<Self, Errno> {
        let mut create = Create {
            kind: kind as u32,
            key_size: if kind.has_words_as_keys() { 8 } else { 4 },
            value_size: bytes as u32,
            max_entries: most as u32,
            flags: 0,
            inner,
        };
        // SAFETY: the attribute has no address; the kernel returns a new descriptor.
        let fd = unsafe { own(bpf(MAP_CREATE, &mut create)?) };
        Ok(Self { fd, kind, words, most, room: RefCell::default() })
    }

    /// Returns the greatest number of entries.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Returns the bytes of a key, of which an array takes the first four.
    fn key(&self, key: u64) -> [u8; 8] {
        if self.kind.has_words_as_keys() {
            return key.to_ne_bytes();
        }
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&(key as u32).to_ne_bytes());
        bytes
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// A map that cannot be read.
    #[cfg(test)]
    pub fn unreadable(kind: Kind, words: usize) -> Self {
        let fd = std::fs::File::open("/dev/null").unwrap().into();
        Self { fd, kind, words, most: 1, room: RefCell::default() }
    }

    /// Returns the value of a key.
    pub fn value(&self, key: u64) -> Result<Vec<u64>, Errno> {
        let key = self.key(key);
        let mut value = vec![0; self.words];
        let mut element = Element {
            map: self.fd() as u32,
            key: address(&key),
            value: value.as_mut_ptr() as u64,
            ..Element::default()
        };
        // SAFETY: a key has 8 bytes at most, and a value has as many words as the map was made
        // with.
        unsafe { bpf(MAP_LOOKUP, &mut element)? };
        Ok(value)
    }

    /// Sets the value of a key.
    pub fn set(&self, key: u64, value: &[u64]) -> Result<(), Errno> {
        assert_eq!(value.len(), self.words);
        // SAFETY: a value has as many words as the map was made with.
        unsafe { self.update(key, address(value)) }
    }

    /// Sets the map of a key. When this returns, no program uses the former one any more: since
    /// Linux 4.20 the call waits for those that began before it.
    pub fn set_map(&self, key: u64, inner: &Self) -> Result<(), Errno> {
        let value = [inner.fd()];
        // SAFETY: a value of a map of maps is a descriptor.
        unsafe { self.update(key, address(&value)) }
    }

    /// # Safety
    /// `value` is the address of a value of this map, which is valid for the call.
    unsafe fn update(&self, key: u64, value: u64) -> Result<(), Errno> {
        let key = self.key(key);
        let mut element =
            Element { map: self.fd() as u32, key: address(&key), value, ..Element::default() };
        // SAFETY: a key has 8 bytes at most; the caller guarantees the value. The kernel writes
        // nothing.
        unsafe { bpf(MAP_UPDATE, &mut element) }.map(drop)
    }

    /// Deletes a key of a hash.
    pub fn delete(&self, key: u64) -> Result<(), Errno> {
        let key = self.key(key);
        let mut element =
            Element { map: self.fd() as u32, key: address(&key), ..Element::default() };
        // SAFETY: a key has 8 bytes at most; the kernel writes nothing.
        unsafe { bpf(MAP_DELETE, &mut element) }.map(drop)
    }

    /// Returns all entries of a hash, in one call. A value may lie in the middle of its program's
    /// update.
    pub fn entries(&self) -> Result<Vec<(u64, Vec<u64>)>, Errno> {
        assert_eq!(self.kind, Kind::Hash, "keys of an array are 32 bits");
        let mut keys = vec![0u64; self.most];
        let mut values = self.room.borrow_mut();
        if values.is_empty() {
            // The kernel allocates pages of it when they are first written.
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
        // SAFETY: keys have 8 bytes, and values have as many words as the map was made with. There
        // is room for `most` of each, which is the count that is passed. The position at which a
        // hash would continue takes 4 bytes, and there are 16.
        match unsafe { bpf(MAP_LOOKUP_BATCH, &mut batch) } {
            // The kernel reached the end of the map.
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
pub(crate) struct LoadError {
    pub error: Errno,
    /// The last line of the verifier's log, if it has any.
    said: String,
}

impl fmt::Display for LoadError {
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
    pub fn load(called: ProgramInput, instructions: &[u64]) -> Result<Self, LoadError> {
        let mut load = Load {
            kind: called as u32,
            count: instructions.len() as u32,
            instructions: address(instructions),
            license: c"MIT".as_ptr() as u64,
            ..Load::default()
        };
        // SAFETY: the count is that of the instructions, and the license ends with a 0; neither is
        // written.
        let error = match unsafe { bpf(PROG_LOAD, &mut load) } {
            // SAFETY: the descriptor is new.
            Ok(fd) => return Ok(Self(unsafe { own(fd) })),
            Err(error) => error,
        };
        let mut log = vec![0u8; LOG];
        (load.log_level, load.log_size, load.log) = (1, LOG as u32, log.as_mut_ptr() as u64);
        // SAFETY: as before; the log has the size that is passed, and may be written.
        match unsafe { bpf(PROG_LOAD, &mut load) } {
            // SAFETY: the descriptor is new.
            Ok(fd) => Ok(Self(unsafe { own(fd) })),
            Err(_) => {
                let text = String::from_utf8_lossy(&log);
                let mut lines = text.trim_end_matches('\0').lines();
                // The last line counts the verifier's work.
                let said = lines.rfind(|line| !line.starts_with("processed "));
                Err(LoadError { error, said: said.unwrap_or_default().trim().to_owned() })
            }
        }
    }

    /// Returns how often the kernel skipped the program because another one ran on the CPU
    /// (`recursion_misses`). Of programs that perf attached to a tracepoint it counts that from
    /// Linux 6.7 on; before, this is 0 although programs may have been skipped. Of others it skips
    /// one only within itself, from Linux 6.1 on, and counts it.
    pub fn missed(&self) -> Result<u64, Errno> {
        Ok(self.info()?[INFO - 1])
    }

    /// Returns how the program is called.
    #[cfg(test)]
    pub fn called(&self) -> Result<Option<ProgramInput>, Errno> {
        let kind = self.info()?[0] as u32;
        Ok([ProgramInput::ByPerf, ProgramInput::Raw]
            .into_iter()
            .find(|called| *called as u32 == kind))
    }

    /// Returns the program's ID, which the kernel keeps as long as the program exists.
    #[cfg(test)]
    pub fn number(&self) -> Result<u32, Errno> {
        Ok((self.info()?[0] >> 32) as u32)
    }

    /// Returns whether the kernel has a program with this ID.
    #[cfg(test)]
    pub fn is_there(number: u32) -> Result<bool, Errno> {
        const PROG_GET_FD_BY_ID: i32 = 13;
        let mut words = [u64::from(number), 0];
        // SAFETY: the attribute has no address; the kernel returns a new descriptor.
        match unsafe { bpf(PROG_GET_FD_BY_ID, &mut words) } {
            Ok(fd) => {
                // SAFETY: the descriptor is new.
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
        // SAFETY: the size is that of `words`, which may be written. The struct could ask for lists
        // of maps and instructions; its words are 0, so it has no room for them.
        unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut info)? };
        Ok(words)
    }
}

/// Words of `struct perf_event_attr`, version 0.
const ATTRIBUTE: usize = 8;

/// `PERF_TYPE_TRACEPOINT` and the size of the attribute, as one word.
const OF_TRACEPOINT: u64 = (ATTRIBUTE as u64 * 8) << 32 | 2;

const CLOSE_ON_EXEC: c_ulong = 8;

/// `PERF_EVENT_IOC_SET_BPF`.
const SET_BPF: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<u32>(b'$', 8);

/// A tracepoint that this process listens to, until the event is dropped.
#[derive(Debug)]
pub(crate) struct Event(OwnedFd);

impl Event {
    /// Opens an event by its number: of a thread on any CPU, or of a CPU.
    fn open(number: u64, thread: i32, cpu: i32) -> Result<Self, Errno> {
        let mut attribute = [0u64; ATTRIBUTE];
        (attribute[0], attribute[1]) = (OF_TRACEPOINT, number);
        // SAFETY: the attribute has the size that it states; the call reads and writes nothing
        // else.
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

    /// Returns the count.
    pub fn counted(&self) -> Result<u64, Errno> {
        let mut value = [0; 8];
        match rustix::io::read(&self.0, &mut value)? {
            8 => Ok(u64::from_ne_bytes(value)),
            _ => Err(Errno::IO),
        }
    }

    /// Runs a program that is called with the arguments at each hit of a tracepoint, on every CPU.
    pub fn run_raw(name: &str, program: &Program) -> Result<Self, Errno> {
        let name = CString::new(name).map_err(|_| Errno::INVAL)?;
        let mut open = RawOpen {
            name: name.as_ptr() as u64,
            program: program.0.as_raw_fd() as u32,
            ..RawOpen::default()
        };
        // SAFETY: the name ends with a 0, and is not written; the kernel returns a new descriptor,
        // and checks the program's kind.
        Ok(Self(unsafe { own(bpf(RAW_TRACEPOINT_OPEN, &mut open)?) }))
    }

    /// Runs a program that perf calls at each hit of a tracepoint, on every CPU. Programs belong to
    /// the tracepoint, so the CPU that the event is opened for does not matter.
    pub fn run(number: u64, program: &Program) -> Result<Self, Errno> {
        // Any CPU that exists.
        let here = i32::try_from(rustix::thread::sched_getcpu()).unwrap_or_default();
        let this = Self::open(number, -1, here)?;
        // SAFETY:
        // - the request takes a descriptor by value, and neither reads nor writes memory;
        // - both descriptors are open, and the kernel checks their kinds.
        let done = unsafe { libc::ioctl(this.0.as_raw_fd(), SET_BPF as _, program.0.as_raw_fd()) };
        if done < 0 { Err(last_error()) } else { Ok(this) }
    }
}
