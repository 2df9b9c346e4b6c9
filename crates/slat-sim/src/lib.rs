//! The adversarial machine: vCPUs that walk the engine's tables as their architecture says, and are
//! as lazy as it lets them be; a host whose memory is behind them; a log of every rule that was
//! broken.
//!
//! A [`Machine`] is the [`slat::Platform`] of the engine under test. It works on one thread, where
//! a test says what happens when ([`Machine::meanwhile`] runs at each of the engine's calls), and
//! on many, where vCPUs run beside threads of the hypervisor. Nothing in it panics in the engine's
//! calls: what is wrong is a [`Violation`].
//!
//! The architectures, [`Arm`], [`Ept`], [`Npt`], [`Power`] and [`RiscV`], are written from their
//! manuals, and share nothing with the engine's formats. AMD is as lazy as Intel; its invalidation
//! is a flush of an ASID. Power is as lazy as Arm, but looks at an entry again before it faults;
//! its invalidations are `tlbie`, and a `ptesync` behind `eieio` and `tlbsync` waits for them.
//!
//! Beside it, [`fast`] is a machine for benchmarks and stress: its vCPUs are threads that access
//! real memory through the tables.
//!
//! # What may be lazy, and the switch that models it
//!
//! | laziness | Arm | Intel, AMD | RISC-V | switch |
//! |---|---|---|---|---|
//! | a TLB keeps a translation of the second stage until an invalidation names it | yes (D8.16) | yes (30.4) | yes | [`Lazy::tlb`] |
//! | it keeps translations of both stages, which an invalidation by IPA leaves | until VMALLE1 | INVEPT takes them | HFENCE.GVMA takes them | [`Lazy::combined`] |
//! | a walk cache keeps links to tables, which an invalidation of last levels leaves | yes | yes, with the rights gathered on the way | until HFENCE.GVMA without an address | [`Lazy::walk_cache`] |
//! | a walker reads what a slot held at the barrier before | until DSB | no (TSO, coherent walkers) | until FENCE | [`Lazy::late_stores`] |
//! | an invalidation takes effect when a barrier waits for it; several, in any order | until DSB of the right domain | no (INVEPT is serializing) | no (of the hart's own) | [`Lazy::late_invalidation`] |
//! | a CPU walks where nobody asked | yes | yes | yes | [`Lazy::speculation`] |
//! | a translation cached as dirty lets writes through unmarked | yes | yes | yes | [`Lazy::silent_writes`] |
//! | a translation cached without a right, or without a mark that is software's to make, goes on faulting | rights | no: the violation drops it | yes | [`Lazy::stale_faults`] |
//! | a slot that was found invalid goes on faulting | no | no | without Svvptc | [`Lazy::invalid_entries`] |
//! | two sizes of one page raise an abort | FEAT_BBM level 2 | no | no | [`Lazy::conflict_aborts`] |
//! | the data cache holds lines of memory that is used past it | without FWB | no | by Svpbmt | [`Lazy::data_cache`] |
//! | instructions are fetched as they were before the host wrote | without DIC | no | until FENCE.I | [`Lazy::instruction_cache`] |
//!
//! With any one switched off some bug escapes; `tests/machine/laziness.rs` has one for each.
//!
//! TLBs forget nothing by themselves: a CPU that *may* have dropped an entry is no worse than one
//! that has it and does not use it. How a CPU chooses among what it may use is [`Choice`].
//!
//! # What is checked
//!
//! At every walk, fill and access: [`Kind`] says which rule was broken. And when the host says
//! something, that it is so: memory is nobody's any more ([`Machine::take_back`]), pages are
//! protected ([`Machine::protect`]), what was written is known ([`Machine::claim_clean`]), what was
//! used is known ([`Machine::claim_old`]), nothing stale is left ([`Machine::claim_fresh`]), a
//! right has arrived ([`Machine::claim_progress`]), memory is private or shared
//! ([`Machine::claim_kind`]), a device's tables follow a guest's ([`Machine::claim_followed`]; and no host reaches what is assigned to a guest). Each is held against all that a CPU *could* do
//! from then on, by what it holds and by walks that begin in it; not only against what it happens
//! to do.
//!
//! # What is not modelled
//!
//! - Whose barrier it is: a barrier publishes the stores of all threads. A DSB for this CPU alone
//!   publishes to all; the invalidations that it waits for complete here alone.
//! - Stores to a table before its first link. The engine links by a release, which orders them for
//!   walkers too; a link by a plain store would not, and is not told apart. Nor is activation: CPUs
//!   see all of the tables that they load.
//! - The guest's first stage, beyond an identity that makes entries of both stages; ASIDs, the
//!   guest's own invalidations, nested guests, CnP, system MMUs.
//! - nT, FEAT_HAFT, hardware's own page-based attributes; on Intel,
//!   memory types, five levels, sub-page permissions, VPIDs.
//! - Data at byte granularity: a page has a version, and caches hold whole pages.
//! - Slots that are cached as invalid where nobody faulted; of RISC-V, Svnapot and Svinval, whose
//!   fences are parts of HFENCE.GVMA, and the hypervisor's own MXR.
//! - Power's nest MMUs, and entries by process.
//!
//! # Example
//!
//! ```
//! use slat::{Attributes, Gpa, GpaRange, Hpa, Member, PageSize, Removals, TableCache, Tables, Vmid};
//! use slat_sim::{Arm, Machine};
//!
//! let machine = Machine::new(Arm::new(12, 39), 2);
//! machine.give(Hpa(0x4000_0000), 0x1000);
//! let tables = Tables::new(slat::format::arm64::Arm64K4::default(), Vmid(1), 39, &machine)?;
//! (0..2).for_each(|cpu| machine.cpu(cpu).load(Vmid(1), tables.root()));
//!
//! let mut storage = [const { None }; 4];
//! let mut cache = TableCache::new(&machine, &mut storage);
//! cache.fill(4)?;
//! let mut member = Member::join(&machine)?;
//! let mut guard = tables.enter(&mut member)?;
//! let page = GpaRange::new(Gpa(0x8000_0000), 0x1000)?;
//! guard.map(page, Hpa(0x4000_0000), Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
//! assert_eq!(machine.cpu(1).write(0x8000_0123), Ok(Hpa(0x4000_0123)));
//!
//! let mut storage = [slat::Place::EMPTY; 4];
//! let mut removals = Removals::new(&tables, &mut storage);
//! guard.unmap(page, &mut removals)?;
//! for leaf in removals.complete() {
//!     machine.take_back(leaf.hpa, leaf.bytes);
//! }
//! assert!(machine.finish().is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
pub mod arch;
mod claims;
mod device;
#[cfg(target_os = "linux")]
pub mod fast;
pub mod firmware;
mod host;
mod instruction;
mod lazy;
mod machine;
mod marked;
mod memory;
mod owned;
mod platform;
#[cfg(feature = "trace")]
mod record;
mod state;
mod tlb;
#[cfg(feature = "trace")]
mod trace;
mod uses;
mod violation;

pub use arch::{Access, Arch, Arm, Ept, Fault, Npt, Power, RiscV};
pub use firmware::Firmware;
pub use instruction::{Barrier, Tlbi};
pub use lazy::{Choice, Lazy};
pub use machine::{Machine, Moment, Place, Vcpu};
pub use owned::PrivateCall;
pub use tlb::Scope;
#[cfg(feature = "trace")]
pub use trace::Untold;
pub use uses::CONSUMERS;
pub use violation::{Kind, Violation};
