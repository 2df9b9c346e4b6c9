//! A table, before anybody prints it.

/// What a cell holds where there is nothing to say.
pub const NOTHING: &str = "–";

/// A table, before anybody prints it.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// What all rows have in common.
    pub common: String,
    /// Names of the columns. The first [`Table::labels`] of them say what a row is about.
    pub columns: Vec<String>,
    /// How many columns are labels; the others hold numbers.
    pub labels: usize,
    /// The cells, as many in each row as there are columns.
    pub rows: Vec<Vec<String>>,
    /// How to read it.
    pub notes: Vec<String>,
}
