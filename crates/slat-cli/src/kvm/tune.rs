//! Which way of logging dirty pages stalls a guest least, on this host.
//!
//! Every way that the host has is run beside the same guest, in turns; they are ranked by how long
//! the vCPU that had it worst stood still for each page that it touched. A rank is only as good as
//! the difference behind it, so that is tested, too.

use super::live::{Live, middle, stall};
use super::options::{GuestArgs, QUICK_RUN};
use super::values::{HotSet, Others};
use super::{Asked, Pattern};
use crate::needs::GUEST;
use anyhow::bail;
use clap::Args;
use slat_kvm::scenario::live::Config;
use slat_kvm::{Error, HostKvm, Mode};
use slat_lab::cli::time;
use slat_lab::compare::LEAST;
use slat_lab::compare::groups::{Contrast, LEVEL};
use slat_lab::failure::bad_input;
use slat_lab::numbers::seconds;
use slat_lab::rate::Rate;
use slat_lab::record::Measurement;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::turns::order;
use std::time::Duration;

/// Phases of a run.
const PHASES: u64 = 4;

/// A way of logging, and how it is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// Its name.
    pub name: String,
    /// How KVM logs.
    pub mode: Mode,
    /// Pages of one clear.
    pub chunk: Option<u64>,
    /// Bytes of eager splitting, on Arm.
    pub eager_split: Option<u64>,
}

impl Way {
    fn new(name: impl Into<String>, mode: Mode, chunk: Option<u64>) -> Self {
        Self { name: name.into(), mode, chunk, eager_split: None }
    }

    /// What makes QEMU log like this.
    pub fn qemu(&self) -> String {
        let own = match (self.mode, self.chunk) {
            (Mode::Ring { entries }, _) => format!("-accel kvm,dirty-ring-size={entries}"),
            (Mode::ManualInitiallySet, None) => {
                "-accel kvm (this is what it does by itself)".into()
            }
            (Mode::ManualInitiallySet, Some(_)) => {
                "-accel kvm (it clears in pieces of its own choice)".into()
            }
            (Mode::Legacy | Mode::Manual, _) => {
                "no option: with manual protect in the kernel it uses that, initially set".into()
            }
        };
        match self.eager_split {
            Some(bytes) => format!("-accel kvm,eager-split-size={bytes}; {own}"),
            None => own,
        }
    }

    /// What any other VMM calls.
    pub fn ioctls(&self) -> String {
        let enable = "KVM_ENABLE_CAP of";
        let mut calls = match self.mode {
            Mode::Legacy => "none; KVM_GET_DIRTY_LOG clears".to_owned(),
            Mode::Manual => format!("{enable} KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags 1"),
            Mode::ManualInitiallySet => {
                format!("{enable} KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, flags 3")
            }
            Mode::Ring { entries } => format!(
                "{enable} {}, {} bytes; mmap of each vCPU, KVM_RESET_DIRTY_RINGS",
                if cfg!(target_arch = "x86_64") {
                    "KVM_CAP_DIRTY_LOG_RING"
                } else {
                    "KVM_CAP_DIRTY_LOG_RING_ACQ_REL"
                },
                u64::from(entries) * 16
            ),
        };
        if let Some(chunk) = self.chunk {
            calls += &format!("; KVM_CLEAR_DIRTY_LOG of {chunk} pages a call");
        }
        if let Some(bytes) = self.eager_split {
            calls += &format!("; {enable} KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, {bytes}");
        }
        calls
    }
}

/// All ways that the host has.
pub fn ways(host: &HostKvm) -> Vec<Way> {
    let chunked = "manual, initially set, 2048 pages a clear";
    let mut ways = vec![
        Way::new("legacy", Mode::Legacy, None),
        Way::new("manual", Mode::Manual, None),
        Way::new("manual, initially set", Mode::ManualInitiallySet, None),
        Way::new(chunked, Mode::ManualInitiallySet, Some(2048)),
    ];
    for entries in [4096, 65536] {
        let mode = Mode::Ring { entries };
        ways.push(Way::new(mode.to_string(), mode, None));
    }
    let sizes = [2 << 20, 32 << 20, 512 << 20, 1 << 30];
    for bytes in sizes.into_iter().filter(|bytes| host.eager_split_sizes & bytes != 0) {
        let name = format!("manual, initially set, eager split by {}", slat_lab::size::Size(bytes));
        ways.push(Way {
            eager_split: Some(bytes),
            ..Way::new(name, Mode::ManualInitiallySet, None)
        });
    }
    ways.retain(|way| way.mode.check(host).is_ok());
    ways
}

