//! The main job: everything that this machine can run, the host's KVM first, in under two minutes.

use super::output::Output;
use crate::cli::{
    DirtyLogArgs, Granule, KvmArgs, KvmBacking, LinuxArgs, LogArgs, MainArgs, OutputArgs,
    SplitArgs, Switch, TableFormat, TablesArgs, Target, Walk, What, When,
};
use crate::failure::is_interruption;
use crate::host::Host;
use crate::numbers::bytes;
use crate::record::Measurement;
use crate::scenario;
use crate::scenario::kvm::dirty_log::Guest;
use crate::session::Session;
use crate::size::Size;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Below this much free memory the main job shrinks: the machine has other things to do.
const COMFORTABLE: u64 = 4 << 30;

/// Below this much, it does what it can.
const TIGHT: u64 = 1 << 30;

/// How long guests may take before the remaining ones are left out.
const GUESTS: Duration = Duration::from_secs(40);

/// What will be run, and how large.
#[derive(Clone, Debug, PartialEq)]
struct Plan {
    /// Memory of the guest under KVM.
    guest: Size,
    /// vCPUs of that guest.
    vcpus: u32,
    /// Runs of each guest that count.
    runs: u32,
    /// Memory of the guest whose tables the engine splits.
    tables_of: Size,
    /// Samples of each split.
    samples: u32,
    /// How long the person waiting should expect to wait.
    duration: &'static str,
    /// Whether it is smaller than it would be on a machine with memory to spare.
    shrunk: bool,
}

impl Plan {
    fn new(quick: bool, available: u64, cpus: usize) -> Self {
        let shrunk = !quick && available < COMFORTABLE;
        let (guest, tables_of, samples, duration) = match available {
            _ if quick => (32 << 20, 1 << 30, 10, "a few seconds"),
            ..TIGHT => (32 << 20, 4 << 30, 11, "half a minute"),
            TIGHT..COMFORTABLE => (64 << 20, 16 << 30, 11, "a minute"),
            _ => (256 << 20, 64 << 30, 11, "one to two minutes"),
        };
        let vcpus = cpus.clamp(1, 2) as u32;
        let runs = if quick { 1 } else { 5 };
        Self {
            guest: Size(guest),
            vcpus,
            runs,
            tables_of: Size(tables_of),
            samples,
            duration,
            shrunk,
        }
    }

    /// What all of it needs at its widest: a guest's memory, or tables of 1/512 of a guest's memory.
    fn memory(&self) -> u64 {
        let tables = self.tables_of.bytes() / 512;
        self.guest.bytes().max(tables) + (64 << 20)
    }

    /// The ways of logging that are compared: on small pages, protecting as the log is read or as
    /// it is cleared; and the ways that a VMM would choose, on each kind of huge page.
    fn guests(&self) -> Vec<DirtyLogArgs> {
        use KvmBacking::*;
        use Switch::{Off, On};
        let ways = [
            (Small, Off, Off),
            (Small, On, Off),
            (Transparent2m, Off, Off),
            (Transparent2m, On, On),
            (Hugetlb2m, On, On),
        ];
        let guest = |(backing, manual_protect, initially_set)| DirtyLogArgs {
            target: Target::Kvm,
            memory: self.guest,
            vcpus: self.vcpus,
            backing: Some(backing),
            manual_protect,
            initially_set,
            dirty_ring_size: None,
            log: LogArgs::default(),
            duration: None,
            interval: None,
            iterations: 3,
            runs: self.runs,
            kvm: KvmArgs::default(),
            way: Vec::new(),
            tables: TablesArgs::of(TableFormat::Ept),
            quick: false,
            out: OutputArgs::default(),
        };
        ways.map(guest).into()
    }

    fn splits(&self) -> SplitArgs {
        SplitArgs {
            memory: self.tables_of,
            backing: Vec::new(),
            target_size: None,
            when: vec![When::Enable, When::Clear],
            what: vec![What::Split, What::Call],
            walk: vec![Walk::EveryEntry, Walk::Bounded, Walk::Batched],
            granule: Granule::Size4k,
            format: None,
            bbm: None,
            samples: self.samples,
            quick: false,
            linux: LinuxArgs::default(),
            out: OutputArgs::default(),
        }
    }

