//! The programs that run in the kernel at each event. They keep accounts of vCPUs' threads, and of
//! ranges that the host unmaps or ages.
//!
//! Each guest that is watched has a map of its own, its room, for the accounts of its threads: a
//! guest that fills it takes nothing from another, and a process that is not watched fills none.
//! Only the thread itself writes a thread's account, because its events come on it; so plain stores
//! suffice. A room also has the guest's own account. Several CPUs may write that one, or a range's,
//! so those stores are atomic.

use super::times::{BUCKETS, FIRST, LONGEST, STRIDE, SUM, Why};
use super::tracepoint::{Field, Tracepoint};
use crate::watch::bpf::asm::{Helper, If, Label, Op, Program, Reg, Width};
use Reg::{R0, R1, R2, R3, R4, R6, R7, R8, R9, Stack};

/// Words of a thread's account.
pub(crate) const BEGAN: usize = 0;
pub(crate) const WHY: usize = 1;
/// The vCPU's number plus 1; 0 if it is unknown.
pub(crate) const VCPU: usize = 2;
pub(crate) const USER_EXITS: usize = 3;
pub(crate) const PUSHES: usize = 4;
/// Nanoseconds at the last exit.
pub(crate) const LAST: usize = 5;
pub(crate) const TIMES: usize = 6;
pub(crate) const THREAD_WORDS: usize = TIMES + Why::ALL.len() * STRIDE;

/// Words of a guest's own account, which has the size of a thread's and the thread 0. It has events
/// of threads that found no room: exits here, the others at [`USER_EXITS`] and [`PUSHES`].
pub(crate) const UNTIMED: usize = 0;
/// The words of a range's account, of all ranges that the guest's own threads unmapped or aged.
pub(crate) const OWN: usize = TIMES;

/// The place of ranges that found no room at their place.
pub(crate) const ANYWHERE: u32 = u32::MAX;

/// Base-2 logarithm of more bytes than a process can map.
const ADDRESS_BITS: i32 = 57;

/// Words of a range's account: for each [`Notice`] a count, and bytes.
pub(crate) const RANGE_WORDS: usize = 6;

/// log2 of the size of a range: accounts distinguish addresses by 64 MiB.
pub(crate) const RANGE_SHIFT: i32 = 26;

/// MMU notifier events of KVM about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Unmap,
    Age,
    TestAge,
}

/// Descriptors of the maps that programs use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maps {
    /// A room for each watched process: accounts by process and thread.
    pub rooms: i32,
    /// Two maps of accounts by process and place; the second has [`ANYWHERE`].
    pub ranges: i32,
    /// The empty account of a thread.
    pub empty: i32,
    /// Number of ranges that found no room at all.
    pub lost: i32,
}

const KEY: i16 = -8;
const INDEX: i16 = -16;
/// The key of a guest's room, and of its own account therein.
const GUEST: i16 = -24;
const RANGE: i16 = -72;

const fn at(word: usize) -> i16 {
    (word * 8) as i16
}

fn load(program: &mut Program, dst: Reg, field: Field) {
    let width = match field.size {
        1 => Width::B1,
        2 => Width::B2,
        4 => Width::B4,
        _ => Width::B8,
    };
    program.load(width, dst, R6, field.offset);
}

/// Sets R0 to the value that a map has for the key on the stack.
fn lookup(program: &mut Program, map: i32, key: i16) {
    program.map(R1, map);
    find(program, key);
}

/// Sets R0 to the value that the map R9 has for the key on the stack.
fn lookup_inner(program: &mut Program, key: i16) {
    program.op_reg(Op::Mov, R1, R9);
    find(program, key);
}

fn find(program: &mut Program, key: i16) {
    program.op_reg(Op::Mov, R2, Stack);
    program.op(Op::Add, R2, key.into());
    program.call(Helper::Lookup);
}

/// Adds 1 to a word of the account R0, which other CPUs write as well. R2 points to the word then.
fn count_atomically(program: &mut Program, word: usize) {
    program.op_reg(Op::Mov, R2, R0);
    program.op(Op::Add, R2, at(word).into());
    program.op(Op::Mov, R1, 1);
    program.add_atomically(R2, 0, R1);
}

