//! The second CPU, as the firmware lends it, and invalidations of both. An entry of the guest alone
//! invalidates here, by the CPU that executes it: so the second one leaves and enters again.

use super::cases::{MEMORY, with_tables};
use super::cpu::{self, Does, EXIT_CALL, Tree, VCPUS};
use super::firmware;
use super::machine::Serial;
use super::pair::{Cpus, Pair, Part, addresses};
use super::platform::Machine;
use core::fmt::Write;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering::SeqCst};
use slat::GuestRoot;

const PAGE: u64 = 4096;
/// mov rax, [rdi]; mov [rsi], rax; inc qword [rdi + 16]; inc qword [rsi + 16];
/// cmp qword [rsi + 8], 0; je to the first; the call.
const CODE: [u64; 3] =
    [0xff48_0689_4807_8b48, 0x8348_1046_ff48_1047, cpu::CALL << 40 | 0xeb_7400_087e];

/// The tables that the second CPU runs its guest on.
static ROOT: AtomicPtr<GuestRoot<Tree>> = AtomicPtr::new(null_mut());
/// How often its guest has stopped, and what it is to do next.
static EXITS: AtomicU64 = AtomicU64::new(0);
static NEXT: AtomicU64 = AtomicU64::new(NOTHING);
const NOTHING: u64 = 0;
const ENTER: u64 = 1;
const FLUSH: u64 = 2;
const END: u64 = 3;

/// The second CPU.
fn second() {
    // SAFETY: `run` keeps it until this function has ended.
    let root = unsafe { &*ROOT.load(SeqCst) };
    let vcpu = &VCPUS[1];
    vcpu.create(root);
    let [program, data, report] = addresses(PAGE);
    loop {
        let next = NEXT.swap(NOTHING, SeqCst);
        match next {
            NOTHING => core::hint::spin_loop(),
            END => break cpu::off(),
            _ => {
                vcpu.enter(program, data, report, next == FLUSH);
                EXITS.fetch_add(1, SeqCst);
            }
        }
    }
}

struct Both;

impl Cpus for Both {
    type Format = Tree;
    type Platform = Machine;
    const PARTS: &'static [Part<Self>] = &[
        ("no invalidation", |_| ()),
        ("on this CPU alone", |_| {
            let exit = VCPUS[0].run(Does::Read(addresses(PAGE)[2]), true);
            assert_eq!(exit.code, EXIT_CALL, "the report is mapped");
        }),
        ("exit and entry there", |pair| pair.again(false)),
        ("an invalidation there", |pair| pair.again(true)),
    ];

    /// The platform's own concerns the next entry of the first CPU alone.
    fn ignore(_: &Machine, _: bool) {}

    fn enter(_: &Machine, forgets: bool) {
        NEXT.store(if forgets { FLUSH } else { ENTER }, SeqCst);
    }

    fn exits() -> u64 {
        EXITS.load(SeqCst)
    }
}

/// Checks all changes with this CPU and another; returns whether all were right.
pub fn run() -> bool {
    let Some(number) = firmware::others().next() else {
        let _ = writeln!(Serial, "no case of two CPUs: the firmware lends one");
        return true;
    };
    let Some(format) = cpu::format(false) else { return false };
    with_tables(format, |machine, tables, guard, cache| {
        let mut pair = Pair::<Both>::new(machine, guard, cache, MEMORY.hpa());
        cpu::prepare(&MEMORY);
        let [program, ..] = addresses(PAGE);
        (program..).step_by(8).zip(CODE).for_each(|(at, word)| MEMORY.write(at, word));
        let mut root = tables.guest_root();
        // Takes the second's memory from the firmware, which serves this CPU only.
        VCPUS[1].create(&root);
        cpu::off();
        VCPUS[0].create(&root);
        ROOT.store(&raw mut root, SeqCst);
        let Some(ended) = firmware::beside(number, second) else {
            let _ = writeln!(Serial, "wrong: the firmware does not start CPU {number}");
            return false;
        };
        let right = pair.run(&mut Serial);
        NEXT.store(END, SeqCst);
        firmware::wait(ended);
        cpu::off();
        right
    })
}
