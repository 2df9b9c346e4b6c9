//! Runs the programs in an interpreter, over streams of events.

use super::*;
use crate::watch::events::thread;
use crate::watch::events::times::{Stalls, faults};
use std::cell::RefCell;
use std::collections::BTreeMap;

const MAPS: Maps = Maps { rooms: 1, ranges: 2, empty: 3, lost: 4 };

/// The map number of a process's room is this and the process, that of places this and the index.
const ROOM: u64 = 1000;
const RANGES: u64 = 100;

/// The process whose threads run vCPUs.
const PID: u64 = 7;

/// The interpreter's number of an atomic addition, which it does not have: an imagined helper.
const ADD: u32 = 200;

/// The map number of accounts that are made before the programs run.
const SPARE: u64 = 9;

/// State of the interpreter's helper functions.
#[derive(Default)]
struct Machine {
    now: u64,
    thread: u64,
    /// Accounts by map and key. They are never moved, because programs have their addresses.
    accounts: BTreeMap<(u64, u64), &'static mut [u64]>,
    /// Spare accounts of each map.
    room: BTreeMap<u64, usize>,
}

thread_local!(static MACHINE: RefCell<Machine> = RefCell::default());

/// Allocates an account that programs of any test may access.
fn made(words: usize) -> &'static mut [u64] {
    vec![0; words].leak()
}

fn key(map: u64, address: u64) -> u64 {
    let is_array = [MAPS.empty, MAPS.lost, MAPS.ranges].map(|map| map as u64).contains(&map);
    let bytes = if is_array { 4 } else { 8 };
    let mut key = [0; 8];
    // SAFETY: the program's key lies on its stack, with as many bytes as keys of this map have.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, key.as_mut_ptr(), bytes) };
    u64::from_le_bytes(key)
}

fn lookup(map: u64, at: u64, _: u64, _: u64, _: u64) -> u64 {
    MACHINE.with_borrow(|machine| {
        let key = key(map, at);
        let room = ROOM + (key >> 32);
        match i32::try_from(map) {
            Ok(map) if map == MAPS.ranges => RANGES + key,
            Ok(map) if map == MAPS.rooms && machine.room.contains_key(&room) => room,
            _ => machine.accounts.get(&(map, key)).map_or(0, |it| it.as_ptr() as u64),
        }
    })
}

fn update(map: u64, at: u64, _: u64, flags: u64, _: u64) -> u64 {
    assert_eq!(flags, 1);
    MACHINE.with_borrow_mut(|machine| {
        let key = (map, key(map, at));
        let room = machine.room.get_mut(&map).expect("programs insert into maps that there are");
        if machine.accounts.contains_key(&key) || *room == 0 {
            return u64::MAX;
        }
        *room -= 1;
        let spare = *machine.accounts.keys().find(|(map, _)| *map == SPARE).expect("there is room");
        let account = machine.accounts.remove(&spare).unwrap();
        machine.accounts.insert(key, account);
        0
    })
}

fn add(amount: u64, at: u64, _: u64, _: u64, _: u64) -> u64 {
    let word = at as *mut u64;
    // SAFETY: programs add to words of accounts, which are never freed; this thread alone runs.
    unsafe { word.write(word.read() + amount) };
    0
}

fn nanoseconds(_: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    MACHINE.with_borrow(|machine| machine.now)
}

fn current(_: u64, _: u64, _: u64, _: u64, _: u64) -> u64 {
    MACHINE.with_borrow(|machine| machine.thread)
}

/// A simulated kernel with room for the accounts of `room` threads.
struct Kernel {
    exit: Vec<u8>,
    entry: Vec<u8>,
    mmio: Vec<u8>,
    user: Vec<u8>,
    fault: Vec<u8>,
    unmap: Vec<u8>,
    /// Offsets and sizes of the words that a line has of an exit.
    fields: &'static [(usize, usize)],
    memory: Vec<std::ops::Range<u64>>,
}

