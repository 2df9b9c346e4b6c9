//! Dirty rates of guests by each available means, and predictions of their migrations.

use crate::forecast::{self, Guest};
use serde::Serialize;
use slat_kvm::watch::qmp::{DirtyRate, Migration, Qmp};
use slat_kvm::watch::{GuestTotal, Metric};
use slat_lab::numbers::{bytes, seconds};
use slat_lab::rate::Rate;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Rounds after which a guest is stopped in any case, as in `bench migrate` and most VMMs.
const MAX_ROUNDS: u32 = 30;

/// Share of a link's bits that carries pages. Ethernet and TCP headers take the rest.
const CARRIED: f64 = 0.94;

/// Seconds in which a dirty rate is measured, QEMU's as well (`calc-time`): what a guest dirties in
/// them is the least that its hot set can be.
const WINDOW: f64 = 1.0;

/// A dirty rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Dirty {
    /// The guest's process.
    pub pid: i32,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// The means of the measurement.
    pub by: &'static str,
    /// Possible error, in words.
    pub error: String,
    /// Cost of the means, in words.
    pub cost: &'static str,
}

/// Prediction of a guest's migration.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Prediction {
    /// The guest's process.
    pub pid: i32,
    /// Size of the guest's memory, in bytes.
    pub memory: u64,
    /// Bytes per second that the guest dirties.
    pub dirty_rate: f64,
    /// The means by which the dirty rate is known.
    pub by: &'static str,
    /// Bytes per second that are copied.
    pub copied: f64,
    /// Longest downtime allowed, in seconds.
    pub max_downtime: f64,
    /// Rounds before the guest is stopped.
    pub rounds: u32,
    /// Duration in seconds, including the downtime, if the guest writes the same pages each second.
    pub seconds: f64,
    /// Downtime, in seconds, of the same guest.
    pub downtime: f64,
    /// Duration in seconds, including the downtime, if the guest writes other pages each second.
    pub seconds_at_most: f64,
    /// Downtime, in seconds, of the same guest.
    pub downtime_at_most: f64,
    /// Whether the remaining pages fit into the downtime allowed after some round.
    pub converges: bool,
    /// Changes that would improve the migration, in words.
    pub changes: Vec<String>,
}

/// The user's options.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Bandwidth of the link, in bytes per second on the wire.
    pub link: Option<Rate>,
    /// A dirty rate that the user knows.
    pub dirty_rate: Option<Rate>,
    /// The guest's memory in bytes, if the user knows it.
    pub memory: Option<u64>,
    /// The memory that the guest writes to again and again, in bytes, if the user knows it.
    pub hot_set: Option<u64>,
    /// Longest downtime allowed.
    pub max_downtime: Duration,
}

/// QEMU's monitor of a watched guest, and its measurements.
#[derive(Debug)]
pub struct Monitor {
    qmp: Qmp,
    memory: Result<u64, String>,
    rates: Vec<DirtyRate>,
    measures: bool,
    migration: Migration,
    /// The migration that ran during the watch, if one did.
    migrated: Option<Migration>,
    /// The account of the first step: of a migration before the watch, perhaps.
    first: Option<Migration>,
    /// Answers on whether the guest runs, and how many of them said in which other state it was.
    asked: u32,
    stopped: BTreeMap<String, u32>,
    /// What the balloon left to the guest, in the first step and in the last.
    balloon: Option<(u64, u64)>,
    counters: Result<BTreeMap<String, u64>, String>,
    /// Why the last step could not ask QEMU what it wanted.
    why: Option<String>,
}

impl Monitor {
    /// Begins to measure by a monitor.
    pub fn new(mut qmp: Qmp) -> Self {
        let memory = qmp.memory();
        let (rates, migration, first, asked, stopped) = Default::default();
        let (measures, migrated, why, balloon) = Default::default();
        let counters = Err(String::new());
        let mut this = Self {
            qmp,
            memory,
            rates,
            measures,
            migration,
            migrated,
            first,
            asked,
            stopped,
            balloon,
            counters,
            why,
        };
        this.step();
        this
    }

    /// Returns KVM's counters as QEMU told them in the last step, or why it did not.
    pub fn counters(&self) -> &Result<BTreeMap<String, u64>, String> {
        &self.counters
    }

