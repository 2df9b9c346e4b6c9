//! Tests of the programs in the kernel, if this process may load them.

use super::*;
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

/// Listens, or prints the reason why it cannot.
fn events() -> Option<Events> {
    let events = Events::open();
    match events.how {
        How::Programs(_) => Some(events),
        _ => {
            eprintln!("skipped: {}", events.how());
            None
        }
    }
}

#[test]
fn the_kernel_takes_every_program_whose_event_it_has() {
    let Some(events) = events() else { return };
    // Each architecture lacks some of the tracepoints. The kernel refuses none of the programs.
    for (event, why) in &events.why {
        assert!(why.contains("no tracepoint"), "{event}: {why}");
    }
}

#[test]
fn events_without_fields_are_received_without_tracefs() {
    if events().is_none() {
        return;
    }
    let (programs, why) = Programs::load(Err("no tracefs".to_owned())).unwrap();
    let raw = |it: &Program| it.called().unwrap() == Some(ProgramInput::Raw);
    assert!(!programs.programs.is_empty() && programs.programs.iter().all(raw));
    assert!(!why.contains_key(USER_EXIT), "{why:?}");
    assert_eq!(why[UNMAP], "no tracefs");
}

#[test]
fn only_events_with_arguments_that_hide_fields_cost_a_record() {
    let Some(events) = events() else { return };
    let How::Programs(programs) = &events.how else { return };
    let called = programs.programs.iter().map(|program| program.called().unwrap().unwrap());
    let by_perf = called.filter(|called| *called == ProgramInput::ByPerf).count();
    // KVM on x86 gathers why it left the guest for the record.
    let exit = cfg!(target_arch = "x86_64") && !events.why.contains_key(EXIT);
    assert_eq!(by_perf, usize::from(exit), "{:?}", events.why);
}

/// Words of an account of a thread that had so many exits to the VMM.
fn words(exits: u64) -> [u64; THREAD_WORDS] {
    let mut words = [0; THREAD_WORDS];
    words[programs::USER_EXITS] = exits;
    words
}

/// A process that does not exist.
const NOBODY: i32 = i32::MAX;

fn key(pid: i32, tid: i32) -> u64 {
    (pid as u64) << 32 | u64::from(tid as u32)
}

#[test]
fn a_forgotten_guest_yields_no_events_and_restarts_at_zero() {
    let Some(mut events) = events() else { return };
    let mut heard = Accounts::default();
    for pid in [NOBODY, NOBODY - 1] {
        events.begin(pid, 1);
        let How::Programs(programs) = &events.how else { return };
        programs.rooms.room(pid).set(key(pid, 5), &words(7)).unwrap();
    }
    events.forget(NOBODY);
    events.hear(&mut heard);
    let exits = heard.threads.iter().map(|(key, it)| (*key, it.counts[USER_EXIT]));
    assert_eq!(exits.collect::<Vec<_>>(), [((NOBODY - 1, 5), 7)]);
    events.begin(NOBODY, 1);
    events.hear(&mut heard);
    assert_eq!(heard.guests[&NOBODY], Own::default());
    assert!(!heard.threads.contains_key(&(NOBODY, 5)));
}

#[test]
fn accounts_of_ended_threads_are_freed_and_still_count() {
    let Some(mut events) = events() else { return };
    // A process that lives and runs no guest; other tests run some in this one.
    let first = 1;
    events.begin(first, 1);
    let mut heard = Accounts::default();
    let mut most = 0;
    // A thread's numbers are below 2^22.
    for round in 0..100 {
        let How::Programs(programs) = &events.how else { return };
        let room = programs.rooms.room(first);
        most = room.most();
        for tid in 0..most as i32 / 2 {
            room.set(key(first, (1 << 23) + round * 1000 + tid), &words(1)).unwrap();
        }
        room.set(key(first, first), &words(9)).unwrap();
        events.hear(&mut heard);
    }
    let all: u64 = heard.threads.values().map(|it| it.counts[USER_EXIT]).sum();
    assert_eq!(all, 100 * (most as u64 / 2) + 9);
    assert!(heard.threads.len() < 400, "{}", heard.threads.len());
}

