//! `slat predict`: forecasts of a migration from figures, for each way to migrate.
//!
//! Pre-copy is the model of `forecast`. With multifd, several threads copy, each at its own rate,
//! up to the link. Auto-converge is QEMU's: from the second round on, a round that dirties more
//! than half of what it copied slows the vCPUs down, by 20 % at first and by 10 % more each further
//! time, to 99 % at most. Post-copy copies all memory once while the guest runs, then moves the
//! vCPUs, which wait for each page that is not there yet.

use crate::cli::{PredictArgs, WriteOrder};
use crate::forecast::{self, Guest, Writes};
use serde::Serialize;
use slat_lab::failure::bad_input;
use slat_lab::numbers::{bytes, seconds, thousands};
use slat_lab::rate::Rate;
use slat_lab::table::{NOTHING, Table};

/// Dirty part of a round from which on QEMU slows vCPUs down (`throttle-trigger-threshold`).
const TRIGGER: f64 = 0.5;
/// First slowing (`cpu-throttle-initial`), each further one, and the most.
const THROTTLE: [f64; 3] = [0.2, 0.1, 0.99];

/// The way that slows the guest down.
const AUTO_CONVERGE: &str = "auto-converge";

/// The forecast of one way to migrate a guest.
#[derive(Clone, Debug, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Prediction {
    /// The link, in bytes per second.
    pub link: f64,
    /// The downtime allowed, in seconds.
    pub max_downtime: f64,
    /// The rate at which the guest writes, in bytes per second.
    pub dirty_rate: f64,
    /// Bytes that it writes again and again.
    pub hot: f64,
    /// `pre-copy`, `multifd`, `auto-converge` or `post-copy`.
    pub way: &'static str,
    /// Seconds of the migration, with the downtime.
    pub total: f64,
    /// Seconds for which the guest stands still.
    pub downtime: f64,
    /// Rounds before the guest is stopped.
    pub rounds: u32,
    /// Whether the rest fits into the downtime.
    pub converges: bool,
    /// What the guest loses of its pace until it is stopped, in per cent: to logged writes, and to
    /// slowing down.
    pub lost: f64,
    /// Pages that vCPUs wait for after they moved, at most, and for how long each.
    pub remote_faults: Option<(u64, f64)>,
}

/// Computes the forecasts: for each dirty rate, link and downtime, each way.
///
/// # Errors
/// [`Failure::BadInput`](slat_lab::failure::Failure::BadInput) if the windows cannot be.
pub fn all(args: &PredictArgs) -> anyhow::Result<Vec<Prediction>> {
    let memory = args.memory.bytes() as f64;
    let hot = args.hot_set.map_or(memory, |hot| (hot.bytes() as f64).min(memory));
    let random = args.order == WriteOrder::Random;
    let writes: Vec<(Writes, bool)> = match args.dirty[..] {
        [] => args.dirty_rate.iter().map(|rate| (Writes { rate: rate.0, hot }, random)).collect(),
        [one, other] => {
            let mut windows = [one, other].map(|window| (window.seconds, window.dirty.0 as f64));
            windows.sort_by(|a, b| a.0.total_cmp(&b.0));
            let writes = Writes::of_windows(windows, memory).ok_or_else(|| {
                bad_input(
                    "the longer --dirty has fewer bytes than the shorter, or more for each \
                     second; no guest dirties memory so",
                )
            })?;
            vec![(writes, true)]
        }
        _ => return Err(bad_input("--dirty is given twice, for a short and a long window")),
    };
    let mut all = Vec::new();
    for (Writes { rate, hot }, random) in writes {
        for link in &args.link {
            for downtime in &args.max_downtime {
                let copied = |channels: u32| {
                    let threads = args.channel_rate.map(|rate| rate.0 * f64::from(channels));
                    threads.map_or(link.0, |threads| threads.min(link.0))
                };
                let guest = |channels| Guest {
                    memory,
                    writes: rate,
                    hot,
                    random,
                    copied: copied(channels),
                    copied_at_rest: copied(channels),
                    stop: args.stop_time.as_secs_f64(),
                    max_downtime: downtime.as_secs_f64(),
                    max_rounds: args.max_rounds,
                };
                let one = guest(1);
                let mut ways = vec![precopy(args, &one, "pre-copy")];
                if args.channels > 1 {
                    ways.push(precopy(args, &guest(args.channels), "multifd"));
                }
                ways.push(precopy(args, &one, AUTO_CONVERGE));
                ways.push(postcopy(args, &one));
                all.extend(ways.into_iter().map(|way| Prediction { link: link.0, ..way }));
            }
        }
    }
    Ok(all)
}

