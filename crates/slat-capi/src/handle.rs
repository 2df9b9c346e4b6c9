//! A space in the caller's storage: which calls may use it, and when.
//!
//! The first word of the storage is its state, and depends on its address: zero is nothing,
//! `address | IDLE` is a live space, `address | BUSY` is one that a call is using, `DEAD` is one
//! that was destroyed. A call changes idle to busy by a compare-and-swap, so it has the rest of the
//! storage for itself. A copy, a handle that was never made, or a second thread finds another word
//! and is refused.

use crate::abi::{slat_owing, slat_result, slat_shootdown, slat_status};
use crate::machine::Machine;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use slat::{AddressSpace, AnyAddressSpace, Format, Guard, Interruption, Shootdown};

/// Size of a `slat_space`, in bytes.
pub const SLAT_SPACE_BYTES: usize = 2048;

/// One guest's second-stage tables, in the caller's storage. The storage has to be zero before
/// `slat_create`, and must not move or be copied afterwards. One thread at a time uses it; a call
/// of another returns `SLAT_STATUS_BUSY`.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct slat_space {
    /// Only the library uses it.
    pub bytes: [u8; SLAT_SPACE_BYTES],
}

/// The content of a `slat_space`.
#[repr(C)]
struct Body {
    word: AtomicUsize,
    machine: MaybeUninit<Machine>,
    live: MaybeUninit<Live>,
}

const _: () = assert!(size_of::<Body>() <= size_of::<slat_space>());
const _: () = assert!(align_of::<Body>() <= align_of::<slat_space>());

const DEAD: usize = 1;
const IDLE: usize = 2;
const BUSY: usize = 3;

/// A space of any format. Its machine is in the same storage.
pub(crate) type Any = AnyAddressSpace<'static, Machine>;
/// A guard in tables of a format.
pub(crate) type On<F> = Guard<'static, 'static, F, Machine>;

pub(crate) struct Live {
    pub space: Any,
    /// The invalidation that operations left, and that no call has completed yet.
    owed: Option<AnyShootdown>,
    /// The last ticket that was issued, and the last that was completed.
    issued: u64,
    completed: u64,
    /// A guard may have unlinked tables that were not given back yet.
    unlinked: bool,
}

