//! The output while guests are watched: a table in one place on a terminal, lines elsewhere.

use super::{coverage, mapped, rate, share, size};
use slat_kvm::watch::{GuestTotal, Metric, Sample, Values, WatchedGuest};
use slat_lab::numbers::several;
use slat_lab::report::text;
use slat_lab::table::{NOTHING, Table};
use std::fmt::Write;

/// Moves the cursor so that the next text replaces the last one.
const HOME: &str = "\x1b[H";
/// Clears the screen and moves the cursor to its start.
pub const CLEAR: &str = "\x1b[2J\x1b[H";
/// Erase the rest of the line, and of the screen.
const REST_OF_LINE: &str = "\x1b[K";
const REST: &str = "\x1b[J";

/// Returns the table of the last samples, for a terminal of `columns` columns and `lines` lines.
pub fn screen(guests: &[WatchedGuest], seconds: f64, columns: u16, lines: u16) -> String {
    let there: Vec<_> = guests.iter().filter(|guest| guest.is_there()).collect();
    let mut rows = Vec::new();
    for guest in &there {
        let total = guest.total();
        let Some(sample) = total.samples.last() else { continue };
        rows.push(row(label(total), &sample.guest, sample.seconds, sample.vcpus.len()));
        // For a single guest, each vCPU has a row; for several guests there is no room.
        if there.len() == 1 {
            for (vcpu, values) in total.vcpus.iter().zip(&sample.vcpus) {
                rows.push(row(format!("  vCPU {}", vcpu.index), values, sample.seconds, 1));
            }
        }
    }
    let mut drawn = String::new();
    let title = format!(
        "slat watch: {}, {seconds:.0} s; %: of all its vCPUs' time; Ctrl-C ends it",
        count(there.len())
    );
    let table = table(title, rows);
    text::grid(&mut drawn, &table, columns);
    let mut screen = HOME.to_owned();
    let room = usize::from(lines).saturating_sub(1).max(4);
    let all = drawn.lines().count();
    for line in drawn.lines().take(if all > room { room - 1 } else { room }) {
        let _ = writeln!(screen, "{line}{REST_OF_LINE}");
    }
    if all > room {
        let _ = writeln!(screen, "… {} rows more{REST_OF_LINE}", all + 1 - room);
    }
    screen + REST
}

/// Formats the last sample of a guest as a line.
pub fn line(guest: &GuestTotal, sample: &Sample) -> String {
    let values = &sample.guest;
    let per_second = |metric| rate(values, metric, sample.seconds);
    let of_time = |metric| share(values, metric, sample.seconds, sample.vcpus.len());
    let mut line = format!(
        "{:8.1} s  {}: faults {}/s, exits {}/s, runs {}, waits {}, {} in huge pages of {}, \
         remote flushes {}/s",
        sample.at,
        label(guest),
        per_second(Metric::Faults),
        per_second(Metric::Exits),
        of_time(Metric::RunningNs),
        of_time(Metric::WaitingNs),
        coverage(values),
        size(values, Metric::RssBytes),
        per_second(Metric::RemoteTlbFlushes),
    );
    if values.contains_key(&Metric::FaultNs) {
        let _ = write!(line, ", in faults {}", of_time(Metric::FaultNs));
    }
    if values.contains_key(&Metric::Invalidations) {
        let _ = write!(line, ", unmapped by the host {}/s", per_second(Metric::Invalidations));
    }
    if values.contains_key(&Metric::WorkingSetBytes) {
        let _ = write!(line, ", working set {}", size(values, Metric::WorkingSetBytes));
    }
    line
}

/// Returns the label of a guest.
pub fn label(guest: &GuestTotal) -> String {
    // The process chooses its name, so control characters are removed: they would steer the
    // terminal.
    let name = guest.domain.as_ref().unwrap_or(&guest.name);
    let name: String = name.chars().filter(|c| !c.is_control()).collect();
    match guest.vms {
        0 | 1 => format!("{} {name}", guest.pid),
        vms => format!("{} {name} ({vms} VMs)", guest.pid),
    }
}

/// Formats the number of guests, in words.
pub fn count(guests: usize) -> String {
    several(guests, "guest")
}

/// Makes a table of rows. Columns without any known value are left out, except the first `ALWAYS`,
/// which every host can provide.
pub fn table(title: String, mut rows: Vec<Vec<String>>) -> Table {
    let mut columns = COLUMNS.map(str::to_owned).to_vec();
    for place in (ALWAYS..COLUMNS.len()).rev() {
        if rows.iter().all(|row| row[place] == NOTHING) {
            columns.remove(place);
            rows.iter_mut().for_each(|row| drop(row.remove(place)));
        }
    }
    Table { title, common: String::new(), columns, labels: 1, rows, notes: Vec::new() }
}

/// Number of columns that are always there.
const ALWAYS: usize = 10;

/// Headings of the columns of [`row`].
const COLUMNS: [&str; 15] = [
    "guest",
    "faults/s",
    "exits/s",
    "runs",
    "waits for a CPU",
    "in its own code",
    "memory",
    "in huge pages",
    "4K / 2M / 1G mapped",
    "remote flushes/s",
    "in faults",
    "unmapped/s",
    "logged pages/s",
    "protected writes/s",
    "working set",
];

/// Shows a rate of 0 as unknown, so that the column of a rare event is left out.
fn some(rate: String) -> String {
    if rate == "0" { NOTHING.to_owned() } else { rate }
}

/// Makes a row of the table, of a guest with so many vCPUs or of one of them.
pub fn row(label: String, values: &Values, seconds: f64, vcpus: usize) -> Vec<String> {
    let share = |metric| share(values, metric, seconds, vcpus);
    vec![
        label,
        rate(values, Metric::Faults, seconds),
        rate(values, Metric::Exits, seconds),
        share(Metric::RunningNs),
        share(Metric::WaitingNs),
        share(Metric::GuestNs),
        size(values, Metric::RssBytes),
        coverage(values),
        mapped(values),
        rate(values, Metric::RemoteTlbFlushes, seconds),
        share(Metric::FaultNs),
        rate(values, Metric::Invalidations, seconds),
        some(rate(values, Metric::PagesLogged, seconds)),
        some(rate(values, Metric::FaultsProtected, seconds)),
        size(values, Metric::WorkingSetBytes),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_host_is_drawn_and_a_name_cannot_steer_the_terminal() {
        let drawn = screen(&[], 3.2, 80, 24);
        assert!(drawn.starts_with(HOME) && drawn.ends_with(REST), "{drawn:?}");
        assert!(drawn.contains("0 guests, 3 s; %: of"), "{drawn:?}");
        // A screen of size 0 has a small table, too.
        assert!(screen(&[], 3.2, 0, 0).lines().count() < 6);
        let guest = crate::watch::fake::guest("a\x1b[2Jb");
        assert_eq!(label(&guest), "4711 a[2Jb");
        let named =
            slat_kvm::watch::GuestTotal { domain: Some("web\u{7}01".to_owned()), ..guest.clone() };
        assert_eq!(label(&named), "4711 web01");
        let said = line(&guest, &guest.samples[0]);
        assert!(said.contains("faults 500/s") && said.contains("runs 100.0 %"), "{said}");
    }
}
