//! Another process's statistics files, held by descriptors of our own.
//!
//! All of it ends with this process, however that ends: the kernel closes what it had open.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use slat_kvm::Error;
use slat_kvm::stats::{Changes, Reading, Stats};
use std::fs::{File, read_link};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `KCMP_FILE` of kcmp(2): whether two descriptors are one open file.
const KCMP_FILE: i32 = 0;

/// `KVM_GET_STATS_FD`.
const GET_STATS_FD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0xae, 0xce);

/// A process, by a descriptor: its number may become another's, this does not.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    /// This process.
    own: i32,
    fd: OwnedFd,
}

impl Process {
    pub fn open(pid: i32) -> Result<Self, Errno> {
        // A negative number would be a bug to the library.
        let id = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        Ok(Self { pid, own, fd: pidfd_open(id, PidfdFlags::empty())? })
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// The file behind its descriptor, if that is still what it is said to be.
    fn take(&self, fd: RawFd, kind: &str) -> Result<File, Errno> {
        let taken = File::from(pidfd_getfd(&self.fd, fd, PidfdGetfdFlags::empty())?);
        // It may have been closed since it was seen, and its number given to something else.
        let name = read_link(format!("/proc/self/fd/{}", taken.as_raw_fd()));
        let name = name.map_err(|_| Errno::NOENT)?;
        let is = name.to_str().and_then(|name| name.strip_prefix("anon_inode:kvm-"));
        if is.is_some_and(|is| is.starts_with(kind)) { Ok(taken) } else { Err(Errno::BADF) }
    }

    /// Takes a statistics file that the process has open.
    pub fn statistics(&self, fd: RawFd) -> Result<Held, String> {
        let file = self.take(fd, "v").map_err(refusal)?;
        Held::new(Stats::from_file(file).map_err(|error| error.to_string())?, Some(fd))
    }

    /// Asks KVM for the statistics of a VM or vCPU of the process. Up to now, KVM answers the
    /// process alone whose memory the VM has.
    pub fn ask(&self, fd: RawFd) -> Result<Held, String> {
        let file = self.take(fd, "v").map_err(refusal)?;
        // SAFETY:
        // - the descriptor is a VM's or a vCPU's of KVM, by the name that the kernel gives it, and
        //   is open; on another file of KVM's the request is unknown, and refused;
        // - the request takes no argument, and writes no memory of this process;
        // - the answer is looked at.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), GET_STATS_FD as _) };
        if made < 0 {
            return Err(match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::IO) => NOT_ITS_OWN.to_owned(),
                error => format!("KVM_GET_STATS_FD: {}", error.unwrap_or(Errno::IO)),
            });
        }
        // SAFETY: the call succeeded, so its answer is a descriptor that is open, and that the
        // kernel made for this call: nobody else owns it.
        let stats = unsafe { File::from_raw_fd(made) };
        Held::new(Stats::from_file(stats).map_err(|error| error.to_string())?, None)
    }

    /// Whether the process still has the very file open that is held; `None` where the kernel does
    /// not say (it was built without kcmp, or a sandbox forbids it).
    pub fn still_has(&self, held: &Held) -> Option<bool> {
        let theirs = held.theirs?;
        // SAFETY:
        // - kcmp takes five numbers, and neither reads nor writes memory of this process;
        // - a process or descriptor that is not there is an error, which is looked at.
        let answer = unsafe {
            libc::syscall(
                libc::SYS_kcmp,
                self.own,
                self.pid,
                KCMP_FILE,
                held.stats.as_fd().as_raw_fd() as libc::c_ulong,
                theirs as libc::c_ulong,
            )
        };
        match answer {
            0 => Some(true),
            1.. => Some(false),
            _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                // The number is nobody's any more.
                Some(Errno::BADF) => Some(false),
                _ => None,
            },
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const NOT_ITS_OWN: &str = "the VMM holds no statistics descriptor, and KVM makes one for the VMM \
                           alone (EIO)";

/// Why a descriptor could not be taken.
fn refusal(error: Errno) -> String {
    match error {
        Errno::PERM => "no permission to take the VMM's descriptors: run as root, or as its user \
                        where ptrace is allowed"
            .to_owned(),
        Errno::NOSYS => "this kernel has no pidfd_getfd: 5.6 has it".to_owned(),
        error => format!("pidfd_getfd: {error}"),
    }
}

/// A statistics file, with what it said first and last.
#[derive(Debug)]
pub(crate) struct Held {
    stats: Stats,
    theirs: Option<RawFd>,
    first: Reading,
    last: Reading,
}

impl Held {
    fn new(stats: Stats, theirs: Option<RawFd>) -> Result<Self, String> {
        let mut first = Reading::default();
        stats.read(&mut first).map_err(|error| error.to_string())?;
        Ok(Self { last: first.clone(), stats, theirs, first })
    }

    /// Counts from the beginning of the vCPU, and not from when it was taken.
    pub fn since_its_beginning(self) -> Self {
        Self { first: self.stats.zero(), ..self }
    }

    /// Reads all counters.
    pub fn read(&mut self) -> Result<(), Error> {
        self.stats.read(&mut self.last)
    }

    /// The sum of those of these counters that the kernel has, if it has any.
    pub fn sum(&self, counters: &[&str]) -> Option<u64> {
        let values = counters.iter().filter_map(|name| self.stats.value(&self.last, name));
        values.fold(None, |sum, value| Some(sum.unwrap_or(0u64).saturating_add(value)))
    }

    /// What changed since it was taken.
    pub fn changes(&self) -> Changes {
        self.stats.changes(&self.first, &self.last)
    }
}
