//! `KIND:PATH`: the text that names a data set.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{
    CorpusDataset, CorpusSpec, Error, MatchDataset, MatchSpec, Mqar, PairDataset, PairSpec, Pathfinder, PictureDataset,
    RecallDataset, Result, Shapes, Sizing, TextDataset, TextSpec, WebDataset, cifar, idx, images,
    reading::{Tell, nobody},
    settings::settings,
};
use crate::budget::Held;

/// The kinds of pictures, for messages.
const KINDS: &str = "shapes[:SETTINGS], pathfinder[:SETTINGS], mnist:DIR, fashion-mnist:DIR, idx:IMAGES,LABELS, cifar10:DIR, images:PATH[?size=PIXELS], \
     webdataset:TRAIN[,[VALIDATION,]TEST][?size=PIXELS]";

/// Names of the kinds of pictures.
const PICTURES: [&str; 8] =
    ["shapes", "pathfinder", "mnist", "fashion-mnist", "idx", "cifar10", "images", "webdataset"];

/// Share of every class that is held out for testing where a data set brings no test split.
pub(super) const HOLDOUT: f64 = 0.2;

/// Which pictures to use.
///
/// ```
/// use resolvent_lab::data::PictureSpec;
/// let spec: PictureSpec = "shapes:seed=1,train=64,test=16".parse()?;
/// assert_eq!(spec.load()?.train.len(), 64);
/// # Ok::<(), resolvent_lab::data::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum PictureSpec {
    /// `shapes` or `shapes:seed=1,size=32,train=4000,test=1000,difficulty=0`: generated pictures.
    Shapes(Shapes),
    /// `pathfinder` or `pathfinder:seed=0,size=32,train=160000,val=20000,test=20000,length=14`: generated pictures of dashed paths.
    Pathfinder(Pathfinder),
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
    /// `images:PATH` or `images:PATH?size=64&crop=0.875`: PNG, JPEG and WebP pictures in a folder or a .tar, .tar.gz, .tar.xz, .tar.zst
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

impl PictureSpec {
    /// Reads `KIND:PATH`, or a generated kind with optional settings.
    ///
    /// # Errors
    /// [`Error::Spec`] or [`Error::Setting`]; whether the path exists is seen by [`PictureSpec::load`].
    pub fn parse(spec: &str) -> Result<Self> {
        let fail = |problem: String| Error::Spec { spec: spec.into(), problem };
        let (kind, rest) = spec.split_once(':').unwrap_or((spec, ""));
        if kind == "shapes" {
            return Ok(PictureSpec::Shapes(Shapes::parse(rest)?));
        }
        if kind == "pathfinder" {
            return Ok(PictureSpec::Pathfinder(Pathfinder::parse(rest)?));
        }
        if !PICTURES.contains(&kind) {
            return Err(fail(format!("unknown kind `{kind}`; give one of {KINDS}")));
        }
        if rest.is_empty() {
            return Err(fail(no_path(kind)));
        }
        let path = PathBuf::from(rest);
        Ok(match kind {
            "mnist" => PictureSpec::Mnist(path),
            "fashion-mnist" => PictureSpec::FashionMnist(path),
            "idx" => {
                let pair = rest.split_once(',').filter(|(left, right)| !left.is_empty() && !right.is_empty());
                let (pictures, labels) = pair.ok_or_else(|| fail("give two files, `idx:IMAGES,LABELS`".into()))?;
                PictureSpec::Idx { pictures: pictures.into(), labels: labels.into() }
            }
            "cifar10" => PictureSpec::Cifar10(path),
            "webdataset" => PictureSpec::WebDataset(WebDataset::parse(rest)?),
            _ => images_spec(rest)?,
        })
    }

    /// Generates or reads the data set.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file.
    pub fn load(&self) -> Result<PictureDataset> {
        self.load_telling(&nobody)
    }

    /// As [`PictureSpec::load`], telling how far it has come.
    ///
    /// # Errors
    /// As [`PictureSpec::load`].
    pub fn load_telling(&self, tell: Tell<'_>) -> Result<PictureDataset> {
        let held = &Held::new();
        match self {
            PictureSpec::Shapes(shapes) => shapes.generate(),
            PictureSpec::Pathfinder(pathfinder) => pathfinder.generate(),
            PictureSpec::Mnist(folder) => idx::load("mnist", folder, &idx::DIGITS, held),
            PictureSpec::FashionMnist(folder) => idx::load("fashion-mnist", folder, &idx::GARMENTS, held),
            PictureSpec::Idx { pictures, labels } => idx::load_with_holdout(pictures, labels, HOLDOUT, held),
            PictureSpec::Cifar10(folder) => cifar::load(folder, held),
            PictureSpec::Images { path, sizing } => images::load(path, *sizing, HOLDOUT, held, tell),
            PictureSpec::WebDataset(shards) => shards.load(HOLDOUT, held, tell),
        }
    }
}

/// Which data set to use, of any kind.
///
/// ```
/// use resolvent_lab::data::{Data, DataSpec};
/// let source: DataSpec = "listops:train=10,test=5,min=3,max=20".parse()?;
/// assert!(matches!(source.load()?, Data::Texts(texts) if texts.train.len() == 10));
/// # Ok::<(), resolvent_lab::data::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub enum DataSpec {
    /// Pictures.
    Pictures(PictureSpec),
    /// Labelled texts.
    Texts(TextSpec),
    /// Labelled pairs of documents.
    Matches(MatchSpec),
    /// Texts and their translations.
    Pairs(PairSpec),
    /// Plain text.
    Corpus(CorpusSpec),
    /// `mqar` or `mqar:seed=0,train=100000,val=3000,test=3000,tokens=64,pairs=4,vocabulary=8192,power=0.01,fill=blank`: generated
    /// sequences of keys and values that are asked for.
    Recall(Mqar),
}

