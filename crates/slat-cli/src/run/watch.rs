//! `slat watch`.

use crate::cli::WatchArgs;
use crate::watch::migration::{self, MigrationOptions, Monitor};
use crate::watch::report::{Report, WatchEnd};
use crate::watch::serve::Server;
use crate::watch::{exposition, live, page};
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::termios::Winsize;
use rustix::time::{ClockId, clock_gettime};
use slat_kvm::procfs::Files;
use slat_kvm::watch::qmp::Qmp;
use slat_kvm::watch::{Debugfs, Events, NotFound, Watch, Which, WorkingSets};
use slat_lab::failure::{bad_input, cannot};
use slat_lab::files::write_whole;
use slat_lab::run::output;
use slat_lab::session::Session;
use slat_lab::size::Size;
use std::io::{IsTerminal, Write};
use std::panic::resume_unwind;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Ctrl-C is noticed within this time.
const NOTICED: Duration = Duration::from_millis(250);

/// Guests that ended and are still told of where samples went out as they came.
const MOST_ENDED: usize = 64;

/// Watches guests, and tells what it saw.
pub fn watch(args: &WatchArgs) -> anyhow::Result<ExitCode> {
    let file = args.json.as_deref().filter(|path| path.as_os_str() != "-");
    for (option, path) in [("--json", file), ("--html", args.html.as_deref())] {
        if let Some(path) = path {
            check(option, path)?;
        }
    }
    if let Some((set, time)) = args.working_set.zip(args.time)
        && set > time
    {
        return Err(bad_input("--working-set: is longer than --for; make it as long, or shorter"));
    }
    if args.json_lines && args.json.is_some() && file.is_none() {
        return Err(bad_input(
            "--json - and --json-lines both write to stdout; name a file for one",
        ));
    }
    // Before anything is watched: the address may be taken.
    let server = args.listen.map(Server::listen).transpose()?;
    if let Some(server) = &server {
        eprintln!("metrics at http://{}/metrics", server.address());
    }
    more_descriptors();
    let which = args.pid.map_or(Which::All, Which::Pid);
    let session = Session::interactive()?;
    let files = Files::here();
    let events = |_| {
        let mut events = Events::open();
        if !args.no_calibration {
            events.calibrate();
        }
        events
    };
    let mut watch = Watch::begin(files, Debugfs::open(), events, which)
        .map_err(|error| refusal(error, args.pid.unwrap_or_default()))?;
    if watch.guests().is_empty() && !Path::new("/dev/kvm").exists() {
        return Err(slat_kvm::Error::NoKvm.into());
    }
    if let Some(time) = args.working_set {
        watch.estimate(WorkingSets::new(time, args.working_set_by.map(Into::into)));
    }
    let socket = args.qmp.as_deref().map(|socket| ("--qmp", Qmp::connect(socket)));
    let domain = || args.libvirt.as_deref().map(|it| ("--libvirt", Qmp::through_libvirt(it)));
    let mut monitor = match socket.or_else(domain) {
        Some((_, Ok(qmp))) => Some(Monitor::new(qmp)),
        Some((option, Err(why))) => return Err(bad_input(format!("{option} {why}"))),
        None => None,
    };
    let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let to_stdout = args.json.is_some() && file.is_none();
    if args.listen.is_some() || args.json_lines {
        watch.keep_ended(MOST_ENDED);
    }
    let mut view = View::new(to_stdout);
    view.server = server;
    if args.json_lines {
        (view.on_terminal, view.lines) = (false, Lines::Json(began.as_secs_f64()));
    } else if view.server.is_some() && !view.on_terminal {
        view.lines = Lines::None;
    }
    view.serve(&watch);
    let ended = run(args, &mut watch, &session, monitor.as_mut(), &mut view)?;
    watch.end();
    let debugfs = match watch.debugfs() {
        Ok(debugfs) if debugfs.is_private() => "mounted for this process alone".to_owned(),
        Ok(_) => "mounted".to_owned(),
        Err(why) => why.clone(),
    };
    let guests: Vec<_> = watch.guests().iter().map(|guest| guest.total()).collect();
    let asked = MigrationOptions {
        link: args.link,
        dirty_rate: args.dirty_rate,
        hot_set: args.hot_set.map(|size| size.bytes()),
        memory: args.memory.map(Size::bytes),
        max_downtime: args.max_downtime,
    };
    let told = migration::tell(&guests, monitor.as_ref(), &asked);
    let mut report = Report {
        began: began.as_secs(),
        seconds: watch.seconds(),
        every: args.every.as_secs_f64(),
        cpu_seconds: cpu_seconds(),
        hidden: watch.hidden(),
        debugfs,
        events: watch.events().how(),
        transition_ns: watch.events().transition().ok(),
        lost_events: watch.lost(),
        ambiguous_ranges: watch.ambiguous(),
        dirty_rates: told.rates,
        predictions: told.predictions,
        missing: told.missing,
        working_sets: watch.working_sets().map(WorkingSets::told).unwrap_or_default(),
        ..Report::new(guests, ended)
    };
    // A monitor is that of one process, whose last guest it tells of.
    if let Some((verdict, guest)) = report.verdicts.last_mut().zip(report.guests.last())
        && let Some(monitor) = &monitor
    {
        verdict.take(monitor.events(guest, &asked));
    }
    if let Some(path) = file {
        write_whole(path, report.json()?.as_bytes())?;
    }
    if let Some(path) = &args.html {
        write_whole(path, page::render(&report).as_bytes())?;
    }
    // What follows may wait for a reader: nothing of a guest is held any more.
    view.end()?;
    output::print(&if args.json_lines {
        let line = |guest: &&_| exposition::verdict(guest, began.as_secs_f64());
        report.guests.iter().map(line).collect()
    } else if to_stdout {
        report.json()?
    } else {
        report.text(output::width())
    })?;
    Ok(match (ended, args.time) {
        (WatchEnd::Interrupted, Some(_)) => ExitCode::from(130),
        _ => ExitCode::SUCCESS,
    })
}

