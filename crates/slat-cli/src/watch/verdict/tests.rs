//! Verdicts on made accounts: each cause alone, and each pair in the order of their shares.

use super::*;
use crate::watch::fake::guest as made;
use slat_kvm::watch::Values;

const VCPUS: usize = 2;
const SAMPLES: usize = 10;

/// All metrics that a verdict reads, of a guest that does nothing for a second.
fn quiet() -> Values {
    [
        Metric::WaitingNs,
        Metric::ProtectedNs,
        Metric::FaultsProtected,
        Metric::FaultNs,
        Metric::FaultsRead,
        Metric::FaultsWritten,
        Metric::FaultsExecuted,
        Metric::HostMajorFaults,
        Metric::SwapBytes,
        Metric::PressureSomeNs,
        Metric::PressureFullNs,
        Metric::Invalidations,
        Metric::IdleNs,
    ]
    .into_iter()
    .map(|metric| (metric, 0))
    .collect()
}

/// Adds a cause that takes this share of the vCPUs' time to the values of a second.
fn add(values: &mut Values, cause: Cause, share: f64) {
    let ns = (share * 1e9 * VCPUS as f64) as u64;
    // A read from a disk takes 200 µs here, a fault with reclaim 20 µs, one without 2 µs.
    let [reads, slow, fast] = [200_000, 20_000, 2000].map(|each| ns / each);
    let each: &[(Metric, u64)] = match cause {
        C::WaitingForCpu => &[(Metric::WaitingNs, ns)],
        C::ProtectedWrites => {
            &[(Metric::ProtectedNs, ns), (Metric::FaultNs, ns), (Metric::FaultsProtected, 5000)]
        }
        C::Swap => &[
            (Metric::FaultNs, ns),
            (Metric::FaultsWritten, reads),
            (Metric::HostMajorFaults, reads),
            (Metric::SwapBytes, 89 << 20),
            (Metric::PressureSomeNs, ns * 9 / 10),
        ],
        C::HostMajorFaults => &[
            (Metric::FaultNs, ns),
            (Metric::FaultsRead, reads),
            (Metric::HostMajorFaults, reads),
            (Metric::PressureSomeNs, 0),
        ],
        C::Reclaim => {
            &[(Metric::FaultNs, ns), (Metric::FaultsWritten, slow), (Metric::PressureSomeNs, ns)]
        }
        C::Mapping => &[(Metric::FaultNs, ns), (Metric::FaultsWritten, fast)],
        C::Unmapped => &[(Metric::Invalidations, 306)],
        C::Idle => &[(Metric::IdleNs, ns)],
    };
    each.iter().for_each(|(metric, value)| *values.entry(*metric).or_default() += value);
}

/// A guest with these causes all the time, as QEMU's `web01`.
fn guest(causes: &[(Cause, f64)], known: impl Fn(Metric) -> bool) -> GuestTotal {
    let mut values = quiet();
    causes.iter().for_each(|(cause, share)| add(&mut values, *cause, *share));
    values.retain(|metric, _| known(*metric));
    samples(&vec![values; SAMPLES])
}

/// A guest with a sample of each of these values in a second.
fn samples(values: &[Values]) -> GuestTotal {
    let mut it = made("qemu-system-x86");
    (it.pid, it.domain, it.seconds) = (177, Some("web01".to_owned()), values.len() as f64);
    it.invalidated_by = [("ksmd".to_owned(), 3000), ("qemu".to_owned(), 60)].into();
    let one = it.vcpus[0].clone();
    it.vcpus = vec![one; VCPUS];
    let sample = |(second, guest): (usize, &Values)| Sample {
        at: second as f64 + 1.0,
        seconds: 1.0,
        guest: guest.clone(),
        vcpus: vec![Values::new(); VCPUS],
    };
    it.samples = values.iter().enumerate().map(sample).collect();
    it
}

fn order(guest: &GuestTotal) -> Vec<Cause> {
    of(guest).causes.iter().map(|it| it.cause).collect()
}

#[test]
fn each_cause_alone_is_the_only_one() {
    for cause in C::ALL {
        let it = of(&guest(&[(cause, 0.3)], |_| true));
        assert_eq!(it.causes.len(), 1, "{cause:?}: {it:?}");
        assert_eq!((it.causes[0].cause, it.not_known.len()), (cause, 0));
        let share = it.causes[0].share.unwrap_or(0.3);
        assert!((share - 0.3).abs() < 0.01, "{cause:?}: {it:?}");
        let still = if matches!(cause, C::Idle | C::Unmapped) { 0.0 } else { share };
        assert_eq!(it.stood_still, Some(still), "{cause:?}");
        assert_eq!(it.causes[0].to_do.is_empty(), cause == C::Idle);
    }
}

