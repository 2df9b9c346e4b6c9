//! The scenario `split`: the engine's splits, or those of the engine and Linux's own code.

use crate::peers;
use crate::settings::peers::{LinuxArgs, TablesTarget};
use crate::split::{EXAMPLES, RENDERER, SplitArgs, run};
use clap::Args;
use slat_lab::record::Measurement;
use slat_lab::renderer::Renderer;
use slat_lab::scenario::Scenario;
use slat_lab::session::Session;

/// Options of the split, and of the comparison with Linux.
#[derive(Clone, Debug, Args)]
pub struct Settings {
    /// The split.
    #[command(flatten)]
    pub split: SplitArgs,

    /// Linux's tables.
    #[command(flatten)]
    pub linux: LinuxArgs,
}

/// The scenario of splits.
pub struct Split;

impl Scenario for Split {
    const NAME: &'static str = "split";
    const ABOUT: &'static str =
        "Split huge pages in the tables of a guest (no guest memory needed)";
    const EXAMPLES: &'static str = EXAMPLES;
    const RENDERER: Renderer = RENDERER;
    type Settings = Settings;

    fn run(args: &Settings, session: &mut Session) -> anyhow::Result<Vec<Measurement>> {
        args.linux.check()?;
        match args.linux.target {
            TablesTarget::LinuxSource => peers::split(&args.split.sized(), &args.linux, session),
            TablesTarget::Engine => run(&args.split, session),
        }
    }
}
