//! What a guest of the hypervisor does once it has booted: memory is written, read and executed,
//! and the hypervisor is told over its control page how that went.

mod cli;
mod control;
mod crew;
mod device;
mod execute;
mod guarded;
mod kexec;
mod memory;
mod pages;
mod poke;
mod private;
mod touch;
mod write;

use cli::{Job, USAGE};
use control::Control;
use std::process::ExitCode;

/// Whether the work found what it expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Wrong,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let job = match Job::parse(&arguments) {
        Ok(job) => job,
        Err(why) => {
            eprintln!("work: {why}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let done = match job {
        Job::Help => {
            println!("{USAGE}");
            Ok(ExitCode::SUCCESS)
        }
        Job::Write { mib, seconds } => judged(|control| write::run(mib, seconds, control)),
        Job::Crew { mib, seconds } => judged(|control| crew::run(mib, seconds, control)),
        Job::Private { mib } => judged(|control| private::run(mib, control)),
        Job::Touch { mib } => judged(|control| touch::run(mib, control)),
        Job::Execute { mib } => judged(|control| execute::run(mib, control)),
        Job::Kexec { image, cmdline, initrd } => kexec::run(&image, &cmdline, initrd.as_deref()),
        Job::Poke { address, value } => poke::run(address, value),
    };
    done.unwrap_or_else(|error| {
        eprintln!("work: {error:#}");
        ExitCode::FAILURE
    })
}

/// Does a work that the hypervisor hears the verdict of.
fn judged(work: impl FnOnce(&Control) -> anyhow::Result<Verdict>) -> anyhow::Result<ExitCode> {
    let control = Control::open();
    let verdict = work(&control);
    let right = matches!(verdict, Ok(Verdict::Right));
    control.tell(if right { control::Event::Passed } else { control::Event::Failed });
    verdict.map(|_| if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
