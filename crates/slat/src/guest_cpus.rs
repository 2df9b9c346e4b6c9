//! The CPUs that may hold TLB entries of a guest, for platforms whose invalidations reach only the
//! CPU that executes them (x86, RISC-V; Power by `tlbiel`).
//!
//! TLB entries are tagged, so a CPU may hold a guest's entries after it has left the guest. An
//! invalidation has to reach those CPUs too, but need not interrupt them: it is enough that each
//! invalidates before it enters the guest again. Invalidations are counted by a *generation*. Each
//! CPU remembers up to which generation it has invalidated; below, it has *forgotten* that
//! generation.
//!
//! # Protocol
//! `generation` counts invalidations that have begun. Each CPU has a word: whether it is *inside*
//! (it runs the guest, or is about to), and the generation up to which it has forgotten. Only that
//! CPU writes the word.
//!
//! A CPU, with interrupts off from step 1 until the guest runs:
//! 1. enters: marks its group as known (once), and writes *inside* into its word;
//! 2. executes a full fence;
//! 3. reads the generation;
//! 4. if that differs from its word, invalidates all of the guest on itself, and only then writes
//!    the generation that it read in step 3 into its word;
//! 5. runs the guest. When it is interrupted, it repeats steps 3 and 4 (*serves*), or leaves;
//! 6. leaves: it stops running the guest and walking its root, and writes *outside* into its word.
//!
//! A thread that invalidates, after its stores to the tables:
//! 1. adds 1 to the generation, whose new value is `g`;
//! 2. executes a full fence;
//! 3. reads the words of all CPUs in known groups, and interrupts the CPUs that are inside and have
//!    forgotten less than `g`;
//! 4. waits until each of these is outside, or has forgotten `g`.
//!
//! *Invariant*: when the thread's step 4 has ended, no CPU uses a TLB or walk-cache entry that was
//! made before the stores to the tables. One of the two fences comes first.
//! - If the thread's does, the CPU's step 3 reads `g` or later and synchronises with the thread, so
//!   the CPU invalidates before it runs the guest, and its later walks find what the thread stored.
//! - If the CPU's does, the thread's step 3 finds the CPU inside; or it finds the CPU outside by a
//!   later leave, whose value it acquires, so all that the CPU did in the guest came before.
//!
//! A CPU whose word shows `g` as forgotten has read `g` in step 3, and so sees the thread's stores,
//! before it invalidated in step 4. If a CPU finds its group known, another CPU made it known
//! before this CPU's own fence, so the same argument holds for the word of groups.
//!
//! Only the thread that invalidates waits, and only for interrupts. `tests/loom/ran.rs` has the
//! models, and each order of two steps that breaks the protocol.

use crate::sync::{AtomicU64, Ordering, agreed};
use core::fmt;

/// The bit of a CPU's word that says that it runs the guest, or is about to. Above the bit is the
/// generation up to which it has forgotten.
const INSIDE: u64 = 1;
const SHIFT: u32 = 1;
/// The first generation. No CPU has forgotten it, so each CPU's first entry invalidates: another
/// guest's root may have been at the same address.
const FIRST: u64 = 1;

/// One CPU's word, on a cache line of its own.
#[derive(Debug)]
#[repr(align(128))]
struct Word(AtomicU64);

/// A number on a cache line of its own, which all CPUs read at each entry.
#[derive(Debug)]
#[repr(align(128))]
struct Shared(AtomicU64);

