//! Table of how long vCPUs were out of the guest, by reason.

use super::live::label;
use slat_kvm::watch::{GuestTotal, Times, Why};
use slat_lab::numbers::{seconds, thousands};
use slat_lab::table::Table;

/// Returns the reason in words.
pub fn reason(why: Why) -> &'static str {
    match why {
        Why::FaultRead => "faults of reads",
        Why::FaultWrite => "faults of writes",
        Why::FaultProtected => "writes to protected pages",
        Why::FaultExecute => "faults of fetches",
        Why::Idle => "idle (HLT)",
        Why::Other => "other exits",
    }
}

/// Makes a table of all guests whose exits were received, with the transition of an exit in
/// nanoseconds, if it is known; `None` if no exit was received.
pub fn table(guests: &[&GuestTotal], transition: Option<u64>) -> Option<Table> {
    let mut rows = Vec::new();
    for guest in guests {
        for (why, times) in &guest.stalls {
            let mut row = vec![label(guest), reason(*why).to_owned()];
            row.extend(cells(times, guest.seconds * guest.vcpus.len().max(1) as f64));
            row.extend(
                transition.map(|ns| seconds((times.total_ns + times.count * ns) as f64 / 1e9)),
            );
            rows.push(row);
        }
    }
    let columns = ["guest", "reason", "times", "in all", "of the time", "p50", "p99", "longest"];
    let columns = columns.into_iter().chain(transition.map(|_| "in all with transitions"));
    let exact = "p50 and p99 within an eighth from 40 ns to 2 minutes; the longest since the guest \
                 is watched";
    let mut notes = vec![exact.to_owned()];
    notes.extend(transition.map(|ns| {
        format!(
            "a transition, the way out of the guest and back into it, takes {} more for each exit, \
             measured with a guest of the watch's own; only the last column has it",
            seconds(ns as f64 / 1e9)
        )
    }));
    (!rows.is_empty()).then(|| Table {
        title: "Out of the guest, from exit to entry, all vCPUs together".to_owned(),
        common: String::new(),
        columns: columns.map(str::to_owned).collect(),
        labels: 2,
        rows,
        notes,
    })
}

fn cells(times: &Times, of: f64) -> [String; 6] {
    let quantile = |share| seconds(times.quantile(share).unwrap_or_default().as_secs_f64());
    let all = times.total_ns as f64 / 1e9;
    let share = if of > 0.0 { format!("{:.1} %", 100.0 * all / of) } else { String::new() };
    [
        thousands(times.count.try_into().unwrap_or(i64::MAX)),
        seconds(all),
        share,
        quantile(0.5),
        quantile(0.99),
        seconds(times.longest_ns as f64 / 1e9),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::fake::guest;

    #[test]
    fn stalls_are_shown_by_reason_and_only_for_stalled_guests() {
        let mut one = guest("qemu");
        assert!(table(&[&one], Some(800)).is_none());
        let mut times = Times::default();
        (times.count, times.total_ns, times.longest_ns) = (2000, 500_000_000, 3_000_000);
        one.stalls.insert(Why::FaultWrite, times);
        let with = table(&[&one], Some(800)).unwrap();
        assert!(with.rows[0][8].starts_with("502") && with.columns.len() == 9, "{with:?}");
        let table = table(&[&one, &guest("other")], None).unwrap();
        assert_eq!(table.columns.len(), 8);
        assert_eq!(table.rows.len(), 1);
        let row = &table.rows[0];
        assert_eq!((&*row[1], &*row[2], &*row[4]), ("faults of writes", "2,000", "25.0 %"));
        assert!(row[3].contains("500") && row[7].contains('3'), "{row:?}");
    }
}
