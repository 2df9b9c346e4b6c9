//! A guest as options describe it: its shape, the work of its vCPUs, its runs and its measurements.

use super::options::{GuestArgs, LogArgs};
use super::values::{HotSet, Others, SEED};
use serde_json::{Map, Value, json};
use slat_kvm::figure::{self, Figure, Stall};
use slat_kvm::guest::Shape;
use slat_kvm::phase::PhaseRun;
use slat_kvm::work::{Order, Touch, Work};
use slat_kvm::{Error, Event, Mode, Setting};
use slat_lab::cli::param_of;
use slat_lab::failure::bad_input;
use slat_lab::rate::Rate;
use slat_lab::record::{KVM, Kind, Measurement};
use slat_lab::session::Session;
use slat_lab::size::Size;

/// The options that describe a guest.
pub struct GuestOptions<'a> {
    pub guest: &'a GuestArgs,
    pub overlap: bool,
    pub mode: Mode,
    pub eager_split: Option<Size>,
}

impl GuestOptions<'_> {
    /// Returns the shape of the guest, for `slat-kvm`.
    ///
    /// # Errors
    /// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) if the vCPUs do not get whole
    /// pages.
    pub fn shape(&self) -> anyhow::Result<Shape> {
        let backing = self.guest.backing.0;
        let shares = if self.overlap { 1 } else { u64::from(self.guest.vcpus) };
        let share = Size(backing.page_size().saturating_mul(shares));
        if !self.guest.memory.bytes().is_multiple_of(share.bytes()) {
            return Err(bad_input(format!(
                "--memory {} does not give each of {} vCPUs whole pages of {}; take a multiple of \
                 {share}",
                self.guest.memory, self.guest.vcpus, self.guest.backing
            )));
        }
        Ok(Shape {
            memory: self.guest.memory.bytes(),
            backing,
            prealloc: false,
            vcpus: self.guest.vcpus as usize,
            overlap: self.overlap,
            slots: self.guest.run.kvm.slots.unwrap_or(1),
            mode: self.mode,
            eager_split: self.eager_split.map(Size::bytes),
            nx_huge_pages: !self.guest.run.kvm.disable_nx_huge_pages,
            slot_zap_all: true,
            nodes: self.guest.run.kvm.memory_node.clone(),
            probes: self.guest.run.kvm.probe.clone(),
            records: 0,
        })
    }

    /// Returns the parameters of the guest's results, without options that have their usual value.
    pub fn params(&self) -> Map<String, Value> {
        let mut params = Params::default();
        params.add("memory", self.guest.memory.bytes());
        params.add("vcpus", self.guest.vcpus);
        params.add("backing", self.guest.backing.to_string());
        params.add_if(self.overlap, "overlap", true);
        params.add_if(
            self.guest.run.kvm.slots.is_some_and(|slots| slots > 1),
            "slots",
            self.guest.run.kvm.slots,
        );
        let pin = self.guest.run.kvm.pin.as_ref().map_or(&[][..], |cpus| &cpus.0);
        params.add_if(!pin.is_empty(), "pin", json!(pin).to_string());
        params.add_if(self.guest.run.kvm.disable_nx_huge_pages, "nx_huge_pages", "off");
        let nodes = &self.guest.run.kvm.memory_node;
        params.add_if(!nodes.is_empty(), "memory_node", json!(nodes).to_string());
        params.add_if(
            self.guest.run.kvm.cpu_node.is_some(),
            "cpu_node",
            self.guest.run.kvm.cpu_node,
        );
        let probes = &self.guest.run.kvm.probe;
        params.add_if(!probes.is_empty(), "probes", probes.join(","));
        if let Some(chunk) = self.eager_split {
            params.add("eager_split", chunk.bytes());
        }
        params.0
    }
}

/// Builder of a map of parameters.
#[derive(Default)]
struct Params(Map<String, Value>);

impl Params {
    fn add(&mut self, name: &str, value: impl Into<Value>) {
        self.0.insert(name.to_owned(), value.into());
    }

    fn add_if(&mut self, condition: bool, name: &str, value: impl Into<Value>) {
        if condition {
            self.add(name, value);
        }
    }
}

/// The part of a guest's work that does not depend on how it is logged.
pub struct Pattern {
    pub write_percent: u8,
    pub others: Others,
    pub random: bool,
    pub hot_set: Option<HotSet>,
    pub dirty_rate: Option<Rate>,
}

impl Pattern {
    /// Each step writes the next page.
    pub const WRITES: Self = Self {
        write_percent: 100,
        others: Others::Skip,
        random: false,
        hot_set: None,
        dirty_rate: None,
    };

    /// Returns the pattern that the options of a log describe.
    pub fn of(args: &LogArgs) -> Self {
        Self {
            write_percent: args.write_percent,
            others: args.others,
            random: args.random_access,
            hot_set: args.hot_set,
            dirty_rate: args.dirty_rate,
        }
    }