/// The CPUs that may hold entries of one guest, `CPUS` at most. It takes 128 bytes for each CPU.
///
/// Its owner keeps one for each guest, next to the guest's tables.
/// [`Platform::invalidate`](crate::Platform::invalidate) calls [`GuestCpus::invalidate`] instead of
/// a broadcast; it finds the guest's in a table of its own, by the VMID. A CPU leaves before it
/// answers a fault, as the answer may invalidate.
///
/// # Example
///
/// INVEPT, by way of interrupts:
/// ```
/// use slat::GuestCpus;
///
/// struct Vm { cpus: GuestCpus<64>, eptp: u64 }
///
/// # fn invept(_eptp: u64) {}
/// # fn enter_guest() {}
/// # fn send_ipi(_cpu: usize) {}
/// /// On `cpu`, with interrupts off.
/// fn run(vm: &Vm, cpu: usize) -> Result<(), slat::NoSuchCpu> {
///     vm.cpus.enter(cpu, || invept(vm.eptp))?;
///     enter_guest(); // an interrupt that is pending by now makes it exit at once
///     vm.cpus.leave(cpu)
/// }
///
/// /// What `Platform::invalidate` does, on a CPU that is not inside.
/// fn invalidate(vm: &Vm) {
///     // A locked instruction lies before: stores are visible when the interrupt is. (With an
///     // x2APIC, `send_ipi` begins with `mfence; lfence`.)
///     vm.cpus.invalidate(send_ipi, core::hint::spin_loop);
/// }
///
/// /// The handler of that interrupt, where the guest goes on without `leave` and `enter`.
/// fn interrupted(vm: &Vm, cpu: usize) -> Result<(), slat::NoSuchCpu> {
///     vm.cpus.serve(cpu, || invept(vm.eptp))?;
///     Ok(())
/// }
/// # let vm = Vm { cpus: GuestCpus::new(), eptp: 0 };
/// # run(&vm, 0)?;
/// # invalidate(&vm);
/// # interrupted(&vm, 1)?;
/// # Ok::<(), slat::NoSuchCpu>(())
/// ```
#[derive(Debug)]
pub struct GuestCpus<const CPUS: usize> {
    generation: Shared,
    /// Bit `n`: a CPU of group `n` has entered the guest once. Up to 64 CPUs, each is a group.
    groups: Shared,
    cpus: [Word; CPUS],
}

/// There is no CPU with that number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoSuchCpu {
    /// The number.
    pub cpu: usize,
    /// The number of CPUs.
    pub cpus: usize,
}

impl fmt::Display for NoSuchCpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cpus } = self;
        write!(f, "there is no CPU {cpu}, of {cpus}")
    }
}

impl core::error::Error for NoSuchCpu {}

macro_rules! constructors {
    ($($const:ident)?) => {
        impl Word {
            $($const)? fn new() -> Self {
                Self(AtomicU64::new(0))
            }
        }

        impl<const CPUS: usize> GuestCpus<CPUS> {
            /// Makes the state of a guest that no CPU has run: each CPU's first
            /// [`GuestCpus::enter`] invalidates.
            #[expect(clippy::new_without_default, reason = "a `const fn` beside no other use")]
            pub $($const)? fn new() -> Self {
                Self {
                    generation: Shared(AtomicU64::new(FIRST)),
                    groups: Shared(AtomicU64::new(0)),
                    cpus: constructors!(@words $($const)?),
                }
            }
        }
    };
    (@words const) => { [const { Word::new() }; CPUS] };
    (@words) => { core::array::from_fn(|_| Word::new()) };
}
#[cfg(not(any(loom, shuttle)))]
constructors!(const);
#[cfg(any(loom, shuttle))]
constructors!();

impl<const CPUS: usize> GuestCpus<CPUS> {
    /// The number of CPUs in a group, which has one bit.
    const GROUP: usize = if CPUS > 64 { CPUS.div_ceil(64) } else { 1 };

    fn word(&self, cpu: usize) -> Result<&AtomicU64, NoSuchCpu> {
        self.cpus.get(cpu).map(|word| &word.0).ok_or(NoSuchCpu { cpu, cpus: CPUS })
    }

    /// Enters the guest: called on the CPU number `cpu`, before it loads the guest's root and runs
    /// it. Calls `flush`, which invalidates all of the guest on this CPU, if the CPU may hold stale
    /// entries. Returns whether it did.
    ///
    /// The caller keeps interrupts off from this call until the guest runs. An interrupt that is
    /// pending then makes the guest exit at once.
    ///
    /// # Errors
    /// [`NoSuchCpu`]; nothing is done, and the guest must not run.
    #[inline]
    pub fn enter(&self, cpu: usize, flush: impl FnOnce()) -> Result<bool, NoSuchCpu> {
        let word = self.word(cpu)?;
        self.make_known(cpu);
        let forgotten = word.load(Ordering::Relaxed) >> SHIFT;
        word.store(forgotten << SHIFT | INSIDE, Ordering::Relaxed);
        agreed();
        Ok(self.catch_up(word, forgotten, flush))
    }

