//! The command line of `slat check`.

use clap::Args;
use clap::builder::PossibleValuesParser;
use slat_kvm::check::classes;
use slat_lab::cli::time;
use slat_lab::size::Size;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  slat check
      a minute of random histories of each class, on this host's KVM
  slat check --for 2h --class log,memslots -o report/
      longer, some classes; results.json in a folder, and if something is lost, report.txt, to be
      sent to KVM's maintainers, and the history
  slat check --class log --seed 7 --number 12 --steps 0,3,9
      some steps of one history once more, as a report names them
  slat check --history report/log-12.json
      the same, from the file that the report wrote
  slat emulate --kernel debian-6.12 -- check --for 5m
      another kernel's KVM, in an emulated machine, which also gets swap and KSM
  slat emulate --kernel tree:debian-6.12 --config private -- check --class guest-memfd
      private and shared memory, which most kernels have for encrypted guests only

A history is a list of steps of vCPUs and of the host on a guest's memory. The guest's writes are
numbered, so after each step the content of each page is known, and which pages the log must have.
It changes no setting of the host. As root it tries more.

Exit codes:
  0    nothing was lost in what could be tried
  1    LOST: a wrong page, a write that no log told, or a hang of KVM
  2    the command line cannot be right
  4    nothing can be tried on this host
  130  Ctrl-C; what was tried until then has been told";

/// Options of `slat check`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CheckArgs {
    /// How long
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = time::run)]
    pub time: Duration,

    /// The seed of the histories [default: drawn, and told]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,

    /// Host memory of a guest: whole huge pages, at least two
    #[arg(long, value_name = "SIZE", default_value = "8m")]
    pub memory: Size,

    /// Classes of histories [default: all]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    #[arg(value_parser = PossibleValuesParser::new(classes().iter().map(|class| class.name)))]
    pub class: Vec<String>,

    /// Print the classes, and why one cannot be tried here
    #[arg(long)]
    pub list: bool,

    /// Run one history of a class and a seed, by its number
    #[arg(long, value_name = "N", requires_all = ["seed", "class"])]
    pub number: Option<u64>,

    /// Only these steps of it
    #[arg(long, value_name = "N,...", value_delimiter = ',', requires = "number")]
    pub steps: Vec<usize>,

    /// Run the history of a file, again and again for as long as --for says, or until it loses
    #[arg(long, value_name = "FILE", conflicts_with_all = ["seed", "class", "number", "list"])]
    pub history: Option<PathBuf>,

    /// Stop at the first loss, when its history is cut down
    #[arg(long)]
    pub first: bool,

    /// Write results.json to this folder, and of what is lost report.txt and the history
    #[arg(long, short, value_name = "DIR")]
    pub output: Option<PathBuf>,

    /// Print the report as JSON
    #[arg(long)]
    pub json: bool,
}
