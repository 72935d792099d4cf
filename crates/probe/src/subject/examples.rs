//! What a model is shown: test examples of a data set, or pictures and texts of one's own.

use std::path::{Path, PathBuf};

use resolvent_lab::{
    Error, Result,
    augment::Rectangle,
    checkpoint::{Expectation, PictureExpectation, TextExpectation},
    data::{self, Data, PictureDataset, PictureShape, Span, TextDataset, Vocabulary},
    predict::{Seen, picture_files, read_picture},
    stats::spread,
};

use super::voc::{self, Region};

/// Where examples come from.
#[derive(Debug, Clone)]
pub enum Material {
    /// The test part of a data set.
    Data(Data),
    /// A PNG, JPEG or WebP picture, or a folder of them, each resized (shorter side) and cut (centre) to what the model sees.
    Pictures {
        /// The file or folder.
        input: PathBuf,
        /// Pascal VOC annotations: the file, or a folder with `NAME.xml` for each `NAME.jpg`.
        boxes: Option<PathBuf>,
    },
    /// Texts.
    Texts(Vec<String>),
}

impl TextExample {
    /// The words of its tokens.
    pub fn words(&self) -> Vec<String> {
        self.spans.iter().map(|&(from, to)| self.text[from..to].to_owned()).collect()
    }

    /// Whether the text goes on after the tokens that the model reads.
    pub fn is_cut(&self) -> bool {
        let end = self.spans.last().map_or(0, |&(_, to)| to);
        !self.text[end..].trim().is_empty()
    }
}

/// One example as a model is shown it.
#[derive(Debug, Clone, PartialEq)]
pub enum Example {
    /// A picture.
    Picture(PictureExample),
    /// A text.
    Text(TextExample),
}

impl Example {
    /// Its file, or its number in the data set.
    pub fn name(&self) -> &str {
        match self {
            Self::Picture(picture) => &picture.name,
            Self::Text(text) => &text.name,
        }
    }

    /// Whether it is a text that goes on after the tokens that the model reads.
    pub fn is_cut(&self) -> bool {
        matches!(self, Self::Text(text) if text.is_cut())
    }

    /// Its class, where known.
    pub fn label(&self) -> Option<usize> {
        match self {
            Self::Picture(picture) => picture.label,
            Self::Text(text) => text.label,
        }
    }
}

/// A picture at the size that the model sees.
#[derive(Debug, Clone, PartialEq)]
pub struct PictureExample {
    /// Its file, or its number in the data set.
    pub name: String,
    /// Its shape.
    pub shape: PictureShape,
    /// `[channels, height, width]`.
    pub bytes: Vec<u8>,
    /// Its class, where known.
    pub label: Option<usize>,
    /// Where its objects lie; `None` where nobody knows.
    pub boxes: Option<Vec<Region>>,
}

/// A text as tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct TextExample {
    /// Its number.
    pub name: String,
    /// The text.
    pub text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Which bytes of the text each token is.
    pub spans: Vec<Span>,
    /// Its class, where known.
    pub label: Option<usize>,
}

/// Examples for a model of pictures.
pub(super) fn pictures(expects: &PictureExpectation, material: &Material, count: usize) -> Result<Vec<Example>> {
    match material {
        Material::Data(Data::Pictures(dataset)) => of_dataset(expects, dataset, count),
        Material::Pictures { input, boxes } => {
            let files = if input.is_dir() { picture_files(input)? } else { vec![input.clone()] };
            if let Some(boxes) = boxes.as_deref().filter(|boxes| files.len() > 1 && boxes.is_file()) {
                let problem = format!(
                    "is of one picture, and there are {}; name a folder with NAME.xml for each NAME.jpg",
                    files.len()
                );
                return Err(data::Error::Format { path: boxes.into(), problem }.into());
            }
            let chosen = spread(files.len(), count);
            chosen.map(|index| Ok(Example::Picture(picture(expects, &files[index], boxes.as_deref())?))).collect()
        }
        other => Err(unfit(other, "pictures")),
    }
}

fn of_dataset(expects: &PictureExpectation, dataset: &PictureDataset, count: usize) -> Result<Vec<Example>> {
    expects.check(dataset)?;
    let split = &dataset.test;
    let region = |index: usize| {
        let b = split.boxes()?[index];
        let [left, top, right, bottom] = [b.left, b.top, b.right, b.bottom].map(f64::from);
        Some(vec![Region { left, top, right, bottom }])
    };
    let one = |index: usize| {
        Ok(Example::Picture(PictureExample {
            name: format!("{} {index}", dataset.name),
            shape: split.shape(),
            bytes: split.picture(index)?.into_owned(),
            label: Some(split.labels()[index] as usize),
            boxes: region(index),
        }))
    };
    spread(split.len(), count).map(one).collect()
}

/// One picture file with its boxes.
fn picture(expects: &PictureExpectation, path: &Path, boxes: Option<&Path>) -> Result<PictureExample> {
    let Seen { shape, bytes, whole } = read_picture(expects, path)?;
    let boxes = boxes.map(|boxes| voc::read(&annotation(boxes, path), whole.width, whole.height)).transpose()?;
    let area = Rectangle::centred(whole, shape.height, shape.width, 1.0);
    let seen = |region: &Region| cut(region, area, shape.height, shape.width);
    Ok(PictureExample {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        shape,
        bytes,
        label: None,
        boxes: boxes.map(|boxes| boxes.iter().filter_map(seen).collect()),
    })
}

