//! The log of hardware that marks leaves as dirty, as a hypervisor reads it.

use crate::arch::Arch;
use crate::machine::Vcpu;
use crate::marked::MarkedEntries;

impl<A: Arch> Vcpu<'_, A> {
    /// Makes the CPU log what it marks into a buffer of `room` entries.
    pub fn log_marks(&self, room: usize) {
        let marked = Some(MarkedEntries { entries: Vec::new(), room });
        self.machine.state().cpus[self.index].marked = marked;
    }

    fn take_marks(&self) -> Vec<(u64, i8)> {
        let mut state = self.machine.state();
        let marked = state.cpus[self.index].marked.as_mut();
        marked.map(|marked| std::mem::take(&mut marked.entries)).unwrap_or_default()
    }

    /// Returns the page modification log and its index at an exit, and sets the index anew.
    pub fn take_pml(&self) -> ([u64; 512], u16) {
        // The other entries hold old values, which software must not read.
        let mut log = [0xdead_b000; 512];
        let marks = self.take_marks();
        for (entry, (gpa, _)) in log.iter_mut().rev().zip(&marks) {
            *entry = *gpa;
        }
        (log, 511u16.wrapping_sub(marks.len() as u16))
    }

    /// Returns the dirty state buffer and HDBSSPROD_EL2.INDEX, and sets the index to 0.
    pub fn take_hdbss(&self) -> (Vec<u64>, usize) {
        let marks = self.take_marks();
        let entry = |&(gpa, level): &(u64, i8)| gpa | (level as u64 & 0b111) << 1 | 1;
        let mut buffer: Vec<_> = marks.iter().map(entry).collect();
        // An old entry behind the index, which software must not read.
        buffer.push(0xdead_b000 | 3 << 1 | 1);
        (buffer, marks.len())
    }
}