/// Sets R9 to the room of this thread's process, if that is watched; the keys of the thread and the
/// process are on the stack then.
fn room(program: &mut Program, maps: Maps, out: Label) {
    program.call(Helper::Thread);
    program.store(Width::B8, Stack, KEY, R0);
    program.op(Op::Shr, R0, 32);
    program.op(Op::Shl, R0, 32);
    program.store(Width::B8, Stack, GUEST, R0);
    lookup(program, maps.rooms, GUEST);
    program.jump_if(If::Equal, R0, 0, out);
    program.op_reg(Op::Mov, R9, R0);
}

/// Sets R0 to the account of this thread, and creates it if necessary. If there is no room, it
/// counts the event at `without` in the guest's own account. R9 changes.
fn account(program: &mut Program, maps: Maps, without: usize, out: Label) {
    let found = program.label();
    known(program, maps, out);
    program.jump_if(If::NotEqual, R0, 0, found);
    program.store_imm(Width::B4, Stack, INDEX, 0);
    lookup(program, maps.empty, INDEX);
    program.jump_if(If::Equal, R0, 0, out);
    program.op_reg(Op::Mov, R3, R0);
    insert_inner(program);
    lookup_inner(program, KEY);
    program.jump_if(If::NotEqual, R0, 0, found);
    lookup_inner(program, GUEST);
    program.jump_if(If::Equal, R0, 0, out);
    count_atomically(program, without);
    program.jump(out);
    program.here(found);
}

/// Sets R0 to the account of this thread, or to 0. R9 changes.
fn known(program: &mut Program, maps: Maps, out: Label) {
    room(program, maps, out);
    lookup_inner(program, KEY);
}

/// Inserts the value that R3 points to into the map R9, unless the key exists.
fn insert_inner(program: &mut Program) {
    program.op_reg(Op::Mov, R1, R9);
    program.op_reg(Op::Mov, R2, Stack);
    program.op(Op::Add, R2, KEY.into());
    // BPF_NOEXIST.
    program.op(Op::Mov, R4, 1);
    program.call(Helper::Update);
}

/// Adds 1 to a word of an account that only this thread writes.
fn count(program: &mut Program, word: usize) {
    program.load(Width::B8, R1, R0, at(word));
    program.op(Op::Add, R1, 1);
    program.store(Width::B8, R0, at(word), R1);
}

fn set_why(program: &mut Program, why: Why) {
    program.op(Op::Mov, R8, why as i32);
}

/// Sets R8 to the reason of an exit. R7 is the ISA, R2 its exit reason, and R3 its `info1`.
fn why_x86(program: &mut Program, told: Label) {
    let [amd, idle] = [(); 2].map(|()| program.label());
    set_why(program, Why::Other);
    program.jump_if(If::Equal, R7, 2, amd);
    program.jump_if(If::NotEqual, R7, 1, told);
    // The upper half holds flags.
    program.op(Op::And, R2, 0xffff);
    // HLT, MWAIT.
    for reason in [12, 36] {
        program.jump_if(If::Equal, R2, reason, idle);
    }
    // EPT violation. Bit 2 is a fetch, bit 1 a write; bits 5 to 3 are the rights of the mapping, if
    // there is one.
    program.jump_if(If::NotEqual, R2, 48, told);
    access(program, [1 << 2, 1 << 1, 0b111 << 3], told);
    program.here(amd);
    // HLT, MWAIT, HLT without a pending interrupt.
    for reason in [0x78, 0x8b, 0xa6] {
        program.jump_if(If::Equal, R2, reason, idle);
    }
    // Nested page fault. Bit 4 is a fetch, bit 3 reserved (KVM's mark of a device), bit 1 a write,
    // bit 0 present.
    program.jump_if(If::NotEqual, R2, 0x400, told);
    program.jump_if(If::Set, R3, 1 << 3, told);
    access(program, [1 << 4, 1 << 1, 1], told);
    program.here(idle);
    set_why(program, Why::Idle);
}

/// Sets R8 to the kind of a fault, by bits of R3.
fn access(program: &mut Program, [fetch, write, mapped]: [i32; 3], told: Label) {
    let written = program.label();
    set_why(program, Why::FaultExecute);
    program.jump_if(If::Set, R3, fetch, told);
    program.jump_if(If::Set, R3, write, written);
    set_why(program, Why::FaultRead);
    program.jump(told);
    program.here(written);
    set_why(program, Why::FaultProtected);
    program.jump_if(If::Set, R3, mapped, told);
    set_why(program, Why::FaultWrite);
    program.jump(told);
}

