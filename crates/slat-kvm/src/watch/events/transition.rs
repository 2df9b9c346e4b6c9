//! The transition: the part of an exit that lies outside of `kvm_exit` to `kvm_entry`.
//!
//! The processor leaves the guest before the first of these tracepoints, and enters it after the
//! second. No tracepoint covers that time, nor KVM's own work on both ways and half of the
//! programs' time. So the watch runs a guest of its own, whose only vCPU exits again and again with
//! a question that KVM answers at once, without a fault. The transition is the time of that run
//! less the time from exit to entry. A pass of the same steps without questions gives the time of
//! the guest's own instructions, which is subtracted.

use crate::guest::{Guest, Shape, Vcpu};
use crate::work::{Touch, Work};
use crate::{Error, Mode};
use std::time::{Duration, Instant};

/// Number of questions in a batch.
const QUESTIONS: u64 = 64;

/// Largest number of batches. The result is their median.
const BATCHES: usize = 15;

/// No batch begins after this time, unless it is the first.
const ENOUGH: Duration = Duration::from_millis(50);

/// Reason why there is no transition although the guest ran.
const SILENT: &str = "kvm_exit has not fired for the watch's own guest: where KVM works without \
                      hardware virtualisation (kvm_pvm) it never does";

/// Number of a thread's exits, and their time from exit to entry in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outside {
    pub exits: u64,
    pub ns: u64,
}

/// The time after `KVM_RUN` returned, and the accounts then.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Instant,
    known: Outside,
}

/// Measures the transition in nanoseconds, on this thread. `known` reads the programs' account of
/// the thread.
///
/// # Errors
/// The reason why it cannot be measured, in words.
pub(super) fn measure(known: impl Fn() -> Option<Outside>) -> Result<u64, String> {
    let page = rustix::param::page_size() as u64;
    let shape = Shape { memory: QUESTIONS * page, mode: Mode::Legacy, ..Shape::default() };
    let (_guest, mut vcpus) = Guest::new(&shape).map_err(refused)?;
    let mut pass = |touch| -> Result<Mark, String> {
        run(&mut vcpus[0], touch).map_err(refused)?;
        let at = Instant::now();
        Ok(Mark { at, known: known().ok_or(SILENT)? })
    };
    // The first pass of each kind maps what the guest's code needs.
    pass(Touch::Skip)?;
    pass(Touch::Ask)?;
    let mut last = pass(Touch::Skip)?;
    let (began, mut each) = (last.at, Vec::new());
    while each.len() < BATCHES && (each.is_empty() || began.elapsed() < ENOUGH) {
        let asked = pass(Touch::Ask)?;
        let skipped = pass(Touch::Skip)?;
        each.push(transition(last, asked, skipped));
        last = skipped;
    }
    each.sort_unstable_by(f64::total_cmp);
    Ok(each[each.len() / 2].round() as u64)
}

fn run(vcpu: &mut Vcpu, touch: Touch) -> Result<(), Error> {
    vcpu.load(&Work::each_page(touch))?;
    vcpu.run().map(drop)
}

fn refused(error: Error) -> String {
    format!("the watch's own guest cannot run: {error}")
}

/// Returns the transition, by two passes that follow each other. Both contain the way from the last
/// exit to the host's clock, and the guest's instructions other than its questions.
fn transition(before: Mark, asked: Mark, skipped: Mark) -> f64 {
    let inside = |from: Mark, to: Mark| {
        (to.at - from.at).as_nanos() as f64 - (to.known.ns - from.known.ns) as f64
    };
    let exits = |from: Mark, to: Mark| (to.known.exits - from.known.exits) as f64;
    let more = exits(before, asked) - exits(asked, skipped);
    let more_inside = inside(before, asked) - inside(asked, skipped);
    // If questions cause no exits, there is nothing to divide by.
    if more > 0.0 { (more_inside / more).max(0.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_both_passes_have_is_no_part_of_a_transition() {
        let begin = Instant::now();
        let mark = |at, exits, ns| {
            let at = begin + Duration::from_nanos(at);
            Mark { at, known: Outside { exits, ns } }
        };
        // Each exit takes 1000 ns from exit to entry, and 400 of transition. A pass has one exit at
        // its end, 50 ns of its own, and any time in user space, which is between exit and entry.
        let before = mark(0, 5, 9_000);
        let asked = mark(7_000 + 257 * 1_400 + 50, 262, 9_000 + 7_000 + 257 * 1_000);
        let skipped = mark(7_000 + 257 * 1_400 + 50 + 3_000 + 1_400 + 50, 263, 277_000);
        assert_eq!(transition(before, asked, skipped), 400.0);
        // Nothing left the guest.
        assert_eq!(transition(before, before, before), 0.0);
    }

    #[test]
    fn a_host_whose_programs_hear_nothing_has_a_reason() {
        let why = measure(|| None).unwrap_err();
        assert!(why.contains("kvm_exit") || why.contains("cannot run"), "{why}");
    }
}
