//! Which offer every head takes: the cheapest that is near enough, and cheaper ones where all together cost too much.

/// One candidate on one head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Offer {
    /// Its number among the candidates of the layer.
    pub candidate: usize,
    /// Its cost as a share of dense softmax's.
    pub cost: f64,
    /// How far it is from softmax; 0: not at all.
    pub distance: f64,
}

/// What a head can choose from.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choices {
    /// What the head costs with dense softmax, in the unit of all heads.
    weight: f64,
    /// The offers that none beats in both cost and distance: dearer ones are nearer. Dense softmax is the last.
    offers: Vec<Offer>,
}

impl Choices {
    /// Of `offers`, one of which is dense softmax with a cost of 1 and no distance.
    pub(super) fn new(weight: f64, mut offers: Vec<Offer>) -> Self {
        offers.retain(|offer| offer.cost.is_finite() && offer.distance.is_finite());
        offers.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.distance.total_cmp(&b.distance)));
        let mut nearest = f64::INFINITY;
        offers.retain(|offer| {
            let better = offer.distance < nearest;
            nearest = nearest.min(offer.distance);
            better
        });
        Self { weight, offers }
    }

    /// The number of the cheapest offer that is no farther than `limit`; dense softmax, where no other is.
    fn cheapest(&self, limit: f64) -> usize {
        self.offers.iter().position(|offer| offer.distance <= limit).unwrap_or(self.offers.len().saturating_sub(1))
    }
}

/// For every head the cheapest offer that is no farther than `limit`; then, where all cost more than the share `budget` of dense softmax,
/// cheaper ones where that loses the least for what it saves, until they do not or none is cheaper.
pub(super) fn choose(heads: &[Choices], limit: f64, budget: Option<f64>) -> Vec<Offer> {
    let mut taken: Vec<usize> = heads.iter().map(|head| head.cheapest(limit)).collect();
    let offer = |head: usize, taken: &[usize]| heads[head].offers[taken[head]];
    if let Some(budget) = budget {
        while share(heads, &(0..heads.len()).map(|head| offer(head, &taken)).collect::<Vec<_>>()) > budget {
            let steps = heads.iter().enumerate().flat_map(|(head, choices)| {
                let now = choices.offers[taken[head]];
                let step = move |(to, then): (usize, &Offer)| {
                    let saved = choices.weight * (now.cost - then.cost);
                    ((then.distance - now.distance) / saved, head, to)
                };
                choices.offers[..taken[head]].iter().enumerate().map(step)
            });
            let Some((_, head, to)) = steps.min_by(|a, b| a.0.total_cmp(&b.0)) else { break };
            taken[head] = to;
        }
    }
    (0..heads.len()).map(|head| offer(head, &taken)).collect()
}

/// What `taken` cost together, as a share of dense softmax.
pub(super) fn share(heads: &[Choices], taken: &[Offer]) -> f64 {
    let all: f64 = heads.iter().map(|head| head.weight).sum();
    heads.iter().zip(taken).map(|(head, offer)| head.weight * offer.cost).sum::<f64>() / all.max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(candidate: usize, cost: f64, distance: f64) -> Offer {
        Offer { candidate, cost, distance }
    }

    fn head(weight: f64) -> Choices {
        let all = [(0, 1.0, 0.0), (1, 0.5, 0.01), (2, 0.6, 0.02), (3, 0.2, 0.1), (4, 1.4, 0.0), (5, 0.1, f64::NAN)];
        Choices::new(weight, all.map(|(candidate, cost, distance)| offer(candidate, cost, distance)).to_vec())
    }

    fn candidates(taken: &[Offer]) -> Vec<usize> {
        taken.iter().map(|offer| offer.candidate).collect()
    }

    #[test]
    fn the_cheapest_that_is_near_enough() {
        let heads = [head(1.0)];
        for (limit, candidate) in [(0.0, 0), (0.009, 0), (0.01, 1), (0.05, 1), (0.1, 3), (1.0, 3)] {
            assert_eq!(candidates(&choose(&heads, limit, None)), [candidate], "{limit}");
        }
        // What is dearer and no nearer, and what has no distance, is never taken.
        assert_eq!(candidates(&heads[0].offers), [3, 1, 0]);
    }

    /// From dense, the step to half of the cost loses .02 for each share saved; the next .3.
    #[test]
    fn a_budget_takes_first_what_loses_least() {
        let heads = [head(1.0), head(3.0)];
        for (budget, expected) in
            [(1.0, [0, 0]), (0.7, [0, 1]), (0.5, [1, 1]), (0.3, [1, 3]), (0.2, [3, 3]), (0.01, [3, 3])]
        {
            let taken = choose(&heads, 0.0, Some(budget));
            assert_eq!(candidates(&taken), expected, "{budget}");
            assert!(share(&heads, &taken) <= budget.max(0.2) + 1e-12);
        }
        assert_eq!(share(&[], &[]), 0.0);
    }
}
