//! Values of options that describe a guest: ways of logging, hot sets, backings, sizes of a clear.

use clap::ValueEnum;
use slat_kvm::Backing;
use slat_lab::failure::bad_input;
use slat_lab::size::Size;
use std::fmt;
use std::str::FromStr;

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

/// What a vCPU does to pages that it does not write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Others {
    /// They are read, and held against what was written
    Read,
    /// Nothing
    Skip,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum KvmBacking {
    /// Pages of 4k, huge ones refused
    #[value(name = "4k", alias = "anonymous")]
    Small,
    /// Transparent huge pages of 2m
    #[value(name = "2m", alias = "anonymous_thp")]
    Transparent2m,
    /// Pages of 2m from the host's hugetlb pool
    #[value(name = "hugetlb-2m", alias = "anonymous_hugetlb_2mb")]
    Hugetlb2m,
    /// Pages of 1g from the host's hugetlb pool
    #[value(name = "hugetlb-1g", aliases = ["1g", "anonymous_hugetlb_1gb"])]
    Hugetlb1g,
    /// Shared memory without a name
    #[value(name = "shmem")]
    Shmem,
    /// A memfd, mapped shared, as VMMs do that give the memory to other processes
    #[value(name = "memfd")]
    Memfd,
    /// A memfd of 2m pages from the host's hugetlb pool
    #[value(name = "memfd-hugetlb-2m", alias = "shared_hugetlb")]
    MemfdHugetlb2m,
}

impl KvmBacking {
    /// Returns the backing, as `slat-kvm` names it.
    pub fn in_kvm(self) -> Backing {
        match self {
            Self::Small => Backing::Small,
            Self::Transparent2m => Backing::Thp,
            Self::Hugetlb2m => Backing::Hugetlb2M,
            Self::Hugetlb1g => Backing::Hugetlb1G,
            Self::Shmem => Backing::Shmem,
            Self::Memfd => Backing::Memfd,
            Self::MemfdHugetlb2m => Backing::MemfdHugetlb2M,
        }
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

slat_lab::display_as_written!(KvmWay, Others, KvmBacking);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hot_set_is_two_shares() {
        assert_eq!("10:90".parse(), Ok(HotSet { pages: 10, steps: 90 }));
        for text in ["10", "0:90", "10:101", "a:b", "10:90:1"] {
            assert!(text.parse::<HotSet>().unwrap_err().contains("10:90"), "{text}");
        }
    }
}