#[test]
fn places_are_heard_once_and_their_room_is_given_back() {
    let Ok(mut places) = Places::with_room([2, 1]) else { return eprintln!("skipped: no eBPF") };
    let mut heard = Accounts::default();
    for round in 0..5 {
        for place in 0..2 {
            places.used(0).set(key(2, 10 * round + place), &[1, 4096, 0, 0, 0, 0]).unwrap();
        }
        places.used(1).set(key(3, -1), &[5, 0, 0, 0, 0, 0]).unwrap();
        heard.places.clear();
        places.hear(&mut heard);
        assert_eq!(heard.places.values().map(|it| it.unmaps).sum::<u64>(), 7);
        assert!(heard.places.contains_key(&Place::anywhere(3)), "{heard:?}");
    }
    heard.places.clear();
    places.hear(&mut heard);
    assert_eq!(heard, Accounts::default());
}

#[test]
fn unreadable_accounts_stay_and_missing_ones_have_a_reason() {
    let mut programs = Programs {
        rooms: Rooms::unreadable(10),
        places: Places::unreadable(),
        lost: Map::unreadable(Kind::Array, 1),
        _empty: Map::unreadable(Kind::Array, 1),
        programs: Vec::new(),
        _events: Vec::new(),
    };
    let mut heard = Accounts::default();
    programs.hear(&mut heard);
    for why in [&heard.no_threads, &heard.no_places] {
        assert!(why.as_ref().unwrap().contains("cannot be read"), "{heard:?}");
    }
    let mut heard = Accounts { lost: 3, no_places: heard.no_places, ..Accounts::default() };
    heard.threads.insert((10, 20), Thread::default());
    heard.guests.insert(10, Own::default());
    heard.places.insert(Place::new(2, 0), Notices { unmaps: 5, ..Notices::default() });
    let before = heard.clone();
    programs.hear(&mut heard);
    assert_eq!(heard, before);
}

/// Maps for programs, and a room of this process with place for `most` accounts.
struct Alone {
    rooms: Map,
    room: Map,
    empty: Map,
    lost: Map,
}

impl Alone {
    fn new(most: usize) -> Option<Self> {
        let room = Map::new(Kind::Hash, THREAD_WORDS, most).ok()?;
        let rooms = Map::of_maps(Kind::HashOfMaps, &room, 1).unwrap();
        let own = std::process::id().cast_signed();
        room.set(key(own, 0), &words(0)).unwrap();
        rooms.set_map(key(own, 0), &room).unwrap();
        let empty = Map::new(Kind::Array, THREAD_WORDS, 1).unwrap();
        Some(Self { rooms, room, empty, lost: Map::new(Kind::Array, 1, 1).unwrap() })
    }

    fn maps(&self) -> Maps {
        let [rooms, empty, lost] = [&self.rooms, &self.empty, &self.lost].map(Map::fd);
        Maps { rooms, ranges: rooms, empty, lost }
    }
}

