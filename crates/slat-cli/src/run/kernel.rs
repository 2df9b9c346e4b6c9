//! `slat kernel`, from the command line to the exit code.

use crate::bisect;
use crate::cli::{
    BisectArgs, BootArgs, BuildArgs, CallsArgs, EmulateArgs, InTurnsArgs, KernelAction, KernelArgs,
    KernelChoice, ListArgs, PatchArgs, ReviewArgs, TestArgs, TreeChoice,
};
use crate::emulate;
use crate::in_turns;
use crate::kernel::{self, Source};
use crate::review;
use crate::selftests;
use anyhow::Context;
use serde_json::json;
use slat_kernel::vm::Architecture;
use slat_kernel::{Author, EditedTree, Edits, Mail};
use slat_lab::failure::bad_input;
use slat_lab::files::{check, writable, write_whole};
use slat_lab::numbers::several;
use slat_lab::report::text;
use slat_lab::run::output::{self, print};
use slat_lab::session::Session;
use slat_lab::table::Table;
use std::fmt::Write as _;
use std::process::{Command, ExitCode};

/// Runs the action of `slat kernel`.
pub fn kernel(args: &KernelArgs) -> anyhow::Result<ExitCode> {
    let mut session = Session::interactive()?;
    match &args.action {
        KernelAction::List(args) => list(args, &mut session),
        KernelAction::Build(args) => build(args, &mut session),
        KernelAction::Patch(args) => patch(args, &mut session),
        KernelAction::Boot(args) => boot(args, &mut session),
        KernelAction::Test(args) => test(args, &mut session),
        KernelAction::Ab(args) => ab(args, &mut session),
        KernelAction::Bisect(args) => bisect(args, &mut session),
        KernelAction::Review(args) => review(args, &mut session),
    }
}

fn list(args: &ListArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let edits = Edits::read(args.edits.edits.as_deref()).map_err(|e| bad_input(e.to_string()))?;
    let tree = args.tree.as_deref().map(|name| kernel::tree(name, session)).transpose()?;
    let tree = tree.map(|(tree, _)| tree);
    let mut fits = true;
    let mut rows = Vec::new();
    for series in edits.series() {
        let found = tree.as_ref().map(|tree| {
            session.check()?;
            let names = [series.name.clone()];
            let edited = edits.find(&names).and_then(|edits| EditedTree::new(tree, edits));
            Ok::<_, anyhow::Error>(edited.map_err(|error| error.to_string()))
        });
        rows.push((series, found.transpose()?));
    }
    let mut shown = String::new();
    let mut all = Vec::new();
    for (series, found) in &rows {
        let state = match found {
            None => String::new(),
            Some(Ok(edited)) => format!("fits, {}", several(edited.files.len(), "file")),
            Some(Err(why)) => {
                fits = false;
                why.clone()
            }
        };
        let _ = writeln!(shown, "{:20} {}", series.name, series.title());
        for edit in &series.edits {
            let own = edit.name.rsplit('/').next().unwrap_or_default();
            let _ = writeln!(shown, "  {own:30} {}", edit.subject());
        }
        for (other, why) in &series.not_with {
            let _ = writeln!(shown, "  not with {other}: {why}");
        }
        if !state.is_empty() {
            let _ = writeln!(shown, "  {state}");
        }
        all.push(json!({
            "name": series.name,
            "title": series.title(),
            "edits": series.edits.iter().map(|edit| json!({
                "name": edit.name, "subject": edit.subject(),
            })).collect::<Vec<_>>(),
            "not_with": series.not_with.iter().map(|(other, _)| other).collect::<Vec<_>>(),
            "fits": found.as_ref().map(Result::is_ok),
            "why": found.as_ref().and_then(|found| found.as_ref().err()),
        }));
    }
    for (name, why) in edits.broken() {
        fits = false;
        let _ = writeln!(shown, "{name:20} cannot be read: {why}");
        all.push(json!({ "name": name, "fits": false, "why": why }));
    }
    match args.json {
        true => print(&(serde_json::to_string_pretty(&all)? + "\n"))?,
        false if all.is_empty() => {
            return Err(bad_input("there is no series: a series is a folder with cover.md"));
        }
        false => print(&shown)?,
    }
    Ok(ExitCode::from(u8::from(!fits)))
}

