//! QEMU's monitor of a watched guest: dirty rates, and what happened by its account.

use super::{Dirty, MigrationOptions, predict, sampled, span};
use crate::watch::timeline::Event;
use slat_kvm::watch::GuestTotal;
use slat_kvm::watch::qmp::{DirtyRate, Migration, Qmp};
use slat_lab::numbers::{bytes, seconds, several};
use slat_lab::rate::Rate;
use std::collections::BTreeMap;
use std::time::Duration;

/// QEMU's monitor of a watched guest, and its measurements.
#[derive(Debug)]
pub struct Monitor {
    qmp: Qmp,
    pub(super) memory: Result<u64, String>,
    rates: Vec<DirtyRate>,
    measures: bool,
    /// The migration as QEMU told it last; none before its first answer.
    migration: Option<Migration>,
    /// The migration that ran during the watch, if one did.
    migrated: Option<Migration>,
    /// Whether the migration that runs was told to converge.
    converges: Option<bool>,
    /// The state in which the guest does not run, and since when.
    stopped: Option<(String, f64)>,
    /// What the balloon left to the guest in the first step and in the last, and when it changed.
    balloon: Option<(u64, u64, f64)>,
    counters: Result<BTreeMap<String, u64>, String>,
    /// Why the last step could not ask QEMU what it wanted.
    why: Option<String>,
    events: Vec<Event>,
    /// The migrations that were completed: the place of their event, and the rate known before.
    completed: Vec<(usize, f64)>,
}

impl Monitor {
    /// Begins to measure by a monitor.
    pub fn new(mut qmp: Qmp) -> Self {
        let memory = qmp.memory();
        let (rates, migration, converges, events, completed) = Default::default();
        let (measures, migrated, why, balloon, stopped) = Default::default();
        let counters = Err(String::new());
        let mut this = Self {
            qmp,
            memory,
            rates,
            measures,
            migration,
            migrated,
            converges,
            stopped,
            balloon,
            counters,
            why,
            events,
            completed,
        };
        this.step(0.0);
        this
    }

    /// Returns KVM's counters as QEMU told them in the last step, or why it did not.
    pub fn counters(&self) -> &Result<BTreeMap<String, u64>, String> {
        &self.counters
    }

    /// Takes the measurement, so many seconds after the watch began, and begins the next one, which
    /// QEMU makes in the background.
    pub fn step(&mut self, at: f64) {
        self.why = self.ask(at).err();
        self.counters = self.qmp.statistics();
        if let Ok(Some(left)) = self.qmp.balloon() {
            let (first, last, since) = self.balloon.unwrap_or((left, left, at));
            self.balloon = Some((first, left, if left == last { since } else { at }));
        }
    }

    fn ask(&mut self, at: f64) -> Result<(), String> {
        if let Ok(state) = self.qmp.status() {
            self.state(at, state.err());
        }
        let now = self.qmp.migration()?;
        self.migrates(at, now);
        if now.runs {
            // Before QEMU reads the log for the first time, it has no rate.
            let known = now.bytes_per_second > 0.0 || self.migrated.is_none();
            self.migrated = Some(now).filter(|_| known).or(self.migrated);
        }
        if self.measures {
            // After an error, QEMU measures anew, if it does not measure still.
            let rate = self.qmp.dirty_rate().inspect_err(|_| self.measures = false)?;
            self.measures = rate.is_none();
            self.rates.extend(rate);
        }
        // The log of a migration is exact: samples beside it cost the guest, and tell less.
        if now.runs {
            return Err("a migration runs, and QEMU has not read its log yet".to_owned());
        }
        if !self.measures {
            self.qmp.begin_dirty_rate(1)?;
            self.measures = true;
        }
        Ok(())
    }

    /// Takes the state in which the guest does not run, if it does not.
    fn state(&mut self, at: f64, now: Option<String>) {
        let before = self.stopped.take();
        match (&before, &now) {
            (Some((old, since)), Some(new)) if old == new => {
                self.stopped = Some((new.clone(), *since))
            }
            (_, Some(state)) => {
                let what = match &**state {
                    "paused" => "it was paused".to_owned(),
                    other => format!("it was stopped ({other})"),
                };
                self.events.push(Event::new(at, what));
                self.stopped = Some((state.clone(), at));
            }
            (Some((_, since)), None) => {
                let what = format!("it ran again, after about {}", seconds(at - since));
                self.events.push(Event::new(at, what));
            }
            (None, None) => {}
        }
    }