/// Runs the programs for exits on a system call that sleeps for a known time. So the kernel's
/// clock, maps and verifier are tested in place of the interpreter's.
#[test]
fn times_in_the_kernel_are_those_that_the_thread_stood_still() {
    let Ok(tracefs) = Tracefs::open() else { return eprintln!("skipped: no tracefs") };
    let calls =
        ["enter", "exit"].map(|end| tracefs.event(&format!("syscalls/sys_{end}_clock_nanosleep")));
    let [Ok(enter), Ok(exit)] = calls else { return eprintln!("skipped: no such tracepoints") };
    let Some(alone) = Alone::new(64) else { return eprintln!("skipped: no eBPF") };
    let maps = alone.maps();
    // On Intel, reason 48 is an EPT violation. Here each call has it: its clock (1) is taken as the
    // ISA, and its flags as the reason.
    let stand_in = tracepoint::parse(&format!(
        "ID: {}\n\tfield:int isa;\toffset:16;\tsize:4;\n\tfield:int exit_reason;\toffset:24;\t\
         size:4;\n\tfield:u64 info1;\toffset:16;\tsize:8;\n",
        enter.number
    ));
    let exits = programs::exit(&stand_in.unwrap(), maps).unwrap();
    let load = |text: &[u64]| {
        Program::load(ProgramInput::ByPerf, text).unwrap_or_else(|error| panic!("{error}"))
    };
    let [exits, entries] = [load(&exits), load(&programs::entry(maps))];
    let Ok(_begin) = Event::run(enter.number, &exits) else { return eprintln!("skipped: no perf") };
    let _end = Event::run(exit.number, &entries).unwrap();
    let sleep = |ns: i64| {
        let time = libc::timespec { tv_sec: 0, tv_nsec: ns };
        let began = Instant::now();
        // SAFETY: the time is valid for the call, and the call returns no remaining time. The flags
        // are in the place of an exit's reason. Of 48, the call uses only the lowest bit, which is
        // 0.
        let answer = unsafe {
            libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 48, &time, std::ptr::null_mut())
        };
        assert_eq!(answer, 0);
        began.elapsed()
    };
    let times = [2_000_000, 2_000_000, 2_000_000, 40_000_000];
    let felt: Vec<Duration> = times.map(sleep).into();
    // SAFETY: the call has no argument and changes nothing.
    let own = (std::process::id().cast_signed(), unsafe { libc::gettid() });
    let entries: BTreeMap<_, _> =
        alone.room.entries().unwrap().into_iter().map(|(key, words)| (ids(key), words)).collect();
    let stalls = thread(&entries[&own]).stalls.unwrap();
    let (why, slept) = stalls.iter().next().unwrap();
    assert!(stalls.len() == 1 && why.is_fault(), "{stalls:?}");
    assert_eq!(slept.count, 4);
    let all: u128 = felt.iter().map(Duration::as_nanos).sum();
    let asked: u128 = times.iter().map(|ns| *ns as u128).sum();
    assert!((asked..=all).contains(&slept.total_ns.into()), "{asked} {slept:?} {all}");
    // On a busy machine any of them may be the longest.
    let longest = felt.iter().map(Duration::as_nanos).max().unwrap();
    assert!((40_000_000..=longest).contains(&slept.longest_ns.into()), "{slept:?}");
}

#[test]
fn events_that_find_no_room_are_in_the_guests_own_account() {
    let Ok(tracefs) = Tracefs::open() else { return eprintln!("skipped: no tracefs") };
    let Ok(call) = tracefs.event("syscalls/sys_enter_clock_nanosleep") else {
        return eprintln!("skipped: no such tracepoint");
    };
    let Some(alone) = Alone::new(1) else { return eprintln!("skipped: no eBPF") };
    let maps = alone.maps();
    let program =
        Program::load(ProgramInput::ByPerf, &programs::counted(programs::USER_EXITS, maps));
    let program = program.unwrap_or_else(|error| panic!("{error}"));
    let Ok(_event) = Event::run(call.number, &program) else {
        return eprintln!("skipped: no perf");
    };
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let own = alone.room.value(key(std::process::id().cast_signed(), 0)).unwrap();
    assert!(own[programs::USER_EXITS] >= 5);
    assert_eq!(alone.room.entries().unwrap().len(), 1);
}

