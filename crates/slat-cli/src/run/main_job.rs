//! The main job, which measures what memory management costs guests on this host, and what it could
//! cost.

use crate::PROGRAM;
use crate::brief;
use crate::cli::MainArgs;
use crate::ideas::{self, Sizes};
use crate::kvm::dirty_log::guest;
use crate::kvm::log_options::DirtyLogArgs;
use crate::kvm::migrate::Migrate;
use crate::kvm::options::{GuestArgs, KvmArgs, LogArgs, RunArgs};
use crate::kvm::repeat::{Repeatable, Times};
use crate::kvm::runs::Guest;
use crate::kvm::values::{KvmBacking, KvmWay};
use slat_kvm::Backing;
use slat_lab::cli::Format;
use slat_lab::cli::Switch;
use slat_lab::failure::{CANNOT, is_interruption};
use slat_lab::host::Host;
use slat_lab::numbers::{bytes, several};
use slat_lab::record::{Measurement, Report};
use slat_lab::run::output::Output;
use slat_lab::run::{NOISY, report, show, show_as};
use slat_lab::scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;
use slat_lab::trust::{Begin, cpus};
use slat_lab::turns::order;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Free memory, in bytes, below which the main job uses smaller sizes, because other programs need
/// the memory.
const COMFORTABLE: u64 = 4 << 30;

/// Free memory, in bytes, below which the main job uses its smallest sizes.
const TIGHT: u64 = 1 << 30;

/// Memory of the guests that execute: one of the blocks from which they do.
const BLOCK: Size = Size(1 << 30);

/// Time after which no further turn of guests begins, once one turn has been measured.
const GUESTS: Duration = Duration::from_secs(40);

/// Migrations that are measured at most, not counting the one that warms up.
const MIGRATIONS: u32 = 3;

/// Name of the part that needs KVM, in the report.
const GUESTS_WHAT: &str = "guests under the host's KVM";

/// Sizes and counts of all that the main job will run.
#[derive(Clone, Debug, PartialEq)]
struct Plan {
    /// Memory of each guest under KVM.
    guest: Size,
    /// vCPUs of each guest under KVM.
    vcpus: u32,
    /// Measured runs of each guest, not counting the one that warms up.
    runs: u32,
    /// Sizes of the measurements of the ideas.
    ideas: Sizes,
    /// Expected duration, as it is printed.
    duration: &'static str,
    /// Whether the sizes are smaller than on a machine with enough free memory.
    shrunk: bool,
}

impl Plan {
    fn new(quick: bool, available: u64, cpus: usize) -> Self {
        let shrunk = !quick && available < COMFORTABLE;
        let small = Sizes {
            split: Size(1 << 30),
            guest: Size(64 << 20),
            executed: Some(BLOCK),
            flushed: Size(1 << 30),
            rounds: 3,
        };
        let full = Sizes {
            split: Size(16 << 30),
            guest: Size(1 << 30),
            executed: Some(BLOCK),
            flushed: Size(128 << 30),
            rounds: 7,
        };
        let (guest, ideas, duration) = match available {
            _ if quick => (32 << 20, small, "a few seconds"),
            ..TIGHT => (32 << 20, small, "half a minute"),
            TIGHT..COMFORTABLE => (64 << 20, Sizes { rounds: 7, ..small }, "a minute"),
            _ => (256 << 20, full, "half a minute to a minute"),
        };
        let vcpus = cpus.clamp(1, 2) as u32;
        let runs = if quick { 1 } else { 5 };
        let mut plan = Self { guest: Size(guest), vcpus, runs, ideas, duration, shrunk };
        // A tenth is left to the others, as each measurement leaves it.
        if plan.memory() > available / 10 * 9 {
            plan.ideas.executed = None;
        }
        plan
    }

    /// Returns the largest amount of memory that is in use at one time, in bytes.
    fn memory(&self) -> u64 {
        // A migration has a copy of the guest.
        (2 * self.guest.bytes()).max(self.ideas.memory()) + (64 << 20)
    }

