//! Dirty logs and ageing: rights are taken and given back, marks are read, blocks are split and
//! collapsed.
//!
//! The space gathers what these operations leave stale. [`slat_complete`] completes it, as does the
//! next call of `space.rs` that changes the tables, or the end of the space.

use crate::abi::{access, range, size, slat_owing, slat_result, slat_shootdown, slat_status};
use crate::handle::{EnteredSpace, of_each, slat_space};
use slat::{
    AgeBitmaps, AgeOptions, Format, Frame, Gpa, Interruption, Pages, SplitError, TableBits,
    TableCache,
};

/// The number of table pages that a split asks the platform for at once.
const BATCH: usize = 8;

/// `slat_age` makes the young pages old; without this flag it only looks.
pub const SLAT_AGE_CLEAR: u32 = 1 << 0;
/// With `SLAT_AGE_CLEAR`: `slat_age` invalidates at its end. Without this flag, a page that is in a
/// TLB may be in use and look old until the TLB drops its entry.
pub const SLAT_AGE_FRESH: u32 = 1 << 1;

/// Completes the invalidation `owed`: returns when no CPU uses the old entries any more. It
/// completes all that the space owes, so the last of several is enough. One that was completed
/// before costs nothing. If nothing is owed any more, it gives back the tables that the operations
/// unlinked.
///
/// Returns `SLAT_STATUS_FOREIGN` for another space's, `SLAT_STATUS_ARGUMENT` for one that no
/// function returned: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_complete(
    space: *mut slat_space,
    owed: slat_shootdown,
) -> slat_status {
    // SAFETY: the caller's promise is the callee's.
    match unsafe { EnteredSpace::new(space) } {
        Ok(mut entered) => entered.complete(owed),
        Err(reason) => reason,
    }
}

fn owing(of: Result<slat_owing, slat_status>) -> slat_owing {
    let refused =
        |reason| slat_owing { result: slat_result::refused(reason), owed: slat_shootdown::NOTHING };
    of.unwrap_or_else(refused)
}

/// Runs one operation of the engine's guard.
macro_rules! operation {
    ($space:expr, |$guard:ident| $operation:expr) => {{
        let mut entered = $space;
        of_each!(entered.space(), space => entered.owing(space, |$guard| $operation))
    }};
}

/// Takes the right to write from every leaf in a range. Once that is completed, each write faults,
/// and `slat_relax` gives the right back.
///
/// Returns the bytes that had the right, and what is owed. Errors: `SLAT_STATUS_RANGE`,
/// `SLAT_STATUS_CUTS_BLOCK`: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_write_protect(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
) -> slat_owing {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    owing(entered.and_then(|entered| {
        let range = range(gpa, bytes)?;
        Ok(operation!(entered, |guard| guard.write_protect(range)))
    }))
}

/// Returns the caller's bitmap.
///
/// # Safety
/// `bits` is null, or points to `words` words for as long as the slice is used, and no other code
/// writes to them meanwhile.
unsafe fn bitmap<'a>(bits: *const u64, words: usize) -> Result<&'a [u64], slat_status> {
    // SAFETY: the caller's promise is the callee's.
    unsafe { check(bits, words) }?;
    // SAFETY: `bits` is not null, aligned, and not larger than an object can be, as was checked; it
    // is readable by the caller's promise.
    Ok(unsafe { core::slice::from_raw_parts(bits, words) })
}

/// Returns the caller's bitmap, to be written.
///
/// # Safety
/// As for [`bitmap`], and no other code reads the words.
unsafe fn bitmap_mut<'a>(bits: *mut u64, words: usize) -> Result<&'a mut [u64], slat_status> {
    // SAFETY: the caller's promise is the callee's.
    unsafe { check(bits, words) }?;
    // SAFETY: as in `bitmap`; only this call uses it, by the caller's promise.
    Ok(unsafe { core::slice::from_raw_parts_mut(bits, words) })
}