#[test]
fn a_perf_counter_counts_every_event_beside_a_program() {
    let Ok(tracefs) = Tracefs::open() else { return eprintln!("skipped: no tracefs") };
    let Ok(call) = tracefs.event("syscalls/sys_enter_clock_nanosleep") else {
        return eprintln!("skipped: no such tracepoint");
    };
    let Some(alone) = Alone::new(64) else { return eprintln!("skipped: no eBPF") };
    let maps = alone.maps();
    let program =
        Program::load(ProgramInput::ByPerf, &programs::counted(programs::USER_EXITS, maps))
            .unwrap();
    let Ok(_event) = Event::run(call.number, &program) else {
        return eprintln!("skipped: no perf");
    };
    let counter = Event::count(call.number, 0).unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // A signal may restart a sleep.
    assert!(counter.counted().unwrap() >= 5);
}

#[test]
fn a_refused_program_is_reported_with_the_verifiers_message() {
    if Map::new(Kind::Array, 1, 1).is_err() {
        return eprintln!("skipped: no eBPF");
    }
    // The program reads a register that was never set.
    let text = [0x0000_0000_0000_60bf, 0x0000_0000_0000_0095];
    let refused = Program::load(ProgramInput::ByPerf, &text).unwrap_err();
    assert!(refused.to_string().contains("!read_ok"), "{refused}");
}

#[test]
fn threads_are_counted_by_perf_without_programs() {
    let mut events = Events::counting("refused for the test");
    let own = std::process::id().cast_signed();
    events.follow(own, [own, i32::MAX].into_iter());
    let mut heard = Accounts::default();
    events.hear(&mut heard);
    if matches!(events.how, How::Counts { .. }) {
        assert_eq!(events.source(), Source::PerfCounts);
        assert_eq!(heard.threads[&(own, own)].counts[USER_EXIT], 0);
        assert_eq!(heard.threads[&(own, own)].stalls, None);
        assert_eq!(events.why(USER_EXIT), None);
        events.forget(own);
        events.hear(&mut heard);
        assert!(heard.threads.is_empty());
    }
    for event in [EXIT, UNMAP, AGE] {
        let why = events.why(event).unwrap();
        assert!(why.contains("refused for the test") || why.contains("tracefs"), "{event}: {why}");
    }
}

/// Runs in its own process, until it is killed.
#[test]
#[ignore = "another test runs it"]
fn listens_until_it_is_killed() {
    if std::env::var_os(LISTENS).is_none() {
        return;
    }
    let events = Events::open();
    let How::Programs(programs) = &events.how else { return println!("NONE") };
    for program in &programs.programs {
        println!("PROGRAM {}", program.number().unwrap());
    }
    println!("READY");
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

const LISTENS: &str = "SLAT_WATCH_LISTENS";

#[test]
fn nothing_stays_of_a_listener_that_is_killed() {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "events::tests::listens_until_it_is_killed", "--nocapture", "--ignored"])
        .env(LISTENS, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let lines: Vec<String> =
        lines.take_while(|line| !line.contains("READY") && !line.contains("NONE")).collect();
    let number = |line: &String| line.split_once("PROGRAM ")?.1.parse::<u32>().ok();
    let numbers: Vec<u32> = lines.iter().filter_map(number).collect();
    let there = |number: &&u32| Program::is_there(**number).unwrap_or(false);
    let before = numbers.iter().filter(there).count();
    // Sends SIGKILL.
    child.kill().unwrap();
    child.wait().unwrap();
    if numbers.is_empty() {
        return eprintln!("skipped: no program can be loaded");
    }
    assert_eq!(before, numbers.len());
    // The kernel frees the programs once nothing can run them any more.
    while numbers.iter().any(|number| there(&number)) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_thread_with_refused_events_makes_the_sum_unknown() {
    // No tracepoint has this number; an event that perf does open is not put in its place.
    let numbers = vec![(USER_EXIT, u64::MAX), (PUSH, u64::MAX)];
    let mut events = Events::of(How::Counts { numbers, threads: BTreeMap::new() }, BTreeMap::new());
    events.follow(10, [rustix::thread::gettid().as_raw_pid()].into_iter());
    assert!(events.roomless(10).is_some_and(|why| why.contains("not counted")));
    // A thread that ended has no events.
    events.forget(10);
    assert_eq!(events.roomless(10), None);
}
