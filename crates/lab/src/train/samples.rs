//! What a trained model says of some test examples, for the report of its run.

use std::io::Cursor;

use base64::{Engine, engine::general_purpose::STANDARD};
use burn::tensor::Tensor;
use image::{DynamicImage, GrayImage, ImageFormat, RgbImage};
use serde::{Deserialize, Serialize};

use crate::{
    data::{PictureShape, by_budget},
    evaluation::answer,
    stats::{probabilities, spread},
};

/// Test examples that a classifier's errors are looked for in, evenly spread over the part: what they cost does not grow with it.
pub(super) const LOOKED_AT: usize = 2000;
/// Errors that are kept.
const WORST: usize = 12;
/// Translations and continuations.
pub(super) const SHOWN: usize = 6;
/// The longer side of a picture that is kept, in pixels.
const SIDE: u32 = 96;
/// Characters kept of a text.
const CHARACTERS: usize = 400;

/// What a trained model says of some test examples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Samples {
    /// Of a classifier: its worst errors.
    Errors(Errors),
    /// Of a translator.
    Translations(Vec<Translation>),
    /// Of a language model.
    Continuations(Vec<Continuation>),
}

/// The worst errors of a classifier.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Errors {
    /// Test examples that were looked at: at most 2000, evenly spread.
    pub examples: usize,
    /// Those of them that are answered wrong.
    pub wrong: usize,
    /// Of these, those whose own class is least probable, the least probable first.
    pub worst: Vec<WrongAnswer>,
}

/// A wrong answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WrongAnswer {
    /// Number of the example in the test part, from 0.
    pub example: usize,
    /// Its class.
    pub label: String,
    /// The probability of that.
    pub label_probability: f64,
    /// The model's answer.
    pub answer: String,
    /// The probability of that.
    pub answer_probability: f64,
    /// What the model was shown.
    pub shown: Seen,
}

/// What a classifier was shown.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Seen {
    /// A picture, at most 96 pixels high and wide, as the address of a PNG (`data:image/png;base64,...`).
    Picture(String),
    /// The beginning of a text, from its tokens.
    Text(String),
}

/// A test sentence in two languages, and what the model makes of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Translation {
    /// The sentence, from its tokens.
    pub source: String,
    /// The translation in the data.
    pub reference: String,
    /// The model's, by greedy search.
    pub translation: String,
}

/// A piece of the test text, and how the model goes on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Continuation {
    /// What the model was given.
    pub prompt: String,
    /// What it wrote, drawn from its probabilities as they are.
    pub continuation: String,
    /// What follows in the text.
    pub original: String,
}

impl Errors {
    /// Of `logits [examples, classes]` on test examples with these numbers and `labels`; `show` makes what is shown of one of them.
    ///
    /// # Errors
    /// Those of `show`.
    pub(super) fn new<E>(
        classes: &[String],
        logits: &[f32],
        examples: &[usize],
        labels: &[u32],
        show: impl Fn(usize) -> Result<Seen, E>,
    ) -> Result<Self, E> {
        let mut wrong: Vec<(usize, u32, usize, Vec<f64>)> = Vec::new();
        for ((row, &example), &label) in logits.chunks_exact(classes.len()).zip(examples).zip(labels) {
            let (answer, _) = answer(row);
            if answer != label as usize {
                wrong.push((example, label, answer, probabilities(row)));
            }
        }
        wrong.sort_by(|a, b| a.3[a.1 as usize].total_cmp(&b.3[b.1 as usize]));
        let told = |(example, label, answer, probabilities): &(usize, u32, usize, Vec<f64>)| {
            let label = *label as usize;
            Ok(WrongAnswer {
                example: *example,
                label: classes[label].clone(),
                label_probability: probabilities[label],
                answer: classes[*answer].clone(),
                answer_probability: probabilities[*answer],
                shown: show(*example)?,
            })
        };
        let worst = wrong.iter().take(WORST).map(told).collect::<Result<_, E>>()?;
        Ok(Self { examples: examples.len(), wrong: wrong.len(), worst })
    }

