//! The scenario `dirty-log`: logs the dirty pages of a guest under the host's KVM, phase by phase.

use super::guest::Pattern;
use super::log_options::{DirtyLogArgs, asked, chunk, log_params};
use super::log_tables;
use super::runs::Guest;
use crate::needs::GUEST;
use slat_kvm::scenario::dirty_log::{self, Config, Report};
use slat_kvm::{Backing, Setting};
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;
use slat_lab::size::Size;

const EXAMPLES: &str = "\
Examples:
  slat bench dirty-log
      256 MiB on 4k pages, 2 vCPUs, 3 rounds of dirtying
  slat bench dirty-log --memory 1G --backing 2m --manual-protect on --initially-set on
      huge pages by THP, split as the log is cleared
  slat bench dirty-log --backing hugetlb-2m --clear-chunk 64
      clear 64 pages a call; the pool is filled beforehand with `sysctl vm.nr_hugepages=128`
  slat bench dirty-log --dirty-ring-size 4096 --write-percent 10 --others read
      by rings; a guest that mostly reads
  slat bench dirty-log --duration 5s --dirty-rate 100MiB/s --hot-set 10:90
      vCPUs that run on for 5 seconds while the log is fetched every 100 ms";

/// The scenario.
pub struct DirtyLog;

impl Scenario for DirtyLog {
    const NAME: &'static str = dirty_log::NAME;
    const ABOUT: &'static str = "Log the dirty pages of a guest";
    const EXAMPLES: &'static str = EXAMPLES;
    const NEEDS: &'static [&'static [&'static str]] = GUEST;
    const RENDERER: Renderer = log_tables::RENDERER;
    type Settings = DirtyLogArgs;

    fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        let args = &args.sized();
        if args.duration.is_some() {
            return super::live::run(args, session);
        }
        let (guest, phases) = guest(args)?;
        session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize, 0);
        guest.alone(phases, session)
    }
}

/// Creates the guest that `args` describes, which is logged in one way, and checks the options.
/// Returns the number of its phases, too.
///
/// The first touch of memory that the host has not used before costs more than later touches, above
/// all where the host is itself a guest. The run that warms up pays for that, and is not counted.
///
/// # Errors
///
/// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for values that cannot be right.
pub fn guest(args: &DirtyLogArgs) -> anyhow::Result<(Guest<'static, Report>, u64)> {
    let config = config(args)?;
    let mut params = log_params(args, config.clear_chunk)?;
    params.insert("iterations".to_owned(), config.iterations.into());
    let calls = if config.shape.mode.is_manual() { 3 } else { 2 };
    let phases = 4 + u64::from(config.iterations) * calls;
    let (memory, backing) = (args.guest.memory, args.guest.backing);
    let name = format!("dirty-log, {memory} on {backing}, {}", config.shape.mode);
    let run = move |setting: Setting<'_>| dirty_log::run(&config, setting);
    let run_args = &args.guest.run;
    let guest = Guest::new(DirtyLog::NAME, name, params, run_args, &dirty_log::OUTCOME, run)?;
    let noting = guest.noting(|name, report, first| {
        let shortfall = first.then(|| shortfall(report)).flatten();
        shortfall.into_iter().chain(left_behind(name, report)).collect()
    });
    Ok((noting, phases))
}

fn config(args: &DirtyLogArgs) -> anyhow::Result<Config> {
    Ok(Config {
        shape: asked(args)?.shape()?,
        iterations: args.iterations,
        clear_chunk: chunk(args)?,
        work: Pattern::of(&args.log).work(args.guest.vcpus),
        ..Config::default()
    })
}

/// Returns the message for a kernel that gave fewer transparent huge pages than were asked for.
fn shortfall(report: &Report) -> Option<String> {
    let asked = report.config.shape.memory;
    let found = report.transparent_huge_bytes?;
    (report.config.shape.backing == Backing::Thp && found < asked).then(|| {
        format!(
            "dirty-log on {}: the kernel found huge pages for {} of {} only, the rest is on {}",
            Backing::Thp,
            Size(found),
            Size(asked),
            Backing::Small
        )
    })
}