    /// Takes the measurement, and begins the next one, which QEMU makes in the background.
    pub fn step(&mut self) {
        self.why = self.ask().err();
        self.counters = self.qmp.statistics();
        if let Ok(Some(left)) = self.qmp.balloon() {
            self.balloon = Some((self.balloon.map_or(left, |(first, _)| first), left));
        }
    }

    fn ask(&mut self) -> Result<(), String> {
        if let Ok(state) = self.qmp.status() {
            self.asked += 1;
            if let Err(state) = state {
                *self.stopped.entry(state).or_default() += 1;
            }
        }
        self.migration = self.qmp.migration()?;
        self.first.get_or_insert(self.migration);
        if self.migration.runs {
            // Before QEMU reads the log for the first time, it has no rate.
            let known = self.migration.bytes_per_second > 0.0 || self.migrated.is_none();
            self.migrated = Some(self.migration).filter(|_| known).or(self.migrated);
        }
        if self.measures {
            // After an error, QEMU measures anew, if it does not measure still.
            let rate = self.qmp.dirty_rate().inspect_err(|_| self.measures = false)?;
            self.measures = rate.is_none();
            self.rates.extend(rate);
        }
        // The log of a migration is exact: samples beside it cost the guest, and tell less.
        if self.migration.runs {
            return Err("a migration runs, and QEMU has not read its log yet".to_owned());
        }
        if !self.measures {
            self.qmp.begin_dirty_rate(1)?;
            self.measures = true;
        }
        Ok(())
    }

    /// Returns what QEMU told of the guest during the watch, in words: migrations and pauses.
    pub fn events(&self) -> Vec<String> {
        let (now, time) = (self.migration, |time: Duration| seconds(time.as_secs_f64()));
        let mut events = Vec::new();
        let is_new = self.first.is_some_and(|first| first.runs || first.total != now.total);
        if now.runs {
            let left = bytes(now.remaining);
            events.push(format!("a migration runs, in round {}, {left} left", now.rounds));
        } else if let Some(total) = now.total.filter(|_| is_new && now.completed) {
            let downtime = now.downtime.map_or("unknown".to_owned(), time);
            events.push(format!(
                "a migration was completed: it took {} and {} round{}, downtime {downtime}",
                time(total),
                now.rounds,
                if now.rounds == 1 { "" } else { "s" },
            ));
        } else if self.migrated.is_some() {
            events.push("a migration ended without success".to_owned());
        }
        let stopped = self.stopped.iter().map(|(state, count)| {
            format!("QEMU told that it was not running ({state}), {count} of {} times", self.asked)
        });
        events.extend(stopped);
        let memory = self.memory.as_ref().ok().copied();
        match self.balloon {
            Some((first, last)) if first != last => events.push(format!(
                "its balloon left it {} at first and {} at last",
                bytes(first),
                bytes(last)
            )),
            Some((_, left)) if memory.is_some_and(|memory| left < memory) => {
                events.push(format!("its balloon leaves it {}", bytes(left)));
            }
            _ => {}
        }
        events
    }

    /// Returns why no rate of QEMU's is known, if none is.
    pub fn why(&self) -> Option<&str> {
        let knows = self.migrated.is_some_and(|it| it.bytes_per_second > 0.0);
        self.why.as_deref().filter(|_| !knows && self.rates.is_empty())
    }

    /// Returns the rates from the log of an active migration and from samples.
    fn rates(&self, pid: i32) -> Vec<Dirty> {
        let mut all = Vec::new();
        if let Some(migration) = self.migrated.filter(|it| it.bytes_per_second > 0.0) {
            all.push(Dirty {
                pid,
                bytes_per_second: migration.bytes_per_second,
                by: "by QEMU's log of the migration that runs (query-migrate)",
                error: format!("exact, of round {}", migration.rounds),
                cost: "none: QEMU reads the log anyway",
            });
        }
        if !self.rates.is_empty() {
            let count = self.rates.len() as f64;
            let mean = self.rates.iter().map(|rate| rate.bytes_per_second).sum::<f64>() / count;
            all.push(Dirty {
                pid,
                bytes_per_second: mean,
                by: "by samples of QEMU's (calc-dirty-rate)",
                error: sampled(mean, self.memory.as_ref().ok().copied(), &self.rates),
                cost: "QEMU takes hashes of 512 pages of each GiB twice a second; nothing is \
                       protected",
            });
        }
        all
    }
}

