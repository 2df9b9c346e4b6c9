//! Writes the engine's stores and invalidations as a trace for [Casemate], an executable model of
//! the rules that Arm has for changing page tables.
//!
//! The grammar is that of Casemate 3.0.2's parser, which requires a source location at the end of
//! every record: one record a line, `(mem-write (id 0) (tid 0) (mem-order release) (address 0x..)
//! (value 0x..) (src "slat:0"))`, in that order of fields. `casemate-check -R` reads it.
//!
//! - There are no locks: the engine has none, and `-R` asks for none.
//! - A thread is one of Casemate's CPUs. Its `vttbr_el2` is the guest that [`Machine::vttbr`] set
//!   last. Before that, it is a root that no guest has, with a VMID that no invalidation of the
//!   engine names. Casemate does not know a guest that no CPU has loaded yet, nor invalidations for
//!   it.
//! - When a CPU of the machine loads a root, the thread writes that root to its `vttbr_el2`, and
//!   then its old value again. A root is released (`release_table`) before the first of the tables
//!   that are freed with it.
//! - `ripas2e1is` becomes one `ipas2e1is` for each page, and last-level forms become `ipas2e1is`.
//!   They invalidate no less. Whether the engine's own invalidations suffice is checked by
//!   [`Machine`].
//! - What hardware marks (accessed, dirty) is a store of the thread that runs the CPU.
//!
//! [Casemate]: https://github.com/rems-project/casemate

use crate::Machine;
use crate::arch::{Arch, Arm};
use crate::instruction::{Barrier, Tlbi};
use crate::record::{Event, Recorder};
use slat::Vmid;
use slat::observe::Order;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};

/// Number of Casemate's CPUs in its default build.
const THREADS: usize = 4;
/// Most pages of one range that are written out.
const PAGES: u64 = 1 << 18;

/// Reason why there is no trace: Casemate cannot express an event, or would interpret it
/// differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Untold {
    /// The machine does not record: it was made without [`Machine::tracing`].
    NotRecorded,
    /// The tables are not of 4K pages without FEAT_LPA2, or their root is not one page that begins
    /// at the level which its addresses need: 26 to 30, 35 to 39, or 44 to 48 bits.
    Tables {
        /// Base-2 logarithm of the granule.
        granule: u32,
        /// Bits of a guest physical address.
        address_bits: u32,
        /// Whether FEAT_LPA2 or FEAT_LPA is in use.
        lpa2: bool,
    },
    /// More threads than Casemate has CPUs, which are 4.
    Threads(usize),
    /// A barrier for this CPU alone.
    Barrier(Barrier),
    /// An invalidation for this CPU alone.
    Local(Tlbi),
    /// A range of more pages than a trace writes out.
    Range(u64),
}

impl fmt::Display for Untold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRecorded => write!(f, "the machine was not asked to record"),
            Self::Tables { granule, address_bits, lpa2 } => {
                let wide = if *lpa2 { " with FEAT_LPA or FEAT_LPA2" } else { "" };
                write!(f, "Casemate knows no tables of 2^{granule} byte granules")?;
                write!(f, "{wide} for {address_bits} bits of address")
            }
            Self::Threads(threads) => {
                write!(f, "{threads} threads, of which Casemate knows at most {THREADS}")
            }
            Self::Barrier(barrier) => {
                let kind = format!("{barrier:?}").to_lowercase();
                write!(f, "Casemate does not tell `dsb {kind}` from one for all CPUs")
            }
            Self::Local(op) => write!(f, "Casemate knows no `tlbi {op}`"),
            Self::Range(pages) => write!(f, "an invalidation of {pages} pages is too long a trace"),
        }
    }
}

impl std::error::Error for Untold {}

impl Machine<Arm> {
    /// Makes the machine record what the engine does, for [`Machine::trace`].
    #[must_use]
    pub fn tracing(self) -> Self {
        self.state().recorder = Some(Recorder::new());
        self
    }

    /// Returns what the engine did, in Casemate's format. See `docs/bugs.md` for what Casemate
    /// checks.
    ///
    /// # Errors
    /// The event, or the property of the tables, that Casemate cannot express.
    pub fn trace(&self) -> Result<String, Untold> {
        let state = self.state();
        let recorder = state.recorder.as_ref().ok_or(Untold::NotRecorded)?;
        export(&state.arch, &recorder.events())
    }
}

