//! Times dirty logging on this host: `cargo run --release --example dirty_log -- 256 2 2m`
//! (MiB, vCPUs, backing, mode, clear chunk in pages, write share in per cent; all optional).

use slat_kvm::dirty_log::{Config, Event, Mode, run};
use slat_kvm::{Backing, probe};
use std::error::Error;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

fn main() -> ExitCode {
    match time() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn time() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| match args.get(at) {
        Some(text) => text.parse().map_err(|_| format!("{text} is not a number")),
        None => Ok(default),
    };
    let named = |at: usize| args.get(at).map(String::as_str);
    let backing = Backing::ALL.into_iter().find(|it| named(2) == Some(it.name()));
    let mode = match named(3) {
        Some("legacy") => Mode::Legacy,
        Some("full") => Mode::ManualInitiallySet,
        _ => Mode::Manual,
    };
    let chunk = number(4, 0)?;
    let config = Config {
        memory: number(0, 64)? << 20,
        vcpus: number(1, 1)? as usize,
        iterations: 3,
        backing: backing.unwrap_or(Backing::Small),
        mode,
        clear_chunk: (chunk != 0).then_some(chunk),
        write_share: number(5, 100)? as u8,
    };
    println!("{:?}\n{config:?}", probe()?);
    let report = run(&config, &AtomicBool::new(false), &mut |event| {
        if let Event::End(run) = event {
            println!(
                "{:8} {:?} {:.6} s, {} calls, longest {:.6} s, {:?} {:?} {:?}",
                run.phase.name(),
                run.iteration,
                run.seconds,
                run.calls,
                run.longest_call_seconds,
                run.log,
                run.mapped,
                run.vm
            );
            for vcpu in &run.vcpus {
                let per_page = vcpu.seconds * 1e9 / vcpu.pages.max(1) as f64;
                println!("         {per_page:.0} ns a page, {vcpu:?}");
            }
        }
    })?;
    println!(
        "thp {:?}, left in log {}, excess {}, stamps {}",
        report.transparent_huge_bytes,
        report.left_in_log,
        report.excess(),
        report.stamps_checked
    );
    Ok(())
}