    /// Takes QEMU's account of its migration.
    fn migrates(&mut self, at: f64, now: Migration) {
        let Some(before) = self.migration.replace(now) else {
            // One that ended before the watch is no event.
            if now.runs {
                self.events.push(Event::new(at, "a migration was running"));
            }
            return;
        };
        let is_other = before.runs && now.runs && now.total < before.total;
        let was_missed = !before.runs && !now.runs && now.total != before.total;
        if before.runs && (!now.runs || is_other) || was_missed {
            self.ended(at, if is_other { Migration::default() } else { now });
        }
        if now.runs && (!before.runs || is_other) {
            self.converges = None;
            self.events.push(Event::new(at, "a migration began"));
        }
        let known = now.runs && now.bytes_per_second > 0.0 && now.copied > 0.0;
        let converges = now.bytes_per_second < now.copied;
        if known && self.converges != Some(converges) {
            self.converges = Some(converges);
            let verb = if converges { "converges" } else { "does not converge" };
            self.events.push(Event::new(
                at,
                format!(
                    "the migration {verb}: in round {} the guest dirtied {}, and {} were copied",
                    now.rounds,
                    Rate(now.bytes_per_second),
                    Rate(now.copied)
                ),
            ));
        }
    }

    fn ended(&mut self, at: f64, now: Migration) {
        let time = |time: Duration| seconds(time.as_secs_f64());
        let what = match now.total.filter(|_| now.completed) {
            Some(total) => {
                if let Some(rate) = self.sampled() {
                    self.completed.push((self.events.len(), rate));
                }
                format!(
                    "the migration was completed: it took {} and {}, downtime {}",
                    time(total),
                    several(now.rounds as usize, "round"),
                    now.downtime.map_or("unknown".to_owned(), time),
                )
            }
            None if now.cancelled => "the migration was cancelled".to_owned(),
            None => "the migration ended without success".to_owned(),
        };
        self.events.push(Event::new(at, what));
    }

    /// Returns what QEMU told of the guest during the watch: migrations, each beside its forecast
    /// if the user named a link, pauses and the balloon.
    pub fn events(&self, guest: &GuestTotal, asked: &MigrationOptions) -> Vec<Event> {
        let mut events = self.events.clone();
        let memory = asked.memory.or(self.memory.as_ref().ok().copied());
        for (place, rate) in &self.completed {
            let Some((link, memory)) = asked.link.zip(memory) else { continue };
            let rate = asked.dirty_rate.map_or(*rate, |rate| rate.0);
            let by = Dirty { bytes_per_second: rate, ..Dirty::unknown(guest.pid) };
            let it = predict(guest, &by, memory, link, asked);
            events[*place].what += &format!(
                "; forecast by {} dirtied before it and --link: {}, downtime {}",
                Rate(rate),
                span(it.seconds, it.seconds_at_most),
                span(it.downtime, it.downtime_at_most),
            );
        }
        events.extend(match self.balloon {
            Some((first, last, at)) if first != last => Some(Event::new(
                at,
                format!("its balloon left it {}, and {} before", bytes(last), bytes(first)),
            )),
            Some((_, left, _)) if memory.is_some_and(|memory| left < memory) => {
                Some(Event::new(0.0, format!("its balloon left it {}", bytes(left))))
            }
            _ => None,
        });
        events
    }

    /// Returns why no rate of QEMU's is known, if none is.
    pub fn why(&self) -> Option<&str> {
        let knows = self.migrated.is_some_and(|it| it.bytes_per_second > 0.0);
        self.why.as_deref().filter(|_| !knows && self.rates.is_empty())
    }

    /// Returns the mean of the sampled rates, if there are any.
    fn sampled(&self) -> Option<f64> {
        let sum = self.rates.iter().map(|rate| rate.bytes_per_second).sum::<f64>();
        (!self.rates.is_empty()).then(|| sum / self.rates.len() as f64)
    }

    /// Returns the rates from the log of a migration and from samples: while one runs, or where
    /// nothing was sampled, that of the log is first.
    pub(super) fn rates(&self, pid: i32) -> Vec<Dirty> {
        let mut all = Vec::new();
        if let Some(migration) = self.migrated.filter(|it| it.bytes_per_second > 0.0) {
            all.push(Dirty {
                pid,
                bytes_per_second: migration.bytes_per_second,
                by: "by QEMU's log of a migration (query-migrate)",
                error: format!("none, in round {}", migration.rounds),
                cost: "none: QEMU reads the log anyway",
            });
        }
        if let Some(mean) = self.sampled() {
            all.push(Dirty {
                pid,
                bytes_per_second: mean,
                by: "by samples of QEMU's (calc-dirty-rate)",
                error: sampled(mean, self.memory.as_ref().ok().copied(), &self.rates),
                cost: "QEMU takes hashes of 512 pages of each GiB twice a second; nothing is \
                       protected",
            });
        }
        // A guest writes less while it is logged.
        if self.migration.is_some_and(|now| !now.runs) {
            all.reverse();
        }
        all
    }
}
