//! Errors. Where a remedy is known, the message names it.

use std::io;
use std::path::PathBuf;

/// Why a guest could not be run or measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host has no KVM.
    #[error(
        "/dev/kvm does not exist: KVM is not loaded (modprobe kvm_intel or kvm_amd), or this \
         machine is itself a guest without nested virtualization"
    )]
    NoKvm,
    /// The process may not open the host's KVM.
    #[error(
        "no permission to open /dev/kvm: join the group that owns it (often `kvm`), or run as root"
    )]
    KvmPermission,
    /// The crate has no guest code for this architecture.
    #[error("guests are not supported on {0} yet; supported: x86_64 and aarch64")]
    UnsupportedArch(&'static str),
    /// The kernel's KVM lacks something that was asked for.
    #[error("this host's KVM lacks {capability}, which {needed_for} needs")]
    MissingCapability {
        /// Name of the capability as in the kernel's api.rst.
        capability: &'static str,
        /// The option or operation that needs it.
        needed_for: &'static str,
    },
    /// Calls of the kernel's functions cannot be counted.
    #[error("{0}")]
    NoProbes(String),
    /// A value of the configuration is out of range.
    #[error("{name} {value} {rule}")]
    Invalid {
        /// Name of the value.
        name: &'static str,
        /// The value as it was given.
        value: String,
        /// The rule that the value breaks.
        rule: String,
    },
    /// The guest needs more memory than the machine has available, or its control group leaves.
    #[error(
        "the guest needs {needed} MiB, and {by} {available} MiB: ask for less memory, or free some"
    )]
    NotEnoughMemory {
        /// MiB needed, including the tables and the working memory of KVM and the process.
        needed: u64,
        /// MiB that are available.
        available: u64,
        /// What says so: the machine or a control group.
        by: String,
    },
    /// A file of the host's memory, or of a control group's limit, does not tell how much is left.
    #[error(
        "/{file} does not tell how much memory is left for a guest: let this user read it, or run \
         outside of this control group"
    )]
    MemoryUntold {
        /// The file.
        file: String,
    },
    /// The NUMA nodes to which the guest's memory is bound have too little memory.
    #[error(
        "the guest needs {needed} MiB, and NUMA nodes {nodes} can give {available} MiB: ask for \
         less, or name more nodes"
    )]
    NotEnoughOnNodes {
        /// MiB needed.
        needed: u64,
        /// MiB that the nodes can give.
        available: u64,
        /// The nodes.
        nodes: String,
    },
    /// The pool of huge pages is too small, or there is none of that size.
    #[error(
        "{needed} huge pages of {size} are needed, and {free} are free: {advice}",
        size = size_name(*page_size)
    )]
    NoHugePages {
        /// Bytes of one huge page.
        page_size: u64,
        /// Number of pages needed.
        needed: u64,
        /// Number of pages that are free and not reserved.
        free: u64,
        /// How to make enough pages available.
        advice: Advice,
    },
    /// Transparent huge pages are switched off.
    #[error(
        "transparent huge pages are off: \
         echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )]
    NoTransparentHugePages,
    /// The kernel does not report to user space which pages were used.
    #[error(
        "this host has nothing that tells which pages were used: {}",
        match refused {
            Some(refused) => format!("{refused}; it takes root, and a kernel without lockdown"),
            None => "it needs a kernel with CONFIG_IDLE_PAGE_TRACKING, or with CONFIG_LRU_GEN and \
                     debugfs (mount -t debugfs none /sys/kernel/debug)"
                .to_owned(),
        }
    )]
    NoAccessTracking {
        /// The interface that the kernel has and does not let this process use, and its error.
        refused: Option<String>,
    },
    /// There is too little free swap for the memory beyond a limit.
    #[error(
        "{needed} MiB beyond the limit have to be swapped, and {free} MiB of swap are free: \
         swapon more, or raise --limit"
    )]
    NotEnoughSwap {
        /// MiB that have to be swapped.
        needed: u64,
        /// MiB of swap that are free.
        free: u64,
    },
    /// No group of the kernel's can limit memory for this process.
    #[error("the control group {group} {why}")]
    NoControlGroup {
        /// The group.
        group: String,
        /// What it lacks, and what helps.
        why: String,
    },
    /// The process cannot resolve the faults of a guest's memory.
    #[error(
        "userfaultfd: {why}; it takes root, or `sysctl vm.unprivileged_userfaultfd=1`, and a \
         kernel with CONFIG_USERFAULTFD"
    )]
    NoUserfaultfd {
        /// What the kernel answered.
        why: String,
    },
    /// The kernel has no soft-dirty bits.
    #[error("this kernel has no soft-dirty bits: it needs CONFIG_MEM_SOFT_DIRTY")]
    NoSoftDirty,
    /// The kernel does not merge pages with equal contents.
    #[error("KSM: {why}; it takes root, and a kernel with CONFIG_KSM")]
    NoMerging {
        /// What is missing, or what the kernel answered.
        why: String,
    },
    /// The kernel does not reclaim memory by itself.
    #[error("DAMON_RECLAIM: {why}; it takes root, and a kernel with CONFIG_DAMON_RECLAIM")]
    NoDamon {
        /// What is missing, or what the kernel answered.
        why: String,
    },
    /// A file stays in the page cache.
    #[error(
        "{cached} of the file stay in the page cache, which a file of a tmpfs is part of: name a \
         folder of a disk (--folder)"
    )]
    NoColdCache {
        /// The bytes that stay.
        cached: String,
    },
    /// The kernel refused a call.
    #[error("{call}: {answer}")]
    Os {
        /// The call, by its name in the kernel's documentation.
        call: &'static str,
        /// Its error. It is not the error's source, because a caller that prints the chain of
        /// sources would print it twice.
        answer: io::Error,
    },
    /// The guest left its code with an exit that the code never makes.
    #[error("vCPU {vcpu} stopped with {exit} (registers: {registers})")]
    GuestStopped {
        /// Index of the vCPU.
        vcpu: usize,
        /// KVM's exit reason.
        exit: String,
        /// The vCPU's registers at the exit.
        registers: String,
    },
    /// A vCPU left its work before the work was done, without having been asked to stop.
    #[error("vCPU {vcpu} left {left} of {asked} steps undone after {steps}, unasked")]
    WorkIncomplete {
        /// Index of the vCPU.
        vcpu: usize,
        /// Steps of the work.
        asked: u64,
        /// Steps that the guest reports as done.
        steps: u64,
        /// Steps that the guest reports as left.
        left: u64,
    },
    /// A vCPU read a page that held another page's contents.
    #[error("{pages} times a page held another page's contents when the guest read it")]
    Misread {
        /// Number of such reads.
        pages: u64,
    },
    /// A ring names a page of a slot that is not logged.
    #[error("a dirty ring names page {page} of memslot {slot}, which is not logged")]
    WrongRing {
        /// The memslot's number in KVM.
        slot: u32,
        /// The page, counted from the start of the slot.
        page: u64,
    },
    /// A page was written and is not in the log. A guest that is migrated with this log is corrupt.
    #[error(
        "{missing} written pages are missing from the dirty log of iteration {iteration}, \
         the first at page {first} of the memory"
    )]
    PagesMissing {
        /// Iteration, from 1.
        iteration: u32,
        /// The first missing page, counted from the start of the memory.
        first: u64,
        /// Number of missing pages.
        missing: u64,
    },
    /// A log that must start with all bits set does not.
    #[error(
        "KVM_DIRTY_LOG_INITIALLY_SET is on, yet only {set} of {pages} pages are in the first log"
    )]
    NotInitiallySet {
        /// Bits set.
        set: u64,
        /// Pages of the memory.
        pages: u64,
    },
    /// A page does not hold the value that the guest wrote to it.
    #[error("page {page} of the memory holds {found:#x}, the guest wrote {expected:#x}")]
    WrongStamp {
        /// The page, counted from the start of the memory.
        page: u64,
        /// The value in the host's memory.
        found: u64,
        /// The value that the guest wrote.
        expected: u64,
    },
    /// The migrated memory differs from the guest's.
    #[error("page {page} was migrated as {found:#x}, the guest has {expected:#x}")]
    NotCopied {
        /// The page, counted from the start of the memory.
        page: u64,
        /// The value in the copy.
        found: u64,
        /// The value in the guest.
        expected: u64,
    },
    /// A vCPU's thread panicked, which is a bug in this program.
    #[error("the thread of a vCPU panicked; this is a bug of slat, please report it")]
    ThreadPanicked,
    /// The caller asked the run to stop.
    #[error("stopped on request")]
    Stopped,
}