    fn announce(&self, args: &MainArgs, available: u64) -> String {
        let shrunk = if self.shrunk {
            format!(
                "\n  Shrunk: only {} of memory are free, the full size wants {}.",
                bytes(available),
                bytes(COMFORTABLE)
            )
        } else {
            String::new()
        };
        format!(
            "Measuring this host, in {} and with {} of memory ({} are free):{shrunk}
  1. a guest of {} and {} vCPU{} under the host's KVM, its dirty pages logged in several ways;
  2. splitting the tables of a {} guest in the engine, beside what this machine's memory allows.
Results go to {}. Ctrl-C stops and keeps what was measured.",
            self.duration,
            bytes(self.memory()),
            bytes(available),
            bytes(self.guest.bytes()),
            self.vcpus,
            if self.vcpus == 1 { "" } else { "s" },
            bytes(self.tables_of.bytes()),
            args.output.display(),
        )
    }
}

/// Measures, prints and writes all that this machine can run.
pub fn main_job(args: &MainArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let output = Output::prepare(&args.output)?;
    let host = Host::read();
    let available = session.memory_available();
    let plan = Plan::new(args.quick, available, host.cpu.usable);
    session.note(&plan.announce(args, available));

    let (mut results, wrong) = guests(&plan, session);
    let split = if session.interrupted() {
        Ok(Vec::new())
    } else {
        scenario::split::run(&plan.splits(), session)
    };
    session.finish();
    let failed = match split {
        Ok(measured) => {
            results.extend(measured);
            wrong
        }
        Err(error) if is_interruption(&error) => wrong,
        Err(error) => {
            session.fail("splitting in the engine", format!("{error:#}"));
            true
        }
    };
    let report = super::report(host, results, session);
    session.note("");
    super::show(&report, args.print.format(), Some(output))?;
    Ok(match () {
        () if report.partial => ExitCode::from(130),
        () if failed || report.results.is_empty() => ExitCode::from(1),
        () => ExitCode::SUCCESS,
    })
}

/// Guests under the host's KVM, in turns. What fails here is skipped with its reason: the rest of
/// the job does not depend on it. The second answer says whether any result was wrong, which is no
/// matter of what the host lacks.
fn guests(plan: &Plan, session: &mut Session) -> (Vec<Measurement>, bool) {
    let mut wrong = false;
    if let Err(reason) = slat_kvm::probe() {
        session.skip("guests under the host's KVM", reason.to_string());
        return (Vec::new(), false);
    }
    let ways = plan.guests();
    let mut guests = Vec::new();
    for way in &ways {
        match Guest::new(way) {
            Ok(guest) => guests.push(Some(guest)),
            Err(error) => session.skip(way.backing().to_string(), format!("{error:#}")),
        }
    }
    session.start("guests", guests.iter().flatten().map(Guest::steps).sum());
    let begin = Instant::now();
    let runs = ways.iter().map(|way| way.runs).max().unwrap_or(0);
    for run in 0..=runs {
        if begin.elapsed() > GUESTS && run > 1 {
            session.skip(
                format!("dirty-log, runs {run} to {runs} of each guest"),
                format!(
                    "guests took {} s already; `slat bench dirty-log` runs more",
                    GUESTS.as_secs()
                ),
            );
            break;
        }
        // A guest finds the host's memory as the one before left it: the order turns round.
        let mut order: Vec<usize> = (0..guests.len()).collect();
        if run % 2 == 1 {
            order.reverse();
        }
        for place in order {
            let Some(guest) = &mut guests[place] else { continue };
            if let Err(error) = guest.run(session) {
                wrong |= error.downcast_ref().is_some_and(slat_kvm::Error::is_wrong_result);
                session.skip(guest.name(), format!("{error:#}"));
                guests[place] = None;
            }
        }
        if session.interrupted() {
            break;
        }
    }
    session.finish();
    (guests.iter().flatten().flat_map(Guest::measurements).collect(), wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_memory_to_spare_the_tables_are_those_of_64_gib() {
        let plan = Plan::new(false, 20 << 30, 2);
        assert_eq!((plan.tables_of, plan.shrunk), (Size(64 << 30), false));
    }

    #[test]
    fn below_4_gib_free_the_job_shrinks_and_says_so() {
        let plan = Plan::new(false, 3 << 30, 2);
        assert!(plan.shrunk && plan.memory() < 256 << 20, "{plan:?}");
        let args = MainArgs {
            output: "out".into(),
            quick: false,
            print: crate::cli::PrintArgs::default(),
        };
        let text = plan.announce(&args, 3 << 30);
        assert!(
            text.contains("only 3 GiB of memory are free, the full size wants 4 GiB"),
            "{text}"
        );
    }

    #[test]
    fn what_is_planned_always_fits_into_what_is_free() {
        for available in [512 << 20, 1 << 30, 3 << 30, 4 << 30, 1u64 << 40] {
            let plan = Plan::new(false, available, 64);
            assert!(plan.memory() < available, "{available}: {plan:?}");
        }
    }
}
