//! Values of options that describe a guest: ways of logging, hot sets, backings, sizes of a clear.

use clap::ValueEnum;
use slat_kvm::Backing;
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use std::fmt;
use std::str::FromStr;

/// Seed of all random orders. It is fixed, so that all runs touch the same pages.
pub const SEED: u64 = 0x51a7;

/// A way of logging under KVM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum KvmWay {
    /// Reading the log protects what was read
    Legacy,
    /// Read, then clear what was read
    Manual,
    /// The same; all pages count as dirty at first, so that enabling protects none
    InitiallySet,
    /// Each vCPU names the pages that it wrote in a ring
    Ring,
}

impl KvmWay {
    /// Returns how many rounds cost nothing: no page is protected before the first clear of a log
    /// that starts full.
    pub fn rounds_for_nothing(self) -> usize {
        usize::from(self == Self::InitiallySet)
    }
}

/// What a vCPU does to pages that it does not write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Others {
    /// They are read, and held against what was written
    Read,
    /// Nothing
    Skip,
}

/// An option that is on or off, or both in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Without it
    Off,
    /// With it
    On,
}

/// Returns the name of a value on the command line, which is also the one in results.
pub fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Returns the ways to measure: all where none was asked for.
pub fn all_or<T: ValueEnum>(asked: &[T]) -> &[T] {
    if asked.is_empty() { T::value_variants() } else { asked }
}

/// A part of the pages that most steps touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotSet {
    /// The part of the pages, in per cent.
    pub pages: u8,
    /// The part of the steps, in per cent.
    pub steps: u8,
}

impl FromStr for HotSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = |text: &str| text.parse().ok().filter(|share| (1..=100).contains(share));
        let both = text.split_once(':').and_then(|(pages, steps)| {
            Some(Self { pages: percent(pages)?, steps: percent(steps)? })
        });
        both.ok_or_else(|| {
            format!("`{text}` is no hot set; 10:90 sends 90 % of the steps to 10 % of the pages")
        })
    }
}

impl fmt::Display for HotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.pages, self.steps)
    }
}

/// What backs the memory of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvmBacking(pub Backing);

impl FromStr for KvmBacking {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let of_pool = |prefix| {
            let Size(size) = text.strip_prefix(prefix)?.parse().ok()?;
            size.is_power_of_two().then_some(size)
        };
        let memfd = of_pool("memfd-hugetlb-").map(Backing::MemfdHugetlb);
        let pool = of_pool("hugetlb-").map(Backing::Hugetlb);
        // Linux's selftests have the long names.
        let named = || {
            Some(match text {
                "4k" | "anonymous" => Backing::Small,
                "2m" | "anonymous_thp" => Backing::Thp,
                "anonymous_hugetlb_2mb" => Backing::Hugetlb(2 << 20),
                "1g" | "anonymous_hugetlb_1gb" => Backing::Hugetlb(1 << 30),
                "shmem" => Backing::Shmem,
                "memfd" => Backing::Memfd,
                "shared_hugetlb" => Backing::MemfdHugetlb(2 << 20),
                // Pages of this host, by their sizes.
                _ => [Backing::Small, Backing::Thp].into_iter().find(|it| it.name() == text)?,
            })
        };
        memfd.or(pool).or_else(named).map(Self).ok_or_else(|| {
            format!(
                "`{text}` is no backing; there are 4k, 2m, hugetlb-SIZE (hugetlb-2m), shmem, memfd \
                 and memfd-hugetlb-SIZE"
            )
        })
    }
}

impl fmt::Display for KvmBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Length of the log that one call clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClearChunk {
    /// A number of pages
    Pages(u64),
    /// A number of bytes
    Bytes(Size),
}

impl ClearChunk {
    /// Returns the chunk in pages of `page_size` bytes.
    ///
    /// # Errors
    /// Returns [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for a chunk that is not
    /// a multiple of 64 pages, which KVM requires.
    pub fn pages(self, page_size: u64) -> anyhow::Result<u64> {
        let (pages, rest) = match self {
            Self::Pages(pages) => (pages, 0),
            Self::Bytes(size) => (size.bytes() / page_size, size.bytes() % page_size),
        };
        if pages == 0 || rest != 0 || !pages.is_multiple_of(64) {
            return Err(bad_input(format!(
                "--clear-chunk {self} is not a multiple of 64 pages; KVM clears 64 pages ({}) at \
                 least",
                Size(64 * page_size)
            )));
        }
        Ok(pages)
    }
}

impl FromStr for ClearChunk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u64>() {
            Ok(0) => Err("clearing no pages a call would never end; 64 is the least".into()),
            Ok(pages) => Ok(Self::Pages(pages)),
            Err(_) => text.parse().map(Self::Bytes),
        }
    }
}

impl fmt::Display for ClearChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(pages) => write!(f, "{pages}"),
            Self::Bytes(size) => write!(f, "{size}"),
        }
    }
}

slat_lab::display_as_written!(KvmWay, Others, Switch);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backing_has_any_kernels_sizes_and_prints_as_it_is_typed() {
        for (text, backing) in [
            ("hugetlb-2m", Backing::Hugetlb(2 << 20)),
            ("hugetlb-512m", Backing::Hugetlb(512 << 20)),
            ("hugetlb-64k", Backing::Hugetlb(64 << 10)),
            ("memfd-hugetlb-32m", Backing::MemfdHugetlb(32 << 20)),
            ("shmem", Backing::Shmem),
        ] {
            assert_eq!(text.parse(), Ok(KvmBacking(backing)));
            assert_eq!(KvmBacking(backing).to_string(), text);
        }
        for backing in [Backing::Small, Backing::Thp] {
            assert_eq!(backing.name().parse(), Ok(KvmBacking(backing)));
        }
        for text in ["3m", "hugetlb-3m", "hugetlb-", "memfd-2m", "hugetlb"] {
            assert!(text.parse::<KvmBacking>().unwrap_err().contains("hugetlb-2m"), "{text}");
        }
    }

    #[test]
    fn a_hot_set_is_two_shares() {
        assert_eq!("10:90".parse(), Ok(HotSet { pages: 10, steps: 90 }));
        for text in ["10", "0:90", "10:101", "a:b", "10:90:1"] {
            assert!(text.parse::<HotSet>().unwrap_err().contains("10:90"), "{text}");
        }
    }
}