/// A data set of any kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// Pictures.
    Pictures(Box<PictureDataset>),
    /// Labelled texts.
    Texts(TextDataset),
    /// Labelled pairs of documents.
    Matches(Box<MatchDataset>),
    /// Texts and their translations.
    Pairs(PairDataset),
    /// Plain text.
    Corpus(CorpusDataset),
    /// Keys and values that are asked for.
    Recall(RecallDataset),
}

impl DataSpec {
    /// Generates or reads the data set.
    ///
    /// # Errors
    /// Any [`Error`]: files are read strictly, and the message names the file.
    pub fn load(&self) -> Result<Data> {
        self.load_telling(&nobody)
    }

    /// As [`DataSpec::load`], telling how far it has come where there are many files.
    ///
    /// # Errors
    /// As [`DataSpec::load`].
    pub fn load_telling(&self, tell: Tell<'_>) -> Result<Data> {
        Ok(match self {
            DataSpec::Pictures(spec) => Data::Pictures(Box::new(spec.load_telling(tell)?)),
            DataSpec::Texts(spec) => Data::Texts(spec.load()?),
            DataSpec::Matches(spec) => Data::Matches(Box::new(spec.load()?)),
            DataSpec::Pairs(spec) => Data::Pairs(spec.load()?),
            DataSpec::Corpus(spec) => Data::Corpus(spec.load()?),
            DataSpec::Recall(mqar) => Data::Recall(mqar.generate()?),
        })
    }
}

impl FromStr for DataSpec {
    type Err = Error;

    /// # Errors
    /// [`Error::Spec`] or [`Error::Setting`].
    fn from_str(spec: &str) -> Result<Self> {
        let (kind, rest) = spec.split_once(':').unwrap_or((spec, ""));
        let fail = |problem: String| Err(Error::Spec { spec: spec.into(), problem });
        if let Some(texts) = TextSpec::parse(kind, rest) {
            return match texts? {
                TextSpec::Imdb(_) | TextSpec::Files { .. } if rest.is_empty() => fail(no_path(kind)),
                texts => Ok(DataSpec::Texts(texts)),
            };
        }
        if kind == "mqar" {
            return Ok(DataSpec::Recall(Mqar::parse(rest)?));
        }
        if let Some(matches) = MatchSpec::parse(kind, rest) {
            return match matches? {
                MatchSpec::Retrieval { .. } if rest.is_empty() => fail(no_path(kind)),
                matches => Ok(DataSpec::Matches(matches)),
            };
        }
        match CorpusSpec::parse(kind, rest) {
            Some(_) if rest.is_empty() => return fail(no_path(kind)),
            Some(corpus) => return Ok(DataSpec::Corpus(corpus?)),
            None => {}
        }
        match PairSpec::parse(kind, rest) {
            Some(_) if rest.is_empty() => fail(no_path(kind)),
            Some(pairs) => Ok(DataSpec::Pairs(pairs?)),
            None if PICTURES.contains(&kind) => Ok(DataSpec::Pictures(PictureSpec::parse(spec)?)),
            None => {
                let others = [TextSpec::KINDS, MatchSpec::KINDS, PairSpec::KINDS, CorpusSpec::KINDS].join(", ");
                fail(format!("unknown kind `{kind}`; give one of {KINDS}, {others}, mqar[:SETTINGS]"))
            }
        }
    }
}

impl fmt::Display for DataSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DataSpec::Pictures(spec) => spec.fmt(f),
            DataSpec::Texts(spec) => spec.fmt(f),
            DataSpec::Matches(spec) => spec.fmt(f),
            DataSpec::Pairs(spec) => spec.fmt(f),
            DataSpec::Corpus(spec) => spec.fmt(f),
            DataSpec::Recall(mqar) => write!(f, "mqar:{mqar}"),
        }
    }
}

fn no_path(kind: &str) -> String {
    format!("a path must follow, as in `{kind}:PATH`")
}

/// Reads `PATH` or `PATH?size=PIXELS&crop=SHARE`.
fn images_spec(rest: &str) -> Result<PictureSpec> {
    let (path, named) = rest.rsplit_once('?').unwrap_or((rest, ""));
    let mut sizing = Sizing::default();
    for (name, value) in settings("images", named, '&')? {
        let expected = "`size=PIXELS` and `crop=SHARE`, joined by `&`";
        let unknown = || Err(Error::UnknownSetting { kind: "images", name: name.into(), expected });
        sizing.set(name, value).unwrap_or_else(unknown)?;
    }
    Ok(PictureSpec::Images { path: path.into(), sizing })
}

impl FromStr for PictureSpec {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        PictureSpec::parse(spec)
    }
}

impl fmt::Display for PictureSpec {
    /// The text that parses to this value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PictureSpec::Shapes(shapes) => write!(f, "shapes:{shapes}"),
            PictureSpec::Pathfinder(pathfinder) => write!(f, "pathfinder:{pathfinder}"),
            PictureSpec::Mnist(path) => write!(f, "mnist:{}", path.display()),
            PictureSpec::FashionMnist(path) => write!(f, "fashion-mnist:{}", path.display()),
            PictureSpec::Idx { pictures, labels } => write!(f, "idx:{},{}", pictures.display(), labels.display()),
            PictureSpec::Cifar10(path) => write!(f, "cifar10:{}", path.display()),
            PictureSpec::Images { path, sizing } => {
                let settings: Vec<String> = sizing.text().collect();
                let mark = if settings.is_empty() { "" } else { "?" };
                write!(f, "images:{}{mark}{}", path.display(), settings.join("&"))
            }
            PictureSpec::WebDataset(shards) => write!(f, "webdataset:{shards}"),
        }
    }
}
