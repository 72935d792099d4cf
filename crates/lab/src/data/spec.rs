//! `KIND:PATH`: the text that names a data set.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{
    CorpusDataset, CorpusSpec, Dataset, Error, PairDataset, PairSpec, Result, Shapes, Sizing, TextDataset, TextSpec,
    WebDataset, cifar, idx, images,
    reading::{Tell, nobody},
    settings::settings,
};
use crate::budget::Held;

/// The kinds of pictures, for messages.
const KINDS: &str = "shapes[:SETTINGS], mnist:DIR, fashion-mnist:DIR, idx:IMAGES,LABELS, cifar10:DIR, images:PATH[?size=PIXELS], \
     webdataset:TRAIN[,[VALIDATION,]TEST][?size=PIXELS]";

/// Names of the kinds of pictures.
const PICTURES: [&str; 7] = ["shapes", "mnist", "fashion-mnist", "idx", "cifar10", "images", "webdataset"];

/// Share of every class that is held out for testing where a data set brings no test split.
pub(super) const HOLDOUT: f64 = 0.2;

/// Which pictures to use.
///
/// ```
/// use resolvent_lab::data::DataSpec;
/// let spec: DataSpec = "shapes:seed=1,train=64,test=16".parse()?;
/// assert_eq!(spec.load()?.train.len(), 64);
/// # Ok::<(), resolvent_lab::data::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum DataSpec {
    /// `shapes` or `shapes:seed=1,size=32,train=4000,test=1000,difficulty=0`: generated pictures.
    Shapes(Shapes),
    /// `mnist:DIR`: the four idx files, plain or gzipped.
    Mnist(PathBuf),
    /// `fashion-mnist:DIR`: the four idx files, plain or gzipped.
    FashionMnist(PathBuf),
    /// `idx:IMAGES,LABELS`: one pair of idx files, of which a fifth of every class is held out for testing.
    Idx {
        /// The file of pictures.
        pictures: PathBuf,
        /// The file of labels.
        labels: PathBuf,
    },
    /// `cifar10:DIR`: the binary form.
    Cifar10(PathBuf),
    /// `images:PATH` or `images:PATH?size=64&crop=0.875`: PNG and JPEG pictures in a folder or a .tar, .tar.gz, .tar.xz, .tar.zst
    /// or .zip archive, as `train/CLASS/PICTURE`, perhaps `val/CLASS/PICTURE`, and `test/CLASS/PICTURE`, or as `CLASS/PICTURE`,
    /// of which a fifth of every class is held out for testing.
    Images {
        /// The folder or archive.
        path: PathBuf,
        /// How pictures become one size.
        sizing: Sizing,
    },
    /// `webdataset:TRAIN,TEST`: shards with `key.jpg` and `key.cls`.
    WebDataset(WebDataset),
}

impl DataSpec {
    /// Reads `KIND:PATH`, or `shapes` with optional settings.
    ///
    /// # Errors
    /// [`Error::Spec`] or [`Error::Setting`]; whether the path exists is seen by [`DataSpec::load`].
    pub fn parse(spec: &str) -> Result<Self> {
        let fail = |problem: String| Error::Spec { spec: spec.into(), problem };
        let (kind, rest) = spec.split_once(':').unwrap_or((spec, ""));
        if kind == "shapes" {
            return Ok(DataSpec::Shapes(Shapes::parse(rest)?));
        }
        if !PICTURES.contains(&kind) {
            return Err(fail(format!("unknown kind `{kind}`; give one of {KINDS}")));
        }
        if rest.is_empty() {
            return Err(fail(no_path(kind)));
        }
        let path = PathBuf::from(rest);
        Ok(match kind {
            "mnist" => DataSpec::Mnist(path),
            "fashion-mnist" => DataSpec::FashionMnist(path),
            "idx" => {
                let pair = rest.split_once(',').filter(|(left, right)| !left.is_empty() && !right.is_empty());
                let (pictures, labels) = pair.ok_or_else(|| fail("give two files, `idx:IMAGES,LABELS`".into()))?;
                DataSpec::Idx { pictures: pictures.into(), labels: labels.into() }
            }
            "cifar10" => DataSpec::Cifar10(path),
            "webdataset" => DataSpec::WebDataset(WebDataset::parse(rest)?),
            _ => images_spec(rest)?,
        })
    }

    /// Generates or reads the data set.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file.
    pub fn load(&self) -> Result<Dataset> {
        self.load_telling(&nobody)
    }

    /// As [`DataSpec::load`], telling how far it has come.
    ///
    /// # Errors
    /// As [`DataSpec::load`].
    pub fn load_telling(&self, tell: Tell<'_>) -> Result<Dataset> {
        let held = &Held::new();
        match self {
            DataSpec::Shapes(shapes) => shapes.generate(),
            DataSpec::Mnist(folder) => idx::load("mnist", folder, &idx::DIGITS, held),
            DataSpec::FashionMnist(folder) => idx::load("fashion-mnist", folder, &idx::GARMENTS, held),
            DataSpec::Idx { pictures, labels } => idx::load_with_holdout(pictures, labels, HOLDOUT, held),
            DataSpec::Cifar10(folder) => cifar::load(folder, held),
            DataSpec::Images { path, sizing } => images::load(path, *sizing, HOLDOUT, held, tell),
            DataSpec::WebDataset(shards) => shards.load(HOLDOUT, held, tell),
        }
    }
}

