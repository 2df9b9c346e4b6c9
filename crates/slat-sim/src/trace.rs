//! What the engine did, as a trace for [Casemate], an executable model of the discipline that Arm
//! demands of page tables.
//!
//! The grammar is that of Casemate's `doc/asciidoc/sections/trace-format.adoc` and of its parser,
//! which wants every record to end with a source location: one record a line, `(mem-write (id 0)
//! (tid 0) (mem-order release) (address 0x..) (value 0x..) (src "slat:0"))`, in that order of
//! fields.
//!
//! What Casemate has no word for is written so:
//! - It knows writes by one thread under a lock of the tables. The engine has neither; each of its
//!   writes is put under the lock of its root. Writes are seen at the barrier after them: between
//!   two barriers, those to tables come before those to the links to them.
//! - `ripas2e1is` becomes as many `ipas2e1is`, last-level forms become `ipas2e1is`. They invalidate
//!   no less: whether the engine's own are enough is checked here, not there.
//! - Invalidations of one CPU by address are left out: there is no word for them.
//! - What hardware writes (accessed, dirty) is in the next barrier's writes.
//! - A table that is freed is released from its root (`hint`, `release_table`), and then freed
//!   (`mem-free`, which the parser knows and the manual does not).
//!
//! Traces were held against the grammar, in `tests/machine/trace.rs`; not yet against a build of
//! Casemate itself.
//!
//! [Casemate]: https://github.com/rems-project/casemate

use crate::arch::Arch;
use crate::instruction::{Barrier, Tlbi};
use crate::memory::Table;
use crate::state::State;
use slat::Vmid;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::thread::ThreadId;

/// Something that Casemate wants to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Allocate { table: u64, bytes: usize },
    Free { table: u64, bytes: usize },
    Load { vmid: Vmid, root: u64 },
    Write { root: u64, address: u64, value: u64 },
    Tlbi(Tlbi, u64),
    Dsb(Barrier),
    Isb,
}

#[derive(Default, Debug)]
pub(crate) struct Recorder {
    events: Vec<(usize, Event)>,
    threads: HashMap<ThreadId, usize>,
    written: HashMap<u64, Vec<u64>>,
}

impl Recorder {
    pub fn push(&mut self, event: Event) {
        let next = self.threads.len();
        let thread = *self.threads.entry(std::thread::current().id()).or_insert(next);
        self.events.push((thread, event));
    }

    /// What changed in a table since it was last looked at.
    pub fn table(&mut self, root: u64, hpa: u64, table: &Table) {
        let now: Vec<_> = (0..table.len()).map(|index| table.cell(index).load()).collect();
        let old = self.written.insert(hpa, now.clone()).unwrap_or_else(|| vec![0; now.len()]);
        for (address, (value, old)) in (hpa..).step_by(8).zip(now.into_iter().zip(old)) {
            if value != old {
                self.push(Event::Write { root, address, value });
            }
        }
    }
}

struct Writer {
    text: String,
    id: usize,
}

impl Writer {
    fn record(&mut self, thread: usize, name: &str, fields: &str) {
        let Self { text, id } = self;
        let blank = if fields.is_empty() { "" } else { " " };
        let written =
            writeln!(text, "({name} (id {id}) (tid {thread}){blank}{fields} (src \"slat:0\"))");
        written.expect("a string takes everything");
        self.id += 1;
    }
}

