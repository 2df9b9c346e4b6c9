//! Verdicts in words.

use super::{Account, C, Cause, Found, LEAST, Verdict};
use slat_kvm::watch::{GuestTotal, Metric};
use slat_lab::numbers::{bytes, thousands};
use std::fmt::Write;

/// What to do about a dirty log.
const LOGGED: &str = "let the migration, or whatever logs its memory, come to its end, or give it \
                      a faster link (--link tells whether it converges)";

/// What to do about swap.
const SWAPPED: &str = "give its control group more memory (memory.high, memory.max), or the host";

/// What to do about reads from a disk that are none of swap.
const READ: &str = "its memory comes from a file: read it in advance, or keep it in the page cache";

/// Returns the cause and what to do about it.
pub(super) fn words(
    cause: Cause,
    count: u64,
    account: &Account,
    guest: &GuestTotal,
) -> (String, String) {
    let times = thousands(count.try_into().unwrap_or(i64::MAX));
    let merges = guest.invalidated_by.get("ksmd").is_some_and(|ranges| *ranges > 0);
    let timed = account.sums[cause as usize].of > 0.0;
    let swap = bytes(account.swap.unwrap_or(0));
    let pressure = pressure(guest);
    let (what, to_do) = match cause {
        C::WaitingForCpu => (
            "waiting for a CPU".to_owned(),
            "give its vCPUs more CPU (fewer guests on this host, pinning, or cpu.weight or cpu.max \
             of its control group)",
        ),
        C::ProtectedWrites if !timed => {
            (format!("{times} writes that a dirty ring logged (as in a migration)"), LOGGED)
        }
        C::ProtectedWrites if merges => (
            "in writes to protected pages (ksmd merges its pages, or a dirty log runs)".to_owned(),
            "keep KSM away from it (QEMU: mem-merge=off), unless a migration runs",
        ),
        C::ProtectedWrites => (
            "in writes to protected pages (a dirty log runs, as in a migration)".to_owned(),
            LOGGED,
        ),
        C::Swap if timed => {
            (format!("in faults while {swap} of its memory were in swap{pressure}"), SWAPPED)
        }
        C::Swap => (
            format!("{times} host major faults while {swap} of its memory were in swap{pressure}"),
            SWAPPED,
        ),
        C::HostMajorFaults if timed => {
            ("in faults that read from a disk (host major faults)".to_owned(), READ)
        }
        C::HostMajorFaults => (format!("{times} host major faults (reads from a disk)"), READ),
        C::Reclaim => (
            format!("while its control group reclaimed memory{pressure}"),
            "give its control group more memory (memory.high, memory.max), or move others out",
        ),
        C::Mapping => (
            "in faults that map memory".to_owned(),
            "nothing, where it uses memory for the first time; huge pages or preallocation make \
             that shorter",
        ),
        C::Unmapped => {
            return (
                format!("{times} ranges unmapped by the host ({})", takers(guest)),
                remedy(guest),
            );
        }
        C::Idle => ("idle".to_owned(), ""),
    };
    (what, to_do.to_owned())
}

/// Returns the memory pressure of the guest's control group in words, if it is known and is worth
/// a word.
fn pressure(guest: &GuestTotal) -> String {
    let some = guest.total.get(&Metric::PressureSomeNs);
    let share = some.map_or(0.0, |ns| *ns as f64 / 1e9 / guest.seconds);
    match share.is_finite() && share >= LEAST {
        true => format!(" (memory pressure of its control group: {} of the time)", percent(share)),
        false => String::new(),
    }
}

/// Returns the threads that unmapped most, the first ones first.
fn takers(guest: &GuestTotal) -> String {
    let mut by: Vec<_> = guest.invalidated_by.iter().collect();
    by.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let clean = |name: &str| name.chars().filter(|c| !c.is_control()).collect::<String>();
    let by = by.iter().take(3).map(|(name, count)| {
        format!("{} by {}", thousands((**count).try_into().unwrap_or(i64::MAX)), clean(name))
    });
    match by.collect::<Vec<_>>().join(", ") {
        by if by.is_empty() => "by unknown threads".to_owned(),
        by => by,
    }
}

