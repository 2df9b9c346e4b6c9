//! The command line of `slat watch`.

use clap::{Args, ValueEnum};
use slat_kvm::watch::Source;
use slat_lab::cli::time;
use slat_lab::rate::Rate;
use slat_lab::size::Size;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  slat watch
      all guests of this host, until Ctrl-C; those that start later appear
  slat watch 4711
      the guests of one process, and each vCPU
  sudo slat watch --for 30s --json watch.json
      as root: every user's guests, with KVM's own counters of them; all samples in a file
  slat watch $(pidof qemu-system-x86_64) --for 10s --json - | jq '.guests[0].total.faults'
      how often it faulted in ten seconds
  slat watch 4711 --for 30s --qmp /run/qemu.sock --link 10Gbit/s
      how fast it dirties its memory, by QEMU's own samples, and what a migration would do to it
  slat watch $(cat /run/libvirt/qemu/web01.pid) --for 30s --libvirt web01
      the same of a domain of libvirt's; --qmp and --libvirt also tell KVM's counters where
      nothing else does, pauses, the balloon, and how a migration went
  slat watch 4711 --for 1s --dirty-rate 400MiB/s --memory 16G --link 10Gbit/s --max-downtime 100ms
      the same, for a rate and a size that are known
  sudo slat watch --for 1m --working-set 20s
      how much of its memory each guest uses within 20 s; this changes something in the host
  slat watch --listen
      for Prometheus: OpenMetrics at http://127.0.0.1:9558/metrics, until Ctrl-C
  slat watch --for 10s --json-lines | jq -r 'select(.kind == \"verdict\").verdict.said'
      a JSON object for each guest and sample, and at the end its verdict

A guest is found by the descriptors that its VMM has open (/proc/PID/fd: anon_inode:kvm-vm). What
is read, and what cannot be known on this host, the report says; nothing is changed in a guest, and
nothing is left when the watch ends. Without root, guests of the same user are seen.

Exit codes:
  0    watched for as long as was asked, or until the process ended, or until Ctrl-C without --for
  2    the process has no guest, or the command line cannot be right
  4    this host has no KVM, or does not let this user look at the process
  130  --for: Ctrl-C came first; what was watched until then has been told";

/// Which guests, for how long, and how it is told.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct WatchArgs {
    /// The process whose guests to watch; without it, all of this host
    #[arg(value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,

    /// All guests of this host, those that start later as well; so it is without a PID
    #[arg(long, conflicts_with = "pid")]
    pub all: bool,

    /// How long; without it, until Ctrl-C or until the process ends
    #[arg(long = "for", value_name = "TIME", value_parser = time::at_least(LEAST))]
    pub time: Option<Duration>,

    /// From one sample to the next
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time::at_least(LEAST))]
    pub every: Duration,

    /// The socket of QEMU's monitor (-qmp unix:PATH,server=on,wait=off), which tells the dirty rate
    #[arg(long, value_name = "SOCKET", requires = "pid")]
    pub qmp: Option<PathBuf>,

    /// The domain of libvirt's that the process runs, where libvirt holds QEMU's monitor: asks
    /// through `virsh qemu-monitor-command`, for which libvirt calls the domain tainted
    #[arg(long, value_name = "DOMAIN", requires = "pid", conflicts_with = "qmp")]
    pub libvirt: Option<String>,

    /// What the guest dirties, where that is known
    #[arg(long, value_name = "RATE", requires = "link")]
    pub dirty_rate: Option<Rate>,

    /// Predict a migration over this link: 10Gbit/s, 1GiB/s
    #[arg(long, value_name = "RATE")]
    pub link: Option<Rate>,

    /// The guest's memory, where that is known [default: what QEMU says (--qmp), or else all memory
    /// of the process, the VMM's own included]
    #[arg(long, value_name = "SIZE", requires_all = ["link", "pid"])]
    pub memory: Option<Size>,

    /// The part of its memory that the guest writes to again and again, where that is known: no
    /// round of a migration leaves more than this [default: all memory]
    #[arg(long, value_name = "SIZE", requires = "link")]
    pub hot_set: Option<Size>,

    /// How long a guest may stand still in it
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = time::some)]
    pub max_downtime: Duration,

    /// Estimate how much memory a guest uses within such a time; changes something in the host
    /// (the report says what)
    #[arg(long, value_name = "TIME", value_parser = time::at_least(LEAST_WORKING_SET))]
    pub working_set: Option<Duration>,

    /// By which means [default: the best that the host has]
    #[arg(long, value_name = "MEANS", requires = "working_set")]
    pub working_set_by: Option<Means>,

    /// Do not run a guest of the watch's own for some milliseconds at the beginning, which measures
    /// what an exit takes outside of KVM's tracepoints
    #[arg(long)]
    pub no_calibration: bool,

    /// Write the report as JSON to a file, or to stdout (`-`)
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,

    /// Write a JSON object in a line for each guest and sample to stdout, and at the end verdicts
    #[arg(long)]
    pub json_lines: bool,

    /// Serve the known metrics of the guests as OpenMetrics, at http://ADDRESS/metrics, without a
    /// password; by default programs of this host alone reach it
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, require_equals = true,
          default_missing_value = "127.0.0.1:9558")]
    pub listen: Option<SocketAddr>,

    /// Write the report as a page with time lines to a file, which needs no other
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// A means to estimate a working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Means {
    /// Idle page tracking (/sys/kernel/mm/page_idle)
    IdlePages,
    /// Generations of the control group's memory (/sys/kernel/debug/lru_gen)
    Generations,
    /// Referenced pages (/proc/PID/clear_refs): a lower bound
    Referenced,
}

impl From<Means> for Source {
    fn from(means: Means) -> Self {
        match means {
            Means::IdlePages => Self::IdlePages,
            Means::Generations => Self::Generations,
            Means::Referenced => Self::Referenced,
        }
    }
}

/// All of a guest's memory is looked at for each.
const LEAST_WORKING_SET: Duration = Duration::from_millis(100);

/// More samples a second would show the watch.
const LEAST: Duration = Duration::from_millis(10);
