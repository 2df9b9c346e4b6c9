//! A client of QEMU's monitor (QMP), for measurements that QEMU itself makes of a guest.
//!
//! `calc-dirty-rate` hashes sampled pages, waits, and then compares (`page-sampling`). It protects
//! no page and stops no vCPU. Its other modes enable a dirty log, and are not used here.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time that QEMU may take to answer.
const ANSWER: Duration = Duration::from_secs(3);

/// Most bytes of a message.
const MOST: usize = 1 << 20;

/// States of a migration that has ended or never begun (`MigrationStatus` in QEMU's
/// qapi/migration.json). In any other, also one that is not known here, it runs.
const OVER: [&str; 4] = ["none", "completed", "failed", "cancelled"];

/// QEMU's monitor, through its own socket or through libvirt.
#[derive(Debug)]
pub struct Qmp(Way);

#[derive(Debug)]
enum Way {
    Socket(Socket),
    Libvirt(Libvirt),
}

/// A connection to QEMU's monitor.
#[derive(Debug)]
struct Socket {
    stream: BufReader<UnixStream>,
    /// The beginning of a line that is not complete yet.
    line: Vec<u8>,
}

/// QEMU's measurement of how fast a guest writes to its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DirtyRate {
    /// Bytes per second in pages that changed. A page counts once, however often it was written.
    pub bytes_per_second: f64,
    /// Length of the measurement, in seconds.
    pub seconds: f64,
    /// Sampled pages per GiB.
    pub pages_per_gib: u64,
}

/// QEMU's account of a migration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Migration {
    /// Whether a migration has begun and not ended.
    pub runs: bool,
    /// Number of times that the dirty log was read.
    pub rounds: u64,
    /// Bytes per second that the guest dirties, by the dirty log.
    pub bytes_per_second: f64,
    /// Bytes per second that are copied, where QEMU tells it.
    pub copied: f64,
    /// Bytes that are still to be sent.
    pub remaining: u64,
    /// Whether the last migration was completed.
    pub completed: bool,
    /// Whether the last migration was cancelled.
    pub cancelled: bool,
    /// How long the migration has run, or ran.
    pub total: Option<Duration>,
    /// How long a completed migration stopped the guest.
    pub downtime: Option<Duration>,
}

impl Qmp {
    /// Connects to a monitor, and leaves its capabilities mode without enabling any capability.
    ///
    /// # Errors
    /// Why the monitor cannot be used, in words.
    pub fn connect(socket: &Path) -> Result<Self, String> {
        let failed = |error: std::io::Error| {
            let what = match error.kind() {
                ErrorKind::NotFound => "no such socket".to_owned(),
                ErrorKind::PermissionDenied => {
                    "no permission: run as root, or as QEMU's user".to_owned()
                }
                ErrorKind::ConnectionRefused => "nobody listens there: the guest ended".to_owned(),
                _ => error.to_string(),
            };
            format!("{}: {what}", socket.display())
        };
        let stream = UnixStream::connect(socket).map_err(failed)?;
        stream.set_read_timeout(Some(ANSWER)).map_err(failed)?;
        stream.set_write_timeout(Some(ANSWER)).map_err(failed)?;
        let mut this = Socket { stream: BufReader::new(stream), line: Vec::new() };
        let greeting = this.message().map_err(|why| {
            format!(
                "{}: {why}; a monitor talks to one client at a time: give QEMU a second one \
                 (-qmp unix:PATH,server=on,wait=off)",
                socket.display()
            )
        })?;
        if greeting.get("QMP").is_none() {
            return Err(format!("{}: that is no QMP monitor", socket.display()));
        }
        this.ask("qmp_capabilities", json!({}))?;
        Ok(Self(Way::Socket(this)))
    }

    /// Asks through libvirt, which holds the monitor of this domain.
    ///
    /// # Errors
    /// Why that is not possible, in words.
    pub fn through_libvirt(domain: &str) -> Result<Self, String> {
        Self::through(Path::new("virsh"), domain)
    }

