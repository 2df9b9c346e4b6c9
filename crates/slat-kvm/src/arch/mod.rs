//! What differs between architectures: the guest's code, its registers, bits of its own tables.
//!
//! Each has the same items; the rest of the crate names none of them.

/// The guest's code, with the offsets of its mailbox and the numbers of its orders by name, and
/// what else an architecture's needs.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
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
            histogram = const $crate::mailbox::HISTOGRAM,
            whole = const $crate::work::WHOLE,
            multiplier = const $crate::work::MULTIPLIER,
            increment = const $crate::work::INCREMENT,
            $($name = const $value,)*
        );
    };
}

/// The code that `global_asm!` has put between its labels, and where its pieces are.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! pieces {
    () => {
        unsafe extern "C" {
            static slat_guest_start: u8;
            static slat_guest_sequential: u8;
            static slat_guest_random: u8;
            static slat_guest_hot: u8;
            static slat_guest_write: u8;
            static slat_guest_read: u8;
            static slat_guest_execute: u8;
            static slat_guest_skip: u8;
            static slat_guest_toggle: u8;
            static slat_guest_end: u8;
        }

        /// The guest's code. It is position-independent and enters at its start.
        pub(crate) fn code() -> &'static [u8] {
            let start = &raw const slat_guest_start;
            let len = (&raw const slat_guest_end).addr() - start.addr();
            // SAFETY: both labels are of one section, which the assembler laid out above, start
            // before end; it is read-only memory of the program, there for as long as it runs.
            unsafe { std::slice::from_raw_parts(start, len) }
        }

        /// Bytes from the start of the code to a piece of it.
        pub(crate) fn offset(piece: super::Piece) -> u64 {
            let label = match piece {
                super::Piece::Sequential => &raw const slat_guest_sequential,
                super::Piece::Random => &raw const slat_guest_random,
                super::Piece::Hot => &raw const slat_guest_hot,
                super::Piece::Write => &raw const slat_guest_write,
                super::Piece::Read => &raw const slat_guest_read,
                super::Piece::Execute => &raw const slat_guest_execute,
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

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod unsupported;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use unsupported::*;

/// Where the test memory starts: above the holes that chipsets and KVM itself use below 4 GiB,
/// and aligned for 1 GiB pages.
pub(crate) const MEMORY_GPA: u64 = 1 << 32;

/// A piece of the guest's code that a [`Work`](crate::work::Work) is put together from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Piece {
    Sequential,
    Random,
    Hot,
    Write,
    Read,
    Execute,
    Skip,
    Toggle,
}
