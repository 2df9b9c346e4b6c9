//! Histories, run one after the other in turns of the classes.

use super::{FORMAT, Finding, HistoryClass, Report, Verdict};
use slat_kvm::Error;
use slat_kvm::check::{
    Act, Class, Counts, History, HistoryEnd, Host, Loss, minimise, moved, outlast, run,
};
use slat_lab::session::Session;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A vCPU that makes no progress for this time hangs.
const PATIENCE: Duration = Duration::from_secs(20);
/// The same when a history that hung is cut down.
const LITTLE_PATIENCE: Duration = Duration::from_secs(3);
/// Longest time to cut a history down.
const CUTTING: Duration = Duration::from_secs(90);
/// How often a history that was cut down runs once more.
const REPEATS: u32 = 5;

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long histories are started.
    pub time: Duration,
    /// The seed.
    pub seed: u64,
    /// Bytes of a guest's host memory.
    pub memory: u64,
    /// Whether the first loss is the last.
    pub first: bool,
}

/// Runs histories.
pub struct Tries<'a> {
    host: &'a Host,
    session: &'a Session,
    beat: Beat,
    begin: Instant,
    moved: BTreeMap<String, u64>,
}

/// What is told when a call does not return.
pub type Tell = Box<dyn Fn(&Report) + Send>;

/// What runs now, seen by a thread that ends the program if a call does not return.
#[derive(Clone)]
struct Beat(Arc<Mutex<Now>>);

#[derive(Default)]
struct Now {
    /// When the step began, its index, and what it is.
    step: Option<(Instant, usize, String)>,
    /// The history, and its number.
    history: Option<(History, u64)>,
    /// What is known of all classes.
    report: Option<Report>,
}

impl Now {
    /// Returns the report, with the step that does not end.
    fn hung(&self, since: Instant, index: usize, what: &str) -> Option<Report> {
        let (mut report, (history, number)) = (self.report.clone()?, self.history.as_ref()?);
        let what = format!("a call does not return for {} s: {what}", since.elapsed().as_secs());
        let steps: Vec<usize> = (0..=index).collect();
        let finding = Finding {
            lost: Loss { step: index, what, hang: true },
            number: *number,
            seconds: report.seconds,
            history: history.part(&steps),
            steps,
            repeated: (0, 0),
        };
        let class = report.classes.iter_mut().find(|class| class.name == history.class)?;
        class.verdict = Verdict::Lost(Box::new(finding));
        Some(report)
    }
}

impl Beat {
    fn now(&self) -> MutexGuard<'_, Now> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Watches. A call that does not return cannot be ended, so the program ends with it.
    fn watch(tell: Tell) -> Self {
        let beat = Self(Arc::default());
        let seen = beat.clone();
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(500));
                let Some((since, index, what)) = seen.now().step.clone() else { continue };
                let goes_on = || seen.now().step.as_ref().is_none_or(|step| step.0 != since);
                if since.elapsed() < 2 * PATIENCE || outlast(2 * PATIENCE, goes_on) {
                    continue;
                }
                match seen.now().hung(since, index, &what) {
                    Some(report) => tell(&report),
                    None => eprintln!("HANG  a call does not return: {what}"),
                }
                std::process::exit(1);
            }
        });
        beat
    }
}

impl<'a> Tries<'a> {
    /// Makes the runner. `tell` gets the report if a call does not return, before the program ends.
    pub fn new(host: &'a Host, session: &'a Session, tell: Tell) -> Self {
        Self { host, session, beat: Beat::watch(tell), begin: Instant::now(), moved: moved() }
    }

    /// Runs one history.
    fn once(&self, history: &History, number: u64, patience: Duration) -> HistoryEnd {
        let stop = self.session.stop_flag();
        self.beat.now().history = Some((history.clone(), number));
        let ended = run(history, self.host, patience, &stop, &mut |index, step| {
            self.beat.now().step = Some((Instant::now(), index, step.to_owned()));
            !self.session.interrupted()
        });
        self.beat.now().step = None;
        ended
    }

