//! Page-table entries as atomics, and the frames that hold them.

use crate::addr::Hpa;
use crate::observe::{Order, shown};
use crate::sync::{AtomicU64, Ordering};
use core::convert::Infallible;
use core::num::NonZeroU64;

/// One page-table entry in memory.
///
/// A live entry changes only by an atomic exchange whose old value is used: hardware sets accessed
/// and dirty bits at any time. Plain stores are for entries that no other thread and no hardware
/// reaches (in a table that is not linked yet), and for entries that hold the caller's own marker.
#[repr(transparent)]
#[derive(Debug)]
pub struct Pte(AtomicU64);

impl Pte {
    /// An entry that holds `raw`.
    pub fn new(raw: u64) -> Self {
        Self(AtomicU64::new(raw))
    }

    /// Returns where it lies, for an observer.
    #[inline(always)]
    fn address(&self) -> usize {
        core::ptr::from_ref(self).addr()
    }

    /// Loads the entry. The load is an acquire: if the value links a table, the caller sees the
    /// stores that preceded the link.
    #[inline(always)]
    pub fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Returns the present value by a relaxed load, for walks over many entries: on Power, RISC-V
    /// and arm64 an acquire costs more than the load.
    ///
    /// An exchange from the value acquires it. A caller that relies on the value without an
    /// exchange, to follow a link or to take a reservation, calls
    /// [`acquired`](crate::sync::acquired) first. A walk does so at its end, for its caller.
    #[inline(always)]
    pub(crate) fn peek(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces `old` by `new`, or returns the value that it found instead.
    ///
    /// Release: stores to a new table precede its link. Acquire: a thread that takes over an entry
    /// sees what the entry's former holder did.
    #[inline(always)]
    pub fn exchange(&self, old: u64, new: u64) -> Result<(), u64> {
        shown(self.address(), new, Order::Release, || {
            self.0.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
        })
    }

    /// Replaces the caller's own marker, or a vacant entry where the caller is the only thread:
    /// hardware takes the entry for invalid, and no other software changes it. Release: what was
    /// done under the marker precedes the new value.
    #[inline(always)]
    pub(crate) fn release(&self, marker: u64, new: u64) {
        debug_assert_eq!(self.load(), marker, "a frozen entry was changed by somebody else");
        self.always(new, Order::Release, || self.0.store(new, Ordering::Release));
    }

    /// Replaces the value, whatever it is, and returns it. For a caller that is the only software
    /// in the tables: hardware may mark the entry at any time before.
    #[inline(always)]
    pub(crate) fn swap(&self, new: u64) -> u64 {
        let mut old = 0;
        let swap = || old = self.0.swap(new, Ordering::AcqRel);
        self.always(new, Order::Release, swap);
        old
    }

    /// Does a store of `raw` that cannot fail.
    #[inline(always)]
    fn always(&self, raw: u64, order: Order, store: impl FnOnce()) {
        let Ok(()) = shown::<Infallible>(self.address(), raw, order, || {
            store();
            Ok(())
        });
    }

    /// Replaces the value by what `change` makes of it, again until no other change comes in
    /// between. Returns the value that it replaced, or the value for which `change` returned
    /// `None`.
    #[inline]
    pub(crate) fn update(&self, change: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut raw = self.load();
        loop {
            let Some(new) = change(raw) else { return Err(raw) };
            match self.exchange(raw, new) {
                Ok(()) => return Ok(raw),
                Err(found) => raw = found,
            }
        }
    }

    /// Stores to an entry of a table that is not linked yet. The link, a release, publishes the
    /// store.
    #[inline(always)]
    pub(crate) fn init(&self, raw: u64) {
        self.always(raw, Order::Plain, || self.0.store(raw, Ordering::Relaxed));
    }

    /// Stores to an entry that no other code can reach.
    #[inline(always)]
    pub fn set(&mut self, raw: u64) {
        let pte = self.address();
        let Ok(()) = shown::<Infallible>(pte, raw, Order::Plain, || {
            #[cfg(not(loom))]
            {
                *self.0.get_mut() = raw;
            }
            #[cfg(loom)]
            self.0.with_mut(|word| *word = raw);
            Ok(())
        });
    }

    /// Loads from an entry that no other code can reach.
    #[inline(always)]
    pub(crate) fn get(&mut self) -> u64 {
        #[cfg(not(loom))]
        return *self.0.get_mut();
        #[cfg(loom)]
        self.0.with_mut(|word| *word)
    }

    /// Returns exclusively owned entries as plain words, for a platform that fills them by vector
    /// stores. No observer sees those stores.
    #[cfg(not(any(loom, shuttle)))]
    pub fn words(ptes: &mut [Self]) -> &mut [u64] {
        let len = ptes.len();
        // SAFETY: `Pte` is a transparent wrapper of `AtomicU64`, which has the size, alignment and
        // validity of `u64`; the exclusive borrow of the entries becomes that of the words.
        unsafe { core::slice::from_raw_parts_mut(ptes.as_mut_ptr().cast(), len) }
    }
}

/// An owned frame of memory that holds, or will hold, one table.
///
/// It is not `Copy`: a frame is in one cache, in one table, or given back. Losing one leaks it.
#[derive(PartialEq, Eq, Debug)]
pub struct Frame(NonZeroU64);

impl Frame {
    /// Takes ownership of the frame at `hpa`. Returns `None` for address 0, which entries use for
    /// "none".
    ///
    /// # Safety
    /// The frame is memory that [`Platform::entries`](crate::Platform::entries) of the platform
    /// that it is used with can reach. It has the size and alignment that were asked for, its
    /// address fits into an entry of the format, and no other code uses it.
    pub const unsafe fn from_hpa(hpa: Hpa) -> Option<Self> {
        match NonZeroU64::new(hpa.0) {
            Some(hpa) => Some(Self(hpa)),
            None => None,
        }
    }