    /// Does what [`GuestCpus::enter`] does for the CPU number `cpu` that is inside, was interrupted
    /// out of the guest, and goes on without leaving. It is called on that CPU. For a CPU that is
    /// outside it does nothing.
    ///
    /// # Errors
    /// [`NoSuchCpu`]; nothing is done.
    #[inline]
    pub fn serve(&self, cpu: usize, flush: impl FnOnce()) -> Result<bool, NoSuchCpu> {
        let word = self.word(cpu)?;
        let now = word.load(Ordering::Relaxed);
        Ok(now & INSIDE != 0 && self.catch_up(word, now >> SHIFT, flush))
    }

    /// Leaves the guest: called on the CPU number `cpu` after it has left, and no longer walks the
    /// guest's tables speculatively (RISC-V, Power: hgatp or LPIDR have another guest's value; an
    /// x86 CPU does not walk them outside the guest). The CPU keeps its TLB entries. It is not
    /// interrupted for them; it invalidates when it next enters, if it has to.
    ///
    /// # Errors
    /// [`NoSuchCpu`]; nothing is done.
    #[inline]
    pub fn leave(&self, cpu: usize) -> Result<(), NoSuchCpu> {
        let word = self.word(cpu)?;
        word.store(word.load(Ordering::Relaxed) & !INSIDE, Ordering::Release);
        Ok(())
    }

    /// Makes every CPU invalidate all of the guest, and returns once none can use its old entries.
    /// It passes CPUs that are inside now to `interrupt`, which makes them
    /// [serve](GuestCpus::serve) or [leave](GuestCpus::leave), and calls `wait` until they have.
    /// Other CPUs invalidate when they next enter.
    ///
    /// `interrupt` orders the caller's stores before the interrupt. The calling CPU must be
    /// outside, or its `interrupt` must serve at once when it gets its own number. Two CPUs that
    /// invalidate while both are inside with interrupts off would wait for each other, so a CPU
    /// that invalidates should be outside.
    pub fn invalidate(&self, interrupt: impl FnMut(usize), mut wait: impl FnMut()) {
        let announced = self.announce();
        announced.cpus().for_each(interrupt);
        while !announced.is_done() {
            wait();
        }
    }

    /// Begins [`GuestCpus::invalidate`], and returns the CPUs to interrupt and to wait for. CPUs
    /// that enter from now on invalidate first.
    pub fn announce(&self) -> RemoteFlush<'_, CPUS> {
        let generation = self.generation.0.fetch_add(1, Ordering::AcqRel) + 1;
        agreed();
        RemoteFlush { guest_cpus: self, generation }
    }

    /// Returns whether the CPU number `cpu` has to invalidate before it next enters.
    ///
    /// # Errors
    /// [`NoSuchCpu`].
    pub fn is_stale(&self, cpu: usize) -> Result<bool, NoSuchCpu> {
        let forgotten = self.word(cpu)?.load(Ordering::Acquire) >> SHIFT;
        Ok(forgotten != self.generation.0.load(Ordering::Acquire))
    }

    #[inline]
    fn make_known(&self, cpu: usize) {
        let group = 1 << (cpu / Self::GROUP);
        if self.groups.0.load(Ordering::Relaxed) & group == 0 {
            self.groups.0.fetch_or(group, Ordering::Relaxed);
        }
    }

    /// Invalidates if the generation differs from `forgotten`, and writes the word only afterwards.
    #[inline]
    fn catch_up(&self, word: &AtomicU64, forgotten: u64, flush: impl FnOnce()) -> bool {
        let generation = self.generation.0.load(Ordering::Acquire);
        if generation == forgotten {
            return false;
        }
        flush();
        word.store(generation << SHIFT | INSIDE, Ordering::Release);
        true
    }

    /// [`GuestCpus::enter`], and [`GuestCpus::serve`] of a CPU that is inside, with a step left out
    /// or moved. The models have to fail with it.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn enter_broken(&self, cpu: usize, broken: Broken, flush: impl FnOnce()) {
        let word = &self.cpus[cpu].0;
        let forgotten = word.load(Ordering::Relaxed) >> SHIFT;
        let say = |forgotten: u64| word.store(forgotten << SHIFT | INSIDE, Ordering::Release);
        let read = || self.generation.0.load(Ordering::Acquire);
        self.make_known(cpu);
        let before = matches!(broken, Broken::ReadsFirst).then(read);
        say(forgotten);
        if !matches!(broken, Broken::NoFence) {
            agreed();
        }
        let generation = before.unwrap_or_else(read);
        if generation == forgotten {
            return;
        }
        if matches!(broken, Broken::SaysSoFirst) {
            say(generation);
        }
        flush();
        say(if matches!(broken, Broken::ReadsAgain) { read() } else { generation });
    }

    /// [`GuestCpus::announce`] without its fence: for the models.
    #[cfg(loom)]
    #[doc(hidden)]
    pub fn announce_broken(&self) -> RemoteFlush<'_, CPUS> {
        let generation = self.generation.0.fetch_add(1, Ordering::AcqRel) + 1;
        RemoteFlush { guest_cpus: self, generation }
    }
}

