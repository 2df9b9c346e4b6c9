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

impl Table {
    /// Creates a table without parameters in common and without notes. `|` divides the names of its
    /// columns, of which the first `labels` name a row.
    pub fn new(
        title: impl Into<String>,
        labels: usize,
        columns: &str,
        rows: impl IntoIterator<Item = Vec<String>>,
    ) -> Self {
        Self {
            title: title.into(),
            common: String::new(),
            columns: columns.split('|').map(str::to_owned).collect(),
            labels,
            rows: rows.into_iter().collect(),
            notes: Vec::new(),
        }
    }

    /// Adds a note.
    pub fn noting(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// Returns the table, if it has a row.
    pub fn some(self) -> Option<Self> {
        (!self.rows.is_empty()).then_some(self)
    }
}
