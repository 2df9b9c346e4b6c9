//! What is asked of the hypervisor: words of its command line, which QEMU puts into the device
//! tree.

use crate::layout::{INITRD, LEAST_RAM, MOST_RAM};
use core::fmt;
use core::ops::RangeInclusive;

/// All of it. What follows `--` is the guest's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options<'a> {
    /// vCPUs, each on the CPU of its number; one more CPU is the manager's.
    pub vcpus: u64,
    /// The vCPU that boots the guest.
    pub first: u64,
    /// Bytes of guest memory.
    pub memory: u64,
    /// Bytes of the largest leaf.
    pub largest: u64,
    /// Bits of the guest's addresses; 0 are as many as there are.
    pub bits: u64,
    /// Bytes of its initramfs.
    pub initrd: u64,
    /// What the manager does.
    pub job: Job,
    /// How writes are logged.
    pub logging: Logging,
    /// What becomes of fetches from huge pages.
    pub execute: ExecuteHuge,
    /// What a switch of a vCPU's caches does.
    pub caches: Caches,
    /// When a vCPU's switches of its caches are trapped.
    pub trap: Trap,
    /// What is done wrong on purpose.
    pub fault: Fault,
    /// The guest's time, in seconds; then it is stopped.
    pub seconds: u64,
    /// The guest's command line.
    pub guest: &'a str,
}

/// A choice of an option, by its word.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$each:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name {
            $($(#[$each])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Its word.
            pub const fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }
    };
}

choice! {
    /// What the manager does beside the guest.
    Job {
        /// Nothing: it waits for the guest's end.
        Boot = "boot",
        /// Copies the guest's memory while it runs, and switches it to the copy.
        Migrate = "migrate",
        /// Measures the guest's working set.
        Age = "age",
        /// Moves the guest's leaves one by one while it runs, and gives it another VMID.
        Move = "move",
        /// Takes the guest's memory to a snapshot; it comes back page by page while the guest runs.
        Restore = "restore",
        /// Forks the guest while it writes, and checks the fork.
        Fork = "fork",
        /// Makes pages of the guest's private and shared again while it uses them, as it does too.
        Private = "private",
    }
}

choice! {
    /// How writes are logged.
    Logging {
        /// By write protection.
        Protect = "protect",
        /// By hardware's dirty bits.
        Hardware = "hardware",
    }
}

choice! {
    /// Whether huge pages may be executed.
    ExecuteHuge {
        /// They may.
        Allowed = "allowed",
        /// A fetch splits them.
        Split = "split",
        /// A fetch splits them, and makes one page executable.
        SplitPage = "split-page",
        /// A fetch takes them away.
        Zap = "zap",
    }
}

choice! {
    /// What a switch of a vCPU's caches does.
    Caches {
        /// What the vCPU used without caches is maintained.
        Exact = "exact",
        /// All memory, at every switch.
        Every = "every",
        /// All memory, at the first switch of all.
        First = "first",
        /// All memory, at switches of vCPU 0.
        Vcpu0 = "vcpu0",
    }
}

choice! {
    /// When writes of the registers that switch caches are trapped.
    Trap {
        /// While the policy needs it: a guest that switches off later is not noticed.
        Needed = "needed",
        /// Always.
        Always = "always",
    }
}

choice! {
    /// A deliberate fault: what the machine, or the checks, must notice.
    Fault {
        /// None.
        None = "none",
        /// No invalidation at all.
        NoTlbi = "no-tlbi",
        /// Invalidations reach the manager's own CPU only.
        Local = "local",
        /// The guest's combined entries are left.
        NoStage1 = "no-stage1",
        /// The entries of stage 2 are left.
        NoStage2 = "no-stage2",
        /// The log is cleared, and nothing invalidated.
        KeepDirty = "keep-dirty",
        /// Another guest's entries are invalidated.
        WrongVmid = "wrong-vmid",
        /// Sizes change without a break.
        NoBreak = "no-break",
        /// Nothing waits for an invalidation.
        NoBarrier = "no-barrier",
        /// Caches are not maintained.
        NoMaintenance = "no-maintenance",
    }
}

/// Why a command line is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Refused<'a> {
    /// The word.
    pub word: &'a str,
    /// What it may be.
    pub wanted: &'static str,
}

impl fmt::Display for Refused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the option {:?} is not understood: {}", self.word, self.wanted)
    }
}

/// A number, with k, m or g.
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
    /// What holds where nothing is said.
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

    /// Widths of guest addresses.
    pub const BITS: RangeInclusive<u64> = 39..=52;
    /// The most vCPUs.
    pub const MOST_VCPUS: u64 = 8;
    /// The most seconds: a day.
    pub const MOST_SECONDS: u64 = 24 * 60 * 60;

    /// Reads `text`.
    ///
    /// # Errors
    /// The first word that cannot be, and what it could be.
    pub fn parse(text: &'a str) -> Result<Self, Refused<'a>> {
        let (own, guest) = text.split_once("--").unwrap_or((text, ""));
        let mut options = Self { guest: guest.trim(), ..Self::DEFAULT };
        for word in own.split_whitespace() {
            let refused = |wanted| Refused { word, wanted };
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
            // Both copies of its RAM, and devices, lie below 512 GiB.
            let wide = options.bits == 0 || Self::BITS.contains(&options.bits);
            may_be(wide, "39 to 52 bits, or 0 for all that there are")?;
            may_be(options.seconds <= Self::MOST_SECONDS, "at most a day, 86400")?;
        }
        let word = own.trim();
        if options.first >= options.vcpus {
            return Err(Refused { word, wanted: "`first` is one of the vCPUs, from 0 on" });
        }
        if options.initrd > options.memory - INITRD {
            return Err(Refused {
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
