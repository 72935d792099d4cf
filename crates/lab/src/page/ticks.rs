//! Where the ticks of an axis are, and what they are called.

/// About five round numbers that cover `low..=high`.
pub fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = if high > low { high - low } else { low.abs().max(1.0) };
    let rough = span / 4.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|m| m * power).into_iter().find(|&s| s >= rough * 0.999).unwrap_or(rough);
    let (first, last) = ((low / step).floor() as i64, ((low + span) / step).ceil() as i64);
    (first..=last).map(|i| i as f64 * step).collect()
}

/// The shortest text that tells ticks `step` apart.
fn tick_label(value: f64, step: f64, percent: bool) -> String {
    let scale = if percent { 100.0 } else { 1.0 };
    let digits = (-(step * scale).log10()).ceil().clamp(0.0, 4.0) as usize;
    let text = format!("{:.digits$}", value * scale);
    // 2.5 apart needs one digit more than its power of ten says.
    let exact = |text: &str| text.parse::<f64>().is_ok_and(|x| (x - value * scale).abs() < step * scale * 1e-3);
    let text = if exact(&text) { text } else { format!("{:.*}", digits + 1, value * scale) };
    if percent { text + " %" } else { text }
}

/// As many of the names as have room, without the pieces that all begin or end with, and cut to twelve characters.
pub fn named(names: &[&str]) -> Vec<(f64, String)> {
    const MOST: usize = 12;
    let pieces: Vec<Vec<&str>> = names.iter().map(|name| name.split('.').collect()).collect();
    let least = pieces.iter().map(Vec::len).min().unwrap_or(1) - 1;
    let same = |at: &dyn Fn(&[&'_ str]) -> String| pieces.iter().all(|own| at(own) == at(&pieces[0]));
    let front = (0..least).take_while(|&n| same(&|own| own[n].into())).count();
    let back = (0..least - front).take_while(|&n| same(&|own| own[own.len() - 1 - n].into())).count();
    let short = |own: &Vec<&str>| own[front..own.len() - back].join(".").chars().take(MOST).collect::<String>();
    let labels: Vec<String> = pieces.iter().map(short).collect();
    let widest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(1);
    let places: Vec<f64> = (0..names.len()).map(|at| at as f64).collect();
    // What fits under an axis, in characters and the gaps between labels.
    thinned(&places, 44 / (widest + 2)).into_iter().map(|at| (at, labels[at as usize].clone())).collect()
}

/// Powers of ten between `low` and `high`, which are above 0, at most `most`; where fewer than three lie there, their double and fivefold too.
pub fn log_ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let within = |steps: &[f64]| -> Vec<f64> {
        let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let all = powers.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
        all.filter(|tick| (low * 0.999..=high * 1.001).contains(tick)).collect()
    };
    let powers = within(&[1.0]);
    thinned(&if powers.len() < 3 { within(&[1.0, 2.0, 5.0]) } else { powers }, most)
}

/// At most so many of the ticks, the last among them.
pub fn thinned(ticks: &[f64], most: usize) -> Vec<f64> {
    let step = ticks.len().div_ceil(most).max(1);
    let mut kept: Vec<_> = ticks.iter().rev().step_by(step).copied().collect();
    kept.reverse();
    kept
}

/// `65536` as `64k`, `331776` as `332k`: thousands of 1024 where that is exact.
pub fn compact(x: f64) -> String {
    match x {
        x if x >= 1024.0 && x % 1024.0 == 0.0 => format!("{}k", x / 1024.0),
        x if x >= 10_000.0 => format!("{:.0}k", x / 1e3),
        x => x.to_string(),
    }
}

/// Evenly spaced ticks with their labels.
pub fn labelled(ticks: &[f64], percent: bool) -> Vec<(f64, String)> {
    let step = ticks[1] - ticks[0];
    ticks.iter().map(|&tick| (tick, tick_label(tick, step, percent))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.5, 5.0, 7.5, 10.0]);
        assert_eq!(ticks(0.0, 937.0), [0.0, 250.0, 500.0, 750.0, 1000.0]);
        for (low, high) in [(0.1, 2.31), (-3.0, 7.0), (0.86, 0.91), (5.0, 5.0), (0.0, 0.0)] {
            let ticks = ticks(low, high);
            assert!((3..=8).contains(&ticks.len()), "{low} {high} {ticks:?}");
            assert!(ticks[0] <= low && high <= ticks[ticks.len() - 1], "{low} {high} {ticks:?}");
        }
        assert_eq!(tick_label(0.875, 0.025, true), "87.5 %");
        assert_eq!(tick_label(2.5, 2.5, false), "2.5");
        assert_eq!(tick_label(1000.0, 250.0, false), "1000");
    }

    #[test]
    fn ticks_of_shares_are_powers_of_ten_or_between() {
        assert_eq!(log_ticks(2e-4, 0.99, 7), [0.001, 0.01, 0.1]);
        assert_eq!(log_ticks(0.04, 1.0, 7), [0.05, 0.1, 0.2, 0.5, 1.0]);
        assert!(log_ticks(1e-30, 1.0, 7).len() <= 7);
    }

    /// What all names share says nothing.
    #[test]
    fn names_are_shortened() {
        let many: Vec<String> = (0..48).map(|layer| format!("encoder.layers.{layer}.attention")).collect();
        let labels = named(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert!((5..=11).contains(&labels.len()) && labels[labels.len() - 1] == (47.0, "47".into()), "{labels:?}");
        assert_eq!(named(&["q"]), [(0.0, "q".into())]);
    }
}
