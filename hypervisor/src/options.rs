//! Options of the hypervisor: words of its command line, which QEMU puts into the device tree.

use crate::layout::{INITRD, LEAST_RAM, MOST_RAM};
use core::fmt;
use core::ops::RangeInclusive;

/// All options. What follows `--` is the guest's command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options<'a> {
    /// Number of vCPUs, each of which runs on the CPU of its number. One more CPU is the manager's.
    pub vcpus: u64,
    /// The vCPU that boots the guest.
    pub first: u64,
    /// Size of the guest's memory, in bytes.
    pub memory: u64,
    /// Size of the largest leaf, in bytes.
    pub largest: u64,
    /// Width of guest addresses in bits; 0 is the widest that the CPU has.
    pub bits: u64,
    /// Size of the guest's initramfs, in bytes.
    pub initrd: u64,
    /// The manager's job.
    pub job: Job,
    /// How writes are logged.
    pub logging: Logging,
    /// What a fetch from a huge page does.
    pub execute: ExecuteHuge,
    /// What the hypervisor does when a vCPU switches its caches.
    pub caches: Caches,
    /// When switches of a vCPU's caches are trapped.
    pub trap: Trap,
    /// A deliberate fault.
    pub fault: Fault,
    /// Seconds after which the guest is stopped.
    pub seconds: u64,
    /// The guest's command line.
    pub guest: &'a str,
}

/// Defines the choices of an option, each with its word.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$each:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[$each])* $variant,)*
        }

        impl $name {
            /// All choices.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Returns the word of the choice.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }
    };
}

choice! {
    /// What the manager does while the guest runs.
    Job {
        /// It only waits for the guest's end.
        Boot = "boot",
        /// It copies the guest's memory while the guest runs, and switches the guest to the copy.
        Migrate = "migrate",
        /// It measures the guest's working set.
        Age = "age",
        /// It moves the guest's leaves one by one while the guest runs, and gives it another VMID.
        Move = "move",
        /// It moves the guest's memory to a snapshot, from which the memory comes back page by page
        /// while the guest runs.
        Restore = "restore",
        /// It forks the guest while the guest writes, and checks the fork.
        Fork = "fork",
        /// It converts pages of the guest to private and back to shared while the guest uses them.
        /// The guest converts pages as well.
        Private = "private",
    }
}

choice! {
    /// How writes are logged.
    Logging {
        /// By write-protecting leaves.
        Protect = "protect",
        /// By the dirty state that hardware marks.
        Hardware = "hardware",
    }
}

choice! {
    /// Whether huge pages may be executed.
    ExecuteHuge {
        /// Huge pages are executable.
        Allowed = "allowed",
        /// A fetch splits the huge page.
        Split = "split",
        /// A fetch splits the huge page, and makes one page executable.
        SplitPage = "split-page",
        /// A fetch unmaps the huge page.
        Zap = "zap",
    }
}

choice! {
    /// What the hypervisor does when a vCPU switches its caches.
    Caches {
        /// It maintains the pages that the vCPU used while its caches were off.
        Exact = "exact",
        /// It flushes all memory at every switch.
        Every = "every",
        /// It flushes all memory when the first vCPU switches its caches on.
        First = "first",
        /// It flushes all memory at switches of vCPU 0.
        Vcpu0 = "vcpu0",
    }
}

choice! {
    /// When writes of the registers that switch caches are trapped.
    Trap {
        /// While the policy needs it. A guest that switches its caches off later is not noticed.
        Needed = "needed",
        /// Always.
        Always = "always",
    }
}

choice! {
    /// A deliberate fault, which the machine or the checks must detect.
    Fault {
        /// No fault.
        None = "none",
        /// No TLB invalidation is executed.
        NoTlbi = "no-tlbi",
        /// An invalidation reaches only the CPU that executes it.
        Local = "local",
        /// Entries that combine stage 1 and stage 2 are not invalidated.
        NoStage1 = "no-stage1",
        /// Entries of stage 2 are not invalidated.
        NoStage2 = "no-stage2",
        /// The log is cleared without an invalidation.
        KeepDirty = "keep-dirty",
        /// The entries of another VMID are invalidated.
        WrongVmid = "wrong-vmid",
        /// The size of a leaf changes without break-before-make.
        NoBreak = "no-break",
        /// No barrier waits for an invalidation.
        NoBarrier = "no-barrier",
        /// Data caches are not maintained.
        NoMaintenance = "no-maintenance",
    }
}

/// Why a command line is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refusal<'a> {
    /// The word that is refused.
    pub word: &'a str,
    /// What is allowed.
    pub wanted: &'static str,
}

impl fmt::Display for Refusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the option {:?} is not understood: {}", self.word, self.wanted)
    }
}