/// Sets R8 to the reason of an exit. R2 is the kind of exception, and R3 its class.
fn why_arm(program: &mut Program, told: Label) {
    set_why(program, Why::Other);
    // ARM_EXCEPTION_TRAP. Other kinds have no class.
    program.op(Op::And, R2, 0x7fff_ffff);
    program.jump_if(If::NotEqual, R2, 2, told);
    let classes = [(0x01, Why::Idle), (0x20, Why::FaultExecute), (0x24, Why::FaultRead)];
    one_of(program, R3, &classes, told);
    set_why(program, Why::Other);
}

/// Sets R8 to the reason that belongs to the value of a register, and goes on at `told`, if it is
/// one of these.
fn one_of(program: &mut Program, register: Reg, values: &[(i32, Why)], told: Label) {
    for (value, why) in values {
        let other = program.label();
        program.jump_if(If::NotEqual, register, *value, other);
        set_why(program, *why);
        program.jump(told);
        program.here(other);
    }
}

/// Sets R8 to the reason of an exit. R2 is `scause`, and R3 `stval`.
fn why_riscv(program: &mut Program, told: Label) {
    // Guest page faults of a fetch, a load and a store (privileged architecture, `scause`).
    let faults = [(20, Why::FaultExecute), (21, Why::FaultRead), (23, Why::FaultWrite)];
    one_of(program, R2, &faults, told);
    set_why(program, Why::Other);
    // A virtual instruction, which is in `stval`.
    program.jump_if(If::NotEqual, R2, 22, told);
    let wfi = 0x1050_0073;
    one_of(program, R3, &[(wfi, Why::Idle)], told);
}

/// The program at `kvm_exit`: notes the time and the reason.
pub(crate) fn exit(event: &Tracepoint, maps: Maps) -> Result<Vec<u64>, String> {
    let mut program = Program::default();
    let [told, out] = [(); 2].map(|()| program.label());
    program.op_reg(Op::Mov, R6, R1);
    match (event.field("isa"), event.field("esr_ec"), event.field("scause")) {
        (Ok(isa), _, _) => {
            load(&mut program, R7, isa);
            load(&mut program, R2, event.field("exit_reason")?);
            load(&mut program, R3, event.field("info1")?);
            why_x86(&mut program, told);
        }
        (_, Ok(class), _) => {
            load(&mut program, R2, event.field("ret")?);
            load(&mut program, R3, class);
            why_arm(&mut program, told);
        }
        (_, _, Ok(cause)) => {
            load(&mut program, R2, cause);
            load(&mut program, R3, event.field("stval")?);
            why_riscv(&mut program, told);
        }
        _ => return Err("it is not known how this architecture's KVM says why".to_owned()),
    }
    program.here(told);
    // The events of Arm and RISC-V have no vCPU number.
    match event.field("vcpu_id") {
        Ok(vcpu) => {
            load(&mut program, R7, vcpu);
            program.op(Op::Add, R7, 1);
        }
        Err(_) => program.op(Op::Mov, R7, 0),
    }
    account(&mut program, maps, UNTIMED, out);
    program.op_reg(Op::Mov, R9, R0);
    program.store(Width::B8, R9, at(WHY), R8);
    program.store(Width::B8, R9, at(VCPU), R7);
    program.call(Helper::Nanoseconds);
    program.store(Width::B8, R9, at(BEGAN), R0);
    program.store(Width::B8, R9, at(LAST), R0);
    program.here(out);
    program.end();
    Ok(program.assemble())
}

/// The program at `kvm_entry`: adds the time since the exit to the account.
pub(crate) fn entry(maps: Maps) -> Vec<u64> {
    let mut program = Program::default();
    let out = program.label();
    known(&mut program, maps, out);
    program.jump_if(If::Equal, R0, 0, out);
    program.op_reg(Op::Mov, R7, R0);
    program.load(Width::B8, R8, R7, at(BEGAN));
    program.jump_if(If::Equal, R8, 0, out);
    program.store_imm(Width::B8, R7, at(BEGAN), 0);
    program.call(Helper::Nanoseconds);
    program.op_reg(Op::Sub, R0, R8);
    program.op_reg(Op::Mov, R8, R0);
    // The words of this reason. The verifier requires proof that they lie within the account.
    program.load(Width::B8, R9, R7, at(WHY));
    program.jump_if(If::Above, R9, Why::ALL.len() as i32 - 1, out);
    program.op(Op::Mul, R9, STRIDE as i32 * 8);
    program.op_reg(Op::Add, R7, R9);
    program.load(Width::B8, R1, R7, at(TIMES));
    program.op(Op::Add, R1, 1);
    program.store(Width::B8, R7, at(TIMES), R1);
    program.load(Width::B8, R1, R7, at(TIMES + SUM));
    program.op_reg(Op::Add, R1, R8);
    program.store(Width::B8, R7, at(TIMES + SUM), R1);
    let no_record = program.label();
    program.load(Width::B8, R1, R7, at(TIMES + LONGEST));
    program.jump_if_reg(If::AtLeast, R1, R8, no_record);
    program.store(Width::B8, R7, at(TIMES + LONGEST), R8);
    program.here(no_record);
    bucket(&mut program);
    program.op(Op::Shl, R1, 3);
    program.op_reg(Op::Add, R7, R1);
    program.load(Width::B8, R2, R7, at(TIMES + 3));
    program.op(Op::Add, R2, 1);
    program.store(Width::B8, R7, at(TIMES + 3), R2);
    program.here(out);
    program.end();
    program.assemble()
}

