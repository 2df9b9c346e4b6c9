//! Options of a guest whose dirty pages are logged, and the guest and log that they describe.

use super::guest::{GuestOptions, Pattern};
use super::options::{GuestArgs, LogArgs, QUICK_RUN};
use clap::Args;
use serde_json::{Map, Value, json};
use slat_kvm::{Backing, Mode};
use slat_lab::cli::{Switch, count, time};
use slat_lab::failure::bad_input;
use std::time::Duration;

/// Options of `slat bench dirty-log`.
#[derive(Clone, Debug, Args)]
pub struct DirtyLogArgs {
    /// The guest.
    #[command(flatten)]
    pub guest: GuestArgs,

    /// Whether reading the log leaves the pages writable until they are cleared
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub manual_protect: Switch,

    /// Whether all pages count as dirty at first, so that enabling protects none
    #[arg(long, value_name = "on|off", default_value = "off")]
    pub initially_set: Switch,

    /// Entries of each vCPU's dirty ring, in place of a log: a power of two
    #[arg(long, value_name = "N")]
    #[arg(conflicts_with_all = ["manual_protect", "initially_set", "clear_chunk"])]
    pub dirty_ring_size: Option<u32>,

    /// Options of the log, and of the work that the vCPUs do.
    #[command(flatten)]
    pub log: LogArgs,

    /// How long vCPUs keep running while the log is fetched, in place of rounds: 5s
    #[arg(long, value_name = "TIME", conflicts_with = "iterations", value_parser = time::run)]
    pub duration: Option<Duration>,

    /// From one fetch of the log to the next, with --duration [default: 100ms]
    #[arg(long, value_name = "TIME", requires = "duration", value_parser = time::some)]
    pub interval: Option<Duration>,

    /// Rounds of dirtying, reading and clearing the log
    #[arg(long, short = 'i', value_name = "N", default_value_t = 3)]
    #[arg(value_parser = count::iterations())]
    pub iterations: u32,
}

impl DirtyLogArgs {
    /// Returns the options, reduced if `--quick` is given.
    pub fn sized(&self) -> Self {
        let mut args = self.clone();
        if args.guest.shrink() {
            args.duration = args.duration.map(|time| time.min(QUICK_RUN));
            args.iterations = args.iterations.min(2);
        }
        args
    }
}

/// Returns the mode of logging.
///
/// # Errors
/// Returns [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) for a log that is initially
/// set without manual protect, which KVM does not have.
pub fn mode(args: &DirtyLogArgs) -> anyhow::Result<Mode> {
    if let Some(entries) = args.dirty_ring_size {
        return Ok(Mode::Ring { entries });
    }
    match (args.manual_protect.is_on(), args.initially_set.is_on()) {
        (false, false) => Ok(Mode::Legacy),
        (true, false) => Ok(Mode::Manual),
        (true, true) => Ok(Mode::ManualInitiallySet),
        (false, true) => Err(bad_input(
            "--initially-set on needs --manual-protect on: KVM has no such log otherwise",
        )),
    }
}

/// Returns the guest that the options describe.
pub fn asked(args: &DirtyLogArgs) -> anyhow::Result<GuestOptions<'_>> {
    Ok(GuestOptions {
        guest: &args.guest,
        overlap: args.log.overlap,
        mode: mode(args)?,
        eager_split: args.log.eager_split,
    })
}

/// Returns the number of pages that one call clears; `None` means all.
pub fn chunk(args: &DirtyLogArgs) -> anyhow::Result<Option<u64>> {
    args.log.clear_chunk.map(|chunk| chunk.pages(Backing::Small.page_size())).transpose()
}

/// Returns the parameters of a guest and its log, for its results.
pub fn log_params(args: &DirtyLogArgs, chunk: Option<u64>) -> anyhow::Result<Map<String, Value>> {
    let mut params = asked(args)?.params();
    match args.dirty_ring_size {
        Some(entries) => {
            params.insert("dirty_ring_size".to_owned(), entries.into());
        }
        None => {
            params.insert("manual_protect".to_owned(), args.manual_protect.is_on().into());
            params.insert("initially_set".to_owned(), args.initially_set.is_on().into());
            params.insert("clear_chunk".to_owned(), json!(chunk));
        }
    }
    params.insert("write_percent".to_owned(), args.log.write_percent.into());
    Pattern::of(&args.log).add_to(&mut params);
    Ok(params)
}