    /// Of texts, or pairs of them, of the test part, evenly spread over it: `answer` gives the logits `[batch, classes]` of those with some
    /// numbers, whose `lengths` are together at most `tokens`, padding included.
    ///
    /// # Errors
    /// Those of `answer` and `show`; [`crate::Error::Stopped`].
    pub(super) fn of_test(
        classes: &[String],
        lengths: &[usize],
        labels: &[u32],
        tokens: usize,
        answer: impl Fn(&[usize]) -> crate::Result<Tensor<2>>,
        show: impl Fn(usize) -> crate::Result<Seen>,
    ) -> crate::Result<Self> {
        let chosen: Vec<usize> = spread(labels.len(), LOOKED_AT).collect();
        let their_lengths: Vec<usize> = chosen.iter().map(|&example| lengths[example]).collect();
        let (mut logits, mut examples) = (Vec::new(), Vec::new());
        for places in by_budget(&their_lengths, tokens) {
            crate::stop::check()?;
            let batch: Vec<usize> = places.into_iter().map(|place| chosen[place]).collect();
            logits.extend(answer(&batch)?.into_data().iter::<f32>());
            examples.extend(batch);
        }
        let labels: Vec<u32> = examples.iter().map(|&example| labels[example]).collect();
        Self::new(classes, &logits, &examples, &labels, show)
    }
}

/// A picture of `bytes [channels, height, width]`, made smaller where it is large.
pub(super) fn thumbnail(shape: PictureShape, bytes: &[u8]) -> Seen {
    let (width, height, plane) = (shape.width as u32, shape.height as u32, shape.plane());
    let at = |x: u32, y: u32| (y * width + x) as usize;
    let mut image: DynamicImage = match shape.channels {
        1 => GrayImage::from_fn(width, height, |x, y| [bytes[at(x, y)]].into()).into(),
        _ => {
            let pixel = |x, y| std::array::from_fn(|channel| bytes[channel * plane + at(x, y)]);
            RgbImage::from_fn(width, height, |x, y| pixel(x, y).into()).into()
        }
    };
    if width.max(height) > SIDE {
        image = image.thumbnail(SIDE, SIDE);
    }
    let mut png = Cursor::new(Vec::new());
    image.write_to(&mut png, ImageFormat::Png).expect("memory takes every byte, and PNG these pixels");
    Seen::Picture(format!("data:image/png;base64,{}", STANDARD.encode(png.into_inner())))
}

/// The beginning of a text.
pub(super) fn beginning(text: &str) -> String {
    match text.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{} …", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_errors_come_first() {
        let classes = ["a", "b", "c"].map(String::from);
        let logits = [[3.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 4.0], [2.0, 1.9, 0.0]].concat();
        let show = |example: usize| Ok::<_, ()>(Seen::Text(format!("text {example}")));
        let found = Errors::new(&classes, &logits, &[10, 20, 30, 40], &[0, 2, 1, 1], show).unwrap();
        assert_eq!((found.examples, found.wrong), (4, 3));
        let order: Vec<_> = found.worst.iter().map(|wrong| (wrong.example, &*wrong.label, &*wrong.answer)).collect();
        assert_eq!(order, [(30, "b", "c"), (20, "c", "b"), (40, "b", "a")]);
        let worst = &found.worst[0];
        assert!((worst.label_probability - 1.0 / (2.0 + 4f64.exp())).abs() < 1e-9 && worst.answer_probability > 0.9);
        assert_eq!(worst.shown, Seen::Text("text 30".into()));
        let none = Errors::new(&classes, &logits[..3], &[10], &[0], show).unwrap();
        assert_eq!((none.wrong, none.worst.len()), (0, 0));
    }

    #[test]
    fn what_is_large_is_made_smaller() {
        let shape = PictureShape { channels: 3, height: 60, width: 240 };
        let Seen::Picture(address) = thumbnail(shape, &vec![200; shape.volume()]) else { panic!() };
        let png = STANDARD.decode(address.strip_prefix("data:image/png;base64,").unwrap()).unwrap();
        let image = image::load_from_memory(&png).unwrap().to_rgb8();
        assert_eq!((image.dimensions(), image.get_pixel(5, 5).0), ((96, 24), [200; 3]));
        assert_eq!(beginning("short"), "short");
        assert_eq!(beginning(&"é ".repeat(300)).chars().count(), CHARACTERS + 1);
    }
}
