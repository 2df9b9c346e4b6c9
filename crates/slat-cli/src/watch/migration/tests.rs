//! Monitors that answer as they are told, and migrations of made guests.

use super::*;
use crate::watch::fake::guest;
use slat_kvm::watch::qmp::Qmp;

const GBIT: f64 = 1.25e8;

fn asked(dirty: Option<f64>) -> MigrationOptions {
    MigrationOptions {
        link: Some(Rate(10.0 * GBIT)),
        dirty_rate: dirty.map(Rate),
        hot_set: None,
        memory: None,
        max_downtime: Duration::from_millis(300),
    }
}

fn of_gib(gib: u64) -> GuestTotal {
    let mut guest = guest("qemu");
    guest.total.extend([(Metric::RssBytes, gib << 30), (Metric::SwapBytes, 0)]);
    guest
}

/// A monitor of a QEMU that answers each command in this way.
fn monitor(answer: impl Fn(&str) -> String + Send + 'static) -> (Monitor, Commands) {
    use std::io::{BufRead, BufReader, Write};
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut asked = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let line: serde_json::Value = serde_json::from_str(&line).unwrap();
            let command = line["execute"].as_str().unwrap().to_owned();
            writeln!(stream, "{}", answer(&command)).unwrap();
            asked.push(command);
        }
        asked
    });
    (Monitor::new(Qmp::connect(&socket).unwrap()), thread)
}

type Commands = std::thread::JoinHandle<Vec<String>>;

const MIGRATES: &str = "{\"return\": {\"status\": \"active\", \"ram\": \
                        {\"dirty-pages-rate\": 100, \"page-size\": 4096, \
                        \"dirty-sync-count\": 3, \"remaining\": 77}}}";
const NOTHING: &str = "{\"return\": {}}";
const REFUSED: &str = "{\"error\": {\"class\": \"GenericError\", \"desc\": \"refused\"}}";

#[test]
fn qemu_takes_no_samples_while_a_migration_runs() {
    let (mut monitor, asked) = monitor(|command| match command {
        "query-migrate" => MIGRATES.to_owned(),
        command if command.contains("dirty-rate") => REFUSED.to_owned(),
        _ => NOTHING.to_owned(),
    });
    monitor.step(1.0);
    assert_eq!(monitor.rates(1)[0].bytes_per_second, 409_600.0);
    assert_eq!(monitor.why(), None);
    drop(monitor);
    assert!(!asked.join().unwrap().contains(&"calc-dirty-rate".to_owned()));
}

#[test]
fn the_time_line_shows_a_migrations_forecast_and_real_figures() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    let step = Arc::new(AtomicU32::new(0));
    let now = Arc::clone(&step);
    let ram = |rate: u32, round: u32, mbps: f64| {
        format!(
            "\"ram\": {{\"dirty-pages-rate\": {rate}, \"page-size\": 4096, \"mbps\": {mbps}, \
             \"dirty-sync-count\": {round}, \"remaining\": 77}}"
        )
    };
    let migration = move |status: &str, total: u32, ram: String| {
        format!(
            "{{\"return\": {{\"status\": \"{status}\", \"total-time\": {total}, \"downtime\": 59, \
             {ram}}}}}"
        )
    };
    let done = migration("completed", 3260, ram(0, 4, 80.0));
    let ended = done.clone();
    let (mut monitor, _) = monitor(move |command| match (command, now.load(Ordering::Relaxed)) {
        ("query-migrate", 1) => migration("active", 100, ram(5000, 1, 80.0)),
        ("query-migrate", 2) => migration("cancelled", 200, ram(5000, 1, 80.0)),
        ("query-migrate", 3) => migration("active", 90, ram(1000, 2, 80.0)),
        ("query-migrate", 4..) => ended.clone(),
        ("query-status", 4) => "{\"return\": {\"status\": \"postmigrate\"}}".to_owned(),
        ("query-status", _) => "{\"return\": {\"status\": \"running\"}}".to_owned(),
        ("query-dirty-rate", _) => "{\"return\": {\"status\": \"measured\", \"dirty-rate\": 20, \
                                    \"calc-time\": 1, \"sample-pages\": 512}}"
            .to_owned(),
        _ => NOTHING.to_owned(),
    });
    for at in 1..=5 {
        step.store(at, Ordering::Relaxed);
        monitor.step(f64::from(at));
    }
    let known = MigrationOptions { memory: Some(1 << 30), ..asked(None) };
    let events = monitor.events(&of_gib(1), &known);
    let said: Vec<_> = events.iter().map(|it| format!("{} {}", it.at, it.what)).collect();
    let expected = [
        "1 a migration began",
        "1 the migration does not converge: in round 1 the guest dirtied 20 MiB/s, and 10 MiB/s",
        "2 the migration was cancelled",
        "3 a migration began",
        "3 the migration converges: in round 2 the guest dirtied 4 MiB/s, and 10 MiB/s were",
        "4 it was stopped (postmigrate)",
        "4 the migration was completed: it took 3.26 s and 4 rounds, downtime 59",
        "5 it ran again, after about 1",
    ];
    assert_eq!(said.len(), expected.len(), "{said:#?}");
    for (said, expected) in said.iter().zip(expected) {
        assert!(said.starts_with(expected), "{said}, not {expected}");
    }
    assert!(said[6].contains("forecast by 20 MiB/s dirtied before it and --link: "), "{}", said[6]);
    let without = monitor.events(&of_gib(1), &MigrationOptions { link: None, ..known });
    assert!(without[6].what.ends_with("ms"), "{without:?}");
    // One of before the watch is not told.
    let (monitor, _) = self::monitor(move |command| match command {
        "query-migrate" => done.clone(),
        _ => NOTHING.to_owned(),
    });
    assert!(monitor.events(&of_gib(1), &known).is_empty());
}

