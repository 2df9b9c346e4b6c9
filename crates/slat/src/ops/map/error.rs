//! The errors of a map.

use crate::addr::{Hpa, LeafSizeError, PageSize, RangeError};
use crate::format::AttributeError;
use crate::ops::{ChangeError, Owner};
use core::fmt;

/// Reason why a range was not mapped, or not all of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MapError {
    /// The range of guest addresses is not one that these tables can have.
    Range(RangeError),
    /// The host address is not a multiple of the page size, or reaches beyond what a descriptor
    /// can hold.
    HostAddress {
        /// The address.
        hpa: Hpa,
        /// The page size.
        page: PageSize,
        /// Bits of a host address.
        bits: u32,
    },
    /// The format has no leaf of that size.
    LeafSize(LeafSizeError),
    /// The format, as configured, cannot express the attributes.
    Attributes(AttributeError),
    /// The cache was filled from another platform.
    ForeignCache,
    /// Something else is mapped there.
    Occupied {
        /// The size of the leaf found.
        size: PageSize,
        /// The host address that the leaf maps to.
        hpa: Hpa,
    },
    /// The address has an owner ([`Guard::set_owner`](crate::Guard::set_owner)).
    Owned {
        /// The owner.
        owner: Owner,
    },
    /// The cache ran out of table pages.
    CacheEmpty,
    /// Another thread held an entry for too long.
    Contended,
}

impl fmt::Display for MapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(error) => error.fmt(f),
            Self::HostAddress { hpa, page, bits } => write!(
                f,
                "the host address {hpa} is not a multiple of {page}, or the range from there \
                 exceeds {bits} bits"
            ),
            Self::LeafSize(error) => error.fmt(f),
            Self::Attributes(error) => error.fmt(f),
            Self::ForeignCache => f.write_str("the cache's table pages are another platform's"),
            Self::Occupied { size, hpa } => {
                write!(
                    f,
                    "a {size} leaf that points elsewhere or has other attributes ({hpa}) is mapped \
                     there; unmap it first"
                )
            }
            Self::Owned { owner } => write!(
                f,
                "the address has an owner ({:#x}), who has to give it up first",
                owner.word()
            ),
            Self::CacheEmpty => {
                f.write_str("the table cache is empty; refill it and continue from this address")
            }
            Self::Contended => ChangeError::Contended.fmt(f),
        }
    }
}

impl core::error::Error for MapError {}
