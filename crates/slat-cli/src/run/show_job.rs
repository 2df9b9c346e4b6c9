//! `slat show`.

use crate::cli::ShowArgs;
use crate::show::dump::Dump;
use crate::show::{build, kvm, text as drawing};
use slat_lab::report::{markdown, text};
use slat_lab::run::output;
use std::path::Path;
use std::process::ExitCode;

/// Draws tables of Slat or of KVM, as `args` asks.
pub fn show(args: &ShowArgs) -> anyhow::Result<ExitCode> {
    let mut dump = dump(args)?;
    if let Some(range) = args.range {
        dump = dump.within(range.start().0, range.end().0);
    }
    // The picture is written first, so that a pipe that closes early does not lose it.
    let unit = args.unit.map_or_else(|| drawing::unit(&dump), |unit| unit.bytes());
    let table = drawing::table(&dump);
    output::print(&if args.json {
        dump.to_json()?
    } else if args.markdown {
        let maps = drawing::maps(&dump, unit);
        format!("{}```\n{}```\n", markdown::table(&table), maps.trim_start())
    } else {
        let mut text = String::new();
        text::grid(&mut text, &table, output::width());
        text + &drawing::maps(&dump, unit)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn dump(args: &ShowArgs) -> anyhow::Result<Dump> {
    let page = args.page.map(|page| page.bytes());
    if let Some(file) = &args.file {
        return Dump::read(file, page.unwrap_or(4096));
    }
    if let Some(guest) = &args.kvm {
        let guest = Some(&**guest).filter(|guest| !guest.is_empty());
        let page = page.unwrap_or(rustix::param::page_size() as u64);
        return kvm::read(Path::new("/"), guest, page);
    }
    match args.scenario {
        Some(scenario) => build::build(args.format, &scenario.operations()),
        None => build::build(args.format, &args.operations),
    }
}