macro_rules! formats {
    ($($(#[$feature:meta])* $format:ident: $of:ty;)*) => {
        /// A shootdown of any format.
        pub(crate) enum AnyShootdown {
            $($(#[$feature])* $format(Shootdown<'static, 'static, $of, Machine>),)*
        }

        impl AnyShootdown {
            fn complete(self) {
                match self {
                    $($(#[$feature])* Self::$format(owed) => owed.complete(),)*
                }
            }
        }

        /// A format whose shootdowns can be kept.
        pub(crate) trait KeepsShootdown: Format {
            /// Merges a shootdown into the kept one, which is of the same space.
            fn keep(
                owed: &mut Option<AnyShootdown>,
                new: Shootdown<'static, 'static, Self, Machine>,
            );
        }

        $($(#[$feature])* impl KeepsShootdown for $of {
            fn keep(
                owed: &mut Option<AnyShootdown>,
                new: Shootdown<'static, 'static, Self, Machine>,
            ) {
                match owed {
                    Some(AnyShootdown::$format(old)) => old.merge(new),
                    _ => *owed = Some(AnyShootdown::$format(new)),
                }
            }
        })*

        macro_rules! of_each {
            ($any:expr, $space:ident => $body:expr) => {
                match $any {
                    $($(#[$feature])* slat::AnyAddressSpace::$format($space) => $body,)*
                    // `slat_create` makes no other.
                    _ => unreachable!("a format that this library does not make"),
                }
            };
        }
        pub(crate) use of_each;
    };
}

formats! {
    #[cfg(feature = "arm64-4k")] Arm64K4: slat::format::arm64::Arm64K4;
    #[cfg(feature = "arm64")] Arm64K16: slat::format::arm64::Arm64K16;
    #[cfg(feature = "arm64")] Arm64K64: slat::format::arm64::Arm64K64;
    #[cfg(feature = "arm64")] Arm64Lpa2K4: slat::format::arm64::Arm64Lpa2K4;
    #[cfg(feature = "arm64")] Arm64Lpa2K16: slat::format::arm64::Arm64Lpa2K16;
    #[cfg(feature = "ept")] Ept1G: slat::format::ept::Ept1G;
    #[cfg(feature = "ept")] Ept2M: slat::format::ept::Ept2M;
    #[cfg(feature = "npt")] Npt1G: slat::format::npt::Npt1G;
    #[cfg(feature = "npt")] Npt2M: slat::format::npt::Npt2M;
    #[cfg(feature = "power")] PowerK4: slat::format::power::PowerK4;
    #[cfg(feature = "power")] PowerK64: slat::format::power::PowerK64;
    #[cfg(feature = "riscv")] RiscV: slat::format::riscv::RiscV;
}

/// A call that has a live space for itself until this is dropped.
pub(crate) struct EnteredSpace {
    body: *mut Body,
}

/// Returns the word of a handle, and the address of its body.
///
/// # Safety
/// `space` is null, or points to a `slat_space` that is zero or was given to `slat_create`.
unsafe fn word<'a>(space: *mut slat_space) -> Result<(&'a AtomicUsize, *mut Body), slat_status> {
    if space.is_null() {
        return Err(slat_status::NullPointer);
    }
    if !space.is_aligned() {
        return Err(slat_status::Argument);
    }
    let body = space.cast::<Body>();
    // SAFETY: `space` is not null and aligned, as was checked. It is the caller's, and large enough
    // for a body, as is asserted above. The first bytes are initialised (zero or a word), and all
    // code uses them as an atomic.
    Ok((unsafe { &(*body).word }, body))
}

/// Makes a space in `space`; `make` makes the tables from the machine.
///
/// # Safety
/// `space` is null, or points to a `slat_space` that is zero or was given to this function, and
/// that stays where it is while it is live.
pub(crate) unsafe fn create(
    space: *mut slat_space,
    machine: Machine,
    make: impl FnOnce(&'static Machine) -> Result<Any, slat_status>,
) -> Result<(), slat_status> {
    // SAFETY: the caller's promise is the callee's.
    let (word, body) = unsafe { word(space) }?;
    let before = word.load(Ordering::Relaxed);
    let free = before == 0 || before == DEAD;
    let busy = body as usize | BUSY;
    let take = || word.compare_exchange(before, busy, Ordering::Acquire, Ordering::Relaxed);
    if !free || take().is_err() {
        return Err(slat_status::Handle);
    }
    // SAFETY: the word says that only this call uses the body. Nothing is in the fields, which are
    // written as raw memory. The machine stays where it is, unchanged, until `destroy` has ended
    // all that borrows it, so the borrow is valid for as long as it is used.
    let made = unsafe {
        (&raw mut (*body).machine).cast::<Machine>().write(machine);
        make(&*(&raw const (*body).machine).cast::<Machine>())
    };
    match made {
        Ok(space) => {
            let live = Live { space, owed: None, issued: 0, completed: 0, unlinked: false };
            // SAFETY: as above.
            unsafe { (&raw mut (*body).live).cast::<Live>().write(live) };
            word.store(body as usize | IDLE, Ordering::Release);
            Ok(())
        }
        Err(reason) => {
            word.store(before, Ordering::Release);
            Err(reason)
        }
    }
}

impl EnteredSpace {
    /// # Safety
    /// `space` is null, or points to a `slat_space` that is zero or was given to `slat_create`.
    pub unsafe fn new(space: *mut slat_space) -> Result<Self, slat_status> {
        // SAFETY: the caller's promise is the callee's.
        let (word, body) = unsafe { word(space) }?;
        let (idle, busy) = (body as usize | IDLE, body as usize | BUSY);
        match word.compare_exchange(idle, busy, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Ok(Self { body }),
            Err(found) if found == busy => Err(slat_status::Busy),
            Err(_) => Err(slat_status::Handle),
        }
    }

    fn live(&self) -> *mut Live {
        // SAFETY: the body is that of a live space, and only an address is taken.
        unsafe { (&raw mut (*self.body).live).cast() }
    }

    /// Returns the space, to read it. Code that it is passed to keeps it no longer than the call.
    pub fn space(&self) -> &'static Any {
        // SAFETY: the space is live, and only this call uses it. Each function of the library calls
        // this or `space_mut`, not both. A shootdown that is kept from it is consumed in
        // `space_mut`.
        unsafe { &(*self.live()).space }
    }

    /// Returns the space, to change it by calls that are complete when they return. It first
    /// completes what is owed, as a shootdown borrows the tables.
    pub fn space_mut(&mut self) -> &mut Any {
        self.complete_all();
        // SAFETY: the space is live, and only this call uses it. The shootdown that borrowed it was
        // consumed.
        unsafe { &mut (*self.live()).space }
    }

    fn owed(&mut self) -> &mut Option<AnyShootdown> {
        // SAFETY: as in `space`; this field is none of those that are borrowed elsewhere.
        unsafe { &mut (*self.live()).owed }
    }

    /// Returns the last tickets issued and completed.
    fn tickets(&mut self) -> (&mut u64, &mut u64) {
        // SAFETY: as in `owed`; these are two different fields.
        unsafe { (&mut (*self.live()).issued, &mut (*self.live()).completed) }
    }

    /// Completes all that the space owes, and gives unlinked tables back. No borrow of the space is
    /// in use.
    pub fn complete_all(&mut self) {
        if let Some(owed) = self.owed().take() {
            owed.complete();
        }
        let (issued, completed) = self.tickets();
        *completed = *issued;
        self.give_back();
    }

    fn unlinked(&mut self) -> &mut bool {
        // SAFETY: as in `owed`.
        unsafe { &mut (*self.live()).unlinked }
    }

    /// Gives tables back that guards have unlinked, unless the space owes an invalidation: a
    /// shootdown borrows the tables.
    fn give_back(&mut self) {
        if self.owed().is_some() || !core::mem::take(self.unlinked()) {
            return;
        }
        // SAFETY: the space is live, and only this call uses it. No shootdown is kept, and the
        // callers use no borrow of the space.
        let space = unsafe { &mut (*self.live()).space };
        of_each!(space, space => space.reclaim());
    }

    /// Completes the invalidation of the ticket `owed`, unless that is done.
    pub fn complete(&mut self, owed: slat_shootdown) -> slat_status {
        if owed == slat_shootdown::NOTHING {
            self.give_back();
            return slat_status::Ok;
        }
        if owed.space != self.name() {
            return slat_status::Foreign;
        }
        let (issued, completed) = self.tickets();
        if owed.ticket > *issued {
            return slat_status::Argument;
        }
        if owed.ticket > *completed {
            self.complete_all();
        }
        self.give_back();
        slat_status::Ok
    }

    fn name(&self) -> u64 {
        self.body as u64
    }

    /// Runs one operation by a guard in the tables. Keeps what it owes, and returns a ticket for
    /// that.
    pub fn owing<F: KeepsShootdown, E: Into<slat_status>>(
        &mut self,
        space: &'static AddressSpace<'static, F, Machine>,
        operation: impl FnOnce(&mut On<F>) -> Result<u64, Interruption<E>>,
    ) -> slat_owing {
        *self.unlinked() = true;
        let mut guard = space.enter();
        let result = slat_result::of(operation(&mut guard));
        let mut owed = slat_shootdown::NOTHING;
        if guard.pending_invalidation().is_some() {
            F::keep(self.owed(), guard.shootdown());
            let name = self.name();
            let (issued, _) = self.tickets();
            *issued += 1;
            owed = slat_shootdown { space: name, ticket: *issued };
        }
        slat_owing { result, owed }
    }

    /// Ends the space.
    ///
    /// # Safety
    /// No CPU has the root loaded, nor loads it later.
    pub unsafe fn destroy(mut self) {
        self.complete_all();
        // SAFETY: the space is live, and only this call uses it. It is read out once, as the word
        // says afterwards that nothing is left. The shootdown that borrowed it is gone; after
        // `destroy`, so is all that borrowed the machine, whose fields need no drop.
        unsafe {
            let Live { space, .. } = self.live().read();
            space.destroy();
        }
        // SAFETY: as in `word`.
        unsafe { (*self.body).word.store(DEAD, Ordering::Release) };
        core::mem::forget(self);
    }
}

impl Drop for EnteredSpace {
    fn drop(&mut self) {
        // SAFETY: as in `word`.
        unsafe { (*self.body).word.store(self.body as usize | IDLE, Ordering::Release) };
    }
}
