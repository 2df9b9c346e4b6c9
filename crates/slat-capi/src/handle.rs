//! A space in the caller's storage: which calls may touch it, and when.
//!
//! The first word of the storage says what it is, and depends on where it lies: zero is nothing,
//! `address | IDLE` a live space, `address | BUSY` one that a call is using, `DEAD` one that was
//! destroyed. A call goes from idle to busy by a compare-and-swap, so it is alone with what follows
//! the word, and a copy, a handle that was never made, or a second thread finds another word.

use crate::abi::{slat_owing, slat_result, slat_shootdown, slat_status};
use crate::machine::Machine;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicUsize, Ordering};
use slat::{AddressSpace, AnyAddressSpace, Format, Guard, Halted, Shootdown};

/// Bytes of a `slat_space`.
pub const SLAT_SPACE_BYTES: usize = 2048;

/// One guest's second-stage tables, in storage of the caller's, which has to be zero before
/// `slat_create`, and must not move or be copied afterwards. One thread at a time uses it; another
/// is answered `SLAT_STATUS_BUSY`.
#[repr(C, align(128))]
#[derive(Debug)]
pub struct slat_space {
    /// For the library alone.
    pub bytes: [u8; SLAT_SPACE_BYTES],
}

/// What is in a `slat_space`.
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

/// A space of any format, whose machine lies beside it.
pub(crate) type Any = AnyAddressSpace<'static, Machine>;

pub(crate) struct Live {
    pub space: Any,
    /// What operations left behind and nobody completed.
    owed: Option<AnyShootdown>,
    /// The last ticket given, and the last that is covered.
    issued: u64,
    completed: u64,
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
        pub(crate) trait Kept: Format {
            /// Adds one to those that are kept, which are of the same space.
            fn keep(owed: &mut Option<AnyShootdown>, new: Shootdown<'static, 'static, Self, Machine>);
        }

        $($(#[$feature])* impl Kept for $of {
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
    #[cfg(feature = "arm64")] Arm64K4: slat::format::arm64::Arm64K4;
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

/// A call that is alone with a live space, until this is dropped.
pub(crate) struct Entered {
    body: *mut Body,
}

/// The word of a handle, and its address.
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
    // SAFETY: not null and aligned, as was checked, and the caller's, of a size that holds a body,
    // as is asserted above. The first bytes are initialised: zero or a word. Whoever uses them
    // does so as an atomic.
    Ok((unsafe { &(*body).word }, body))
}

/// Makes a space in `space`, from what `live` makes of the machine.
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
    // SAFETY: the word says that this call is alone with the body; nothing is in the fields, which
    // are written as raw memory. The machine stays where it is, untouched, until `destroy` has
    // ended all that borrows it: so it is borrowed for as long as is needed.
    let made = unsafe {
        (&raw mut (*body).machine).cast::<Machine>().write(machine);
        make(&*(&raw const (*body).machine).cast::<Machine>())
    };
    match made {
        Ok(space) => {
            let live = Live { space, owed: None, issued: 0, completed: 0 };
            // SAFETY: as above.
            unsafe { (&raw mut (*body).live).cast::<Live>().write(live) };
            word.store(body as usize | IDLE, Ordering::Release);
            Ok(())
        }
        Err(why) => {
            word.store(before, Ordering::Release);
            Err(why)
        }
    }
}

impl Entered {
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
        // SAFETY: the body is that of a live space: only its address is taken.
        unsafe { (&raw mut (*self.body).live).cast() }
    }

    /// The space, to look at. What it is given to lives no longer than the call.
    pub fn space(&self) -> &'static Any {
        // SAFETY: the space is live, and this call alone with it; each function of the library
        // calls this or `space_mut`, not both, and what is kept of it is consumed in `space_mut`.
        unsafe { &(*self.live()).space }
    }

    /// The space, to change by what is complete when it returns. What was owed is completed first:
    /// a shootdown borrows the tables.
    pub fn space_mut(&mut self) -> &mut Any {
        self.complete_all();
        // SAFETY: the space is live, and this call alone with it; the shootdown that borrowed it
        // was consumed.
        unsafe { &mut (*self.live()).space }
    }

    fn owed(&mut self) -> &mut Option<AnyShootdown> {
        // SAFETY: as in `space`; the field is another than those that are borrowed elsewhere.
        unsafe { &mut (*self.live()).owed }
    }

    /// The tickets issued and completed.
    fn tickets(&mut self) -> (&mut u64, &mut u64) {
        // SAFETY: as in `owed`; two fields.
        unsafe { (&mut (*self.live()).issued, &mut (*self.live()).completed) }
    }

    /// Completes all that is owed.
    pub fn complete_all(&mut self) {
        if let Some(owed) = self.owed().take() {
            owed.complete();
        }
        let (issued, completed) = self.tickets();
        *completed = *issued;
    }

    /// Completes what `owed` stands for, unless that is done.
    pub fn complete(&mut self, owed: slat_shootdown) -> slat_status {
        if owed == slat_shootdown::NOTHING {
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
        slat_status::Ok
    }

    fn name(&self) -> u64 {
        self.body as u64
    }

    /// A guard in the tables, for one operation; what it owes is kept, and returned as a ticket.
    pub fn owing<F: Kept, E: Into<slat_status>>(
        &mut self,
        space: &'static AddressSpace<'static, F, Machine>,
        operation: impl FnOnce(&mut Guard<'static, 'static, F, Machine>) -> Result<u64, Halted<E>>,
    ) -> slat_owing {
        let mut guard = space.guard();
        let result = slat_result::of(operation(&mut guard));
        let mut owed = slat_shootdown::NOTHING;
        if guard.owed().is_some() {
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
    /// No CPU has the root loaded, nor will load it.
    pub unsafe fn destroy(mut self) {
        self.complete_all();
        // SAFETY: the space is live and this call alone with it. It is read out once: the word says
        // then that nothing is left. The shootdown, which borrowed it, is gone, and so is, after
        // `destroy`, what borrowed the machine, whose fields have nothing to drop.
        unsafe {
            let Live { space, .. } = self.live().read();
            space.destroy();
        }
        // SAFETY: as in `word`.
        unsafe { (*self.body).word.store(DEAD, Ordering::Release) };
        core::mem::forget(self);
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: as in `word`.
        unsafe { (*self.body).word.store(self.body as usize | IDLE, Ordering::Release) };
    }
}
