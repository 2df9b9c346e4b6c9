//! The adversarial machine: vCPUs that walk the engine's tables as their architecture says, and are
//! as lazy as it allows; a host that owns the memory; and a log of every rule that was broken.
//!
//! A [`Machine`] is the [`slat::Platform`] of the engine under test. On one thread, a test decides
//! what happens when: [`Machine::meanwhile`] runs its hook at each of the engine's calls. On
//! several threads, vCPUs run while threads of the hypervisor change the tables. The engine's calls
//! do not panic: the machine reports each broken rule as a [`Violation`].
//!
//! The architectures, [`Arm`], [`Ept`], [`Npt`], [`Power`] and [`RiscV`], are written from their
//! manuals, and share no code with the engine's formats. AMD is as lazy as Intel; its invalidation
//! is a flush of an ASID. Power is as lazy as Arm, but reads an entry again before it faults. Its
//! invalidations are `tlbie`; a `ptesync` after `eieio` and `tlbsync` waits for them.
//!
//! The module [`fast`] has a machine for benchmarks and stress tests: its vCPUs are threads that
//! access real memory through the tables.
//!
//! # Laziness, and the switches for it
//!
//! [`Lazy`] has a switch for each kind of laziness. This table says on which architectures it
//! applies:
//!
//! | switch | Arm | Intel, AMD | RISC-V |
//! |---|---|---|---|
//! | [`Lazy::tlb`] | yes (D8.16) | yes (30.4) | yes |
//! | [`Lazy::combined`] | until VMALLE1 | INVEPT takes them | HFENCE.GVMA takes them |
//! | [`Lazy::walk_cache`] | yes | yes, with rights | until HFENCE.GVMA without an address |
//! | [`Lazy::late_stores`] | until DSB | no (TSO, coherent walkers) | until FENCE |
//! | [`Lazy::late_invalidation`] | until DSB of the right domain | no (INVEPT serializes) | no |
//! | [`Lazy::speculation`] | yes | yes | yes |
//! | [`Lazy::silent_writes`] | yes | yes | yes |
//! | [`Lazy::stale_faults`] | rights | no: a violation drops it | rights; marks without Svadu |
//! | [`Lazy::invalid_entries`] | no | no | without Svvptc |
//! | [`Lazy::conflict_aborts`] | FEAT_BBM level 2 | no | no |
//! | [`Lazy::data_cache`] | without FWB | no | memory types of Svpbmt |
//! | [`Lazy::instruction_cache`] | without DIC | no | until FENCE.I |
//!
//! Without any one of them, the machine misses some bug: `tests/machine/laziness.rs` has one for
//! each.
//!
//! TLBs drop nothing by themselves: a CPU that *may* have dropped an entry is no worse than one
//! that has it and does not use it. [`Choice`] says how a CPU chooses among the entries that it may
//! use.
//!
//! # What is checked
//!
//! The machine checks every walk, TLB fill and access; [`Kind`] lists the rules. It also checks the
//! claims of the host:
//!
//! - memory that was taken back is not reached ([`Machine::take_back`]);
//! - pages are protected from writes ([`Machine::protect`]);
//! - software knows of all writes ([`Machine::claim_clean`]) and uses ([`Machine::claim_old`]);
//! - no CPU caches anything stale ([`Machine::claim_fresh`]);
//! - a CPU sees a new right ([`Machine::claim_progress`]);
//! - memory is private or shared ([`Machine::claim_kind`]), and the host does not reach private
//!   memory;
//! - a device's tables follow a guest's ([`Machine::claim_followed`]).
//!
//! A claim is checked against all that a CPU *could* do from then on, by what it has cached and by
//! walks that begin there, and not only against what it happens to do.
//!
//! # What is not modelled
//!
//! - The issuer of a barrier: a barrier publishes the stores of all threads. A DSB for this CPU
//!   alone publishes them to all CPUs; the invalidations that it waits for complete on this CPU
//!   alone.
//! - Stores to a table before its first link. The engine links by a release, which orders them for
//!   walkers too. The machine does not find a link by a plain store. CPUs see all of the tables
//!   that they load.
//! - The guest's first stage, beyond an identity that makes entries of both stages; ASIDs, the
//!   guest's own invalidations, nested guests, CnP, system MMUs.
//! - nT, FEAT_HAFT, hardware's own page-based attributes; on Intel, memory types, five levels,
//!   sub-page permissions, VPIDs.
//! - Data at byte granularity: a page has a version, and caches hold whole pages.
//! - Entries that are cached as invalid without a fault; of RISC-V, Svnapot and Svinval, whose
//!   fences are parts of HFENCE.GVMA, and the hypervisor's own MXR.
//! - Power's nest MMUs, and entries by process.
//!
//! # Example
//!
//! ```
//! use slat::{Attributes, Gpa, GpaRange, Hpa, PageSize, Reader};
//! use slat::{UnmapBatch, TableCache, Tables, Vmid};
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
//! let mut reader = Reader::register(&machine)?;
//! let mut guard = tables.enter(&mut reader)?;
//! let page = GpaRange::new(Gpa(0x8000_0000), 0x1000)?;
//! guard.map(page, Hpa(0x4000_0000), Attributes::RAM, PageSize::SIZE_4K, &mut cache)?;
//! assert_eq!(machine.cpu(1).write(0x8000_0123), Ok(Hpa(0x4000_0123)));
//!
//! let mut storage = [slat::UnmapEntry::EMPTY; 4];
//! let mut batch = UnmapBatch::new(&tables, &mut storage);
//! guard.unmap(page, &mut batch)?;
//! for leaf in batch.complete() {
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
mod forward;
mod host;
mod instruction;
mod late_stores;
mod lazy;
mod machine;
mod marked;
mod memory;
mod owned;
mod platform;
mod pml;
mod private;
mod state;
mod tlb;
mod uses;
mod violation;

pub use arch::{Access, Arch, Arm, Ept, Fault, Npt, Power, RiscV};
pub use instruction::{Barrier, Tlbi};
pub use lazy::{Choice, Lazy};
pub use machine::{Firmware, HasFirmware, Machine, Moment, Place, Vcpu};
pub use owned::PrivateCall;
pub use tlb::Scope;
pub use violation::{Kind, Violation};