    fn through(program: &Path, domain: &str) -> Result<Self, String> {
        let (program, domain) = (program.to_owned(), domain.to_owned());
        let mut this = Self(Way::Libvirt(Libvirt { program, domain }));
        this.ask("query-status", json!({}))?;
        Ok(this)
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        match &mut self.0 {
            Way::Socket(socket) => socket.ask(command, arguments),
            Way::Libvirt(libvirt) => libvirt.ask(command, arguments),
        }
    }

    /// Returns the size of the guest's memory, in bytes.
    ///
    /// # Errors
    /// The error that QEMU reports.
    pub fn memory(&mut self) -> Result<u64, String> {
        let answer = self.ask("query-memory-size-summary", json!({}))?;
        let base = number(&answer, "base-memory")?;
        // A machine to which no memory can be plugged leaves this out.
        let plugged = match answer.get("plugged-memory") {
            None => 0,
            Some(_) => number(&answer, "plugged-memory")?,
        };
        Ok(base.saturating_add(plugged))
    }

    /// Begins to measure the dirty rate over `seconds` seconds, clamped to 1 to 60.
    ///
    /// # Errors
    /// The error that QEMU reports: a measurement is active, or QEMU is older than 5.2.
    pub fn begin_dirty_rate(&mut self, seconds: u64) -> Result<(), String> {
        let arguments = json!({ "calc-time": seconds.clamp(1, 60) });
        self.ask("calc-dirty-rate", arguments).map(drop)
    }

    /// Returns the dirty rate, or `None` while it is measured.
    ///
    /// # Errors
    /// The error that QEMU reports, or that it measures nothing.
    pub fn dirty_rate(&mut self) -> Result<Option<DirtyRate>, String> {
        let answer = self.ask("query-dirty-rate", json!({}))?;
        match answer["status"].as_str() {
            Some("measuring") => return Ok(None),
            Some("measured") => {}
            _ => return Err("query-dirty-rate: QEMU measures nothing".to_owned()),
        }
        // It is -1 if QEMU could sample no page.
        let rate = answer["dirty-rate"].as_f64().filter(|rate| *rate >= 0.0);
        let rate = rate.ok_or("query-dirty-rate: QEMU measured no rate")?;
        Ok(Some(DirtyRate {
            bytes_per_second: rate * f64::from(1 << 20),
            seconds: number(&answer, "calc-time")? as f64,
            // QEMU tells them since 6.1, and took so many before.
            pages_per_gib: match answer.get("sample-pages") {
                None => 512,
                Some(_) => number(&answer, "sample-pages")?,
            },
        }))
    }

    /// Returns the state of the migration, if there is one.
    ///
    /// # Errors
    /// The error that QEMU reports.
    pub fn migration(&mut self) -> Result<Migration, String> {
        let answer = self.ask("query-migrate", json!({}))?;
        let runs = answer["status"].as_str().is_some_and(|status| !OVER.contains(&status));
        let time = |name: &str| answer[name].as_u64().map(Duration::from_millis);
        let (total, downtime) = (time("total-time"), time("downtime"));
        let [completed, cancelled] =
            ["completed", "cancelled"].map(|status| answer["status"] == status);
        let ended = Migration { completed, cancelled, ..Migration::default() };
        let known = Migration { runs, total, downtime, ..ended };
        let Some(ram) = answer.get("ram") else { return Ok(known) };
        // It has all of them; a size of pages that is guessed would make the rate a guess.
        Ok(Migration {
            rounds: number(ram, "dirty-sync-count")?,
            bytes_per_second: number(ram, "dirty-pages-rate")? as f64
                * number(ram, "page-size")? as f64,
            remaining: number(ram, "remaining")?,
            copied: ram["mbps"].as_f64().unwrap_or(0.0) * 1e6 / 8.0,
            ..known
        })
    }