#[test]
fn of_two_causes_the_one_with_the_larger_share_is_first() {
    for one in C::ALL {
        for other in C::ALL {
            // Reads from a disk are of swap, as a whole, while anything is in swap.
            let read = |cause| matches!(cause, C::Swap | C::HostMajorFaults);
            if one == other || read(one) && read(other) {
                continue;
            }
            // How long a read took, and how long reclaim, no metric tells apart.
            let reclaims = [one, other].contains(&C::Reclaim);
            let found = order(&guest(&[(one, 0.4), (other, 0.2)], |_| true));
            // A count alone comes behind all shares, and idleness last.
            let is_last = |cause| matches!(cause, C::Unmapped | C::Idle);
            let expected = match (is_last(one), is_last(other)) {
                (true, true) => [C::Unmapped, C::Idle],
                (true, false) => [other, one],
                _ => [one, other],
            };
            if reclaims && (read(one) || read(other)) {
                assert!(expected.contains(&found[0]), "{one:?} with {other:?}: {found:?}");
                continue;
            }
            assert_eq!(found[..2], expected, "{one:?} with {other:?}");
        }
    }
}

#[test]
fn a_verdict_reads_like_this() {
    let causes = [(C::ProtectedWrites, 0.12), (C::WaitingForCpu, 0.18), (C::Idle, 0.4)];
    assert_eq!(
        of(&guest(&causes, |metric| metric != Metric::Invalidations)).said,
        "177 web01 stood still at least 30 % of its vCPUs' time: 18 % waiting for a CPU; 12 % in \
         writes to protected pages (ksmd merges its pages, or a dirty log runs); it was idle 40 % \
         of the time. To do: (1) give its vCPUs more CPU (fewer guests on this host, pinning, or \
         cpu.weight or cpu.max of its control group); (2) keep KSM away from it (QEMU: \
         mem-merge=off), unless a migration runs. Not known here: ranges unmapped by the host."
    );
    assert_eq!(
        of(&guest(&[(C::Idle, 0.95)], |_| true)).said,
        "177 web01: nothing kept it from running; it was idle 95 % of the time."
    );
    let mut still = guest(&[], |_| true);
    still.total.insert(Metric::RunningNs, 9000);
    assert!(of(&still).said.contains("idle all the time, or is paused"), "{}", of(&still).said);
    let said = of(&guest(&[(C::Unmapped, 0.0)], |_| true)).said;
    assert!(said.contains("177 web01: 3,060 ranges unmapped by the host (3,000 by ksmd"), "{said}");
    assert!(said.contains("mem-merge=off"), "{said}");
}

#[test]
fn overlapping_shares_are_capped_by_idle_and_guest_time() {
    let causes = [(C::Mapping, 0.4), (C::WaitingForCpu, 0.3), (C::Idle, 0.2)];
    let mut both = guest(&causes, |_| true);
    let all = 1e9 * VCPUS as f64 * SAMPLES as f64;
    let ns = |share: f64| (share * all) as u64;
    both.total.extend([(Metric::GuestNs, ns(0.3)), (Metric::RunningNs, ns(0.6))]);
    let it = of(&both);
    assert!((it.stood_still.unwrap() - 0.5).abs() < 0.01, "{it:?}");
    assert!(it.said.contains("stood still 50 % of") && it.said.contains("overlap"), "{}", it.said);
    // Ticks may count more than all the time: the largest cause is not hidden by them.
    both.total.extend([(Metric::GuestNs, ns(0.9)), (Metric::RunningNs, ns(0.9))]);
    assert!((of(&both).stood_still.unwrap() - 0.4).abs() < 0.01);
}

/// Pages that are read back at once are seen in swap by few samples.
#[test]
fn major_faults_count_as_swap_if_swap_is_in_use_nearby() {
    let mut often = guest(&[(C::Swap, 0.3)], |_| true);
    let empty = |it: &mut Sample| it.guest.insert(Metric::SwapBytes, 0);
    for (at, sample) in often.samples.iter_mut().enumerate().filter(|(at, _)| at % 3 != 1) {
        assert!(empty(sample).is_some(), "{at}");
    }
    assert_eq!(order(&often), [C::Swap]);
    let mut once = guest(&[(C::Swap, 0.3)], |_| true);
    once.samples.iter_mut().skip(1).for_each(|it| _ = empty(it));
    let causes = order(&once);
    assert!(causes.contains(&C::HostMajorFaults) && causes.contains(&C::Swap), "{causes:?}");
}