fn annotation(boxes: &Path, picture: &Path) -> PathBuf {
    match boxes.is_dir() {
        true => boxes.join(picture.file_stem().unwrap_or_default()).with_added_extension("xml"),
        false => boxes.into(),
    }
}

/// What is left of a region in `area` at its new size; `None` where it lies outside.
fn cut(region: &Region, area: Rectangle, height: usize, width: usize) -> Option<Region> {
    let (down, across) = (height as f64 / area.height as f64, width as f64 / area.width as f64);
    let x = |at: f64| ((at - area.left as f64) * across).clamp(0.0, width as f64);
    let y = |at: f64| ((at - area.top as f64) * down).clamp(0.0, height as f64);
    let cut = Region { left: x(region.left), top: y(region.top), right: x(region.right), bottom: y(region.bottom) };
    (cut.left < cut.right && cut.top < cut.bottom).then_some(cut)
}

/// Examples for a model of texts.
pub(super) fn texts(
    expects: &TextExpectation,
    vocabulary: &Vocabulary,
    material: &Material,
    count: usize,
) -> Result<Vec<Example>> {
    let one = |name: String, text: &str, label| {
        let (ids, spans) = vocabulary.spans(text, expects.max_tokens)?;
        Ok(Example::Text(TextExample { name, text: text.into(), ids, spans, label }))
    };
    match material {
        Material::Data(Data::Texts(TextDataset { name, classes, test, .. })) => {
            expects.check(name, classes)?;
            let chosen = spread(test.len(), count);
            chosen.map(|i| one(format!("{name} {i}"), &test.texts[0][i], Some(test.labels[i] as usize))).collect()
        }
        Material::Texts(texts) => {
            spread(texts.len(), count).map(|i| one(format!("text {}", i + 1), &texts[i], None)).collect()
        }
        other => Err(unfit(other, "texts")),
    }
}

/// Examples for a language model that reads `context` tokens at once: windows of plain text, or the beginnings of texts.
pub(super) fn windows(
    context: usize,
    vocabulary: &Vocabulary,
    material: &Material,
    count: usize,
) -> Result<Vec<Example>> {
    // The rest of a text that is longer than the context stands behind its tokens.
    let one = |name: String, all: &[u32]| {
        let (ids, rest) = all.split_at(all.len().min(context));
        let (mut text, mut spans) = (String::new(), Vec::new());
        for &id in ids {
            let from = text.len();
            text.push_str(&vocabulary.decode(&[id])?);
            spans.push((from, text.len()));
        }
        text.push_str(&vocabulary.decode(rest)?);
        Ok(Example::Text(TextExample { name, text, ids: ids.to_vec(), spans, label: None }))
    };
    match material {
        Material::Data(Data::Corpus(corpus)) => {
            let ids = vocabulary.encode_whole(&corpus.test)?;
            let windows: Vec<&[u32]> = ids.chunks(context).collect();
            // The last one may be short.
            let whole = windows.len() - usize::from(windows.len() > 1 && ids.len() % context > 0);
            spread(whole, count).map(|i| one(format!("{} {i}", corpus.name), windows[i])).collect()
        }
        Material::Texts(texts) => {
            let beginning = |i: usize| {
                let ids = vocabulary.encode_whole(&texts[i])?;
                one(format!("text {}", i + 1), &ids)
            };
            spread(texts.len(), count).map(beginning).collect()
        }
        other => Err(unfit(other, "plain text")),
    }
}

/// The error of a model that was trained on `expected` and is shown something else.
fn unfit(material: &Material, expected: &str) -> Error {
    let (name, found) = match material {
        Material::Data(Data::Pictures(data)) => (data.name.clone(), "pictures"),
        Material::Data(Data::Texts(data)) => (data.name.clone(), "texts"),
        Material::Data(Data::Matches(data)) => (data.name.clone(), Expectation::MATCHES),
        Material::Data(Data::Pairs(data)) => (data.name.clone(), "translations"),
        Material::Data(Data::Corpus(data)) => (data.name.clone(), "plain text"),
        Material::Data(Data::Recall(data)) => (data.name.clone(), Expectation::RECALL),
        Material::Pictures { input, .. } => (input.display().to_string(), "pictures"),
        Material::Texts(_) => ("the texts".into(), "texts"),
    };
    let problem = format!("it holds {found}, the model was trained on {expected}; show it {expected}");
    Error::Unfit { name, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_the_cut() {
        let area = Rectangle { top: 0, left: 10, height: 20, width: 20 };
        let region = Region { left: 5.0, top: 10.0, right: 20.0, bottom: 15.0 };
        let expected = Region { left: 0.0, top: 5.0, right: 5.0, bottom: 7.5 };
        assert_eq!(cut(&region, area, 10, 10), Some(expected));
        assert_eq!(cut(&Region { right: 10.0, ..region }, area, 10, 10), None, "outside of what is seen");
    }
}
