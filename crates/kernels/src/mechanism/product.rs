//! The product of all kinds: what there is to compose.

use serde_json::{Map, Value};

use super::{DotExp, Mechanism, Normalisation, Score, Series, Structure};
use crate::Result;

impl Mechanism {
    /// Every combination of a score, a structure, a normalisation and a series, by their kinds, in the order of the tables.
    pub fn kinds() -> impl Iterator<Item = [&'static str; 4]> {
        let last = |score, structure| {
            Normalisation::KINDS.into_iter().flat_map(move |normalisation| {
                Series::KINDS.into_iter().map(move |series| [score, structure, normalisation, series])
            })
        };
        Score::KINDS
            .into_iter()
            .flat_map(move |score| Structure::KINDS.into_iter().flat_map(move |structure| last(score, structure)))
    }

    /// The values of these kinds with their defaults, whether or not they go together: [`Mechanism::refused`] tells.
    ///
    /// ```
    /// use resolvent_kernels::Mechanism;
    /// let refused = |kinds| Mechanism::of_kinds(kinds).unwrap().refused();
    /// assert!(refused(["levy", "clustered", "row", "resolvent"]).is_ok());
    /// assert!(refused(["dot-relu", "nystrom", "row", "one-hop"]).is_err()); // no inverse
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Config`] for a kind that is none.
    pub fn of_kinds([score, structure, normalisation, series]: [&str; 4]) -> Result<Self> {
        let kind = |kind: &str| Map::from_iter([("kind".to_owned(), Value::from(kind))]);
        Ok(Self {
            score: Score::from_fields(kind(score))?,
            structure: Structure::from_fields(kind(structure))?,
            normalisation: Normalisation::from_fields(kind(normalisation))?,
            series: Series::from_fields(kind(series))?,
            ..Self::new(DotExp::default())
        })
    }
}