/// Returns the bytes that the first round copies: all, and in place of pages that are zero what the
/// link would carry while the VMM finds that out.
fn first(args: &PredictArgs, guest: &Guest) -> f64 {
    let zero = guest.memory * args.zero_pages.0 / 100.0;
    guest.memory - zero + zero / args.zero_rate.0 * guest.copied
}

/// Returns the part of the vCPUs' time that logging takes, if so many bytes become dirty in a time.
fn logged(args: &PredictArgs, dirtied: f64, seconds: f64) -> f64 {
    let page = slat_kvm::Backing::Small.page_size() as f64;
    let cost = dirtied / page * args.logged_write.as_secs_f64() / f64::from(args.vcpus);
    if seconds > 0.0 { (cost / seconds).min(1.0) } else { 0.0 }
}

fn precopy(args: &PredictArgs, guest: &Guest, way: &'static str) -> Prediction {
    let slows = way == AUTO_CONVERGE;
    let (mut pace, mut lost, mut running) = (1.0, 0.0, 0.0);
    let forecast = forecast::course(guest, first(args, guest), |round| {
        let dirtied = guest.dirtied(round.seconds, pace);
        running += round.seconds;
        let left = pace * (1.0 - logged(args, dirtied, round.seconds));
        lost += (1.0 - left) * round.seconds;
        if slows && round.number >= 2 && dirtied > round.copied * TRIGGER {
            let [initial, more, most] = THROTTLE;
            let by = if pace == 1.0 { initial } else { 1.0 - pace + more };
            pace = 1.0 - by.min(most);
        }
        dirtied
    });
    Prediction {
        link: guest.copied,
        max_downtime: guest.max_downtime,
        dirty_rate: guest.writes,
        hot: guest.hot,
        way,
        total: forecast.total,
        downtime: forecast.downtime,
        rounds: forecast.rounds,
        converges: forecast.converges,
        lost: if running > 0.0 { 100.0 * lost / running } else { 0.0 },
        remote_faults: None,
    }
}

fn postcopy(args: &PredictArgs, guest: &Guest) -> Prediction {
    let page = slat_kvm::Backing::Small.page_size() as f64;
    let round = first(args, guest) / guest.copied;
    let rest = guest.dirtied(round, 1.0).min(guest.memory);
    let fault = args.round_trip.as_secs_f64() + page / guest.copied;
    Prediction {
        link: guest.copied,
        max_downtime: guest.max_downtime,
        dirty_rate: guest.writes,
        hot: guest.hot,
        way: "post-copy",
        total: round + rest / guest.copied,
        // The vCPUs' state, and the list of the pages that are not there: a bit for each page.
        downtime: guest.stop
            + args.round_trip.as_secs_f64()
            + guest.memory / page / 8.0 / guest.copied,
        rounds: 1,
        converges: true,
        lost: 100.0 * logged(args, rest, round),
        remote_faults: Some(((rest / page) as u64, fault)),
    }
}