    /// Returns its address.
    pub const fn hpa(&self) -> Hpa {
        Hpa(self.0.get())
    }

    /// Consumes the frame for the entry that will link it.
    pub(crate) const fn into_hpa(self) -> Hpa {
        self.hpa()
    }
}

/// Loads each of a run of entries once, with their common bits, in one pass, so that the values
/// stay in registers. [`Pte::peek`] says how the loads are ordered. The loop is by index, as
/// `array::map` and `zip` are calls where crates are not optimised as one.
#[inline(always)]
pub(crate) fn load_run<const N: usize>(run: &[Pte; N]) -> Run<N> {
    let mut loaded = Run { raws: [0; N], common: !0, any: 0 };
    for (index, pte) in run.iter().enumerate() {
        let raw = pte.peek();
        loaded.raws[index] = raw;
        loaded.common &= raw;
        loaded.any |= raw;
    }
    loaded
}

/// Returns the bits that any of a run of entries has, loaded as by [`load_run`].
#[inline(always)]
pub(crate) fn any<const N: usize>(run: &[Pte; N]) -> u64 {
    let mut any = 0;
    for pte in run {
        any |= pte.peek();
    }
    any
}

/// The values of a run of entries.
pub(crate) struct Run<const N: usize> {
    pub raws: [u64; N],
    /// The bits that all of them have.
    pub common: u64,
    /// The bits that any of them has.
    pub any: u64,
}

/// Rewrites a run of entries as plain words, unless `change` refuses; returns whether it did.
///
/// # Safety
/// No other software and no hardware reads or writes the entries meanwhile.
#[cfg(not(any(loom, shuttle)))]
#[inline(always)]
pub(crate) unsafe fn rewrite_run<const N: usize>(
    run: &[Pte; N],
    change: impl FnOnce([u64; N]) -> Option<[u64; N]>,
) -> bool {
    let words = core::ptr::from_ref(run).cast::<[u64; N]>().cast_mut();
    // SAFETY: `Pte` is a transparent wrapper of `AtomicU64`: it has the size and alignment of
    // `u64`, and an `UnsafeCell`, so it may be written through a shared reference. By the caller's
    // contract no other code accesses it.
    unsafe {
        let Some(new) = change(words.read()) else { return false };
        words.write(new);
        #[cfg(feature = "observed")]
        run.iter().zip(new).for_each(|(pte, raw)| pte.always(raw, Order::Plain, || ()));
    }
    true
}

/// The way in which an entry is changed from the value that was read.
pub(crate) trait Change {
    /// No other thread, and no hardware, reaches the entries.
    const ALONE: bool;

    fn exchange(pte: &Pte, old: u64, new: u64) -> Result<(), u64>;
}

/// For entries in tables that hardware or other threads may use.
pub(crate) struct Atomically;
/// For entries in tables that no other thread, and no hardware, can reach.
pub(crate) struct Plainly;

impl Change for Atomically {
    const ALONE: bool = false;

    #[inline(always)]
    fn exchange(pte: &Pte, old: u64, new: u64) -> Result<(), u64> {
        pte.exchange(old, new)
    }
}

impl Change for Plainly {
    const ALONE: bool = true;

    #[inline(always)]
    fn exchange(pte: &Pte, _old: u64, new: u64) -> Result<(), u64> {
        pte.init(new);
        Ok(())
    }
}