fn bytes(program: Vec<u64>) -> Vec<u8> {
    let mut bytes: Vec<u8> = program.into_iter().flat_map(u64::to_le_bytes).collect();
    for it in bytes.chunks_exact_mut(8).filter(|it| it[0] == 0xdb) {
        // R2 has the address, and R1 what is added.
        assert_eq!(it[1..4], [0x12, 0, 0]);
        it[..4].copy_from_slice(&[0x85, 0, 0, 0]);
        it[4..].copy_from_slice(&ADD.to_le_bytes());
    }
    bytes
}

const ARM_EXIT: &str = "ID: 1\n\tfield:int ret;\toffset:8;\tsize:4;\n\tfield:unsigned int esr_ec;\
                        \toffset:12;\tsize:4;\n";
const RISCV_EXIT: &str = "ID: 1\n\tfield:unsigned long scause;\toffset:16;\tsize:8;\n\tfield:\
                          unsigned long stval;\toffset:24;\tsize:8;\n";
const UNMAP: &str = "ID: 1\n\tfield:u64 start;\toffset:8;\tsize:8;\n\tfield:u64 end;\toffset:16;\t\
                     size:8;\n";
const ARM_FAULT: &str = "ID: 1\n\tfield:unsigned long hsr;\toffset:16;\tsize:8;\n";

impl Kernel {
    fn new(format: &str, room: usize) -> Self {
        let tracepoint = |text: &str| crate::watch::events::tracepoint::parse(text).unwrap();
        let own = ((ROOM + PID, PID << 32), made(THREAD_WORDS));
        let accounts =
            [((MAPS.empty as u64, 0), made(THREAD_WORDS)), ((MAPS.lost as u64, 0), made(1)), own];
        let spare = (0..2 * room as u64 + 1).map(|place| ((SPARE, place), made(THREAD_WORDS)));
        let accounts: BTreeMap<_, _> = accounts.into_iter().chain(spare).collect();
        let memory = accounts.values().map(|it| {
            let begin = it.as_ptr() as u64;
            begin..begin + 8 * it.len() as u64
        });
        let memory = memory.collect();
        let room = [(ROOM + PID, room), (RANGES, room), (RANGES + 1, 1)].into();
        MACHINE.set(Machine { accounts, room, ..Machine::default() });
        Self {
            exit: bytes(exit(&tracepoint(format), MAPS).unwrap()),
            entry: bytes(entry(MAPS)),
            mmio: bytes(mmio(MAPS)),
            user: bytes(user_exit(Field { offset: 8, size: 4 }, MAPS)),
            fault: bytes(guest_fault(&tracepoint(ARM_FAULT), MAPS).unwrap()),
            unmap: bytes(notice(&tracepoint(UNMAP), Notice::Unmap, MAPS).unwrap()),
            fields: match format {
                ARM_EXIT => &[(8, 4), (12, 4)],
                RISCV_EXIT => &[(16, 8), (24, 8)],
                _ => &[(24, 4), (8, 4), (32, 8), (56, 4)],
            },
            memory,
        }
    }

    fn run(&self, program: &[u8], event: &mut [u8]) {
        let mut machine = rbpf::EbpfVmRaw::new(None).unwrap();
        // The interpreter's verifier does not know the imagined helper. Another test runs the
        // kernel's verifier on all programs.
        machine.set_verifier(|_| Ok(())).unwrap();
        machine.set_program(program).unwrap();
        let helpers: [(Helper, rbpf::ebpf::Helper); 4] = [
            (Helper::Lookup, lookup),
            (Helper::Update, update),
            (Helper::Nanoseconds, nanoseconds),
            (Helper::Thread, current),
        ];
        for (helper, function) in helpers {
            machine.register_helper(helper as u32, function).unwrap();
        }
        machine.register_helper(ADD, add).unwrap();
        self.memory.iter().for_each(|range| machine.register_allowed_memory(range.clone()));
        machine.execute_program(event).unwrap();
    }