#[test]
fn a_swapped_guests_verdict_has_its_groups_memory_pressure() {
    let mut swapped = guest(&[(C::Swap, 0.3)], |_| true);
    assert!(!of(&swapped).said.contains("pressure"));
    swapped.total.insert(Metric::PressureSomeNs, 1_700_000_000);
    let said = of(&swapped).said;
    assert!(said.contains("(memory pressure of its control group: 17 % of the time)"), "{said}");
}

#[test]
fn a_metric_that_is_unknown_is_not_taken_for_zero() {
    let nothing = of(&guest(&[], |_| false));
    assert_eq!((nothing.stood_still, nothing.causes.len()), (None, 0));
    assert_eq!(nothing.not_known.len(), 8, "{nothing:?}");
    assert!(nothing.said.contains("nothing that is known here"), "{}", nothing.said);
    // Known in half of the samples only: it is a share of their time.
    let mut values = vec![quiet(); SAMPLES];
    values.iter_mut().for_each(|values| add(values, C::WaitingForCpu, 0.3));
    for values in &mut values[5..] {
        values.remove(&Metric::WaitingNs);
    }
    let it = of(&samples(&values));
    assert!((it.causes[0].share.unwrap() - 0.3).abs() < 0.01, "{it:?}");
}

#[test]
fn counts_and_pressure_reveal_swap_without_fault_times() {
    let untimed = |metric| !matches!(metric, Metric::FaultNs | Metric::ProtectedNs);
    let both = [(C::Swap, 0.3), (C::WaitingForCpu, 0.1)];
    let it = of(&guest(&both, untimed));
    assert_eq!((it.causes[0].cause, it.causes[0].is_estimate), (C::Swap, true), "{it:?}");
    assert!(
        it.said.contains("about 27 % in faults while 89 MiB of its memory were in swap"),
        "{}",
        it.said
    );
    assert!(it.not_known.contains(&"time in other faults"), "{it:?}");
    let nor_pressure = |metric| untimed(metric) && metric != Metric::PressureSomeNs;
    let it = of(&guest(&both, nor_pressure));
    let swap = it.causes.iter().find(|it| it.cause == C::Swap).unwrap();
    assert_eq!((swap.share, swap.count), (None, Some(30_000)));
    assert!(
        it.said.contains(
            "30,000 host major faults while 89 MiB of its memory were in swap, whose time"
        )
    );
    // Reclaim without a read is no swap, whatever has been in swap for long.
    let mut values = quiet();
    add(&mut values, C::Reclaim, 0.3);
    values.insert(Metric::SwapBytes, 5 << 20);
    values.retain(|metric, _| untimed(*metric));
    assert_eq!(order(&samples(&vec![values; SAMPLES])), [C::Reclaim]);
}

#[test]
fn a_dirty_ring_tells_of_a_log_where_no_exit_is_timed() {
    let mut values = quiet();
    values.insert(Metric::PagesLogged, 5000);
    values.retain(|metric, _| !matches!(metric, Metric::FaultNs | Metric::ProtectedNs));
    values.remove(&Metric::FaultsProtected);
    let mut it = of(&samples(&vec![values; SAMPLES]));
    assert!(it.said.contains("50,000 writes that a dirty ring logged"), "{}", it.said);
    assert_eq!((it.causes[0].cause, it.causes[0].share), (C::ProtectedWrites, None));
    it.take([2.0, 1.0].map(|at| Event::new(at, "a migration began")).into());
    assert_eq!(it.events.iter().map(|event| event.at).collect::<Vec<_>>(), [1.0, 2.0]);
}

#[test]
fn first_touches_beside_a_few_disk_reads_are_not_swap() {
    let mut values = quiet();
    add(&mut values, C::Mapping, 0.3);
    values.insert(Metric::FaultsWritten, 100_000);
    values.insert(Metric::HostMajorFaults, 5);
    values.insert(Metric::SwapBytes, 1 << 20);
    assert_eq!(order(&samples(&vec![values; SAMPLES])), [C::Mapping]);
}

#[test]
fn a_cause_that_was_there_for_a_while_has_its_time() {
    let mut values = vec![quiet(); SAMPLES];
    values[3..6].iter_mut().for_each(|values| add(values, C::ProtectedWrites, 0.5));
    let it = of(&samples(&values));
    assert_eq!((it.causes[0].from, it.causes[0].to), (3.0, 6.0));
    assert!(it.said.contains(", from 3.0 s to 6.0 s"), "{}", it.said);
}
