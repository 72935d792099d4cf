//! The random numbers of plans, written a second time: SplitMix64 started at a state folded from seed and words.

pub(super) struct Stream {
    state: u64,
}

fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Stream {
    /// `words`: batch entry and head, stage, and what the stage draws for; for the projection the stage alone.
    pub fn new(seed: u64, words: &[u64]) -> Self {
        let mut state = mix(seed.wrapping_add(STEP));
        for word in words {
            state = mix(state ^ mix(word.wrapping_add(STEP)));
        }
        Self { state }
    }

    pub fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(STEP);
        (mix(self.state) >> 11) as f64 / 9_007_199_254_740_992.0
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64).floor() as usize
    }

    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// An index drawn by its weight: the first with a positive weight whose running sum exceeds the drawn share of all.
    pub fn pick(&mut self, weights: &[f64]) -> usize {
        let goal = self.uniform() * weights.iter().sum::<f64>();
        let (mut sum, mut last) = (0.0, 0);
        for (n, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            (sum, last) = (sum + weight, n);
            if sum > goal {
                return n;
            }
        }
        last
    }

    /// `count` distinct integers below `population`, ascending: Floyd's algorithm.
    pub fn distinct(&mut self, population: usize, count: usize) -> Vec<usize> {
        let mut chosen = Vec::new();
        for top in population - count..population {
            let n = self.below(top + 1);
            chosen.push(if chosen.contains(&n) { top } else { n });
        }
        chosen.sort_unstable();
        chosen
    }
}