/// Returns the possible error of a sampled rate: twice its standard error.
fn sampled(mean: f64, memory: Option<u64>, rates: &[DirtyRate]) -> String {
    let Some(memory) = memory.map(|memory| memory as f64).filter(|memory| *memory > 0.0) else {
        return "not known, without the size of the memory".to_owned();
    };
    let time = rates.iter().map(|rate| rate.seconds).sum::<f64>() / rates.len() as f64;
    let gib = memory / f64::from(1 << 30);
    let pages = rates.iter().map(|rate| rate.pages_per_gib as f64 * gib).sum::<f64>();
    if pages < 2.0 {
        return "not known, because too few pages were sampled".to_owned();
    }
    let share = (mean * time / memory).clamp(0.0, 1.0);
    // If no sample changed, or all did, the error is that of one sample.
    let share = share.clamp(1.0 / pages, 1.0 - 1.0 / pages);
    let error = 2.0 * (share * (1.0 - share) / pages).sqrt() * memory / time.max(1.0);
    format!("± {} (two standard errors of {pages:.0} sampled pages)", Rate(error))
}

/// Returns the dirty rates of a guest, the best first.
pub fn rates(guest: &GuestTotal, monitor: Option<&Monitor>, asked: &Asked) -> Vec<Dirty> {
    let pid = guest.pid;
    let given = asked.dirty_rate.map(|Rate(bytes_per_second)| Dirty {
        pid,
        bytes_per_second,
        by: "given by --dirty-rate",
        error: "whatever it was measured with".to_owned(),
        cost: "none",
    });
    let mut all = Vec::from_iter(given);
    all.extend(monitor.into_iter().flat_map(|monitor| monitor.rates(pid)));
    let logged = guest.total.get(&Metric::PagesLogged).filter(|pages| **pages > 0);
    if let Some(pages) = logged.filter(|_| guest.seconds > 0.0) {
        all.push(Dirty {
            pid,
            bytes_per_second: *pages as f64 * rustix::param::page_size() as f64 / guest.seconds,
            by: "by pages in dirty rings (kvm_dirty_ring_push)",
            error: "exact over the whole watch; a page counts once each time that it was protected"
                .to_owned(),
            cost: "a program in the kernel for each page that is logged",
        });
    }
    all
}

/// Predicts the migration of a guest at this rate.
pub fn predict(
    guest: &GuestTotal,
    rate: &Dirty,
    memory: u64,
    link: Rate,
    asked: &Asked,
) -> Prediction {
    let max_downtime = asked.max_downtime.as_secs_f64();
    let of = Guest {
        memory: memory as f64,
        writes: rate.bytes_per_second,
        hot: asked.hot_set.unwrap_or(memory) as f64,
        random: false,
        stop: 0.0,
        copied: link.0 * CARRIED,
        copied_at_rest: link.0 * CARRIED,
        max_downtime,
        max_rounds: MAX_ROUNDS,
    };
    let forecast = forecast::of(&of);
    // A rate tells what is dirty after a second, not whether the next second's pages are others.
    let again = forecast::of(&Guest { hot: of.writes * WINDOW, ..of });
    let mut changes = Vec::new();
    let bearable = forecast::bearable_writes(&of);
    if forecast.converges {
        changes.push(match bearable < forecast::MOST_WRITES * of.copied {
            true => format!("converges up to a dirty rate of {}", Rate(bearable)),
            false => "all of its memory fits into the downtime".to_owned(),
        });
    } else {
        if let Some(copied) = forecast::needed_copy(&of) {
            let link = copied / CARRIED * 8.0 / 1e9;
            changes.push(format!("a link of {link:.1} Gbit/s (or several, or compression)"));
        }
        if bearable > 0.0 {
            changes.push(format!(
                "the guest slowed down to {:.0} % of its writes (auto-converge), {}",
                100.0 * bearable / of.writes,
                Rate(bearable)
            ));
        }
        if forecast.downtime < of.memory / of.copied * 0.99 {
            changes.push(format!("a downtime of {} allowed", seconds(forecast.downtime)));
        }
        changes.push(
            "post-copy: it stands still for its vCPUs' state alone, and waits for pages \
                      afterwards"
                .to_owned(),
        );
    }
    Prediction {
        pid: guest.pid,
        memory,
        dirty_rate: of.writes,
        by: rate.by,
        copied: of.copied,
        max_downtime,
        rounds: forecast.rounds,
        seconds: again.total,
        downtime: again.downtime,
        seconds_at_most: forecast.total,
        downtime_at_most: forecast.downtime,
        converges: forecast.converges,
        changes,
    }
}

