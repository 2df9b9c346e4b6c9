//! `cargo xtask hypervisor`: runs a guest of the hypervisor in QEMU.

mod build;
mod image;
mod machine;
mod test;

pub use build::Granule;
pub use image::image_to;
pub use test::test;

use crate::target;
use anyhow::{Context, bail};
use build::Build;
use clap::Args;
use machine::{Guest, RunEnd};
use serde_json::Value;
use slat_hypervisor::options::{Job, Options};
use slat_kernel::vm::Debian;
use slat_kernel::vm::qemu::{AARCH64, last_lines};
use std::fs;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  cargo xtask hypervisor run                         boots Linux, and shows what its memory cost
  cargo xtask hypervisor run --vcpus 4 --cpu max
  cargo xtask hypervisor run --cpu max --lpa2        a guest of 52-bit addresses
  cargo xtask hypervisor run --granule 64k --largest 512m --memory 1g --job migrate
      stage 2 of another granule than the guest's own
  cargo xtask hypervisor run --job migrate --vcpus 2 --logging hardware --output migration
      moves a guest that writes all the time
  cargo xtask hypervisor run --job migrate --vcpus 8 --work crew,64 --seconds 200
      all eight write all the time
  cargo xtask hypervisor run --job migrate --fault local
      what comes of it if invalidations reach one CPU only
  cargo xtask hypervisor run --job age --largest 4k
  cargo xtask hypervisor run --job move --largest 4k --vcpus 2
      moves its memory leaf by leaf while it writes, and gives it another VMID
  cargo xtask hypervisor run --job restore --vcpus 2
      goes back to a snapshot that comes page by page while Linux runs
  cargo xtask hypervisor run --job fork --vcpus 2
      forks Linux while it writes, and checks the fork word by word
  cargo xtask hypervisor run --job private --vcpus 4 --thread multi
      makes pages private and shared again while vCPUs use them
  cargo xtask hypervisor run --execute zap --work execute,16
  cargo xtask hypervisor run --caches every --vcpus 4 --work hotplug
  cargo xtask hypervisor run --work kexec

Ends with 0 if the guest switched itself off and its program passed, with 1 if not.";

/// Options of a run.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// QEMU's name of the CPU: cortex-a76 has neither FEAT_S2FWB nor FEAT_BBM, max has both
    /// [default: cortex-a76; max for the job private]
    #[arg(long)]
    pub cpu: Option<String>,
    /// Guest addresses of 52 bits: FEAT_LPA2, which the CPU max has
    #[arg(long)]
    pub lpa2: bool,
    /// Smallest page of stage 2; the guest's own pages are 4k
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub granule: Granule,
    /// Bits of guest addresses, 39 to 52 [default: as many as possible; 51 with --lpa2 --granule
    /// 16k, because QEMU before 8.1 walks no more levels then]
    #[arg(long, value_parser = clap::value_parser!(u8).range(39..=52))]
    pub bits: Option<u8>,
    /// vCPUs, 1 to 8; the manager has another CPU
    #[arg(long, default_value_t = 1)]
    pub vcpus: u64,
    /// The vCPU that boots
    #[arg(long, default_value_t = 0)]
    pub first: u64,
    /// The guest's memory
    #[arg(long, default_value = "256m")]
    pub memory: String,
    /// The largest leaf: 4k, 2m or 1g; 16k or 32m, with FEAT_LPA2 64g; 64k or 512m [default: 2m,
    /// 32m, 512m]
    #[arg(long)]
    pub largest: Option<String>,
    /// Debian's kernel
    #[arg(long, default_value = "debian-6.12")]
    pub kernel: Debian,
    /// The manager's job: boot (nothing), migrate, age, move (the guest's memory leaf by leaf, and
    /// to another VMID), restore (the guest to a snapshot, page by page), fork (the guest while it
    /// writes) or private (pages become private and shared again while the guest uses them)
    #[arg(long, default_value = "boot")]
    pub job: String,
    /// The guest's work: write,MIB crew,MIB (the same on all CPUs) private,MIB touch,MIB
    /// execute,MIB hotplug kexec [default: what the job needs]
    #[arg(long)]
    pub work: Option<String>,
    /// Way to log writes: protect or hardware
    #[arg(long, default_value = "protect")]
    pub logging: String,
    /// Fetches from huge pages: allowed, split, split-page or zap
    #[arg(long, default_value = "allowed")]
    pub execute: String,
    /// Switches of a vCPU's caches: exact, every, first or vcpu0 [default: exact; first for the job
    /// fork]
    #[arg(long)]
    pub caches: Option<String>,
    /// Which of these switches are trapped: needed or always
    #[arg(long, default_value = "needed")]
    pub trap: String,
    /// A deliberate fault: no-tlbi, local, no-stage1, no-stage2, keep-dirty, wrong-vmid, no-break,
    /// no-barrier or no-maintenance
    #[arg(long, default_value = "none")]
    pub fault: String,
    /// Seconds after which the guest is stopped
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// QEMU's threads: one for all CPUs, which boots fast, or one each (`multi`), which races
    #[arg(long, default_value = "single", value_parser = ["single", "multi"])]
    pub thread: String,
    /// More words of the guest's command line
    #[arg(long, default_value = "", hide_default_value = true)]
    pub append: String,
    /// A folder for console and report.json [default: target/hypervisor]
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// An ELF file to run instead of Linux, for the tests
    #[arg(skip)]
    pub guest: Option<PathBuf>,
}