/// Takes samples until it is over.
fn run(
    args: &WatchArgs,
    watch: &mut Watch<'_>,
    session: &Session,
    mut monitor: Option<&mut Monitor>,
    view: &mut View,
) -> anyhow::Result<WatchEnd> {
    let begin = Instant::now();
    let end = args.time.map(|time| begin + time);
    let mut next = begin + args.every;
    loop {
        let due = end.map_or(next, |end| end.min(next));
        let mut left = due.saturating_duration_since(Instant::now());
        let mut ending = watch.is_ending();
        while !left.is_zero() && !session.interrupted() && !ending {
            ending = watch.wait(left.min(NOTICED));
            left = due.saturating_duration_since(Instant::now());
        }
        // Looked at before: of a process that ended by then, this step tells the last counts.
        let is_over = watch.is_over();
        if let Some(monitor) = &mut monitor {
            monitor.step(watch.seconds());
            args.pid.into_iter().for_each(|pid| watch.tell(pid, monitor.counters()));
        }
        let step = watch.step();
        view.show(watch, &step)?;
        if is_over {
            return Ok(WatchEnd::ProcessEnded);
        }
        if session.interrupted() {
            return Ok(WatchEnd::Interrupted);
        }
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            return Ok(WatchEnd::Time);
        }
        // What came late is not made up for.
        while next <= now {
            next += args.every;
        }
    }
}

/// Where samples are shown, and how.
///
/// A thread of its own writes them: while nobody reads (Ctrl-S, a pager), the watch goes on, and
/// releases guests that end. A VM exists as long as somebody holds a descriptor of it.
struct View {
    on_terminal: bool,
    lines: Lines,
    server: Option<Server>,
    drawn: bool,
    /// What the thread has not taken yet.
    waiting: String,
    texts: Option<SyncSender<String>>,
    writer: Option<JoinHandle<anyhow::Result<()>>>,
}