/// Sets R1 to the bucket of R8 nanoseconds.
fn bucket(program: &mut Program) {
    let done = program.label();
    // R2 becomes the highest bit that is set, by bisection.
    program.op(Op::Mov, R2, 0);
    program.op_reg(Op::Mov, R3, R8);
    for half in [32, 16, 8, 4, 2, 1] {
        let below = program.label();
        program.op_reg(Op::Mov, R4, R3);
        program.op(Op::Shr, R4, half);
        program.jump_if(If::Equal, R4, 0, below);
        program.op(Op::Add, R2, half);
        program.op_reg(Op::Mov, R3, R4);
        program.here(below);
    }
    let long = program.label();
    program.op(Op::Mov, R1, 0);
    program.jump_if(If::AtLeast, R2, FIRST as i32, long);
    program.jump(done);
    program.here(long);
    // The two bits below the highest one are the quarter of the octave.
    program.op_reg(Op::Mov, R4, R2);
    program.op(Op::Add, R4, -2);
    program.op_reg(Op::Mov, R1, R8);
    program.op_reg(Op::Shr, R1, R4);
    program.op(Op::And, R1, 3);
    program.op(Op::Add, R2, -(FIRST as i32));
    program.op(Op::Shl, R2, 2);
    program.op_reg(Op::Add, R1, R2);
    let last = program.label();
    program.jump_if(If::Above, R1, BUCKETS as i32 - 1, last);
    program.jump(done);
    program.here(last);
    program.op(Op::Mov, R1, BUCKETS as i32 - 1);
    program.here(done);
}

/// The program at `kvm_mmio`: an exit that looked like a fault was an access to a device.
pub(crate) fn mmio(maps: Maps) -> Vec<u64> {
    let mut program = Program::default();
    let out = program.label();
    known(&mut program, maps, out);
    program.jump_if(If::Equal, R0, 0, out);
    not_a_fault(&mut program, out);
    program.here(out);
    program.end();
    program.assemble()
}

/// Changes the reason of the account R0 from a fault to another exit.
fn not_a_fault(program: &mut Program, out: Label) {
    program.load(Width::B8, R1, R0, at(WHY));
    program.jump_if(If::Above, R1, Why::FaultExecute as i32, out);
    program.store_imm(Width::B8, R0, at(WHY), Why::Other as i32);
}

/// The program at `kvm_userspace_exit`, whose reason is at `reason`: counts it. RISC-V's KVM has no
/// `kvm_mmio`, so an access to a device is known by its exit alone.
pub(crate) fn user_exit(reason: Field, maps: Maps) -> Vec<u64> {
    let mut program = Program::default();
    let out = program.label();
    program.op_reg(Op::Mov, R6, R1);
    load(&mut program, R7, reason);
    account(&mut program, maps, USER_EXITS, out);
    count(&mut program, USER_EXITS);
    // KVM_EXIT_MMIO.
    program.jump_if(If::NotEqual, R7, 6, out);
    not_a_fault(&mut program, out);
    program.here(out);
    program.end();
    program.assemble()
}