const EXAMPLES: &str = "\
Examples:
  slat tune dirty-log
      256 MiB dirtied at 50 MiB/s for 2 seconds, each way in turns
  slat tune dirty-log --memory 1G --vcpus 4 --backing 2m --dirty-rate 200MiB/s --duration 5s";

/// A guest to tune for.
#[derive(Clone, Debug, Args)]
pub struct TuneArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Bytes that all vCPUs write a second
    #[arg(long, value_name = "RATE", default_value = "50MiB/s")]
    pub dirty_rate: Rate,

    /// Most writes go to a part of the pages: 10:90 is 90 % of them to the first 10 %
    #[arg(long, value_name = "PAGES:STEPS")]
    pub hot_set: Option<HotSet>,

    /// How long each guest runs with its log fetched
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time::run)]
    pub duration: Duration,

    /// From one fetch of the log to the next
    #[arg(long, value_name = "TIME", default_value = "100ms", value_parser = time::some)]
    pub interval: Duration,
}

impl TuneArgs {
    /// As `--quick` has it, if that is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if args.guest.shrink() {
            args.duration = args.duration.min(QUICK_RUN);
        }
        args
    }
}

/// The scenario.
pub struct TuneDirtyLog;

impl Scenario for TuneDirtyLog {
    const NAME: &'static str = "dirty-log";
    const ABOUT: &'static str = "Run each way of logging dirty pages that this host has, and say which stalls a guest least";
    const EXAMPLES: &'static str = EXAMPLES;
    const DEFAULTS: &'static [(&'static str, &'static str)] = &[("runs", "5")];
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    type Settings = TuneArgs;

    fn run(args: &TuneArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        dirty_log(args, session)
    }
}