/// # Safety
/// None: it reads nothing.
unsafe fn check(bits: *const u64, words: usize) -> Result<(), slat_status> {
    if bits.is_null() {
        return Err(slat_status::NullPointer);
    }
    let fits = words.checked_mul(8).is_some_and(|bytes| isize::try_from(bytes).is_ok());
    if bits.is_aligned() && fits { Ok(()) } else { Err(slat_status::Argument) }
}

/// Does `slat_write_protect` for exactly the pages that a bitmap names: bit `i` of word `w` is the
/// page `64 * w + i` pages after `gpa`.
///
/// Returns the bytes that had the right, and what is owed. Errors: the errors of
/// `slat_write_protect`, at the address where it stopped; the pages before it are done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `bits` is null or points to `words`
/// words, which no other code writes meanwhile.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_write_protect_pages(
    space: *mut slat_space,
    gpa: u64,
    bits: *const u64,
    words: usize,
) -> slat_owing {
    // SAFETY: the caller's promises are the callees'.
    let (entered, bits) = unsafe { (EnteredSpace::new(space), bitmap(bits, words)) };
    owing(entered.and_then(|entered| {
        let pages = Pages { start: Gpa(gpa), bits: bits? };
        Ok(operation!(entered, |guard| guard.write_protect_pages(&pages)))
    }))
}

/// Gives every leaf in a range the rights for an access, one of `enum slat_access`, as a fault does
/// to a leaf that is there. The caller knows whether the guest may have them.
///
/// Nothing is owed to other CPUs. On Arm and RISC-V it calls the platform's `invalidate_local` (or
/// `invalidate`, if that is null), so that the calling CPU, which faulted, drops the old rights (on
/// x86 and Power the fault has done so). A caller
/// that logs writes reports the page after this call, not before.
///
/// Returns the bytes that changed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`, and, except for a read,
/// `CUTS_BLOCK`: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_relax(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    how: u32,
) -> slat_owing {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    owing(entered.and_then(|entered| {
        let (range, access) = (range(gpa, bytes)?, access(how)?);
        Ok(operation!(entered, |guard| guard
            .relax(range, access)
            .map(slat::LocalFlush::flush_local)))
    }))
}

/// Moves the dirty state that hardware set in a range into a bitmap, whose bit 0 is the first page
/// of the range. It adds bits and removes none; a block is dirty as a whole. It completes what the
/// space owes before and after: a page that the bitmap does not name was not written since the last
/// harvest, and the next harvest reports every later write.
///
/// Returns the pages that are dirty and were not in the bitmap. Errors: `SLAT_STATUS_RANGE`,
/// `BITMAP`, `CUTS_BLOCK`: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `bits` is null or points to `words`
/// words, which no other code uses meanwhile.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_harvest(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    bits: *mut u64,
    words: usize,
) -> slat_result {
    // SAFETY: the caller's promises are the callees'.
    let (entered, bits) = unsafe { (EnteredSpace::new(space), bitmap_mut(bits, words)) };
    owing(entered.and_then(|mut entered| {
        let (range, bits) = (range(gpa, bytes)?, bits?);
        entered.complete_all();
        Ok(operation!(entered, |guard| guard.harvest(range, bits)))
    }))
    .result
}

/// Clears the dirty state of a range, for a caller that knows it already. The pages are clean only
/// once that is completed: copy them after it.
///
/// Returns the bytes that changed, and what is owed. Errors: the errors of `slat_write_protect`.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_clean(space: *mut slat_space, gpa: u64, bytes: u64) -> slat_owing {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    owing(entered.and_then(|entered| {
        let range = range(gpa, bytes)?;
        Ok(operation!(entered, |guard| guard.clean(range)))
    }))
}