#[test]
fn a_span_of_forecasts_begins_with_the_shorter_one() {
    assert_eq!(span(0.0917, 0.0800), span(0.0800, 0.0917));
    assert!(span(2.0, 1.0).starts_with("1.00 s to"), "{}", span(2.0, 1.0));
    assert_eq!(span(1.0, 1.0), "1.00 s");
}

#[test]
fn a_refusal_of_qemus_that_is_over_is_not_told() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let refuses = Arc::new(AtomicBool::new(true));
    let now = Arc::clone(&refuses);
    let (mut monitor, _) = self::monitor(move |command| match command {
        "calc-dirty-rate" if now.load(Ordering::Relaxed) => REFUSED.to_owned(),
        _ => NOTHING.to_owned(),
    });
    assert!(monitor.why().is_some_and(|why| why.contains("refused")));
    // It tells no size of the memory, either: that of the process is taken, and it is said.
    let mut one = of_gib(1);
    one.total.insert(Metric::SwapBytes, 1 << 30);
    let told = tell(&[&one], Some(&monitor), &asked(Some(4.0 * GBIT)));
    assert!(told.missing[1].contains("no base-memory"), "{told:?}");
    assert_eq!(told.predictions[0].memory, 2 << 30);
    refuses.store(false, Ordering::Relaxed);
    monitor.step(1.0);
    assert_eq!(monitor.why(), None);
}

#[test]
fn of_a_guest_whose_memory_is_unknown_nothing_is_predicted() {
    for unknown in [Metric::RssBytes, Metric::SwapBytes] {
        let mut one = of_gib(16);
        one.total.remove(&unknown);
        let told = tell(&[&one], None, &asked(Some(4.0 * GBIT)));
        assert!(told.predictions.is_empty(), "{unknown:?}: {told:?}");
        assert!(told.missing.iter().any(|it| it.contains("the memory of")), "{told:?}");
    }
}

#[test]
fn a_slow_writer_converges_and_a_fast_one_gets_remedies() {
    let one = of_gib(16);
    let below = tell(&[&one], None, &asked(Some(4.0 * GBIT)));
    let it = &below.predictions[0];
    assert!(it.converges && it.rounds > 2 && it.downtime <= 0.3, "{it:?}");
    assert!(it.changes[0].contains("up to"), "{it:?}");
    let above = tell(&[&one], None, &asked(Some(20.0 * GBIT)));
    let it = &above.predictions[0];
    assert!(!it.converges && it.rounds == MAX_ROUNDS, "{it:?}");
    let words = it.changes.join("\n");
    for change in ["Gbit/s", "auto-converge", "post-copy"] {
        assert!(words.contains(change), "{words}");
    }
    // Twice the link's 1.25 GB/s: what it wrote in a second, and all of its memory.
    assert!(it.downtime < 3.0 && it.downtime_at_most > 10.0, "{it:?}");
    let said = above.text().join("\n");
    assert!(said.contains("the same pages each second"), "{said}");
    assert!(said.contains("not converge") && said.contains("given by --dirty-rate"), "{said}");
}

#[test]
fn ring_pages_give_a_rate_and_a_missing_rate_has_a_reason() {
    let mut one = of_gib(1);
    let none = tell(&[&one], None, &asked(None));
    assert!(none.predictions.is_empty() && none.missing[0].contains("--qmp"), "{none:?}");
    one.total.insert(Metric::PagesLogged, 5000);
    let told = tell(&[&one], None, &asked(None));
    let page = rustix::param::page_size() as f64;
    assert_eq!(told.rates[0].bytes_per_second, 2500.0 * page);
    assert_eq!(told.predictions[0].by, told.rates[0].by);
    let mut unasked = asked(None);
    unasked.link = None;
    assert!(tell(&[&one], None, &unasked).predictions.is_empty());
}

#[test]
fn the_memory_that_is_given_counts_in_place_of_the_process_s() {
    let one = of_gib(17);
    let of_process = asked(Some(4.0 * GBIT));
    let given = MigrationOptions { memory: Some(16 << 30), ..of_process };
    let [whole, own] = [of_process, given].map(|it| tell(&[&one], None, &it).predictions);
    assert_eq!([whole[0].memory, own[0].memory], [17 << 30, 16 << 30]);
    assert!(own[0].seconds < whole[0].seconds, "{own:?} {whole:?}");
}

#[test]
fn the_sampling_error_shrinks_with_samples_and_is_never_zero() {
    let rate = |seconds| DirtyRate { bytes_per_second: 1e8, seconds, pages_per_gib: 512 };
    let number = |text: String| {
        let digits = text.split_whitespace().nth(1).unwrap().to_owned();
        digits.parse::<f64>().unwrap()
    };
    let one = number(sampled(1e8, Some(4 << 30), &[rate(1.0)]));
    let many = number(sampled(1e8, Some(4 << 30), &[rate(1.0); 16]));
    assert!(one > 3.0 * many && many > 0.0, "{one} {many}");
    assert!(number(sampled(0.0, Some(4 << 30), &[rate(1.0)])) > 0.0);
    assert!(sampled(1.0, None, &[rate(1.0)]).contains("not known"));
    // Of a small guest QEMU may sample a page, a part of one, or none.
    for (memory, pages_per_gib) in [(4 << 30, 0), (2 << 20, 512), (3 << 20, 512), (1 << 20, 1)] {
        let few = DirtyRate { pages_per_gib, ..rate(1.0) };
        assert!(sampled(1e8, Some(memory), &[few]).contains("too few"), "{memory}");
    }
}