    /// Runs histories of the classes until the time is up.
    pub fn all(&self, classes: &[&'static Class], limits: &Limits) -> Report {
        let mut tried: Vec<HistoryClass> = classes.iter().map(|class| self.before(class)).collect();
        let mut spent = vec![Duration::ZERO; classes.len()];
        let mut numbers = vec![0; classes.len()];
        let mut seconds = 0;
        while self.begin.elapsed() < limits.time && !self.session.interrupted() {
            let open = (0..classes.len()).filter(|at| tried[*at].verdict == Verdict::Held);
            let Some(at) = open.min_by_key(|at| spent[*at]) else { break };
            let begin = Instant::now();
            let report = self.report(tried.clone(), limits);
            self.beat.now().report = Some(report);
            self.next(classes[at], numbers[at], limits.seed, &mut tried[at]);
            if limits.first && matches!(tried[at].verdict, Verdict::Lost(_)) {
                break;
            }
            numbers[at] += 1;
            spent[at] += begin.elapsed();
            self.session.say(&format!("{}: history {}", tried[at].name, numbers[at]));
            let now = self.begin.elapsed().as_secs();
            (seconds..now).for_each(|_| self.session.step());
            seconds = now;
        }
        self.report(tried, limits)
    }

    fn report(&self, classes: Vec<HistoryClass>, limits: &Limits) -> Report {
        let uname = rustix::system::uname();
        Report {
            slat_check: FORMAT,
            kernel: format!(
                "{} {}",
                uname.release().to_string_lossy(),
                uname.machine().to_string_lossy()
            ),
            module: self.host.kvm.module.clone(),
            parameters: self.host.kvm.parameters.clone(),
            seed: limits.seed,
            memory: limits.memory,
            seconds: self.begin.elapsed().as_secs_f64(),
            interrupted: self.session.interrupted(),
            history: None,
            moved: moved()
                .into_iter()
                .map(|(name, now)| {
                    let before = self.moved.get(&name).copied().unwrap_or(0);
                    (name, now.saturating_sub(before))
                })
                .filter(|(_, count)| *count > 0)
                .collect(),
            classes,
        }
    }

    /// Returns what is known of a class before it is tried.
    pub fn before(&self, class: &Class) -> HistoryClass {
        let lacks = |act: Act| {
            let why = self.host.lacks.get(&act)?;
            let name = serde_json::to_value(act).ok()?;
            Some(format!("{}: {why}", name.as_str()?))
        };
        let mut untried: Vec<String> = class.acts().filter_map(lacks).collect();
        let verdict = match class.lacks(&self.host.means) {
            None => Verdict::Held,
            Some("") => Verdict::Untried(std::mem::take(&mut untried).join("; ")),
            Some(why) => Verdict::Untried(why.to_owned()),
        };
        HistoryClass { name: class.name.to_owned(), verdict, counts: Counts::default(), untried }
    }

    fn next(&self, class: &Class, number: u64, seed: u64, tried: &mut HistoryClass) {
        let Some(history) = class.history(seed, number, &self.host.means) else {
            tried.verdict = Verdict::Untried("this host lacks what it takes".to_owned());
            return;
        };
        let ended = self.once(&history, number, PATIENCE);
        self.judge(ended, &history, number, tried);
    }

    fn judge(&self, ended: HistoryEnd, history: &History, number: u64, tried: &mut HistoryClass) {
        match ended {
            HistoryEnd::Held(counts) => tried.counts.add(counts),
            HistoryEnd::Stopped(Error::Stopped) => {}
            HistoryEnd::Stopped(error) => tried.verdict = Verdict::Untried(error.to_string()),
            HistoryEnd::Lost(lost) => {
                let finding = self.cut(history, number, lost);
                tried.verdict = Verdict::Lost(Box::new(finding));
            }
        }
    }

    /// Cuts a history that lost something down.
    fn cut(&self, history: &History, number: u64, first: Loss) -> Finding {
        let seconds = self.begin.elapsed().as_secs_f64();
        self.session.say(&format!("{}: cutting a history down", history.class));
        let begin = Instant::now();
        let patience = if first.hang { LITTLE_PATIENCE } else { PATIENCE };
        let mut last = first.clone();
        let mut once = |part: &History| match self.once(part, number, patience) {
            HistoryEnd::Lost(lost) => {
                last = lost;
                true
            }
            _ => false,
        };
        let mut loses = |part: &History, in_a_row: u32, tries: u32| {
            (0..tries).any(|_| (0..in_a_row).all(|_| once(part)))
        };
        // Nothing comes of the steps after the one at which it was noticed.
        let steps = 0..(first.step + 1).min(history.steps.len());
        // Best is a history that always goes alike: without vCPUs that run beside steps.
        let calm: Vec<usize> =
            steps.clone().filter(|step| !history.part(&[*step]).is_concurrent()).collect();
        let base = if loses(&history.part(&calm), 1, 1) { calm } else { steps.collect() };
        let of_base =
            |steps: &[usize]| -> Vec<usize> { steps.iter().map(|it| base[*it]).collect() };
        let steps = minimise(base.len(), &mut |steps| {
            let over = begin.elapsed() > CUTTING || self.session.interrupted();
            let part = history.part(&of_base(steps));
            // One that is lost twice in a row is lost again.
            (!over).then(|| loses(&part, if part.is_concurrent() { 2 } else { 1 }, 2))
        });
        let steps = of_base(&steps);
        let part = history.part(&steps);
        let repeated = (0..REPEATS).filter(|_| loses(&part, 1, 1)).count() as u32;
        // The loss that is told is that of the steps that are told.
        let lost = if repeated > 0 { last } else { first };
        Finding { lost, number, seconds, steps, history: part, repeated: (repeated, REPEATS) }
    }

    /// Runs one history again and again, until it loses something or the time is up.
    pub fn repeat(
        &self,
        history: &History,
        number: u64,
        steps: &[usize],
        limits: &Limits,
    ) -> Report {
        let (verdict, counts) = (Verdict::Held, Counts::default());
        let mut tried =
            HistoryClass { name: history.class.clone(), verdict, counts, untried: Vec::new() };
        let report = self.report(vec![tried.clone()], limits);
        self.beat.now().report = Some(report);
        while tried.verdict == Verdict::Held
            && (tried.counts.histories == 0 || self.begin.elapsed() < limits.time)
            && !self.session.interrupted()
        {
            match self.once(history, number, PATIENCE) {
                HistoryEnd::Lost(lost) => {
                    let seconds = self.begin.elapsed().as_secs_f64();
                    let (history, steps) = (history.clone(), steps.to_vec());
                    let repeated = (1, tried.counts.histories as u32 + 1);
                    let finding = Finding { lost, number, seconds, steps, history, repeated };
                    tried.verdict = Verdict::Lost(Box::new(finding));
                }
                other => self.judge(other, history, number, &mut tried),
            }
        }
        self.report(vec![tried], limits)
    }
}