/// The trace; empty if nothing was recorded.
pub(crate) fn export<A: Arch>(state: &State<A>) -> String {
    let mut out = Writer { text: String::new(), id: 0 };
    let Some(recorder) = &state.recorder else { return out.text };
    let page = 1u64 << state.arch.shift(3).min(16);
    // Locks stand at addresses of their own, above all tables.
    let lock = |root: u64| root | 1 << 46;
    let (mut rooted, mut owned) = (HashSet::new(), HashSet::new());
    let roots: HashSet<_> = recorder
        .events
        .iter()
        .filter_map(|(_, event)| match event {
            Event::Load { root, .. } => Some(*root),
            _ => None,
        })
        .collect();
    let frames: Vec<_> = recorder
        .events
        .iter()
        .filter_map(|(_, event)| match *event {
            Event::Allocate { table, bytes } => Some((table, table + bytes as u64)),
            _ => None,
        })
        .collect();
    for &(thread, event) in &recorder.events {
        match event {
            Event::Allocate { table, bytes } => {
                let fields = format!("(address {table:#x}) (size {bytes:#x})");
                out.record(thread, "mem-init", &fields);
            }
            Event::Free { table, bytes } => {
                if owned.remove(&table) {
                    let fields = format!("(kind release_table) (location {table:#x}) (value 0x0)");
                    out.record(thread, "hint", &fields);
                }
                let fields = format!("(address {table:#x}) (size {bytes:#x})");
                out.record(thread, "mem-free", &fields);
            }
            Event::Load { vmid, root } => {
                hint_root(&mut out, &mut rooted, thread, root, lock(root));
                let value = u64::from(vmid.0) << 48 | root;
                let fields = format!("(sysreg vttbr_el2) (value {value:#x})");
                out.record(thread, "sysreg-write", &fields);
            }
            Event::Write { root, address, value } => {
                hint_root(&mut out, &mut rooted, thread, root, lock(root));
                let frame = frames.iter().find(|frame| (frame.0..frame.1).contains(&address));
                let table = frame.map_or(address, |frame| frame.0);
                if !roots.contains(&table) && owned.insert(table) {
                    let fields =
                        format!("(kind set_owner_root) (location {table:#x}) (value {root:#x})");
                    out.record(thread, "hint", &fields);
                }
                out.record(thread, "lock", &format!("(address {:#x})", lock(root)));
                let fields =
                    format!("(mem-order release) (address {address:#x}) (value {value:#x})");
                out.record(thread, "mem-write", &fields);
                out.record(thread, "unlock", &format!("(address {:#x})", lock(root)));
            }
            Event::Tlbi(op, operand) => tlbi(&mut out, thread, op, operand, page),
            Event::Dsb(barrier) => {
                let kind = format!("dsb (kind {})", format!("{barrier:?}").to_lowercase());
                out.record(thread, "barrier", &kind);
            }
            Event::Isb => out.record(thread, "barrier", "isb"),
        }
    }
    out.text
}

fn hint_root(out: &mut Writer, rooted: &mut HashSet<u64>, thread: usize, root: u64, lock: u64) {
    if rooted.insert(root) {
        let fields = format!("(kind set_root_lock) (location {root:#x}) (value {lock:#x})");
        out.record(thread, "hint", &fields);
    }
}

fn tlbi(out: &mut Writer, thread: usize, op: Tlbi, operand: u64, page: u64) {
    match op {
        Tlbi::Ipas2e1is | Tlbi::Ipas2le1is => {
            out.record(thread, "tlbi", &format!("ipas2e1is (value {operand:#x})"));
        }
        Tlbi::Vae2is => out.record(thread, "tlbi", &format!("vae2is (value {operand:#x})")),
        Tlbi::Ripas2e1is | Tlbi::Ripas2le1is => {
            let base = (operand & ((1 << 37) - 1)) * page;
            let (scale, num) = (operand >> 44 & 0b11, operand >> 39 & 0b1_1111);
            for index in 0..(num + 1) << (5 * scale + 1) {
                let value = (base + index * page) >> 12;
                out.record(thread, "tlbi", &format!("ipas2e1is (value {value:#x})"));
            }
        }
        // Not known there: what it leaves on other CPUs is found here.
        Tlbi::Ipas2e1 | Tlbi::Ipas2le1 | Tlbi::Ripas2e1 | Tlbi::Ripas2le1 => {}
        Tlbi::Vmalle1 | Tlbi::Vmalle1is | Tlbi::Vmalls12e1 | Tlbi::Vmalls12e1is | Tlbi::Alle1is => {
            out.record(thread, "tlbi", &op.to_string());
        }
    }
}
