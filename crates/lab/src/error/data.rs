//! What can be wrong with a data set, as typed data.

use std::{io, path::PathBuf};

use crate::{picture::PictureShape, sizes::size_text};

/// The result of loading or describing a data set.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a data set could not be described, found or read. Every message is one line that names the file and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text that names a data set is not `KIND:PATH`.
    #[error("data `{spec}`: {problem}")]
    Spec {
        /// The text as given.
        spec: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A setting of a data set or of the augmentation is unknown or outside its range.
    #[error("setting `{field}` is {got}, must be {expected}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// The value found.
        got: String,
        /// The valid range.
        expected: &'static str,
    },
    /// A data set has no setting of a name.
    #[error("data `{kind}` has no setting `{name}`, but {expected}")]
    UnknownSetting {
        /// The kind of data.
        kind: &'static str,
        /// The name found.
        name: String,
        /// Those that it has.
        expected: &'static str,
    },
    /// A file or folder that the data set needs is not there.
    #[error("{}: not found; {remedy}", path.display())]
    Missing {
        /// The path looked for.
        path: PathBuf,
        /// What belongs there.
        remedy: String,
    },
    /// The operating system refused to read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Decoded, it would take more than the budget has left.
    #[error("{}", over_budget(path, *needed, *used, *limit))]
    Budget {
        /// The file, or the name of an entry below that of its archive.
        path: PathBuf,
        /// Bytes that were asked for; where their number is not known before, at least as many are needed.
        needed: u64,
        /// Bytes that other decoded data takes.
        used: u64,
        /// The budget.
        limit: u64,
    },
    /// A device, a pipe or a socket stands where a file is expected.
    #[error("{}: is {kind}, expected an ordinary file; copy what it gives into a file", path.display())]
    NotAFile {
        /// Its path.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// The file is not of the format that its place or name promises, or is damaged.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was found, what was expected.
        problem: String,
    },
    /// The file ends before, or goes on after, what its header announces.
    #[error("{}: {expected} bytes of data expected, {got} found; the file is cut off or damaged, fetch it again", path.display())]
    Length {
        /// The file.
        path: PathBuf,
        /// Bytes announced.
        expected: u64,
        /// Bytes found; where there are too many, one more than announced.
        got: u64,
    },
    /// A label is no class of the data set.
    #[error("{}: label {label} at index {index} is outside 0..{classes}", path.display())]
    Label {
        /// The file.
        path: PathBuf,
        /// Position of the label.
        index: usize,
        /// The label found.
        label: u8,
        /// Number of classes.
        classes: usize,
    },
    /// Pictures and labels of one split do not pair up.
    #[error("{} has {pictures} pictures but {} has {labels} labels", pictures_path.display(), labels_path.display())]
    Count {
        /// The file of pictures.
        pictures_path: PathBuf,
        /// Number of pictures.
        pictures: usize,
        /// The file of labels.
        labels_path: PathBuf,
        /// Number of labels.
        labels: usize,
    },
    /// Pictures in memory are not of the shape that is given.
    #[error(
        "{found} bytes are not {pictures} pictures of {} x {} x {} (channels, height, width), one for each label",
        shape.channels, shape.height, shape.width
    )]
    Pixels {
        /// Bytes that are given.
        found: usize,
        /// Number of labels.
        pictures: usize,
        /// The shape of a picture.
        shape: PictureShape,
    },
    /// A picture of a folder or an archive cannot be used.
    #[error("{}: `{entry}` {problem}", path.display())]
    Entry {
        /// The folder or archive.
        path: PathBuf,
        /// Name of the picture inside it.
        entry: String,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// A line of a file of text cannot be used.
    #[error("{}: line {line} {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// A label of the test part is none that is learnt.
    #[error("{}: line {line} has the label `{label}`, which is none of those in the training part: {classes}", path.display())]
    UnknownLabel {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The label found.
        label: String,
        /// The labels of the training part.
        classes: String,
    },
    /// Two files of parallel text do not have the same number of lines.
    #[error("{} has {lines} lines but {} has {others}; each line must have its translation on the same line", path.display(), other.display())]
    OneSided {
        /// One file.
        path: PathBuf,
        /// Its lines.
        lines: usize,
        /// The other file.
        other: PathBuf,
        /// Its lines.
        others: usize,
    },
    /// There is nothing, or too little, to learn from.
    #[error("{}: {problem}", path.display())]
    Empty {
        /// The file, folder or archive.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
}

fn over_budget(path: &std::path::Path, needed: u64, used: u64, limit: u64) -> String {
    let [needed, free, limit] = [needed, limit.saturating_sub(used), limit].map(size_text);
    format!(
        "{}: takes {needed} more when decoded, and {free} of the {limit} for decoded data are left; if it is what you expect, \
         allow more with `--decode-limit` or RESOLVENT_DECODE_LIMIT",
        path.display()
    )
}

impl Error {
    /// Wraps a failure to read `path`; a missing file and a stream that ends early have variants of their own.
    pub(crate) fn io(path: &std::path::Path, source: io::Error) -> Self {
        let path = path.to_path_buf();
        match source.kind() {
            io::ErrorKind::NotFound => Error::Missing { path, remedy: "check the path".into() },
            io::ErrorKind::UnexpectedEof => {
                Error::Format { path, problem: format!("ends too early ({source}); fetch it again") }
            }
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::Other => {
                Error::Format { path, problem: format!("is damaged ({source}); fetch it again") }
            }
            _ => Error::Io { path, source },
        }
    }
}
