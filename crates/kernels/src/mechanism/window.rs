//! The windows that landmarks are made from: a range of tokens per axis.

use std::ops::Range;

use super::{Landmarks, PoolWindows};

/// One axis cut into windows.
#[derive(Debug, Clone, Copy)]
struct Axis {
    tokens: usize,
    windows: usize,
    /// Tokens of the longest window.
    side: usize,
    /// Whether windows are of as equal lengths as can be, or of `side` tokens.
    even: bool,
}

impl Axis {
    /// Windows of `side` tokens; `partial`: whether what is left at the end is one too, or dropped.
    fn of_side(tokens: usize, side: usize, partial: bool) -> Self {
        let windows = if partial { tokens.div_ceil(side) } else { tokens / side };
        Self { tokens, windows, side, even: false }
    }

    /// So many windows, of which none is empty where there are as many tokens.
    fn of_count(tokens: usize, windows: usize) -> Self {
        Self { tokens, windows, side: tokens.div_ceil(windows), even: true }
    }

    fn range(self, window: usize) -> Range<usize> {
        let Self { tokens, windows, side, even } = self;
        // floor(i tokens / windows) in two parts, of which no product leaves the machine's numbers.
        let even_start = |i: usize| i * (tokens / windows) + i * (tokens % windows) / windows;
        if even { even_start(window)..even_start(window + 1) } else { window * side..((window + 1) * side).min(tokens) }
    }
}

/// The windows of a sequence or a grid, row by row. They tile it from the first token on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    rows: Axis,
    cols: Axis,
}

impl Windows {
    /// Windows of `ratio` tokens a side; `partial`: whether those at the far edges may be smaller, or are dropped.
    fn of_ratio(tokens: usize, grid: Option<[usize; 2]>, ratio: usize, partial: bool) -> Self {
        let [height, width] = grid.unwrap_or([1, tokens]);
        // A sequence is one row, whatever the ratio.
        let rows = if grid.is_some() { Axis::of_side(height, ratio, partial) } else { Axis::of_count(1, 1) };
        Self { rows, cols: Axis::of_side(width, ratio, partial) }
    }

    /// `count` windows, or one per token where there are no more tokens than that; `None` on a grid that has no room for any
    /// `a x b` of that number.
    fn of_count(tokens: usize, grid: Option<[usize; 2]>, count: usize) -> Option<Self> {
        let [height, width] = grid.unwrap_or([1, tokens]);
        let [rows, cols] = if count >= tokens { [height, width] } else { nearest_pair(count, [height, width])? };
        Some(Self { rows: Axis::of_count(height, rows), cols: Axis::of_count(width, cols) })
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.rows.windows * self.cols.windows
    }

    /// `(token, slot)` of window `w`: the slot is the place in a whole window, row by row.
    pub fn tokens(&self, w: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { rows, cols } = *self;
        let (down, across) = (rows.range(w / cols.windows), cols.range(w % cols.windows));
        let (top, left) = (down.start, across.start);
        let row = move |y: usize| across.clone().map(move |x| (y * cols.tokens + x, (y - top) * cols.side + x - left));
        down.flat_map(row)
    }
}

/// The rows and columns of `count` windows on a grid: of the pairs of which neither is longer than its axis, the one whose
/// aspect is nearest to the grid's on a logarithmic scale, of two as near the one with fewer rows.
fn nearest_pair(count: usize, [height, width]: [usize; 2]) -> Option<[usize; 2]> {
    // How far `a / b` is from `height / width`, as a fraction of at least one: exact, so that ties are ties.
    let stretch = |a: usize, b: usize| {
        let (x, y) = (a as u128 * width as u128, b as u128 * height as u128);
        (x.max(y), x.min(y))
    };
    let pairs = (1..=count.min(height)).filter(|a| count.is_multiple_of(*a)).map(|a| [a, count / a]);
    pairs.filter(|[_, b]| *b <= width).min_by(|x, y| {
        let ((high, low), (other_high, other_low)) = (stretch(x[0], x[1]), stretch(y[0], y[1]));
        (high * other_low).cmp(&(other_high * low))
    })
}

impl Landmarks {
    /// The slot that [`Landmarks::Stride`] would pick.
    pub(crate) const fn centre(ratio: usize, grid: bool) -> usize {
        let half = ratio / 2;
        if grid { half * ratio + half } else { half }
    }