    /// Returns KVM's counters of the VM and of all its vCPUs together, by the kernel's names.
    ///
    /// # Errors
    /// The error that QEMU reports: it is older than 7.1, or has no statistics of KVM.
    pub fn statistics(&mut self) -> Result<BTreeMap<String, u64>, String> {
        let mut all = BTreeMap::new();
        for target in ["vm", "vcpu"] {
            let answer = self.ask("query-stats", json!({ "target": target }))?;
            let of_kvm = answer.as_array().into_iter().flatten();
            let of_kvm = of_kvm.filter(|entry| entry["provider"] == "kvm");
            let stats = of_kvm.flat_map(|entry| entry["stats"].as_array().into_iter().flatten());
            all.extend(counters(stats));
        }
        if all.is_empty() {
            return Err("query-stats: QEMU tells no statistics of KVM".to_owned());
        }
        Ok(all)
    }

    /// Returns how much memory the balloon leaves to the guest, in bytes; `None` without a balloon.
    ///
    /// # Errors
    /// Why QEMU does not answer, in words.
    pub fn balloon(&mut self) -> Result<Option<u64>, String> {
        match self.ask("query-balloon", json!({})) {
            Ok(answer) => number(&answer, "actual").map(Some),
            Err(why) if why.contains("No balloon device") => Ok(None),
            Err(why) => Err(why),
        }
    }

    /// Returns whether the guest runs, or in which other state it is, such as `paused`.
    ///
    /// # Errors
    /// Why QEMU does not answer, in words.
    pub fn status(&mut self) -> Result<Result<(), String>, String> {
        let answer = self.ask("query-status", json!({}))?;
        match answer["status"].as_str() {
            Some("running") => Ok(Ok(())),
            Some(state) => Ok(Err(state.to_owned())),
            None => Err("QEMU tells no status".to_owned()),
        }
    }
}

impl Socket {
    /// Returns the next message from QEMU.
    fn message(&mut self) -> Result<Value, String> {
        let end = Instant::now() + ANSWER;
        loop {
            let got = match self.stream.fill_buf() {
                Ok([]) => return Err("QEMU closed the monitor".to_owned()),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(match error.kind() {
                        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                            "QEMU does not answer".to_owned()
                        }
                        ErrorKind::ConnectionReset => "QEMU closed the monitor".to_owned(),
                        _ => error.to_string(),
                    });
                }
            };
            let (taken, whole) = match got.iter().position(|byte| *byte == b'\n') {
                Some(at) => (at + 1, true),
                None => (got.len(), false),
            };
            self.line.extend_from_slice(&got[..taken]);
            self.stream.consume(taken);
            if self.line.len() > MOST || (!whole && Instant::now() > end) {
                return Err("that is no QMP monitor".to_owned());
            }
            if whole {
                let line = std::mem::take(&mut self.line);
                if line.trim_ascii().is_empty() {
                    continue;
                }
                return serde_json::from_slice(&line)
                    .map_err(|_| "that is no QMP monitor".to_owned());
            }
        }
    }

    /// Executes a command and returns its result. Events in between are skipped.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let mut text = json!({ "execute": command, "arguments": arguments }).to_string();
        text.push('\n');
        let sent = self.stream.get_mut().write_all(text.as_bytes());
        sent.map_err(|error| format!("QEMU closed the monitor: {error}"))?;
        let end = Instant::now() + ANSWER;
        loop {
            let mut message = self.message()?;
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
            if let Some(error) = message.get("error") {
                return Err(format!("{command}: {}", refusal(error)));
            }
            if Instant::now() > end {
                return Err(format!("{command}: QEMU does not answer"));
            }
        }
    }
}

/// libvirt, by its command: it lets one client at a time ask what it does not know itself.
#[derive(Debug)]
struct Libvirt {
    program: PathBuf,
    domain: String,
}