fn export(arch: &Arm, events: &[(usize, Event)]) -> Result<String, Untold> {
    tables(arch)?;
    let threads = events.iter().map(|&(thread, _)| thread + 1).max().unwrap_or(0);
    if threads > THREADS {
        return Err(Untold::Threads(threads));
    }
    let mut out = Writer::new(arch, events);
    let ends = ends(events);
    for (index, &(thread, event)) in events.iter().enumerate() {
        out.begin(thread);
        if let Some(&root) = ends.get(&index) {
            out.release(thread, root);
        }
        match event {
            Event::Allocate { table, bytes } => {
                out.record(thread, "mem-init", &format!("(address {table:#x}) (size {bytes:#x})"));
            }
            Event::Free { table, bytes } => {
                out.record(thread, "mem-free", &format!("(address {table:#x}) (size {bytes:#x})"));
            }
            Event::Load { cpu, vmid, root } => out.load(thread, cpu, vmid, root),
            Event::Unload { cpu } => _ = out.cpus.remove(&cpu),
            Event::Guest(vmid) => out.guest(thread, vmid),
            Event::Store { address, value, order } => {
                let order = match order {
                    Order::Plain => "plain",
                    Order::Release => "release",
                };
                let fields =
                    format!("(mem-order {order}) (address {address:#x}) (value {value:#x})");
                out.record(thread, "mem-write", &fields);
            }
            Event::Tlbi(op, operand) => out.tlbi(thread, op, operand)?,
            Event::Dsb(barrier) => {
                let kind = match barrier {
                    Barrier::Ish => "dsb (kind ish)",
                    Barrier::Ishst => "dsb (kind ishst)",
                    Barrier::Nsh | Barrier::Nshst => return Err(Untold::Barrier(barrier)),
                };
                out.record(thread, "barrier", kind);
            }
            Event::Isb => out.record(thread, "barrier", "isb"),
        }
    }
    Ok(out.text)
}

/// Refuses tables that Casemate walks differently: it derives the level of the root from the number
/// of bits, 9 a level.
fn tables(arch: &Arm) -> Result<(), Untold> {
    let &Arm { granule, address_bits, start_level, lpa2, lpa, .. } = arch;
    let known = granule == 12
        && !lpa2
        && !lpa
        && address_bits <= 48
        && start_level as u32 == (48 - address_bits) / 9
        && (17..=512).contains(&arch.entries(start_level));
    if known { Ok(()) } else { Err(Untold::Tables { granule, address_bits, lpa2: lpa2 || lpa }) }
}

/// Returns where a thread begins to free the tables under a root: the first of a thread's
/// consecutive frees, the last of which frees the root.
fn ends(events: &[(usize, Event)]) -> BTreeMap<usize, u64> {
    let roots: BTreeSet<_> = events
        .iter()
        .filter_map(|(_, event)| match event {
            Event::Load { root, .. } => Some(*root),
            _ => None,
        })
        .collect();
    let mut first = [None; THREADS];
    let mut ends = BTreeMap::new();
    for (index, (thread, event)) in events.iter().enumerate() {
        let first = &mut first[*thread];
        match event {
            Event::Free { table, .. } => {
                let begin = *first.get_or_insert(index);
                if roots.contains(table) {
                    ends.insert(begin, *table);
                    *first = None;
                }
            }
            _ => *first = None,
        }
    }
    ends
}

struct Writer<'a> {
    arch: &'a Arm,
    text: String,
    id: usize,
    /// A root that no guest has, with its VMID, in the format of VTTBR_EL2.
    nobody: u64,
    /// VTTBR_EL2 of each thread that has appeared.
    vttbr: BTreeMap<usize, u64>,
    /// The value of VTTBR_EL2 for each guest that was loaded and not freed.
    guests: BTreeMap<u16, u64>,
    /// The value of VTTBR_EL2 of each of the machine's CPUs.
    cpus: BTreeMap<usize, u64>,
}

const ROOT: u64 = (1 << 48) - 1;

impl<'a> Writer<'a> {
    fn new(arch: &'a Arm, events: &[(usize, Event)]) -> Self {
        let (mut used, mut frames) = (BTreeSet::new(), BTreeSet::new());
        for (_, event) in events {
            match *event {
                Event::Load { vmid, .. } | Event::Guest(vmid) => _ = used.insert(vmid.0),
                Event::Allocate { table, bytes } => {
                    frames.extend((table..table + bytes as u64).step_by(0x1000));
                }
                _ => {}
            }
        }
        // There are more pages than frames, and fewer guests in a test than VMIDs.
        let page = (1..).map(|page| page << 12).find(|page| !frames.contains(page));
        let vmid = (0..=u16::MAX).rev().find(|vmid| !used.contains(vmid));
        let nobody = u64::from(vmid.unwrap_or_default()) << 48 | page.unwrap_or_default();
        let (vttbr, guests, cpus) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { arch, text: String::new(), id: 0, nobody, vttbr, guests, cpus }
    }

