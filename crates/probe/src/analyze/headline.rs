//! An analysis in a sentence, and its mechanisms by rank.

use super::{Analysis, Finding, Numbers, Verdict};

impl Analysis {
    /// Which of the verdicts comes first, second, ...: softmax, then by the error of the output, then those without one.
    pub fn ranking(&self) -> Vec<usize> {
        let key = |at: &usize| {
            let verdict = &self.verdicts[*at];
            (verdict.finding != Finding::Baseline, verdict.numbers.error_median.unwrap_or(f64::INFINITY))
        };
        let mut order: Vec<usize> = (0..self.verdicts.len()).collect();
        order.sort_by(|a, b| key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)));
        order
    }

    /// What the analysis comes to.
    pub fn headline(&self) -> String {
        let order = self.ranking();
        let others = order[1..].iter().map(|&at| &self.verdicts[at]);
        let others: Vec<&Verdict> = others.filter(|verdict| verdict.finding != Finding::IsSoftmax).collect();
        let of = |finding| others.iter().copied().filter(|verdict| verdict.finding == finding).collect::<Vec<_>>();
        let (replace, some) = (of(Finding::Replaces), of(Finding::SomeHeads));
        let nearest = others.iter().find(|verdict| verdict.numbers.error_median.is_some());
        match (nearest, some.iter().max_by_key(|verdict| verdict.numbers.close_nearer)) {
            _ if !replace.is_empty() => replacing(&replace, self.causal),
            (Some(near), Some(most)) => {
                let Verdict { name, numbers: n, .. } = most;
                let all = n.heads + n.refused;
                let nearest = format!("nearest is {}, {}", near.name, off(&near.numbers));
                let than = than(near, self.causal);
                format!(
                    "Nothing replaces softmax in nine of ten heads here{than}; {name} does in {} of {all}; {nearest}. {FIT}",
                    n.close_nearer
                )
            }
            (Some(nearest), None) => {
                let than = than(nearest, self.causal);
                let Verdict { name, numbers, .. } = nearest;
                let (off, control) = (off(numbers), control(numbers, self.causal));
                format!("Nothing replaces softmax here{than}; nearest is {name}, {off}.{control} {FIT}")
            }
            (None, _) if others.is_empty() => self.verdicts[0].sentence.clone(),
            (None, _) => "Nothing can be compared with softmax here: the verdicts say why.".into(),
        }
    }
}

/// Where to go on from a verdict on defaults.
const FIT: &str =
    "Mechanisms are taken at their defaults: analyze --fit 0.99 looks for settings that do, head by head.";

/// Those that replace softmax, the nearest of them first.
fn replacing(replace: &[&Verdict], causal: bool) -> String {
    let time = |verdict: &Verdict| verdict.numbers.time_ratio.unwrap_or(f64::INFINITY);
    let nearest = replace[0];
    let fastest = replace.iter().copied().min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(nearest);
    let named = |verdict: &Verdict| format!("{}, {}", verdict.name, off(&verdict.numbers));
    let who = match replace.len() {
        1 => format!("{} can replace softmax here: {}", nearest.name, off(&nearest.numbers)),
        count if fastest.name == nearest.name => {
            format!("{count} mechanisms can replace softmax here; nearest and fastest is {}", named(nearest))
        }
        count => format!(
            "{count} mechanisms can replace softmax here; nearest is {}; fastest is {}",
            named(nearest),
            named(fastest)
        ),
    };
    let slow = if time(fastest) > 1.0 { ". None is faster than softmax on these tokens" } else { "" };
    format!("{who}{slow}.{}", control(&nearest.numbers, causal))
}

/// What nothing replaces softmax better than, where the nearest is close as the mean is.
fn than(nearest: &Verdict, causal: bool) -> String {
    match nearest.finding {
        Finding::LikeTheMean => format!(" better than the mean of {}", values(causal)),
        _ => String::new(),
    }
}

/// What the control is the mean of.
const fn values(causal: bool) -> &'static str {
    if causal { "the values so far" } else { "all values" }
}

/// What every replacement is held against.
fn control(n: &Numbers, causal: bool) -> String {
    let of = values(causal);
    let told = |mean: f64| format!(" The mean of {of}, which needs no attention, is {:.1} % off.", 100.0 * mean);
    n.mean_of_values.map_or_else(String::new, told)
}