/// Finds which pages of a range were used: adds the bits of the young ones to `young`, whose bit 0
/// is the first page, and makes them old if `flags` has `SLAT_AGE_CLEAR`. Pages whose entries other
/// users of the engine are changing are added to `unanswered`: with this interface alone, none.
///
/// Returns the bits that were added. Errors: `SLAT_STATUS_ARGUMENT` for an unknown flag or for two
/// equal pointers, `RANGE`, `BITMAP`, `NOT_RECORDED`: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`; `young` and `unanswered` are null or
/// point to `words` words each, which no other code uses meanwhile.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_age(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    flags: u32,
    young: *mut u64,
    unanswered: *mut u64,
    words: usize,
) -> slat_owing {
    if young == unanswered {
        return owing(Err(match young.is_null() {
            true => slat_status::NullPointer,
            false => slat_status::Argument,
        }));
    }
    // SAFETY: the caller's promises are the callees'.
    let entered = unsafe { EnteredSpace::new(space) };
    // SAFETY: as above; two bitmaps.
    let bitmaps = unsafe { (bitmap_mut(young, words), bitmap_mut(unanswered, words)) };
    owing(entered.and_then(|entered| {
        if flags & !(SLAT_AGE_CLEAR | SLAT_AGE_FRESH) != 0 {
            return Err(slat_status::Argument);
        }
        let range = range(gpa, bytes)?;
        let how = AgeOptions {
            clear: flags & SLAT_AGE_CLEAR != 0,
            table_bits: TableBits::Ignored,
            flush_tlb: flags & SLAT_AGE_FRESH != 0,
        };
        let mut ages = AgeBitmaps { young: bitmaps.0?, unanswered: bitmaps.1? };
        Ok(operation!(entered, |guard| guard.age(range, &mut ages, how).map(|aged| aged.young)))
    }))
}

/// Splits, and takes table pages from the platform as it needs them.
fn split<F: Format>(
    guard: &mut crate::handle::On<F>,
    range: slat::GpaRange,
    to: slat::PageSize,
) -> Result<u64, Interruption<SplitError>> {
    let mut storage: [Option<Frame>; BATCH] = [const { None }; BATCH];
    let mut cache = TableCache::new(guard.platform(), &mut storage);
    let (mut bytes, mut left) = (guard.counts().bytes_changed, range);
    loop {
        let result = guard.split(left, to, &mut cache);
        let Err(Interruption { at, reason }) = result else { break };
        let empty = matches!(reason, SplitError::CacheEmpty)
            && cache.fill(BATCH).is_err()
            && cache.is_empty();
        if empty || !matches!(reason, SplitError::CacheEmpty | SplitError::Contended) {
            return Err(Interruption { at, reason });
        }
        if let Ok(rest) = slat::GpaRange::new(at, range.end().0.saturating_sub(at.0)) {
            left = rest;
        }
    }
    bytes = guard.counts().bytes_changed - bytes;
    Ok(bytes)
}

/// Splits until no leaf that overlaps the range is larger than `to` bytes. Translations, rights and
/// state stay as they are, for every byte and at every moment; but where the CPU demands
/// break-before-make, an access faults while a block stands broken.
///
/// Returns the bytes of the blocks that were split, and what is owed. Errors:
/// `SLAT_STATUS_ARGUMENT`, `RANGE`, `LEAF_SIZE`: nothing is done; `OUT_OF_FRAMES`: what precedes
/// `at` is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_split(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    to: u64,
) -> slat_owing {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    owing(entered.and_then(|entered| {
        let (range, to) = (range(gpa, bytes)?, size(to)?);
        Ok(operation!(entered, |guard| split(guard, range, to)))
    }))
}

/// Turns tables that the range covers back into blocks of at most `to` bytes, where their leaves
/// map contiguous memory with the same rights, memory type and software bits.
///
/// The tables are given back by the call of `slat_complete` that completes what is owed, or by the
/// next call that completes it.
///
/// Returns the bytes of the blocks, and what is owed. Errors: `SLAT_STATUS_ARGUMENT`, `RANGE`,
/// `LEAF_SIZE`: nothing is done.
///
/// # Safety
/// `space` is null, zero, or was passed to `slat_create`.
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn slat_collapse(
    space: *mut slat_space,
    gpa: u64,
    bytes: u64,
    to: u64,
) -> slat_owing {
    // SAFETY: the caller's promise is the callee's.
    let entered = unsafe { EnteredSpace::new(space) };
    owing(entered.and_then(|entered| {
        let (range, to) = (range(gpa, bytes)?, size(to)?);
        Ok(operation!(entered, |guard| guard.collapse(range, to)))
    }))
}