/// What is written for each sample where there is no terminal.
#[derive(Clone, Copy, Debug)]
enum Lines {
    Text,
    /// For a watch that began so many seconds after 1970.
    Json(f64),
    /// The page of metrics has it.
    None,
}

/// Most bytes of lines that wait for a reader.
const WAITING: usize = 1 << 20;

impl View {
    /// On stdout, unless that is for the JSON.
    fn new(to_stderr: bool) -> Self {
        let on_terminal = match to_stderr {
            true => std::io::stderr().is_terminal(),
            false => std::io::stdout().is_terminal(),
        };
        let print = move |text: &str| match to_stderr {
            true => {
                let _ = std::io::stderr().lock().write_all(text.as_bytes());
                Ok(())
            }
            false => output::print(text),
        };
        Self::by(on_terminal, print)
    }

    fn by(on_terminal: bool, print: impl Fn(&str) -> anyhow::Result<()> + Send + 'static) -> Self {
        let (texts, received) = sync_channel::<String>(1);
        let write = move || received.into_iter().try_for_each(|text| print(&text));
        let writer = Some(std::thread::spawn(write));
        let (drawn, waiting) = (false, String::new());
        let (lines, server) = (Lines::Text, None);
        Self { on_terminal, lines, server, drawn, waiting, texts: Some(texts), writer }
    }

    /// Hands text to the writer if it is ready. A table replaces the one that waits; of lines, the
    /// newest are left out if too many wait.
    fn hand(&mut self, text: &str) -> anyhow::Result<()> {
        if self.on_terminal {
            self.waiting.clear();
        }
        if self.waiting.len() + text.len() <= WAITING {
            self.waiting += text;
        }
        let Some(texts) = self.texts.as_ref().filter(|_| !self.waiting.is_empty()) else {
            return Ok(());
        };
        match texts.try_send(std::mem::take(&mut self.waiting)) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(text)) => {
                self.waiting = text;
                Ok(())
            }
            // It ends early because it cannot write.
            Err(TrySendError::Disconnected(_)) => self.end(),
        }
    }

    /// Waits until all is written.
    fn end(&mut self) -> anyhow::Result<()> {
        if let Some(texts) = self.texts.take() {
            // Fails if the writer ended, which then says why.
            let _ = texts.send(std::mem::take(&mut self.waiting));
        }
        let ended = self.writer.take().map(JoinHandle::join);
        ended.map_or(Ok(()), |ended| ended.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    /// Puts the guests that are there on the page of metrics.
    fn serve(&self, watch: &Watch<'_>) {
        if let Some(server) = &self.server {
            let there = watch.guests().iter().filter(|guest| guest.is_there());
            let guests: Vec<_> = there.map(|guest| guest.total()).collect();
            let ended = watch.forgotten() + watch.guests().len() - guests.len();
            let own = exposition::Own { cpu: cpu_seconds(), hidden: watch.hidden(), ended };
            server.show(exposition::openmetrics(&guests, own));
        }
    }

    fn show(&mut self, watch: &Watch<'_>, step: &slat_kvm::watch::Step) -> anyhow::Result<()> {
        self.serve(watch);
        let text = if self.on_terminal {
            let size = rustix::termios::tcgetwinsize(std::io::stdout());
            let size = size.or_else(|_| rustix::termios::tcgetwinsize(std::io::stderr()));
            let (columns, lines) = columns_and_lines(size.ok());
            let clear = if self.drawn { "" } else { live::CLEAR };
            self.drawn = true;
            clear.to_owned() + &live::screen(watch.guests(), watch.seconds(), columns, lines)
        } else {
            let mut text = String::new();
            for (place, guest) in watch.guests().iter().enumerate() {
                if guest.is_there() || step.went.contains(&place) {
                    let total = guest.total();
                    let line = total.samples.last().map(|sample| match self.lines {
                        Lines::Text => live::line(total, sample) + "\n",
                        Lines::Json(began) => exposition::sample(total, sample, began),
                        Lines::None => String::new(),
                    });
                    text.extend(line);
                }
            }
            text
        };
        self.hand(&text)
    }
}

/// Whether the report can be written, before anything is watched for it.
fn check(option: &str, path: &Path) -> anyhow::Result<()> {
    let wrong = |why: String| bad_input(format!("{option} {}: {why}", path.display()));
    if path.is_dir() {
        return Err(wrong("is a directory; name a file in it".to_owned()));
    }
    slat_lab::files::check(path).map_err(|error| {
        wrong(format!(
            "cannot write there ({error}); name a file in a folder that can be written to"
        ))
    })
}

/// Why there is nothing to watch, and what would change that.
fn refusal(error: NotFound, pid: i32) -> anyhow::Error {
    match error {
        NotFound::NoVm => bad_input(format!(
            "process {pid} has no KVM guest: none of its descriptors is a VM (ls -l /proc/{pid}/fd \
             shows anon_inode:kvm-vm for one); `slat watch --all --for 1s` lists the guests of \
             this host"
        )),
        NotFound::NoProcess => bad_input(format!(
            "there is no process {pid}; `slat watch --all --for 1s` lists the guests of this host"
        )),
        NotFound::Thread(process) => {
            bad_input(format!("{pid} is a thread of process {process}; watch {process}"))
        }
        NotFound::Denied => cannot(format!(
            "no permission to look at process {pid}: run as root, or as the user whose process it \
             is"
        )),
    }
}

/// Each vCPU takes a descriptor, and a process may often have a thousand; maps may take memory.
fn more_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Without, guests beyond the limit are told with the reason.
    let _ = setrlimit(Resource::Nofile, limit);
    // Before 5.11 maps in the kernel count as locked memory of this process.
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    let _ = setrlimit(Resource::Memlock, unlimited);
}

