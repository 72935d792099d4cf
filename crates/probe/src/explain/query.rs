//! What a chosen place looks at.

use std::{fmt, str::FromStr};

use resolvent_lab::{Error, Result};

use super::{LayerAttention, LayerMaps, QueryRow};
use crate::subject::LayerCall;

/// A place that is asked for: of a picture by row and column on the grid of the scored layer, of a text by the token's number. From 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Query {
    /// Row and column.
    Place([usize; 2]),
    /// Number of a token.
    Token(usize),
}

impl FromStr for Query {
    type Err = String;

    /// Reads `ROW,COLUMN` or `TOKEN`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |text: &str| text.trim().parse().ok().filter(|&n: &usize| n > 0);
        let parts: Option<Vec<usize>> = text.split(',').map(number).collect();
        match parts.as_deref() {
            Some(&[row, column]) => Ok(Self::Place([row, column])),
            Some(&[token]) => Ok(Self::Token(token)),
            _ => Err("give a picture's place as ROW,COLUMN or a text's token by its number, counted from 1".into()),
        }
    }
}

impl fmt::Display for Query {
    /// `row 3, column 5` or `token 7`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Place([row, column]) => write!(f, "row {row}, column {column}"),
            Self::Token(token) => write!(f, "token {token}"),
        }
    }
}

impl Query {
    /// Its place on a layer of `places` places on `grid`; `scored` is the grid that it is counted on.
    fn place(
        self,
        places: usize,
        grid: Option<[usize; 2]>,
        scored: Option<[usize; 2]>,
    ) -> std::result::Result<usize, String> {
        match (self, grid.zip(scored)) {
            (Self::Place([row, column]), Some(([rows, columns], [high, wide]))) => {
                if row > high || column > wide {
                    return Err(format!("is {self}, and the layer has {high} rows and {wide} columns"));
                }
                // A pyramid's other layers have grids of their own: the cell that holds the middle of this one.
                let at = |place: usize, of: usize, on: usize| (2 * place - 1) * on / (2 * of);
                Ok(at(row, high, rows) * columns + at(column, wide, columns))
            }
            (Self::Token(token), None) if token <= places => Ok(token - 1),
            (Self::Token(_), None) => Err(format!("is {self}, and the text has {places} tokens")),
            (Self::Token(_), Some(_)) => Err("names a token, and this is a picture; give ROW,COLUMN".into()),
            (Self::Place(_), None) => {
                Err("names a row and a column, and this is a text; give the number of a token".into())
            }
        }
    }

    /// What it looks at in every layer; `scored` is the layer whose grid it is counted on.
    ///
    /// # Errors
    /// [`Error::Recipe`] for a place that is not there, [`Error::Kernels`].
    pub(super) fn rows(
        self,
        calls: &[LayerCall],
        layers: &[LayerAttention<'_>],
        scored: usize,
    ) -> Result<Vec<QueryRow>> {
        let row = |(call, layer): (&LayerCall, &LayerAttention<'_>)| {
            let places = call.shape.seq_q - usize::from(call.place.class_token);
            let refused = |problem| Error::Recipe { file: "explanation".into(), field: "query".into(), problem };
            let place = self.place(places, call.place.grid, calls[scored].place.grid).map_err(refused)?;
            let heads = layer.row(place)?;
            let mean =
                (0..places).map(|at| heads.iter().map(|head| head[at]).sum::<f32>() / heads.len() as f32).collect();
            Ok(QueryRow {
                place,
                maps: LayerMaps { layer: call.place.name.clone(), grid: call.place.grid, mean, heads },
            })
        };
        calls.iter().zip(layers).map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_found() {
        assert_eq!(
            ["3,5", " 2 , 1", "7"].map(str::parse),
            [Query::Place([3, 5]), Query::Place([2, 1]), Query::Token(7)].map(Ok)
        );
        for wrong in ["", "0", "1,0", "1,2,3", "a"] {
            assert!(wrong.parse::<Query>().is_err(), "{wrong}");
        }
        let (large, small) = (Some([8, 8]), Some([4, 4]));
        assert_eq!(Query::Place([3, 5]).place(64, large, large), Ok(20));
        assert_eq!(Query::Place([3, 5]).place(16, small, large), Ok(6), "the cell that it lies in");
        assert_eq!(Query::Place([4, 1]).place(64, large, small), Ok(7 * 8 + 1));
        assert_eq!(Query::Token(2).place(5, None, None), Ok(1));
        for (query, grid) in [
            (Query::Token(6), None),
            (Query::Token(1), large),
            (Query::Place([1, 1]), None),
            (Query::Place([9, 1]), large),
        ] {
            assert!(query.place(5, grid, grid).is_err(), "{query}");
        }
    }
}