impl Libvirt {
    fn ask(&self, command: &str, arguments: Value) -> Result<Value, String> {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        let mut virsh = Command::new(&self.program);
        virsh.args(["--quiet", "qemu-monitor-command", "--domain", &self.domain, "--cmd", &text]);
        let done = virsh.stdin(Stdio::null()).output().map_err(|error| match error.kind() {
            ErrorKind::NotFound => "no virsh is installed (libvirt-clients)".to_owned(),
            _ => format!("virsh: {error}"),
        })?;
        if !done.status.success() {
            let why = String::from_utf8_lossy(&done.stderr);
            let line = why.lines().find(|line| !line.trim().is_empty());
            return Err(format!("virsh: {}", line.unwrap_or("no reason given").trim()));
        }
        let answer = done.stdout.get(..MOST.min(done.stdout.len())).unwrap_or_default();
        let mut answer: Value = serde_json::from_slice(answer)
            .map_err(|_| "virsh printed no answer of QEMU's".to_owned())?;
        match answer.get_mut("return") {
            Some(result) => Ok(result.take()),
            None => Err(format!("{command}: {}", refusal(&answer["error"]))),
        }
    }
}

/// Returns why QEMU refuses a command.
fn refusal(error: &Value) -> &str {
    error["desc"].as_str().unwrap_or("no reason given")
}

/// Returns the sums of counters by their names. One that is no number is a histogram.
fn counters<'a>(stats: impl Iterator<Item = &'a Value>) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for one in stats {
        if let Some((name, value)) = one["name"].as_str().zip(one["value"].as_u64()) {
            *sums.entry(name.to_owned()).or_default() += value;
        }
    }
    sums
}