impl Default for RunArgs {
    fn default() -> Self {
        #[derive(clap::Parser)]
        struct Defaults {
            #[command(flatten)]
            args: RunArgs,
        }
        <Defaults as clap::Parser>::parse_from(["run"]).args
    }
}

impl RunArgs {
    /// Returns the guest's work.
    fn work(&self) -> &str {
        match (&self.work, self.job.as_str()) {
            (Some(work), _) => work,
            (None, "migrate" | "move" | "restore") => "write,64",
            (None, "age") => "touch,64",
            (None, "fork") => "crew,32",
            (None, "private") => "private,16",
            (None, _) => "",
        }
    }

    /// Returns the CPU: memory is private only on one whose vCPUs cannot bypass their caches.
    fn cpu(&self) -> &str {
        let private = self.job == Job::Private.word();
        self.cpu.as_deref().unwrap_or(if private { "max" } else { "cortex-a76" })
    }

    /// Returns the policy for switches of a vCPU's caches: a guest with one set of tables can be
    /// forked.
    fn caches(&self) -> &str {
        let fork = self.job == Job::Fork.word();
        self.caches.as_deref().unwrap_or(if fork { "first" } else { "exact" })
    }

    /// Returns the build of the hypervisor.
    ///
    /// # Errors
    /// There is none for the granule and addresses.
    fn build(&self) -> anyhow::Result<Build> {
        Build::new(self.granule, self.lpa2)
    }

    /// Returns the hypervisor's command line.
    ///
    /// # Errors
    /// The granule does not have these leaves.
    fn words(&self) -> anyhow::Result<String> {
        let build = self.build()?;
        let largest = build.largest(self.largest.as_deref())?;
        Ok(format!(
            "vcpus={} first={} memory={} largest={} bits={} job={} logging={} execute={} \
             caches={} trap={} fault={} seconds={}",
            self.vcpus,
            self.first,
            self.memory,
            largest,
            self.bits.unwrap_or(build.bits()),
            self.job,
            self.logging,
            self.execute,
            self.caches(),
            self.trap,
            self.fault,
            self.seconds
        ))
    }

    /// Returns the guest's command line.
    fn guest_words(&self) -> String {
        if self.guest.is_some() {
            return self.append.clone();
        }
        // Without kernel page-table isolation, whose changes of ASID flush QEMU's TLB, and so hide
        // a missing invalidation.
        format!("console=ttyAMA0 kpti=off panic=-1 slat.work={} {}", self.work(), self.append)
    }
}

/// Installs what is missing, builds, boots, and prints the results.
///
/// # Errors
/// Impossible options, something that cannot be installed or built, or a guest that did not end as
/// it should.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let build = args.build()?;
    args.words()?;
    build.prepare()?;
    let folder = args.output.clone().unwrap_or_else(|| target().join("hypervisor/run"));
    let ending = boot(args, &folder, true)?;
    ending.check()?;
    println!("\n{}", folder.join("report.json").display());
    Ok(())
}

