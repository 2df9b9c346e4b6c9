//! The architecture-dependent parts: the guest's code, its registers, and the bits of its own
//! tables.
//!
//! Each architecture's module has the same items, so that the rest of the crate does not depend on
//! the architecture.

/// Assembles the guest's code. It defines names for the offsets of the mailbox's words and for
/// constants, and takes further names that an architecture needs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))]
macro_rules! guest_asm {
    ($($line:literal),*; $($name:ident = $value:expr,)*) => {
        std::arch::global_asm!(
            $($line,)*
            left = const std::mem::offset_of!($crate::mailbox::Words, left),
            base = const std::mem::offset_of!($crate::mailbox::Words, base),
            pages = const std::mem::offset_of!($crate::mailbox::Words, pages),
            shift = const std::mem::offset_of!($crate::mailbox::Words, shift),
            index = const std::mem::offset_of!($crate::mailbox::Words, index),
            random = const std::mem::offset_of!($crate::mailbox::Words, random),
            share = const std::mem::offset_of!($crate::mailbox::Words, share),
            accumulator = const std::mem::offset_of!($crate::mailbox::Words, accumulator),
            next = const std::mem::offset_of!($crate::mailbox::Words, next),
            hit = const std::mem::offset_of!($crate::mailbox::Words, hit),
            miss = const std::mem::offset_of!($crate::mailbox::Words, miss),
            hot_pages = const std::mem::offset_of!($crate::mailbox::Words, hot_pages),
            hot_share = const std::mem::offset_of!($crate::mailbox::Words, hot_share),
            list = const std::mem::offset_of!($crate::mailbox::Words, list),
            listed = const std::mem::offset_of!($crate::mailbox::Words, listed),
            period = const std::mem::offset_of!($crate::mailbox::Words, period),
            threshold = const std::mem::offset_of!($crate::mailbox::Words, threshold),
            returns = const std::mem::offset_of!($crate::mailbox::Words, returns),
            stop = const std::mem::offset_of!($crate::mailbox::Words, stop),
            position = const std::mem::offset_of!($crate::mailbox::Words, position),
            stalls = const std::mem::offset_of!($crate::mailbox::Words, stalls),
            stall_ticks = const std::mem::offset_of!($crate::mailbox::Words, stall_ticks),
            longest = const std::mem::offset_of!($crate::mailbox::Words, longest),
            idle_ticks = const std::mem::offset_of!($crate::mailbox::Words, idle_ticks),
            wrong = const std::mem::offset_of!($crate::mailbox::Words, wrong),
            sum = const std::mem::offset_of!($crate::mailbox::Words, sum),
            record = const std::mem::offset_of!($crate::mailbox::Words, record),
            histogram = const $crate::mailbox::HISTOGRAM,
            whole = const $crate::work::WHOLE,
            multiplier = const $crate::work::MULTIPLIER,
            increment = const $crate::work::INCREMENT,
            $($name = const $value,)*
        );
    };
}

/// Defines functions that return the code between the labels of `guest_asm!`, and the offsets of
/// its pieces.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))]
macro_rules! pieces {
    () => {
        unsafe extern "C" {
            static slat_guest_start: u8;
            static slat_guest_sequential: u8;
            static slat_guest_random: u8;
            static slat_guest_hot: u8;
            static slat_guest_listed: u8;
            static slat_guest_write: u8;
            static slat_guest_read: u8;
            static slat_guest_sum: u8;
            static slat_guest_execute: u8;
            static slat_guest_ask: u8;
            static slat_guest_skip: u8;
            static slat_guest_toggle: u8;
            static slat_guest_end: u8;
        }

        /// Returns the guest's code. It is position-independent, and its entry point is its start.
        pub(crate) fn code() -> &'static [u8] {
            let start = &raw const slat_guest_start;
            let len = (&raw const slat_guest_end).addr() - start.addr();
            // SAFETY: the assembler laid out both labels in one section, start before end. It is
            // read-only memory of the program, which exists as long as the program runs.
            unsafe { std::slice::from_raw_parts(start, len) }
        }

        /// Returns the offset of a piece from the start of the code, in bytes.
        pub(crate) fn offset(piece: super::Piece) -> u64 {
            let label = match piece {
                super::Piece::Sequential => &raw const slat_guest_sequential,
                super::Piece::Random => &raw const slat_guest_random,
                super::Piece::Hot => &raw const slat_guest_hot,
                super::Piece::Listed => &raw const slat_guest_listed,
                super::Piece::Write => &raw const slat_guest_write,
                super::Piece::Read => &raw const slat_guest_read,
                super::Piece::Sum => &raw const slat_guest_sum,
                super::Piece::Execute => &raw const slat_guest_execute,
                super::Piece::Ask => &raw const slat_guest_ask,
                super::Piece::Skip => &raw const slat_guest_skip,
                super::Piece::Toggle => &raw const slat_guest_toggle,
            };
            (label.addr() - (&raw const slat_guest_start).addr()) as u64
        }
    };
}
#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "riscv64")]
pub(crate) use riscv64::*;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
mod unsupported;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64")))]
pub(crate) use unsupported::*;

/// Guest address of the code. Page 0 is left empty, so that a jump through a null pointer fails.
pub(crate) const CODE_GPA: u64 = 0x1000;
/// Guest addresses of the guest's own tables: the root, followed by the tables of the third level,
/// then those of the second.
pub(crate) const ROOT_GPA: u64 = 0x4000;
/// Guest address at which the test memory starts. It is above the areas below 4 GiB that chipsets
/// and KVM use, and aligned for 1 GiB pages.
pub(crate) const MEMORY_GPA: u64 = 1 << 32;

/// A piece of the guest's code, of which a [`Work`](crate::work::Work) is composed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece {
    Sequential,
    Random,
    Hot,
    Listed,
    Write,
    Read,
    Sum,
    Execute,
    Ask,
    Skip,
    Toggle,
}