    /// Runs a stream of events. Each line has the time in ns, the thread, the event and its fields,
    /// as the tracer would print them.
    fn hear(&self, stream: &str) {
        for line in stream.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |word: usize| match words[word].trim_start_matches('-').strip_prefix("0x")
            {
                Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
                None => words[word].trim_start_matches('-').parse().unwrap(),
            };
            let (time, tid) = (number(0), number(1));
            MACHINE.with_borrow_mut(|machine| {
                // A thread of another process is written as a negative number.
                let pid = if words[1].starts_with('-') { tid } else { PID };
                (machine.now, machine.thread) = (time, pid << 32 | tid);
            });
            let mut event = vec![0; 96];
            let mut put =
                |at: usize, bytes: &[u8]| event[at..at + bytes.len()].copy_from_slice(bytes);
            let program = match words[2] {
                "exit" => {
                    for (word, (offset, size)) in self.fields.iter().enumerate() {
                        put(*offset, &number(3 + word).to_le_bytes()[..*size]);
                    }
                    &self.exit
                }
                "entry" => &self.entry,
                "mmio" => &self.mmio,
                "user" => {
                    if words.len() > 3 {
                        put(8, &number(3).to_le_bytes());
                    }
                    &self.user
                }
                "unmap" => {
                    put(8, &number(3).to_le_bytes());
                    put(16, &number(4).to_le_bytes());
                    &self.unmap
                }
                "fault" => {
                    put(16, &number(3).to_le_bytes());
                    &self.fault
                }
                other => panic!("{other}"),
            };
            self.run(program, &mut event);
        }
    }

    fn thread(&self, tid: u64) -> Option<crate::watch::events::Thread> {
        MACHINE.with_borrow(|machine| {
            machine.accounts.get(&(ROOM + PID, PID << 32 | tid)).map(|words| thread(words))
        })
    }

    /// Returns the words of an account.
    fn words(&self, map: u64, key: u64) -> Option<Vec<u64>> {
        MACHINE.with_borrow(|machine| machine.accounts.get(&(map, key)).map(|it| it.to_vec()))
    }

    fn stalls(&self, tid: u64) -> Stalls {
        self.thread(tid).unwrap().stalls.unwrap()
    }
}

fn told(stalls: &Stalls) -> Vec<(Why, u64, u64, u64)> {
    stalls.iter().map(|(why, it)| (*why, it.count, it.total_ns, it.longest_ns)).collect()
}

use crate::watch::events::tracepoint::tests::EXIT;

#[test]
fn exit_times_are_told_by_thread_and_reason_on_intel_and_amd() {
    let kernel = Kernel::new(EXIT, 4);
    // Fields: isa, reason, info1, vCPU.
    kernel.hear(
        "1000 31 exit 1 48 0x182 0
         1500 32 exit 2 0x400 0x100000014 5
         4000 31 entry
         5000 31 exit 1 0x80000030 0x184 0
         5900 31 entry
         6000 31 exit 1 48 0x181 0
         6300 31 entry
         6500 31 exit 1 12 0 0
         9500 32 entry
         9600 32 exit 2 0x400 0x100000006 5
         9700 32 entry
         9800 32 exit 2 0x60 0 5
        10000 32 entry
       106500 31 entry
       200000 31 exit 1 1 0 0
       200400 31 entry
       201000 31 exit 1 48 0x1aa 0
       201050 31 entry
       202000 32 exit 2 0x400 0x100000007 5
       202070 32 entry",
    );
    use Why::*;
    let intel = [
        (FaultRead, 1, 300, 300),
        (FaultWrite, 1, 3000, 3000),
        (FaultProtected, 1, 50, 50),
        (FaultExecute, 1, 900, 900),
        (Idle, 1, 100_000, 100_000),
        (Other, 1, 400, 400),
    ];
    assert_eq!(told(&kernel.stalls(31)), intel);
    let amd = [
        (FaultWrite, 1, 100, 100),
        (FaultProtected, 1, 70, 70),
        (FaultExecute, 1, 8000, 8000),
        (Other, 1, 200, 200),
    ];
    assert_eq!(told(&kernel.stalls(32)), amd);
    assert_eq!(kernel.thread(32).unwrap().vcpu, Some(5));
    let sum = faults(&kernel.stalls(31));
    assert_eq!((sum.count, sum.total_ns, sum.longest_ns), (4, 4250, 3000));
}

