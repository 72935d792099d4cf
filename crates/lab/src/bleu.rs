//! BLEU as sacreBLEU computes it: "BLEU: a Method for Automatic Evaluation of Machine Translation", with the tokenisation
//! `13a` and exponential smoothing, which are that program's defaults ("A Call for Clarity in Reporting BLEU Scores").

use std::{collections::HashMap, sync::LazyLock};

use regex::Regex;
use serde::{Deserialize, Serialize};

/// Longest n-grams.
const ORDER: usize = 4;

/// The agreement of translations with their references.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bleu {
    /// The score, in [0, 100].
    pub score: f64,
    /// Precision of n-grams of length 1 to 4, in percent, smoothed.
    pub precisions: [f64; ORDER],
    /// What translations that are too short are multiplied by.
    pub brevity_penalty: f64,
    /// Tokens of the translations.
    pub len: usize,
    /// Tokens of the references.
    pub reference_len: usize,
}

/// BLEU of `translations`, one reference each. `lowercase` compares without case.
///
/// # Panics
/// If there are not as many references as translations.
pub fn bleu(translations: &[String], references: &[String], lowercase: bool) -> Bleu {
    assert_eq!(translations.len(), references.len(), "one reference per translation");
    let (mut correct, mut total) = ([0_usize; ORDER], [0_usize; ORDER]);
    let (mut len, mut reference_len) = (0, 0);
    for (translation, reference) in translations.iter().zip(references) {
        let [ours, theirs] = [translation, reference].map(|text| tokenize(text, lowercase));
        len += ours.len();
        reference_len += theirs.len();
        for n in 1..=ORDER {
            let known = counts(&theirs, n);
            let matches = counts(&ours, n).into_iter();
            correct[n - 1] += matches.map(|(gram, n)| n.min(known.get(gram).copied().unwrap_or(0))).sum::<usize>();
            total[n - 1] += ours.len().saturating_sub(n - 1);
        }
    }
    score(correct, total, len, reference_len)
}

fn score(correct: [usize; ORDER], total: [usize; ORDER], len: usize, reference_len: usize) -> Bleu {
    let mut precisions = [0.0; ORDER];
    let mut smoothing = 1.0;
    for n in (0..ORDER).take_while(|&n| total[n] > 0) {
        precisions[n] = 100.0
            * match correct[n] {
                0 => {
                    smoothing *= 2.0;
                    1.0 / (smoothing * total[n] as f64)
                }
                correct => correct as f64 / total[n] as f64,
            };
    }
    let brevity_penalty = match len {
        0 => 0.0,
        _ if len < reference_len => (1.0 - reference_len as f64 / len as f64).exp(),
        _ => 1.0,
    };
    let matched = correct.iter().any(|&correct| correct > 0);
    let mean = precisions.iter().map(|precision| precision.ln()).sum::<f64>() / ORDER as f64;
    let score = if matched { brevity_penalty * mean.exp() } else { 0.0 };
    Bleu { score, precisions: if matched { precisions } else { [0.0; ORDER] }, brevity_penalty, len, reference_len }
}

fn counts(tokens: &[String], n: usize) -> HashMap<&[String], usize> {
    let mut counts = HashMap::new();
    tokens.windows(n).for_each(|gram| *counts.entry(gram).or_default() += 1);
    counts
}