/// `46.0 % off, 0.42 times softmax's time`.
fn off(n: &Numbers) -> String {
    let error = n.error_median.map_or_else(|| "?".into(), |error| format!("{:.1}", 100.0 * error));
    let time = n.time_ratio.map_or_else(String::new, |ratio| format!(" in {ratio:.2} times softmax's time"));
    format!("{error} % off{time}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use resolvent_lab::environment::Environment;

    fn verdict(name: &str, finding: Finding, error: Option<f64>, time: f64) -> Verdict {
        let numbers = Numbers {
            error_median: error,
            time_ratio: Some(time),
            heads: 10,
            close: 4,
            close_nearer: 4,
            ..Numbers::default()
        };
        Verdict { name: name.into(), mechanism: "softmax", finding, sentence: String::new(), numbers }
    }

    fn analysis(verdicts: Vec<Verdict>) -> Analysis {
        let (layers, unread, tallies, distances, listed, maps, commands) = Default::default();
        let (causal, full, cut, heads) = (false, false, 0, 0);
        let environment = Environment::current();
        let input = String::new();
        Analysis {
            input,
            layers,
            unread,
            cut,
            causal,
            full,
            verdicts,
            environment,
            commands,
            tallies,
            distances,
            listed,
            maps,
            heads,
        }
    }

    #[test]
    fn the_nearest_comes_first_and_is_named() {
        let softmax = || verdict("softmax", Finding::Baseline, Some(0.0), 1.0);
        let far = || verdict("uniform", Finding::NotHere, Some(0.8), 0.1);
        let lost = || verdict("soft", Finding::Refused, None, 0.0);
        let found = analysis(vec![softmax(), lost(), far(), verdict("ssa", Finding::NeedsTraining, Some(0.46), 2.0)]);
        assert_eq!(found.ranking(), [0, 3, 2, 1]);
        let told = "Nothing replaces softmax here; nearest is ssa, 46.0 % off in 2.00 times softmax's time.";
        assert_eq!(found.headline(), format!("{told} {FIT}"));
        let some = analysis(vec![softmax(), far(), verdict("ssa", Finding::SomeHeads, Some(0.2), 2.0)]);
        assert!(some.headline().contains("ssa does in 4 of 10"), "{}", some.headline());
        let near = |name, error, time| verdict(name, Finding::Replaces, Some(error), time);
        let two = analysis(vec![softmax(), near("local", 0.05, 0.3), near("ssa", 0.01, 2.0)]);
        assert!(two.headline().contains("nearest is ssa, 1.0 %") && two.headline().contains("fastest is local"));
        let slow = analysis(vec![softmax(), near("ssa", 0.01, 2.0)]);
        assert!(slow.headline().ends_with("None is faster than softmax on these tokens."), "{}", slow.headline());
        let mut told = verdict("ssa", Finding::Replaces, Some(0.01), 2.0);
        told.numbers.mean_of_values = Some(0.743);
        let causal = Analysis { causal: true, ..analysis(vec![softmax(), told]) }.headline();
        assert!(
            causal.ends_with("The mean of the values so far, which needs no attention, is 74.3 % off."),
            "{causal}"
        );
        let itself = || verdict("local", Finding::IsSoftmax, Some(0.0), 1.0);
        assert_eq!(
            analysis(vec![softmax(), itself(), lost()]).headline(),
            analysis(vec![softmax(), lost()]).headline()
        );
        let flat =
            analysis(vec![softmax(), itself(), verdict("ssa", Finding::LikeTheMean, Some(0.02), 2.0)]).headline();
        assert!(
            flat.starts_with("Nothing replaces softmax here better than the mean of all values; nearest is ssa"),
            "{flat}"
        );
        let both = vec![
            softmax(),
            verdict("uniform", Finding::LikeTheMean, Some(0.0), 2.0),
            verdict("ssa", Finding::SomeHeads, Some(0.2), 2.0),
        ];
        let both = analysis(both).headline();
        assert!(
            both.starts_with(
                "Nothing replaces softmax in nine of ten heads here better than the mean of all values; ssa"
            ),
            "{both}"
        );
        assert!(analysis(vec![softmax(), lost()]).headline().contains("the verdicts say why"));
    }
}