#[test]
fn every_time_falls_into_its_bucket() {
    let kernel = Kernel::new(EXIT, 1);
    let mut times: Vec<u64> = (0..63).map(|bit| 1u64 << bit).collect();
    times.extend((5..37).flat_map(|bit| {
        (0..4).flat_map(move |quarter| {
            let begin = (1u64 << bit) / 4 * (4 + quarter);
            [begin - 1, begin, begin + 1]
        })
    }));
    let mut expected = BTreeMap::new();
    for time in &times {
        kernel.hear(&format!("1 31 exit 1 48 0x2 0\n{} 31 entry", 1 + time));
        let octave = time.ilog2();
        let end = match octave {
            ..5 => 40,
            // The last bucket ends with the longest time.
            _ if *time >= (1 << 37) / 8 * 7 => (1 << 62) + 1,
            _ => {
                let quarter = (1u64 << octave) / 4;
                time / quarter * quarter + quarter
            }
        };
        *expected.entry(end).or_insert(0) += 1;
    }
    let stalls = kernel.stalls(31);
    let write = &stalls[&Why::FaultWrite];
    assert_eq!(write.count, times.len() as u64);
    assert_eq!(write.histogram().collect::<BTreeMap<_, _>>(), expected);
    assert_eq!(write.longest_ns, 1 << 62);
}

#[test]
fn accesses_of_devices_are_no_faults() {
    let kernel = Kernel::new(EXIT, 1);
    // An access that KVM knows by its mark, one that it discovers, and an EPT misconfiguration.
    kernel.hear(
        "1000 31 exit 2 0x400 0x10000000d 0
         2000 31 entry
         3000 31 exit 2 0x400 0x100000004 0
         3100 31 mmio
         3200 31 user
         9000 31 entry
         9500 31 mmio
        10000 31 exit 1 49 0 0
        11000 31 entry",
    );
    assert_eq!(told(&kernel.stalls(31)), [(Why::Other, 3, 8000, 6000)]);
    assert_eq!(kernel.thread(31).unwrap().counts["kvm_userspace_exit"], 1);
}

#[test]
fn arm_exits_are_reported_by_class_and_writes_by_syndrome() {
    let kernel = Kernel::new(ARM_EXIT, 1);
    kernel.hear(
        "1000 31 exit 2 0x24
         1100 31 fault 0x92000047
         2000 31 entry
         3000 31 exit 2 0x24
         3100 31 fault 0x92000007
         5000 31 entry
         6000 31 exit 2 0x20
         6100 31 fault 0x82000047
         6500 31 entry
         7000 31 exit 2 0x01
         8000 31 entry
         8100 31 exit 0 0x24
         8200 31 entry
         8300 31 exit 2 0x18
         8400 31 entry
         8500 31 exit 2 0x24
         8510 31 fault 0x9200004f
         8530 31 entry
         8600 31 exit 2 0x24
         8610 31 fault 0x9200000f
         8640 31 entry",
    );
    use Why::*;
    let all = [
        (FaultRead, 2, 2040, 2000),
        (FaultWrite, 1, 1000, 1000),
        (FaultProtected, 1, 30, 30),
        (FaultExecute, 1, 500, 500),
        (Idle, 1, 1000, 1000),
        (Other, 2, 200, 100),
    ];
    assert_eq!(told(&kernel.stalls(31)), all);
    assert_eq!(kernel.thread(31).unwrap().vcpu, None);
}

#[test]
fn riscv_exits_are_reported_by_cause_and_devices_by_vmm_exits() {
    let kernel = Kernel::new(RISCV_EXIT, 1);
    // Faults of each kind, a device, WFI, another virtual instruction, and an interrupt.
    kernel.hear(
        "1000 31 exit 20 0x8000
         1100 31 entry
         2000 31 exit 21 0x8000
         2200 31 entry
         3000 31 exit 23 0x8000
         3400 31 entry
         4000 31 exit 23 0x10000000
         4100 31 user 6
         4800 31 entry
         5000 31 exit 22 0x10500073
         6600 31 entry
         7000 31 exit 22 0x600022f3
         7032 31 entry
         8000 31 exit 0x8000000000000005 0
         8064 31 entry",
    );
    use Why::*;
    let all = [
        (FaultRead, 1, 200, 200),
        (FaultWrite, 1, 400, 400),
        (FaultExecute, 1, 100, 100),
        (Idle, 1, 1600, 1600),
        (Other, 3, 896, 800),
    ];
    assert_eq!(told(&kernel.stalls(31)), all);
}

