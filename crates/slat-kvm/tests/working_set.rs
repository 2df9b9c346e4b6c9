//! Compares estimates of working sets with guests of the laboratory that touch a known part of
//! their memory, by each means that the host has.

mod other;

use other::{CHILD, Other, watch};
use slat_kvm::guest::{Guest, Shape, Vcpu};
use slat_kvm::watch::{Source, Watch, Which, WorkingSets};
use slat_kvm::work::{Touch, Work};
use std::fs;
use std::path::Path;
use std::time::Duration;

const MEMORY: u64 = 32 << 20;

/// Share of the pages that are touched, in per cent.
const SHARE: u8 = 25;

/// Most memory that the process uses apart from the guest's, with its libraries and stacks, and all
/// of its program of 6 MiB: a kernel may map the page cache of one just built by 2 MiB.
const OWN: u64 = 8 << 20;

fn touch(vcpu: &mut Vcpu, touch: Touch, share: u8) {
    vcpu.load(&Work { share, ..Work::each_page(touch) }).unwrap();
    vcpu.run().unwrap();
}

/// The child process that [`Other`] runs. It reports how many bytes its guest touched.
#[test]
#[ignore = "the other tests run it, in a process of its own"]
fn child() {
    if std::env::var(CHILD).as_deref() != Ok("touch") {
        return;
    }
    let (guest, mut vcpus) = Guest::new(&Shape { memory: MEMORY, ..Shape::default() }).unwrap();
    println!("SAYS 0 0");
    for line in std::io::stdin().lines() {
        let share = match &*line.unwrap() {
            "all" => 100,
            "away" => {
                guest.unmap_all().unwrap();
                println!("SAYS 0 0");
                continue;
            }
            "nothing" => {
                println!("SAYS 0 0");
                continue;
            }
            _ => SHARE,
        };
        touch(&mut vcpus[0], Touch::Write, share);
        println!("SAYS {} 0", guest.memory().len() * u64::from(share) / 100);
    }
}

/// Watches with estimates by one means from each step to the next; `None` if that is impossible.
fn estimating(other: &Other, by: Source) -> Option<Watch<'static>> {
    let mut watch = watch(Which::Pid(other.pid())).unwrap();
    watch.estimate(WorkingSets::new(Duration::ZERO, Some(by)));
    match used(&mut watch) {
        Ok(_) => Some(watch),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

fn used(watch: &mut Watch<'_>) -> Result<u64, String> {
    watch.step();
    let told = watch.working_sets().unwrap().told();
    let metric = slat_kvm::watch::Metric::WorkingSetBytes;
    let total = watch.guests()[0].total();
    match told.first() {
        Some(set) => {
            assert_eq!(total.total[&metric], set.bytes);
            assert_eq!(total.knowledge.sources[&metric], set.by);
            assert!(set.bytes <= set.of_bytes, "{set:?}");
            Ok(set.bytes)
        }
        None => Err(total.knowledge.unknown[&metric].clone()),
    }
}

/// Estimates while the guest does `what`.
fn during(watch: &mut Watch<'_>, other: &mut Other, what: &str) -> (u64, u64) {
    used(watch).unwrap();
    let truth = other.told(what)[0];
    let told = used(watch).unwrap();
    eprintln!("{what}: {} KiB used, {} KiB estimated", truth >> 10, told >> 10);
    (truth, told)
}

/// Checks that the estimate lies between the touched bytes and these plus the process's own memory.
fn is_exact((truth, told): (u64, u64)) {
    assert!(told >= truth && told <= truth + OWN, "{told} of {truth}");
}

#[test]
fn referenced_pages_are_a_lower_bound_and_exact_after_unmaps() {
    let Some(mut other) = Other::start_as("touch") else { return };
    let Some(mut watch) = estimating(&other, Source::Referenced) else { return other.end() };
    is_exact(during(&mut watch, &mut other, "share"));
    let (truth, told) = during(&mut watch, &mut other, "share again");
    assert!(told <= truth + OWN, "{told} of {truth}");
    other.told("away");
    is_exact(during(&mut watch, &mut other, "share"));
    let (_, none) = during(&mut watch, &mut other, "nothing");
    assert!(none <= OWN, "{none}");
    other.end();
}

#[test]
fn idle_pages_show_the_use_through_existing_mappings() {
    let Some(mut other) = Other::start_as("touch") else { return };
    let Some(mut watch) = estimating(&other, Source::IdlePages) else { return other.end() };
    other.told("all");
    is_exact(during(&mut watch, &mut other, "share"));
    is_exact(during(&mut watch, &mut other, "all"));
    is_exact(during(&mut watch, &mut other, "nothing"));
    other.end();
}

/// A control group that this process is in until the value is dropped.
struct Group(std::path::PathBuf);

impl Group {
    fn enter(root: &Path) -> std::io::Result<Self> {
        fs::write(root.join("cgroup.subtree_control"), "+memory")?;
        let group = Self(root.join("slat-watch-test"));
        fs::create_dir_all(&group.0)?;
        fs::write(group.0.join("cgroup.procs"), std::process::id().to_string())?;
        Ok(group)
    }

    fn leave(&self) {
        let root = self.0.parent().unwrap().join("cgroup.procs");
        fs::write(root, std::process::id().to_string()).unwrap();
    }
}

#[test]
fn generations_report_what_came_into_use_in_a_control_group() {
    if !Path::new("/sys/kernel/mm/lru_gen").exists() {
        return eprintln!("skipped: this kernel has no MGLRU");
    }
    let root = tempfile::tempdir().unwrap();
    let flags = rustix::mount::MountFlags::empty();
    if let Err(error) = rustix::mount::mount("none", root.path(), "cgroup2", flags, None) {
        return eprintln!("skipped: no control groups of version 2 can be mounted: {error}");
    }
    match Group::enter(root.path()) {
        Err(error) => eprintln!("skipped: no control group that counts memory: {error}"),
        Ok(group) => {
            let other = Other::start_as("touch");
            group.leave();
            if let Some(other) = other {
                generations(other);
            }
            fs::remove_dir(&group.0).unwrap();
        }
    }
    rustix::mount::unmount(root.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
}

fn generations(mut other: Other) {
    let Some(mut watch) = estimating(&other, Source::Generations) else { return other.end() };
    is_exact(during(&mut watch, &mut other, "share"));
    let (truth, told) = during(&mut watch, &mut other, "share again");
    assert!(told <= truth + OWN, "{told} of {truth}");
    let error = &watch.working_sets().unwrap().told()[0].error;
    if !error.contains("lower bound") {
        is_exact((truth, told));
    }
    let (_, none) = during(&mut watch, &mut other, "nothing");
    assert!(none <= OWN, "{none}");
    other.end();
}