    /// The windows that landmarks are made from, if they are; `None` also for a number of them that the grid has no room for.
    /// `partial`: whether a filter takes windows that it does not fill.
    pub(crate) fn windows(self, tokens: usize, grid: Option<[usize; 2]>, partial: bool) -> Option<Windows> {
        match self {
            Landmarks::Pool(PoolWindows::Ratio(ratio)) | Landmarks::Stride { ratio } => {
                Some(Windows::of_ratio(tokens, grid, ratio, true))
            }
            Landmarks::Pool(PoolWindows::Count(count)) => Windows::of_count(tokens, grid, count),
            Landmarks::Conv { ratio } => Some(Windows::of_ratio(tokens, grid, ratio, partial)),
            _ => None,
        }
    }

    /// `(token, slot)` of the tokens of every window that landmarks are made from, masked ones among them, window by window; the
    /// slot is the place in a whole window, row by row. `partial`: whether a filter ([`Landmarks::Conv`]) takes windows that it
    /// does not fill, as in `laplacian`. `None` for landmarks that are not made from windows, and for a number of them that the
    /// grid has no room for.
    pub fn members(self, tokens: usize, grid: Option<[usize; 2]>, partial: bool) -> Option<Vec<Vec<(usize, usize)>>> {
        let windows = self.windows(tokens, grid, partial)?;
        Some((0..windows.len()).map(|w| windows.tokens(w).collect()).collect())
    }

    /// How many landmarks there are for `tokens` tokens, dead ones included; `partial` as in [`Landmarks::windows`].
    pub(crate) fn count(self, tokens: usize, grid: Option<[usize; 2]>, partial: bool) -> usize {
        match self {
            Landmarks::Pool(_) | Landmarks::Conv { .. } | Landmarks::Stride { .. } => {
                self.windows(tokens, grid, partial).map_or(0, |windows| windows.len())
            }
            Landmarks::Random { count, .. } | Landmarks::First { count } => count,
            Landmarks::Given { count } => count.unwrap_or(0),
            Landmarks::All => tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Windows, nearest_pair};

    #[test]
    fn windows_tile_and_are_partial_or_dropped_at_the_edges() {
        let grid = Windows::of_ratio(15, Some([3, 5]), 2, true);
        assert_eq!((grid.rows.windows, grid.cols.windows), (2, 3));
        assert_eq!(Vec::from_iter(grid.tokens(1)), [(2, 0), (3, 1), (7, 2), (8, 3)]);
        assert_eq!(Vec::from_iter(grid.tokens(5)), [(14, 0)]);
        assert_eq!(Windows::of_ratio(15, Some([3, 5]), 2, false).len(), 2);
        let sequence = Windows::of_ratio(7, None, 3, true);
        assert_eq!(Vec::from_iter(sequence.tokens(2)), [(6, 0)]);
        assert_eq!(Windows::of_ratio(7, None, 3, false).len(), 2);
        assert_eq!(Windows::of_ratio(2, None, 3, true).len(), 1);
    }

    #[test]
    fn counted_windows_tile_any_length() {
        for tokens in 1..40 {
            for count in 1..45 {
                let windows = Windows::of_count(tokens, None, count).unwrap();
                assert_eq!(windows.len(), count.min(tokens));
                let starts = |i: usize| i * tokens / windows.len();
                for w in 0..windows.len() {
                    let expected = (starts(w)..starts(w + 1)).enumerate().map(|(slot, token)| (token, slot));
                    assert_eq!(Vec::from_iter(windows.tokens(w)), Vec::from_iter(expected), "{w} of {count}");
                }
            }
        }
    }

    #[test]
    fn the_windows_of_a_grid_have_its_aspect() {
        for (count, grid, pair) in [
            (49, [56, 56], [7, 7]),
            (12, [8, 8], [3, 4]),
            (2, [4, 4], [1, 2]),
            (12, [30, 10], [6, 2]),
            (12, [10, 30], [2, 6]),
            (6, [2, 9], [1, 6]),
            // Nearer ones do not fit.
            (7, [6, 7], [1, 7]),
            (12, [2, 7], [2, 6]),
        ] {
            assert_eq!(nearest_pair(count, grid), Some(pair), "{count} on {grid:?}");
        }
        assert_eq!(nearest_pair(7, [6, 6]), None);
        assert!(Windows::of_count(36, Some([6, 6]), 7).is_none());
        assert_eq!(Windows::of_count(36, Some([6, 6]), 37).unwrap().len(), 36);
        let grid = Windows::of_count(15, Some([3, 5]), 6).unwrap();
        assert_eq!(
            Vec::from_iter((0..6).map(|w| Vec::from_iter(grid.tokens(w).map(|t| t.0)))),
            [vec![0], vec![1, 2], vec![3, 4], vec![5, 10], vec![6, 7, 11, 12], vec![8, 9, 13, 14]]
        );
    }
}
