//! Dirty rates of guests by each available means, and predictions of their migrations.

mod monitor;

pub use self::monitor::Monitor;

use crate::forecast::{self, Guest};
use serde::Serialize;
use slat_kvm::watch::qmp::DirtyRate;
use slat_kvm::watch::{GuestTotal, Metric};
use slat_lab::numbers::{bytes, seconds, several};
use slat_lab::rate::Rate;
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
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
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

impl Dirty {
    /// A rate of which only the guest is known.
    const fn unknown(pid: i32) -> Self {
        Self { pid, bytes_per_second: 0.0, by: "", error: String::new(), cost: "" }
    }
}

/// Prediction of a guest's migration.
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
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
pub struct MigrationOptions {
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
pub fn rates(
    guest: &GuestTotal,
    monitor: Option<&Monitor>,
    asked: &MigrationOptions,
) -> Vec<Dirty> {
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
    asked: &MigrationOptions,
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
pub struct MigrationFigures {
    /// Rates by guest, the best first.
    pub rates: Vec<Dirty>,
    /// Predictions for the guests whose rate and size are known.
    pub predictions: Vec<Prediction>,
    /// What is unknown, in words.
    pub missing: Vec<String>,
}

/// Collects the results that the user asked for.
pub fn tell(
    guests: &[&GuestTotal],
    monitor: Option<&Monitor>,
    asked: &MigrationOptions,
) -> MigrationFigures {
    let mut told = MigrationFigures::default();
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

/// Formats two times, the shorter one first, or one if they look alike.
fn span(one: f64, other: f64) -> String {
    match (seconds(one.min(other)), seconds(one.max(other))) {
        (least, most) if least == most => least,
        (least, most) => format!("{least} to {most}"),
    }
}

/// Returns all memory of a guest's process: what was swapped has to be sent as well. It is unknown
/// if one of both is.
fn of_process(guest: &GuestTotal) -> Option<u64> {
    let bytes = |metric| guest.total.get(&metric).copied();
    Some(bytes(Metric::RssBytes)?.saturating_add(bytes(Metric::SwapBytes)?))
}

impl MigrationFigures {
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
            let mut line = format!(
                "{}: a migration of {} at {} (copied at {}) would take {} ({} at most), {}, and \
                 stand still for {} ({} allowed). The ranges reach from a guest that writes the \
                 same pages each second to one that writes others.",
                it.pid,
                bytes(it.memory),
                Rate(it.dirty_rate),
                Rate(it.copied),
                span(it.seconds, it.seconds_at_most),
                several(it.rounds as usize, "round"),
                if it.converges { "converge" } else { "not converge" },
                span(it.downtime, it.downtime_at_most),
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