fn build(args: &BuildArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let arch = architecture(args.arch)?;
    session.start(&format!("kernel for {arch}"), 1);
    let begin = std::time::Instant::now();
    let source = Source::of(&args.tree, session)?;
    if args.objects {
        let steps = source.objects(arch, &args.tree.config, session)?;
        session.finish();
        let seconds = begin.elapsed().as_secs_f64();
        match args.json {
            true => print(&format!("{}\n", json!({ "steps": steps, "seconds": seconds })))?,
            false => print(&format!("compiled for {arch}: {steps} commands in {seconds:.0} s\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.warnings {
        let added = source.warnings(arch, &args.tree.config, session)?;
        session.finish();
        let edits = source.edited.patches.iter().map(|(edit, _)| &*edit.name).zip(added);
        let shown = match args.json {
            true => {
                let each = edits.map(|(edit, new)| json!({ "edit": edit, "warnings": new }));
                serde_json::to_string_pretty(&each.collect::<Vec<_>>())? + "\n"
            }
            false => edits
                .map(|(edit, new)| {
                    let lines: String = new.iter().map(|line| format!("  {line}\n")).collect();
                    format!("{edit:44} {} new warnings\n{lines}", new.len())
                })
                .collect(),
        };
        print(&shown)?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.each {
        let steps = source.each(arch, &args.tree.config, session)?;
        session.finish();
        let edits = source.edited.patches.iter().map(|(edit, _)| &*edit.name).zip(steps);
        let shown = match args.json {
            true => {
                let each = edits.map(|(edit, steps)| json!({ "edit": edit, "steps": steps }));
                serde_json::to_string_pretty(&each.collect::<Vec<_>>())? + "\n"
            }
            false => edits.map(|(edit, steps)| format!("{edit:44} {steps} commands\n")).collect(),
        };
        print(&shown)?;
        return Ok(ExitCode::SUCCESS);
    }
    let built = source.build(arch, &args.tree.config, session)?;
    session.finish();
    if args.json {
        let value = json!({
            "image": built.image,
            "release": built.release,
            "architecture": arch.name(),
            "steps": built.steps,
            "seconds": begin.elapsed().as_secs_f64(),
            "log": built.log,
        });
        print(&(serde_json::to_string_pretty(&value)? + "\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let how = match built.steps {
        0 => "was built before".to_owned(),
        steps => format!("{steps} commands in {:.0} s", begin.elapsed().as_secs_f64()),
    };
    eprintln!("Linux {} for {arch}: {how}", built.release);
    print(&format!("{}\n", built.image.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn patch(args: &PatchArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    if args.tree.named().is_empty() {
        return Err(bad_input(
            "name the edits to write: --edit SERIES, which `slat kernel list` has, or --patch FILE",
        ));
    }
    writable(&args.output)?;
    let mut source = Source::of(&args.tree, session)?;
    let author = author();
    for (edit, _) in source.edited.patches.iter_mut().filter(|_| args.signoff) {
        edit.sign(&author.from);
    }
    let known = Edits::read(args.tree.edits.edits.as_deref())?;
    let series = args.tree.names.iter().filter_map(|name| {
        let series = name.split('/').next();
        known.series().iter().find(|known| Some(&*known.name) == series)
    });
    let mut covers: Vec<&str> = series.map(|series| &*series.cover).collect();
    if covers.is_empty() {
        // As git's: they are to be replaced.
        covers.push("*** SUBJECT HERE ***\n\n*** BLURB HERE ***\n");
    }
    for mail in Mail::series(&covers.join("\n\n"), &source.edited, &author) {
        let path = args.output.join(&mail.file);
        write_whole(&path, mail.text.as_bytes())?;
        print(&format!("{}\n", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the author that git would use, because `git am` needs one in each patch.
fn author() -> Author {
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
    };
    let ident = git(&["var", "GIT_AUTHOR_IDENT"]);
    let from = ident.as_deref().and_then(|ident| Some(&ident[..=ident.rfind('>')?]));
    let date = Command::new("date").arg("-R").env("LC_ALL", "C").output().ok();
    let date = date.and_then(|output| String::from_utf8(output.stdout).ok());
    Author {
        from: from.unwrap_or("Nobody <nobody@localhost>").to_owned(),
        date: date.map_or_else(String::new, |date| date.trim().to_owned()),
    }
}

/// Boots two kernels in turns, and prints what differs.
fn ab(args: &InTurnsArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    if let Some(folder) = &args.output {
        writable(folder)?;
    }
    if in_turns::is_check(args) {
        let checked = in_turns::check_both(args, session)?;
        if let Some(folder) = &args.output {
            for (name, report) in ["before.json", "after.json"].iter().zip(&checked.reports) {
                let Ok(report) = report else { continue };
                let json = serde_json::to_string_pretty(report)? + "\n";
                write_whole(&folder.join(name), json.as_bytes())?;
            }
        }
        print(&checked.shown(args.print.format())?)?;
        return Ok(ExitCode::from(u8::from(checked.failed())));
    }
    let compared = in_turns::run(args, session)?;
    if let Some(folder) = &args.output {
        for (name, text) in ["before.json", "after.json"].iter().zip(&compared.reports) {
            let path = folder.join(name);
            write_whole(&path, text.as_bytes())?;
            eprintln!("Written: {}", path.display());
        }
    }
    print(&compared.shown(args.print.format(), output::width())?)?;
    let slower = args.fail_if_slower && compared.comparison.slower();
    Ok(ExitCode::from(u8::from(slower)))
}

/// Writes a page on patches.
fn review(args: &ReviewArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    if let Some(path) = &args.output {
        check(path).map_err(|error| bad_input(format!("--output {}: {error}", path.display())))?;
    }
    let review = review::run(args, architecture(args.counted.arch)?, session)?;
    match &args.output {
        Some(path) => {
            let is_html = path.extension().is_some_and(|it| it == "html" || it == "htm");
            let page = if is_html { review.html() } else { review.markdown() };
            write_whole(path, page.as_bytes())?;
            eprintln!("Written: {}", path.display());
        }
        None => print(&review.markdown())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds the commit that changed a count.
fn bisect(args: &BisectArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let bisected = bisect::run(args, session)?;
    print(&match args.json {
        true => serde_json::to_string_pretty(&bisected)? + "\n",
        false => bisected.shown(),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn boot(args: &BootArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let BootArgs { tree, machine } = args;
    let arch = architecture(machine.arch)?;
    let command = match arch.runs_slat() {
        true => "bench populate --memory 4M --backing 4k --vcpus 1 --runs 1",
        false => "guest -p 1024",
    };
    let emulated = EmulateArgs {
        arch: Some(arch),
        parts: machine.parts.clone(),
        time_limit: machine.time_limit,
        edits: tree.edits.clone(),
        patches: tree.patches.clone(),
        config: tree.config.clone(),
        keep_running: machine.keep_running,
        command: command.split(' ').map(str::to_owned).collect(),
        ..EmulateArgs::of(KernelChoice::Tree(TreeChoice::from(tree)))
    };
    let run = emulate::run(&emulated, session)?;
    if let Some(path) = &machine.console {
        write_whole(path, run.console.as_bytes())?;
    }
    let ended = run.end?;
    if !arch.runs_slat() && ended.exit_code == 0 {
        print(&format!("{}A guest of 4 MiB ran under its KVM.\n", ended.stderr))?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(report) = ended.report.filter(|_| ended.exit_code == 0) else {
        eprint!("{}", ended.stderr);
        anyhow::bail!("the kernel booted, and no guest ran under its KVM");
    };
    let shown = match machine.json {
        true => report.json()?,
        false => format!("{}\nA guest of 4 MiB ran under its KVM.\n", report.machine()),
    };
    print(&shown)?;
    Ok(ExitCode::SUCCESS)
}

fn test(args: &TestArgs, session: &mut Session) -> anyhow::Result<ExitCode> {
    let arch = architecture(args.machine.arch)?;
    let results = selftests::run(args, arch, session)?;
    let failed = results.tests.iter().filter(|test| test.failed()).count();
    if args.machine.json {
        print(&(serde_json::to_string_pretty(&results)? + "\n"))?;
    } else {
        let mut shown = String::new();
        let rows = results.tests.iter().map(|test| test.cells(&args.probe));
        let title = format!("KVM's selftests on Linux {}, {arch}", results.release);
        let mut table = Table::new(title, 1, "test|result|seconds", rows);
        let calls = args.probe.iter().map(|name| name.trim_end_matches('?'));
        table.columns.extend(calls.map(|name| format!("calls of {name}")));
        text::grid(&mut shown, &table, output::width());
        if let Some(engine) = results.engine() {
            let _ = writeln!(shown, "\n{engine}");
        }
        for test in results.tests.iter().filter(|test| test.failed()) {
            let _ = writeln!(shown, "\nThe last that {} said:\n{}", test.name, test.output);
        }
        print(&shown)?;
    }
    if results.is_without_engine(args.machine.parts.append.as_deref()) {
        anyhow::bail!("no VM ran on the engine, so the tests say nothing about it");
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}

/// Runs a program, and prints on stdout how often each kernel function was called while it ran.
pub fn calls(args: &CallsArgs) -> anyhow::Result<ExitCode> {
    let Some((program, arguments)) = args.command.split_first() else {
        return Err(bad_input("name a program"));
    };
    let run = || Command::new(program).args(arguments).status();
    let (status, calls) = slat_kvm::probes::during(&args.probe, run)?;
    let status = status.with_context(|| format!("cannot start {program}"))?;
    for (name, count) in calls {
        println!("{}{name} {count}", selftests::CALLS);
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.context("a signal ended it")?))
}

fn architecture(asked: Option<Architecture>) -> anyhow::Result<Architecture> {
    asked
        .or_else(Architecture::of_this_machine)
        .ok_or_else(|| bad_input("name the architecture of the kernel by --arch"))
}