/// Dirty rates and predictions, as they are shown.
#[derive(Debug, Default)]
pub struct Told {
    /// Rates by guest, the best first.
    pub rates: Vec<Dirty>,
    /// Predictions for the guests whose rate and size are known.
    pub predictions: Vec<Prediction>,
    /// What is unknown, in words.
    pub missing: Vec<String>,
}

/// Collects the results that the user asked for.
pub fn tell(guests: &[&GuestTotal], monitor: Option<&Monitor>, asked: &Asked) -> Told {
    let mut told = Told::default();
    if let Some(why) = monitor.and_then(Monitor::why) {
        told.missing.push(format!("QEMU's monitor: {why}"));
    }
    if let Some(Err(why)) = monitor.map(|monitor| &monitor.memory) {
        let why = format!("the size of the memory, from QEMU's monitor: {why}");
        told.missing.push(why);
    }
    for guest in guests {
        let all = rates(guest, monitor, asked);
        let of_qemu = || monitor?.memory.as_ref().ok().copied();
        let memory = asked.memory.or_else(of_qemu).or_else(|| of_process(guest));
        match (asked.link, all.first(), memory.filter(|memory| *memory > 0)) {
            (None, ..) => {}
            (Some(link), Some(rate), Some(memory)) => {
                told.predictions.push(predict(guest, rate, memory, link, asked));
            }
            (_, None, _) => told.missing.push(format!(
                "the dirty rate of {}: no log is on whose pages are told, and no monitor was given \
                 (--qmp SOCKET); give it by --dirty-rate. Write protection, idle tracking and \
                 DAMON would tell, and are not used: they change the guest, or stay behind",
                guest.pid
            )),
            (_, _, None) => told.missing.push(format!("the memory of {}", guest.pid)),
        }
        told.rates.extend(all);
    }
    told
}

/// Returns all memory of a guest's process: what was swapped has to be sent as well. It is unknown
/// if one of both is.
fn of_process(guest: &GuestTotal) -> Option<u64> {
    let bytes = |metric| guest.total.get(&metric).copied();
    Some(bytes(Metric::RssBytes)?.saturating_add(bytes(Metric::SwapBytes)?))
}

impl Told {
    /// Formats the results as text, one paragraph each.
    pub fn text(&self) -> Vec<String> {
        let mut said = Vec::new();
        for rate in &self.rates {
            said.push(format!(
                "{} dirties {}, {}; error: {}; cost: {}.",
                rate.pid,
                Rate(rate.bytes_per_second),
                rate.by,
                rate.error,
                rate.cost
            ));
        }
        for it in &self.predictions {
            let or = |least, most| match (seconds(least), seconds(most)) {
                (least, most) if least == most => least,
                (least, most) => format!("{least} to {most}"),
            };
            let mut line = format!(
                "{}: a migration of {} at {} (copied at {}) would take {} in at most {} round{}, \
                 {}, and stand still for {} ({} allowed); a guest that writes the same hot pages \
                 each second has the lower values.",
                it.pid,
                bytes(it.memory),
                Rate(it.dirty_rate),
                Rate(it.copied),
                or(it.seconds, it.seconds_at_most),
                it.rounds,
                if it.rounds == 1 { "" } else { "s" },
                if it.converges { "converge" } else { "not converge" },
                or(it.downtime, it.downtime_at_most),
                seconds(it.max_downtime),
            );
            let what = if it.converges { "Limit" } else { "What would change it" };
            let _ = write!(line, " {what}: {}.", it.changes.join("; "));
            said.push(line);
        }
        said.extend(self.missing.iter().map(|what| format!("Not known: {what}.")));
        said
    }
}

#[cfg(test)]
mod tests;
