//! The screen that the main job prints: a table of what guests pay, and a table of what the ideas
//! could save. report.html has all tables.

use crate::ideas;
use crate::kvm::logged;
use slat_lab::record::Report;
use slat_lab::report::text;
use std::fmt::Write;
use std::path::Path;

/// Returns the screen of a report in this folder, in lines of at most `width` columns where the
/// tables can be made to fit.
pub fn render(report: &Report, folder: &Path, width: u16) -> String {
    let mut screen = String::new();
    text::header(&mut screen, report, width);
    let guests = logged::table(&report.results);
    for table in guests.iter().cloned().chain(ideas::table(&report.results)) {
        text::grid(&mut screen, &table, width);
    }
    text::skipped(&mut screen, &report.skipped, width);
    if guests.is_some() {
        let explain = format!("slat explain {}", folder.display());
        let next = [
            ("slat tune dirty-log", "which way of logging stalls least"),
            ("slat bench migrate", "what a migration costs"),
            (&*explain, "where the time of these guests went"),
            ("slat doctor", "what else this host could measure"),
        ];
        let widest = next.iter().map(|(command, _)| command.len()).max().unwrap_or(0);
        screen += "\nNext\n";
        for (command, what) in next {
            let _ = writeln!(screen, "  {command:widest$}  {what}");
        }
    }
    screen
}