/// Boots a guest, and waits for its end; `shown` copies its console to stdout.
pub fn boot(args: &RunArgs, folder: &Path, shown: bool) -> anyhow::Result<RunEnd> {
    let (words, build) = (args.words()?, args.build()?);
    let options = Options::parse(&words).map_err(|refused| anyhow::anyhow!("{refused}"))?;
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (image, initrd) = match &args.guest {
        Some(_) => (None, None),
        None => {
            let image = image::kernel(args.kernel)?;
            let initrd = initrd(&image, args.work() == "kexec")?;
            (Some(image), Some(initrd))
        }
    };
    let machine = Guest {
        args,
        options: &options,
        words: &words,
        program: build.program(),
        image,
        initrd,
        folder,
    };
    let ending = machine.run(shown)?;
    let report = serde_json::json!({
        "format": "slat-hypervisor", "version": 1,
        "command": std::env::args().collect::<Vec<_>>(),
        "cpu": args.cpu(), "granule": args.granule.to_string(), "lpa2": args.lpa2,
        "options": words, "guest": args.guest_words(), "emulator": AARCH64.version()?,
        "limits": "an emulator: counts are the guest's, times are not a machine's",
        "records": ending.records,
    });
    let text = serde_json::to_string_pretty(&report).context("a report is JSON")? + "\n";
    fs::write(folder.join("report.json"), text).context("cannot write the report")?;
    Ok(ending)
}

/// Returns Linux's initial file system, packed once per run of this program; or one with a second
/// kernel.
fn initrd(image: &Path, kexec: bool) -> anyhow::Result<PathBuf> {
    let folder = target().join("hypervisor");
    fs::create_dir_all(&folder).context("cannot make a folder")?;
    static PACKED: std::sync::Mutex<Vec<PathBuf>> = std::sync::Mutex::new(Vec::new());
    let mut packed = PACKED.lock().unwrap_or_else(|error| error.into_inner());
    let mut once = |path: PathBuf, files: &[(&str, &Path)]| -> anyhow::Result<PathBuf> {
        if !packed.contains(&path) {
            image::write(&path, image::INIT, files)?;
            packed.push(path.clone());
        }
        Ok(path)
    };
    let plain = once(folder.join("initrd"), &[])?;
    if !kexec {
        return Ok(plain);
    }
    once(folder.join("initrd-kexec"), &[("boot/Image", image), ("boot/initrd", &plain)])
}

impl RunEnd {
    /// Returns the first record of a kind.
    pub fn record(&self, kind: &str) -> Option<&Value> {
        self.records.iter().find(|record| record["record"] == kind)
    }

    /// Returns a number of the last record.
    pub fn count(&self, name: &str) -> anyhow::Result<u64> {
        let end = self.record("end").context("the hypervisor said nothing at the end")?;
        end[name].as_u64().with_context(|| format!("no {name} in {end}"))
    }

    /// Returns the faults of a kind, of each vCPU, and of the manager.
    pub fn each(&self, kind: &str) -> Vec<u64> {
        let all = self.record("end").map(|end| &end["faults"][kind]);
        let all = all.and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        all.iter().filter_map(Value::as_u64).collect()
    }

    /// Returns the faults of a kind, of all vCPUs.
    pub fn faults(&self, kind: &str) -> u64 {
        self.each(kind).iter().sum()
    }

    /// Returns the reason for the guest's end.
    pub fn why(&self) -> &str {
        self.record("end").and_then(|end| end["why"].as_str()).unwrap_or("nobody knows")
    }

    /// Checks that all went as it should.
    ///
    /// # Errors
    /// The reason, with the last lines of the console and of the hypervisor.
    pub fn check(&self) -> anyhow::Result<()> {
        let work_failed = self.console.contains("guest: FAILED");
        if self.why() == "it switched itself off" && !work_failed {
            return Ok(());
        }
        bail!(
            "the guest did not end as it should: {}{}{}{}",
            self.why(),
            if work_failed { ", and its program failed" } else { "" },
            last_lines("its console", &self.console),
            last_lines("the hypervisor", &self.said)
        )
    }
}
