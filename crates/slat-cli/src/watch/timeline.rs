//! What happened to a guest while it was watched, in the order of time.

use serde::Serialize;
use slat_kvm::watch::{GuestTotal, Metric, Sample, State};
use slat_lab::numbers::{bytes, thousands};

/// Bytes that are swapped out before it is worth an event: a VMM's own idle pages are fewer.
const SWAPPED: u64 = 1 << 20;

/// Seconds without an event of `memory.high` after which the next one begins anew.
const QUIET: f64 = 5.0;

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Event {
    /// Seconds from the beginning of the watch; what samples tell is as exact as they are.
    pub at: f64,
    /// What happened, in words.
    pub what: String,
}

impl Event {
    /// Makes an event.
    pub fn new(at: f64, what: impl Into<String>) -> Self {
        Self { at, what: what.into() }
    }
}

/// Returns the events that a guest's samples tell.
pub fn of(guest: &GuestTotal) -> Vec<Event> {
    let mut events = swap(&guest.samples);
    events.extend(high(&guest.samples));
    events.extend(threads(guest));
    events.sort_by(|one, other| one.at.total_cmp(&other.at));
    events
}

/// Returns when memory began to be swapped out, and when all of that was back.
fn swap(samples: &[Sample]) -> Vec<Event> {
    let mut events = Vec::new();
    let mut least: Option<u64> = None;
    let mut is_out = false;
    for sample in samples {
        let Some(swapped) = sample.guest.get(&Metric::SwapBytes).copied() else { continue };
        let before = *least.get_or_insert(swapped);
        least = Some(before.min(swapped));
        if !is_out && swapped >= before + SWAPPED {
            is_out = true;
            events.push(Event::new(
                begin(sample),
                format!("its memory began to be swapped out: {} at first", bytes(swapped)),
            ));
        } else if is_out && swapped <= before {
            is_out = false;
            events.push(Event::new(sample.at, "its memory was back from swap"));
        }
    }
    events
}

/// Returns when the control group went over `memory.high`, and until when it did again and again.
fn high(samples: &[Sample]) -> Vec<Event> {
    let mut spans: Vec<(f64, f64, u64)> = Vec::new();
    for sample in samples {
        let times = sample.guest.get(&Metric::MemoryHighEvents).copied().unwrap_or(0);
        match spans.last_mut() {
            _ if times == 0 => {}
            Some((_, to, count)) if begin(sample) - *to < QUIET => {
                (*to, *count) = (sample.at, *count + times);
            }
            _ => spans.push((begin(sample), sample.at, times)),
        }
    }
    let said = |(from, to, times)| {
        let times = thousands(i64::try_from(times).unwrap_or(i64::MAX));
        let what =
            format!("its control group went over memory.high: {times} times until {to:.1} s");
        Event::new(from, what)
    };
    spans.into_iter().map(said).collect()
}

/// Returns the threads of vCPUs that came or went, but for those that went with the guest.
fn threads(guest: &GuestTotal) -> Vec<Event> {
    let end = guest.samples.last().map_or(0.0, |sample| sample.at);
    let is_own = |at: f64| guest.state == State::Runs || at < end;
    let said = |it: &slat_kvm::watch::ThreadChange| {
        let thread = it.thread.map_or(String::new(), |thread| format!(" {thread}"));
        let verb = if it.came { "came" } else { "ended" };
        Event::new(it.at, format!("the thread{thread} of vCPU {} {verb}", it.vcpu))
    };
    guest.threads.iter().filter(|it| is_own(it.at)).map(said).collect()
}

fn begin(sample: &Sample) -> f64 {
    (sample.at - sample.seconds).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::fake;
    use slat_kvm::watch::ThreadChange;

    /// A guest with a sample a second: bytes in swap, and events of `memory.high`.
    fn guest(seconds: &[(u64, u64)]) -> GuestTotal {
        let mut guest = fake::guest("qemu");
        let one = guest.samples.remove(0);
        for (second, (swap, high)) in seconds.iter().enumerate() {
            let mut sample = Sample { at: second as f64 + 1.0, seconds: 1.0, ..one.clone() };
            let values = [(Metric::SwapBytes, *swap), (Metric::MemoryHighEvents, *high)];
            sample.guest.extend(values);
            guest.samples.push(sample);
        }
        guest
    }

    fn said(guest: &GuestTotal) -> Vec<String> {
        of(guest).iter().map(|it| format!("{:.0} {}", it.at, it.what)).collect()
    }

    #[test]
    fn swap_and_memory_high_have_their_beginning_and_their_end() {
        let seconds = [(4096, 0), (4096, 7), (5 << 20, 1000), (9 << 20, 0), (4096, 0)];
        assert_eq!(
            said(&guest(&seconds)),
            [
                "1 its control group went over memory.high: 1,007 times until 3.0 s",
                "2 its memory began to be swapped out: 5 MiB at first",
                "5 its memory was back from swap",
            ]
        );
        // What was swapped before the watch is no event, and a few pages are none.
        assert!(said(&guest(&[(9 << 20, 0), (9 << 20, 0), ((9 << 20) + 4096, 0)])).is_empty());
        // After some quiet seconds, memory.high is exceeded anew.
        let mut seconds = [(0, 0); 9];
        (seconds[0].1, seconds[8].1) = (1, 1);
        assert_eq!(said(&guest(&seconds)).len(), 2);
    }

    #[test]
    fn a_threads_start_and_end_are_shown_unless_the_guest_ended() {
        let mut one = guest(&[(0, 0), (0, 0)]);
        let change = |at, came| ThreadChange { at, vcpu: 1, came, thread: Some(4713) };
        one.threads = vec![change(1.0, false), change(2.0, true)];
        assert_eq!(said(&one), ["1 the thread 4713 of vCPU 1 ended"]);
        one.state = State::Runs;
        assert_eq!(said(&one)[1], "2 the thread 4713 of vCPU 1 came");
    }
}
