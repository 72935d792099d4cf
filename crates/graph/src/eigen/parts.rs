//! Strongly connected parts: a matrix is block triangular in their order, so that its eigenvalues are those of its parts.

use crate::{Dense, LinearOperator};

/// The parts of the graph whose edges are the entries that are not zero, by Tarjan's algorithm. Of a triangular matrix each token is one.
pub(super) fn strongly_connected(m: &Dense) -> Vec<Vec<usize>> {
    let n = m.len();
    let mut search = Search {
        order: vec![None; n],
        lowest: vec![0; n],
        open: Vec::new(),
        is_open: vec![false; n],
        parts: Vec::new(),
    };
    let mut seen = 0;
    for root in 0..n {
        if search.order[root].is_some() {
            continue;
        }
        // A stack of its own: paths are as long as there are tokens. Each with the next column to look at.
        let mut path = vec![(root, 0)];
        while let Some((token, column)) = path.pop() {
            if column == 0 {
                search.enter(token, seen);
                seen += 1;
            }
            let next = (column..n).find(|&to| m.row(token)[to] != 0.0 && search.leads_on(token, to));
            match next {
                Some(to) => path.extend([(token, to + 1), (to, 0)]),
                None => {
                    search.leave(token);
                    if let Some(&(before, _)) = path.last() {
                        search.lowest[before] = search.lowest[before].min(search.lowest[token]);
                    }
                }
            }
        }
    }
    search.parts
}

/// How far a depth-first search has come.
struct Search {
    order: Vec<Option<usize>>,
    /// The earliest token that each leads back to.
    lowest: Vec<usize>,
    /// Tokens whose part is not complete.
    open: Vec<usize>,
    is_open: Vec<bool>,
    parts: Vec<Vec<usize>>,
}

impl Search {
    fn enter(&mut self, token: usize, number: usize) {
        (self.order[token], self.lowest[token], self.is_open[token]) = (Some(number), number, true);
        self.open.push(token);
    }

    /// Whether an edge leads to a token that has not been seen; one that is open is noted.
    fn leads_on(&mut self, from: usize, to: usize) -> bool {
        match self.order[to] {
            None => true,
            Some(number) => {
                if self.is_open[to] {
                    self.lowest[from] = self.lowest[from].min(number);
                }
                false
            }
        }
    }

    /// Completes the part that begins with a token, where one does.
    fn leave(&mut self, token: usize) {
        if self.order[token] != Some(self.lowest[token]) {
            return;
        }
        let first = self.open.iter().rposition(|&open| open == token).unwrap_or(0);
        let part = self.open.split_off(first);
        part.iter().for_each(|&member| self.is_open[member] = false);
        self.parts.push(part);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_that_lead_to_each_other() {
        let edges = [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 3), (5, 5), (0, 6)];
        let m = Dense::from_fn(7, |i, j| f64::from(u8::from(edges.contains(&(i, j)))));
        let mut parts = strongly_connected(&m);
        parts.iter_mut().for_each(|part| part.sort_unstable());
        parts.sort();
        assert_eq!(parts, [vec![0, 1, 2], vec![3, 4], vec![5], vec![6]]);
        let cycle = Dense::from_fn(3000, |i, j| f64::from(u8::from((i + 1) % 3000 == j)));
        assert_eq!(strongly_connected(&cycle).len(), 1);
        assert!(strongly_connected(&Dense::from_fn(0, |_, _| 0.0)).is_empty());
    }
}
