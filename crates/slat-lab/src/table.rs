//! A table, independent of how it is printed.

/// The content of a cell without a value.
pub const NOTHING: &str = "–";

/// A table, independent of how it is printed.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Title of the table.
    pub title: String,
    /// The parameters that all rows have in common.
    pub common: String,
    /// Names of the columns. The first [`Table::labels`] of them name a row.
    pub columns: Vec<String>,
    /// Number of columns that are labels; the others hold numbers.
    pub labels: usize,
    /// The cells of each row, one for each column.
    pub rows: Vec<Vec<String>>,
    /// Notes on how to read it.
    pub notes: Vec<String>,
}