/// Parses a number, which may end in k, m or g.
fn number(text: &str) -> Option<u64> {
    let shift = match text.bytes().last()? {
        b'k' => 10,
        b'm' => 20,
        b'g' => 30,
        _ => return text.parse().ok(),
    };
    text[..text.len() - 1].parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn chosen<T: Copy>(all: &[T], word: impl Fn(T) -> &'static str, text: &str) -> Option<T> {
    all.iter().copied().find(|&one| word(one) == text)
}

impl<'a> Options<'a> {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        vcpus: 1,
        first: 0,
        memory: 512 << 20,
        largest: 2 << 20,
        bits: 0,
        initrd: 0,
        job: Job::Boot,
        logging: Logging::Protect,
        execute: ExecuteHuge::Allowed,
        caches: Caches::Exact,
        trap: Trap::Needed,
        fault: Fault::None,
        seconds: 60,
        guest: "",
    };

    /// Widths of guest addresses that can be asked for, in bits.
    pub const BITS: RangeInclusive<u64> = 39..=52;
    /// The largest number of vCPUs.
    pub const MOST_VCPUS: u64 = 8;
    /// The longest time of a guest, in seconds: a day.
    pub const MOST_SECONDS: u64 = 24 * 60 * 60;

    /// Parses a command line.
    ///
    /// # Errors
    /// Returns the first word that is wrong, and what is allowed.
    pub fn parse(text: &'a str) -> Result<Self, Refusal<'a>> {
        let (own, guest) = text.split_once("--").unwrap_or((text, ""));
        let mut options = Self { guest: guest.trim(), ..Self::DEFAULT };
        for word in own.split_whitespace() {
            let refused = |wanted| Refusal { word, wanted };
            let (name, value) =
                word.split_once('=').ok_or(refused("it has the form NAME=VALUE"))?;
            let size = || number(value).ok_or(refused("a number, with k, m or g"));
            let one_of = || refused("no such choice");
            match name {
                "vcpus" => options.vcpus = size()?,
                "first" => options.first = size()?,
                "memory" => options.memory = size()?,
                "largest" => options.largest = size()?,
                "bits" => options.bits = size()?,
                "initrd" => options.initrd = size()?,
                "seconds" => options.seconds = size()?,
                "job" => options.job = chosen(Job::ALL, Job::word, value).ok_or_else(one_of)?,
                "logging" => {
                    options.logging =
                        chosen(Logging::ALL, Logging::word, value).ok_or_else(one_of)?;
                }
                "execute" => {
                    options.execute =
                        chosen(ExecuteHuge::ALL, ExecuteHuge::word, value).ok_or_else(one_of)?;
                }
                "caches" => {
                    options.caches = chosen(Caches::ALL, Caches::word, value).ok_or_else(one_of)?;
                }
                "trap" => options.trap = chosen(Trap::ALL, Trap::word, value).ok_or_else(one_of)?,
                "fault" => {
                    options.fault = chosen(Fault::ALL, Fault::word, value).ok_or_else(one_of)?;
                }
                _ => return Err(refused("there is no such option")),
            }
            let may_be = |there: bool, wanted| if there { Ok(()) } else { Err(refused(wanted)) };
            may_be((1..=Self::MOST_VCPUS).contains(&options.vcpus), "1 to 8 vCPUs")?;
            let fits = (LEAST_RAM..=MOST_RAM).contains(&options.memory);
            let fits = fits && options.memory.is_multiple_of(2 << 20);
            may_be(fits, "a multiple of 2m, from 192m to 255g")?;
            // Both copies of the guest's RAM, and all devices, are below 512 GiB, so 39 bits are
            // enough.
            let wide = options.bits == 0 || Self::BITS.contains(&options.bits);
            may_be(wide, "39 to 52 bits, or 0 for all that there are")?;
            may_be(options.seconds <= Self::MOST_SECONDS, "at most a day, 86400")?;
        }
        let word = own.trim();
        if options.first >= options.vcpus {
            return Err(Refusal { word, wanted: "`first` is one of the vCPUs, from 0 on" });
        }
        if options.initrd > options.memory - INITRD {
            return Err(Refusal {
                word,
                wanted: "`initrd` fits into `memory`, behind its first 130m",
            });
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_the_rest_is_the_guests() {
        let text = "vcpus=4 memory=1g job=migrate fault=no-tlbi initrd=77 -- console=ttyAMA0 a=b";
        let options = Options::parse(text).unwrap();
        assert_eq!((options.vcpus, options.memory, options.initrd), (4, 1 << 30, 77));
        assert_eq!((options.job, options.fault), (Job::Migrate, Fault::NoTlbi));
        assert_eq!(options.guest, "console=ttyAMA0 a=b");
        assert_eq!(Options::parse("").unwrap(), Options::DEFAULT);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_word() {
        for (text, word) in [
            ("vcpus=0", "vcpus=0"),
            ("vcpus=9", "vcpus=9"),
            ("bits=38", "bits=38"),
            ("bits=53", "bits=53"),
            ("memory=1m", "memory=1m"),
            ("job=dance", "job=dance"),
            ("fast", "fast"),
            ("color=red", "color=red"),
            ("memory=99999999999999g", "memory=99999999999999g"),
            ("first=1", "first=1"),
            ("memory=256g", "memory=256g"),
            ("seconds=1g", "seconds=1g"),
            ("memory=256m initrd=127m", "memory=256m initrd=127m"),
        ] {
            assert_eq!(Options::parse(text).unwrap_err().word, word);
        }
    }

    #[test]
    fn every_choice_has_a_word_of_its_own() {
        for fault in Fault::ALL {
            assert_eq!(chosen(Fault::ALL, Fault::word, fault.word()), Some(*fault));
        }
    }
}
