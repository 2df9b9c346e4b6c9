//! Two kernels that boot in turns in emulated machines, and what the second takes more or fewer
//! instructions for. Each boot is a group.

use crate::PROGRAM;
use crate::check;
use crate::cli::{EmulateArgs, InTurnsArgs, KernelChoice, PatchesArgs};
use crate::emulate::{CHECK, CommandEnd, EmulatedReport, Ready};
use crate::params::PARAMS;
use anyhow::Context;
use serde_json::json;
use slat_kernel::vm::Debian;
use slat_lab::cli::Format;
use slat_lab::compare::{Comparison, EXACT, Run, compare};
use slat_lab::failure::bad_input;
use slat_lab::report::comparison::{Rows, answer, tables};
use slat_lab::report::{markdown, text};
use slat_lab::session::Session;
use slat_lab::table::Table;
use std::time::Instant;

/// What came of it.
#[derive(Debug)]
pub struct TurnsOutcome {
    /// Both kernels as they are named.
    pub kernels: [String; 2],
    /// Boots of each.
    pub boots: u32,
    /// The comparison of their results.
    pub comparison: Comparison,
    /// The report of each.
    pub reports: [String; 2],
    /// The console of the first boot of each.
    pub consoles: [String; 2],
}

/// Builds both kernels, boots them in turns, and compares what was counted.
///
/// # Errors
/// See [`Ready::new`] and [`Ready::boot`]; [`Failure::BadInput`](slat_lab::failure::Failure) for
/// two kernels that are one.
pub fn run(args: &InTurnsArgs, session: &mut Session) -> anyhow::Result<TurnsOutcome> {
    let kernels = kernels(args)?;
    let both = turns(&kernels, args.counted.boots, session)?;
    let [first, second] = [&both[0], &both[1]].map(|it| run_of(&it.report));
    let comparison = compare(&first?, &second?, EXACT);
    if !comparison.judges() {
        return Err(bad_input(format!(
            "`slat {}` has no phase of which both kernels count instructions; take one of `bench`",
            args.counted.command.join(" ")
        )));
    }
    let reports = [both[0].report.json()?, both[1].report.json()?];
    let consoles = [0, 1].map(|side| both[side].console.clone());
    let kernels = kernels.map(|kernel| kernel.named());
    Ok(TurnsOutcome { kernels, boots: args.counted.boots, comparison, reports, consoles })
}

/// What `slat check` found under two kernels.
#[derive(Debug)]
pub struct CheckFindings {
    /// Both kernels as they are named.
    pub kernels: [String; 2],
    /// The report of each, or why there is none.
    pub reports: [Result<check::Report, String>; 2],
}

impl CheckFindings {
    /// Returns the answer in one line.
    pub fn answer(&self) -> String {
        let one = |report: &Result<check::Report, String>| match report {
            Ok(report) if report.lost() => "a write was LOST".to_owned(),
            Ok(report) => {
                let histories: u64 = report.classes.iter().map(|it| it.counts.histories).sum();
                format!("nothing lost in {histories} histories")
            }
            Err(_) => "no report".to_owned(),
        };
        let [before, after] = &self.reports;
        format!("before: {}; after: {}", one(before), one(after))
    }

    /// Returns whether the second kernel loses something, or gave no report.
    pub fn failed(&self) -> bool {
        self.reports[1].as_ref().map_or(true, check::Report::lost)
    }

    /// Returns both reports as lines of text.
    pub fn lines(&self) -> Vec<String> {
        let text = |report: &Result<check::Report, String>| match report {
            Ok(report) => report.text(),
            Err(why) => why.clone(),
        };
        let both = self.kernels.iter().zip(&self.reports);
        both.flat_map(|(kernel, report)| {
            let text = text(report);
            [format!("{kernel}:")]
                .into_iter()
                .chain(text.lines().map(str::to_owned))
                .collect::<Vec<_>>()
        })
        .collect()
    }

    /// Returns all of it as text, or as JSON.
    ///
    /// # Errors
    /// None in practice.
    pub fn shown(&self, format: Format) -> serde_json::Result<String> {
        if format != Format::Json {
            return Ok(format!("{}\n\n{}\n", self.answer(), self.lines().join("\n")));
        }
        let one = |side: usize| match &self.reports[side] {
            Ok(report) => json!({ "kernel": self.kernels[side], "report": report }),
            Err(why) => json!({ "kernel": self.kernels[side], "error": why }),
        };
        let value = json!({ "answer": self.answer(), "before": one(0), "after": one(1) });
        serde_json::to_string_pretty(&value).map(|text| text + "\n")
    }
}

