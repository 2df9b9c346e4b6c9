//! Another process's statistics files, held by descriptors of this process.
//!
//! The kernel closes the descriptors when this process ends, however it ends.

use crate::Error;
use crate::stats::{Changes, Reading, Stats};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{File, read_link};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `KCMP_FILE` of kcmp(2): compares the open files of two descriptors.
const KCMP_FILE: i32 = 0;

/// `KVM_GET_STATS_FD`.
const GET_STATS_FD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0xae, 0xce);

/// A process, held by a pidfd. A PID may be reused for another process, a pidfd never is.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    /// The PID of this process.
    own: i32,
    fd: OwnedFd,
}

impl Process {
    pub fn open(pid: i32) -> Result<Self, Errno> {
        // rustix panics on a negative number in debug builds.
        let id = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
        let own = rustix::process::getpid().as_raw_nonzero().get();
        Ok(Self { pid, own, fd: pidfd_open(id, PidfdFlags::empty())? })
    }

    /// Returns whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Returns the file of the process's descriptor `fd`, if its name still says that it is of this
    /// kind.
    fn take(&self, fd: RawFd, kind: &str) -> Result<File, Errno> {
        let taken = File::from(pidfd_getfd(&self.fd, fd, PidfdGetfdFlags::empty())?);
        // The process may have closed it since it was seen, and reused its number for another file.
        let name = read_link(format!("/proc/self/fd/{}", taken.as_raw_fd()));
        let name = name.map_err(|_| Errno::NOENT)?;
        let is = name.to_str().and_then(|name| name.strip_prefix("anon_inode:kvm-"));
        if is.is_some_and(|is| is.starts_with(kind)) { Ok(taken) } else { Err(Errno::BADF) }
    }

    /// Takes a statistics file that the process has open.
    pub fn statistics(&self, fd: RawFd) -> Result<StatsReadings, String> {
        let file = self.take(fd, "v").map_err(refusal)?;
        StatsReadings::new(Stats::from_file(file).map_err(|error| error.to_string())?, Some(fd))
    }

    /// Asks KVM for the statistics of a VM or vCPU of the process. KVM so far grants this only to
    /// the process whose memory the VM has.
    pub fn ask(&self, fd: RawFd) -> Result<StatsReadings, String> {
        let file = self.take(fd, "v").map_err(refusal)?;
        // SAFETY:
        // - the descriptor is open, and is a VM's or a vCPU's of KVM by the name that the kernel
        //   gives it; another file of KVM refuses the request as unknown;
        // - the request takes no argument, and writes no memory of this process;
        // - the code below checks the result.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), GET_STATS_FD as _) };
        if made < 0 {
            return Err(match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::IO) => NOT_ITS_OWN.to_owned(),
                error => format!("KVM_GET_STATS_FD: {}", error.unwrap_or(Errno::IO)),
            });
        }
        // SAFETY: the call succeeded, so its result is an open descriptor. The kernel made it for
        // this call, so nothing else owns it.
        let stats = unsafe { File::from_raw_fd(made) };
        StatsReadings::new(Stats::from_file(stats).map_err(|error| error.to_string())?, None)
    }

    /// Returns whether the process still has the same file open that `held` holds; `None` if the
    /// kernel does not answer (it was built without kcmp, or a sandbox forbids the call).
    pub fn still_has(&self, held: &StatsReadings) -> Option<bool> {
        let theirs = held.theirs?;
        is_same_file((self.own, held.stats.as_fd().as_raw_fd()), (self.pid, theirs))
    }
}

/// Returns whether two descriptors, each of a process, are of one open file; `None` if the kernel
/// does not answer.
pub(crate) fn is_same_file(one: (i32, RawFd), other: (i32, RawFd)) -> Option<bool> {
    // SAFETY:
    // - kcmp takes five numbers, and neither reads nor writes memory of this process;
    // - for a process or descriptor that does not exist it returns an error, which the code below
    //   checks.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            one.0,
            other.0,
            KCMP_FILE,
            one.1 as libc::c_ulong,
            other.1 as libc::c_ulong,
        )
    };
    match answer {
        0 => Some(true),
        1.. => Some(false),
        _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
            // The process has closed the descriptor.
            Some(Errno::BADF) => Some(false),
            _ => None,
        },
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const NOT_ITS_OWN: &str = "the VMM holds no statistics descriptor, and KVM makes one for the VMM \
                           alone (EIO)";

/// Returns why a descriptor could not be taken.
fn refusal(error: Errno) -> String {
    match error {
        Errno::PERM => "no permission to take the VMM's descriptors: run as root, or as its user \
                        where ptrace is allowed"
            .to_owned(),
        Errno::NOSYS => "this kernel has no pidfd_getfd: 5.6 has it".to_owned(),
        error => format!("pidfd_getfd: {error}"),
    }
}

/// A statistics file, with its first and its last reading.
#[derive(Debug)]
pub(crate) struct StatsReadings {
    stats: Stats,
    theirs: Option<RawFd>,
    first: Reading,
    last: Reading,
}

impl StatsReadings {
    fn new(stats: Stats, theirs: Option<RawFd>) -> Result<Self, String> {
        let mut first = Reading::default();
        stats.read(&mut first).map_err(|error| error.to_string())?;
        Ok(Self { last: first.clone(), stats, theirs, first })
    }

    /// Counts from the creation of the vCPU, and not from the attach.
    pub fn since_its_beginning(self) -> Self {
        Self { first: self.stats.zero(), ..self }
    }

    /// Reads all counters.
    pub fn read(&mut self) -> Result<(), Error> {
        self.stats.read(&mut self.last)
    }

    /// Returns the sum of the counters that the kernel has; `None` if it has none of them.
    pub fn sum(&self, counters: &[&str]) -> Option<u64> {
        let values = counters.iter().filter_map(|name| self.stats.value(&self.last, name));
        values.fold(None, |sum, value| Some(sum.unwrap_or(0u64).saturating_add(value)))
    }

    /// Returns the changes between the first and the last reading.
    pub fn changes(&self) -> Changes {
        self.stats.changes(&self.first, &self.last)
    }
}