/// The program at Arm's `kvm_guest_fault`: a data abort is a write if the syndrome says so, and a
/// write to a protected page if it is a permission fault.
pub(crate) fn guest_fault(event: &Tracepoint, maps: Maps) -> Result<Vec<u64>, String> {
    let mut program = Program::default();
    let out = program.label();
    program.op_reg(Op::Mov, R6, R1);
    load(&mut program, R7, event.field("hsr")?);
    known(&mut program, maps, out);
    program.jump_if(If::Equal, R0, 0, out);
    program.load(Width::B8, R1, R0, at(WHY));
    program.jump_if(If::NotEqual, R1, Why::FaultRead as i32, out);
    let written = program.label();
    // WnR.
    program.jump_if(If::Set, R7, 1 << 6, written);
    program.jump(out);
    program.here(written);
    let mapped = program.label();
    // The kind of the fault, without its level.
    program.op(Op::And, R7, 0b11_1100);
    program.jump_if(If::Equal, R7, 0b00_1100, mapped);
    program.store_imm(Width::B8, R0, at(WHY), Why::FaultWrite as i32);
    program.jump(out);
    program.here(mapped);
    program.store_imm(Width::B8, R0, at(WHY), Why::FaultProtected as i32);
    program.here(out);
    program.end();
    Ok(program.assemble())
}

/// The program at an event of a vCPU's thread that is only counted.
pub(crate) fn counted(word: usize, maps: Maps) -> Vec<u64> {
    let mut program = Program::default();
    let out = program.label();
    account(&mut program, maps, word, out);
    count(&mut program, word);
    program.here(out);
    program.end();
    program.assemble()
}

/// The program at an MMU notifier event: counts it by the process that the CPU runs and by the
/// range's first address.
pub(crate) fn notice(event: &Tracepoint, notice: Notice, maps: Maps) -> Result<Vec<u64>, String> {
    let mut program = Program::default();
    let [found, out] = [(); 2].map(|()| program.label());
    program.op_reg(Op::Mov, R6, R1);
    match event.field("start") {
        Ok(start) => {
            load(&mut program, R7, start);
            load(&mut program, R8, event.field("end")?);
            program.op_reg(Op::Sub, R8, R7);
            // All addresses, as a write to clear_refs tells: no guest has so much.
            let is_part = program.label();
            program.op_reg(Op::Mov, R3, R8);
            program.op(Op::Shr, R3, ADDRESS_BITS);
            program.jump_if(If::Equal, R3, 0, is_part);
            program.op(Op::Mov, R8, 0);
            program.here(is_part);
        }
        Err(_) => {
            load(&mut program, R7, event.field("hva")?);
            program.op(Op::Mov, R8, 0);
        }
    }
    let other = program.label();
    let word = 2 * notice as usize;
    room(&mut program, maps, other);
    // A guest's own thread: the address says nothing more.
    lookup_inner(&mut program, GUEST);
    program.jump_if(If::Equal, R0, 0, out);
    program.op(Op::Add, R0, at(OWN).into());
    program.jump(found);
    program.here(other);
    program.op(Op::Shr, R7, RANGE_SHIFT);
    for word in 0..RANGE_WORDS {
        program.store_imm(Width::B8, Stack, RANGE + at(word), 0);
    }
    for index in 0..2 {
        program.store_imm(Width::B4, Stack, INDEX, index);
        lookup(&mut program, maps.ranges, INDEX);
        program.jump_if(If::Equal, R0, 0, out);
        program.op_reg(Op::Mov, R9, R0);
        program.load(Width::B8, R1, Stack, GUEST);
        program.op_reg(Op::Or, R1, R7);
        program.store(Width::B8, Stack, KEY, R1);
        lookup_inner(&mut program, KEY);
        program.jump_if(If::NotEqual, R0, 0, found);
        program.op_reg(Op::Mov, R3, Stack);
        program.op(Op::Add, R3, RANGE.into());
        insert_inner(&mut program);
        lookup_inner(&mut program, KEY);
        program.jump_if(If::NotEqual, R0, 0, found);
        // ANYWHERE, of 32 bits.
        program.op(Op::Mov, R7, -1);
        program.op(Op::Shl, R7, 32);
        program.op(Op::Shr, R7, 32);
    }
    program.store_imm(Width::B4, Stack, INDEX, 0);
    lookup(&mut program, maps.lost, INDEX);
    program.jump_if(If::Equal, R0, 0, out);
    count_atomically(&mut program, 0);
    program.jump(out);
    program.here(found);
    count_atomically(&mut program, word);
    program.op(Op::Add, R2, 8);
    program.op_reg(Op::Mov, R1, R8);
    program.add_atomically(R2, 0, R1);
    program.here(out);
    program.end();
    Ok(program.assemble())
}

#[cfg(test)]
mod tests;