/// How to get more huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Advice {
    /// Write a number to a file in sysfs.
    Reserve {
        /// The file.
        path: String,
        /// The number of pages that would be enough.
        pages: u64,
    },
    /// The kernel has no pool of that size.
    NoPool {
        /// The directory that would exist.
        path: String,
        /// The sizes of the pages of its pools, in bytes.
        sizes: Vec<u64>,
    },
}

impl std::fmt::Display for Advice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Advice::Reserve { path, pages } => write!(f, "echo {pages} > {path}"),
            Advice::NoPool { path, sizes } => {
                write!(f, "this kernel has no pool of that size ({path} does not exist)")?;
                match sizes.iter().map(|size| size_name(*size)).collect::<Vec<_>>() {
                    none if none.is_empty() => Ok(()),
                    sizes => write!(f, ", but of {}", sizes.join(", ")),
                }
            }
        }
    }
}

impl Error {
    /// Returns the error for a file that does not tell how much memory is left.
    pub(crate) fn untold(file: PathBuf) -> Self {
        Self::MemoryUntold { file: file.display().to_string() }
    }

    /// Wraps the error of a call, for use with `map_err`.
    pub(crate) fn os<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> Error {
        move |answer| Error::Os { call, answer: answer.into() }
    }

    /// Makes an error for a configuration value that breaks `rule`.
    pub(crate) fn invalid(
        name: &'static str,
        value: impl ToString,
        rule: impl Into<String>,
    ) -> Error {
        Error::Invalid { name, value: value.to_string(), rule: rule.into() }
    }