/// Returns the table of the forecasts.
pub fn table(args: &PredictArgs, all: &[Prediction]) -> Table {
    let cells = all.iter().map(|one| {
        let faults = one.remote_faults.map_or_else(
            || NOTHING.to_owned(),
            |(pages, each)| format!("{} of {}", thousands(pages as i64), seconds(each)),
        );
        vec![
            Rate(one.dirty_rate).to_string(),
            bytes(one.hot as u64),
            Rate(one.link).to_string(),
            seconds(one.max_downtime),
            one.way.to_owned(),
            seconds(one.total),
            seconds(one.downtime),
            format!("{}{}", one.rounds, if one.converges { "" } else { " *" }),
            format!("{:.0} %", one.lost),
            faults,
        ]
    });
    let common = format!(
        "vCPUs {}, order {}, zero pages {}, a logged write {}, stop {}, round trip {}",
        args.vcpus,
        if args.dirty.is_empty() { args.order } else { WriteOrder::Random },
        args.zero_pages,
        seconds(args.logged_write.as_secs_f64()),
        seconds(args.stop_time.as_secs_f64()),
        seconds(args.round_trip.as_secs_f64()),
    );
    let columns = "dirty rate|hot|link|allowed|way|total|downtime|rounds|guest lost|remote faults";
    let title = format!("Forecasts of a migration: {}", bytes(args.memory.bytes()));
    let table = Table::new(title, 5, columns, cells).noting(
        "By calculation, at constant rates. Rounds with * did not come to fit into the downtime \
         allowed. “guest lost” until it is stopped: to logged writes, and to slowing down. \
         “remote faults”: at most so many, each for so long.",
    );
    Table { common, ..table }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn predicted(line: &str) -> anyhow::Result<Vec<Prediction>> {
        let words = ["slat", "predict"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words)?.command {
            Some(Command::Predict(args)) => all(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_way_is_computed_for_each_rate_link_and_downtime() {
        let line = "--memory 16g --dirty-rate 100MiB/s,2GiB/s --link 1GiB/s,2GiB/s";
        let all = predicted(line).unwrap();
        assert_eq!(all.len(), 12);
        let slow = &all[0];
        let same = forecast::of(&Guest {
            memory: slow.hot,
            writes: slow.dirty_rate,
            hot: slow.hot,
            random: false,
            stop: 0.003,
            copied: slow.link,
            copied_at_rest: slow.link,
            max_downtime: 0.3,
            max_rounds: 30,
        });
        // Pre-copy is the model of the other commands.
        assert_eq!(
            (slow.total, slow.downtime, slow.rounds),
            (same.total, same.downtime, same.rounds)
        );
        let fast: Vec<_> = all.iter().filter(|one| one.dirty_rate > 2e9).collect();
        assert!(!fast[0].converges && fast[0].way == "pre-copy");
        assert!(fast[1].converges && fast[1].lost > 20.0, "{:?}", fast[1]);
        assert!(fast[2].downtime < 0.01 && fast[2].remote_faults.is_some(), "{:?}", fast[2]);
    }

    #[test]
    fn several_channels_copy_until_the_link_is_full() {
        let line = "--memory 10g --dirty-rate 1MiB/s --link 2GiB/s --channel-rate 500MiB/s";
        let all = predicted(&format!("{line} --channels 2")).unwrap();
        let ways: Vec<_> = all.iter().map(|one| one.way).collect();
        assert_eq!(ways, ["pre-copy", "multifd", "auto-converge", "post-copy"]);
        assert!((all[0].total / all[1].total - 2.0).abs() < 0.02, "{all:?}");
        let full = &predicted(&format!("{line} --channels 9")).unwrap()[1];
        assert!((full.total - 5.0).abs() < 0.1, "{full:?}");
        assert!(predicted(&format!("{line} --order random")).is_ok());
    }

    #[test]
    fn zero_pages_bypass_the_link_and_windows_bound_the_hot_set() {
        let total = |more: &str| {
            let line = format!("--memory 10g --dirty-rate 1MiB/s --link 1GiB/s {more}");
            predicted(&line).unwrap()[0].total
        };
        assert!((total("") / total("--zero-pages 50% --zero-rate 1TiB/s") - 2.0).abs() < 0.02);
        // Half of it takes the link 5 s, and the search for the other half takes 2.5 s.
        assert!((total("--zero-pages 50% --zero-rate 2GiB/s") - 7.5).abs() < 0.1);
        let windows = "--memory 64g --dirty 1s:600m --dirty 100ms:200m --link 1GiB/s";
        let two = &predicted(windows).unwrap()[0];
        assert!(two.hot < 1e9 && two.hot > 600.0 * 1048576.0, "{two:?}");
        let wrong = "--memory 1g --dirty 1s:1m --dirty 100ms:2m";
        assert!(predicted(wrong).unwrap_err().to_string().contains("no guest dirties"));
        assert!(predicted("--memory 1g --dirty 1s:1m").is_err());
        assert!(predicted("--memory 1g").is_err());
    }
}
