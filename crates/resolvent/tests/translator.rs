//! The translator: what it may see, decoding with kept keys and values, and its searches.

use burn::tensor::{Bool, Device, Int, Tensor, Tolerance, activation::log_softmax};
use resolvent::{
    Mechanism,
    models::{NormOrder, Search, TextConfig, Translator},
};

const VOCABULARY: usize = 7;

fn config(norm: NormOrder, mechanism: &str) -> TextConfig {
    let base = TextConfig::new(VOCABULARY, Mechanism::preset(mechanism).unwrap());
    TextConfig { dim: 16, depth: 2, heads: 2, mlp_dim: 24, norm, ..base }
}

fn translator(norm: NormOrder, encoder: &str, decoder: &str, cross: &str) -> Translator {
    let [decoder, cross] = [decoder, cross].map(|id| Mechanism::preset(id).unwrap());
    config(norm, encoder).try_init_translator(&decoder, &cross, &Device::flex()).unwrap()
}

/// Two sentences, the second with two places of padding.
fn source() -> (Tensor<2, Int>, Option<Tensor<2, Bool>>) {
    let device = Device::flex();
    let padding = Tensor::<2, Int>::from_ints([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]], &device).equal_scalar(1);
    (Tensor::from_ints([[4, 5, 6, 4, 1], [6, 5, 4, 0, 0]], &device), Some(padding))
}

fn written() -> Tensor<2, Int> {
    Tensor::from_ints([[2, 4, 6, 5, 5, 4], [2, 6, 6, 1, 4, 5]], &Device::flex())
}

fn close(a: Tensor<2>, b: Tensor<2>) {
    a.into_data().assert_approx_eq::<f32>(&b.into_data(), Tolerance::absolute(2e-5));
}

#[test]
fn writing_token_by_token_gives_the_logits_of_the_whole() {
    for (norm, encoder, decoder, cross) in [
        (NormOrder::Post, "softmax", "softmax", "softmax"),
        (NormOrder::Pre, "fna", "fna", "fna"),
        (NormOrder::Post, "linear-infsa", "uniform", "fna"),
        (NormOrder::Pre, "soft", "fna", "uniform"),
    ] {
        let model = translator(norm, encoder, decoder, cross);
        let ((source, padding), written) = (source(), written());
        let whole = model.try_forward(source.clone(), padding.clone(), written.clone(), None).unwrap();
        let mut state = model.begin(source, padding).unwrap();
        for place in 0..6 {
            let token = written.clone().slice([0..2, place..place + 1]).squeeze_dim(1);
            let logits = model.step(token, &mut state).unwrap();
            close(logits, whole.clone().slice([0..2, place..place + 1]).squeeze_dim(1));
            assert_eq!(state.len(), place + 1);
        }
    }
}

#[test]
fn tied_projections_decode_alike() {
    let fna = Mechanism::preset("fna").unwrap();
    let config = TextConfig { tied: Some(true), ..config(NormOrder::Post, "fna") };
    let model = config.try_init_translator(&fna, &fna, &Device::flex()).unwrap();
    let ((source, padding), written) = (source(), written());
    let whole = model.try_forward(source.clone(), padding.clone(), written.clone(), None).unwrap();
    let mut state = model.begin(source, padding).unwrap();
    for place in 0..6 {
        let logits = model.step(written.clone().slice([0..2, place..place + 1]).squeeze_dim(1), &mut state).unwrap();
        close(logits, whole.clone().slice([0..2, place..place + 1]).squeeze_dim(1));
    }
}

#[test]
fn no_token_sees_what_is_written_later_nor_padding() {
    let model = translator(NormOrder::Post, "fna", "fna", "fna");
    let ((source, padding), written) = (source(), written());
    let logits = |source: Tensor<2, Int>, written: Tensor<2, Int>| {
        model.try_forward(source, padding.clone(), written, None).unwrap().slice([0..2, 0..3]).into_data()
    };
    let shown = logits(source.clone(), written);
    let later = Tensor::from_ints([[2, 4, 6, 1, 1, 1], [2, 6, 6, 5, 5, 1]], &Device::flex());
    assert_eq!(shown, logits(source, later.clone()));
    let other = Tensor::from_ints([[4, 5, 6, 4, 1], [6, 5, 4, 5, 6]], &Device::flex());
    assert_eq!(shown, logits(other, later), "what stands in padding");
}