    /// Returns whether a guest ran and its result is wrong, as opposed to an error about the host.
    pub fn is_wrong_result(&self) -> bool {
        matches!(
            self,
            Error::GuestStopped { .. }
                | Error::WorkIncomplete { .. }
                | Error::Misread { .. }
                | Error::WrongRing { .. }
                | Error::PagesMissing { .. }
                | Error::NotInitiallySet { .. }
                | Error::WrongStamp { .. }
                | Error::NotCopied { .. }
                | Error::ThreadPanicked
        )
    }

    /// Returns whether the host lacks something that another host may have.
    pub fn is_missing_feature(&self) -> bool {
        self.is_kvm_unusable()
            || matches!(
                self,
                Error::MissingCapability { .. }
                    | Error::NotEnoughMemory { .. }
                    | Error::MemoryUntold { .. }
                    | Error::NotEnoughOnNodes { .. }
                    | Error::NoHugePages { .. }
                    | Error::NoTransparentHugePages
                    | Error::NoAccessTracking { .. }
                    | Error::NotEnoughSwap { .. }
                    | Error::NoControlGroup { .. }
                    | Error::NoUserfaultfd { .. }
                    | Error::NoColdCache { .. }
                    | Error::NoSoftDirty
                    | Error::NoMerging { .. }
                    | Error::NoDamon { .. }
            )
    }

    /// Returns whether KVM cannot be used on this host at all, as opposed to a single call that
    /// failed.
    pub fn is_kvm_unusable(&self) -> bool {
        matches!(self, Error::NoKvm | Error::KvmPermission | Error::UnsupportedArch(_))
    }
}

/// Formats a size with the largest unit that divides it: `4k`, `2m`, `1g`.
pub(crate) fn size_name(bytes: u64) -> String {
    match bytes {
        b if b >= (1 << 30) && b % (1 << 30) == 0 => format!("{}g", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{}m", b >> 20),
        b => format!("{}k", b >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_huge_pages_names_the_remedy() {
        let error = Error::NoHugePages {
            page_size: 2 << 20,
            needed: 16,
            free: 3,
            advice: Advice::Reserve { path: "/sys/x/nr_hugepages".into(), pages: 29 },
        };
        assert_eq!(
            error.to_string(),
            "16 huge pages of 2m are needed, and 3 are free: echo 29 > /sys/x/nr_hugepages"
        );
    }

    #[test]
    fn the_answer_of_a_call_is_said_once() {
        let error = Error::os("KVM_RUN")(io::Error::from_raw_os_error(14));
        assert!(std::error::Error::source(&error).is_none());
        assert!(error.to_string().starts_with("KVM_RUN: "), "{error}");
    }

    #[test]
    fn a_guests_wrong_result_is_no_missing_feature_of_the_host() {
        let lost = Error::PagesMissing { iteration: 1, first: 0, missing: 1 };
        assert!(lost.is_wrong_result() && !lost.is_kvm_unusable());
        assert!(!Error::NoTransparentHugePages.is_wrong_result());
    }

    #[test]
    fn an_invalid_value_is_named_with_the_rule() {
        let error = Error::invalid("clear chunk", 63, "must be a multiple of 64 pages");
        assert_eq!(error.to_string(), "clear chunk 63 must be a multiple of 64 pages");
    }

    #[test]
    fn sizes_are_named_as_people_do() {
        assert_eq!(size_name(4096), "4k");
        assert_eq!(size_name(2 << 20), "2m");
        assert_eq!(size_name(1 << 30), "1g");
        assert_eq!(size_name(3 << 29), "1536m");
    }
}
