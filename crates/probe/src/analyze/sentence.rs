//! Verdicts in words.

use resolvent_kernels::{Mechanism, mechanism::Structure};
use resolvent_lab::{
    candidate::Candidate,
    stats::{Interval, Side},
};

use super::{Finding, Numbers, verdict::beside_mean};

/// The finding on a mechanism with its numbers and reasons, for a reader.
pub(super) fn sentence(
    candidate: &Candidate,
    finding: Finding,
    n: &Numbers,
    softmax: &Numbers,
    causal: bool,
) -> String {
    let Candidate { name: id, mechanism } = candidate;
    if finding == Finding::Baseline {
        let graph = shape_of(n).map_or_else(String::new, |shape| format!(" {shape}."));
        let left = match n.incomparable {
            0 => String::new(),
            left => format!(" On {} it has no output to compare with.", heads(left)),
        };
        return format!("{id} is what the others are compared with: {}.{graph}{left}", cost(n));
    }
    if finding == Finding::NotFinite {
        return format!("{id} breaks down here: its output is not finite on any of {}.", heads(n.heads));
    }
    let mean = if causal { "the mean of the values so far" } else { "the mean of all values" };
    let told = match finding {
        Finding::Replaces => {
            let control = match beside_mean(n.beside_mean) {
                _ if n.mean_of_values.is_none() => String::new(),
                Finding::NeedsTraining => format!(", nearer than {mean} ({})", beside(n)),
                _ => format!(", where {mean} is close in {} of {} ({})", n.mean_close, heads(n.heads), beside(n)),
            };
            format!("{id} can replace softmax here{}: {}{control}", share(n), error(n))
        }
        Finding::LikeTheMean => format!(
            "{id} is close to softmax here{}, and no closer than {mean} ({}): {}; what softmax does on these tokens, that mean does without \
             attention",
            share(n),
            beside(n),
            error(n)
        ),
        Finding::SomeHeads => {
            let all = n.heads + n.refused;
            let more = match n.close - n.close_nearer {
                0 => share(n),
                more => format!(" (in {more} more it is close and {mean} is, too)"),
            };
            format!("{id} can replace softmax in {} of {}{more}: {}", n.close_nearer, heads(all), error(n))
        }
        Finding::NotHere => {
            format!("{id} cannot replace softmax here: {}, no nearer than {mean} ({})", error(n), beside(n))
        }
        Finding::Undecided => {
            format!(
                "{id} is about as near to softmax here as {mean} ({}): {}; these heads do not tell which is nearer",
                beside(n),
                error(n)
            )
        }
        _ => format!(
            "{id} is another operator, to be trained with rather than swapped in: {}, nearer than {mean} ({})",
            error(n),
            beside(n)
        ),
    };
    let refused = match n.refused {
        0 => String::new(),
        refused => format!(" To {} it cannot be applied: the remarks say why.", heads(refused)),
    };
    format!("{told}, at {}.{refused} {}", cost(n), reason(mechanism, n, softmax, causal))
}

/// Where the share of close heads lies, if these leave it open whether nine of ten are.
fn share(n: &Numbers) -> String {
    match n.close_interval.filter(|interval| interval.side_of(0.9) == Side::Open) {
        Some(interval) => {
            let all = n.heads + n.refused;
            let open = if 10 * n.close >= 9 * all { "fewer than nine of ten are" } else { "nine of ten is" };
            format!(" (of more such heads {} %, 95 % interval: {open} not ruled out)", interval.text(100.0, 0))
        }
        None => String::new(),
    }
}

/// The error of the mean of all values, and in how many heads the mechanism is nearer.
fn beside(n: &Numbers) -> String {
    let [nearer, farther] = n.beside_mean;
    let mean = percent(n.mean_of_values);
    match nearer + farther {
        0 => mean,
        all if nearer == 0 || farther == 0 => format!("{mean}; nearer in {nearer} of {}", heads(all)),
        all => {
            let interval = Interval::of_share(nearer, all).text(100.0, 0);
            format!("{mean}; nearer in {nearer} of {}, 95 % interval {interval} %", heads(all))
        }
    }
}

/// How far the output is off.
fn error(n: &Numbers) -> String {
    let of = heads(n.heads - n.broken);
    let broken = match n.broken {
        0 => String::new(),
        broken => format!("; on {} more it is not finite", heads(broken)),
    };
    format!(
        "its output is {} off (median over {of}{}; worst {}; {} with its own scale{broken})",
        percent(n.error_median),
        n.error_interval.map_or_else(String::new, |interval| format!(", 95 % interval {} %", interval.text(100.0, 1))),
        percent(n.error_worst),
        percent(n.error_relative)
    )
}

