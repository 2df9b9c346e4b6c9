//! Guests of another process, watched as a user does it.

mod common;

use common::{kvm_is_usable, refused, send, slat};
use predicates::prelude::*;
use predicates::str::contains;
use rustix::process::Signal;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// A process with guests that go on until it is ended.
struct Guests(Child);

impl Guests {
    /// One with a guest, if guests can run here.
    fn start() -> Option<Self> {
        kvm_is_usable().then(|| {
            let line = "bench dirty-log --memory 8m --runs 1000 --iterations 1000";
            let mut slat = Command::new(env!("CARGO_BIN_EXE_slat"));
            slat.args(line.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
            let this = Self(slat.spawn().unwrap());
            while !this.kvms().iter().any(|name| name == "anon_inode:kvm-vm-stats") {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            this
        })
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    fn kvms(&self) -> Vec<String> {
        kvms(self.0.id())
    }
}

/// What of KVM's a process has open.
fn kvms(pid: u32) -> Vec<String> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd"));
    let links = folder.into_iter().flatten().flatten();
    let names = links.filter_map(|link| {
        std::fs::read_link(link.path()).ok()?.into_os_string().into_string().ok()
    });
    names.filter(|name| name.starts_with("anon_inode:kvm-")).collect()
}

impl Drop for Guests {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn json(output: &[u8]) -> serde_json::Value {
    serde_json::from_slice(output).expect("JSON alone is on stdout")
}

#[test]
fn a_process_without_guests_is_refused_with_a_valid_command() {
    let own = std::process::id().to_string();
    refused(&["watch", &own], &["no KVM guest", "anon_inode:kvm-vm", "slat watch --all"]);
    refused(&["watch", "2147483646"], &["no process 2147483646"]);
    refused(&["watch", "0"], &["0"]);
    refused(&["watch", "qemu"], &["qemu"]);
    refused(&["watch", "1", "--all"], &["--all"]);
    refused(&["watch", "--for", "5"], &["no unit", "5s"]);
    refused(&["watch", "--every", "1ms"], &["10ms"]);
    refused(
        &["watch", "--for", "1s", "--json", "/proc/nowhere/x.json"],
        &["--json", "cannot write"],
    );
    refused(&["watch", "--for", "1s", "--json", "/tmp"], &["--json", "directory"]);
    refused(&["watch", "--for", "1s", "--html", "/tmp"], &["--html", "directory"]);
    refused(&["watch", "--for", "1s", "--qmp", "/tmp/q"], &["--qmp", "<PID>"]);
    refused(&["watch", "--for", "1s", "--dirty-rate", "1GiB/s"], &["--link"]);
    refused(&["watch", "1", "--memory", "1G"], &["--link"]);
    refused(&["watch", "--memory", "1G", "--link", "1Gbit/s"], &["<PID>"]);
    refused(&["watch", "--for", "1s", "--link", "fast"], &["10Gbit/s"]);
    slat(&["watch", "--help"]).assert().success().stdout(contains("Examples:"));
}

#[test]
fn the_number_of_a_thread_is_refused_with_that_of_its_process() {
    let Some(guests) = Guests::start() else { return };
    let pid = guests.pid();
    let tasks = || std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let thread = loop {
        let mut names = tasks().filter_map(|task| task.file_name().into_string().ok());
        if let Some(thread) = names.find(|tid| *tid != pid) {
            break thread;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let said = format!("{thread} is a thread of process {pid}; watch {pid}");
    refused(&["watch", &thread, "--for", "100ms"], &[&said]);
}

/// User and group that own nothing.
const NOBODY: u32 = 65534;

#[test]
fn a_watch_of_another_users_process_is_refused_with_code_4() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can run the command as another user");
    }
    // The build's own folder may be closed to others.
    let folder = tempfile::tempdir().unwrap();
    let open = || std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open()).unwrap();
    let slat = folder.path().join("slat");
    std::fs::copy(env!("CARGO_BIN_EXE_slat"), &slat).unwrap();
    std::fs::set_permissions(&slat, open()).unwrap();
    let own = std::process::id().to_string();
    let mut watch = Command::new(&slat);
    watch.args(["watch", &own]).current_dir("/").uid(NOBODY).gid(NOBODY);
    let done = match watch.output() {
        Ok(done) => done,
        Err(error) => return eprintln!("skipped: cannot run as another user: {error}"),
    };
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(4), "{said}");
    assert!(said.contains(&format!("no permission to look at process {own}")), "{said}");
    assert!(said.contains("run as root"), "{said}");
}

#[test]
fn a_guest_is_reported_as_lines_as_html_and_as_json() {
    let Some(guests) = Guests::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("watch.json");
    let page = folder.path().join("watch.html");
    let link = ["--link", "10Gbit/s", "--dirty-rate", "4GiB/s", "--max-downtime", "1ms"];
    let words = ["watch", &guests.pid(), "--memory", "8m", "--for", "600ms", "--every", "200ms"];
    let words = [&words[..], &link, &["--html", page.to_str().unwrap(), "--json"]].concat();
    let done = slat(&words).arg(&file).assert().success();
    // Lines end anywhere, by the lengths of numbers.
    let said = String::from_utf8_lossy(&done.get_output().stdout);
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for text in ["faults", "Not known here", "Read from", "not converge", "auto-converge"] {
        assert!(said.contains(text), "{text}: {said}");
    }
    assert!(std::fs::read_to_string(&page).unwrap().contains("<figure>"));
    refused(&["watch", &guests.pid(), "--qmp", "/proc/nowhere"], &["--qmp", "no such socket"]);
    let written = json(&std::fs::read(&file).unwrap());
    let done = slat(&words).arg("-").assert().success().stderr(contains("faults"));
    let printed = json(&done.get_output().stdout);
    for report in [written, printed] {
        let it = &report["predictions"][0];
        assert_eq!((&it["converges"], it["pid"].to_string()), (&false.into(), guests.pid()));
        assert_eq!(it["memory"], 8 << 20);
        assert_eq!((&report["schema"], &report["ended"]), (&1.into(), &"time".into()));
        for guest in report["guests"].as_array().unwrap() {
            assert_eq!(guest["pid"].to_string(), guests.pid());
            let samples = guest["samples"].as_array().unwrap();
            let total = |name: &str| guest["total"][name].as_u64();
            let sum = samples.iter().map(|sample| sample["guest"]["exits"].as_u64()).sum();
            assert_eq!(total("exits"), sum, "{guest}");
            let why = guest["unknown"]["fault_ns"].as_str();
            assert!(
                why.is_none_or(|why| why.contains("kvm_exit") || why.contains("root")),
                "{why:?}"
            );
        }
    }
}

#[test]
fn a_watched_guest_is_served_as_openmetrics_until_the_end() {
    let Some(guests) = Guests::start() else { return };
    let words = ["watch", &guests.pid(), "--for", "1h", "--listen=127.0.0.1:0", ALONE];
    let mut watch = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(watch.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().strip_prefix("metrics at http://").unwrap();
    let address = address.strip_suffix("/metrics").unwrap();
    let label = format!("{{pid=\"{}\",name=\"slat\",domain=\"\",pod=\"\",", guests.pid());
    // Between two of its runs the process has no guest.
    let mut tries = 0..3_000;
    let page = loop {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: slat\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        if page.contains(&label) {
            break page;
        }
        assert!(tries.next().is_some(), "{page}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\n# EOF\n"), "{page}");
    assert!(page.contains(&format!("\nslat_guest_vcpus{label}")), "{page}");
    send(&watch, Signal::INT);
    let done = watch.wait_with_output().unwrap();
    // The page takes the place of the lines; the report follows.
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(said.starts_with("Watched "), "{said}");
    refused(&["watch", "--for", "1s", "--listen=here"], &["--listen", "here"]);
}

#[test]
fn each_sample_and_each_verdict_is_a_line_of_json() {
    let Some(guests) = Guests::start() else { return };
    let words = ["watch", &guests.pid(), "--for", "500ms", "--every", "100ms", "--json-lines"];
    let done = slat(&words).assert().success();
    let said = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    let kinds = |kind: &str| {
        let lines = said.lines().map(|line| json(line.as_bytes()));
        lines.filter(|line| line["kind"] == kind).collect::<Vec<_>>()
    };
    let (samples, verdicts) = (kinds("sample"), kinds("verdict"));
    assert_eq!(samples.len() + verdicts.len(), said.lines().count());
    assert!(samples[0]["guest"]["running_ns"].is_u64(), "{said}");
    assert!(verdicts[0]["verdict"]["causes"].is_array(), "{said}");
    let both = [&words[..], &["--json", "-"]].concat();
    refused(&both, &["--json -", "--json-lines"]);
}

#[test]
fn a_process_that_ends_ends_the_watch_and_is_said_to() {
    let Some(mut guests) = Guests::start() else { return };
    let words = ["watch", &guests.pid(), "--for", "1h", "--every", "1h", "--json", "-", ALONE];
    let watch = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(words)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    await_hold(watch.id());
    guests.0.kill().unwrap();
    guests.0.wait().unwrap();
    let done = watch.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(0));
    let report = json(&done.stdout);
    assert_eq!(report["ended"], "process_ended");
    let last = report["guests"].as_array().unwrap().last().unwrap();
    // Between two of its runs it has no VM.
    assert!(last["state"] == "process_ended" || last["state"] == "vm_closed", "{last}");
    assert!(!last["samples"].as_array().unwrap().is_empty());
}

/// Without a guest of its own, what a watch holds of KVM is a guest's that it watches.
const ALONE: &str = "--no-calibration";

/// Waits until a watch holds a guest's statistics.
fn await_hold(watch: u32) {
    while kvms(watch).is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn ctrl_c_keeps_the_watched_data_and_an_exit_code_says_so() {
    let Some(guests) = Guests::start() else { return };
    for (time, code) in [(None, 0), (Some("1h"), 130)] {
        let mut watch = Command::new(env!("CARGO_BIN_EXE_slat"));
        watch.args(["watch", &guests.pid(), ALONE, "--json", "-"]);
        if let Some(time) = time {
            watch.args(["--for", time]);
        }
        let watch = watch.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        await_hold(watch.id());
        send(&watch, Signal::INT);
        let done = watch.wait_with_output().unwrap();
        assert_eq!(done.status.code(), Some(code), "{time:?}");
        assert_eq!(json(&done.stdout)["ended"], "interrupted");
    }
}

/// What stays when a process is gone: mounts, and what KVM and the tracer have.
fn traces() -> Vec<String> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    vec![
        read("/proc/self/mounts"),
        read("/sys/kernel/tracing/set_event"),
        read("/sys/kernel/tracing/kprobe_events"),
    ]
}

#[test]
fn a_watch_that_is_killed_leaves_nothing() {
    let Some(guests) = Guests::start() else { return };
    let before = traces();
    let mut watch = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(["watch", &guests.pid(), ALONE])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    await_hold(watch.id());
    let held = kvms(watch.id());
    assert!(held.iter().all(|name| name.contains("stats")), "no VM and no vCPU is held: {held:?}");
    assert_eq!(traces(), before, "nothing is there while it watches, either");
    watch.kill().unwrap();
    watch.wait().unwrap();
    assert_eq!(traces(), before);
    // The guest has what it had, and goes on.
    let exits = |watched: &[u8]| {
        let report = json(watched);
        let guests = report["guests"].as_array().unwrap().iter();
        guests.filter_map(|guest| guest["total"]["exits"].as_u64()).sum::<u64>()
    };
    let words = ["watch", &guests.pid(), "--for", "300ms", "--json", "-"];
    let done = slat(&words).assert().success();
    assert!(exits(&done.get_output().stdout) > 0);
}

/// A watch that runs beside the second of two command lines, and what goes wrong with it.
#[test]
fn a_watchs_cost_is_measured_beside_the_second_command_line() {
    if !kvm_is_usable() {
        return;
    }
    let measured = "bench populate --memory 4m --runs 1";
    let both = ["ab", "--pairs", "1", "--first", measured, "--second", measured];
    let beside = |words| slat(&[&both[..], &["--while-second", words]].concat()).assert();
    beside("watch --all").success().stdout(contains("(beside: watch --all)"));
    // That it was interrupted is what was asked for.
    beside("watch --all --for 1h --json -").success();
    beside("watch 2147483646").code(1).stderr(contains("ended before").and(contains("no process")));
    beside("doctor").code(1).stderr(contains("ended before"));
    refused(&[&both[..], &["--while-second", "watch '"]].concat(), &["a quote is not closed"]);
}

#[test]
fn a_report_over_the_invoking_users_file_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can make files of another user");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("watch.json");
    std::fs::write(&path, "old").unwrap();
    std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
    let file = path.to_str().unwrap();
    for option in ["--json", "--html"] {
        let told = ["belongs to another user (number 65534)", "remove it, or name another", file];
        refused(&["watch", "--for", "1s", option, file], &told);
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
}