/// Returns whether the command is `slat check`, which counts nothing.
pub fn is_check(args: &InTurnsArgs) -> bool {
    args.counted.command.first().is_some_and(|word| word == CHECK)
}

/// Builds both kernels and runs `slat check` under each, in a machine of two CPUs.
///
/// # Errors
/// See [`Ready::new`] and [`Ready::boot`]. What fails inside a machine is in
/// [`CheckFindings::reports`].
pub fn check_both(args: &InTurnsArgs, session: &mut Session) -> anyhow::Result<CheckFindings> {
    let kernels = kernels(args)?.map(|kernel| EmulateArgs { count_instructions: false, ..kernel });
    session.start("kernels", 4);
    let ready = kernels.iter().map(|kernel| {
        let ready = Ready::new(kernel, session);
        session.step();
        ready
    });
    let ready = ready.collect::<anyhow::Result<Vec<_>>>()?;
    let one = |ready: &Ready<'_>| -> anyhow::Result<Result<check::Report, String>> {
        session.say("looking for lost writes");
        let end = ready.boot(0, session)?.end;
        session.check()?;
        session.step();
        let report = end.and_then(|ended| {
            let CommandEnd { checked, stderr, .. } = ended;
            checked.with_context(|| format!("`slat check` made no report:\n{stderr}"))
        });
        Ok(report.map_err(|error| format!("{error:#}")))
    };
    let reports = [one(&ready[0])?, one(&ready[1])?];
    session.finish();
    Ok(CheckFindings { kernels: kernels.each_ref().map(EmulateArgs::named), reports })
}

/// Returns a report as `compare` takes it.
pub fn run_of(report: &EmulatedReport) -> anyhow::Result<Run> {
    Run::of(report.value().clone(), "the report")
}

/// What the boots of one kernel gave.
#[derive(Debug)]
pub struct BootCounts {
    /// Their samples.
    pub report: EmulatedReport,
    /// The console of the first.
    pub console: String,
}

/// Boots two machines in turns, and counts calls in one more boot of each. Returns the report of
/// each.
///
/// # Errors
/// See [`Ready::new`] and [`Ready::boot`].
pub fn turns(
    kernels: &[EmulateArgs; 2],
    boots: u32,
    session: &mut Session,
) -> anyhow::Result<Vec<BootCounts>> {
    // Both builds come first, so that a patch that does not compile says so at once.
    session.start("kernels", 2);
    let mut ready = Vec::new();
    for kernel in kernels {
        ready.push(Ready::new(kernel, session)?);
        session.step();
    }
    let counts_calls = ready.iter().any(|it| !it.probes().is_empty());
    session.start("boots", u64::from(2 * boots) + if counts_calls { 2 } else { 0 });
    let mut taken: [Vec<EmulatedReport>; 2] = Default::default();
    let mut consoles: [Option<String>; 2] = Default::default();
    for number in 0..boots {
        // A, B, B, A: nothing of this machine favours one.
        let order = if number % 2 == 0 { [0, 1] } else { [1, 0] };
        for side in order {
            session.say(&format!("boot {} of {}", number + 1, kernels[side].named()));
            let begin = Instant::now();
            let run = ready[side].boot(number, session)?;
            consoles[side].get_or_insert_with(|| run.console.clone());
            taken[side].push(report(run)?);
            if number == 0 && side == 0 {
                ready[1].bound(begin.elapsed());
            }
            session.step();
        }
    }
    let mut both = Vec::new();
    let parts = taken.into_iter().zip(consoles).zip(&ready).zip(kernels);
    for (((boots, console), ready), kernel) in parts {
        let mut all = EmulatedReport::join(boots)?.context("there was no boot")?;
        if counts_calls {
            session.say(&format!("counting calls in {}", kernel.named()));
            let counted = report(ready.boot_with_probes(session)?)?;
            all.add(&counted, slat_kvm::probes::CALLS)?;
            session.step();
        }
        all.set_command(slat_lab::run::command(&PROGRAM, std::env::args()));
        both.push(BootCounts { report: all, console: console.unwrap_or_default() });
    }
    session.finish();
    Ok(both)
}

/// Boots one machine so often, and returns its report.
///
/// # Errors
/// See [`Ready::new`] and [`Ready::boot`].
pub fn boots(
    kernel: &EmulateArgs,
    boots: u32,
    session: &Session,
) -> anyhow::Result<EmulatedReport> {
    let ready = Ready::new(kernel, session)?;
    let mut taken = Vec::new();
    for number in 0..boots {
        session.say(&format!("boot {} of {}", number + 1, kernel.named()));
        taken.push(report(ready.boot(number, session)?)?);
    }
    EmulatedReport::join(taken)?.context("there was no boot")
}

