//! Text and tables of a plan's cells, and of their states after a run.

use crate::numbers::several;
use crate::plan::cell::Cell;
use crate::plan::run::{Outcomes, State};
use crate::table::{NOTHING, Table};

/// Returns a line for each cell: its number and its command line.
pub fn list(cells: &[&Cell]) -> String {
    let width = cells.iter().map(|cell| cell.number.to_string().len()).max().unwrap_or(1);
    cells.iter().map(|cell| format!("{:>width$}  {}\n", cell.number, cell.line())).collect()
}

/// Returns the same as a table.
pub fn list_table(cells: &[&Cell]) -> Table {
    let row = |cell: &&Cell| vec![cell.number.to_string(), format!("`{}`", cell.line())];
    Table {
        title: "Cells".to_owned(),
        common: String::new(),
        columns: ["cell", "command line"].map(str::to_owned).into(),
        labels: 2,
        rows: cells.iter().map(row).collect(),
        notes: Vec::new(),
    }
}

/// Returns the number of cells in each state, and the directory of the reports.
pub fn summary(outcomes: &Outcomes) -> String {
    let of = |wanted: fn(&State) -> bool| outcomes.count(wanted);
    let mut parts = vec![format!("{} measured", of(|state| *state == State::Measured))];
    for (count, what) in [
        (of(|state| *state == State::AlreadyThere), "already there"),
        (of(|state| matches!(state, State::Failed { .. })), "failed"),
        (of(|state| *state == State::NotRun), "not run"),
    ] {
        if count > 0 {
            parts.push(format!("{count} {what}"));
        }
    }
    let cells = outcomes.cells.len();
    format!(
        "{}: {}; reports in {}",
        several(cells, "cell"),
        parts.join(", "),
        outcomes.directory.display()
    )
}

/// Returns a table of the cells that failed, if there are any.
pub fn failed(outcomes: &Outcomes) -> Option<Table> {
    let rows: Vec<_> = outcomes
        .cells
        .iter()
        .filter_map(|cell| match &cell.state {
            State::Failed { reason, exit_code } => Some(vec![
                cell.cell.to_string(),
                exit_code.map_or_else(|| NOTHING.to_owned(), |code| code.to_string()),
                cell.command.clone(),
                reason.clone(),
            ]),
            _ => None,
        })
        .collect();
    (!rows.is_empty()).then(|| Table {
        title: "Failed".to_owned(),
        common: String::new(),
        columns: ["cell", "exit code", "command line", "why"].map(str::to_owned).into(),
        labels: 4,
        rows,
        notes: vec![
            "What each of them said is in its cell-NNN.failed.json. The same command line tries \
             them again."
                .to_owned(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::run::Outcome;

    #[test]
    fn what_failed_is_listed_and_the_rest_is_counted() {
        let outcome = |cell, state| Outcome {
            cell,
            repeat: 1,
            command: format!("slat bench split --samples {cell}"),
            state,
        };
        let failed_state = State::Failed { reason: "no memory".to_owned(), exit_code: Some(1) };
        let outcomes = Outcomes {
            directory: "results".into(),
            cells: vec![
                outcome(1, State::Measured),
                outcome(2, failed_state),
                outcome(3, State::AlreadyThere),
                outcome(4, State::NotRun),
            ],
        };
        assert_eq!(
            summary(&outcomes),
            "4 cells: 1 measured, 1 already there, 1 failed, 1 not run; reports in results"
        );
        let rows = failed(&outcomes).unwrap().rows;
        assert_eq!(rows, [["2", "1", "slat bench split --samples 2", "no memory"]]);
    }
}
