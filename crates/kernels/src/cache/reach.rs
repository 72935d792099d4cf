//! Which of the tokens so far a query sees.

use std::ops::Range;

use crate::{
    Mechanism,
    mechanism::{Dense, Form, Normalisation, Series, Structure},
};

/// Sums over keys are f32 from one multiple of it to the next, and f64 from there on: pieces of a past that break at multiples alone give
/// the same bits wherever they lie.
pub(super) const CHUNK: usize = 16;

/// The tokens that a query sees: those so far, or the nearest and the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reach {
    window: Option<usize>,
    sinks: usize,
}

/// How many slots hold all that a query can see, however many tokens there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slots {
    /// Those of the first tokens, which stay.
    pub pinned: usize,
    /// Those of the last, which are used again and again.
    pub ring: usize,
    window: usize,
}

impl Reach {
    pub fn of(mechanism: &Mechanism) -> Self {
        let Dense { window, sinks } = mechanism.window();
        Self { window, sinks: window.map_or(0, |_| sinks) }
    }

    /// The positions that the query at one of them sees.
    pub fn visible(&self, at: usize) -> [Range<usize>; 2] {
        let (low, end) = (self.low(at), at + 1);
        if low <= self.sinks { [0..end, end..end] } else { [0..self.sinks, low..end] }
    }

    /// The first position in the window of the query at one of them.
    pub fn low(&self, at: usize) -> usize {
        self.window.map_or(0, |window| (at + 1).saturating_sub(window))
    }

    /// How many first positions every later query sees beside its window; none where it sees all.
    pub fn sinks(&self) -> usize {
        self.sinks
    }

    /// The slots of a window, whole chunks; none without one, and where no machine has as many.
    pub fn slots(&self) -> Option<Slots> {
        let window = self.window.filter(|&window| window.max(self.sinks) < usize::MAX >> 2)?;
        let ring = (window + CHUNK - 1).next_multiple_of(CHUNK);
        Some(Slots { pinned: self.sinks.next_multiple_of(CHUNK), ring, window })
    }
}

impl Slots {
    pub fn all(&self) -> usize {
        self.pinned + self.ring
    }

    /// The slot of a position.
    pub fn of(&self, position: usize) -> usize {
        if position < self.pinned { position } else { self.pinned + (position - self.pinned) % self.ring }
    }

    /// How many tokens may be written from `position` on before the first of them is a query, so that nothing that it sees is lost.
    pub fn at_once(&self, position: usize) -> usize {
        (self.ring - self.window + 1).max(self.all().saturating_sub(position))
    }

    /// Whether a position is still there once those below `end` are written.
    pub fn outlasts(&self, position: usize, end: usize) -> bool {
        position < self.pinned || position + self.ring >= end
    }
}

/// Whether the past of a mechanism is its keys and values as they come: each row is one hop over pairs, and depends on its own query alone,
/// or, of a norm, on a sum over the rows so far.
pub(super) fn keeps_rows(mechanism: &Mechanism) -> bool {
    let pairs = matches!(mechanism.structure, Structure::Dense(_));
    pairs && (mechanism.is_row_local() || matches!(mechanism.own(), Some(Form::Infsa(_))))
}

/// Whether rows are divided by a norm of those so far, so that no row can be left out.
pub(super) fn sums_over_rows(mechanism: &Mechanism) -> bool {
    matches!(mechanism.normalisation, Normalisation::Frobenius(_))
}

/// Why a dense composition that does not keep its rows cannot.
pub(super) fn why_not(m: &Mechanism) -> Option<&'static str> {
    if !matches!(m.structure, Structure::Dense(_)) {
        return None;
    }
    Some(match (&m.series, &m.normalisation) {
        (Series::OneHop(_), Normalisation::Row(row)) if row.density_exponent != 0.0 => {
            "densities are sums over later rows; set density_exponent to 0, or call the mechanism on the sequence so far"
        }
        (Series::OneHop(_), Normalisation::Row(_) | Normalisation::None(_)) => {
            "a bias by pair or on a grid is of a whole call; use alibi or buckets, or call the mechanism on the sequence so far"
        }
        (Series::OneHop(_), Normalisation::Whitened(_)) => {
            "weights that are centred, whitened or shifted are of a whole row; set all three to none for normalisation none, or call the \
             mechanism on the sequence so far"
        }
        (Series::OneHop(_), _) => {
            "its rows depend on other queries; use normalisation row or none, or call the mechanism on the sequence so far"
        }
        _ => "only one hop is decoded row by row; call the mechanism on the sequence so far, and take the last row",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_holds_what_every_query_sees() {
        for (window, sinks) in [(1, 0), (1, 3), (5, 0), (16, 16), (17, 1), (40, 20)] {
            let reach = Reach { window: Some(window), sinks };
            let slots = reach.slots().unwrap();
            assert!(slots.all() <= window + sinks + 3 * CHUNK);
            let mut held = vec![usize::MAX; slots.all()];
            let mut len = 0;
            while len < 300 {
                let new = slots.at_once(len);
                (len..len + new).for_each(|position| held[slots.of(position)] = position);
                for at in len..len + new {
                    for position in reach.visible(at).into_iter().flatten() {
                        assert_eq!(held[slots.of(position)], position, "{window}, {sinks}: {at} sees {position}");
                    }
                }
                len += new;
            }
            assert!((0..len).all(|x| slots.outlasts(x, len) == (held[slots.of(x)] == x)));
        }
    }

    #[test]
    fn what_is_seen_is_in_the_window_or_a_sink() {
        for (window, sinks) in [(None, 0), (Some(1), 0), (Some(4), 0), (Some(4), 2), (Some(100), 3)] {
            let reach = Reach { window, sinks };
            for at in 0..30 {
                let expected: Vec<usize> =
                    (0..=at).filter(|&j| window.is_none_or(|w| at - j < w || j < sinks)).collect();
                assert_eq!(reach.visible(at).into_iter().flatten().collect::<Vec<_>>(), expected);
            }
        }
    }
}