/// Which data set to use, of any kind.
///
/// ```
/// use resolvent_lab::data::{Data, Source};
/// let source: Source = "listops:train=10,test=5,min=3,max=20".parse()?;
/// assert!(matches!(source.load()?, Data::Texts(texts) if texts.train.len() == 10));
/// # Ok::<(), resolvent_lab::data::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Pictures.
    Pictures(DataSpec),
    /// Labelled texts.
    Texts(TextSpec),
    /// Texts and their translations.
    Pairs(PairSpec),
    /// Plain text.
    Corpus(CorpusSpec),
}

/// A data set of any kind.
#[allow(clippy::large_enum_variant)] // a command has one
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// Pictures.
    Pictures(Dataset),
    /// Labelled texts.
    Texts(TextDataset),
    /// Texts and their translations.
    Pairs(PairDataset),
    /// Plain text.
    Corpus(CorpusDataset),
}

impl Source {
    /// Generates or reads the data set.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file.
    pub fn load(&self) -> Result<Data> {
        self.load_telling(&nobody)
    }

    /// As [`Source::load`], telling how far it has come where there are many files.
    ///
    /// # Errors
    /// As [`Source::load`].
    pub fn load_telling(&self, tell: Tell<'_>) -> Result<Data> {
        Ok(match self {
            Source::Pictures(spec) => Data::Pictures(spec.load_telling(tell)?),
            Source::Texts(spec) => Data::Texts(spec.load()?),
            Source::Pairs(spec) => Data::Pairs(spec.load()?),
            Source::Corpus(spec) => Data::Corpus(spec.load()?),
        })
    }
}

impl FromStr for Source {
    type Err = Error;

    /// # Errors
    /// [`Error::Spec`] or [`Error::Setting`].
    fn from_str(spec: &str) -> Result<Self> {
        let (kind, rest) = spec.split_once(':').unwrap_or((spec, ""));
        let fail = |problem: String| Err(Error::Spec { spec: spec.into(), problem });
        if let Some(texts) = TextSpec::parse(kind, rest) {
            return match texts? {
                TextSpec::Imdb(_) | TextSpec::Files { .. } if rest.is_empty() => fail(no_path(kind)),
                texts => Ok(Source::Texts(texts)),
            };
        }
        match CorpusSpec::parse(kind, rest) {
            Some(_) if rest.is_empty() => return fail(no_path(kind)),
            Some(corpus) => return Ok(Source::Corpus(corpus?)),
            None => {}
        }
        match PairSpec::parse(kind, rest) {
            Some(_) if rest.is_empty() => fail(no_path(kind)),
            Some(pairs) => Ok(Source::Pairs(pairs?)),
            None if PICTURES.contains(&kind) => Ok(Source::Pictures(DataSpec::parse(spec)?)),
            None => {
                let (texts, pairs, corpora) = (TextSpec::KINDS, PairSpec::KINDS, CorpusSpec::KINDS);
                fail(format!("unknown kind `{kind}`; give one of {KINDS}, {texts}, {pairs}, {corpora}"))
            }
        }
    }
}

impl fmt::Display for Source {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Pictures(spec) => spec.fmt(f),
            Source::Texts(spec) => spec.fmt(f),
            Source::Pairs(spec) => spec.fmt(f),
            Source::Corpus(spec) => spec.fmt(f),
        }
    }
}

fn no_path(kind: &str) -> String {
    format!("a path must follow, as in `{kind}:PATH`")
}

/// Reads `PATH` or `PATH?size=PIXELS&crop=SHARE`.
fn images_spec(rest: &str) -> Result<DataSpec> {
    let (path, named) = rest.rsplit_once('?').unwrap_or((rest, ""));
    let mut sizing = Sizing::default();
    for (name, value) in settings("images", named, '&')? {
        let expected = "`size=PIXELS` and `crop=SHARE`, joined by `&`";
        let unknown = || Err(Error::Setting { field: "images", got: format!("`{named}`"), expected });
        sizing.set(name, value).unwrap_or_else(unknown)?;
    }
    Ok(DataSpec::Images { path: path.into(), sizing })
}

impl FromStr for DataSpec {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        DataSpec::parse(spec)
    }
}

impl fmt::Display for DataSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSpec::Shapes(shapes) => write!(f, "shapes:{shapes}"),
            DataSpec::Mnist(path) => write!(f, "mnist:{}", path.display()),
            DataSpec::FashionMnist(path) => write!(f, "fashion-mnist:{}", path.display()),
            DataSpec::Idx { pictures, labels } => write!(f, "idx:{},{}", pictures.display(), labels.display()),
            DataSpec::Cifar10(path) => write!(f, "cifar10:{}", path.display()),
            DataSpec::Images { path, sizing } => {
                let settings: Vec<String> = sizing.text().collect();
                let mark = if settings.is_empty() { "" } else { "?" };
                write!(f, "images:{}{mark}{}", path.display(), settings.join("&"))
            }
            DataSpec::WebDataset(shards) => write!(f, "webdataset:{shards}"),
        }
    }
}
