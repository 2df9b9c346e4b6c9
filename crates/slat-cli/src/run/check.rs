//! `slat check`, from the command line to the exit code.

use crate::check::{HistoryClass, Limits, Report, Tries, Verdict};
use crate::cli::CheckArgs;
use anyhow::Context;
use slat_kvm::Error;
use slat_kvm::check::{Class, History, Host, classes, set_up_machine};
use slat_lab::failure::{Failure, bad_input};
use slat_lab::files::{RESULTS, writable, write_whole};
use slat_lab::first::is_timeless;
use slat_lab::run::output;
use slat_lab::session::Session;
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// The file with what to send to KVM's maintainers.
const LETTER: &str = "report.txt";

/// Runs histories, and tells what was lost.
pub fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    if let Some(folder) = &args.output {
        writable(folder)?;
    }
    if is_timeless() {
        set_up_machine();
    }
    let host = Host::here(args.memory.bytes()).map_err(refusal)?;
    let mut session = Session::interactive()?;
    let asked =
        |class: &&Class| args.class.is_empty() || args.class.iter().any(|name| name == class.name);
    let chosen: Vec<&'static Class> = classes().iter().filter(asked).collect();
    if args.list {
        return list(&chosen, &Tries::new(&host, &session, Box::new(|_| ())));
    }
    let drawn =
        || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |it| it.as_millis() as u64);
    let seed = args.seed.unwrap_or_else(drawn);
    let limits = Limits { time: args.time, seed, memory: args.memory.bytes(), first: args.first };
    session.start("check", args.time.as_secs());
    let report = {
        let own = args.clone();
        let tell = move |report: &Report| _ = told(&own, report);
        let tries = Tries::new(&host, &session, Box::new(tell));
        match one(args, &chosen, seed, &host)? {
            Some((history, number, steps)) => tries.repeat(&history, number, &steps, &limits),
            None => tries.all(&chosen, &limits),
        }
    };
    session.finish();
    told(args, &report)
}

/// Prints and writes the report, and returns the exit code.
fn told(args: &CheckArgs, report: &Report) -> anyhow::Result<ExitCode> {
    let history = args.history.as_ref().map(|path| path.display().to_string());
    let report = &Report { history, ..report.clone() };
    let json = serde_json::to_string_pretty(report)? + "\n";
    if let Some(folder) = &args.output {
        write_whole(&folder.join(RESULTS), json.as_bytes())?;
        for (class, finding) in report.classes.iter().filter_map(HistoryClass::lost) {
            let history = serde_json::to_string_pretty(&finding.history)? + "\n";
            write_whole(&folder.join(finding.file(&class.name)), history.as_bytes())?;
        }
        if let Some(letter) = report.letter() {
            write_whole(&folder.join(LETTER), letter.as_bytes())?;
        }
    }
    output::print(&if args.json { json } else { report.text() })?;
    if report.lost() {
        return Ok(ExitCode::from(1));
    }
    if report.interrupted {
        return Ok(ExitCode::from(130));
    }
    if !report.tried() {
        return Err(Failure::CannotRun("nothing could be tried on this host".to_owned()).into());
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the one history that was asked for, its number, and the indices of its steps.
fn one(
    args: &CheckArgs,
    chosen: &[&'static Class],
    seed: u64,
    host: &Host,
) -> anyhow::Result<Option<(History, u64, Vec<usize>)>> {
    let (history, number) = match (&args.history, args.number) {
        (Some(path), _) => (read(path)?, 0),
        (None, Some(number)) => {
            let [class] = chosen else {
                return Err(bad_input("--number: is of one class; name it by --class NAME"));
            };
            let history = class.history(seed, number, &host.means);
            let why = class.lacks(&host.means).unwrap_or_default();
            let history = history.ok_or_else(|| {
                Failure::CannotRun(format!(
                    "--class {}: this host lacks what it takes; {why}",
                    class.name
                ))
            })?;
            (history, number)
        }
        (None, None) => return Ok(None),
    };
    let all = history.steps.len();
    if let Some(step) = args.steps.iter().find(|step| **step >= all) {
        return Err(bad_input(format!("--steps {step}: the history has steps 0 to {}", all - 1)));
    }
    let steps = if args.steps.is_empty() { (0..all).collect() } else { args.steps.clone() };
    Ok(Some((history.part(&steps), number, steps)))
}

fn read(path: &Path) -> anyhow::Result<History> {
    let wrong = |why: String| bad_input(format!("--history {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| wrong(format!("is no history: {error}")))
}

fn list(chosen: &[&'static Class], tries: &Tries<'_>) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    for class in chosen {
        text += &format!("{:<12} {}\n", class.name, class.about);
        let tried = tries.before(class);
        if let Verdict::Untried(why) = &tried.verdict {
            text += &format!("{:13}cannot be tried here: {why}\n", "");
        }
        for why in &tried.untried {
            text += &format!("{:13}not tried here: {why}\n", "");
        }
    }
    output::print(&text).context("cannot list the classes")?;
    Ok(ExitCode::SUCCESS)
}

fn refusal(error: Error) -> anyhow::Error {
    match &error {
        Error::Invalid { .. } => bad_input(format!("--memory: {error}")),
        _ if error.is_missing_feature() => Failure::CannotRun(error.to_string()).into(),
        _ => error.into(),
    }
}