    fn record(&mut self, thread: usize, name: &str, fields: &str) {
        let Self { text, id, .. } = self;
        let written = writeln!(text, "({name} (id {id}) (tid {thread}) {fields} (src \"slat:0\"))");
        written.expect("a string takes everything");
        self.id += 1;
    }

    fn register(&mut self, thread: usize, name: &str, value: u64) {
        self.record(thread, "sysreg-write", &format!("(sysreg {name}) (value {value:#x})"));
    }

    /// Writes what comes before the first event of a thread.
    fn begin(&mut self, thread: usize) {
        if self.vttbr.contains_key(&thread) {
            return;
        }
        let nobody = self.nobody;
        if self.vttbr.is_empty() {
            let table = nobody & ROOT;
            self.record(thread, "mem-init", &format!("(address {table:#x}) (size 0x1000)"));
        }
        // T0SZ, SL0, and bit 31, which is RES1.
        let level = 2 - self.arch.start_level as u64;
        let vtcr = u64::from(64 - self.arch.address_bits) | level << 6 | 1 << 31;
        self.register(thread, "vtcr_el2", vtcr);
        self.vttbr(thread, nobody);
    }

    fn vttbr(&mut self, thread: usize, value: u64) {
        self.register(thread, "vttbr_el2", value);
        self.vttbr.insert(thread, value);
    }

    fn load(&mut self, thread: usize, cpu: usize, vmid: Vmid, root: u64) {
        let loaded = u64::from(vmid.0) << 48 | root;
        self.guests.insert(vmid.0, loaded);
        self.cpus.insert(cpu, loaded);
        let own = self.vttbr[&thread];
        if own != loaded {
            self.vttbr(thread, loaded);
            self.vttbr(thread, own);
        }
    }

    fn guest(&mut self, thread: usize, vmid: Vmid) {
        let value = self.guests.get(&vmid.0).copied().unwrap_or(self.nobody);
        self.vttbr(thread, value);
    }

    /// Casemate releases a root only if no CPU has it in its register. A root that a CPU of the
    /// machine still has loaded is therefore written to the thread's register, so that Casemate
    /// reports it.
    fn release(&mut self, thread: usize, root: u64) {
        if let Some(&loaded) = self.cpus.values().find(|loaded| *loaded & ROOT == root) {
            self.vttbr(thread, loaded);
        } else {
            let all = self.vttbr.iter().filter(|(_, loaded)| *loaded & ROOT == root);
            let threads: Vec<_> = all.map(|(&thread, _)| thread).collect();
            threads.into_iter().for_each(|thread| self.vttbr(thread, self.nobody));
        }
        self.guests.retain(|_, loaded| *loaded & ROOT != root);
        let fields = format!("(kind release_table) (location {root:#x}) (value 0x0)");
        self.record(thread, "hint", &fields);
    }

    fn tlbi(&mut self, thread: usize, op: Tlbi, operand: u64) -> Result<(), Untold> {
        match op {
            Tlbi::Ipas2e1is | Tlbi::Ipas2le1is => {
                self.record(thread, "tlbi", &format!("ipas2e1is (value {operand:#x})"));
            }
            Tlbi::Vae2is => {
                self.record(thread, "tlbi", &format!("vae2is (value {operand:#x})"));
            }
            Tlbi::Ripas2e1is | Tlbi::Ripas2le1is => {
                let scope = self.arch.scope(op, operand, 0, Vmid::default());
                let (start, end) = scope.and_then(|scope| scope.range).unwrap_or_default();
                let pages = (end - start) >> 12;
                if pages > PAGES {
                    return Err(Untold::Range(pages));
                }
                for page in start >> 12..end >> 12 {
                    self.record(thread, "tlbi", &format!("ipas2e1is (value {page:#x})"));
                }
            }
            Tlbi::Vmalle1is | Tlbi::Vmalls12e1is | Tlbi::Alle1is => {
                self.record(thread, "tlbi", &op.to_string());
            }
            Tlbi::Ipas2e1
            | Tlbi::Ipas2le1
            | Tlbi::Ripas2e1
            | Tlbi::Ripas2le1
            | Tlbi::Vmalle1
            | Tlbi::Vmalls12e1 => return Err(Untold::Local(op)),
        }
        Ok(())
    }
}