    /// Returns the guests, one for each way of logging that is compared. On small pages: KVM
    /// write-protects pages as the log is read, or as it is cleared. On huge pages: the ways that a
    /// VMM would choose.
    fn guests(&self) -> Vec<DirtyLogArgs> {
        use Backing::{Hugetlb, Small, Thp};
        use Switch::{Off, On};
        let ways = [
            (Small, Off, Off),
            (Small, On, Off),
            (Thp, Off, Off),
            (Thp, On, On),
            (Hugetlb(Thp.page_size()), On, On),
        ];
        let guest = |(backing, manual_protect, initially_set)| DirtyLogArgs {
            guest: GuestArgs {
                memory: self.guest,
                vcpus: self.vcpus,
                backing: KvmBacking(backing),
                run: RunArgs {
                    runs: Times::exactly(self.runs),
                    until: 10.0,
                    kvm: KvmArgs::default(),
                    quick: false,
                },
            },
            manual_protect,
            initially_set,
            dirty_ring_size: None,
            log: LogArgs::default(),
            duration: None,
            interval: None,
            iterations: 3,
        };
        ways.map(guest).into()
    }

    /// Returns the announcement: what will be measured, and what this host lacks for it.
    fn announce(&self, args: &MainArgs, available: u64, lack: Option<&slat_kvm::Error>) -> String {
        let shrunk = if self.shrunk {
            format!(
                "\n  Shrunk: only {} of memory are free, the full size wants {}.",
                bytes(available),
                bytes(COMFORTABLE)
            )
        } else {
            String::new()
        };
        let guests = match lack {
            Some(lack) => format!("no {GUESTS_WHAT}: {lack}"),
            None => format!(
                "a guest of {} and {} under the host's KVM, its dirty pages logged in \
                 several ways, and migrated",
                bytes(self.guest.bytes()),
                several(self.vcpus as usize, "vCPU")
            ),
        };
        format!(
            "Measuring this host, in {} and with {} of memory ({} are free):{shrunk}
  1. {guests};
  2. the ideas that Slat grew from, in tables of its own: a guest of {} is split, one of {} faults.
Results go to {}. Ctrl-C stops and keeps what was measured.",
            self.duration,
            bytes(self.memory()),
            bytes(available),
            bytes(self.ideas.split.bytes()),
            bytes(self.ideas.guest.bytes()),
            args.output.display(),
        )
    }
}

/// Measures all that this machine can run, then prints and writes the report.
pub fn main_job(args: &MainArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let output = Output::prepare(&args.output)?;
    let host = Host::read();
    let begin = Begin::now();
    let available = session.memory_available();
    let plan = Plan::new(args.quick, available, host.cpu.usable);
    let lack = slat_kvm::probe().err();
    session.note(&plan.announce(args, available, lack.as_ref()));

    let (mut results, wrong) = match lack {
        Some(lack) => {
            session.skip(GUESTS_WHAT, lack.to_string());
            (Vec::new(), false)
        }
        None => guests(&plan, session),
    };
    if !results.is_empty() && !session.interrupted() {
        results.extend(migration(&plan, session));
    }
    let measured =
        if session.interrupted() { Ok(Vec::new()) } else { ideas::run(&plan.ideas, session) };
    session.finish();
    let failed = match measured {
        Ok(measured) => {
            results.extend(measured);
            wrong
        }
        Err(error) if is_interruption(&error) => wrong,
        Err(error) => {
            session.fail("the ideas, in the engine", format!("{error:#}"));
            true
        }
    };
    let report = report(&PROGRAM, host, &begin, results, session);
    session.note("");
    match args.print.format() {
        Format::Text => {
            let text = |report: &Report, width| brief::render(report, &args.output, width);
            show_as(&PROGRAM, &report, text, Some(output))?;
        }
        format => show(&PROGRAM, &report, format, Some(output))?,
    }
    Ok(match () {
        () if report.partial => ExitCode::from(130),
        () if args.fail_if_noisy && report.is_noisy() && !failed => ExitCode::from(NOISY),
        () if failed => ExitCode::FAILURE,
        () if report.results.is_empty() => ExitCode::from(CANNOT),
        () => ExitCode::SUCCESS,
    })
}