/// The way in which [`GuestCpus::enter_broken`] is wrong.
#[cfg(loom)]
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Broken {
    /// Step 3 comes before step 1.
    ReadsFirst,
    /// Step 2 is left out.
    NoFence,
    /// Step 4 writes the word before it invalidates.
    SaysSoFirst,
    /// Step 4 writes the generation that it reads again after the invalidation.
    ReadsAgain,
}

/// An invalidation that has begun ([`GuestCpus::announce`]).
#[derive(Debug)]
#[must_use = "CPUs inside use what they hold until they are interrupted and waited for"]
pub struct RemoteFlush<'r, const CPUS: usize> {
    guest_cpus: &'r GuestCpus<CPUS>,
    generation: u64,
}

impl<const CPUS: usize> RemoteFlush<'_, CPUS> {
    /// Returns the CPUs that are inside and have not invalidated yet, which are to be interrupted.
    pub fn cpus(&self) -> impl Iterator<Item = usize> {
        let Self { guest_cpus, generation } = *self;
        let groups = guest_cpus.groups.0.load(Ordering::Relaxed);
        guest_cpus.cpus.iter().enumerate().filter_map(move |(cpu, word)| {
            if groups >> (cpu / GuestCpus::<CPUS>::GROUP) & 1 == 0 {
                return None;
            }
            let now = word.0.load(Ordering::Acquire);
            (now & INSIDE != 0 && now >> SHIFT < generation).then_some(cpu)
        })
    }

    /// Returns whether no CPU can use any more an entry that it held when the invalidation began.
    pub fn is_done(&self) -> bool {
        self.cpus().next().is_none()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Returns whether CPU `cpu` invalidates as it enters, and as it serves.
    fn enters<const CPUS: usize>(guest_cpus: &GuestCpus<CPUS>, cpu: usize) -> bool {
        let mut flushed = false;
        let said = guest_cpus.enter(cpu, || flushed = true).unwrap();
        assert_eq!(said, flushed);
        said
    }

    #[test]
    fn a_cpu_invalidates_as_it_first_enters_and_then_only_what_came_since() {
        let guest_cpus = GuestCpus::<4>::new();
        assert!(enters(&guest_cpus, 2));
        guest_cpus.leave(2).unwrap();
        assert!(!enters(&guest_cpus, 2));
        guest_cpus.leave(2).unwrap();
        guest_cpus.invalidate(|cpu| panic!("{cpu} is outside"), || panic!("nobody is waited for"));
        guest_cpus.invalidate(|cpu| panic!("{cpu} is outside"), || panic!("nobody is waited for"));
        assert_eq!(guest_cpus.is_stale(2), Ok(true));
        assert!(enters(&guest_cpus, 2), "it was noted, twice");
        assert_eq!(guest_cpus.is_stale(2), Ok(false));
    }

    #[test]
    fn only_cpus_that_are_inside_are_interrupted_and_waited_for() {
        for outside in 0..3 {
            let guest_cpus = GuestCpus::<3>::new();
            (0..3).for_each(|cpu| assert!(enters(&guest_cpus, cpu)));
            guest_cpus.leave(outside).unwrap();
            let mut interrupted = Vec::new();
            let mut left = 0;
            guest_cpus.invalidate(
                |cpu| interrupted.push(cpu),
                || {
                    // One after the other: the first serves, the second leaves.
                    let cpu = (0..3).filter(|&cpu| cpu != outside).nth(left).unwrap();
                    match left {
                        0 => assert_eq!(guest_cpus.serve(cpu, || ()), Ok(true)),
                        _ => guest_cpus.leave(cpu).unwrap(),
                    }
                    left += 1;
                },
            );
            assert_eq!((interrupted.len(), left), (2, 2));
            assert!(!interrupted.contains(&outside));
            assert_eq!(guest_cpus.serve(outside, || panic!("it is outside")), Ok(false));
        }
    }

    #[test]
    fn an_invalidation_in_steps_reports_the_cpus_that_it_waits_for() {
        let guest_cpus = GuestCpus::<2>::new();
        enters(&guest_cpus, 1);
        let announced = guest_cpus.announce();
        assert_eq!(announced.cpus().collect::<Vec<_>>(), [1]);
        guest_cpus.serve(1, || ()).unwrap();
        assert!(announced.is_done());
        let (one, two) = (guest_cpus.announce(), guest_cpus.announce());
        assert!(!one.is_done() && !two.is_done());
        assert_eq!(guest_cpus.serve(1, || ()), Ok(true), "one invalidation serves both");
        assert!(one.is_done() && two.is_done());
        assert_eq!(guest_cpus.serve(1, || ()), Ok(false));
    }

    #[test]
    fn more_than_64_cpus_are_known_in_groups() {
        let guest_cpus = GuestCpus::<200>::new();
        for cpu in [0, 3, 4, 199] {
            enters(&guest_cpus, cpu);
        }
        assert_eq!(guest_cpus.groups.0.load(Ordering::Relaxed), 1 | 1 << 1 | 1 << 49);
        assert_eq!(guest_cpus.announce().cpus().collect::<Vec<_>>(), [0, 3, 4, 199]);
        let none = NoSuchCpu { cpu: 200, cpus: 200 };
        assert_eq!((guest_cpus.enter(200, || ()), guest_cpus.leave(200)), (Err(none), Err(none)));
        assert_eq!(
            (guest_cpus.serve(200, || ()), guest_cpus.is_stale(200)),
            (Err(none), Err(none))
        );
    }

    #[test]
    fn threads_that_run_a_guest_never_use_what_was_invalidated() {
        use core::sync::atomic::{AtomicBool, AtomicU64};
        const MANY: [u64; 2] = if cfg!(miri) { [8, 4] } else { [2_000, 100] };
        static RAN: GuestCpus<4> = GuestCpus::new();
        static TABLE: AtomicU64 = AtomicU64::new(0);
        static INVALID: AtomicU64 = AtomicU64::new(0);
        static STOP: AtomicBool = AtomicBool::new(false);
        static INTERRUPTS: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];
        std::thread::scope(|scope| {
            for (cpu, interrupt) in INTERRUPTS.iter().enumerate() {
                scope.spawn(move || {
                    let mut tlb = 0;
                    while !STOP.load(Ordering::Relaxed) {
                        RAN.enter(cpu, || tlb = TABLE.load(Ordering::Relaxed)).unwrap();
                        for _ in 0..MANY[1] {
                            let invalid = INVALID.load(Ordering::Acquire);
                            assert!(tlb >= invalid, "{tlb} is used after {invalid} was invalid");
                            if interrupt.swap(false, Ordering::Acquire) {
                                RAN.serve(cpu, || tlb = TABLE.load(Ordering::Relaxed)).unwrap();
                            }
                        }
                        RAN.leave(cpu).unwrap();
                    }
                });
            }
            for now in 1..MANY[0] {
                TABLE.store(now, Ordering::Relaxed);
                RAN.invalidate(
                    |cpu| INTERRUPTS[cpu].store(true, Ordering::Release),
                    std::thread::yield_now,
                );
                INVALID.store(now, Ordering::Release);
            }
            STOP.store(true, Ordering::Relaxed);
        });
    }
}
