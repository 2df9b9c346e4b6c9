//! The program that a guest of the hypervisor runs once it has booted. It writes, reads and
//! executes memory, and reports the result to the hypervisor through the control page.

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

/// Whether a job found what it expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Wrong,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let job = match Job::parse(&arguments) {
        Ok(job) => job,
        Err(reason) => {
            eprintln!("work: {reason}\n\n{USAGE}");
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

/// Runs a job, and reports its verdict to the hypervisor.
fn judged(work: impl FnOnce(&Control) -> anyhow::Result<Verdict>) -> anyhow::Result<ExitCode> {
    let control = Control::open();
    let verdict = work(&control);
    let right = matches!(verdict, Ok(Verdict::Right));
    control.tell(if right { control::Event::Passed } else { control::Event::Failed });
    verdict.map(|_| if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