/// Returns what to do about the thread that unmapped most.
fn remedy(guest: &GuestTotal) -> String {
    let first = guest.invalidated_by.iter().max_by_key(|(_, count)| **count);
    match first.map(|(name, _)| name.as_str()) {
        Some("ksmd") => "keep KSM away from it (QEMU: mem-merge=off)",
        Some("khugepaged") => "it collapses pages to huge ones: back the guest by huge pages",
        Some(name) if name.starts_with("kswapd") => "the host lacks memory: move a guest away",
        _ => "look for what makes its VMM unmap: a balloon, NUMA balancing, reclaim of its group",
    }
    .to_owned()
}

/// Returns the verdict in words.
pub(super) fn said(verdict: &Verdict, guest: &GuestTotal) -> String {
    let who = &verdict.guest;
    let (idle, stalls): (Vec<_>, Vec<_>) =
        verdict.causes.iter().partition(|it| it.cause == C::Idle);
    let still = verdict.stood_still.filter(|share| *share >= LEAST);
    let mut said = match still {
        Some(share) => {
            let at_least = match verdict.not_known.iter().any(|what| *what != "idle") {
                true => "at least ",
                false => "",
            };
            format!("{who} stood still {at_least}{} of its vCPUs' time: ", percent(share))
        }
        None if stalls.is_empty() && guest.vcpus.is_empty() => format!("{who} has no vCPU yet"),
        None if stalls.is_empty() && never_ran(guest) => {
            format!("{who}: its vCPUs did not run: it was idle all the time, or is paused")
        }
        None if stalls.is_empty() && verdict.not_known.is_empty() => {
            format!("{who}: nothing kept it from running")
        }
        None if stalls.is_empty() => {
            format!("{who}: nothing that is known here kept it from running")
        }
        None => format!("{who}: "),
    };
    let each: Vec<String> = stalls.iter().map(|it| cause(it, guest)).collect();
    said += &each.join("; ");
    if let Some(share) = idle.first().and_then(|it| it.share) {
        let _ = write!(said, "; it was idle {} of the time", percent(share));
    }
    said += ".";
    let sum: f64 = stalls.iter().filter_map(|it| it.share).sum();
    if still.is_some_and(|still| sum > still + LEAST) {
        said += " (These shares overlap: a vCPU can wait for a CPU within a fault.)";
    }
    let to_do: Vec<_> =
        stalls.iter().map(|it| &*it.to_do).filter(|it| !it.is_empty()).take(2).collect();
    match to_do[..] {
        [] => {}
        [one, other] => drop(write!(said, " To do: (1) {one}; (2) {other}.")),
        _ => drop(write!(said, " To do: {}.", to_do.concat())),
    }
    if !verdict.not_known.is_empty() {
        let _ = write!(said, " Not known here: {}.", verdict.not_known.join(", "));
    }
    said
}

/// Returns a cause with its share, and when it was there, if that was not all the time.
fn cause(it: &Found, guest: &GuestTotal) -> String {
    let about = if it.is_estimate { "about " } else { "" };
    let mut said = match it.share {
        Some(share) => format!("{about}{} {}", percent(share), it.what),
        None if it.cause == C::Unmapped => it.what.clone(),
        None => format!("{}, whose time is not known", it.what),
    };
    if guest.samples.len() > 2 && it.to - it.from < 0.8 * guest.seconds {
        let _ = write!(said, ", from {:.1} s to {:.1} s", it.from, it.to);
    }
    said
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// Returns whether the vCPUs are known to have had a CPU for less than a thousandth of the time.
fn never_ran(guest: &GuestTotal) -> bool {
    let running = guest.total.get(&Metric::RunningNs);
    running.is_some_and(|ns| (*ns as f64) < 1e6 * guest.seconds)
}