/// Returns the message for a log that had pages after the last round cleared it, although no vCPU
/// wrote.
fn left_behind(name: &str, report: &Report) -> Option<String> {
    (report.left_in_log > 0).then(|| {
        format!(
            "{name}: {} of {} pages are in the log again after it was cleared, and nobody wrote",
            report.left_in_log, report.pages
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::repeat::Repeatable;
    use super::*;
    use slat_kvm::Mode;
    use slat_kvm::phase::Phase;
    use slat_lab::failure::Failure;

    fn args(options: &[&str]) -> DirtyLogArgs {
        slat_lab::scenario::settings::<DirtyLog>(&options.join(" ")).unwrap()
    }

    fn refusal(options: &[&str]) -> String {
        let error = config(&args(options)).expect_err("refused");
        assert!(matches!(error.downcast_ref(), Some(Failure::BadInput(_))), "{error}");
        error.to_string()
    }

    #[test]
    fn each_mode_has_its_options() {
        let mode = |options: &[&str]| config(&args(options)).unwrap().shape.mode;
        assert_eq!(mode(&["--manual-protect", "off"]), Mode::Legacy);
        assert_eq!(mode(&[]), Mode::Manual);
        assert_eq!(mode(&["--initially-set", "on"]), Mode::ManualInitiallySet);
        assert_eq!(mode(&["--dirty-ring-size", "2048"]), Mode::Ring { entries: 2048 });
    }

    #[test]
    fn options_that_contradict_each_other_are_refused() {
        let text = refusal(&["--manual-protect", "off", "--initially-set", "on"]);
        assert!(text.contains("--manual-protect on"), "{text}");
        assert!(refusal(&["--clear-chunk", "63"]).contains("multiple of 64"));
        let text = refusal(&["--memory", "1g", "--backing", "hugetlb-1g"]);
        assert!(text.contains("--memory 1g") && text.contains("multiple of 2g"), "{text}");
    }

    #[test]
    fn a_chunk_in_bytes_is_one_in_pages() {
        let chunk = |text| config(&args(&["--clear-chunk", text])).unwrap().clear_chunk;
        assert_eq!(chunk("128"), Some(128));
        assert_eq!(chunk("2m"), Some((2 << 20) / Backing::Small.page_size()));
    }

    #[test]
    fn a_guest_on_this_host_gives_every_phase() {
        if let Err(reason) = slat_kvm::probe() {
            eprintln!("skipped: {reason}");
            let required = std::env::var("SLAT_REQUIRE_KVM").is_ok_and(|value| value == "1");
            assert!(!required, "SLAT_REQUIRE_KVM=1, and no guest can run: {reason}");
            return;
        }
        let small =
            args(&["--memory", "8m", "--clear-chunk", "64", "--iterations", "2", "--runs", "2"]);
        let results = DirtyLog::run(&small, &mut Session::quiet()).unwrap();
        let samples = |variant: &str| {
            let of_all = |m: &&Measurement| m.variant == variant && !m.is_vcpu();
            results.iter().find(of_all).map(|m| m.samples.len())
        };
        for (variant, count) in [
            ("populate", 2),
            ("warm", 2),
            ("dirty-stall", 4),
            ("dirty-stall-p99", 4),
            ("enable", 2),
            ("dirty", 4),
            ("get", 4),
            ("clear", 4),
            ("clear-longest-call", 4),
            ("disable", 2),
        ] {
            assert_eq!(samples(variant), Some(count), "{variant}");
        }
    }

    #[test]
    fn pages_that_a_clear_left_behind_are_reported() {
        let report = |left_in_log| Report {
            config: Config::default(),
            pages: 9,
            phases: Vec::new(),
            transparent_huge_bytes: None,
            left_in_log,
            stamps_checked: 9,
            full_rings: 0,
        };
        assert_eq!(left_behind("guest", &report(0)), None);
        assert!(left_behind("guest", &report(2)).unwrap().starts_with("guest: 2 of 9 pages"));
    }

    #[test]
    fn a_run_that_only_warms_up_is_named_so_when_stopped() {
        if slat_kvm::probe().is_err() {
            return;
        }
        let args = args(&["--memory", "64m", "--iterations", "10000"]);
        // It is not known how long a host takes to populate the guest, so the limit doubles until
        // it has.
        let stopped_after = |wait| {
            let session = Session::quiet();
            let (mut guest, _) = guest(&args).unwrap();
            let stop = session.stop_flag();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(wait);
                    stop.store(true, std::sync::atomic::Ordering::Relaxed);
                });
                guest.run(&session).unwrap();
            });
            guest.measurements()
        };
        let populated =
            |results: &Vec<Measurement>| results.iter().any(|m| Phase::Populate == *m.variant);
        let mut waits = (0..8).map(|doubled| std::time::Duration::from_millis(250 << doubled));
        let results = waits.by_ref().map(stopped_after).find(populated).expect("never populated");
        assert!(results.iter().all(|m| m.params["warm_up"] == true), "{results:?}");
    }

    #[test]
    fn a_session_that_was_stopped_gives_what_it_has() {
        if slat_kvm::probe().is_err() {
            return;
        }
        let mut session = Session::quiet();
        session.stop();
        assert_eq!(DirtyLog::run(&args(&["--memory", "8m"]), &mut session).unwrap(), []);
    }
}