fn search(beams: usize) -> Search {
    Search { begin: 2, end: 3, max_tokens: 3, beams, length_penalty: 1.0 }
}

/// The log-probability of `tokens` and, if there is room for one, of the end after them, over their number.
fn score(model: &Translator, source: &Tensor<2, Int>, tokens: &[u32]) -> f64 {
    let ended = tokens.len() < 3;
    let read: Vec<i64> = [2].into_iter().chain(tokens.iter().map(|&token| i64::from(token))).collect();
    let read = Tensor::<1, Int>::from_data(&read[..], &Device::flex()).unsqueeze_dim(0);
    let logits = model.try_forward(source.clone(), None, read, None).unwrap();
    let log: Vec<f32> = log_softmax(logits, 2).into_data().iter().collect();
    let said = tokens.iter().copied().chain(ended.then_some(3)).enumerate();
    let sum: f64 = said.map(|(place, token)| f64::from(log[place * VOCABULARY + token as usize])).sum();
    sum / (tokens.len() + 1) as f64
}

#[test]
fn greedy_takes_the_likeliest_and_wide_beams_find_the_best() {
    let model = translator(NormOrder::Post, "softmax", "fna", "softmax");
    let (source, _) = source();
    let found = model.search(source.clone(), None, &search(1)).unwrap();
    let wide = model.search(source.clone(), None, &search(400)).unwrap();
    for sentence in 0..2 {
        let source = source.clone().narrow(0, sentence, 1);
        let mut state = model.begin(source.clone(), None).unwrap();
        let (mut token, mut greedy) = (2, vec![]);
        while greedy.len() < 3 {
            let logits = model.step(Tensor::from_ints([token], &Device::flex()), &mut state).unwrap();
            token = logits.argmax(1).into_data().iter::<i32>().next().unwrap();
            if token == 3 {
                break;
            }
            greedy.push(token as u32);
        }
        assert_eq!(found[sentence], greedy);

        let tokens = (0..VOCABULARY as u32).filter(|&token| token != 3);
        let mut all: Vec<Vec<u32>> = vec![vec![]];
        for _ in 0..3 {
            let longer: Vec<_> =
                all.iter().flat_map(|t| tokens.clone().map(move |next| [&t[..], &[next]].concat())).collect();
            all.extend(longer);
        }
        all.sort();
        all.dedup();
        let best = all.iter().map(|t| score(&model, &source, t)).fold(f64::NEG_INFINITY, f64::max);
        assert!((score(&model, &source, &wide[sentence]) - best).abs() < 1e-5, "{best}");
        assert!(score(&model, &source, &greedy) <= best + 1e-6);
    }
    assert!(model.search(source, None, &search(0)).is_err());
}

#[test]
fn sentences_do_not_depend_on_their_neighbours() {
    let model = translator(NormOrder::Pre, "fna", "fna", "fna");
    let (tokens, padding) = source();
    for beams in [1, 3] {
        let search = Search { max_tokens: 8, ..search(beams) };
        let together = model.search(tokens.clone(), padding.clone(), &search).unwrap();
        let second = tokens.clone().slice([1..2, 0..3]);
        assert_eq!(model.search(second, None, &search).unwrap()[0], together[1]);
    }
}

#[test]
fn mechanisms_without_rows_of_their_own_are_refused_in_the_decoder() {
    let fna = Mechanism::preset("fna").unwrap();
    for id in ["infsa", "linear-infsa", "soft", "laplacian-exact", "ssa"] {
        let other = Mechanism::preset(id).unwrap();
        for (decoder, cross) in [(&other, &fna), (&fna, &other)] {
            let refused = config(NormOrder::Post, "fna").try_init_translator(decoder, cross, &Device::flex());
            let message = refused.expect_err(id).to_string();
            assert!(message.contains(id) && message.contains("decoder"), "{message}");
        }
    }
    let mixed = Mechanism::from_json(r#"{"mechanism": "fna", "norm_exponent": 1.0}"#).unwrap();
    let refused = config(NormOrder::Post, "fna").try_init_translator(&mixed, &fna, &Device::flex());
    assert!(refused.expect_err("refused").to_string().contains("norm_exponent"));
}
