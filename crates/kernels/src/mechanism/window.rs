//! The windows that landmarks are made from.

use super::Landmarks;

/// The windows of a sequence or a grid, row by row. They tile it from the first token on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Windows {
    height: usize,
    width: usize,
    ratio: usize,
    /// Rows and columns of windows.
    pub rows: usize,
    pub cols: usize,
}

impl Windows {
    /// `partial`: whether windows at the far edges may be smaller, or are dropped.
    pub fn new(tokens: usize, grid: Option<[usize; 2]>, ratio: usize, partial: bool) -> Self {
        let [height, width] = grid.unwrap_or([1, tokens]);
        let count = |side: usize| if partial { side.div_ceil(ratio) } else { side / ratio };
        // A sequence is one row, whatever the ratio.
        let rows = if grid.is_some() { count(height) } else { 1 };
        Self { height, width, ratio, rows, cols: count(width) }
    }

    /// Number of windows.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// `(token, slot)` of window `w`: the slot is the place in a whole window, row by row.
    pub fn tokens(&self, w: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Self { height, width, ratio, cols, .. } = *self;
        let (top, left) = (w / cols * ratio, w % cols * ratio);
        let (bottom, right) = ((top + ratio).min(height), (left + ratio).min(width));
        let row = move |y: usize| (left..right).map(move |x| (y * width + x, (y - top) * ratio + x - left));
        (top..bottom).flat_map(row)
    }
}

impl Landmarks {
    /// The slot that [`Landmarks::Stride`] would pick.
    pub(crate) const fn centre(ratio: usize, grid: bool) -> usize {
        let half = ratio / 2;
        if grid { half * ratio + half } else { half }
    }

    /// How many landmarks there are for `tokens` tokens, dead ones included; `partial` as in [`Windows::new`].
    pub(crate) fn count(self, tokens: usize, grid: Option<[usize; 2]>, partial: bool) -> usize {
        match self {
            Landmarks::Pool { ratio } | Landmarks::Stride { ratio } => Windows::new(tokens, grid, ratio, true).len(),
            Landmarks::Conv { ratio } => Windows::new(tokens, grid, ratio, partial).len(),
            Landmarks::Random { count, .. } | Landmarks::First { count } => count,
            Landmarks::Given { count } => count.unwrap_or(0),
            Landmarks::All => tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Windows;

    #[test]
    fn windows_tile_and_are_partial_or_dropped_at_the_edges() {
        let grid = Windows::new(15, Some([3, 5]), 2, true);
        assert_eq!((grid.rows, grid.cols), (2, 3));
        assert_eq!(Vec::from_iter(grid.tokens(1)), [(2, 0), (3, 1), (7, 2), (8, 3)]);
        assert_eq!(Vec::from_iter(grid.tokens(5)), [(14, 0)]);
        assert_eq!(Windows::new(15, Some([3, 5]), 2, false).len(), 2);
        let sequence = Windows::new(7, None, 3, true);
        assert_eq!(Vec::from_iter(sequence.tokens(2)), [(6, 0)]);
        assert_eq!(Windows::new(7, None, 3, false).len(), 2);
        assert_eq!(Windows::new(2, None, 3, true).len(), 1);
    }
}