/// The tokenisation `13a`, that of the WMT evaluations: symbols and punctuation apart, but not within numbers.
fn tokenize(text: &str, lowercase: bool) -> Vec<String> {
    static RULES: LazyLock<[(Regex, &str); 4]> = LazyLock::new(|| {
        let rule = |pattern: &str, to| (Regex::new(pattern).expect("a valid pattern"), to);
        [
            rule(r"([{-~\[-` -&(-+:-@/])", " $1 "),
            rule(r"([^0-9])([.,])", "$1 $2 "),
            rule(r"([.,])([^0-9])", " $1 $2"),
            rule(r"([0-9])(-)", "$1 $2 "),
        ]
    });
    let text = if lowercase { text.to_lowercase() } else { text.to_owned() };
    let text = text.trim_end().replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    let text = text.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    let spaced = RULES.iter().fold(format!(" {text} "), |text, (rule, to)| rule.replace_all(&text, *to).into_owned());
    // Python's white space, which has the separators of ASCII beside Unicode's.
    let space = |c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c);
    spaced.split(space).filter(|token| !token.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scores, precisions, brevity penalty and lengths as sacreBLEU 2.6.0 gives them.
    #[test]
    fn scores_are_those_of_sacrebleu() {
        let translations = [
            "A man in an orange hat starring at something.",
            "Two dogs, one black & one white, run 3.5 miles -- fast!",
            "The \"quoted\" text costs $1,000.50 (or 2-3 euros).",
            "Ein Boston Terrier läuft auf saftig-grünem Gras vor einem weißen Zaun.",
            "It&#39;s 5:30pm; who's there?",
        ];
        let references = [
            "A man in an orange hat staring at something.",
            "Two dogs, one black & one white, run 3.5 miles - very fast!",
            "The \"quoted\" text costs $1,000.50 (or 2-3 Euros) today.",
            "Ein Boston Terrier läuft über saftig-grünes Gras vor einem weißen Zaun.",
            "It&#39;s 5:30 pm; who is there?",
        ];
        let cased = [89.39393939393939, 77.04918032786885, 67.85714285714286, 60.78431372549019];
        let uncased = [90.9090909090909, 80.32786885245902, 71.42857142857143, 64.70588235294117];
        check(&translations, &references, false, 68.71395068991747, cased, 0.9411939401248326, (66, 70));
        check(&translations, &references, true, 71.73836003096544, uncased, 0.9411939401248326, (66, 70));
        let short = (["A man.", "Two dogs run"], ["A man walks down the street.", "Two black dogs run across a field"]);
        check(&short.0, &short.1, false, 0.0, [100.0, 50.0, 25.0, 0.0], 0.2635971381157267, (6, 14));
        let smoothed = (["the cat sat", "a dog"], ["the cat is sat here", "the dog"]);
        check(&smoothed.0, &smoothed.1, false, 0.0, [80.0, 100.0 / 3.0, 50.0, 0.0], 0.6703200460356393, (5, 7));
        check(&["x y z"], &["a b c"], false, 0.0, [0.0; 4], 1.0, (3, 3));
        check(&["", ""], &["a b", "c"], false, 0.0, [0.0; 4], 0.0, (0, 3));
    }

    fn check(
        translations: &[&str],
        references: &[&str],
        lowercase: bool,
        score: f64,
        precisions: [f64; ORDER],
        penalty: f64,
        lengths: (usize, usize),
    ) {
        let own = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let found = bleu(&own(translations), &own(references), lowercase);
        assert!((found.score - score).abs() < 1e-9 && (found.brevity_penalty - penalty).abs() < 1e-12, "{found:?}");
        assert!(found.precisions.iter().zip(precisions).all(|(a, b)| (a - b).abs() < 1e-9), "{found:?}");
        assert_eq!((found.len, found.reference_len), lengths);
    }

    #[test]
    fn tokens_are_those_of_13a() {
        for (text, expected) in [
            ("A man in an orange hat starring at something.", "A man in an orange hat starring at something ."),
            ("It&#39;s 5:30pm; who's there?", "It & # 39 ; s 5 : 30pm ; who's there ?"),
            ("a.b,c 1.2,3 4-5 x-y ...", "a . b , c 1.2,3 4 - 5 x-y . . ."),
            ("[x]{y}~z`q^w_v", "[ x ] { y } ~ z ` q ^ w _ v"),
            ("<skipped>&lt;b&gt; &amp;quot; it's", "< b > & quot ; it's"),
            ("Preis: 3,50€ – „ja“", "Preis : 3,50€ – „ja“"),
            (".5 and 5. ,", ". 5 and 5 . ,"),
            ("a\x1cb\x1fc\u{a0}d", "a b c d"),
        ] {
            assert_eq!(tokenize(text, false).join(" "), expected);
        }
    }
}