fn report(run: crate::emulate::Run) -> anyhow::Result<EmulatedReport> {
    let ended = run.end?;
    let report = ended.report.filter(|_| ended.exit_code == 0);
    report.with_context(|| format!("the command failed in the machine:\n{}", ended.stderr))
}

/// Returns the machines of both kernels.
fn kernels(args: &InTurnsArgs) -> anyhow::Result<[EmulateArgs; 2]> {
    let is_patched = !args.patches.is_empty();
    let after = args.after.clone().unwrap_or_else(|| args.before.clone());
    if is_patched && !matches!(after, KernelChoice::Tree(_)) {
        // The source of a kernel that Debian built has the kernel's name, where `slat` fetches it.
        let has_source = after == KernelChoice::Debian(Debian::Linux6_12);
        let tree = if has_source { "debian-6.12" } else { "TREE" };
        return Err(bad_input(format!(
            "--patch and --range need a tree, and {after} is built already; write tree:{tree}"
        )));
    }
    if !is_patched && after == args.before {
        return Err(bad_input(
            "both kernels are the same: give a second one, or patches by --patch FILE",
        ));
    }
    let mut before = args.before.clone();
    // The commits of a range come after its first revision.
    if let (KernelChoice::Tree(choice), Some(range)) = (&mut before, &args.patches.range)
        && args.after.is_none()
        && let Some((first, _)) = range.split_once("..")
    {
        choice.tree = format!("{}@{first}", choice.tree);
    }
    let counted = &args.counted;
    let (none, patches) = (PatchesArgs::default(), args.patches.clone());
    let mut machines = [counted.machine(before, none), counted.machine(after, patches)];
    machines[0].modules.clone_from(&args.modules);
    machines[1].modules.clone_from(&args.modules_after);
    Ok(machines)
}

impl TurnsOutcome {
    /// Returns the answer in one line.
    pub fn answer(&self) -> String {
        answer(&self.comparison, PARAMS)
    }

    /// Returns all of it as text, Markdown or JSON.
    ///
    /// # Errors
    /// None in practice.
    pub fn shown(&self, format: Format, width: u16) -> serde_json::Result<String> {
        let [before, after] = &self.kernels;
        if format == Format::Json {
            let value = json!({
                "answer": self.answer(),
                "before": before,
                "after": after,
                "boots": self.boots,
                "comparison": self.comparison,
            });
            return serde_json::to_string_pretty(&value).map(|text| text + "\n");
        }
        let mut shown =
            format!("{}\n{} boots each of {before} and {after}\n", self.answer(), self.boots);
        let tables = self.tables();
        match format {
            Format::Markdown => tables.iter().for_each(|table| shown += &markdown::table(table)),
            _ => tables.iter().for_each(|table| text::grid(&mut shown, table, width)),
        }
        Ok(shown)
    }

    /// Returns its tables.
    pub fn tables(&self) -> Vec<Table> {
        // The kernel and the command differ on purpose.
        let is_shown = |table: &Table| !table.title.starts_with("What else");
        tables(&self.comparison, Rows::All, PARAMS).into_iter().filter(is_shown).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command, KernelAction};
    use clap::Parser;

    fn parsed(words: &str) -> InTurnsArgs {
        let line = format!("slat kernel ab {words} -- bench dirty-log");
        match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Some(Command::Kernel(args)) => match args.action {
                KernelAction::Ab(args) => args,
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn patches_belong_to_the_second_kernel_and_kernels_must_differ() {
        let [before, after] = kernels(&parsed("tree:debian-6.12 --patch my.patch")).unwrap();
        assert_eq!(
            (&*before.named(), &*after.named()),
            ("tree:debian-6.12", "tree:debian-6.12+my.patch")
        );
        assert!(kernels(&parsed("tree:a tree:a+walks")).is_ok());
        let refused = |words: &str| kernels(&parsed(words)).unwrap_err().to_string();
        assert!(refused("tree:a").contains("both kernels are the same"));
        assert!(refused("a/Image b/Image --patch p").contains("need a tree"));
        assert!(refused("debian-6.12 --patch p").ends_with("write tree:debian-6.12"));
        let [before, after] = kernels(&parsed("tree:linux --range v1..topic")).unwrap();
        assert_eq!(
            [before, after].map(|kernel| kernel.named()),
            ["tree:linux@v1", "tree:linux+v1..topic"]
        );
    }
}
