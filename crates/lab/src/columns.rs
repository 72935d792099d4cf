//! Tables of plain text, as commands print them.

use std::fmt;

/// So many of a thing: `1 step`, `2 steps`.
pub fn counted(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// Where the cells of a column stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// At its left edge: words.
    Left,
    /// At its right edge: numbers.
    Right,
}

/// Rows of cells in columns that are as wide as their widest cell, two spaces apart.
///
/// ```
/// use resolvent_lab::columns::{Align::{Left, Right}, Columns};
/// let mut table = Columns::new([(Left, "mechanism"), (Right, "ms")]);
/// table.row(["softmax".into(), "12.5".into()]);
/// assert_eq!(table.to_string(), "mechanism    ms\nsoftmax    12.5\n");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Columns {
    aligns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Columns {
    /// A table with these columns and headings.
    pub fn new<T: Into<String>>(columns: impl IntoIterator<Item = (Align, T)>) -> Self {
        let (aligns, headings) = columns.into_iter().map(|(align, heading)| (align, heading.into())).unzip();
        Self { aligns, rows: vec![headings] }
    }

    /// Adds a row; cells that it lacks at its end are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Columns {
    /// A line per row, without spaces at its end.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.aligns.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, &width), align) in row.iter().zip(&widths).zip(&self.aligns) {
                line += &match align {
                    Align::Left => format!("{cell:<width$}  "),
                    Align::Right => format!("{cell:>width$}  "),
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Align::{Left, Right},
        Columns,
    };

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Columns::new([(Left, "name"), (Right, "value ± std"), (Left, "")]);
        table.row(["a longer name".into(), "1.0 ± 0.5".into(), "with words".into()]);
        table.row(["b".into()]);
        let expected = "name           value ± std\na longer name    1.0 ± 0.5  with words\nb\n";
        assert_eq!(table.to_string(), expected);
    }
}