#[test]
fn an_entry_or_exit_without_its_counterpart_yields_no_time() {
    let kernel = Kernel::new(EXIT, 2);
    kernel.hear(
        "1000 31 entry
         1100 31 user
         1200 31 entry
         2000 32 exit 1 48 2 0
         3000 32 exit 1 48 2 0
         3500 32 entry
         9000 32 entry",
    );
    assert_eq!(kernel.thread(31).unwrap().stalls, None);
    assert_eq!(told(&kernel.stalls(32)), [(Why::FaultWrite, 1, 500, 500)]);
}

#[test]
fn an_architecture_with_unknown_exits_is_refused_in_words() {
    let event = crate::watch::events::tracepoint::parse("ID: 5\n").unwrap();
    assert!(exit(&event, MAPS).unwrap_err().contains("architecture"));
}

#[test]
fn a_process_that_is_not_watched_takes_no_room_for_threads() {
    let kernel = Kernel::new(EXIT, 1);
    kernel.hear("1000 -41 exit 1 48 2 0\n1500 -41 entry\n1600 -42 user\n1700 -43 mmio");
    assert!(MACHINE.with_borrow(|machine| machine.room[&(ROOM + PID)]) == 1);
    kernel.hear("2000 31 exit 1 48 2 0\n2500 31 entry");
    assert_eq!(told(&kernel.stalls(31)), [(Why::FaultWrite, 1, 500, 500)]);
}

#[test]
fn events_of_threads_without_room_are_in_the_guests_account() {
    let kernel = Kernel::new(EXIT, 1);
    kernel.hear(
        "1000 31 user
         1100 32 user
         1200 33 user
         1300 33 exit 1 48 2 0
         1400 33 entry
         1500 31 user",
    );
    assert_eq!(kernel.thread(31).unwrap().counts["kvm_userspace_exit"], 2);
    let own = kernel.words(ROOM + PID, PID << 32).unwrap();
    assert_eq!((own[UNTIMED], own[USER_EXITS], own[PUSHES]), (1, 2, 0));
    assert_eq!(kernel.words(MAPS.lost as u64, 0), Some(vec![0]));
}

#[test]
fn places_without_room_count_for_their_process_then_as_lost() {
    let kernel = Kernel::new(EXIT, 1);
    kernel.hear(
        "1000 31 unmap 0x1000 0x3000
         1000 32 unmap 0x7f0000000000 0x7f0000001000
         1100 -5 unmap 0x1000 0x2000
         1200 -5 unmap 0x2000 0x4000
         1300 -5 unmap 0x7f0000000000 0x7f0000001000
         1400 -5 unmap 0x7f8000000000 0x7f8000001000
         1500 -6 unmap 0x1000 0x2000
         1600 -5 unmap 0x0 0xffffffffffffffff",
    );
    let notices = |words: Option<Vec<u64>>, at: usize| words.map(|it| (it[at], it[at + 1]));
    // The guest's own ranges need no place.
    assert_eq!(notices(kernel.words(ROOM + PID, PID << 32), OWN), Some((2, 0x3000)));
    // The range of all addresses counts, and has no bytes.
    assert_eq!(notices(kernel.words(RANGES, 5 << 32), 0), Some((3, 0x3000)));
    let anywhere = 5 << 32 | u64::from(ANYWHERE);
    assert_eq!(notices(kernel.words(RANGES + 1, anywhere), 0), Some((2, 0x2000)));
    assert_eq!(kernel.words(MAPS.lost as u64, 0), Some(vec![1]));
}