/// Returns a number of an answer.
fn number(answer: &Value, name: &str) -> Result<u64, String> {
    answer[name].as_u64().ok_or_else(|| format!("QEMU tells no {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    /// Starts a monitor that gives these answers in order. Returns its folder and the commands that
    /// it got.
    fn monitor(
        greeting: &'static str,
        answers: Vec<&'static str>,
    ) -> (tempfile::TempDir, RequestThread) {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // In two pieces: a line need not arrive whole.
            let (one, two) = greeting.split_at(greeting.len() / 2);
            stream.write_all(one.as_bytes()).unwrap();
            stream.write_all(two.as_bytes()).unwrap();
            let mut asked = Vec::new();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in answers {
                let Some(Ok(line)) = lines.next() else { break };
                asked.push(serde_json::from_str::<Value>(&line).unwrap());
                stream.write_all(answer.as_bytes()).unwrap();
            }
            asked
        });
        (folder, thread)
    }

    type RequestThread = std::thread::JoinHandle<Vec<Value>>;

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
    const AGREED: &str = "{\"return\": {}}\r\n";

    #[test]
    fn a_dirty_rate_is_asked_for_and_taken_once_it_is_measured() {
        let (folder, asked) = monitor(
            GREETING,
            vec![
                AGREED,
                "{\"return\": {\"base-memory\": 1073741824, \"plugged-memory\": 4096}}\n",
                "{\"event\": \"NIC_RX_FILTER_CHANGED\"}\n{\"return\": {}}\n",
                "{\"return\": {\"status\": \"measuring\", \"calc-time\": 1}}\n",
                "{\"return\": {\"status\": \"measured\", \"dirty-rate\": 108, \"calc-time\": 1, \
                 \"sample-pages\": 256}}\n",
                "{\"return\": {\"status\": \"active\", \"ram\": {\"dirty-pages-rate\": 100, \
                 \"page-size\": 4096, \"dirty-sync-count\": 3, \"remaining\": 77}}}\n",
                "{\"return\": {}}\n",
                "{\"return\": {\"status\": \"completed\"}}\n",
                "{\"return\": {\"status\": \"setup\"}}\n",
            ],
        );
        let mut qmp = Qmp::connect(&folder.path().join("qmp")).unwrap();
        assert_eq!(qmp.memory(), Ok((1 << 30) + 4096));
        qmp.begin_dirty_rate(1).unwrap();
        assert_eq!(qmp.dirty_rate(), Ok(None));
        let rate = qmp.dirty_rate().unwrap().unwrap();
        assert_eq!((rate.bytes_per_second, rate.pages_per_gib), (108.0 * 1_048_576.0, 256));
        let migration = qmp.migration().unwrap();
        assert_eq!((migration.runs, migration.rounds, migration.remaining), (true, 3, 77));
        assert_eq!(migration.bytes_per_second, 409_600.0);
        assert_eq!(
            qmp.migration(),
            Ok(Migration { bytes_per_second: 0.0, ..Migration::default() })
        );
        let runs = [(); 2].map(|()| qmp.migration().unwrap().runs);
        assert_eq!(runs, [false, true]);
        drop(qmp);
        let asked = asked.join().unwrap();
        let words: Vec<_> = asked.iter().map(|it| it["execute"].as_str().unwrap()).collect();
        assert_eq!(
            words[..3],
            ["qmp_capabilities", "query-memory-size-summary", "calc-dirty-rate"]
        );
        assert_eq!(asked[2]["arguments"]["calc-time"], 1);
    }

    #[test]
    fn what_qemu_does_not_tell_is_no_zero_and_no_guess() {
        let returns = |answer: &str| format!("{{\"return\": {answer}}}\n").leak() as &str;
        let (folder, _asked) = monitor(
            GREETING,
            vec![
                AGREED,
                returns("{\"base-memory\": 4096}"),
                returns("{\"base-memory\": 4096, \"plugged-memory\": \"none\"}"),
                returns("{\"plugged-memory\": 4096}"),
                returns("{\"status\": \"measured\", \"calc-time\": 1, \"dirty-rate\": -1}"),
                returns("{\"status\": \"measured\", \"dirty-rate\": 3}"),
                returns("{\"status\": \"unstarted\", \"calc-time\": 1}"),
                returns(
                    "{\"status\": \"active\", \"ram\": {\"dirty-pages-rate\": 100, \
                     \"dirty-sync-count\": 3, \"remaining\": 77}}",
                ),
                returns("{\"status\": \"of a later QEMU\"}"),
            ],
        );
        let mut qmp = Qmp::connect(&folder.path().join("qmp")).unwrap();
        assert_eq!(qmp.memory(), Ok(4096));
        assert!(qmp.memory().unwrap_err().contains("no plugged-memory"));
        assert!(qmp.memory().unwrap_err().contains("no base-memory"));
        assert!(qmp.dirty_rate().unwrap_err().contains("measured no rate"));
        assert!(qmp.dirty_rate().unwrap_err().contains("no calc-time"));
        assert!(qmp.dirty_rate().unwrap_err().contains("measures nothing"));
        assert!(qmp.migration().unwrap_err().contains("no page-size"));
        assert!(qmp.migration().unwrap().runs);
    }

    #[test]
    fn a_socket_without_a_monitor_and_a_refusal_are_reported() {
        let missing = Qmp::connect(Path::new("/proc/nowhere")).unwrap_err();
        assert!(missing.contains("no such socket"), "{missing}");
        let (folder, _asked) = monitor("SSH-2.0-OpenSSH_9.2\r\n", Vec::new());
        let other = Qmp::connect(&folder.path().join("qmp")).unwrap_err();
        assert!(other.contains("no QMP monitor"), "{other}");
        let refusal = "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"The command \
                       calc-dirty-rate has not been found\"}}\n";
        let (folder, _asked) = monitor(GREETING, vec![AGREED, refusal]);
        let mut qmp = Qmp::connect(&folder.path().join("qmp")).unwrap();
        let refused = qmp.begin_dirty_rate(1).unwrap_err();
        assert!(refused.contains("has not been found"), "{refused}");
        let closed = qmp.dirty_rate().unwrap_err();
        assert!(closed.contains("closed"), "{closed}");
    }

    #[test]
    fn a_line_without_end_is_refused_before_it_fills_memory() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(&vec![b'x'; 2 * MOST]);
            let _ = stream.read(&mut [0; 16]);
        });
        let error = Qmp::connect(&folder.path().join("qmp")).unwrap_err();
        assert!(error.contains("no QMP monitor"), "{error}");
        thread.join().unwrap();
    }

    #[test]
    fn counters_of_all_vcpus_and_the_balloon_are_asked_for() {
        let (folder, asked) = monitor(
            GREETING,
            vec![
                AGREED,
                "{\"return\": [{\"provider\": \"kvm\", \"stats\": [{\"name\": \"pages_4k\", \
                 \"value\": 7}]}]}\n",
                "{\"return\": [{\"provider\": \"kvm\", \"qom-path\": \"/a\", \"stats\": [{\
                 \"name\": \"pf_taken\", \"value\": 3}, {\"name\": \"halt_wait_hist\", \
                 \"value\": [1, 2]}]}, \
                 {\"provider\": \"kvm\", \"stats\": [{\"name\": \"pf_taken\", \"value\": 4}]}, \
                 {\"provider\": \"cryptodev\", \"stats\": [{\"name\": \"pf_taken\", \
                 \"value\": 9}]}]}\n",
                "{\"return\": {\"actual\": 4096}}\n",
                "{\"error\": {\"class\": \"DeviceNotActive\", \"desc\": \"No balloon device has \
                 been activated\"}}\n",
                "{\"return\": []}\n",
                "{\"return\": []}\n",
            ],
        );
        let mut qmp = Qmp::connect(&folder.path().join("qmp")).unwrap();
        let counters = BTreeMap::from([("pages_4k".to_owned(), 7), ("pf_taken".to_owned(), 7)]);
        assert_eq!(qmp.statistics(), Ok(counters));
        assert_eq!((qmp.balloon(), qmp.balloon()), (Ok(Some(4096)), Ok(None)));
        assert!(qmp.statistics().unwrap_err().contains("no statistics of KVM"));
        drop(qmp);
        assert_eq!(asked.join().unwrap()[2]["arguments"]["target"], "vcpu");
    }

    #[test]
    fn a_domain_of_libvirts_is_asked_through_its_command() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let virsh = folder.path().join("virsh");
        let script = "#!/bin/sh\n\
            [ \"$4\" = web01 ] || { echo \"error: failed to get domain '$4'\" >&2; exit 1; }\n\
            case \"$6\" in *query-status*)\n\
            echo '{\"return\":{\"status\":\"running\"},\"id\":\"a\"}';;\n\
            *)\n\
            echo '{\"error\":{\"class\":\"CommandNotFound\",\"desc\":\"no such thing\"}}';; esac\n";
        std::fs::write(&virsh, script).unwrap();
        std::fs::set_permissions(&virsh, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut qmp = Qmp::through(&virsh, "web01").unwrap();
        assert_eq!(qmp.status(), Ok(Ok(())));
        assert!(qmp.memory().unwrap_err().contains("no such thing"));
        let other = Qmp::through(&virsh, "web02").unwrap_err();
        assert!(other.contains("failed to get domain 'web02'"), "{other}");
        let missing = Qmp::through(&folder.path().join("none"), "web01").unwrap_err();
        assert!(missing.contains("libvirt-clients"), "{missing}");
    }

    #[test]
    fn a_monitor_that_another_client_has_is_said_to_be() {
        let folder = tempfile::tempdir().unwrap();
        let _listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let error = Qmp::connect(&folder.path().join("qmp")).unwrap_err();
        assert!(error.contains("one client at a time"), "{error}");
    }
}