fn percent(x: Option<f64>) -> String {
    x.map_or_else(|| "?".into(), |x| format!("{:.1} %", 100.0 * x))
}

/// `1 head`, `12 heads`.
fn heads(count: usize) -> String {
    format!("{count} head{}", if count == 1 { "" } else { "s" })
}

/// Time and memory.
fn cost(n: &Numbers) -> String {
    let time = n.seconds.map_or_else(|| "no time measured".into(), |s| format!("{} a layer", duration(s)));
    let ratio = n.time_ratio.filter(|ratio| (ratio - 1.0).abs() > 1e-9);
    let ratio = ratio.map_or_else(String::new, |ratio| format!(" ({} times softmax's)", two_digits(ratio)));
    let memory =
        n.peak_bytes.map_or_else(String::new, |bytes| format!(" and {:.2} MB beside the tensors", bytes / 1e6));
    format!("{time}{ratio}{memory}")
}

/// With two decimals, or two digits that matter.
fn two_digits(x: f64) -> String {
    let decimals = if x > 0.0 { (1.0 - x.log10().floor()).clamp(2.0, 9.0) } else { 2.0 };
    format!("{x:.*}", decimals as usize)
}

fn duration(seconds: f64) -> String {
    if seconds < 1e-4 { format!("{:.1} µs", seconds * 1e6) } else { format!("{:.2} ms", seconds * 1e3) }
}

/// What the graph is like.
fn shape_of(n: &Numbers) -> Option<String> {
    let (rows, rank, gap) = (n.perplexity?, n.effective_rank?, n.gap?);
    Some(format!(
        "A row attends to {rows:.1} tokens; the graph has {rank:.1} directions and a spectral gap of {gap:.3}"
    ))
}

/// Why the outputs are as near or as far as they are.
fn reason(mechanism: &Mechanism, n: &Numbers, softmax: &Numbers, causal: bool) -> String {
    if n.weightless {
        return "It gives these tokens no weight at all: its output is zero.".into();
    }
    let mut reasons = Vec::new();
    if matches!(mechanism.values().structure, Structure::Pooled(_)) {
        let directions = softmax
            .effective_rank
            .map_or_else(String::new, |rank| format!(", where softmax's graph has {rank:.1} directions"));
        let pooled = if causal { "one pooled value of the tokens so far" } else { "the same value" };
        reasons.push(format!("it gives every token {pooled}{directions}"));
    }
    if let Some(negative) = n.negative.filter(|&share| share > 0.01) {
        reasons.push(format!("{:.0} % of its weight is negative, which no softmax has", 100.0 * negative));
    }
    let all = n.heads + n.incomparable;
    let among = |count: usize| if count < all { format!(", on {count} of {}", heads(all)) } else { String::new() };
    if let Some((count, own, theirs)) = n.rows_beside {
        let how = match own / theirs {
            ratio if ratio > 1.25 => "are wider than softmax's",
            ratio if ratio < 0.8 => "are narrower than softmax's",
            _ => "are as wide as softmax's",
        };
        reasons.push(format!("its rows {how} ({own:.1} tokens against {theirs:.1}{})", among(count)));
    }
    if let Some(centrality) = n.centrality {
        let heads = among(n.centrality_heads);
        reasons.push(format!("the rank correlation of what it and softmax find important is {centrality:.2}{heads}"));
    }
    if let Some(subspace) = n.subspace {
        let heads = among(n.subspace_heads);
        reasons.push(format!("the sines of the angles between their leading eigenvectors are {subspace:.2}{heads}"));
    }
    match reasons.is_empty() {
        true => "Its graph could not be compared: the remarks say why.".into(),
        false => format!("Why: {}.", reasons.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An uncertain share of close heads is told with its interval, a clear one without.
    #[test]
    fn a_share_at_the_edge_says_so() {
        let numbers = |close, heads| Numbers {
            close,
            heads,
            close_interval: Some(Interval::of_share(close, heads)),
            ..Numbers::default()
        };
        assert!(share(&numbers(62, 72)).contains("76 to 92 %"), "{}", share(&numbers(62, 72)));
        assert!(
            share(&numbers(12, 12)).contains("76 to 100 %, 95 % interval: fewer than"),
            "{}",
            share(&numbers(12, 12))
        );
        assert_eq!(share(&numbers(10, 72)), "");
    }
}