/// Measures guests under the host's KVM, in turns. A guest that fails is skipped with its reason,
/// because the rest of the job does not depend on it. The second value returned says whether a
/// guest gave a wrong result, which is a failure and not something that the host lacks.
fn guests(plan: &Plan, session: &mut Session) -> (Vec<Measurement>, bool) {
    let mut wrong = false;
    let ways = plan.guests();
    let (mut guests, mut steps) = (Vec::new(), 0);
    for way in &ways {
        match guest(way) {
            Ok((guest, phases)) => {
                steps += guest.steps(phases);
                guests.push(Some(guest));
            }
            Err(error) => session.skip(way.guest.backing.to_string(), format!("{error:#}")),
        }
    }
    session.start("guests", steps);
    let begin = Instant::now();
    let runs = plan.runs;
    for run in 0..=runs {
        if begin.elapsed() > GUESTS && run > 1 {
            session.skip(
                format!("dirty-log, {} of {runs} runs of each guest", runs + 1 - run),
                format!(
                    "guests took {} s already; `slat bench dirty-log` runs more",
                    GUESTS.as_secs()
                ),
            );
            break;
        }
        for place in order(run as usize, guests.len()) {
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

/// Measures a migration, from which the report computes the migration of a larger guest. It logs as
/// QEMU does, as far as the host's KVM can.
fn migration(plan: &Plan, session: &mut Session) -> Vec<Measurement> {
    let host = slat_kvm::probe().unwrap_or_default();
    let way = match (host.manual_protect, host.initially_set) {
        (true, true) => KvmWay::InitiallySet,
        (true, false) => KvmWay::Manual,
        (false, _) => KvmWay::Legacy,
    };
    // On a host with two CPUs or more, one is left to the thread that copies.
    let vcpus = (cpus() - 1).clamp(1, plan.vcpus as usize);
    let options = format!(
        "--memory {} --vcpus {vcpus} --runs {} --way {way}",
        plan.guest,
        plan.runs.min(MIGRATIONS)
    );
    scenario::run::<Migrate>(&options, session).unwrap_or_else(|error| {
        session.finish();
        session.skip("a migration", format!("{error:#}"));
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_memory_to_spare_nothing_is_shrunk() {
        let plan = Plan::new(false, 20 << 30, 2);
        assert_eq!((plan.ideas.split, plan.shrunk), (Size(16 << 30), false));
    }

    #[test]
    fn below_4_gib_free_the_job_shrinks_and_says_so() {
        let plan = Plan::new(false, 3 << 30, 2);
        let full = Plan::new(false, 20 << 30, 2);
        assert!(plan.shrunk && plan.memory() < full.memory(), "{plan:?}");
        let args = MainArgs { output: "out".into(), ..MainArgs::default() };
        let text = plan.announce(&args, 3 << 30, None);
        assert!(
            text.contains("only 3 GiB of memory are free, the full size wants 4 GiB"),
            "{text}"
        );
        assert!(text.contains("1. a guest of"), "{text}");
    }

    #[test]
    fn the_plan_announces_a_missing_kvm_permission() {
        let plan = Plan::new(true, 8 << 30, 2);
        let args = MainArgs { output: "out".into(), quick: true, ..MainArgs::default() };
        let text = plan.announce(&args, 8 << 30, Some(&slat_kvm::Error::KvmPermission));
        assert!(text.contains("1. no guests under the host's KVM: "), "{text}");
        assert!(!text.contains("1. a guest of"), "{text}");
    }

    #[test]
    fn what_is_planned_always_fits_into_what_is_free() {
        for available in [512 << 20, 1 << 30, 3 << 30, 4 << 30, 1u64 << 40] {
            let plan = Plan::new(false, available, 64);
            assert!(plan.memory() < available, "{available}: {plan:?}");
            let quick = Plan::new(true, available, 64);
            assert!(quick.memory() < available, "{available}: {quick:?}");
            let resident = quick.ideas.executed.map_or(0, Size::bytes);
            assert!(quick.memory() > resident, "it is told");
        }
    }
}
