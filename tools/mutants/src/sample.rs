//! Which mutants are tried.

use std::collections::BTreeMap;

use crate::find::Mutant;

/// How many files they are in.
pub fn files(mutants: &[Mutant]) -> usize {
    let mut files = mutants.iter().map(|mutant| &mutant.file).collect::<Vec<_>>();
    files.dedup();
    files.len()
}

/// `count` of `mutants` by `seed`, from every file its share, in the order of the files.
pub fn spread(mutants: Vec<Mutant>, count: usize, seed: u64) -> Vec<Mutant> {
    let mut by_file = BTreeMap::<String, Vec<Mutant>>::new();
    mutants.into_iter().for_each(|mutant| by_file.entry(mutant.file.clone()).or_default().push(mutant));
    let mut random = Random(seed);
    let mut ranked = Vec::new();
    for mutants in by_file.into_values() {
        let (len, offset) = (mutants.len() as f64, random.unit());
        let mut mutants = mutants.into_iter().map(|mutant| (random.unit(), mutant)).collect::<Vec<_>>();
        mutants.sort_by(|a, b| a.0.total_cmp(&b.0));
        // The smallest ranks of all files together take an equal part of each.
        ranked.extend(mutants.into_iter().enumerate().map(|(n, (_, mutant))| ((n as f64 + offset) / len, mutant)));
    }
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut chosen = ranked.into_iter().take(count).map(|(_, mutant)| mutant).collect::<Vec<_>>();
    chosen.sort_by(|a, b| (&a.file, a.range.start).cmp(&(&b.file, b.range.start)));
    chosen
}

/// Numbers by the SplitMix64 generator.
struct Random(u64);

impl Random {
    /// In [0, 1).
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
