//! Measures vCPUs that keep running while the VMM fetches their log.

use super::guest::Pattern;
use super::log_options::{DirtyLogArgs, asked, chunk, log_params};
use super::options::RunArgs;
use super::runs::Guest;
use serde_json::{Map, Value};
use slat_kvm::Setting;
use slat_kvm::scenario::live::{self, Config, Report};
use slat_lab::record::Measurement;
use slat_lab::session::Session;
use std::time::Duration;

/// Name of the scenario in results.
pub const SCENARIO: &str = live::RESULTS.name;
/// Default time from one fetch to the next.
const INTERVAL: Duration = Duration::from_millis(100);
/// Phases of a run.
const PHASES: u64 = 4;

/// Measures the guest that `args` describes, for the time that it asks for.
///
/// # Errors
/// Values that cannot be right, what this host lacks, or a guest or a log that went wrong.
pub fn run(args: &DirtyLogArgs, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
    let clear_chunk = chunk(args)?;
    let interval = args.interval.unwrap_or(INTERVAL);
    let duration = args.duration.unwrap_or(Duration::from_secs(1));
    let config = Config {
        shape: asked(args)?.shape()?,
        work: Pattern::of(&args.log).work(args.guest.vcpus),
        duration,
        interval,
        clear_chunk,
    };
    let mut params = log_params(args, clear_chunk)?;
    params.insert("duration".to_owned(), duration.as_secs_f64().into());
    params.insert("interval_ms".to_owned(), (interval.as_millis() as u64).into());
    let guest = guest(config, params, &args.guest.run)?;
    session.announce(args.guest.memory.bytes(), args.guest.vcpus as usize, 2);
    guest.alone(PHASES, session)
}

/// Returns a guest with one way of logging.
pub(super) fn guest(
    config: Config,
    params: Map<String, Value>,
    args: &RunArgs,
) -> anyhow::Result<Guest<'static, Report>> {
    let name = format!(
        "dirty-log beside running vCPUs, on {}, {}",
        config.shape.backing, config.shape.mode
    );
    let run = move |setting: Setting<'_>| live::run(&config, setting);
    Guest::new(SCENARIO, name, params, args, &live::OUTCOME, run)
}