    /// Returns the work that each of `vcpus` vCPUs repeats. They share the dirty rate evenly.
    pub fn work(&self, vcpus: u32) -> Work {
        let page = slat_kvm::Backing::Small.page_size() as f64;
        let order = match self.hot_set {
            Some(hot) => Order::Hot { seed: SEED, percent: hot.pages, share: hot.steps },
            None if self.random => Order::Random { seed: SEED },
            None => Order::Sequential,
        };
        Work {
            order,
            share: self.write_percent,
            miss: match self.others {
                Others::Read => Touch::Read,
                Others::Skip => Touch::Skip,
            },
            per_second: self.dirty_rate.map(|rate| rate.0 / page / f64::from(vcpus)),
            ..Work::each_page(Touch::Write)
        }
    }

    /// Returns the pattern of results, of which [`Self::add_to`] and their `write_percent` tell.
    pub fn read(params: &Map<String, Value>) -> Self {
        let text = |name| params.get(name).and_then(Value::as_str);
        let percent = params.get("write_percent").and_then(Value::as_u64);
        Self {
            write_percent: percent.map_or(100, |percent| percent as u8),
            others: param_of(params, "others").unwrap_or(Others::Skip),
            random: text("order").is_some(),
            hot_set: text("hot_set").and_then(|hot| hot.parse().ok()),
            dirty_rate: params.get("dirty_rate").and_then(Value::as_f64).map(Rate),
        }
    }

    /// Returns the bytes that are written a second, of those that are touched.
    pub fn written_rate(&self) -> Option<f64> {
        let percent = if self.others == Others::Read { self.write_percent } else { 100 };
        Some(self.dirty_rate?.0 * f64::from(percent) / 100.0)
    }

    /// Adds the pattern's parameters, without options that have their usual value.
    pub fn add_to(&self, params: &mut Map<String, Value>) {
        let mut all = Params(std::mem::take(params));
        all.add_if(self.others == Others::Read, "others", "read");
        all.add_if(self.random, "order", "random");
        if let Some(hot) = self.hot_set {
            all.add("hot_set", hot.to_string());
        }
        if let Some(rate) = self.dirty_rate {
            all.add("dirty_rate", rate.0.round() as u64);
        }
        *params = all.0;
    }
}

/// Runs a scenario of `slat-kvm`, and reports its phases to `session`. Adds to `phases` each phase
/// that ended. Returns `None` if the session stopped the run.
///
/// # Errors
/// What this host lacks, values that cannot be, or a guest or a log that went wrong.
pub fn observe<T>(
    session: &Session,
    name: &str,
    pin: &[usize],
    phases: &mut Vec<PhaseRun>,
    run: impl FnOnce(Setting<'_>) -> Result<T, Error>,
) -> anyhow::Result<Option<T>> {
    let stop = session.stop_flag();
    let on_event = &mut |event: Event<'_>| match event {
        Event::Begin { phase, iteration: Some(round) } => {
            session.say(&format!("{name}: {phase}, round {round}"));
        }
        Event::Begin { phase, iteration: None } => session.say(&format!("{name}: {phase}")),
        Event::End(run) => {
            phases.push(run.clone());
            session.step();
        }
        Event::Checking => session.say("checking what the guest wrote"),
        _ => {}
    };
    match run(Setting { stop: &stop, pin, on_event }) {
        Ok(report) => Ok(Some(report)),
        // `slat-kvm` has checked each phase that ended against its log, so these phases count.
        Err(Error::Stopped) => Ok(None),
        Err(error @ Error::Invalid { .. }) => Err(bad_input(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

/// Returns a measurement of a guest under KVM.
pub fn measurement(
    scenario: &str,
    figure: Figure,
    params: Map<String, Value>,
    samples: Vec<f64>,
) -> Measurement {
    let kind = match figure {
        Figure::Course(..) => Kind::Course,
        Figure::Stall(_, Stall::P50 | Stall::P95 | Stall::P99 | Stall::Longest) => Kind::Bucketed,
        Figure::Stall(_, Stall::Waited) => Kind::Waited,
        _ => Kind::Measured,
    };
    Measurement::new(scenario, KVM, figure.name(), params, figure.unit(), samples).of_kind(kind)
}

/// Returns the measurements of figures, with a sample for each run that gave one.
pub fn figures<R>(
    scenario: &str,
    params: &Map<String, Value>,
    values: &[figure::Value<R>],
    reports: &[R],
) -> Vec<Measurement> {
    let of = |(figure, of): &figure::Value<R>| {
        (*figure, reports.iter().filter_map(of).collect::<Vec<f64>>())
    };
    course(scenario, params, values.iter().map(of))
}

/// Returns the measurements of figures that one run gave, without those that have no samples.
pub fn course(
    scenario: &str,
    params: &Map<String, Value>,
    figures: impl IntoIterator<Item = (Figure, Vec<f64>)>,
) -> Vec<Measurement> {
    let known = figures.into_iter().filter(|(_, samples)| !samples.is_empty());
    known.map(|(figure, samples)| measurement(scenario, figure, params.clone(), samples)).collect()
}
