//! Real Linux on real stage-2 walks: checks each service of the hypervisor, and the effects of
//! deliberate faults.

use super::build::{Build, program};
use super::{Granule, RunArgs, RunEnd, boot};
use crate::workspace::Outcome;
use crate::{in_ci, target};
use anyhow::{Context, ensure};
use std::sync::Mutex;

/// A boot, and its check.
struct Case {
    name: String,
    args: RunArgs,
    check: fn(&RunEnd) -> anyhow::Result<()>,
    /// With --long only.
    long: bool,
}

impl Case {
    /// Returns how often the case may be booted until its check passes.
    fn tries(&self) -> u32 {
        if self.args.fault == "none" { 1 } else { 3 }
    }
}

/// Boots every case, two at a time.
pub fn test(long: bool) -> anyhow::Result<Outcome> {
    let cases: Vec<Case> =
        cases().into_iter().chain(probes()).filter(|case| long || !case.long).collect();
    let mut builds = Vec::new();
    for case in &cases {
        let build = case.args.build()?;
        if !builds.contains(&build) {
            builds.push(build);
        }
    }
    match builds.into_iter().try_for_each(Build::prepare) {
        Ok(()) => {}
        Err(error) if in_ci() => return Err(error),
        Err(error) => return Ok(Outcome::Skipped(format!("{error:#}"))),
    }
    let queue = Mutex::new(cases.into_iter());
    let failed = Mutex::new(Vec::new());
    let lock = |error: std::sync::PoisonError<_>| error.into_inner();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(case) = queue.lock().unwrap_or_else(lock).next() else { return };
                    let begin = std::time::Instant::now();
                    let folder = target().join("hypervisor").join(&case.name);
                    let once =
                        || boot(&case.args, &folder, false).and_then(|end| (case.check)(&end));
                    let mut done = once();
                    // A deliberate fault shows only if the guest writes the right page in time,
                    // which on a busy machine may fail at the first try.
                    for _ in 1..case.tries() {
                        if let Err(error) = &done {
                            println!("{}: once more: {error:#}", case.name);
                            done = once();
                        }
                    }
                    let seconds = begin.elapsed().as_secs_f64();
                    match done {
                        Ok(()) => println!("{:<44} {seconds:>5.1} s  passed", case.name),
                        Err(error) => {
                            println!("{:<44} {seconds:>5.1} s  FAILED", case.name);
                            let message = format!("{}: {error:#}", case.name);
                            failed.lock().unwrap_or_else(|e| e.into_inner()).push(message);
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(|error| error.into_inner());
    ensure!(failed.is_empty(), "{}", failed.join("\n\n"));
    Ok(Outcome::Ran(Vec::new()))
}

fn cases() -> Vec<Case> {
    let base = || RunArgs {
        memory: "192m".to_owned(),
        append: "quiet".to_owned(),
        seconds: 120,
        ..RunArgs::default()
    };
    let case = |name: &str, args, check| Case { name: name.to_owned(), args, check, long: false };
    let rare = |name: &str, args, check| Case { name: name.to_owned(), args, check, long: true };
    let migrate = |cpu: &str, vcpus, logging: &str| RunArgs {
        cpu: Some(cpu.to_owned()),
        vcpus,
        job: "migrate".to_owned(),
        work: Some("write,32".to_owned()),
        logging: logging.to_owned(),
        ..base()
    };
    let mut cases = vec![
        case("migrate-protect-on-a76", migrate("cortex-a76", 2, "protect"), migrated),
        rare(
            "migrate-hardware-on-max-threads-race",
            RunArgs { thread: "multi".to_owned(), lpa2: true, ..migrate("max", 2, "hardware") },
            |end| {
                ensure!(end.said.contains("52-bit addresses"), "narrower: {}", end.said);
                migrated(end).and_then(|()| no_maintenance(end))
            },
        ),
        case(
            "migrate-of-eight-vcpus-that-all-write",
            RunArgs { work: Some("crew,32".to_owned()), ..migrate("cortex-a76", 8, "protect") },
            |end| {
                ensure!(end.console.contains("stamps of 8 threads"), "not all CPUs have written");
                let each = end.each("made writable");
                let wrote = each.iter().filter(|&&faults| faults >= 100).count();
                ensure!(wrote == 8, "faults by which each vCPU made pages writable: {each:?}");
                migrated(end)
            },
        ),
        case(
            "ageing-finds-the-working-set",
            RunArgs { job: "age".to_owned(), largest: Some("4k".to_owned()), ..base() },
            |end| {
                end.check()?;
                ensure!(end.record("ageing").is_some(), "nothing was measured");
                ensure!(end.faults("made accessed") == 0, "a page was aged by faults");
                Ok(())
            },
        ),
        case(
            "moves-and-a-new-vmid-on-a76",
            RunArgs {
                job: "move".to_owned(),
                largest: Some("4k".to_owned()),
                ..migrate("cortex-a76", 2, "protect")
            },
            |end| {
                end.check()?;
                let moves = end.record("moves").context("nothing was moved")?;
                ensure!(moves["bytes"].as_u64() >= Some(4 << 20), "{moves}");
                ensure!(moves["vmid"] == 2, "{moves}");
                ensure!(end.console.contains("pages right"), "the guest's program said nothing");
                Ok(())
            },
        ),
        case(
            "a-snapshot-comes-back-while-linux-runs",
            RunArgs { job: "restore".to_owned(), ..migrate("cortex-a76", 2, "protect") },
            |end| {
                end.check()?;
                let restore = end.record("restore").context("nothing was restored")?;
                let of = |name: &str| restore[name].as_u64().unwrap_or_default();
                ensure!(of("asked") >= 100 && of("stalls") >= of("asked") / 4, "{restore}");
                ensure!(of("asked") + of("background") == of("pages"), "{restore}");
                ensure!(of("blocks") >= 1, "{restore}");
                ensure!(end.console.contains("pages right"), "the guest's program said nothing");
                Ok(())
            },
        ),
        case(
            "a-fork-of-linux-while-it-writes",
            RunArgs {
                job: "fork".to_owned(),
                thread: "multi".to_owned(),
                work: None,
                ..migrate("cortex-a76", 2, "protect")
            },
            |end| {
                end.check()?;
                let fork = end.record("fork").context("nothing was forked")?;
                let of = |name: &str| fork[name].as_u64().unwrap_or_default();
                let (faults, background) = (of("copied_by_faults"), of("copied_in_background"));
                ensure!(of("alone_copied") >= 100 && background >= 100, "{fork}");
                ensure!(faults + background >= of("pages"), "{fork}");
                ensure!(fork["alone"]["stalls"].as_u64() >= Some(100), "{fork}");
                ensure!(end.console.contains("pages right"), "the guest's program said nothing");
                Ok(())
            },
        ),
        case(
            "private-pages-while-linux-uses-them",
            RunArgs { job: "private".to_owned(), vcpus: 4, thread: "multi".to_owned(), ..base() },
            |end| {
                end.check()?;
                let private = end.record("private").context("nothing was converted")?;
                let of = |name: &str| private[name].as_u64().unwrap_or_default();
                let by_guest = of("to_private") + of("to_shared") - of("conversions_by_manager");
                ensure!(by_guest >= 100 && of("pages_by_manager") >= 10_000, "{private}");
                ensure!(of("given") >= 1_000 && of("given") == of("taken"), "{private}");
                ensure!((of("wrong"), of("held")) == (0, 0), "{private}");
                ensure!(of("refused_busy") >= 1 && of("refused_firm") == 1, "{private}");
                ensure!(of("refused_pinned") >= 1, "{private}");
                ensure!(end.console.contains("pages right"), "the guest's program said nothing");
                Ok(())
            },
        ),
        case("fetches-that-zap", executing("zap", base()), |end| {
            end.check()?;
            let (zapped, mapped) = (end.faults("zapped"), end.faults("mapped"));
            // In 16 MiB alone, each page faults again.
            ensure!(zapped >= 8 && mapped >= 4096, "{zapped} zapped, {mapped} mapped");
            Ok(())
        }),
        case("fetches-that-split", executing("split", base()), |end| {
            end.check()?;
            let (split, mapped) = (end.faults("split"), end.faults("mapped"));
            ensure!(split >= 8 && mapped < 200, "{split} split, {mapped} mapped");
            Ok(())
        }),
        case(
            "hotplug-exact-from-the-third-cpu",
            RunArgs { work: Some("hotplug".to_owned()), vcpus: 4, first: 2, ..base() },
            |end| {
                end.check()?;
                let touched = end.count("touched_bytes")?;
                ensure!(touched > 0 && touched < 1 << 20, "{touched} bytes were touched uncached");
                ensure!(end.count("flushes")? == 0, "all memory was flushed");
                Ok(())
            },
        ),
        rare(
            "migrate-16k-on-a76",
            RunArgs { granule: Granule::K16, ..migrate("cortex-a76", 2, "protect") },
            |end| of_pages(end, "16k").and_then(|()| migrated(end)),
        ),
        rare(
            "migrate-16k-on-max-with-lpa2",
            RunArgs { granule: Granule::K16, lpa2: true, ..migrate("max", 2, "hardware") },
            |end| {
                ensure!(end.said.contains("51-bit addresses"), "narrower: {}", end.said);
                of_pages(end, "16k").and_then(|()| migrated(end))
            },
        ),
        rare(
            "migrate-64k-on-a76",
            RunArgs {
                granule: Granule::K64,
                memory: "1g".to_owned(),
                ..migrate("cortex-a76", 2, "hardware")
            },
            |end| of_pages(end, "64k").and_then(|()| migrated(end)),
        ),
        rare(
            "a-granule-that-the-cpu-lacks",
            RunArgs { granule: Granule::K16, cpu: Some("cortex-a72".to_owned()), ..base() },
            |end| {
                let refused = "no 16k granule at stage 2; it has 4k, 64k";
                ensure!(end.said.contains(refused), "{}", end.said);
                Ok(())
            },
        ),
        rare("hotplug-every", caches("every", 4, base()), |end| {
            end.check()?;
            // Both switches of 4 boots and 6 hotplugs, except those that a reset vCPU had off
            // already.
            ensure!(end.count("flushes")? >= 10, "{} flushes", end.count("flushes")?);
            ensure!(end.count("flushed_bytes")? > 100 << 20, "too little was flushed");
            Ok(())
        }),
        rare(
            "kexec",
            RunArgs {
                work: Some("kexec".to_owned()),
                memory: "512m".to_owned(),
                trap: "always".to_owned(),
                ..base()
            },
            |end| {
                end.check()?;
                ensure!(end.console.contains("guest: second kernel"), "there was no second kernel");
                // The memory of each kernel's boot, and what the first uses after it has switched
                // its caches off.
                let touched = end.count("touched_bytes")?;
                ensure!(
                    (100_000..1 << 20).contains(&touched),
                    "{touched} bytes were touched uncached"
                );
                Ok(())
            },
        ),
    ];
    for policy in ["first", "vcpu0", "every", "exact"] {
        for vcpus in [1, 4] {
            let name = format!("caches-{policy}-{vcpus}");
            let args = caches(policy, vcpus, base());
            cases.push(Case { name, args, check: RunEnd::check, long: true });
        }
    }
    let fault = |fault: &str, logging| RunArgs {
        fault: fault.to_owned(),
        seconds: 90,
        ..migrate("cortex-a76", 2, logging)
    };
    // The comparison of both copies finds these faults; for the last one, the guest makes no
    // progress.
    cases.extend([
        rare("caught-no-tlbi", fault("no-tlbi", "protect"), differs),
        case("caught-local", fault("local", "protect"), differs),
        rare(
            "caught-local-in-a-fork",
            RunArgs { job: "fork".to_owned(), work: None, ..fault("local", "protect") },
            |end| {
                ensure!(end.why().starts_with("the fork"), "not noticed so: {}", end.why());
                Ok(())
            },
        ),
        rare("caught-no-stage1", fault("no-stage1", "hardware"), differs),
        case("caught-keep-dirty", fault("keep-dirty", "hardware"), differs),
        // Stale walks of the guest's old tables: the guest hangs, and its time limit ends it.
        rare(
            "caught-no-stage2",
            RunArgs { thread: "multi".to_owned(), ..fault("no-stage2", "hardware") },
            |end| {
                ensure!(end.check().is_err() && end.record("end").is_some(), "nobody noticed");
                Ok(())
            },
        ),
    ]);
    // Faults that QEMU cannot notice: the guest ends as it should.
    for name in ["wrong-vmid", "no-break", "no-barrier", "no-maintenance"] {
        cases.push(rare(name, fault(name, "hardware"), migrated));
    }
    cases
}

/// Returns guests that misbehave at EL1 (`slat-probe`), with their expected ends.
fn probes() -> Vec<Case> {
    let probe = |word: &str, cpu: &str, seconds| RunArgs {
        guest: Some(program("slat-probe")),
        cpu: Some(cpu.to_owned()),
        memory: "192m".to_owned(),
        append: format!("probe={word}"),
        seconds,
        ..RunArgs::default()
    };
    let right: fn(&RunEnd) -> anyhow::Result<()> = |end| {
        end.check()?;
        ensure!(end.console.contains("probe: right"), "{}", end.console);
        Ok(())
    };
    let stopped: fn(&RunEnd) -> anyhow::Result<()> = |end| {
        ensure!(end.said.contains("vCPU 0: pc"), "no registers: {}", end.said);
        ensure!(
            end.why().contains("faults for ever") || end.why().contains("took more than"),
            "{}",
            end.why()
        );
        Ok(())
    };
    let case = |name: &str, args, check| Case { name: name.to_owned(), args, check, long: false };
    let rare = |name: &str, args, check| Case { name: name.to_owned(), args, check, long: true };
    vec![
        case("probe-absent-memory", probe("absent", "cortex-a76", 20), right),
        case("probe-absent-memory-on-max", probe("absent", "max", 20), right),
        rare(
            "probe-absent-memory-on-max-with-lpa2",
            RunArgs { lpa2: true, ..probe("absent", "max", 20) },
            right,
        ),
        case("probe-fetches-from-devices", probe("fetch", "cortex-a76", 20), right),
        case("probe-unknown-calls", probe("call", "cortex-a76", 20), right),
        case("probe-undefined-instructions", probe("undefined", "cortex-a76", 20), right),
        case("probe-the-last-address", probe("last", "cortex-a76", 20), right),
        case("probe-polling-is-no-loop", probe("poll", "cortex-a76", 20), right),
        case("probe-faults-for-ever", probe("loop", "cortex-a76", 20), stopped),
        case("probe-vectors-nowhere", probe("vectors", "cortex-a76", 20), stopped),
        case("probe-never-leaves", probe("spin", "cortex-a76", 1), stopped),
    ]
}

fn executing(execute: &str, args: RunArgs) -> RunArgs {
    RunArgs { execute: execute.to_owned(), work: Some("execute,16".to_owned()), ..args }
}

fn caches(policy: &str, vcpus: u64, args: RunArgs) -> RunArgs {
    RunArgs { caches: Some(policy.to_owned()), vcpus, work: Some("hotplug".to_owned()), ..args }
}

/// Checks that the guest was migrated, and found all data that it had written.
fn migrated(end: &RunEnd) -> anyhow::Result<()> {
    end.check()?;
    let migration = end.record("migration").context("there was no migration")?;
    let rounds = migration["rounds"].as_array().map_or(0, Vec::len);
    ensure!(rounds >= 2, "{rounds} rounds");
    ensure!(migration["collapsed_bytes"].as_u64() > Some(16 << 20), "huge pages did not come back");
    ensure!(end.console.contains("pages right"), "the guest's program said nothing");
    Ok(())
}

/// Checks that stage 2 had pages of that size, and no smaller leaf.
fn of_pages(end: &RunEnd, size: &str) -> anyhow::Result<()> {
    let leaves = end.record("end").map(|end| end["leaves"].clone()).unwrap_or_default();
    ensure!(leaves[size].as_u64() > Some(0) && leaves["4k"].is_null(), "leaves: {leaves}");
    Ok(())
}

fn no_maintenance(end: &RunEnd) -> anyhow::Result<()> {
    for name in ["flushed_bytes", "touched_bytes", "mapped_bytes", "flushes"] {
        ensure!(end.count(name)? == 0, "{} {name} on a CPU with FEAT_S2FWB", end.count(name)?);
    }
    Ok(())
}

fn differs(end: &RunEnd) -> anyhow::Result<()> {
    ensure!(end.why().starts_with("the copy differs"), "not noticed so: {}", end.why());
    Ok(())
}
