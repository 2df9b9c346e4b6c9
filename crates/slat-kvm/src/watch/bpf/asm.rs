//! An assembler for eBPF instructions (Documentation/bpf/standardization/instruction-set).
//!
//! It has only the instructions that the watch uses, each with operands that it can have. The
//! kernel's verifier refuses all other errors. It is little-endian, like the hosts whose exits the
//! watch distinguishes.

use std::collections::BTreeMap;

/// A register. R0 has a call's result, R1 to R5 its arguments, which the call clobbers. Calls
/// preserve the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reg {
    R0,
    R1,
    R2,
    R3,
    R4,
    R6 = 6,
    R7,
    R8,
    R9,
    /// The frame pointer. The stack grows down from it.
    Stack,
}

/// Size of a load or a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    B1 = 0x10,
    B2 = 0x08,
    B4 = 0x00,
    B8 = 0x18,
}

/// A 64-bit operation on a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Add = 0x00,
    Sub = 0x10,
    Mul = 0x20,
    Or = 0x40,
    And = 0x50,
    Shl = 0x60,
    Shr = 0x70,
    Mov = 0xb0,
}

/// The condition of a jump; comparisons are unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum If {
    Equal = 0x10,
    Above = 0x20,
    AtLeast = 0x30,
    Set = 0x40,
    NotEqual = 0x50,
}

/// Helper functions of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Helper {
    Lookup = 1,
    Update = 2,
    Nanoseconds = 5,
    /// Returns the process in the upper and the thread in the lower 32 bits.
    Thread = 14,
}

/// A target of jumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Label(usize);

/// Marks a 64-bit load as the load of a map, by its descriptor.
const MAP: u8 = 1;

/// A program under construction.
#[derive(Debug, Default)]
pub(crate) struct Program {
    words: Vec<u64>,
    labels: usize,
    places: BTreeMap<Label, usize>,
    jumps: Vec<(usize, Label)>,
}

impl Program {
    fn push(&mut self, code: u8, dst: u8, src: u8, off: i16, imm: i32) {
        let mut bytes = [code, src << 4 | dst, 0, 0, 0, 0, 0, 0];
        bytes[2..4].copy_from_slice(&off.to_le_bytes());
        bytes[4..].copy_from_slice(&imm.to_le_bytes());
        self.words.push(u64::from_le_bytes(bytes));
    }

    /// Creates a label, which has to be [placed](Self::here).
    pub fn label(&mut self) -> Label {
        self.labels += 1;
        Label(self.labels)
    }

    /// Places a label at the next instruction.
    pub fn here(&mut self, label: Label) {
        self.places.insert(label, self.words.len());
    }

    pub fn op(&mut self, op: Op, dst: Reg, imm: i32) {
        self.push(0x07 | op as u8, dst.number(), 0, 0, imm);
    }

    pub fn op_reg(&mut self, op: Op, dst: Reg, src: Reg) {
        self.push(0x0f | op as u8, dst.number(), src.number(), 0, 0);
    }

    pub fn load(&mut self, width: Width, dst: Reg, base: Reg, off: i16) {
        self.push(0x61 | width as u8, dst.number(), base.number(), off, 0);
    }

    pub fn store(&mut self, width: Width, base: Reg, off: i16, src: Reg) {
        self.push(0x63 | width as u8, base.number(), src.number(), off, 0);
    }

    pub fn store_imm(&mut self, width: Width, base: Reg, off: i16, imm: i32) {
        self.push(0x62 | width as u8, base.number(), 0, off, imm);
    }

    /// Adds to 64 bits of memory that other CPUs add to.
    pub fn add_atomically(&mut self, base: Reg, off: i16, src: Reg) {
        self.push(0xdb, base.number(), src.number(), off, 0);
    }

    /// Loads the map of a descriptor.
    pub fn map(&mut self, dst: Reg, fd: i32) {
        self.push(0x18, dst.number(), MAP, 0, fd);
        self.push(0, 0, 0, 0, 0);
    }

    pub fn jump(&mut self, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.push(0x05, 0, 0, 0, 0);
    }

    pub fn jump_if(&mut self, when: If, dst: Reg, imm: i32, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.push(0x05 | when as u8, dst.number(), 0, 0, imm);
    }

    pub fn jump_if_reg(&mut self, when: If, dst: Reg, src: Reg, to: Label) {
        self.jumps.push((self.words.len(), to));
        self.push(0x0d | when as u8, dst.number(), src.number(), 0, 0);
    }

    pub fn call(&mut self, helper: Helper) {
        self.push(0x85, 0, 0, 0, helper as i32);
    }

    /// Ends the program with result 1. After a 0 the kernel would hide the event from other readers
    /// of perf.
    pub fn end(&mut self) {
        self.op(Op::Mov, Reg::R0, 1);
        self.push(0x95, 0, 0, 0, 0);
    }

    /// Returns the instructions, eight bytes each.
    ///
    /// # Panics
    /// If a label that a jump uses has no place, or is too far away: a bug in this crate.
    pub fn assemble(mut self) -> Vec<u64> {
        for (at, label) in std::mem::take(&mut self.jumps) {
            let to = self.places.get(&label).expect("a label that is jumped to has a place");
            let off = *to as i64 - at as i64 - 1;
            let off = i16::try_from(off).expect("programs are shorter than a jump reaches");
            let mut bytes = self.words[at].to_le_bytes();
            bytes[2..4].copy_from_slice(&off.to_le_bytes());
            self.words[at] = u64::from_le_bytes(bytes);
        }
        self.words
    }
}

impl Reg {
    fn number(self) -> u8 {
        self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected bytes are those of LLVM's assembler.
    #[test]
    fn instructions_are_those_of_the_standard() {
        let mut program = Program::default();
        let out = program.label();
        program.op_reg(Op::Mov, Reg::R6, Reg::R1); // r6 = r1
        program.load(Width::B4, Reg::R7, Reg::R6, 8); // r7 = *(u32 *)(r6 + 8)
        program.jump_if(If::NotEqual, Reg::R7, 0x400, out); // if r7 != 1024 goto
        program.op(Op::Add, Reg::R7, -8); // r7 += -8
        program.store(Width::B8, Reg::Stack, -8, Reg::R7); // *(u64 *)(r10 - 8) = r7
        program.add_atomically(Reg::R6, 16, Reg::R7); // lock *(u64 *)(r6 + 16) += r7
        program.map(Reg::R1, 5);
        program.call(Helper::Lookup);
        program.here(out);
        program.end();
        let bytes: Vec<u8> =
            program.assemble().iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected = [
            "bf16000000000000", "6167080000000000", "5507060000040000", "07070000f8ffffff",
            "7b7af8ff00000000", "db76100000000000", "1811000005000000", "0000000000000000",
            "8500000001000000", "b700000001000000", "9500000000000000",
        ];
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(bytes.chunks(8).map(hex).collect::<Vec<_>>(), expected);
    }
}