/// Runs them all, and says on stdout's report and in a note what to set.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest or a log that went wrong.
pub fn dirty_log(args: &TuneArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let args = &args.sized();
    let host = slat_kvm::probe()?;
    let ways = ways(&host);
    let mut guests = Vec::new();
    for way in &ways {
        let guest = prepare(args, way)?;
        match guest.config.check(&host) {
            Ok(()) => guests.push((way, guest)),
            Err(error @ Error::Invalid { .. }) => return Err(bad_input(error.to_string())),
            Err(error @ Error::MissingCapability { .. }) => {
                session.skip(format!("tune, {}", way.name), error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
    }
    if guests.is_empty() {
        bail!("this host's KVM cannot log dirty pages");
    }
    session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize + 2);
    session
        .start("tune dirty-log", guests.len() as u64 * u64::from(args.guest.run.runs + 1) * PHASES);
    for run in 0..=args.guest.run.runs as usize {
        for place in order(run, guests.len()) {
            if session.interrupted() {
                break;
            }
            guests[place].1.run(session)?;
        }
    }
    session.finish();
    let mut ranked: Vec<(&Way, Vec<f64>, f64)> = guests
        .iter()
        .map(|(way, guest)| (*way, stall(&guest.reports, 0), middle(&stall(&guest.reports, 4))))
        .filter(|(_, stalls, _)| !stalls.is_empty())
        .collect();
    ranked.sort_by(|a, b| middle(&a.1).total_cmp(&middle(&b.1)));
    session.note(&advice(&ranked));
    Ok(guests.iter().flat_map(|(_, guest)| guest.measurements()).collect())
}

fn prepare(args: &TuneArgs, way: &Way) -> anyhow::Result<Live> {
    let asked = Asked {
        guest: &args.guest,
        overlap: false,
        mode: way.mode,
        eager_split: way.eager_split.map(slat_lab::size::Size),
    };
    let pattern = Pattern {
        write_percent: 100,
        others: Others::Skip,
        random: true,
        hot_set: args.hot_set,
        dirty_rate: Some(args.dirty_rate),
    };
    let mut params = asked.params();
    params.insert("way".to_owned(), way.name.clone().into());
    params.insert("duration".to_owned(), args.duration.as_secs_f64().into());
    params.insert("interval_ms".to_owned(), (args.interval.as_millis() as u64).into());
    params.insert("runs".to_owned(), args.guest.run.runs.into());
    pattern.add_to(&mut params);
    let config = Config {
        shape: asked.shape()?,
        work: pattern.work(args.guest.vcpus),
        duration: args.duration,
        interval: args.interval,
        clear_chunk: way.chunk,
    };
    Ok(Live::new(config, params, args.guest.run.kvm.cpus()?))
}

/// What to set, from the ways in the order of their stalls.
fn advice(ranked: &[(&Way, Vec<f64>, f64)]) -> String {
    let Some((best, stalls, p99)) = ranked.first() else {
        return "Nothing was measured, so that nothing can be recommended.".to_owned();
    };
    let mut text = format!(
        "Least stall: {} ({} for each page that the vCPU touched that had it worst; of the single \
         stalls 99 of 100 at most {})\n  QEMU:   {}\n  others: {}",
        best.name,
        seconds(middle(stalls)),
        seconds(*p99),
        best.qemu(),
        best.ioctls()
    );
    if stalls.len() < LEAST {
        return text + "\nSo few runs show no difference between ways: take --runs 5 or more.";
    }
    // Whoever came first is held against all others: each comparison has its part of the accidents.
    let level = LEVEL / (ranked.len() - 1).max(1) as f64;
    let close = |(_, others, _): &&(&Way, Vec<f64>, f64)| {
        Contrast::of(stalls, others, 0.0).is_none_or(|contrast| contrast.p() >= level)
    };
    let alike: Vec<_> = ranked[1..].iter().filter(close).map(|(way, ..)| &*way.name).collect();
    if !alike.is_empty() {
        text += &format!(
            "\nNo difference is shown from: {}.\nMore --runs tell finer differences.",
            alike.join("; ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_are_those_that_the_host_has() {
        let host = HostKvm { manual_protect: true, ..HostKvm::default() };
        let names = |host: &HostKvm| ways(host).into_iter().map(|way| way.name).collect::<Vec<_>>();
        assert_eq!(names(&host), ["legacy", "manual"]);
        let host = HostKvm {
            initially_set: true,
            dirty_ring_bytes: 1 << 20,
            eager_split_sizes: 2 << 20,
            ..host
        };
        assert_eq!(names(&host).len(), 4 + 2 + 1);
    }

    #[test]
    fn what_to_set_is_said_for_qemu_and_for_others() {
        let ring = Way::new("ring of 4096", Mode::RING, None);
        assert_eq!(ring.qemu(), "-accel kvm,dirty-ring-size=4096");
        assert!(ring.ioctls().contains("65536 bytes"), "{}", ring.ioctls());
        let eager =
            Way { eager_split: Some(2 << 20), ..Way::new("x", Mode::ManualInitiallySet, Some(64)) };
        assert!(eager.qemu().contains("eager-split-size=2097152"));
        assert!(eager.ioctls().contains("64 pages a call"));
    }

    #[test]
    fn a_difference_that_is_not_shown_is_said() {
        let (a, b) = (Way::new("a", Mode::Legacy, None), Way::new("b", Mode::Manual, None));
        let far = |from: f64| (0..10).map(|n| from + f64::from(n)).collect::<Vec<_>>();
        let text = advice(&[(&a, far(1.0), 0.1), (&b, far(2.0), 0.1)]);
        assert!(text.starts_with("Least stall: a") && text.contains("No difference"), "{text}");
        let text = advice(&[(&a, far(1.0), 0.1), (&b, far(100.0), 0.1)]);
        assert!(!text.contains("No difference"), "{text}");
        let few = [(&a, vec![1.0; 3], 0.1), (&b, vec![9.0; 3], 0.1)];
        assert!(advice(&few).contains("--runs 5"));
        assert!(advice(&[]).contains("nothing can be recommended"));
    }
}