/// What this process took of CPUs.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Returns the size that a terminal has, or is taken to have: a serial console has a size of 0.
fn columns_and_lines(size: Option<Winsize>) -> (u16, u16) {
    let size = size.filter(|size| size.ws_col > 0 && size.ws_row > 0);
    size.map_or((80, 24), |size| (size.ws_col, size.ws_row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A view whose texts are written once the lock is free.
    fn view(on_terminal: bool, written: &Arc<Mutex<String>>) -> View {
        let written = Arc::clone(written);
        View::by(on_terminal, move |text| {
            written.lock().unwrap().push_str(text);
            Ok(())
        })
    }

    #[test]
    fn samples_that_nobody_reads_do_not_stop_the_watch() {
        for on_terminal in [false, true] {
            let written = Arc::new(Mutex::new(String::new()));
            let mut view = view(on_terminal, &written);
            let blocked = written.lock().unwrap();
            for sample in 0..100 {
                view.hand(&format!("{sample}\n")).unwrap();
            }
            // As much as waits at most.
            view.hand(&"x".repeat(WAITING + 1)).unwrap();
            assert!(view.waiting.len() <= WAITING);
            view.hand("last\n").unwrap();
            drop(blocked);
            view.end().unwrap();
            let written = written.lock().unwrap();
            assert!(written.ends_with("last\n"), "{written}");
            let all: String = (0..100).map(|sample| format!("{sample}\n")).collect();
            assert_eq!(on_terminal, *written != all + "last\n");
        }
    }

    #[test]
    fn a_terminal_that_does_not_tell_its_size_shows_guests() {
        let size = |ws_row, ws_col| Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 };
        for untold in [None, Some(size(0, 0)), Some(size(0, 80)), Some(size(24, 0))] {
            assert_eq!(columns_and_lines(untold), (80, 24));
        }
        assert_eq!(columns_and_lines(Some(size(50, 132))), (132, 50));
    }

    #[test]
    fn a_view_that_cannot_be_written_to_says_why() {
        let mut view = View::by(false, |_| Err(anyhow::anyhow!("no space")));
        let failed = std::iter::repeat_with(|| view.hand("line\n")).find_map(Result::err);
        assert!(failed.unwrap().to_string().contains("no space"));
    }
}
